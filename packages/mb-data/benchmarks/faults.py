"""Faults by the thousand: mutated files, and runs killed at random times.

    python packages/mb-data/benchmarks/faults.py --files 5000 --kills 100

Mutates a dataset's ``.idx`` and ``.bin`` and reads everything of what still opens: every refusal
must name the file. Kills preprocessing at random times and gives the command again until it ends,
one half with a file, the other with a folder of archives that the workers unpack: the bytes must be
those of a run that was left alone. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from mb_data import IndexedDataset, IndexedDatasetBuilder, preprocess, write_sample_corpus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", type=int, default=5000)
    parser.add_argument("--kills", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        report = mutate(Path(directory), options.files) | kill(Path(directory), options.kills)
    print(json.dumps(report))


def mutate(folder: Path, count: int) -> dict[str, int]:
    rng = random.Random(0)
    with IndexedDatasetBuilder(folder / "whole", "u2") as builder:
        for size in range(12):
            builder.add_document(range(size), [size // 2, size - size // 2])
    whole = {end: (folder / f"whole.{end}").read_bytes() for end in ("bin", "idx")}
    opened = accesses = refused = unnamed = 0
    for _ in range(count):
        data = {end: bytearray(raw) for end, raw in whole.items()}
        end = rng.choice(["idx", "idx", "idx", "bin"])
        for _ in range(rng.randrange(1, 4)):
            data[end][rng.randrange(len(data[end]))] = rng.randrange(256)
        if rng.random() < 0.1:
            del data[end][rng.randrange(len(data[end])) :]
        for suffix, raw in data.items():
            (folder / f"a.{suffix}").write_bytes(raw)
        try:
            dataset = IndexedDataset(folder / "a")
        except ValueError as error:
            unnamed += str(folder / "a.") not in str(error)
            continue
        opened += 1
        for read, number in [
            *((dataset.get, i) for i in range(len(dataset))),
            *((dataset.document, i) for i in range(dataset.num_documents)),
        ]:
            accesses += 1
            try:
                read(number)
            except Exception as error:
                refused += 1
                unnamed += str(folder / "a.") not in str(error)
    return {
        "mutated_files": count,
        "opened": opened,
        "accesses": accesses,
        "accesses_refused": refused,
        "errors_without_the_file": unnamed,
    }


def kill(folder: Path, count: int) -> dict[str, int]:
    rng = random.Random(1)
    corpus = write_sample_corpus(folder / "corpus.jsonl", max_bytes=5_000_000)
    lines = corpus.read_bytes().splitlines(keepends=True)
    archives = folder / "archives"
    archives.mkdir()
    cuts = [0, len(lines) // 3, *sorted(rng.sample(range(len(lines)), 10)), len(lines)]
    for i, (start, stop) in enumerate(pairwise(cuts)):
        packed = gzip.compress(b"".join(lines[start:stop]))
        (archives / f"{i:02}.jsonl.gz").write_bytes(packed)
    preprocess(corpus, folder / "once0", append_eod=True, workers=1, block_bytes=20_000)
    preprocess(archives, folder / "once1", append_eod=True, workers=1, block_bytes=20_000)
    code = (
        "import sys, mb_data.text.bookkeeping; mb_data.text.bookkeeping.SAVE_INTERVAL = 0.01\n"
        "from mb_data import preprocess\n"
        "preprocess(sys.argv[1], sys.argv[2], append_eod=True, workers=2, block_bytes=20_000)\n"
    )
    kills = runs = different = 0
    while kills < count:
        runs += 1
        half = 2 * kills // count  # a run is killed until its half of the kills is over
        source = (corpus, archives)[half]
        while True:
            before = _saved(folder)
            run = subprocess.Popen([sys.executable, "-c", code, source, folder / "out"])
            # At work, however long the start takes: once there is another state on disk. One in
            # eight is killed anywhere.
            anywhere = rng.random() < 0.125
            while run.poll() is None and _saved(folder) == before and not anywhere:
                time.sleep(0.002)
            try:
                longest = 2.0 if anywhere else 0.2
                run.wait(rng.uniform(0, longest) if 2 * kills // count == half else None)
                break
            except subprocess.TimeoutExpired:
                run.kill()
                run.wait()
                kills += 1
        if run.returncode:
            raise SystemExit(f"a run ended with exit code {run.returncode}")
        once = f"once{half}"
        for end in ("bin", "idx"):
            names = (folder / f"{side}_text_document.{end}" for side in (once, "out"))
            a, b = (name.read_bytes() for name in names)
            different += a != b
    return {"kills": kills, "runs": runs, "files_that_differ": different}


def _saved(folder: Path) -> int:
    """When the state of the run under way was last recorded, 0 if never."""
    try:
        return (folder / "out.partial" / "state.json").stat().st_mtime_ns
    except FileNotFoundError:
        return 0


if __name__ == "__main__":
    main()
