"""Seconds from typing a command to its first step, with empty caches of kernels and full ones.

    python packages/mb-train/benchmarks/start.py [--kinds dense dmoe] [--way eager|compiled]
        [--states cold warm in-turn] [FLAGS]

Each row is a process of its own that trains three steps of `dense-125m` or `dmoe-125m`, 8 sequences
each, on random tokens. `cold` begins with empty caches of Triton and Inductor, `warm` with what
`cold` left, `in-turn` is cold without compiling kernels ahead. Python's own bytecode
is there in every row, as in an environment that has been used: a run before the first of each way
makes it, in a folder of its own, for some images hold none and forbid writing it. Columns are
moments at which lines of the log appear: the program answers; torch and the device are there; model
and optimizer are built; all is set up; the first and the third step are done, and the process is
ended. Further flags go to the runs. Prints each row when it is known, then one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from small_runs import random_tokens

MOMENTS = {
    "answers": "mb-train ",
    "device": "using world size",
    "model": "[after model",
    "set up": "done with setup",
    "step 1": " iteration        1/",
    "step 3": " iteration        3/",
}
KINDS, STATES = ("dense", "dmoe"), ("cold", "warm", "in-turn")
WAYS = {"eager": "--no-compile", "compiled": "--compile"}
IN_TURN = (
    "import sys, mb_train.train.run as run; run.compile_experts = lambda *_: None; "
    "run.compile_step = lambda *_, **__: None; "
    "from mb_train.cli import main; sys.exit(main())"
)


def start(program: list[str], words: list[str], caches: Path) -> dict[str, float]:
    """Seconds until each moment."""
    environment = dict(os.environ, PYTHONUNBUFFERED="1")
    environment["TRITON_CACHE_DIR"] = str(caches / "triton")
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(caches / "inductor")
    environment["PYTHONPYCACHEPREFIX"] = str(caches.parent / "bytecode")
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    begun, found, said = time.perf_counter(), {}, []
    with subprocess.Popen(
        [sys.executable, *program, *words], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            for line in process.stdout:
                said.append(line)
                for name, beginning in MOMENTS.items():
                    if line.startswith(beginning):
                        found.setdefault(name, time.perf_counter() - begun)
                if len(found) == len(MOMENTS):
                    return found
            process.wait()
        finally:
            process.kill()
    print("".join(said[-15:]), flush=True)
    raise SystemExit(f"{' '.join([*program, *words])}: exit code {process.returncode}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--way", choices=WAYS, help="without torch.compile or with it only")
    parser.add_argument("--states", nargs="+", choices=STATES, default=STATES)
    options, rest = parser.parse_known_args()
    ways = {options.way: WAYS[options.way]} if options.way else WAYS
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    rows, known = [], set()
    print(f"{'':24}" + "".join(f"{name:>9}" for name in MOMENTS), flush=True)
    # Ignored: what a run that was ended had compile is still writing.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        data = random_tokens(Path(folder) / "random", 262_144)
        for kind in options.kinds:
            for way, flag in ways.items():
                words = ["--recipe", f"{kind}-125m", flag, *data]
                words += ["--micro-batch-size", "8", "--global-batch-size", "8"]
                words += ["--train-iters", "3", "--lr-warmup-fraction", "0", *rest]
                caches = Path(folder) / f"{kind}-{way}"
                states = {"cold": caches, "warm": caches}
                if kind == "dmoe" and way == "eager":
                    states["in-turn"] = Path(folder) / "in-turn"
                states = {state: states[state] for state in options.states if state in states}
                if way not in known:
                    known.add(way)
                    start(["-m", "mb_train"], words, Path(folder) / f"bytecode-{way}")
                for state, cache in states.items():
                    program = ["-c", IN_TURN] if state == "in-turn" else ["-m", "mb_train"]
                    found = start(program, words, cache)
                    rows.append({"kind": kind, "way": way, "caches": state, **found})
                    times = "".join(f"{found[name]:9.1f}" for name in MOMENTS)
                    print(f"{kind:6} {way:9} {state:7}{times}", flush=True)
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
