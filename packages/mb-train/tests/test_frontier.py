"""The frontier from synthetic logs whose answers are known."""

import json
import math
import re

import pytest
from mb_train import recipe
from mb_train.cli import main
from mb_train.config import TrainConfig
from mb_train.logs.run_log import read_log
from mb_train.report.frontier import (
    Noise,
    noise_of,
    points_of,
    read_run,
    same_size_speed_up,
    speed_up,
)
from mb_train.train import train as train_run

BATCH, S = 4, 16
DENSE, DROPLESS, CAPACITY = {}, {"moe_num_experts": 64, "moe_capacity_factor": 0.0}, 1.5


def start(iteration=0, *, shape=(6, 512), seed=1, iters=100, device="H200", **experts):
    config = {
        "num_layers": shape[0], "hidden_size": shape[1], "seed": seed, "train_iters": iters,
        "global_batch_size": BATCH, "seq_length": S, "data_path": ["text"], "split": "9,1,0",
        "moe_num_experts": None, "moe_capacity_factor": 0.0,
    } | experts  # fmt: skip
    return {
        "event": "start", "iteration": iteration, "ranks": 1, "device": device,
        "parameters": shape[0] * shape[1] ** 2 * 12, "iterations": iters, "config": config,
        "tokens_per_sample": S,
    }  # fmt: skip


def train(iteration, ms, steps=10):
    return {
        "event": "train", "iteration": iteration, "lm_losses": [1.0] * steps,
        "ms_per_iteration": ms,
    }  # fmt: skip


def evaluation(iteration, loss, place="iteration"):
    return {
        "event": "eval", "iteration": iteration, "place": place, "lm_loss": loss,
        "consumed_samples": iteration * BATCH,
    }  # fmt: skip


def write(folder, *events):
    folder.mkdir(parents=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    return folder


def finished(folder, ms, loss, *, first_ms=None, halfway=4.0, **start_as):
    """A run of 100 steps of `ms`; evaluated halfway and at the end."""
    steps = [train(i, ms) for i in range(20, 101, 10)]
    return write(
        folder, start(**start_as), train(10, first_ms or ms), *steps[:4], evaluation(50, halfway),
        *steps[4:], evaluation(100, loss), evaluation(100, 9.0, "test data"),
    )  # fmt: skip


def test_time_is_training_without_what_compiles(tmp_path):
    run = read_run(finished(tmp_path / "a", 20.0, 3.0, first_ms=3020.0))
    assert run.seconds == pytest.approx((1.0, 2.0))
    assert run.overhead_s == pytest.approx(30.0)
    assert run.tokens == (50 * BATCH * S, 100 * BATCH * S)
    assert run.losses == (4.0, 3.0)
    assert run.finished


def test_time_of_a_run_that_was_killed_and_went_on(tmp_path):
    folder = write(
        tmp_path / "a",
        start(), train(10, 900.0), train(20, 20.0), train(30, 20.0), evaluation(30, 5.0),
        train(40, 20.0), evaluation(40, 4.5),
        # Its checkpoint was of step 25: 26 to 30 come again, the rest was never logged.
        start(25), train(30, 2000.0, steps=5), evaluation(30, 4.9), train(40, 40.0),
        train(50, 20.0), evaluation(50, 4.0),
    )  # fmt: skip
    run = read_run(folder)
    # 1 to 10 and 26 to 30 compile, 21 to 25 have lost their interval: all at the median, 20 ms.
    assert run.seconds == pytest.approx((0.6, 1.2))
    assert run.losses == (4.9, 4.0)
    assert run.overhead_s == pytest.approx(10 * 0.88 + 5 * 1.98)
    assert not run.finished


def test_an_interval_that_ends_after_the_evaluation(tmp_path):
    folder = write(
        tmp_path / "a", start(iters=15), train(5, 10.0, 5), train(10, 10.0, 5), evaluation(8, 3.0),
        train(15, 30.0, 5), evaluation(15, 2.0),
    )  # fmt: skip
    # The first interval is charged at the median of 10 and 30.
    assert read_run(folder).seconds == pytest.approx((0.1 + 0.03, 0.1 + 0.05 + 0.15))


def test_a_run_by_samples_finishes_and_its_tokens_are_those_consumed(tmp_path):
    """A batch that grows makes more steps than there are full batches in the samples."""
    shape = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "seq_length": S}
    config = TrainConfig(
        **shape, train_samples=23, global_batch_size=8, rampup_batch_size=[2, 2, 10], lr=1e-3,
        micro_batch_size=2, eval_interval=3, eval_iters=1, log_interval=2, mock_data=True,
        tokenizer_type="NullTokenizer", vocab_size=40, device="cpu", save=str(tmp_path / "run"),
    )  # fmt: skip
    train_run(config)
    run = read_run(tmp_path / "run")
    assert run.finished
    assert run.tokens == (8 * S, 22 * S)  # 2, 2, 4, 6 and 8 sequences
    assert len(points_of([run])) == 1


@pytest.mark.slow
def test_tokens_are_those_that_the_log_of_the_run_counts(tmp_path):
    """Of a T5 the encoder's and the decoder's."""
    config = TrainConfig(
        **recipe("t5-quickstart")
        | {
            "num_layers": 1, "decoder_num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 16,
            "num_attention_heads": 1, "seq_length": 32, "decoder_seq_length": 16, "train_iters": 2,
            "micro_batch_size": 4, "global_batch_size": 4, "eval_iters": 1, "log_interval": 2,
            "num_workers": 0, "device": "cpu", "save": str(tmp_path / "run"),
        }
    )  # fmt: skip
    train_run(config)
    run = read_run(tmp_path / "run")
    (event,) = (e for e in read_log(tmp_path / "run" / "log.jsonl") if e["event"] == "train")
    logged = event["tokens_per_s"] * event["ms_per_iteration"] / 1000 * 2
    assert run.tokens == (2 * 4 * 48,)
    assert logged == pytest.approx(2 * 4 * 48)


def frontier(tmp_path, dmoe_ms=30.0, dmoe_loss=2.5):
    """Dense: loss 3 in 1 s, 2 in 10 s. One dMoE between them."""
    folders = [
        finished(tmp_path / "small", 10.0, 3.0, shape=(4, 256)),
        finished(tmp_path / "large", 100.0, 2.0, shape=(6, 512)),
        finished(tmp_path / "experts", dmoe_ms, dmoe_loss, shape=(4, 256), **DROPLESS),
    ]
    points = points_of(map(read_run, folders))
    dense = [p for p in points if p.family == "dense"]
    (dmoe,) = (p for p in points if p.family == "dMoE")
    return dmoe, dense, folders


def test_speed_up_is_interpolated_in_log_time(tmp_path):
    dmoe, dense, _ = frontier(tmp_path)
    found = speed_up(dmoe, dense, noise_of([dmoe, *dense]))
    assert found.value == pytest.approx(math.sqrt(10) / 3)
    assert not found.bound
    assert found.interval is None


@pytest.mark.parametrize(
    ("loss", "value", "bound"),
    [(3.0, 1 / 3, False), (2.0, 10 / 3, False), (1.9, 10 / 3, True), (3.1, None, False)],
)
def test_speed_up_at_the_ends_of_the_curve(tmp_path, loss, value, bound):
    dmoe, dense, _ = frontier(tmp_path, dmoe_loss=loss)
    found = speed_up(dmoe, dense, noise_of([]))
    assert found.value == (None if value is None else pytest.approx(value))
    assert found.bound == bound


def test_a_model_that_another_beats_is_not_of_the_frontier(tmp_path):
    dmoe, dense, folders = frontier(tmp_path)
    folders.append(finished(tmp_path / "worse", 50.0, 3.2, shape=(9, 256)))
    points = points_of(map(read_run, folders))
    found = speed_up(dmoe, [p for p in points if p.family == "dense"], noise_of([]))
    assert found.value == pytest.approx(math.sqrt(10) / 3)
    assert len(dense) == 2


def test_uncertainty_comes_from_seeds(tmp_path):
    _, _, folders = frontier(tmp_path)
    noise = []
    for name, gap in (("little", 0.002), ("much", 0.2)):
        twin = finished(tmp_path / name, 30.0, 2.5 + gap, shape=(4, 256), seed=2, **DROPLESS)
        points = points_of(map(read_run, [*folders, twin]))
        (dmoe,) = (p for p in points if p.family == "dMoE")
        dense = [p for p in points if p.family == "dense"]
        assert dmoe.loss == pytest.approx(2.5 + gap / 2)
        noise.append(noise_of(points))
        assert noise[-1].loss == pytest.approx(gap / math.sqrt(2))
        assert (noise[-1].freedom, noise[-1].log_seconds) == (1, pytest.approx(0, abs=1e-12))
        found = speed_up(dmoe, dense, noise[-1])
        low, high = found.interval
        assert low <= found.value <= high
        if name == "much":  # one degree of freedom: the curve may not even reach that loss
            assert low == 0.0
            assert high == math.inf
        else:
            assert 0.8 * found.value < low < 0.999 * found.value
            assert 1.001 * found.value < high < 1.25 * found.value


def test_an_interval_is_as_wide_as_the_noise_of_all_points_that_it_rests_on(tmp_path):
    dmoe_as = {"shape": (4, 256), **DROPLESS}
    _, _, folders = frontier(tmp_path)
    folders.append(finished(tmp_path / "again", 30.0, 2.5, seed=2, **dmoe_as))
    points = points_of(map(read_run, folders))
    (dmoe,) = (p for p in points if p.family == "dMoE")
    dense = [p for p in points if p.family == "dense"]
    # Of times alone, and well known: the point has two runs, the curve one in each of its ends.
    low, high = speed_up(dmoe, dense, Noise(loss=0.0, log_seconds=0.01, freedom=10**6)).interval
    share = (dense[0].loss - dmoe.loss) / (dense[0].loss - dense[1].loss)
    deviation = 0.01 * math.sqrt(1 / 2 + share**2 + (1 - share) ** 2)
    assert math.log(high / low) / (2 * 1.96) == pytest.approx(deviation, rel=0.05)


def test_runs_of_two_rates_are_no_seeds_of_one_point(tmp_path):
    """Nor are those of two numbers of experts; where a run was saved makes no difference.

    Nor does the version that wrote a log, which may lack a field, or a number's decimal point.
    """
    settings = [{"lr": 1e-3}, {"lr": 2e-3}, DROPLESS, DROPLESS | {"moe_num_experts": 8}]
    same = [{"min_lr": 0, "num_workers": 4}, {"min_lr": 0.0, "moe_router_bias": False}]
    runs = [
        read_run(
            finished(tmp_path / f"{i}-{seed}", 9.0, 3.0 + i, seed=seed, save=f"{seed}", **to | also)
        )
        for i, to in enumerate(settings)
        for seed, also in enumerate(same)
    ]
    points = points_of(runs)
    assert sorted(point.loss for point in points) == [3.0, 4.0, 5.0, 6.0]
    assert all(len(point.runs) == 2 for point in points)


def test_same_size_speed_up_reads_the_curve(tmp_path):
    dmoe, dense, _ = frontier(tmp_path, dmoe_ms=15.0)
    # Of its 1.5 s it has 3.0 after 0.75 + (4 - 3) / (4 - 2.5) of 0.75; dense has it after 1.
    assert same_size_speed_up(dmoe, dense[0]) == pytest.approx(1 / 1.25)
    assert same_size_speed_up(dmoe, dense[1]) is None
    # With no number halfway nothing is read between the two.
    unknown = finished(tmp_path / "nan", 15.0, 2.5, halfway=None, shape=(4, 256), **DROPLESS)
    (dmoe,) = points_of([read_run(unknown)])
    assert same_size_speed_up(dmoe, dense[0]) == pytest.approx(1 / 1.5)


@pytest.mark.parametrize(
    "other",
    [
        {"device": "H100"}, {"iters": 200}, {"data_path": ["more"]}, {"seq_length": 32},
        {"eval_iters": 4}, {"data_path": None, "train_data_path": ["text"]}, {"mock_data": True},
        {"iters": None, "train_samples": 400},
    ],
)  # fmt: skip
def test_runs_that_do_not_belong_together_are_refused(tmp_path, other):
    folders = [finished(tmp_path / "a", 1.0, 3.0), finished(tmp_path / "b", 1.0, 3.0, **other)]
    with pytest.raises(ValueError, match=r"Expected runs of one .* Draw them apart"):
        points_of(map(read_run, folders))


def test_report_draws_and_says(tmp_path, capsys):
    dmoe_as = {"shape": (4, 256), **DROPLESS}
    _, _, folders = frontier(tmp_path / "runs")
    folders += [
        finished(tmp_path / "runs" / "again", 30.0, 2.502, seed=2, **dmoe_as),
        finished(
            tmp_path / "runs" / "cf", 25.0, 2.6, **(dmoe_as | {"moe_capacity_factor": CAPACITY})
        ),
        write(tmp_path / "runs" / "going", start(), train(10, 9.0), evaluation(10, 5.0)),
        finished(tmp_path / "runs" / "nan", 30.0, None, seed=3, **dmoe_as),
    ]
    command = ["report", "--frontier", *map(str, [*folders, folders[0]])]  # one of them twice
    command += ["--output", str(tmp_path / "out")]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "dMoE 3.1M over MoE cf 1.5: below all of it, whose end took 0.83 x the time" in said
    assert re.search(r"dMoE 3\.1M over dense: [\d.]+ x sooner \(95 %: [\d.]+ to [\d.]+\);", said)
    assert "dMoE        3.1M: loss 2.5010 in 3.0 s (2,133 tokens/s, experts and again)" in said
    assert "not at their end, or diverged: going, nan" in said
    numbers = json.loads((tmp_path / "out" / "frontier.json").read_text())
    assert numbers["noise"]["degrees_of_freedom"] == 1
    over = {(c["point"], c["over"]): c for c in numbers["speed_ups"]}
    assert {point.split()[0] for point, _ in over} == {"dMoE", "MoE"}
    assert [p["valid_loss"] for p in numbers["points"] if p["family"] == "dMoE"] == [2.501]
    assert (tmp_path / "out" / "frontier.png").read_bytes()[:4] == b"\x89PNG"
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["frontier.json", "frontier.png"]


def test_nothing_to_draw(tmp_path, capsys):
    (tmp_path / "no").mkdir()
    write(tmp_path / "short", start(), train(10, 9.0))
    write(tmp_path / "going", start(), train(10, 9.0), evaluation(10, 5.0))
    write(tmp_path / "other", start(), {"event": "train", "iteration": 10})
    damaged = start() | {"iterations": 10, "tokens_per_sample": [5]}
    write(tmp_path / "damaged", damaged, train(10, 9.0), evaluation(10, 5.0))
    for name, problem in (
        ("no", "found none"), ("short", "found none"), ("going", "end of its schedule"),
        ("other", "log.jsonl is not a log that this mb-train can read: KeyError"),
        ("damaged", "log.jsonl is not a log that this mb-train can read: TypeError"),
    ):  # fmt: skip
        output = ["--output", str(tmp_path / "out")]
        assert main(["report", "--frontier", str(tmp_path / name), *output]) == 2
        assert problem in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
