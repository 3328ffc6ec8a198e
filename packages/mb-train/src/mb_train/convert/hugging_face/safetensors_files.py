"""Folders of safetensors: tensors read one at a time when asked for, written in shards."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from mb_train.convert.hugging_face.quantized import FP8, SCALES, dequantized
from mb_train.convert.new_run import check_dtype
from mb_train.convert.on_demand import OnDemand
from mb_train.folder.whole_files import write_text
from mb_train.untrusted import json_of

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_SHARD_BYTES = 5_000_000_000
# Beginning of the text that git-lfs leaves in place of a file until it is fetched.
_POINTER = b"version https://git-lfs"


class TensorFolder(OnDemand[tuple[Path, str]]):
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
        self._scales: dict[tuple[Path, str], tuple[Path, str]] = {}
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
                    shapes = {name: file.get_slice(name).get_shape() for name in list(file.keys())}
            except Exception as error:  # the library has an exception of its own
                with path.open("rb") as file:
                    pointer = file.read(len(_POINTER)) == _POINTER
                why = "git-lfs has not fetched it: git lfs pull" if pointer else error
                raise ValueError(f"{path} is damaged: {why}.") from None
            for name in (name for name, shape in shapes.items() if 0 not in shape):
                place = self.places.setdefault(name.removeprefix(prefix), (path, name))
                if place != (path, name):
                    raise ValueError(f"{path} holds {name}, which {place[0]} holds as {place[1]}.")
        if block is not None:
            for name in [name for name in self.places if name + SCALES in self.places]:
                self._scales[self.places[name]] = self.places.pop(name + SCALES)

    def rename(self, pattern: str, name: str) -> None:
        """Put `name` in the place of a pattern in all names.

        Raises:
            ValueError: two tensors would have one name.
        """
        renamed: dict[str, tuple[Path, str]] = {}
        for old, (path, there) in self.places.items():
            new = re.sub(pattern, name, old)
            if new in renamed:
                raise ValueError(f"{path} holds {there}, which is {renamed[new][1]} once more.")
            renamed[new] = path, there
        self.places = renamed

    def leave_out(self, pattern: str) -> None:
        """Forget the tensors whose whole name matches a pattern."""
        self.places = {
            name: place for name, place in self.places.items() if not re.fullmatch(pattern, name)
        }

    def read(self, place: tuple[Path, str]) -> Tensor:
        path, there = place
        with _safetensors()(path, "pt") as file:
            tensor = file.get_tensor(there)
        if self._block is not None and place in self._scales:
            scales = self.read(self._scales[place])
            return dequantized(tensor, scales, self._block, f"{there} in {path}")
        if self._block is not None and tensor.dtype == FP8:
            raise ValueError(f"Expected {there}{SCALES} beside {there} in {path}, found none.")
        if not (there.endswith(self._packed) and tensor.dtype == torch.uint8):
            check_dtype(tensor.dtype, f"{there} in {path}")
        return tensor


def write_tensors(
    folder: Path, tensors: Mapping[str, Tensor], *, shard_bytes: int = _SHARD_BYTES
) -> None:
    """Write model.safetensors, or shards with their index where that would be too large."""
    _safetensors()
    shards: list[dict[str, Tensor]] = [{}]
    size = total = 0
    for name, tensor in tensors.items():
        here = tensor.numel() * tensor.element_size()
        if shards[-1] and size + here > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.contiguous()
        size, total = size + here, total + here
    if len(shards) == 1:
        _write(shards[0], folder / SINGLE)
        return
    where = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(shard, folder / name)
        where |= dict.fromkeys(shard, name)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    write_text(folder / INDEX, json.dumps(index, indent=1, sort_keys=True) + "\n")


def _write(tensors: dict[str, Tensor], path: Path) -> None:
    """With the permissions of any new file: the library gives them to the owner alone."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # of a full disk, say
        raise OSError(f"Cannot write {path}: {error}.") from None
    path.chmod(mode)


def _safetensors():
    try:
        from safetensors import safe_open
    except ImportError:
        raise ValueError(
            "Expected the safetensors package, found none. Install it with "
            "pip install 'mb-train[convert]'."
        ) from None
    return safe_open
