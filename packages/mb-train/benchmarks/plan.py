"""What `mb-train plan` says of a run beside what the run then takes, on one GPU.

    python packages/mb-train/benchmarks/plan.py [--cases dense-125m dmoe-46m:16x32] [--steps 24]

Each case trains a few steps on random tokens, without evaluation or checkpoint; models of sentences
on documents longer than their sequences, with little padding. Memory is the most that torch's
allocator had given out, time the median mean of four steps after the warm-up; the plan's error is
its figure over the measured one, less 1. Prints each row when it is known, then one line of JSON.

A case RECIPE:SxN takes a recipe's steps as N micro-batches of S sequences, in CUDA graphs;
RECIPE:SxN:L its first L layers. --no-dropout leaves out the dropout of such cases, --no-compile
torch's compiler.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from mb_train.config import TrainConfig
from mb_train.config.recipes import recipe
from mb_train.data.tokenizers import load_tokenizer
from mb_train.data.vocabulary import vocabulary_rows
from mb_train.logs.run_log import read_log
from mb_train.plan.sizing import sizes
from mb_train.plan.words import GIB
from small_runs import end_at_sigterm, random_sentences, random_tokens, train

TWICE_32 = {"micro_batch_size": 32, "global_batch_size": 64}
NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
HEAVY = {"num_layers": 4, "micro_batch_size": 8, "global_batch_size": 8}
DEEP = {
    "micro_batch_size": 64,
    "global_batch_size": 64,
    "recompute_granularity": "full",
} | NO_DROPOUT
GRAPH = {"cuda_graph": True, "compile": False, "global_batch_size": 32} | NO_DROPOUT
# Case -> its recipe, and the fields that make it one GPU's.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense-125m": ("dense-125m", TWICE_32),
    "dmoe-125m": ("dmoe-125m", TWICE_32),
    "olmoe-1b-7b": (
        "olmoe-1b-7b",
        {"num_layers": 2, "micro_batch_size": 4, "global_batch_size": 8},
    ),
    "olmoe-1b-7b-offload": (
        "olmoe-1b-7b",
        {
            "num_layers": 2,
            "micro_batch_size": 4,
            "global_batch_size": 8,
            "optimizer_cpu_offload": True,
        },
    ),
    # Its 6.9 B parameters; pins 55 GB of the host's memory.
    "olmoe-1b-7b-whole": (
        "olmoe-1b-7b",
        {
            "micro_batch_size": 1,
            "global_batch_size": 32,
            "optimizer_cpu_offload": True,
        },
    ),
    # Activations on the host: of layers that recompute, their inputs; of others all that half of
    # them keep, or all of them. Each beside the same without.
    "olmoe-1b-7b-recompute": ("olmoe-1b-7b", HEAVY | {"recompute_granularity": "full"}),
    "olmoe-1b-7b-inputs": (
        "olmoe-1b-7b",
        HEAVY | {"recompute_granularity": "full", "cpu_offloading_num_layers": 4},
    ),
    "olmoe-1b-7b-heavy": ("olmoe-1b-7b", HEAVY),
    "olmoe-1b-7b-layers": ("olmoe-1b-7b", HEAVY | {"cpu_offloading_num_layers": 2}),
    "olmoe-1b-7b-all-layers": ("olmoe-1b-7b", HEAVY | {"cpu_offloading_num_layers": 4}),
    "dense-760m-recompute": ("dense-760m", DEEP),
    "dense-760m-inputs": ("dense-760m", DEEP | {"cpu_offloading_num_layers": 24}),
    "deepseek-v2-lite": (
        "deepseek-v2-lite",
        {"num_layers": 4, "micro_batch_size": 4, "global_batch_size": 8},
    ),
    "bert-110m": ("bert-110m", TWICE_32),
    "bert-110m-graph": ("bert-110m", TWICE_32 | GRAPH),
    "t5-220m": ("t5-220m", TWICE_32),
    "t5-220m-graph": ("t5-220m", TWICE_32 | GRAPH),
    "ict-bert": ("ict-bert", TWICE_32),
    "ict-bert-graph": ("ict-bert", TWICE_32 | GRAPH),
}
WARM_UP, TOGETHER = 8, 4


def case(name: str, also: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """A case of `CASES`, or what RECIPE:SxN or RECIPE:SxN:L says, with these fields."""
    if name in CASES:
        return CASES[name]
    found = re.fullmatch(r"([^:]+):(\d+)x(\d+)(?::(\d+))?", name)
    if found is None:
        raise ValueError(f"Expected one of {', '.join(CASES)}, or RECIPE:SxN[:L], got {name!r}.")
    base, sequences, micro_batches, layers = found.groups()
    own = {
        "micro_batch_size": int(sequences),
        "global_batch_size": int(sequences) * int(micro_batches),
        "cuda_graph": True,
    }
    own |= {} if layers is None else {"num_layers": int(layers)}
    return base, own | dict(also)


def measure(
    name: str, folder: Path, steps: int, device: str, also: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Plan and actual figures of one case; `folder` has its data."""
    base, own = case(name, also)
    fields = recipe(base) | own | {"train_iters": steps, "device": device}
    data = random_sentences if "model" in fields else random_tokens
    words = ["--recipe", base, *data(folder / "random"), "--save", str(folder / "run")]
    # A report waits for the device: after every step it would hold the host back.
    words += ["--device", device, "--train-iters", str(steps), "--log-interval", str(TOGETHER)]
    for field, value in own.items():
        flag = field.replace("_", "-")
        words += (
            [f"--{flag}" if value else f"--no-{flag}"]
            if type(value) is bool
            else [f"--{flag}={value}"]
        )
    on_gpu = device == "cuda"
    if on_gpu:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch._dynamo.reset()  # shapes of other cases count towards its limit of recompilations
    train(words)
    log = read_log(folder / "run" / "log.jsonl")
    events = [e for e in log if e["event"] == "train"]
    (start,) = (e for e in log if e["event"] == "start")
    times = [e["ms_per_iteration"] for e in events[WARM_UP // TOGETHER :]]
    config = TrainConfig(**fields)
    vocab_size = vocabulary_rows(config, load_tokenizer(config).vocab_size, ranks=1)
    found = sizes(config, vocab_size, 1, torch.cuda.get_device_name() if on_gpu else "CPU")
    return {
        "case": name,
        "parameters": start["parameters"],
        "planned_parameters": found.parameters,
        "gib": max(e["memory_allocated"] or 0 for e in events) / GIB,
        "planned_gib": found.memory / GIB,
        "ms": statistics.median(times),
        "planned_ms": None if found.step_s is None else 1e3 * found.step_s,
    }


def main() -> None:
    """Measure the cases and print them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", nargs="+", default=list(CASES), help="; ".join(CASES))
    parser.add_argument("--no-dropout", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--steps", type=int, default=24, help=f"more than {WARM_UP}; default 24")
    options = parser.parse_args()
    for name in options.cases:
        try:
            case(name, {})
        except ValueError as error:
            parser.error(str(error))
    if options.steps <= WARM_UP:
        raise SystemExit(f"Expected --steps above {WARM_UP}, got {options.steps}.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    also = (NO_DROPOUT if options.no_dropout else {}) | (
        {"compile": False} if options.no_compile else {}
    )
    rows = []
    head = f"{'':20}{'GiB':>8}{'plan':>8}{'error':>8}{'ms':>9}{'plan':>9}{'error':>8}"
    print(head, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        end_at_sigterm(Path(folder))
        for name in options.cases:
            own = Path(folder) / name.replace(":", "-")
            own.mkdir()
            rows.append(measure(name, own, options.steps, device, also))
            print(_line(rows[-1]), flush=True)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(json.dumps({"device": name, "torch": torch.__version__, "rows": rows}))


def _line(row: dict[str, Any]) -> str:
    assert row["parameters"] == row["planned_parameters"], row
    line = f"{row['case']:20}"
    for kind, digits in (("gib", 8), ("ms", 9)):
        got, planned = row[kind], row[f"planned_{kind}"]
        known = got and planned is not None
        error = f"{planned / got - 1:+8.1%}" if known else f"{'unknown':>8}"
        line += f"{got:{digits}.1f}{planned or 0.0:{digits}.1f}{error}"
    return line


if __name__ == "__main__":
    sys.exit(main())
