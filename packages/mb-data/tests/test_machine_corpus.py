"""The corpus of a machine: every text once, in an order of the seed alone, nothing else."""

import gzip
import json
import os
import random
import sys
import zlib

import pytest
from mb_data.cli import main
from mb_data.corpora import machine
from mb_data.corpora.machine import MAX_FILE_BYTES, write_machine_corpus
from mb_data.corpora.markup import text_of_markup

WORDS = ("of", "the", "experts", "each", "token", "meets", "one", "and", "learns", "what", "it")


def prose(seed, lines=40):
    chosen = random.Random(seed)
    return "".join(f"{seed} {' '.join(chosen.choices(WORDS, k=9))}\n" for _ in range(lines))


def texts(path):
    return {r["path"]: r["text"] for r in map(json.loads, path.read_text("utf-8").splitlines())}


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "machine"
    (root / "deep" / "er").mkdir(parents=True)
    for number in range(12):
        (root / "deep" / f"{number}.py").write_text(prose(number))
    return root


def test_the_order_is_a_shuffle_by_the_seed_alone(tmp_path, folder):
    outputs = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_machine_corpus(tmp_path / name, folders={"m": folder}, seed=seed)
        outputs.append(list(texts(tmp_path / name)))
    assert outputs[0] == outputs[1] != outputs[2]
    assert sorted(outputs[0]) == sorted(outputs[2]) == sorted(f"m/deep/{n}.py" for n in range(12))
    assert outputs[0] != sorted(outputs[0])
    limit = 3 * len(prose(0)) + 500
    write_machine_corpus(tmp_path / "d", folders={"m": folder}, seed=1, max_bytes=limit)
    prefix = list(texts(tmp_path / "d"))
    assert 1 <= len(prefix) < 5
    assert prefix == outputs[0][: len(prefix)]


@pytest.mark.skipif(sys.platform != "linux", reason="names elsewhere are Unicode")
def test_a_name_that_is_no_text(tmp_path, folder):
    (folder / os.fsdecode(b"\xff.py")).write_text(prose(99))
    write_machine_corpus(tmp_path / "a", folders={"m": folder})
    assert texts(tmp_path / "a")["m/\\udcff.py"] == prose(99)


def test_copies_and_near_copies_are_left_out(tmp_path, folder):
    lines = prose(3).splitlines(keepends=True)
    (folder / "copy.txt").write_text(prose(3))
    (folder / "indented.py").write_text("".join(f"    {line}" for line in lines))
    (folder / "near.py").write_text("".join([*lines[:20], "one new line\n", *lines[20:]]))
    (folder / "packed.txt.gz").write_bytes(gzip.compress(prose(3).encode()))
    (folder / "half.py").write_text("".join(lines[:8]) + prose(77))
    facts = write_machine_corpus(tmp_path / "a", folders={"m": folder})
    assert (facts.documents, facts.copies) == (13, 4)
    assert "m/half.py" in texts(tmp_path / "a")


def test_what_is_no_text_is_left_out(tmp_path, folder):
    (folder / "latin.txt").write_bytes(prose(50).encode() + b"\xe9\n")
    (folder / "table.txt").write_text("\n".join(f"{n * 7919:08d};{n:04d}" for n in range(99)))
    (folder / "minified.txt").write_text(prose(51).replace("\n", " "))
    (folder / "short.md").write_text("a word\n")
    (folder / "long.txt").write_text("word of it\n" * 100_000)
    (folder / "broken.txt.gz").write_bytes(gzip.compress(prose(52).encode())[:60])
    (folder / "nul.c").write_text(prose(53) + "\0")
    (folder / "picture.png").write_text(prose(54))
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "made.py").write_text(prose(55))
    (folder / "link.py").symlink_to(folder / "deep" / "1.py")
    (folder / "gone.py").symlink_to(folder / "nowhere")
    facts = write_machine_corpus(tmp_path / "a", folders={"m": folder})
    assert (facts.documents, facts.copies, facts.unfit) == (12, 0, 7)


def test_facts_are_those_of_the_text(tmp_path, folder):
    other = folder / "deep" / "er"
    (other / "é.md").write_text("".join(f"{n}: Größe, naïveté {prose(n, 1)}" for n in range(60)))
    facts = write_machine_corpus(tmp_path / "a", folders={"m": folder, "inner": other})
    written = list(texts(tmp_path / "a").values())
    data = "".join(written).encode()
    assert facts.text_bytes == len(data)
    assert facts.gzip_bits_per_byte == pytest.approx(8 * len(zlib.compress(data, 6)) / len(data))
    # A folder inside another one that has a name of its own is counted under that.
    assert facts.origins["inner"] == len((other / "é.md").read_bytes())
    assert sum(facts.origins.values()) == facts.text_bytes


def test_nothing_to_take_leaves_no_file(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    output = tmp_path / "out.jsonl"
    for words, problem in (
        (["--add", f"m={tmp_path / 'empty'}"], "no text in"),
        (["--add", f"m={tmp_path / 'none'}"], "which is none"),
        (["--add", "folder"], "expected NAME=FOLDER"),
        (["--add", "m="], "expected NAME=FOLDER"),
        (["--add", "m=a", "--add", "m=b"], "m is a already"),
        ([], "give one at least"),
    ):
        assert main(["machine-corpus", str(output), "--only-added", *words]) == 2
        assert problem in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["empty"]


def test_a_bare_machine_makes_one(tmp_path, capsys, monkeypatch):
    """Python's library is there; of all that, as its files are many, two packages."""
    library = machine.machine_folders()["python"]
    some = {name: library / name for name in ("asyncio", "email")}
    monkeypatch.setattr(machine, "machine_folders", lambda: some)
    output = tmp_path / "out.jsonl"
    assert main(["machine-corpus", str(output), "--max-bytes", "300000"]) == 0
    said = capsys.readouterr().out
    assert "gzip: " in said
    size = sum(len(text.encode()) for text in texts(output).values())
    assert 300_000 <= size < 300_000 + MAX_FILE_BYTES


PAGE = """<!DOCTYPE html><html><head><title>Not read</title><style>p {{ x }}</style></head>
<BODY><nav><a href="#">Home</a></nav><!-- a <p> remark --><h1>Experts &amp; tokens</h1>
<p>One
   paragraph,&nbsp;<b>b</b>old where a &lt; b.</p><pre class="x">
def f(x):
    return x &lt; <span>1</span>
</pre><script>if (a < b) {{ "</p>" }}</script>
<table><tr><td>a</td><td>b</td></tr></table>{more}</body></html>"""


def test_a_page_is_the_text_it_shows():
    assert text_of_markup(PAGE.format(more="<p>5 < 6 and x<y")).split("\n") == [
        "Experts & tokens",
        "One paragraph, bold where a < b.",
        "",
        "def f(x):",
        "    return x < 1",
        "",
        "a    b",
        "5 < 6 and x",
        "",
    ]
    assert text_of_markup("") == text_of_markup("<p> </p>") == "\n"
    assert text_of_markup("<pre>a<PRE class='b'>c</pre >d<pre>e") == "ac\n\nde\n"
    # Each of these would be followed to the page's end, for half an hour in all.
    for sign, shown in (("<select x>", ""), ("<!-- ", "<!-- "), ("<pre>", ""), ("<a", "<a")):
        assert text_of_markup(f"a{sign * 100_000}") == f"a{shown * 100_000}".strip() + "\n"


def test_pages_of_paragraphs_are_taken_and_indices_are_not(tmp_path, folder):
    paragraphs = "".join(f"<p>{line} {line}</p>" for line in prose(60, 80).splitlines())
    links = "".join(f"<li><a href='#'>{n} word</a></li>" for n in range(500))
    for name, more in (("page", paragraphs), ("index", links), ("short", "<p>A word.</p>")):
        (folder / f"{name}.html").write_text(PAGE.format(more=more))
    packed = PAGE.format(more=paragraphs.replace("60 ", "61 "))
    (folder / "packed.html.gz").write_bytes(gzip.compress(packed.encode()))
    for workers in (1, 2):
        output = tmp_path / str(workers)
        facts = write_machine_corpus(output, folders={"m": folder}, workers=workers)
        assert (facts.documents, facts.unfit) == (14, 2)
    assert {"m/page.html", "m/packed.html.gz"} < set(texts(output))
    assert texts(output)["m/page.html"] == text_of_markup(PAGE.format(more=paragraphs))
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
    with pytest.raises(ValueError, match="workers"):
        write_machine_corpus(tmp_path / "none", folders={"m": folder}, workers=0)
