"""Log lines against published ones, averages over steps, layers and ranks, and the JSON log."""

import math
import re
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from mb_parallel import ParallelDims
from mb_parallel.testing import run_ranks
from mb_train.config import TrainConfig
from mb_train.interval import Speed, extra_line, speed
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
from mb_train.logs.metrics import Accumulator, IntervalStats
from mb_train.logs.run_log import RunLog, read_log
from mb_train.logs.timers import Timers, timer_lines
from mb_train.tasks.make import one_process_task
from mb_train.validate import measure


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


def test_a_share_of_the_peak():
    # AMD's post: 512 sequences of 1024 in 657.1 ms on 8 MI300X, GPT-2 125M.
    def paced(device, **fields):
        work = one_process_task(TrainConfig(**RUN, **fields), None, vocab_size=50304).workload
        return speed(work, samples_per_s=512 / 0.6571, ranks=8, device=device)

    rate, pace = 512 * 1024 / 0.6571, paced("AMD MI300X")
    assert pace.tokens_per_s == pytest.approx(rate)
    by_hand = 6 * (12 * 12 * 768**2 + 50304 * 768) + 12 * 12 * 1024 * 768
    assert pace.tflops == pytest.approx(by_hand * rate / 8 / 1e12)
    assert pace.mfu == pytest.approx(pace.tflops / 1307)
    assert paced("CPU").mfu is None
    twice = paced(
        "", moe_num_experts=64, moe_top_k=2, moe_layer_freq=3, swiglu=True, ffn_hidden_size=4 * 768
    )
    # Of 12 layers 4 have experts: two of 3 x 4 D^2 and the router; attention has 4 D^2.
    matrices = 8 * 12 * 768**2 + 4 * (2 * 12 * 768**2 + 64 * 768) + 12 * 4 * 768**2
    by_hand = 6 * (matrices + 50304 * 768) + 12 * 12 * 1024 * 768
    assert twice.tflops == pytest.approx(by_hand * rate / 8 / 1e12)


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


def _metrics(counts, dropped):
    layers = len(counts)
    return {
        "tokens_per_expert": torch.tensor(counts, dtype=torch.int32),
        "load_balancing_loss": torch.full((layers,), 1.5),
        "z_loss": torch.full((layers,), 2.0),
        "dropped_fraction": torch.tensor(dropped),
        "router_entropy": torch.full((layers,), 0.5),
    }


def _collect(rank, world_size):
    accumulator = Accumulator(ParallelDims.for_world(world_size).build("cpu"))
    results = []
    for interval in range(2):  # the second starts from nothing
        for step in range(2):
            for _ in range(3):
                counts = [[1 + rank, 3], [4, 0]]
                accumulator.add_pass(_metrics(counts, [0.1 * interval, 0.3]))
            accumulator.add_iteration({"lm loss": torch.tensor(1.0 + step + rank)})
        zeros = torch.tensor(2.0**24 + 1, dtype=torch.float64) if interval else None
        results.append(accumulator.collect(torch.tensor(0.25), torch.tensor(9.0), zeros))
    return results


def test_sums_over_passes_steps_and_ranks():
    unasked, alone = _collect(0, 1)
    assert (unasked.zeros_in_grad, alone.zeros_in_grad) == (None, 2**24 + 1)
    assert unasked.params_norm == alone.params_norm
    assert alone.lm_losses == [1.0, 2.0]
    assert (alone.loss("lm loss"), alone.grad_norm, alone.params_norm) == (1.5, 0.25, 9.0)
    assert alone.tokens_per_expert == [[6, 18], [24, 0]]
    assert alone.load_imbalance == [1.5, 2.0]
    assert alone.layer_means["dropped_fraction"] == pytest.approx([0.1, 0.3])
    assert alone.mean("load_balancing_loss") == 1.5

    for results in run_ranks(_collect, 2):
        both = results[1]
        assert both.lm_losses == [3.0, 5.0]  # each rank has its share of the mean
        assert both.tokens_per_expert == [[18, 36], [48, 0]]
        assert both.layer_means["dropped_fraction"] == pytest.approx([0.1, 0.3])
        assert both.grad_norm == 0.25
    assert not dist.is_initialized()


def test_losses_are_of_the_steps_that_were_taken():
    """All of them; how experts were loaded is of all steps. A step that overflowed has any loss."""
    accumulator = Accumulator(ParallelDims().build("cpu"))
    for skipped, passes, loss in ((1.0, 2, math.inf), (0.0, 1, 3.0), (0.0, 3, 4.0)):
        for _ in range(passes):
            metrics = _metrics([[1, 3]], [0.25])
            accumulator.add_pass(metrics | {"load_balancing_loss": torch.tensor([loss])})
        accumulator.add_iteration({"lm loss": torch.tensor(loss)}, torch.tensor(skipped))
    stats = accumulator.collect(torch.tensor(1.0))
    assert stats.loss("lm loss") == 3.5
    assert stats.layer_means["load_balancing_loss"] == [(3 + 3 * 4) / 4]  # a pass, as a step, each
    assert stats.layer_means["z_loss"] == [2.0]
    assert stats.layer_means["dropped_fraction"] == [0.25]
    assert stats.tokens_per_expert == [[6, 18]]
    metrics = _metrics([[1, 3]], [0.25])
    accumulator.add_pass(metrics | {"z_loss": torch.tensor([math.nan])})
    accumulator.add_iteration({"lm loss": torch.tensor(1.0)}, torch.tensor(1.0))
    stats = accumulator.collect(torch.tensor(math.inf))
    assert (stats.loss("lm loss"), stats.mean("z_loss")) == (0, 0)
    assert stats.mean("router_entropy") == 0.5


def test_a_dense_model_has_losses_alone():
    accumulator = Accumulator(ParallelDims().build("cpu"))
    accumulator.add_pass({})
    accumulator.add_iteration({"lm loss": torch.tensor(float("nan"))})
    stats = accumulator.collect(torch.tensor(1.0))
    assert stats.nan_iterations == 1
    both = {"lm loss": [1.0, math.inf, 1.0], "sop loss": [1.0, 1.0, -math.inf]}
    assert IntervalStats(both, grad_norm=1.0).nan_iterations == 2
    assert stats.mean("z_loss") == 0
    assert extra_line(Speed(1234.5, 1, None, None), stats) == "  tokens per second: 1,234"
    said = extra_line(Speed(8e5, 8, 100.0, 0.101), stats)
    assert said == (
        "  tokens per second: 800,000 | per GPU: 100,000 | TFLOP/s per GPU: 100.0 (MFU 10.1 %)"
    )


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


def test_a_measurement_compiles_nothing():
    """Its batches have other sizes than those of the training, for which blocks are compiled."""
    compiled = []

    def evaluate_more(model, dataset, count):
        return {"sum": float(model(torch.ones(count, 2)).sum())}

    def backend(graph, inputs):
        compiled.append(inputs)
        return graph.forward

    class Model(torch.nn.Module):
        def forward(self, x):
            return x.relu()

    model = Model()
    model.compile(backend=backend)
    run = SimpleNamespace(
        config=SimpleNamespace(eval_iters=1, compile=True), say=lambda line: None,
        mesh=SimpleNamespace(tp_size=1, pp_size=1), batch_sizes=SimpleNamespace(full=3),
        model=SimpleNamespace(parts=[model]), progress=SimpleNamespace(iteration=1),
        log=SimpleNamespace(write=lambda event, **found: None),
        task=SimpleNamespace(tells_more=True, evaluate_more=evaluate_more),
    )  # fmt: skip
    assert measure(run, range(9), "the end") == {"sum": 6.0}
    assert not compiled
    model(torch.ones(3, 2))
    assert compiled


def test_a_loss_that_is_no_number_has_no_perplexity():
    assert math.isnan(perplexity(math.nan))
    assert perplexity(math.inf) == perplexity(30.0) == math.exp(20.0)
