"""Models and layouts drawn at random, each against one process: a tool, not a test.

    python integration-tests/sweep_layouts.py --draws 20 --seed 1 --go-on
    python integration-tests/sweep_layouts.py --draws 20 --seed 1 --resume
    python integration-tests/sweep_layouts.py --draws 20 --seed 1 --device cuda

A draw is a GPT, a BERT, a T5, an ICT or a classifier (experts, top-k, capacity, biases, shared
experts, positions, heads, latents, norms, windows, sinks, gates, states, further tokens,
multipliers, muP), in fp32, fp16 or bf16, with products in FP8 or without, an optimizer, and a
layout of two or four ranks (data, tensor, sequence, context, pipeline and expert parallelism,
schedule, dispatcher, ZeRO stage, recompute, offload; those of one size share their processes).
Three steps with accumulation, sequences with unequal numbers of tokens that count: the largest
deviation of losses, gradient norms, weights and moments is printed. With `--go-on` two more steps
follow: of the ranks from the process's checkpoint, and of the process from theirs. With `--resume`
nothing is compared with one process: the ranks take five steps, and five with a stop after three,
dropout, jitter and a router's noise drawn: losses, weights and moments are to be equal to the bit.
With `--device cuda` the ranks are two or four GPUs, joined by NCCL, and the one process has the
first of them (a CPU draws other first weights; that GPUs compute what CPUs do is `sweep_devices`'
part): losses, norms and validation are compared; with `--compiled` the ranks compile their blocks,
the one process does not. What the configuration refuses is said with its message.

Draws leave out what is not equal by definition: dropping slots where ranks of different samples
share a capacity, a balance over the global batch, of an ICT also one over a micro-batch, which has
to be that of all ranks, and Sinkhorn's balance and experts that choose where ranks have parts of a
sequence. A bias of keys, or of the scores of answers, shifts all of them alike, so its gradient is
rounding alone: that of the keys' norm and of answers is not compared, and no bias of attention with
Adafactor, which scales each number by its own size and makes steps that differ and change nothing.
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import mb_data
import numpy as np
import tiny_run
import torch
from drawn_models import decoder, experts, hybrid, seldom, sentences
from mb_parallel.optimizer import Muon
from mb_parallel.testing import run_ranks
from test_parallel import _deviations, _train
from test_resume_bitwise import _weights
from test_sentence_models import SAME as SENTENCES
from test_sentence_models import _ict_deviations, _write_data

SAME = (
    "--num-layers 4 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --seq-length 16 "
    "--train-iters 3 --lr 3e-3 --lr-decay-style constant --log-interval 1 --eval-interval 3 "
    "--eval-iters 1 --split 80,20,0 --device cpu --tokenizer null:255 "
    "--make-vocab-size-divisible-by 64 --attention-dropout 0 --hidden-dropout 0 --adam-eps 1e-3 "
    "--eod-mask-loss"
)
MODULES = ("attn_norm qkv_linear", "core_attn", "attn_proj mlp_norm", "expert_fc1", "moe_act")
# Adafactor divides by the roots of small sums, bf16 moments are rounded by the last bits of the
# weights.
OPTIMIZERS = {
    "adam": 1e-5, "sgd": 1e-5, "sgd --sgd-momentum 0": 1e-5, "adafactor": 1e-3, "muon": 1e-4,
    "adam --optimizer-state-dtype bf16": 5e-2,
}  # fmt: skip
# A T5's scores of relative positions begin large, and with them errors of rounding; an ICT's towers
# embed all texts nearly alike at first, as a classifier does, and what tells them apart cancels. A
# number between two codes of 8 bits gets either. Polar Express takes the least singular values, of
# rounding alone, a thousand times up.
KINDS = {
    "--model t5": 1e-3, "--model ict": 1e-3, "--model classifier": 1e-3,
    "--moe-saved-activation-bits": 1e-3, "polar_express": 5e-3,
    "--fp16": 5e-2, "--bf16": 5e-2, "--fp8-format": 5e-2,
}  # fmt: skip
RUNS_OF_A_START = 24  # what they came to is printed behind the last of them
GPU_LIMIT = 1e-4  # of fp32: the order of sums moves tokens whose experts score alike
ONE_PROCESS = (
    "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --expert-model-parallel-size 1"
    " --context-parallel-size 1 --no-sequence-parallel --data-parallel-replicas 1"
    " --pipeline-schedule 1f1b --num-layers-per-virtual-pipeline-stage 0"
)


def write_tokens(folder: Path) -> str:
    """Documents of 3 to 40 tokens, each with its end, which `--eod-mask-loss` does not count."""
    prefix, rng = folder / "walks", np.random.default_rng(0)
    with mb_data.IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(80):
            walk = (rng.integers(30) + np.cumsum(rng.integers(1, 4, size=rng.integers(3, 41)))) % 30
            builder.add_document(np.append(walk, 255))
    return str(prefix)


def write_data(folder: Path) -> Callable[[str], list[str]]:
    """Data of every kind; the flags that a model's line begins with, by its own."""
    gpt = [*SAME.split(), "--data-path", write_tokens(folder)]
    *sentences, _, prefix = [*SENTENCES.split(), *_write_data(folder)]

    def begins(model: str) -> list[str]:
        if "--task" not in model:
            return [*sentences, "--data-path", prefix] if "--model" in model else gpt
        pairs = str(folder / ("questions" if "--task race" in model else "pairs.tsv"))
        return [*sentences, "--train-data-path", pairs, "--valid-data-path", pairs]

    return begins


def draw(rng: random.Random, device: str = "cpu") -> tuple[int, str, str]:
    """Ranks, the model's flags and the layout's."""
    most = 4 if device == "cpu" else max(torch.cuda.device_count(), 2)
    ranks = rng.choice([number for number in (2, 4, 4) if number <= most])
    kind = rng.choice(["gpt", "gpt", "gpt", "bert", "t5", "ict", "classifier"])
    stages = (1,) if kind == "ict" else (1, 2, 4)
    tp, pp = rng.choice([(t, p) for t in (1, 2, 4) for p in stages if ranks % (t * p) == 0])
    dp = ranks // (tp * pp)
    # Four heads are shared by both.
    cps = [c for c in (1, 1, 2, 4) if dp % c == 0 and 4 % (c * tp) == 0 and kind == "gpt"]
    cp = rng.choice(cps or [1])
    layout = [f"--tensor-model-parallel-size {tp}", f"--pipeline-model-parallel-size {pp}"]
    layout += [f"--context-parallel-size {cp}"] if cp > 1 else []
    layout += [f"--zero-stage {rng.choice([0, 1, 2, 3] if pp == 1 else [1, 2, 3])}"]
    if dp == 4 and rng.random() < 0.5:
        layout += ["--data-parallel-replicas 2"]
    if tp > 1 and rng.random() < 0.6:
        layout += ["--sequence-parallel"]
    if pp > 1:
        schedules = ["gpipe", "1f1b"]
        if pp == 2:
            schedules += ["interleaved-1f1b", "interleaved-zero-bubble", "zbv-zero-bubble"]
        schedule = rng.choice(schedules)
        layout += [f"--pipeline-schedule {schedule}"]
        if schedule not in ("gpipe", "1f1b"):
            most = 1 if schedule.startswith("zbv") else rng.choice([1, 1, 2, 3])
            layout += [f"--num-layers-per-virtual-pipeline-stage {most}"]
    layout += [rng.choice(["", "", "--recompute-granularity full", "--recompute-granularity "
                           "selective", "--recompute-granularity full --recompute-method block "
                           "--recompute-num-layers 1"])]  # fmt: skip
    if rng.random() < 0.3:
        modules = "layer_input" if "granularity full" in layout[-1] else rng.choice(MODULES)
        flags = f"--cpu-offloading-num-layers {rng.choice([1, 4])}", f"--offload-modules {modules}"
        layout += [rng.choice(flags), "--min-offloaded-tensor-size 1"]
    optimizer = rng.choice(["adam", "adam", *OPTIMIZERS])
    # A query is held against the blocks of all ranks: one process has them in one micro-batch.
    micro_batch = 8 if kind == "ict" else rng.choice([1, 2])
    layout += [f"--micro-batch-size {8 // dp}"] if kind == "ict" else []
    model = [f"--optimizer {optimizer}", f"--micro-batch-size {micro_batch}"]
    model += [f"--global-batch-size {rng.choice([8, 16])}"]
    half = rng.random() if kind != "ict" else 1.0  # whose towers' gradients all but cancel
    model += ["--fp16 --initial-loss-scale 4096"] if half < 0.15 else []
    model += ["--bf16"] if 0.15 <= half < 0.3 else []
    model += sentences(rng, kind) if kind != "gpt" else decoder(rng, tp)
    model += [rng.choice(["", "", "--decoupled-lr 1e-2"])]
    # Parts of rows have scales of their own.
    if half >= 0.15 and tp == 1 and rng.random() < 0.2:
        model += [f"--fp8-format e4m3 {rng.choice(['', '--first-last-layers-bf16'])}"]
    model += [rng.choice(["", "", "", "--clip-grad 0", "--clip-grad 0.1"])]
    if rng.random() < 0.8:
        experts(rng, ranks // pp, cp * tp, model, layout)
    if kind == "gpt" and rng.random() < 0.15:
        model = hybrid(rng, model)
    model += [rng.choice(["--activation gelu", "--swiglu", "--activation squared_relu"])]
    model += [rng.choice(["", "", "--fp32-residual-connection"])]
    model += [rng.choice(["", "", "--dataloader-type cyclic"])]
    more = seldom(rng, model, layers=4)
    if cp > 1 or "--sequence-parallel" in layout:  # ranks have parts of what these look at as one
        more = [flag for flag in more if not re.search("sinkhorn|expert_choice", flag)]
    model += more
    if device != "cpu":
        model += ["--no-bf16"] if half >= 0.3 else []
        model += [f"--device {device} --no-compile"]
    return ranks, " ".join(filter(None, model)), " ".join(filter(None, layout))


class Pair(NamedTuple):
    """A draw's flags, and the folders of its runs on ranks and on one process."""

    model: str
    layout: str
    spread: Path
    alone: Path

    @property
    def device(self) -> list[str]:
        """The flag, for a line that does not repeat the model's: a run is loaded on any device."""
        return ["--device", "cuda" if "--device cuda" in self.model else "cpu"]

    def further(self) -> Pair:
        """Where the two go on from each other's checkpoint."""
        spread, alone = (run.with_name(f"{run.name}-on") for run in (self.spread, self.alone))
        return self._replace(spread=spread, alone=alone)


def sweep(draws: list[tuple[int, str, str]], folder: Path, *, go_on: bool, compiled: bool) -> bool:
    """Train all, print a line for each; whether all are equal."""
    eager = "--no-compile" if compiled else None  # what the ranks leave out
    begins = write_data(folder)
    equal = True
    for ranks in sorted({ranks for ranks, *_ in draws}):
        pairs = [
            Pair(m, layout, folder / f"{ranks}-{i}", folder / f"{ranks}-{i}-alone")
            for i, (r, m, layout) in enumerate(draws)
            if r == ranks
        ]
        begin = [[*begins(pair.model), *pair.model.split()] for pair in pairs]
        spread = [
            [*(word for word in line if word != eager), *pair.layout.split(),
             "--save", str(pair.spread)]
            for line, pair in zip(begin, pairs, strict=True)
        ]  # fmt: skip
        said = on_ranks(ranks, spread)
        for pair, line, error in zip(pairs, begin, said, strict=True):
            if not error:
                in_one([*line, "--save", str(pair.alone)])
            equal &= told(ranks, pair, error)
        pairs = [pair for pair, error in zip(pairs, said, strict=True) if not error and go_on]
        spread = [
            ["--load", str(pair.alone), "--save", str(pair.further().spread), "--train-iters", "5",
             *pair.device, *pair.layout.split()]
            for pair in pairs
        ]  # fmt: skip
        for pair, error in zip(pairs, on_ranks(ranks, spread) if pairs else [], strict=True):
            more = ["--load", str(pair.spread), "--save", str(pair.further().alone)]
            batch = re.findall(r"--micro-batch-size \S+", pair.model)[0].split()
            in_one([*more, "--train-iters", "5", *pair.device, *ONE_PROCESS.split(), *batch])
            equal &= told(ranks, pair.further(), error)
    return equal


def resume(draws: list[tuple[int, str, str]], folder: Path) -> bool:
    """Train all at once and with a stop, print a line for each; whether all are equal."""
    begins = write_data(folder)
    drawn = ["--train-iters", "5", "--attention-dropout", "0.1", "--hidden-dropout", "0.1"]
    equal = True
    for ranks in sorted({ranks for ranks, *_ in draws}):
        pairs, lines = [], []
        for i, (r, model, layout) in enumerate(draws):
            if r != ranks:
                continue
            # A budget begins anew after a stop, and a CPU's last bits depend on the room.
            layout = layout.replace("--moe-row-policy budget", "--moe-row-policy exact")
            pair = Pair(model, layout, folder / f"{ranks}-{i}-parts", folder / f"{ranks}-{i}")
            begin = [*begins(model), *model.split(), *layout.split(), *drawn]
            if "moe-num-experts" in model:
                begin += ["--moe-jitter-eps", "0.1"]
                begin += ["--moe-router-noise"] if "router-type" not in model else []
            pairs.append(pair)
            lines += [
                [*begin, "--save", str(pair.alone)],
                [*begin, "--save", str(pair.spread), "--exit-interval", "3"],
                ["--load", str(pair.spread)],
            ]
        said = on_ranks(ranks, lines)
        for i, pair in enumerate(pairs):
            error = next((text for text in said[3 * i : 3 * i + 3] if text), "")
            found = [] if error else differing(pair)
            defect = bool(found) or "Traceback" in error or bool(error and not said[3 * i])
            verdict = "DEFECT " if defect else "refused" if error else "ok     "
            print(
                verdict, f"{ranks}: {pair.model} | {pair.layout}\n   ", error or found, flush=True
            )
            equal &= not defect
    return equal


def differing(pair: Pair) -> list[str]:
    """What of two runs is not equal to the bit."""
    found = ["losses"] if tiny_run.losses(pair.spread) != tiny_run.losses(pair.alone) else []
    parts, whole = (_weights(run, 5) for run in (pair.spread, pair.alone))
    return found + [name for name in whole if not torch.equal(parts[name], whole[name])][:3]


def on_ranks(ranks: int, lines: list[list[str]]) -> list[str]:
    """What a rank said of each line that failed, "" of the others."""
    device = "cuda" if any("cuda" in line for line in lines) else "cpu"
    firsts = range(0, len(lines), RUNS_OF_A_START)
    parts = [lines[first : first + RUNS_OF_A_START] for first in firsts]
    return [said for part in parts for said in _on_ranks(ranks, part, device)]


def _on_ranks(ranks: int, lines: list[list[str]], device: str) -> list[str]:
    try:
        return _started(ranks, lines, device)
    except RuntimeError as error:  # a line that ends the ranks: each by itself, to see which
        ended = str(error)
    said, found = [], False
    for line in lines:
        try:
            said += _started(ranks, [line], device)
        except RuntimeError as error:
            said, found = [*said, str(error)], True
    return said if found else [ended] * len(lines)  # which a run does in others' company alone


def _started(ranks: int, lines: list[list[str]], device: str) -> list[str]:
    by_rank = run_ranks(exactly, ranks, lines, timeout_s=1800.0, device_type=device)
    return [next((error for error in errors if error), "") for errors in zip(*by_rank, strict=True)]


def in_one(line: list[str]) -> None:
    (error,) = exactly(0, 1, [line])
    assert not error, error


def exactly(rank: int, world_size: int, lines: list[list[str]]) -> list[str]:
    """`_train` with Muon's iterations in fp32: in bf16 they are 1e-2 apart for another rounding."""
    said = []
    with mock.patch.dict(Muon.__init__.__kwdefaults__, ns_dtype=torch.float32):
        for line in lines:
            torch._dynamo.reset()  # which compiles a function a few times, and no run's after that
            said += _train(rank, world_size, [line])
    return said


def told(ranks: int, pair: Pair, error: str) -> bool:
    """Print how a draw did; whether it is without fault."""
    what = f"{ranks}: {pair.model} | {pair.layout}\n   "
    if error:
        defect = "Traceback" in error or pair.spread.name.endswith("-on")
        print("DEFECT" if defect else "refused", what, error, flush=True)
        return not defect
    if "cuda" in pair.model:
        worst = _deviations(pair.spread, pair.alone, without=("reported",))
    elif "--model ict" in pair.model:
        worst = _ict_deviations(pair.spread, pair.alone)
    else:
        scaled = "adafactor" in pair.model
        biases = r"attention\.norm_k\.bias"
        biases += r"|\.head\.bias" if "--task race" in pair.model else ""
        biases += r"|^model.*(attention|cross)\.(qkv|kv)\.bias" if scaled else ""
        worst = _deviations(pair.spread, pair.alone, biases)
    # Rounding decides who is chosen of two experts that score alike, and which code of 8 bits a
    # number between two gets.
    if any(flag in pair.model for flag in ("--fp16", "--bf16", "--fp8-format", "cuda")):
        worst = {name: worst[name] for name in ("loss", "grad norm", "validation")}
    # Adafactor and Muon make whole steps of what is rounding alone, as of biases that no score of
    # an ICT or of a choice among answers depends on.
    whole = re.search("adafactor|muon", pair.model)
    if whole and re.search("--model ict|adafactor.*(--fp8-format|--task race)", pair.model):
        worst = {name: worst[name] for name in ("loss", "validation")}
    limits = KINDS | {f"--optimizer {name} ": limit for name, limit in OPTIMIZERS.items()}
    limit = max(limit for flag, limit in limits.items() if flag in pair.model)
    if "cuda" in pair.model:
        limit = max(limit, GPU_LIMIT)
    if "--model ict" in pair.model and whole:
        limit = 1e-2  # of steps of weights that nothing depends on
    fine = max(worst.values()) < limit
    figures = "  ".join(f"{name} {value:.0e}" for name, value in worst.items())
    print("ok     " if fine else "DIFFERS", what, figures, flush=True)
    return fine


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Random layouts against one process.")
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--go-on", action="store_true", help="from each other's checkpoints, too")
    parser.add_argument("--resume", action="store_true", help="a stop changes nothing, to the bit")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of all runs")
    parser.add_argument("--compiled", action="store_true", help="the ranks compile, on GPUs")
    arguments = parser.parse_args()
    drawn = [
        draw(random.Random(f"{arguments.seed} {n}"), arguments.device)
        for n in range(arguments.draws)
    ]
    with tempfile.TemporaryDirectory() as made:
        if arguments.resume:
            raise SystemExit(not resume(drawn, Path(made)))
        raise SystemExit(
            not sweep(drawn, Path(made), go_on=arguments.go_on, compiled=arguments.compiled)
        )
