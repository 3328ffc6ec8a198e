"""Fields that say how positions enter a model, and how rotations are slowed for longer texts."""

from __future__ import annotations

from dataclasses import dataclass

from mb_train.config.field import AT_LEAST_0, GIVEN, IS_0_OR_1, NOT_1, POSITIVE, SHARE, flag

_YARN = ("rotary_scaling_factor", NOT_1)


@dataclass(frozen=True, kw_only=True)
class PositionFields:
    """Learned positions, rotations, distances."""

    position_embedding_type: str = flag(
        "how positions enter: a learned table, rotations of queries and keys, T5's bias by "
        "distance, or not", "learned", choices=("learned", "rope", "relative", "none"),
        on_load="model", said_as={"learned_absolute": "learned"},
    )  # fmt: skip
    max_position_embeddings: int | None = flag(
        "longest sequence, rows of learned positions; default the sequence length",
        bounds=POSITIVE, on_load="model", in_force="position_rows",
    )  # fmt: skip
    rotary_base: float = flag(
        "base of the rotary frequencies", 10_000.0, bounds=POSITIVE, on_load="said",
        needs=("position_embedding_type", "rope"),
    )  # fmt: skip
    rotary_base_local: float | None = flag(
        "base of the rotary frequencies of layers with a window, which are then not slowed, as "
        "OLMo 3; default they turn as the others (ours)", bounds=POSITIVE, on_load="said",
        in_force="local_base", needs=("window_size", GIVEN),
    )  # fmt: skip
    rotary_percent: float = flag(
        "share of a head's width that is rotated", 1.0, bounds=SHARE, on_load="said",
        needs=("position_embedding_type", "rope"),
    )  # fmt: skip
    rope_layers: list[int] | None = flag(  # noqa: RUF009, a field like the others
        "1 for each layer with positions and 0 for each without, in place of --no-rope-freq (ours)",
        bounds=IS_0_OR_1, on_load="said", in_force="unrotated", instead_of=("no_rope_freq",),
        needs=("position_embedding_type", "rope"),
    )  # fmt: skip
    no_rope_freq: int | None = flag(
        "every n-th layer has no positions; default all have them", bounds=POSITIVE,
        on_load="said", in_force="unrotated", instead_of=("rope_layers",),
        needs=("position_embedding_type", "rope"),
    )  # fmt: skip
    rotary_seq_len_interpolation_factor: float | None = flag(
        "slow all rotary frequencies by this, for sequences so many times longer", bounds=POSITIVE,
        on_load="said", in_force="rope_scaling", instead_of=("use_rope_scaling", "rope_type"),
    )  # fmt: skip
    use_rope_scaling: bool = flag(
        "slow the rotary frequencies that turn seldom within 8192 tokens, as Llama 3.1", False,
        on_load="said", in_force="rope_scaling",
        instead_of=("rotary_seq_len_interpolation_factor", "rope_type"),
    )  # fmt: skip
    rope_scaling_factor: float = flag(
        "by how much, with --use-rope-scaling: 8 in Llama 3.1, 32 in 3.2", 8.0, bounds=POSITIVE,
        on_load="said", in_force="rope_scaling", needs=("use_rope_scaling",),
    )  # fmt: skip
    rope_type: str | None = flag(
        "slow rotary frequencies as YaRN by --rotary-scaling-factor, as LongRoPE by "
        "--rotary-factors (ours), or not; default yarn with --multi-latent-attention, else rope",
        choices=("rope", "yarn", "longrope"), on_load="said", in_force="rope_scaling",
        instead_of=("use_rope_scaling", "rotary_seq_len_interpolation_factor"),
    )  # fmt: skip
    rotary_scaling_factor: float = flag(
        "by how much YaRN slows those that turn seldom within the length trained on, for texts so "
        "many times longer; 1 changes nothing", 1.0, bounds=POSITIVE, on_load="said",
        in_force="rope_scaling", needs=(("multi_latent_attention", "rope_type"),),
    )  # fmt: skip
    rotary_factors: list[float] | None = flag(  # noqa: RUF009, a field like the others
        "LongRoPE: by how much to slow each rotary frequency (ours)", bounds=POSITIVE,
        on_load="said", in_force="rope_scaling", needs=("rope_type", "longrope"),
    )  # fmt: skip
    original_max_position_embeddings: int = flag(
        "YaRN: the length trained on (ours)", 4096, bounds=POSITIVE, on_load="said",
        in_force="rope_scaling", needs=_YARN,
    )  # fmt: skip
    beta_fast: float = flag(
        "YaRN: turns within that length from which on a frequency is not slowed (ours)", 32.0,
        bounds=POSITIVE, on_load="said", in_force="rope_scaling", needs=_YARN,
    )  # fmt: skip
    beta_slow: float = flag(
        "YaRN: turns up to which it is slowed by the whole factor (ours)", 1.0, bounds=POSITIVE,
        on_load="said", in_force="rope_scaling", needs=_YARN,
    )  # fmt: skip
    yarn_truncate: bool = flag(
        "YaRN: move these two bounds to whole frequencies; GPT-OSS does not (ours)", True,
        on_load="said", in_force="rope_scaling", needs=_YARN,
    )  # fmt: skip
    mscale: float = flag(
        "YaRN: how much sharper the rotated part of queries and keys makes attention; LongRoPE: "
        "what that part is multiplied by", 1.0, bounds=AT_LEAST_0, on_load="said",
        in_force="rope_scaling", needs=(("rotary_scaling_factor", "rotary_factors"), NOT_1),
    )  # fmt: skip
    mscale_all_dim: float = flag(
        "YaRN: the same of all of them, in latent attention; the rotated part has the quotient",
        0.0, bounds=AT_LEAST_0, on_load="said", in_force="rope_scaling", needs=_YARN,
    )  # fmt: skip
