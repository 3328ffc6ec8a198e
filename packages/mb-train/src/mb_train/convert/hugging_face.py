"""Hugging Face folders to run folders and back."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mb_data
import torch
from mb_layers.state_dicts import translate, translate_back
from torch import Tensor

from mb_train.checkpoint.read import Progress
from mb_train.checkpoint.saver import Saver
from mb_train.config import TrainConfig, whole
from mb_train.convert.architectures import (
    Architecture,
    architecture_for,
    architecture_of,
    imported_config,
)
from mb_train.convert.safetensors_files import TensorFolder, write_tensors
from mb_train.convert.tokenizer import find_tokenizer, named_tokenizer, write_tokenizer
from mb_train.convert.vocabulary import rows_of, with_rows
from mb_train.data.tokenizers import keep_tokenizer, load_tokenizer
from mb_train.folder.lock import locked
from mb_train.folder.run_folder import TOKENIZER, checkpoints
from mb_train.folder.whole_files import replaceable, replaced_folder, write_text
from mb_train.loading import load_trained
from mb_train.models.unfilled import unfilled
from mb_train.tasks.architecture import transformer_config
from mb_train.tasks.make import whole_model
from mb_train.untrusted import json_of

_STACKED = re.compile(r"\.experts\.gate_up_proj$")
_ADAPTER = "adapter_config.json"
_ORDER_HEAD, _POOLER = "cls.seq_relationship.weight", "bert.pooler.dense.weight"
_BERT_HEADS = ("lm_head.", "order_head.")  # by our names


def read_model(
    folder: Path,
    *,
    say: Callable[[str], None] = print,
    headless: bool = False,
    **fields: Any,
) -> tuple[TrainConfig, dict[str, Tensor]]:
    """The configuration and the weights of a Hugging Face folder, by our names.

    Args:
        say: gets a line for each setting that is left out.
        headless: a BERT may be without its heads, all of them; then they are not among the weights.
        fields: of the configuration, over what the folder says.

    Raises:
        ValueError: an architecture or a setting that we have not; tensors that are missing, left
            over, or of the wrong shape.
    """
    path = folder / "config.json"
    theirs = _json(path)
    found = architecture_of(theirs)
    try:
        vocab_size = theirs["vocab_size"]
        if vocab_size < 1:
            raise ValueError(f"Expected {path} to have a vocab_size above 0, got {vocab_size}.")
        config = imported_config(found.read(theirs), vocab_size, **fields)
    except KeyError as error:
        raise ValueError(f"{path} lacks {error}.") from None
    except (TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(f"{path} has a value that it should not have: {error}.") from None
    for line in _left_out({**found.defaults, **theirs}, config):
        say(line)
    if (folder / _ADAPTER).is_file():  # which transformers would add to the weights
        raise ValueError(
            f"Expected a model without an adapter, got {_ADAPTER} in {folder}. Merge the adapter "
            "into the weights and save them, or move it elsewhere to read the model without it."
        )
    source = _tensors(folder, found)
    if config.model == "bert" and _ORDER_HEAD in source:
        # The first BERTs' files have it, though their config.json names a class that has not.
        config = dataclasses.replace(config, bert_binary_head=True)
    headless &= config.model == "bert" and not any(name.startswith("cls.") for name in source)
    if headless:
        config = dataclasses.replace(config, bert_binary_head=_POOLER in source)
    rules_of, least = found.rules, max(whole(config.num_layers), config.decoder_layers)
    if found.stacked is not None and any(map(_STACKED.search, source)):
        rules_of = found.stacked
    else:
        least = max(least, config.moe_num_experts or 0)
    if least > len(source):  # before there is a rule for each
        raise ValueError(
            f"Expected a tensor for each layer and each expert, got {len(source)} in {folder}, and "
            f"{least:,} layers or experts in {path}."
        )
    rules = rules_of(config, transformer_config(config, vocab_size))
    tied = next(r.sources[0] for r in rules if r.target == "embedding.tokens.weight")
    stored = "lm_head.weight" in source and tied in source
    if stored and not config.untie_embeddings_and_output_weights:
        if torch.equal(source["lm_head.weight"], source[tied]):
            source.leave_out("lm_head.weight")
        else:  # a head of its own: T5 1.1 is written like this, as if it were tied
            config = dataclasses.replace(config, untie_embeddings_and_output_weights=True)
            rules = rules_of(config, transformer_config(config, vocab_size))
    try:
        shapes = shapes_of(config, vocab_size)
    except (RuntimeError, TypeError) as error:  # larger than any tensor may be
        raise ValueError(f"{path} has a size that it should not have: {error}.") from None
    if headless:
        rules = [rule for rule in rules if not rule.target.startswith(_BERT_HEADS)]
        shapes = {n: shape for n, shape in shapes.items() if not n.startswith(_BERT_HEADS)}
    try:
        weights = translate(source, rules, shapes)
    except RuntimeError as error:  # parts that cannot be laid together
        raise ValueError(f"{folder} has tensors of other sizes than {path}: {error}.") from None
    check_shapes(weights, shapes, folder)
    return config, {name: tensor.float().contiguous() for name, tensor in weights.items()}


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json_of(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"Cannot read {path}: {error}.") from None
    if not isinstance(found, dict):
        raise ValueError(f"Expected {path} to hold a JSON object.")
    return found


def _left_out(theirs: Mapping[str, Any], config: TrainConfig) -> Iterator[str]:
    """A line on each of their settings that our configuration of the model does not have."""
    window = theirs.get("sliding_window")
    if window == config.positions < theirs.get("max_position_embeddings", 0):
        yield f"its attention has a window: taken for texts of {window:,} tokens, which fit into it"
    if noise := theirs.get("router_jitter_noise"):
        yield (
            f"its router_jitter_noise of {noise} is left out: in training its experts saw that "
            "noise too, that of --moe-jitter-eps is seen by the router alone"
        )
    of_embeddings = theirs.get("embd_pdrop", config.hidden_dropout)
    if of_embeddings != config.hidden_dropout:
        yield (
            f"its embd_pdrop of {of_embeddings} is left out: --hidden-dropout is of embeddings "
            f"too, {config.hidden_dropout}"
        )


def _tensors(folder: Path, found: Architecture) -> TensorFolder:
    """The tensors of a folder, by today's names and each of them once."""
    source = TensorFolder(folder, prefix=found.prefix)
    for pattern, name in found.renamed.items():
        source.rename(pattern, name)
    for pattern in found.left_out:
        source.leave_out(pattern)
    for copy, name in found.copies.items():
        if copy in source and name in source:
            if not torch.equal(source[copy], source[name]):
                raise ValueError(
                    f"Expected {copy} of {folder} to be {name} once more, got other numbers: this "
                    "model has something that ours have not."
                )
            source.leave_out(re.escape(copy))
    return source


def import_model(
    source: Path,
    target: Path,
    *,
    tokenizer: str | None = None,
    divisible_by: int = 1,
    say: Callable[[str], None] = print,
) -> None:
    """Make a run folder of a Hugging Face folder: to evaluate, generate from, or `--finetune`.

    A vocabulary with less rows than the tokenizer has tokens grows, see `vocabulary.with_rows`.

    Args:
        tokenizer: by name or file; None takes the one in the folder.
        divisible_by: rows of the vocabulary come in a multiple of it, as tensor parallelism wants.

    Raises:
        ValueError: as `read_model`; no tokenizer; a target that holds a run.
        OSError: files that cannot be read or written.
    """
    refuse_run(target)
    if divisible_by < 1:
        raise ValueError(
            f"Expected --make-vocab-size-divisible-by of at least 1, got {divisible_by}."
        )
    if tokenizer is None:
        fields, own = find_tokenizer(source)
    else:
        fields, own = named_tokenizer(tokenizer), []
    config, weights = read_model(source, say=say, **fields)
    rows, tokens = rows_of(weights), load_tokenizer(config).vocab_size
    wanted = mb_data.padded_vocab_size(max(rows, tokens), divisible_by=divisible_by)
    if wanted > rows:
        say(f"vocabulary: {rows:,} rows, {tokens:,} tokens; {wanted - rows:,} new rows, their mean")
        weights = with_rows(weights, wanted)
        config = dataclasses.replace(config, make_vocab_size_divisible_by=wanted)
    write_run(target, config, weights, own=own, say=say)


def write_run(
    target: Path,
    config: TrainConfig,
    weights: Mapping[str, Tensor],
    *,
    run: Path | None = None,
    own: Sequence[Path] = (),
    say: Callable[[str], None],
) -> None:
    """Write weights by our names as the checkpoint of a run at iteration 0.

    Args:
        run: folder of the run that they are from, if any, with copies of its tokenizer.
        own: the tokenizer's files, where the new run is to name its copies and no longer these.

    Raises:
        ValueError: a tokenizer that the model's vocabulary has no room for; weights that are not
            numbers; a target that holds a run, or that another process is writing.
    """
    vocab_size, tokenizer = rows_of(weights), load_tokenizer(config, run)
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"Expected a tokenizer of at most {vocab_size} tokens, the rows of the model's "
            f"vocabulary, got one of {tokenizer.vocab_size}. Give --tokenizer the model's own."
        )
    wrong = next((name for name, t in weights.items() if not bool(t.isfinite().all())), None)
    if wrong is not None:
        raise ValueError(f"Expected numbers in {wrong}, got NaN or infinity: the model is damaged.")
    with unfilled():
        model = whole_model(config, vocab_size=vocab_size)
    model.load_state_dict(dict(weights), strict=True, assign=True)
    identity = config.model_identity(vocab_size=vocab_size, tokenizer=tokenizer.fingerprint)
    copies = {path: target / TOKENIZER / path.name for path in own}
    named = {str(path): str(copy.absolute()) for path, copy in copies.items()}
    fields = {
        name: named.get(value, value) if isinstance(value, str) else value
        for name, value in dataclasses.asdict(config).items()
    }
    with locked(target):
        refuse_run(target)  # of another, while the weights were read
        saver = Saver(target, say=say)
        if not saver.save(model, None, Progress(0, 0), config=fields, identity=identity, data={}):
            raise OSError(f"Cannot write {target}.")
        keep_tokenizer(config, target, run)
        for path, copy in copies.items():
            shutil.copyfile(path, copy)


def export_model(
    run: Path,
    target: Path,
    *,
    dtype: torch.dtype = torch.float32,
    say: Callable[[str], None] = print,
) -> None:
    """Write the model of a run as a Hugging Face folder.

    Args:
        dtype: of the weights written.

    Raises:
        ValueError: no checkpoint, a model that Hugging Face has no architecture for, weights that
            `dtype` cannot hold, or a target that is there already.
        OSError: files that cannot be read or written.
    """
    _refuse_filled(target)
    trained = load_trained(run, kinds=("gpt", "bert", "t5"))
    config, state = trained.config, trained.model.state_dict()
    found = architecture_for(config)
    rules = found.rules(config, trained.model.config)
    names = [name for rule in rules for name in rule.sources]
    weights = {name: t.to(dtype) for name, t in translate_back(state, rules, names).items()}
    weights = {
        name if name.startswith("lm_head.") else f"{found.prefix}{name}": tensor
        for name, tensor in weights.items()
    }
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


def shapes_of(config: TrainConfig, vocab_size: int) -> dict[str, torch.Size]:
    """The shapes of a model's weights, by our names."""
    with unfilled():
        model = whole_model(config, vocab_size=vocab_size)
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def check_shapes(
    weights: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], folder: Path
) -> None:
    """Raise ValueError for a weight, read from `folder`, of another shape than the model's."""
    for name, shape in shapes.items():
        if weights[name].shape != shape:
            raise ValueError(
                f"Expected {name} of {folder} to be {list(shape)}, got {list(weights[name].shape)}."
            )


def refuse_run(target: Path) -> None:
    """Raise ValueError if a folder holds checkpoints already, or a model of others.

    What is done with a folder of both is done with that model.
    """
    for holds, found in (
        ("a run", checkpoints(target)),
        ("a model of Hugging Face's", (target / "config.json").exists()),
    ):
        if found:
            raise ValueError(f"Expected a new folder, but {target} holds {holds}. Give another.")


def _refuse_filled(target: Path) -> None:
    if replaceable(target).exists() and any(target.iterdir()):
        raise ValueError(f"Expected an empty or new folder to write to, got {target}.")
