"""Plans for transformer blocks in this library's names, for GPT, BERT and T5 alike.

blocks.N.{norm_1, norm_cross, norm_2}                   in the residual stream
blocks.N.{attention, cross}.{qkv | q, kv, norm_q, norm_k, out}
blocks.N.mlp.{gate, up, down}, or mb_layers' dMoE or MoE as blocks.N.mlp
embedding.{tokens, positions, token_types, norm}, stack.{blocks, norm}, head
"""

from __future__ import annotations

from mb_layers import MoE, dMoE
from torch import nn

from mb_parallel.tensor_parallel.apply import Plan
from mb_parallel.tensor_parallel.experts import ExpertLayer
from mb_parallel.tensor_parallel.styles import (
    ColumnParallel,
    ParallelInput,
    PartialGradients,
    RowParallel,
    SequenceParallel,
    SplitSequence,
    Style,
)
from mb_parallel.tensor_parallel.vocabulary import VocabParallelEmbedding, VocabParallelLoss


def block_plan(num_kv_heads: int, *, blocks: str = "stack.blocks") -> Plan:
    """Of a stack of transformer blocks.

    Args:
        num_kv_heads: key-value heads, of which each rank gets whole ones with their query heads.
        blocks: path of the stack.
    """
    heads = ColumnParallel(units=num_kv_heads, unit="key-value heads")
    attention: Plan = {
        "qkv": heads,
        "q": heads,
        "kv": heads,
        "norm_[qk]": PartialGradients(),
        "out": RowParallel(),
    }
    return {
        f"{blocks}.*.norm_*": SequenceParallel(),
        **{f"{blocks}.*.{kind}.{name}": style for kind in ("attention", "cross")
           for name, style in attention.items()},
        f"{blocks}.*.mlp": _feed_forward,
        f"{blocks}.*.mlp.gate": ColumnParallel(enter=False),
        f"{blocks}.*.mlp.up": ColumnParallel(enter=False),
        f"{blocks}.*.mlp.down": RowParallel(),
    }  # fmt: skip


def gpt_plan(num_kv_heads: int) -> Plan:
    """Of a whole GPT, or a pipeline stage of one: ends and blocks.

    The head is tied to the embedding or a linear map `head` without bias; the model calls its loss
    as `VocabParallelLoss` says.
    """
    return {
        "embedding.tokens": VocabParallelEmbedding(),
        "embedding.positions": SplitSequence(),
        "embedding.token_types": SplitSequence(),
        "embedding.norm": SequenceParallel(),
        **block_plan(num_kv_heads),
        "stack.norm": SequenceParallel(),
        "head": ColumnParallel(enter=False, unit="vocabulary"),
        "": VocabParallelLoss(),
    }


def _feed_forward(module: nn.Module) -> Style:
    return ExpertLayer() if isinstance(module, (MoE, dMoE)) else ParallelInput()
