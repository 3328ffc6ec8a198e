"""Page one and the page of preprocessing: the examples run, the commands do what is said."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mb_data import IndexedDataset, preprocess, write_sample_corpus
from mb_data.cli import main

PACKAGE = Path(__file__).parents[1]
README = (PACKAGE / "README.md").read_text("utf-8")
PREPROCESSING = (PACKAGE / "docs" / "preprocessing.md").read_text("utf-8")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_readme_example(here, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert "documents" in capsys.readouterr().out


def test_commands_of_page_one(here, capsys):
    (block,) = re.findall(r"```\n(mb-data.*?)```", README, re.DOTALL)
    for name in ("a", "b"):
        preprocess(write_sample_corpus(f"{name}.jsonl", max_bytes=20_000), name, workers=1)
    for line in block.splitlines():
        words = shlex.split(line, comments=True)[1:]
        if words[0] == "sample-corpus":
            words += ["--max-bytes", "200000"]
        if words[0] != "convert":  # has its own test, and the files for it
            assert main(words) == 0, line
    assert "corpus_text_document: whole" in capsys.readouterr().out
    assert len(IndexedDataset("both")) == 2 * len(IndexedDataset("mixed"))


def test_the_slurm_array_makes_the_bytes_of_one_run(here):
    """Two tasks of the script as it is printed, and what comes after them."""
    script, after, of_a_key = re.findall(r"```bash\n(.*?)```", PREPROCESSING, re.DOTALL)
    zstd = pytest.importorskip("backports.zstd") if sys.version_info < (3, 14) else None
    if zstd is None:
        from compression import zstd
    text = write_sample_corpus("all.jsonl", max_bytes=100_000).read_bytes().splitlines(True)
    (here / "corpus").mkdir()
    for part in range(3):
        packed = zstd.compress(b"".join(text[part::3]))
        (here / "corpus" / f"{part}.jsonl.zst").write_bytes(packed)
    (here / "parts").mkdir()
    stand_in = here / "mb-data"
    stand_in.write_text(f'#!/bin/bash\nexec {sys.executable} -m mb_data "$@"\n')
    stand_in.chmod(0o755)
    slurm = {"SLURM_CPUS_PER_TASK": "1", "PATH": f"{here}:{os.environ['PATH']}"}
    assert "--array=0-63" in script
    assert "_ID/64" in script
    script = script.replace("tokenizer.json", "gpt2").replace("_ID/64", "_ID/2")
    for task in ("0", "1"):
        environment = {**os.environ, **slurm, "SLURM_ARRAY_TASK_ID": task}
        subprocess.run(["bash", "-ec", script], env=environment, check=True)
    for line in after.splitlines():
        assert main(shlex.split(line, comments=True)[1:]) == 0
    for file in list(Path("parts").iterdir()):  # as if there were titles too
        shutil.copy(file, str(file).replace("_text_", "_title_"))
    subprocess.run(["bash", "-ec", of_a_key], env={**os.environ, **slurm}, check=True)
    preprocess("corpus", "once", append_eod=True, workers=1)
    for suffix in (".bin", ".idx"):
        one, array = (Path(f"{name}_text_document{suffix}") for name in ("once", "corpus"))
        assert np.array_equal(np.fromfile(one, np.uint8), np.fromfile(array, np.uint8))
        assert Path(f"corpus_title_document{suffix}").read_bytes() == array.read_bytes()
