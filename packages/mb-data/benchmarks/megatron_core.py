"""Our files, splits, sample orders and blends, with Megatron Core's own code as the judge.

    pip download --no-deps megatron-core && python -m zipfile -e megatron_core-*.whl core
    python packages/mb-data/benchmarks/megatron_core.py core

Writes random datasets and reads them with Core's reader, cuts them with its split, draws GPT
samples with its dataset, blends with its compiled helper, and counts what differs. Needs torch,
which Core imports, and nothing of Core in this repository. Prints one JSON line.
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
from mb_data.blend import blend_order, normalize

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


if __name__ == "__main__":
    main()
