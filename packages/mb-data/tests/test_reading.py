"""Blocks give every line once, whatever their size; inputs by path, pattern and compression."""

import bz2
import glob
import gzip
import io
import lzma
import os
import random
import subprocess
import sys
import warnings

import pytest
from mb_data.text.compression import compression
from mb_data.text.reading import Archive, Block, blocks, count_lines, read_lines
from mb_data.text.sources import Source, find_sources

LIMIT = 10_000


def lines_of(paths, block_bytes, limit=LIMIT):
    found = []
    for block in blocks(find_sources(paths), block_bytes, limit):
        if block.problem:
            raise ValueError(f"{block.path}: {block.problem}")
        found += map(bytes, read_lines(block, limit))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_every_line_once(tmp_path, seed):
    rng = random.Random(seed)
    lines = [b"x" * rng.choice([0, 1, 2, 3, 30]) for _ in range(rng.randrange(1, 30))]
    data = b"\n".join(lines) + rng.choice([b"", b"\n"])
    lines = data.splitlines()
    (tmp_path / "a").write_bytes(data)
    (tmp_path / "a.gz").write_bytes(gzip.compress(data))
    for block_bytes in (1, 2, 3, 5, 31, 1000):
        assert lines_of([tmp_path / "a"], block_bytes) == lines
        assert lines_of([tmp_path / "a.gz"], block_bytes) == lines


@pytest.mark.parametrize("name", ["a.json", "a.gz"])
@pytest.mark.parametrize("end", [b"", b"\n", b"\nlast"])
def test_a_line_beyond_the_limit_is_cut_but_still_beyond_it(tmp_path, name, end):
    data = b"first\n" + b"y" * (5 << 19) + end
    (tmp_path / name).write_bytes(gzip.compress(data, 1) if name.endswith("gz") else data)
    for block_bytes in (100_000, 1 << 20, 3 << 20):
        first, long, *last = lines_of([tmp_path / name], block_bytes, limit=1000)
        assert first == b"first"
        assert 1000 < len(long) <= 5 << 19
        assert set(long) == set(b"y")
        assert last == ([b"last"] if end == b"\nlast" else [])


def test_small_blocks_within_a_line_beyond_the_limit(tmp_path):
    (tmp_path / "a").write_bytes(b"first\n" + b"y" * 3000 + b"\nlast")
    first, long, last = lines_of([tmp_path / "a"], 3, limit=1000)
    assert (first, last) == (b"first", b"last")
    assert len(long) > 1000


def test_compressed_files_read_alike(tmp_path):
    zstd = pytest.importorskip("backports.zstd") if sys.version_info < (3, 14) else None
    if zstd is None:
        from compression import zstd
    data = b"".join(b'{"text": "%d"}\n' % i for i in range(1000))
    # Two members each: files joined with cat are valid too.
    half = len(data) // 2
    for name, pack in [
        ("gz", gzip.compress),
        ("bz2", bz2.compress),
        ("xz", lzma.compress),
        ("zst", zstd.compress),
    ]:
        path = tmp_path / f"a.jsonl.{name}"
        path.write_bytes(pack(data[:half]) + pack(data[half:]))
        assert compression(path.read_bytes()[:8]) == name
        assert lines_of([path], 777) == data.splitlines()
        if name == "zst":  # as seekable and parallel writers begin
            path.write_bytes(b"\x5e\x2a\x4d\x18\x04\0\0\0abcd" + path.read_bytes())
            assert lines_of([path], 777) == data.splitlines()
            window = {zstd.CompressionParameter.window_log: 28}  # zstd --long=28 of a stream
            stream = zstd.ZstdCompressor(options=window)
            path.write_bytes(stream.compress(data) + stream.flush())
            assert lines_of([path], 777) == data.splitlines()
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(ValueError, match=rf"a\.jsonl\.{name}: damaged {name} data"):
            lines_of([path], 777)


@pytest.mark.parametrize(
    ("name", "pack"), [("gz", gzip.compress), ("xz", lzma.compress)], ids=["gz", "xz"]
)
def test_all_before_the_end_of_a_broken_archive_is_kept(tmp_path, name, pack):
    """Though it is less than is read at a time."""
    lines = [b'{"text": "%d"}' % random.Random(i).getrandbits(200) for i in range(2000)]
    packed = pack(b"\n".join(lines))
    path = tmp_path / f"a.jsonl.{name}"
    path.write_bytes(packed[: len(packed) // 2])
    *whole, last = blocks(find_sources([path]), 4 << 20, 1000)
    assert last.problem is not None
    kept = [bytes(line) for block in whole for line in read_lines(block, 1000)]
    assert len(kept) > 800
    assert kept == lines[: len(kept)]


def test_damaged_in_the_middle(tmp_path):
    data = bytearray(gzip.compress(random.Random(0).randbytes(50_000)))
    data[20_000:20_050] = bytes(50)
    (tmp_path / "a.gz").write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.gz: damaged gz data"):
        lines_of([tmp_path / "a.gz"], 5000)


@pytest.mark.parametrize("pack", [bz2.compress, lzma.compress], ids=["bz2", "xz"])
def test_no_stream_of_a_file_is_lost_in_silence(tmp_path, pack):
    """The standard library's readers end in silence at a later stream that is damaged."""
    streams = [pack(b'{"text": "%d"}\n' % i * 50) for i in range(3)]
    path = tmp_path / "a.jsonl"
    for zeros in (b"", bytes(4), bytes(1000)):  # padding, between streams and after them
        path.write_bytes(zeros.join([*streams, b""]))
        assert len(lines_of([path], 777)) == 150
    start, stop = len(streams[0]), len(streams[0]) + len(streams[1])
    for place in (start, start + 5, start + 20, stop - 5):
        damaged = bytearray(b"".join(streams))
        damaged[place] ^= 0x55
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"a\.jsonl: damaged"):
            lines_of([path], 777)
    path.write_bytes(b"".join(streams) + b"no stream")
    with pytest.raises(ValueError, match="damaged"):
        lines_of([path], 777)


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gz"])
def test_standard_input(monkeypatch, pack):
    data = b"one\ntwo\nthree"
    stream = io.TextIOWrapper(io.BufferedReader(io.BytesIO(pack(data))))
    monkeypatch.setattr(sys, "stdin", stream)
    assert lines_of(["-"], 4) == [b"one", b"two", b"three"]


def test_links_to_directories_are_read_as_directories(tmp_path):
    corpus, disk = tmp_path / "corpus", tmp_path / "disk"
    (disk / "deep").mkdir(parents=True)
    (corpus / "real").mkdir(parents=True)
    for path in (disk / "a.jsonl", disk / "deep" / "b.jsonl", corpus / "real" / "c.jsonl"):
        path.write_bytes(b"{}\n")
    (disk / "back").symlink_to(corpus)
    (corpus / "first").symlink_to(corpus / "real")
    (corpus / "more").symlink_to(disk)
    (corpus / "more2").symlink_to(disk)
    found = [s.path.removeprefix(f"{corpus}/") for s in find_sources([corpus])]
    assert found == ["more/a.jsonl", "more/deep/b.jsonl", "real/c.jsonl"]
    (corpus / "gone.jsonl").symlink_to(disk / "gone.jsonl")
    for item in (corpus, corpus / "*.jsonl"):
        with pytest.raises(FileNotFoundError, match=r"gone\.jsonl"):
            find_sources([item])


def test_a_directory_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.jsonl").write_bytes(b"{}\n")
    scandir = os.scandir

    def closed(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    for item in (tmp_path, tmp_path / "**" / "*.jsonl"):
        with pytest.raises(PermissionError, match="closed"):
            find_sources([item])


def test_links_that_lead_back_are_no_end_of_names(tmp_path):
    """Of two such links Python's glob makes 2**40 paths, and more of three."""
    for name in ("a", ".hidden", "a/b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.jsonl").write_bytes(b"{}\n")
    for name in ("up", "a/up", "a/b/up"):
        (tmp_path / name).symlink_to(tmp_path)
    (tmp_path / "self").symlink_to("self")
    program = "import sys; from mb_data.text.sources import find_sources as find; "
    program += "[print(s.path) for item in sys.argv[1:] for s in find([item])]"
    patterns = ("**/*.jsonl", "*/**/b/x*", "./**/**/x.jsonl")
    command = [sys.executable, "-c", program, *patterns]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    both = ["a/b/x.jsonl", "a/x.jsonl"]
    assert done.stdout.split() == [*both, "a/b/x.jsonl", *(f"./{path}" for path in both)]


@pytest.mark.parametrize("backwards", [False, True])
def test_names_of_one_folder_are_chosen_alike_in_any_order_of_the_disk(
    tmp_path, monkeypatch, backwards
):
    """Which of them counts decides where its documents come, before or behind those of others."""
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.jsonl").write_bytes(b"{}\n")
    (tmp_path / "c").symlink_to(tmp_path / "a")
    on_disk = glob.glob
    monkeypatch.setattr(
        glob, "glob", lambda *of, **how: sorted(on_disk(*of, **how), reverse=backwards)
    )
    found = [s.path.removeprefix(f"{tmp_path}/") for s in find_sources([f"{tmp_path}/*/x.jsonl"])]
    assert found == ["a/x.jsonl", "b/x.jsonl"]


def test_directories_and_patterns(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.jsonl", "a.json.gz", "sub/c.ndjson", "notes.txt", "d.jsonl.xz"):
        (tmp_path / name).write_bytes(b"{}\n")

    def names(item):
        return [s.path.removeprefix(f"{tmp_path}/") for s in find_sources([item])]

    assert names(tmp_path) == ["a.json.gz", "b.jsonl", "d.jsonl.xz", "sub/c.ndjson"]
    assert names(f"{tmp_path}/*.jsonl*") == ["b.jsonl", "d.jsonl.xz"]
    assert names(f"{tmp_path}/**/*.ndjson") == ["sub/c.ndjson"]
    (tmp_path / "sub" / "loop").symlink_to(tmp_path)  # once more, and in it once more, and so on
    (tmp_path / "sub" / "again.ndjson").symlink_to("c.ndjson")
    assert names(f"{tmp_path}/**/*.ndjson") == ["sub/again.ndjson", "sub/c.ndjson"]
    assert names(f"{tmp_path}/sub/loop/*.jsonl") == ["sub/loop/b.jsonl"]
    everything = ["a.json.gz", "b.jsonl", "d.jsonl.xz", "sub/again.ndjson", "sub/c.ndjson"]
    assert names(tmp_path) == everything
    for name in ("loop", "again.ndjson"):
        (tmp_path / "sub" / name).unlink()
    with pytest.raises(FileNotFoundError, match="no file matches"):
        names(f"{tmp_path}/*.csv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"empty: no \.jsonl"):
        names(tmp_path / "empty")
    with pytest.raises(ValueError, match="only once"):
        find_sources(["-", "-"])
    with pytest.raises(ValueError, match="no input"):
        find_sources([])
    assert names(tmp_path / "sub") == ["sub/c.ndjson"]
    for name in ("only/a.txt", "only/b.txt.gz"):
        (tmp_path / "only").mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    assert names(tmp_path / "only") == ["only/a.txt", "only/b.txt.gz"]
    (tmp_path / "only" / "C.JSONL.GZ").write_bytes(b"")
    assert names(tmp_path / "only") == ["only/C.JSONL.GZ"]
    (tmp_path / "D.TXT").write_bytes(b"")
    assert find_sources([tmp_path / "D.TXT"])[0].unit == "line"


def test_what_is_named_twice_is_read_twice_and_told(tmp_path):
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        (tmp_path / name).write_text("{}\n")
    (tmp_path / "link.jsonl").symlink_to("a.jsonl")  # a name of its own
    given = [tmp_path, f"{tmp_path}/[ab].jsonl"]
    with pytest.warns(RuntimeWarning, match=r"read as often: \S+a\.jsonl, and 1 more$"):
        found = find_sources(given)
    names = "a.jsonl b.jsonl c.jsonl link.jsonl a.jsonl b.jsonl"
    assert " ".join(os.path.basename(source.path) for source in found) == names
    with warnings.catch_warnings(action="error"):
        assert len(find_sources([tmp_path])) == 4


@pytest.mark.parametrize(
    ("shares", "apart"),
    [
        ((1, 1, 1, 1), True),
        ((3, 3, 3), True),
        ((1, 1), False),
        ((9,), False),
        ((9, *[1] * 8), False),
        ((9, 9, 9, 1), True),
    ],
)
def test_archives_are_unpacked_by_workers_where_none_outweighs_the_others(tmp_path, shares, apart):
    """Whatever plain files are beside them; every line is there either way."""
    for number, share in enumerate(shares):
        (tmp_path / f"{number}.gz").write_bytes(gzip.compress(b"a line\n" * 100, 0) * share)
    (tmp_path / "plain").write_bytes(b"a line\n" * 5000)
    found = list(blocks(find_sources([f"{tmp_path}/*"]), 1000, LIMIT))
    archives = [unit for unit in found if isinstance(unit, Archive)]
    assert len(archives) == len(shares) * apart
    parts = [unit for unit in found if not isinstance(unit, Archive)]
    parts += [part for archive in archives for part in archive.blocks()]
    assert sum(len(read_lines(part, LIMIT)) for part in parts) == 100 * sum(shares) + 5000


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="a file that cannot be read")
def test_input_that_the_disk_does_not_give_is_named():
    path = "/proc/self/mem"
    for read in (
        lambda: find_sources([path]),
        lambda: read_lines(Block(path, 0, 9, None, 9), LIMIT),
        lambda: count_lines(path, 9),
        lambda: list(blocks([Source(path, 9, 0, False, "json")], 9, LIMIT)),
    ):
        with pytest.raises(OSError, match=f"error: '{path}'"):
            read()
