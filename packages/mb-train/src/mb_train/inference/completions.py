"""OpenAI's completions: what a request asks for, and the parts of its answer.

A request is checked whole before anything is computed. What OpenAI has and a model here has not is
refused by name.
"""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from mb_train.inference.decoding import Likelihood, Sampling
from mb_train.inference.generate import READ_WITH, Completion, Prompt, common, text_behind

if TYPE_CHECKING:
    from mb_data import Tokenizer

_T = TypeVar("_T")

_MOST_COMPLETIONS = 128
_MOST_LIKELIEST = 20
_READ = (
    "prompt", "max_tokens", "temperature", "top_p", "top_k", "n", "best_of", "stop", "logprobs",
    "stream", "stream_options", "echo", "seed",
)  # fmt: skip
_IGNORED = ("model", "user")
_REFUSED = ("suffix", "logit_bias", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request that has been checked.

    Attributes:
        prompts: texts or tokens.
        n: how many choices each prompt has, one behind the other in the answer.
        seeds: of each choice, so that those of one prompt are different.
        logprobs: how many likely tokens are told beside each; None tells no likelihoods.
    """

    prompts: list[Prompt]
    n: int
    seeds: list[int]
    sampling: Sampling
    max_tokens: int
    stop: tuple[str, ...]
    logprobs: int | None
    echo: bool
    stream: bool
    include_usage: bool

    @classmethod
    def of_json(cls, body: Any) -> Request:
        """Read a request's body.

        Raises:
            ValueError: says what was expected.
        """
        check_parameters(body, _READ, _REFUSED)
        prompts = _prompts("" if body.get("prompt") is None else body["prompt"])
        n = _number(body, "n", int, 1, least=1)
        if _number(body, "best_of", int, n) != n:
            raise ValueError("best_of is not supported: expected none, or as much as n.")
        if not 1 <= len(prompts) * n <= _MOST_COMPLETIONS:
            wanted = f"1 to {_MOST_COMPLETIONS} completions"
            raise ValueError(f"Expected {wanted}, got {len(prompts) * n}.")
        echo = _flag(body, "echo")
        seed = _number(body, "seed", int, None)
        # The same text several times is continued differently, but for a seed that says how.
        first = [random.getrandbits(62) if seed is None else seed % 2**63 for _ in prompts]
        sampling = Sampling(
            temperature=_number(body, "temperature", float, 1.0),
            top_p=_number(body, "top_p", float, 1.0),
            top_k=_number(body, "top_k", int, 0),
        )
        options = body.get("stream_options") or {}
        if not isinstance(options, Mapping):
            raise ValueError("Expected stream_options to be an object.")
        return cls(
            prompts=prompts,
            n=n,
            seeds=[seed + copy for seed in first for copy in range(n)],
            sampling=sampling,
            max_tokens=_number(body, "max_tokens", int, 16, least=0 if echo else 1),
            stop=_stop_words(body.get("stop")),
            logprobs=_number(body, "logprobs", int, None, least=0, most=_MOST_LIKELIEST),
            echo=echo,
            stream=_flag(body, "stream"),
            include_usage=_flag(options, "include_usage"),
        )

    def copies(self, of_prompts: Sequence[_T]) -> list[_T]:
        """What is one for each prompt, for each choice."""
        return [one for one in of_prompts for _ in range(self.n)]


class Told(NamedTuple):
    """Tokens of an answer, their likelihoods where they are told, and the tokens before them.

    The first `echoed` tokens are the prompt's. The answer's text is `echo`, the prompt as it was
    asked, which the tokenizer may have simplified, and then what the other tokens add: a character
    that begins in the prompt is said twice, at first as a piece.
    """

    tokens: list[int]
    likelihoods: list[Likelihood | None]
    before: list[int]
    echoed: int = 0
    echo: str = ""


class Answer:
    """Parts of the answer to a request, all under one heading.

    Args:
        name: of the model, as clients see it.
    """

    def __init__(self, request: Request, name: str, tokenizer: Tokenizer) -> None:
        self._request, self._tokenizer = request, tokenizer
        self._heading: dict[str, Any] = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": name,
        }

    def part(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A part with these choices."""
        return self._heading | {"choices": choices} | more

    def choice(
        self, index: int, text: str, reason: str | None, told: Told, said: int = 0
    ) -> dict[str, Any]:
        """A choice, and the likelihoods of its tokens behind the first `said`."""
        logprobs = None if self._request.logprobs is None else self._logprobs(told, said)
        return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}

    def told(self, echo: Told, one: Completion) -> Told:
        """The tokens so far whose text is decided, and their likelihoods.

        Not among them is what a stop word has cut off, or may. Behind them is the end of a
        document, if one ended the text.
        """
        count, prompt = len(one.tokens), [*echo.before, *echo.tokens]

        def text(count: int) -> str:
            return text_behind(self._tokenizer, prompt, one.tokens[:count])

        if self._request.logprobs is not None and text(count) != one.text:
            if one.finish_reason is None:
                while not one.text.startswith(text(count)):
                    count -= 1
            else:
                while count and text(count - 1).startswith(one.text):
                    count -= 1
        tokens, likelihoods = one.tokens[:count], one.likelihoods[:count]
        if one.end is not None:
            tokens, likelihoods = [*tokens, one.end], one.likelihoods
        told = [*echo.tokens, *tokens], [*echo.likelihoods, *likelihoods]
        return Told(*told, echo.before, len(echo.tokens), echo.echo)

    def usage(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Completion]
    ) -> dict[str, int]:
        """Tokens of the prompts, each once, and of what continues them."""
        used, new = (sum(map(len, all_of)) for all_of in (prompts, [c.tokens for c in completions]))
        return {"prompt_tokens": used, "completion_tokens": new, "total_tokens": used + new}

    def _length(self, told: Told, count: int) -> int:
        """Of the text of the first `count` tokens."""
        echo, new = told.tokens[: told.echoed], told.tokens[told.echoed : count]
        if count < told.echoed:
            return len(text_behind(self._tokenizer, told.before, echo[:count]))
        return len(told.echo) + len(text_behind(self._tokenizer, [*told.before, *echo], new))

    def _logprobs(self, told: Told, said: int) -> dict[str, Any]:
        """As OpenAI's legacy interface has them; offsets are of the whole answer's text."""
        tokens, log_probs, tops, offsets = [], [], [], []
        every, begin = [*told.before, *told.tokens], len(told.before)
        # The last place between characters, and its offset: texts are decoded from there.
        whole, so_far, text = begin + said, self._length(told, said), ""
        for place in range(said, len(told.tokens)):
            token, likelihood = told.tokens[place], told.likelihoods[place]
            at = begin + place
            if place == told.echoed:
                whole, so_far, text = at, len(told.echo), ""
            before = every[max(at - READ_WITH, 0) : at]
            tokens.append(text_behind(self._tokenizer, before, [token]))
            log_probs.append(likelihood and likelihood.log_prob)
            earlier, since = text, every[max(whole - READ_WITH, 0) : whole]
            text = text_behind(self._tokenizer, since, every[whole : at + 1])
            # A piece of a character stands where that does, whether or not it changes its look.
            same = common(earlier, text)
            offset = so_far + min(same, max(len(text) - 1, 0))
            offsets.append(min(offset, len(told.echo)) if place < told.echoed else offset)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                whole, so_far, text = at + 1, so_far + len(text), ""
            top = None
            if likelihood is not None:
                # Pieces of a character look alike as text: the likeliest of them stays.
                ranked = [(token, likelihood.log_prob), *likelihood.likeliest.items()]
                ranked.sort(key=lambda item: item[1])
                top = {text_behind(self._tokenizer, before, [t]): log_p for t, log_p in ranked}
            tops.append(top)
        return {
            "tokens": tokens,
            "token_logprobs": log_probs,
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def event(content: Mapping[str, Any]) -> str:
    """A part of a streamed answer, as a server-sent event."""
    return f"data: {json.dumps(content)}\n\n"


def error(message: object, kind: str, code: str | None = None) -> dict[str, Any]:
    """The body of an answer that says what was wrong."""
    return {"error": {"message": str(message), "type": kind, "param": None, "code": code}}


def check_parameters(body: Any, read: Collection[str], refused: Collection[str]) -> None:
    """Raise ValueError unless a request's body is an object of parameters that are known.

    Args:
        read: those that mean something here.
        refused: those that OpenAI has and a model here has not; they may be there without a value.
    """
    if not isinstance(body, Mapping):
        raise ValueError("Expected a JSON object.")
    unknown = sorted(body.keys() - {*read, *refused, *_IGNORED})
    if unknown:
        raise ValueError(f"Unknown parameter {unknown[0]!r}.")
    for name in refused:
        if body.get(name):
            raise ValueError(f"{name} is not supported.")


def _prompts(value: Any) -> list[Prompt]:
    """A text, its tokens, or several of either."""
    several = [value] if isinstance(value, str) or _are_tokens(value) else value
    if not isinstance(several, list) or not all(
        isinstance(p, str) or _are_tokens(p) for p in several
    ):
        raise ValueError("Expected prompt to be a text, tokens, or a list of either.")
    return several


def _are_tokens(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(token, int) and not isinstance(token, bool) for token in value)
    )


def _stop_words(value: Any) -> tuple[str, ...]:
    words = [value] if isinstance(value, str) else value or []
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError("Expected stop to be a text or a list of texts.")
    if "" in words:
        raise ValueError("Expected stop words that are not empty.")
    return tuple(words)


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"Expected {name} to be true or false, got {value!r}.")
    return bool(value)


def _number(
    body: Mapping[str, Any], name: str, kind: type, default: Any, *,
    least: float = float("-inf"), most: float = float("inf"),
) -> Any:  # fmt: skip
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, kind)) or value != value:
        wanted = "a whole number" if kind is int else "a number"
        raise ValueError(f"Expected {name} to be {wanted}, got {value!r}.")
    if not least <= value <= most:
        to = f" and at most {most}" if most < float("inf") else ""
        raise ValueError(f"Expected {name} of at least {least}{to}, got {value}.")
    try:
        return kind(value)
    except OverflowError:
        raise ValueError(
            f"Expected {name} to be a number, got one of {len(f'{value}')} digits."
        ) from None
