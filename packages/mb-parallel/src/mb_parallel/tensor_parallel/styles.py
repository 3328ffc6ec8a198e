"""The styles that plans are made of: what tensor parallelism does to one module.

"The stream" is the residual stream, x [..., S, D], of plain tensors. Without sequence parallelism
every rank holds all of it. With it each rank holds its part of the sequence, S. A column-parallel
layer takes in the whole stream (`copy` or `gather`) and returns a slice of its outputs. A
row-parallel layer takes such a slice and returns the stream (`reduce` or `scatter`). What lies
between the two is called a region.

A parameter is either sharded, as a DTensor, or replicated on the tp ranks. A replicated one stays a
plain parameter, and its style makes sure that every rank ends up with its whole gradient.

Letters: B sequences, S tokens of a sequence, D hidden.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from mb_parallel.random import make_distinct
from mb_parallel.tensor_parallel import collectives
from mb_parallel.tensor_parallel.adapt import Adapted, adapt, once, shard, summed, to_local

SEQUENCE = -2  # dimension of x [..., S, D]


@dataclass(frozen=True)
class Region:
    """The tp ranks, and whether the stream's tokens are spread over them."""

    mesh: DeviceMesh
    sequence_parallel: bool
    adapted: Adapted = field(default_factory=dict, compare=False, repr=False)

    @property
    def size(self) -> int:
        return self.mesh.size()

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank()

    @property
    def group(self) -> ProcessGroup:
        return self.mesh.get_group()

    def enter(self, x: Tensor) -> Tensor:
        """The whole stream, for layers of which each rank computes a part."""
        if self.sequence_parallel:
            return collectives.gather(x, self.group, SEQUENCE)
        return collectives.copy(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """The stream, as the sum of what each rank has."""
        if self.sequence_parallel:
            return collectives.scatter(x, self.group, SEQUENCE)
        return collectives.reduce(x, self.group)


class Style:
    """Base of the styles."""

    def apply(self, module: nn.Module, region: Region) -> None:
        """Change `module` in place.

        Raises:
            ValueError: the module cannot be split over so many ranks.
        """
        raise NotImplementedError

    def covers(self, module: nn.Module) -> list[nn.Module]:
        """The modules whose own parameters this style handles."""
        return [module]


class UnitInCommon(NamedTuple):
    """What is in a unit of a column-parallel map that several ranks have in common, in its order.

    divided: heads of each map of which every rank needs a share of its own (queries, their gates).
    needed: heads behind them, which all of these ranks need (a key and a value).
    head_size: rows of a head.
    """

    divided: tuple[int, ...]
    needed: int
    head_size: int


@dataclass(frozen=True)
class ColumnParallel(Style):
    """A linear layer that is split by outputs: weight [out, in] and bias by rows.

    Args:
        units: number of indivisible units that the rows consist of (heads, key-value groups). Each
            rank gets whole units, so the rows of a fused projection must be ordered by unit: for
            grouped queries `[key-value group][its query heads, key, value][head size]`. None: every
            row is a unit.
        unit: their name, for the error.
        enter: take in the whole stream. False if a parent has done so (`ParallelInput`).
        common: what is in a unit, so that several ranks can have one in common where there are more
            ranks than units. Each multiplies with as many of its rows as the others, they send one
            another what comes of them, and each keeps what it needs. None: tp has to divide the
            units.
    """

    units: int | None = None
    unit: str = "rows"
    enter: bool = True
    common: UnitInCommon | None = None

    def apply(self, module: nn.Module, region: Region) -> None:
        several = self._ranks_of_a_unit(region.size)
        names = own(module, "weight", "bias")
        for name in names:
            shard(module, name, 0, region.mesh, what=f"{self.unit} of a column-parallel map")

        def forward(
            _: nn.Module, original: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            y = original(region.enter(x) if self.enter else x, *args, **kwargs)
            return y if several == 1 else self._share(y, several, region)

        views = dict.fromkeys(names, to_local)
        changed = self.enter or several > 1
        adapt(module, region.adapted, self, views=views, forward=forward if changed else None)

    def _ranks_of_a_unit(self, ranks: int) -> int:
        """How many ranks have each unit in common.

        Raises:
            ValueError: neither do they get whole units, nor can they have one in common.
        """
        if self.units is None or self.units % ranks == 0:
            return 1
        if self.common is None:
            raise ValueError(
                f"Expected tp = {ranks} to divide the {self.units} {self.unit}, for each rank "
                f"computes whole ones. Choose a tp that divides {self.units}."
            )
        several = ranks // self.units
        if ranks % self.units or any(heads % several for heads in self.common.divided):
            raise ValueError(
                f"Expected tp = {ranks} to divide the {self.units} {self.unit}, or to be a "
                "multiple of them that divides the heads beside them. Choose another tp."
            )
        return several

    def _share(self, y: Tensor, several: int, region: Region) -> Tensor:
        """What one rank needs of a unit, of which each of its ranks computes some rows."""
        assert self.units is not None
        assert self.common is not None
        unit, place = divmod(region.rank, several)
        whole = collectives.gather(y, region.group, -1).unflatten(-1, (self.units, -1))
        heads = whole.select(-2, unit).unflatten(-1, (-1, self.common.head_size))
        *maps, needed = heads.split([*self.common.divided, self.common.needed], -2)
        shares = (x.unflatten(-2, (several, -1)).select(-3, place) for x in maps)
        return torch.cat([*shares, needed], -2).flatten(-2)


@dataclass(frozen=True)
class RowParallel(Style):
    """A linear layer that is split by inputs: weight [out, in] by columns, bias replicated."""

    def apply(self, module: nn.Module, region: Region) -> None:
        names = own(module, "weight", "bias")
        shard(module, "weight", 1, region.mesh, what="inputs of a row-parallel map")

        def forward(_: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return region.leave(original(*args, **kwargs))

        views = dict.fromkeys(names, once(region.group)) | {"weight": to_local}
        adapt(module, region.adapted, self, views=views, forward=forward)


@dataclass(frozen=True)
class ParallelInput(Style):
    """The parent of column-parallel layers with `enter=False`: takes in the stream once for all.

    Its own parameters need a second style: `PartialGradients` if each rank uses them for its part.

    Args:
        count: how many leading arguments of its forward are streams, given by position or by name
            (2 for a decoder's states and an encoder's).
    """

    count: int = 1

    def apply(self, module: nn.Module, region: Region) -> None:
        names = tuple(inspect.signature(module.forward).parameters)[: self.count]
        kind = type(module).__name__

        def forward(_: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            entered = [region.enter(x) for x in args[: self.count]]
            named = [name for name in names[len(entered) :] if name in kwargs]
            if len(entered) + len(named) < self.count:
                raise ValueError(
                    f"Expected {self.count} streams in {kind}, by position or as "
                    f"{', '.join(names)}, got {len(entered) + len(named)}."
                )
            kwargs |= {name: region.enter(kwargs[name]) for name in named}
            return original(*entered, *args[self.count :], **kwargs)

        adapt(module, region.adapted, (self, names), forward=forward)

    def covers(self, module: nn.Module) -> list[nn.Module]:
        return []


@dataclass(frozen=True)
class SequenceParallel(Style):
    """A module that works token by token in the stream: norms, a head's dense layer.

    Its parameters are replicated. With sequence parallelism each rank sees its own tokens only, so
    gradients are added up.
    """

    def apply(self, module: nn.Module, region: Region) -> None:
        if region.sequence_parallel:
            adapt(
                module, region.adapted, self, views=dict.fromkeys(own(module), summed(region.group))
            )


@dataclass(frozen=True)
class PartialGradients(Style):
    """Replicated parameters inside a region, such as a norm that all heads share.

    Each rank uses them for its part only, so gradients are added up.
    """

    def apply(self, module: nn.Module, region: Region) -> None:
        adapt(module, region.adapted, self, views=dict.fromkeys(own(module), summed(region.group)))


@dataclass(frozen=True)
class SplitSequence(Style):
    """A replicated module whose output [..., S, D] begins the stream, such as an embedding."""

    def apply(self, module: nn.Module, region: Region) -> None:
        if not region.sequence_parallel:
            return

        def forward(_: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return collectives.split(original(*args, **kwargs), region.group, SEQUENCE)

        adapt(module, region.adapted, self, forward=forward)


@dataclass(frozen=True)
class JoinOutput(Style):
    """A module at the end of the stream, such as the last norm, before what needs whole sequences.

    Its output, or the first of several, is joined, and all ranks compute the same from there on. It
    is assumed to work token by token.
    """

    def apply(self, module: nn.Module, region: Region) -> None:
        if not region.sequence_parallel:
            return

        def forward(_: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            if isinstance(output, Tensor):
                return collectives.join(output, region.group, SEQUENCE)
            x, *rest = output
            return collectives.join(x, region.group, SEQUENCE), *rest

        views = dict.fromkeys(own(module), summed(region.group))
        adapt(module, region.adapted, self, views=views, forward=forward)


@dataclass(frozen=True)
class Sharded(Style):
    """Parameters that are split, each rank computing with its part, without communication.

    A module that has none of them is left alone.

    Args:
        dims: the dimension to split, by parameter name: {"weight": 1} for a table [buckets, heads]
            whose output is added to the scores of a rank's own heads.
    """

    dims: Mapping[str, int]

    def apply(self, module: nn.Module, region: Region) -> None:
        names = own(module, *self.dims)
        for name in names:
            shard(module, name, self.dims[name], region.mesh, what=f"dimension of {name}")
        if names:
            adapt(module, region.adapted, type(self), views=dict.fromkeys(names, to_local))


@dataclass(frozen=True)
class DistinctRandom(Style):
    """A dropout, or another module that draws random numbers: each rank draws its own.

    See `mb_parallel.random`. A module whose rate (`p`, or `dropout`) is 0 is left alone.

    Args:
        stream: whether the module is in the stream. There ranks draw their own numbers only with
            sequence parallelism; without it they hold the same tokens, and must drop the same.
            False: it is within a region, where ranks hold different heads or channels, and always
            draw their own.
    """

    stream: bool = True

    def apply(self, module: nn.Module, region: Region) -> None:
        rate = getattr(module, "p", getattr(module, "dropout", None))
        if rate != 0 and (region.sequence_parallel or not self.stream):
            make_distinct([module], region.rank)

    def covers(self, module: nn.Module) -> list[nn.Module]:
        return []


@dataclass(frozen=True)
class Replicated(Style):
    """A module that all ranks run on equal inputs: nothing is done."""

    def apply(self, module: nn.Module, region: Region) -> None:
        pass

    def covers(self, module: nn.Module) -> list[nn.Module]:
        return list(module.modules())


def own(module: nn.Module, *names: str) -> list[str]:
    """The names of the module's own parameters.

    Args:
        names: those that it may have; none given: any.

    Raises:
        ValueError: it has others.
    """
    found = [name for name, parameter in module._parameters.items() if parameter is not None]
    if more := [name for name in found if names and name not in names]:
        raise ValueError(
            f"Expected no parameters but {', '.join(names)} in {type(module).__name__}, got "
            f"{', '.join(more)}. Put them into a module of their own, which has a style of its own."
        )
    return found
