"""Reading the `.metadata` of torch's distributed checkpoints, a pickle, without trust."""

# Apart from `read`, whose users need not wait for torch's checkpoints to be imported, DTensor with
# them, before a run's first step.

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, ClassVar

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from mb_train.checkpoint.errors import CheckpointError
from mb_train.untrusted import Unpickler, dtype_named

_METADATA_CLASSES = {
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "StorageMeta", "ChunkStorageMetadata", "TensorProperties",
        "TensorStorageMetadata", "BytesStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
}  # fmt: skip

# Where the checkpoint lay when it was written. Pure paths stand for it: those of another system
# cannot be made here, and Python 3.13 names a module of which 3.12 knows nothing.
_PATHS = {
    f"{pure}{name}": path
    for name, path in (("PosixPath", PurePosixPath), ("WindowsPath", PureWindowsPath))
    for pure in ("", "Pure")
}


class SafeReader(dcp.FileSystemReader):
    """torch's reader, with a `.metadata` that can name data classes only, and is read once."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = read_metadata(Path(self.path) / ".metadata")
        metadata = self._metadata
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def read_metadata(path: Path, also: Callable[[str, str], Any] = lambda *_: None) -> Metadata:
    """The content of a `.metadata`.

    Args:
        also: what a module's name stands for that is no part of the format; None refuses it.

    Raises:
        CheckpointError: damaged, or it names what is no part of the format.
    """
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file, also).load()
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{path} is no checkpoint's metadata.")
        for info in (metadata.storage_data or {}).values():
            if Path(info.relative_path).name != info.relative_path:
                raise CheckpointError(f"{path} points outside its folder: {info.relative_path!r}.")
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"Cannot read {path}: {error.strerror}.") from error
    except Exception as error:
        raise CheckpointError(f"{path} is damaged: {str(error)[:200]}.") from error
    return metadata


# What torch 2.11 to 2.14 write of a tensor in TensorProperties: dtype, layout and three more. Torch
# 2.15 adds strides behind them, of which earlier releases make an error, and no reader asks.
_PROPERTIES = 5


class _MetadataUnpickler(Unpickler):
    dispatch: ClassVar[dict[int, Any]] = dict(Unpickler.dispatch)

    def __init__(self, file: Any, also: Callable[[str, str], Any]) -> None:
        super().__init__(file)
        self._also = also

    def find_class(self, module: str, name: str) -> Any:
        if name in _METADATA_CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return _PATHS[name]
        if (found := dtype_named(module, name) or self._also(module, name)) is not None:
            return found
        raise CheckpointError(
            f"The checkpoint's .metadata names {module}.{name}, which is no part of the format: "
            "it may be meant to run code. Refusing to load it."
        )

    def load_build(self) -> None:
        """As the original's, also of what a later torch wrote."""
        made, state = self.stack[-2:]
        if type(made).__name__ == "TensorProperties" and isinstance(state, tuple):
            self.stack[-1] = state[:_PROPERTIES]
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build
