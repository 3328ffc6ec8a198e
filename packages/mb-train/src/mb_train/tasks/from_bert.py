"""The BERT that another model begins from."""

from __future__ import annotations

from pathlib import Path

from mb_train.models.bert import Bert
from mb_train.models.config import TransformerConfig

_SAME = (
    "vocab_size", "max_positions", "positions", "num_layers", "hidden_size", "num_heads",
    "ffn_size", "activation", "norm", "post_norm",
)  # fmt: skip


def trained_bert(run: str, wanted: TransformerConfig) -> Bert:
    """The BERT of a run (`--bert-load`).

    Raises:
        ValueError: no BERT there, or one of other sizes than `wanted`.
    """
    from mb_train.loading import load_trained  # which makes models by tasks

    trained = load_trained(Path(run), kinds=("bert",))
    found = trained.model.config
    for name, here, there in (
        *((name, getattr(wanted, name), getattr(found, name)) for name in _SAME),
        ("experts", _experts(wanted), _experts(found)),
    ):
        if here != there:
            raise ValueError(
                f"Expected a BERT of this model's {name}, {here}, in {run} (--bert-load), got "
                f"{there}."
            )
    return trained.model


def _experts(config: TransformerConfig) -> tuple[int, int] | None:
    """How many, and their width; how they are trained is the run's own matter."""
    moe = config.moe
    return None if moe is None else (moe.num_experts, moe.ffn_hidden_size)
