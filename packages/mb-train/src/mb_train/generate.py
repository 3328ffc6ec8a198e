"""Text from a checkpoint: greedy, top-k or top-p sampling, several prompts at once.

Keys and values of tokens are kept, so that a step computes the new token of each prompt alone. A
model sees at most its training context: beyond it every step runs the last `positions` tokens
through the model, for each of them has another position then. So does a model with an expert
capacity, whose experts' places depend on all tokens of a pass. Prompts of one call need not be
equally long: they are padded behind, where a causal model does not look. Each draws with a
generator of its own, so what a prompt is continued with does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from mb_train.loading import Trained, load_trained
from mb_train.models.cache import KVCache
from mb_train.models.gpt import GPT

_NO_NUMBERS = (
    "The model's scores are not numbers: the run has diverged. Give an earlier checkpoint, "
    "RUN/iter_N, from before its loss became NaN (mb-train report RUN shows when)."
)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen.

    Args:
        temperature: scores are divided by it; 0 takes the likeliest token (greedy).
        top_k: choose among this many likeliest tokens; 0 among all.
        top_p: choose among the fewest likeliest tokens that hold this much probability.
        seed: of the choice.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"Expected a temperature of at least 0, got {self.temperature}.")
        if self.top_k < 0:
            raise ValueError(f"Expected top-k of at least 0, got {self.top_k}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"Expected top-p in (0, 1], got {self.top_p}.")


def choose(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw one token from scores [V]; top-k is applied before top-p, as in Megatron-LM.

    Raises:
        ValueError: scores that are not numbers.
    """
    if sampling.temperature == 0:
        if not bool(logits_V.isfinite().all()):
            raise ValueError(_NO_NUMBERS)
        return int(logits_V.argmax())
    values, ids = (logits_V.float() / sampling.temperature).sort(descending=True, stable=True)
    if sampling.top_k:
        values, ids = values[: sampling.top_k], ids[: sampling.top_k]
    probs = values.softmax(0)
    if not bool(probs[0] >= 0):
        raise ValueError(_NO_NUMBERS)
    # A token stays if those before it do not hold top_p already: at least one always does.
    kept = probs.cumsum(0) - probs < sampling.top_p
    probs = probs * kept
    return int(ids[torch.multinomial(probs.cpu(), 1, generator=generator)])


@torch.no_grad()
def continue_tokens(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    vocab_size: int,
    context: int,
    eod: int | None = None,
    cached: bool = True,
) -> Iterator[list[int | None]]:
    """The next token of every prompt, step by step, until all have ended.

    Args:
        prompts: at least one token each.
        vocab_size: ids from here on are padding of the head and never chosen.
        context: longest input of the model.
        eod: ends a prompt; None never does.
        cached: keep keys and values as long as the context lasts.

    Yields:
        A token for each prompt, `eod` as its last one, None once it has ended.

    Raises:
        ValueError: scores that are not numbers.
    """
    generators = [torch.Generator().manual_seed(sampling.seed) for _ in prompts]
    device = next(model.parameters()).device
    texts = [list(prompt) for prompt in prompts]
    running = list(range(len(texts)))
    cache = KVCache(len(texts), device) if cached else None
    seen = [0] * len(texts)
    while running:
        if max(len(texts[row]) for row in running) > context:
            cache = None
        first = [seen[row] if cache is not None else -context for row in running]
        windows = [texts[row][start:] for row, start in zip(running, first, strict=True)]
        lengths = [len(window) for window in windows]
        padded = [window + [0] * (max(lengths) - len(window)) for window in windows]
        tokens_BS, lengths_B = (torch.tensor(x, device=device) for x in (padded, lengths))
        if cache is None:
            logits_BV = model.logits(tokens_BS, at_B=lengths_B - 1)[:, :vocab_size]
        else:
            logits_BV = model.go_on(tokens_BS, lengths_B, cache)[:, :vocab_size]
        for row in running:
            seen[row] = len(texts[row])
        step: list[int | None] = [None] * len(texts)
        for row, logits_V in zip(running, logits_BV, strict=True):
            token = choose(logits_V, sampling, generators[row])
            texts[row].append(token)
            step[row] = token
        still = [place for place, row in enumerate(running) if eod is None or step[row] != eod]
        if cache is not None and len(still) < len(running):
            cache.keep(torch.tensor(still, dtype=torch.int64, device=device))
        running = [running[place] for place in still]
        yield step


@dataclass
class Completion:
    """What a prompt was continued with.

    Attributes:
        text: as far as it is decided: a character may take several tokens.
        tokens: new ones.
        finish_reason: None while it goes on, then "stop" (the end of a document, or a stop word)
            or "length".
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class Generator:
    """A model and its tokenizer.

    Args:
        trained: from `load_trained`.

    Raises:
        ValueError, OSError: the tokenizer's files are gone or damaged.
    """

    def __init__(self, trained: Trained) -> None:
        self.model = trained.model
        self.tokenizer = trained.tokenizer
        self.context = trained.config.positions
        # With a capacity, padding would take the experts' places: one prompt at a time.
        self._together = not trained.config.moe_capacity_factor

    @classmethod
    def of_run(cls, run: Path, device: str) -> Generator:
        """From a run folder or an iteration folder; as `load_trained`."""
        return cls(load_trained(run, device))

    def stream(
        self,
        prompts: Sequence[str],
        sampling: Sampling,
        *,
        max_new_tokens: int,
        stop: Sequence[str] = (),
    ) -> Iterator[list[Completion]]:
        """The completions of the prompts so far, after every token.

        Args:
            max_new_tokens: of each prompt.
            stop: words that end a completion and are not part of it.

        Raises:
            ValueError: fewer than no tokens; scores that are not numbers.
        """
        if max_new_tokens < 0:
            raise ValueError(f"Expected --max-new-tokens of at least 0, got {max_new_tokens}.")
        if not self._together and len(prompts) > 1:
            done: list[Completion] = []
            for prompt in prompts:
                last: list[Completion] = []
                for last in self.stream(
                    [prompt], sampling, max_new_tokens=max_new_tokens, stop=stop
                ):
                    rest = [Completion() for _ in prompts[len(done) + 1 :]]
                    yield [*done, *last, *rest]
                done += last
            return
        eod = self.tokenizer.eod
        completions = [Completion() for _ in prompts]
        encoded = [self.tokenizer.encode(prompt) or [eod] for prompt in prompts]
        steps = continue_tokens(
            self.model, encoded, sampling, vocab_size=self.tokenizer.vocab_size,
            context=self.context, eod=eod, cached=self._together,
        )  # fmt: skip
        for _, step in zip(range(max_new_tokens), steps, strict=False):
            for completion, token in zip(completions, step, strict=True):
                if token is not None and completion.finish_reason is None:
                    self._add(completion, token, max_new_tokens, stop)
            yield completions
            if all(completion.finish_reason for completion in completions):
                return

    def complete(
        self,
        prompts: Sequence[str],
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
        self, completion: Completion, token: int, max_new_tokens: int, stop: Sequence[str]
    ) -> None:
        if token == self.tokenizer.eod:
            completion.text = self.tokenizer.decode(completion.tokens)
            completion.finish_reason = "stop"
            return
        completion.tokens.append(token)
        text = self.tokenizer.decode(completion.tokens)
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
