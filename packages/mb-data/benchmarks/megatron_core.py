"""Our files, splits, sample orders and blends, with Megatron Core's own code as the judge.

    pip download --no-deps megatron-core && python -m zipfile -e megatron_core-*.whl core
    python packages/mb-data/benchmarks/megatron_core.py core

Writes random datasets and reads them with Core's reader, cuts them with its split, draws GPT, BERT
and T5 samples with its datasets, blends and maps sentences to samples and blocks with its compiled
helpers, and counts what differs. Needs torch, which Core imports, and nothing of Core in this
repository. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import mb_data
import numpy as np
import torch
from mb_data.samples.blend import blend_order, normalize
from mb_data.samples.masking import Vocabulary
from mb_data.samples.sentence_index import build_block_mapping, build_sample_mapping

DTYPES = ("u1", "i1", "i2", "u2", "i4", "i8", "f4", "f8")
SPLITS = ("969,30,1", "9,1,0", "80,10,10", "1,1,1", "0.5,0.3,0.2", "99,1,0", "100,0,0")

Counts = dict[str, int]


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("core", type=Path, help="folder with an unpacked wheel of megatron-core")
    options = parser.parse_args()
    sys.path.insert(0, str(options.core))
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        found = read(Path(folder), rng) | split() | sample(Path(folder), rng) | blend(rng)
        found |= mapping(rng) | masked(Path(folder), rng)
    print(json.dumps({"core": importlib.import_module("megatron.core").__version__} | found))
    sys.exit(any(count for name, count in found.items() if name.endswith("differ")))


def read(folder: Path, rng: np.random.Generator) -> Counts:
    """Every sequence of random datasets, with and without modes, in every dtype."""
    core = importlib.import_module("megatron.core.datasets.indexed_dataset")
    sequences = differ = 0
    for case in range(48):
        dtype, multimodal = DTYPES[case % len(DTYPES)], case % 3 == 0
        prefix = folder / f"read-{case}"
        with mb_data.IndexedDatasetBuilder(prefix, dtype) as builder:
            for _ in range(rng.integers(1, 40)):
                lengths = rng.integers(0, 30, rng.integers(1, 4))
                modes = rng.integers(0, 3, len(lengths)).astype("i1") if multimodal else None
                tokens = rng.integers(0, 100, lengths.sum()).astype(dtype)
                builder.add_document(tokens, lengths.tolist(), modes)
        ours, theirs = mb_data.IndexedDataset(prefix), core.IndexedDataset(str(prefix), multimodal)
        assert np.dtype(theirs.index.dtype) == ours.dtype
        assert np.array_equal(ours.document_indices, theirs.document_indices)
        for i in range(max(len(ours), len(theirs))):
            tokens = theirs[i][0] if multimodal else theirs[i]
            sequences, differ = sequences + 1, differ + (not np.array_equal(ours[i], tokens))
    return {"sequences": sequences, "sequences differ": differ}


def split() -> Counts:
    """Ranges of documents, by Core's shares and its rounding of their bounds."""
    core = importlib.import_module("megatron.core.datasets.blended_megatron_dataset_config")
    splits = differ = 0
    for text in SPLITS:
        shares = core.convert_split_vector_to_split_matrix(core.parse_and_normalize_split(text))
        for count in (*range(1, 400), 1000, 12_345, 10**7 + 3):
            bounds = [(round(s[0] * count), round(s[1] * count)) if s else (0, 0) for s in shares]
            ours = mb_data.parse_split(text, count, rounding="cumulative")
            got = [(part.start, part.stop) if len(part) else (0, 0) for part in ours]
            want = [bound if bound[1] > bound[0] else (0, 0) for bound in bounds]
            splits, differ = splits + 1, differ + (got != want)
    return {"splits": splits, "splits differ": differ}


def sample(folder: Path, rng: np.random.Generator) -> Counts:
    """Every sample of GPT datasets of random sizes, lengths and seeds."""
    core = importlib.import_module("megatron.core.datasets.gpt_dataset")
    reader = importlib.import_module("megatron.core.datasets.indexed_dataset")
    train = importlib.import_module("megatron.core.datasets.utils").Split.train

    class Tokenizer:
        eod, pad, vocab_size, unique_identifiers = 0, 999, 1000, {"class": "none"}

    samples = differ = 0
    for case in range(40):
        prefix, documents = folder / f"sample-{case}", int(rng.integers(3, 200))
        with mb_data.IndexedDatasetBuilder(prefix, "u2") as builder:
            for _ in range(documents):
                builder.add_document(rng.integers(1, 900, rng.integers(1, 60)))
        length, seed = int(rng.choice([4, 7, 16, 33])), int(rng.integers(9999))
        wanted = int(rng.integers(1, 900))
        settings: dict[str, Any] = dict.fromkeys(
            ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False
        )
        config = core.GPTDatasetConfig(
            random_seed=seed, sequence_length=length, blend=([str(prefix)], None), split="1,0,0",
            tokenizer=Tokenizer(), create_attention_mask=False, **settings,
        )  # fmt: skip
        low = reader.IndexedDataset(str(prefix))
        numbers = np.arange(documents, dtype=np.int32)
        theirs = core.GPTDataset(low, str(prefix), numbers, wanted, train, config)
        ours = mb_data.GPTDataset(
            mb_data.IndexedDataset(prefix), range(documents), seq_length=length,
            num_samples=wanted, seed=seed,
        )  # fmt: skip
        assert len(ours) == len(theirs)
        for i in range(len(ours)):
            their = theirs[i]
            text = np.append(their["tokens"].numpy(), their["labels"].numpy()[-1])
            samples, differ = samples + 1, differ + (not np.array_equal(ours[i], text))
    return {"samples": samples, "samples differ": differ}


def blend(rng: np.random.Generator) -> Counts:
    """Orders of up to 40 sources, by Core's compiled loop."""
    core = importlib.import_module("megatron.core.datasets.helpers_cpp")
    entries = differ = 0
    for _ in range(120):
        sources, size = int(rng.integers(1, 40)), int(rng.integers(1, 200_000))
        shares = normalize((rng.random(sources) + 0.01).tolist())
        which, number = np.zeros(size, np.int16), np.zeros(size, np.int64)
        core.build_blending_indices(which, number, shares, sources, size, False)
        ours = blend_order(shares, size)
        entries += size
        differ += int(((ours[0] != which) | (ours[1] != number)).sum())
    return {"blend entries": entries, "blend entries differ": differ}


def mapping(rng: np.random.Generator) -> Counts:
    """Which sentences make the samples of BERT and T5, and the blocks of ICT."""
    core = importlib.import_module("megatron.core.datasets.helpers_cpp")
    found = dict.fromkeys(("mapping rows", "mapping rows differ", "blocks", "blocks differ"), 0)
    for case in range(400):
        documents, seed = int(rng.integers(1, 60)), int(rng.integers(1, 2**31))
        bounds = np.append(0, rng.integers(0, 9, documents).cumsum()) + rng.integers(5)
        sizes = rng.integers(case % 3 > 0, rng.choice([8, 60, 520]), bounds[-1]).astype(np.int32)
        titles = rng.integers(0, 12, documents).astype(np.int32)
        wanted, length = int(rng.choice([1, 10, 300, 2000])), int(rng.integers(2, 130))
        least, short = int(rng.integers(1, 3)), float(rng.choice([0, 0.1, 0.3, 0.77, 1]))
        shared: dict[str, Any] = {"min_sentences": least, "num_samples": wanted, "seed": seed}
        try:
            samples = build_sample_mapping(
                sizes, bounds, max_length=length, short_seq_prob=short, **shared
            )
            blocks = build_block_mapping(sizes, bounds, titles, max_length=length + 12, **shared)
        except ValueError:  # no document is fit, for which Core loops for ever
            continue
        theirs = core.build_mapping(bounds, sizes, 10**6, wanted, length, short, seed, False, least)
        found["mapping rows"] += len(samples)
        found["mapping rows differ"] += _rows_that_differ(samples, theirs)
        theirs = core.build_blocks_mapping(
            bounds, sizes, titles, 10**6, wanted, length + 12, seed, False, least == 1
        )
        found["blocks"] += len(blocks)
        found["blocks differ"] += _rows_that_differ(blocks, theirs)
    return found


def _rows_that_differ(ours: np.ndarray, theirs: np.ndarray) -> int:
    if ours.shape != theirs.shape:
        return max(len(ours), len(theirs))
    return int((ours != theirs).any(axis=1).sum())


class WordPieces:
    """A small vocabulary with the attributes that both sides ask for."""

    pad, cls, sep, mask, bos, eos, eod = range(7)
    vocab_size, extra_ids = 300, tuple(range(200, 300))
    inv_vocab = {i: "##b" if 120 <= i < 200 else "a" for i in range(vocab_size)}  # noqa: RUF012
    additional_special_tokens_ids, unique_identifiers = extra_ids, {"class": "none"}

    def word_starts(self) -> np.ndarray:
        return np.array([not text.startswith("##") for text in self.inv_vocab.values()])


def masked(folder: Path, rng: np.random.Generator) -> Counts:
    """Every BERT and T5 sample of datasets of random sizes, lengths and seeds."""
    bert = importlib.import_module("megatron.core.datasets.bert_dataset")
    t5 = importlib.import_module("megatron.core.datasets.t5_dataset")
    reader = importlib.import_module("megatron.core.datasets.indexed_dataset")
    train = importlib.import_module("megatron.core.datasets.utils").Split.train
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
    )
    tokenizer = WordPieces()
    found = dict.fromkeys(("bert", "bert differ", "t5", "t5 differ"), 0)
    for case in range(40):
        prefix, documents = folder / f"masked-{case}", int(rng.integers(3, 60))
        with mb_data.IndexedDatasetBuilder(prefix, "u2") as builder:
            for _ in range(documents):
                sizes = rng.integers(1, 30, rng.integers(1, 9))
                builder.add_document(rng.integers(7, 200, sizes.sum()), sizes.tolist())
        length, seed, pairs = int(rng.integers(20, 130)), int(rng.integers(1, 9999)), case % 2 > 0
        wanted, part = int(rng.integers(1, 400)), np.arange(documents)
        indexed, low = mb_data.IndexedDataset(prefix), reader.IndexedDataset(str(prefix))
        theirs: dict[str, Any] = {
            "random_seed": seed, "sequence_length": length, "blend": ([str(prefix)], None),
            "split": "1,0,0", "tokenizer": tokenizer, "masking_probability": 0.15,
            "short_sequence_probability": 0.1, "masking_do_full_word": True,
            "masking_do_permutation": False, "masking_use_longer_ngrams": False,
            "path_to_cache": str(prefix),
        }  # fmt: skip
        ours: dict[str, Any] = {"num_samples": wanted, "seed": seed}
        config = bert.BERTMaskedWordPieceDatasetConfig(
            **theirs, masking_max_ngram=3, masking_use_geometric_distribution=False,
            classification_head=pairs,
        )  # fmt: skip
        _compare_samples(
            found, "bert",
            mb_data.BertDataset(
                indexed, range(documents), vocabulary=Vocabulary.for_bert(tokenizer),
                seq_length=length, binary_head=pairs, **ours,
            ),
            bert.BERTMaskedWordPieceDataset(low, str(prefix), part, wanted, train, config),
            ("text", "types", "labels", "is_random", "loss_mask", "truncated"),
        )  # fmt: skip
        config = t5.T5MaskedWordPieceDatasetConfig(
            **theirs, masking_max_ngram=10, masking_use_geometric_distribution=True,
            sequence_length_decoder=length,
        )  # fmt: skip
        _compare_samples(
            found, "t5",
            mb_data.T5Dataset(
                indexed, range(documents), vocabulary=Vocabulary.for_t5(tokenizer),
                encoder_seq_length=length, decoder_seq_length=length, **ours,
            ),
            t5.T5MaskedWordPieceDataset(low, str(prefix), part, wanted, train, config),
            ("text_enc", "text_dec", "labels", "loss_mask", "enc_mask", "dec_mask", "truncated"),
        )  # fmt: skip
    torch.distributed.destroy_process_group()
    return found


def _compare_samples(
    found: Counts, name: str, ours: Any, theirs: Any, fields: tuple[str, ...]
) -> None:
    assert len(ours) == len(theirs)
    found[name] += len(ours)
    for i in range(len(ours)):
        mine, their = ours[i], theirs[i]
        found[f"{name} differ"] += any(not np.array_equal(mine[f], their[f]) for f in fields)


if __name__ == "__main__":
    main()
