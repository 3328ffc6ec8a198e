"""BERT samples: sentences in two segments, some words hidden, the segments sometimes swapped.

A sample is consecutive sentences of one document, cut at a random sentence into A and B. In half of
the samples A and B change places, and a head learns to tell (sentence order, Lan et al., 2019).
Text: ``[CLS] A [SEP] B [SEP]``, then padding. What is hidden: ``mb_data.samples.masking``.

Samples and their order for a seed are Megatron-LM's. A sample is a function of (seed, index) alone.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Unpack

import numpy as np
import numpy.typing as npt

from mb_data.indexed_dataset import IndexedDataset
from mb_data.mersenne import check_seed
from mb_data.samples.masking import (
    MaskingTokenizer,
    Vocabulary,
    check_share,
    mask_bert,
    ones,
    pad_to,
)
from mb_data.samples.parts import DataPaths, Parts, PartsOptions, build_parts
from mb_data.samples.sentence_index import SentenceSamples, count_documents, sample_mapping

SPECIAL = 3  # [CLS] and two [SEP]


class BertDataset(SentenceSamples):
    """Masked samples from a range of documents that were split into sentences.

    Args:
        indexed: sentences as sequences, documents as documents.
        documents: which to use.
        vocabulary: see ``Vocabulary.for_bert``.
        seq_length: S, tokens of a sample with special tokens and padding.
        num_samples: how many must be there at least.
        seed: of the order and of the samples.
        mask_prob: share of the tokens to hide.
        short_seq_prob: share of samples with a shorter target, so that positions are learnt at
            all lengths.
        binary_head: sentence-order pairs; else one segment.
        cache_dir: where the index is kept; ``<prefix>_index/`` if None.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: range,
        *,
        vocabulary: Vocabulary,
        seq_length: int,
        num_samples: int,
        seed: int,
        mask_prob: float = 0.15,
        short_seq_prob: float = 0.1,
        binary_head: bool = True,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        indexed.expect_random_access()
        self.indexed = indexed
        self.vocabulary = vocabulary
        self.seq_length = seq_length
        self.seed = check_seed(seed)
        self.mask_prob = check_share(mask_prob, seq_length - SPECIAL)
        self.binary_head = binary_head
        self._index = sample_mapping(
            indexed,
            documents,
            max_length=seq_length - SPECIAL,
            short_seq_prob=short_seq_prob,
            min_sentences=2 if binary_head else 1,
            num_samples=num_samples,
            seed=self.seed,
            cache_dir=cache_dir,
        )

    def lengths(self) -> npt.NDArray[np.int64]:
        """[samples, 1]: tokens, special ones included, at most; no sample is read."""
        special = 2 + self.binary_head  # [CLS], and [SEP] behind each segment
        return (self._text_lengths() + special)[:, None]

    def __getitem__(self, index: int) -> dict[str, npt.NDArray[np.int64] | int]:
        """Sample ``index``.

        Returns:
            ``text`` [S], ``types`` [S] (0 for A and padding, 1 for B), ``labels`` [S] (-1 where
            nothing is to be predicted), ``loss_mask`` [S], ``padding_mask`` [S] (1 on tokens), all
            int64; ``is_random`` (the segments are swapped) and ``truncated``, 0 or 1.
        """
        (start, end, target), rng = self._row(index)
        sentences = [self.indexed[i].tolist() for i in range(start, end)]

        first, swapped = len(sentences), False
        if self.binary_head:
            first = int(rng.randint(1, len(sentences))) if len(sentences) >= 3 else 1
        a = [token for sentence in sentences[:first] for token in sentence]
        b = [token for sentence in sentences[first:] for token in sentence]
        if self.binary_head and rng.random_sample() < 0.5:
            a, b, swapped = b, a, True
        a_kept, b_kept = trim(len(a), len(b), target, rng)
        truncated = len(a_kept) + len(b_kept) < len(a) + len(b)
        a, b = a[a_kept.start : a_kept.stop], b[b_kept.start : b_kept.stop]

        vocabulary = self.vocabulary
        tokens = [vocabulary.cls, *a, vocabulary.sep]
        b_start = len(tokens)
        if b:
            tokens += [*b, vocabulary.sep]
        shown, hidden = mask_bert(
            tokens,
            vocabulary,
            rng,
            probability=self.mask_prob,
            max_predictions=self.mask_prob * target,
        )
        labels = np.full(self.seq_length, -1, dtype=np.int64)
        labels[hidden] = [tokens[position] for position in hidden]
        return {
            "text": pad_to(shown, self.seq_length, vocabulary.pad),
            "types": ones(range(b_start, len(tokens)), self.seq_length),
            "labels": labels,
            "is_random": int(swapped),
            "loss_mask": (labels >= 0).astype(np.int64),
            "padding_mask": ones(range(len(tokens)), self.seq_length),
            "truncated": int(truncated),
        }


def build_bert_datasets(
    prefix: DataPaths,
    *,
    tokenizer: MaskingTokenizer,
    seq_length: int,
    seed: int,
    mask_prob: float = 0.15,
    short_seq_prob: float = 0.1,
    binary_head: bool = True,
    **parts: Unpack[PartsOptions],
) -> Parts[BertDataset]:
    """Train, validation and test datasets; see ``build_gpt_datasets`` and ``BertDataset``.

    Raises:
        ValueError: the tokenizer has no [CLS], [SEP], [MASK] or [PAD], or no document is fit.
    """
    vocabulary = Vocabulary.for_bert(tokenizer)
    make = partial(
        BertDataset,
        vocabulary=vocabulary,
        seq_length=seq_length,
        seed=seed,
        mask_prob=mask_prob,
        short_seq_prob=short_seq_prob,
        binary_head=binary_head,
    )
    return build_parts(prefix, make, count=count_documents, **parts)


def trim(
    a_length: int, b_length: int, target: int, rng: np.random.RandomState
) -> tuple[range, range]:
    """What is kept of two segments: one token at a time goes from the longer, from a random end."""
    a, b = range(a_length), range(b_length)
    for draw in rng.random_sample(max(a_length + b_length - target, 0)).tolist():
        longer = a if len(a) > len(b) else b
        shorter_by_one = longer[1:] if draw < 0.5 else longer[:-1]
        if longer is a:
            a = shorter_by_one
        else:
            b = shorter_by_one
    return a, b
