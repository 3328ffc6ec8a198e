"""Inputs of every kind, and what is wrong with them, by file and line."""

import gzip
import importlib.util
import io
import json
import os
import random
import shlex
import subprocess
import sys
from pathlib import Path

import mb_data.text.bookkeeping
import mb_data.text.reading
import pytest
from mb_data import IndexedDataset
from preprocess_helpers import GPT2, documents, output_bytes, preprocess, random_records, write

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


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("case", "block_bytes"),
    [*((case, 4 << 20) for case in BAD_LINES), ("broken JSON", 64), ("too long", 64)],
)
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


def test_numbers_that_python_refuses_are_none_of_our_business(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"n": %b, "text": "a"}\n{"n": 1e999, "text": "b"}\n' % (b"9" * 5000))
    preprocess(source, tmp_path / "out", workers=1)
    assert documents(tmp_path / "out_text_document") == [[64], [65]]


def test_what_is_good_is_good_beside_a_bad_line(tmp_path):
    """A block with one is read by Python's json too, which takes nothing so deeply nested."""
    pytest.importorskip("orjson")
    deep = '{"text": "b", "more": ' + "[" * 1000 + "]" * 1000 + "}\n"
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "a"}\n' + deep + "{\n")
    summary = preprocess(source, tmp_path / "out", workers=1, on_error="skip")
    assert (summary.documents, summary.bad_lines) == (2, 1)


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


@pytest.mark.filterwarnings("ignore:named more than once")
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


def test_a_list_of_bad_lines_beside_the_input_is_no_input(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ok\n\xff\n")
    for _ in range(2):
        summary = preprocess(tmp_path, tmp_path / "out", workers=1, on_error="skip")
        assert (summary.documents, summary.bad_lines) == (1, 1)


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
    twice = pyarrow.table([["a"], ["b"]], names=["text", "text"])
    parquet.write_table(twice, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="several columns 'text'; the columns are text, text"):
        preprocess(tmp_path / "a.parquet", tmp_path / "out", workers=1)
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


def test_sums_of_parquet_pages_are_checked(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": [f"{i} is whole" for i in range(40)]})
    kept = {"use_dictionary": False, "compression": "none", "write_statistics": False}
    parquet.write_table(table, path, row_group_size=20, write_page_checksum=True, **kept)
    path.write_bytes(path.read_bytes().replace(b"33 is whole", b"33 is whale"))
    with pytest.raises(ValueError, match=r"row 21: damaged Parquet data: .*the 20 rows of its row"):
        preprocess(path, tmp_path / "out", workers=1)
    assert preprocess(path, tmp_path / "out", workers=1, on_error="skip").documents == 20


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
    with pytest.raises(FileNotFoundError, match=r"^'': no such file"):
        preprocess("", tmp_path / "out")
    if importlib.util.find_spec("s3fs") is None:
        with pytest.raises(ModuleNotFoundError, match=r"s3://a/b: Install s3fs"):
            preprocess("s3://a/b", tmp_path / "out")


@pytest.mark.sweep(2)
@pytest.mark.parametrize("packing", [bytes, gzip.compress], ids=["plain", "gz"])
@pytest.mark.parametrize("error", [TimeoutError, RuntimeError, None], ids=str)
def test_a_broken_connection_is_no_damage(tmp_path, monkeypatch, packing, error):
    """Of a damaged archive the rest is left out with --on-error skip; here it would be lost."""
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
        ("a.arrow", b"\xff\xff\xff\xff\x70\0\0\0", "Arrow, as save_to_disk .*to_parquet"),
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


def test_the_command_in_such_a_message_can_be_run(tmp_path):
    lines = "".join(f'{{"text": "caf\\u00e9 {i}"}}\n' for i in range(3))
    (tmp_path / "my file.jsonl").write_text(lines, encoding="utf-16")
    with pytest.raises(ValueError, match="iconv") as caught:
        preprocess(tmp_path / "my file.jsonl", tmp_path / "out", workers=1)
    *_, source, arrow, made = shlex.split(str(caught.value).partition("anew: ")[2])
    assert arrow == ">"
    Path(made).write_text(Path(source).read_text("utf-16"), encoding="utf-8")
    assert preprocess(made, tmp_path / "out", workers=1).documents == 3
