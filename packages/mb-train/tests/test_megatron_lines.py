"""Log lines against published ones, and the timers that some of them show."""

import math
import re
import time

import pytest
import torch
from mb_parallel.testing import run_ranks
from mb_train.config import TrainConfig
from mb_train.logs.megatron_lines import (
    argument_lines,
    datetime_line,
    parameters_line,
    perplexity,
    saved_line,
    saving_line,
    train_line,
    validation_lines,
    vocabulary_line,
    world_line,
)
from mb_train.logs.run_log import RunLog, read_log
from mb_train.logs.timers import Timers, timer_lines


def test_the_training_line_is_megatrons():
    # AMD's ROCm post on Megatron-LM, GPT 125M, iteration 100 of 2000.
    line = train_line(
        100, 2000, consumed_samples=51200, elapsed_ms=660.6, lr=5.978e-4, batch_size=512,
        losses={"lm loss": 7.643560, "load balancing loss": 0.0}, grad_norm=0.207,
        params_norm=None, nan_iterations=0,
    )  # fmt: skip
    asked = train_line(
        100, 2000, consumed_samples=51200, elapsed_ms=660.6, lr=5.978e-4, batch_size=512,
        losses={}, grad_norm=0.207, tflops=98.76,
    )  # fmt: skip
    assert " (ms): 660.6 | throughput per GPU (TFLOP/s/GPU): 98.8 | learning rate: " in asked
    assert line == (
        " iteration      100/    2000 | consumed samples:        51200 | "
        "elapsed time per iteration (ms): 660.6 | learning rate: 5.978E-04 | "
        "global batch size:   512 | lm loss: 7.643560E+00 | loss scale: 1.0 | grad norm: 0.207 | "
        "number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def test_the_training_line_of_a_scaled_run_is_megatrons():
    # The same post, MoE 125M in fp16, iteration 200.
    line = train_line(
        200, 2000, consumed_samples=102400, elapsed_ms=580.2, lr=1.477e-4, batch_size=512,
        losses={"lm loss": 6.711773, "load balancing loss": 0.1010925}, loss_scale=32768.0,
        grad_norm=0.428, zeros_in_grad=12.0, params_norm=3.5, skipped_iterations=18,
    )  # fmt: skip
    assert line == (
        " iteration      200/    2000 | consumed samples:       102400 | "
        "elapsed time per iteration (ms): 580.2 | learning rate: 1.477E-04 | "
        "global batch size:   512 | lm loss: 6.711773E+00 | load balancing loss: 1.010925E-01 | "
        "loss scale: 32768.0 | grad norm: 0.428 | num zeros: 12.0 | params norm: 3.500 | "
        "number of skipped iterations:  18 | number of nan iterations:   0 |"
    )


RUN = {
    "num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "seq_length": 1024,
    "micro_batch_size": 64, "train_iters": 2000, "lr": 6e-4,
}  # fmt: skip


def test_the_lines_of_the_start_are_megatrons():
    assert world_line(8, data=4, tensor=2, pipeline=1) == (
        "using world size: 8, data-parallel-size: 4, tensor-model-parallel size: 2, "
        "pipeline-model-parallel size: 1 "
    )
    assert world_line(8, data=2, context=2, tensor=2, pipeline=1) == (
        "using world size: 8, data-parallel-size: 2, context-parallel-size: 2, "
        "tensor-model-parallel size: 2, pipeline-model-parallel size: 1 "
    )
    assert vocabulary_line(50257, 50304) == (
        " > padded vocab (size: 50257) with 47 dummy tokens (new size: 50304)"
    )
    assert parameters_line(125, tensor_rank=1, pipeline_rank=0) == (
        " > number of parameters on (tensor, pipeline) model parallel rank (1, 0): 125"
    )
    said = datetime_line("before the start of training step")
    form = r"\[before the start of training step\] datetime: \d{4}-\d\d-\d\d \d\d:\d\d:\d\d "
    assert re.fullmatch(form, said)
    first, *arguments, last = argument_lines(TrainConfig(**RUN)).split("\n")
    assert (first, last) == (
        "------------------------ arguments ------------------------",
        "-------------------- end of arguments ---------------------",
    )
    assert arguments == sorted(arguments, key=str.lower)
    assert "  hidden_size ..................................... 768" in arguments
    assert all(
        line[50] == "." and line[51] == " " for line in arguments if len(line.split()[0]) < 47
    )


def test_the_lines_of_a_checkpoint_are_megatrons():
    assert saving_line(500, "runs/a") == "saving checkpoint at iteration     500 to runs/a"
    assert saved_line(500, "runs/a") == (
        "  successfully saved checkpoint at iteration     500 to runs/a"
    )


def test_the_lines_of_timers_are_megatrons():
    times = {
        "model-and-optimizer-setup": [55.17, 73.82],
        "train/valid/test-data-iterators-setup": [1115.27, 1015.72],
    }
    assert timer_lines(times, "minmax") == (  # the same post
        "(min, max) time across ranks (ms):\n"
        "    model-and-optimizer-setup ......................: (55.17, 73.82)\n"
        "    train/valid/test-data-iterators-setup ..........: (1015.72, 1115.27)"
    )
    assert timer_lines({"save-checkpoint": [1.0, 2.0]}, "max") == (
        "(min, max) time across ranks (ms):\n"
        "    save-checkpoint ................................: 2.00"
    )
    assert timer_lines({"save-checkpoint": [1.0, 2.0]}, "all") == (
        "times across ranks (ms):\n  save-checkpoint:\n     rank  0: 1.00\n     rank  1: 2.00"
    )
    assert timer_lines({}, "all") == ""


def _time(rank, world_size):
    timers = Timers(torch.device("cpu"), level=1)
    for _ in range(2):
        with timers("both", level=1):
            time.sleep(0.002 * (1 + rank))
    if rank == 1:
        with timers("one"):
            pass
    with timers("never", level=2):
        pass
    first = timers.collect("both", steps=2)
    return first, timers.collect(), timers.lines()


def test_timers_over_ranks():
    for first, rest, none in run_ranks(_time, 2):
        (times,) = first.values()
        assert len(times) == 2
        assert times[0] >= 2
        assert times[1] >= 4
        assert [len(ranks) for ranks in rest.values()] == [1]
        assert (list(rest), none) == (["one"], "")


@pytest.mark.parametrize(
    ("place", "loss", "ppl", "width"),
    [
        # The same post: its rules are 96 and 114 dashes long.
        ("iteration 1000", 5.314413, 2.032451e2, 96),
        ("the end of training for val data", 4.580711, 9.758374e1, 114),
    ],
)
def test_the_validation_lines_are_megatrons(place, loss, ppl, width):
    rule, line, last = validation_lines(place, {"lm loss": loss}).split("\n")
    assert rule == last == "-" * width
    start = f" validation loss at {place} | lm loss value: {loss:.6E} | lm loss PPL: "
    assert line.startswith(start)
    assert line.endswith(" | ")
    assert float(line[len(start) : -3]) == pytest.approx(ppl, rel=1e-6)  # the loss is rounded


def test_not_a_number_is_left_out_of_the_line_and_null_in_the_log(tmp_path):
    line = train_line(
        1, 2, consumed_samples=1, elapsed_ms=1, lr=0, batch_size=1, losses={"lm loss": math.nan},
        grad_norm=math.nan, params_norm=1.0, nan_iterations=1,
    )  # fmt: skip
    assert "lm loss" not in line
    assert "grad norm: nan | params norm: 1.000" in line
    assert line.endswith("number of nan iterations:   1 |")
    log = RunLog(tmp_path / "new" / "log.jsonl")
    log.write("train", lm_losses=[math.nan, 1.0], layers={"a": [math.inf]})
    log.close()
    assert read_log(tmp_path / "new" / "log.jsonl") == [
        {"event": "train", "lm_losses": [None, 1.0], "layers": {"a": [None]}}
    ]


def test_a_loss_that_is_no_number_has_no_perplexity():
    assert math.isnan(perplexity(math.nan))
    assert perplexity(math.inf) == perplexity(30.0) == math.exp(20.0)
