"""Every layout takes the steps of one process: losses, norms, every gradient, weights, moments.

And it reports what one process does: every number of the log that does not tell of time.

    python integration-tests/test_parallel.py      # prints the matrix with the largest deviations

fp32 on gloo, three steps with accumulation, the same global batch as that process has. Ranks that
are started train a few layouts, one after the other.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import re
import sys
import tempfile
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import mb_parallel
import mb_train.train.loop
import mb_train.train.step
import pytest
import tiny_run
import torch
import torch.distributed.checkpoint as dcp
from mb_parallel.testing import run_ranks
from mb_train.checkpoint.metadata import SafeReader
from mb_train.train.run import Run
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

# Micro-batches of one sequence everywhere: the balance of load is a matter of the micro-batch.
SAME = (
    "--micro-batch-size 1 --train-iters 3 --log-interval 1 "
    "--eval-interval 3 --eval-iters 1 --attention-dropout 0 --hidden-dropout 0 "
    "--make-vocab-size-divisible-by 128 --adam-eps 1e-3 --log-params-norm"
)
# What an MoE layer has besides its experts, so that every layout has to spread it right.
BESIDES = (
    "--moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate --moe-output-bias "
    "--moe-z-loss-weight 0.01"
)
TP, PP, EP = (f"--{name}-model-parallel-size" for name in ("tensor", "pipeline", "expert"))
CP = "--context-parallel-size"
SP, A2A, GATHER = (
    "--sequence-parallel",
    "--moe-dispatcher all_to_all",
    "--moe-dispatcher all_gather",
)
PLACES = "--moe-rebalance-interval 1"
BUDGET = "--moe-row-policy budget --moe-row-budget 1.05"
FOUR = "--num-layers 4"  # for four stages; the others make do with two
FIVE = "--num-layers 5"  # of which one has two
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"  # masks are the sample's, not the rank's
LATENT = (
    "--multi-latent-attention --position-embedding-type rope --q-lora-rank 12 --kv-lora-rank 10 "
    "--qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6 --qk-layernorm "
    "--rotary-scaling-factor 4 --original-max-position-embeddings 8 --mscale-all-dim 1 "
    "--norm-placement both"
)
HEADS = "--num-attention-heads 4"  # for four ranks that share them
GROUPS = "--group-query-attention --num-query-groups 2 --position-embedding-type rope"
# Walks have no ends: they begin anew behind one of their tokens, which tells nothing of the next.
DOCUMENTS = "--tokenizer null:29 --reset-attention-mask --reset-position-ids --eod-mask-loss"
DROPPED = "--moe-capacity-factor 1 --moe-drop-policy probability"
FIRST_KEPT = "--moe-capacity-factor 0.8"
OVER_BATCH = "--moe-balance-over global_batch"
OUTPUTS = "--norm-placement output"
IN_SEQUENCES = "--moe-balance-over sequence --moe-balance-by scores --micro-batch-size 2"
SINKS = (
    "--window-size 3,0 --window-attn-skip-freq 2 --softmax-type learnable --activation swigluoai "
    f"--moe-mlp-bias --moe-router-bias {HEADS} {GROUPS}"
)
UNTIED = "--untie-embeddings-and-output-weights"
# Layer 0 has a window and positions, layer 1 neither; of three, layer 2 has both again.
GATES = (
    "--attention-output-gate --window-size 3 --window-attn-skip-freq 2 --no-rope-freq 2 "
    f"--normalization RMSNorm --qk-layernorm --norm-placement both {HEADS} {GROUPS}"
)
# The key and the value of each group of queries are several tensor-parallel ranks'.
ONE_KEY = f"{GATES} --softmax-type learnable --num-query-groups 1"
# Of four layers the first and the last are dense, and every third has no positions.
LISTS = (
    "--num-layers 4 --moe-layers 0 1 1 0 --no-rope-freq 3 --qk-l2-norm --clip-qkv 0.03 "
    "--normalization LayerNorm-without-bias --head-bias --moe-weights-on-input "
    f"--moe-router-score-function sigmoid {HEADS} {GROUPS} {UNTIED}"
)
# Layer 0 has a state, layer 1 attends; of three, layer 2 has a state again.
STATES = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
    "--linear-num-key-heads 4 --linear-num-value-heads 8 --linear-key-head-dim 6 "
    "--linear-value-head-dim 5 --attention-output-gate --normalization RMSNorm --qk-layernorm "
    f"{HEADS} {GROUPS}"
)
# Mamba-2, experts, attention, a dense feed-forward: halves of blocks, and one stage's as another's;
# behind them a module for further tokens.
MAMBA = (
    "--num-layers 4 --hybrid-layer-pattern ME*-/ME --mamba-num-heads 4 --mamba-head-dim 6 "
    "--mamba-num-groups 2 --mamba-state-dim 5 --position-embedding-type none --normalization "
    f"RMSNorm --moe-latent-size 12 {HEADS}"
)
ONE_GROUP = f"{MAMBA} --mamba-num-groups 1"
# Of four times the base's width; the modules for further tokens have the same numbers.
WIDTH = (
    "--use-mup --mup-base-hidden-size 8 --embedding-multiplier 4 --residual-multiplier 0.5 "
    f"--moe-router-lr-mult 0.5 --mtp-num-layers 1 --norm-placement both {UNTIED}"
)
ROWS = "--make-vocab-size-divisible-by 64"  # of a vocabulary of two ranks, as many as of one
# Without sequence and context parallelism, where a rank balances its own part of a sequence.
# Of the seed 1234 its load is so even that no expert changes places.
SINKHORN = (
    "--moe-router-type sinkhorn --moe-router-score-function sigmoid --micro-batch-size 2 --seed 1"
)
NOISE = "--moe-router-noise"  # a sample's, on whichever rank
# Evaluated in between without them.
FURTHER = f"--mtp-num-layers 2 --mtp-loss-scaling-factor 0.3 --eval-interval 2 {UNTIED}"
# What a layout's run of one process needs too.
ALONE = {
    "deep": FOUR, "deeper": FIVE, "dropout": DROPOUT, "latent": LATENT, "heads": HEADS,
    "groups": GROUPS, "documents": DOCUMENTS, "dropped": DROPPED, "kept": FIRST_KEPT,
    "batch": OVER_BATCH, "sequences": IN_SEQUENCES, "sinks": SINKS, "outputs": OUTPUTS,
    "further": FURTHER, "sinkhorn": SINKHORN, "gates": GATES, "key": ONE_KEY, "states": STATES,
    "mamba": MAMBA, "group": ONE_GROUP, "width": WIDTH, "lists": LISTS, "noise": NOISE,
}  # fmt: skip
# Name: ranks, flags, whether with experts.
LAYOUTS: dict[str, tuple[int, str, bool]] = {
    "dp2 zero0": (2, "--zero-stage 0", True),
    "dp2 zero1": (2, "", True),
    "dp2 zero2": (2, "--zero-stage 2", True),
    "dp2 zero3": (2, "--zero-stage 3", True),
    "dp2 dense": (2, "", False),
    "dp2 dropout": (2, DROPOUT, False),
    "tp2 dense": (2, f"{TP} 2", False),
    "tp2 sp dense": (2, f"{TP} 2 {SP}", False),
    "tp2": (2, f"{TP} 2", True),
    "tp2 noise": (2, f"{TP} 2 {NOISE}", True),
    "tp2 sp": (2, f"{TP} 2 {SP}", True),
    "tp2 sp, balance in sequences": (2, f"{TP} 2 {SP} {IN_SEQUENCES}", True),
    "latent tp2 sp": (2, f"{TP} 2 {SP} {LATENT}", True),
    "sinks tp2 sp": (2, f"{TP} 2 {SP} {SINKS} {DOCUMENTS} {ROWS}", True),
    "sinks zero3, recompute": (
        2,
        f"--zero-stage 3 --recompute-granularity selective {SINKS}",
        True,
    ),
    "gates tp2 sp": (2, f"{TP} 2 {SP} {GATES} {DOCUMENTS} {ROWS}", True),
    "key tp2 sp": (2, f"{TP} 2 {SP} {ONE_KEY} {DOCUMENTS} {ROWS}", True),
    "gates pp2": (2, f"{PP} 2 {GATES}", True),
    "gates cp2 zero3, recompute": (
        2,
        f"{CP} 2 --zero-stage 3 --recompute-granularity full {GATES} {DOCUMENTS}",
        True,
    ),
    "lists pp2": (2, f"{PP} 2 {LISTS} {DOCUMENTS}", True),
    "states tp2": (2, f"{TP} 2 {STATES} {DOCUMENTS} {ROWS}", True),
    "states tp2 sp": (2, f"{TP} 2 {SP} {STATES}", True),
    "states pp2": (2, f"{PP} 2 {STATES} {DOCUMENTS}", True),
    "states zero3, recompute": (
        2,
        f"--zero-stage 3 --recompute-granularity selective {STATES} {DOCUMENTS}",
        True,
    ),
    "states cp2, documents": (2, f"{CP} 2 {STATES} {DOCUMENTS}", True),
    "states cp2 zero3, selective": (
        2,
        f"{CP} 2 --zero-stage 3 --recompute-granularity selective {STATES}",
        True,
    ),
    "states zero0": (2, f"--zero-stage 0 --recompute-granularity full {STATES}", False),
    "mamba tp2": (2, f"{TP} 2 {MAMBA} {DOCUMENTS} {ROWS}", True),
    "group tp2 sp": (2, f"{TP} 2 {SP} {ONE_GROUP}", True),
    "mamba pp2": (2, f"{PP} 2 {MAMBA} {DOCUMENTS}", True),
    "group cp2 zero3, recompute": (
        2,
        f"{CP} 2 --zero-stage 3 --recompute-granularity selective {ONE_GROUP} {DOCUMENTS}",
        True,
    ),
    "width tp2 sp": (2, f"{TP} 2 {SP} {WIDTH} {ROWS}", True),
    "width pp2": (2, f"{PP} 2 {WIDTH}", True),
    "width ep2, zero3": (2, f"{EP} 2 {A2A} --zero-stage 3 {WIDTH}", True),
    "pp2 dense": (2, f"{PP} 2", False),
    "pp2": (2, f"{PP} 2", True),
    "pp2 gpipe": (2, f"{PP} 2 --pipeline-schedule gpipe", True),
    "pp2 interleaved": (2, f"{PP} 2 {FOUR} --num-layers-per-virtual-pipeline-stage 1", True),
    "pp2 interleaved, unequal chunks": (
        2,
        f"{PP} 2 {FIVE} --num-layers-per-virtual-pipeline-stage 2",
        True,
    ),
    "ep2 exchange": (2, f"{EP} 2 {A2A}", True),
    "ep2, places changed": (2, f"{EP} 2 {A2A} {PLACES}", True),
    "ep2 gather, steps redone": (2, f"{EP} 2 {GATHER} {BUDGET}", True),
    "ep2 capacity, none dropped": (2, f"{EP} 2 --moe-capacity-factor 4", True),
    "ep2 fixed, none dropped": (2, f"{EP} 2 --moe-dispatcher fixed --moe-capacity-factor 4", True),
    "recompute full, chunks": (
        2,
        f"{EP} 2 {A2A} --moe-a2a-overlap-degree 3 --recompute-granularity full",
        True,
    ),
    "recompute selective": (2, "--recompute-granularity selective", True),
    "cp2": (2, f"{CP} 2", True),
    "cp2 dense, selective": (2, f"{CP} 2 --recompute-granularity selective", False),
    "cp2 zero0, documents": (2, f"{CP} 2 --zero-stage 0 {DOCUMENTS}", True),
    "cp2 zero3, recompute full": (2, f"{CP} 2 --zero-stage 3 --recompute-granularity full", True),
    "cp2 over replicas": (2, f"{CP} 2 --data-parallel-replicas 2", True),
    "cp2, first slots kept": (2, f"{CP} 2 {FIRST_KEPT}", True),
    "cp2 ep2, slots dropped": (2, f"{CP} 2 {EP} 2 {DROPPED}", True),
    "cp2 ep2, places changed": (2, f"{CP} 2 {EP} 2 {A2A} {PLACES}", True),
    "cp2, balance over the batch": (2, f"{CP} 2 {OVER_BATCH}", True),
    "cp2 latent": (2, f"{CP} 2 {LATENT}", True),
    "sinks cp2, documents": (2, f"{CP} 2 {SINKS} {DOCUMENTS}", True),
    "further zero3, recompute": (
        2,
        f"--zero-stage 3 --recompute-granularity full {FURTHER} {DOCUMENTS}",
        True,
    ),
    "further pp2": (2, f"{PP} 2 {FURTHER}", True),
    "further pp2 zero-bubble": (
        2,
        f"{PP} 2 {FOUR} {FURTHER} --num-layers-per-virtual-pipeline-stage 1 "
        "--pipeline-schedule zbv-zero-bubble",
        True,
    ),
    "sinkhorn tp2": (2, f"{TP} 2 {SINKHORN}", True),
    "sinkhorn ep2 gather, recompute full": (
        2,
        f"{EP} 2 {GATHER} --recompute-granularity full {SINKHORN}",
        True,
    ),
    "sinkhorn ep2 exchange, places changed": (2, f"{EP} 2 {A2A} {PLACES} {SINKHORN}", True),
    "sinkhorn ep2 fixed, selective": (
        2,
        f"{EP} 2 --moe-dispatcher fixed --moe-capacity-factor 4 --recompute-granularity selective "
        f"{SINKHORN}",
        True,
    ),
    "dp4": (4, "", True),
    "hybrid 2 x 2, recompute moe": (4, f"--data-parallel-replicas 2 {EP} 2 --moe-recompute", True),
    "ep4": (4, f"{EP} 4", True),
    "dp4 ep2 zero0": (4, f"{EP} 2 --zero-stage 0 {A2A}", True),
    "dp2 ep2 zero3, chunks": (4, f"{EP} 2 --zero-stage 3 {A2A} --moe-a2a-overlap-degree 2", True),
    "latent tp2 sp zero3, recompute": (
        4,
        f"{TP} 2 {SP} --zero-stage 3 --recompute-granularity selective {LATENT}",
        True,
    ),
    "outputs tp2 pp2 sp dense": (4, f"{TP} 2 {PP} 2 {SP} {OUTPUTS}", False),
    "latent tp2 pp2": (4, f"{TP} 2 {PP} 2 {LATENT}", True),
    "sinks cp2 tp2 sp": (4, f"{CP} 2 {TP} 2 {SP} {SINKS}", True),
    "sinks tp2 pp2 ep2": (4, f"{TP} 2 {PP} 2 {EP} 2 {SINKS} {DOCUMENTS} {ROWS}", True),
    "key cp2 tp2": (4, f"{CP} 2 {TP} 2 {ONE_KEY}", True),
    "gates cp2 tp2 sp": (4, f"{CP} 2 {TP} 2 {SP} {GATES}", True),
    "gates tp2 pp2 further": (4, f"{TP} 2 {PP} 2 {GATES} {FURTHER}", True),
    "states tp2 pp2 further": (4, f"{TP} 2 {PP} 2 {SP} {STATES} {FURTHER}", True),
    "states tp2 ep2 zero3": (4, f"{TP} 2 {EP} 2 --zero-stage 3 {STATES} {DOCUMENTS} {ROWS}", True),
    "states cp4 ep2, documents": (4, f"{CP} 4 {EP} 2 {STATES} {DOCUMENTS}", True),
    "states cp2 tp2 sp, documents": (4, f"{CP} 2 {TP} 2 {SP} {STATES} {DOCUMENTS} {ROWS}", True),
    "states cp2 pp2 further": (4, f"{CP} 2 {PP} 2 {STATES} {FURTHER}", True),
    "mamba cp4 ep2, documents": (4, f"{CP} 4 {EP} 2 {MAMBA} {DOCUMENTS}", True),
    "group cp2 tp2 sp, documents": (4, f"{CP} 2 {TP} 2 {SP} {ONE_GROUP} {DOCUMENTS} {ROWS}", True),
    "lists tp2 sp ep2 zero3": (4, f"{TP} 2 {SP} {EP} 2 --zero-stage 3 {LISTS} {ROWS}", True),
    "mamba tp2 pp2 ep2": (4, f"{TP} 2 {PP} 2 {EP} 2 {MAMBA}", True),
    "pp4": (4, f"{PP} 4 {FOUR}", True),
    "sinkhorn ep4 zero3": (4, f"{EP} 4 --zero-stage 3 {SINKHORN}", True),
    "sinkhorn tp2 pp2 ep2": (4, f"{TP} 2 {PP} 2 {EP} 2 {SINKHORN}", True),
    "tp2 pp2 ep2": (4, f"{TP} 2 {PP} 2 {EP} 2 {SP}", True),
    "tp2 pp2 ep2, places changed": (4, f"{TP} 2 {PP} 2 {EP} 2 {SP} {PLACES}", True),
    "zero3, places changed": (4, f"{EP} 2 --zero-stage 3 {A2A} {PLACES}", True),
    "tp2 ep4": (4, f"{TP} 2 {EP} 4", True),
    "tp2 sp ep2 zero3": (4, f"{TP} 2 {SP} {EP} 2 --zero-stage 3", True),
    "cp4 groups, documents": (4, f"{CP} 4 {HEADS} {GROUPS} {DOCUMENTS}", True),
    "cp4 ep2, first slots kept": (4, f"{CP} 4 {EP} 2 {HEADS} {FIRST_KEPT}", True),
    "dp2 cp2 ep4 zero3": (4, f"{CP} 2 {EP} 4 --zero-stage 3 {A2A}", True),
    "dp2 cp2 ep2, first slots kept": (4, f"{CP} 2 {EP} 2 {FIRST_KEPT}", True),
    "cp2 tp2": (4, f"{CP} 2 {TP} 2 {HEADS}", True),
    "cp2 tp2 sp, documents": (
        4,
        f"{CP} 2 {TP} 2 {SP} {HEADS} {DOCUMENTS} --make-vocab-size-divisible-by 64",
        True,
    ),
    "cp2 tp2 sp, slots dropped": (4, f"{CP} 2 {TP} 2 {SP} {HEADS} {DROPPED}", True),
    "cp2 tp2 sp, balance in sequences": (4, f"{CP} 2 {TP} 2 {SP} {HEADS} {IN_SEQUENCES}", True),
    "cp2 pp2, documents": (4, f"{CP} 2 {PP} 2 {DOCUMENTS}", True),
    "cp2 pp2 zero-bubble": (
        4,
        f"{CP} 2 {PP} 2 {FOUR} --num-layers-per-virtual-pipeline-stage 1 "
        "--pipeline-schedule interleaved-zero-bubble",
        True,
    ),
    "further cp2 pp2, documents": (4, f"{CP} 2 {PP} 2 {FURTHER} {DOCUMENTS}", True),
    "further tp2 sp ep2, latent": (4, f"{TP} 2 {SP} {EP} 2 {FURTHER} {LATENT}", True),
    "dp2 tp2 pp2 ep2": (8, f"{TP} 2 {PP} 2 {EP} 2 {SP}", True),
    "ep8 on 4 experts": (8, f"{EP} 8", True),
    "cp2 tp2 pp2 ep4": (8, f"{CP} 2 {TP} 2 {PP} 2 {EP} 4 {SP} {HEADS}", True),
}

# Each way to spread a model is in these at least once, most of them beside others; and those that a
# test below asks for.
ALWAYS = (
    *("dp2 zero0", "pp2 interleaved", "ep2, places changed", "ep2 gather, steps redone"),
    *("cp2, balance over the batch", "hybrid 2 x 2, recompute moe", "dp2 ep2 zero3, chunks"),
    *("outputs tp2 pp2 sp dense", "states cp2 tp2 sp, documents", "mamba tp2 pp2 ep2"),
    *("cp4 ep2, first slots kept", "further cp2 pp2, documents", "cp2 tp2 pp2 ep4"),
)
assert LAYOUTS.keys() >= set(ALWAYS)
PLACES_CHANGED = [layout for layout in LAYOUTS if "places" in layout]


def _train(rank: int, world_size: int, lines: list[list[str]]) -> list[str]:
    """Standard error of each run that failed, "" for the others."""
    said = []
    for arguments in lines:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _gradients_kept():
            code = tiny_run.train(arguments)
        said.append(err.getvalue() if code else "")
    return said


def _train_in_turn(ranks: int, lines: list[list[str]]) -> list[list[str]]:
    """What each rank says of each run, as `run_ranks` of `_train` tells it, started every few runs.

    A start costs less than what runs leave behind: gloo's groups, each with a thread that wakes a
    hundred times a second. After thirty runs those of four ranks keep a core busy.
    """
    parts = [
        run_ranks(_train, ranks, lines[first : first + 3], timeout_s=300.0)
        for first in range(0, len(lines), 3)
    ]
    return [[said for part in of_rank for said in part] for of_rank in zip(*parts, strict=True)]


@contextlib.contextmanager
def _gradients_kept() -> Iterator[None]:
    """Write this rank's part of every gradient, as the optimizer gets it, beside the run's log.

    Of each step (name, offset in the whole, part).
    """
    runs, steps = [], []

    def train_step(run: Run, *arguments: Any) -> Any:
        def keep(*_: Any) -> None:
            named = [pair for part in run.model.parts for pair in part.named_parameters()]
            without = [name for name, p in named if p.grad is None]
            assert not without, f"no gradient of {without}"
            steps.append([(name, *_offset_and_part(p.grad)) for name, p in named])

        runs.append(run)
        hook = run.optimizer.register_step_pre_hook(keep)
        done = mb_train.train.step.train_step(run, *arguments)
        hook.remove()
        return done

    with mock.patch.object(mb_train.train.loop, "train_step", train_step):
        yield
    if runs:
        torch.save(steps, runs[0].folder / f"gradients_{mb_parallel.rank()}.pt")


def _offset_and_part(grad: torch.Tensor) -> tuple[tuple[int, ...], torch.Tensor]:
    if not isinstance(grad, DTensor):
        return (0,) * grad.dim(), grad.clone()
    _, offset = compute_local_shape_and_global_offset(grad.shape, grad.device_mesh, grad.placements)
    return offset, grad.to_local().clone()


# How fast it went, on how many ranks; steps that were run again, of which a test asks.
OF_THE_LAYOUT = {"ms_per_iteration", "tokens_per_s", "tflops_per_rank", "ranks", "steps_redone"}


def _numbers_in(value: Any) -> Iterator[float]:
    """All numbers of an event, in its order."""
    if isinstance(value, dict):
        for name, item in value.items():
            if name not in OF_THE_LAYOUT:
                yield from _numbers_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from _numbers_in(item)
    elif isinstance(value, int | float):
        yield value


def _by_load(event: dict[str, Any]) -> dict[str, Any]:
    """The fullest experts first, whatever their numbers."""
    loads = event.get("tokens_per_expert", [])
    return event | {"tokens_per_expert": [sorted(layer, reverse=True) for layer in loads]}


def _numbers(run: Path, *, renumbered: bool = False) -> dict[str, list[float]]:
    reported = [event for kind in ("train", "eval") for event in tiny_run.events(run, kind)]
    if renumbered:
        reported = [_by_load(event) for event in reported]
    return {
        "loss": tiny_run.losses(run),
        # None of a step that an overflow skipped.
        "grad norm": [event["grad_norm"] or 0.0 for event in tiny_run.events(run, "train")],
        "balance": [e.get("load_balancing_loss", 0.0) for e in tiny_run.events(run, "train")],
        "validation": [event["lm_loss"] for event in tiny_run.events(run, "eval")],
        "reported": list(_numbers_in(reported)),
    }


@functools.cache  # of one process there are many questions
def _tensors(run: Path) -> dict[str, torch.Tensor]:
    """Weights and moments of a run's last checkpoint, whole."""
    folder = max(run.glob("iter_*"))
    entries = SafeReader(folder).read_metadata().state_dict_metadata
    state = {name: torch.empty(entry.size) for name, entry in entries.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, storage_reader=SafeReader(folder), no_dist=True)
    return state


def _gradients_deviate(run: Path, expected: Path, leave_out: str) -> float:
    """The largest difference of any rank's part of a gradient, over the norm of the whole."""
    (one,) = expected.glob("gradients_*.pt")
    wanted = [{name: whole for name, _, whole in step} for step in torch.load(one)]
    ranks = [torch.load(file) for file in run.glob("gradients_*.pt")]
    errors = []
    for number, whole in enumerate(wanted):
        seen = {name: torch.zeros_like(grad, dtype=torch.bool) for name, grad in whole.items()}
        for name, offset, part in (piece for steps in ranks for piece in steps[number]):
            here = tuple(slice(a, a + n) for a, n in zip(offset, part.shape, strict=True))
            seen[name][here] = True
            if not re.search(leave_out, name):
                error = (part - whole[name][here]).norm() / whole[name].norm().clamp(min=1e-12)
                errors.append(error)
        assert all(mask.all() for mask in seen.values()), "a part that no rank has"
    assert all(len(steps) == len(wanted) for steps in ranks)
    return float(torch.stack(errors).max())


def _deviations(
    run: Path,
    expected: Path,
    leave_out: str = "$^",
    *,
    renumbered: bool = False,
    without: tuple[str, ...] = (),
) -> dict[str, float]:
    """Largest relative difference by kind, but of tensors whose name matches.

    renumbered: experts may have changed places; what is counted of them is compared by load.
    without: numbers of `_numbers` that are left out.
    """
    found: dict[str, list[float]] = {}
    for name, values in _numbers(run, renumbered=renumbered).items():
        if name in without:
            continue
        wanted = _numbers(expected, renumbered=renumbered)[name]
        assert len(values) == len(wanted)
        found[name] = [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(values, wanted, strict=True)]
    got, wanted = _tensors(run), _tensors(expected)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        first, second, *_ = name.split(".")
        kind = "weights" if first == "model" else second
        compared = first in ("model", "optimizer") and not re.search(leave_out, name)
        if compared and value.is_floating_point():
            error = float((got[name] - value).norm() / value.norm().clamp(min=1e-12))
            found.setdefault(kind, []).append(error)
    return {kind: float(torch.tensor(errors).max()) for kind, errors in found.items()}  # or NaN


def _flags(tokens: str, run: Path, more: str = "", *, moe: bool, batch: int = 4) -> list[str]:
    besides = BESIDES if moe else ""
    return tiny_run.flags(
        tokens, run, f"{SAME} --global-batch-size {batch}", besides, more, moe=moe
    )


def _batch(layout: str) -> int:
    """The global batch: two micro-batches for each data-parallel rank and stage, of four to eight.

    More would take longer and meet nothing that is new.
    """
    ranks, flags, _ = LAYOUTS[layout]
    taken = [int(n) for n in re.findall(rf"(?:{TP}|{CP}) (\d)", flags)]
    return min(max(2 * ranks // math.prod(taken), 4), 8)


def _expected(layout: str) -> str:
    """Name of the run of one process: its kind, its global batch, what else it has of `ALONE`."""
    _, more, moe = LAYOUTS[layout]
    also = [name for name, flags in ALONE.items() if flags in more]
    return " ".join(["one", "moe" if moe else "dense", str(_batch(layout)), *also])


def _all_runs(folder: Path, layouts: Collection[str]) -> dict[str, Path]:
    """Train these layouts, and one process as each of them has to be compared with."""
    tokens = tiny_run.write_tokens(folder)
    ones = {_expected(layout) for layout in layouts}
    runs = {name: folder / name.replace(" ", "-") for name in (*layouts, *ones)}
    for one in ones:
        _, kind, batch, *also = one.split()
        more = " ".join(ALONE[name] for name in also)
        line = _flags(tokens, runs[one], more, moe=kind == "moe", batch=int(batch))
        assert _train(0, 1, [line]) == [""]
    for ranks in sorted({LAYOUTS[layout][0] for layout in layouts}):
        names = [name for name in layouts if LAYOUTS[name][0] == ranks]
        lines = []
        for name in names:
            _, more, moe = LAYOUTS[name]
            lines.append(_flags(tokens, runs[name], more, moe=moe, batch=_batch(name)))
        for said in _train_in_turn(ranks, lines):
            for name, error in zip(names, said, strict=True):
                assert not error, f"{name}: {error}"
    return runs


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory) -> dict[str, Path]:
    """Of the layouts that the selected tests ask for."""
    asked = tiny_run.layouts_asked(request)
    layouts = [layout for layout in LAYOUTS if layout in asked.union(ALWAYS)]
    return _all_runs(tmp_path_factory.mktemp("layouts"), layouts)


def _compared(runs: dict[str, Path], layout: str) -> dict[str, float]:
    """The largest relative differences of a layout from one process, by kind."""
    run, one, moved = runs[layout], runs[_expected(layout)], "places" in layout
    leave_out = r"experts|router" if moved else "$^"
    gradients = _gradients_deviate(run, one, leave_out)
    return _deviations(run, one, leave_out, renumbered=moved) | {"gradients": gradients}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", tiny_run.slow_but(ALWAYS, LAYOUTS))
def test_a_layout_takes_the_steps_of_one_process(layout, runs):
    deviations = _compared(runs, layout)
    assert all(value < 1e-5 for value in deviations.values()), deviations


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", tiny_run.slow_but(ALWAYS, PLACES_CHANGED))
def test_experts_did_change_places(layout, runs):
    assert _deviations(runs[layout], runs[_expected(layout)])["weights"] > 0.01


@pytest.mark.timeout(1200)
def test_experts_that_change_places_go_on_to_the_bit(tmp_path):
    tokens, whole, parts = tiny_run.write_tokens(tmp_path), tmp_path / "whole", tmp_path / "parts"
    more = f"{EP} 2 {A2A} {PLACES} --train-iters 4"
    lines = [
        _flags(tokens, whole, more, moe=True),
        _flags(tokens, parts, f"{more} --exit-interval 3", moe=True),
        ["--load", str(parts)],
    ]
    for said in run_ranks(_train, 2, lines):
        assert said == ["", "", ""]
    assert tiny_run.losses(parts) == tiny_run.losses(whole)


@pytest.mark.timeout(1200)
def test_steps_beyond_the_row_budget_are_counted(runs):
    def redone(layout):
        return [event["steps_redone"] for event in tiny_run.events(runs[layout], "train")]

    assert redone("ep2 gather, steps redone")[-1] > 0
    assert set(redone("dp2 ep2 zero3, chunks")) == {0}


@pytest.mark.timeout(1200)
def test_the_experts_of_all_stages_are_told_of_once(runs):
    def notes(layout):
        return tiny_run.events(runs[layout], "start")[0]["notes"]

    alike = "expert parallelism: ep = 1, all experts of 1 layer on every rank"
    assert notes("pp2 interleaved") == [f"stages 0, 1, 2, 3: {alike}"]
    assert notes("dp2 zero0") == [alike.replace("1 layer", "2 layers")]
    assert notes("outputs tp2 pp2 sp dense") == []


def test_a_pipeline_in_halves_takes_one_micro_batch(tmp_path):
    """In 16 bit over data-parallel ranks: FSDP2 had gradients of two dtypes to reduce."""
    tokens = tiny_run.write_tokens(tmp_path)
    halves = "--num-layers-per-virtual-pipeline-stage 1 --pipeline-schedule zbv-zero-bubble"
    layouts = {"halves": f"{PP} 2 {halves} --bf16", "one": ""}
    lines = [
        _flags(tokens, tmp_path / name, f"{FOUR} --eval-iters 0 {more}", moe=True, batch=2)
        for name, more in layouts.items()
    ]
    assert run_ranks(_train, 4, lines[:1], timeout_s=300.0) == [[""]] * 4
    assert tiny_run.train(lines[1]) == 0
    got, wanted = (tiny_run.losses(tmp_path / name) for name in layouts)
    assert got == pytest.approx(wanted, rel=1e-2)


def test_a_batch_of_one_micro_batch_is_balanced_over_all_ranks(tmp_path):
    """Of several, a load counts those so far: with more at a time it is another number."""
    tokens, over_batch = tiny_run.write_tokens(tmp_path), f"{OVER_BATCH} --mtp-num-layers 1"
    layouts = {"ranks": f"{CP} 2", "one": "--micro-batch-size 2"}
    lines = [
        _flags(tokens, tmp_path / name, f"{over_batch} {more}", moe=True, batch=2)
        for name, more in layouts.items()
    ]
    assert run_ranks(_train, 4, lines[:1], timeout_s=300.0) == [[""]] * 4
    assert _train(0, 1, lines[1:]) == [""]
    ranks, one = (tmp_path / name for name in layouts)
    deviations = _deviations(ranks, one) | {"gradients": _gradients_deviate(ranks, one, "$^")}
    assert all(value < 1e-5 for value in deviations.values()), deviations


@pytest.mark.timeout(1200)
def test_a_checkpoint_goes_on_in_another_layout(runs, tmp_path):
    """Written with tensor, pipeline, expert and context parallelism at once, read by others."""
    writer = "cp2 tp2 pp2 ep4"
    halves = "--num-layers-per-virtual-pipeline-stage 1 --pipeline-schedule interleaved-zero-bubble"
    others = {"one": "", "ep": f"{EP} 2", "tp": f"{TP} 2 {SP}", "halves": f"{PP} 2 {halves} --bf16"}
    lines = []
    for name, flags in others.items():
        go_on = ["--load", str(runs[writer]), "--save", str(tmp_path / name)]
        plain = f"--train-iters 5 {TP} 1 {PP} 1 {EP} 1 {CP} 1 --no-sequence-parallel {flags}"
        lines.append([*go_on, *plain.split()])
    assert tiny_run.train(lines[0]) == 0
    for said in run_ranks(_train, 2, lines[1:], timeout_s=300.0):
        assert said == ["", "", ""]
    wanted = tiny_run.losses(tmp_path / "one")
    assert len(wanted) == 2
    for name, limit in {"ep": 1e-5, "tp": 1e-5, "halves": 1e-3}.items():
        assert tiny_run.losses(tmp_path / name) == pytest.approx(wanted, rel=limit)
    whole = tmp_path / "whole"
    from_one = ["--load", str(runs[_expected(writer)]), "--save", str(whole)]
    assert tiny_run.train([*from_one, "--train-iters", "5"]) == 0
    assert wanted == pytest.approx(tiny_run.losses(whole), rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_modules_for_further_tokens_go_on_in_another_layout(runs, tmp_path):
    """Written by stages of parts of sequences, and read by one process and by tensor ranks."""
    others = {"one": "", "tp": f"{TP} 2 {SP}", "stages": f"{PP} 2 --pipeline-schedule gpipe"}
    lines = []
    for name, flags in others.items():
        go_on = ["--load", str(runs["further cp2 pp2, documents"]), "--save", str(tmp_path / name)]
        lines.append([*go_on, *f"--train-iters 5 {CP} 1 {PP} 1 {flags}".split()])
    assert tiny_run.train(lines[0]) == 0
    for said in run_ranks(_train, 2, lines[1:], timeout_s=300.0):
        assert said == ["", ""]
    wanted = tiny_run.losses(tmp_path / "one")
    assert len(wanted) == 2
    for name in ("tp", "stages"):
        assert tiny_run.losses(tmp_path / name) == pytest.approx(wanted, rel=1e-5)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(io.StringIO()):
            made = _all_runs(Path(folder), LAYOUTS)
        for number, layout in enumerate(LAYOUTS):
            measured = _compared(made, layout)
            if not number:
                print(f"{'layout':27}" + "".join(f"{name:>19}" for name in measured))
            print(f"{layout:27}" + "".join(f"{value:19.1e}" for value in measured.values()))
            sys.stdout.flush()
