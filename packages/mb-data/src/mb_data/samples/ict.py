"""Inverse cloze task: a sentence as the query, the block it came from as the answer (Lee et al.,
2019, "Latent Retrieval for Weakly Supervised Open Domain Question Answering").

    query   [CLS] sentence [SEP]
    block   [CLS] title [SEP] the other sentences [SEP]

The query is taken out of its block, except in a small share of samples, so that a retriever learns
meaning before wording. Blocks and their order for a seed are Megatron-LM's. A sample is a function
of (seed, index) alone; Megatron draws queries from a stream, so its samples depend on the order in
which they are read. Titles are those of the block's document in every part of the split; Megatron
gives validation and test the titles of the first documents.
"""

from __future__ import annotations

import os
from functools import partial
from itertools import chain
from typing import Unpack

import numpy as np
import numpy.typing as npt

from mb_data.indexed_dataset import IndexedDataset
from mb_data.mersenne import check_seed
from mb_data.samples.masking import MaskingTokenizer, ones, pad_to
from mb_data.samples.parts import Parts, PartsOptions, build_parts
from mb_data.samples.sentence_index import SentenceSamples, block_mapping, count_documents
from mb_data.words import counted


class ICTDataset(SentenceSamples):
    """Queries and blocks from a range of documents that were split into sentences.

    Args:
        indexed: sentences as sequences, documents as documents.
        documents: which to use.
        titles: one document for each of ``indexed``, or None.
        cls, sep, pad: ids of the special tokens.
        seq_length: S, tokens of a query and of a block with special tokens and padding.
        num_samples: how many must be there at least.
        seed: of the order and of the samples.
        query_in_block_prob: share of samples whose block keeps the query.
        use_one_sent_docs: also documents of one sentence, whose block keeps it.
        cache_dir: where the index is kept; ``<prefix>_index/`` if None.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: range,
        *,
        titles: IndexedDataset | None,
        cls: int,
        sep: int,
        pad: int,
        seq_length: int,
        num_samples: int,
        seed: int,
        query_in_block_prob: float = 0.1,
        use_one_sent_docs: bool = False,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if not 0 <= query_in_block_prob <= 1:
            raise ValueError(
                f"query_in_block_prob must lie between 0 and 1, got {query_in_block_prob}"
            )
        if titles is not None and titles.num_documents != indexed.num_documents:
            raise ValueError(
                f"{titles.prefix} has {counted(titles.num_documents, 'title')}, {indexed.prefix} "
                f"{counted(indexed.num_documents, 'document')}; they must be made from the same "
                "lines, with `mb-data preprocess --keep-empty` where some have no title or no text"
            )
        special = 2 if titles is None else 3
        if seq_length <= special:
            raise ValueError(f"seq_length {seq_length} has no room besides the special tokens")
        self.indexed = indexed
        self.titles = titles
        for read in (indexed, titles):
            if read is not None:
                read.expect_random_access()
        self.cls, self.sep, self.pad = cls, sep, pad
        self.seq_length = seq_length
        self.seed = check_seed(seed)
        self.query_in_block_prob = query_in_block_prob
        sizes = np.zeros(len(documents), dtype=np.int32)
        if titles is not None:
            before = np.concatenate([[0], np.cumsum(titles.sizes, dtype=np.int64)])
            sizes = np.diff(before[titles.boundaries(documents)]).astype(np.int32)
        self._index = block_mapping(
            indexed,
            documents,
            sizes,
            max_length=seq_length - special,
            min_sentences=1 if use_one_sent_docs else 2,
            num_samples=num_samples,
            seed=self.seed,
            cache_dir=cache_dir,
        )

    def __getitem__(self, index: int) -> dict[str, npt.NDArray[np.int64]]:
        """Sample ``index``.

        Returns:
            ``query_tokens``, ``query_pad_mask``, ``block_tokens``, ``block_pad_mask`` [S] (masks 1
            on tokens) and ``block_data`` [4], a row of ``mapping``; int64.
        """
        row, rng = self._row(index)
        start, end, document, _ = row
        sentences = [self.indexed[i].tolist() for i in range(start, end)]
        chosen = int(rng.randint(0, len(sentences)))
        query = sentences[chosen][: self.seq_length - 2]
        keep = rng.random_sample() < self.query_in_block_prob
        if not keep and len(sentences) > 1:
            del sentences[chosen]
        query_tokens = [self.cls, *query, self.sep]
        block_tokens, block_mask = self._block(sentences, document)
        return {
            "query_tokens": pad_to(query_tokens, self.seq_length, self.pad),
            "query_pad_mask": ones(range(len(query_tokens)), self.seq_length),
            "block_tokens": block_tokens,
            "block_pad_mask": block_mask,
            "block_data": np.array(row, dtype=np.int64),
        }

    def get_block(
        self, start: int, end: int, document: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Tokens and mask [S] of a whole block under its title, for a retrieval index."""
        return self._block([self.indexed[i].tolist() for i in range(start, end)], document)

    def title(self, document: int) -> list[int]:
        """Tokens of a document's title; [] without titles."""
        if self.titles is None:
            return []
        parts = (self.titles[i].tolist() for i in self.titles.document(document))
        return list(chain.from_iterable(parts))

    def _block(
        self, sentences: list[list[int]], document: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        tokens = [self.cls]
        if self.titles is not None:
            # A title that fills the sample is cut, to leave half of it to the block.
            title = self.title(document)
            if len(title) > self.seq_length - 3:
                title = title[: min(self.seq_length // 2, self.seq_length - 3)]
            tokens += [*title, self.sep]
        text = list(chain.from_iterable(sentences))
        tokens += [*text[: self.seq_length - len(tokens) - 1], self.sep]
        return (
            pad_to(tokens, self.seq_length, self.pad),
            ones(range(len(tokens)), self.seq_length),
        )


def build_ict_datasets(
    prefix: str | os.PathLike[str],
    *,
    titles_prefix: str | os.PathLike[str] | None,
    tokenizer: MaskingTokenizer,
    seq_length: int,
    seed: int,
    query_in_block_prob: float = 0.1,
    use_one_sent_docs: bool = False,
    **parts: Unpack[PartsOptions],
) -> Parts[ICTDataset]:
    """Train, validation and test datasets; a part without documents is None. See ``ICTDataset``."""
    titles = None if titles_prefix is None else IndexedDataset(titles_prefix)
    make = partial(
        ICTDataset,
        titles=titles,
        cls=tokenizer.cls,
        sep=tokenizer.sep,
        pad=tokenizer.pad,
        seq_length=seq_length,
        seed=seed,
        query_in_block_prob=query_in_block_prob,
        use_one_sent_docs=use_one_sent_docs,
    )
    # Of a blend each source would want titles of its own.
    return build_parts(os.fspath(prefix), make, count=count_documents, **parts)
