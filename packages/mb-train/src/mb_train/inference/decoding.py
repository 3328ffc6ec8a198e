"""The next tokens of prompts: greedy, top-k or top-p sampling, several prompts at once.

Keys and values of tokens are kept, so that a step computes the new token of each prompt alone. A
model sees at most its training context: beyond it every step runs the last `positions` tokens
through the model again, because their positions change. With an expert capacity every step does
so, because the experts' places depend on all tokens of a pass. Prompts of one call need not be
equally long: they are padded at the end, where a causal model does not look. Each draws with a
generator of its own, so what a prompt is continued with does not depend on its neighbours.

Letters: B prompts, S tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mb_train.inference.going_on import GoingOn
from mb_train.inference.scoring import NO_NUMBERS
from mb_train.models.cache import KVCache
from mb_train.models.gpt import GPT

# Without cuDNN, which makes a plan for every number of keys: 69 ms a token on an H200
# (benchmarks/results/2026-11-28-h200.md).
_OF_ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


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
            raise ValueError(
                f"Expected a finite temperature of at least 0, got {self.temperature}."
            )
        if self.top_k < 0:
            raise ValueError(f"Expected top-k of at least 0, got {self.top_k}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"Expected top-p in (0, 1], got {self.top_p}.")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"Expected a seed of at most 63 bits, got {self.seed}.")


def choose(
    logits_BV: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]
) -> list[int]:
    """Draw a token from each row of scores [B, V]; top-k comes before top-p, as in Megatron-LM.

    Args:
        generators: of each row, on the scores' device.

    Raises:
        ValueError: scores that are not numbers.
    """
    if sampling.temperature == 0:
        if not bool(logits_BV.isfinite().all()):
            raise ValueError(NO_NUMBERS)
        return logits_BV.argmax(1).tolist()
    values, ids = logits_BV.float().sort(dim=1, descending=True, stable=True)
    # What fp32 takes for 0 would make 0/0 of the likeliest, and leave no token to draw.
    temperature, top_p = (
        max(setting, torch.finfo(values.dtype).tiny)
        for setting in (sampling.temperature, sampling.top_p)
    )
    values = (values - values[:, :1]) / temperature  # no overflow, however cold
    if sampling.top_k:
        values, ids = values[:, : sampling.top_k], ids[:, : sampling.top_k]
    probs = values.softmax(1)
    # A token stays if those before it do not hold top_p already: at least one always does.
    kept = probs.cumsum(1) - probs < top_p
    # A race: the token of the shortest time wins, and times are exponential with the probabilities
    # as rates. Each token of the vocabulary has its own time, so that what a rounding does to one
    # score, as beside other prompts, changes nothing for the others.
    probs_BV = torch.zeros_like(logits_BV, dtype=probs.dtype).scatter_(1, ids, probs * kept)
    times_BV = torch.empty_like(probs_BV)
    for times_V, generator in zip(times_BV, generators, strict=True):
        times_V.exponential_(generator=generator)
    tokens = (probs_BV / times_BV).argmax(1)
    if not bool((probs[:, 0] >= 0).all()):
        raise ValueError(NO_NUMBERS)
    return tokens.tolist()


class Next(NamedTuple):
    """A token that continues a prompt, and the scores [V] it was drawn from."""

    token: int
    logits_V: Tensor


class Likelihood(NamedTuple):
    """Log probability of a token, in nats, and of the likeliest ones at its place by their ids."""

    log_prob: float
    likeliest: dict[int, float]


def likelihood(logits_V: Tensor, token: int, count: int) -> Likelihood:
    """How likely a token is by the scores at its place, beside the `count` likeliest.

    Raises:
        ValueError: scores that are not numbers.
    """
    log_probs_V = logits_V.float().log_softmax(0)
    if bool(log_probs_V.isnan().any()):
        raise ValueError(NO_NUMBERS)
    values, ids = log_probs_V.topk(min(count, len(log_probs_V)))
    likeliest = dict(zip(ids.tolist(), values.tolist(), strict=True))
    return Likelihood(float(log_probs_V[token]), likeliest)


@torch.no_grad()
def continue_tokens(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    vocab_size: int,
    context: int,
    ends: Collection[int] = (),
    cached: bool = True,
    seeds: Sequence[int] | None = None,
) -> Iterator[list[Next | None]]:
    """The next token of every prompt, step by step, until all have ended.

    Args:
        prompts: at least one token each.
        vocab_size: ids from here on are padding of the head and never chosen.
        context: longest input of the model.
        ends: tokens that end a prompt.
        cached: keep keys and values as long as the context lasts.
        seeds: of each prompt's choice; None takes the one of `sampling` for all.

    Yields:
        What continues each prompt, one of `ends` as its last token, None once it has ended.

    Raises:
        ValueError: scores that are not numbers.
    """
    seeds = [sampling.seed] * len(prompts) if seeds is None else seeds
    device = next(model.parameters()).device
    generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
    texts = [list(prompt) for prompt in prompts]
    running = list(range(len(texts)))
    cache = KVCache(len(texts), device) if cached else None
    go_on = GoingOn(model, device)
    seen = [0] * len(texts)
    while running:
        if max(len(texts[row]) for row in running) > context:
            cache = None
        first = [seen[row] if cache is not None else -context for row in running]
        windows = [texts[row][start:] for row, start in zip(running, first, strict=True)]
        lengths = [len(window) for window in windows]
        padded = [window + [0] * (max(lengths) - len(window)) for window in windows]
        tokens_BS, lengths_B = (torch.tensor(x, device=device) for x in (padded, lengths))
        with sdpa_kernel(_OF_ANY_LENGTH):
            if cache is None:
                logits_BV = model.logits(tokens_BS, at_B=lengths_B - 1)[:, :vocab_size]
            else:
                logits_BV = go_on(tokens_BS, lengths_B, cache)[:, :vocab_size]
        for row in running:
            seen[row] = len(texts[row])
        step: list[Next | None] = [None] * len(texts)
        drawn = choose(logits_BV, sampling, [generators[row] for row in running])
        for row, token, logits_V in zip(running, drawn, logits_BV, strict=True):
            texts[row].append(token)
            step[row] = Next(token, logits_V)
        still = [place for place, row in enumerate(running) if texts[row][-1] not in ends]
        if cache is not None and len(still) < len(running):
            cache.keep(torch.tensor(still, dtype=torch.int64, device=device))
        running = [running[place] for place in still]
        yield step
