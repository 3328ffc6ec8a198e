"""Models drawn at random, on a GPU and on the CPU from one checkpoint: a tool, not a test.

    python integration-tests/sweep_devices.py --draws 60 --seed 1 --workers 12

A draw is a GPT, a BERT, a T5, an ICT or a classifier as `sweep_layouts` draws them, in sizes that
fill no tile, in fp32, fp16 or bf16, with an optimizer, recompute, kept activations in few bits,
block-sparse experts, and on the GPU compiled or replayed as CUDA graphs. The CPU takes two steps
and saves; from there each takes three more. The largest deviation of losses, gradient norms,
weights and moments is printed. What the configuration refuses is said with its message.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import shutil
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
from drawn_models import decoder, experts, hybrid, seldom, sentences
from mb_data.system import cores
from sweep_layouts import exactly, write_data
from test_parallel import _deviations

# Largest deviation of losses, which all else follows from: rounding moves tokens whose experts
# score alike. An H100 had at most 2e-6 in fp32 and 1e-4 in halves (24 draws of seed 91). Adafactor
# divides by roots of small sums, where rounding grows: 2e-4 in fp32 (an H200, seed 8).
LIMITS = {"--no-bf16": 1e-4, "--fp16": 3e-2, "--bf16": 3e-2, "adafactor": 3e-3}

SPARSE = "--moe-mlp-impl sparse --moe-capacity-factor 0 --moe-ffn-hidden-size 128"


def draw(rng: random.Random) -> tuple[str, str]:
    """Flags of the model, and those of the GPU alone."""
    kind = rng.choice(["gpt", "gpt", "gpt", "gpt", "bert", "t5", "ict", "classifier"])
    heads = rng.choice([2, 4])
    model = sentences(rng, kind) if kind != "gpt" else decoder(rng, 1)
    model += [f"--num-layers 2 --num-attention-heads {heads}"]
    model += [f"--hidden-size {heads * rng.choice([8, 16, 24, 40, 64])}"]
    model += [f"--ffn-hidden-size {rng.choice([48, 72, 128, 200])}"]
    model += [f"--seq-length {rng.choice([16, 40, 100])}"]
    model += [f"--optimizer {rng.choice(['adam', 'adam', 'muon', 'adafactor', 'sgd'])}"]
    micro_batch = 8 if kind == "ict" else rng.choice([1, 2, 3])
    model += [f"--micro-batch-size {micro_batch} --global-batch-size {micro_batch * 2}"]
    if rng.random() < 0.8:
        experts(rng, 1, 1, model, [])
        model += [rng.choice(["", "", "--moe-recompute", "--moe-saved-activation-bits 8",
                              "--moe-saved-activation-bits 4", SPARSE])]  # fmt: skip
    activations = ["gelu", "squared_relu", "relu", "silu", "geglu", "reglu", "swiglu(limit=7)"]
    model += [rng.choice(["--swiglu", f"--activation {rng.choice(activations)}"])]
    if kind == "gpt":
        model = hybrid(rng, model) if rng.random() < 0.15 else model
        model += [rng.choice(["", "", "--reset-attention-mask --reset-position-ids"])]
    model += [rng.choice(["", "", "--recompute-granularity full", "--recompute-granularity "
                          "selective"])]  # fmt: skip
    fp16 = "--fp16 --initial-loss-scale 4096"
    model += [rng.choice(["--no-bf16", "--no-bf16", "--bf16", fp16]) if kind != "ict"
              else "--no-bf16"]  # fmt: skip
    model += seldom(rng, model, layers=2)
    words = " ".join(filter(None, model))
    if SPARSE in words:  # whose widths are multiples of its blocks
        words = words.replace("expert-intermediate-size 16", "expert-intermediate-size 128")
        words = words.replace("--moe-mlp-bias ", "")
    more = ["--no-compile", "--no-compile", "--compile"]
    more += [] if "recompute" in words else ["--no-compile --cuda-graph"] * 2
    return words, rng.choice(more)


def compare(number: int, model: str, more: str, line: list[str], folder: Path) -> str:
    """A draw on both devices: its verdict, with what it said."""
    begin, cpu, gpu = (folder / f"{number}-{name}" for name in ("begin", "cpu", "gpu"))
    began = time.monotonic()
    shown = f"{number}: {model} | {more}\n   "
    (error,) = exactly(0, 1, [[*line, *model.split(), "--save", str(begin), "--train-iters", "2"]])
    if not error:
        on = [["--load", str(begin), "--train-iters", "5", "--save", str(cpu), "--device", "cpu"]]
        on += [["--load", str(begin), "--train-iters", "5", "--save", str(gpu), "--device", "cuda"]]
        on[1] += more.split()
        error = next((said for said in exactly(0, 1, on) if said), "")
    if error:
        return f"{'DEFECT ' if 'Traceback' in error else 'refused'} {shown} {error}"
    worst = _deviations(gpu, cpu, without=("reported",))  # where a GPU's memory is, too
    limit = max(limit for flag, limit in LIMITS.items() if flag in model)
    fine = max(worst["loss"], worst["validation"], worst["grad norm"] / 10) < limit
    figures = "  ".join(f"{name} {value:.0e}" for name, value in worst.items())
    for run in (begin, cpu, gpu):
        shutil.rmtree(run)
    seconds = time.monotonic() - began
    return f"{'ok     ' if fine else 'DIFFERS'} {shown} {figures}  {seconds:.0f} s"


def main(arguments: argparse.Namespace) -> int:
    """Train all draws and print a line for each; how many are not equal."""
    context, wrong = multiprocessing.get_context("spawn"), 0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        begins = write_data(folder)
        threads = max(cores() // arguments.workers, 1)  # or they wait for each other
        begin = {"initializer": torch.set_num_threads, "initargs": (threads,)}
        with ProcessPoolExecutor(
            arguments.workers, context, max_tasks_per_child=8, **begin
        ) as pool:
            waiting = []
            for n in range(arguments.draws):
                model, more = draw(random.Random(f"{arguments.seed} {n}"))
                waiting.append(pool.submit(compare, n, model, more, begins(model), folder))
            for done in as_completed(waiting):
                error = done.exception()
                said = f"DEFECT  {error!r} {error.__cause__}" if error else done.result()
                wrong += not said.startswith(("ok", "refused"))
                print(said, flush=True)
    return wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Random models, a GPU against the CPU.")
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=4)
    raise SystemExit(main(parser.parse_args()) != 0)
