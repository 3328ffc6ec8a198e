"""Strangers' folders in torch's distributed format: parts of tensors, read when asked for.

    .metadata         a pickle: the size of each tensor, and in which file each of its shards lies
    __R_K.distcp      shards, each as torch.save writes it, one behind the other

The pickle may name the format's own data classes and what Megatron adds to them, nothing else;
shards are read with torch's `weights_only`. Torch's reader would fill tensors of the whole size;
the largest here holds a kind of weight of all layers.
"""

from __future__ import annotations

import io
import pickle
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mb_train.convert.megatron.safe_pickle import Opaque, check_sums
from mb_train.convert.new_run import check_dtype

# Plans, which Megatron adds to a `.metadata` to make the next one's sooner.
_PLANS = ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
_PLANNER = "torch.distributed.checkpoint.planner"
_WRITERS = ("megatron.", "nvidia_resiliency_ext.")
# Where the properties of a tensor were until torch 2.3.
_OLDER = "torch.distributed._shard.sharded_tensor.metadata"


class Shard(NamedTuple):
    """A part of a tensor, or an object without offsets and sizes, and where it lies.

    Raises:
        ValueError: (`content`) it cannot be read, or lies outside its file.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    file_bytes: int
    start: int
    length: int

    def check(self, what: str, least: int = 1) -> None:
        """Raise ValueError unless the file has it whole."""
        end = self.start + self.length
        if self.length < least or self.start < 0 or end > self.file_bytes:
            raise ValueError(
                f"Expected {self.length:,} bytes at {self.start:,} in {self.file}, with the "
                f"{least:,} of {what}; it has {self.file_bytes:,}. Is it copied to its end?"
            )

    def content(self, what: str) -> bytes:
        """Its bytes."""
        self.check(what)
        try:
            with self.file.open("rb") as file:
                file.seek(self.start)
                return file.read(self.length)
        except OSError as error:
            raise ValueError(f"Cannot read {self.file}: {error.strerror}.") from None


class SavedTensor:
    """One tensor of a folder, of which `shards` hold every element once.

    Raises:
        ValueError: they do not, they lie outside their files, or it holds no real numbers.
    """

    def __init__(
        self,
        name: str,
        size: Sequence[int],
        dtype: torch.dtype,
        shards: Sequence[Shard],
        load: Callable[[Shard, str], Tensor],
    ) -> None:
        self.name, self.size, self.dtype, self._load = name, tuple(size), dtype, load
        check_dtype(dtype, name)
        for shard in shards:
            self._check(shard)
        elements = sum(prod(shard.sizes) for shard in shards)
        distinct = len({shard.offsets for shard in shards}) == len(shards)
        if not elements or elements != prod(self.size) or not distinct:
            raise ValueError(
                f"Expected shards with the {prod(self.size):,} elements of {name}, got "
                f"{elements:,} in {len(shards)} shards."
            )
        self._shards = sorted(shards, key=lambda shard: shard.offsets)
        self._firsts = [shard.offsets[0] for shard in self._shards]
        self._longest = max(shard.sizes[0] for shard in self._shards)

    def _check(self, shard: Shard) -> None:
        axes = zip(shard.offsets, shard.sizes, self.size, strict=False)
        as_many = 0 < len(self.size) == len(shard.sizes) == len(shard.offsets)
        if not as_many or any(o < 0 or n < 1 or o + n > size for o, n, size in axes):
            raise ValueError(
                f"Expected shards within {list(self.size)} of {self.name}, got {list(shard.sizes)} "
                f"at {list(shard.offsets)}."
            )
        shard.check(f"a shard of {self.name}", prod(shard.sizes) * self.dtype.itemsize)

    def outline(self, *within: tuple[int, int]) -> Tensor:
        """What `read` gives, without numbers."""
        shape = [stop - start for start, stop in self._all_ranges(within)]
        return torch.empty(shape, dtype=self.dtype, device="meta")

    def _all_ranges(self, within: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        return [*within, *((0, size) for size in self.size[len(within) :])]

    def read(self, *within: tuple[int, int]) -> Tensor:
        """The part inside these ranges of its first axes, with all of the others."""
        ranges = self._all_ranges(within)
        (first, last), *_ = ranges
        # Of the thousands that a tensor of all layers may have, only those that may lie within.
        here = slice(
            bisect_right(self._firsts, first - self._longest), bisect_left(self._firsts, last)
        )
        # Where shards overlapped and left a hole, it would hold no number rather than any.
        found = torch.full_like(self.outline(*within), torch.nan, device="cpu")
        for shard in self._shards[here]:
            axes = list(zip(ranges, shard.offsets, shard.sizes, strict=True))
            common = [(max(a, o), min(b, o + n)) for (a, b), o, n in axes]
            if any(start >= stop for start, stop in common):
                continue
            source = [slice(a - o, b - o) for (a, b), o in zip(common, shard.offsets, strict=True)]
            target = [slice(a - r, b - r) for (a, b), (r, _) in zip(common, ranges, strict=True)]
            loaded = self._load(shard, self.name)
            if (tuple(loaded.shape), loaded.dtype) != (shard.sizes, self.dtype):
                raise ValueError(
                    f"Expected {list(shard.sizes)} of {self.dtype} in {shard.file} for "
                    f"{self.name}, got {list(loaded.shape)} of {loaded.dtype}."
                )
            found[tuple(target)] = loaded[tuple(source)]
        return found


def _load(shard: Shard, name: str) -> Tensor:
    """What is in a shard of the tensor of this name."""
    content = io.BytesIO(shard.content(name))
    try:
        check_sums(content)
        content.seek(0)
        found = torch.load(content, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # torch's own text says how to run it
        raise ValueError(
            f"Expected a tensor in {shard.file} at {shard.start:,}, for {name}; its pickle is "
            "damaged or names something else, which may be meant to run code."
        ) from None
    except Exception as error:  # a damaged one may raise any
        raise ValueError(
            f"Cannot read {name} in {shard.file} at {shard.start:,}: {str(error)[:200]}."
        ) from None
    if not isinstance(found, Tensor) or found.device.type != "cpu":
        raise ValueError(f"Expected a tensor in {shard.file} for {name}, got none.")
    return found.detach()


def read_folder(
    folder: Path, wanted: Callable[[str], bool]
) -> tuple[dict[str, SavedTensor], dict[str, Shard]]:
    """The tensors of a folder whose names are `wanted`, and objects of other kinds.

    Raises:
        ValueError: `.metadata` is damaged or names what is no part of the format; a tensor that
            lacks a shard; a file that is missing or too short.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

    from mb_train.checkpoint.metadata import read_metadata

    path = folder / ".metadata"
    metadata = read_metadata(path, _also)
    where = metadata.storage_data or {}
    lengths = cache(_bytes_of)  # a file has thousands of shards
    load = lru_cache(maxsize=1)(_load)  # of one that holds all layers, they are asked for in turn

    def shard(name: str, offsets: torch.Size | None = None, sizes: Sequence[int] = ()) -> Shard:
        info = where[MetadataIndex(name, offsets)]
        if info.transform_descriptors:
            raise ValueError(
                f"Expected {info.relative_path} as torch.save writes it, got one that went through "
                f"{info.transform_descriptors}."
            )
        file, start = folder / info.relative_path, info.offset
        return Shard(tuple(offsets or ()), tuple(sizes), file, lengths(file), start, info.length)

    tensors: dict[str, SavedTensor] = {}
    objects: dict[str, Shard] = {}
    try:
        for name, entry in metadata.state_dict_metadata.items():
            if not wanted(name):
                continue
            if isinstance(entry, TensorStorageMetadata):
                shards = [shard(name, chunk.offsets, chunk.sizes) for chunk in entry.chunks]
                dtype = entry.properties.dtype
                tensors[name] = SavedTensor(name, entry.size, dtype, shards, load)
            else:
                objects[name] = shard(name)
    except KeyError as error:
        raise ValueError(f"{path} does not say where the shard {error} lies.") from None
    except (TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{path} is damaged: {error}.") from None
    return tensors, objects


def _also(module: str, name: str) -> Any:
    """What a `.metadata` may name beside the format's own classes: nothing that does anything."""
    from torch.distributed._shard.sharded_tensor import metadata as older
    from torch.distributed.checkpoint.metadata import Metadata

    if module == _OLDER and name in ("TensorProperties", "MEM_FORMAT_ENCODING"):
        return getattr(older, name)
    if module.startswith(_WRITERS):
        return Metadata if name == "MCoreMetadata" else Opaque
    return Opaque if module == _PLANNER and name in _PLANS else None


def _bytes_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise ValueError(f"Cannot read {file}: {error.strerror}.") from None
