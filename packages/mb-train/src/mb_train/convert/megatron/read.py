"""Checkpoints of Megatron-LM (of 2023, and its MegaBlocks fork) and of Megatron Core: read.

    iter_XXXXXXX/mp_rank_*/                      format torch, see `ranks`
    iter_XXXXXXX/metadata.json, common.pt, ...   format torch_dist, see `torch_dist`

Each comes with arguments, which say what the model is. `fork` and `core` know the models' layouts.
What the optimizer keeps is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mb_layers.on_demand import Picked
from mb_layers.state_dicts import Rule, Translation
from torch import Tensor

from mb_train.config import TrainConfig
from mb_train.convert.megatron import core, fork
from mb_train.convert.megatron.ranks import read_ranks
from mb_train.convert.megatron.torch_dist import format_of, is_distributed, read_distributed
from mb_train.convert.new_run import in_fp32, refuse_run, shapes_of, write_run
from mb_train.folder.run_folder import LATEST, iteration_folder
from mb_train.words import counted

_GPT2 = "GPT2BPETokenizer"
_NORM = re.compile(r".*norm(_\w+)?\.weight")  # by our names
_LAYOUTS = (fork.LAYOUT, core.LAYOUT)


def is_megatron(folder: Path) -> bool:
    """Whether a folder is such a checkpoint, or a save folder with one, in whatever format."""
    ranks = any(folder.glob("mp_rank_*")) or any(folder.glob("*/mp_rank_*"))
    if ranks or any(map(is_distributed, (folder, _latest(folder)))):
        return True
    return any(format_of(path) is not None for path in folder.glob("*/"))  # none is named


def read_megatron(
    folder: Path, *, tokenizer: str | None = None, mtp_num_layers: int | None = None
) -> tuple[TrainConfig, Mapping[str, Tensor]]:
    """The configuration and the weights of a GPT, by our names.

    A weight is read when it is asked for, every time anew. In their order none is read twice.

    Args:
        folder: iter_XXXXXXX, or the folder that it is in.
        tokenizer: by name or file; None is GPT-2's, if that is what the checkpoint names.
        mtp_num_layers: modules for further tokens to read, of those that there are; None: all.

    Raises:
        ValueError: another model, or another tokenizer than GPT-2's and none is given; ranks that
            are missing, a damaged file, tensors left over or missing; another format.
    """
    folder = _iteration(folder)
    try:
        return _read(folder, tokenizer, mtp_num_layers)
    except AttributeError as error:
        raise ValueError(f"The arguments in {folder} lack {error.name}.") from None
    except KeyError as error:
        where = "" if is_distributed(folder) else ", in a rank at least"
        raise ValueError(f"{folder} lacks {error}{where}.") from None
    except (TypeError, IndexError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"{folder} has a value that it should not have: {error}.") from None


def _read(
    folder: Path, tokenizer: str | None, modules: int | None
) -> tuple[TrainConfig, Mapping[str, Tensor]]:
    saved = read_distributed(folder) if is_distributed(folder) else read_ranks(folder, _LAYOUTS)
    layout, args = saved.layout, saved.common["args"]
    version = saved.common.get("checkpoint_version", 0)  # as Megatron takes one that does not say
    if version < 2 and not (layout is fork.LAYOUT and version in fork.OLDER):
        raise ValueError(f"Expected {folder} of checkpoint version 2 or later, got {version}.")
    try:
        config = layout.config(args, saved.names, tokenizer or "gpt2")
    except ValueError as error:
        raise ValueError(
            f"The arguments in {folder} are of no model that is known: {error}"
        ) from None
    wholes = saved.wholes()
    if modules is not None:
        config, wholes = _with_modules(config, wholes, modules)
    _check_modules(config)
    layers = {name.split(".")[1] for name in wholes[0] if name.startswith("layers.")}
    if len(layers) != args.num_layers:
        wanted = counted(args.num_layers, "layer")
        raise ValueError(f"Expected {wanted} in {folder}, got {len(layers)}.")
    if version < 2:
        wholes = [fork.reordered(whole, args, version) for whole in wholes]
    weights = layout.renamed(wholes, config, args.padded_vocab_size)
    if getattr(args, "apply_layernorm_1p", False):
        weights = _around_one(weights, config)
    weights = in_fp32(weights, shapes_of(config, args.padded_vocab_size), folder)
    kind = getattr(args, "tokenizer_type", None) or _GPT2
    if tokenizer is None and kind != _GPT2:  # of a model that can be read
        raise ValueError(
            f"Expected --tokenizer, for {folder} was trained with a {kind}, whose files it does "
            "not hold. Give their name or folder."
        )
    return config, weights


def _around_one(weights: Mapping[str, Tensor], config: TrainConfig) -> Mapping[str, Tensor]:
    """With norms, which multiply by 1 more than their weights in the files, as ours have them.

    But not those inside of layers of Mamba-2, which are mamba-ssm's.
    """
    stacks = {"stack": config.hybrid_layer_pattern or ""}
    for number in range(config.mtp_num_layers):
        stacks[f"mtp.{number}.stack"] = config.mtp_pattern or ""
    others = {
        f"{stack}.blocks.{layer}.attention.norm.weight"
        for stack, pattern in stacks.items()
        for layer, kind in enumerate(pattern)
        if kind == "M"
    }
    rules = [
        Rule(
            name,
            (name,),
            (lambda w: w.float() + 1) if _NORM.fullmatch(name) and name not in others else None,
        )
        for name in weights
    ]
    return Translation(weights, rules, list(weights))


def _with_modules(
    config: TrainConfig, wholes: Sequence[Mapping[str, Tensor]], modules: int
) -> tuple[TrainConfig, list[Mapping[str, Tensor]]]:
    """A model with the first of its modules for further tokens alone."""
    there = config.mtp_num_layers
    if not 0 <= modules <= there:
        raise ValueError(
            f"Expected --mtp-num-layers of 0 to {there}, the modules for further tokens that "
            f"there are, got {modules}."
        )
    beginnings = tuple(f"mtp.layers.{number}." for number in range(modules, there))
    kept: list[Mapping[str, Tensor]] = [
        Picked({name: (whole, name) for name in whole if not name.startswith(beginnings)})
        for whole in wholes
    ]
    fewer = replace(config, mtp_num_layers=modules)
    # A layer's losses weigh as much in the mean of fewer layers.
    share = fewer.num_moe_layers / max(config.num_moe_layers, 1)
    weights = {n: share * getattr(config, n) for n in ("moe_loss_weight", "moe_z_loss_weight")}
    return replace(fewer, **weights), kept


def _check_modules(config: TrainConfig) -> None:
    """Raise ValueError for modules for further tokens of which Megatron has no rule.

    The number that it gives to their layer, by which the layer is like others or not, has changed
    with versions and with the pipeline; ours is like the last.
    """
    uneven = {
        "--no-rope-freq": config.unrotated not in (None, 1),
        "--window-attn-skip-freq": config.windows is not None and config.windows[1] is not None,
    }
    for flag in (flag for flag, given in uneven.items() if given and config.mtp_num_layers):
        raise ValueError(
            f"Expected no modules for further tokens in a model with {flag}, got "
            f"{config.mtp_num_layers}: which of the layers they are like depends on Megatron's "
            "version. --mtp-num-layers 0 leaves them out."
        )


def import_megatron(
    source: Path,
    target: Path,
    *,
    tokenizer: str | None = None,
    mtp_num_layers: int | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Make a run folder of such a checkpoint: to evaluate, generate from, or `--finetune`.

    Raises:
        ValueError: as `read_megatron`; a target that holds a run.
    """
    refuse_run(target)
    config, weights = read_megatron(source, tokenizer=tokenizer, mtp_num_layers=mtp_num_layers)
    write_run(target, config, weights, say=say)


def _latest(folder: Path) -> Path:
    """The iteration's folder that a save folder names; itself, if none."""
    latest = folder / LATEST
    name = latest.read_text(errors="replace").strip() if latest.is_file() else ""
    name = name if len(name) < 80 else ""  # what a file system or a number may be too short for
    return folder / (iteration_folder(int(name)) if name.isdecimal() else name)


def _iteration(folder: Path) -> Path:
    if any(folder.glob("mp_rank_*")):
        return folder
    found = _latest(folder)
    if not any(found.glob("mp_rank_*")) and not is_distributed(found):
        raise ValueError(
            f"Expected {folder / LATEST} to name a checkpoint, got {found.name[:40]!r}. Give the "
            "folder that metadata.json or the mp_rank_* are in."
        )
    return found
