"""Checkpoints of Megatron Core in its format torch_dist, today's default of Megatron-LM.

    iter_XXXXXXX/metadata.json    {"sharded_backend": "torch_dist", ...}
    iter_XXXXXXX/.metadata, __R_K.distcp    the tensors, see `distcp`
    iter_XXXXXXX/common.pt        pickled arguments, iteration, checkpoint version; since Core 0.19
                                  an object among the tensors, common_state/shard_0_1

Tensors are whole, whatever the ranks were. Where all layers are alike they lie in one tensor,
decoder.layers.KIND of [layers, ...], else by number, decoder.layers.N.KIND. Experts lie in one
(mlp.experts.experts.linear_fc1.weight of [layers, experts, ...]) or by number. A gate and what it
gates are the halves of one linear_fc1, or two tensors, ..._w and ..._v. What the optimizer, random
generators and FP8 (_extra_state) keep is left out.
"""

from __future__ import annotations

import io
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mb_layers.on_demand import OnDemand
from torch import Tensor

from mb_train.convert.megatron import safe_pickle
from mb_train.convert.megatron.core import LAYOUT, common_name, names_within
from mb_train.convert.megatron.distcp import SavedTensor, Shard, read_folder
from mb_train.convert.megatron.layout import Saved
from mb_train.folder.checksums import SUMS_FILE
from mb_train.folder.run_folder import RUN_FILE
from mb_train.untrusted import json_of

FORMAT, COMMON, INDEX = "metadata.json", "common.pt", ".metadata"
_COMMON_STATE = "common_state/shard_0_1"
_BACKEND = "torch_dist"
_TURN = (
    "run the script that trained it with --load, --ckpt-convert-format torch_dist (or torch) and "
    "--ckpt-convert-save DIR, and give DIR/torch_dist."
)
# Whatever may be beside the model's tensors; all else is the model's, and has to be known.
_LEFT_OUT = re.compile(r"(chained_\d+\.)*optimizer\..*|.*_extra_state(/shard_.*)?")
_MODEL = re.compile(r"(model\.|module\.)*(decoder|embedding|output_layer|mtp)\.")
_STACKED = re.compile(r"(decoder\.layers\.)(?!\d+\.)(.+)")


class _Part(NamedTuple):
    """Of a saved tensor: one layer if it has all, then part `number` of `parts` of its rows."""

    tensor: SavedTensor
    layer: int | None
    number: int
    parts: int

    def ranges(self) -> list[tuple[int, int]]:
        """Of its first axes."""
        found = [] if self.layer is None else [(self.layer, self.layer + 1)]
        if self.parts > 1:
            rows = self.tensor.size[len(found)] // self.parts
            found.append((self.number * rows, (self.number + 1) * rows))
        return found

    def of(self, read: Tensor) -> Tensor:
        """It, from what lies within these ranges."""
        return read if self.layer is None else read[0]


class DistributedModel(OnDemand[_Part]):
    """The tensors of a model by the names that `core` knows, each read when asked for.

    Raises:
        ValueError: tensors that do not fit together; (a tensor) damaged ones.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, SavedTensor], args: Namespace) -> None:
        super().__init__()
        for key, tensor in tensors.items():
            for name, part in _parts_of(key, tensor, args):
                if name in self.places:
                    raise ValueError(
                        f"Expected one tensor {name} in {folder}, got "
                        f"{self.places[name].tensor.name} and {key}."
                    )
                self.places[name] = part

    def read(self, place: _Part) -> Tensor:
        return place.of(place.tensor.read(*place.ranges()))

    def outlines(self) -> dict[str, Tensor]:
        return {
            name: place.of(place.tensor.outline(*place.ranges()))
            for name, place in self.places.items()
        }


def _parts_of(key: str, tensor: SavedTensor, args: Namespace) -> Iterator[tuple[str, _Part]]:
    """What a saved tensor holds, by common names: each layer, of a gate and what it gates each."""
    name = re.sub(r"^(model\.|module\.)*", "", key)
    name = name.replace(".mlp.experts.experts.", ".mlp.experts.")
    name = re.sub(r"linear_fc1\.(weight|bias)_w$", r"linear_gate.\1", name)
    name = re.sub(r"linear_fc1\.(weight|bias)_v$", r"linear_up.\1", name)
    numbered: list[tuple[str, int | None]] = [(name, None)]
    if match := _STACKED.fullmatch(name):
        if tensor.size[0] != args.num_layers:
            raise ValueError(
                f"Expected {key} of {args.num_layers} layers, got {list(tensor.size)}."
            )
        numbered = [(f"{match[1]}{n}.{match[2]}", n) for n in range(args.num_layers)]
    for name, layer in numbered:
        name = common_name(name)
        # All experts in one tensor are laid out as ours, each gate over what it gates.
        names = [name] if ".mlp.experts.linear_fc1." in name else names_within(name, args)
        if len(names) > 1 and tensor.size[layer is not None] % len(names):
            raise ValueError(f"Expected a gate over as much in {key}, got {list(tensor.size)}.")
        for number, part in enumerate(names):
            yield part, _Part(tensor, layer, number, len(names))


def is_distributed(folder: Path) -> bool:
    """Whether a folder holds a checkpoint that ranks wrote together, of Megatron or of torch."""
    ours = any((folder / name).is_file() for name in (RUN_FILE, SUMS_FILE))
    return format_of(folder) is not None or ((folder / INDEX).is_file() and not ours)


def read_distributed(folder: Path) -> Saved:
    """The checkpoint in a folder, its tensors read when they are asked for.

    Raises:
        ValueError: another format, a damaged or missing file, no arguments, or what is not known
            in a model.
    """
    found = format_of(folder)
    if found is None:
        raise ValueError(
            f"Expected {FORMAT} of format torch_dist in {folder}, found torch's own {INDEX} alone, "
            f"as torch_dcp and fsdp_dtensor are. If Megatron can turn it into another: {_TURN}"
        )
    backend = found.get("sharded_backend"), found.get("sharded_backend_version", 1)
    if backend != (_BACKEND, 1):
        raise ValueError(
            f"Expected format torch_dist, version 1, in {folder}, got {backend[0]}, {backend[1]}: "
            f"{_TURN}"
        )
    tensors, objects = read_folder(folder, lambda name: not _LEFT_OUT.fullmatch(name))
    if strange := [name for name in objects if _MODEL.match(name)]:
        raise ValueError(f"Expected tensors in {folder}, got {min(strange)}, which is none.")
    common = _common(folder, objects)
    args = common.get("args") if isinstance(common, dict) else None
    if not isinstance(args, Namespace):
        raise ValueError(
            f"Expected Megatron-LM's arguments in {folder}, found none. A checkpoint of NeMo or "
            "Megatron Bridge can be exported to Hugging Face's format with their tools."
        )
    model = DistributedModel(folder, tensors, args)
    return Saved(LAYOUT, common, set(model), lambda: [model])


def _common(folder: Path, objects: Mapping[str, Shard]) -> Any:
    if (folder / COMMON).is_file():
        return safe_pickle.load(folder / COMMON)
    if _COMMON_STATE not in objects:
        raise ValueError(f"Expected {folder / COMMON}, or {_COMMON_STATE} in {INDEX}, found none.")
    found = objects[_COMMON_STATE]
    packed = io.BytesIO(found.content(_COMMON_STATE))
    content = safe_pickle.load(packed, f"{_COMMON_STATE} in {found.file}")
    return content[0] if isinstance(content, list) and content else None


def format_of(folder: Path) -> dict[str, Any] | None:
    """What Megatron Core says of the format of a folder; None if the folder is of another."""
    file = folder / FORMAT
    try:
        found = json_of(file.read_bytes()) if file.is_file() else None
    except ValueError:
        return None
    return found if isinstance(found, dict) and "sharded_backend" in found else None
