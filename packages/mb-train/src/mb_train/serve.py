"""`mb-train serve RUN`: a model behind OpenAI's completions interface, to try it out.

    curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\
        -d '{"prompt": "def f(", "max_tokens": 32, "temperature": 0.8}'

POST /v1/completions takes prompt (a text, its tokens, or several), max_tokens, temperature, top_p,
n, stop, logprobs, stream with stream_options, echo and seed, and top_k beside them; GET /v1/models
lists the model and GET /v1/models/NAME is its entry; GET /health answers. What is wrong gets
status 400, 404 or 405 and JSON that says what was expected. One request is computed at a time.
starlette and uvicorn come with `pip install 'mb-train[serve]'`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from mb_train.completions import Answer, Request, Told, error, event
from mb_train.generate import Completion, Generator, Likelihood

if TYPE_CHECKING:
    from starlette.applications import Starlette


class Asked(NamedTuple):
    """A request with its prompts' tokens, and what of each prompt belongs to the answer."""

    request: Request
    prompts: list[list[int]]
    echoes: list[Told]
    answer: Answer

    def nothing_yet(self) -> list[Completion]:
        """Completions of no token."""
        return [Completion(finish_reason="length") for _ in self.prompts]


class Service:
    """Computes answers, one request at a time, whatever they travel by.

    Args:
        name: of the model, as clients see it.
    """

    def __init__(self, generator: Generator, name: str) -> None:
        self._generator, self._name = generator, name
        self._one_at_a_time = asyncio.Lock()

    async def understand(self, content: Any) -> Asked:
        """A request out of its JSON.

        Raises:
            ValueError: something that is wrong with it.
        """
        request = Request.of_json(content)
        prompts = [self._generator.tokens_of(prompt) for prompt in request.prompts]
        async with self._one_at_a_time:
            echoes = [await _echo(self._generator, request, i) for i in range(len(prompts))]
        return Asked(
            request, prompts, echoes, Answer(request, self._name, self._generator.tokenizer)
        )

    async def whole(self, asked: Asked, gone: Callable[[], Awaitable[bool]]) -> dict[str, Any]:
        """The answer at once; what there is of it when the client is `gone`.

        Raises:
            ValueError: it cannot be computed.
        """
        request, prompts, echoes, answer = asked
        found = asked.nothing_yet()
        async with self._one_at_a_time:
            async for step in _steps(self._generator, request, prompts):
                found = step
                if await gone():
                    break
        choices = [
            answer.choice(
                index, answer.echo(index) + one.text, one.finish_reason, answer.told(echo, one)
            )
            for index, (one, echo) in enumerate(zip(found, echoes, strict=True))
        ]
        return answer.part(choices, usage=answer.usage(prompts, found))

    async def events(self, asked: Asked) -> AsyncIterator[str]:
        """The answer as server-sent events, a token at a time."""
        request, prompts, echoes, answer = asked
        found = asked.nothing_yet()
        texts, tokens = [0] * len(prompts), [0] * len(prompts)  # how much of each has been said
        if request.echo:
            whole = enumerate(echoes)
            reason = None if request.max_tokens else "length"
            said = [answer.choice(i, answer.echo(i), reason, echo) for i, echo in whole]
            yield event(answer.part(said))
            tokens = [len(echo.tokens) for echo in echoes]
        async with self._one_at_a_time:
            try:
                async for found in _steps(self._generator, request, prompts):
                    for index, (one, echo) in enumerate(zip(found, echoes, strict=True)):
                        new = one.text[max(texts[index], 0) :]
                        if texts[index] < 0 or not (new or one.finish_reason):
                            continue
                        told = answer.told(echo, one)
                        reason = one.finish_reason
                        choice = answer.choice(index, new, reason, told, tokens[index])
                        yield event(answer.part([choice]))
                        texts[index] = -1 if reason else len(one.text)
                        tokens[index] = len(told.tokens)
            except ValueError as wrong:
                yield event(error(wrong, "server_error"))
        if request.include_usage:
            yield event(answer.part([], usage=answer.usage(prompts, found)))
        yield "data: [DONE]\n\n"


def application(generator: Generator, name: str) -> Starlette:
    """The ASGI application of a `Service`.

    Raises:
        ValueError: starlette is missing.
    """
    try:
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.requests import Request as HTTPRequest
        from starlette.responses import JSONResponse, Response, StreamingResponse
        from starlette.routing import Route
    except ImportError:
        raise ValueError(
            "Expected starlette and uvicorn to serve with, found none. Install them with "
            "pip install 'mb-train[serve]'."
        ) from None
    service = Service(generator, name)

    async def completions(http: HTTPRequest) -> Response:
        try:
            asked = await service.understand(await http.json())
        except ValueError as wrong:
            return JSONResponse(error(wrong, "invalid_request_error"), status_code=400)
        if asked.request.stream:
            return StreamingResponse(service.events(asked), media_type="text/event-stream")
        try:
            return JSONResponse(await service.whole(asked, http.is_disconnected))
        except ValueError as wrong:
            return JSONResponse(error(wrong, "server_error"), status_code=500)

    about = {"id": name, "object": "model", "created": 0, "owned_by": "mb-train"}

    async def models(_: HTTPRequest) -> Response:
        return JSONResponse({"object": "list", "data": [about]})

    async def model(http: HTTPRequest) -> Response:
        asked = http.path_params["name"]
        if asked != name:
            wrong = f"Expected the model {name!r}, got {asked!r}."
            return JSONResponse(error(wrong, "invalid_request_error"), status_code=404)
        return JSONResponse(about)

    async def health(_: HTTPRequest) -> Response:
        return JSONResponse({"status": "ok"})

    routes = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/health", health),
    ]

    async def refused(http: HTTPRequest, wrong: Exception) -> Response:
        assert isinstance(wrong, HTTPException)
        known = ", ".join(f"{min(route.methods or ())} {route.path}" for route in routes)
        message = f"Expected one of {known}; got {http.method} {http.url.path}."
        body = error(message, "invalid_request_error")
        return JSONResponse(body, status_code=wrong.status_code, headers=wrong.headers)

    return Starlette(routes=routes, exception_handlers={HTTPException: refused})


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


async def _steps(
    generator: Generator, request: Request, prompts: list[list[int]]
) -> AsyncIterator[list[Completion]]:
    """`Generator.stream`, each step in a thread so that other requests are heard meanwhile."""
    steps = generator.stream(
        prompts, request.sampling, max_new_tokens=request.max_tokens, stop=request.stop,
        seeds=request.seeds, likeliest=request.logprobs,
    )  # fmt: skip

    def step() -> list[Completion] | None:
        return next(steps, None)

    while (found := await asyncio.to_thread(step)) is not None:
        yield found


async def _echo(generator: Generator, request: Request, index: int) -> Told:
    """What of a prompt belongs to the answer; of an empty one nothing does."""
    prompt = request.prompts[index]
    if not request.echo or not prompt:
        return Told([], [])
    likelihoods: list[Likelihood | None] = []
    if request.logprobs is not None:
        likelihoods = await asyncio.to_thread(generator.likelihoods, prompt, request.logprobs)
    return Told(generator.tokens_of(prompt), likelihoods)
