"""Tensors by name which together may be too many for the memory: each is made when asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor

Place = TypeVar("Place")


class OnDemand(Mapping[str, Tensor], Generic[Place]):
    """Each tensor is read from its place when it is asked for, every time anew; `read` says how."""

    def __init__(self) -> None:
        self.places: dict[str, Place] = {}

    def read(self, place: Place) -> Tensor:
        """The tensor that lies there."""
        raise NotImplementedError

    def outlines(self) -> dict[str, Tensor]:
        """All of them without numbers: shapes and dtypes, on the meta device."""
        raise NotImplementedError

    def __getitem__(self, name: str) -> Tensor:
        return self.read(self.places[name])

    def __contains__(self, name: object) -> bool:  # that of a Mapping would read the tensor
        return name in self.places

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def outlines(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Shapes and dtypes, see `OnDemand`, of tensors that may also be in memory."""
    if isinstance(tensors, OnDemand):
        return tensors.outlines()
    return {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}


class Changed(OnDemand[str]):
    """The tensors of another, each as `change` makes it of its name and what it was.

    Of its outlines too: `change` has to take tensors without numbers.
    """

    def __init__(
        self, source: Mapping[str, Tensor], change: Callable[[str, Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.places = {name: name for name in source}
        self._source, self._change = source, change

    def read(self, place: str) -> Tensor:
        return self._change(place, self._source[place])

    def outlines(self) -> dict[str, Tensor]:
        return {name: self._change(name, t) for name, t in outlines(self._source).items()}


class Picked(OnDemand[tuple[Mapping[str, Tensor], str]]):
    """Tensors of others, by name: of which, and their name there."""

    def __init__(self, places: Mapping[str, tuple[Mapping[str, Tensor], str]]) -> None:
        super().__init__()
        self.places = dict(places)

    def read(self, place: tuple[Mapping[str, Tensor], str]) -> Tensor:
        source, name = place
        return source[name]

    def outlines(self) -> dict[str, Tensor]:
        sources = {id(source): source for source, _ in self.places.values()}
        found = {key: outlines(source) for key, source in sources.items()}
        return {name: found[id(source)][there] for name, (source, there) in self.places.items()}
