"""How long a GPU takes for a step, reckoned from what the step does.

Large products run at a share of the peak that all of them reach, attention at another. Everything
else waits for the memory, and is counted by bytes: what blocks keep for the backward pass, logits,
weights with their state. Of a wide model the products are most of a step; of a narrow one, and of
one with many experts, they are not. What ranks tell each other is not counted, nor is the host.

`tests/test_sizing.py` holds it to what was measured, of the models in `MEASURED`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from mb_train.flops import of_device, peak_flops

# Models whose steps the figures below are fitted to. For others a step takes longer: a packed BERT
# of 110M 492 k tokens/s, not 722 k (benchmarks/results/2026-11-22-models.md).
MEASURED = ("gpt",)
# Of a dense GPT-2 125M on an H200, by --profile: products 703 and 723 TFLOP/s, attention 490 of
# the whole square of positions (benchmarks/results/2026-11-22-h200.md).
_PRODUCTS, _ATTENTION = 0.71, 0.5
# The optimizer's pass over 3.7 B weights, with the norm before it: 3.4 to 3.7 of 4.8 TB/s.
_BANDWIDTH = 0.75
# How often what blocks keep passes through the memory beside the products, there and as gradients;
# and the logits, written and read by three products and twice by the loss. Fitted to the measured
# steps of tests/test_sizing.py, and older ones of benchmarks/results/2026-11-22-frontier.md.
_KEPT_PASSES, _LOGIT_PASSES = 5.0, 5.4
# TB/s by a part of the device's name, the more particular first: the makers' data sheets.
_BANDWIDTH_TB = {
    "GB200": 8.0, "B200": 8.0, "H200": 4.8, "H100 PCIe": 2.0, "H100": 3.35, "A100": 2.04,
    "L40S": 0.86, "MI355X": 8.0, "MI350X": 8.0, "MI325X": 6.0, "MI300X": 5.3, "MI300A": 5.3,
    "MI250": 1.64, "MI210": 1.64, "7900 XTX": 0.96,
}  # fmt: skip
_NEWTON_SCHULZ = 5  # steps of `mb_parallel.optimizer.Muon`


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a step asks of one GPU.

    Attributes:
        products, attention: FLOPs, both apart.
        kept: bytes that blocks keep of all its tokens; logits: bytes of theirs.
        weights: bytes that are moved for weights, gradients and the optimizer.
    """

    products: float = 0.0
    attention: float = 0.0
    kept: float = 0.0
    logits: float = 0.0
    weights: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(**{n: value + getattr(other, n) for n, value in vars(self).items()})

    def shared(self, ranks: int) -> Work:
        """The share of one of so many ranks."""
        return Work(**{n: value / ranks for n, value in vars(self).items()})

    def seconds(self, device: str) -> float | None:
        """Seconds on a GPU of this name; None if its data sheet is not known."""
        peak, bandwidth = peak_flops(device), of_device(_BANDWIDTH_TB, device)
        if peak is None or bandwidth is None:
            return None
        moved = _KEPT_PASSES * self.kept + _LOGIT_PASSES * self.logits + self.weights
        computed = self.products / _PRODUCTS + self.attention / _ATTENTION
        return computed / peak + moved / (_BANDWIDTH * 1e12 * bandwidth)


def orthogonalising(weights: Iterable[Tensor], fused: tuple[int, ...]) -> Work:
    """Muon's iterations over weights [..., rows, columns].

    Args:
        fused: rows of the matrices that a weight holds by turns, as `Muon` takes them; () for one.
    """
    flops = moved = 0.0
    rounds, twice = -(-_NEWTON_SCHULZ // 2), _NEWTON_SCHULZ // 2  # twice: those of two steps
    for weight in weights:
        rows, columns = weight.shape[-2:]
        for part in fused or (rows,):
            own = rows * part // sum(fused or (rows,))
            short, long = min(own, columns), max(own, columns)
            count = weight.numel() // (rows * columns)
            # A round: the Gram matrix, half of it, and what is made of it by the matrix. Between
            # them products of the small, halved too: one each step, three more to get to a second.
            half = short * (short + 1)
            small = _NEWTON_SCHULZ + 3 * twice
            flops += count * (rounds * (half * long + 2 * short**2 * long) + small * half * short)
            passes = rounds + 2 * _NEWTON_SCHULZ + 9 * twice + 4
            moved += count * 2 * (3 * rounds * short * long + passes * short**2)  # in 16 bits
    return Work(products=flops, weights=moved)
