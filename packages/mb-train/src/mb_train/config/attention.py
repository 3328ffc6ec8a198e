"""What does not go together of a model's attention: latents, slowed rotations, windows, sinks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mb_train.config.model import ModelFields


def check_latent(config: ModelFields) -> None:
    """Raise ValueError for what has no meaning beside --multi-latent-attention."""
    if not config.multi_latent_attention:
        return
    of_rotated = config.qk_pos_emb_head_dim
    settings = {
        "--model gpt": (config.model == "gpt", config.model),
        "no --group-query-attention": (
            not config.group_query_attention,
            "both: every head has a key and a value of its own",
        ),
        "--position-embedding-type rope": (
            config.position_embedding_type == "rope",
            config.position_embedding_type,
        ),
        "--rotary-percent 1": (
            config.rotary_percent == 1,
            f"{config.rotary_percent}: --qk-pos-emb-head-dim says how much is rotated",
        ),
        "an even --qk-pos-emb-head-dim": (
            of_rotated % 2 == 0,
            f"{of_rotated}: rotations are of pairs",
        ),
        "no --add-qkv-bias": (
            not config.add_qkv_bias,
            "both: of its maps only the last can have a bias, see --add-bias-linear",
        ),
        "no --qk-layernorm-over": (
            config.qk_layernorm_over == "head",
            f"{config.qk_layernorm_over}: its --qk-layernorm is over the latents",
        ),
        "no --window-size": (config.window_size is None, f"both: {config.window_size}"),
        "--softmax-type vanilla": (config.softmax_type == "vanilla", config.softmax_type),
    }
    for wanted, (fits, found) in settings.items():
        if not fits:
            raise ValueError(
                f"Expected {wanted} with --multi-latent-attention, got {found}. Change one, or "
                "leave one out."
            )


def check_slowing(config: ModelFields) -> None:
    """Raise ValueError for rotations that are slowed in two ways, or in none that works."""
    linear, by_yarn = config.rotary_seq_len_interpolation_factor, config.rotary_scaling_factor
    if config.use_rope_scaling and linear is not None:
        raise ValueError(
            "Expected --use-rope-scaling or --rotary-seq-len-interpolation-factor, got both."
        )
    others = {
        "--use-rope-scaling": config.use_rope_scaling,
        # One of 1 is what scripts have that slow nothing.
        f"--rotary-seq-len-interpolation-factor {linear}": linear not in (None, 1),
    }
    own = {
        "--rope-type yarn": config.rope_type == "yarn",
        # Core's own latent attention passes over the other ways.
        "--multi-latent-attention": config.multi_latent_attention,
    }
    for other in (words for words, given in others.items() if given):
        for words in (words for words, given in own.items() if given):
            raise ValueError(
                f"Expected --rotary-scaling-factor to slow rotations with {words}, got {other}."
            )
    if config.rope_type == "rope" and by_yarn != 1:
        raise ValueError(
            f"Expected --rope-type yarn with --rotary-scaling-factor {by_yarn}, got rope, whose "
            "rotations it does not slow. Leave one of the two out."
        )
    if config.rope_scaling is None:
        return
    if config.position_embedding_type != "rope":
        raise ValueError(
            "Expected --position-embedding-type rope with slowed rotations, got "
            f"{config.position_embedding_type}."
        )
    if config.rope_scaling[0] != "yarn":
        return
    if config.beta_fast < config.beta_slow:  # Kimi-K2 has 1 and 1
        raise ValueError(
            f"Expected --beta-fast of at least --beta-slow, got {config.beta_fast} and "
            f"{config.beta_slow}."
        )
    if config.rotary_base <= 1:
        raise ValueError(f"Expected --rotary-base above 1 with YaRN, got {config.rotary_base}.")


def check_softmax(config: ModelFields) -> None:
    """Raise ValueError for a window or sinks in a model that also sees tokens to come."""
    settings = {
        f"--window-size {config.window_size}": config.window_size is not None,
        f"--softmax-type {config.softmax_type}": config.softmax_type != "vanilla",
    }
    for words in (words for words, given in settings.items() if given and config.model != "gpt"):
        raise ValueError(f"Expected --model gpt with {words}, got {config.model}.")
