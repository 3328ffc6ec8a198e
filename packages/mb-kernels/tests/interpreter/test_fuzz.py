"""Every op with arguments drawn at random, outputs and gradients against the float64 reference.

    TRITON_INTERPRET=1 python packages/mb-kernels/tests/interpreter/test_fuzz.py FIRST COUNT
    python packages/mb-kernels/tests/interpreter/test_fuzz.py FIRST COUNT cuda

runs that many seeds and prints those that fail; CI runs a few dozen. Each seed draws everything
that a user may choose: sizes (0 and 1 too), dropped slots, capacity, dtypes, activation, biases,
the bound on rows, what is saved, which inputs have gradients, memory orders, and the width of
indices. On a GPU sizes are larger, as its tiles are.

Letters: T tokens, D hidden, F ffn width, E experts, K top-k, N rows, V vocabulary.
"""

import math
import random
import sys
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import mb_kernels
import pytest
import torch
from mb_kernels import is_glu, reference
from mb_kernels.activation import GLU_ACTIVATIONS, PLAIN_ACTIVATIONS, parse
from mb_kernels.block_sparse.reference import BLOCK, Topology, make_matrix
from mb_kernels.exchange import pack_routing, unpack_routing
from mb_kernels.testing import (
    NUMBERED,
    ROUTINGS,
    TOLERANCES,
    bf16_interpreted,
    error,
    make_expert_ids,
)

ACTIVATIONS = (*GLU_ACTIVATIONS, *NUMBERED, *PLAIN_ACTIVATIONS)
GATE_OVER_UP = tuple(name for name in ACTIVATIONS if "interleaved" not in name)
SEEDS = range(28)
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


def _bins(t: dict[str, torch.Tensor]) -> mb_kernels.Bins:
    return mb_kernels.Bins(*(t.pop(n) for n in ("order", "inverse", "counts", "offsets")))


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
        tensors = (w1, w2, _bins(bins), weights)
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


def permuted(dice: Dice) -> Draw:
    bins, weights = dice.routed()
    dice.hidden = dice.choice.choice((dice.hidden, dice.choice.randrange(1, 70)))
    what = dice.choice.choice(("gather", "combine", "both", "padded"))
    rows = bins["order"].shape[0]
    tensors = {"x": dice.normal(dice.tokens, dice.hidden)}
    if what == "combine":
        tensors = {"x": dice.normal(rows, dice.hidden)}
    if what != "gather":
        tensors["weights"] = weights

    def call(m, x, weights=None, **bins):
        found = _bins(bins)
        if what == "padded":
            found = m.pad_bins(found)
        if what != "combine":
            x = m.gather(x, found, dice.top_k)
        return x if what == "gather" else m.combine(x, found, weights)

    return Draw(call, tensors | bins, tuple(tensors))


def routing(dice: Dice) -> Draw:
    k, renormalize = dice.top_k, dice.sometimes()
    logits = dice.normal(dice.tokens, dice.experts) * 4

    def call(m, logits):
        weights, ids, probs = m.topk_softmax(logits, k, renormalize=renormalize)
        return weights, probs, ids

    return Draw(call, {"logits": logits}, ("logits",))


def binning(dice: Dice) -> Draw:
    shape = (dice.tokens, dice.top_k)
    ids = torch.randint(-1, dice.experts + 1, shape, generator=dice.generator)
    ids = ids.to(dice.choice.choice((torch.int32, torch.int64)))
    capacity = dice.choice.choice((None, dice.choice.randrange(9)))
    return Draw(
        lambda m, ids: tuple(m.bin_tokens(ids, dice.experts, capacity=capacity)), {"ids": ids}
    )


def losses(dice: Dice) -> Draw:
    bins, _ = dice.routed()
    logits = dice.normal(dice.tokens, dice.experts)
    sigmoid = dice.sometimes()
    tensors = {"logits": logits, "counts": bins["counts"], "kept": bins["offsets"][-1]}
    if dice.sometimes():
        share = dice.choice.choice((0.7, 0.7, 0))
        tensors["mask_T"] = torch.rand(dice.tokens, generator=dice.generator) < share
    if dice.sometimes():
        tensors["balance_counts_E"] = bins["counts"].flip(0).clone()
    if dice.sometimes(0.3):
        tensors["num_tokens"] = torch.tensor(dice.choice.choice((0.0, 0.5, 9.0)))
    if dice.sometimes(0.3):
        tensors["slots"] = bins["counts"].sum() + 2
    weights = {"load_balancing_weight": dice.choice.random(), "z_weight": dice.choice.random()}
    function = "sigmoid" if sigmoid else "softmax"

    def call(m, logits, counts, kept, **options):
        probs = None
        if not sigmoid:
            probs = torch.softmax(logits.detach().to(_wide(logits)), 1)
        return m.router_losses(
            logits, probs, counts, kept, score_function=function, **weights, **options
        )

    return Draw(call, tensors, ("logits",))


def _wide(t: torch.Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)


def quantized(dice: Dice) -> Draw:
    bits = dice.choice.choice((4, 8))
    columns = 2 * dice.choice.randrange(1, 150)
    x = dice.normal(dice.tokens, columns)

    def call(m, x):
        return m.dequantize(*m.quantize(x, bits), bits=bits, dtype=x.dtype)

    # A value in the middle between two codes may go to either.
    return Draw(call, {"x": x}, (), {8: 1e3, 4: 3e4}[bits])


def cross_entropy(dice: Dice) -> Draw:
    vocabulary = dice.choice.randrange(2, 300)
    tensors = {
        "x": dice.normal(dice.tokens, dice.hidden),
        "weight": dice.normal(vocabulary, dice.hidden),
        "labels": torch.randint(-1, vocabulary, (dice.tokens,), generator=dice.generator),
    }
    if dice.sometimes():
        tensors["weights"] = torch.rand(dice.tokens, generator=dice.generator)
    if dice.sometimes():
        tensors["bias"] = dice.normal(vocabulary)
    ignored = dice.choice.choice((-1, -100))
    tensors["labels"] = torch.where(tensors["labels"] < 0, ignored, tensors["labels"])
    if dice.sometimes(0.1):
        tensors["labels"].fill_(ignored)
    reduction = dice.choice.choice(("mean", "sum", "none"))
    beyond = reduction == "none" and dice.sometimes()
    if beyond:
        tensors["labels"][::3] = vocabulary + dice.choice.randrange(3)

    def call(m, x, weight, labels, weights=None, bias=None):
        inside = labels.clamp(max=vocabulary - 1) if m is reference else labels
        options = {"bias_V": bias, "reduction": reduction}
        loss = m.linear_cross_entropy(x, weight, inside, weights, **options)
        if beyond:
            assert m is reference or loss[::3].isnan().all()
            loss = torch.where(labels >= vocabulary, 0, loss)
        return loss

    leaves = () if reduction == "none" else ("x", "weight", "bias")
    return Draw(call, tensors, tuple(n for n in tensors if n in leaves), 2.0)


def attention(dice: Dice) -> Draw:
    # Of a token that sees one key alone the gradient is zero, and what is rounded is all of it.
    lengths = [dice.choice.choice((0, 1, dice.choice.randrange(40))) for _ in "NN"]
    lengths.insert(dice.choice.randrange(3), dice.choice.randrange(3, 40))
    tokens, longest = sum(lengths), max(*lengths, 1) + dice.choice.choice((0, 3))
    groups, width = dice.choice.choice((1, 2)), dice.choice.choice((8, 16, 24, 40))
    heads = groups * dice.choice.choice((1, 2, 3))
    bias = dice.normal(heads, 2 * longest - 1, dtype=torch.float32)
    bias[:, : dice.choice.choice((0, 1, longest))] = -torch.inf
    tensors = {
        "q": dice.normal(tokens, heads, width),
        "k": dice.normal(tokens, groups, width),
        "v": dice.normal(tokens, groups, width),
        "bias": bias.to(dice.choice.choice((torch.float32, dice.dtype))),
        "offsets": torch.tensor([0, *lengths]).cumsum(0),
    }
    options = {"causal": dice.sometimes(), "scale": dice.choice.choice((None, 0.7))}
    leaves = tuple(n for n in tensors if n in "qkv" or (n == "bias" and dice.sometimes(0.8)))
    return Draw(lambda m, **t: m.relative_attention(*t.values(), **options), tensors, leaves, 2.0)


def travelling(dice: Dice) -> Draw:
    """To the ranks of the experts, in one process: what is packed, and what each rank unpacks."""
    part, times = (dice.choice.randrange(1, 6) for _ in "EP")
    experts, ranks = dice.choice.choice(((part * times, part), (part, part * times)))
    top_k = dice.choice.choice((dice.top_k, experts, 1))
    ids = torch.randint(-1, experts + 1, (dice.tokens, top_k), generator=dice.generator)
    came = torch.randint(0, dice.tokens + 1, (ranks,), generator=dice.generator).int()
    tensors = {
        "weights": torch.rand(ids.shape, generator=dice.generator).to(dice.dtype),
        "ids": ids.to(dice.choice.choice((torch.int32, torch.int64))),
    } | ({"came": came} if dice.sometimes() else {})

    def call(m, weights, ids, came=None):
        packed = pack_routing(weights, ids, num_experts=experts, ranks=ranks)
        words = packed.words_TW
        if came is not None:  # what did not come holds anything
            absent = torch.arange(dice.tokens, device=came.device) >= came[:, None]
            words = words.repeat(ranks, 1).masked_fill(absent.view(-1, 1), torch.nan)
        sizes = {"num_experts": experts, "ranks": ranks, "counts_P": came}
        got = [t for rank in range(ranks) for t in unpack_routing(words, rank=rank, **sizes)]
        return (*packed, *got)

    return Draw(call, tensors, ("weights",))


def muon(dice: Dice) -> Draw:
    shape = dice.choice.choice(((), (0, 4), (7,), (3, 11, 17), (2049,)))
    kinds = {"grad": dice.dtype, "buffer": torch.float32, "weight": torch.float32}
    kinds |= {"update": dice.dtype} | ({"copy": dice.half} if dice.sometimes() else {})
    tensors = {
        n: dice.normal(*(shape or (1,)), dtype=kind).view(shape) for n, kind in kinds.items()
    }
    flags = {"found_inf": torch.tensor(dice.choice.choice((0.0, 0.0, 1.0, 3.0)))}
    if flags["found_inf"]:
        tensors["grad"], tensors["update"] = (tensors[n] * torch.inf for n in ("grad", "update"))
    rates = {"momentum": dice.choice.random(), "grad_scale": torch.tensor(3.0), "dtype": dice.dtype}
    size, decay = dice.choice.random(), 0.1 * dice.choice.random()

    def call(m, grad, buffer, weight, update, copy=None):
        buffer, weight = (t.float().clone() for t in (buffer, weight))  # the twin takes no float64
        copy = None if copy is None else copy.clone()
        skip = {"found_inf": flags["found_inf"].to(grad.device)}
        scale = rates | {"grad_scale": rates["grad_scale"].to(grad.device)}
        direction = m.muon_momentum(grad, buffer, **scale, **skip)
        m.muon_step(weight, update, copy, size=size, decay=decay, **skip)
        return direction, buffer, weight, *(() if copy is None else (copy,))

    return Draw(call, tensors, anywhere=False)


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
        return m.sparse_expert_mlp(x, w1, w2, _bins(bins), weights, **options)

    return Draw(call, tensors | bins, tuple(tensors), 2.0)


def adamw(dice: Dice) -> Draw:
    pick = dice.choice.choice
    shapes = [pick(((), (0, 3), (7,), (33, 20), (1025,))) for _ in range(pick((1, 2, 5)))]
    kinds = {"weight": torch.float32, "grad": pick((torch.float32, dice.half))}
    kinds |= dict.fromkeys(("m", "v"), pick((torch.float32, torch.bfloat16)))
    kinds["copy"] = pick((None, dice.half))
    tensors = {
        f"{name} {i}": dice.normal(*shape, dtype=kind) if shape else dice.normal(1)[0].to(kind)
        for name, kind in kinds.items()
        if kind is not None
        for i, shape in enumerate(shapes)
    }
    for name in tensors:
        if name.startswith("v"):
            tensors[name] = tensors[name].square()
    hyper = {"lr": 0.1 * dice.choice.random(), "betas": pick(((0.9, 0.999), (0.8, 0.95)))}
    hyper |= {"eps": pick((1e-8, 1e-3)), "weight_decay": pick((0.0, 0.1))}
    flags = {"grad_scale": pick((1.0, 4.0)), "found_inf": pick((0.0, 0.0, 1.0, 3.0))}
    first = pick((0.0, 1000.0))

    def call(m, **given):
        lists = [
            [given[f"{name} {i}"].clone() if kind else None for i in range(len(shapes))]
            for name, kind in kinds.items()
        ]
        here = lists[0][0].device
        lists.append([torch.tensor(first + i, device=here) for i in range(len(shapes))])
        dice.reachable[:] = [t for tensors in lists for t in tensors if t is not None]
        m.adamw_step(*lists, **hyper, **{n: torch.tensor(f, device=here) for n, f in flags.items()})
        return tuple(dice.reachable)

    return Draw(call, tensors, anywhere=False)


def squares(dice: Dice) -> Draw:
    shapes = [dice.choice.choice(((), (0, 3), (7,), (33, 20), (17, 1024))) for _ in range(5)]
    kinds = (dice.dtype, dice.dtype, torch.float32, torch.float64)
    tensors = {
        f"x{i}": dice.normal(*(shape or (1,))).view(shape).to(dice.choice.choice(kinds))
        for i, shape in enumerate(shapes)
    }

    def call(m, **given):
        dice.reachable[:] = given.values()
        return m.sum_of_squares(list(given.values()))

    return Draw(call, tensors, anywhere=False)


def symmetric(dice: Dice) -> Draw:
    shape = (dice.choice.randrange(4), dice.tokens, dice.hidden)
    a = dice.normal(*shape) if dice.sometimes() else dice.normal(*shape).mT.contiguous().mT
    tensors = {"a": a}
    if dice.sometimes():
        add = dice.normal(shape[0], shape[1], shape[1])
        tensors["add"] = add + add.mT
    alpha, beta, diagonal = (dice.choice.uniform(-2, 2) for _ in range(3))
    own = {"alpha": alpha / max(shape[2], 1) ** 0.5, "beta": beta, "diagonal": diagonal}
    return Draw(lambda m, a, add=None: m.symmetric_matmul(a, a, add, **own), tensors)


OPS = (
    *((expert_mlp,) * 7),
    *(grouped, gmm, grouped_experts, permuted, permuted, routing, binning, losses, quantized),
    *(cross_entropy, block_sparse, block_sparse, sparse_expert_mlp, adamw, muon, squares),
    *(attention, travelling, symmetric),
)


def results(draw: Draw, module: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Outputs, and gradients of a fixed projection of those that have some."""
    given = {n: t.detach().requires_grad_(n in draw.leaves) for n, t in tensors.items()}
    found = draw.call(module, **given)
    found = found if isinstance(found, tuple) else (found,)
    out = {f"output {i}": t for i, t in enumerate(found)}
    if draw.leaves:
        score = sum(
            (
                t * torch.linspace(0.5, 1, t.numel(), dtype=_wide(t), device=t.device).view(t.shape)
            ).sum()
            for t in found
            if t.requires_grad
        )
        grads = torch.autograd.grad(score, [given[n] for n in draw.leaves])
        out |= {f"gradient of {n}": g for n, g in zip(draw.leaves, grads, strict=True)}
    return out


def check(seed: int, reachable: list[torch.Tensor], device: str = "cpu") -> None:
    """Raise if the op of this seed is not what its reference is, on a CPU."""
    dice = Dice(seed, reachable, device)
    op = dice.choice.choice(OPS)
    draw = op(dice)
    if draw.anywhere and op is not attention:  # among equal keys or values its gradients are zero
        draw = draw._replace(tensors={n: dice.expanded(t) for n, t in draw.tensors.items()})
    if draw.anywhere and dice.sometimes(0.2):
        longer = {n: t.long() for n, t in draw.tensors.items() if t.dtype is torch.int32}
        draw = draw._replace(tensors=draw.tensors | longer)
    scattered = {n: t.to(device) for n, t in draw.tensors.items()}
    if draw.anywhere:
        scattered = {n: dice.somewhere(t) for n, t in scattered.items()}
    got = results(draw, mb_kernels, scattered)
    exact = {n: t.double() if t.is_floating_point() else t for n, t in draw.tensors.items()}
    rounded: dict[str, torch.Tensor] = {}
    for name, want in results(draw, reference, exact).items():
        value, what = got[name].cpu(), f"{op.__name__}: {name}"
        assert value.shape == want.shape, f"{what} {value.shape}, not {want.shape}"
        if not value.is_floating_point():
            assert torch.equal(value, want.to(value.dtype)), what
            continue
        loose = dice.dtype if value.dtype is torch.float32 else value.dtype
        bound, found = draw.slack * TOLERANCES[loose], error(value, want, loose)
        if not found <= bound:
            # What nearly cancels is only as right as its terms, the reference's too.
            rounded = rounded or results(draw, reference, draw.tensors)
            bound = max(bound, 3 * error(rounded[name], want, loose))
        assert found <= bound, f"{what} off by {found:.1e}, allowed are {bound:.0e}"


@pytest.mark.parametrize("seed", SEEDS)
def test_any_arguments(seed, reachable):
    check(seed, reachable)


def main() -> None:
    first, count = (int(a) for a in sys.argv[1:3])
    failed = 0
    for seed in range(first, first + count):
        if seed > first and (seed - first) % 100 == 0:
            print(f"{seed - first} seeds, {failed} failed", flush=True)
        try:
            with bf16_interpreted():
                check(seed, [], *sys.argv[3:])
        except Exception:
            failed += 1
            print(f"seed {seed}: {traceback.format_exc().strip().splitlines()[-1]}", flush=True)
    print(f"{count} seeds, {failed} failed")


if __name__ == "__main__":
    main()
