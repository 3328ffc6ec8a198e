"""A run that ends early loses nothing, and two runs do not meet."""

import errno
import gzip
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import mb_data.text.bookkeeping
import mb_data.text.partial_output
import mb_data.text.worker
import numpy as np
import pytest
from mb_data import WorkerDiedError
from mb_data.system import try_lock
from mb_data.text.sources import find_sources
from preprocess_helpers import documents, output_bytes, preprocess, random_records, write


def test_two_runs_on_one_prefix(tmp_path, monkeypatch):
    monkeypatch.setattr(mb_data.text.partial_output, "LOCK_PATIENCE", 0.1)
    source = write(tmp_path / "in.jsonl", [{"text": "a"}])
    first = mb_data.text.partial_output.PartialOutput(
        str(tmp_path / "out"), ("x",), np.dtype("<u2"), {}, resume=False
    )
    with first, pytest.raises(ValueError, match=rf"another run \(process {os.getpid()}\) is writ"):
        preprocess(source, tmp_path / "out", workers=1)
    preprocess(source, tmp_path / "out", workers=1)


def test_input_that_changes_meanwhile(tmp_path, monkeypatch):
    source = write(tmp_path / "in.jsonl", [{"text": "a"}])

    def encode_and_touch(job, block, encode=mb_data.text.worker.encode_block):
        os.utime(source, ns=(1, 1))
        return encode(job, block)

    monkeypatch.setattr(mb_data.text.worker, "encode_block", encode_and_touch)
    with pytest.raises(ValueError, match=r"in\.jsonl: changed while it was being read"):
        preprocess(source, tmp_path / "out", workers=1)
    assert os.listdir(tmp_path) == ["in.jsonl"]


def interrupted_run_goes_on(tmp_path, source, **options):
    """The second half of the tests below: the same call finishes, with the bytes of one run."""
    assert not list(tmp_path.glob("out_*"))
    summary = preprocess(source, tmp_path / "out", **options)
    preprocess(source, tmp_path / "once", **options)
    assert output_bytes(tmp_path / "out_text_document") == output_bytes(
        tmp_path / "once_text_document"
    )
    assert not list(tmp_path.glob("*.partial"))
    return summary


def test_disk_full(tmp_path, monkeypatch):
    source = write(tmp_path / "in.jsonl", random_records(3, 200))

    def in_little_room(job, block, encode=mb_data.text.worker.encode_block):
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, most))
        return encode(job, block)

    monkeypatch.setattr(mb_data.text.worker, "encode_block", in_little_room)
    with pytest.raises(OSError, match=r"File too large.*out\.partial"):
        preprocess(source, tmp_path / "out", workers=2, block_bytes=5000)
    monkeypatch.undo()
    interrupted_run_goes_on(tmp_path, source, workers=2, block_bytes=5000)


def test_output_that_a_worker_cannot_open(tmp_path, monkeypatch, capfd):
    def too_many(path, *words, open=Path.open, **options):
        if path.suffix == ".tokens":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return open(path, *words, **options)

    source = write(tmp_path / "in.jsonl", [{"text": "a"}])
    monkeypatch.setattr(Path, "open", too_many)
    with pytest.raises(OSError, match=r"Too many open files.*out\.partial"):
        preprocess(source, tmp_path / "out", workers=1)
    assert "Traceback" not in capfd.readouterr().err
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_killed_worker(tmp_path, monkeypatch):
    source = write(tmp_path / "in.jsonl", random_records(4, 200))

    def die_at(job, block, encode=mb_data.text.worker.encode_block):
        if block.start == 50_000:
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(job, block)

    monkeypatch.setattr(mb_data.text.worker, "encode_block", die_at)
    with pytest.raises(WorkerDiedError, match=r"by signal 9 .*in\.jsonl, bytes 50,000 to 55,000"):
        preprocess(source, tmp_path / "out", workers=2, block_bytes=5000)
    monkeypatch.undo()
    interrupted_run_goes_on(tmp_path, source, workers=2, block_bytes=5000)


SLOW_RUN = """
    import sys, time
    import mb_data.text.bookkeeping, mb_data.text.worker
    from mb_data import preprocess

    encode = mb_data.text.worker.encode_block
    def slow(job, block):
        time.sleep(0.02)
        return encode(job, block)
    mb_data.text.worker.encode_block = slow
    mb_data.text.bookkeeping.SAVE_INTERVAL = 0.02
    tick = mb_data.text.bookkeeping.Bookkeeping.tick
    def wait_to_be_killed(self):  # or on a loaded machine it would end before
        tick(self)
        if self.saved.blocks > 10:
            time.sleep(60)
    mb_data.text.bookkeeping.Bookkeeping.tick = wait_to_be_killed
    preprocess(sys.argv[1], sys.argv[2], workers=2, block_bytes=5000, on_error="skip")
"""


@pytest.mark.sweep(3)
@pytest.mark.parametrize("packing", ["", ".gz", "many archives"])
def test_kill_9_in_the_middle_and_run_again(tmp_path, packing):
    source = write(tmp_path / "in.jsonl", random_records(5, 400))
    lines = source.read_bytes().splitlines(keepends=True)
    data = b"".join(line + b"bad\n" * (i % 50 == 0) for i, line in enumerate(lines))
    source = tmp_path / f"in.jsonl{packing}"
    if packing == "many archives":
        source.mkdir()
        lines = data.splitlines(keepends=True)
        for i, start in enumerate((0, 110, 111, 112, 170, 230, 290, 320, 350)):
            stop = [110, 111, 112, 170, 230, 290, 320, 350, None][i]
            (source / f"{i}.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[start:stop])))
    else:
        source.write_bytes(gzip.compress(data) if packing else data)
    run = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SLOW_RUN), str(source), str(tmp_path / "out")]
    )
    state = tmp_path / "out.partial" / "state.json"
    deadline = time.monotonic() + 60
    while not (state.is_file() and json.loads(state.read_bytes())["blocks"] > 10):
        assert run.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    run.kill()
    run.wait()
    summary = interrupted_run_goes_on(
        tmp_path, source, workers=2, block_bytes=5000, on_error="skip"
    )
    assert 0 < summary.resumed_text_bytes < summary.text_bytes
    assert summary.documents + summary.empty == 400
    assert summary.bad_lines == 8
    assert (tmp_path / "out_skipped.txt").read_text().count("\n") == 8
    assert (tmp_path / "out_skipped.txt").read_text() == (tmp_path / "once_skipped.txt").read_text()


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A run that ended early: its input, 200 good lines and a bad last one, and what it said."""
    source = write(tmp_path / "in.jsonl", random_records(6, 200))
    with open(source, "ab") as file:
        file.write(b"bad\n")
    with pytest.raises(ValueError, match=r"line 201: .*\n.*partial keeps [1-9]\d* documents: the"):
        preprocess(source, tmp_path / "out", workers=1, block_bytes=5000)
    return source


def test_output_in_the_directory_of_the_input_is_no_input(tmp_path, kept):
    """What a run keeps there is JSON too."""
    with pytest.raises(ValueError, match=r"in\.jsonl, line 201: "):
        preprocess(tmp_path, tmp_path / "new", workers=1, block_bytes=5000)
    for given in (tmp_path, f"{tmp_path}/**/*.json*"):
        assert [source.path for source in find_sources([given])] == [str(kept)]
    summary = preprocess(tmp_path, tmp_path / "new", workers=1, block_bytes=5000, on_error="skip")
    assert summary.bad_lines == 1
    assert summary.resumed_text_bytes > 0


def test_one_bad_last_line_costs_nothing_but_itself(tmp_path, kept):
    options = {"workers": 2, "block_bytes": 5000, "on_error": "skip"}
    summary = interrupted_run_goes_on(tmp_path, kept, **options)
    assert summary.resumed_text_bytes > 0
    assert summary.bad_lines == 1


def test_other_settings_do_not_drop_what_is_done(tmp_path, kept, monkeypatch):
    before = {p.name: p.read_bytes() for p in (tmp_path / "out.partial").iterdir()}
    options = {"workers": 1, "block_bytes": 5000, "on_error": "skip", "append_eod": True}
    with pytest.raises(ValueError, match=r"other settings \(eod\); .* or --restart to drop"):
        preprocess(kept, tmp_path / "out", **options)
    other = write(tmp_path / "other.jsonl", [{"text": "a"}])
    with pytest.raises(ValueError, match=r"other settings \(sources\)"):
        preprocess(other, tmp_path / "out", workers=1, block_bytes=5000)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"text": "a"}')))
    with pytest.raises(ValueError, match=r"other settings \(sources\)"):
        preprocess("-", tmp_path / "out", workers=1, block_bytes=5000)
    assert before == {p.name: p.read_bytes() for p in (tmp_path / "out.partial").iterdir()}
    summary = preprocess(kept, tmp_path / "out", restart=True, **options)
    assert summary.resumed_text_bytes == 0
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("state.json", lambda text: re.sub(rb'"places": \[\[\d+', b'"places": [[7', text)),
        ("state.json", lambda text: text.replace(b'"units": ', b'"units": 1')),
        ("state.json", lambda text: text.replace(b'"careful": 0', b'"careful": [0]')),
        ("settings.json", lambda text: b"[]"),
        ("settings.json", lambda text: text.replace(b'"sources"', b'"\xffources"')),
        ("0.tokens", lambda numbers: bytes([numbers[0] ^ 1, *numbers[1:]])),
        ("0.sizes", lambda numbers: bytes([numbers[0] ^ 2, *numbers[1:]])),
        ("0.tokens", lambda numbers: numbers[:2]),
    ],
)
def test_a_damaged_state_is_none(tmp_path, kept, name, damage):
    path = tmp_path / "out.partial" / name
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert path.read_bytes() != whole
    options = {"workers": 1, "block_bytes": 5000, "on_error": "skip"}
    assert interrupted_run_goes_on(tmp_path, kept, **options).resumed_text_bytes == 0


def test_a_longer_line_limit_goes_on(tmp_path):
    source = tmp_path / "in.jsonl"
    long = json.dumps({"text": "word " * 1000}).encode()
    source.write_bytes(b'{"text": "a"}\n' * 50 + long + b"\n")
    options = {"workers": 1, "block_bytes": 100}
    with pytest.raises(ValueError, match="line 51: longer than 1,000 bytes"):
        preprocess(source, tmp_path / "out", max_line_bytes=1000, **options)
    assert interrupted_run_goes_on(tmp_path, source, **options).resumed_text_bytes > 0


def test_a_folder_of_the_users_own_is_left_alone(tmp_path):
    source = write(tmp_path / "in.jsonl", [{"text": "a"}])
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.tex").write_text("mine")
    for restart in (False, True):
        with pytest.raises(ValueError, match=r"out\.partial .* holds thesis\.tex, which"):
            preprocess(source, tmp_path / "out", workers=1, restart=restart)
    assert os.listdir(tmp_path / "out.partial") == ["thesis.tex"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT], ids=["disk", "quota"])
def test_a_full_disk_is_not_taken_for_one_without_locks(tmp_path, monkeypatch, number):
    def full(*_):
        raise OSError(number, os.strerror(number))

    source = write(tmp_path / "in.jsonl", [{"text": "a"}])
    monkeypatch.setattr("mb_data.text.partial_output.os.write", full)
    with (
        pytest.raises(OSError, match=rf"{os.strerror(number)}.*out\.partial"),
        warnings.catch_warnings(action="error"),
    ):
        preprocess(source, tmp_path / "out", workers=1)


def test_a_run_that_ends_at_the_last_moment_is_no_lack_of_locks(tmp_path, monkeypatch):
    module, held = "mb_data.text.partial_output", [True]

    def taken(descriptor):
        if held:
            held.pop()
            (tmp_path / "out.partial" / "lock").unlink()
            return False
        return try_lock(descriptor)

    source = write(tmp_path / "in.jsonl", [{"text": "a"}])
    monkeypatch.setattr(f"{module}.LOCK_PATIENCE", -1.0)
    monkeypatch.setattr(f"{module}.try_lock", taken)
    with warnings.catch_warnings(action="error"):
        preprocess(source, tmp_path / "out", workers=1)
    assert documents(tmp_path / "out_text_document") == [[64]]


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    import fcntl

    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    source = write(tmp_path / "in.jsonl", [{"text": "a"}])
    with pytest.warns(RuntimeWarning, match="this file system has no locks"):
        preprocess(source, tmp_path / "out", workers=1)
    assert documents(tmp_path / "out_text_document") == [[64]]
