"""Hugging Face's configurations and ours, both ways: GPT-2, BERT, T5, Mixtral, OLMoE, Qwen3-MoE.

What a configuration asks for and our models do not have is refused by name, never left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from mb_layers.state_dicts import Rule

from mb_train.config import TrainConfig, whole
from mb_train.convert.sentence_weights import BERT, MEGATRON_BERT, bert_rules, t5_rules
from mb_train.convert.weights import MIXTRAL, OLMOE, gpt2_rules, llama_like_rules
from mb_train.models.config import TransformerConfig
from mb_train.models.relative import MAX_DISTANCE, NUM_BUCKETS

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Architecture:
    """One of Hugging Face's model types.

    Attributes:
        name: of its class.
        fields: from its config.json to fields of a `TrainConfig`.
        config: back.
        rules: from its tensors to ours.
        prefix: of its tensors' names, but the head's.
        left_out: patterns of tensors that files may hold and that say nothing.
        special: special tokens of its config.json, from a tokenizer.
    """

    model_type: str
    name: str
    fields: Callable[[Json], dict[str, Any]]
    config: Callable[[TrainConfig], dict[str, Any]]
    rules: Callable[[TrainConfig, TransformerConfig], list[Rule]]
    prefix: str = ""
    left_out: tuple[str, ...] = ()
    special: Callable[[Any], dict[str, Any]] = lambda t: {
        "eos_token_id": t.eod, "bos_token_id": None
    }  # fmt: skip


def architecture_of(config: Json) -> Architecture:
    """The architecture of a config.json.

    Raises:
        ValueError: one that is not supported.
    """
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"Expected a model of type {', '.join(ARCHITECTURES)}, got {kind!r} in config.json."
        )
    return ARCHITECTURES[kind]


def architecture_for(config: TrainConfig) -> Architecture:
    """The architecture that a model of ours can be written as.

    Raises:
        ValueError: none has what the model has; says what.
    """
    dense = config.moe_num_experts is None
    if config.model == "bert":
        kind = "bert" if config.post_layernorm else "megatron-bert"
    elif config.model == "t5":
        kind = "t5"
    elif dense and config.position_embedding_type == "learned":
        kind = "gpt2"
    elif config.qk_layernorm:
        kind = "olmoe" if config.qk_layernorm_over == "width" else "qwen3_moe"
    else:
        kind = "mixtral"
    # A configuration that comes back changed is one that the architecture cannot say.
    found = ARCHITECTURES[kind]
    back = found.fields(found.config(config))
    fields: dict[str, Any] = {**_TRAINING, **back}
    other = TrainConfig(**fields)
    differing = [
        name
        for name, value in config.model_identity().items()
        if other.model_identity()[name] != value and name not in ("positions", "ffn_size")
    ]
    settings = ("moe_top_k", "moe_renormalize", "moe_router_score_function", "rotary_percent",
                "moe_router_num_groups", "moe_shared_expert_intermediate_size",
                "moe_router_topk_scaling_factor", "layernorm_epsilon", "rotary_base")  # fmt: skip
    differing += [n for n in settings if getattr(other, n) != getattr(config, n)]
    if config.moe_layer_freq != other.moe_layer_freq or config.moe_first_k_dense:
        differing += ["moe_layer_freq"]
    if differing:
        raise ValueError(
            f"Hugging Face has no architecture for this model: the nearest, {found.name}, cannot "
            f"say its {', '.join(dict.fromkeys(differing))}."
        )
    return found


# What a TrainConfig needs beside its model; an imported model has no run of its own yet.
_TRAINING = {"micro_batch_size": 1, "seq_length": 1, "lr": 1e-5, "train_iters": 1}


def _refuse(config: Json, **allowed: Any) -> None:
    """Raise ValueError for a setting that is there with another value than those allowed."""
    for name, values in allowed.items():
        if name in config and config[name] not in values:
            raise ValueError(
                f"Expected {name} of config.json to be {' or '.join(map(repr, values))}, got "
                f"{config[name]!r}: this model has something that ours have not."
            )


# Two names for one function: the one that is written comes last.
_GPT2_ACTIVATIONS = {
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu", "relu": "relu",
    "silu": "silu",
}  # fmt: skip


def _gpt2_fields(config: Json) -> dict[str, Any]:
    _refuse(
        config,
        activation_function=tuple(_GPT2_ACTIVATIONS),
        scale_attn_weights=(True,),
        scale_attn_by_inverse_layer_idx=(False,),
        add_cross_attention=(False,),
    )
    hidden = config["n_embd"]
    return {
        "num_layers": config["n_layer"],
        "hidden_size": hidden,
        "num_attention_heads": config["n_head"],
        "ffn_hidden_size": config.get("n_inner") or 4 * hidden,
        "max_position_embeddings": config["n_positions"],
        "activation": _GPT2_ACTIVATIONS[config.get("activation_function", "gelu_new")],
        "layernorm_epsilon": config["layer_norm_epsilon"],
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", True),
        "attention_dropout": config.get("attn_pdrop", 0.1),
        "hidden_dropout": config.get("resid_pdrop", 0.1),
    }


def _gpt2_config(config: TrainConfig) -> dict[str, Any]:
    theirs = {ours: name for name, ours in _GPT2_ACTIVATIONS.items()}
    return {
        "activation_function": theirs.get(config.activation_name, "gelu_new"),
        "n_embd": config.hidden_size,
        "n_layer": config.num_layers,
        "n_head": config.num_attention_heads,
        "n_inner": config.ffn_size,
        "n_positions": config.positions,
        "layer_norm_epsilon": config.layernorm_epsilon,
        "attn_pdrop": config.attention_dropout,
        "resid_pdrop": config.hidden_dropout,
        "embd_pdrop": config.hidden_dropout,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
    }


def _llama_like_fields(config: Json, **defaults: Any) -> dict[str, Any]:
    """Fields of a model with Llama's attention; `defaults` are for what a file may leave out."""
    config = defaults | dict(config)
    _refuse(config, hidden_act=("silu",), attention_bias=(False,), clip_qkv=(None,),
            mlp_only_layers=([], None), use_sliding_window=(False,))  # fmt: skip
    rope = config.get("rope_parameters") or {}
    for scaled in (rope, config.get("rope_scaling") or {}):
        _refuse(scaled, rope_type=("default",), type=("default",))
    window, positions = config.get("sliding_window"), config["max_position_embeddings"]
    if window is not None and window < positions and config.get("use_sliding_window", True):
        raise ValueError(f"Expected no sliding_window in config.json, got {window}.")
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups if groups != heads else 1,
        "kv_channels": config.get("head_dim") or config["hidden_size"] // heads,
        "ffn_hidden_size": config["intermediate_size"],
        "moe_ffn_hidden_size": config.get("moe_intermediate_size", config["intermediate_size"]),
        "max_position_embeddings": positions,
        "position_embedding_type": "rope",
        "rotary_base": float(rope.get("rope_theta", config["rope_theta"])),
        "normalization": "RMSNorm",
        "layernorm_epsilon": config["rms_norm_eps"],
        "swiglu": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "attention_dropout": config.get("attention_dropout", 0.0),
        "hidden_dropout": 0.0,
        "moe_num_experts": _either(config, "num_local_experts", "num_experts"),
        "moe_top_k": config["num_experts_per_tok"],
        "moe_loss_weight": config.get("router_aux_loss_coef", 0.0),
    }


def _llama_like_config(config: TrainConfig) -> dict[str, Any]:
    return {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.ffn_size,
        "max_position_embeddings": config.positions,
        "rope_theta": config.rotary_base,
        "rope_parameters": {"rope_theta": config.rotary_base, "rope_type": "default"},
        "hidden_act": "silu",
        "rms_norm_eps": config.layernorm_epsilon,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        "attention_dropout": config.attention_dropout,
        "attention_bias": False,
        "num_experts_per_tok": config.moe_top_k,
        "router_aux_loss_coef": config.moe_loss_weight,
    }


def _mixtral_fields(config: Json) -> dict[str, Any]:
    found = _llama_like_fields(config, num_key_value_heads=8, rope_theta=1_000_000.0)
    return found | {"moe_renormalize": True}


def _mixtral_config(config: TrainConfig) -> dict[str, Any]:
    return _llama_like_config(config) | {
        "num_local_experts": config.moe_num_experts,
        "intermediate_size": config.expert_ffn_size,
        "sliding_window": None,
    }


def _olmoe_fields(config: Json) -> dict[str, Any]:
    return _llama_like_fields(config, rope_theta=10_000.0) | {
        "moe_renormalize": config.get("norm_topk_prob", False),
        "qk_layernorm": True,
        "qk_layernorm_over": "width",
    }


def _olmoe_config(config: TrainConfig) -> dict[str, Any]:
    return _llama_like_config(config) | {
        "num_experts": config.moe_num_experts,
        "intermediate_size": config.expert_ffn_size,
        "norm_topk_prob": config.moe_renormalize,
        "clip_qkv": None,
    }


def _qwen3_moe_fields(config: Json) -> dict[str, Any]:
    _refuse(config, decoder_sparse_step=(1,))
    defaults: dict[str, Any] = {
        "num_key_value_heads": 4, "rope_theta": 10_000.0, "moe_intermediate_size": 768,
        "use_sliding_window": False,
    }  # fmt: skip
    return _llama_like_fields(config, **defaults) | {
        "moe_renormalize": config.get("norm_topk_prob", False),
        "qk_layernorm": True,
        "qk_layernorm_over": "head",
    }


def _qwen3_moe_config(config: TrainConfig) -> dict[str, Any]:
    return _llama_like_config(config) | {
        "num_experts": config.moe_num_experts,
        "num_local_experts": config.moe_num_experts,
        "moe_intermediate_size": config.expert_ffn_size,
        "norm_topk_prob": config.moe_renormalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _either(config: Json, *names: str) -> Any:
    for name in names:
        if name in config:
            return config[name]
    raise ValueError(f"Expected config.json to have {' or '.join(names)}, got neither.")


def _bert_fields(config: Json, *, post_norm: bool) -> dict[str, Any]:
    _refuse(config, hidden_act=("gelu",), position_embedding_type=("absolute",),
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
        "attention_dropout": config.get("attention_probs_dropout_prob", 0.1),
        "hidden_dropout": config.get("hidden_dropout_prob", 0.1),
        "bert_binary_head": "ForMaskedLM" not in "".join(config.get("architectures") or ()),
    }


def _bert_config(config: TrainConfig) -> dict[str, Any]:
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


# Buffers and the head's tied weight and bias, which some files hold once more.
_BERT_LEFT_OUT = (
    r"bert\.embeddings\.position_ids",
    r"cls\.predictions\.decoder\.(weight|bias)",
)


def _bert_special(tokenizer: Any) -> dict[str, Any]:
    return {"pad_token_id": tokenizer.pad}


_T5_ACTIVATIONS = {
    "relu": "relu", "gelu": "gelu", "gated-gelu": "geglu_tanh", "gated-silu": "swiglu",
    "gated-relu": "reglu",
}  # fmt: skip


def _t5_fields(config: Json) -> dict[str, Any]:
    _refuse(config, relative_attention_num_buckets=(NUM_BUCKETS,),
            relative_attention_max_distance=(MAX_DISTANCE,),
            feed_forward_proj=tuple(_T5_ACTIVATIONS), is_encoder_decoder=(True,))  # fmt: skip
    tied = config.get("tie_word_embeddings", True)
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
        "activation": _T5_ACTIVATIONS[config.get("feed_forward_proj", "relu")],
        "add_bias_linear": False,
        "attention_scale": 1.0,
        "scale_head": config.get("scale_decoder_outputs", tied),
        "untie_embeddings_and_output_weights": not tied,
        "attention_dropout": config.get("dropout_rate", 0.1),
        "hidden_dropout": config.get("dropout_rate", 0.1),
    }


def _t5_config(config: TrainConfig) -> dict[str, Any]:
    theirs = {ours: name for name, ours in _T5_ACTIVATIONS.items()}
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
        "feed_forward_proj": theirs.get(config.activation_name, "relu"),
        "scale_decoder_outputs": config.scale_head,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        "dropout_rate": config.hidden_dropout,
        "is_encoder_decoder": True,
    }


ARCHITECTURES = {
    found.model_type: found
    for found in (
        Architecture(
            "gpt2", "GPT2LMHeadModel", _gpt2_fields, _gpt2_config, lambda _, c: gpt2_rules(c),
            prefix="transformer.",
            # Causal masks, which old files hold as if they were weights.
            left_out=(r"h\.\d+\.attn\.(masked_)?bias",),
            special=lambda t: {"eos_token_id": t.eod, "bos_token_id": t.eod},
        ),
        Architecture(
            "bert", "BertForPreTraining", partial(_bert_fields, post_norm=True), _bert_config,
            partial(bert_rules, names=BERT), left_out=_BERT_LEFT_OUT, special=_bert_special,
        ),
        Architecture(
            "megatron-bert", "MegatronBertForPreTraining", partial(_bert_fields, post_norm=False),
            _bert_config, partial(bert_rules, names=MEGATRON_BERT), left_out=_BERT_LEFT_OUT,
            special=_bert_special,
        ),
        Architecture(
            "t5", "T5ForConditionalGeneration", _t5_fields, _t5_config, t5_rules,
            # The embedding once more; a table of the first files that no layer ever used.
            left_out=(
                r"(en|de)coder\.embed_tokens\.weight",
                r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
            ),
            special=lambda t: {
                "eos_token_id": t.eos, "pad_token_id": t.pad, "decoder_start_token_id": t.bos
            },
        ),
        Architecture(
            "mixtral", "MixtralForCausalLM", _mixtral_fields, _mixtral_config,
            lambda _, c: llama_like_rules(c, MIXTRAL),
        ),
        Architecture(
            "olmoe", "OlmoeForCausalLM", _olmoe_fields, _olmoe_config,
            lambda _, c: llama_like_rules(c, OLMOE),
        ),
        Architecture(
            "qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_moe_fields, _qwen3_moe_config,
            lambda _, c: llama_like_rules(c, OLMOE),
        ),
    )
}  # fmt: skip


def imported_config(fields: Mapping[str, Any], vocab_size: int, **also: Any) -> TrainConfig:
    """A configuration for an imported model: the model, and a run to be overruled by flags.

    Args:
        vocab_size: rows of its token embedding.
        also: further fields.
    """
    training: dict[str, Any] = {**_TRAINING, "seq_length": fields["max_position_embeddings"]}
    exact: dict[str, Any] = {"make_vocab_size_divisible_by": vocab_size}
    config = TrainConfig(**{**training, **exact, **fields, **also})
    whole(config.num_layers)
    return config
