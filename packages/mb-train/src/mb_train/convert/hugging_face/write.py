"""Run folders to Hugging Face folders."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from mb_layers.on_demand import Changed, OnDemand, Picked
from mb_layers.state_dicts import Rule, Translation, reversed_rules
from torch import Tensor

from mb_train.checkpoint.finite import all_finite
from mb_train.convert.hugging_face.architecture import (
    EMBEDDING,
    HEAD,
    Architecture,
    copies_of_ends,
)
from mb_train.convert.hugging_face.architectures import architecture_for
from mb_train.convert.hugging_face.config_json import Json
from mb_train.convert.hugging_face.safetensors_files import write_tensors
from mb_train.convert.hugging_face.tokenizer import write_tokenizer
from mb_train.folder.run_folder import has_name_of_a_checkpoint
from mb_train.folder.whole_files import replaceable, replaced_folder, write_text
from mb_train.loading import Trained, outlined


def export_model(
    run: Path,
    target: Path,
    *,
    dtype: torch.dtype = torch.float32,
    mtp_num_layers: int | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Write the model of a run as a Hugging Face folder.

    Args:
        dtype: of the weights written.
        mtp_num_layers: modules for further tokens to write, of those that there are; None: all.

    Raises:
        ValueError: no checkpoint, a model that Hugging Face has no architecture for, weights that
            `dtype` cannot hold, or a target that is there already.
        OSError: files that cannot be read or written.
    """
    from mb_train.checkpoint.weights import SavedWeights

    _refuse_filled(target)
    trained = outlined(run, kinds=("gpt", "bert", "t5"), mtp_num_layers=mtp_num_layers)
    config = trained.config
    found = architecture_for(config)
    assert found.config is not None
    back = found.back or (lambda *of: reversed_rules(found.rules(*of)))
    rules = back(config, trained.model.config)
    ours = SavedWeights(trained.checkpoint, trained.model, left_out=trained.left_out)
    tokenizer = trained.tokenizer
    about = {
        "architectures": [found.name],
        "model_type": found.model_type,
        "vocab_size": trained.vocab_size,
        "dtype": str(dtype).removeprefix("torch."),
        "torch_dtype": str(dtype).removeprefix("torch."),
        **found.special(tokenizer),
        "initializer_range": config.init_method_std,
        **found.config(config),
    }
    begins = _begins_of_modules(found, found.settled(about), config.mtp_num_layers)
    weights = _named(_theirs(ours, trained, rules, dtype), found.prefix, begins)
    with replaced_folder(target) as draft:
        write_tensors(draft, Changed(weights, partial(_checked, dtype)))
        write_text(draft / "config.json", json.dumps(about, indent=2) + "\n")
        there = write_tokenizer(config, tokenizer, trained.checkpoint.parent, draft)
        _refuse_filled(target)  # by another, while this was written
    count = sum(outline.numel() for outline in weights.outlines().values())
    say(f"{found.name} with {count:,} weights: {target}")
    if config.moe_num_experts is not None and config.moe_capacity_factor:
        say("its experts had a capacity in training; elsewhere no token is dropped")
    if config.moe_num_experts is not None and config.moe_router_type == "sinkhorn":
        say("its experts were chosen by Sinkhorn's balance in training; elsewhere by their scores")
    if not there:
        name = config.tokenizer or config.tokenizer_type or "gpt2"
        say(f"no files of its tokenizer, {name}, are in it: transformers loads an empty one")
    elif tokenizer.begins_with is not None and not tokenizer.prepend_bos:
        first = tokenizer.decode([tokenizer.begins_with])
        say(
            f"its tokenizer.json begins texts with {first}, which this run was not told to: for "
            "documents without it, tokenize with add_special_tokens=False"
        )


def _theirs(
    ours: Mapping[str, Tensor], trained: Trained, rules: Sequence[Rule], dtype: torch.dtype
) -> OnDemand[str]:
    """Tensors by their names, those of one of ours one after the other."""
    # What is no parameter, the bias of a router, moves by less than 16 bits can tell.
    buffers = {name for name, _ in trained.model.named_buffers()}
    exact = {rule.target for rule in rules if not buffers.isdisjoint(rule.sources)}
    theirs = Translation(ours, rules, [rule.target for rule in rules], shared=True)
    return Changed(theirs, lambda name, tensor: tensor if name in exact else tensor.to(dtype))


def _begins_of_modules(found: Architecture, settled: Json, number: int) -> list[str]:
    """How the names of modules begin that are to hold the embedding and the head once more."""
    if found.modules is None or not found.modules.with_ends:
        return []
    return [first for k in range(number) for first in found.modules.begin(settled, k)]


def _named(weights: Mapping[str, Tensor], prefix: str, begins: Sequence[str]) -> Picked:
    """Tensors by their names in files, which hold some of them more than once."""
    names = {n if n.startswith("lm_head.") else f"{prefix}{n}": n for n in weights}
    head = HEAD if HEAD in names else EMBEDDING
    copies = {copy: of for begin in begins for copy, of in copies_of_ends(begin, head).items()}
    # Behind what they are copies of, which is read once for all of them.
    again = {name: [copy for copy, of in copies.items() if of == name] for name in names}
    return Picked({n: (weights, names[name]) for name in names for n in (name, *again[name])})


def _checked(dtype: torch.dtype, name: str, weight: Tensor) -> Tensor:
    if not weight.is_meta and not all_finite([weight]):
        raise ValueError(
            f"Expected weights that {dtype} can hold, got larger ones in {name}. Give --dtype bf16."
        )
    return weight


def _refuse_filled(target: Path) -> None:
    if has_name_of_a_checkpoint(target):
        raise ValueError(
            f"Expected a folder for a model, got {target}, the name of a checkpoint. Give another."
        )
    if replaceable(target).exists() and any(target.iterdir()):
        raise ValueError(f"Expected an empty or new folder to write to, got {target}.")
