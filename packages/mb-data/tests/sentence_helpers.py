"""What the tests of sentence datasets share: a small vocabulary, and documents of sentences."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from mb_data.dataset_builder import IndexedDatasetBuilder
from mb_data.indexed_dataset import IndexedDataset
from mb_data.samples.masking import Vocabulary

# 60 ids: 0 to 5 are special, 10 to 19 sentinels, multiples of 4 from 20 on continue a word.
PAD, CLS, SEP, MASK, BOS, EOS = range(6)

WORD_STARTS = np.array([not (i >= 20 and i % 4 == 0) for i in range(60)])

VOCABULARY = Vocabulary(
    cls=CLS,
    sep=SEP,
    mask=MASK,
    pad=PAD,
    bos=BOS,
    eos=EOS,
    word_starts=WORD_STARTS,
    sentinels=tuple(range(10, 20)),
)

TOKENIZER = SimpleNamespace(
    vocab_size=60,
    cls=CLS,
    sep=SEP,
    mask=MASK,
    pad=PAD,
    bos=BOS,
    eos=EOS,
    extra_ids=tuple(range(10, 20)),
    word_starts=lambda: WORD_STARTS,
)

SENTENCES = [[21, 24, 25], [26, 27, 28, 32, 29], [30, 31, 36, 33], [34, 35, 40, 37, 38]]


def write(prefix, documents) -> IndexedDataset:
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for sentences in documents:
            tokens = np.array([t for sentence in sentences for t in sentence], dtype=np.int64)
            builder.add_document(tokens, [len(sentence) for sentence in sentences])
    return IndexedDataset(prefix)


def random_documents(seed, documents=40, longest=25):
    rng = np.random.default_rng(seed)
    return [
        [
            rng.integers(20, 60, int(rng.integers(1, longest))).tolist()
            for _ in range(int(rng.integers(0, 12)))
        ]
        for _ in range(documents)
    ]
