"""The tensors of BERT and T5 by our names and by Hugging Face's, as rules that work both ways.

`weights` says how rows of a fused projection lie. Letters: H heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from mb_kernels.activation import is_glu
from mb_layers.state_dicts import Rule

from mb_train.config import TrainConfig
from mb_train.convert.hugging_face.weights import both, fused_rule
from mb_train.models.config import TransformerConfig


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


def bert_rules(config: TrainConfig, model: TransformerConfig, *, names: BertNorms) -> list[Rule]:
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


def t5_rules(config: TrainConfig, model: TransformerConfig) -> list[Rule]:
    """A T5 with relative positions."""
    rules = [Rule("embedding.tokens.weight", ("shared.weight",))]
    if not model.tie_embeddings:
        rules.append(Rule("head.weight", ("lm_head.weight",)))
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
