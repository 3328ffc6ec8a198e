"""Training with products in 8-bit floats: by every layout, beside fp32, and on from a checkpoint.

Rows, output channels and experts are rounded by themselves, so most layouts round what one process
does. Tensor parallelism does not: a rank scales its part of a row. Nor does the dispatcher with
fixed shapes, where a routing weight's gradient comes from the experts' rounded output.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_run
import torch
from mb_kernels.float8 import reference as float8
from mb_parallel.testing import run_ranks
from mb_train.loading import load_trained

FP8 = "--fp8-format e4m3"
# Micro-batches of one sequence everywhere: the balance of load is a matter of the micro-batch.
SAME = (
    "--micro-batch-size 1 --train-iters 4 --log-interval 1 --save-interval 0 --eval-iters 0 "
    "--adam-eps 1e-3 --make-vocab-size-divisible-by 128 --attention-dropout 0 --hidden-dropout 0 "
    "--moe-shared-expert-intermediate-size 16"
)
LAYOUTS = {
    "zero3, recompute": "--zero-stage 3 --recompute-granularity full",
    "pp2": "--pipeline-model-parallel-size 2",
    "cp2 ep2": "--context-parallel-size 2 --expert-model-parallel-size 2",
    "tp2 sp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "fixed": "--expert-model-parallel-size 2 --moe-dispatcher fixed --moe-capacity-factor 8",
}
OTHERWISE = ("tp2 sp", "fixed")  # rounded than by one process


def _numbers(run: Path) -> torch.Tensor:
    """Loss and gradient's norm of every step."""
    norms = [event["grad_norm"] for event in tiny_run.events(run, "train")]
    return torch.tensor([*tiny_run.losses(run), *norms])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder of runs by name: each layout on two ranks, "alone" on one, and that without FP8."""
    folder = tmp_path_factory.mktemp("fp8")
    tokens = tiny_run.write_tokens(folder)
    for name, more in (("alone", FP8), ("unrounded", "")):
        assert tiny_run.train(tiny_run.flags(tokens, folder / name, SAME, more)) == 0
    lines = [tiny_run.flags(tokens, folder / name, SAME, FP8, LAYOUTS[name]) for name in LAYOUTS]
    assert run_ranks(tiny_run.on_a_rank, 2, lines)[0][0] == [""] * len(LAYOUTS)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_rounds_what_one_process_does(runs, layout):
    alone, unrounded = _numbers(runs / "alone"), _numbers(runs / "unrounded")
    by_rounding = ((alone - unrounded) / unrounded).abs().max()
    found = _numbers(runs / layout)
    assert 3e-4 < by_rounding < 0.05
    assert ((found - unrounded) / unrounded).abs().max() > 3e-4
    # Two that round otherwise are each so far from what neither does.
    assert ((found - alone) / alone).abs().max() < (
        2 * by_rounding if layout in OTHERWISE else 1e-5
    )


def test_a_run_goes_on_and_is_read_without_rounding(runs, tmp_path):
    """There is no state of its own to go on with."""
    tokens, half = str(runs / "walks"), tmp_path / "half"
    begun = tiny_run.flags(tokens, half, SAME, FP8, "--train-iters 2 --save-interval 2")
    assert tiny_run.train(begun) == 0
    assert tiny_run.train(["--load", str(half), "--train-iters", "4"]) == 0
    assert torch.equal(_numbers(half), _numbers(runs / "alone"))
    model = load_trained(half).model
    assert not any(getattr(module, "fp8", False) for module in model.modules())
    assert not model.stack.blocks["0"].mlp.config.fp8


def _losses(folder: Path, name: str, *more: str) -> torch.Tensor:
    """Of 40 steps, in which a tiny model learns what may follow a token."""
    long = "--train-iters 40 --lr-decay-iters 40 --lr 1e-2 --tokenizer null:30 --micro-batch-size 4"
    words = tiny_run.flags(str(folder / "walks"), folder / name, SAME, long, *more)
    assert tiny_run.train(words) == 0
    return torch.tensor(tiny_run.losses(folder / name))


@pytest.mark.slow
def test_the_loss_falls_beside_that_of_fp32(tmp_path, monkeypatch):
    tiny_run.write_tokens(tmp_path)
    unrounded, rounded = _losses(tmp_path, "unrounded"), _losses(tmp_path, "rounded", FP8)
    off = (rounded - unrounded).abs()
    assert unrounded[-10:].mean() < 2.5 < 4.8 < unrounded[0]
    assert 0 < off[-10:].mean() < 0.04
    right = float8.to_float8

    def half(x: torch.Tensor, transpose: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = right(x, transpose)
        return codes, scales / 2

    monkeypatch.setattr(float8, "to_float8", half)
    wrong = (_losses(tmp_path, "wrong", FP8) - unrounded).abs()
    assert wrong[-10:].mean() > 4 * off[-10:].mean()
