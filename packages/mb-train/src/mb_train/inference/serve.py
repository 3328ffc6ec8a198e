"""`mb-train serve RUN`: a model behind OpenAI's completions interface, to try it out.

    curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\
        -d '{"prompt": "def f(", "max_tokens": 32, "temperature": 0.8}'

POST /v1/completions takes prompt (a text, its tokens, or several), max_tokens, temperature, top_p,
n, stop, logprobs, stream with stream_options, echo and seed, and top_k beside them. POST
/v1/chat/completions takes messages (and tools) instead of prompt, for a model whose tokenizer has a
chat template, and no logprobs or echo; its answer may fill the context. GET /v1/models
lists the model and GET /v1/models/NAME is its entry; GET /health answers. A request that names
another model is answered with 404; it may name none. Prompt and max_tokens have to fit into the
model's context together. What is wrong gets status 400, 404, 405 or 413 (more than 32 MiB) and JSON
that says what was expected. One request is computed at a time.
starlette and uvicorn come with `pip install 'mb-train[serve]'`.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from mb_train.inference.completions import error
from mb_train.inference.generate import Generator
from mb_train.inference.service import Asked, Service

# Of a request: as many prompts as one may have, of 256 kB each. Without a bound a client could fill
# the memory.
MOST_BYTES = 128 << 18


class _Endpoints:
    """What is answered at which address."""

    def __init__(self, generator: Generator, name: str) -> None:
        self._service, self._name = Service(generator, name), name
        self._about = {"id": name, "object": "model", "created": 0, "owned_by": "mb-train"}
        self.routes = [
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/health", self._health),
        ]

    async def _completions(self, http: Request) -> Response:
        return await self._answer(http, self._service.understand)

    async def _chat(self, http: Request) -> Response:
        return await self._answer(http, self._service.understand_chat)

    async def _answer(
        self, http: Request, understand: Callable[[Any], Awaitable[Asked]]
    ) -> Response:
        try:
            content = json.loads(await _body(http))
            named = content.get("model") if isinstance(content, Mapping) else None
            if named and named != self._name:
                return self._other_model(named)
            asked = await understand(content)
        except _TooLargeError as wrong:
            return _refusal(wrong, 413)
        except (ValueError, RecursionError) as wrong:  # JSON may be nested too deeply
            return _refusal(wrong, 400)
        except ClientDisconnect:  # before all of its request was here; nobody reads this
            return Response(status_code=400)
        if asked.request.stream:
            events = self._service.events(asked)
            return StreamingResponse(events, media_type="text/event-stream")
        try:
            return JSONResponse(await self._service.whole(asked, http.is_disconnected))
        except ValueError as wrong:
            return JSONResponse(error(wrong, "server_error"), status_code=500)

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._about]})

    async def _model(self, http: Request) -> Response:
        asked = http.path_params["name"]
        return JSONResponse(self._about) if asked == self._name else self._other_model(asked)

    def _other_model(self, named: object) -> Response:
        message = (
            f"Expected the model {self._name!r} or none, got {named!r}. mb-train serve "
            "--served-model-name gives it another name."
        )
        return _refusal(message, 404, code="model_not_found")

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def nothing_there(self, http: Request, wrong: Exception) -> Response:
        assert isinstance(wrong, HTTPException)
        known = ", ".join(f"{min(route.methods or ())} {route.path}" for route in self.routes)
        message = f"Expected one of {known}; got {http.method} {http.url.path}."
        return _refusal(message, wrong.status_code, wrong.headers)


def application(generator: Generator, name: str) -> Starlette:
    """The ASGI application of a `Service`."""
    endpoints = _Endpoints(generator, name)
    handlers = {HTTPException: endpoints.nothing_there}
    return Starlette(routes=endpoints.routes, exception_handlers=handlers)


def serve(generator: Generator, name: str, *, host: str, port: int) -> None:
    """Answer requests until Ctrl-C.

    Raises:
        ValueError: no such host or port, or it is taken.
    """
    served = application(generator, name)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        said = f"Cannot listen at --host {host} --port {port}: {str(reason).rstrip('.')}."
        raise ValueError(said) from None
    # uvicorn raises Ctrl-C again once it has answered what it was asked.
    with listening, contextlib.suppress(KeyboardInterrupt):
        place = f"[{host}]" if ":" in host else host
        print(f"listening at http://{place}:{listening.getsockname()[1]}/v1", flush=True)
        uvicorn.Server(uvicorn.Config(served, log_level="info")).run(sockets=[listening])


class _TooLargeError(ValueError):
    """A request of more than `MOST_BYTES`."""


async def _body(http: Request) -> bytes:
    """A request's body; of one that is too large nothing is kept."""
    parts, size = [], 0
    async for part in http.stream():  # to its end: a client that still writes hears no answer
        size += len(part)
        if size > MOST_BYTES:
            parts.clear()
        else:
            parts.append(part)
    if size > MOST_BYTES:
        raise _TooLargeError(f"Expected a request of at most {MOST_BYTES:,} bytes, got {size:,}.")
    return b"".join(parts)


def _refusal(
    wrong: object, status: int, headers: Mapping[str, str] | None = None, code: str | None = None
) -> Response:
    body = error(wrong, "invalid_request_error", code)
    return JSONResponse(body, status_code=status, headers=headers)
