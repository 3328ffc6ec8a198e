"""Preprocessing against a pool of tiktoken workers that writes the same files.

Both sides turn one JSON Lines file into ``.bin``/``.idx`` with GPT-2's vocabulary and an
end-of-document token, with the same number of worker processes. Each is a process of its own,
timed from its start to its end: interpreter, imports and loading of the vocabulary included. The
two alternate, so that whatever else the machine does meets both, and processor time, which other
work disturbs least, is told beside; the files must be equal byte for byte. tiktoken gets its ranks
from the same merges and works on batches of 1 MB.

The text is Python source: the standard library and all that is installed beside it, over and over
until the file is large enough. gigatoken remembers words and so gains from repetition; the table
says how much text is distinct.

    pip install mb-data[fast] tiktoken
    python packages/mb-data/benchmarks/run.py --megabytes 512 --workers 2 --repeats 5

Prints a table, and one JSON line at the end. ``--side ours|tiktoken`` runs one side once.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

BATCH_BYTES = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=512, help="size of the JSON Lines file")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", help="for the files (default: a temporary one)")
    parser.add_argument("--side", choices=["ours", "tiktoken"])
    parser.add_argument("--input", type=Path)
    options = parser.parse_args()
    if options.side:
        side = ours if options.side == "ours" else tiktoken_pool
        side(options.input, options.directory, options.workers)
        return
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        compare(Path(directory), options)


def compare(directory: Path, options: argparse.Namespace) -> None:
    source = directory / "corpus.jsonl"
    size, text_bytes, distinct = write_corpus(source, options.megabytes * 1_000_000)
    print(f"{size / 1e6:.0f} MB of JSON Lines, {text_bytes / 1e6:.0f} MB of text,", end=" ")
    print(f"{distinct / 1e6:.0f} MB of it distinct; {options.workers} workers,", end=" ")
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"{'side':10}{'seconds':>10}{'MB/s':>10}{'CPU s':>10}{'peak MB':>10}{'load':>8}")
    times: dict[str, list[float]] = {"ours": [], "tiktoken": []}
    cpu_times: dict[str, list[float]] = {"ours": [], "tiktoken": []}
    peaks = dict.fromkeys(times, 0.0)
    for _ in range(options.repeats):
        for side in times:
            for end in ("bin", "idx"):
                (directory / f"{side}_text_document.{end}").unlink(missing_ok=True)
            seconds, cpu, peak = run_side(side, source, directory, options.workers)
            times[side].append(seconds)
            cpu_times[side].append(cpu)
            peaks[side] = max(peaks[side], peak)
            load = os.getloadavg()[0]
            rate = text_bytes / 1e6 / seconds
            print(f"{side:10}{seconds:10.2f}{rate:10.1f}{cpu:10.2f}{peak:10.0f}{load:8.2f}")
        for end in ("bin", "idx"):
            files = [directory / f"{side}_text_document.{end}" for side in times]
            if not filecmp.cmp(*files, shallow=False):
                raise SystemExit(f"the .{end} files differ")
    median = {side: statistics.median(values) for side, values in times.items()}
    best = {side: min(values) for side, values in times.items()}
    work = {side: statistics.median(values) for side, values in cpu_times.items()}
    pairs = [b / a for a, b in zip(times["ours"], times["tiktoken"], strict=True)]
    print("the files are equal byte for byte")
    print(f"{median['tiktoken'] / median['ours']:.1f} x by medians, ", end="")
    print(f"{best['tiktoken'] / best['ours']:.1f} x by the best of each, ", end="")
    print(f"{work['tiktoken'] / work['ours']:.1f} x by processor time")
    report = {
        "benchmark": "preprocess",
        "text_bytes": text_bytes,
        "distinct_bytes": distinct,
        "workers": options.workers,
        "seconds": times,
        "speedup_median": median["tiktoken"] / median["ours"],
        "speedup_best": best["tiktoken"] / best["ours"],
        "speedup_pairs": pairs,
        "speedup_cpu": work["tiktoken"] / work["ours"],
        "megabytes_per_second": text_bytes / 1e6 / median["ours"],
        "peak_megabytes": peaks,
    }
    print(json.dumps(report))


def run_side(side: str, source: Path, directory: Path, workers: int) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds of all processes, and the largest process's peak in MB."""
    command = [sys.executable, __file__, "--side", side, "--workers", str(workers)]
    command += ["--input", str(source), "--directory", str(directory)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, cpu, float(run.stdout.split()[-1])


def ours(source: Path, directory: str, workers: int) -> None:
    from mb_data import preprocess

    preprocess(source, f"{directory}/ours", append_eod=True, workers=workers)
    print_peak()


def tiktoken_pool(source: Path, directory: str, workers: int) -> None:
    """A good one: batches instead of lines through the pool, arrays instead of lists back."""
    import numpy as np
    from mb_data import IndexedDatasetBuilder

    output = f"{directory}/tiktoken_text_document"
    with (
        multiprocessing.Pool(workers, start_worker) as pool,
        open(source, "rb") as file,
        IndexedDatasetBuilder(output, np.uint16) as builder,
    ):
        for tokens, lengths in pool.imap(encode_lines, batches(file)):
            builder.add_documents(
                np.frombuffer(tokens, np.uint16), np.frombuffer(lengths, np.int32)
            )
    print_peak()


def batches(file) -> Iterator[list[bytes]]:
    while lines := file.readlines(BATCH_BYTES):
        yield lines


def start_worker() -> None:
    import tiktoken
    from mb_data.tokenizer import load_tokenizer
    from mb_data.tokenizer.readable_bpe import GPT2_PATTERN

    strings = load_tokenizer("gpt2", engine="python").byte_strings
    ranks = {string: i for i, string in strings.items() if i < 50256}
    special = {"<|endoftext|>": 50256}
    globals()["encoding"] = tiktoken.Encoding(
        "gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special
    )


def encode_lines(lines: list[bytes]) -> tuple[bytes, bytes]:
    import numpy as np

    encode = globals()["encoding"].encode_ordinary
    rows = [[*encode(json.loads(line)["text"]), 50256] for line in lines]
    tokens = np.array([token for row in rows for token in row], dtype=np.uint16)
    return tokens.tobytes(), np.array([len(row) for row in rows], dtype=np.int32).tobytes()


def print_peak() -> None:
    """Of the largest process, parent or worker."""
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    print(max(resource.getrusage(w).ru_maxrss for w in who) / 1000)


def write_corpus(path: Path, size: int) -> tuple[int, int, int]:
    """Write ``size`` bytes or more; returns their number, that of all texts, of distinct ones."""
    roots = [sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")]
    sources = sorted({str(p) for root in roots for p in Path(root).rglob("*.py") if p.is_file()})
    written = text_bytes = number = distinct = 0
    with open(path, "w", encoding="utf-8") as file:
        while written < size:
            for name in sources:
                try:
                    text = Path(name).read_text("utf-8")
                except (UnicodeDecodeError, OSError):
                    continue
                if not text.strip():
                    continue
                line = json.dumps({"id": number, "text": text}) + "\n"
                number += 1
                written += file.write(line)
                text_bytes += len(text.encode())
                if written >= size:
                    break
            distinct = distinct or text_bytes
        file.flush()
        os.fsync(file.fileno())
    return written, text_bytes, distinct


if __name__ == "__main__":
    main()
