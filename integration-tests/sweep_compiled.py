"""Compiled blocks against eager ones, in layouts and models drawn at random: a tool, not a test.

    python integration-tests/sweep_compiled.py --rounds 2 --seed 1 --backend aot_eager

The command line compiles on a GPU alone; here blocks are compiled on the CPU at the same place,
between recompute and the sharding of data parallelism. Every round draws for each layout a model
(dense, experts of every kind, padding), recompute, numbers and sizes of micro-batches, fp32 or
bf16. Both ways take two steps in the same processes; every rank compares its losses and its shard
of every gradient, before the optimizer has them. What `assemble` refuses is said with its message,
and with `--anyway` compiled all the same; a rank that raises or hangs is a defect, and the sweep
goes on after it.

In bf16 Inductor rounds otherwise, and a token whose experts score alike may change its mind: an
expert's gradient is then a tenth off. Such a case is to be tried with `aot_eager`, which rounds as
eager does, and with Inductor in fp32. Compiling takes minutes where four ranks share two cores.

Cases of as many ranks share their processes, between which the compiler is reset: what differs is
to be tried again by itself, with all its names in `--only`.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import random
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import tiny_run
import torch
from drawn_models import LATENTS, MAMBA, STATES
from mb_parallel.testing import run_ranks
from test_sentence_models import SAME as SENTENCES
from test_sentence_models import _write_data
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

HANG_S = 600
SAME = (
    "--num-layers 2 --train-iters 2 --log-interval 1 --eval-interval 100 --eval-iters 1 "
    "--lr-warmup-iters 0 --lr-decay-iters 2 --hidden-dropout 0 --attention-dropout 0 "
    "--make-vocab-size-divisible-by 128 --adam-eps 1e-3"
)
TP, PP, EP = (f"--{name}-model-parallel-size" for name in ("tensor", "pipeline", "expert"))
CP = "--context-parallel-size"
GATHER, A2A = "--moe-dispatcher all_gather", "--moe-dispatcher all_to_all"
CHUNKS = "--moe-a2a-overlap-degree 2"
INTERLEAVED = "--num-layers 4 --num-layers-per-virtual-pipeline-stage 1 --pipeline-schedule"
# Name: ranks, data-parallel ranks, flags.
LAYOUTS: dict[str, tuple[int, int, str]] = {
    "tp2": (2, 1, f"{TP} 2"),
    "tp2 sp": (2, 1, f"{TP} 2 --sequence-parallel"),
    "tp2 ep2": (2, 1, f"{TP} 2 {EP} 2"),
    "tp2 sp ep2": (2, 1, f"{TP} 2 {EP} 2 --sequence-parallel {A2A}"),
    "cp2": (2, 1, f"{CP} 2"),
    "cp2 ep2": (2, 1, f"{CP} 2 {EP} 2 {A2A} --zero-stage 3"),
    "cp2 tp2 sp": (4, 1, f"{CP} 2 {TP} 2 --sequence-parallel --num-attention-heads 4"),
    "pp2": (2, 1, f"{PP} 2"),
    "pp2 gpipe": (2, 1, f"{PP} 2 --pipeline-schedule gpipe"),
    "pp2 interleaved": (2, 1, f"{PP} 2 {INTERLEAVED} interleaved-1f1b"),
    "pp2 zero-bubble": (2, 1, f"{PP} 2 {INTERLEAVED} interleaved-zero-bubble"),
    "pp2 zbv": (2, 1, f"{PP} 2 {INTERLEAVED} zbv-zero-bubble"),
    "ep2 gather": (2, 2, f"{EP} 2 {GATHER}"),
    "ep2 exact": (2, 2, f"{EP} 2 {GATHER} --moe-row-policy exact"),
    "ep2 budget": (2, 2, f"{EP} 2 {GATHER} --moe-row-policy budget --moe-row-budget 1.05"),
    "ep2 exchange": (2, 2, f"{EP} 2 {A2A}"),
    "ep2 chunks": (2, 2, f"{EP} 2 {A2A} {CHUNKS}"),
    "dp2 zero1": (2, 2, ""),
    "dp2 zero2": (2, 2, "--zero-stage 2"),
    "dp2 zero3": (2, 2, "--zero-stage 3"),
    "dp2 zero3 ep2": (2, 2, f"--zero-stage 3 {EP} 2 {A2A} {CHUNKS}"),
    "hybrid": (4, 4, f"--data-parallel-replicas 2 {EP} 2"),
    "hybrid zero3": (4, 4, "--data-parallel-replicas 2 --zero-stage 3"),
    "dp2 tp2 ep2": (4, 2, f"{TP} 2 {EP} 2 --sequence-parallel --zero-stage 3"),
    "tp2 pp2": (4, 1, f"{TP} 2 {PP} 2 --sequence-parallel"),
    "pp2 ep2": (4, 2, f"{PP} 2 {EP} 2 {A2A}"),
    "pp2 ep2 interleaved": (4, 2, f"{PP} 2 {EP} 2 {GATHER} {INTERLEAVED} interleaved-1f1b"),
}
DROPLESS = "--moe-num-experts 4 --moe-loss-weight 0.05 --activation swiglu --moe-top-k"
MODELS = {
    "dense": "",
    "dense gqa": "--num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--position-embedding-type rope --swiglu --normalization RMSNorm",
    "k1": f"{DROPLESS} 1 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--position-embedding-type rope",
    "k2": f"{DROPLESS} 2 --moe-mlp-bias --moe-output-bias",
    "capacity": f"{DROPLESS} 2 --moe-capacity-factor 1.0",
    "shared": f"{DROPLESS} 2 --moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate",
    "sigmoid": f"{DROPLESS} 2 --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
    "z-loss": f"{DROPLESS} 2 --moe-z-loss-weight 0.01 --moe-renormalize --moe-layer-freq 2",
    "per sequence": f"{DROPLESS} 2 --moe-balance-over sequence",
    "documents": f"{DROPLESS} 1 --reset-attention-mask --reset-position-ids",
    "one key": f"{DROPLESS} 2 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 1 --qk-layernorm --attention-output-gate",
    "sinks": f"{DROPLESS} 2 --softmax-type learnable --window-size 4 --window-attn-skip-freq 2 "
    "--add-qkv-bias",
    "latents": f"{DROPLESS} 2 {LATENTS} --q-lora-rank 10 --qk-layernorm",
    "states": f"{DROPLESS} 2 {STATES} --linear-attention-freq 2",
    "modules": f"{DROPLESS} 2 --mtp-num-layers 2 --norm-placement both",
    "layers of kinds": f"{DROPLESS} 2 --num-layers 4 --hybrid-layer-pattern MES*/E* {MAMBA}",
    "kinds in documents": f"{DROPLESS} 2 --num-layers 4 --hybrid-layer-pattern MEM* {MAMBA} "
    "--reset-attention-mask --reset-position-ids",
    "bert": f"--model bert {DROPLESS} 2",
    "bert dense": "--model bert",
    "t5": f"--model t5 --decoder-seq-length 12 --vocab-extra-ids 8 {DROPLESS} 2",
}
RECOMPUTE = {
    "none": "",
    "full": "--recompute-granularity full",
    "block": "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
    "moe": "--moe-recompute",
    "selective": "--recompute-granularity selective",
}
# Micro-batches of a step, and whether the last has half the sequences.
ACCUMULATE = {"1": (1, False), "3": (3, False), "3 cut": (3, True)}
DTYPES = {"fp32": "--no-bf16", "bf16": "--bf16"}
AXES = (MODELS, RECOMPUTE, ACCUMULATE, DTYPES)
Case = tuple[str, str, str, str, str]


def draw(rng: random.Random, layout: str, only: str) -> Case | None:
    """A case of `layout` whose names, joined by " / ", contain `only`'s words, if one is found."""
    for _ in range(1000):
        case: Any = (layout, *(rng.choice(list(axis)) for axis in AXES))
        _, model, recompute, accumulate, _ = case
        experts = "moe" in MODELS[model]
        possible = experts or ("ep2" not in layout and layout != "hybrid" and recompute != "moe")
        possible &= model != "z-loss" or "pp2" not in layout
        # A pipeline's micro-batches are of one size.
        possible &= accumulate != "3 cut" or "pp2" not in layout
        if possible and all(word in " / ".join(case) for word in only.split(",")):
            return case
    return None


def flags(case: Case, gpt: list[str], sentences: list[str]) -> list[str]:
    """The command line of a case."""
    layout, model, recompute, accumulate, dtype = case
    dp, count = LAYOUTS[layout][1], ACCUMULATE[accumulate][0]
    line = sentences if "--model" in MODELS[model] else gpt
    sizes = f"--micro-batch-size 2 --global-batch-size {2 * dp * count}"
    more = [SAME, MODELS[model], LAYOUTS[layout][2], RECOMPUTE[recompute], DTYPES[dtype], sizes]
    return [*line, *" ".join(more).split()]


def steps(
    line: list[str], backend: str | None, *, cut: bool, anyway: bool = False
) -> tuple[str, list[tuple[str, Tensor]], int]:
    """Train: what it said when it failed, the names and values of two steps, graphs compiled."""
    from mb_train.assembly import assemble, execute
    from mb_train.train import loop, step

    seen: list[tuple[str, Tensor]] = []
    recompute, sequential = assemble._recompute, execute.Sequential.step
    train_step, clip_and_step = loop.train_step, step.clip_and_step

    def compiled(blocks, config):
        recompute(blocks, config)
        if backend is not None:
            if not anyway:
                assemble.compile_blocks(blocks, config, tp_size=config.tensor_model_parallel_size)
            for block in blocks:
                block.compile()

    def compile_module(module, **_):
        assert backend is not None
        module._compiled_call_impl = torch.compile(module._call_impl, backend=backend)

    def a_step(run, *rest):
        def clip(*args, **kwargs):
            for part in run.model.parts:
                for name, p in part.named_parameters():
                    grad = p.grad
                    if grad is not None:
                        grad = grad.to_local() if isinstance(grad, DTensor) else grad
                        seen.append((name, grad.detach().float().clone()))
            return clip_and_step(*args, **kwargs)

        with mock.patch.object(step, "clip_and_step", clip):
            done = train_step(run, *rest)
        seen.extend((name, value.float().clone()) for name, value in run.last_losses.items())
        return done

    def one_after_the_other(self, work):
        if cut:
            last = {name: value[:1] for name, value in work.batches[-1].items()}
            work = work._replace(batches=[*work.batches[:-1], last])
        return sequential(self, work)

    out, err = io.StringIO(), io.StringIO()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with (
        mock.patch.object(assemble, "_recompute", compiled),
        mock.patch.object(nn.Module, "compile", compile_module),
        mock.patch.object(execute.Sequential, "step", one_after_the_other),
        mock.patch.object(loop, "train_step", a_step),
        torch._dynamo.config.patch(recompile_limit=64),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        warnings.simplefilter("ignore")
        code = tiny_run.train(line)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return (err.getvalue() or out.getvalue()[-2000:]) if code else "", seen, graphs


def compare(rank, world_size, cases, lines, backend, anyway, progress):
    """Every case eager and compiled; rank 0 says how it did, others where they differ."""
    for number, (case, line) in enumerate(zip(cases, lines, strict=True)):
        if rank == 0:
            Path(progress).write_text(str(number))
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        began, cut = time.monotonic(), ACCUMULATE[case[3]][1]
        said, eager, _ = steps(line, None, cut=cut)
        graphs, found = 0, []
        if not said:
            said, got, graphs = steps(line, backend, cut=cut, anyway=anyway)
        if not said:
            found = deviations(eager, got)
        faulthandler.cancel_dump_traceback_later()
        worst = max((error for error, _ in found), default=0.0)
        limit = 1e-5 if case[4] == "fp32" else 3e-2
        verdict = (
            "refused"
            if "Expected" in said
            else "DIFFERS"
            if said
            else "ok"
            if worst < limit and graphs
            else "DIFFERS"
        )
        if rank == 0 or verdict == "DIFFERS":
            name = max(found, default=(0.0, ""))[1]
            seconds = time.monotonic() - began
            print(f"{verdict:8}{' / '.join(case)}: rank {rank} {worst:.0e} {name} of {len(found)}, "
                  f"{graphs} graphs, {seconds:.0f} s {said.strip()}", flush=True)  # fmt: skip


def deviations(eager, got) -> list[tuple[float, str]]:
    """Relative errors; of what is next to nothing, relative to the largest gradient."""
    if [name for name, _ in eager] != [name for name, _ in got]:
        apart = sorted({name for name, _ in eager} ^ {name for name, _ in got})
        return [(float("inf"), f"{len(eager)} and {len(got)} values: {apart}")]
    floor = 1e-4 * max((float(value.norm()) for _, value in eager), default=0.0) + 1e-30
    return [
        (float((b - a).norm()) / max(float(a.norm()), floor), name)
        for (name, a), (_, b) in zip(eager, got, strict=True)
    ]


def main(arguments: argparse.Namespace) -> None:
    rng = random.Random(arguments.seed)
    layouts = rng.sample(list(LAYOUTS), len(LAYOUTS))
    drawn = [
        draw(rng, layout, arguments.only) for _ in range(arguments.rounds) for layout in layouts
    ]
    cases = [case for case in dict.fromkeys(drawn) if case]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        gpt = tiny_run.flags(tiny_run.write_tokens(folder), moe=False)
        sentences = [*SENTENCES.split(), *_write_data(folder)]
        for ranks in (2, 4):
            left = [case for case in cases if LAYOUTS[case[0]][0] == ranks]
            while left:
                lines = [flags(case, gpt, sentences) for case in left]
                progress = folder / "progress"
                progress.write_text("0")
                try:
                    run_ranks(compare, ranks, left, lines, arguments.backend, arguments.anyway,
                              str(progress), timeout_s=3600.0)  # fmt: skip
                    break
                except RuntimeError as error:
                    number = int(progress.read_text())
                    print("DEFECT ", " / ".join(left[number]), "\n", str(error)[-6000:], flush=True)
                    left = left[number + 1 :]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compiled blocks against eager ones.")
    parser.add_argument("--rounds", type=int, default=1, help="draws of each layout")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--only", default="", help="words, with commas between, of a case's names")
    parser.add_argument("--anyway", action="store_true", help="compile what assemble refuses, too")
    main(parser.parse_args())
