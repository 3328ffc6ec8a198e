"""How the models' modules are shared out under tensor parallelism: styles by module name.

A plan serves a whole model and any pipeline stage of it.
"""

from __future__ import annotations

from collections.abc import Callable

from mb_parallel.tensor_parallel import (
    ColumnParallel,
    JoinOutput,
    PartialGradients,
    Plan,
    Region,
    Replicated,
    SequenceParallel,
    Sharded,
    SplitNorm,
    Style,
    VocabParallelLoss,
    block_plan,
    convolution_plan,
    delta_plan,
    embedding_plan,
    mamba_plan,
)
from torch import nn

from mb_train.models.bert import Bert
from mb_train.models.config import TransformerConfig

_HEAD = ColumnParallel(enter=False, unit="vocabulary")
_HEADS_BIAS = Sharded({"weight": 1})  # a column per head


def gpt_plan(config: TransformerConfig) -> Plan:
    """Of a GPT."""
    return {
        **embedding_plan(),
        **_stack_plan("stack", config),
        **_stack_plan("mtp.*.stack", config),
        **dict.fromkeys(("mtp.*.enorm", "mtp.*.hnorm", "mtp.*.eh_proj"), SequenceParallel()),
        "head": _HEAD,
        "": VocabParallelLoss(bias="head_bias"),
    }


def bert_plan(config: TransformerConfig, *, bert: str = "") -> Plan:
    """Of a BERT, whose heads are small and need whole sequences: every rank runs them alike.

    Args:
        bert: path of it in the model.
    """
    within = f"{bert}." if bert else ""
    return {
        **embedding_plan(f"{within}embedding"),
        **_stack_plan(f"{within}stack", config),
        f"{within}bias.table": _HEADS_BIAS,
        f"{within}lm_head.*": Replicated(),
        f"{within}lm_head": Sharded({"bias": 0}),
        f"{within}pooler": Replicated(),
        f"{within}order_head": Replicated(),
        bert: _BertEnd(),
    }


def classifier_plan(config: TransformerConfig) -> Plan:
    """Of a classifier on a BERT."""
    return {**bert_plan(config, bert="bert"), "head": Replicated()}


def ict_plan(config: TransformerConfig) -> Plan:
    """Of a retriever's towers."""
    plan: dict[str, Style | Callable[[nn.Module], Style]] = {}
    for tower in ("query", "block"):
        plan |= bert_plan(config, bert=f"{tower}.bert")
        plan[f"{tower}.projection"] = Replicated()
    return plan


def t5_plan(config: TransformerConfig) -> Plan:
    """Of a T5."""
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
    over_width = config.qk_norm == "width"
    qk_norm = SplitNorm(rms=config.norm == "rmsnorm") if over_width else PartialGradients()
    states = {} if config.delta is None else delta_plan(config.delta.key_heads)
    if config.mamba is not None:
        states = mamba_plan(config.mamba.heads, config.mamba.groups)
    if config.conv_taps is not None:
        states = {**states, **convolution_plan(config.num_heads)}
    sizes = {} if config.latent is not None else {"num_heads": config.num_heads,
                                                  "head_size": config.head_size}  # fmt: skip
    blocks = block_plan(
        config.num_kv_heads, **sizes, blocks=f"{path}.blocks", qk_norm=qk_norm, states=states
    )
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
