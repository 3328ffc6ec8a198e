"""What the readers of the formats hand on, and what they have to know of the models inside."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mb_train.config import TrainConfig


@dataclass(frozen=True)
class Layout:
    """A version of Megatron: how its models are shared among ranks, and what their parts are.

    Attributes:
        kind: of the ranks among which experts are distributed: data, or expert.
        parts: beginnings of names in a model of this layout.
        sizes: numbers of tensor, `kind` and pipeline ranks, from the arguments.
        rank: a rank by these, from the numbers of its folder and the arguments.
        flat: tensors of a rank's model by name, layers.N.* among them, from its arguments and its
            number among `kind` ranks.
        joined: patterns of names, and whether tensor-parallel ranks have rows (0) or columns (1);
            all else is held by all.
        or_whole: pattern of what some layers join and others hold on all ranks.
        own: pattern of what a `kind` rank alone has; all else is held by all.
        kept: a part of the names that are kept of each `kind` rank, not of the first alone.
        head: name of the last stage's copy of the embedding, or of an untied head.
        config: from the arguments, the names of all tensors, and a tokenizer.
        renamed: the weights by our names, from the whole models of each `kind` rank.
    """

    kind: str
    parts: tuple[str, ...]
    sizes: Callable[[Namespace], tuple[int, int, int]]
    rank: Callable[[Sequence[int], Namespace], tuple[int, int, int]]
    flat: Callable[[Any, Namespace, int], dict[str, Tensor]]
    joined: Sequence[tuple[str, int]]
    own: str
    kept: str
    head: str
    config: Callable[[Namespace, Collection[str], str], TrainConfig]
    renamed: Callable[[Sequence[Mapping[str, Tensor]], TrainConfig, int], Mapping[str, Tensor]]
    or_whole: str = "(?!)"


@dataclass(frozen=True)
class Saved:
    """A checkpoint, of whatever format.

    Attributes:
        layout: of its model.
        common: what is the same for all ranks: `args`, `checkpoint_version`, ...
        names: of the model's tensors.
        wholes: reads the whole models of each `kind` rank, the first with all that is no expert.
            It is called once the arguments are found to be of a known model.
    """

    layout: Layout
    common: Mapping[str, Any]
    names: Collection[str]
    wholes: Callable[[], Sequence[Mapping[str, Tensor]]]
