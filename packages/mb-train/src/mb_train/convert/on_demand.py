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
