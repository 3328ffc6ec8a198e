"""How likely a model finds given tokens: what every evaluation is made of.

Letters: B windows, S tokens of a window, N scored tokens of a window, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from mb_train.models.gpt import GPT

NO_NUMBERS = (
    "The model's scores are not numbers: the run has diverged. Give an earlier checkpoint, "
    "RUN/iter_N, from before its loss became NaN (mb-train report RUN shows when)."
)


class Window(NamedTuple):
    """Tokens of which the last `scored` (at least one) are scored, given all before them."""

    tokens: list[int]
    scored: int


class Score(NamedTuple):
    """Sum of the scored tokens' log probabilities, in nats; whether each was the likeliest."""

    log_prob: float
    greedy: bool


def continuation(before: Sequence[int], tokens: Sequence[int], context: int) -> Window:
    """The window that scores `tokens` after `before`, of which as much is kept as fits.

    Raises:
        ValueError: nothing to score, nothing before it, or more tokens than the model can see.
    """
    if not before or not tokens:
        raise ValueError("Expected tokens to score and at least one before them, got none.")
    if len(tokens) > context:
        raise ValueError(
            f"Expected at most {context} tokens to score at once, the model's context, got "
            f"{len(tokens)}."
        )
    kept = context + 1 - len(tokens)
    return Window([*before[-kept:], *tokens], len(tokens))


def rolling(tokens: Sequence[int], context: int, stride: int) -> list[Window]:
    """Windows that score every token but the first exactly once.

    The first scores all it holds; each further one moves on by `stride` and scores that many.

    Raises:
        ValueError: a stride outside 1 to `context`.
    """
    if not 1 <= stride <= context:
        raise ValueError(f"Expected a stride of 1 to the context, {context}, got {stride}.")
    windows, done, end = [], 1, min(context + 1, len(tokens))
    while done < len(tokens):
        windows.append(Window(list(tokens[max(end - context - 1, 0) : end]), end - done))
        done, end = end, min(end + stride, len(tokens))
    return windows


@torch.no_grad()
def score(model: GPT, windows: Sequence[Window], *, batch_size: int) -> list[Score]:
    """Score windows, in their order; long ones are computed first, so too large a batch shows.

    A model whose experts have a capacity gets one window at a time: others, and what fills them up,
    would take its places.

    Raises:
        ValueError: scores that are not numbers.
    """
    device = next(model.parameters()).device
    if model.config.moe is not None and model.config.moe.capacity_factor is not None:
        batch_size = 1
    order = sorted(range(len(windows)), key=lambda i: -len(windows[i].tokens))
    scores: dict[int, Score] = {}
    for begin in range(0, len(order), batch_size):
        chosen = order[begin : begin + batch_size]
        batch = [windows[i] for i in chosen]
        longest, most = len(batch[0].tokens) - 1, max(window.scored for window in batch)
        tokens_BS = torch.zeros(len(batch), longest, dtype=torch.int64)
        at_BN = torch.zeros(len(batch), most, dtype=torch.int64)
        labels_BN = torch.zeros(len(batch), most, dtype=torch.int64)
        valid_BN = torch.zeros(len(batch), most, dtype=torch.bool)
        for row, (tokens, scored) in enumerate(batch):
            inputs = len(tokens) - 1
            tokens_BS[row, :inputs] = torch.tensor(tokens[:-1])
            at_BN[row, :scored] = torch.arange(inputs - scored, inputs)
            labels_BN[row, :scored] = torch.tensor(tokens[-scored:])
            valid_BN[row, :scored] = True
        labels_BN, valid_BN = labels_BN.to(device), valid_BN.to(device)
        logits_BNV = model.logits(tokens_BS.to(device), at_B=at_BN.to(device))
        chosen_BN = logits_BNV.gather(2, labels_BN[..., None]).squeeze(2)
        log_probs_BN = (chosen_BN - logits_BNV.logsumexp(2)).double()
        sums_B = (log_probs_BN * valid_BN).sum(1)
        greedy_B = ((logits_BNV.argmax(2) == labels_BN) | ~valid_BN).all(1)
        for index, total, greedy in zip(chosen, sums_B.tolist(), greedy_B.tolist(), strict=True):
            scores[index] = Score(total, greedy)
    if any(found.log_prob != found.log_prob for found in scores.values()):
        raise ValueError(NO_NUMBERS)
    return [scores[index] for index in range(len(windows))]
