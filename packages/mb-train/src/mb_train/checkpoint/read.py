"""Checkpoints: torch's distributed format, read without trust. `saver` writes them.

    RUN/latest_checkpointed_iteration.txt    the iteration to go on from
    RUN/iter_0000100/run.json                configuration, counters, what model this is
    RUN/iter_0000100/.metadata, *.distcp     tensors, in shards as the ranks held them
    RUN/iter_0000100/SHA256SUMS              of all of them, see `folder.checksums`

Tensors are found by name and place. A rank holds what it holds, whole layers of a pipeline, DTensor
shards over tensor, expert and data parallel ranks, or all; any layout can load what any other
wrote, because names are those of the whole model on every rank. Together the ranks must name every
tensor of the checkpoint, and no other.

The format's `.metadata` is a pickle, which could run code. It is read through an unpickler that
knows the format's own dozen classes and refuses the rest; tensors are read with torch's
`weights_only`, and nothing but tensors is accepted. State of random generators is not needed: see
`mb_parallel.random.seed_micro_batch`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from mb_parallel import of_all_ranks, rank, world_size

from mb_train.checkpoint.errors import CheckpointError
from mb_train.checkpoint.tensors import (
    Modules,
    Optimizer,
    named_parameters,
    named_tensors,
    optimizer_entries,
    state_names,
)
from mb_train.folder.checksums import SUMS_FILE, damage, read_sums
from mb_train.folder.run_folder import RUN_FILE, checkpoints, iteration_of, others
from mb_train.logs.console import out_of_memory
from mb_train.words import typed

if TYPE_CHECKING:
    from torch.distributed.checkpoint import CheckpointException, Metadata

    from mb_train.checkpoint.metadata import SafeReader


@dataclass(frozen=True)
class Progress:
    """Where a run stands."""

    iteration: int
    consumed_samples: int


def load_checkpoint(
    path: Path,
    model: Modules,
    optimizer: Optimizer,
    *,
    alone: bool = False,
    left_out: tuple[str, ...] = (),
) -> None:
    """Read the tensors of the checkpoint folder `path` into `model` and `optimizer`, in place.

    Every tensor of the model must be there with its shape, and every tensor there must be used on
    some rank (the optimizer's may be left out by passing None), but for those of `left_out`. All
    ranks call this together.

    Args:
        model: this rank's: one module, or several parts of a pipeline, named as in the whole model.
        optimizer: over the parameters of `model`.
        alone: no other rank takes part, whatever process group there is; `model` is a whole one.
        left_out: beginnings of names of tensors there that the model does without, or of its own
            that stay as they are.

    Raises:
        CheckpointError: damaged, foreign or not of this model; names what does not fit, and of a
            damaged checkpoint the latest whole one beside it. Equal on all ranks.
    """
    reader, shapes = opened(path, alone=alone, left_out=left_out)
    if optimizer is not None:
        _make_optimizer_state(optimizer)
        if not state_names(shapes) and any(optimizer_entries(model, optimizer)):
            raise CheckpointError(
                f"{path} was saved without optimizer state. Add --no-load-optim or --finetune."
            )
        _forget_state(model, optimizer, shapes)
    named = named_tensors(model, optimizer)
    tensors = [(name, tensor) for name, tensor in named if not name.startswith(left_out)]
    state = dict(tensors)
    held = _over_ranks({n: tuple(t.shape) for n, t in state.items()}, alone=alone)
    if not state_names(held):  # left out, or one that keeps none, as SGD without momentum
        shapes = {name: shapes[name] for name in shapes.keys() - state_names(shapes)}
    compare(path, held, shapes)
    fill(path, state, reader, alone=alone)
    with torch.no_grad():
        for name, tensor in tensors:
            if tensor is not state[name]:  # two stages on this rank have one of that name
                tensor.copy_(state[name])
    for entry, kind, name in optimizer_entries(model, optimizer):
        if isinstance(entry[kind], (int, float)):
            entry[kind] = type(entry[kind])(state[name].item())


def opened(
    path: Path, *, alone: bool, left_out: tuple[str, ...] = ()
) -> tuple[SafeReader, dict[str, tuple[int, ...]]]:
    """A reader of the checkpoint folder `path`, whose files are whole, and its tensors' shapes.

    Those of tensors whose names begin as one of `left_out` are not among them.

    Raises:
        CheckpointError: as `load_checkpoint`.
    """
    from mb_train.checkpoint.metadata import SafeReader

    with _removal_told(path):
        _check_sums(path, alone=alone)
        reader = SafeReader(path)
        shapes = _saved_shapes(path, _metadata(reader, alone=alone))
    return reader, {n: size for n, size in shapes.items() if not n.startswith(left_out)}


def fill(path: Path, tensors: dict[str, Any], reader: SafeReader, *, alone: bool) -> None:
    """Read the numbers of these tensors, by name, of the checkpoint folder `path`.

    Raises:
        CheckpointError: as `load_checkpoint`.
        MemoryError, RuntimeError: no memory to read them to.
    """
    import torch.distributed.checkpoint as dcp

    with _removal_told(path), quiet():
        try:
            dcp.load(tensors, storage_reader=reader, no_dist=alone or world_size() == 1)
        except dcp.CheckpointException as error:
            for cause, _ in error.failures.values():
                if out_of_memory(cause):
                    raise cause from error
            raise CheckpointError(f"{path} is damaged: {cause_of(error)}.{_offer(path)}") from error


@contextlib.contextmanager
def _removal_told(path: Path) -> Generator[None]:
    """Call a checkpoint that is gone removed, not damaged: a run that keeps few has others."""
    try:
        yield
    except CheckpointError as error:
        if path.is_dir():
            raise
        raise CheckpointError(
            f"{path} was removed while it was read, as a run with --keep-checkpoints does."
            f"{others(path.parent)}"
        ) from error


def _metadata(reader: SafeReader, *, alone: bool) -> Metadata:
    """What the reader reads on all ranks, or an error on all."""
    metadata = problem = None
    try:
        metadata = reader.read_metadata()
    except CheckpointError as error:
        problem = error
    told = [] if alone else of_all_ranks(problem and str(problem))
    if problem is not None:
        raise problem
    for other in filter(None, told):
        raise CheckpointError(other)
    assert metadata is not None
    return metadata


def _saved_shapes(path: Path, saved: Metadata) -> dict[str, tuple[int, ...]]:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    shapes: dict[str, tuple[int, ...]] = {}
    for name, entry in saved.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{path} holds {name!r}, no tensor; refusing to load it.")
        shapes[name] = tuple(entry.size)
    return shapes


def cause_of(error: CheckpointException) -> str:
    """What went wrong on the first rank that failed.

    Raises:
        KeyboardInterrupt: a Ctrl-C on any of them, which torch takes for a failure of its own.
    """
    causes = [cause for cause, _ in error.failures.values()]
    if any(isinstance(cause, KeyboardInterrupt) for cause in causes):
        raise KeyboardInterrupt from error
    cause = causes[0]
    return f"{type(cause).__name__}: {cause}"


def _make_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer make its state, by a step that changes nothing, to load into."""
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = lr


def _forget_state(
    model: Modules, optimizer: torch.optim.Optimizer, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Drop the state of parameters that had none when they were saved: they got no gradient."""
    with_state = {name.split(".", 2)[2] for name in state_names(shapes)}
    for parameter, name in named_parameters(model):
        if name not in with_state:
            optimizer.state.pop(parameter, None)


def _over_ranks(shapes: dict[str, tuple[int, ...]], *, alone: bool) -> dict[str, tuple[int, ...]]:
    """The tensors that all ranks together hold."""
    everyones = [shapes] if alone else of_all_ranks(shapes)
    return {name: size for one in everyones for name, size in one.items()}


def compare(path: Path, expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless a folder has the tensors that are expected, by their shapes."""
    missing = sorted(expected.keys() - found.keys())
    surplus = sorted(found.keys() - expected.keys())
    other = sorted(n for n in expected.keys() & found.keys() if expected[n] != found[n])
    if not (missing or surplus or other):
        return
    parts = []
    if missing:
        parts.append(f"{len(missing)} tensors are missing ({missing[0]}, ...)")
    if surplus:
        parts.append(f"{len(surplus)} do not belong ({surplus[0]}, ...)")
    if other:
        name = other[0]
        parts.append(f"{name} is {list(found[name])}, expected {list(expected[name])}")
    raise CheckpointError(f"{path} is a checkpoint of another model: {'; '.join(parts)}.")


def _check_sums(path: Path, *, alone: bool) -> None:
    """Compare the files with their checksums, every rank its share of them."""
    found: list[str] = []
    here, ranks = (0, 1) if alone else (rank(), world_size())
    try:
        sums = read_sums(path / SUMS_FILE)
        found = damage(path, sums, _files_of(path, sums)[here::ranks])
    except FileNotFoundError:
        found = [f"{path / SUMS_FILE} is missing"]
    except (ValueError, OSError) as error:
        found = [str(error).rstrip(".")]
    found = found if alone else [line for one in of_all_ranks(found) for line in one]
    if found:
        raise CheckpointError(f"{'; '.join(dict.fromkeys(found))}.{_offer(path)}")


def _files_of(path: Path, sums: Mapping[str, str]) -> list[str]:
    """The files of a checkpoint, also those that its list of sums lacks because it was cut off."""
    there = {file.name for file in path.glob("*.distcp")}
    return sorted({".metadata", RUN_FILE, *there, *sums})


def _offer(path: Path) -> str:
    """A sentence that names the latest whole checkpoint before the one at `path`, if any."""
    try:
        earlier = [p for p in checkpoints(path.parent) if iteration_of(p) < iteration_of(path)]
    except ValueError:  # not named after an iteration
        return ""
    for other in reversed(earlier):
        with contextlib.suppress(ValueError, OSError):
            sums = read_sums(other / SUMS_FILE)
            if not damage(other, sums, _files_of(other, sums)):
                return f" {other} is whole: go on from there with --load {typed(other)}"
    return " No checkpoint before it is whole." if earlier else ""


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Without two warnings of torch's checkpoints about what is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        # Stages of a pipeline hold other tensors than their neighbours: `compare` has seen to it.
        warnings.filterwarnings("ignore", message="Detected mismatched keys")
        yield
