"""Fixed-length training samples from documents laid end to end: Megatron's GPT dataset.

Documents are shuffled, repeated for as many epochs as the samples asked for need, laid end to end,
and cut every S tokens; a sample is S + 1 tokens, so that inputs and labels are its first and last
S, and neighbours share one token. Nothing is padded. Three arrays say where everything is, with
T tokens an epoch, E epochs and n = (E·T - 1) // S samples:

- ``doc_idx`` [E·D]: the documents in the order in which they are laid;
- ``sample_idx`` [n + 1, 2]: position in ``doc_idx``, and token in that document, where sample i
  starts; sample i ends on the token where sample i + 1 starts;
- ``shuffle_idx`` [n]: the order in which samples are handed out.

If fewer than 80 % of the last epoch's samples are needed, that epoch is shuffled apart from the
others, so that every document has been seen E - 1 times before any is seen E times.

The order for a seed is Megatron-LM's, number for number. Its builder walks the documents one by
one; here a block of documents is located at once, from the running sum of their lengths.
A "document" is a sequence of the indexed dataset.
"""

from __future__ import annotations

import operator
import os
import warnings
from functools import partial
from typing import Any, Protocol, Unpack

import numpy as np
import numpy.typing as npt

from mb_data.indexed_dataset import IndexedDataset, checked_index
from mb_data.mersenne import check_seed
from mb_data.samples.index_cache import digest, load_or_build
from mb_data.samples.parts import DataPaths, Parts, PartsOptions, build_parts
from mb_data.words import counted

# Documents located at once: keeps every temporary in a core's L2 cache. 10**7 documents took 0.17 s
# in blocks of 2**15, 0.23 s of 2**12, 0.22 s of 2**18 and 0.29 s in one, on one core.
BLOCK = 1 << 15


class GPTDataset:
    """Samples of ``seq_length + 1`` tokens, int64, from a range of documents.

    Pickles by path, so worker processes, forked or spawned, share the mapped pages.

    Args:
        indexed: the tokens.
        documents: which of its sequences to use.
        seq_length: S.
        num_samples: how many samples must be there at least; decides the number of epochs.
        seed: of the shuffles, 0 to 2**32 - 1.
        vocab_size: rows of the model's embedding; a sample with a token beyond them is an error.
        cache_dir: where the index is kept; ``<prefix>_index/`` if None.

    Attributes:
        doc_idx, sample_idx, shuffle_idx: see the module.
        num_epochs: E.
        shuffled_epochs: how many of them are shuffled as one: [E] or [E - 1, 1].

    Raises:
        ValueError: an argument out of range, or documents without a token.
        MemoryError: samples that are more passes through the documents than it holds.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: range,
        *,
        seq_length: int,
        num_samples: int,
        seed: int,
        vocab_size: int | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self.indexed = indexed
        self.vocab_size = vocab_size
        self.documents = documents
        sizes, seq_length, num_samples = check_part(indexed, documents, seq_length, num_samples)
        self.seq_length = seq_length
        tokens = int(sizes.sum(dtype=np.int64))
        self.shuffled_epochs = shuffled_epochs(tokens, seq_length, num_samples)
        self.num_epochs = sum(self.shuffled_epochs)
        settings = {"seq_length": seq_length, "num_samples": num_samples, "seed": check_seed(seed)}
        self._index = load_or_build(
            {
                "kind": "gpt",
                "sizes": digest(sizes),
                "documents": [documents.start, documents.stop],
                **settings,
            },
            lambda: self._build(**settings),
            prefix=indexed.prefix,
            cache_dir=cache_dir,
        )

    def _build(self, **settings: int) -> dict[str, npt.NDArray]:
        try:
            return build_index(self.indexed.sizes, self.documents, **settings)
        except MemoryError as error:
            raise MemoryError(
                f"{self.indexed.prefix}: {settings['num_samples']:,} samples are "
                f"{self.num_epochs:,} times these {len(self.documents):,} documents, an order that "
                "does not fit into memory; give more text, or ask for fewer samples"
            ) from error

    @property
    def doc_idx(self) -> npt.NDArray:
        return self._index["doc_idx"]

    @property
    def sample_idx(self) -> npt.NDArray:
        return self._index["sample_idx"]

    @property
    def shuffle_idx(self) -> npt.NDArray:
        return self._index["shuffle_idx"]

    def __len__(self) -> int:
        return len(self.shuffle_idx)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Sample ``index``: int64 [S + 1]. A function of the index and the seed alone."""
        index = checked_index(index, len(self), "sample", self.indexed.prefix)
        row = int(self.shuffle_idx[index])
        (first, offset), (last, final) = self.sample_idx[row : row + 2].tolist()
        sample = np.empty(self.seq_length + 1, dtype=np.int64)
        filled = 0
        for position, document in enumerate(self.doc_idx[first : last + 1].tolist(), first):
            length = final + 1 - offset if position == last else None
            piece = self.indexed.get(document, offset, length)
            sample[filled : filled + len(piece)] = piece
            filled += len(piece)
            offset = 0
        assert filled == len(sample)
        if self.vocab_size is not None:
            check_tokens(sample, self.vocab_size, self.indexed.prefix)
        return sample

    def documents_of(self, index: int) -> list[tuple[str, int]]:
        """Prefix, and number there, of each document that sample ``index`` is cut from."""
        row = int(self.shuffle_idx[index])
        first, last = self.sample_idx[row : row + 2, 0].tolist()
        return [(self.indexed.prefix, d) for d in self.doc_idx[first : last + 1].tolist()]

    def __repr__(self) -> str:
        return (
            f"GPTDataset({self.indexed.prefix!r}, {self.documents}: "
            f"{counted(len(self), 'sample')} of {self.seq_length} + 1 tokens, "
            f"{counted(self.num_epochs, 'epoch')})"
        )


class Documents(Protocol):
    """What samples are cut from: documents by number, as the sequences of an ``IndexedDataset``."""

    prefix: str
    sizes: npt.NDArray[np.int32]

    def __len__(self) -> int: ...

    def get(self, index: int, offset: int, length: int, /) -> npt.NDArray[Any]: ...

    def expect_random_access(self) -> None: ...


def check_part(
    indexed: Documents, documents: range, seq_length: int, num_samples: int
) -> tuple[npt.NDArray[np.int32], int, int]:
    """Tokens of each of the documents, ``seq_length`` and ``num_samples`` as ints.

    Raises ValueError for what is out of range, for documents without a token, and for sequences
    that are parts of conversations. Warns of those that are parts of other documents.
    """
    if isinstance(indexed, IndexedDataset):
        indexed.check_plain()
        if len(indexed) > indexed.num_documents:
            warnings.warn(
                f"{indexed.prefix}: its documents are of several sequences, as --split-sentences "
                "makes them; each of those is taken for a document, as in Megatron, and shuffled "
                "by itself",
                RuntimeWarning,
                stacklevel=3,
            )
    seq_length, num_samples = operator.index(seq_length), operator.index(num_samples)
    if seq_length < 1 or num_samples < 0:
        raise ValueError(
            "expected seq_length of at least 1 and num_samples of at least 0, got "
            f"{seq_length} and {num_samples}"
        )
    if not 0 <= documents.start < documents.stop <= len(indexed) or documents.step != 1:
        raise ValueError(
            f"{indexed.prefix}: {documents} is no part of its {counted(len(indexed), 'document')}"
        )
    sizes = indexed.sizes[documents.start : documents.stop]
    if not sizes.any():
        raise ValueError(
            f"{indexed.prefix}: documents {documents.start:,} to {documents.stop - 1:,} hold "
            "no tokens; give this part of the split a larger share, or more text"
        )
    indexed.expect_random_access()
    return sizes, seq_length, num_samples


def check_tokens(sample: npt.NDArray[np.int64], vocab_size: int, prefix: str) -> None:
    """Raise ValueError for a token that is no row of the embedding."""
    low, high = int(sample.min()), int(sample.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{prefix}: holds token {low if low < 0 else high}, the vocabulary has ids 0 to "
            f"{vocab_size - 1:,}; was it made with another tokenizer? See `mb-data validate "
            f"{prefix} --vocab-size {vocab_size}`"
        )


def build_gpt_datasets(
    prefix: DataPaths,
    *,
    seq_length: int,
    seed: int,
    vocab_size: int | None = None,
    **parts: Unpack[PartsOptions],
) -> Parts[GPTDataset]:
    """Train, validation and test datasets; one without documents, or that is not wanted, is None.

    Args:
        prefix: path of a ``.bin``/``.idx`` pair without the suffix; or a blend, weights and
            prefixes by turns or prefixes alone, which weigh as many as their tokens; or a mapping
            from ``train``, ``valid``, ``test`` to one of these.
        split, split_rounding: shares of documents, and the Megatron whose ranges they make, see
            ``parse_split``; not used with a mapping.
        seq_length, seed, vocab_size, cache_dir: see ``GPTDataset``.
        num_samples: wanted for training, validation and test; None for a part that is not.

    Raises:
        FileNotFoundError, ValueError: see ``IndexedDataset``, ``GPTDataset``, ``parse_blend``.
    """
    make = partial(
        GPTDataset,
        seq_length=seq_length,
        seed=seed,
        vocab_size=vocab_size,
    )
    return build_parts(prefix, make, count=len, **parts)


def count_epochs(tokens: int, seq_length: int, num_samples: int) -> int:
    """Smallest E ≥ 1 with (E·T - 1) // S ≥ num_samples."""
    return max(1, -(-(num_samples * seq_length + 1) // tokens))


def shuffled_epochs(tokens: int, seq_length: int, num_samples: int) -> list[int]:
    """How many epochs are shuffled as one: all E, or E - 1 and then the last, of which less than
    80 % are wanted (Megatron's rule)."""
    epochs = count_epochs(tokens, seq_length, num_samples)
    before_last = ((epochs - 1) * tokens - 1) // seq_length
    per_epoch = (tokens - 1) // seq_length
    if epochs > 1 and num_samples - before_last < int(0.80 * per_epoch):
        return [epochs - 1, 1]
    return [epochs]


def build_index(
    sizes: npt.NDArray[np.int32],
    documents: range,
    *,
    seq_length: int,
    num_samples: int,
    seed: int,
) -> dict[str, npt.NDArray]:
    """``doc_idx``, ``sample_idx`` and ``shuffle_idx`` for a seed, in Megatron's order.

    Args:
        sizes: int32 [N], tokens of every sequence of the dataset.
        documents: those to use; they must hold a token.
    """
    tokens = int(sizes[documents.start : documents.stop].sum(dtype=np.int64))
    epochs, *last_epoch = shuffled_epochs(tokens, seq_length, num_samples)
    before = (epochs * tokens - 1) // seq_length
    total = ((epochs + sum(last_epoch)) * tokens - 1) // seq_length

    # One generator for both shuffles, the documents first: this is the order to reproduce.
    rng = np.random.RandomState(seed)
    doc_idx, lengths = _shuffled_documents(sizes, documents, epochs, rng)
    if last_epoch:
        last = _shuffled_documents(sizes, documents, 1, rng)
        doc_idx = np.concatenate((doc_idx, last[0]))
        lengths = np.concatenate((lengths, last[1]))
    dtype = np.dtype(np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64)
    shuffle_idx = np.arange(total, dtype=dtype)
    rng.shuffle(shuffle_idx[:before])
    if before < total:
        rng.shuffle(shuffle_idx[before:])
    return {
        "doc_idx": doc_idx,
        "sample_idx": build_sample_idx(lengths, seq_length, total),
        "shuffle_idx": shuffle_idx,
    }


def build_sample_idx(
    lengths: npt.NDArray[np.int32], seq_length: int, num_samples: int, *, block: int = BLOCK
) -> npt.NDArray:
    """Where samples start: int32 [num_samples + 1, 2] (int64 from 2**31 documents on).

    Row i is the document that holds token i·S of the documents laid end to end. The rows in one
    document are those between the ceilings of its two ends over S, so every document says by
    itself how many rows it has. Row 0 is (0, 0) even if the first documents are empty.

    Args:
        lengths: int32 [E·D], tokens of the documents in the order in which they are laid.
    """
    dtype = np.int32 if len(lengths) <= np.iinfo(np.int32).max else np.int64
    sample_idx = np.empty((num_samples + 1, 2), dtype=dtype)
    laid, row = 0, 0  # tokens and rows before this block
    for begin in range(0, len(lengths), block):
        ends = np.cumsum(lengths[begin : begin + block], dtype=np.int64)
        ends += laid
        counts = np.diff((ends + (seq_length - 1)) // seq_length, prepend=row)
        local = np.repeat(np.arange(len(ends)), counts)
        stop = row + len(local)
        sample_idx[row:stop, 0] = begin + local
        starts = ends - lengths[begin : begin + block]
        sample_idx[row:stop, 1] = np.arange(row, stop) * seq_length - starts[local]
        laid, row = int(ends[-1]), stop
    assert row == num_samples + 1
    sample_idx[0] = 0
    return sample_idx


def _shuffled_documents(
    sizes: npt.NDArray[np.int32], documents: range, epochs: int, rng: np.random.RandomState
) -> tuple[npt.NDArray, npt.NDArray[np.int32]]:
    """Document numbers and their lengths in random order, ``epochs`` times each.

    A length rides in the low half of its document's word through the shuffle. To look lengths up
    afterwards takes longer than all the rest of ``build_sample_idx``: one cache miss each.
    """
    if documents.stop > 2**32:
        raise ValueError(f"a dataset may have 2**32 documents, got {documents.stop:,}")
    words = np.arange(documents.start, documents.stop, dtype=np.uint64)
    words <<= np.uint64(32)
    words |= sizes[documents.start : documents.stop].astype(np.uint64)
    words = np.tile(words, epochs)
    rng.shuffle(words)
    dtype = np.int32 if documents.stop <= np.iinfo(np.int32).max else np.int64
    return (words >> np.uint64(32)).astype(dtype), words.astype(np.uint32).view(np.int32)
