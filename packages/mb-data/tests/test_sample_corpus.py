"""The corpus is the same each time, whole lines of real modules, and within its limit."""

import json
import os
import sysconfig
from pathlib import Path

import pytest
from mb_data import write_documentation_corpus, write_sample_corpus
from mb_data.cli import main
from mb_data.corpora import sample


def test_corpus_is_real_text_in_a_fixed_order(tmp_path):
    path = write_sample_corpus(tmp_path / "a.jsonl", max_bytes=500_000)
    assert path == tmp_path / "a.jsonl"
    again = write_sample_corpus(tmp_path / "b.jsonl", max_bytes=500_000)
    assert path.read_bytes() == again.read_bytes()
    assert 400_000 < path.stat().st_size <= 500_000
    records = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert len(records) > 10
    library = Path(sysconfig.get_path("stdlib"))
    for record in records:
        assert record["text"] == (library / record["path"]).read_text("utf-8")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl"]


def test_a_limit_nothing_fits_in(tmp_path, capsys):
    with pytest.raises(ValueError, match="no Python source of at most 10 bytes"):
        write_sample_corpus(tmp_path / "a.jsonl", max_bytes=10)
    assert main(["sample-corpus", str(tmp_path / "a.jsonl"), "--max-bytes", "10"]) == 2
    assert "no Python source" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_file_is_not_replaced(tmp_path):
    (tmp_path / "pipe").symlink_to(os.devnull)  # as /dev/stdout is one
    for name in ("pipe", "."):
        with pytest.raises(ValueError, match="expected the name of a file"):
            write_sample_corpus(tmp_path / name, max_bytes=10_000)
    assert [p.name for p in tmp_path.iterdir()] == ["pipe"]


def test_documentation_is_prose_under_a_title(tmp_path, monkeypatch):
    """Of one package: to parse the whole library three times is 15 s of two cores."""
    package = Path(sysconfig.get_path("stdlib"), "asyncio")
    monkeypatch.setattr(sample, "_library", lambda: package)
    path, again = (
        write_documentation_corpus(tmp_path / name, max_bytes=30_000) for name in ("a.jsonl", "b")
    )
    assert path.read_bytes() == again.read_bytes()
    records = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert 25_000 < path.stat().st_size <= 30_000
    titles = [record["title"] for record in records]
    assert len(set(titles)) == len(titles)
    for record in records:
        assert ". " in record["text"]
        assert ">>>" not in [
            word for line in record["text"].splitlines() for word in line.split()[:1]
        ]
    with pytest.raises(ValueError, match="no docstrings of at most 10 bytes"):
        write_documentation_corpus(tmp_path / "c.jsonl", max_bytes=10)
