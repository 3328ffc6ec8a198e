"""Checkpoints: whole or not there, exact, of this model, and no code from strangers."""

import hashlib
import io
import math
import os
import pickle
import re
import signal
import subprocess
import threading
import time
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hostile_pickle import Attack
from mb_parallel.testing import run_ranks
from mb_train.checkpoint import host_copy, read, snapshot, writer
from mb_train.checkpoint import summed_file as summing
from mb_train.checkpoint.errors import CheckpointError
from mb_train.checkpoint.metadata import read_metadata
from mb_train.checkpoint.read import Progress, load_checkpoint
from mb_train.checkpoint.saver import Saver
from mb_train.checkpoint.summed_file import SummedFile, summed_file
from mb_train.config.outputs import CheckpointingFields
from mb_train.folder.checksums import format_sums, sum_of
from mb_train.folder.run_folder import (
    LATEST,
    SavedRun,
    checkpoints,
    find_checkpoint,
    iteration_of,
    read_saved_run,
)
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties


def make(width=5, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def step(model, optimizer):
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def begin(saver, model, optimizer, iteration=7):
    return saver.save(
        model, optimizer, Progress(iteration, 10 * iteration),
        config={"seed": 1, "load": "x"}, identity={"width": 5}, data={"bin_bytes": [3]},
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _one_process():
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def save(folder, model, optimizer, iteration=7):
    begin(Saver(folder), model, optimizer, iteration)
    return folder / f"iter_{iteration:07d}"


def test_a_loaded_run_takes_the_step_that_the_saved_one_takes(tmp_path):
    model, optimizer = make()
    step(model, optimizer)
    path = save(tmp_path, model, optimizer)
    assert find_checkpoint(tmp_path) == find_checkpoint(path) == path
    saved = read_saved_run(path)
    assert (saved.iteration, saved.consumed_samples, saved.data) == (7, 70, {"bin_bytes": [3]})
    assert saved.inherited() == {"seed": 1}

    other, other_optimizer = make(seed=1)
    load_checkpoint(path, other, other_optimizer)
    # Of the step that made its state nothing is left; a zero would decay what gets no gradient.
    assert all(p.grad is None for p in other.parameters())
    assert other_optimizer.param_groups[0]["lr"] == 0.1
    for both in ((model, optimizer), (other, other_optimizer)):
        step(*both)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(optimizer.state[a]["exp_avg_sq"], other_optimizer.state[b]["exp_avg_sq"])


def test_a_checkpoint_that_does_not_fit_leaves_the_weights(tmp_path):
    model, optimizer = make()
    step(model, optimizer)
    path = save(tmp_path, model, optimizer)
    other, other_optimizer = make(width=6)
    before = [p.detach().clone() for p in other.parameters()]
    with pytest.raises(CheckpointError, match="of another model"):
        load_checkpoint(path, other, other_optimizer)
    assert all(map(torch.equal, other.parameters(), before))


def test_a_large_state_is_spread_over_files_and_read_back(tmp_path, monkeypatch):
    """Several are written at a time."""
    monkeypatch.setattr(writer, "_FILE_BYTES", 100)
    model, optimizer = make(width=30)
    step(model, optimizer)
    path = save(tmp_path, model, optimizer)
    tensors = [t for p in model.parameters() for t in (p, *optimizer.state[p].values())]
    metadata, held = dcp.FileSystemReader(path).read_metadata(), Counter()
    for index, place in metadata.storage_data.items():
        held[place.relative_path] += 4 * math.prod(metadata.state_dict_metadata[index.fqn].size)
    largest = 4 * 90
    assert sum(held.values()) == sum(tensor.nbytes for tensor in tensors)
    assert len(held) > 3
    assert max(held.values()) < 100 + largest
    assert sorted(held) == sorted(file.name for file in path.glob("*.distcp"))

    other, other_optimizer = make(width=30, seed=1)
    load_checkpoint(path, other, other_optimizer)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(optimizer.state[a]["exp_avg"], other_optimizer.state[b]["exp_avg"])
    damaged = max(path.glob("*.distcp"))
    damaged.write_bytes(b"x" + damaged.read_bytes()[1:])
    with pytest.raises(CheckpointError, match=damaged.name):
        load_checkpoint(path, other, other_optimizer)


def test_the_files_are_those_of_torchs_writer(tmp_path):
    """Each tensor as `torch.save` writes it, of any size, dtype and layout, for any reader."""
    model = nn.Module()
    for name, tensor in {
        "small": torch.ones(3), "large": torch.rand(700, 801), "none": torch.empty(0, 4),
        "bf16": torch.rand(5, 7).bfloat16(), "fp8": torch.rand(8).to(torch.float8_e4m3fn),
        "transposed": torch.rand(6, 9).mT, "of_a_larger": torch.rand(100)[20:30],
    }.items():  # fmt: skip
        model.register_buffer(name, tensor)
    path = save(tmp_path, model, None)
    state = {f"model.{name}": buffer for name, buffer in model.named_buffers()}
    places = dcp.FileSystemReader(path).read_metadata().storage_data
    assert {index.fqn for index in places} == state.keys()
    for index, place in places.items():
        saved = io.BytesIO()
        tensor = state[index.fqn]
        torch.save(tensor.clone() if index.fqn == "model.of_a_larger" else tensor, saved)
        written = (path / place.relative_path).read_bytes()[place.offset :][: place.length]
        assert written == saved.getvalue()
    loaded = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    dcp.load(loaded, checkpoint_id=path)
    for name, tensor in state.items():
        assert torch.equal(loaded[name].float(), tensor.float())


def test_small_tensors_are_written_together_and_large_ones_whole():
    """Every call of the system takes the interpreter's lock from the steps beside it."""

    class File(io.RawIOBase):
        def __init__(self):
            self.content, self.calls = b"", 0

        def writable(self):
            return True

        def write(self, data):
            self.content += bytes(data)
            self.calls += 1
            return len(data)

    raw = File()
    with io.BufferedWriter(raw, 2**20) as stream:
        summed = SummedFile(stream)
        for _ in range(50):
            torch.save(torch.ones(3), summed)
        assert raw.calls == 0
        torch.save(torch.ones(2**20), summed)
        assert raw.calls == 2
    assert summed.size == len(raw.content) > 2**22
    assert summed.sum() == hashlib.sha256(raw.content).hexdigest()


@pytest.mark.parametrize("begins", [True, False], ids=["linux", "elsewhere"])
def test_a_file_goes_to_the_disk_while_it_is_written(begins, tmp_path, monkeypatch):
    path, there = tmp_path / "file", []

    def begin(descriptor, offset, length, advice):
        assert (offset, length, advice) == (0, 0, 4)  # POSIX_FADV_DONTNEED
        there.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(summing, "_AHEAD_BYTES", 1000)
    monkeypatch.setattr(os, "POSIX_FADV_DONTNEED", 4, raising=False)
    if begins:
        monkeypatch.setattr(os, "posix_fadvise", begin, raising=False)
    else:
        monkeypatch.delattr(os, "posix_fadvise", raising=False)
    with summed_file(path) as file:
        for _ in range(5):
            file.write(b"x" * 400)
    assert there == ([1200] if begins else [])
    assert file.size == path.stat().st_size == 2000
    assert file.sum() == hashlib.sha256(b"x" * 2000).hexdigest()


def test_stages_on_one_rank_that_share_a_name_both_get_it(tmp_path):
    """An interleaved schedule's rank has a copy of a tied table in each of its stages."""
    model, optimizer = make()
    step(model, optimizer)
    path = save(tmp_path, model, optimizer)
    stages = [make(seed=seed)[0] for seed in (1, 2)]
    both = torch.optim.AdamW([p for m in stages for p in m.parameters()], lr=0.1, fused=True)
    load_checkpoint(path, stages, both)
    for stage in stages:
        for a, b in zip(model.parameters(), stage.parameters(), strict=True):
            assert torch.equal(a, b)
            assert torch.equal(optimizer.state[a]["exp_avg"], both.state[b]["exp_avg"])
            assert torch.equal(optimizer.state[a]["step"], both.state[b]["step"])


class OneTower(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query = nn.BatchNorm1d(width)  # parameters and buffers
        self.block = self.query


def test_what_a_module_has_under_two_names_is_written_once(tmp_path):
    model = OneTower(3)
    path = save(tmp_path, model, None)
    names = set(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
    assert names == {f"model.query.{name}" for name in nn.BatchNorm1d(3).state_dict()}
    other = OneTower(3)
    nn.init.zeros_(other.query.weight)
    load_checkpoint(path, other, None)
    assert torch.equal(other.block.weight, model.block.weight)
    two = nn.ModuleDict({name: nn.BatchNorm1d(3) for name in ("query", "block")})
    with pytest.raises(CheckpointError, match="another model"):  # two towers are not one
        load_checkpoint(path, two, None)


def test_a_checkpoint_that_is_there_is_not_replaced(tmp_path):
    """A kill between the renames of such an exchange left neither under its name."""
    model, optimizer = make()
    step(model, optimizer)
    first, said = save(tmp_path, model, optimizer), []
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    step(model, optimizer)
    assert not begin(Saver(tmp_path, say=said.append), model, optimizer)
    assert "could not save iteration 7: FileExistsError: [Errno 17] A checkpoint of" in said[-1]
    assert str(first) in said[-1]
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    begin(Saver(tmp_path), model, optimizer, 8)
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000008"


def full(*_, **__):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("where", ["mkdir", "write_data", "fsync", "finish", "rename"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_failed_save_is_said_and_leaves_nothing_behind(
    tmp_path, monkeypatch, where, asynchronous
):
    model, optimizer = make()
    step(model, optimizer)
    first = save(tmp_path, model, optimizer)
    before = sorted(tmp_path.iterdir())
    said = []
    saver = Saver(tmp_path, asynchronous=asynchronous, say=said.append)
    with monkeypatch.context() as patch:
        owner = {"mkdir": Path, "rename": os, "fsync": os}.get(where, writer.Writer)
        patch.setattr(owner, where, full)
        begin(saver, model, optimizer, 8)
        saver.wait()
    assert "could not save iteration 8: OSError" in said[-1]
    assert "No space left" in said[-1]
    assert "The latest checkpoint is that of iteration 7." in said[-1]
    assert sorted(tmp_path.iterdir()) == before
    assert find_checkpoint(tmp_path) == first
    assert saver.latest is None
    begin(saver, model, optimizer, 9)  # the failure is no obstacle
    saver.wait()
    saver.close()
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000009"
    assert saver.latest == 9


def test_a_disk_without_room_for_the_name_of_the_latest_keeps_no_checkpoint_beside_it(
    tmp_path, monkeypatch
):
    """It would not be gone on from, and be moved aside by the run that goes on."""
    model, optimizer = make()
    first = save(tmp_path, model, optimizer)
    before, opened, said = sorted(tmp_path.iterdir()), Path.open, []

    def open_but_latest(path, mode="r", *arguments, **options):
        if path.name.startswith(LATEST) and mode != "r":
            full()
        return opened(path, mode, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_but_latest)
        assert not begin(Saver(tmp_path, say=said.append), model, optimizer, 8)
    assert said[-1].endswith("The latest checkpoint is that of iteration 7.")
    assert sorted(tmp_path.iterdir()) == before
    assert find_checkpoint(tmp_path) == first
    assert begin(Saver(tmp_path), model, optimizer, 8)
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000008"


def _on_a_full_disk(rank, world_size, folder):
    """What is said of a save that fits and of one that does not."""
    import resource  # which Windows has not

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    said = []
    saver = Saver(folder, say=said.append)
    none = {"config": {}, "identity": {}, "data": {}}
    saver.save(nn.Linear(8, 8), None, Progress(1, 1), **none)
    saver.save(nn.Linear(800, 800), None, Progress(2, 2), **none)
    return said


def test_a_ctrl_c_in_a_save_is_no_failed_save(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(writer, "sum_of", interrupted)
    said = []
    with pytest.raises(KeyboardInterrupt):
        begin(Saver(tmp_path, say=said.append), *make())
    assert [line for line in said if "could not save" in line] == []
    assert list(tmp_path.iterdir()) == []


def test_a_ctrl_c_while_a_checkpoint_is_read_does_not_call_it_damaged(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    model, _ = make()
    path = save(tmp_path, model, None)
    monkeypatch.setattr(dcp.FileSystemReader, "read_data", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_checkpoint(path, model, None)


@pytest.mark.parametrize(
    "lack",
    [MemoryError(), torch.OutOfMemoryError("CUDA"), RuntimeError("DefaultCPUAllocator: no room")],
    ids=["host", "gpu", "torch"],
)
def test_a_lack_of_memory_while_a_checkpoint_is_read_does_not_call_it_damaged(
    tmp_path, monkeypatch, lack
):
    def lacking(*_):
        raise lack

    model, _ = make()
    path = save(tmp_path, model, None)
    monkeypatch.setattr(dcp.FileSystemReader, "read_data", lacking)
    with pytest.raises(type(lack)) as told:
        load_checkpoint(path, model, None)
    assert told.value is lack


@pytest.mark.parametrize(
    "at", ["mb_train.checkpoint.saver.any_rank", "torch.distributed.checkpoint.save"]
)
def test_the_loss_of_another_rank_leaves_no_half_checkpoint(tmp_path, monkeypatch, at):
    def lost(*_, **__):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(at, lost)
    with pytest.raises(RuntimeError, match="closed by peer"):
        begin(Saver(tmp_path), *make())
    assert list(tmp_path.iterdir()) == []


def test_what_the_kernel_refuses_to_write_is_no_checkpoint(tmp_path):
    """The kernel's own refusal to write on, in a process with a limit on the size of files."""
    (said,) = run_ranks(_on_a_full_disk, 1, tmp_path)
    told = rf"could not save iteration 2: OSError: .* File too large: '{tmp_path}/.*distcp'"
    assert re.search(told, said[-1])
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "iter_0000001", "latest_checkpointed_iteration.txt",
    ]  # fmt: skip


def test_a_folder_that_is_gone_fails_the_save_alone(tmp_path):
    said = []
    (tmp_path / "file").touch()
    begin(Saver(tmp_path / "file" / "run", say=said.append), *make())
    assert "could not save iteration 7" in said[-1]
    assert said[-1].endswith("There is no checkpoint yet.")


def test_weights_that_are_not_numbers_are_not_saved(tmp_path):
    model, optimizer = make()
    first = save(tmp_path, model, None)
    said = []
    saver = Saver(tmp_path, keep=1, say=said.append)
    with torch.no_grad():
        model[2].bias.fill_(torch.nan)
    assert begin(saver, model, optimizer, 8) is False
    assert "not saved: at iteration 8 the weights are not numbers" in said[-1]
    assert checkpoints(tmp_path) == [first]


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


def test_weights_can_be_loaded_without_the_optimizer(tmp_path):
    model, optimizer = make()
    step(model, optimizer)
    path = save(tmp_path, model, None)
    other, other_optimizer = make(seed=1)
    load_checkpoint(path, other, None)
    assert torch.equal(model[0].weight, other[0].weight)
    with pytest.raises(CheckpointError, match="without optimizer state"):
        load_checkpoint(path, other, other_optimizer)


def sum_again(path):
    """What one who wants his file loaded would do."""
    sums = {p.name: sum_of(p) for p in path.iterdir() if p.name != "SHA256SUMS"}
    (path / "SHA256SUMS").write_text(format_sums(sums))


@pytest.mark.parametrize("content", ["code", "eval", "garbage", "nothing", "list", "class"])
def test_a_foreign_metadata_file_runs_nothing(tmp_path, content):
    model, optimizer = make()
    step(model, optimizer)
    path = save(tmp_path, model, optimizer)
    written = {
        "code": pickle.dumps(Attack(os.system, "true")),
        "eval": b"cbuiltins\neval\n(S'1'\ntR.",
        "garbage": b"\x93garbage",
        "nothing": b"",
        "list": pickle.dumps([1, 2]),
        "class": f"c{Metadata.__module__}\nMetadata\n(N(S'changed'\nI1\ndtb.".encode(),
    }[content]
    (path / ".metadata").write_bytes(written)
    sum_again(path)
    says = "no part of the format" if content in ("code", "eval") else "damaged|no checkpoint"
    with pytest.raises(CheckpointError, match=says):
        load_checkpoint(path, *make())
    assert not hasattr(Metadata, "changed")


def test_what_torch_2_15_wrote_is_read_by_any_torch(tmp_path, monkeypatch):
    known = TensorProperties.__getstate__
    model, optimizer = make()
    step(model, optimizer)
    with monkeypatch.context() as later:  # it adds strides
        later.setattr(TensorProperties, "__getstate__", lambda self: (*known(self)[:5], (3, 1)))
        path = save(tmp_path, model, optimizer)
    other, other_optimizer = make(seed=1)
    load_checkpoint(path, other, other_optimizer)
    assert torch.equal(model[0].weight, other[0].weight)


@pytest.mark.parametrize("kind", ["pathlib._local\nPosixPath", "pathlib\nWindowsPath"])
def test_a_place_on_another_python_or_system_is_no_damage(tmp_path, kind):
    """Python 3.13 calls its paths so; a checkpoint's metadata says where it was written."""
    (tmp_path / ".metadata").write_bytes(f"c{kind}\n(S'there'\ntR.".encode())
    with pytest.raises(CheckpointError, match="is no checkpoint's metadata"):
        read_metadata(tmp_path / ".metadata")


def test_tensors_that_cannot_be_read_are_no_checkpoint(tmp_path):
    """Whole files, but no tensors in them."""
    model, optimizer = make()
    step(model, optimizer)
    path = save(tmp_path, model, optimizer)
    shards = path / "__0_0.distcp"
    shards.write_bytes(bytes(len(shards.read_bytes())))
    sum_again(path)
    with pytest.raises(CheckpointError, match=f"{path.name} is damaged: .*Error"):
        load_checkpoint(path, *make())


def test_metadata_that_leads_out_of_the_folder_is_refused(tmp_path):
    model, optimizer = make()
    step(model, optimizer)
    path = save(tmp_path, model, optimizer)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for key, info in metadata.storage_data.items():
        metadata.storage_data[key] = replace(info, relative_path="../other/__0_0.distcp")
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    sum_again(path)
    with pytest.raises(CheckpointError, match="points outside its folder"):
        load_checkpoint(path, *make())


@pytest.mark.parametrize("damage", ["truncated", "removed", "flipped"])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "run.json", "SHA256SUMS"])
def test_a_damaged_file_is_named_and_the_checkpoint_before_offered(tmp_path, damage, name):
    model, optimizer = make()
    step(model, optimizer)
    good = save(tmp_path, model, optimizer, 4)
    # Neither is to be offered.
    (save(tmp_path, model, optimizer, 5) / "SHA256SUMS").unlink()
    (save(tmp_path, model, optimizer, 6) / "run.json").write_text("{}")
    path = save(tmp_path, model, optimizer, 7)
    content = (path / name).read_bytes()
    if damage == "removed":
        (path / name).unlink()
    elif damage == "truncated":
        (path / name).write_bytes(content[: len(content) // 2])
    else:
        middle = len(content) // 2
        (path / name).write_bytes(
            content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        )
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, *make())
    # A flipped bit in the list of sums may show as a wrong file.
    assert name in str(caught.value) or (name, damage) == ("SHA256SUMS", "flipped")
    assert f"{good} is whole: go on from there with --load {good}" in str(caught.value)


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_list_of_sums_that_is_cut_off_leaves_nothing_unchecked(tmp_path, kept):
    """A copy onto a full disk may end so; an empty list was one that all files agreed with."""
    model, optimizer = make()
    for iteration in (4, 5):
        path = save(tmp_path, model, optimizer, iteration)
        lines = (path / "SHA256SUMS").read_text().splitlines(keepends=True)
        (path / "SHA256SUMS").write_text("".join(lines[:kept]))
    assert len(lines) == 3
    says = f"SHA256SUMS does not list {lines[kept][66:-1]}.* No checkpoint before it is whole"
    with pytest.raises(CheckpointError, match=says):
        load_checkpoint(path, *make())


@pytest.mark.parametrize("after", ["_check_sums", "compare"])
def test_a_checkpoint_removed_while_it_is_read_is_not_called_damaged(
    tmp_path, monkeypatch, after, caplog
):
    """The run that writes there, with --keep-checkpoints, does not know who reads."""
    model, optimizer = make()
    step(model, optimizer)
    path, other = save(tmp_path, model, optimizer, 4), save(tmp_path, model, optimizer, 5)
    before = getattr(read, after)

    def removed(*arguments, **named):
        before(*arguments, **named)
        path.rename(tmp_path / "gone")

    monkeypatch.setattr(read, after, removed)
    says = rf"was removed while it was read.* There is {re.escape(str(other))}: give that to --load"
    with pytest.raises(CheckpointError, match=says):
        load_checkpoint(path, *make())
    assert "WARNING" not in {record.levelname for record in caplog.records}  # of torch, a traceback


def test_every_single_flipped_bit_is_found(tmp_path):
    model, optimizer = make()
    step(model, optimizer)
    path = save(tmp_path, model, optimizer)
    files = sorted(p for p in path.iterdir())
    generator = torch.Generator().manual_seed(0)
    for file in files:
        content = file.read_bytes()
        for bit in torch.randint(8 * len(content), (30,), generator=generator).tolist():
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            file.write_bytes(flipped)
            with pytest.raises(CheckpointError):
                load_checkpoint(path, *make())
        file.write_bytes(content)
    load_checkpoint(path, *make())


@pytest.mark.parametrize("read", ["hashlib.file_digest", "pathlib.Path.read_bytes"])
def test_a_file_that_the_disk_does_not_give_is_named(tmp_path, monkeypatch, read):
    """The kernel's error of a read knows no name."""
    model, optimizer = make()
    begin(Saver(tmp_path), model, optimizer)
    folder = find_checkpoint(tmp_path)

    def unreadable(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(read, unreadable)
    with pytest.raises(CheckpointError, match=rf"Input/output error: '{folder}/[\w.]+'"):
        load_checkpoint(folder, model, optimizer)


def test_the_sums_are_those_of_sha256sum(tmp_path):
    path = save(tmp_path, make()[0], None)
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=path, check=True)


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
        ("[]", "is damaged"),
        (text.replace('"iteration": 7', '"iteration": "7"'), "damaged: its iteration is '7'"),
        (text.replace('"iteration": 7', '"iteration": -7'), "damaged: its iteration is -7"),
        (text.replace('"consumed_samples": ', f'"consumed_samples": {2**63}'), "its consumed_sam"),
        ('{"format": ' + "[" * 200_000, "nested too deeply"),
        (text.replace('"torch"', '"troch"'), "key that this mb-train does not know: 'troch'"),
        (text.replace('"format": 2', '"format": 3'), "in format 2, got 3"),
        (text.replace('"format": 2', '"format": 1'), "in format 2, got 1"),
    ):
        (path / "run.json").write_text(wrong)
        with pytest.raises(ValueError, match=says):
            read_saved_run(path)
    for rows in (None, "512", 0, -5, 1.5, True, 10**12):
        wrong = SavedRun(2, 7, 7, {}, {"padded_vocab_size": rows}, {}, "2", 0.0, {})
        with pytest.raises(ValueError, match="padded_vocab_size is"):
            _ = wrong.vocab_rows
    (path / "run.json").unlink()
    (path / "run.json").mkdir()
    with pytest.raises(ValueError, match=r"Cannot read .*run\.json: Is a directory\.$"):
        read_saved_run(path)


def _async_ranks(rank, world_size, folder):
    """Save beside the training, train on at once, and return what was saved and what was loaded."""
    model, optimizer = make()
    step(model, optimizer)
    saver = Saver(folder, asynchronous=True)
    before = [p.detach().clone() for p in model.parameters()]
    begin(saver, model, optimizer)
    step(model, optimizer)
    while not saver.poll():
        time.sleep(0.01)
    saver.close()
    other, _ = make(seed=1)
    load_checkpoint(folder / "iter_0000007", other, None)
    return saver.latest, all(map(torch.equal, before, other.parameters()))


@pytest.mark.parametrize("ranks", [1, 2])
def test_saving_beside_the_training_keeps_the_state_of_its_moment(tmp_path, ranks):
    results = run_ranks(_async_ranks, 2, tmp_path) if ranks == 2 else [_async_ranks(0, 1, tmp_path)]
    assert results == [(7, True)] * ranks


def test_an_asynchronous_save_counts_only_when_it_is_whole(tmp_path, monkeypatch):
    model, optimizer = make()
    step(model, optimizer)
    saver = Saver(tmp_path, asynchronous=True)
    release = threading.Event()
    write = writer.Writer.write_data

    def slow(*arguments):
        assert release.wait(30)
        return write(*arguments)

    monkeypatch.setattr(writer.Writer, "write_data", slow)
    begin(saver, model, optimizer, 3)
    assert not saver.poll()
    assert find_checkpoint(tmp_path) is None
    release.set()
    assert saver.wait()
    assert not saver.wait()
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000003"
    saver.close()


def test_which_checkpoint_is_in_force_cannot_always_be_read(tmp_path):
    (tmp_path / LATEST).mkdir()  # as a failing disk, an OSError
    assert Saver(tmp_path).in_force().startswith(f"Cannot read {tmp_path / LATEST}: ")


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_only_those_written_last_are_kept(tmp_path, asynchronous):
    model, optimizer = make()
    step(model, optimizer)
    saver = Saver(tmp_path, keep=2, asynchronous=asynchronous)
    for iteration in (9, 10, 11, 4):  # back to an earlier iteration
        assert begin(saver, model, optimizer, iteration)
    saver.wait()
    assert [path.name for path in checkpoints(tmp_path)] == ["iter_0000004", "iter_0000011"]
    begin(saver, model, optimizer, 5)
    saver.wait()
    saver.close()
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000005"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "iter_0000004", "iter_0000005", "latest_checkpointed_iteration.txt",
    ]  # fmt: skip


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_link_to_a_checkpoint_goes_without_what_it_leads_to(tmp_path, asynchronous):
    model, _ = make()
    run, disk = tmp_path / "run", tmp_path / "disk"
    saver = Saver(run, keep=1, asynchronous=asynchronous)
    begin(saver, model, None, 1)
    saver.wait()
    (run / "iter_0000001").rename(disk)
    (run / "iter_0000001").symlink_to(disk)
    begin(saver, model, None, 2)
    saver.wait()
    saver.close()
    assert sorted(os.listdir(run)) == ["iter_0000002", LATEST]
    assert (disk / "run.json").is_file()


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ({"save_retain_interval": 4}, [4, 8, 10]),
        ({"save_retain_interval": 4, "keep_checkpoints": 2}, [4, 8, 9, 10]),
        ({"save_retain_interval": None}, [*range(1, 11)]),
    ],
    ids=str,
)
def test_those_of_every_so_many_steps_are_kept(tmp_path, flags, kept):
    fields = CheckpointingFields(save_interval=1, **flags)
    model, _ = make()
    keep, retain = fields.checkpoints_kept, fields.save_retain_interval
    saver = Saver(tmp_path, keep=keep, retain=retain)
    for iteration in range(1, 11):
        begin(saver, model, None, iteration)
    assert list(map(iteration_of, checkpoints(tmp_path))) == kept


def test_checkpoints_to_keep_have_to_be_written():
    with pytest.raises(ValueError, match=r"a multiple of --save-interval 4, got 6\."):
        CheckpointingFields(save_interval=4, save_retain_interval=6).check_checkpointing()
    CheckpointingFields(save_interval=0, save_retain_interval=6).check_checkpointing()


def test_those_written_last_stay_although_the_clock_went_back(tmp_path, monkeypatch):
    """Between two runs, say, of which the second is on another host."""
    model, _ = make()
    saver = Saver(tmp_path, keep=2)
    for iteration in (1, 2):
        begin(saver, model, None, iteration)
    monkeypatch.setattr(time, "time", lambda: 5.0)
    saver = Saver(tmp_path, keep=2)
    for iteration in (3, 4):
        begin(saver, model, None, iteration)
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000004"
    assert [path.name for path in checkpoints(tmp_path)] == ["iter_0000003", "iter_0000004"]


class _Counting(torch.optim.Optimizer):
    """Keeps plain numbers in its state, and none for parameters without a gradient."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    new = {"steps": 0, "share": 1.0, "sum": torch.zeros_like(p)}
                    state = self.state.setdefault(p, new)
                    state["steps"] += 1
                    state["share"] /= 3
                    state["sum"] += p.grad


def test_numbers_and_gaps_in_an_optimizers_state_are_kept(tmp_path):
    model, _ = make()
    optimizer = _Counting(model.parameters())
    model[0](torch.ones(1, 3)).sum().backward()
    for _ in range(3):
        optimizer.step()
    path = save(tmp_path, model, optimizer)
    other, _ = make(seed=1)
    fresh = _Counting(other.parameters())
    load_checkpoint(path, other, fresh)
    assert len(fresh.state) == 2
    for a, b in zip(model[0].parameters(), other[0].parameters(), strict=True):
        assert fresh.state[b]["steps"] == 3
        assert type(fresh.state[b]["steps"]) is int
        assert fresh.state[b]["share"] == optimizer.state[a]["share"]
        assert torch.equal(fresh.state[b]["sum"], optimizer.state[a]["sum"])
    assert fresh.param_groups[0]["lr"] == 0.1
    assert all(p.grad is None for p in other.parameters())


def test_names_do_not_change_by_what_is_wrapped_around_a_module(tmp_path):
    model, _ = make()
    model[0].compile()  # in place: no new name
    wrapped = nn.Sequential(torch.compile(make(seed=1)[0][0]), *make(seed=1)[0][1:])
    assert any("_orig_mod" in name for name, _ in wrapped.named_parameters())
    load_checkpoint(save(tmp_path, model, None), wrapped, None)
    assert torch.equal(wrapped[0].weight, model[0].weight)


def test_a_copy_on_the_device_has_to_fit_beside_the_largest_step(monkeypatch):
    """In what the device has free, and what the allocator holds beyond the most it has given."""
    for name, value in (("mem_get_info", (100, 500)), ("memory_reserved", 50)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 20)

    def fits(*sizes):
        shards = [SimpleNamespace(is_cuda=n > 1, nbytes=n, device="cuda") for n in sizes]
        return snapshot.fits_on_device(shards)

    assert fits(100, 1, 23)
    assert not fits(100, 24)  # 1.05 x 124 of 130
    assert not fits(1)


@pytest.mark.parametrize(
    ("device", "room"),
    [
        ("cpu", False),
        pytest.param("cuda", True, marks=pytest.mark.gpu),
        pytest.param("cuda", False, marks=pytest.mark.gpu),
    ],
)
def test_a_snapshot_keeps_the_state_of_its_moment(tmp_path, monkeypatch, device, room):
    model, optimizer = make(width=1000)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    x = torch.ones(2, 3, device=device)
    model(x).square().sum().backward()
    optimizer.step()
    monkeypatch.setattr(host_copy, "_BUFFER_BYTES", 1024)
    where = {"on_device": None if room else False}
    saver = Saver(tmp_path, asynchronous=True, snapshots=snapshot.Snapshots(**where))
    for iteration in (1, 2, 3):  # the second reuses what the first has allocated
        if iteration == 3:
            optimizer = None  # fewer tensors than before
        before = [p.detach().clone() for p in model.parameters()]
        begin(saver, model, optimizer, iteration)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)
        assert saver.wait()
        other = make(width=1000, seed=1)[0].to(device)
        load_checkpoint(tmp_path / f"iter_{iteration:07d}", other, None)
        assert all(map(torch.equal, before, other.parameters()))
    saver.close()
    copies = snapshot.Snapshots(**where).take(model.state_dict())
    assert {copy.device.type for copy in copies.values()} == {"cuda" if room else "cpu"}
