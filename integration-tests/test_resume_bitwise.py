"""A run that stops and goes on takes the same steps as one that does not, to the bit on a CPU."""

import warnings

import pytest
import tiny_run
import torch
import torch.distributed.checkpoint as dcp

DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1 --moe-jitter-eps 0.1"


def _weights(run, iteration):
    """All tensors of a checkpoint by name."""
    reader = dcp.FileSystemReader(run / f"iter_{iteration:07d}")
    entries = reader.read_metadata().state_dict_metadata
    state = {name: torch.empty(entry.size) for name, entry in entries.items()}
    with warnings.catch_warnings(action="ignore"):  # "assuming a single process": so it is
        dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def _same(a, b, iteration):
    first, second = _weights(a, iteration), _weights(b, iteration)
    assert first.keys() == second.keys()
    assert any(name.startswith("optimizer.exp_avg_sq.") for name in first)
    return all(torch.equal(first[name], second[name]) for name in first)


def test_stop_and_go_on(tokens, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert tiny_run.train(tiny_run.flags(tokens, whole, DROPOUT)) == 0
    beside = "--exit-interval 3 --save-interval 1 --async-save --keep-checkpoints 2"
    assert tiny_run.train(tiny_run.flags(tokens, parts, DROPOUT, beside)) == 0
    assert sorted(p.name for p in parts.glob("iter_*")) == ["iter_0000002", "iter_0000003"]
    assert len(tiny_run.losses(parts)) == 3
    assert tiny_run.train(["--load", str(parts)]) == 0  # everything else comes from the checkpoint
    assert tiny_run.losses(parts) == tiny_run.losses(whole)
    validation = [
        {(event["iteration"], event["lm_loss"]) for event in tiny_run.events(run, "eval")}
        for run in (whole, parts)
    ]
    assert validation[0] == validation[1]
    assert _same(whole, parts, 8)


def test_a_finished_run_goes_on_as_the_longer_run_would_have(tokens, tmp_path, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert tiny_run.train(tiny_run.flags(tokens, whole, "--train-iters 16")) == 0
    assert tiny_run.train(tiny_run.flags(tokens, parts)) == 0
    assert tiny_run.train(["--load", str(parts)]) == 0
    assert tiny_run.losses(parts) == tiny_run.losses(whole)
    assert _same(whole, parts, 16)
    # At the length asked for there is nothing to do but what a kill left undone.
    (parts / "loss.png.partial").write_text("half of it")
    capsys.readouterr()
    assert tiny_run.train(["--load", str(parts), "--train-iters", "16"]) == 0
    said = capsys.readouterr().out
    assert "at iteration 16, the end of this run" in said
    assert " picture " in said
    assert not list(parts.glob("loss.png*"))  # a tiny run draws none


def test_another_course_from_an_earlier_checkpoint(tokens, tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    assert tiny_run.train(tiny_run.flags(tokens, run, "--save-interval 4")) == 0
    again = ["--load", str(run / "iter_0000004"), "--save", str(other)]
    assert tiny_run.train(again) == 0
    assert tiny_run.losses(other) == tiny_run.losses(run)[4:]
    assert _same(run, other, 8)


def test_other_data_is_refused(tokens, tmp_path, capsys):
    run = tmp_path / "run"
    assert tiny_run.train(tiny_run.flags(tokens, run, "--exit-interval 2")) == 0
    other = tiny_run.write_tokens(tmp_path, documents=20)
    assert tiny_run.train(["--load", str(run), "--data-path", other]) == 2
    assert "Expected the data this run began with" in capsys.readouterr().err


def test_other_weights_of_a_blend_are_said(tokens, tmp_path, capsys):
    run, other = tmp_path / "run", tiny_run.write_tokens(tmp_path, documents=20)
    blend = ["--data-path", "3", tokens, "1", other]
    assert tiny_run.train([*tiny_run.flags(tokens, run, "--exit-interval 2"), *blend]) == 0
    capsys.readouterr()
    for weights, said in ("60 20", False), ("1 1", True):
        first, second = weights.split()
        blend = ["--data-path", first, tokens, second, other]
        again = ["--load", str(run), "--save", str(tmp_path / "other"), *blend]
        assert tiny_run.train(again) == 0
        out = capsys.readouterr().out
        assert ("by weights of [0.75, 0.25] until now, by [0.5, 0.5] from here on" in out) is said


def test_a_weight_of_the_only_data_set_says_nothing(tokens, tmp_path, capsys):
    run = tmp_path / "run"
    assert tiny_run.train(tiny_run.flags(tokens, run, "--exit-interval 2")) == 0
    capsys.readouterr()
    weighed = ["--data-path", "2", tokens, "--exit-interval", "4"]
    assert tiny_run.train(["--load", str(run), *weighed]) == 0
    assert "weights of" not in capsys.readouterr().out


def test_a_run_goes_on_with_batches_of_another_size_to_the_length_asked_for(tokens, tmp_path):
    run = tmp_path / "run"

    def end():
        last = tiny_run.events(run, "train")[-1]
        return last["iteration"], last["consumed_samples"]

    # A blend has no sample more than it is asked for.
    blend = f"--data-path 1 {tokens} 1 {tokens} --exit-interval 3"
    assert tiny_run.train(tiny_run.flags(tokens, run, blend)) == 0
    assert end() == (3, 3 * 4)
    go_on = ["--load", str(run), "--global-batch-size"]
    assert tiny_run.train([*go_on, "2"]) == 0
    assert end() == (8, 12 + 5 * 2)
    assert tiny_run.train([*go_on, "4", "--train-samples", "41", "--lr-decay-samples", "41"]) == 0
    assert end() == (12, 22 + 4 * 4)


def test_scripts_that_load_from_where_they_save_start_from_nothing(tokens, tmp_path):
    run = tmp_path / "run"
    script = tiny_run.flags(tokens, run, f"--load {run} --train-iters 4 --lr-decay-iters 4")
    assert tiny_run.train([*script, "--exit-interval", "2"]) == 0
    assert tiny_run.train([*script, "--exit-interval", "2"]) == 0
    assert len(tiny_run.losses(run)) == 4


def test_without_optimizer_state_rates_and_loss_scale_begin_anew(tokens, tmp_path):
    """Megatron's `load_checkpoint` takes the scheduler and the loss scale with the optimizer."""
    run = tmp_path / "run"
    more = "--fp16 --initial-loss-scale 64 --loss-scale-window 2 --log-interval 1 --train-iters 8"
    assert tiny_run.train(tiny_run.flags(tokens, run, more, "--exit-interval 3")) == 0
    assert tiny_run.train(["--load", str(run), "--no-load-optim", "--exit-interval", "6"]) == 0
    assert tiny_run.train(["--load", str(run), "--train-iters", "7"]) == 0
    events = tiny_run.events(run, "train")
    assert [event["iteration"] for event in events] == list(range(1, 8))
    for key in "lr", "loss_scale":
        first, second = ([event[key] for event in events[i : i + 3]] for i in (0, 3))
        assert first == second
    assert events[0]["lr"] < events[6]["lr"] < events[5]["lr"]  # counted on from the second start


def test_a_constant_loss_scale_is_the_one_said_last(tokens, tmp_path):
    run = tmp_path / "run"
    more = "--fp16 --initial-loss-scale 64 --log-interval 1"
    assert tiny_run.train(tiny_run.flags(tokens, run, more, "--exit-interval 2")) == 0
    for step, scale in (4, "128"), (6, "256"):
        again = ["--load", str(run), "--loss-scale", scale, "--exit-interval", str(step)]
        assert tiny_run.train(again) == 0
    scales = [event["loss_scale"] for event in tiny_run.events(run, "train")]
    assert scales == [64, 64, 128, 128, 256, 256]


def test_an_optimizer_that_keeps_nothing_goes_on_from_one_that_did(tokens, tmp_path):
    run = tmp_path / "run"
    assert tiny_run.train(tiny_run.flags(tokens, run, "--optimizer sgd --exit-interval 2")) == 0
    assert tiny_run.train(["--load", str(run), "--sgd-momentum", "0"]) == 0
    assert len(tiny_run.losses(run)) == 8


@pytest.mark.parametrize("missing", ["optimizer", "none"])
def test_a_checkpoint_without_optimizer_state(tokens, tmp_path, capsys, missing):
    run = tmp_path / "run"
    more = "--no-save-optim" if missing == "optimizer" else ""
    assert tiny_run.train(tiny_run.flags(tokens, run, "--exit-interval 2", more)) == 0
    code = tiny_run.train(["--load", str(run), "--train-iters", "4"])
    if missing == "none":
        assert code == 0
    else:
        assert code == 2
        assert "saved without optimizer state. Add --no-load-optim" in capsys.readouterr().err
        again = ["--load", str(run), "--train-iters", "4", "--no-load-optim"]
        assert tiny_run.train([*again, "--log-interval", "1"]) == 0
        # Steps 3 and 4 of a warm-up of two steps that begins anew; logged is the next step's rate.
        rates = [event["lr"] for event in tiny_run.events(run, "train")]
        assert rates[-2:] == [1.5e-3, 3e-3]
