"""Fields of numbers that a model multiplies by, and of those that follow from its width (μP)."""

from __future__ import annotations

from dataclasses import dataclass

from mb_train.config.field import POSITIVE, flag

_MUP = ("use_mup",)


@dataclass(frozen=True, kw_only=True)
class WidthFields:
    """Multipliers; rates, weights at the start and scores that follow from a narrower model's.

    With μP (maximal update parametrization, arXiv 2203.03466) a rate that was found for a model of
    the base's width holds for wider ones. The rules are Megatron Core's, for Adam: with m the
    hidden size over the base's,

        matrices of blocks, experts and routers begin 1 / sqrt(m) as wide as others
        theirs and an untied head's rates, and Adam's epsilon, are divided by m
        scores of tokens are divided by m, those of attention by the head's width
    """

    embedding_multiplier: float = flag(
        "multiplies what embeddings give, as in Granite (ours)", 1.0, bounds=POSITIVE,
        on_load="model", in_force="multipliers",
    )  # fmt: skip
    residual_multiplier: float = flag(
        "multiplies what attention and feed-forward add, as in Granite (ours)", 1.0,
        bounds=POSITIVE, on_load="model", in_force="multipliers",
    )  # fmt: skip
    logits_scaling: float | None = flag(
        "divides the scores of tokens, as in Granite; default 1, with --use-mup the hidden size "
        "over --mup-base-hidden-size (ours)", bounds=POSITIVE, on_load="model",
        in_force="multipliers",
    )  # fmt: skip
    use_mup: bool = flag(
        "rates and weights at the start that hold for models of any width (μP)", False,
        on_load="model", in_force="mup", in_training=True,
    )  # fmt: skip
    mup_base_hidden_size: int | None = flag(
        "hidden size of the model that rates and weights were found for; default this one's",
        bounds=POSITIVE, on_load="model", in_force="mup", in_training=True, needs=_MUP,
    )  # fmt: skip
    mup_base_head_dim: float | None = flag(
        "width of its heads, at which attention is what it is without --use-mup; default 1",
        bounds=POSITIVE, on_load="model", in_force="mup", in_training=True, needs=_MUP,
    )  # fmt: skip
    mup_attn_scale_power: float = flag(
        "power of a head's width by which the scores of attention are divided", 1.0,
        bounds=POSITIVE, on_load="model", in_force="mup", in_training=True, needs=_MUP,
    )  # fmt: skip
