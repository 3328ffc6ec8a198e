"""Fields that say how a model's tokens attend to each other."""

from __future__ import annotations

from dataclasses import dataclass

from mb_train.config.field import AT_LEAST_0, GIVEN, IS_0_OR_1, OFF, POSITIVE, flag

_DELTA = ("experimental_attention_variant",)


@dataclass(frozen=True, kw_only=True)
class AttentionFields:
    """Heads, latents, norms of queries and keys, gates, states, windows, sinks."""

    num_attention_heads: int | None = flag(
        "attention heads", bounds=POSITIVE, on_load="model", required=True
    )
    kv_channels: int | None = flag(
        "width of one head; default hidden size / heads", bounds=POSITIVE, on_load="model",
        in_force="head_size", needs=("multi_latent_attention", OFF),
    )  # fmt: skip
    group_query_attention: bool = flag(
        "share each key and value head among several query heads", False, on_load="model",
        in_force="kv_heads", instead_of=("multi_latent_attention",),
    )  # fmt: skip
    num_query_groups: int = flag(
        "key and value heads, with --group-query-attention", 1, bounds=POSITIVE, on_load="model",
        in_force="kv_heads", needs=("group_query_attention",),
    )  # fmt: skip
    multi_latent_attention: bool = flag(
        "make keys and values of a latent, as DeepSeek", False, on_load="model",
        in_force="latent_sizes", instead_of=("group_query_attention",),
    )  # fmt: skip
    q_lora_rank: int | None = flag(
        "width of the latent that queries are made of; default none, they are made of the hidden "
        "state", bounds=POSITIVE, on_load="model", in_force="latent_sizes",
        needs=("multi_latent_attention",),
    )  # fmt: skip
    kv_lora_rank: int = flag(
        "width of the latent that keys and values are made of", 32, bounds=POSITIVE,
        on_load="model", in_force="latent_sizes", needs=("multi_latent_attention",),
    )  # fmt: skip
    qk_head_dim: int = flag(
        "width of a head's query and key without the part that is rotated", 128, bounds=POSITIVE,
        on_load="model", in_force="latent_sizes", needs=("multi_latent_attention",),
    )  # fmt: skip
    qk_pos_emb_head_dim: int = flag(
        "width of the part of a head's query and key that is rotated", 64, bounds=POSITIVE,
        on_load="model", in_force="latent_sizes", needs=("multi_latent_attention",),
    )  # fmt: skip
    v_head_dim: int = flag(
        "width of a head's value", 128, bounds=POSITIVE, on_load="model",
        in_force="latent_sizes", needs=("multi_latent_attention",),
    )  # fmt: skip
    qk_layernorm: bool = flag(
        "normalise queries and keys; with --multi-latent-attention what they are made of", False,
        on_load="model",
    )  # fmt: skip
    qk_layernorm_over: str = flag(
        "normalise them over each head, over each head once positions have turned it as HunYuan, "
        "or over their whole width as OLMoE (ours)", "head",
        choices=("head", "turned-head", "width"), on_load="model", needs=("qk_layernorm",),
    )  # fmt: skip
    qk_layernorm_epsilon: float | None = flag(
        "epsilon of those norms, 1e-6 in DeepSeek; default --layernorm-epsilon (ours)",
        bounds=POSITIVE, on_load="said", in_force="qk_epsilon", needs=("qk_layernorm",),
    )  # fmt: skip
    add_qkv_bias: bool = flag(
        "biases for queries, keys and values where the other maps have none", False,
        on_load="model",
    )  # fmt: skip
    qk_l2_norm: bool = flag(
        "divide queries and keys of layers with rotary positions by the root of their mean square, "
        "as Llama 4", False, on_load="said", instead_of=("qk_layernorm",),
        needs=[("position_embedding_type", "rope"), ("multi_latent_attention", OFF)],
    )  # fmt: skip
    clip_qkv: float | None = flag(
        "clip queries, keys and values to this and its negative before positions turn them, as "
        "DBRX; default not (ours)", bounds=POSITIVE, on_load="said",
        needs=("multi_latent_attention", OFF),
    )  # fmt: skip
    attention_output_gate: bool = flag(
        "multiply what attention returns by the sigmoid of a further map of its input, as "
        "Qwen3-Next", False, on_load="model", in_force="gates",
    )  # fmt: skip
    experimental_attention_variant: str | None = flag(
        "what stands in place of attention in all layers but every n-th: a state that each token "
        "corrects and lets fade, as in Qwen3-Next", choices=("gated_delta_net",),
        said_as={"gdn": "gated_delta_net"}, also=("--linear-attention-type",), on_load="model",
        in_force="delta_sizes",
    )  # fmt: skip
    linear_attention_freq: int | None = flag(
        "every n-th layer attends beside layers with a state; default none does", bounds=POSITIVE,
        on_load="model", in_force="delta_sizes", needs=_DELTA,
    )  # fmt: skip
    linear_num_key_heads: int = flag(
        "layers with a state: heads of queries and keys", 16, bounds=POSITIVE, on_load="model",
        in_force="delta_sizes", needs=_DELTA,
    )  # fmt: skip
    linear_num_value_heads: int = flag(
        "layers with a state: heads of values, each with a state; a multiple of the former", 32,
        bounds=POSITIVE, on_load="model", in_force="delta_sizes", needs=_DELTA,
    )  # fmt: skip
    linear_key_head_dim: int = flag(
        "layers with a state: width of a head's query and key", 128, bounds=POSITIVE,
        on_load="model", in_force="delta_sizes", needs=_DELTA,
    )  # fmt: skip
    linear_value_head_dim: int = flag(
        "layers with a state: width of a head's value", 128, bounds=POSITIVE, on_load="model",
        in_force="delta_sizes", needs=_DELTA,
    )  # fmt: skip
    linear_conv_kernel_dim: int = flag(
        "layers with a state: tokens that the convolution before it sums up", 4, bounds=POSITIVE,
        on_load="model", in_force="delta_sizes", needs=_DELTA,
    )  # fmt: skip
    attention_scale: float | None = flag(
        "multiplies the attention scores, 1 in T5; default 1 / sqrt(width of a head's query), with "
        "--multi-latent-attention times what YaRN asks for (ours)",
        bounds=POSITIVE, on_load="model", also=("--softmax-scale",),
    )  # fmt: skip
    window_size: int | None = flag(
        "tokens before its own that a token sees, one less than a window holds; also as Megatron's "
        "pair, 127,0 for 127; default all", bounds=AT_LEAST_0, on_load="said", in_force="windows",
    )  # fmt: skip
    window_layers: list[int] | None = flag(  # noqa: RUF009, a field like the others
        "1 for each layer with a window and 0 for each that sees all tokens before, in place of "
        "--window-attn-skip-freq (ours)", bounds=IS_0_OR_1, on_load="said", in_force="windows",
        instead_of=("window_attn_skip_freq",), needs=("window_size", GIVEN),
    )  # fmt: skip
    window_attn_skip_freq: int | None = flag(
        "every n-th layer sees all tokens before; default none does", bounds=POSITIVE,
        on_load="said", in_force="windows", instead_of=("window_layers",),
        needs=("window_size", GIVEN),
    )  # fmt: skip
    softmax_type: str = flag(
        "of attention: with a score more in each sum, which has no value and is 0 (off-by-one) or "
        "learned by each head, a sink (learnable)", "vanilla",
        choices=("vanilla", "off-by-one", "learnable"), on_load="model", in_force="sinks",
    )  # fmt: skip
