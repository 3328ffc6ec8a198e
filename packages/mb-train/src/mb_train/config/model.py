"""Fields that say what the model is: its sizes and its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mb_train.config.attention import check_latent, check_slowing, check_softmax
from mb_train.config.field import (
    AT_LEAST_0,
    GIVEN,
    NOT_1,
    OFF,
    POSITIVE,
    SHARE,
    flag,
    flag_name,
    whole,
)

_YARN = ("rotary_scaling_factor", NOT_1)
# As `mb_kernels.activation` has them, which would bring torch into every --help.
_GATED = ("swiglu", "geglu", "geglu_tanh", "reglu", "swigluoai")


@dataclass(frozen=True, kw_only=True)
class ModelFields:
    """Sizes and options of the network."""

    model: str = flag(
        "what to train; a classifier is a BERT with a head of its own (ours)", "gpt",
        choices=("gpt", "bert", "t5", "ict", "classifier"), on_load="model",
    )  # fmt: skip
    num_layers: int | None = flag(
        "transformer layers; of the encoder, where there is a decoder too", bounds=POSITIVE,
        on_load="model", also=("--encoder-num-layers",), required=True
    )  # fmt: skip
    decoder_num_layers: int | None = flag(
        "layers of T5's decoder; default as many as the encoder's", bounds=POSITIVE,
        on_load="model", in_force="decoder_layers", needs=("model", "t5"),
    )  # fmt: skip
    hidden_size: int | None = flag(
        "width of the residual stream", bounds=POSITIVE, on_load="model", required=True
    )
    ffn_hidden_size: int | None = flag(
        "width inside a feed-forward; default 4 x hidden size, with --swiglu two thirds of that in "
        "steps of 64", bounds=POSITIVE, on_load="model", in_force="ffn_size",
    )  # fmt: skip
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
    rotary_percent: float = flag(
        "share of a head's width that is rotated", 1.0, bounds=SHARE, on_load="said",
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
        "slow rotary frequencies as YaRN by --rotary-scaling-factor, or not; default yarn with "
        "--multi-latent-attention, else rope", choices=("rope", "yarn"), on_load="said",
        in_force="rope_scaling",
        instead_of=("use_rope_scaling", "rotary_seq_len_interpolation_factor"),
    )  # fmt: skip
    rotary_scaling_factor: float = flag(
        "by how much YaRN slows those that turn seldom within the length trained on, for texts so "
        "many times longer; 1 changes nothing", 1.0, bounds=POSITIVE, on_load="said",
        in_force="rope_scaling", needs=(("multi_latent_attention", "rope_type"),),
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
        "YaRN: how much sharper the rotated part of queries and keys makes attention", 1.0,
        bounds=AT_LEAST_0, on_load="said", in_force="rope_scaling", needs=_YARN,
    )  # fmt: skip
    mscale_all_dim: float = flag(
        "YaRN: the same of all of them, in latent attention; the rotated part has the quotient",
        0.0, bounds=AT_LEAST_0, on_load="said", in_force="rope_scaling", needs=_YARN,
    )  # fmt: skip
    make_vocab_size_divisible_by: int = flag(
        "pad the vocabulary to a multiple of this x tensor parallel size", 128, bounds=POSITIVE
    )
    untie_embeddings_and_output_weights: bool = flag(
        "give the head weights of its own", False, on_load="model", needs=("model", "gpt", "t5")
    )
    normalization: str = flag(
        "kind of the norms", "LayerNorm", choices=("LayerNorm", "RMSNorm"), on_load="model"
    )
    layernorm_epsilon: float = flag(
        "epsilon of the norms", 1e-5, bounds=POSITIVE, on_load="said", also=("--norm-epsilon",)
    )
    qk_layernorm: bool = flag(
        "normalise queries and keys; with --multi-latent-attention what they are made of", False,
        on_load="model",
    )  # fmt: skip
    qk_layernorm_over: str = flag(
        "normalise them over each head, or over their whole width as OLMoE (ours)", "head",
        choices=("head", "width"), on_load="model", needs=("qk_layernorm",),
    )  # fmt: skip
    qk_layernorm_epsilon: float | None = flag(
        "epsilon of those norms, 1e-6 in DeepSeek; default --layernorm-epsilon (ours)",
        bounds=POSITIVE, on_load="said", in_force="qk_epsilon", needs=("qk_layernorm",),
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
        "feed-forward activation by mb_kernels' name, swiglu(limit=10) for one with numbers; "
        "default gelu_tanh, or geglu_tanh (ours)",
        on_load="model", in_force="activation_name", instead_of=("glu", "swiglu", "squared_relu"),
    )  # fmt: skip
    apply_residual_connection_post_layernorm: bool = flag(
        "add to what a norm puts out, not to what goes in", False, on_load="model"
    )
    post_layernorm: bool = flag(
        "normalise behind each residual sum and behind the embedding, as the first BERT (ours)",
        False, on_load="model",
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
    window_attn_skip_freq: int | None = flag(
        "every n-th layer sees all tokens before; default none does", bounds=POSITIVE,
        on_load="said", in_force="windows", needs=("window_size", GIVEN),
    )  # fmt: skip
    softmax_type: str = flag(
        "of attention: with a score more in each sum, which has no value and is 0 (off-by-one) or "
        "learned by each head, a sink (learnable)", "vanilla",
        choices=("vanilla", "off-by-one", "learnable"), on_load="model", in_force="sinks",
    )  # fmt: skip
    scale_head: bool = flag(
        "multiply hidden states by 1 / sqrt(hidden size) before T5's head, as T5 1.0 (ours)",
        False, on_load="model", needs=("model", "t5"),
    )  # fmt: skip
    bert_binary_head: bool = flag(
        "BERT's second head, for the order of sentences", True, on_load="model",
        off=("--bert-no-binary-head",), needs=("model", "bert"),
    )  # fmt: skip

    @property
    def decoder_layers(self) -> int:
        """Layers of a decoder beside an encoder."""
        return self.decoder_num_layers or whole(self.num_layers)

    @property
    def head_size(self) -> int:
        """Width of one attention head's query and key."""
        if self.multi_latent_attention:
            return self.qk_head_dim + self.qk_pos_emb_head_dim
        return self.kv_channels or whole(self.hidden_size) // whole(self.num_attention_heads)

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        grouped = self.group_query_attention
        return self.num_query_groups if grouped else whole(self.num_attention_heads)

    @property
    def latent_sizes(self) -> list[int | None] | None:
        """Of latent attention, as `models.config.LatentSizes` has them; a list, as in JSON."""
        if not self.multi_latent_attention:
            return None
        heads = [self.qk_head_dim, self.qk_pos_emb_head_dim, self.v_head_dim]
        return [self.q_lora_rank, self.kv_lora_rank, *heads]

    @property
    def qk_epsilon(self) -> float | None:
        """Epsilon of the norms of queries and keys, if there are any."""
        if not self.qk_layernorm:
            return None
        return self.qk_layernorm_epsilon or self.layernorm_epsilon

    @property
    def rope_scaling(self) -> tuple[Any, ...] | None:
        """How rotations are slowed, and by how much, as `models.config.RopeScaling` has it."""
        if self.use_rope_scaling:
            return "llama3", self.rope_scaling_factor
        factor = self.rotary_scaling_factor
        if self.rope_type == "yarn" or (self.rope_type is None and self.multi_latent_attention):
            # The whole of YaRN grows with the factor's logarithm.
            return None if factor == 1 else ("yarn", factor, *self._yarn_numbers)
        factor = self.rotary_seq_len_interpolation_factor
        return None if factor is None else ("linear", factor)

    @property
    def _yarn_numbers(self) -> tuple[float, ...]:
        trained_on, turns = self.original_max_position_embeddings, (self.beta_fast, self.beta_slow)
        return trained_on, *turns, self.mscale, self.mscale_all_dim, self.yarn_truncate

    @property
    def windows(self) -> tuple[int, int | None] | None:
        """Of layers with one: its size, and n if every n-th layer has none; None without."""
        size, every = self.window_size, self.window_attn_skip_freq
        if size is None or every == 1:
            return None
        return size, every if every is not None and every <= whole(self.num_layers) else None

    @property
    def sinks(self) -> str | None:
        """Kind of the score more in each sum of attention's softmax, if there is one."""
        return None if self.softmax_type == "vanilla" else self.softmax_type

    def has_window(self, layer: int) -> bool:
        """Whether a token of layer `layer`, counted from 0, sees those near before it alone."""
        every = self.window_attn_skip_freq
        return self.window_size is not None and (every is None or (layer + 1) % every != 0)

    @property
    def ffn_size(self) -> int:
        """F, the width inside a dense feed-forward."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        wide = 4 * whole(self.hidden_size)
        return max(wide * 2 // 3 // 64, 1) * 64 if self.swiglu else wide

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
        return self.activation_name.partition("(")[0] in _GATED

    def check_model(self) -> None:
        """Raise ValueError for sizes and options that do not go together."""
        hidden, heads = whole(self.hidden_size), whole(self.num_attention_heads)
        if self.kv_channels is None and not self.multi_latent_attention and hidden % heads:
            raise ValueError(
                f"Expected --hidden-size to be divisible by --num-attention-heads, got {hidden} "
                f"and {heads}. Change one, or give --kv-channels."
            )
        if heads % self.kv_heads:
            raise ValueError(
                f"Expected --num-query-groups to divide --num-attention-heads, got "
                f"{self.kv_heads} and {heads}."
            )
        if self.model == "bert" and self.untie_embeddings_and_output_weights:
            raise ValueError(
                "Expected --model gpt or t5 with --untie-embeddings-and-output-weights, got bert, "
                "whose head is tied to its embedding. Leave it out."
            )
        if self.post_layernorm and self.apply_residual_connection_post_layernorm:
            raise ValueError(
                "Expected --post-layernorm or --apply-residual-connection-post-layernorm, got "
                "both: a norm behind the sum leaves none before it. Leave one of the two out."
            )
        check_latent(self)
        check_slowing(self)
        check_softmax(self)
        if self.activation is not None and self.glu and not self.is_glu:
            raise ValueError(
                f"Expected a gated --activation with --glu, got {self.activation!r}. "
                f"Leave one of the two out, or take {', '.join(_GATED)}."
            )
        names = ("glu", "swiglu", "squared_relu", "activation")
        named = [flag_name(name) for name in names if getattr(self, name)]
        # "glu" beside "swiglu" or a gated --activation says the same once more.
        if len(set(named) - {"--glu"}) > 1 or (self.squared_relu and self.glu):
            raise ValueError(f"Expected one activation, got {' and '.join(named)}.")
