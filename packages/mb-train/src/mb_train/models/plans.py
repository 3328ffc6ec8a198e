"""How the models' modules are shared out under tensor parallelism: styles by module name.

A plan serves a whole model and any pipeline stage of it.
"""

from __future__ import annotations

from mb_parallel.tensor_parallel import (
    ColumnParallel,
    JoinOutput,
    Plan,
    Region,
    Replicated,
    SequenceParallel,
    Sharded,
    Style,
    VocabParallelLoss,
    block_plan,
    embedding_plan,
)
from torch import nn

from mb_train.models.bert import Bert
from mb_train.models.config import TransformerConfig

_HEAD = ColumnParallel(enter=False, unit="vocabulary")
_HEADS_BIAS = Sharded({"weight": 1})  # a column per head


def gpt_plan(config: TransformerConfig) -> Plan:
    """Of a GPT.

    Raises:
        ValueError: a norm over the width of all heads, of which no rank has more than its own.
    """
    return {
        **embedding_plan(),
        **_stack_plan("stack", config),
        "head": _HEAD,
        "": VocabParallelLoss(),
    }


def bert_plan(config: TransformerConfig) -> Plan:
    """Of a BERT, whose heads are small and need whole sequences: every rank runs them alike.

    Raises:
        ValueError: as for `gpt_plan`.
    """
    return {
        **embedding_plan(),
        **_stack_plan("stack", config),
        "bias.table": _HEADS_BIAS,
        "lm_head.*": Replicated(),
        "lm_head": Sharded({"bias": 0}),
        "pooler": Replicated(),
        "order_head": Replicated(),
        "": _BertEnd(),
    }


def t5_plan(config: TransformerConfig) -> Plan:
    """Of a T5.

    Raises:
        ValueError: as for `gpt_plan`.
    """
    return {
        **embedding_plan(),
        **_stack_plan("encoder", config),
        **_stack_plan("decoder", config),
        "encoder_bias.table": _HEADS_BIAS,
        "decoder_bias.table": _HEADS_BIAS,
        "head": _HEAD,
        "": VocabParallelLoss(bias="head_bias"),
    }


def _stack_plan(path: str, config: TransformerConfig) -> Plan:
    if config.qk_norm == "width":
        raise ValueError(
            "Expected queries and keys normed by head under tensor parallelism, got a norm over "
            "their whole width, which no rank has. Spread the model by data and expert "
            "parallelism instead."
        )
    blocks = block_plan(config.num_kv_heads, blocks=f"{path}.blocks")
    return {**blocks, f"{path}.norm": SequenceParallel()}


class _BertEnd(Style):
    """The end of a BERT's stream; a stage in the middle sends the stream on as it is."""

    def apply(self, module: nn.Module, region: Region) -> None:
        assert isinstance(module, Bert)
        if module.last:
            JoinOutput().apply(module.stack, region)
            VocabParallelLoss(whole=True).apply(module, region)

    def covers(self, module: nn.Module) -> list[nn.Module]:
        return []
