"""Processes: how they start, what waits in them, how much memory they take."""

import gzip
import os
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import mb_data
import mb_data.system
import mb_data.text.pipeline
import mb_data.text.reading
import mb_data.text.worker
import numpy as np
import pytest
from mb_data.text.spill import SpillBuffer
from preprocess_helpers import documents, output_bytes, preprocess, random_records, write


def test_another_thread_makes_workers_spawn(tmp_path):
    source = write(tmp_path / "in.jsonl", random_records(2, 20))
    preprocess(source, tmp_path / "forked", workers=2, block_bytes=2000)
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    try:
        preprocess(source, tmp_path / "spawned", workers=2, block_bytes=2000)
    finally:
        release.set()
        thread.join()
    assert output_bytes(tmp_path / "forked_text_document") == output_bytes(
        tmp_path / "spawned_text_document"
    )


def test_a_worker_of_a_pool_may_have_no_workers(tmp_path, monkeypatch):
    """Python said so by an assertion."""
    source = write(tmp_path / "in.jsonl", random_records(2, 2))
    current = SimpleNamespace(daemon=True)
    monkeypatch.setattr(mb_data.text.pipeline.multiprocessing, "current_process", lambda: current)
    with pytest.raises(ValueError, match=r"is a daemon.*take concurrent\.futures\.Process"):
        preprocess(source, tmp_path / "out", workers=1)
    assert os.listdir(tmp_path) == ["in.jsonl"]


@pytest.mark.parametrize(
    ("quota", "usable"),
    [(None, 3), ("max 100000", 3), ("250000 100000", 2), ("50000 100000", 1), ("900000 100000", 3)],
)
def test_the_cores_of_a_container_are_counted(tmp_path, monkeypatch, quota, usable):
    """Of a host's 128, as `docker run --cpuset-cpus` and `--cpus` leave them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 127}, raising=False)
    monkeypatch.setattr(mb_data.system, "QUOTA", tmp_path / "cpu.max")
    if quota is not None:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert mb_data.system.cores() == usable


OTHER_SYSTEMS = """
    import fcntl as locks, os, subprocess, sys, types

    for name in ("pread", "pwrite", "fdatasync", "sched_getaffinity", "fork"):
        delattr(os, name)
    sys.platform = "darwin"  # the standard library itself would not load as another one
    import mb_data.system
    if sys.argv[1] == "Windows":
        def locking(descriptor, mode, count):
            assert os.lseek(descriptor, 0, os.SEEK_CUR) > 1 << 20
            try:
                locks.lockf(descriptor, locks.LOCK_EX | locks.LOCK_NB, count)
            except OSError as error:
                raise PermissionError(*error.args)
        sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_NBLCK=2)
        sys.modules["fcntl"] = sys.modules["resource"] = None
        mb_data.system.WINDOWS = True
    from mb_data import build_gpt_datasets, load_tokenizer, preprocess

    def own():  # for whose sake the workers run this module again, and lack what it deletes
        tokenizer = load_tokenizer("gpt2")
        tokenizer.rebuild = own
        return tokenizer

    if __name__ == "__main__":
        preprocess(sys.argv[2], sys.argv[3], tokenizer=own(), workers=1, block_bytes=5000)
        prefix = f"{sys.argv[3]}_text_document"
        build_gpt_datasets(prefix, split="1", seq_length=8, num_samples=(9, 0, 0), seed=1)
"""


@pytest.mark.parametrize("platform", ["macOS", "Windows"])
def test_systems_that_lack_what_linux_has(tmp_path, platform):
    source = write(tmp_path / "in.jsonl", random_records(3, 60))
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(OTHER_SYSTEMS))
    command = [sys.executable, script, platform, source, tmp_path / "out"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    preprocess(source, tmp_path / "once", workers=1)
    assert output_bytes(tmp_path / "out_text_document") == output_bytes(
        tmp_path / "once_text_document"
    )


UNGUARDED = """
    import sys
    sys.platform = "darwin"
    from mb_data import preprocess
    print(preprocess(sys.argv[1], sys.argv[2], workers=2).documents)
"""


def test_a_script_is_not_run_again_by_workers_that_are_no_forks(tmp_path):
    """Without `if __name__ == "__main__":` it would begin its work anew, which ended them."""
    source = write(tmp_path / "in.jsonl", random_records(3, 60))
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(UNGUARDED))
    command = [sys.executable, script, source, tmp_path / "out"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "60\n", "")


OF_A_CHILD = """
    import multiprocessing
    import sys
    sys.platform = "darwin"
    from mb_data import load_tokenizer, preprocess

    def own():
        tokenizer = load_tokenizer("gpt2")
        tokenizer.rebuild = own
        return tokenizer

    def work():
        print(preprocess(sys.argv[1], sys.argv[2], tokenizer=own(), workers=1).documents)

    if __name__ == "__main__":
        multiprocessing.set_start_method("spawn")
        child = multiprocessing.Process(target=work)
        child.start()
        child.join()
"""


def test_a_tokenizer_of_a_script_whose_child_preprocesses(tmp_path):
    """There the script is called __mp_main__, and the workers have to run it as well."""
    source = write(tmp_path / "in.jsonl", random_records(3, 60))
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(OF_A_CHILD))
    command = [sys.executable, script, source, tmp_path / "out"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "60\n", "")


def test_threads_that_start_workers_at_once_leave_the_main_module_in_place():
    main, within = sys.modules["__main__"], threading.Barrier(2)

    def start():
        within.wait()
        with mb_data.text.pipeline._no_main_module():
            there = sys.modules["__main__"]
            assert there is not main
            assert (there.__file__, there.__spec__) == (None, None)
            assert vars(main).keys() <= vars(there).keys()
            time.sleep(0.01)

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(start) for _ in range(10)]:
            done.result()
    assert sys.modules["__main__"] is main


@pytest.mark.sweep(3)
@pytest.mark.parametrize("options", [{}, {"split_sentences": True}, {"shard": (1, 2)}])
def test_many_archives_are_unpacked_by_the_workers(tmp_path, monkeypatch, options):
    """Of any sizes, in any worker: the first is so long that all others wait for it on the disk."""
    folder = tmp_path / "in"
    folder.mkdir()
    for i, count in enumerate((300, 0, 1, 40, 0, 7, 20, 60, 5, 0, 100, 3, 0)):
        records = write(tmp_path / "raw.jsonl", random_records(i, count)).read_bytes()
        packed = gzip.compress(records + b"bad\n" * (i == 3))
        (folder / f"{i:02}.jsonl.gz").write_bytes(packed[:-30] if i == 7 else packed)
    settings = {"block_bytes": 2000, "on_error": "skip", "append_eod": True, **options}
    with monkeypatch.context() as patched:
        patched.setattr(mb_data.text.reading, "LARGEST_SHARE", 0)
        once = preprocess(folder, tmp_path / "once", workers=2, **settings)
    monkeypatch.setattr(mb_data.text.reading, "LARGEST_SHARE", 1)
    for workers in (1, 3):
        summary = preprocess(folder, tmp_path / "out", workers=workers, **settings)
        assert summary.bad_lines == once.bad_lines
        assert summary.documents == once.documents > 0
        assert output_bytes(Path(summary.outputs[0])) == output_bytes(Path(once.outputs[0]))
        report = tmp_path / "out_skipped.txt"
        if once.bad_lines:
            assert report.read_text() == (tmp_path / "once_skipped.txt").read_text()
    (folder / "00.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\nbad\n'))
    if not options:
        with pytest.raises(ValueError, match=r"00\.jsonl\.gz, line 2: "):
            preprocess(folder, tmp_path / "new", workers=2)


def test_thousands_of_blocks_that_wait_do_not_fill_the_pipes(tmp_path, monkeypatch):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "0.jsonl.gz").write_bytes(gzip.compress(b'{"text": "1"}\n'))
    (folder / "1.jsonl.gz").write_bytes(gzip.compress(b'{"text": "2"}\n' * 4000))

    def last_of_all(job, block, encode=mb_data.text.worker.encode_block):
        while block.path.endswith("0.jsonl.gz") and not (tmp_path / "others").exists():
            time.sleep(0.01)
        if block.start == 3999 * 14:
            (tmp_path / "others").touch()
        return encode(job, block)

    monkeypatch.setattr(mb_data.text.worker, "encode_block", last_of_all)
    monkeypatch.setattr(mb_data.text.reading, "LARGEST_SHARE", 1)
    preprocess(folder, tmp_path / "out", workers=2, block_bytes=1, tokenizer="null:9")
    assert documents(tmp_path / "out_text_document") == [[1], *[[2]] * 4000]


def test_a_spill_buffer_gives_back_what_it_was_given(tmp_path):
    buffer = SpillBuffer(tmp_path, room=2)
    rng = np.random.default_rng(0)
    given = {
        key: [rng.integers(0, 9, rng.integers(0, 50)).astype(d) for d in ("u2", "i4", "i4")]
        for key in range(20)
    }
    for turn in (range(20), reversed(range(20)), [3, 1, 2, *range(4, 20), 0]):
        for key in range(20):
            buffer.put(key, given[key])
        for key in turn:
            for found, expected in zip(buffer.take(key), given[key], strict=True):
                assert found.dtype == expected.dtype
                assert found.tolist() == expected.tolist()
    assert not os.listdir(tmp_path)


MEASURED_RUN = """
    import os, sys
    import mb_data.text.worker
    from mb_data import preprocess

    def peak():  # ru_maxrss would be that of the process which started this one
        (line,) = (x for x in open("/proc/self/status") if x.startswith("VmHWM"))
        return int(line.split()[1]) / 1024

    encode = mb_data.text.worker.encode_block
    def measured(job, block):
        encoded = encode(job, block)
        os.write(1, f"{peak()}\\n".encode())  # in one piece, beside the other worker
        return encoded
    mb_data.text.worker.encode_block = measured
    mb_data.text.worker.CACHE_BYTES = 16 << 20
    preprocess(sys.argv[1], sys.argv[2], workers=2, block_bytes=1 << 20)
    print(peak())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_bounded(tmp_path):
    """On text without a word twice, of which the engine remembers the most."""

    def peak(megabytes):
        source = tmp_path / "in.jsonl"
        rng = np.random.default_rng(0)
        with open(source, "wb") as file:
            for _ in range(megabytes):
                letters = rng.integers(ord("a"), ord("z") + 1, size=1 << 20, dtype=np.uint8)
                letters[::8] = ord(" ")
                file.write(b'{"text": "' + letters.tobytes() + b'"}\n')
        run = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(MEASURED_RUN), source, tmp_path / "out"],
            capture_output=True,
            text=True,
            check=True,
        )
        return max(map(float, run.stdout.split()))

    # In MiB. Without its limit the engine would take 10 bytes a byte of new words, half of them a
    # worker's: 155 more. With it, 30 to 75 more: a table is doubled, sooner or later.
    small, large = peak(8), peak(24)
    assert large < small + 110
    assert large < 300
