"""BERT and MegatronBert: their configuration and their tensors, and ours, both ways.

Letters: H heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mb_layers.state_dicts import Rule

from mb_train.config import TrainConfig
from mb_train.convert.hugging_face.config_json import Json, refuse
from mb_train.convert.hugging_face.rules import both, fused_rule
from mb_train.models.config import TransformerConfig

DEFAULTS = {
    "hidden_act": "gelu", "layer_norm_eps": 1e-12, "attention_probs_dropout_prob": 0.1,
    "hidden_dropout_prob": 0.1,
}  # fmt: skip
LEFT_OUT = (r"bert\.embeddings\.position_ids",)  # a buffer
COPIES = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
# Files of the model without heads have no prefix.
PREFIXED = {r"^(?!bert\.|cls\.)": "bert."}
RENAMED = {
    r"LayerNorm\.gamma$": "LayerNorm.weight", r"LayerNorm\.beta$": "LayerNorm.bias", **PREFIXED
}  # fmt: skip


def fields_of(config: Json, *, post_norm: bool) -> dict[str, Any]:
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


def config_of(config: TrainConfig) -> dict[str, Any]:
    """Back."""
    head = "PreTraining" if config.bert_binary_head else "MaskedLM"
    kind = "Bert" if config.norms == "sum" else "MegatronBert"
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


@dataclass(frozen=True)
class BertNorms:
    """Where an architecture keeps its norms: within a layer, and of the embedding or the end."""

    norm_1: str
    norm_2: str
    outer: tuple[str, str]  # ours and theirs


BERT = BertNorms(
    "attention.output.LayerNorm", "output.LayerNorm",
    ("embedding.norm", "bert.embeddings.LayerNorm"),
)  # fmt: skip
MEGATRON_BERT = BertNorms("attention.ln", "ln", ("stack.norm", "bert.encoder.ln"))


def rules_of(config: TrainConfig, model: TransformerConfig, *, names: BertNorms) -> list[Rule]:
    """A BERT with its heads, post-LN or (MegatronBert) pre-LN."""
    tables = {"tokens": "word", "positions": "position", "token_types": "token_type"}
    rules = [
        Rule(f"embedding.{ours}.weight", (f"bert.embeddings.{theirs}_embeddings.weight",))
        for ours, theirs in tables.items()
    ]
    rules += both(*names.outer)
    H = model.num_heads
    for layer in range(model.num_layers):
        ours, theirs = f"stack.blocks.{layer}.", f"bert.encoder.layer.{layer}."
        for our, their in {
            "norm_1": names.norm_1, "norm_2": names.norm_2,
            "attention.out": "attention.output.dense",
            "mlp.up": "intermediate.dense", "mlp.down": "output.dense",
        }.items():  # fmt: skip
            rules += both(f"{ours}{our}", f"{theirs}{their}")
        for kind in ("weight", "bias"):
            parts = [f"{theirs}attention.self.{p}.{kind}" for p in ("query", "key", "value")]
            rules.append(fused_rule(f"{ours}attention.qkv.{kind}", parts, H, (1, 1, 1)))
    rules += both("lm_head.dense", "cls.predictions.transform.dense")
    rules += both("lm_head.norm", "cls.predictions.transform.LayerNorm")
    rules.append(Rule("lm_head.bias", ("cls.predictions.bias",)))
    if config.bert_binary_head:
        rules += both("pooler.dense", "bert.pooler.dense")
        rules += both("order_head", "cls.seq_relationship")
    return rules
