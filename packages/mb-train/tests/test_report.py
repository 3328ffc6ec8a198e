"""Curves from logs, resumed ones too, and the picture."""

import pytest
from mb_train.report import draw, read_curves, summary
from mb_train.reporting import RunLog


def write(folder, *events):
    log = RunLog(folder / "log.jsonl")
    for kind, values in events:
        log.write(kind, **values)
    log.close()


def interval(last, losses, load=None):
    return "train", {
        "iteration": last, "lm_losses": losses, "tokens_per_s": 100.0 * last,
        "load_imbalance": load or [],
    }  # fmt: skip


def valid(iteration, loss, place="iteration"):
    return "eval", {"iteration": iteration, "lm_loss": loss, "place": place}


def test_a_resumed_run_replaces_what_was_beyond_its_start(tmp_path):
    write(
        tmp_path,
        ("start", {"iteration": 0}),
        interval(2, [5.0, 4.0]),
        valid(2, 4.5),
        interval(4, [3.0, 2.0]),
        valid(4, 9.9),
        valid(4, 1.0, "the end of training for test data"),
        ("start", {"iteration": 2}),
        interval(3, [2.5]),
    )
    curves = read_curves(tmp_path)
    assert curves.loss == {1: 5.0, 2: 4.0, 3: 2.5}
    assert curves.valid == {2: 4.5}
    assert curves.tokens_per_s == {2: 200.0, 3: 300.0}
    assert "iterations 1 to 3: training loss 5.0000 -> 2.5000" in summary(tmp_path)


@pytest.mark.parametrize("load", [None, [1.5, 2.0], [1.0] * 12], ids=["dense", "moe", "deep"])
def test_the_picture(tmp_path, load):
    write(
        tmp_path,
        ("start", {"iteration": 0}),
        interval(2, [5.0, float("nan")], load),
        interval(3, [4.0], load),
        valid(3, 4.5),
    )
    path = draw(tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.jsonl", "loss.png"]
    assert ("expert load" in summary(tmp_path)) == (load is not None)


def test_nothing_to_draw_is_said(tmp_path):
    with pytest.raises(ValueError, match="to be a run folder with a"):
        read_curves(tmp_path)
    write(tmp_path, ("start", {"iteration": 0}))
    with pytest.raises(ValueError, match="holds no training step yet"):
        draw(tmp_path)
