"""Samples of whole conversations, and which of their tokens are learned.

The documents of ``mb_data.chat.preprocess`` are packed as ``packed_documents`` packs any, with two
differences. One that is longer than a sample is cut off there instead of going on in another, where
nothing would say what it answers; if no answer of it begins before that, it is left out, for
nothing would be learned of it. And a sample says where its documents end, since their last token
may well be within others too.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any, NamedTuple, Unpack

import numpy as np
import numpy.typing as npt

from mb_data.indexed_dataset import IndexedDataset
from mb_data.samples.packed_documents import PackedDataset
from mb_data.samples.parts import DataPaths, Parts, PartsOptions, build_parts

# Modes of sequences.
READ, LEARNED = 0, 1


class ConversationSample(NamedTuple):
    """tokens: int64 [S + 1].

    learned: bool [S + 1], whether each is to be predicted; never a conversation's first token.
    lengths: tokens of each conversation in it; behind them it is filled up.
    """

    tokens: npt.NDArray[np.int64]
    learned: npt.NDArray[np.bool_]
    lengths: list[int]


class Conversations:
    """An ``IndexedDataset`` by documents, where that counts sequences, for ``PackedDataset``.

    Args:
        most: a longer document has no more tokens than this.

    Attributes:
        sizes: int32 [D], tokens of each document, at most ``most``; none where none of these is
            learned.
        cut: bool [D], whether it has more.

    Raises:
        ValueError: its sequences are not marked as conversations' are.
    """

    def __init__(self, indexed: IndexedDataset, most: int) -> None:
        modes = indexed.modes
        if modes is None or (len(modes) and not (modes.min() >= READ and modes.max() <= LEARNED)):
            raise ValueError(
                f"{indexed.prefix}: no conversations: nothing says which of its tokens are "
                "learned; make it with `mb-data chats`"
            )
        self._indexed, self._most = indexed, most
        self.prefix = indexed.prefix
        ends = np.concatenate(([0], indexed.sizes.cumsum(dtype=np.int64)))
        boundaries = indexed.boundaries(range(indexed.num_documents))
        starts, lengths = ends[boundaries[:-1]], np.diff(ends[boundaries])
        document = np.repeat(np.arange(len(lengths)), np.diff(boundaries))
        first, stop = ends[:-1] - starts[document], ends[1:] - starts[document]
        # The first token of a document stands behind nothing, and is never learned.
        learned = (modes == LEARNED) & (np.maximum(first, 1) < np.minimum(stop, most))
        teaches = np.bincount(document[learned], minlength=len(lengths)) > 0
        self.sizes = np.where(teaches, np.minimum(lengths, most), 0).astype(np.int32)
        self.cut = lengths > most

    def __len__(self) -> int:
        return len(self.sizes)

    def expect_random_access(self) -> None:
        """See ``IndexedDataset``."""
        self._indexed.expect_random_access()

    def get(self, document: int, offset: int, length: int) -> npt.NDArray[Any]:
        """``length`` tokens of a document from ``offset`` on."""
        return self._joined(document, self._indexed.get)[offset : offset + length]

    def learned(self, document: int, length: int) -> npt.NDArray[np.bool_]:
        """Whether each of its first ``length`` tokens is learned."""
        modes, sizes = self._indexed.modes, self._indexed.sizes
        assert modes is not None
        found = self._joined(document, lambda i: np.full(int(sizes[i]), modes[i] == LEARNED))
        found[:1] = False  # nothing stands before it
        return found[:length]

    def _joined(self, document: int, of_sequence: Any) -> npt.NDArray[Any]:
        return np.concatenate([of_sequence(i) for i in self._indexed.document(document)])

    def __reduce__(self) -> tuple[type[Conversations], tuple[IndexedDataset, int]]:
        return type(self), (self._indexed, self._most)


class ConversationDataset:
    """Conversations packed by a ``PackedDataset``.

    Args:
        indexed: what ``preprocess_chats`` wrote.
        documents: which of its documents to use.
        seq_length: S.
        packing: the other arguments of ``PackedDataset``.

    Raises:
        ValueError: as there, and for data that holds no conversations.
    """

    def __init__(
        self, indexed: IndexedDataset, documents: range, *, seq_length: int, **packing: Any
    ) -> None:
        self.conversations = Conversations(indexed, seq_length + 1)
        part = slice(documents.start, documents.stop)
        cut, sizes = self.conversations.cut[part], self.conversations.sizes[part]
        if cut.any():
            warnings.warn(
                f"{indexed.prefix}: {int(cut.sum()):,} of {len(documents):,} conversations are "
                f"longer than a sample of {seq_length:,} tokens and are cut off there; "
                f"{int((sizes[cut] == 0).sum()):,} have no answer before that and are left out",
                RuntimeWarning,
                stacklevel=2,
            )
        if len(sizes) and not sizes.any():
            raise ValueError(
                f"{indexed.prefix}: none of {len(documents):,} conversations has an answer within "
                f"a sample of {seq_length:,} tokens; raise the sequence length"
            )
        self.packed = PackedDataset(self.conversations, documents, seq_length=seq_length, **packing)

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, index: int) -> ConversationSample:
        """Sample ``index``, a function of the index and the seed alone."""
        tokens = self.packed[index]
        learned = np.zeros(len(tokens), dtype=bool)
        lengths, filled = [], 0
        for document, _, length in self.packed.pieces_of(index):
            learned[filled : filled + length] = self.conversations.learned(document, length)
            lengths.append(length)
            filled += length
        return ConversationSample(tokens, learned, lengths)

    def documents_of(self, index: int) -> list[tuple[str, int]]:
        """As ``GPTDataset.documents_of``."""
        return self.packed.documents_of(index)


def build_conversation_datasets(
    prefix: DataPaths,
    *,
    seq_length: int,
    eod: int,
    seed: int,
    vocab_size: int | None = None,
    **parts: Unpack[PartsOptions],
) -> Parts[ConversationDataset]:
    """Train, validation and test datasets; see ``build_gpt_datasets`` and ``PackedDataset``.

    Raises:
        ValueError: also for data that holds no conversations.
    """
    make = partial(
        ConversationDataset,
        seq_length=seq_length,
        eod=eod,
        seed=seed,
        vocab_size=vocab_size,
    )
    return build_parts(prefix, make, count=lambda indexed: indexed.num_documents, **parts)
