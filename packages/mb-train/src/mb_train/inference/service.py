"""Answers to requests for completions, one at a time, whatever they travel by."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from mb_train.inference.chat import ChatAnswer, chat_request
from mb_train.inference.completions import Answer, Request, Told, error, event
from mb_train.inference.decoding import Likelihood
from mb_train.inference.generate import Completion, Generator, Prompt


class Asked(NamedTuple):
    """A request with its prompts' tokens, and what of its prompt belongs to each choice."""

    request: Request
    prompts: list[list[int]]
    echoes: list[Told]
    answer: Answer

    def nothing_yet(self) -> list[Completion]:
        """Completions of no token."""
        return [Completion(finish_reason="length") for _ in self.echoes]


class Service:
    """Computes answers beside the event loop, so that other requests are heard meanwhile.

    Args:
        name: of the model, as clients see it.
    """

    def __init__(self, generator: Generator, name: str) -> None:
        self._generator, self._name = generator, name
        self._one_at_a_time = asyncio.Lock()
        # A request whose client went away is over at once, its last step is not: one thread, so
        # that the next request's first step waits for it.
        self._thread = ThreadPoolExecutor(1, "completions")

    async def understand(self, content: Any) -> Asked:
        """A request for a completion out of its JSON.

        Raises:
            ValueError: something that is wrong with it.
        """
        return await self._understood(Request.of_json(content), Answer)

    async def understand_chat(self, content: Any) -> Asked:
        """The same of one for a chat completion, where the model has a chat template."""
        generator = self._generator
        request = await self._computed(chat_request, content, generator.asked, generator.context)
        return await self._understood(request, ChatAnswer)

    async def _understood(self, request: Request, kind: type[Answer]) -> Asked:
        # A text of many MB takes seconds, in which others must be heard.
        prompts = [
            await self._computed(self._generator.tokens_of, prompt) for prompt in request.prompts
        ]
        context, longest = self._generator.context, max(map(len, prompts))
        if longest + request.max_tokens > context:
            raise ValueError(
                f"Expected a prompt and max_tokens of at most {context} tokens together, the "
                f"model's context, got {longest} and {request.max_tokens}."
            )
        async with self._one_at_a_time:
            pairs = zip(request.prompts, prompts, strict=True)
            echoes = [await self._echo(request, prompt, tokens) for prompt, tokens in pairs]
        answer = kind(request, self._name, self._generator.tokenizer)
        return Asked(request, prompts, request.copies(echoes), answer)

    async def whole(self, asked: Asked, gone: Callable[[], Awaitable[bool]]) -> dict[str, Any]:
        """The answer at once; what there is of it when the client is `gone`.

        Raises:
            ValueError: it cannot be computed.
        """
        _, prompts, echoes, answer = asked
        found = asked.nothing_yet()
        async with self._one_at_a_time:
            async for step in self._steps(asked):
                found = step
                if await gone():
                    break

        def choices() -> list[dict[str, Any]]:
            return [
                answer.choice(
                    index, echo.echo + one.text, one.finish_reason, answer.told(echo, one)
                )
                for index, (one, echo) in enumerate(zip(found, echoes, strict=True))
            ]

        return answer.part(await self._computed(choices), usage=answer.usage(prompts, found))

    async def events(self, asked: Asked) -> AsyncIterator[str]:
        """The answer as server-sent events, a token at a time.

        They wait here for a client that does not read them: other requests do not wait for it.
        """
        ready: asyncio.Queue[str | None] = asyncio.Queue()

        async def compute() -> None:
            try:
                async for said in self._events(asked):
                    ready.put_nowait(said)
            finally:
                ready.put_nowait(None)

        computing = asyncio.create_task(compute())
        try:
            while (said := await ready.get()) is not None:
                yield said
            await computing  # which raises what it ended with
        finally:
            computing.cancel()

    async def _events(self, asked: Asked) -> AsyncIterator[str]:
        request, prompts, echoes, answer = asked
        found = asked.nothing_yet()
        texts, tokens = [0] * len(echoes), [0] * len(echoes)  # how much of each has been said

        def echoed() -> str:
            reason = None if request.max_tokens else "length"
            whole = enumerate(echoes)
            return event(
                answer.part([answer.choice(i, echo.echo, reason, echo) for i, echo in whole])
            )

        def news(found: list[Completion]) -> list[str]:
            said = []
            for index, (one, echo) in enumerate(zip(found, echoes, strict=True)):
                new, reason = one.text[max(texts[index], 0) :], one.finish_reason
                if texts[index] < 0 or not (new or reason):
                    continue
                told = answer.told(echo, one)
                choice = answer.choice(index, new, reason, told, tokens[index])
                said.append(event(answer.part([choice])))
                texts[index] = -1 if reason else len(one.text)
                tokens[index] = len(told.tokens)
            return said

        if request.echo:
            yield await self._computed(echoed)
            tokens = [len(echo.tokens) for echo in echoes]
        async with self._one_at_a_time:
            try:
                async for found in self._steps(asked):
                    for said in await self._computed(news, found):
                        yield said
            except ValueError as wrong:
                yield event(error(wrong, "server_error"))
        if request.include_usage:
            yield event(answer.part([], usage=answer.usage(prompts, found)))
        yield "data: [DONE]\n\n"

    async def _steps(self, asked: Asked) -> AsyncIterator[list[Completion]]:
        """`Generator.stream` of every choice."""
        request = asked.request
        steps = self._generator.stream(
            request.copies(asked.prompts), request.sampling, max_new_tokens=request.max_tokens,
            stop=request.stop, seeds=request.seeds, likeliest=request.logprobs,
        )  # fmt: skip
        while (found := await self._computed(next, steps, None)) is not None:
            yield found

    async def _echo(self, request: Request, prompt: Prompt, tokens: list[int]) -> Told:
        """What of a prompt belongs to the answer; of an empty one nothing does."""
        if not request.echo or not prompt:
            return Told([], [], tokens)
        begin = self._generator.beginning(prompt)
        likelihoods: list[Likelihood | None] = []
        if request.logprobs is not None:
            likelihoods = await self._computed(
                self._generator.likelihoods, prompt, request.logprobs
            )
        decode = self._generator.tokenizer.decode
        text = prompt if isinstance(prompt, str) else await self._computed(decode, tokens)
        echoed = tokens[len(begin) :]
        return Told(echoed, likelihoods[len(begin) :], begin, len(echoed), text)

    async def _computed(self, function: Callable[..., Any], *arguments: Any) -> Any:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, function, *arguments)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"Not enough memory for this request: {error} Ask for fewer prompts, choices or "
                "tokens at a time."
            ) from error
