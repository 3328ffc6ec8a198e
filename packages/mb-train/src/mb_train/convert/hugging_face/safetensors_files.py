"""Folders of safetensors: tensors read one at a time when asked for, and written so, in shards.

8 bytes         length of the header, little-endian
header          JSON, spaces behind it up to a multiple of 8 bytes: by name `dtype`, `shape` and
                `data_offsets`, begin and end behind the header; {"format": "pt"}
numbers         of each tensor, rows one after the other, little-endian
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from mb_layers.on_demand import OnDemand, outlines
from torch import Tensor

from mb_train.convert.hugging_face.quantized import FP8, SCALES, check_scales, dequantized
from mb_train.convert.new_run import check_dtype
from mb_train.folder.whole_files import replaced, write_text
from mb_train.untrusted import json_of
from mb_train.words import missing_package

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_SHARD_BYTES = 5_000_000_000
# Beginning of the text that git-lfs leaves in place of a file until it is fetched.
_POINTER = b"version https://git-lfs"
# Names of dtypes. Of a file's tensors those of the last come first, so that all are aligned.
_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": FP8, "F8_E8M0": torch.float8_e8m0fnu, "I16": torch.int16, "F16": torch.float16,
    "BF16": torch.bfloat16, "I32": torch.int32, "F32": torch.float32, "C64": torch.complex64,
    "F64": torch.float64, "I64": torch.int64,
}  # fmt: skip


class Place(NamedTuple):
    """Where a tensor lies, and what its file says of it; a dtype that is not known by its name."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | str

    @property
    def words(self) -> str:
        """It, for messages."""
        return f"{self.name} in {self.path}"


class TensorFolder(OnDemand[Place]):
    """The tensors of a folder by name, each read from its file when it is asked for.

    Those without a single number are not among them: transformers writes such of maps that a model
    has not, GLM-4.5's shared expert for one.

    Args:
        folder: holds model.safetensors, which comes first as for transformers, or shards with their
            index.
        prefix: left off names that begin with it.
        packed: ends of the names of tensors that may hold bytes.
        block: rows and columns that share a scale of FP8. Such a matrix comes in fp32, and its
            scales are no tensor of their own.

    Raises:
        ValueError: neither is there, or a file is damaged; (a tensor) it is quantized in another
            way, or holds no real numbers.
    """

    def __init__(
        self,
        folder: Path,
        *,
        prefix: str = "",
        packed: tuple[str, ...] = (),
        block: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self._packed, self._block = packed, block
        self._scales: dict[Place, Place] = {}
        safe_open = _safetensors()
        files = [folder / SINGLE]
        if not files[0].is_file() and (folder / INDEX).is_file():
            try:
                shards = set(json_of((folder / INDEX).read_bytes())["weight_map"].values())
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise ValueError(f"{folder / INDEX} is damaged: {error}.") from None
            if any(Path(str(name)).name != name for name in shards):
                raise ValueError(f"{folder / INDEX} points outside its folder.")
            files = [folder / name for name in sorted(shards)]
        for path in files:
            if not path.is_file():
                why = " Pickled weights (*.bin) are not read: save the model as safetensors."
                if not any(folder.glob("*.bin")):
                    why = " Is it downloaded to its end?"
                raise ValueError(f"Expected {path}, found none.{why}")
            try:
                with safe_open(path, "pt") as file:
                    slices = {name: file.get_slice(name) for name in list(file.keys())}
                    found = [
                        Place(path, name, tuple(one.get_shape()), _dtype_of(one.get_dtype()))
                        for name, one in slices.items()
                    ]
            except Exception as error:  # the library has an exception of its own
                with path.open("rb") as file:
                    pointer = file.read(len(_POINTER)) == _POINTER
                why = "git-lfs has not fetched it: git lfs pull" if pointer else error
                raise ValueError(f"{path} is damaged: {why}.") from None
            for place in (one for one in found if 0 not in one.shape):
                first = self.places.setdefault(place.name.removeprefix(prefix), place)
                if first != place:
                    raise ValueError(
                        f"{path} holds {place.name}, which {first.path} holds as {first.name}."
                    )
        if block is not None:
            for name in [name for name in self.places if name + SCALES in self.places]:
                self._scales[self.places[name]] = self.places.pop(name + SCALES)

    def rename(self, pattern: str, name: str) -> None:
        """Put `name` in the place of a pattern in all names.

        Raises:
            ValueError: two tensors would have one name.
        """
        renamed: dict[str, Place] = {}
        for old, place in self.places.items():
            new = re.sub(pattern, name, old)
            if new in renamed:
                raise ValueError(
                    f"{place.path} holds {place.name}, which is {renamed[new].name} once more."
                )
            renamed[new] = place
        self.places = renamed

    def leave_out(self, pattern: str) -> None:
        """Forget the tensors whose whole name matches a pattern."""
        self.places = {
            name: place for name, place in self.places.items() if not re.fullmatch(pattern, name)
        }

    def read(self, place: Place) -> Tensor:
        outline = self._outline(place)
        with _safetensors()(place.path, "pt") as file:
            tensor = file.get_tensor(place.name)
        if self._block is None or place not in self._scales:
            return tensor
        scales = self.read(self._scales[place])
        return dequantized(tensor, scales, self._block).to(outline.dtype)

    def outlines(self) -> dict[str, Tensor]:
        return {name: self._outline(place) for name, place in self.places.items()}

    def _outline(self, place: Place) -> Tensor:
        dtype = place.dtype
        if self._block is not None and place in self._scales:
            scales = self._scales[place]
            check_dtype(scales.dtype, scales.words)
            check_scales(place.shape, dtype, scales.shape, self._block, place.words)
            dtype = torch.float32
        elif self._block is not None and dtype == FP8:
            raise ValueError(
                f"Expected {place.name}{SCALES} beside {place.name} in {place.path}, found none."
            )
        elif not (place.name.endswith(self._packed) and dtype == torch.uint8):
            dtype = check_dtype(dtype, place.words)
        assert isinstance(dtype, torch.dtype)
        return torch.empty(place.shape, dtype=dtype, device="meta")


def _dtype_of(name: str) -> torch.dtype | str:
    return _DTYPES.get(name, name)


def write_tensors(
    folder: Path, tensors: Mapping[str, Tensor], *, shard_bytes: int = _SHARD_BYTES
) -> None:
    """Write model.safetensors, or shards with their index where that would be too large.

    Each tensor is asked for once, and let go when it is written.
    """
    about = outlines(tensors)
    shards: list[list[str]] = [[]]
    size = 0
    for name, outline in about.items():
        if shards[-1] and size + outline.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += outline.nbytes
    if len(shards) == 1:
        _write(folder / SINGLE, tensors, about)
        return
    where = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(folder / file, tensors, {name: about[name] for name in shard})
        where |= dict.fromkeys(shard, file)
    total = sum(outline.nbytes for outline in about.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    write_text(folder / INDEX, json.dumps(index, indent=1, sort_keys=True) + "\n")


def _write(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Tensor]) -> None:
    """A file with those of the tensors that are in `about`, asked for in its order."""
    names = {dtype: name for name, dtype in _DTYPES.items()}
    order = list(_DTYPES.values())
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, outline in sorted(about.items(), key=lambda o: (-order.index(o[1].dtype), o[0])):
        begin, end = end, end + outline.nbytes
        shape = list(outline.shape)
        header[name] = {
            "dtype": names[outline.dtype], "shape": shape, "data_offsets": [begin, end],
        }  # fmt: skip
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    # The tensors may lie in the file that this one replaces.
    with replaced(path) as draft, draft.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, outline in about.items():
            tensor = tensors[name]
            assert (tensor.shape, tensor.dtype) == (outline.shape, outline.dtype), name
            file.seek(8 + len(text) + header[name]["data_offsets"][0])
            file.write(memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy()))


def _safetensors():
    try:
        from safetensors import safe_open
    except ImportError:
        purpose = "for Hugging Face's files"
        raise missing_package("safetensors", purpose, "'mb-train[convert]'") from None
    return safe_open
