"""Hugging Face folders to run folders."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import mb_data
import torch
from mb_layers.state_dicts import Translation
from torch import Tensor

from mb_train.config import TrainConfig, whole
from mb_train.convert.hugging_face import llama, llama4, mistral4
from mb_train.convert.hugging_face.architecture import (
    EMBEDDING,
    HEAD,
    Architecture,
    Rules,
    copies_of_ends,
)
from mb_train.convert.hugging_face.architectures import architecture_of
from mb_train.convert.hugging_face.chosen import chosen
from mb_train.convert.hugging_face.config_json import Json, read_object
from mb_train.convert.hugging_face.mxfp4 import PACKED
from mb_train.convert.hugging_face.quantized import block_of
from mb_train.convert.hugging_face.safetensors_files import TensorFolder
from mb_train.convert.hugging_face.text_inside import text_settings, with_text_inside
from mb_train.convert.hugging_face.tokenizer import find_tokenizer, named_tokenizer
from mb_train.convert.new_run import (
    imported_config,
    in_fp32,
    refuse_run,
    shapes_of,
    write_run,
)
from mb_train.convert.vocabulary import rows_of, with_rows
from mb_train.data.tokenizers import load_tokenizer
from mb_train.tasks.architecture import transformer_config

_STACKED = re.compile(r"\.experts\.((gate_)?up_proj|mlp\.v1)$")
_ADAPTER = "adapter_config.json"
_TOKENS = "embedding.tokens.weight"  # by our names
_ORDER_HEAD, _POOLER = "cls.seq_relationship.weight", "bert.pooler.dense.weight"
_BERT_HEADS = ("lm_head.", "order_head.")  # by our names


def read_model(
    folder: Path,
    *,
    say: Callable[[str], None] = print,
    headless: bool = False,
    mtp_num_layers: int | None = None,
    **fields: Any,
) -> tuple[TrainConfig, Mapping[str, Tensor]]:
    """The configuration and the weights of a Hugging Face folder, by our names.

    Each weight is read when it is asked for, every time anew; of all of them together the shapes
    are known to fit.

    Args:
        say: gets a line for each setting that is left out.
        headless: a BERT may be without its heads, all of them; then they are not among the weights.
        mtp_num_layers: modules for further tokens to read, of those that there are; None: all.
        fields: of the configuration, over what the folder says.

    Raises:
        ValueError: an architecture or a setting that we have not; tensors that are missing, left
            over, or of the wrong shape.
    """
    path = folder / "config.json"
    whole_model = read_object(path)
    theirs = text_settings(whole_model)
    found = architecture_of(theirs)
    if theirs is not whole_model:
        found = with_text_inside(found)
    config, vocab_size = _config(path, theirs, found, fields)
    settled = found.settled(theirs)
    for line in _settings_left_out(settled, config):
        say(line)
    if (folder / _ADAPTER).is_file():  # which transformers would add to the weights
        raise ValueError(
            f"Expected a model without an adapter, got {_ADAPTER} in {folder}. Merge the adapter "
            "into the weights and save them, or move it elsewhere to read the model without it."
        )
    source = _tensors(folder, found, block_of(theirs))
    there = _modules(source, found, settled)
    modules = _wanted(there, found, settled, mtp_num_layers)
    config = dataclasses.replace(config, mtp_num_layers=len(modules))
    head = HEAD if HEAD in source else EMBEDDING
    for begin in modules:
        say(f"{_called(begin)}: read as a module of --mtp-num-layers; 0 would leave it out")
        for first in begin:
            _leave_out_copies(source, folder, copies_of_ends(first, head))
    for line in _left_out(source, modules, there[len(modules) :], found):
        say(line)
    headless &= config.model == "bert" and not any(name.startswith("cls.") for name in source)
    if config.model == "bert":
        # The first BERTs' files have this head, though their config.json names a class without.
        order = _POOLER in source if headless else config.bert_binary_head or _ORDER_HEAD in source
        config = dataclasses.replace(config, bert_binary_head=order)
    rules_of = _rules_of(found, config, source, folder)
    rules = rules_of(config, transformer_config(config, vocab_size))
    embedding = next(r.sources[0] for r in rules if r.target == _TOKENS)
    tied = not config.untie_embeddings_and_output_weights
    if tied and HEAD in source:
        if embedding not in source:  # safetensors' save_model keeps one name, the first by alphabet
            source.rename(f"^{re.escape(HEAD)}$", embedding)
        elif torch.equal(source[HEAD], source[embedding]):
            source.leave_out(re.escape(HEAD))
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
    place = {name: number for number, name in enumerate(shapes)}
    rules.sort(key=lambda rule: place.get(rule.target, 0))
    weights = Translation(source, rules, shapes, shared=found.shared)
    try:
        return config, in_fp32(weights, shapes, folder)
    except RuntimeError as error:  # parts that cannot be laid together
        raise ValueError(f"{folder} has tensors of other sizes than {path}: {error}.") from None


def _config(
    path: Path, theirs: Json, found: Architecture, fields: Mapping[str, Any]
) -> tuple[TrainConfig, int]:
    """Of a config.json: ours, with `fields` over it, and the rows of its vocabulary."""
    try:
        vocab_size = theirs["vocab_size"]
        if vocab_size < 1:
            raise ValueError(f"Expected {path} to have a vocab_size above 0, got {vocab_size}.")
        config = imported_config(found.read(theirs), vocab_size, **fields)
        return config, vocab_size
    except KeyError as error:
        raise ValueError(f"{path} lacks {error}.") from None
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{path} has a value that it should not have: {error}.") from None


def _rules_of(
    found: Architecture, config: TrainConfig, source: TensorFolder, folder: Path
) -> Rules:
    """What makes the rules for the way in which the files hold experts.

    Raises:
        ValueError: less tensors than layers or experts. It is said before there is a rule for each,
            because config.json may name any number of them.
    """
    rules_of, least = found.rules, max(whole(config.num_layers), config.decoder_layers)
    if found.packed is not None and any(name.endswith(PACKED) for name in source):
        rules_of = found.packed
    elif found.stacked is not None and any(map(_STACKED.search, source)):
        rules_of = found.stacked
    else:
        least = max(least, config.moe_num_experts or 0)
    if least > len(source):
        raise ValueError(
            f"Expected a tensor for each layer and each expert, got {len(source)} in {folder}, and "
            f"{least:,} layers or experts in {folder / 'config.json'}."
        )
    return rules_of


def _settings_left_out(theirs: Json, config: TrainConfig) -> Iterator[str]:
    """A line on each of their settings that our configuration of the model does not have."""
    shorter = config.positions < theirs.get("max_position_embeddings", 0)
    window = theirs.get("sliding_window")
    if shorter and window == config.positions:
        yield f"its attention has a window: taken for texts of {window:,} tokens, which fit into it"
    growth = llama.rope_of(theirs)
    if shorter and growth.get(mistral4.GROWTH):
        yield f"its queries grow with their place: taken for texts of {config.positions:,} tokens"
    if shorter and growth.get("short_factor") is not None:
        yield (
            f"its rotations are slowed otherwise in longer texts: taken for those of "
            f"{config.positions:,} tokens"
        )
    if shorter and llama4.CHUNK in theirs:
        yield (
            "its attention is in chunks, and its queries grow with their place: taken for texts of "
            f"{config.positions:,} tokens, in which neither is to be seen"
        )
    seen = chosen(theirs)
    if shorter and seen == config.positions:
        yield f"its attention sees {seen:,} tokens that it chooses: taken for texts of so many"
    name = "input_jitter_noise" if "input_jitter_noise" in theirs else "router_jitter_noise"
    if noise := theirs.get(name):
        yield (
            f"its {name} of {noise} is left out: in training its experts saw that "
            "noise too, that of --moe-jitter-eps is seen by the router alone"
        )
    of_embeddings = theirs.get("embd_pdrop", config.hidden_dropout)
    if of_embeddings != config.hidden_dropout:
        yield (
            f"its embd_pdrop of {of_embeddings} is left out: --hidden-dropout is of embeddings "
            f"too, {config.hidden_dropout}"
        )


def _tensors(folder: Path, found: Architecture, block: tuple[int, int] | None) -> TensorFolder:
    """The tensors of a folder, by today's names and each of them once."""
    packed = () if found.packed is None else PACKED
    source = TensorFolder(folder, prefix=found.prefix, packed=packed, block=block)
    for pattern, name in found.renamed.items():
        source.rename(pattern, name)
    for pattern in found.left_out:
        source.leave_out(pattern)
    _leave_out_copies(source, folder, found.copies)
    return source


def _leave_out_copies(source: TensorFolder, folder: Path, copies: Mapping[str, str]) -> None:
    """Forget tensors that are there once more under another name, or take one for what is not.

    Raises:
        ValueError: they hold other numbers.
    """
    for copy, name in copies.items():
        if copy in source and name not in source:
            source.rename(f"^{re.escape(copy)}$", name)
        elif copy in source:
            if not torch.equal(source[copy], source[name]):
                raise ValueError(
                    f"Expected {copy} of {folder} to be {name} once more, got other numbers: this "
                    "model has something that ours have not."
                )
            source.leave_out(re.escape(copy))


def _modules(source: TensorFolder, found: Architecture, settled: Json) -> list[tuple[str, ...]]:
    """How the names of each module for further tokens begin, of those that there are."""
    modules, there = found.modules, []
    if modules is not None:
        for k in range(modules.count(settled)):
            begin = modules.begin(settled, k)
            if not any(name.startswith(begin) for name in source):
                break
            there.append(begin)
    return there


def _wanted(
    there: list[tuple[str, ...]], found: Architecture, settled: Json, wanted: int | None
) -> list[tuple[str, ...]]:
    """Those of them to read.

    Raises:
        ValueError: more are wanted than there are; some of those that config.json counts.
    """
    modules = found.modules
    if modules is None or not modules.read:
        there = []
    elif there and len(there) < (counted := modules.count(settled)) and wanted != 0:
        raise ValueError(
            f"Expected {counted} modules for further tokens, of which config.json tells, got "
            f"{', '.join(map(_called, there))} alone. --mtp-num-layers 0 leaves them out."
        )
    if wanted is not None and not 0 <= wanted <= len(there):
        raise ValueError(
            f"Expected --mtp-num-layers of 0 to {len(there)}, the modules for further tokens "
            f"that there are, got {wanted}."
        )
    return there[:wanted]


def _called(begin: tuple[str, ...]) -> str:
    return ", ".join(first.removesuffix(".") for first in begin)


def _left_out(
    source: TensorFolder,
    modules: list[tuple[str, ...]],
    others: list[tuple[str, ...]],
    found: Architecture,
) -> Iterator[str]:
    """Leave out what is not of the model, nor of these modules, a line on each."""
    why = "it was not asked for" if found.modules and found.modules.read else "ours do not so"
    for begin in others:
        source.leave_out(f"({_any(begin)}).*")
        yield f"{_called(begin)}: left out, it guesses tokens beyond the next, {why}"
    kept = "".join(f"(?!{_any(begin)})" for begin in modules)
    for pattern, what in found.beside.items():
        if name := next(filter(re.compile(kept + pattern).match, source), None):
            source.leave_out(kept + pattern)
            yield f"what {name} belongs to is left out: {what}"


def _any(begin: tuple[str, ...]) -> str:
    return "|".join(map(re.escape, begin))


def import_model(
    source: Path,
    target: Path,
    *,
    tokenizer: str | None = None,
    divisible_by: int = 1,
    mtp_num_layers: int | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Make a run folder of a Hugging Face folder: to evaluate, generate from, or `--finetune`.

    A vocabulary with less rows than the tokenizer has tokens grows, see `vocabulary.with_rows`.

    Args:
        tokenizer: by name or file; None takes the one in the folder.
        divisible_by: rows of the vocabulary come in a multiple of it, as tensor parallelism wants.
        mtp_num_layers: see `read_model`.

    Raises:
        ValueError: as `read_model`; no tokenizer; a target that holds a run.
        OSError: files that cannot be read or written.
    """
    refuse_run(target)
    if divisible_by < 1:
        raise ValueError(
            f"Expected --make-vocab-size-divisible-by of at least 1, got {divisible_by}."
        )
    config, weights = read_model(source, say=say, mtp_num_layers=mtp_num_layers)
    if tokenizer is None:
        fields, own = find_tokenizer(source)
    else:
        fields, own = named_tokenizer(tokenizer), []
    config = dataclasses.replace(config, **fields)
    rows, tokens = rows_of(weights), load_tokenizer(config).vocab_size
    wanted = mb_data.padded_vocab_size(max(rows, tokens), divisible_by=divisible_by)
    if wanted > rows:
        say(f"vocabulary: {rows:,} rows, {tokens:,} tokens; {wanted - rows:,} new rows, their mean")
        weights = with_rows(weights, wanted)
        config = dataclasses.replace(config, make_vocab_size_divisible_by=wanted)
    write_run(target, config, weights, own=own, say=say)
