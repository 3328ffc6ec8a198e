"""Text from a checkpoint: what prompts are continued with, until a stop word or a length."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from mb_train.data.tokenizers import (
    beginning,
    chat_tokenizer,
    further_ends,
    preceding,
)
from mb_train.inference.decoding import Likelihood, Sampling, continue_tokens, likelihood
from mb_train.loading import Trained, load_trained

if TYPE_CHECKING:
    from mb_data import ChatTokenizer, Tokenizer

# A text, or its tokens.
Prompt: TypeAlias = str | Sequence[int]
# Tokens that what follows is read with: more than the four that a character may take.
READ_WITH = 8
# Letters of prompts after which a tokenizer forgets the words it has seen, which it keeps as long
# as a server runs: GPT-2's grew by 188 MB with so many random letters, in words of 26 letters in
# the mean, and took 58 ms to forget them (two cores, 2026-11-26).
REMEMBERED = 1 << 25


def text_behind(tokenizer: Tokenizer, before: Sequence[int], tokens: Sequence[int]) -> str:
    """The text that tokens add behind others.

    By themselves they may say another: SentencePiece leaves out the space of a text's first word.
    """
    before = list(before[-READ_WITH:])
    begin, whole = tokenizer.decode(before), tokenizer.decode([*before, *tokens])
    return whole[common(begin, whole) :]


def common(a: str, b: str) -> int:
    """How many characters two texts begin with alike."""
    same = takewhile(lambda letters: letters[0] == letters[1], zip(a, b, strict=False))
    return len(list(same))


@dataclass
class Completion:
    """What a prompt was continued with.

    Attributes:
        text: as far as it is decided: a character may take several tokens.
        tokens: new ones.
        end: the token that ended it, if one did; it is none of its text.
        likelihoods: of the tokens, and then of the end, if they were asked for.
        finish_reason: None while it goes on, then "stop" (the end of a document, or a stop word)
            or "length".
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    end: int | None = None
    likelihoods: list[Likelihood] = field(default_factory=list)
    finish_reason: str | None = None

    def so_far(self) -> Completion:
        """A copy that does not go on."""
        return replace(self, tokens=self.tokens[:], likelihoods=self.likelihoods[:])


class Generator:
    """A model and its tokenizer.

    Args:
        trained: from `load_trained`.

    Attributes:
        ends: tokens that end a text.

    Raises:
        ValueError, OSError: the tokenizer's files are gone or damaged.
    """

    def __init__(self, trained: Trained) -> None:
        self.model = trained.model
        self.tokenizer = trained.tokenizer
        self._config, self._run = trained.config, trained.checkpoint.parent
        further = further_ends(self._config, self._run)
        self.ends = frozenset((self.tokenizer.eod, *further, *self._ends_of_answers()))
        self.context = trained.config.positions
        # With a capacity, padding would take the experts' places: one prompt at a time.
        self._together = not trained.config.experts_see_others
        self._letters = 0  # of the texts since the tokenizer forgot

    @classmethod
    def of_run(cls, run: Path, device: str) -> Generator:
        """From a run folder or an iteration folder; as `load_trained`."""
        return cls(load_trained(run, device, held_as_used=True))

    def asked(self, messages: Sequence[Any], tools: Sequence[Any] | None = None) -> list[int]:
        """The tokens that an answer to messages stands behind.

        Raises:
            ValueError: the tokenizer has no chat template, or that refuses these messages.
        """
        return self._chats.prompt(messages, tools)

    @cached_property
    def _chats(self) -> ChatTokenizer:
        """Raises ValueError for a model that cannot be asked so."""
        return chat_tokenizer(self._config, self._run)

    def _ends_of_answers(self) -> list[int]:
        """The token that a chat model's answers end with; none of a model without a template."""
        try:
            end = self._chats.end()
        except ValueError:  # told to who asks by the template
            return []
        return [] if end is None else [end]

    def beginning(self, prompt: Prompt) -> list[int]:
        """What is before a text, as before every document; before tokens nothing is."""
        return beginning(self.tokenizer) if isinstance(prompt, str) else []

    def tokens_of(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt. An empty one becomes what documents begin with, or end with.

        Raises:
            ValueError: a token that the tokenizer has not, or a text that it does not take.
        """
        vocab_size = self.tokenizer.vocab_size
        self._letters += len(prompt) if isinstance(prompt, str) else 0
        if self._letters > REMEMBERED:
            self._letters = 0
            self.tokenizer.forget()
        try:
            tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        except UnicodeEncodeError as error:
            raise ValueError(
                f"Expected a text of valid Unicode, got {error.object[error.start]!r} in it."
            ) from None
        wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise ValueError(f"Expected tokens in [0, {vocab_size}), got {wrong}.")
        return [*self.beginning(prompt), *tokens] or preceding(self.tokenizer)

    @torch.no_grad()
    def likelihoods(self, prompt: Prompt, count: int) -> list[Likelihood | None]:
        """How likely the model finds each token of a prompt; None for the first.

        Raises:
            ValueError: as `tokens_of`; more tokens than the model can see; scores that are not
                numbers.
        """
        tokens = self.tokens_of(prompt)
        if len(tokens) > self.context:
            raise ValueError(
                f"Expected at most {self.context} tokens to tell likelihoods of, the model's "
                f"context, got {len(tokens)}."
            )
        device = next(self.model.parameters()).device
        logits_SV = self.model.logits(torch.tensor([tokens], device=device))[0]
        logits_SV = logits_SV[:, : self.tokenizer.vocab_size]
        told = zip(logits_SV, tokens[1:], strict=False)
        return [None, *(likelihood(logits_V, token, count) for logits_V, token in told)]

    def stream(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        max_new_tokens: int,
        stop: Sequence[str] = (),
        seeds: Sequence[int] | None = None,
        likeliest: int | None = None,
    ) -> Iterator[list[Completion]]:
        """The completions of the prompts so far, after every token.

        The model sees as many of the last tokens as its context holds; a longer prompt is told.

        Args:
            max_new_tokens: of each prompt.
            stop: words that end a completion and are not part of it.
            seeds: of each prompt's choice; None takes the one of `sampling` for all.
            likeliest: tell the likelihood of each token, and of so many others; None does not.

        Raises:
            ValueError: fewer than no tokens, or a prompt of other tokens, at once; scores that are
                not numbers, once they are met.
        """
        if max_new_tokens < 0:
            raise ValueError(f"Expected --max-new-tokens of at least 0, got {max_new_tokens}.")
        tokens = [self.tokens_of(prompt) for prompt in prompts]
        longest = max(map(len, tokens), default=0)
        if longest > self.context:
            warnings.warn(
                f"A prompt has {longest:,} tokens, of which the model sees the last "
                f"{self.context:,}, its context.",
                stacklevel=2,
            )
        rows = range(len(tokens))

        def steps() -> Iterator[list[Completion]]:
            completions = [Completion() for _ in rows]
            for group in [rows] if self._together else [[row] for row in rows]:
                drawn = continue_tokens(
                    self.model, [tokens[row] for row in group], sampling,
                    vocab_size=self.tokenizer.vocab_size, context=self.context,
                    ends=self.ends, cached=self._together,
                    seeds=None if seeds is None else [seeds[row] for row in group],
                )  # fmt: skip
                going = [completions[row] for row in group]
                for _, step in zip(range(max_new_tokens), drawn, strict=False):
                    for row, completion, one in zip(group, going, step, strict=True):
                        if one is None or completion.finish_reason is not None:
                            continue
                        self._add(completion, tokens[row], one.token, max_new_tokens, stop)
                        if likeliest is not None:
                            told = likelihood(one.logits_V, one.token, likeliest)
                            completion.likelihoods.append(told)
                    yield [completion.so_far() for completion in completions]
                    if all(completion.finish_reason for completion in going):
                        break

        return steps()

    def complete(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        max_new_tokens: int,
        stop: Sequence[str] = (),
    ) -> list[Completion]:
        """Continue every prompt to its end."""
        last = [Completion(finish_reason="length") for _ in prompts]
        for step in self.stream(prompts, sampling, max_new_tokens=max_new_tokens, stop=stop):
            last = step
        return last

    def _add(
        self,
        completion: Completion,
        prompt: Sequence[int],
        token: int,
        max_new_tokens: int,
        stop: Sequence[str],
    ) -> None:
        if token in self.ends:
            completion.text = text_behind(self.tokenizer, prompt, completion.tokens)
            completion.end, completion.finish_reason = token, "stop"
            return
        completion.tokens.append(token)
        text = text_behind(self.tokenizer, prompt, completion.tokens)
        ended = len(completion.tokens) == max_new_tokens
        found = min((at for word in stop if (at := text.find(word)) >= 0), default=None)
        if found is not None:
            completion.text, completion.finish_reason = text[:found], "stop"
        elif ended:
            completion.text, completion.finish_reason = text, "length"
        elif not text.endswith("\N{REPLACEMENT CHARACTER}"):
            # What may be the beginning of a stop word is not decided either.
            held = max((n for word in stop for n in range(1, len(word)) if text.endswith(word[:n])),
                       default=0)  # fmt: skip
            completion.text = text[: len(text) - held]
