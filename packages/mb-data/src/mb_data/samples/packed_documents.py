"""Best-fit packing: samples of whole documents, cut only where they are longer than a sample.

Documents laid end to end and cut every S tokens lose their start to the sample before: a model
cannot know what it continues. Packed best-fit-decreasing (Ding et al. 2024, "Fewer Truncations
Improve Language Modeling", arXiv:2404.10830) the longest document goes first, each into the sample
that it fills best; what stays free, a few tokens in ten thousand on common text, is filled with
the end-of-document token, whose successor no loss asks for (``document_layout``).

A document longer than a sample becomes pieces of S + 1 tokens that share one token each with their
neighbours, so that every token but the first is predicted once.
"""

from __future__ import annotations

import os
from bisect import bisect_left, insort
from functools import partial
from typing import Unpack

import numpy as np
import numpy.typing as npt

from mb_data.indexed_dataset import checked_index
from mb_data.mersenne import check_seed
from mb_data.samples.gpt import Documents, check_part, check_tokens
from mb_data.samples.index_cache import digest, load_or_build
from mb_data.samples.parts import DataPaths, Parts, PartsOptions, build_parts


class PackedDataset:
    """Samples of ``seq_length + 1`` tokens, int64, of whole documents.

    Args:
        indexed: the tokens; an ``IndexedDataset`` has a document in each of its sequences.
        documents: which of them to use.
        seq_length: S.
        num_samples: how many samples to give; the packed ones are repeated, in another order in
            every epoch, until there are so many.
        eod: fills what stays free.
        seed: of the orders.
        vocab_size: rows of the model's embedding; a sample with a token beyond them is an error.
        cache_dir: where the index is kept; ``<prefix>_index/`` if None.

    Attributes:
        pieces: int64 [P, 3], sequence, first token and length of each piece, sample by sample.
        starts: int64 [B + 1], first piece of each packed sample, then P.

    Raises:
        ValueError: an argument out of range, or documents without a token.
    """

    def __init__(
        self,
        indexed: Documents,
        documents: range,
        *,
        seq_length: int,
        num_samples: int,
        eod: int,
        seed: int,
        vocab_size: int | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        sizes, seq_length, num_samples = check_part(indexed, documents, seq_length, num_samples)
        self.indexed = indexed
        self.vocab_size = vocab_size
        self.seq_length = seq_length
        self.eod = eod
        self.seed = check_seed(seed)
        self._index = load_or_build(
            {
                "kind": "packed",
                "sizes": digest(sizes),
                "first_document": documents.start,
                "seq_length": seq_length,
            },
            lambda: pack(sizes, documents.start, seq_length + 1),
            prefix=indexed.prefix,
            cache_dir=cache_dir,
        )
        self.size = max(num_samples, len(self.starts) - 1)
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None

    @property
    def pieces(self) -> npt.NDArray:
        return self._index["pieces"]

    @property
    def starts(self) -> npt.NDArray:
        return self._index["starts"]

    @property
    def num_epochs(self) -> int:
        return -(-self.size // (len(self.starts) - 1))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Sample ``index``: int64 [S + 1]. A function of the index and the seed alone."""
        sample = np.full(self.seq_length + 1, self.eod, dtype=np.int64)
        filled = 0
        for sequence, first, length in self.pieces_of(index):
            sample[filled : filled + length] = self.indexed.get(sequence, first, length)
            filled += length
        if self.vocab_size is not None:
            check_tokens(sample, self.vocab_size, self.indexed.prefix)
        return sample

    def documents_of(self, index: int) -> list[tuple[str, int]]:
        """As ``GPTDataset.documents_of``."""
        return [(self.indexed.prefix, sequence) for sequence, *_ in self.pieces_of(index)]

    def pieces_of(self, index: int) -> list[list[int]]:
        """Document, first token and length of each piece of a sample."""
        index = checked_index(index, len(self), "sample", self.indexed.prefix)
        epoch, place = divmod(index, len(self.starts) - 1)
        row = int(self._epoch(epoch)[place])
        return self.pieces[self.starts[row] : self.starts[row + 1]].tolist()

    def _epoch(self, epoch: int) -> npt.NDArray[np.int64]:
        known = self._order  # once: another thread may be in another epoch
        if known is None or known[0] != epoch:
            rng = np.random.default_rng((self.seed, epoch))
            self._order = known = epoch, rng.permutation(len(self.starts) - 1)
        return known[1]


def build_packed_datasets(
    prefix: DataPaths,
    *,
    seq_length: int,
    eod: int,
    seed: int,
    vocab_size: int | None = None,
    **parts: Unpack[PartsOptions],
) -> Parts[PackedDataset]:
    """Train, validation and test datasets; see ``build_gpt_datasets`` and ``PackedDataset``."""
    make = partial(
        PackedDataset,
        seq_length=seq_length,
        eod=eod,
        seed=seed,
        vocab_size=vocab_size,
    )
    return build_parts(prefix, make, count=len, **parts)


def pack(
    sizes: npt.NDArray[np.int32], first_document: int, room: int
) -> dict[str, npt.NDArray[np.int64]]:
    """``pieces`` and ``starts`` of ``PackedDataset``, for samples of ``room`` tokens.

    Args:
        sizes: int32 [D], tokens of each document.
        first_document: the number of the first of them.
    """
    pieces = _cut(sizes, first_document, room)
    bins = best_fit(pieces[:, 2], room)
    order = np.argsort(bins, kind="stable")
    starts = np.concatenate(([0], np.bincount(bins).cumsum()))
    return {"pieces": pieces[order], "starts": starts.astype(np.int64)}


def best_fit(lengths: npt.NDArray[np.int64], room: int) -> npt.NDArray[np.int64]:
    """The bin [P] of each piece [P]: longest first, each where it leaves least room.

    Pieces of one length are placed together: the bins that have just the room for k of them take
    k each, before any bin with more room. All lengths must lie in 1 to ``room``.
    """
    order = np.argsort(-lengths, kind="stable")
    bins = np.empty(len(lengths), dtype=np.int64)
    free: dict[int, list[npt.NDArray[np.int64]]] = {}  # bins by the room they have
    rooms: list[int] = []  # those of them that have bins, ascending
    opened = place = 0
    values, counts = np.unique(lengths, return_counts=True)
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            at = bisect_left(rooms, length)
            found = at < len(rooms)
            left = rooms[at] if found else room
            each = left // length
            wanted = -(-count // each)
            if found:
                there = np.concatenate(free[left])
                there, others = there[:wanted], there[wanted:]
                if len(others):
                    free[left] = [others]
                else:
                    del free[left], rooms[at]
            else:
                there = np.arange(opened, opened + wanted)
                opened += wanted
            taken = np.full(len(there), each)
            taken[-1] -= max(int(taken.sum()) - count, 0)
            bins[order[place : place + int(taken.sum())]] = np.repeat(there, taken)
            place += int(taken.sum())
            count -= int(taken.sum())
            for n in np.unique(taken).tolist():
                rest = left - n * length
                if rest:
                    if rest not in free:
                        insort(rooms, rest)
                    free.setdefault(rest, []).append(there[taken == n])
    return bins


def _cut(sizes: npt.NDArray[np.int32], first_document: int, room: int) -> npt.NDArray[np.int64]:
    """Pieces [P, 3] of at most ``room`` tokens; neighbours in a document share one."""
    lengths = sizes.astype(np.int64)
    counts = np.where(lengths > 0, np.maximum(1, -(-(lengths - 1) // (room - 1))), 0)
    document = np.repeat(np.arange(len(sizes)), counts)
    number = np.arange(len(document)) - np.repeat(counts.cumsum() - counts, counts)
    first = number * (room - 1)
    length = np.minimum(room, lengths[document] - first)
    return np.stack((document + first_document, first, length), axis=1)
