"""Plans for the parts of a transformer in this library's names, for GPT, BERT and T5 alike.

    blocks.N.{norm_1, norm_cross, norm_2, dropout}                 in the stream
    blocks.N.attention, which may have a parameter `sinks` [heads]
    blocks.N.{attention, cross}.{qkv | q, kv, norm_q, norm_k, core, out}
    blocks.N.attention.{q_down, q_norm, q_up | q, kv_down, kv_norm, kv_up, shared_key}
    blocks.N.attention.{qkvz, ba, conv, gates, norm, out}
    blocks.N.attention.{xz, bc, dt, conv, conv_bc, gates, norm, out}
    blocks.N.attention.{bcx, conv, out}
    blocks.N.mlp.{gate, up, down}, or mb_layers' dMoE or MoE as blocks.N.mlp
    embedding.{tokens, positions, token_types, norm, dropout}

`core` is softmax(q k^T) v, with its dropout. A model need not have all of these parts.

The fourth line is of latent attention: maps down and norms of latents are replicated and work in
the stream, maps up are split by heads. So ranks exchange latents, which are narrow, and the key
that all heads share: `shared_key`, a module without parameters, is given it in the stream and
passes it on to the heads.

The fifth is of layers with a state (Gated DeltaNet): rows of all are ordered by key head, and
`conv` and `gates` have parameters of each channel or head, `weight` [channels, taps], and `A_log`
and `dt_bias` [heads]. `norm` is of a head, and all share it.

The sixth is of Mamba-2: rows of `xz`, `dt`, `conv` and `gates` are ordered by head, those of `bc`
and `conv_bc` by group of heads. `norm` is over the width of a group. If there is but one group,
ranks share its heads all the same: each maps to the whole of what these have in common.

The seventh is of a gated short convolution: rows of `bcx` and `conv` are ordered by head.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from mb_layers.moe import MoELayer
from torch import nn

from mb_parallel.tensor_parallel.apply import Plan
from mb_parallel.tensor_parallel.experts import ExpertLayer
from mb_parallel.tensor_parallel.split_norm import SplitNorm
from mb_parallel.tensor_parallel.styles import (
    ColumnParallel,
    DistinctRandom,
    ParallelInput,
    PartialGradients,
    RowParallel,
    SequenceParallel,
    Sharded,
    SplitSequence,
    Style,
    UnitInCommon,
)
from mb_parallel.tensor_parallel.vocabulary import VocabParallelEmbedding

_BY_HEAD = PartialGradients()
# What both kinds of layers with a state have by head.
_STATES: Plan = {
    "conv": Sharded({"weight": 0, "bias": 0}),
    "gates": Sharded({"A_log": 0, "dt_bias": 0, "D": 0}),
}


def block_plan(
    num_kv_heads: int,
    *,
    num_heads: int | None = None,
    head_size: int | None = None,
    blocks: str = "blocks",
    qk_norm: Style = _BY_HEAD,
    states: Plan | None = None,
) -> Plan:
    """The plan of a stack of transformer blocks.

    Args:
        num_kv_heads: key-value heads. Each rank gets whole ones, with their query heads.
        num_heads, head_size: query heads, and the channels of a head, so that tp may also be a
            multiple of `num_kv_heads`: each rank computes attention with some of the query heads of
            a key-value head then, and gets its key and value too. `qkv` and `kv` return that of one
            group with fewer queries. Not with `SplitNorm`, nor for latent attention.
        blocks: path of the stack.
        qk_norm: of `norm_q` and `norm_k`. `SplitNorm` if these are over the width of all heads.
        states: of layers with a state: `delta_plan`, `mamba_plan`, `convolution_plan`.
    """
    heads = ColumnParallel(units=num_kv_heads, unit="key-value heads")
    grouped: Plan = dict.fromkeys(("qkv", "q", "kv"), heads)
    if num_heads is not None and head_size is not None and not isinstance(qk_norm, SplitNorm):
        per_group = num_heads // num_kv_heads
        grouped = {
            name: partial(_in_common, heads, per_group, needed, head_size)
            for name, needed in (("qkv", 2), ("q", 0), ("kv", 2))
        }
    attention: Plan = {
        **grouped,
        "norm_[qk]": qk_norm,
        "q_down": SequenceParallel(),
        "q_norm": SequenceParallel(),
        "q_up": heads,
        "kv_down": SequenceParallel(),
        "kv_norm": SequenceParallel(),
        "kv_up": heads,
        "shared_key": ParallelInput(),
        **(states or {}),
        "core": DistinctRandom(stream=False),
        "out": RowParallel(),
    }
    return {
        f"{blocks}.*.norm_*": SequenceParallel(),
        **{f"{blocks}.*.{kind}.{name}": style for kind in ("attention", "cross")
           for name, style in attention.items()},
        f"{blocks}.*.attention": _attention,
        f"{blocks}.*.dropout": DistinctRandom(),
        f"{blocks}.*.mlp": _feed_forward,
        f"{blocks}.*.mlp.gate": ColumnParallel(enter=False),
        f"{blocks}.*.mlp.up": ColumnParallel(enter=False),
        f"{blocks}.*.mlp.down": RowParallel(),
    }  # fmt: skip


def delta_plan(num_key_heads: int) -> Plan:
    """Of a layer of Gated DeltaNet, within it.

    Args:
        num_key_heads: each rank gets whole ones, with their value heads.
    """
    heads = ColumnParallel(units=num_key_heads, unit="key heads of states", enter=False)
    return {"qkvz": heads, "ba": heads, **_STATES, "norm": PartialGradients()}


def mamba_plan(num_heads: int, num_groups: int) -> Plan:
    """Of a layer of Mamba-2, within it.

    Args:
        num_heads, num_groups: each rank gets whole groups of heads, or whole heads of the only one.
    """
    if num_groups == 1:
        heads = ColumnParallel(units=num_heads, unit="heads of states", enter=False)
        common = {"bc": PartialGradients(), "conv_bc": PartialGradients()}
        return {"xz": heads, "dt": heads, **common, **_STATES, "norm": SplitNorm(rms=True)}
    groups = ColumnParallel(units=num_groups, unit="groups of states' heads", enter=False)
    return {
        **dict.fromkeys(("xz", "dt", "bc"), groups),
        "conv_bc": _STATES["conv"],
        **_STATES,
        "norm": Sharded({"weight": 0}),
    }


def convolution_plan(num_heads: int) -> Plan:
    """Of a layer of a gated short convolution, within it.

    Args:
        num_heads: into which its channels are divided; each rank gets whole ones.
    """
    return {"bcx": ColumnParallel(units=num_heads, unit="heads of channels"), **_STATES}


def embedding_plan(embedding: str = "embedding") -> Plan:
    """The plan of token embeddings and what is added to them, where the stream begins.

    Args:
        embedding: path of the module.
    """
    return {
        f"{embedding}.tokens": VocabParallelEmbedding(),
        f"{embedding}.positions": SplitSequence(),
        f"{embedding}.token_types": SplitSequence(),
        f"{embedding}.norm": SequenceParallel(),
        f"{embedding}.dropout": DistinctRandom(),
    }


def _in_common(
    style: ColumnParallel, queries: int, needed: int, head_size: int, module: nn.Module
) -> Style:
    """The same where ranks may share a group: its queries, perhaps gates, perhaps key and value."""
    assert style.units is not None
    heads = module.get_parameter("weight").shape[0] // head_size // style.units
    divided = (queries,) * ((heads - needed) // queries)
    return replace(style, common=UnitInCommon(divided, needed, head_size))


def _attention(module: nn.Module) -> Style:
    """One with a state has several maps of its input."""
    return ParallelInput() if hasattr(module, "gates") else Sharded({"sinks": 0})


def _feed_forward(module: nn.Module) -> Style:
    return ExpertLayer() if isinstance(module, MoELayer) else ParallelInput()
