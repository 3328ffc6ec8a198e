"""`mb-train serve RUN`: a model behind OpenAI's completions interface, to try it out.

    curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\
        -d '{"prompt": "def f(", "max_tokens": 32, "temperature": 0.8}'

POST /v1/completions takes prompt (a text or several), max_tokens, temperature, top_p, n, stop,
stream, echo and seed, and top_k beside them; GET /v1/models names the model; GET /health answers.
Wrong requests get status 400 and say what was expected. One request is computed at a time.
starlette and uvicorn come with `pip install 'mb-train[serve]'`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mb_train.generate import Completion, Generator, Sampling

if TYPE_CHECKING:
    from starlette.applications import Starlette

_MAX_PROMPTS = 128
_IGNORED = ("model", "user", "best_of", "stream_options")
_REFUSED = ("logprobs", "suffix", "logit_bias", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True)
class Request:
    """A request for completions that has been checked."""

    prompts: list[str]
    sampling: Sampling
    max_tokens: int
    stop: tuple[str, ...]
    stream: bool
    echo: bool

    @classmethod
    def of_json(cls, body: Any) -> Request:
        """Read a request's body.

        Raises:
            ValueError: says what was expected.
        """
        if not isinstance(body, Mapping):
            raise ValueError("Expected a JSON object.")
        known = {
            "prompt", "max_tokens", "temperature", "top_p", "top_k", "n", "stop", "stream", "echo",
            "seed", *_IGNORED, *_REFUSED,
        }  # fmt: skip
        unknown = sorted(body.keys() - known)
        if unknown:
            raise ValueError(f"Unknown parameter {unknown[0]!r}.")
        for name in _REFUSED:
            if body.get(name):
                raise ValueError(f"{name} is not supported.")
        prompts = _texts(body.get("prompt", ""), "prompt")
        n, max_tokens = _number(body, "n", int, 1), _number(body, "max_tokens", int, 16)
        if max_tokens < 1 or n < 1:
            raise ValueError("Expected n and max_tokens of at least 1.")
        if not prompts or len(prompts) * n > _MAX_PROMPTS:
            raise ValueError(f"Expected 1 to {_MAX_PROMPTS} completions, got {len(prompts) * n}.")
        sampling = Sampling(
            temperature=_number(body, "temperature", float, 1.0),
            top_p=_number(body, "top_p", float, 1.0),
            top_k=_number(body, "top_k", int, 0),
            seed=_number(body, "seed", int, uuid.uuid4().int % 2**31),
        )
        stop = tuple(_texts(body.get("stop") or [], "stop"))
        if "" in stop:
            raise ValueError("Expected stop words that are not empty.")
        flags = [body.get(name) or False for name in ("stream", "echo")]
        return cls([p for p in prompts for _ in range(n)], sampling, max_tokens, stop, *flags)


def application(generator: Generator, name: str) -> Starlette:
    """The ASGI application.

    Args:
        name: of the model, as clients see it.

    Raises:
        ValueError: starlette is missing.
    """
    try:
        from starlette.applications import Starlette
        from starlette.requests import Request as HTTPRequest
        from starlette.responses import JSONResponse, Response, StreamingResponse
        from starlette.routing import Route
    except ImportError:
        raise ValueError(
            "Expected starlette and uvicorn to serve with, found none. Install them with "
            "pip install 'mb-train[serve]'."
        ) from None
    one_at_a_time = asyncio.Lock()

    async def completions(http: HTTPRequest) -> Response:
        try:
            request = Request.of_json(await http.json())
        except ValueError as error:
            detail = {"message": str(error), "type": "invalid_request_error"}
            return JSONResponse({"error": detail}, status_code=400)
        if request.stream:
            return StreamingResponse(events(request), media_type="text/event-stream")
        async with one_at_a_time:
            steps = _steps(generator, request)
            try:
                found = [Completion() for _ in request.prompts]
                async for step in steps:
                    found = step
            except ValueError as error:
                return JSONResponse({"error": {"message": str(error)}}, status_code=500)
        texts = [
            (prompt if request.echo else "") + one.text
            for prompt, one in zip(request.prompts, found, strict=True)
        ]
        reasons = [one.finish_reason for one in found]
        used = sum(len(generator.tokenizer.encode(prompt)) for prompt in request.prompts)
        new = sum(len(one.tokens) for one in found)
        usage = {"prompt_tokens": used, "completion_tokens": new, "total_tokens": used + new}
        return JSONResponse(_heading(name) | {"choices": _choices(texts, reasons), "usage": usage})

    async def events(request: Request) -> AsyncIterator[str]:
        said, heading = [0] * len(request.prompts), _heading(name)
        if request.echo:
            yield _event(heading | {"choices": _choices(request.prompts, [None] * len(said))})
        async with one_at_a_time:
            try:
                async for found in _steps(generator, request):
                    for index, one in enumerate(found):
                        new = one.text[max(said[index], 0) :]
                        if said[index] < 0 or not (new or one.finish_reason):
                            continue
                        choices = _choices([new], [one.finish_reason], first=index)
                        yield _event(heading | {"choices": choices})
                        said[index] = -1 if one.finish_reason else len(one.text)
            except ValueError as error:
                yield _event({"error": {"message": str(error)}})
        yield "data: [DONE]\n\n"

    async def models(_: HTTPRequest) -> Response:
        about = {"id": name, "object": "model", "created": 0, "owned_by": "mb-train"}
        return JSONResponse({"object": "list", "data": [about]})

    async def health(_: HTTPRequest) -> Response:
        return JSONResponse({"status": "ok"})

    return Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
        ]
    )


def serve(generator: Generator, name: str, *, host: str, port: int) -> None:
    """Answer requests until Ctrl-C.

    Raises:
        ValueError: starlette or uvicorn are missing; no such host or port, or it is taken.
    """
    served = application(generator, name)
    try:
        import uvicorn
    except ImportError:
        raise ValueError(
            "Expected uvicorn to serve with, found none. Install it with "
            "pip install 'mb-train[serve]'."
        ) from None
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"Cannot listen at --host {host} --port {port}: {reason}.") from None
    # uvicorn raises Ctrl-C again once it has answered what it was asked.
    with listening, contextlib.suppress(KeyboardInterrupt):
        place = f"[{host}]" if ":" in host else host
        print(f"listening at http://{place}:{listening.getsockname()[1]}/v1", flush=True)
        uvicorn.Server(uvicorn.Config(served, log_level="info")).run(sockets=[listening])


async def _steps(generator: Generator, request: Request) -> AsyncIterator[list[Completion]]:
    """`Generator.stream`, each step in a thread so that other requests are heard meanwhile."""
    steps = generator.stream(
        request.prompts, request.sampling, max_new_tokens=request.max_tokens, stop=request.stop
    )

    def step() -> list[Completion] | None:
        return next(steps, None)

    while (found := await asyncio.to_thread(step)) is not None:
        yield found


def _heading(name: str) -> dict[str, Any]:
    """What every part of an answer begins with."""
    about = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion"}
    return about | {"created": int(time.time()), "model": name}


def _choices(
    texts: list[str], reasons: list[str | None], *, first: int = 0
) -> list[dict[str, Any]]:
    return [
        {"text": text, "index": index, "logprobs": None, "finish_reason": reason}
        for index, (text, reason) in enumerate(zip(texts, reasons, strict=True), first)
    ]


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _texts(value: Any, name: str) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"Expected {name} to be a text or a list of texts.")
    return texts


def _number(body: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, kind)):
        raise ValueError(f"Expected {name} to be a number, got {value!r}.")
    return kind(value)
