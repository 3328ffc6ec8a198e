"""The run folder: one writer, moves that a kill cannot split, branches that nothing overwrites."""

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys

import pytest
from mb_train.folder import lock, run_folder
from mb_train.folder.history import delete, recover, set_aside, set_later_aside, withdraw
from mb_train.folder.lock import locked
from mb_train.folder.run_folder import find_checkpoint
from mb_train.folder.whole_files import replaced, replaced_folder, write_text
from mb_train.train.own_folder import only_writer


def fill(folder, iterations, text="old"):
    folder.mkdir(exist_ok=True)
    for iteration in iterations:
        path = folder / run_folder.iteration_folder(iteration)
        path.mkdir()
        (path / "run.json").write_text(text)
    (folder / "latest_checkpointed_iteration.txt").write_text(f"{iterations[-1]}\n")
    (folder / "log.jsonl").write_text(text)
    (folder / "config.toml").write_text(text)


def tree(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_setting_aside_keeps_data_and_counts_up(tmp_path):
    (tmp_path / "data").mkdir()
    assert set_aside(tmp_path) is None
    for number in (1, 2):
        (tmp_path / "log.jsonl").touch()
        assert set_aside(tmp_path) == tmp_path / f"previous-{number}"
    assert (tmp_path / "data").is_dir()
    assert not (tmp_path / "log.jsonl").exists()


def test_a_folder_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    synced, files = set(), []

    def fsync(descriptor, fsync=os.fsync):
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def rename(source, target, rename=os.rename):
        files.extend(path for path in source.rglob("*") if path.is_file())
        assert synced >= {path.stat().st_ino for path in files}
        rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    with replaced_folder(tmp_path / "model") as draft:
        (draft / "words").mkdir()
        for name in ("weights", "words/list"):
            (draft / name).write_text("whole")
    assert len(files) == 2


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    target = tmp_path / "target"
    mine = [tmp_path / f"target.{word}" for word in ("earlier", "partial", "partial-1")]
    for folder in (target, *mine):
        folder.mkdir()
        (folder / "file").write_text("mine")
    before = tree(tmp_path)
    rename = os.rename

    def full(source, to):
        if source.name == "new":
            raise OSError("full")
        rename(source, to)

    def interrupted(source, to):
        rename(source, to)
        if to.name == "earlier":
            raise KeyboardInterrupt

    def replace(writes):
        with replaced_folder(target) as draft:
            (draft / "file").write_text(writes)

    with pytest.raises(TypeError):
        replace(None)
    monkeypatch.chdir(target)
    with pytest.raises(ValueError, match="which you are in"):
        replace("new")
    monkeypatch.undo()
    for broken, error in ((full, OSError), (interrupted, KeyboardInterrupt)):
        monkeypatch.setattr(os, "rename", broken)
        with pytest.raises(error):
            replace("new")
        monkeypatch.undo()
    assert tree(tmp_path) == before
    assert (target / "file").read_text() == "mine"
    (tmp_path / "link").symlink_to(target)
    with replaced_folder(tmp_path / "link") as draft:
        (draft / "other").write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert tree(target) == ["other"]
    assert all((folder / "file").read_text() == "mine" for folder in mine)
    assert len(list(tmp_path.iterdir())) == 5


class Killed(BaseException):
    """What no code of ours catches."""


def _killed_after(monkeypatch, renames):
    """Make the process "die" at the given call of os.rename."""
    calls = 0
    rename = os.rename

    def dying(*arguments):
        nonlocal calls
        calls += 1
        if calls > renames:
            raise Killed
        rename(*arguments)

    monkeypatch.setattr(os, "rename", dying)


@pytest.mark.parametrize("renames", range(5))
def test_a_kill_while_a_run_is_set_aside_splits_nothing(tmp_path, monkeypatch, renames):
    fill(tmp_path, [10, 20])
    whole = tree(tmp_path)
    with monkeypatch.context() as patch:
        _killed_after(patch, renames)
        with pytest.raises(Killed):
            set_aside(tmp_path)
    if renames == 0:  # who goes on from here finds all in its place, and it stays there
        assert find_checkpoint(tmp_path) == tmp_path / "iter_0000020"
        assert recover(tmp_path) == []
        assert find_checkpoint(tmp_path) == tmp_path / "iter_0000020"
        assert set_aside(tmp_path) == tmp_path / "previous-1"
    else:  # the file that names the latest has moved, and what was beside it will
        assert find_checkpoint(tmp_path) is None
        assert "finished moving" in recover(tmp_path)[0]
    assert tree(tmp_path / "previous-1") == whole
    assert tree(tmp_path) == [f"previous-1/{name}" for name in whole]
    assert recover(tmp_path) == []


@pytest.mark.parametrize("renames", [0, 1, 9])
def test_going_back_keeps_the_later_branch(tmp_path, monkeypatch, renames):
    fill(tmp_path, [10, 20, 30])
    with monkeypatch.context() as patch:
        _killed_after(patch, renames)
        with contextlib.suppress(Killed):
            assert set_later_aside(tmp_path, 10) == tmp_path / "previous-1"
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000010"
    recover(tmp_path)
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000010"
    assert find_checkpoint(tmp_path / "previous-1") == tmp_path / "previous-1" / "iter_0000030"
    assert (tmp_path / "previous-1" / "log.jsonl").read_text() == "old"
    assert (tmp_path / "log.jsonl").read_text() == "old"  # this run's too, up to iteration 10
    assert set_later_aside(tmp_path, 10) is None


def test_what_a_kill_left_half_written_is_removed(tmp_path):
    fill(tmp_path, [10, 20])
    (tmp_path / "iter_0000030.partial").mkdir()
    (tmp_path / "iter_0000030.partial" / "run.json").write_text("old")
    for name in ("latest_checkpointed_iteration.txt", "loss.png", "report.html", "config.toml"):
        for draft in (f"{name}.partial", f"{name}.0123abcd.partial"):  # an earlier release's, ours
            (tmp_path / draft).write_text("hal")
    (tmp_path / "tokenizer" / "bytes").mkdir(parents=True)
    (tmp_path / "tokenizer" / "bytes" / "vocab.json.0123abcd.partial").write_text("hal")
    fill(tmp_path, [5])
    assert withdraw(tmp_path / "iter_0000005").is_dir()  # not deleted yet
    assert not (tmp_path / "iter_0000005").exists()
    done = recover(tmp_path)
    assert [p.name for p in run_folder.checkpoints(tmp_path)] == ["iter_0000010", "iter_0000020"]
    assert not [p for p in tmp_path.rglob("*") if p.suffix in (".partial", ".surplus")]
    assert len(done) == 1


def on_another_disk(checkpoint, disk):
    """Move a checkpoint, and leave a relative link in its place."""
    disk.mkdir(exist_ok=True)
    moved = checkpoint.rename(disk / checkpoint.name)
    checkpoint.symlink_to(os.path.relpath(moved, checkpoint.parent))
    return moved


@pytest.mark.parametrize("killed", [False, True])
def test_of_a_checkpoint_behind_a_link_the_link_is_deleted(tmp_path, killed):
    fill(tmp_path / "run", [10, 20])
    moved = on_another_disk(tmp_path / "run" / "iter_0000010", tmp_path / "disk")
    withdrawn = withdraw(tmp_path / "run" / "iter_0000010")
    if not killed:
        delete(withdrawn)
    recover(tmp_path / "run")
    assert os.listdir(moved) == ["run.json"]
    assert not [name for name in os.listdir(tmp_path / "run") if "10" in name]


@pytest.mark.parametrize("killed", [False, True])
def test_a_link_to_a_checkpoint_leads_there_from_where_it_is_moved(tmp_path, monkeypatch, killed):
    run = tmp_path / "run"
    fill(run, [10, 20])
    on_another_disk(run / "iter_0000020", tmp_path / "disk")
    unlink = type(run).unlink

    def dying(path, **options):
        if path.is_symlink():
            raise Killed
        unlink(path, **options)

    with monkeypatch.context() as patch, contextlib.suppress(Killed):
        if killed:
            patch.setattr(type(run), "unlink", dying)
        set_later_aside(run, 10)
    recover(run)
    found = find_checkpoint(run / "previous-1")
    assert found is not None
    assert (found / "run.json").read_text() == "old"
    assert run_folder.checkpoints(run) == [run / "iter_0000010"]


def test_a_link_to_a_disk_that_is_away_is_moved_too(tmp_path):
    run, disk = tmp_path / "run", tmp_path / "disk"
    fill(run, [10])
    on_another_disk(run / "iter_0000010", disk)
    disk.rename(tmp_path / "away")
    assert set_aside(run) == run / "previous-1"
    (tmp_path / "away").rename(disk)
    assert find_checkpoint(run) is None
    assert find_checkpoint(run / "previous-1") == run / "previous-1" / "iter_0000010"


def test_two_may_write_one_file_at_once(tmp_path):
    page = tmp_path / "report.html"
    with replaced(page) as first:
        first.write_text("first")
        write_text(page, "second")
        assert page.read_text() == "second"
    assert page.read_text() == "first"
    assert list(tmp_path.iterdir()) == [page]


def test_a_full_disk_is_said_with_the_name_of_the_file(tmp_path):
    with pytest.raises(OSError, match=r"No space: .*page\.html"), replaced(tmp_path / "page.html"):
        raise OSError(errno.ENOSPC, "No space")


@pytest.mark.parametrize("content", ["", "[]", '{"target": "previous-1"}', "[" * 200_000])
def test_a_damaged_note_of_a_move_is_named(tmp_path, content):
    (tmp_path / ".moving.json").write_text(content)
    with pytest.raises(ValueError, match=r"\.moving\.json, .* is damaged"):
        recover(tmp_path)


@pytest.mark.parametrize("target", ["previous-1", "../theirs", "/theirs"])
@pytest.mark.parametrize("name", ["mine", "../mine", "..", "", "{folder}/mine"])
def test_a_note_of_a_move_reaches_nothing_outside(tmp_path, target, name):
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "mine").write_text("mine")
    target = target.replace("/theirs", f"{tmp_path}/theirs" if target[0] == "/" else "/theirs")
    note = {"target": target, "names": [name.format(folder=tmp_path)], "branch": None}
    (folder / ".moving.json").write_text(json.dumps(note))
    if (target, name) == ("previous-1", "mine"):  # which is not in the folder: moved before a kill
        recover(folder)
    else:
        with pytest.raises(ValueError, match="is no name of something in this folder"):
            recover(folder)
    assert (tmp_path / "mine").read_text() == "mine"
    assert not (tmp_path / "theirs").exists()


def test_a_latest_that_is_gone_offers_another(tmp_path):
    fill(tmp_path, [10, 20])
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("30")
    with pytest.raises(ValueError, match=r"There is .*iter_0000020: give that to --load"):
        find_checkpoint(tmp_path)


def test_without_a_word_on_the_latest_it_is_the_last(tmp_path):
    fill(tmp_path, [10, 20])
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    (tmp_path / "iter_0000030").mkdir()  # holds nothing
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000020"


def test_a_damaged_run_file_offers_another(tmp_path):
    folder = tmp_path / "my run"
    fill(folder, [10, 20])
    with pytest.raises(ValueError, match=r"damaged: .* There is '.*my run/iter_0000010': give"):
        run_folder.read_saved_run(folder / "iter_0000020")


@pytest.mark.parametrize(
    ("files", "whose"),
    [
        (["config.json", "model.safetensors"], "It is one of Hugging Face's: the convert"),
        (["iter_0000010/mp_rank_00/model_optim_rng.pt"], "It is one of Megatron's: the convert"),
        (["latest_checkpointed_iteration.txt", "iter_0000001/mp_rank_00/x.pt"], "of Megatron's"),
        (["other"], "found none\\.$"),
    ],
)
def test_another_programs_checkpoint_is_told(tmp_path, files, whose):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    with pytest.raises(ValueError, match=whose):
        run_folder.checkpoint_in(tmp_path)


def test_a_run_that_never_began_leaves_no_folder(tmp_path):
    with pytest.raises(OSError, match="bad input"), locked(tmp_path / "runs" / "new"):
        raise OSError("bad input")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_hides_no_error_and_ends_no_run(tmp_path):
    run = tmp_path / "runs" / "new"

    def fail():
        shutil.rmtree(run)
        raise ValueError("bad input")

    with locked(run):
        shutil.rmtree(run)
    with pytest.raises(ValueError, match="bad input"), locked(run):
        fail()
    with locked(run):  # nobody holds it
        assert tree(run) == [".lock", ".lock-holder.json"]


@pytest.mark.parametrize(
    "behind", ["Path.mkdir", "try_lock", "FileLock", "FileLock.acquire", "os.getpid"]
)
def test_an_interrupt_while_a_folder_is_locked_leaves_none(tmp_path, monkeypatch, behind):
    """As SIGTERM may come at the very start of `mb-train convert`."""
    *module, name = behind.split(".")
    place = getattr(lock, *module) if module else lock
    function = getattr(place, name)

    def interrupted(*arguments, **named):
        function(*arguments, **named)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(place, name, interrupted)
    with pytest.raises(KeyboardInterrupt), locked(tmp_path / "runs" / "new"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_second_run_in_a_folder_is_told_who_holds_it(tmp_path):
    run = tmp_path / "run"
    script = """
import sys
from pathlib import Path
from mb_train.folder.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", script, str(run)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout.readline() == "held\n"
        for _ in range(2):
            with pytest.raises(ValueError, match=f"process {first.pid} on .* is writing it"), \
                 locked(run):  # fmt: skip
                pass
        (run / ".lock-holder.json").write_text("[" * 100_000)
        with pytest.raises(ValueError, match="another run is writing it"), locked(run):
            pass
        first.kill()  # kill -9 lets go of the lock
        first.wait()
        with locked(run):
            holder = json.loads((run / ".lock-holder.json").read_text())
            assert holder["pid"] == os.getpid()
    with locked(run):  # and again
        pass
    assert tree(run) == [".lock"]


@pytest.mark.parametrize("name", ["iter_0000009", "iter_0000009.partial", "iter_0000009.surplus"])
def test_no_run_is_written_where_a_checkpoint_would_be(tmp_path, monkeypatch, name):
    """It could not be gone on from, and the run around it would move or delete it."""
    wanted = r"--save to be the folder of a run, got .*, the name of a checkpoint"
    with pytest.raises(ValueError, match=wanted), only_writer(str(tmp_path / name)):
        pytest.fail("got in")
    assert os.listdir(tmp_path) == []
    with only_writer(str(tmp_path / f"{name}.of-mine")):
        pass
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    with pytest.raises(ValueError, match=wanted), only_writer("."):
        pytest.fail("got in")


def test_no_run_is_written_into_a_checkpoint(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    wanted = r"--save to be the folder of a run, got .* a checkpoint"
    with pytest.raises(ValueError, match=wanted), only_writer(str(tmp_path)):
        pytest.fail("got in")
    assert os.listdir(tmp_path) == ["run.json"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_refuses_no_run(tmp_path, monkeypatch, number):
    """As NFS or Lustre may be mounted: a run there is not refused, nor is the one after a kill."""
    fcntl = pytest.importorskip("fcntl")

    def flock(descriptor, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    run = tmp_path / "run"
    with pytest.warns(RuntimeWarning, match="no locks") as told, locked(run):
        pass
    assert len(told) == 1  # though at its end nothing came of it, and that is looked for again
    assert not run.exists()
    killed, later = locked(run), locked(run)
    for writer in (killed, later):  # nobody lets go of the first
        with pytest.warns(RuntimeWarning, match=f"run: .* no locks .{os.strerror(number)}"):
            writer.__enter__()
        assert json.loads((run / ".lock-holder.json").read_text())["pid"] == os.getpid()
        assert (run / ".lock").read_bytes() == b""  # no mark that would have to be removed
