"""`torchrun` on two processes takes the steps of one process; checkpoints cross over."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_run
from mb_train.cli import main

DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"


def torchrun(arguments: list[str], ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """Run `mb_train` on several ranks of this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={ranks}", "-m", "mb_train", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)


@pytest.fixture(scope="module")
def one_process(tokens, tmp_path_factory) -> Path:
    """The run on one process: two micro-batches per step."""
    run = tmp_path_factory.mktemp("one") / "run"
    assert main(tiny_run.flags(tokens, run, "--save-interval 4")) == 0
    return run


def test_two_ranks_take_the_same_steps_and_load_each_others_checkpoints(
    one_process, tokens, tmp_path
):
    two = tmp_path / "two"
    done = torchrun(tiny_run.flags(tokens, two, "--exit-interval 4 --zero-stage 3"))
    assert done.returncode == 0, done.stdout + done.stderr
    expected = tiny_run.losses(one_process)
    assert tiny_run.losses(two) == pytest.approx(expected[:4], rel=1e-5)
    assert done.stdout.count(" validation loss at") == 1  # one rank speaks

    # What two ranks wrote, one goes on from.
    assert main(["--load", str(two)]) == 0
    assert tiny_run.losses(two) == pytest.approx(expected, rel=1e-5)

    # And the other way.
    other = tmp_path / "other"
    done = torchrun(["--load", str(one_process / "iter_0000004"), "--save", str(other)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert tiny_run.losses(other) == pytest.approx(expected[4:], rel=1e-5)


def test_wrong_input_ends_all_ranks(tokens, tmp_path):
    done = torchrun(tiny_run.flags(tokens, tmp_path / "run", "--global-batch-size 2"))
    assert done.returncode != 0
    assert "micro batch x data-parallel ranks = 2 x 2 = 4, got 2" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.gpu
def test_two_gpus_take_the_steps_of_one(tokens, tmp_path):
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    runs = []
    for ranks in (1, 2):
        run = tmp_path / str(ranks)
        done = torchrun(tiny_run.flags(tokens, run, "--device cuda --no-bf16"), ranks)
        assert done.returncode == 0, done.stdout + done.stderr
        runs.append(tiny_run.losses(run))
    assert runs[1] == pytest.approx(runs[0], rel=1e-4)
