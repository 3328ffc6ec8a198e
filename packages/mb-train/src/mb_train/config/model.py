"""Fields that say what the model is: its sizes, its options, its experts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from mb_train.config.field import (
    AT_LEAST_0,
    FRACTION,
    POSITIVE,
    SHARE,
    flag,
    spec,
    whole,
)

_GATED = ("swiglu", "geglu", "geglu_tanh", "reglu")


@dataclass(frozen=True, kw_only=True)
class ModelFields:
    """Sizes and options of the network."""

    model: str = flag(
        "what to train (ours)", "gpt", choices=("gpt", "bert", "t5", "ict"), on_load="model"
    )
    num_layers: int | None = flag(
        "transformer layers; of the encoder, where there is a decoder too", bounds=POSITIVE,
        on_load="model", also=("--encoder-num-layers",), required=True
    )  # fmt: skip
    decoder_num_layers: int | None = flag(
        "layers of T5's decoder; default as many as the encoder's", bounds=POSITIVE,
        on_load="model", in_force="decoder_layers",
    )  # fmt: skip
    hidden_size: int | None = flag(
        "width of the residual stream", bounds=POSITIVE, on_load="model", required=True
    )
    ffn_hidden_size: int | None = flag(
        "width inside a feed-forward; default 4 x hidden size", bounds=POSITIVE, on_load="model",
        in_force="ffn_size",
    )  # fmt: skip
    num_attention_heads: int | None = flag(
        "attention heads", bounds=POSITIVE, on_load="model", required=True
    )
    kv_channels: int | None = flag(
        "width of one head; default hidden size / heads", bounds=POSITIVE, on_load="model",
        in_force="head_size",
    )  # fmt: skip
    group_query_attention: bool = flag(
        "share each key and value head among several query heads", False, on_load="model",
        in_force="kv_heads",
    )  # fmt: skip
    num_query_groups: int = flag(
        "key and value heads, with --group-query-attention", 1, bounds=POSITIVE, on_load="model",
        in_force="kv_heads",
    )  # fmt: skip
    max_position_embeddings: int | None = flag(
        "learned positions; default the sequence length", bounds=POSITIVE, on_load="model",
        in_force="positions",
    )  # fmt: skip
    position_embedding_type: str = flag(
        "how positions enter: a learned table, rotations of queries and keys, T5's bias by "
        "distance, or not", "learned", choices=("learned", "rope", "relative", "none"),
        on_load="model",
    )  # fmt: skip
    rotary_base: float = flag(
        "base of the rotary frequencies", 10_000.0, bounds=POSITIVE, on_load="said"
    )
    rotary_percent: float = flag(
        "share of a head's width that is rotated", 1.0, bounds=SHARE, on_load="said"
    )
    make_vocab_size_divisible_by: int = flag(
        "pad the vocabulary to a multiple of this x tensor parallel size", 128, bounds=POSITIVE,
        on_load="free",
    )  # fmt: skip
    untie_embeddings_and_output_weights: bool = flag(
        "give the head weights of its own", False, on_load="model"
    )
    normalization: str = flag(
        "kind of the norms", "LayerNorm", choices=("LayerNorm", "RMSNorm"), on_load="model"
    )
    layernorm_epsilon: float = flag(
        "epsilon of the norms", 1e-5, bounds=POSITIVE, on_load="said", also=("--norm-epsilon",)
    )
    qk_layernorm: bool = flag("normalise queries and keys", False, on_load="model")
    qk_layernorm_over: str = flag(
        "normalise them over each head, or over their whole width as OLMoE (ours)", "head",
        choices=("head", "width"), on_load="model",
    )  # fmt: skip
    add_bias_linear: bool = flag(
        "biases in the linear maps", True, on_load="model", off=("--disable-bias-linear",)
    )
    add_qkv_bias: bool = flag(
        "biases for queries, keys and values where the other maps have none", False,
        on_load="model",
    )  # fmt: skip
    glu: bool = flag(
        "gate the feed-forward: two up projections instead of one", False, on_load="model",
        in_force="activation_name",
    )  # fmt: skip
    swiglu: bool = flag(
        "gate the feed-forward with SiLU",
        False,
        on_load="model",
        in_force="activation_name",
        instead_of=("activation", "squared_relu"),
    )
    squared_relu: bool = flag(
        "squared ReLU in the feed-forward",
        False,
        on_load="model",
        in_force="activation_name",
        instead_of=("activation", "swiglu", "glu"),
    )
    activation: str | None = flag(
        "feed-forward activation by mb_kernels' name; default gelu_tanh, or geglu_tanh (ours)",
        on_load="model", in_force="activation_name", instead_of=("glu", "swiglu", "squared_relu"),
    )  # fmt: skip
    apply_residual_connection_post_layernorm: bool = flag(
        "take the residual from behind the norm", False, on_load="said"
    )
    bert_binary_head: bool = flag(
        "BERT's second head, for the order of sentences", True, on_load="model",
        off=("--bert-no-binary-head",),
    )  # fmt: skip

    @property
    def decoder_layers(self) -> int:
        """Layers of a decoder beside an encoder."""
        return self.decoder_num_layers or whole(self.num_layers)

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.kv_channels or whole(self.hidden_size) // whole(self.num_attention_heads)

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        grouped = self.group_query_attention
        return self.num_query_groups if grouped else whole(self.num_attention_heads)

    @property
    def ffn_size(self) -> int:
        """F, the width inside a dense feed-forward."""
        return self.ffn_hidden_size or 4 * whole(self.hidden_size)

    @property
    def activation_name(self) -> str:
        """The activation by mb_kernels' name."""
        if self.activation is not None:
            return self.activation
        if self.swiglu:
            return "swiglu"
        if self.squared_relu:
            return "squared_relu"
        return "geglu_tanh" if self.glu else "gelu_tanh"

    @property
    def is_glu(self) -> bool:
        """Whether the feed-forward has a gate."""
        return self.activation_name in _GATED

    def check_model(self) -> None:
        """Raise ValueError for sizes and options that do not go together."""
        hidden, heads = whole(self.hidden_size), whole(self.num_attention_heads)
        if self.kv_channels is None and hidden % heads:
            raise ValueError(
                f"Expected --hidden-size to be divisible by --num-attention-heads, got {hidden} "
                f"and {heads}. Change one, or give --kv-channels."
            )
        if heads % self.kv_heads:
            raise ValueError(
                f"Expected --num-query-groups to divide --num-attention-heads, got "
                f"{self.kv_heads} and {heads}."
            )
        named = [
            name for name in ("glu", "swiglu", "squared_relu") if getattr(self, name)
        ]  # "glu" beside "swiglu" or a gated --activation says the same once more
        if self.activation is not None and self.glu and self.activation not in _GATED:
            raise ValueError(
                f"Expected a gated --activation with --glu, got {self.activation!r}. "
                f"Leave one of the two out, or take {', '.join(_GATED)}."
            )
        others = [name for name in named if name != "glu"] + ["activation"] * bool(self.activation)
        if len(others) > 1 or (self.squared_relu and self.glu):
            raise ValueError(
                f"Expected one activation, got "
                f"{' and '.join('--' + name.replace('_', '-') for name in (*named, *others[-1:]))}."
            )


@dataclass(frozen=True, kw_only=True)
class MoEFields:
    """The Mixture-of-Experts; everything that a layer of mb_layers can do."""

    moe_num_experts: int | None = flag(
        "experts of a feed-forward; default a dense model", bounds=POSITIVE, on_load="model",
        layer="num_experts", also=("--num-experts",),
    )  # fmt: skip
    moe_top_k: int = flag(
        "experts per token", 1, bounds=POSITIVE, on_load="said", layer="top_k",
        also=("--moe-router-topk",),
    )  # fmt: skip
    moe_capacity_factor: float = flag(
        "slots per expert over the even share; 0 drops no token (dMoE)", 0.0, bounds=AT_LEAST_0,
        on_load="said",
    )  # fmt: skip
    moe_eval_capacity_factor: float | None = flag(
        "the same in evaluation; default no other (ours)", bounds=POSITIVE, on_load="said",
        layer="eval_capacity_factor",
    )  # fmt: skip
    moe_min_capacity: int = flag(
        "but never fewer slots than this (ours)", 0, bounds=AT_LEAST_0, on_load="said",
        layer="min_capacity",
    )  # fmt: skip
    moe_drop_policy: str = flag(
        "who is kept of an expert's tokens beyond its slots: the first, or the surest (ours)",
        "position", choices=("position", "probability"), on_load="said", layer="drop_policy",
    )  # fmt: skip
    moe_ffn_hidden_size: int | None = flag(
        "width inside an expert; default --ffn-hidden-size", bounds=POSITIVE, on_load="model",
        in_force="expert_ffn_size",
    )  # fmt: skip
    moe_layer_freq: int = flag(
        "every n-th layer has experts, the first of them too", 1, bounds=POSITIVE,
        on_load="model",
    )  # fmt: skip
    moe_first_k_dense: int = flag(
        "the first k layers have none (ours)", 0, bounds=AT_LEAST_0, on_load="model"
    )
    moe_loss_weight: float = flag(
        "weight of the load-balancing loss", 0.1, bounds=AT_LEAST_0, on_load="said",
        layer="load_balancing_loss_weight", also=("--moe-aux-loss-coeff",),
    )  # fmt: skip
    moe_balance_over: str = flag(
        "balance the load over each micro-batch, each sequence or the global batch (ours)",
        "micro_batch", choices=("micro_batch", "sequence", "global_batch"), on_load="said",
        layer="balance_over",
    )  # fmt: skip
    moe_z_loss_weight: float = flag(
        "weight of the router's z-loss (ours)", 0.0, bounds=AT_LEAST_0, on_load="said",
        layer="z_loss_weight", also=("--moe-z-loss-coeff",),
    )  # fmt: skip
    moe_router_score_function: str = flag(
        "scores of the router", "softmax", choices=("softmax", "sigmoid"), on_load="said",
        layer="score_function",
    )  # fmt: skip
    moe_renormalize: bool = flag(
        "divide the routing weights of a token by their norm (ours)", False, on_load="said",
        layer="renormalize",
    )  # fmt: skip
    moe_renormalize_p: float = flag(
        "p of that norm (ours)", 1.0, choices=(1.0, 2.0), on_load="said", layer="renormalize_p"
    )
    moe_router_topk_scaling_factor: float = flag(
        "multiply the routing weights by this", 1.0, bounds=POSITIVE, on_load="said",
        layer="routed_scaling_factor",
    )  # fmt: skip
    moe_weights_on_input: bool = flag(
        "scale the experts' input by the routing weights, not their output (ours)", False,
        on_load="said", layer="weights_on_input",
    )  # fmt: skip
    moe_num_zero_experts: int = flag(
        "experts more to choose from, which return their token (ours)", 0, bounds=AT_LEAST_0,
        on_load="model", layer="num_zero_experts",
    )  # fmt: skip
    moe_router_num_groups: int | None = flag(
        "split the experts into groups, of which a token chooses some", bounds=POSITIVE,
        on_load="said", layer="num_expert_groups",
    )  # fmt: skip
    moe_router_group_topk: int | None = flag(
        "groups that a token chooses", bounds=POSITIVE, on_load="said", layer="top_k_groups"
    )
    moe_router_group_score_top: int = flag(
        "a group's score is the sum of this many of its best experts' (ours)", 2, bounds=POSITIVE,
        on_load="said", layer="group_score_top",
    )  # fmt: skip
    moe_router_enable_expert_bias: bool = flag(
        "balance the load by a bias on the choice of experts instead of a loss", False,
        on_load="model", layer="balancing_bias",
    )  # fmt: skip
    moe_router_bias_update_rate: float = flag(
        "how far a step moves that bias", 1e-3, bounds=AT_LEAST_0, on_load="said"
    )
    moe_jitter_eps: float = flag(
        "noise on the router's input in training, uniform in 1 +- eps", 0.0, bounds=FRACTION,
        on_load="said", layer="jitter_eps",
    )  # fmt: skip
    moe_uniform_expert_assignment: bool = flag(
        "for benchmarks: deal the tokens out evenly, whatever the scores (ours)", False,
        on_load="said", layer="uniform_assignment",
    )  # fmt: skip
    moe_router_fp32: bool = flag(
        "compute the router's scores in fp32 (ours)", True, on_load="said", layer="router_fp32"
    )
    moe_router_bias: bool = flag(
        "a learned bias on the router's scores (ours)", False, on_load="model",
        layer="router_bias",
    )  # fmt: skip
    moe_mlp_bias: bool = flag(
        "biases inside every expert (ours)", False, on_load="model", layer="mlp_bias"
    )
    moe_output_bias: bool = flag(
        "one bias on the output of the experts, as MegaBlocks has it (ours)", False,
        on_load="model", layer="output_bias",
    )  # fmt: skip
    moe_shared_expert_intermediate_size: int | None = flag(
        "width of an expert that every token visits; default none", bounds=POSITIVE,
        on_load="model", layer="shared_expert_hidden_size",
    )  # fmt: skip
    moe_shared_expert_gate: bool = flag(
        "weight the shared expert by a learned gate", False, on_load="model",
        layer="shared_expert_gate",
    )  # fmt: skip
    moe_shared_expert_weighted_sum: bool = flag(
        "average the shared expert with the k routed ones instead of adding it (ours)", False,
        on_load="said", layer="shared_expert_weighted_sum",
    )  # fmt: skip
    moe_shared_expert_bias: bool = flag(
        "biases inside the shared expert (ours)", False, on_load="model",
        layer="shared_expert_bias",
    )  # fmt: skip
    moe_mlp_impl: str = flag(
        "grouped matrix products, or MegaBlocks' block-sparse ones, over the same weights (ours)",
        "grouped", choices=("grouped", "sparse"), layer="mlp_impl",
    )  # fmt: skip
    moe_recompute: bool = flag(
        "recompute the experts' activations in the backward pass (ours)", False,
        layer="recompute",
    )  # fmt: skip
    moe_saved_activation_bits: int | None = flag(
        "keep the experts' activations for the backward pass in this many bits (ours)",
        choices=(4, 8), on_load="said", layer="saved_activation_bits",
    )  # fmt: skip

    def moe_arguments(self) -> dict[str, Any]:
        """Arguments of `mb_layers.MoEConfig` that have a field of their own here.

        The sizes, the activation and the init are the model's; see `TrainConfig`.
        """
        return {
            layer: getattr(self, f.name)
            for f in fields(MoEFields)
            if (layer := spec(f).layer) is not None
        } | {"capacity_factor": self.moe_capacity_factor or None}

    def has_experts(self, layer: int) -> bool:
        """Whether layer `layer`, counted from 0, has experts."""
        late = layer >= self.moe_first_k_dense
        return self.moe_num_experts is not None and late and layer % self.moe_layer_freq == 0

    def check_moe(self) -> None:
        """Raise ValueError for a choice of experts that does not work."""
        experts = self.moe_num_experts
        if experts is not None and self.moe_top_k > experts:
            raise ValueError(
                f"Expected --moe-top-k of at most --moe-num-experts, got {self.moe_top_k} and "
                f"{experts}: a token can choose an expert only once."
            )
