"""A trained BERT for a model made of BERTs to begin from (`--bert-load`)."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from mb_train.config import TrainConfig, flag_name
from mb_train.config.field import spec
from mb_train.config.moe import MoEFields
from mb_train.convert.hugging_face import read_model
from mb_train.convert.vocabulary import rows_of, with_rows
from mb_train.loading import load_trained
from mb_train.models.bert import Bert
from mb_train.models.classifier import Classifier
from mb_train.models.config import TransformerConfig
from mb_train.models.ict import ICT
from mb_train.tasks.make import whole_model

# What a model on top of a BERT may choose anew, and its experts; all else says what the weights
# compute.
_FREE = {
    "attention_dropout", "hidden_dropout", "init_std", "output_init_std", "ends_init_std",
    "fp32_residual", "fp8", "fp8_spares", "tie_embeddings", "moe", "router",
}  # fmt: skip
_IN_TRAINING = {f.name for f in fields(MoEFields) if spec(f).in_training}
_FREE_OF_EXPERTS = {"init_method_std", "output_init_std", "fp8"} | {
    argument for argument, f in TrainConfig.moe_argument_names().items() if f in _IN_TRAINING
}
# Of the others, those whose flag has another name.
_FLAGS = {
    "num_layers": "--num-layers", "hidden_size": "--hidden-size", "ffn_size": "--ffn-hidden-size",
    "max_positions": "--max-position-embeddings", "positions": "--position-embedding-type",
    "num_heads": "--num-attention-heads", "num_kv_heads": "--num-query-groups",
    "head_size": "--kv-channels", "norms": "--norm-placement", "rope_layers": "--no-rope-freq",
    "output_gate": "--attention-output-gate",
}  # fmt: skip


def begin_from_bert(model: ICT | Classifier, folder: str) -> None:
    """Give a model the weights of the BERT in a folder: a run of any layout, or Hugging Face's.

    Raises:
        ValueError: no BERT there, or one that computes something else than the model's.
    """
    wanted = (model.bert if isinstance(model, Classifier) else model.query.bert).config
    bert = _read_bert(Path(folder), wanted.vocab_size)
    # If one of them has no experts, their number says all about the other's.
    alike = (wanted.moe is None) == (bert.config.moe is None)
    here, there = _computes(wanted, experts=alike), _computes(bert.config, experts=alike)
    names = [name for name in here | there if here.get(name) != there.get(name)]
    if names:
        ours, theirs = (
            ", ".join(f"{_FLAGS.get(name, name)} {of.get(name)}" for name in names)
            for of in (here, there)
        )
        raise ValueError(
            f"Expected a BERT of this model's {ours} in {folder} (--bert-load), got {theirs}."
        )
    model.begin_from(bert)


def _read_bert(folder: Path, vocab_size: int) -> Bert:
    if not (folder / "config.json").is_file():
        return load_trained(folder, kinds=("bert",)).model
    config, weights = read_model(folder, headless=True)
    if config.model != "bert":
        raise ValueError(f"Expected a BERT in {folder} (--bert-load), got {config.model}.")
    weights = with_rows(weights, vocab_size)  # theirs is not padded
    bert = whole_model(config, vocab_size=rows_of(weights))
    assert isinstance(bert, Bert)
    # All of the folder is in `weights`; heads that it has not are drawn, and nobody takes them.
    bert.load_state_dict(dict(weights), assign=True, strict=False)
    return bert


def _computes(config: TransformerConfig, *, experts: bool) -> dict[str, Any]:
    """What says what the weights compute, by name; without `experts` only the number of them."""
    moe = config.moe
    free = _FREE if config.positions == "learned" else _FREE | {"max_positions"}
    free = free if experts else free | {"moe_layers"}
    found = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in free}
    if not experts:
        return {**found, flag_name("moe_num_experts"): moe and moe.num_experts}
    if moe is None:
        return found
    # Sinkhorn's balance and noise are of training alone: what they trained is evaluated by scores.
    by_score = config.router in ("sinkhorn", "noisy_topk")
    found["--moe-router-type"] = "topk" if by_score else config.router
    found["--moe-router-noise"] = config.router == "noisy_topk"  # which has weights of its own
    flags = TrainConfig.moe_argument_names()
    for name in (f.name for f in fields(moe) if f.name not in _FREE_OF_EXPERTS):
        said = flag_name(flags[name]) if name in flags else f"experts' {name}"
        found[said] = getattr(moe, name)
    return found
