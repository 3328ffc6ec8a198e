"""Log lines against published ones, averages over steps, layers and ranks, and the JSON log."""

import math
import sys
import types

import pytest
import torch
import torch.distributed as dist
from mb_parallel import ParallelDims
from mb_parallel.testing import run_ranks
from mb_train.metrics import Accumulator
from mb_train.reporting import (
    RunLog,
    extra_line,
    open_board,
    read_log,
    train_line,
    validation_lines,
)


def test_the_training_line_is_megatrons():
    # AMD's ROCm post on Megatron-LM, GPT 125M, iteration 100 of 2000.
    line = train_line(
        100, 2000, consumed_samples=51200, elapsed_ms=660.6, lr=5.978e-4, batch_size=512,
        losses={"lm loss": 7.643560, "load balancing loss": 0.0}, grad_norm=0.207,
        params_norm=None, nan_iterations=0,
    )  # fmt: skip
    assert line == (
        " iteration      100/    2000 | consumed samples:        51200 | "
        "elapsed time per iteration (ms): 660.6 | learning rate: 5.978E-04 | "
        "global batch size:   512 | lm loss: 7.643560E+00 | loss scale: 1.0 | grad norm: 0.207 | "
        "number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


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
        results.append(accumulator.collect(torch.tensor(0.25), torch.tensor(9.0)))
    return results


def test_sums_over_passes_steps_and_ranks():
    alone = _collect(0, 1)[1]
    assert alone.lm_losses == [1.0, 2.0]
    assert (alone.lm_loss, alone.grad_norm, alone.params_norm) == (1.5, 0.25, 9.0)
    assert alone.tokens_per_expert == [[6, 18], [24, 0]]
    assert alone.load_imbalance == [1.5, 2.0]
    assert alone.layer_means["dropped_fraction"] == pytest.approx([0.1, 0.3])
    assert alone.mean("load_balancing_loss") == 1.5

    for results in run_ranks(_collect, 2):
        both = results[1]
        assert both.lm_losses == [1.5, 2.5]
        assert both.tokens_per_expert == [[18, 36], [48, 0]]
        assert both.layer_means["dropped_fraction"] == pytest.approx([0.1, 0.3])
        assert both.grad_norm == 0.25
    assert not dist.is_initialized()


def test_a_dense_model_has_losses_alone():
    accumulator = Accumulator(ParallelDims().build("cpu"))
    accumulator.add_pass({})
    accumulator.add_iteration({"lm loss": torch.tensor(float("nan"))})
    stats = accumulator.collect(torch.tensor(1.0))
    assert stats.nan_iterations == 1
    assert stats.mean("z_loss") == 0
    assert extra_line(1234.5, stats) == "  tokens per second: 1,234"


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


class _Writer:
    def __init__(self, folder):
        self.folder, self.added, self.closed = folder, {}, False

    def add_scalar(self, name, value, step):
        self.added[name] = (value, step)

    def close(self):
        self.closed = True


def test_tensorboard_gets_megatrons_names(tmp_path, monkeypatch):
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = _Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    log = RunLog(None, open_board("boards"))
    log.write("start", iteration=0)
    log.write(
        "train", iteration=5, consumed_samples=40, lm_loss=2.0, lr=0.1, grad_norm=3.0,
        params_norm=None, batch_size=8, ms_per_iteration=500.0, tokens_per_s=9.0,
        load_imbalance=[1.5],
    )  # fmt: skip
    log.write("eval", iteration=5, place="iteration 5", lm_loss=2.5, ppl=12.0)
    log.close()
    writer = log._board
    assert (writer.folder, writer.closed) == ("boards", True)
    assert writer.added["lm loss"] == (2.0, 5)
    assert writer.added["lm loss vs samples"] == (2.0, 40)
    assert writer.added["iteration-time"] == (0.5, 5)
    assert writer.added["expert load max over mean/layer 0"] == (1.5, 5)
    assert writer.added["lm loss validation ppl"] == (12.0, 5)
    assert "params-norm" not in writer.added


def test_tensorboard_missing_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"pip install 'mb-train\[tensorboard\]'"):
        open_board("boards")


def test_a_line_cut_short_by_a_kill_spoils_no_other(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"event": "start"}\n{"event": "tr')
    assert read_log(path) == [{"event": "start"}, {"event": "torn", "line": 2}]
    log = RunLog(path)
    log.write("start", iteration=1)
    log.close()
    assert read_log(path) == [
        {"event": "start"}, {"event": "torn", "line": 2}, {"event": "start", "iteration": 1},
    ]  # fmt: skip
    path.write_text('[1]\n{"event": 3}\n')
    assert [event["event"] for event in read_log(path)] == ["torn", "torn"]
