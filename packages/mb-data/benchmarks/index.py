"""Time and memory of building sample indices, beside plain loops in the same run.

    python packages/mb-data/benchmarks/index.py [--documents 10000000] [--repeat 3]

The loops are those of ``mb_data.samples.reference``, which the tests hold to be equal. Where one
would take minutes it does a part of the work, named in the table, and its time is scaled up. Where
there is a C compiler, ``sample_idx`` is timed against a compiled loop too: that is what Megatron's
helper is.
Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from mb_data.mersenne import permutation
from mb_data.samples import reference
from mb_data.samples.blend import blend_order, normalize
from mb_data.samples.gpt import build_index, build_sample_idx
from mb_data.samples.index_cache import read_index_file, write_index_file
from mb_data.samples.sentence_index import build_sample_mapping

SEQ_LENGTH = 1024

# The rule of ``reference.build_sample_idx`` in C.
C_LOOP = r"""
#include <stdint.h>
void build(const int32_t *sizes, const int32_t *order, int32_t seq, int64_t n, int32_t *rows) {
  int64_t position = 0;
  int32_t offset = 0;
  rows[0] = rows[1] = 0;
  for (int64_t i = 1; i <= n; i++) {
    for (int32_t missing = seq + 1; missing > 0;) {
      int32_t left = sizes[order[position]] - offset;
      if (left >= missing) { offset += missing - 1; break; }
      missing -= left;
      position++;
      offset = 0;
    }
    rows[2 * i] = (int32_t)position;
    rows[2 * i + 1] = offset;
  }
}
"""


def compiled_loop(folder: str) -> Callable[..., None] | None:
    """The loop above, None without a compiler."""
    if not shutil.which("cc"):
        return None
    source = Path(folder) / "loop.c"
    source.write_text(C_LOOP)
    library = source.with_suffix(".so")
    subprocess.run(["cc", "-O3", "-shared", "-fPIC", "-o", library, source], check=True)
    return ctypes.CDLL(str(library)).build


def best(run: Callable[[], object], repeat: int) -> float:
    """Seconds of the fastest of ``repeat`` runs."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def peak_growth(run: Callable[[], object]) -> int:
    """MiB by which the peak memory of a fresh fork grows while it runs."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        run()
        growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        os.write(writer, str(growth // 1024).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        growth = int(pipe.read())
    os.wait()
    return growth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=10**7)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    n = options.documents
    rng = np.random.default_rng(0)
    rows: list[dict[str, object]] = []

    def report(
        what: str,
        ours: Callable[[], object],
        baseline: Callable[[], object] | None = None,
        part: float = 1.0,
    ) -> None:
        seconds = best(ours, options.repeat)
        loop = best(baseline, 1) / part if baseline else None
        row = {
            "what": what,
            "seconds": round(seconds, 3),
            "loop_seconds": loop and round(loop, 2),
            "loop_part": part if baseline else None,
            "times_faster": loop and round(loop / seconds, 1),
            "peak_growth_mib": peak_growth(ours),
        }
        rows.append(row)
        loop_text = "" if loop is None else f"{loop:9.2f}"
        share = "" if loop is None else f"{part:7.0%}"
        ratio = "" if loop is None else f"{loop / seconds:7.1f}x"
        print(
            f"{what:58s} {seconds:8.3f} {loop_text:>9s} {share:>7s} {ratio:>8s} "
            f"{row['peak_growth_mib']:8d}",
            flush=True,
        )

    print(f"{platform.processor() or platform.machine()}, NumPy {np.__version__}, one core")
    print(f"{'':58s} {'seconds':>8s} {'loop':>9s} {'part':>7s} {'faster':>8s} {'MiB':>8s}")

    sizes = np.maximum(rng.lognormal(6, 1.2, n), 1).astype(np.int32)
    order = np.random.RandomState(1).permutation(n).astype(np.int32)
    samples = (int(sizes.sum()) - 1) // SEQ_LENGTH
    lengths = sizes[order]
    plain = (sizes.tolist(), order.tolist())
    report(
        f"sample_idx, {n:,} documents, {samples:,} samples",
        lambda: build_sample_idx(lengths, SEQ_LENGTH, samples),
        lambda: reference.build_sample_idx(*plain, SEQ_LENGTH, samples),
    )
    plain = ((), ())
    with tempfile.TemporaryDirectory() as folder:
        build = compiled_loop(folder)
        if build:
            out = np.empty((samples + 1, 2), dtype=np.int32)

            def compiled() -> None:
                count = ctypes.c_int64(samples)
                build(sizes.ctypes, order.ctypes, SEQ_LENGTH, count, out.ctypes)

            report("  the same loop in C", compiled)
            assert (out == build_sample_idx(lengths, SEQ_LENGTH, samples)).all()

    def index() -> dict[str, np.ndarray]:
        return build_index(sizes, range(n), seq_length=SEQ_LENGTH, num_samples=samples, seed=1234)

    report("the same with both shuffles, as a dataset builds it", index)
    with tempfile.TemporaryDirectory() as folder:
        path, built = Path(folder) / "index", index()
        report("  written to the cache", lambda: write_index_file(path, {}, built))
        report("  read from the cache and checked", lambda: read_index_file(path, {}))

    for sources in (4, 20):
        shares = normalize((rng.random(sources) + 0.05).tolist())
        part = 0.02
        report(
            f"blend of {sources} sources, {n:,} samples",
            lambda shares=shares: blend_order(shares, n),
            lambda shares=shares, part=part: reference.blend_order(shares.tolist(), int(n * part)),
            part,
        )

    documents = n // 10
    counts = rng.integers(1, 40, documents)
    sentences = np.maximum(rng.lognormal(3, 0.6, int(counts.sum())), 1).astype(np.int32)
    boundaries = np.concatenate(([0], np.cumsum(counts)))
    settings = {"max_length": 509, "min_sentences": 2, "num_samples": 0}
    part = 0.1
    few = boundaries[: int(documents * part) + 1].tolist()
    words = iter(np.random.RandomState(1).randint(0, 2**32, 3 * documents, np.uint32).tolist())
    sentence_list = sentences[: few[-1]].tolist()

    def loop() -> None:
        made = reference.sample_mapping(
            sentence_list, few, draw=words.__next__, short_ratio=10, **settings
        )
        permutation(len(made), 2)

    report(
        f"BERT samples, {documents:,} documents, {len(sentences):,} sentences",
        lambda: build_sample_mapping(sentences, boundaries, short_seq_prob=0.1, seed=1, **settings),
        loop,
        part,
    )
    print(json.dumps({"benchmark": "index", "documents": n, "rows": rows}))


if __name__ == "__main__":
    main()
