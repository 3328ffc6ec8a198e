"""Several datasets mixed by weight.

Sample n of a blend comes from the source that lags furthest behind its share, the one with the
largest ``weight · max(n, 1) - samples taken``; ties go to the first. So the mix is right after
every few samples, not just on average. This is Megatron-LM's order, number for number.

The rule is sequential: each choice depends on all before. But two runs of it that start from
different counts soon agree, and then agree for ever. So many stretches of the order are computed
side by side, each started a little early from counts rounded from the weights. Where a stretch
begins with exactly the counts on which the one before ends, it is right; the others are computed
again from the right counts. The result is exact however well the guesses do.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt

from mb_data.indexed_dataset import checked_index
from mb_data.samples.index_cache import IndexArrays, load_or_build
from mb_data.words import counted

WINDOW = 1 << 22  # samples ordered at a time: bounds the temporaries to some 40 MB
WARM_UP = 256  # samples after which two orders of 20 even sources nearly always agree


T_co = TypeVar("T_co", covariant=True)


class Samples(Protocol[T_co]):
    """Anything with a length and items by number."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> T_co: ...


class BlendedDataset(Generic[T_co]):
    """``size`` samples from several datasets, in proportion to weights.

    Args:
        datasets: the sources; each must have the samples that its weight asks of it.
        weights: positive, in any unit.
        size: of the blend.
        prefix, cache_dir: where the order is kept, see ``load_or_build``; in memory without both.

    Attributes:
        dataset_index: [size], the source of each sample.
        dataset_sample_index: int64 [size], its number there.
    """

    def __init__(
        self,
        datasets: Sequence[Samples[T_co]],
        weights: Sequence[float],
        size: int,
        *,
        prefix: str | os.PathLike[str] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if len(datasets) != len(weights) or not datasets:
            raise ValueError(f"got {len(datasets)} datasets and {len(weights)} weights")
        if size < 0:
            raise ValueError(f"size of a blend must be at least 0, got {size}")
        shares = normalize(weights)
        self.datasets = list(datasets)

        def build() -> dict[str, npt.NDArray]:
            dataset_index, sample_index = blend_order(shares, size)
            return {"dataset_index": dataset_index, "dataset_sample_index": sample_index}

        if prefix is None and cache_dir is None:
            self._index = IndexArrays(build())
        else:
            key = {"kind": "blend", "weights": [float(w).hex() for w in shares], "size": size}
            self._index = load_or_build(key, build, prefix=prefix or "", cache_dir=cache_dir)
        taken = np.bincount(self.dataset_index, minlength=len(datasets))
        for number, (dataset, count) in enumerate(zip(self.datasets, taken.tolist(), strict=True)):
            if count > len(dataset):
                raise ValueError(
                    f"a blend of {size:,} samples takes {count:,} from source {number}, which has "
                    f"{len(dataset):,}; build that source with more samples"
                )

    @property
    def dataset_index(self) -> npt.NDArray:
        return self._index["dataset_index"]

    @property
    def dataset_sample_index(self) -> npt.NDArray:
        return self._index["dataset_sample_index"]

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, index: int) -> T_co:
        source, number = self._taken(index)
        return source[number]

    def documents_of(self, index: int) -> list[tuple[str, int]]:
        """As the source's method of this name; AttributeError where it has none."""
        source, number = self._taken(index)
        return source.documents_of(number)

    def lengths(self) -> npt.NDArray[np.int64]:
        """As the sources' method of this name; AttributeError where one has none."""
        parts = [cast(Any, source).lengths() for source in self.datasets]
        lengths = np.empty((len(self), parts[0].shape[1]), np.int64)
        for number, part in enumerate(parts):
            own = self.dataset_index == number
            lengths[own] = part[self.dataset_sample_index[own]]
        return lengths

    def _taken(self, index: int) -> tuple[Any, int]:
        """The source of a sample, and its number there."""
        index = checked_index(index, len(self), "sample", "a blend")
        source = self.datasets[int(self.dataset_index[index])]
        return source, int(self.dataset_sample_index[index])

    def __repr__(self) -> str:
        taken = np.bincount(self.dataset_index, minlength=len(self.datasets)).tolist()
        parts = (f"{n:,} of {d!r}" for n, d in zip(taken, self.datasets, strict=True))
        return f"BlendedDataset({counted(len(self), 'sample')}: {', '.join(parts)})"


def normalize(weights: Sequence[float]) -> npt.NDArray[np.float64]:
    """Weights as float64 shares that sum to 1; ValueError unless all are positive and finite."""
    values = np.array(weights, dtype=np.float64)
    with np.errstate(all="ignore"):
        shares = values / np.sum(values)
    # A share is 0 beside a sum that is infinite: the rule would then take all sources by turns.
    if not (np.isfinite(values).all() and (shares > 0).all()):
        raise ValueError(
            "weights must be positive numbers, of a finite sum and none too small beside it, got "
            f"{list(weights)}"
        )
    return shares


def blend_order(
    shares: npt.NDArray[np.float64], size: int
) -> tuple[npt.NDArray[np.unsignedinteger], npt.NDArray[np.int64]]:
    """The source of each sample and its number there: [size] and int64 [size].

    Args:
        shares: float64 [K], positive, as ``normalize`` gives them.
    """
    dtype = np.min_scalar_type(len(shares) - 1)
    sources = np.empty(size, dtype=dtype)
    numbers = np.empty(size, dtype=np.int64)
    counts = np.zeros(len(shares))
    for begin in range(0, size, WINDOW):
        stop = min(begin + WINDOW, size)
        # Wide enough to drown the cost of a NumPy call, long enough to repay the warm-up.
        lanes = max(1, min((stop - begin) // (4 * WARM_UP), (1 << 15) // len(shares)))
        steps = -(-(stop - begin) // lanes)
        starts = begin + steps * np.arange(lanes)
        initial = np.vstack((counts, _guess(shares, starts[1:])))
        chosen, taken, final = _advance(shares, initial, starts, steps)
        while True:
            wrong = np.flatnonzero((final[:-1] != initial[1:]).any(axis=1)) + 1
            if not len(wrong):
                break
            initial[wrong] = final[wrong - 1]
            chosen[:, wrong], taken[:, wrong], final[wrong] = _advance(
                shares, initial[wrong], starts[wrong], steps
            )
        sources[begin:stop] = chosen.T.reshape(-1)[: stop - begin]
        numbers[begin:stop] = taken.T.reshape(-1)[: stop - begin]
        counts = counts + np.bincount(sources[begin:stop], minlength=len(shares))
    return sources, numbers


def _guess(
    shares: npt.NDArray[np.float64], starts: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Samples taken from each source [L, K] before ``starts`` [L], right nearly always.

    Rounds the exact shares a warm-up earlier to counts that sum up, then lets the rule run.
    """
    early = starts - WARM_UP
    exact = early[:, None] * shares
    counts = np.floor(exact)
    missing = early - counts.sum(axis=1)
    rank = np.argsort(np.argsort(counts - exact, axis=1), axis=1)
    counts += rank < missing[:, None]
    return _advance(shares, counts, early, WARM_UP)[2]


def _advance(
    shares: npt.NDArray[np.float64],
    counts: npt.NDArray[np.float64],
    starts: npt.NDArray[np.int64],
    steps: int,
) -> tuple[npt.NDArray[np.unsignedinteger], npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Apply the rule ``steps`` times from ``counts`` [L, K] at samples ``starts`` [L].

    Returns the sources and numbers chosen, [steps, L] each, and the counts then.
    """
    lanes = np.arange(len(starts))
    counts = counts.copy()
    chosen = np.empty((steps, len(starts)), dtype=np.min_scalar_type(len(shares) - 1))
    taken = np.empty((steps, len(starts)), dtype=np.int64)
    for step in range(steps):
        n = np.maximum(starts + step, 1).astype(np.float64)
        best = np.argmax(n[:, None] * shares - counts, axis=1)
        chosen[step] = best
        taken[step] = counts[lanes, best]
        counts[lanes, best] += 1
    return chosen, taken, counts
