"""Checkpoints of Megatron-LM: of 2023 and its MegaBlocks fork, and of Megatron Core.

    iter_XXXXXXX/mp_rank_*/model_optim_rng.pt    or model_rng.pt beside a distributed optimizer

Each holds pickled arguments and a rank's share of the model. The shares are joined and renamed; the
optimizer's are left out. `megatron_fork` and `megatron_core` know the two layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from mb_train.config import TrainConfig
from mb_train.convert import megatron_core, megatron_fork
from mb_train.convert.hugging_face import check_shapes, refuse_run, shapes_of, write_run
from mb_train.convert.megatron_ranks import models_of, read_ranks, whole_models
from mb_train.folder.run_folder import LATEST, iteration_folder

_GPT2 = "GPT2BPETokenizer"
_LAYOUTS = (megatron_fork.LAYOUT, megatron_core.LAYOUT)
# In metadata.json of a checkpoint in Core's other formats, of which each file has parts of tensors.
_DISTRIBUTED = b'"sharded_backend"'


def is_megatron(folder: Path) -> bool:
    """Whether a folder is such a checkpoint, or a save folder with one, in whatever format."""
    ranks = any(folder.glob("mp_rank_*")) or any(folder.glob("*/mp_rank_*"))
    return ranks or any(map(_is_distributed, (folder, *folder.glob("*/"))))


def _is_distributed(folder: Path) -> bool:
    file = folder / "metadata.json"
    return file.is_file() and _DISTRIBUTED in file.read_bytes()


def read_megatron(
    folder: Path, *, tokenizer: str | None = None
) -> tuple[TrainConfig, dict[str, Tensor]]:
    """The configuration and the weights of a GPT, by our names.

    Args:
        folder: iter_XXXXXXX, or the folder that it is in.
        tokenizer: by name or file; None is GPT-2's, if that is what the checkpoint names.

    Raises:
        ValueError: another model, or another tokenizer than GPT-2's and none is given; ranks that
            are missing, a damaged file, tensors left over or missing; a distributed format.
    """
    folder = _iteration(folder)
    try:
        return _read(folder, tokenizer)
    except AttributeError as error:
        raise ValueError(f"The arguments in {folder} lack {error.name}.") from None
    except KeyError as error:
        raise ValueError(f"{folder} lacks {error}, in a rank at least.") from None
    except (TypeError, IndexError, RuntimeError) as error:
        raise ValueError(f"{folder} has a value that it should not have: {error}.") from None


def _read(folder: Path, tokenizer: str | None) -> tuple[TrainConfig, dict[str, Tensor]]:
    ranks, layout = read_ranks(folder, _LAYOUTS)
    first = next(iter(ranks.values()))
    args, version = first["args"], first.get("checkpoint_version", 0)
    if version < 2:
        raise ValueError(f"Expected {folder} of checkpoint version 2 or later, got {version}.")
    kind = getattr(args, "tokenizer_type", None) or _GPT2
    if tokenizer is None and kind != _GPT2:
        raise ValueError(
            f"Expected --tokenizer, for {folder} was trained with a {kind}, whose files it does "
            "not hold. Give their name or folder."
        )
    names = {n for content in ranks.values() for model in models_of(content) for n in model}
    try:
        config = layout.config(args, names, tokenizer or "gpt2")
    except ValueError as error:
        raise ValueError(
            f"The arguments in {folder} are of no model that is known: {error}"
        ) from None
    wholes = whole_models(ranks, layout, folder)
    whole = wholes[0]
    tied = None if config.untie_embeddings_and_output_weights else whole.pop(layout.head, None)
    if tied is not None and not torch.equal(tied, whole["embedding.word_embeddings.weight"]):
        raise ValueError(f"The head of {folder} differs from the embedding it is tied to.")
    layers = {name.split(".")[1] for name in whole if name.startswith("layers.")}
    if len(layers) != args.num_layers:
        raise ValueError(f"Expected {args.num_layers} layers in {folder}, got {len(layers)}.")
    weights = layout.renamed(wholes, config, args.padded_vocab_size)
    check_shapes(weights, shapes_of(config, args.padded_vocab_size), folder)
    return config, {name: tensor.float().contiguous() for name, tensor in weights.items()}


def import_megatron(
    source: Path, target: Path, *, tokenizer: str | None = None, say: Callable[[str], None] = print
) -> None:
    """Make a run folder of such a checkpoint: to evaluate, generate from, or `--finetune`.

    Raises:
        ValueError: as `read_megatron`; a target that holds a run.
    """
    refuse_run(target)
    config, weights = read_megatron(source, tokenizer=tokenizer)
    write_run(target, config, weights, say=say)


def _iteration(folder: Path) -> Path:
    if any(folder.glob("mp_rank_*")):
        return folder
    latest = folder / LATEST
    name = latest.read_text(errors="replace").strip() if latest.is_file() else ""
    found = folder / (iteration_folder(int(name)) if name.isdecimal() else name)
    if _is_distributed(found):
        raise ValueError(
            f"Expected {found} in Megatron's format torch, got a distributed one: run the script "
            "that trained it with --load, --ckpt-convert-format torch and --ckpt-convert-save DIR, "
            "and give DIR/torch."
        )
    if not name or not any(found.glob("mp_rank_*")):
        raise ValueError(
            f"Expected {latest} to name a checkpoint, got {name[:40]!r}. Give the folder that the "
            "mp_rank_* are in."
        )
    return found
