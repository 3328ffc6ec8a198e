"""Checkpoints: whole or not there, exact, of this model, and no code from strangers."""

import os
import pickle
import threading
import time
import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from mb_parallel.testing import run_ranks
from mb_train.checkpoint import CheckpointError, Progress, load_checkpoint
from mb_train.run_folder import find_checkpoint, read_saved_run, set_aside
from mb_train.saver import Saver, checkpoints
from torch import nn


def make(width=5, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def step(model, optimizer):
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def begin(saver, model, optimizer, iteration=7):
    saver.save(
        model, optimizer, Progress(iteration, 10 * iteration),
        config={"seed": 1, "load": "x"}, identity={"width": 5}, data={"bin_bytes": [3]},
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _one_process():
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def save(folder, model, optimizer, iteration=7):
    begin(Saver(folder), model, optimizer, iteration)
    return folder / f"iter_{iteration:07d}"


def test_round_trip(tmp_path):
    model, optimizer = make()
    step(model, optimizer)
    path = save(tmp_path, model, optimizer)
    assert find_checkpoint(tmp_path) == find_checkpoint(path) == path
    saved = read_saved_run(path)
    assert (saved.iteration, saved.consumed_samples, saved.data) == (7, 70, {"bin_bytes": [3]})
    assert saved.inherited() == {"seed": 1}

    other, other_optimizer = make(seed=1)
    load_checkpoint(path, other, other_optimizer)
    for both in ((model, optimizer), (other, other_optimizer)):
        step(*both)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(optimizer.state[a]["exp_avg_sq"], other_optimizer.state[b]["exp_avg_sq"])


def test_saving_again_replaces_the_folder(tmp_path):
    model, optimizer = make()
    step(model, optimizer)
    first = save(tmp_path, model, optimizer)
    (first / "stray").touch()
    assert save(tmp_path, model, optimizer) == first
    assert not (first / "stray").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "iter_0000007", "latest_checkpointed_iteration.txt",
    ]  # fmt: skip


def test_a_failed_save_leaves_the_earlier_checkpoint_in_force(tmp_path, monkeypatch):
    model, optimizer = make()
    step(model, optimizer)
    first = save(tmp_path, model, optimizer)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, model, optimizer, iteration=8)
    monkeypatch.undo()
    assert find_checkpoint(tmp_path) == first
    save(tmp_path, model, optimizer, iteration=8)  # what the failure left is no obstacle
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000008"


def test_another_model_is_refused_by_name(tmp_path):
    model, optimizer = make()
    step(model, optimizer)
    path = save(tmp_path, model, optimizer)
    with pytest.raises(CheckpointError, match=r"model.0.bias is \[5\], expected \[6\]"):
        load_checkpoint(path, make(width=6)[0], None)
    with pytest.raises(CheckpointError, match=r"2 tensors are missing \(model.0.0.bias"):
        load_checkpoint(path, nn.Sequential(nn.Sequential(nn.Linear(3, 5))), None)
    with pytest.raises(CheckpointError, match=r"2 do not belong \(model.2.bias"):
        load_checkpoint(path, nn.Sequential(nn.Linear(3, 5)), None)
    with pytest.raises(ValueError, match="another model: its width is 5, this run's is 6"):
        read_saved_run(path).check_model({"width": 6})


def test_weights_alone(tmp_path):
    model, optimizer = make()
    step(model, optimizer)
    path = save(tmp_path, model, None)
    other, other_optimizer = make(seed=1)
    load_checkpoint(path, other, None)
    assert torch.equal(model[0].weight, other[0].weight)
    with pytest.raises(CheckpointError, match="without optimizer state"):
        load_checkpoint(path, other, other_optimizer)


class _Attack:
    def __reduce__(self):
        return os.system, ("true",)


@pytest.mark.parametrize("content", ["code", "eval", "garbage", "nothing", "list"])
def test_a_foreign_metadata_file_runs_nothing(tmp_path, content):
    model, optimizer = make()
    step(model, optimizer)
    path = save(tmp_path, model, optimizer)
    written = {
        "code": pickle.dumps(_Attack()),
        "eval": b"cbuiltins\neval\n(S'1'\ntR.",
        "garbage": b"\x93garbage",
        "nothing": b"",
        "list": pickle.dumps([1, 2]),
    }[content]
    (path / ".metadata").write_bytes(written)
    says = "no part of the format" if content in ("code", "eval") else "damaged|no checkpoint"
    with pytest.raises(CheckpointError, match=says):
        load_checkpoint(path, *make())


def test_metadata_that_leads_out_of_the_folder_is_refused(tmp_path):
    model, optimizer = make()
    step(model, optimizer)
    path = save(tmp_path, model, optimizer)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for key, info in metadata.storage_data.items():
        metadata.storage_data[key] = replace(info, relative_path="../other/__0_0.distcp")
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="points outside its folder"):
        load_checkpoint(path, *make())


@pytest.mark.parametrize("damage", ["truncated", "removed"])
def test_damaged_shards_are_reported(tmp_path, damage):
    model, optimizer = make()
    step(model, optimizer)
    path = save(tmp_path, model, optimizer)
    for shard in path.glob("*.distcp"):
        if damage == "removed":
            shard.unlink()
        else:
            shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(path, *make())


@pytest.mark.parametrize(
    ("latest", "says"),
    [("seven", "to hold an iteration, got 'seven'"), ("9", "names iteration 9, but .* holds no")],
)
def test_a_wrong_latest_file_is_reported(tmp_path, latest, says):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(latest)
    with pytest.raises(ValueError, match=says):
        find_checkpoint(tmp_path)


def test_a_damaged_run_file_is_reported(tmp_path):
    path = save(tmp_path, make()[0], None)
    text = (path / "run.json").read_text()
    for wrong, says in (
        (text[:50], "is damaged"),
        ("{}", "is damaged"),
        (text.replace('"format": 1', '"format": 2'), "in format 1, got 2"),
    ):
        (path / "run.json").write_text(wrong)
        with pytest.raises(ValueError, match=says):
            read_saved_run(path)


def test_setting_aside_keeps_data_and_counts_up(tmp_path):
    (tmp_path / "data").mkdir()
    assert set_aside(tmp_path) is None
    for number in (1, 2):
        (tmp_path / "log.jsonl").touch()
        assert set_aside(tmp_path) == tmp_path / f"previous-{number}"
    assert (tmp_path / "data").is_dir()
    assert not (tmp_path / "log.jsonl").exists()


def _async_ranks(rank, world_size, folder):
    """Save beside the training, train on at once, and return what was saved and what was loaded."""
    model, optimizer = make()
    step(model, optimizer)
    saver = Saver(folder, asynchronous=True)
    before = [p.detach().clone() for p in model.parameters()]
    begin(saver, model, optimizer)
    step(model, optimizer)
    done = None
    while done is None:
        time.sleep(0.01)
        done = saver.poll()
    saver.close()
    other, _ = make(seed=1)
    load_checkpoint(folder / "iter_0000007", other, None)
    return done, all(map(torch.equal, before, other.parameters()))


@pytest.mark.parametrize("ranks", [1, 2])
def test_saving_beside_the_training_keeps_the_state_of_its_moment(tmp_path, ranks):
    results = run_ranks(_async_ranks, 2, tmp_path) if ranks == 2 else [_async_ranks(0, 1, tmp_path)]
    assert results == [(7, True)] * ranks


def test_an_asynchronous_save_counts_only_when_it_is_whole(tmp_path, monkeypatch):
    model, optimizer = make()
    step(model, optimizer)
    saver = Saver(tmp_path, asynchronous=True)
    release = threading.Event()
    write = dcp.FileSystemWriter.write_data

    def slow(*arguments):
        assert release.wait(30)
        return write(*arguments)

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", slow)
    begin(saver, model, optimizer, 3)
    assert saver.poll() is None
    assert find_checkpoint(tmp_path) is None
    release.set()
    assert saver.wait() == 3
    assert saver.wait() is None
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000003"

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", fail)
    begin(saver, model, optimizer, 4)
    with pytest.raises(OSError, match=r"Cannot write a checkpoint to .*No space left"):
        saver.wait()
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000003"
    saver.close()


def test_only_the_last_few_are_kept(tmp_path):
    model, optimizer = make()
    step(model, optimizer)
    saver = Saver(tmp_path, keep=2)
    for iteration in (9, 10, 11):
        begin(saver, model, optimizer, iteration)
    assert [path.name for path in checkpoints(tmp_path)] == ["iter_0000010", "iter_0000011"]
