"""JSON Lines in, the bytes Megatron would write out; or one clear error and nothing at all."""

import errno
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time

import mb_data
import mb_data.partial
import mb_data.pipeline
import numpy as np
import pytest
from mb_data import IndexedDataset, load_tokenizer
from mb_data.pipeline import WorkerDiedError


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
    "nested too deep": (b'{"text": ' + b"[" * 100_000, "line 13: maximum recursion depth"),
    "too long": (b'{"text": "' + b"x" * 200_000 + b'"}', "line 13: longer than 150,000 bytes"),
}


@pytest.mark.parametrize("block_bytes", [64, 4 << 20])
@pytest.mark.parametrize("case", BAD_LINES)
def test_bad_line_names_its_place_and_leaves_nothing(tmp_path, case, block_bytes):
    line, message = BAD_LINES[case]
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"text": "a"}\n' * 11 + b"\n" + line + b'\n{"text": "b"}\n')
    kwargs = {"block_bytes": block_bytes, "max_line_bytes": 150_000, "workers": 2}
    with pytest.raises(ValueError, match=rf"in\.jsonl, {message}"):
        preprocess(source, tmp_path / "out", **kwargs)
    assert os.listdir(tmp_path) == ["in.jsonl"]

    summary = preprocess(source, tmp_path / "out", on_error="skip", **kwargs)
    assert (summary.documents, summary.bad_lines) == (12, 1)
    assert summary.bad_lines_file == f"{tmp_path}/out_skipped.txt"
    listed = (tmp_path / "out_skipped.txt").read_text().splitlines()
    assert len(listed) == 1
    assert "in.jsonl, line 13: " in listed[0]

    source.write_bytes(b'{"text": "a"}\n')
    assert preprocess(source, tmp_path / "out", on_error="skip").bad_lines_file is None
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
        ({"tokenizer": "gpt3"}, "unknown tokenizer 'gpt3'; did you mean gpt2"),
        ({"dtype": "uint8"}, "gpt2 has 50,257 entries, uint8 holds ids up to 255"),
        ({"dtype": "float64"}, "dtype 'float64': expected one of uint8, "),
        ({"tokenizer": "bert-base-uncased", "append_eod": True}, "has no eod token"),
        ({"json_keys": []}, "one or more different names"),
        ({"json_keys": ["a", "a"]}, "one or more different names"),
        ({"json_keys": ["a/b"]}, "'a/b' cannot be part of a file's name"),
        ({"workers": 0}, "workers must be at least 1"),
        ({"on_error": "ignore"}, "expected stop or skip"),
        ({"split_sentences": True, "language": "klingonese"}, "give an ISO 639 code"),
    ],
)
def test_wrong_settings(tmp_path, options, message):
    source = write(tmp_path / "in.jsonl", [{"text": "a"}])
    if "split_sentences" in options:
        pytest.importorskip("sentencex")
    with pytest.raises(ValueError, match=message):
        preprocess(source, tmp_path / "out", **options)
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_chosen_dtype(tmp_path):
    source = write(tmp_path / "in.jsonl", [{"text": "a b"}])
    preprocess(source, tmp_path / "out", dtype="int64", workers=1)
    assert IndexedDataset(tmp_path / "out_text_document").dtype == np.int64
    assert documents(tmp_path / "out_text_document") == [[64, 275]]


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
    tokenizer._fast._engine = LyingEngine(tokenizer._fast._engine)
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
    monkeypatch.setattr(mb_data.partial, "LOCK_PATIENCE", 0.1)
    source = write(tmp_path / "in.jsonl", [{"text": "a"}])
    first = mb_data.partial.PartialOutput(
        str(tmp_path / "out"), ("x",), np.dtype("<u2"), {}, resume=False
    )
    with first, pytest.raises(ValueError, match=rf"another run \(process {os.getpid()}\) is writ"):
        preprocess(source, tmp_path / "out", workers=1)
    preprocess(source, tmp_path / "out", workers=1)


def test_input_that_changes_meanwhile(tmp_path, monkeypatch):
    source = write(tmp_path / "in.jsonl", [{"text": "a"}])

    def encode_and_touch(job, block, encode=mb_data.pipeline.encode_block):
        os.utime(source, ns=(1, 1))
        return encode(job, block)

    monkeypatch.setattr(mb_data.pipeline, "encode_block", encode_and_touch)
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

    def no_space(descriptor, data, offset, pwrite=os.pwrite):
        if offset > 20_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", no_space)
    with pytest.raises(OSError, match=r"No space left on device.*out\.partial"):
        preprocess(source, tmp_path / "out", workers=2, block_bytes=5000)
    monkeypatch.undo()
    interrupted_run_goes_on(tmp_path, source, workers=2, block_bytes=5000)


def test_killed_worker(tmp_path, monkeypatch):
    source = write(tmp_path / "in.jsonl", random_records(4, 200))

    def die_at(job, block, encode=mb_data.pipeline.encode_block):
        if block.start == 50_000:
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(job, block)

    monkeypatch.setattr(mb_data.pipeline, "encode_block", die_at)
    with pytest.raises(WorkerDiedError, match=r"by signal 9 .*in\.jsonl, bytes 50,000 to 55,000"):
        preprocess(source, tmp_path / "out", workers=2, block_bytes=5000)
    monkeypatch.undo()
    interrupted_run_goes_on(tmp_path, source, workers=2, block_bytes=5000)


SLOW_RUN = """
    import sys, time
    import mb_data.pipeline
    from mb_data import preprocess

    encode = mb_data.pipeline.encode_block
    def slow(job, block):
        time.sleep(0.02)
        return encode(job, block)
    mb_data.pipeline.encode_block = slow
    sys.modules["mb_data.preprocess"].SAVE_INTERVAL = 0.02
    preprocess(sys.argv[1], sys.argv[2], workers=2, block_bytes=5000, on_error="skip")
"""


@pytest.mark.parametrize("packing", ["", ".gz"])
def test_kill_9_in_the_middle_and_run_again(tmp_path, packing):
    source = write(tmp_path / "in.jsonl", random_records(5, 400))
    lines = source.read_bytes().splitlines(keepends=True)
    data = b"".join(line + b"bad\n" * (i % 50 == 0) for i, line in enumerate(lines))
    source = tmp_path / f"in.jsonl{packing}"
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


def test_other_settings_start_afresh(tmp_path, monkeypatch):
    source = write(tmp_path / "in.jsonl", random_records(6, 200))
    monkeypatch.setattr(sys.modules["mb_data.preprocess"], "SAVE_INTERVAL", 0.001)

    def die_late(job, block, encode=mb_data.pipeline.encode_block):
        time.sleep(0.005)
        if block.start == 50_000:
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(job, block)

    monkeypatch.setattr(mb_data.pipeline, "encode_block", die_late)
    with pytest.raises(WorkerDiedError):
        preprocess(source, tmp_path / "out", workers=1, block_bytes=5000)
    monkeypatch.undo()
    assert (tmp_path / "out.partial" / "state.json").exists()
    summary = interrupted_run_goes_on(
        tmp_path, source, workers=1, block_bytes=5000, append_eod=True
    )
    assert summary.resumed_text_bytes == 0


MEASURED_RUN = """
    import os, sys
    import mb_data.pipeline
    from mb_data import preprocess

    def peak():  # ru_maxrss would be that of the process which started this one
        (line,) = (x for x in open("/proc/self/status") if x.startswith("VmHWM"))
        return int(line.split()[1]) / 1024

    encode = mb_data.pipeline.encode_block
    def measured(job, block):
        encoded = encode(job, block)
        os.write(1, f"{peak()}\\n".encode())  # in one piece, beside the other worker
        return encoded
    mb_data.pipeline.encode_block = measured
    mb_data.pipeline.CACHE_BYTES = 64 << 20
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

    # In MiB. Without its limit the engine would take 10 bytes a byte of new words.
    small, large = peak(16), peak(48)
    assert large < small + 64
    assert large < 400
