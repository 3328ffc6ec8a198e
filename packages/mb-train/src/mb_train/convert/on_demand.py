"""Tensors of somebody else's folder by name, which together may be too many for the memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from torch import Tensor

Place = TypeVar("Place")


class OnDemand(Mapping[str, Tensor], Generic[Place]):
    """Each tensor is read from its place when it is asked for; `read` says how."""

    def __init__(self) -> None:
        self.places: dict[str, Place] = {}

    def read(self, place: Place) -> Tensor:
        """The tensor that lies there."""
        raise NotImplementedError

    def __getitem__(self, name: str) -> Tensor:
        return self.read(self.places[name])

    def __contains__(self, name: object) -> bool:  # that of a Mapping would read the tensor
        return name in self.places

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def without(tensors: Mapping[str, Tensor], beginnings: tuple[str, ...]) -> Mapping[str, Tensor]:
    """The same tensors without those whose names begin so; none is read for that."""
    if not isinstance(tensors, OnDemand):
        return {n: t for n, t in tensors.items() if not n.startswith(beginnings)}
    places = tensors.places
    tensors.places = {n: place for n, place in places.items() if not n.startswith(beginnings)}
    return tensors
