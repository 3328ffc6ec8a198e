"""BERT, T5, ICT, a classifier: every layout takes one process's steps, with unequal padding.

fp32 on gloo, three steps of the same global batch, as in `test_parallel`. Sentences are of 3 to 12
tokens and documents of 2 to 6 sentences, so that no two ranks have the same number of valid tokens.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import mb_data
import numpy as np
import pytest
import tiny_run
from test_parallel import EP, PP, SP, TP, _deviations, _tensors, _train_in_turn

SAME = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --ffn-hidden-size 48 --seq-length 24 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 3 --lr 3e-3 "
    "--lr-decay-style constant "
    "--log-interval 1 --eval-interval 3 --eval-iters 2 --split 80,20,0 --device cpu "
    "--attention-dropout 0 --hidden-dropout 0 --make-vocab-size-divisible-by 128 --adam-eps 1e-3"
)
MOE = "--moe-num-experts 4 --moe-top-k 2 --moe-loss-weight 0.05"
ONE = {
    "bert": f"--model bert {MOE}",
    "bert choice": f"--model bert {MOE} --moe-router-type expert_choice",
    "t5": f"--model t5 --decoder-seq-length 12 --vocab-extra-ids 8 {MOE} "
    "--position-embedding-type relative",
    "t5 learned": f"--model t5 --decoder-seq-length 12 --vocab-extra-ids 8 {MOE}",
    "classifier": "--model classifier --task qqp --position-embedding-type relative",
    "race": f"--model classifier --task race {MOE}",
    # A query is held against the blocks of all ranks: one process has them in one micro-batch.
    "ict": "--model ict --micro-batch-size 4",
    "ict experts": f"--model ict --micro-batch-size 4 {MOE} --moe-loss-weight 0",
}
# Name: what it must equal, flags. Of two ranks, or of four.
LAYOUTS: dict[str, tuple[str, str]] = {
    "bert dp2": ("bert", "--zero-stage 3"),
    "bert ep2": ("bert", f"{EP} 2"),
    "bert choice ep2": ("bert choice", f"{EP} 2"),
    "bert choice tp2 ep2": ("bert choice", f"{TP} 2 {EP} 2"),
    "bert tp2 sp": ("bert", f"{TP} 2 {SP}"),
    "bert pp2": ("bert", f"{PP} 2"),
    "t5 dp2": ("t5", ""),
    "t5 ep2": ("t5", f"{EP} 2"),
    "t5 tp2": ("t5", f"{TP} 2"),
    "t5 tp2 sp": ("t5", f"{TP} 2 {SP}"),
    "t5 pp2": ("t5 learned", f"{PP} 2"),
    "t5 relative pp2": ("t5", f"{PP} 2"),
    "classifier tp2 sp": ("classifier", f"{TP} 2 {SP}"),
    "classifier pp2": ("classifier", f"{PP} 2"),
    "race pp2": ("race", f"{PP} 2"),
    "race ep2": ("race", f"{EP} 2"),
    "ict dp2": ("ict", "--micro-batch-size 2"),
    "ict ep2": ("ict experts", f"--micro-batch-size 2 {EP} 2"),
    "ict tp2 sp": ("ict experts", f"{TP} 2 {SP}"),
    "ict dp2 tp2": ("ict experts", f"--micro-batch-size 2 {TP} 2"),
}
FOUR = ("ict dp2 tp2",)
# Each model, each way to spread one.
ALWAYS = ("bert ep2", "t5 relative pp2", "ict dp2 tp2")
assert LAYOUTS.keys() >= set(ALWAYS)


def _write_data(folder: Path) -> list[str]:
    """Sentences, their titles, a vocabulary; returns the flags that name them."""
    vocabulary = folder / "vocab.txt"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary.write_text("\n".join([*special, *(f"word{i}" for i in range(200))]) + "\n")
    rng = np.random.default_rng(0)
    sentences, titles = folder / "walks_text_sentence", folder / "walks_title_document"
    with (
        mb_data.IndexedDatasetBuilder(sentences, np.uint16) as texts,
        mb_data.IndexedDatasetBuilder(titles, np.uint16) as names,
    ):
        for _ in range(60):
            lengths = rng.integers(3, 13, size=rng.integers(2, 7))
            tokens = 5 + (rng.integers(200) + np.arange(lengths.sum())) % 200
            texts.add_document(tokens, lengths)
            names.add_document(tokens[:2])
    words = [
        " ".join(f"word{i}" for i in rng.integers(200, size=n)) for n in rng.integers(1, 9, 80)
    ]
    rows = [f"{i}\t1\t2\t{a}\t{b}\t{i % 2}" for i, (a, b) in enumerate(pairwise(words))]
    (folder / "pairs.tsv").write_text("\n".join(["id\ta\tb\tone\ttwo\tsame", *rows]) + "\n")
    (folder / "questions").mkdir()
    for number, texts in enumerate(zip(*[iter(words)] * 6, strict=False)):
        found = {"article": texts[0], "questions": [texts[1]], "options": [texts[2:]]}
        (folder / f"questions/{number}.txt").write_text(json.dumps(found | {"answers": ["B"]}))
    return ["--vocab-file", str(vocabulary), "--data-path", str(sentences)]


def _line(data: list[str], save: Path, model: str, flags: str = "") -> list[str]:
    if model in ("classifier", "race"):
        files = str(Path(data[-1]).with_name("questions" if model == "race" else "pairs.tsv"))
        data = [*data[:2], "--train-data-path", files, "--valid-data-path", files]
    if model == "race":
        data += ["--bert-load", str(save.with_name("bert"))]
    return [*SAME.split(), *ONE[model].split(), *flags.split(), *data, "--save", str(save)]


def _ict_deviations(run: Path, expected: Path) -> dict[str, float]:
    """As `_deviations`, of weights by their size and of no moments.

    A shift of all blocks leaves the softmax as it is, so what shifts them (the last norm's bias)
    has a gradient of rounding errors alone.
    """
    found = _deviations(run, expected)
    got, wanted = _tensors(run), _tensors(expected)
    errors = [
        float((got[n] - wanted[n]).norm() / wanted[n].norm().clamp(min=0.01))
        for n in wanted
        if n.startswith("model.")
    ]
    said = {name: found[name] for name in ("loss", "grad norm", "validation")}
    return said | {"weights": max(errors)}


@pytest.fixture(scope="module")
def trained(request, tmp_path_factory) -> tuple[dict[str, Path], list[str]]:
    """The folder of every run; what each rank says of a layout that a model has not."""
    folder = tmp_path_factory.mktemp("sentences")
    data = _write_data(folder)
    layouts = tiny_run.layouts_asked(request)
    saves = {name: folder / name.replace(" ", "-") for name in (*ONE, *layouts)}
    for model in ONE:
        assert tiny_run.train(_line(data, saves[model], model)) == 0
    refusal = _line(data, folder / "refused", "ict", f"--micro-batch-size 2 {PP} 2")
    refused = []
    for ranks, names in {4: layouts.intersection(FOUR), 2: layouts.difference(FOUR)}.items():
        lines = [_line(data, saves[name], *LAYOUTS[name]) for name in names]
        for *said, last in _train_in_turn(ranks, [*lines, refusal]):
            assert said == [""] * len(lines)
            refused.append(last)
    return saves, refused


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", tiny_run.slow_but(ALWAYS, LAYOUTS))
def test_a_layout_takes_the_steps_of_one_process(layout, trained):
    runs, _ = trained
    run, expected = runs[layout], runs[LAYOUTS[layout][0]]
    ict, race = layout.startswith("ict"), layout.startswith("race")
    # A bias on the scores of all four answers leaves a softmax as it is: its gradient is rounding.
    without = "head.bias" if race else "$^"
    deviations = _ict_deviations(run, expected) if ict else _deviations(run, expected, without)
    # A T5's scores of relative positions begin at 44, and with them errors of rounding: gradients
    # that all but cancel show it, and what they change. So do those of an ICT's young towers, which
    # embed all texts nearly alike, and of what scores four such texts.
    changed = ("weights", "exp_avg", "exp_avg_sq")
    cancelling = race or LAYOUTS[layout][0] == "t5"
    loose = (*changed, "grad norm") if ict else changed if cancelling else ()
    limit = 1e-3 if ict or race else 1e-4
    for kind, value in deviations.items():
        assert value < (limit if kind in loose else 1e-5), deviations


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", tiny_run.slow_but(ALWAYS, LAYOUTS))
def test_what_a_task_measures_at_the_end(layout, trained):
    runs, _ = trained
    (found,), (expected,) = _measured(runs[layout]), _measured(runs[LAYOUTS[layout][0]])
    assert found == expected


def test_tokens_of_both_sides_are_counted(trained):
    for model, tokens in {"bert": 24, "t5": 24 + 12, "ict": 2 * 24, "race": 4 * 24}.items():
        event = tiny_run.events(trained[0][model], "train")[-1]
        of_a_step = event["tokens_per_s"] * event["ms_per_iteration"] / 1000
        assert of_a_step == pytest.approx(4 * tokens)


def _measured(run: Path) -> list[dict[str, object]]:
    events = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    return [event for event in events if event["event"] == "measured"]


def test_a_layout_that_a_model_has_not_is_refused(trained):
    _, refused = trained
    assert len(refused) == 4 + 2
    for said in refused:
        assert "--model ict" in said
        assert len(said.splitlines()) == 1
