"""What becomes of one module under tensor parallelism: the styles that plans are made of.

In the residual stream tensors are plain. Without sequence parallelism every rank holds all of it;
with it each rank holds its run of the sequence, the dimension before the last of x [..., S, D]. A
column-parallel map takes the whole stream in (`copy` or `gather`) and gives a slice of the width,
a row-parallel one takes that slice and gives the stream back (`reduce` or `scatter`).

A parameter is sharded (a DTensor), or replicated on the tp ranks: then it stays a plain parameter,
and a style sees to it that every rank ends up with its whole gradient.

Letters: B sequences, S tokens of a sequence, D hidden.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from mb_parallel.random import make_distinct
from mb_parallel.tensor_parallel import collectives
from mb_parallel.tensor_parallel.adapt import Adapted, adapt, local, once, shard, summed

SEQUENCE = -2  # dimension of x [..., S, D]


@dataclass(frozen=True)
class Region:
    """Where a style is applied: the tp ranks, and whether tokens are spread over them outside."""

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
        """The whole stream, of which each rank will compute a part."""
        if self.sequence_parallel:
            return collectives.gather(x, self.group, SEQUENCE)
        return collectives.copy(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """The stream again, from each rank's part of the sum."""
        if self.sequence_parallel:
            return collectives.scatter(x, self.group, SEQUENCE)
        return collectives.reduce(x, self.group)


class Style:
    """Base of the styles."""

    def apply(self, module: nn.Module, region: Region) -> None:
        """Change `module` in place.

        Raises:
            ValueError: the module cannot be shared by so many ranks.
        """
        raise NotImplementedError

    def covers(self, module: nn.Module) -> list[nn.Module]:
        """The modules whose own parameters this style has seen to."""
        return [module]


@dataclass(frozen=True)
class ColumnParallel(Style):
    """A linear map whose outputs are shared out: weight [out, in] and bias by rows.

    Args:
        units: how many indivisible units the rows are (heads, key-value groups); None: the rows.
            Each rank gets whole units, so a fused projection has its rows ordered by unit: for
            grouped queries `[key-value group][its query heads, key, value][head size]`.
        unit: their name, for the error.
        enter: take in the whole stream; False where a parent has (`ParallelInput`).
    """

    units: int | None = None
    unit: str = "rows"
    enter: bool = True

    def apply(self, module: nn.Module, region: Region) -> None:
        if self.units is not None and self.units % region.size:
            raise ValueError(
                f"Expected tp = {region.size} to divide the {self.units} {self.unit}, for each "
                f"rank computes whole ones. Choose a tp that divides {self.units}."
            )
        names = own(module, "weight", "bias")
        for name in names:
            shard(module, name, 0, region.mesh, what=f"{self.unit} of a column-parallel map")

        def forward(original: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
            return original(region.enter(x), *args, **kwargs)

        views = dict.fromkeys(names, local)
        adapt(module, region.adapted, self, views=views, forward=forward if self.enter else None)


@dataclass(frozen=True)
class RowParallel(Style):
    """A linear map whose inputs are shared out: weight [out, in] by columns, bias replicated."""

    def apply(self, module: nn.Module, region: Region) -> None:
        names = own(module, "weight", "bias")
        shard(module, "weight", 1, region.mesh, what="inputs of a row-parallel map")

        def forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return region.leave(original(*args, **kwargs))

        views = dict.fromkeys(names, once(region.group)) | {"weight": local}
        adapt(module, region.adapted, self, views=views, forward=forward)


@dataclass(frozen=True)
class ParallelInput(Style):
    """A module whose children are column parallel with `enter=False`: the stream is taken in once.

    Parameters of its own are for another style to see to: `PartialGradients` if it computes with
    them what its children do, each rank a part.

    Args:
        count: how many leading arguments of its forward are streams, given by position or by name
            (2 for a decoder's states and an encoder's).
    """

    count: int = 1

    def apply(self, module: nn.Module, region: Region) -> None:
        names = tuple(inspect.signature(module.forward).parameters)[: self.count]
        kind = type(module).__name__

        def forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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

    Its parameters are replicated. With sequence parallelism each rank sees its own tokens, and
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

    Each rank computes a part of what they are used for, and gradients are added up.
    """

    def apply(self, module: nn.Module, region: Region) -> None:
        adapt(module, region.adapted, self, views=dict.fromkeys(own(module), summed(region.group)))


@dataclass(frozen=True)
class SplitSequence(Style):
    """A replicated module at the head of the stream, [..., S, D]: position embeddings."""

    def apply(self, module: nn.Module, region: Region) -> None:
        if not region.sequence_parallel:
            return

        def forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return collectives.split(original(*args, **kwargs), region.group, SEQUENCE)

        adapt(module, region.adapted, self, forward=forward)


@dataclass(frozen=True)
class JoinOutput(Style):
    """A module at the end of the stream, before what needs whole sequences: a pooler, a gather.

    Its output, or the first of several, is joined; all ranks go on alike with it. Parameters of its
    own are taken to work token by token, as a last norm's do.
    """

    def apply(self, module: nn.Module, region: Region) -> None:
        if not region.sequence_parallel:
            return

        def forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            if isinstance(output, Tensor):
                return collectives.join(output, region.group, SEQUENCE)
            x, *rest = output
            return collectives.join(x, region.group, SEQUENCE), *rest

        views = dict.fromkeys(own(module), summed(region.group))
        adapt(module, region.adapted, self, views=views, forward=forward)


@dataclass(frozen=True)
class Sharded(Style):
    """Parameters of which each rank has a run and computes with it alone, without a collective.

    Args:
        dims: dimension to share out, by name: {"weight": 1} of a table [buckets, heads] whose
            output is added to the scores of a rank's own heads.
    """

    dims: Mapping[str, int]

    def apply(self, module: nn.Module, region: Region) -> None:
        names = own(module, *self.dims)
        for name in names:
            shard(module, name, self.dims[name], region.mesh, what=f"dimension of {name}")
        adapt(module, region.adapted, type(self), views=dict.fromkeys(names, local))


@dataclass(frozen=True)
class DistinctRandom(Style):
    """A dropout, or whatever draws random numbers: each rank its own, see `mb_parallel.random`.

    A module whose rate (`p`, or `dropout`) is 0 is left alone.

    In the stream that is wanted with sequence parallelism alone: without it ranks hold the same
    tokens, and must drop the same.

    Args:
        stream: False within a region, where ranks hold different heads or channels: always.
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
    """A module that all ranks run alike on equal inputs: nothing to do."""

    def apply(self, module: nn.Module, region: Region) -> None:
        pass

    def covers(self, module: nn.Module) -> list[nn.Module]:
        return list(module.modules())


def own(module: nn.Module, *names: str) -> list[str]:
    """The module's own parameters that are there, which are of these names, if any are given.

    Raises:
        ValueError: there are others.
    """
    found = [name for name, parameter in module._parameters.items() if parameter is not None]
    if more := [name for name in found if names and name not in names]:
        raise ValueError(
            f"Expected no parameters but {', '.join(names)} in {type(module).__name__}, got "
            f"{', '.join(more)}. Put them into a module of their own, which has a style of its own."
        )
    return found
