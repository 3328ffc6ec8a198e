"""What shuffled samples read from a disk whose pages are not in memory.

    python packages/mb-data/benchmarks/cold_reads.py [--directory DIR]

Three ways over the same 200 samples of 8,193 tokens from 400 MB: the system's read-ahead, random
access announced, and each sample's pages asked for in one request besides, as the datasets have it.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from pathlib import Path

import numpy as np
from mb_data import IndexedDataset, IndexedDatasetBuilder

SAMPLES, LENGTH = 200, 8193


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", help="on the disk to measure")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        prefix = Path(directory) / "a"
        with IndexedDatasetBuilder(prefix, "i4") as builder:
            for i in range(100):
                builder.add_document(np.full(1 << 20, i, dtype="i4"))
        for way in ("read-ahead", "random", "random, in one request"):
            seconds, megabytes = read(prefix, way)
            wanted = SAMPLES * LENGTH * 4 / 1e6
            print(f"{way}: {seconds:.2f} s, {megabytes:.1f} MB read, {wanted:.1f} MB wanted")


def read(prefix: Path, way: str) -> tuple[float, float]:
    gc.collect()  # pages that are still mapped would not be dropped
    descriptor = os.open(f"{prefix}.bin", os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    dataset = IndexedDataset(prefix)
    if way != "read-ahead":
        dataset.expect_random_access()
    if way == "random":
        dataset._random = None
    rng = np.random.default_rng(0)
    before, started = bytes_read(), time.perf_counter()
    for _ in range(SAMPLES):
        dataset.get(int(rng.integers(100)), int(rng.integers(1 << 19)), LENGTH).sum()
    return time.perf_counter() - started, (bytes_read() - before) / 1e6


def bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


if __name__ == "__main__":
    main()
