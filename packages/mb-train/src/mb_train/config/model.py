"""Fields that say what the model is: its sizes, feed-forwards, norms and heads."""

from __future__ import annotations

from dataclasses import dataclass

from mb_train.config.field import AT_LEAST_0, LEFT_OUT, POSITIVE, flag

# Fields that say how many rows a vocabulary has, of which only one is given.
ROWS_OF_VOCABULARY = ("make_vocab_size_divisible_by", "padded_vocab_size")


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
    make_vocab_size_divisible_by: int = flag(
        "pad the vocabulary to a multiple of this x tensor parallel size", 128, bounds=POSITIVE,
        instead_of=("padded_vocab_size",), needs=("padded_vocab_size", LEFT_OUT),
    )  # fmt: skip
    padded_vocab_size: int | None = flag(
        "rows of the vocabulary, at least as many as the tokenizer has tokens; default these, "
        "padded", bounds=POSITIVE, also=("--pad-vocab-size-to",),
        instead_of=("make_vocab_size_divisible_by",),
    )  # fmt: skip
    untie_embeddings_and_output_weights: bool = flag(
        "give the head weights of its own", False, on_load="model", needs=("model", "gpt", "t5")
    )
    head_bias: bool = flag(
        "a bias for each token on its score, as BERT and Megatron's T5 have it anyway (ours)",
        False, on_load="model", in_force="scores_bias", needs=("model", "gpt", "t5"),
    )  # fmt: skip
    normalization: str = flag(
        "kind of the norms; a layer norm without a bias is ours", "LayerNorm",
        choices=("LayerNorm", "RMSNorm", "LayerNorm-without-bias"), on_load="model",
    )  # fmt: skip
    layernorm_epsilon: float = flag(
        "epsilon of the norms", 1e-5, bounds=POSITIVE, on_load="said", also=("--norm-epsilon",)
    )
    add_bias_linear: bool = flag(
        "biases in the linear maps", True, on_load="model", off=("--disable-bias-linear",)
    )
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
        "add to what a norm puts out, not to what goes in", False, on_load="model",
        in_force="norms", instead_of=("norm_placement", "post_layernorm"),
    )  # fmt: skip
    post_layernorm: bool = flag(
        "normalise behind each residual sum and behind the embedding, as the first BERT (ours)",
        False, on_load="model", in_force="norms",
        instead_of=("norm_placement", "apply_residual_connection_post_layernorm"),
    )  # fmt: skip
    norm_placement: str | None = flag(
        "where norms stand around attention and feed-forward: before them; so, and what they put "
        "out is kept to add to; behind the sum; behind the output, as in OLMo 2; both before and "
        "behind it, as in GLM-4; default before (ours)",
        choices=("before", "kept", "sum", "output", "both"), on_load="model", in_force="norms",
        instead_of=("apply_residual_connection_post_layernorm", "post_layernorm"),
    )  # fmt: skip
    scale_head: bool = flag(
        "multiply hidden states by 1 / sqrt(hidden size) before T5's head, as T5 1.0 (ours)",
        False, on_load="model", needs=("model", "t5"),
    )  # fmt: skip
    mtp_num_layers: int = flag(
        "modules behind the last layer, each a layer more, that learn to predict tokens beyond the "
        "next one", 0, bounds=AT_LEAST_0, on_load="fixed",
    )  # fmt: skip
    mtp_loss_scaling_factor: float = flag(
        "weight of the mean of their losses", 0.1, bounds=AT_LEAST_0, on_load="said",
        in_training=True, needs=("mtp_num_layers",),
    )  # fmt: skip
    bert_binary_head: bool = flag(
        "BERT's second head, for the order of sentences", True, on_load="model",
        off=("--bert-no-binary-head",), needs=("model", "bert"),
    )  # fmt: skip
