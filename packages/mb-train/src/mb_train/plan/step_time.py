"""How long a GPU takes for a step, reckoned from what the step does.

Large products run at a share of the peak that all of them reach, attention at another. Everything
else waits for the memory, and is counted by bytes: what blocks keep for the backward pass, logits,
weights with their state. Of a wide model the products are most of a step; of a narrow one, and of
one with many experts, they are not. Of a small micro-batch kernels' beginnings and ends count, and
that few rows meet an expert. Of a pipeline the time in which it fills and empties is counted. What
ranks tell each other is not, nor is the host.

`tests/test_sizing.py` holds it to what was measured, of the models in `MEASURED`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from mb_train.plan.devices import data_sheet

# Models whose steps the figures below are fitted to. A T5 or a retriever takes the GPU as long to a
# fifth; without --cuda-graph the host takes longer (benchmarks/results/2026-11-24-h200.md).
MEASURED = ("gpt", "bert")
# Share of the peak, by --profile on an H200. Products of a dense GPT-2 125M: 703 and 723 TFLOP/s
# (benchmarks/results/2026-11-22-h200.md).
_PRODUCTS = 0.71
# Attention, of the whole square of positions, half of which a causal kernel computes: that GPT-2's
# 490 TFLOP/s, and 327 with dropout; with dropout a BERT's 133, at 512 positions, and a T5's 121
# (2026-11-24-h200.md). A BERT's without dropout was not measured: it is put in proportion.
_CAUSAL, _BIDIRECTIONAL, _WITH_DROPOUT = 0.5, 0.2, 0.66
# The optimizer's pass over 3.7 B weights, with the norm before it, and sums of gradients: 4.2 of
# 4.8 TB/s (benchmarks/results/2026-11-28-h200.md).
_BANDWIDTH = 0.87
# That pass over moments in the host's memory, read and written at the same time: 39.3 of 64 GB/s
# each way (benchmarks/results/2026-11-27-h200.md).
_LINK = 0.61
# Copies of activations to pinned memory and back: 42 of 64 GB/s, fitted to two measured steps (the
# same page). Copies that do nothing else reach 51.
_COPIES = 0.66
# How often what blocks keep passes through the memory beside the products, there and as gradients;
# and the logits, written and read by three products and twice by the loss. Fitted to the measured
# steps of tests/test_sizing.py, and older ones of benchmarks/results/2026-11-22-frontier.md. Where
# padding is left out, tokens are gathered for every block's attention and laid out again.
_KEPT_PASSES, _KEPT_PASSES_OF_SENTENCES, _LOGIT_PASSES = 5.4, 8.1, 6.3
# Of the kernels of a block's two passes what no number of tokens makes shorter, in seconds: their
# beginnings and ends, and the gaps between them (benchmarks/results/2026-11-28-h200.md).
_OF_A_BLOCK = 2e-4
# The passes of a GPT, and the seconds of any block, without --compile: more kernels, each with a
# pass of its own. Fitted to dense GPTs (benchmarks/results/2026-11-29-h200.md).
_KEPT_PASSES_UNCOMPILED, _OF_A_BLOCK_UNCOMPILED = 6.6, 3e-4
# Rows that are computed for nothing for each expert: half a tile of 128, in the mean.
_HALF_A_TILE = 64


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a step asks of one GPU.

    Attributes:
        products: FLOPs of large products.
        moved: bytes through the memory, beside these.
        linked: bytes to the host's memory, and as many from there.
        fixed: seconds beside all that, whatever GPU it is.
    """

    products: float = 0.0
    moved: float = 0.0
    linked: float = 0.0
    fixed: float = 0.0

    def __add__(self, other: Demand) -> Demand:
        return Demand(
            products=self.products + other.products,
            moved=self.moved + other.moved,
            linked=self.linked + other.linked,
            fixed=self.fixed + other.fixed,
        )

    def shared(self, ranks: int) -> Demand:
        """The share of one of so many ranks."""
        return Demand(
            products=self.products / ranks,
            moved=self.moved / ranks,
            linked=self.linked / ranks,
            fixed=self.fixed / ranks,
        )

    def seconds(self, device: str) -> float | None:
        """Seconds on a GPU of this name; None if its data sheet is not known."""
        sheet = data_sheet(device)
        if sheet is None:
            return None
        moved_s = self.moved / (_BANDWIDTH * 1e12 * sheet.bandwidth_tb)
        linked_s = self.linked / (_LINK * 1e9 * sheet.link_gb)
        products_s = self.products / (_PRODUCTS * 1e12 * sheet.peak_tflops)
        return products_s + moved_s + linked_s + self.fixed


def waiting(away: Sequence[float], blocks: Demand, device: str) -> float | None:
    """Seconds that a micro-batch waits for activations to go to the host's memory and to come back.

    A layer's copies out begin behind it, and the next layer that sends, or the last one, waits for
    them at its end. In the backward pass they come back while those between the two compute.

    Args:
        away: bytes that each layer sends, in order.
        blocks: what the forward and the backward pass of all of them ask for.

    Returns:
        None where the device's data sheet is not known.
    """
    sheet, computing = data_sheet(device), blocks.seconds(device)
    if sheet is None or computing is None:
        return None
    forward = computing / 3 / len(away)  # of a layer; its backward pass takes twice as long
    places = dict.fromkeys([*(n for n, sent in enumerate(away) if sent), len(away) - 1])
    waits = 0.0
    for place, following in itertools.pairwise(places):
        copying = away[place] / (_COPIES * 1e9 * sheet.link_gb)
        hidden = (following - place) * forward
        waits += max(copying - hidden, 0.0) + max(copying - 2 * hidden, 0.0)
    return waits


def meeting_few_rows(
    weights: float, rows: float, device: str, *, in_fp8: bool = False
) -> float | None:
    """Seconds that a micro-batch's experts take beyond the products of their rows.

    Tiles are filled up, half a tile for each expert. And two products read each weight, a third
    writes its gradient: where few rows meet an expert, the memory takes longer than they do.

    Args:
        weights: of a layer's experts on a rank.
        rows: that an expert has, in the mean.
        in_fp8: all but the gradients are, which halves what is read, and its products.

    Returns:
        None where the device's data sheet is not known.
    """
    each = weights * (4 if in_fp8 else 6)  # FLOPs of a row, and bytes
    own, filled = (Demand(products=each * n).seconds(device) for n in (rows, rows + _HALF_A_TILE))
    moving = Demand(moved=each).seconds(device)
    if own is None or filled is None or moving is None:
        return None
    return max(filled, moving) - own


def between_kernels(blocks: float, *, compiled: bool) -> Demand:
    """What the kernels of so many passes of blocks take, however few tokens there are."""
    return Demand(fixed=(_OF_A_BLOCK if compiled else _OF_A_BLOCK_UNCOMPILED) * blocks)


def attending(flops: float, *, causal: bool, dropout: bool) -> Demand:
    """Attention of so many FLOPs over whole squares of positions, with dropout of its weights."""
    share = (_CAUSAL if causal else _BIDIRECTIONAL) * (_WITH_DROPOUT if dropout else 1)
    return Demand(products=flops * _PRODUCTS / share)


def keeping(kept: float, *, sentences: bool, compiled: bool) -> Demand:
    """What blocks keep for the backward pass, in bytes, beside the products."""
    passes = _KEPT_PASSES if compiled else _KEPT_PASSES_UNCOMPILED
    return Demand(moved=(_KEPT_PASSES_OF_SENTENCES if sentences else passes) * kept)


def scoring(logits: float) -> Demand:
    """The logits, in bytes, beside the products."""
    return Demand(moved=_LOGIT_PASSES * logits)


def orthogonalising(weights: Iterable[Tensor], fused: tuple[int, ...], steps: int) -> Demand:
    """Muon's iterations over weights [..., rows, columns].

    Args:
        fused: rows of the matrices that a weight holds by turns, as `Muon` takes them; () for one.
        steps: of Newton-Schulz.
    """
    flops = moved = 0.0
    rounds, twice = -(-steps // 2), steps // 2  # twice: those of two steps
    for weight in weights:
        rows, columns = weight.shape[-2:]
        for part in fused or (rows,):
            own = rows * part // sum(fused or (rows,))
            short, long = min(own, columns), max(own, columns)
            count = weight.numel() // (rows * columns)
            # A round: the Gram matrix, half of it, and what is made of it by the matrix. Between
            # them products of the small, halved too: one each step, three more to get to a second.
            half = short * (short + 1)
            small = steps + 3 * twice
            flops += count * (rounds * (half * long + 2 * short**2 * long) + small * half * short)
            passes = rounds + 2 * steps + 9 * twice + 4
            moved += count * 2 * (3 * rounds * short * long + passes * short**2)  # in 16 bits
    return Demand(products=flops, moved=moved)
