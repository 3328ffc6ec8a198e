"""Checkpoints of Megatron in its format torch: a file of each rank, joined to one model.

    iter_XXXXXXX/mp_rank_*/model_optim_rng.pt    or model_rng.pt beside a distributed optimizer

A file holds pickled arguments and the rank's share of each tensor of its layers. What differs
between versions of Megatron, which numbers a folder has and how shares join, is a `Layout`.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from mb_layers.on_demand import OnDemand
from torch import Tensor

from mb_train.convert.megatron import safe_pickle
from mb_train.convert.megatron.layout import Layout, Saved
from mb_train.convert.new_run import check_dtype

Rank = tuple[int, int, int]  # tensor, `kind` of the layout, pipeline
_FILES = ("model_optim_rng.pt", "model_rng.pt")
# What ranks may differ by, relative to a tensor that all of them hold: kernels that add in no fixed
# order round otherwise on each.
_DRIFT = 0.05


def read_ranks(folder: Path, layouts: Sequence[Layout]) -> Saved:
    """The checkpoint of all ranks, in the layout that it is of: the first of `layouts` if of none.

    Raises:
        ValueError: a damaged file; ranks that are missing, or not of one checkpoint.
    """
    contents: dict[Rank, Any] = {}
    first: tuple[str, Any] | None = None
    layout = layouts[0]
    for name, content in _files_in(folder):
        args = content["args"]
        if first is None:
            layout = next((one for one in layouts if _is_of(content, one)), layout)
        numbers = tuple(map(int, name.removeprefix("mp_rank_").split("_")))
        contents[layout.rank(numbers, args)] = content
        about = (*layout.sizes(args), content.get("iteration"))
        first = first or (name, about)
        if about != first[1]:  # left there by another run, or copied from another iteration
            raise ValueError(
                f"Expected all ranks in {folder} to be of one checkpoint, but by {first[0]} "
                f"(tensor, {layout.kind}, pipeline ranks, iteration) are {first[1]}, by {name} "
                f"{about}."
            )
    if first is None:
        raise ValueError(f"Expected mp_rank_* with {' or '.join(_FILES)} in {folder}, found none.")
    _check_all_there(contents, first[1][:3], layout, folder)
    names = {name for content in contents.values() for m in _models_of(content) for name in m}
    common = next(iter(contents.values()))
    return Saved(layout, common, names, partial(_whole_models, contents, layout, folder))


def _files_in(folder: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The content of each rank's file, and the name of the folder that it is in."""
    for path in sorted(folder.glob("mp_rank_*")):
        if not re.fullmatch(r"mp_rank(_\d+){1,3}", path.name):  # a copy that somebody keeps
            continue
        file = next((path / name for name in _FILES if (path / name).is_file()), None)
        if file is None:  # a data-parallel rank's share of a distributed optimizer
            continue
        content = safe_pickle.load(file)
        if not isinstance(content, dict) or not isinstance(content.get("args"), Namespace):
            raise ValueError(f"Expected {file} to hold Megatron's arguments, found none.")
        yield path.name, {**content, "args": _todays(content["args"])}


def _todays(args: Namespace) -> Namespace:
    """Arguments with what those of checkpoint versions below 3 lack: they knew no pipelines."""
    given = vars(args)
    if "model_parallel_size" not in given:
        return args
    added = {
        "tensor_model_parallel_size": args.model_parallel_size,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "kv_channels": args.hidden_size // args.num_attention_heads,
        "ffn_hidden_size": 4 * args.hidden_size,
        # GELU was its approximation until there was a flag for that.
        "bias_gelu_fusion": "openai_gelu" not in given,
    }
    return Namespace(**{**added, **given})


def _check_all_there(
    found: Collection[Rank], sizes: tuple[int, int, int], layout: Layout, folder: Path
) -> None:
    """Raise ValueError unless these are the ranks of that many, no more and no less."""
    if any(type(ranks) is not int or ranks < 1 for ranks in sizes):
        raise ValueError(
            f"Expected numbers of tensor, {layout.kind} and pipeline ranks in {folder}, got "
            f"{sizes}."
        )
    said = f"Expected tensor, {layout.kind} and pipeline ranks {sizes} in {folder}, but rank"
    # One after the other: of numbers that a stranger wrote, `product` would keep all.
    tensors, kinds, stages = map(range, sizes)
    ranks = ((t, k, p) for t in tensors for k in kinds for p in stages)
    if missing := next((rank for rank in ranks if rank not in found), None):
        raise ValueError(f"{said} {missing} is missing.")
    if len(found) > prod(sizes):
        raise ValueError(f"{said} {max(found)} is there too.")


def _models_of(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The models in a rank's content: one, or one for each of its virtual stages."""
    found = [value for key, value in content.items() if re.fullmatch(r"model\d*", key)]
    return [model for model in found if isinstance(model, dict)]


def _is_of(content: Mapping[str, Any], layout: Layout) -> bool:
    return any(name.startswith(layout.parts) for model in _models_of(content) for name in model)


class _Share(NamedTuple):
    """A tensor: what each tensor-parallel rank has of it, or the first has of one they all hold."""

    parts: tuple[Tensor, ...]
    dim: int = 0

    def joined(self) -> Tensor:
        return self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts, dim=self.dim)


class _Whole(OnDemand[_Share]):
    """The tensors of a model, each joined when it is asked for."""

    def read(self, place: _Share) -> Tensor:
        return place.joined()

    def outlines(self) -> dict[str, Tensor]:
        return {
            name: _Share(tuple(part.to("meta") for part in share.parts), share.dim).joined()
            for name, share in self.places.items()
        }


def _whole_models(ranks: Mapping[Rank, Any], layout: Layout, folder: Path) -> list[_Whole]:
    """Flat state dicts, layers by their number in the model: embedding.*, layers.N.*, ...

    The first holds all, further ones what each further `kind` rank has of the experts. A tied
    head's weights, of which the last stage has a copy, are in the embedding alone.
    """
    tensors, kinds, stages = (range(max(rank[i] for rank in ranks) + 1) for i in range(3))
    args = ranks[0, 0, 0]["args"]
    chunks = args.virtual_pipeline_model_parallel_size or 1
    wholes = [_Whole() for _ in kinds]
    first_layer = 0
    # `product` would keep the numbers of all chunks, of which a stranger said how many.
    for chunk, stage in ((chunk, stage) for chunk in range(chunks) for stage in stages):
        key = "model" if chunks == 1 else f"model{chunk}"
        layers: set[str] = set()  # none in a stage that has the embedding alone
        for kind, whole in enumerate(wholes):
            models = [ranks[tensor, kind, stage][key] for tensor in tensors]
            shares = [layout.flat(model, args, kind) for model in models]
            joined = _joined(shares, layout, folder)
            here = {_numbered(name, first_layer): share for name, share in joined.items()}
            if kind == 0:
                there = whole.places.keys() & here.keys()
                if other := [n for n in there if not torch.equal(whole[n], here[n].joined())]:
                    raise ValueError(
                        f"Expected all stages in {folder} to hold the same {min(other)}, got "
                        "others: they are of no one model."
                    )
                whole.places.update(here)
                layers = {name.split(".")[1] for name in here if name.startswith("layers.")}
                continue
            whole.places.update((n, share) for n, share in here.items() if layout.kept in n)
            for name in here:
                if re.search(layout.own, name):
                    continue
                if name not in wholes[0] or _differ(here[name].joined(), wholes[0][name]):
                    raise ValueError(
                        f"Expected {layout.kind} ranks 0 and {kind} in {folder} to hold the same "
                        f"{name}, got others: they are of no one model."
                    )
        first_layer += len(layers)
    tied = not getattr(args, "untie_embeddings_and_output_weights", False)
    head = wholes[0].places.pop(layout.head, None) if tied else None
    embedding = "embedding.word_embeddings.weight"
    if head is not None and not torch.equal(head.joined(), wholes[0][embedding]):
        raise ValueError(f"The head of {folder} differs from the embedding it is tied to.")
    return wholes


def _joined(
    shares: Sequence[Mapping[str, Tensor]], layout: Layout, folder: Path
) -> dict[str, _Share]:
    """The tensors of a stage, of all its tensor-parallel ranks."""
    for tensor, share in enumerate(shares):
        for name, weight in share.items():
            check_dtype(weight.dtype, f"{name} in {folder}")
        if differing := share.keys() ^ shares[0].keys():
            raise ValueError(
                f"Expected the same tensors of tensor ranks 0 and {tensor} in {folder}, but "
                f"{min(differing)} is of one of them alone."
            )
    return {name: _share(name, shares, layout, folder) for name in shares[0]}


def _share(
    name: str, shares: Sequence[Mapping[str, Tensor]], layout: Layout, folder: Path
) -> _Share:
    """What tensor-parallel ranks have of a tensor; whether they agree is looked at here."""
    first = shares[0][name]
    maybe_whole = re.search(layout.or_whole + "$", name)
    if maybe_whole and not any(_differ(share[name], first) for share in shares):
        return _Share((first,))
    for pattern, dim in layout.joined:
        if re.search(pattern + "$", name):
            return _Share(tuple(share[name] for share in shares), dim)
    for tensor, share in enumerate(shares[1:], 1):
        if _differ(share[name], first):
            why = " Experts become so under --sequence-parallel." * bool(
                re.search(layout.own, name)
            )
            raise ValueError(
                f"Expected tensor ranks 0 and {tensor} in {folder} to hold the same {name}, got "
                f"others: they are of no one model.{why}"
            )
    return _Share((first,))


def _differ(one: Tensor, other: Tensor) -> bool:
    """Whether two ranks' copies of a tensor are not of one model."""
    return one.shape != other.shape or bool(
        (one.float() - other.float()).norm() > _DRIFT * other.float().norm()
    )


def _numbered(name: str, first_layer: int) -> str:
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    return f"layers.{int(match[1]) + first_layer}.{match[2]}" if match else name
