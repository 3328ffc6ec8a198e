"""T5: its configuration and its tensors, and ours, both ways.

Letters: H heads.
"""

from __future__ import annotations

from typing import Any

from mb_kernels.activation import is_glu
from mb_layers.state_dicts import Rule

from mb_train.config import TrainConfig
from mb_train.convert.hugging_face.config_json import Json, refuse
from mb_train.convert.hugging_face.rules import fused_rule, own_head
from mb_train.models.config import TransformerConfig
from mb_train.models.relative import MAX_DISTANCE, NUM_BUCKETS

DEFAULTS = {
    "feed_forward_proj": "relu", "layer_norm_epsilon": 1e-6, "dropout_rate": 0.1,
    "tie_word_embeddings": True,
}  # fmt: skip
ALIASES = {
    "hidden_size": "d_model", "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers", "head_dim": "d_kv",
}  # fmt: skip
# Of a feed-forward by its function, and whether it is gated. Of two names for one function the one
# that is written comes last.
_ACTIVATIONS = {
    ("gelu_pytorch_tanh", False): "gelu_tanh", ("gelu_pytorch_tanh", True): "geglu_tanh",
    ("gelu_new", False): "gelu_tanh", ("gelu_new", True): "geglu_tanh",
    ("relu", False): "relu", ("gelu", False): "gelu", ("silu", False): "silu",
    ("relu", True): "reglu", ("gelu", True): "geglu", ("silu", True): "swiglu",
}  # fmt: skip


def fields_of(config: Json) -> dict[str, Any]:
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


def config_of(config: TrainConfig) -> dict[str, Any]:
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


def rules_of(config: TrainConfig, model: TransformerConfig) -> list[Rule]:
    """A T5 with relative positions."""
    rules = [Rule("embedding.tokens.weight", ("shared.weight",)), *own_head(model)]
    for side, layers in (("encoder", model.num_layers), ("decoder", config.decoder_layers)):
        bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        rules.append(Rule(f"{side}_bias.table.weight", (bias,)))
        rules.append(Rule(f"{side}.norm.weight", (f"{side}.final_layer_norm.weight",)))
        for layer in range(layers):
            rules += _t5_layer(model, side, layer)
    return rules


def _t5_layer(model: TransformerConfig, side: str, layer: int) -> list[Rule]:
    ours, theirs, H = f"{side}.blocks.{layer}.", f"{side}.block.{layer}.layer.", model.num_heads
    cross = side == "decoder"
    feed = f"{theirs}{1 + cross}."
    names = {
        "norm_1": f"{theirs}0.layer_norm",
        "attention.out": f"{theirs}0.SelfAttention.o",
        "norm_2": f"{feed}layer_norm",
        "mlp.up": f"{feed}DenseReluDense.wi",
        "mlp.down": f"{feed}DenseReluDense.wo",
    }
    if is_glu(model.activation):
        names |= {
            "mlp.gate": f"{feed}DenseReluDense.wi_0",
            "mlp.up": f"{feed}DenseReluDense.wi_1",
        }
    if cross:
        names |= {
            "norm_cross": f"{theirs}1.layer_norm",
            "cross.out": f"{theirs}1.EncDecAttention.o",
            "cross.q": f"{theirs}1.EncDecAttention.q",
        }
    rules = [Rule(f"{ours}{our}.weight", (f"{their}.weight",)) for our, their in names.items()]
    parts = [f"{theirs}0.SelfAttention.{part}.weight" for part in "qkv"]
    rules.append(fused_rule(f"{ours}attention.qkv.weight", parts, H, (1, 1, 1)))
    if cross:
        parts = [f"{theirs}1.EncDecAttention.{part}.weight" for part in "kv"]
        rules.append(fused_rule(f"{ours}cross.kv.weight", parts, H, (1, 1)))
    return rules
