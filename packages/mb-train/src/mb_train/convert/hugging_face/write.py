"""Run folders to Hugging Face folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from mb_layers.state_dicts import translate_back

from mb_train.config import whole
from mb_train.convert.hugging_face.architecture import EMBEDDING, HEAD, copies_behind
from mb_train.convert.hugging_face.architectures import architecture_for
from mb_train.convert.hugging_face.safetensors_files import write_tensors
from mb_train.convert.hugging_face.tokenizer import write_tokenizer
from mb_train.folder.whole_files import replaceable, replaced_folder, write_text
from mb_train.loading import load_trained


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
    _refuse_filled(target)
    trained = load_trained(run, kinds=("gpt", "bert", "t5"), mtp_num_layers=mtp_num_layers)
    config, state = trained.config, trained.model.state_dict()
    found = architecture_for(config)
    assert found.config is not None
    rules = found.rules(config, trained.model.config)
    names = [name for rule in rules for name in rule.sources]
    # What is no parameter, the bias of a router, moves by less than 16 bits can tell.
    exact = {name for name, _ in trained.model.named_buffers()}
    state = {name: t if name in exact else t.to(dtype) for name, t in state.items()}
    weights = translate_back(state, rules, names)
    weights = {
        name if name.startswith("lm_head.") else f"{found.prefix}{name}": tensor
        for name, tensor in weights.items()
    }
    last = whole(config.num_layers)
    modules, head = (
        range(last, last + config.mtp_num_layers),
        HEAD if HEAD in weights else EMBEDDING,
    )
    copies = copies_behind(modules, head)  # which a file may not hold as one
    weights |= {copy: weights[name].clone() for copy, name in copies.items()}
    large = next((name for name, t in weights.items() if not bool(t.isfinite().all())), None)
    if large is not None:
        raise ValueError(
            f"Expected weights that {dtype} can hold, got larger ones in {large}. Give --dtype "
            "bf16."
        )
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
    with replaced_folder(target) as draft:
        write_tensors(draft, weights)
        write_text(draft / "config.json", json.dumps(about, indent=2) + "\n")
        there = write_tokenizer(config, tokenizer, trained.checkpoint.parent, draft)
        _refuse_filled(target)  # by another, while this was written
    say(f"{found.name} with {sum(t.numel() for t in weights.values()):,} weights: {target}")
    if config.moe_num_experts is not None and config.moe_capacity_factor:
        say("its experts had a capacity in training; elsewhere no token is dropped")
    if not there:
        name = config.tokenizer or config.tokenizer_type or "gpt2"
        say(f"no files of its tokenizer, {name}, are in it: transformers loads an empty one")


def _refuse_filled(target: Path) -> None:
    if replaceable(target).exists() and any(target.iterdir()):
        raise ValueError(f"Expected an empty or new folder to write to, got {target}.")
