"""What a command line starts: what is said before the first step, and when a run goes on."""

import contextlib
import dataclasses
import gc
import io
import json
import os
import re
import shutil
import sys
from pathlib import Path

import mb_data
import numpy as np
import pytest
import torch
from mb_data.tokenizer.readable_bpe import byte_to_letter
from mb_train.cli import main
from mb_train.commands.train import invocation
from mb_train.config import TrainConfig
from mb_train.config.recipes import recipe
from mb_train.flags.command_line import parse, resolve, without_effect
from mb_train.flags.starting import resolve_start
from mb_train.folder.start import find_start
from mb_train.loading import load_trained
from mb_train.logs import run_log
from mb_train.machine.host import leave_out_of_collections
from mb_train.report.curves import read_curves
from mb_train.train import loop, train

TINY = [
    "--recipe=quickstart", "--num-layers=1", "--hidden-size=16", "--ffn-hidden-size=16",
    "--seq-length=16", "--num-attention-heads=1", "--micro-batch-size=2", "--moe-num-experts=2",
    "--moe-top-k=2", "--eval-iters=1", "--eval-interval=0", "--log-interval=1", "--num-workers=0",
    "--device=cpu", "--split=90,10,0", "--tokenizer=null:500", "--make-vocab-size-divisible-by=128",
]  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two steps in a folder whose name needs quotes; its folder, and what it printed."""
    folder = tmp_path_factory.mktemp("runs") / "a b"
    prefix = tmp_path_factory.mktemp("data") / "text"
    rng = np.random.default_rng(0)
    with mb_data.IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(40):
            builder.add_document(rng.integers(0, 500, 64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["/bin/mb-train"])
        patch.setenv("UV_RUN_RECURSION_DEPTH", "1")
        patch.setattr(os, "fsync", lambda descriptor: None)  # see conftest, which is for tests
        words = ["--train-iters", "2", "--data-path", str(prefix), "--save", str(folder)]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert main([*TINY, *words, "--timing-log-level", "1", "--use-flash-attn"]) == 0
    return folder, printed.getvalue()


def test_the_start_says_what_megatron_says(finished):
    _, out = finished
    in_order = [
        "note: accepted without effect, the matter being settled here: --use-flash-attn (",
        "using world size: 1, data-parallel-size: 1, tensor-model-parallel size: 1, ",
        "------------------------ arguments ------------------------",
        "  hidden_size ..................................... 16\n",
        "-------------------- end of arguments ---------------------",
        " > padded vocab (size: 501) with 11 dummy tokens (new size: 512)",
        " > number of parameters on (tensor, pipeline) model parallel rank (0, 0): ",
        "[after model, optimizer, and learning rate scheduler are built] datetime: ",
        "[after dataloaders are built] datetime: ",
        "done with setup ...\n(min, max) time across ranks (ms):\n"
        "    model-and-optimizer-setup ......................: (",
        "    train/valid/test-data-iterators-setup ..........: (",
        "training ...\n[before the start of training step] datetime: ",
        " iteration        1/       2 | consumed samples:            2 | ",
        "    forward-backward ...............................: (",
        "    optimizer ......................................: (",
        "[after training is done] datetime: ",
        "saving checkpoint at iteration       2 to ",
        "  successfully saved checkpoint at iteration       2 to ",
        "    save-checkpoint ................................: (",
    ]
    place = 0
    for text in in_order:
        assert text in out[place:], text
        place = out.index(text, place)


def test_the_advice_can_be_typed(finished, monkeypatch):
    folder, out = finished
    assert f"go on with           uv run mb-train --load '{folder}'" in out
    monkeypatch.delenv("UV_RUN_RECURSION_DEPTH", raising=False)
    monkeypatch.setattr(sys, "argv", ["/x/mb_train/__main__.py"])
    assert invocation("--load", "a") == "python -m mb_train --load a"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert invocation() == "torchrun --nproc_per_node 8 -m mb_train"
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert invocation() == "torchrun --nnodes 2 --nproc_per_node 8 -m mb_train"


def test_the_advice_for_a_folder_that_looks_like_a_flag(finished, monkeypatch, capsys, tmp_path):
    folder, _ = finished
    shutil.copytree(folder, tmp_path / "-x")
    monkeypatch.chdir(tmp_path)
    assert main(["--load=-x", "--train-iters", "3"]) == 0
    assert " --load ./-x\n" in capsys.readouterr().out


def test_a_checkpoint_is_loaded_from_inside_it(finished, monkeypatch):
    folder, _ = finished
    monkeypatch.chdir(folder / "iter_0000002")
    for load, save in ((".", folder), ("..", ".."), (f"../{Path.cwd().name}", "..")):
        started = resolve_start(parse(["--load", load]))
        assert started.start.checkpoint.name == "iter_0000002"
        assert started.config.save == str(save)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--moe-top-k", "1"], "--moe-top-k was 2 until now, and is 1 from here on"),
        (["--seed", "5"], "--seed was 1234 until now, and is 5 from here on"),
        (["--train-iters", "9"], "was 2 steps until now, and is 9 steps from here on"),
        (["--save-interval", "9"], None),
        ([], None),
        (
            ["--make-vocab-size-divisible-by", "100"],
            "no effect on the checkpoint's vocabulary, of 512 rows: --make-vocab-size-divisible-by",
        ),
        (["--make-vocab-size-divisible-by", "128"], None),
        (["--padded-vocab-size", "640"], "vocabulary, of 512 rows: --padded-vocab-size 640"),
    ],
)
def test_going_on_otherwise_is_said(finished, words, says):
    notes = resolve_start(parse(["--load", str(finished[0]), *words])).notes
    assert notes == (() if says is None else notes[:1])
    assert says is None or says in notes[0]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--min-lr", "0"], True),
        (["--min-lr", "0", "--train-iters", "9"], False),
        (["--min-lr", "0", "--lr-decay-style", "constant"], False),
        (["--min-lr", "0", "--decoupled-lr", "1e-3", "--decoupled-min-lr", "1e-4"], False),
    ],
)
def test_who_has_a_finished_run_go_on_without_a_rate_is_told(finished, words, told):
    notes = resolve_start(parse(["--load", str(finished[0]), *words])).notes
    assert any("at --min-lr 0, where nothing is learned" in note for note in notes) == told


def test_a_longer_run_keeps_its_schedules(finished):
    rising = [
        "--start-weight-decay=0", "--end-weight-decay=1", "--weight-decay-incr-style=linear",
    ]  # fmt: skip
    for words, length in (rising, "2 steps"), ([*rising, "--train-iters", "9"], "9 steps"):
        config = resolve_start(parse(["--load", str(finished[0]), *words])).config
        assert (config.weight_decay_length, config.decay_length) == (length, length)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--split", "50,50,0"], "Expected --split 90,10,0, with which the run to go on from"),
        (["--optimizer", "sgd"], "Expected --optimizer adam, with which"),
        (["--tokenizer", "null:505"], "another model: its tokenizer is null:500"),
        (["--hidden-size", "32"], "another model: its --hidden-size is 16, this run's is 32"),
    ],
)
def test_going_on_with_another_is_refused(finished, capsys, words, says):
    folder, _ = finished
    before = sorted(folder.rglob("*"))
    assert main(["--load", str(folder), "--device", "cpu", *words]) == 2
    assert says in " ".join(capsys.readouterr().err.split())
    assert sorted(folder.rglob("*")) == before


def test_an_iteration_is_asked_for_by_its_number(finished, tmp_path):
    folder = finished[0]
    words = ["--load", str(folder), "--ckpt-step"]
    assert resolve_start(parse([*words, "2"])).start.checkpoint == folder / "iter_0000002"
    with pytest.raises(ValueError, match=r"iter_0000003, found none. --ckpt-step takes one of 2\."):
        resolve_start(parse([*words, "3"]))
    with pytest.raises(ValueError, match="Expected --load with --ckpt-step 2, got none"):
        resolve_start(parse(["--ckpt-step", "2"]))
    begins = ["--load", str(tmp_path), "--save", str(tmp_path)]
    first = parse([*begins, "--use-checkpoint-opt_param-scheduler"])
    assert resolve_start(first).start is None
    assert without_effect(first, resolve_start(first).config) == []  # it has one from then on
    with pytest.raises(ValueError, match="found none"):
        resolve_start(parse([*begins, "--exit-on-missing-checkpoint"]))


def test_a_script_begins_anew_where_there_is_no_checkpoint(finished, tmp_path):
    """Megatron's do; what would lose the weights that were asked for is an error."""
    missing, save = str(tmp_path / "weights"), str(tmp_path / "run")
    script = [*TINY[1:], "--train-iters=2", "--lr=1e-3", "--load", missing]
    into = [*script, "--save", save]
    started = resolve_start(parse(into))
    assert (started.start, started.config.load, started.config.save) == (None, None, save)
    assert f"NO CHECKPOINT IN {missing}: this run begins anew" in started.notes[-1]
    notes = resolve_start(parse([*script, "--save", missing])).notes
    assert not any("NO CHECKPOINT" in note for note in notes)  # it restarts itself
    there = resolve_start(parse([*into, "--load", str(finished[0]), "--train-iters=3"]))
    assert there.start.checkpoint == finished[0] / "iter_0000002"
    for words in (
        script, [*into, "--exit-on-missing-checkpoint"], [*into, "--finetune"],
        [*into, "--ckpt-step=2"], [*into, "--recipe=quickstart"],
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"Expected a checkpoint in .*weights.*, found none"):
            resolve_start(parse(words))
    again = [*script, "--save", missing, "--finetune"]  # it was killed once it had moved them aside
    for number in (2, 10):
        aside = Path(missing) / f"previous-{number}"
        shutil.copytree(finished[0] / "iter_0000002", aside / "iter_0000002")
    with pytest.raises(ValueError, match=rf"found none. What was there is now in {aside}: give"):
        resolve_start(parse(again))
    with pytest.raises(ValueError, match=f"is now in {aside}"):
        find_start(resolve(parse(again)))
    (Path(missing) / "config.json").write_text("{}")
    for folder in (save, missing):
        with pytest.raises(ValueError, match="one of Hugging Face's: the convert command makes"):
            resolve_start(parse([*script, "--save", folder]))


def test_who_names_one_checkpoint_gets_that_or_an_error(finished, tmp_path):
    """An iteration that was pruned or never finished, a file, or the form in which Megatron's
    weights are published: none of them is the folder of a script that has yet to save."""
    (tmp_path / "weights.pt").write_text("")
    (tmp_path / "published" / "release" / "mp_rank_00").mkdir(parents=True)
    whole = shutil.copytree(finished[0] / "iter_0000002", tmp_path / "iter_0000002")
    drafts = [whole.with_name("iter_0000003.partial"), whole.with_name("iter_0000004")]
    shutil.copytree(whole, drafts[0])
    drafts[1].mkdir()
    script = [*TINY[1:], "--train-iters=2", "--lr=1e-3", "--save", str(tmp_path / "run"), "--load"]
    for load, says in (
        (tmp_path / "weights.pt", "found none"),
        (finished[0] / "iter_0000001", "found none"),
        (tmp_path / "published", "one of Megatron's: the convert command"),
        *((draft, "was not finished. There is .*iter_0000002: give that") for draft in drafts),
    ):
        with pytest.raises(ValueError, match=f"Expected a checkpoint in .*{load.name}.*{says}"):
            resolve_start(parse([*script, str(load)]))
    assert resolve_start(parse([*script, str(finished[0] / "iter_0000002")])).start is not None


def test_going_on_from_python(finished, tmp_path, capsys):
    """`train` with a `load` goes on from there; it began from scratch, and set the run aside."""
    folder, _ = finished
    config = TrainConfig(**json.loads((folder / "iter_0000002" / "run.json").read_text())["config"])
    config = dataclasses.replace(config, load=str(folder), save=str(tmp_path), train_iters=3)
    torch.manual_seed(5)
    numbers = torch.rand(3)
    torch.manual_seed(5)
    assert train(config).iteration == 3
    assert torch.equal(torch.rand(3), numbers)  # which steps seed anew
    out = capsys.readouterr().out
    assert re.search(" note: .* was 2 steps until now, and is 3 steps from here on\n", out)
    lines = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert [line["iteration"] for line in lines if line["event"] == "train"] == [3]
    with pytest.raises(ValueError, match="Expected a checkpoint in nowhere, found none"):
        train(dataclasses.replace(config, load="nowhere"))


def test_collections_pass_over_a_run_until_it_ends(finished, tmp_path, monkeypatch):
    folder, _ = finished
    config = TrainConfig(**json.loads((folder / "iter_0000002" / "run.json").read_text())["config"])
    left_out, begin = [], loop.train_step

    def step(*args):
        left_out.append(gc.get_freeze_count())
        return begin(*args)

    monkeypatch.setattr(loop, "train_step", step)
    monkeypatch.setattr(loop, "leave_out_of_collections", leave_out_of_collections)
    train(dataclasses.replace(config, train_iters=4, save=str(tmp_path)))
    assert left_out[:3] == [left_out[0]] * 3
    assert left_out[3] > left_out[0] + 10_000
    assert gc.get_freeze_count() == 0


@contextlib.contextmanager
def bf16_by_default():
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
        assert torch.get_default_dtype() is torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("state", [bf16_by_default, torch.inference_mode, autocast])
def test_a_run_is_what_its_configuration_says_whatever_state_torch_is_in(finished, tmp_path, state):
    folder, _ = finished
    config = TrainConfig(**json.loads((folder / "iter_0000002" / "run.json").read_text())["config"])
    config = dataclasses.replace(config, save=str(tmp_path / "run"))
    with state():
        result = train(config)
        weights = list(load_trained(tmp_path / "run").model.parameters())
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    (loss,) = (line["losses"]["lm loss"] for line in lines if line["event"] == "eval")
    assert result.valid_loss == loss
    assert {weight.dtype for weight in weights} == {torch.float32}


def test_a_length_in_samples_needs_no_batch_size_as_in_megatron(tmp_path, capsys):
    script = [*TINY, "--mock-data", "--train-samples=7", f"--save={tmp_path}"]
    assert main([*script, "--exit-interval=1"]) == 0
    assert main([*script, f"--load={tmp_path}"]) == 0
    steps = re.findall(r"iteration +(\d+)/ +3 \| consumed samples: +(\d+)", capsys.readouterr().out)
    assert steps == [("1", "2"), ("2", "4"), ("3", "6")]
    config = dataclasses.replace(resolve_start(parse(script)).config, load=str(tmp_path))
    assert config.global_batch_size is None
    assert find_start(config).start.is_end_of(config)


def test_what_a_script_leaves_unsaid_is_the_runs_that_goes_on(finished, tmp_path):
    """Muon's constants, and the weight of the experts' loss."""
    checkpoint = tmp_path / "iter_0000002"
    checkpoint.mkdir()
    run = json.loads((finished[0] / "iter_0000002" / "run.json").read_text())
    run["config"] |= {"optimizer": "muon", "moe_loss_weight": 0.25}
    (checkpoint / "run.json").write_text(json.dumps(run))
    script = ["--load", str(checkpoint), "--num-layers=1", "--optimizer=muon"]
    line = parse([*script, "--num-experts=2"])
    started = resolve_start(line)
    config, notes = started.config, started.notes
    assert (config.muon_nesterov, config.muon_extra_scale_factor) == (True, 0.2)
    assert config.moe_loss_weight == 0.25
    assert [note[:22] for note in notes] == ["learned positions are "]
    gone = {note[:22] for note in line.notes if note not in notes}
    of_muon = {"Muon without Nesterov'", "Muon with quintic coef", "steps of Muon five tim"}
    of_experts = {"no load-balancing loss", "one expert for a token", "Megatron at the end of"}
    assert gone == of_experts | of_muon
    anew = resolve_start(parse([*script, "--finetune"])).config
    assert (anew.muon_nesterov, anew.muon_extra_scale_factor) == (False, 1.0)


def test_a_key_of_another_version_is_named(finished, tmp_path):
    folder, _ = finished
    checkpoint = tmp_path / "iter_0000002"
    checkpoint.mkdir()
    saved = json.loads((folder / "iter_0000002" / "run.json").read_text())
    saved["config"]["moe_topk"] = 3
    (checkpoint / "run.json").write_text(json.dumps(saved))
    with pytest.raises(ValueError, match=r"'moe_topk', which this version does not know"):
        resolve_start(parse(["--load", str(checkpoint)]))


def test_the_batch_grows_and_the_run_goes_on_to_the_bit(finished, tmp_path, capsys):
    prefix = json.loads((finished[0] / "iter_0000002" / "run.json").read_text())["config"]
    words = ["--data-path", *prefix["data_path"], "--micro-batch-size", "1", "--rampup-batch-size"]
    words += ["2", "2", "8", "--global-batch-size", "6", "--train-samples", "30"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main([*TINY, *words, "--save", str(whole)]) == 0
    assert main([*TINY, *words, "--save", str(parts), "--exit-interval", "3"]) == 0
    assert main(["--load", str(parts), "--device", "cpu"]) == 0

    def steps(folder):
        events = [e for e in run_log.read_log(folder / "log.jsonl") if e["event"] == "train"]
        return [(e["consumed_samples"], e["batch_size"], e["lr"], e["lm_loss"]) for e in events]

    # 2 for the first 4 samples, 4 for the next 4, then 6.
    assert [samples for samples, *_ in steps(whole)] == [2, 4, 8, 14, 20, 26]
    assert [size for _, size, *_ in steps(whole)] == [2, 2, 4, 6, 6, 6]
    assert steps(parts) == steps(whole)
    assert re.search(r"global batch size:     4 \| lm loss", capsys.readouterr().out)


def test_a_run_of_no_checkpoints_keeps_its_log(finished, tmp_path, capsys):
    (prefix,) = resolve_start(parse(["--load", str(finished[0])])).config.data_path
    words = ["--train-iters=2", "--data-path", prefix, "--save", str(tmp_path), "--save-interval=0",
             "--moe-rebalance-interval=1", "--compile"]  # fmt: skip
    assert main([*TINY, *words]) == 0
    out = capsys.readouterr().out
    assert " --moe-rebalance-interval: nothing to share out, all ranks hold all experts\n" in out
    assert " --compile: no effect without a GPU\n" in out
    assert " checkpoint           none, as --save-interval 0 says" in out
    assert "saving checkpoint" not in out
    assert not list(tmp_path.glob("iter_*"))
    assert read_curves(tmp_path).last == 2


def test_without_evaluations_no_data_is_made_ready_for_them(finished, tmp_path, capsys):
    (prefix,) = resolve_start(parse(["--load", str(finished[0])])).config.data_path
    words = [*TINY, "--train-iters=2", f"--data-path={prefix}", "--split=5,4,1"]
    losses = {}
    for count in ("0", "1"):
        index, run = tmp_path / f"index-{count}", tmp_path / f"run-{count}"
        where = ["--data-cache-path", str(index), "--save", str(run)]
        assert main([*words, *where, "--eval-iters", count]) == 0
        said = capsys.readouterr().out
        evaluated = count == "1"
        assert len(list(index.rglob("*.mbindex"))) == (3 if evaluated else 1)
        assert ("validation loss" in said) == evaluated
        curves = read_curves(run)
        assert bool(curves.valid) == bool(curves.test) == evaluated
        losses[count] = curves.loss
    assert losses["0"] == losses["1"]


def test_without_training_a_run_is_evaluated_and_nothing_is_written(finished, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    (prefix,) = resolve_start(parse(["--load", str(run)])).config.data_path
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    (loss,) = set(read_curves(run).valid.values())
    script = [*TINY, "--train-iters=9", f"--data-path={prefix}", f"--save={run}", "--skip-train"]
    for words in (["--load", str(run), "--skip-train"], [*script, f"--load={run}"]):
        assert main(words) == 0
        said = capsys.readouterr().out
        assert "skipping training (--skip-train is on) ...\n" in said
        (line,) = re.findall(r"validation loss at .* val data \| lm loss value: (\S+)", said)
        assert line == f"{loss:.6E}"
        assert "iteration        3/" not in said
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    # No weights but random ones: a script that trains would begin with these.
    for load, says in (("none", "Expected a checkpoint in"), (None, "Expected --load with --skip")):
        assert main(script if load is None else [*script, f"--load={tmp_path / load}"]) == 2
        assert says in capsys.readouterr().err
    with pytest.raises(ValueError, match="Expected no --save with --skip-train"):
        TrainConfig(**recipe("quickstart") | {"load": "a", "save": "b", "skip_train": True})


def test_data_that_is_there_from_the_runs_directory_on_is_said(
    finished, tmp_path, monkeypatch, capsys
):
    (prefix,) = resolve_start(parse(["--load", str(finished[0])])).config.data_path
    began, other = tmp_path / "began", tmp_path / "other"
    for folder in (began, other):
        folder.mkdir()
    monkeypatch.chdir(began)
    for suffix in (".bin", ".idx"):
        shutil.copyfile(f"{prefix}{suffix}", f"text{suffix}")
    assert main([*TINY, "--data-path=text", "--save=run", "--train-iters=2"]) == 0
    monkeypatch.chdir(other)
    assert main(["--load", str(began / "run")]) == 2
    assert (
        f"Expected text.bin to be a file (from --data-path), found none in {other}. It is in "
        f"{began}, where the run was until now: go there" in capsys.readouterr().err
    )
    began.rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "moved")
    assert main(["--load", "run"]) == 0


def test_separate_data_for_each_part(finished, tmp_path, monkeypatch, capsys):
    (whole,) = json.loads((finished[0] / "iter_0000002" / "run.json").read_text())["config"][
        "data_path"
    ]
    other = tmp_path / "other"
    with mb_data.IndexedDatasetBuilder(other, np.uint16) as builder:
        builder.add_document(np.arange(200) % 500)
    words = ["--train-data-path", "1", whole, "2", str(other), "--valid-data-path", str(other)]
    assert main([*TINY, *words, "--train-iters", "2", "--save", str(tmp_path / "run")]) == 0
    assert "validation loss at the end of training for val data" in capsys.readouterr().out
    saved = json.loads((tmp_path / "run" / "iter_0000002" / "run.json").read_text())
    sizes = [Path(f"{prefix}.bin").stat().st_size for prefix in (whole, other, other)]
    assert saved["data"]["bin_bytes"] == sizes
    missing = ["--train-data-path", whole, "--test-data-path", "nowhere"]
    assert main([*TINY, *missing, "--train-iters", "2"]) == 2
    assert "nowhere.bin to be a file (from --test-data-path), found" in capsys.readouterr().err
    (tmp_path / "near_text_document.idx").touch()
    assert main([*TINY, "--data-path", f"{tmp_path}/near", "--train-iters", "2"]) == 2
    assert f"found none. There is {tmp_path}/near_text_document." in capsys.readouterr().err
    assert main([*TINY, "--data-path", f"{tmp_path}/near_text_document", "--train-iters", "2"]) == 2
    assert "_document.bin to be a file (from --data-path), found none. Give" in (
        capsys.readouterr().err
    )
    for suffix in (".bin", ".idx"):
        shutil.copyfile(f"{other}{suffix}", tmp_path / f"2024{suffix}")
    monkeypatch.chdir(tmp_path)
    words = ["--data-path", "1", whole, "2", "2024", "--train-iters", "2", "--save"]
    assert main([*TINY, *words, str(tmp_path / "years")]) == 0
    saved = json.loads((tmp_path / "years" / "iter_0000002" / "run.json").read_text())
    assert saved["data"]["bin_bytes"] == sizes[:2]
    assert main([*TINY, "--data-path", "2024", "2024", "--train-iters", "2"]) == 2
    assert "got 2024 where a weight is due, and there is 2024.bin" in capsys.readouterr().err
    # The same from a file, as Megatron Core has it.
    parts = {"train": [1, whole, "2", str(other)], "valid": [str(other)], "test": []}
    (tmp_path / "parts.json").write_text(json.dumps(parts))
    empty = tmp_path / "empty"
    mb_data.IndexedDatasetBuilder(empty, np.uint16).finalize()
    (tmp_path / "words").write_text(f"{whole}\n{other}\n{empty}")  # which weigh as their tokens
    named = TrainConfig(**recipe("quickstart"), per_split_data_args_path=f"{tmp_path}/parts.json")
    assert named.data_words() == {
        "train": ["1", whole, "2", str(other)], "valid": [str(other)], "test": None,
    }  # fmt: skip
    words = ["--data-args-path", f"{tmp_path}/words", "--train-iters", "2"]
    with pytest.warns(RuntimeWarning, match="in .*empty: left out of that blend"):
        assert main([*TINY, *words, "--save", str(tmp_path / "other")]) == 0
    saved = json.loads((tmp_path / "other" / "iter_0000002" / "run.json").read_text())
    assert saved["data"]["bin_bytes"] == [*sizes[:2], 0]
    tokens = [int(mb_data.IndexedDataset(prefix).sizes.sum()) for prefix in (whole, other)] + [1]
    assert saved["data"]["weights"] == pytest.approx([n / sum(tokens) for n in tokens], abs=1e-6)
    gone = {"train": [whole], "valid": ["nowhere"], "test": []}
    (tmp_path / "parts.json").write_text(json.dumps(gone))
    words = ["--per-split-data-args-path", f"{tmp_path}/parts.json", "--train-iters", "2"]
    assert main([*TINY, *words]) == 2
    assert f"nowhere.bin to be a file (from {tmp_path}/parts.json), f" in capsys.readouterr().err
    (tmp_path / "parts.json").write_text('{"train": []}')
    with pytest.raises(ValueError, match="Expected lists of train, valid and test in"):
        named.data_words()
    (tmp_path / "parts.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"Expected JSON in .*parts\.json, got It is nested"):
        named.data_words()
    for parts, says in (
        ({"train": [], "valid": ["a"], "test": []}, "Expected data of train in"),
        ({"train": ["a"], "valid": ["b", 1], "test": []}, "--per-split-data-args-path: .* got b 1"),
        (["train", "valid", "test"], "Expected lists of train, valid and test in"),
    ):
        (tmp_path / "parts.json").write_text(json.dumps(parts))
        with pytest.raises(ValueError, match=says):
            named.data_words()
    with pytest.raises(ValueError, match="one of the ways to name data, got --data-path and --dat"):
        TrainConfig(**recipe("quickstart"), data_path=["a"], data_args_path="b")
    from_file = TrainConfig(**recipe("quickstart"), data_args_path=f"{tmp_path}/words")
    for words, says in (
        (b"\xff", "words to be text, got 'utf-8' codec can't decode"),
        (b"\n", "Expected data paths in .*words, got an empty file"),
        (b"a 1", "--data-args-path: .* got a 1"),
    ):
        (tmp_path / "words").write_bytes(words)
        with pytest.raises(ValueError, match=says):
            from_file.data_words()


def test_whole_documents_with_their_middle_last(tmp_path, capsys):
    """From the command line, with a vocabulary that has the marks; and goes on."""
    letters = [*byte_to_letter().values()]
    added = ["<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>"]
    vocabulary = {
        "model": {"type": "BPE", "vocab": {c: i for i, c in enumerate(letters)}, "merges": []},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
        "added_tokens": [{"id": 256 + i, "content": text} for i, text in enumerate(added)],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary))
    with mb_data.IndexedDatasetBuilder(tmp_path / "text", np.uint16) as builder:
        for size in range(3, 40):
            builder.add_document([*range(100, 100 + size), 256])
    words = [*TINY, "--data-path", str(tmp_path / "text"), "--save", str(tmp_path / "run")]
    words += ["--document-packing", "best_fit", "--fim-data", "--split-rounding", "cumulative"]
    assert main([*words, "--train-iters", "2"]) == 2
    assert (
        "Expected --fim-prefix-token to be a special token of null:500" in capsys.readouterr().err
    )
    words += ["--tokenizer", str(tmp_path / "tokenizer.json"), "--train-iters", "2"]
    assert main(words) == 0
    assert main(["--load", str(tmp_path / "run"), "--device", "cpu", "--train-iters", "3"]) == 0
    assert main(["--load", str(tmp_path / "run"), "--document-packing", "end_to_end"]) == 2
    assert "Expected --document-packing best_fit, with which" in capsys.readouterr().err
