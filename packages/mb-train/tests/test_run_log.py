"""RUN/log.jsonl, and what TensorBoard and Weights & Biases get of it."""

import math
import sys
import types

import pytest
from mb_train.config import TrainConfig
from mb_train.config.recipes import recipe
from mb_train.logs.boards import Boards, open_boards
from mb_train.logs.run_log import RunLog, read_log
from mb_train.train import train

RUN = {
    "num_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "seq_length": 8,
    "micro_batch_size": 8, "train_iters": 10, "lr": 6e-4,
}  # fmt: skip


class _Writer:
    def __init__(self, folder, max_queue):
        self.folder, self.added, self.closed = folder, {}, False
        _Writer.last = self

    def add_scalar(self, name, value, step):
        self.added[name] = (value, step)

    def close(self):
        self.closed = True


def board(monkeypatch, **switches):
    """The scalars that a small run writes."""
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = _Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    experts = {"num_layers": 2, "moe_num_experts": 4, "moe_first_k_dense": 1}
    config = TrainConfig(**RUN | experts, tensorboard_dir="boards", **switches)
    log = RunLog(None, open_boards(config, print))
    log.write("start", iteration=0)
    log.write(
        "train", iteration=5, consumed_samples=40, losses={"lm loss": 2.0}, lr=0.1, grad_norm=3.0,
        params_norm=None, batch_size=8, ms_per_iteration=500.0, tokens_per_s=9.0, ranks=3,
        load_imbalance=[1.5], loss_scale=4.0, timers={"optimizer": [1.0, 7.0]},
    )  # fmt: skip
    log.write(
        "eval", iteration=5, consumed_samples=40, place="iteration 5", losses={"lm loss": 2.5}
    )
    log.write("measured", iteration=5, place="iteration 5", accuracy=0.75)
    log.close()
    assert _Writer.last.closed
    return _Writer.last.added


def test_tensorboard_gets_megatrons_names(monkeypatch):
    added = board(monkeypatch)
    assert _Writer.last.folder == "boards"
    assert added["lm loss"] == (2.0, 5)
    assert added["lm loss vs samples"] == (2.0, 40)
    assert added["iteration-time"] == (0.5, 5)
    assert added["expert load max over mean/layer 1"] == (1.5, 5)
    assert added["lm loss validation"] == (2.5, 5)
    assert added["lm loss validation vs samples"] == (2.5, 40)
    assert added["accuracy validation"] == (0.75, 5)
    assert added["learning-rate"] == (0.1, 5)
    assert added["loss-scale"] == (4.0, 5)
    absent = {"params-norm", "batch-size", "world-size", "optimizer-time"}
    assert not absent & added.keys()
    assert "lm loss validation ppl" not in added


def test_switches_of_tensorboard(monkeypatch):
    added = board(
        monkeypatch, log_batch_size_to_tensorboard=True, log_world_size_to_tensorboard=True,
        log_timers_to_tensorboard=True, log_validation_ppl_to_tensorboard=True,
        log_loss_scale_to_tensorboard=False, log_learning_rate_to_tensorboard=False,
    )  # fmt: skip
    assert (added["batch-size"], added["world-size"]) == ((8, 5), (3, 5))
    assert added["optimizer-time"] == (0.007, 5)
    assert added["lm loss validation ppl"] == (pytest.approx(math.exp(2.5)), 5)
    assert not {"loss-scale", "learning-rate"} & added.keys()


def test_weights_and_biases(monkeypatch):
    module, points = types.ModuleType("wandb"), []
    run = types.SimpleNamespace(log=lambda values, step: points.append((step, values)),
                                finish=lambda: points.append("end"))  # fmt: skip
    started = {}
    module.init = lambda **settings: started.update(settings) or run
    module.Error = KeyError
    monkeypatch.setitem(sys.modules, "wandb", module)
    config = TrainConfig(
        **RUN, wandb_project="moe", wandb_exp_name="a", save="runs/a", wandb_entity="us"
    )
    log = RunLog(None, open_boards(config, print))
    log.write("eval", iteration=5, place="iteration 5", losses={"lm loss": 2.5})
    log.close()
    assert points == [(5, {"lm loss validation": 2.5}), "end"]
    assert (started["project"], started["name"], started["dir"]) == ("moe", "a", "runs/a")
    assert started["entity"] == "us"
    assert started["config"]["hidden_size"] == 16
    module.init = lambda **settings: {}["no API key"]
    with pytest.raises(ValueError, match="--wandb-project moe: 'no API key'"):
        open_boards(config, print)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="pip install wandb"):
        open_boards(config, print)


def test_tensorboard_missing_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"pip install 'mb-train\[tensorboard\]'"):
        open_boards(TrainConfig(**RUN, tensorboard_dir="boards"), print)


@pytest.mark.parametrize(("module", "flag"), [
    ("torch.utils.tensorboard", "tensorboard_dir"), ("wandb", "wandb_project"),
])  # fmt: skip
def test_a_board_without_its_package_is_refused_before_there_is_a_model(
    tmp_path, monkeypatch, module, flag
):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(
        "mb_train.train.run.make_task", lambda *_, **__: pytest.fail("made a model")
    )
    config = TrainConfig(**recipe("quickstart") | {"save": str(tmp_path / "run"), flag: "a"})
    with pytest.raises(ValueError, match="pip install"):
        train(config)
    assert not (tmp_path / "run").exists()


def test_a_board_that_fails_is_left_out_and_ends_no_run():
    said, points = [], []
    full = types.SimpleNamespace(
        name="A", add=lambda *_: {}["full"], close=lambda: points.append(0)
    )
    fine = types.SimpleNamespace(name="B", add=lambda *a: points.append(a), close=lambda: 1 / 0)
    config = TrainConfig(**RUN, log_validation_ppl_to_tensorboard=True)
    log = RunLog(None, Boards([full, fine], config, said.append))
    for iteration in (5, 6):
        log.write("eval", iteration=iteration, place="x", losses={"loss": 0.0})
    log.close()
    shown = {"loss validation": 0.0, "loss validation ppl": 1.0}
    assert points == [(shown, 5, None), (shown, 6, None)]
    assert said == [
        " A takes no more: KeyError: 'full'",
        " B takes no more: ZeroDivisionError: division by zero",
    ]


def test_a_line_that_no_parser_takes_is_torn(tmp_path):
    (tmp_path / "log.jsonl").write_text("[" * 50_000 + "\n")
    assert read_log(tmp_path / "log.jsonl") == [{"event": "torn", "line": 1}]


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


def test_what_an_editor_leaves_is_no_event(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"event": "start"}\r\n\r\n \n{"event": "tr\n')
    assert read_log(path) == [{"event": "start"}, {"event": "torn", "line": 4}]


def test_what_a_full_disk_never_takes_is_told(tmp_path):
    resource = pytest.importorskip("resource")  # not on Windows
    path = tmp_path / "log.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    log = RunLog(path)
    log.write("a", n=1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, limits[1]))
    try:
        log.write("b", n=2)
        log.write("c", n=3)
        with pytest.warns(RuntimeWarning, match=r"log\.jsonl lacks the last 2 events .*too large"):
            log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [e["event"] for e in read_log(path)] == ["a", "torn"]


def test_what_a_full_disk_does_not_take_is_written_later(tmp_path, monkeypatch):
    log = RunLog(tmp_path / "log.jsonl")
    log.write("a", n=1)
    real, room = log._file, 5

    class Full:
        def write(self, content):
            nonlocal room
            if not room:
                raise OSError(28, "No space left on device")
            written, room = content[:room], 0
            return real.write(written)

    log._file = Full()
    log.write("b", n=2)
    log.write("c", n=3)
    log._file = real
    log.write("d", n=4)
    log.close()
    assert [e["event"] for e in read_log(tmp_path / "log.jsonl")] == ["a", "b", "c", "d"]
