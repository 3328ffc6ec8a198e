"""Draws of ops that multiply by the experts' matrices: see test_fuzz.py.

Letters: T tokens, D hidden, F ffn width, E experts, K top-k, N rows, V vocabulary.
"""

from typing import Any

import mb_kernels
import pytest
import torch
from fuzz_dice import Dice, Draw, bins_of
from mb_kernels import is_glu, reference
from mb_kernels.activation import GLU_ACTIVATIONS, PLAIN_ACTIVATIONS
from mb_kernels.block_sparse.reference import BLOCK, Topology, make_matrix
from mb_kernels.testing import NUMBERED

ACTIVATIONS = (*GLU_ACTIVATIONS, *NUMBERED, *PLAIN_ACTIVATIONS)
GATE_OVER_UP = tuple(name for name in ACTIVATIONS if "interleaved" not in name)


class _ToHome(torch.autograd.Function):
    """x, whose gradient comes to the homes of its rows."""

    @staticmethod
    def forward(ctx, x, homes):
        ctx.homes = homes
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        assert dx.isnan().all()
        return ctx.homes.received(), None


class _FromHome(torch.autograd.Function):
    """What came home in place of what the op returns."""

    @staticmethod
    def forward(ctx, y, homes):
        assert y.isnan().all()
        return homes.received()

    @staticmethod
    def backward(ctx, dy):
        return dy, None


class Homes:
    """Memory of so many ranks, apart from each other, for rows of the tokens in ``x``."""

    def __init__(self, x: torch.Tensor, ranks: int) -> None:
        self.shape, self.rows = x.shape, x.shape[0] // ranks
        self.memory = x.new_full((ranks, self.rows + 1, x.shape[1]), 7)  # a row that nobody writes
        self.received()
        self.order = list(reversed(range(ranks)))
        self.addresses = torch.tensor(
            [self.memory[i].data_ptr() for i in self.order], device=x.device
        )

    def received(self) -> torch.Tensor:
        """Rows by token, zeros if nothing came; and all are zeros again."""
        assert (self.memory[:, self.rows :] == 7).all()
        rows = self.memory[:, : self.rows]
        came = rows.flip(0).reshape(self.shape)
        rows.zero_()
        return came


def expert_mlp(dice: Dice) -> Draw:
    bins, weights = dice.routed()
    activation = dice.choice.choice(ACTIVATIONS)
    columns = dice.ffn * (2 if is_glu(activation) else 1)
    weights = weights.to(dice.choice.choice((torch.float32, torch.float32, dice.dtype)))
    tensors = {
        "x": dice.before(activation, dice.tokens, dice.hidden),
        "w1": dice.before(activation, dice.experts, columns, dice.hidden),
        "w2": dice.normal(dice.experts, dice.hidden, dice.ffn),
        "weights": weights,
    }
    bias = dice.choice.choice((torch.float32, dice.dtype))
    if dice.sometimes(0.4):
        tensors["b1_EF"] = dice.before(activation, dice.experts, columns, dtype=bias)
    if dice.sometimes(0.4):
        tensors["b2_ED"] = dice.normal(dice.experts, dice.hidden, dtype=bias)
    options: dict[str, Any] = {"activation": activation}
    if dice.sometimes(0.3):
        options["max_rows"] = max(int(bins["offsets"][-1]) + dice.choice.randrange(3), 1)
    keeping = dice.choice.choice(("all", "all", "nothing", "8 bits", "4 bits"))
    if keeping == "nothing":
        options["recompute"] = True
    elif keeping != "all":
        options["saved_activation_bits"] = int(keeping[0])
    if dice.sometimes(0.2):
        options["x_stays"] = False  # of the op alone
    ranks = dice.choice.choice([n for n in range(1, 6) if dice.tokens % n == 0])
    away = dice.sometimes(0.25) and dice.hidden % 16 == 0

    def call(m, x, w1, w2, weights, b1_EF=None, b2_ED=None, **bins):
        given = options | {"b1_EF": b1_EF, "b2_ED": b2_ED}
        tensors = (w1, w2, bins_of(bins), weights)
        if m is mb_kernels and away:
            homes = Homes(x, ranks)
            dice.reachable[:] = [homes.memory]
            x = _ToHome.apply(x, homes)
            return _FromHome.apply(
                m.expert_mlp(x, *tensors, home_P=homes.addresses, **given), homes
            )
        if m is reference:
            given.pop("x_stays", None)
        return m.expert_mlp(x, *tensors, **given)

    leaves = tuple(n for n in tensors if dice.sometimes(0.8))
    return Draw(call, tensors | bins, leaves, {"8 bits": 1e3, "4 bits": 3e4}.get(keeping, 1.0))


def grouped(dice: Dice) -> Draw:
    bins, _ = dice.routed()
    transpose = dice.sometimes()
    shape = (dice.ffn, dice.hidden) if transpose else (dice.hidden, dice.ffn)
    tensors = {
        "x": dice.normal(bins["order"].shape[0], dice.hidden),
        "w": dice.normal(dice.experts, *shape),
        "offsets": bins["offsets"],
    }

    def call(m, x, w, offsets):
        return m.grouped_gemm(x, w, offsets, transpose_weight=transpose)

    return Draw(call, tensors, ("x", "w"))


def gmm(dice: Dice) -> Draw:
    bins, _ = dice.routed()
    sizes = bins["offsets"].diff().to(dice.choice.choice((torch.int32, torch.int64)))
    a = dice.normal(int(sizes.sum()) + dice.choice.randrange(3), dice.hidden)
    how = dice.choice.choice(("trans_a", "trans_b", ""))
    b = {
        "trans_a": (a.shape[0], dice.ffn),
        "trans_b": (dice.experts, dice.ffn, dice.hidden),
        "": (dice.experts, dice.hidden, dice.ffn),
    }[how]
    options = {how: True} if how else {}
    tensors = {"a": a, "b": dice.normal(*b), "batch_sizes": sizes}
    return Draw(lambda m, **t: m.gmm(*t.values(), **options), tensors, ("a", "b"))


def grouped_experts(dice: Dice) -> Draw:
    bins, _ = dice.routed()
    activation = dice.choice.choice(ACTIVATIONS)
    apart = is_glu(activation) and activation in GATE_OVER_UP and dice.sometimes()
    columns = dice.ffn * (2 if is_glu(activation) and not apart else 1)
    tensors = {
        "x": dice.before(activation, bins["order"].shape[0], dice.hidden),
        "tokens": bins["offsets"].diff(),
        "w1": dice.before(activation, dice.experts, columns, dice.hidden),
        "w2": dice.normal(dice.experts, dice.hidden, dice.ffn),
    }
    if apart:
        tensors["w3"] = dice.before(activation, dice.experts, dice.ffn, dice.hidden)
    leaves = tuple(n for n in tensors if n != "tokens")
    return Draw(
        lambda m, **t: m.grouped_experts(*t.values(), activation=activation), tensors, leaves, 2.0
    )


def block_sparse(dice: Dice) -> Draw:
    pytest.importorskip("stk")
    rows, columns = (dice.choice.randrange(1, 4) for _ in "RC")
    filled = torch.rand(rows, columns, generator=dice.generator) < dice.choice.random()
    r, c = filled.nonzero().unbind(1)
    order = (c * rows + r).argsort()
    spare = r.new_zeros(dice.choice.randrange(2))  # blocks of storage that nobody uses
    none = r.new_zeros(1)
    kind = dice.choice.choice((torch.int16, torch.int32))
    indices = Topology(
        *(torch.cat([i, spare]).to(kind) for i in (r, c)),
        *(torch.cat([none, filled.sum(d).cumsum(0)]).int() for d in (1, 0)),
        torch.cat([r[order], spare]).to(kind),
        torch.cat([order, spare]).int(),
    )
    size, transposed = (rows * BLOCK, columns * BLOCK), dice.sometimes()
    data = dice.normal(len(r) + len(spare), BLOCK, BLOCK)
    data[len(r) :] = 0
    above, across = reversed(size) if transposed else size
    width = dice.choice.choice((dice.hidden, dice.choice.randrange(1, 50)))
    what = dice.choice.choice(("sdd", "dsd", "dds"))

    def dense(tall: int, wide: int, stacked: int) -> torch.Tensor:
        """Perhaps a stack of matrices of a block each, along dimension ``stacked``."""
        if stacked is None or dice.sometimes(0.7):
            return dice.normal(tall, wide)
        parts = (tall if stacked == 0 else wide) // BLOCK
        return dice.normal(parts, *((BLOCK, wide) if stacked == 0 else (tall, BLOCK)))

    tensors = {
        "sdd": lambda: {"a": dense(above, width, 0), "b": dense(width, across, 1)},
        "dsd": lambda: {"data": data, "b": dense(across, width, 0)},
        "dds": lambda: {"a": dense(width, above, None), "data": data},
    }[what]()

    def call(m, a=None, b=None, data=None, **indices):
        if what == "sdd":
            data = a.new_zeros(1, 1, 1).expand(indices["rows"].numel(), BLOCK, BLOCK)
        topology = Topology(*indices.values())
        matrix = make_matrix(size, data, topology)
        matrix = matrix.t() if transposed else matrix
        if what == "sdd":
            return m.sdd(a, b, matrix).data
        return m.dsd(matrix, b) if what == "dsd" else m.dds(a, matrix)

    names = ("rows", "columns", "offsets", "offsets_t", "rows_t", "order_t")
    return Draw(call, tensors | dict(zip(names, indices, strict=True)), tuple(tensors))


def sparse_expert_mlp(dice: Dice) -> Draw:
    pytest.importorskip("stk")
    dice.experts = min(dice.experts, 3)
    dice.top_k = min(dice.top_k, dice.experts)
    bins, weights = dice.routed()
    activation, recompute = dice.choice.choice(GATE_OVER_UP), dice.sometimes()
    ffn = BLOCK * dice.choice.choice((1, 1, 2))
    columns = ffn * (2 if is_glu(activation) else 1)
    tensors = {
        "x": dice.before(activation, dice.tokens, dice.hidden),
        "w1": dice.before(activation, dice.experts, columns, dice.hidden),
        "w2": dice.normal(dice.experts, dice.hidden, ffn),
        "weights": weights,
    }

    def call(m, x, w1, w2, weights, **bins):
        options = {"activation": activation} | ({"recompute": True} if recompute else {})
        return m.sparse_expert_mlp(x, w1, w2, bins_of(bins), weights, **options)

    return Draw(call, tensors | bins, tuple(tensors), 2.0)
