"""The train, validation and test parts of one dataset, or of several mixed by weight."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, NotRequired, TypedDict, TypeVar

import numpy as np

from mb_data.indexed_dataset import IndexedDataset
from mb_data.samples.blend import BlendedDataset, Samples
from mb_data.samples.split import parse_split, summed

PARTS = ("train", "valid", "test")
MARGIN = 1.005  # Megatron asks each source for 0.5 % more than its share

# What a data path may be: a prefix or several; weights and prefixes by turns; these per part.
DataPath = str | os.PathLike[str] | Sequence[str]
DataPaths = DataPath | Mapping[str, DataPath | None]

D = TypeVar("D", bound=Samples[Any])
# A part's dataset; a part without documents is None.
Part = D | BlendedDataset[Any] | None
# Those for training, validation and test.
Parts = tuple[Part[D], Part[D], Part[D]]


class Source(NamedTuple):
    """A dataset's documents for one part; the weight is None where nothing else is mixed in."""

    weight: float | None
    prefix: str
    documents: range


class PartsOptions(TypedDict):
    """What every ``build_..._datasets`` takes for ``build_parts``, which describes it."""

    split: str
    num_samples: Sequence[int | None]
    split_rounding: NotRequired[str]
    cache_dir: NotRequired[str | os.PathLike[str] | None]


def build_parts(
    paths: DataPaths,
    make: Callable[..., D],
    *,
    count: Callable[[IndexedDataset], int],
    split: str,
    num_samples: Sequence[int | None],
    split_rounding: str = "shares",
    cache_dir: str | os.PathLike[str] | None = None,
) -> Parts[D]:
    """Train, validation and test datasets from any form of data path.

    Args:
        paths: a prefix; or weights and prefixes by turns, ``["0.3", "a", "0.7", "b"]``; or several
            prefixes alone, which weigh as many as their tokens; or one of these for each of
            ``train``, ``valid`` and ``test``, then ``split`` is not used.
        make: called with a source, a range of its documents, ``num_samples=``, the samples that
            must be there at least, and ``cache_dir=``.
        count: how many documents a source has.
        split, split_rounding: see ``parse_split``; applied to every source by itself.
        num_samples: wanted for training, validation and test; None for a part that is not.
        cache_dir: where indices are kept; beside their source, in ``<prefix>_index/``, if None.

    Returns:
        A part without documents, or that is not wanted, is None. A source without documents in some
        part is left out there, with a warning, and the others share its weight.
    """
    if np.asarray(num_samples, dtype=object).shape != (len(PARTS),):
        raise ValueError(
            f"num_samples: expected three numbers, train, valid and test, got {num_samples!r}"
        )
    opened = cache(IndexedDataset)

    def build(name: str, sources: Sequence[Source], wanted: int | None) -> Part[D]:
        there = [source for source in sources if source.documents]
        if not there or wanted is None:
            return None
        weight, prefix, documents = there[0]
        if weight is None:
            return make(opened(prefix), documents, num_samples=wanted, cache_dir=cache_dir)
        if len(there) < len(sources) and wanted:
            missing = [source.prefix for source in sources if not source.documents]
            warnings.warn(
                f"no documents for {name} in {', '.join(missing)}: left out of that blend",
                RuntimeWarning,
                stacklevel=4,
            )
        weights = [source.weight for source in there if source.weight is not None]
        total = summed(weights)
        shares = [weight / total for weight in weights]
        asked = [math.ceil(wanted * share * MARGIN) for share in shares]
        datasets = [
            make(opened(source.prefix), source.documents, num_samples=number, cache_dir=cache_dir)
            for source, number in zip(there, asked, strict=True)
        ]
        return BlendedDataset(datasets, shares, wanted, prefix=prefix, cache_dir=cache_dir)

    built: list[Part[D]] = []
    each = _sources(paths, opened, count, split, split_rounding)
    for name, sources, wanted in zip(PARTS, each, num_samples, strict=True):
        try:
            built.append(build(name, sources, wanted))
        except ValueError as error:
            raise ValueError(f"data for {name}: {error}") from error
    train, valid, test = built
    return train, valid, test


def _sources(
    paths: DataPaths,
    opened: Callable[[str], IndexedDataset],
    count: Callable[[IndexedDataset], int],
    split: str,
    split_rounding: str,
) -> list[list[Source]]:
    """The sources of each part."""

    def whole(prefix: str) -> range:
        return range(count(opened(prefix)))

    if isinstance(paths, Mapping):
        unknown = [name for name in paths if name not in PARTS]
        if unknown:
            raise ValueError(f"data paths for {unknown}: the parts are {', '.join(PARTS)}")
        blends = [weighed(path, opened) if (path := paths.get(name)) else [] for name in PARTS]
        return [[Source(w, prefix, whole(prefix)) for w, prefix in blend] for blend in blends]
    parts: list[list[Source]] = [[] for _ in PARTS]
    for weight, prefix in weighed(paths, opened):
        ranges = parse_split(split, len(whole(prefix)), rounding=split_rounding)
        for part, documents in zip(parts, ranges, strict=True):
            part.append(Source(weight, prefix, documents))
    return parts


def weighed(
    path: DataPath, opened: Callable[[str], IndexedDataset] = IndexedDataset
) -> list[tuple[float | None, str]]:
    """As ``parse_blend``, but that several prefixes alone weigh as many as their tokens."""
    blend = parse_blend(path)
    if len(blend) == 1 or blend[0][0] is not None:
        return blend
    tokens = [int(opened(prefix).sizes.sum(dtype=np.int64)) for _, prefix in blend]
    # An empty one weighs something too: it is left out of the blend with a warning.
    return [(float(max(n, 1)), prefix) for n, (_, prefix) in zip(tokens, blend, strict=True)]


def parse_blend(path: DataPath) -> list[tuple[float | None, str]]:
    """Weights and prefixes of a data path; prefixes alone have the weight None.

    A prefix behind a weight may be a number too, and so may one that is alone.

    Raises:
        ValueError: neither prefixes alone nor weights and prefixes by turns, or a weight that is
            not a positive number.
    """
    words = [path] if isinstance(path, str | os.PathLike) else path
    words = [os.fspath(word) if isinstance(word, os.PathLike) else str(word) for word in words]
    numbers = [_number(word) for word in words]
    if len(words) == 1 or (words and all(number is None for number in numbers)):
        return [(None, word) for word in words]
    weights = [number for number in numbers[::2] if number is not None]
    if not words or 2 * len(weights) != len(words):
        raise ValueError(
            "expected a data path of prefixes alone, or of weights and prefixes by turns, got "
            f"{' '.join(words) or 'nothing'}"
        )
    for weight in weights:
        if not 0 < weight < math.inf:
            raise ValueError(f"expected weights above 0 in a data path, got {weight:g}")
    return [(weight, prefix.strip()) for weight, prefix in zip(weights, words[1::2], strict=True)]


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
