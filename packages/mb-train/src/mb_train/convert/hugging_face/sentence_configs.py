"""BERT's and T5's configurations and ours, both ways."""

from __future__ import annotations

from typing import Any

from mb_train.config import TrainConfig
from mb_train.convert.hugging_face.config_json import Json, refuse
from mb_train.models.relative import MAX_DISTANCE, NUM_BUCKETS

BERT_DEFAULTS = {
    "hidden_act": "gelu", "layer_norm_eps": 1e-12, "attention_probs_dropout_prob": 0.1,
    "hidden_dropout_prob": 0.1,
}  # fmt: skip
T5_DEFAULTS = {
    "feed_forward_proj": "relu", "layer_norm_epsilon": 1e-6, "dropout_rate": 0.1,
    "tie_word_embeddings": True,
}  # fmt: skip
T5_ALIASES = {
    "hidden_size": "d_model", "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers", "head_dim": "d_kv",
}  # fmt: skip


def bert_fields(config: Json, *, post_norm: bool) -> dict[str, Any]:
    """Fields of a `TrainConfig`; MegatronBert has its norms before each half of a block."""
    refuse(config, hidden_act=("gelu",), position_embedding_type=("absolute",),
           is_decoder=(False,), add_cross_attention=(False,), type_vocab_size=(2,),
           tie_word_embeddings=(True,))  # fmt: skip
    return {
        "model": "bert",
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_attention_heads": config["num_attention_heads"],
        "ffn_hidden_size": config["intermediate_size"],
        "max_position_embeddings": config["max_position_embeddings"],
        "layernorm_epsilon": config["layer_norm_eps"],
        "activation": "gelu",
        "post_layernorm": post_norm,
        "attention_dropout": config["attention_probs_dropout_prob"],
        "hidden_dropout": config["hidden_dropout_prob"],
        "bert_binary_head": "ForMaskedLM" not in "".join(config.get("architectures") or ()),
    }


def bert_config(config: TrainConfig) -> dict[str, Any]:
    """Back."""
    head = "PreTraining" if config.bert_binary_head else "MaskedLM"
    kind = "Bert" if config.post_layernorm else "MegatronBert"
    return {
        "architectures": [f"{kind}For{head}"],
        "hidden_act": "gelu",
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": config.ffn_size,
        "max_position_embeddings": config.positions,
        "layer_norm_eps": config.layernorm_epsilon,
        "attention_probs_dropout_prob": config.attention_dropout,
        "hidden_dropout_prob": config.hidden_dropout,
        "type_vocab_size": 2,
        "tie_word_embeddings": True,
    }


# Of a feed-forward by its function, and whether it is gated. Of two names for one function the one
# that is written comes last.
_ACTIVATIONS = {
    ("gelu_pytorch_tanh", False): "gelu_tanh", ("gelu_pytorch_tanh", True): "geglu_tanh",
    ("gelu_new", False): "gelu_tanh", ("gelu_new", True): "geglu_tanh",
    ("relu", False): "relu", ("gelu", False): "gelu", ("silu", False): "silu",
    ("relu", True): "reglu", ("gelu", True): "geglu", ("silu", True): "swiglu",
}  # fmt: skip


def t5_fields(config: Json) -> dict[str, Any]:
    """Fields of a `TrainConfig`."""
    # Files of later versions say the feed-forward twice, and the second way is what counts.
    gated, _, function = config["feed_forward_proj"].rpartition("-")
    if config["feed_forward_proj"] == "gated-gelu":
        function = "gelu_new"  # of the first gated models, T5 1.1
    feed = (config.get("dense_act_fn", function), config.get("is_gated_act", gated == "gated"))
    refuse({"dense_act_fn": feed[0]}, dense_act_fn=tuple(name for name, _ in _ACTIVATIONS))
    refuse(config, relative_attention_num_buckets=(NUM_BUCKETS,),
           relative_attention_max_distance=(MAX_DISTANCE,), is_encoder_decoder=(True,),
           is_causal=(True, None))  # fmt: skip
    tied = config["tie_word_embeddings"]
    length = config.get("n_positions", 512)
    return {
        "model": "t5",
        "num_layers": config["num_layers"],
        "decoder_num_layers": config.get("num_decoder_layers") or config["num_layers"],
        "hidden_size": config["d_model"],
        "num_attention_heads": config["num_heads"],
        "kv_channels": config["d_kv"],
        "ffn_hidden_size": config["d_ff"],
        "max_position_embeddings": length,
        "decoder_seq_length": length,
        "position_embedding_type": "relative",
        "normalization": "RMSNorm",
        "layernorm_epsilon": config["layer_norm_epsilon"],
        "activation": _ACTIVATIONS[feed],
        "add_bias_linear": False,
        "attention_scale": 1.0,
        "scale_head": config.get("scale_decoder_outputs", tied),
        "untie_embeddings_and_output_weights": not tied,
        "attention_dropout": config["dropout_rate"],
        "hidden_dropout": config["dropout_rate"],
    }


def t5_config(config: TrainConfig) -> dict[str, Any]:
    """Back."""
    theirs = {ours: feed for feed, ours in _ACTIVATIONS.items()}
    function, gated = theirs.get(config.activation_name, ("relu", False))
    return {
        "num_layers": config.num_layers,
        "num_decoder_layers": config.decoder_layers,
        "d_model": config.hidden_size,
        "num_heads": config.num_attention_heads,
        "d_kv": config.head_size,
        "d_ff": config.ffn_size,
        "n_positions": config.positions,
        "relative_attention_num_buckets": NUM_BUCKETS,
        "relative_attention_max_distance": MAX_DISTANCE,
        "layer_norm_epsilon": config.layernorm_epsilon,
        "feed_forward_proj": f"gated-{function}" if gated else function,
        "dense_act_fn": function,
        "is_gated_act": gated,
        "scale_decoder_outputs": config.scale_head,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        "dropout_rate": config.hidden_dropout,
        "is_encoder_decoder": True,
    }
