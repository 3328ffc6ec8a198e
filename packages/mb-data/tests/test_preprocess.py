"""JSON Lines in, the bytes Megatron would write out; or one clear error and nothing at all."""

import errno
import gzip
import importlib.util
import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path

import mb_data
import mb_data.maintenance
import mb_data.text.bookkeeping
import mb_data.text.partial_output
import mb_data.text.reading
import mb_data.text.worker
import numpy as np
import pytest
from mb_data import IndexedDataset, WorkerDiedError, load_tokenizer
from mb_data.text.sources import find_sources
from mb_data.text.spill import SpillBuffer


@pytest.fixture(autouse=True)
def _count_own_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forked, and so inherit what a test patches, if the test itself starts no thread.

    Tests of other packages may have left idle threads in this process.
    """
    count = threading.active_count
    left_behind = count() - 1
    monkeypatch.setattr(threading, "active_count", lambda: count() - left_behind)


GPT2 = load_tokenizer("gpt2")

TEXTS = ["Hello world", "", "a<|endoftext|>b", "Grüße 你好\n\n  x", "z" * 5000, " "]


def preprocess(inputs, prefix, *, tokenizer=GPT2, **options):
    """With a tokenizer that is there already: loading it takes longer than most tests."""
    return mb_data.preprocess(inputs, prefix, tokenizer=tokenizer, **options)


def write(path, records):
    path.write_bytes(b"".join(json.dumps(r).encode() + b"\n" for r in records))
    return path


def random_records(seed, count, words=300):
    rng = random.Random(seed)
    vocabulary = ["the", "of", "a", "MoE", "expert", "12", "router,", "(x)", "=", "é\n", '"']
    return [
        {"id": i, "text": " ".join(rng.choices(vocabulary, k=rng.randrange(words)))}
        for i in range(count)
    ]


def documents(prefix):
    return [x.tolist() for x in IndexedDataset(prefix)[:]]


def output_bytes(prefix):
    return tuple((prefix.parent / f"{prefix.name}.{end}").read_bytes() for end in ("bin", "idx"))


@pytest.mark.parametrize("append_eod", [False, True])
def test_documents_in_order_without_the_empty(tmp_path, append_eod):
    source = write(tmp_path / "in.jsonl", [{"id": i, "text": t} for i, t in enumerate(TEXTS)])
    summary = preprocess(source, tmp_path / "out", append_eod=append_eod, workers=1)
    gpt2 = load_tokenizer("gpt2", engine="python")
    eod = [50256] if append_eod else []
    expected = [gpt2.encode(text) + eod for text in TEXTS if text]
    assert documents(tmp_path / "out_text_document") == expected
    assert (summary.documents, summary.empty, summary.bad_lines) == (5, 1, 0)
    assert summary.tokens == sum(map(len, expected))
    assert summary.text_bytes == sum(len(t.encode()) for t in TEXTS)
    assert summary.outputs == (f"{tmp_path}/out_text_document",)
    assert IndexedDataset(summary.outputs[0]).dtype.name == "uint16"
    assert sorted(os.listdir(tmp_path)) == [
        "in.jsonl",
        "out_text_document.bin",
        "out_text_document.idx",
    ]


def test_output_depends_neither_on_workers_nor_on_blocks_nor_on_the_engine(tmp_path):
    source = write(tmp_path / "in.jsonl", random_records(1, 400))
    packed = tmp_path / "in.jsonl.gz"
    packed.write_bytes(gzip.compress(source.read_bytes()))
    outputs = set()
    for workers, block_bytes, path, engine in [
        (1, 4 << 20, source, "gigatoken"),
        (2, 10_000, source, "gigatoken"),
        (3, 1000, source, "python"),
        (2, 5000, packed, "gigatoken"),
    ]:
        preprocess(
            path,
            tmp_path / "out",
            tokenizer=load_tokenizer("gpt2", engine=engine),
            append_eod=True,
            workers=workers,
            block_bytes=block_bytes,
        )
        outputs.add(output_bytes(tmp_path / "out_text_document"))
    assert len(outputs) == 1


def test_several_keys_and_files(tmp_path):
    a = write(tmp_path / "a.jsonl", [{"title": "A", "text": "first"}, {"title": "", "text": "x"}])
    b = write(tmp_path / "b.jsonl", [{"title": "B", "text": "last"}])
    summary = preprocess([a, b], tmp_path / "out", json_keys=["text", "title"], workers=1)
    encode = GPT2.encode
    assert documents(tmp_path / "out_text_document") == [*map(encode, ["first", "x", "last"])]
    assert documents(tmp_path / "out_title_document") == [encode("A"), encode("B")]
    assert (summary.documents, summary.empty) == (5, 1)
    preprocess(b, tmp_path / "one", json_keys="title", workers=1)
    assert documents(tmp_path / "one_title_document") == [encode("B")]


@pytest.mark.parametrize("split", [False, True])
def test_empty_documents_kept(tmp_path, split):
    if split:
        pytest.importorskip("sentencex")
    texts = [("", "a"), ("One. Two.", ""), ("", ""), ("Three.", "b"), ("Four.", "c"), ("", "d")]
    source = write(tmp_path / "in.jsonl", [{"text": t, "title": n} for t, n in texts])
    how = {"json_keys": ["text", "title"], "append_eod": True, "split_sentences": split}
    written = set()
    for workers, block_bytes in (1, 4 << 20), (2, 40):
        summary = preprocess(
            source,
            tmp_path / "out",
            keep_empty=True,
            workers=workers,
            block_bytes=block_bytes,
            **how,
        )
        written.add(tuple(map(output_bytes, map(Path, summary.outputs))))
    assert len(written) == 1
    assert (summary.documents, summary.empty) == (12, 5)
    # Every document is of its line; what has tokens is as without those that have none.
    for output, column in zip(summary.outputs, zip(*texts, strict=True), strict=True):
        assert mb_data.maintenance.validate(output) == []
        found = IndexedDataset(output)
        assert [len(found.document(i)) > 0 for i in range(6)] == [text != "" for text in column]
    kept = [documents(output) for output in summary.outputs]
    preprocess(source, tmp_path / "out", workers=1, **how)
    assert kept == [documents(output) for output in summary.outputs]


@pytest.mark.parametrize("append_eod", [False, True])
@pytest.mark.parametrize("keep_newlines", [False, True])
def test_split_sentences(tmp_path, append_eod, keep_newlines):
    pytest.importorskip("sentencex")
    texts = ["One here. Two there.\n\nThree, Dr. Smith?", "", " \n ", "Alone", "Tail. \n"]
    source = write(tmp_path / "in.jsonl", [{"text": t} for t in texts])
    summary = preprocess(
        source,
        tmp_path / "out",
        split_sentences=True,
        keep_newlines=keep_newlines,
        append_eod=append_eod,
        workers=1,
    )
    assert summary.outputs == (f"{tmp_path}/out_text_sentence",)
    dataset = IndexedDataset(summary.outputs[0])
    found = [
        [GPT2.decode(s) for s in dataset[a:b]]
        for a, b in zip(dataset.document_indices, dataset.document_indices[1:], strict=False)
    ]
    end = "<|endoftext|>" if append_eod else ""
    if keep_newlines:
        assert ["".join(document) for document in found] == [t + end for t in texts if t]
        assert len(found[0]) >= 3
    else:
        assert found == [
            ["One here.", "Two there.", f"Three, Dr. Smith?{end}"],
            [f"Alone{end}"],
            [f"Tail.{end}"],
        ]
    assert summary.documents == len(found)
    assert summary.empty == len(texts) - len(found)


BAD_LINES = {
    "broken JSON": (b'{"text": "a', "line 13: Unterminated string"),
    "not an object": (b'["text"]', "line 13: expected a JSON object, got list"),
    "missing key": (b'{"txt": "a", "id": 1}', "line 13: no key 'text'; the keys are txt, id"),
    "not text": (b'{"text": null}', "line 13: the value of 'text' must be text, got NoneType"),
    "a list": (b'{"text": ["a"]}', "line 13: the value of 'text' must be text, got list"),
    "invalid UTF-8": (b'{"text": "a\xff"}', "line 13: .* can't decode byte 0xff"),
    "half a surrogate pair": (b'{"text": "a\\ud800"}', "line 13: .*surrogates not allowed"),
    "nested too deep": (b'{"text": ' + b"[" * 100_000, "line 13: (maximum recur|Stack over)"),
    "too long": (b'{"text": "' + b"x" * 200_000 + b'"}', "line 13: longer than 150,000 bytes"),
}


@pytest.mark.parametrize("block_bytes", [64, 4 << 20])
@pytest.mark.parametrize("case", BAD_LINES)
def test_bad_line_names_its_place(tmp_path, case, block_bytes):
    line, message = BAD_LINES[case]
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"text": "a"}\n' * 11 + b"\n" + line + b'\n{"text": "b"}\n')
    kwargs = {"block_bytes": block_bytes, "max_line_bytes": 150_000, "workers": 2}
    with pytest.raises(ValueError, match=rf"in\.jsonl, {message}"):
        preprocess(source, tmp_path / "out", **kwargs)
    # What was done before it is kept, where anything was.
    assert set(os.listdir(tmp_path)) <= {"in.jsonl", "out.partial"}
    assert block_bytes == 64 or os.listdir(tmp_path) == ["in.jsonl"]

    summary = preprocess(source, tmp_path / "out", on_error="skip", **kwargs)
    assert (summary.documents, summary.bad_lines) == (12, 1)
    assert summary.bad_lines_file == f"{tmp_path}/out_skipped.txt"
    listed = (tmp_path / "out_skipped.txt").read_text().splitlines()
    assert len(listed) == 1
    assert "in.jsonl, line 13: " in listed[0]

    source.write_bytes(b'{"text": "a"}\n')
    assert preprocess(source, tmp_path / "out", on_error="skip").bad_lines_file is None
    assert set(os.listdir(tmp_path)) == {
        "in.jsonl",
        "out_text_document.bin",
        "out_text_document.idx",
    }
    assert not (tmp_path / "out_skipped.txt").exists()


def test_many_bad_lines_are_all_accounted_for(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"text": "a"}\n' + b"oops\n" * 5000 + b'{"text": "b"}\nagain\n')
    summary = preprocess(source, tmp_path / "out", on_error="skip", workers=1)
    assert (summary.documents, summary.bad_lines) == (2, 5001)
    listed = (tmp_path / "out_skipped.txt").read_text().splitlines()
    assert "line 2: Expecting value" in listed[0]
    assert "lines 102 to 5003: 4,901 more bad lines among these" in listed[-1]


def test_lines_are_counted_file_by_file(tmp_path):
    a = write(tmp_path / "a.jsonl", [{"text": "x"}] * 5)
    b = tmp_path / "b.jsonl"
    b.write_bytes(b'{"text": "x"}\nbad\n')
    with pytest.raises(ValueError, match=r"b\.jsonl, line 2: Expecting value"):
        preprocess([a, b], tmp_path / "out", workers=1, block_bytes=20)


@pytest.mark.parametrize("content", [b"", b"\n\n", b'{"text": ""}\n'], ids=["0", "blank", "empty"])
def test_nothing_to_write(tmp_path, content):
    source = tmp_path / "in.jsonl"
    source.write_bytes(content)
    with pytest.raises(ValueError, match=r"no document with text under 'text' in .*in\.jsonl"):
        preprocess(source, tmp_path / "out", workers=1)
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_byte_order_mark_and_carriage_returns(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}\r\n')
    preprocess(source, tmp_path / "out", workers=1)
    assert documents(tmp_path / "out_text_document") == [[64], [65]]


def test_a_line_of_200_megabytes(tmp_path):
    source = tmp_path / "in.jsonl"
    with open(source, "wb") as file:
        file.write(b'{"text": "a"}\n{"text": "')
        file.seek(200 << 20)
        file.write(b'"}\n')
    with pytest.raises(ValueError, match=r"in\.jsonl, line 2: longer than 67,108,864 bytes"):
        preprocess(source, tmp_path / "out", workers=1)
    assert os.listdir(tmp_path) == ["in.jsonl"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": object()}, "file or folder, got object; give one of transformers as"),
        ({"tokenizer": "gpt3"}, "unknown tokenizer 'gpt3'; did you mean gpt2"),
        ({"dtype": "uint8"}, "gpt2 has 50,257 entries, uint8 holds ids up to 255"),
        ({"dtype": "float64"}, "dtype 'float64': expected one of uint8, "),
        ({"tokenizer": "bert-base-uncased", "append_eod": True}, "has no eod token"),
        ({"json_keys": []}, "one or more different names"),
        ({"json_keys": ["a", "a"]}, "one or more different names"),
        ({"json_keys": ["a/b"]}, "'a/b' cannot be part of a file's name"),
        ({"workers": 0}, "workers must be at least 1"),
        ({"output_prefix": "out/"}, "'out/': expected one that ends in a name"),
        ({"output_prefix": "."}, "'.': expected one that ends in a name"),
        ({"on_error": "ignore"}, "expected stop or skip"),
        ({"split_sentences": True, "language": "klingonese"}, "give an ISO 639 code"),
    ],
)
def test_wrong_settings(tmp_path, options, message):
    options = dict(options)
    source = write(tmp_path / "in.jsonl", [{"text": "a"}])
    if "split_sentences" in options:
        pytest.importorskip("sentencex")
    with pytest.raises(ValueError, match=message):
        preprocess(source, options.pop("output_prefix", tmp_path / "out"), **options)
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_a_directory_where_the_output_goes(tmp_path):
    source = write(tmp_path / "in.jsonl", [{"text": "a"}])
    (tmp_path / "out_text_document.idx").mkdir()
    with pytest.raises(ValueError, match=r"out_text_document\.idx is a directory"):
        preprocess(source, tmp_path / "out", workers=1)
    with pytest.raises(FileNotFoundError, match=r"no: no such directory for the output"):
        preprocess(source, tmp_path / "no" / "out")
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out_text_document.idx"]


def test_a_name_that_is_too_long_for_the_output_is_said_before_the_work(tmp_path):
    """That of the unfinished output is shorter, and would be taken."""
    source = tmp_path / "in.jsonl"
    source.write_text("a bad line")
    with pytest.raises(OSError, match=r"too long: .*y_text_document.bin"):
        preprocess(source, tmp_path / ("y" * 240), workers=1)


def test_numbers_that_python_refuses_are_none_of_our_business(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"n": %b, "text": "a"}\n{"n": 1e999, "text": "b"}\n' % (b"9" * 5000))
    preprocess(source, tmp_path / "out", workers=1)
    assert documents(tmp_path / "out_text_document") == [[64], [65]]


def test_chosen_dtype(tmp_path):
    source = write(tmp_path / "in.jsonl", [{"text": "a b"}])
    preprocess(source, tmp_path / "out", dtype="int64", workers=1)
    assert IndexedDataset(tmp_path / "out_text_document").dtype == np.int64
    assert documents(tmp_path / "out_text_document") == [[64, 275]]
    with pytest.raises(ValueError, match="int32 holds ids up to 2,147,483,647; give a wider"):
        preprocess(source, tmp_path / "out", tokenizer="null:3000000000", workers=1)


def test_text_that_the_tokenizer_refuses_is_a_bad_line(tmp_path):
    texts = ["1 2", "", "3 1000", "5", "-1"]
    source = write(tmp_path / "in.jsonl", [{"text": t} for t in texts])
    with pytest.raises(ValueError, match=r"in\.jsonl, line 3: '1000' is not an id"):
        preprocess(source, tmp_path / "out", tokenizer="null:1000", workers=1)
    assert os.listdir(tmp_path) == ["in.jsonl"]
    options = {"tokenizer": "null:1000", "append_eod": True, "on_error": "skip", "workers": 1}
    summary = preprocess(source, tmp_path / "out", **options)
    assert documents(tmp_path / "out_text_document") == [[1, 2, 1000], [5, 1000]]
    assert (summary.documents, summary.empty, summary.bad_lines) == (2, 1, 2)
    listed = (tmp_path / "out_skipped.txt").read_text().splitlines()
    assert [line.split(": ")[0][-6:] for line in listed] == ["line 3", "line 5"]


class LyingEngine:
    """The real engine, but for one token."""

    def __init__(self, engine):
        self.engine = engine

    def encode(self, data):
        tokens = self.engine.encode(data)
        tokens[tokens == 3290] = 3797  # " dog" becomes " cat"
        return tokens


@pytest.mark.parametrize("append_eod", [False, True])
@pytest.mark.parametrize("tail", ["", " and more." * 1000], ids=["short", "long"])
def test_a_difference_between_engines_stops_the_run(tmp_path, append_eod, tail):
    tokenizer = load_tokenizer("gpt2")
    tokenizer._fast.engine = LyingEngine(tokenizer._fast.engine)
    source = write(tmp_path / "in.jsonl", [{"text": f"The quick dog.{tail}"}])
    with pytest.raises(ValueError, match=r"line 1, 'text': .* differ at token 2, letter 9: \[3797"):
        preprocess(source, tmp_path / "out", tokenizer=tokenizer, append_eod=append_eod, workers=1)
    assert os.listdir(tmp_path) == ["in.jsonl"]


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
    from mb_data import build_gpt_datasets, preprocess

    if __name__ == "__main__":
        preprocess(sys.argv[2], sys.argv[3], workers=1, block_bytes=5000)
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
    with pytest.raises(ValueError, match=r"line 201: .*\n[1-9]\d* documents are kept in .*partial"):
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


def test_a_list_of_bad_lines_beside_the_input_is_no_input(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ok\n\xff\n")
    for _ in range(2):
        summary = preprocess(tmp_path, tmp_path / "out", workers=1, on_error="skip")
        assert (summary.documents, summary.bad_lines) == (1, 1)


def test_one_bad_last_line_costs_nothing_but_itself(tmp_path, kept):
    options = {"workers": 2, "block_bytes": 5000, "on_error": "skip"}
    summary = interrupted_run_goes_on(tmp_path, kept, **options)
    assert summary.resumed_text_bytes > 0
    assert summary.bad_lines == 1


def test_other_settings_do_not_drop_what_is_done(tmp_path, kept):
    before = {p.name: p.read_bytes() for p in (tmp_path / "out.partial").iterdir()}
    options = {"workers": 1, "block_bytes": 5000, "on_error": "skip", "append_eod": True}
    with pytest.raises(ValueError, match=r"other settings \(append_eod\); .* or --restart to drop"):
        preprocess(kept, tmp_path / "out", **options)
    other = write(tmp_path / "other.jsonl", [{"text": "a"}])
    with pytest.raises(ValueError, match=r"other settings \(sources\)"):
        preprocess(other, tmp_path / "out", workers=1, block_bytes=5000)
    assert before == {p.name: p.read_bytes() for p in (tmp_path / "out.partial").iterdir()}
    summary = preprocess(kept, tmp_path / "out", restart=True, **options)
    assert summary.resumed_text_bytes == 0
    assert not (tmp_path / "out.partial").exists()


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


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    import fcntl

    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    source = write(tmp_path / "in.jsonl", [{"text": "a"}])
    with pytest.warns(RuntimeWarning, match="this file system has no locks"):
        preprocess(source, tmp_path / "out", workers=1)
    assert documents(tmp_path / "out_text_document") == [[64]]


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


def test_a_damaged_archive_is_left_out_and_named(tmp_path):
    good = write(tmp_path / "a.jsonl", random_records(7, 30))
    packed = tmp_path / "b.jsonl.gz"
    raw = write(tmp_path / "b.jsonl", random_records(8, 3000)).read_bytes()
    packed.write_bytes(gzip.compress(raw)[:-2000])
    options = {"workers": 1, "block_bytes": 50_000}
    with pytest.raises(ValueError, match=r"b\.jsonl\.gz, line \d+: damaged gz data after"):
        preprocess([good, packed, good], tmp_path / "out", **options)
    summary = preprocess([good, packed, good], tmp_path / "out", on_error="skip", **options)
    assert summary.bad_lines == 1
    assert "the rest of the file is left out" in (tmp_path / "out_skipped.txt").read_text()
    found = documents(tmp_path / "out_text_document")
    texts = [json.loads(line)["text"] for line in raw.splitlines()]
    once = [GPT2.encode(r["text"]) for r in random_records(7, 30) if r["text"]]
    whole = [GPT2.encode(text) for text in texts if text]
    inside = len(found) - 2 * len(once)
    assert 0 < inside < len(whole)
    assert found == once + whole[:inside] + once


def test_pipes_and_process_substitution(tmp_path):
    source = write(tmp_path / "in.jsonl", random_records(9, 50))
    preprocess(source, tmp_path / "once", workers=1)
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    for given, options in ((str(fifo), ""), (f"<(gzip < {source})", "--quiet")):
        writer = f"cat {source} > {fifo} &" if given == str(fifo) else ""
        command = (
            f"{writer} {sys.executable} -m mb_data preprocess "
            f"--workers 1 --output-prefix {tmp_path}/out --input {given} {options}"
        )
        run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        assert output_bytes(tmp_path / "out_text_document") == output_bytes(
            tmp_path / "once_text_document"
        )


@pytest.mark.parametrize("packing", ["", ".gz"])
@pytest.mark.parametrize("count", [1, 3, 7])
def test_shards_merge_to_the_bytes_of_one_run(tmp_path, packing, count):
    sources = []
    for i in range(4):
        source = write(tmp_path / f"{i}.jsonl", random_records(i, 40))
        if packing:
            (tmp_path / f"{i}.jsonl.gz").write_bytes(gzip.compress(source.read_bytes()))
        sources.append(tmp_path / f"{i}.jsonl{packing}")
    options = {"workers": 1, "block_bytes": 3000, "append_eod": True}
    preprocess(sources, tmp_path / "once", **options)
    parts = []
    for i in range(count):
        parts += preprocess(sources, tmp_path / f"p{i}", shard=(i, count), **options).outputs
    mb_data.maintenance.merge(parts, tmp_path / "merged")
    assert output_bytes(tmp_path / "merged") == output_bytes(tmp_path / "once_text_document")


def test_a_shard_names_the_line_of_the_file(tmp_path, monkeypatch):
    source = write(tmp_path / "in.jsonl", random_records(1, 100))
    with open(source, "ab") as file:
        file.write(b"bad\n" * 3)
    options = {"shard": (3, 4), "workers": 1, "block_bytes": 3000}
    with pytest.raises(ValueError, match=r"in\.jsonl, line 101: "):
        preprocess(source, tmp_path / "out", **options)
    calls = []
    count = mb_data.text.bookkeeping.count_lines
    monkeypatch.setattr(
        mb_data.text.bookkeeping, "count_lines", lambda *a: calls.append(a) or count(*a)
    )
    preprocess(source, tmp_path / "out", **options, on_error="skip")
    assert (tmp_path / "out_skipped.txt").read_text().count("line 10") == 3
    assert len(calls) == 1  # all before the shard is read for it
    with pytest.raises(ValueError, match="i from 0 to n - 1"):
        preprocess(source, tmp_path / "x", shard=(4, 4))


def test_plain_text(tmp_path):
    (tmp_path / "a.txt").write_bytes("Grüße\r\n\nzwei".encode())
    preprocess(tmp_path / "a.txt", tmp_path / "out", workers=1)
    assert documents(tmp_path / "out_text_document") == [GPT2.encode("Grüße"), GPT2.encode("zwei")]
    for name in ("a.txt", "a.txt.gz"):
        data = (tmp_path / "a.txt").read_bytes()
        (tmp_path / "a.txt.gz").write_bytes(gzip.compress(data))
        preprocess(tmp_path / name, tmp_path / "out", workers=1, text_unit="file")
        assert documents(tmp_path / "out_text_document") == [GPT2.encode("Grüße\r\n\nzwei")]
    (tmp_path / "b.txt").write_bytes(b"ok\n\xff\n")
    with pytest.raises(ValueError, match=r"b\.txt, line 2: .* can't decode byte 0xff"):
        preprocess(tmp_path / "b.txt", tmp_path / "out", workers=1)
    with pytest.raises(ValueError, match="is plain text, without keys"):
        preprocess(tmp_path / "b.txt", tmp_path / "out", json_keys=["a", "b"])
    (tmp_path / "c.jsonl").write_bytes(b"Once upon a time\n")
    with pytest.raises(ValueError, match=r"line 1: .*plain text is read from files named \.txt"):
        preprocess(tmp_path / "c.jsonl", tmp_path / "out", workers=1)
    for array in (b'[\n{"text": "a"}\n]\n', b'[{"text": "a"}]'):
        (tmp_path / "c.jsonl").write_bytes(array)
        with pytest.raises(ValueError, match=r"line 1: .*of a JSON array make lines: jq"):
            preprocess(tmp_path / "c.jsonl", tmp_path / "out", workers=1)


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gz"])
def test_a_long_file_is_not_cut_to_fit_by_its_byte_order_mark(tmp_path, pack):
    (tmp_path / "a.txt").write_bytes(pack(b"\xef\xbb\xbf" + b"word " * 20))
    options = {"text_unit": "file", "workers": 1}
    for limit in (97, 98, 99):
        with pytest.raises(ValueError, match=f"line 1: longer than {limit} bytes"):
            preprocess(tmp_path / "a.txt", tmp_path / "out", max_line_bytes=limit, **options)
    preprocess(tmp_path / "a.txt", tmp_path / "out", max_line_bytes=100, **options)
    assert documents(tmp_path / "out_text_document") == [GPT2.encode("word " * 20)]


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    records = [r["text"] for r in random_records(2, 100)]
    source = write(tmp_path / "in.jsonl", [{"text": t} for t in records])
    string = pyarrow.string()
    for kind in (string, pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), string)):
        table = pyarrow.table({"text": pyarrow.array(records).cast(kind), "n": list(range(100))})
        parquet.write_table(table, tmp_path / "a.parquet", row_group_size=17)
        preprocess(tmp_path / "a.parquet", tmp_path / "out", workers=2, append_eod=True)
        preprocess(source, tmp_path / "once", workers=1, append_eod=True)
        assert output_bytes(tmp_path / "out_text_document") == output_bytes(
            tmp_path / "once_text_document"
        )
    with pytest.raises(ValueError, match=r"a\.parquet.*no column 'txt'; the columns are text, n"):
        preprocess(tmp_path / "a.parquet", tmp_path / "out", json_keys=["txt"], workers=1)
    with pytest.raises(ValueError, match="column 'n' must hold text, got int64"):
        preprocess(tmp_path / "a.parquet", tmp_path / "out", json_keys=["n"], workers=1)
    parquet.write_table(pyarrow.table({"text": ["a", None, "b"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet, row 2: the value of 'text' is null"):
        preprocess(tmp_path / "a.parquet", tmp_path / "out", workers=1)
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match=r"a\.parquet: damaged Parquet file"):
        preprocess(tmp_path / "a.parquet", tmp_path / "out", workers=1)


def test_bad_rows_of_parquet(tmp_path):
    """Rows have the file's numbers in a shard too, and a damaged row group is one bad line."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = [None if i == 70 else f"{i} {random.Random(i).getrandbits(99)}" for i in range(80)]
    path = tmp_path / "a.parquet"
    parquet.write_table(
        pyarrow.table({"text": texts}), path, row_group_size=20, use_dictionary=False
    )
    with pytest.raises(ValueError, match=r"a\.parquet, row 71: the value of 'text' is null"):
        preprocess(path, tmp_path / "out", workers=1, shard=(1, 2))
    chunk = parquet.ParquetFile(path).metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    start = chunk.data_page_offset
    data[start : start + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"row 21: damaged Parquet data: .*the 20 rows of its row"):
        preprocess(path, tmp_path / "out", workers=1)
    summary = preprocess(path, tmp_path / "out", workers=1, on_error="skip")
    assert (summary.documents, summary.bad_lines) == (59, 2)
    report = (tmp_path / "out_skipped.txt").read_text().splitlines()
    assert report[0].startswith(f"{path}, row 21: damaged")
    assert report[1] == f"{path}, row 71: the value of 'text' is null"
    parquet.write_table(pyarrow.table({"text": ["é" * 50, "é" * 51]}), path)
    with pytest.raises(ValueError, match="row 2: longer than 100 bytes"):  # not letters
        preprocess(path, tmp_path / "out", workers=1, max_line_bytes=100)


def test_an_object_store(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    source = write(tmp_path / "in.jsonl", random_records(3, 60))
    preprocess(source, tmp_path / "once", workers=1)
    store = fsspec.filesystem("memory")
    lines = source.read_bytes().splitlines(keepends=True)
    for name, data in (("a.jsonl", lines[:30]), ("b.jsonl.gz", lines[30:])):
        raw = b"".join(data)
        store.pipe(f"/data/{name}", gzip.compress(raw) if name.endswith("gz") else raw)
    store.pipe("/data/LICENSE.txt", b"no document, as in a directory of this machine\n")
    # A pattern takes whatever it matches, but for directories.
    for i, start in enumerate((0, 20, 40)):
        store.pipe(f"/spark/part-{i:05}", b"".join(lines[start : start + 20]))
    store.pipe("/spark/part-logs/a", b"no document")
    preprocess("memory://spark/part-*", tmp_path / "out", workers=1)
    assert output_bytes(tmp_path / "out_text_document") == output_bytes(
        tmp_path / "once_text_document"
    )
    store.pipe("/elsewhere/a.jsonl", b"PAR1")
    with pytest.raises(ValueError, match="copy it here first"):
        preprocess("memory://elsewhere/a.jsonl", tmp_path / "out")
    local = f"file://{tmp_path.as_posix()}"
    for given in ("memory://data", "memory://data/*.jsonl*", f"{local}/*.jsonl", local):
        preprocess(given, tmp_path / "out", workers=1, block_bytes=2000)
        assert output_bytes(tmp_path / "out_text_document") == output_bytes(
            tmp_path / "once_text_document"
        )
    with pytest.raises(FileNotFoundError, match="memory://nothing: no such file"):
        preprocess("memory://nothing", tmp_path / "out")
    if importlib.util.find_spec("s3fs") is None:
        with pytest.raises(ModuleNotFoundError, match=r"s3://a/b: Install s3fs"):
            preprocess("s3://a/b", tmp_path / "out")


@pytest.mark.parametrize("packing", [bytes, gzip.compress], ids=["plain", "gz"])
@pytest.mark.parametrize("error", [TimeoutError, RuntimeError, None], ids=str)
def test_a_broken_connection_is_no_damage(tmp_path, monkeypatch, packing, error):
    """It used to leave out the rest of the file with --on-error skip, as of a damaged archive."""
    fsspec = pytest.importorskip("fsspec")
    lines = b"".join(b'{"text": "%d"}\n' % random.Random(i).getrandbits(99) for i in range(9000))
    data = packing(lines)
    fsspec.filesystem("memory").pipe("/far/a.jsonl", data)

    class Connection(io.BytesIO):
        def readinto(self, buffer):
            if error and self.tell() > 60_000:
                raise error("gone")
            return super().readinto(memoryview(buffer)[:10_000])

    def connect(url):
        return io.BufferedReader(Connection(data if error else data[:-10]), 1 << 16)

    monkeypatch.setattr(mb_data.text.reading, "open_remote", connect)
    options = {"workers": 1, "block_bytes": 1000, "on_error": "skip"}
    wanted = f"{error.__name__}: gone" if error else "the connection ended after"
    with pytest.raises(OSError, match=rf"^memory://far/a\.jsonl: {wanted}"):
        preprocess("memory://far/a.jsonl", tmp_path / "out", **options)
    monkeypatch.undo()
    preprocess("memory://far/a.jsonl", tmp_path / "out", **options)
    assert len(IndexedDataset(tmp_path / "out_text_document")) == 9000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.zip", b"PK\x03\x04rest", "a zip archive; unpack it: unzip -p"),
        ("a.jsonl", "\ufeff{}".encode("utf-16-le"), "UTF-16; write it anew: iconv -f UTF-16"),
        ("a.jsonl", "{}".encode("utf-16-le"), "UTF-16LE; write it anew"),
        ("a.jsonl", "{}".encode("utf-16-be"), "UTF-16BE; write it anew"),
        ("a.jsonl", "{}".encode("utf-32"), "UTF-32; write it anew"),
        ("a.tar", b"x" * 600, "a tar archive"),
        ("a.jsonl", b"a.json".ljust(257, b"\0") + b"ustar\0", "a tar archive"),
        ("a.json", b'{\n  "text": "a"\n}\n', r"line 1: .*; make each object one line: jq -c \."),
    ],
)
def test_formats_that_are_not_read_say_what_to_do(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        preprocess(tmp_path / name, tmp_path / "out", workers=1)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("append_eod", [False, True])
def test_prepend_bos(tmp_path, split, append_eod):
    if split:
        pytest.importorskip("sentencex")
    texts = ["One here. Two there.", "", "Three."]
    source = write(tmp_path / "in.jsonl", [{"text": t} for t in texts])
    tokenizer = load_tokenizer("bert-base-uncased", eod_token="[SEP]")
    options = {"append_eod": append_eod, "split_sentences": split, "prepend_bos": True}
    preprocess(source, tmp_path / "out", tokenizer=tokenizer, workers=1, **options)
    dataset = IndexedDataset(tmp_path / f"out_text_{'sentence' if split else 'document'}")
    sequences = [["One here.", "Two there."], ["Three."]] if split else [[texts[0]], [texts[2]]]
    expected = []
    for document in sequences:
        rows = [tokenizer.encode(text) for text in document]
        rows[0] = [tokenizer.bos, *rows[0]]
        if append_eod:
            rows[-1] = [*rows[-1], tokenizer.eod]
        expected += rows
    assert [row.tolist() for row in dataset[:]] == expected


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
    mb_data.text.worker.CACHE_BYTES = 64 << 20
    preprocess(sys.argv[1], sys.argv[2], workers=2, block_bytes=1 << 20)
    print(peak())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["common words", "no word twice"])
def test_memory_is_bounded(tmp_path, kind):
    def peak(megabytes):
        source = tmp_path / "in.jsonl"
        rng = np.random.default_rng(0)
        with open(source, "wb") as file:
            for _ in range(megabytes):
                letters = rng.integers(ord("a"), ord("z") + 1, size=1 << 20, dtype=np.uint8)
                letters[::8] = ord(" ")
                text = letters.tobytes() if kind == "no word twice" else b" cat sat" * (1 << 17)
                file.write(b'{"text": "' + text + b'"}\n')
        run = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(MEASURED_RUN), source, tmp_path / "out"],
            capture_output=True,
            text=True,
            check=True,
        )
        return max(map(float, run.stdout.split()))

    # In MiB. Without its limit the engine would take 10 bytes a byte of new words, half of them a
    # worker's. With it, a table of 100 is doubled once, sooner by a worker that gets more of them.
    small, large = peak(16), peak(80)
    assert large < small + 160
    assert large < 400
