"""`mb-train` end to end: it learns, says so in Megatron's words, and refuses bad input cleanly."""

import io
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import tiny_run
import torch
from mb_train.cli import main
from mb_train.folder.run_folder import find_checkpoint

TRAIN_LINE = re.compile(
    r"^ iteration +(\d+)/ +(\d+) \| consumed samples: +(\d+) \| "
    r"elapsed time per iteration \(ms\): (\d+\.\d) \| learning rate: (\d\.\d{3}E[+-]\d\d) \| "
    r"global batch size: +(\d+) \| lm loss: (\d\.\d{6}E[+-]\d\d) \| "
    r"load balancing loss: \d\.\d{6}E[+-]\d\d \| loss scale: 1\.0 \| grad norm: \d+\.\d{3} \| "
    r"number of skipped iterations:   0 \| number of nan iterations:   0 \|$",
    re.MULTILINE,
)
VALID_LINE = re.compile(
    r"^(-+)\n validation loss at (.+?) \| lm loss value: (\S+) \| lm loss PPL: (\S+) \| \n\1$",
    re.MULTILINE,
)


@pytest.fixture
def finished(tokens, tmp_path, capsys):
    """A finished run of 8 steps, and what it printed."""
    folder = tmp_path / "run"
    assert main(tiny_run.flags(tokens, folder, "--lr 3e-2 --save-interval 3")) == 0
    return folder, capsys.readouterr().out


def test_a_run_learns_and_names_what_it_left(finished):
    folder, out = finished
    lines = TRAIN_LINE.findall(out)
    assert [(int(i), int(n), int(samples)) for i, n, samples, *_ in lines] == [
        (2, 8, 8), (4, 8, 16), (6, 8, 24), (8, 8, 32),
    ]  # fmt: skip
    losses = tiny_run.losses(folder)
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 1
    assert float(lines[0][6]) == pytest.approx(sum(losses[:2]) / 2, rel=1e-6)
    _, places, *measured = zip(*VALID_LINE.findall(out), strict=True)
    assert places == ("iteration 4", "iteration 8", "the end of training for val data")
    assert all(value[1] == value[2] for value in measured)  # the same weights on the same batches
    for left in ("iter_0000008", "loss.png", "log.jsonl"):
        assert str(folder / left) in out
        assert (folder / left).exists()
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "8\n"
    names = sorted(path.name for path in folder.glob("iter_*"))
    assert names == ["iter_0000003", "iter_0000006", "iter_0000008"]
    assert not list(folder.rglob("*.partial*"))


def test_a_second_run_in_a_folder_moves_the_first_aside(finished, tokens, capsys):
    folder, _ = finished
    before = (folder / "log.jsonl").read_text()
    assert main(tiny_run.flags(tokens, folder, "--train-iters 2 --eval-iters 0")) == 0
    assert (folder / "previous-1" / "log.jsonl").read_text() == before
    assert find_checkpoint(folder / "previous-1") == folder / "previous-1" / "iter_0000008"
    assert find_checkpoint(folder) == folder / "iter_0000002"
    assert len(tiny_run.losses(folder)) == 2


def test_a_dense_model_with_dropout_and_norms_of_what_it_logs(tokens, capsys):
    more = "--train-iters 4 --exit-interval 3 --log-params-norm --log-num-zeros-in-grad"
    more += " --optimizer sgd --num-workers 0 --recompute-granularity full"
    assert main(tiny_run.flags(tokens, None, more, moe=False)) == 0
    out = capsys.readouterr().out
    said = r"grad norm: \S+ \| num zeros: (\d+)\.0 \| params norm: \d+\.\d{3} \|"
    # Of 1024 token rows few occur, and all get a gradient from the tied head.
    assert [int(zeros) < 1000 for zeros in re.findall(said, out)] == [True, True]
    assert "load balancing" not in out
    assert "nothing was kept" in out


def test_a_length_in_samples_and_a_limit_in_time(tokens, tmp_path, capsys):
    words = " ".join(tiny_run.flags(tokens, tmp_path / "run"))
    for flag in ("--train-iters 8", "--lr-warmup-iters 2", "--lr-decay-iters 8"):
        words = words.replace(flag, "")
    words += " --train-samples 18 --lr-warmup-samples 4 --eval-iters 0 --log-interval 1"
    assert main([*words.split(), "--exit-duration-in-mins", "0.00001"]) == 0
    assert "stopping at iteration 1: --exit-duration-in-mins 1e-05" in capsys.readouterr().out
    assert main(["--load", str(tmp_path / "run")]) == 0
    events = tiny_run.events(tmp_path / "run", "train")
    assert [event["consumed_samples"] for event in events] == [4, 8, 12, 16]
    rates = [event["lr"] for event in events]  # a cosine from sample 4 to sample 18
    cosine = [3e-3 * (1 + math.cos(math.pi * (n - 4) / 14)) / 2 for n in (4, 8, 12, 16)]
    assert rates == pytest.approx(cosine)
    assert main(["--load", str(tmp_path / "run")]) == 0  # one more length of its schedule
    assert tiny_run.events(tmp_path / "run", "train")[-1]["iteration"] == 8


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("--hiden-size 3", "Unknown flag --hiden-size. The nearest is --hidden-size."),
        (
            "--data-path none",
            "Expected none.bin to be a file (from --data-path), found none in",
        ),
        ("--hidden-size 33", "Expected --hidden-size to be divisible by --num-attention-heads"),
        ("--moe-top-k 5", "Expected --moe-top-k of at most --moe-num-experts, got 5 and 4"),
        (
            "--load nowhere --exit-on-missing-checkpoint",
            "Expected a checkpoint in nowhere, found none.",
        ),
        ("--split 0,100,0", "Expected documents to train on, got none"),
        ("--global-batch-size 3", "to be a multiple of --micro-batch-size"),
        ("--lr-warmup-iters 8", "Expected the warm-up to be shorter than the decay"),
        ("--tokenizer nonesuch", "nonesuch"),
        (
            "--tokenizer bert-base-uncased",
            "with --model gpt, got bert-base-uncased, which has none. Give the one that the data",
        ),
        ("--activation gulu", "gulu"),
    ],
    ids=lambda text: text.split()[0][2:] if text.startswith("--") else "",
)
def test_wrong_input_is_one_line_and_leaves_nothing(tokens, tmp_path, capsys, more, says):
    folder = tmp_path / "run"
    assert main(tiny_run.flags(tokens, folder, more)) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("mb-train: ")
    assert says in captured.err
    assert captured.err.count("\n") == 1
    assert not folder.exists()


@pytest.mark.parametrize(("evaluated", "said"), [("1", 1), ("0", 0)])
def test_a_split_that_leaves_nothing_to_evaluate_on_is_said(
    tokens, tmp_path, capsys, evaluated, said
):
    words = f"--split 100,0,0 --eval-iters {evaluated} --exit-interval 1"
    assert main(tiny_run.flags(tokens, tmp_path / "run", words)) == 0
    line = "data: no evaluations, since there is no document for them with --split 100,0,0"
    assert capsys.readouterr().out.count(line) == said


def test_a_truncated_bin_is_refused(tmp_path, capsys):
    prefix = tiny_run.write_tokens(tmp_path)
    path = Path(prefix + ".bin")
    path.write_bytes(path.read_bytes()[:-10])
    assert main(tiny_run.flags(prefix, tmp_path / "run")) == 2
    error = capsys.readouterr().err
    assert "walks.bin" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_another_model_is_refused(finished, tokens, tmp_path, capsys):
    folder, _ = finished
    before = sorted(folder.rglob("*"))
    for more, says in (
        (f"--load {folder} --hidden-size 64", "its --hidden-size is 32, this run's is 64"),
        (f"--load {folder} --moe-num-experts 8", "its --moe-num-experts is 4, this run's is 8"),
    ):
        assert main(tiny_run.flags(tokens, None, more)) == 2
        assert f"The checkpoint is of another model: {says}" in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before


def test_finetuning_starts_a_new_run_from_the_weights(finished, tokens, tmp_path, capsys):
    folder, _ = finished
    new = tmp_path / "new"
    more = f"--load {folder} --finetune --train-iters 2 --no-load-optim"
    assert main(tiny_run.flags(tokens, new, more)) == 0
    assert tiny_run.losses(new)[0] < tiny_run.losses(folder)[0] - 0.5
    assert find_checkpoint(new) == new / "iter_0000002"


def test_report_draws_the_picture_again(finished, tmp_path, capsys):
    folder, _ = finished
    (folder / "loss.png").unlink()
    assert main(["report", str(folder)]) == 0
    assert "iterations: 1 to 8" in capsys.readouterr().out
    assert (folder / "loss.png").exists()
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "to be a run folder with a log.jsonl" in capsys.readouterr().err


def test_letters_that_the_output_has_not_are_escaped(tokens, tmp_path, monkeypatch):
    words = tiny_run.flags(tokens, tmp_path / "rün", "--train-iters 2 --lr-warmup-iters 1")
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert main(words) == 0
    assert rb"r\xfcn" in sys.stdout.buffer.getvalue()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert main([*words, "--print-config"]) == 2  # to be read again, it has to be as it is


def test_doctor_describes_this_machine(capsys):
    assert main(["doctor"]) in (0, 1)
    out = capsys.readouterr().out
    assert f"torch       {torch.__version__}" in out
    assert "disk" in out


def test_sigterm_saves_and_stops(tokens, tmp_path, capsys):
    folder = tmp_path / "run"
    endless = "--train-iters 100000 --log-interval 1 --eval-interval 0"
    usual = signal.getsignal(signal.SIGTERM)

    def terminate_once_it_trains() -> None:
        log = folder / "log.jsonl"
        while not (log.exists() and '"train"' in log.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=terminate_once_it_trains, daemon=True).start()
    assert main(tiny_run.flags(tokens, folder, endless)) == 0
    assert signal.getsignal(signal.SIGTERM) is usual
    assert ": SIGTERM" in capsys.readouterr().out
    found = find_checkpoint(folder)
    assert found is not None
    assert len(tiny_run.losses(folder)) == int(found.name.removeprefix("iter_"))


def test_help_is_quick():
    begun = time.process_time(), time.monotonic()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "mb_train", "--help"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "--moe-num-experts" in done.stdout
    assert not re.search(r"\| +(torch|numpy|matplotlib)$", done.stderr, re.MULTILINE)
    assert time.monotonic() - begun[1] < 2 or os.getloadavg()[0] > 2


@pytest.mark.gpu
def test_a_run_on_a_gpu_learns_in_bf16(tokens, tmp_path, capsys):
    more = "--device cuda --train-iters 30 --lr-decay-iters 30 --lr 1e-2"
    assert main(tiny_run.flags(tokens, tmp_path / "run", more)) == 0
    assert "torch.bfloat16" in capsys.readouterr().out
    losses = tiny_run.losses(tmp_path / "run")
    assert losses[-1] < losses[0] - 3


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "options",
    [
        "--moe-router-enable-expert-bias --moe-router-score-function sigmoid "
        "--reset-position-ids --reset-attention-mask --eod-mask-loss",
        "--moe-balance-over global_batch --deterministic-mode --dataloader-type cyclic "
        "--moe-layer-freq 2 --moe-shared-expert-intermediate-size 32 "
        "--fp16 --initial-loss-scale 1024 --optimizer adafactor",
        "--optimizer muon --optimizer-state-dtype bf16 --recompute-granularity selective "
        "--position-embedding-type rope --normalization RMSNorm --qk-layernorm "
        "--group-query-attention --num-query-groups 1 --untie-embeddings-and-output-weights",
    ],
)
def test_options_train_and_resume_to_the_bit(tokens, tmp_path, options):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(tiny_run.flags(tokens, whole, options, "--train-iters 6")) == 0
    assert main(tiny_run.flags(tokens, parts, options, "--train-iters 6 --exit-interval 4")) == 0
    assert main(["--load", str(parts), "--train-iters", "6"]) == 0
    expected = tiny_run.losses(whole)
    assert tiny_run.losses(parts) == expected
    assert len(expected) == 6
    assert expected[-1] < expected[0] + 0.1


# A run goes through the kernels of its step as it would for a GPU, and compiles none of them.
REHEARSED = """
import mb_kernels
from mb_kernels.runtime.recording import record
from mb_train.train import run
def compile_ahead(rehearse, *, device):
    with record():
        rehearse()
mb_kernels.compile_ahead, step = compile_ahead, run.compile_step
run.compile_step = lambda *five, **more: step(*five[:4], torch.device("cuda"), five[5], **more)
"""


def test_one_process_imports_no_engine_that_it_does_not_need(tokens):
    """They take a second or more of each start."""
    words = tiny_run.flags(tokens, None, "--train-iters 1 --eval-iters 1")
    runs = [[*words, "--optimizer", name] for name in ("adam", "muon", "adafactor", "sgd")]
    script = (
        "import sys, torch; there = set(sys.modules); from mb_train.cli import main\n"
        f"{REHEARSED}"
        f"print([main(words) for words in {runs!r}])\n"
        "print(sorted(sys.modules.keys() - there))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    *_, codes, imported = ran.stdout.splitlines()
    assert codes == "[0, 0, 0, 0]", ran.stderr
    engines = [f"torch.distributed.{name}" for name in ("tensor", "fsdp", "checkpoint")]
    needless = [name for name in (*engines, "torch._dynamo", "sympy") if repr(name) in imported]
    assert not needless
