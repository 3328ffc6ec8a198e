"""Context parallelism: each rank of a group holds a part of every sequence.

Norms, maps, experts and losses compute token by token and do not notice. Attention does: before it
the ranks exchange parts of sequences for shares of the heads, and after it they exchange them back
(DeepSpeed-Ulysses, arXiv 2309.14509; Megatron Core's `--cp-comm-type a2a`).

    of 4 heads of 6 tokens, rank 0 of 2 holds      and computes attention with

         a b c d e f                                    a b c d e f
      0  x x x                                       0  x x x x x x
      1  x x x                                       1  x x x x x x
      2  x x x                                       2
      3  x x x                                       3

So a core sees whole sequences, and any kernel serves, with any mask. Every rank computes as much as
every other, causal or not. Queries, keys and values travel in one message.

Where ranks are more than key-value heads, or cut across the queries of one, keys and values are
repeated before they travel: each rank is sent those that its queries need.

Shapes do not tell heads from a sequence. So in its first call a core is tried on numbers of ours: a
head's output must not depend on the values of another head, nor of another sequence, as it does in
a core of [B, H, S, C] or [S, B, H, C]; nor on the number of the head, which another rank counts
otherwise.

What is computed with states in place of attention (Gated DeltaNet, Mamba-2) is exchanged alike, by
head, in front of its convolution.

Letters: B sequences, S tokens of a sequence, s of a rank's part of it, H query heads, G key-value
heads, C width of a head, V of its value, P ranks, h heads of each, W all that a rank is sent of a
token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mb_parallel.arguments import several
from mb_parallel.forwards import wrap_forward
from mb_parallel.mesh import ParallelMesh, check_mesh
from mb_parallel.tensor_parallel.collectives import exchange
from mb_parallel.world import check_same

_GROUP = "_mb_context_group"
_SINKS, _WEIGHTS = "sinks_H", "weights"


def parallelize_context(cores: Iterable[nn.Module], mesh: ParallelMesh) -> int:
    """Let attention cores see whole sequences of which each cp rank holds a part, in place.

    A core is called with q [B, s, H, C], k [B, s, G, C] and v [B, s, G, V] by position, and with
    whatever else, and returns y [B, s, H, V]; it is without weights. It gets [B, S, ...] of some of
    the heads instead, and of `sinks_H`, if it is given that by name, a number for each head, those
    of its heads. What else it is given, such as a mask, is of the whole sequences, and alike for
    all heads. The ranks draw different random numbers already, as data-parallel ranks do.

    A core with states is called with three tensors [B, s, heads, ...], and by name with `weights`,
    a tuple of tensors [heads, ...], of which it gets its heads' too. The first has as many heads as
    each of the others, or a multiple. What it returns may have several heads for each of these, one
    behind the other.

    Call it after `parallelize_tensors` and `apply_recompute`, which is to keep what was exchanged,
    and before compilation and `apply_data_parallel`. Everything else of the model works token by
    token on its part, with positions of the whole, and the losses of the ranks have to add up.

    Args:
        cores: every attention core of the model, and every core with states.
        mesh: from `ParallelDims.build`; nothing is done where cp is 1.

    Returns:
        How many cores exchange heads now.

    Raises:
        ValueError: one module for several, one that exchanges heads already, another mesh. In a
            core's forward: a number of query heads that cp, or the number of key-value heads, does
            not divide, or of a state's heads alike; in the first one, if it is not compiled,
            tensors whose dimensions are others than these, or whose sizes differ between the ranks,
            or heads that differ by their number.
    """
    chosen = list(dict.fromkeys(several(cores, "cores")))
    check_mesh(mesh)
    cp = mesh.axis("cp")
    if cp is None:
        return 0
    for core in chosen:
        if hasattr(core, _GROUP):
            raise ValueError(
                f"Expected attention cores that exchange no heads yet, got a {type(core).__name__} "
                "that does. Call parallelize_context once."
            )
    for core in chosen:
        setattr(core, _GROUP, _Group(cp.get_group()))
        wrap_forward(core, _over_whole_sequences)
    return len(chosen)


class _Group:
    """A process group on a module, of which copies of a model have the same.

    Attributes:
        tried: whether a call has shown that the ranks' parts are of equal sizes, and the module
            one that computes heads and sequences apart.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.tried = False

    def __deepcopy__(self, memo: Any) -> _Group:
        return self


def _over_whole_sequences(
    core: nn.Module,
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    held = getattr(core, _GROUP)
    group = held.group
    parts, rest = args[:3], args[3:]
    states = _WEIGHTS in kwargs
    _refuse_other_calls(core, parts, states=states)
    first = not (held.tried or torch.compiler.is_compiling() or parts[0].is_meta)
    if first:
        sizes = [(list(x.shape), x.dtype) for x in parts]
        check_same(sizes, f"the parts that {type(core).__name__} is given", group=group)
    whole = heads_for_parts(parts, group)
    if kwargs.get(_SINKS) is not None:
        kwargs[_SINKS] = _own_heads(kwargs[_SINKS], group)
    if states:
        kwargs[_WEIGHTS] = tuple(_own_heads(weight, group) for weight in kwargs[_WEIGHTS])
    if first and not states:
        _refuse_other_dimensions(core, forward, whole, *rest, **kwargs)
    held.tried |= first
    y_BShV = forward(*whole, *rest, **kwargs)
    if not isinstance(y_BShV, Tensor):
        raise ValueError(
            f"Expected a core to return one tensor, got {type(y_BShV).__name__} from "
            f"{type(core).__name__}. Let a module of its own compute that tensor."
        )
    return parts_for_heads(y_BShV, group)


def _refuse_other_calls(core: nn.Module, parts: Sequence[Any], *, states: bool) -> None:
    """Raise ValueError for a module that is not called as a core is, such as a whole layer."""
    shapes = [list(x.shape) for x in parts if isinstance(x, Tensor)]
    if len(shapes) < 3 or any(len(shape) != 4 for shape in shapes if not states):
        raise ValueError(
            "Expected a core called with queries, keys and values [B, S, heads, width] by "
            f"position, got {type(core).__name__} called with tensors {shapes}. Pass the module "
            "that computes attention between the projections."
        )


@torch.no_grad()
def _refuse_other_dimensions(
    core: nn.Module,
    forward: Callable[..., Any],
    whole: Sequence[Tensor],
    *rest: Any,
    **kwargs: Any,
) -> None:
    """Raise ValueError for a core that does not compute heads of sequences alike and one by one.

    It is called with numbers that are the same for all heads and sequences, and then with the
    values of all others than the last group of the last sequence negated.
    """
    q_BShC, k_BSgC, v_BSgV = whole
    groups, group = max(k_BSgC.shape[2], 2), q_BShC.shape[2] // k_BSgC.shape[2]
    if (sinks_h := kwargs.get(_SINKS)) is not None:
        kwargs[_SINKS] = sinks_h.new_zeros(groups * group)
    queries, keys, values = (
        x.new_ones(*x.shape[:2], heads, x.shape[3])
        for x, heads in ((q_BShC, groups * group), (k_BSgC, groups), (v_BSgV, groups))
    )
    values *= torch.linspace(0.5, 1.0, values.shape[1], device=values.device)[:, None, None]
    negated = -values
    negated[-1:, :, -1] *= -1

    def computed(values: Tensor, *, others: bool = False) -> Tensor:
        """By the same random numbers as every time, or by others."""
        with torch.random.fork_rng([values.device] if values.is_cuda else []):
            if others:
                torch.rand(1, device=values.device)
            return forward(queries, keys, values, *rest, **kwargs).unflatten(2, (groups, group))

    try:
        y, of_negated, again = computed(values), computed(negated), computed(values, others=True)
    except Exception:  # it returns no tensor, say, of which the call itself tells
        return
    if _differ(y[-1:, :, -1], of_negated[-1:, :, -1]):
        raise ValueError(
            "Expected a core of [B, S, heads, width] that computes each head of each sequence by "
            f"itself, got {type(core).__name__}, in which values of others reach it. Of a core of "
            "[B, heads, S, width] transpose what it is given and what it returns."
        )
    if _differ(y, y[:, :, :1]) and not _differ(y, again):  # which dropout does
        raise ValueError(
            f"Expected a core that computes all heads alike, got {type(core).__name__}, in which "
            "they differ by their number, and a rank has some of them. Give it what is a head's "
            "own, such as the slopes of ALiBi, by name as sinks_H, of all heads."
        )


def _differ(a: Tensor, b: Tensor) -> bool:
    """Whether numbers of about 1 do by more than rounding."""
    return bool(((a - b).abs() > 0.02).any())


def _own_heads(weight: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's of a number, or more, for each head."""
    return _by_rank(weight, 0, group.size()).select(0, group.rank())


def _by_rank(x: Tensor, dim: int, ranks: int) -> Tensor:
    """Heads along a dimension as [ranks, heads of each], repeated if they are too few for that."""
    repeats = math.lcm(x.shape[dim], ranks) // x.shape[dim]
    x = x if repeats == 1 else x.repeat_interleave(repeats, dim=dim)
    return x.unflatten(dim, (ranks, -1))


def heads_for_parts(qkv: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """Of all heads of a part, [B, s, H, C]: this rank's of the whole sequences, [B, S, H / P, C].

    Tensors of one dtype travel in one message.

    Args:
        qkv: queries, keys and values, or what a core with states is given; the latter two of fewer
            heads, perhaps, and repeated then as often as it takes that each rank is sent whole
            ones.

    Raises:
        ValueError: a number of query heads that the ranks or the key-value heads do not divide.
    """
    ranks, counts = group.size(), [x.shape[2] for x in qkv]
    heads, groups = counts[0], counts[1]
    if heads % ranks or any(heads % count for count in counts):
        raise ValueError(
            f"Expected cp = {ranks} and the {groups} key-value heads to divide the {heads} heads "
            "of a rank, for each computes with whole ones. Choose a smaller cp, or spread the rest "
            "over pipeline stages or by sequence parallelism."
        )
    parts = [_by_rank(x, 2, ranks) for x in qkv]
    whole = list(parts)
    for dtype in dict.fromkeys(x.dtype for x in parts):
        alike = [i for i, x in enumerate(parts) if x.dtype == dtype]
        for i, x in zip(alike, _exchanged([parts[i] for i in alike], group), strict=True):
            whole[i] = x
    return whole


def _exchanged(parts: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """Each [B, s, P, h, ...] for [B, S, h, ...], in one message."""
    sizes = [x.shape[3:] for x in parts]
    sent_PBsW = torch.cat([x.flatten(3).movedim(2, 0) for x in parts], dim=3)
    whole_BSW = exchange(sent_PBsW, group).movedim(0, 1).flatten(1, 2)
    split = whole_BSW.split([math.prod(size) for size in sizes], dim=2)
    return [x.unflatten(2, size) for x, size in zip(split, sizes, strict=True)]


def parts_for_heads(y_BSHV: Tensor, group: ProcessGroup) -> Tensor:
    """The reverse: of this rank's heads, [B, S, H / P, V], all heads of its part, [B, s, H, V]."""
    sent_PBsHV = y_BSHV.unflatten(1, (group.size(), -1)).movedim(1, 0)
    return exchange(sent_PBsHV, group).movedim(0, 2).flatten(2, 3)
