"""How the models' modules are shared out under tensor parallelism: styles by module name."""

from __future__ import annotations

from mb_parallel.tensor_parallel import (
    ColumnParallel,
    Plan,
    SequenceParallel,
    SplitSequence,
    VocabParallelEmbedding,
    VocabParallelLoss,
    block_plan,
)

from mb_train.models.config import TransformerConfig


def gpt_plan(config: TransformerConfig) -> Plan:
    """Of a GPT, or of one stage of it.

    Raises:
        ValueError: a norm over the width of all heads, of which no rank has more than its own.
    """
    if config.qk_norm == "width":
        raise ValueError(
            "Expected queries and keys normed by head under tensor parallelism, got a norm over "
            "their whole width, which no rank has. Spread the model by data and expert "
            "parallelism instead."
        )
    return {
        **_embedding_plan(),
        **block_plan(config.num_kv_heads, blocks="stack.blocks"),
        "stack.norm": SequenceParallel(),
        "head": ColumnParallel(enter=False, unit="vocabulary"),
        "": VocabParallelLoss(),
    }


def _embedding_plan() -> Plan:
    return {
        "embedding.tokens": VocabParallelEmbedding(),
        "embedding.positions": SplitSequence(),
        "embedding.token_types": SplitSequence(),
    }
