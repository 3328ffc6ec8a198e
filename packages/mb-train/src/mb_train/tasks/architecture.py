"""From the flags of a run to what its model is built from."""

from __future__ import annotations

from mb_kernels.activation import parse
from mb_layers import MoEConfig

from mb_train.config import TrainConfig, whole
from mb_train.config.field import in_flags
from mb_train.config.toml_file import to_toml
from mb_train.models.config import (
    DeltaSizes,
    LatentSizes,
    MambaSizes,
    RopeScaling,
    TransformerConfig,
)
from mb_train.models.transformer import output_std


def transformer_config(config: TrainConfig, vocab_size: int) -> TransformerConfig:
    """The transformer of a run; of T5 the encoder's.

    Args:
        vocab_size: padded.

    Raises:
        ValueError: an activation or experts that mb_layers refuses.
    """
    layers, latent = whole(config.num_layers), config.latent_sizes
    with in_flags({"activation": "activation"}):
        parse(config.activation_name)  # or refuse
    near = tuple(map(config.has_window, range(layers)))
    turned = tuple(map(config.has_rope, range(layers)))
    with_state = tuple(map(config.has_state, range(layers)))
    learned = config.position_embedding_type == "learned"  # Megatron's T5 has that bias then
    norms_over = config.qk_layernorm_over if latent is None else "latent"
    return TransformerConfig(
        num_layers=layers,
        hidden_size=whole(config.hidden_size),
        ffn_size=config.ffn_size,
        vocab_size=vocab_size,
        num_heads=whole(config.num_attention_heads),
        num_kv_heads=config.kv_heads,
        head_size=config.head_size,
        max_positions=config.positions,
        latent=None if latent is None else LatentSizes._make(latent),
        activation=config.activation_name,
        norm=config.normalization.lower(),
        norm_eps=config.layernorm_epsilon,
        qk_norm_eps=config.qk_epsilon,
        qk_norm="l2" if config.qk_l2_norm else norms_over if config.qk_layernorm else "none",
        clip_qkv=config.clip_qkv,
        positions=config.position_embedding_type,
        rope_base=config.rotary_base,
        local_rope_base=config.local_base,
        rope_fraction=config.rotary_percent,
        rope_layers=None if config.unrotated is None else turned,
        rope_scaling=None if config.rope_scaling is None else RopeScaling(*config.rope_scaling),
        norms=config.norms,
        **_multipliers(config),
        fp32_residual=config.fp32_residual_connection,
        delta=None if config.delta_sizes is None else DeltaSizes._make(config.delta_sizes[:-1]),
        mamba=None if config.mamba_sizes is None else MambaSizes._make(config.mamba_sizes),
        conv_taps=config.conv_taps,
        pattern=config.hybrid_layer_pattern,
        delta_layers=None if config.delta_sizes is None else with_state,
        attention_scale=config.scale_of_scores,
        window=None if config.windows is None else config.window_size,
        window_layers=None if config.windows is None else near,
        output_gate=config.attention_output_gate,
        softmax=config.softmax_type,
        bias=config.add_bias_linear,
        qkv_bias=config.add_bias_linear or config.add_qkv_bias,
        head_bias=config.head_bias or (config.model == "t5" and learned),
        tie_embeddings=not config.untie_embeddings_and_output_weights,
        attention_dropout=config.attention_dropout,
        hidden_dropout=config.hidden_dropout,
        init_std=_std(config),
        output_init_std=_residual_std(config),
        ends_init_std=config.init_method_std,
        fp8=config.fp8_spares is not None,
        fp8_spares=config.fp8_spares or (0, 0),
        mtp_modules=config.mtp_num_layers,
        mtp_pattern=config.mtp_pattern,
        mtp_loss_weight=config.mtp_loss_scaling_factor,
        moe=expert_config(config),
        moe_layers=tuple(map(config.has_experts, range(layers))),
        router="noisy_topk" if config.moe_router_noise else config.moe_router_type,
    )


def checked_toml(config: TrainConfig) -> str:
    """The configuration as `--print-config` prints it, if there is a model of it.

    Raises:
        ValueError: an activation or experts that mb_layers refuses.
    """
    transformer_config(config, vocab_size=1)  # whatever it will be
    return to_toml(config)


def expert_config(config: TrainConfig) -> MoEConfig | None:
    """The experts of a run; None for a dense model.

    Raises:
        ValueError: an activation or experts that mb_layers refuses.
    """
    if config.moe_num_experts is None:
        return None
    with in_flags(config.moe_argument_names()):
        return MoEConfig(
            hidden_size=whole(config.hidden_size),
            ffn_hidden_size=config.expert_ffn_size,
            activation=config.activation_name,
            init_method_std=_std(config),
            output_init_std=_residual_std(config),
            fp8=config.fp8_format is not None,
            **config.moe_arguments(),
        )


def _multipliers(config: TrainConfig) -> dict[str, float]:
    names = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
    return dict(zip(names, config.multipliers or (1.0, 1.0, 1.0), strict=True))


def _std(config: TrainConfig) -> float:
    """Of matrices at the start: of a wider model's, with μP, the smaller."""
    return config.init_method_std / config.wider**0.5


def _residual_std(config: TrainConfig) -> float:
    halves = 1 if config.hybrid_layer_pattern is not None else 2  # of a block, that a layer has
    return output_std(_std(config), halves * whole(config.num_layers))
