"""What a report says of the steps since the last one: means over steps, layers and ranks."""

import math

import pytest
import torch
import torch.distributed as dist
from mb_parallel import ParallelDims
from mb_parallel.testing import run_ranks
from mb_train.config import TrainConfig
from mb_train.logs.metrics import Accumulator, IntervalStats
from mb_train.tasks.make import one_process_task
from mb_train.train.interval import Speed, extra_line, named_losses, speed

RUN = {
    "num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "seq_length": 1024,
    "micro_batch_size": 64, "train_iters": 2000, "lr": 6e-4,
}  # fmt: skip


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


def test_long_intervals_are_added_up_exactly():
    accumulator = Accumulator(ParallelDims().build("cpu"))
    for value in (2.0**24, 1.0, 1.0, 2.0):
        entropy = {"router_entropy": torch.tensor([value])}
        accumulator.add_pass(_metrics([[2**30, 2**30 + 1]], [0.25]) | entropy)
    accumulator.add_iteration({"lm loss": torch.tensor(1.0)})
    stats = accumulator.collect(torch.tensor(1.0))
    assert stats.tokens_per_expert == [[2**32, 2**32 + 4]]
    assert stats.mean("router_entropy") == 2**22 + 1


def test_counts_follow_experts_that_change_places():
    accumulator = Accumulator(ParallelDims().build("cpu"))
    for order in ((1, 2, 0), None):
        accumulator.add_pass(_metrics([[8, 1, 3, 5], [8, 1, 3, 5]], [0.0, 0.0]))
        accumulator.add_iteration({"lm loss": torch.tensor(1.0)})
        if order is not None:  # of the second layer; behind the experts stands what is none
            accumulator.renumber({1: order})
    stats = accumulator.collect(torch.tensor(1.0))
    assert stats.tokens_per_expert == [[16, 2, 6, 10], [9, 4, 11, 10]]


def test_what_tokens_have_is_a_mean_over_tokens():
    """A pass of few, most of them padding, counts as a pass in losses alone."""
    accumulator = Accumulator(ParallelDims().build("cpu"))
    for counts, dropped, value in (([8, 0], 0.5, 1.0), ([50, 42], 0.0, 2.0), ([0, 0], 0.0, 0.0)):
        passed = _metrics([counts], [dropped])
        names = ("router_entropy", "z_loss")
        accumulator.add_pass(passed | dict.fromkeys(names, torch.tensor([value])))
    accumulator.add_iteration({"lm loss": torch.tensor(1.0)})
    stats = accumulator.collect(torch.tensor(1.0))
    assert stats.mean("dropped_fraction") == pytest.approx(4 / 100)
    assert stats.mean("router_entropy") == pytest.approx((8 + 2 * 92) / 100)
    assert stats.mean("z_loss") == pytest.approx(1.0)


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


def test_a_report_names_the_fullest_layer_and_weighs_the_routers_losses():
    means = {
        "dropped_fraction": [0.1, 0.2], "router_entropy": [1.0, 2.0],
        "load_balancing_loss": [1.0, 3.0], "z_loss": [4.0, 6.0],
    }  # fmt: skip
    stats = IntervalStats(
        losses={"lm loss": [1.0, 3.0]}, grad_norm=1.0, layer_means=means, skipped=[False, False],
        tokens_per_expert=[[3.0, 1.0], [8.0, 0.0], [2.0, 2.0]],
    )  # fmt: skip
    names = ["layer 1", "layer 3", "mtp 0 layer 0"]
    assert extra_line(Speed(2000.0, 1, 5.0, None), stats, names, steps_redone=3) == (
        "  tokens per second: 2,000 | expert load max/mean: 1.50 (layer 3: 2.00) | dropped: 15.0 %"
        " | router entropy: 1.500 | steps run again for rows beyond the budget: 3"
    )
    config = TrainConfig(**RUN, moe_num_experts=2, moe_loss_weight=0.1)
    weighed = {"lm loss": 2.0, "load balancing loss": 0.2}
    assert named_losses(config, stats) == pytest.approx(weighed)
    config = TrainConfig(**RUN, moe_num_experts=2, moe_loss_weight=0.1, moe_z_loss_weight=0.01)
    assert named_losses(config, stats) == pytest.approx(weighed | {"z loss": 0.05})
