"""What test_fuzz.py draws from: sizes, routings, dtypes and places in memory, all from a seed.

Letters: T tokens, D hidden, F ffn width, E experts, K top-k, N rows, V vocabulary.
"""

import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import mb_kernels
import torch
from mb_kernels import reference
from mb_kernels.activation import parse
from mb_kernels.testing import ROUTINGS, make_expert_ids

_ON_A_GPU = (torch.float32, torch.float16, torch.bfloat16, torch.bfloat16)


class Draw(NamedTuple):
    """A call of ``mb_kernels`` or its reference by tensors; ``leaves`` have gradients."""

    call: Callable[..., Any]
    tensors: dict[str, torch.Tensor]
    leaves: tuple[str, ...] = ()
    slack: float = 1.0  # tolerances that are allowed, where an op rounds on its way
    anywhere: bool = True  # tensors may lie anyhow


class Dice:
    """Random choices, all from one seed."""

    def __init__(self, seed: int, reachable: list[torch.Tensor], device: str = "cpu") -> None:
        self.reachable = reachable  # what kernels may find through a table of addresses
        self.device = device
        self.choice = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        pick = self.choice.choice
        self.tokens = pick((0, 1, 2, self.choice.randrange(3, 40), self.choice.randrange(3, 40)))
        self.hidden, self.ffn = (16 * pick((1, 1, 2, 2, 2, 3, 3, 4, 4, 4, 5, 17)) for _ in "DF")
        if self.sometimes(0.3):
            self.hidden, self.ffn = (self.choice.randrange(1, 70) for _ in "DF")
        self.experts = self.choice.randrange(1, 9)
        self.top_k = pick((self.choice.randrange(1, min(self.experts, 4) + 1), self.experts))
        self.dtype = pick((torch.float32, torch.float16, torch.bfloat16))
        if device != "cpu":
            self.tokens *= pick((1, 1, 5, 20))
            self.hidden, self.ffn = self.hidden * pick((1, 3, 8)), self.ffn * pick((1, 3, 8))
            self.experts, self.dtype = self.experts * pick((1, 1, 9)), pick(_ON_A_GPU)

    @property
    def half(self) -> torch.dtype:
        return torch.float16 if self.dtype is torch.float32 else self.dtype

    def sometimes(self, share: float = 0.5) -> bool:
        return self.choice.random() < share

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        values = torch.randn(shape, generator=self.generator) / max(shape[-1], 1) ** 0.25
        return values.to(dtype or self.dtype)

    def before(
        self, activation: str, *shape: int, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """What goes into pre-activations: beside a limit whole numbers, as in ``make_inputs``."""
        values = self.normal(*shape, dtype=dtype)
        return values.round() if parse(activation).limit < math.inf else values

    def routed(self) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Bins by their names, some slots dropped, and weights."""
        routing = self.choice.choice(ROUTINGS)
        ids = make_expert_ids(
            routing, self.tokens, self.experts, self.top_k, generator=self.generator
        )
        if self.sometimes(0.3):
            share = self.choice.choice((0.2, 0.2, 1))
            nobody = torch.rand(ids.shape, generator=self.generator) < share
            ids = torch.where(nobody, self.choice.choice((-1, self.experts)), ids)
        capacity = self.choice.choice((None, None, self.choice.randrange(9)))
        bins = reference.bin_tokens(ids, self.experts, capacity=capacity)
        weights = torch.rand(ids.shape, generator=self.generator)
        names = ("order", "inverse", "counts", "offsets")
        return dict(zip(names, bins, strict=True)), weights

    def expanded(self, t: torch.Tensor) -> torch.Tensor:
        """Perhaps an expanded tensor instead, of its first entry along some dimension."""
        if not t.is_floating_point() or 0 in t.shape or t.ndim < 2 or self.sometimes(0.9):
            return t
        dim = self.choice.randrange(t.ndim)
        return t.narrow(dim, 0, 1).expand(t.shape)

    def somewhere(self, t: torch.Tensor) -> torch.Tensor:
        """The same values, perhaps with gaps in memory, in another order, or not aligned."""
        how = self.choice.choice(("here", "here", "gaps", "order", "transposed", "behind", "part"))
        if t.ndim > 1 and 0 in t.stride():
            return t  # stays expanded
        if how == "transposed" and t.ndim > 1:
            return t.mT.contiguous().mT
        if how == "gaps":
            return t.new_zeros((*t.shape, 2))[..., 0].copy_(t)
        if how == "order":
            order = list(reversed(range(t.ndim)))
            return t.permute(order).contiguous().permute(order)
        if how == "behind":
            return t.new_zeros(t.numel() + 1)[1:].view(t.shape).copy_(t)
        if how == "part" and t.ndim > 1:
            wide = t.new_zeros((*t.shape[:-1], t.shape[-1] + 3))
            return wide[..., 1:-2].copy_(t)
        return t


def bins_of(t: dict[str, torch.Tensor]) -> mb_kernels.Bins:
    return mb_kernels.Bins(*(t.pop(n) for n in ("order", "inverse", "counts", "offsets")))


def wide(t: torch.Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)
