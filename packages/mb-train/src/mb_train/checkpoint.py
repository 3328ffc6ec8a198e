"""Checkpoints: torch's distributed format, read without trust. `saver` writes them.

    RUN/latest_checkpointed_iteration.txt    the iteration to go on from
    RUN/iter_0000100/run.json                configuration, counters, what model this is
    RUN/iter_0000100/.metadata, *.distcp     tensors, in shards as the ranks held them

Shards are found by name and place: any number of ranks can load what any other wrote.

The format's `.metadata` is a pickle, which could run code. It is read through an unpickler that
knows the format's own dozen classes and refuses the rest; tensors are read with torch's
`weights_only`, and nothing but tensors is accepted. State of random generators is not needed: see
`train.seed_micro_batch`.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from mb_parallel import world_size
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

_METADATA_CLASSES = {
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "StorageMeta", "ChunkStorageMetadata", "TensorProperties",
        "TensorStorageMetadata", "BytesStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"},
    "collections": {"OrderedDict"},
}  # fmt: skip


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded, and why."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands."""

    iteration: int
    consumed_samples: int


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Read the tensors of the checkpoint folder `path` into `model` and `optimizer`, in place.

    Every tensor of the model must be there with its shape, and every tensor there must be used
    (the optimizer's may be left out by passing None).

    Raises:
        CheckpointError: damaged, foreign or not of this model; names what does not fit.
    """
    reader = _SafeReader(path)
    saved = reader.read_metadata().state_dict_metadata
    shapes: dict[str, tuple[int, ...]] = {}
    for name, entry in saved.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{path} holds {name!r}, no tensor; refusing to load it.")
        shapes[name] = tuple(entry.size)
    if optimizer is not None:
        _make_optimizer_state(model, optimizer, shapes, path)
    state = tensors_of(model, optimizer)
    expected = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if optimizer is None:
        shapes = {name: size for name, size in shapes.items() if not name.startswith("optimizer.")}
    _compare(path, expected, shapes)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.load(state, storage_reader=reader, no_dist=world_size() == 1)
        except CheckpointException as error:
            raise CheckpointError(f"{path} is damaged: {cause_of(error)}") from error


def cause_of(error: CheckpointException) -> str:
    """What went wrong on the first rank that failed."""
    cause = next(iter(error.failures.values()))[0]
    return f"{type(cause).__name__}: {cause}"


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Tensors by stable names: `model.NAME`, and `optimizer.KIND.NAME` for each parameter."""
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    if optimizer is not None:
        for name, parameter in model.named_parameters():
            for kind, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    state[f"optimizer.{kind}.{name}"] = value
    return state


def _make_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, shapes: Mapping[str, Any], path: Path
) -> None:
    """Give the optimizer, which makes its state at its first step, tensors to load into."""
    names = [name for name in shapes if name.startswith("optimizer.")]
    if not names:
        raise CheckpointError(
            f"{path} was saved without optimizer state. Add --no-load-optim or --finetune."
        )
    parameters = dict(model.named_parameters())
    for full_name in names:
        _, kind, name = full_name.split(".", 2)
        parameter = parameters.get(name)
        if parameter is None:
            continue  # reported with everything else that does not fit
        whole = shapes[full_name] == tuple(parameter.shape)
        fresh = (
            torch.zeros_like(parameter.detach())
            if whole
            else torch.zeros(shapes[full_name], dtype=torch.float32, device=parameter.device)
        )
        optimizer.state[parameter][kind] = fresh


def _compare(path: Path, expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    missing, surplus = (
        sorted(expected.keys() - found.keys()),
        sorted(found.keys() - expected.keys()),
    )
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


class _SafeReader(dcp.FileSystemReader):
    """torch's reader, with a `.metadata` that can name data classes only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                metadata = _MetadataUnpickler(file).load()
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"Cannot read {path}: {error.strerror}.") from error
        except Exception as error:
            raise CheckpointError(f"{path} is damaged: {error}.") from error
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{path} is no checkpoint's metadata.")
        for info in (metadata.storage_data or {}).values():
            if Path(info.relative_path).name != info.relative_path:
                raise CheckpointError(f"{path} points outside its folder: {info.relative_path!r}.")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _METADATA_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise CheckpointError(
            f"The checkpoint's .metadata names {module}.{name}, which is no part of the format: "
            "it may be meant to run code. Refusing to load it."
        )
