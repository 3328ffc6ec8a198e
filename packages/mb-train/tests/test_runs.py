"""The launch scripts: what they hand to torchrun is a whole run."""

import os
import subprocess
from pathlib import Path

import mb_train
import pytest
from mb_train.flags import parse, resolve

RUNS = Path(mb_train.__file__).parent / "runs"


def handed_over(tmp_path, script, *arguments, gpus=None):
    """What the script passes to torchrun."""
    fake = tmp_path / "torchrun"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    if gpus is not None:
        environment["GPUS"] = gpus
    command = ["bash", str(RUNS / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("script", "size", "micro_batch", "experts", "capacity"),
    [
        ("dense.sh", "760m", 32, None, 0.0),
        ("dmoe.sh", "125m", 32, 64, 0.0),
        ("moe.sh", "356m", 8, 64, 1.0),
    ],
)
def test_scripts_describe_the_papers_runs(tmp_path, script, size, micro_batch, experts, capacity):
    words = handed_over(tmp_path, script, size, "0.5 a 0.5 b", "--train-iters", "7")
    assert words[:4] == ["--standalone", "--nproc_per_node", "8", "-m"]
    config = resolve(parse(words[words.index("mb_train") + 1 :]))
    assert config.data_path == ["0.5", "a", "0.5", "b"]
    assert (config.train_iters, config.micro_batch_size) == (7, micro_batch)
    assert (config.moe_num_experts, config.moe_capacity_factor) == (experts, capacity)


def test_one_gpu_trains_dense_models_at_its_own_rate(tmp_path):
    words = handed_over(tmp_path, "dense.sh", "125m", "a", gpus="1")
    config = resolve(parse(words[words.index("mb_train") + 1 :]))
    assert (config.lr, config.min_lr, config.micro_batch_size) == (1.5e-4, 1e-5, 32)
    assert words[2] == "1"
