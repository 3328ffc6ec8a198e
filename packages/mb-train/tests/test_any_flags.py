"""Flags drawn at random: a run trains, or one line says which flag is wrong and nothing is left."""

import contextlib
import io
import random
import re
import typing
from dataclasses import fields

import mb_data
import numpy as np
import pytest
from mb_train.cli import main
from mb_train.config import GROUPS, TrainConfig, flag_name
from mb_train.config.field import spec, value_types
from mb_train.flags.settled import SETTLED

TYPES = value_types(TrainConfig)
BASE = [
    "--num-layers=2", "--hidden-size=32", "--num-attention-heads=2", "--ffn-hidden-size=48",
    "--seq-length=16", "--micro-batch-size=2", "--global-batch-size=4", "--train-iters=2",
    "--lr=3e-3", "--lr-decay-iters=8", "--log-interval=1", "--eval-interval=2", "--eval-iters=1",
    "--device=cpu", "--tokenizer=null:1000", "--split=80,20,0",
]  # fmt: skip
EXPERTS = ["--moe-num-experts=4", "--moe-top-k=2"]
# What a run needs of this machine, or of other files than those here.
ELSEWHERE = {"device", "save", "load", "data_path", "wandb_project"}
WHOLE = (0, 1, 2, 3, 4, 5, 7, 8, 16, 17, 32, 64, 100, -1)
REAL = (0.0, 0.1, 0.5, 0.9, 1.0, 1.5, 2.0, -0.5, 1e-5, 100.0)
TEXT = ("x", "gpt2", "/nonexistent/é x", "90,10,0", "")
FIELDS = [f for group in GROUPS.values() for f in fields(group) if f.name not in ELSEWHERE]


def drawn(rng):
    """A command line of a tiny run, and one to five further flags with values of their kind."""
    words = [*BASE, *(EXPERTS if rng.random() < 0.7 else [])]
    for f in rng.sample(FIELDS, rng.randint(1, 5)):
        about, kind = spec(f), TYPES[f.name]
        if kind is bool:
            off = rng.random() < 0.25 and not f.name.startswith("no_")
            words.append(f"--no-{flag_name(f.name)[2:]}" if off else flag_name(f.name))
            continue
        count = 1
        if typing.get_origin(kind) is list:
            (kind,) = typing.get_args(kind)
            count = about.count or rng.randint(1, 2)
        values = about.choices or {int: WHOLE, float: REAL, str: TEXT}[kind]
        words += [flag_name(f.name), *(str(rng.choice(values)) for _ in range(count))]
    if rng.random() < 0.3:
        name = rng.choice(list(SETTLED))
        words += [name, "1"] if SETTLED[name][0] is True else [name]
    return words


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text"
    with mb_data.IndexedDatasetBuilder(path, dtype=np.uint16) as builder:
        for document in np.random.default_rng(0).integers(0, 30, (40, 60), dtype=np.uint16):
            builder.add_document(document)
    return str(path)


def called(words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    return code, out.getvalue(), err.getvalue()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("first", range(0, 32, 8))
def test_flags_drawn_at_random(first, tokens, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where a folder named by a flag would appear
    for seed in range(first, first + 8):
        folder = tmp_path / f"run {seed} ü"
        words = [*drawn(random.Random(seed)), "--data-path", tokens, "--save", str(folder)]
        code, _, said = called(words)
        if code == 0:
            assert said == ""
            config = (folder / "config.toml").read_text(encoding="utf-8")
            again = called(["--config", str(folder / "config.toml"), "--print-config"])
            assert again == (0, config, ""), words
        else:
            assert code == 2, words
            assert said.count("\n") == 1
            assert re.search(r"--[a-z]|split|tokenizer|mb-data", said), (words, said)
            assert not folder.exists(), (words, said)
