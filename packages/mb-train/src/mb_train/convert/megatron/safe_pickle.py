"""torch.save files of strangers, read without running anything of theirs.

A pickle names functions and calls them. Here a name is looked up in a short list: what torch needs
to put tensors together, plain containers, and `argparse.Namespace`. Every other name gives an
`Opaque`, which swallows whatever the pickle does to it: a checkpoint that holds an enum or a
random generator of a library that is not installed is read all the same, and one that names
`os.system` calls nothing.
"""

from __future__ import annotations

import argparse
import collections
import io
import types
import zipfile
from pathlib import Path
from typing import Any

import torch

from mb_train.untrusted import Unpickler, dtype_named

_HARMLESS: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
    # Of dtypes that have no storage of their own, such as fp8.
    ("torch._utils", "_rebuild_tensor_v3"): torch._utils._rebuild_tensor_v3,
    ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("argparse", "Namespace"): argparse.Namespace,
}


class Opaque:
    """An object of a class that is not known; nothing can be done with it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> Opaque:
        return self

    def __setstate__(self, _: Any) -> None:
        pass

    def __setitem__(self, _: Any, __: Any) -> None:
        pass

    def append(self, _: Any) -> None:
        """Take an item and forget it."""

    def extend(self, _: Any) -> None:
        """Take items and forget them."""


class _Unpickler(Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return dtype_named(module, name) or _HARMLESS.get((module, name), Opaque)


_AT_ONCE = 2**24

# torch.load asks a module for its Unpickler.
_module = types.ModuleType("mb_train_safe_pickle")
_module.Unpickler = _Unpickler  # ty: ignore[missing-attribute]


def load(file: Path | io.BytesIO, name: str = "") -> Any:
    """What torch.save wrote: tensors on the CPU, those of a file on disk read when touched.

    Args:
        file: it, or its bytes in memory.
        name: what messages call bytes.

    Raises:
        ValueError: not such a file, or a damaged one.
    """
    try:
        if not zipfile.is_zipfile(file):
            raise ValueError("no whole file of the format that torch has written since 1.6")
        check_sums(file)
        in_memory = isinstance(file, io.BytesIO)
        if in_memory:
            file.seek(0)
        return torch.load(
            file, map_location="cpu", pickle_module=_module, weights_only=False, mmap=not in_memory
        )
    except Exception as error:  # a damaged pickle may raise any
        why = str(error)[:200] or type(error).__name__  # some quote what they could not read
        raise ValueError(f"Cannot read {name or file}: {why}.") from None


def check_sums(file: Path | io.BytesIO) -> None:
    """Raise zipfile.BadZipFile if a record of torch.save's is not what was written.

    torch compares no checksums when it reads. Where it was told to compute none, they are 0.
    """
    with zipfile.ZipFile(file) as archive:
        for record in archive.infolist():
            if record.CRC:
                with archive.open(record) as opened:
                    while opened.read(_AT_ONCE):  # at its end zipfile compares
                        pass
