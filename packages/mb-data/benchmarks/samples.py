"""Processor time of a sample of BERT, T5 and ICT.

    python packages/mb-data/benchmarks/samples.py [--samples 1000]

Samples of 512 tokens (ICT: 256) of random sentences of 64 to 96 tokens, from BERT's vocabulary: the
median of five rounds, in milliseconds. It asks for nothing that is new, so that an older commit can
be measured with it, by PYTHONPATH.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from mb_data import (
    IndexedDatasetBuilder,
    build_bert_datasets,
    build_ict_datasets,
    build_t5_datasets,
    load_tokenizer,
)

ROUNDS = 5


def main() -> None:
    """Write the sentences, then read samples of each kind."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=1000)
    samples = parser.parse_args().samples
    tokenizer = load_tokenizer("bert-base-uncased", num_extra_ids=100)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        prefix = str(Path(folder) / "sentences")
        with IndexedDatasetBuilder(prefix, np.uint16) as builder:
            for _ in range(2000):
                lengths = rng.integers(64, 96, 24)
                builder.add_document(rng.integers(1000, 30_000, lengths.sum()), lengths)
        common = {
            "tokenizer": tokenizer, "split": "1,0,0", "num_samples": (samples, 0, 0), "seed": 1,
        }  # fmt: skip
        datasets = {
            "BERT": build_bert_datasets(prefix, seq_length=512, **common),
            "T5": build_t5_datasets(
                prefix, encoder_seq_length=512, decoder_seq_length=128, **common
            ),
            "ICT": build_ict_datasets(prefix, titles_prefix=None, seq_length=256, **common),
        }
        for name, (train, *_) in datasets.items():
            assert train is not None
            rounds = []
            for _ in range(ROUNDS):
                begun = time.process_time()
                for index in range(samples):
                    train[index]
                rounds.append(1000 * (time.process_time() - begun) / samples)
            print(f"{name:5}{statistics.median(rounds):6.2f} ms")


if __name__ == "__main__":
    main()
