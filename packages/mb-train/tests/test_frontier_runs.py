"""runs/frontier.sh: which runs it starts, skips and goes on with."""

import os
import subprocess
from pathlib import Path

import mb_train
import pytest
from mb_train.flags.command_line import parse, resolve

SCRIPT = Path(mb_train.__file__).parent / "runs" / "frontier.sh"

# In mb-train's place: notes its words, and leaves behind the checkpoint that STOP or the end is
# and, unless UNTOLD, the loss there.
STAND_IN = """#!/bin/bash
printf '%s\\n' "$*" >> "$CALLS"
case $1 in plan|report) exit 0 ;; esac
while [ $# -gt 0 ]; do
    case $1 in --save) save=$2 ;; --train-iters) steps=$2 ;; esac
    shift
done
mkdir -p "$save/iter_${STOP:-$steps}"
echo "${STOP:-$steps}" > "$save/latest_checkpointed_iteration.txt"
if [ -n "${UNTOLD:-}" ]; then exit; fi
printf '{"event": "eval", "iteration": %d, "lm_loss": 1}\\n' "${STOP:-$steps}" >> "$save/log.jsonl"
"""


# In torchrun's place: leaves its own words away.
TORCHRUN = """#!/bin/bash
while [ "$1" != mb_train ]; do
    if [ "$1" = --nproc_per_node ]; then printf '%s ' "$2" >> "$CALLS.ranks"; fi
    shift
done
shift
exec mb-train "$@"
"""


@pytest.fixture
def frontier(tmp_path):
    """Runs the script; returns the process, and mb-train's words of every call by its kind."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("mb-train", STAND_IN), ("torchrun", TORCHRUN)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    def run(*words, script=SCRIPT, **environment):
        calls = tmp_path / "calls"
        calls.write_text("")
        path = f"{programs}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "CALLS": str(calls), **environment}
        where = ["--data", "text", "--out", str(tmp_path / "out")]
        command = ["bash", str(script), *where, *words]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, cwd=SCRIPT.parent
        )
        kinds = {"plan": [], "report": [], "train": []}
        for line in calls.read_text().splitlines():
            first, _, rest = line.partition(" ")
            kinds[first if first in kinds else "train"].append(rest if first in kinds else line)
        return done, kinds

    return run


def configs(calls):
    return [resolve(parse(line.split())) for line in calls]


def test_the_default_points_are_the_papers_families_small_first(frontier):
    done, calls = frontier("--tokens", "8000000")
    assert done.returncode == 0, done.stderr
    found = configs(calls["train"])
    names = [Path(config.save).name for config in found]
    assert names[:6] == [f"{f}-17m" for f in ("dense", "dmoe", "fine", "moe1", "moe1.5", "moe2")]
    assert names[-4:] == ["dense-46m@2", "dmoe-46m@2", "dense-154m", "dense-356m"]
    assert len(names) == 22
    hidden = [config.hidden_size for config in found[:18]]
    assert hidden == 6 * [256] + 6 * [512] + 6 * [768]
    capacities = [(c.moe_num_experts, c.moe_capacity_factor) for c in found[:6]]
    assert capacities == [(None, 0.0), (64, 0.0), (256, 0.0), (64, 1.0), (64, 1.5), (64, 2.0)]
    assert [config.seed for config in found] == 18 * [1234] + 2 * [2] + 2 * [1234]
    for config in found:
        assert config.global_batch_size * config.seq_length * config.train_iters <= 8_000_000
        assert config.train_iters % config.eval_interval == 0  # the last loss is the end's
        assert config.train_iters == config.save_interval == 30
        assert (config.attention_dropout, config.hidden_dropout) == (0.0, 0.0)
        assert config.min_lr == pytest.approx(config.lr / 10)
        assert config.lr_warmup_fraction == 0.1
        assert config.global_batch_size == 256
        assert config.micro_batch_size == (64 if config.save.endswith("356m") else 128)
        assert config.eval_iters * config.global_batch_size == 4096
        assert (config.init_method_std, config.weight_decay) == (0.04, 0.1)
        if config.moe_num_experts is not None:
            assert (config.moe_loss_weight, config.moe_first_k_dense) == (0.01, 1)
        if config.moe_num_experts == 64:
            weights = (config.moe_router_topk_scaling_factor, config.moe_router_lr_mult)
            assert weights == (8.0, 0.1)
        assert config.optimizer == "muon"
        assert config.lr_decay_style == "cosine"
    assert [config.lr for config in found[::6][:3]] == [8e-3, 6e-3, 4e-3]
    assert calls["report"][-1].count("--frontier") == 1


@pytest.mark.parametrize("size", ["17m", "46m", "125m", "356m"])
def test_fine_experts_are_four_times_as_many_a_quarter_as_wide(frontier, size):
    _, calls = frontier(f"dmoe-{size}", f"fine-{size}")
    whole, fine = configs(calls["train"])
    assert fine.moe_num_experts == 4 * whole.moe_num_experts
    assert fine.moe_top_k == 4 * whole.moe_top_k
    assert 4 * fine.moe_ffn_hidden_size == (whole.moe_ffn_hidden_size or 4 * whole.hidden_size)
    assert (fine.moe_renormalize, fine.moe_router_topk_scaling_factor) == (True, 1.0)
    assert fine.moe_router_lr_mult == 1


def test_the_dense_curve_goes_on_beyond_125m_by_depth(frontier):
    _, calls = frontier("dense-125m", "dense-154m")
    shorter, longer = configs(calls["train"])
    assert (shorter.num_layers, longer.num_layers) == (12, 16)
    assert longer.hidden_size == shorter.hidden_size
    assert longer.lr == shorter.lr


def test_rates_by_size_and_for_experts(frontier):
    _, calls = frontier(
        "dense-46m", "dmoe-46m", "dense-17m", "--", "--weight-decay", "0.3", LR_46M="4e-3",
        LR_EXPERTS="0.5",
    )  # fmt: skip
    found = configs(calls["train"])
    assert [config.lr for config in found] == [4e-3, 2e-3, 8e-3]
    assert [config.weight_decay for config in found] == 3 * [0.3]
    assert found[0].train_iters == 1600


@pytest.mark.parametrize("script", [SCRIPT, SCRIPT.name])
def test_several_gpus_share_the_sequences_and_the_experts(frontier, tmp_path, script):
    done, calls = frontier("dense-17m", "dmoe-17m", "--gpus", "4", script=script)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "calls.ranks").read_text() == "4 4 "
    dense, experts = configs(calls["train"])
    for config, ranks in (dense, 1), (experts, 4):
        assert (config.global_batch_size, config.micro_batch_size) == (256, 64)
        assert config.expert_model_parallel_size == ranks
    _, calls = frontier("--dry-run", "dmoe-17m", "--gpus", "2")
    assert calls["plan"][0].startswith("--gpus 2 --recipe dmoe-17m")


def test_a_finished_point_is_not_run_again(frontier, tmp_path):
    frontier("dense-17m")
    assert not list((tmp_path / "out" / "dense-17m").glob("iter_*"))
    done, calls = frontier("dense-17m", "dmoe-17m", "--keep")
    assert "dense-17m: finished before" in done.stdout
    assert [Path(config.save).name for config in configs(calls["train"])] == ["dmoe-17m"]
    assert (tmp_path / "out" / "dmoe-17m" / "iter_1600").is_dir()
    (report,) = calls["report"]
    assert "dense-17m" in report
    assert "dmoe-17m" in report


def test_a_point_that_stopped_goes_on(frontier, tmp_path):
    done, calls = frontier("dense-17m", "dmoe-17m", "--minutes", "5", STOP="30")
    assert "stopped at step 30 of 1600" in done.stdout
    (stopped,) = calls["train"]
    assert "--load" not in stopped
    assert 4.5 < float(stopped.split("--exit-duration-in-mins ")[1].split()[0]) <= 5
    assert not calls["report"]
    done, calls = frontier("dense-17m", "dmoe-17m")
    assert f"--load {tmp_path / 'out' / 'dense-17m'}" in calls["train"][0]
    assert "--load" not in calls["train"][1]
    assert len(calls["train"]) == 2


def test_a_point_killed_after_its_end_is_not_trained_twice(frontier, tmp_path):
    frontier("dense-17m", "--keep")
    (tmp_path / "out" / "dense-17m" / "finished").unlink()
    done, calls = frontier("dense-17m")
    assert done.returncode == 0
    assert not calls["train"]
    assert len(calls["report"]) == 1
    assert (tmp_path / "out" / "dense-17m" / "finished").exists()


def test_a_point_without_its_last_loss_is_not_finished(frontier, tmp_path):
    done, calls = frontier("dense-17m", "dmoe-17m", UNTOLD="1")
    assert "dense-17m: its last loss was not measured" in done.stdout
    assert len(calls["train"]) == 2
    assert not calls["report"]
    assert (tmp_path / "out" / "dense-17m" / "iter_1600").is_dir()


def test_no_time_left_starts_nothing(frontier):
    done, calls = frontier("dense-17m", "--minutes", "0")
    assert done.returncode == 0
    assert not calls["train"]
    assert "no time left" in done.stdout


def test_dry_run_writes_nothing(frontier, tmp_path):
    done, calls = frontier("--dry-run", "moe1.5-46m@7", "--gpu", "H200")
    assert not calls["train"]
    (planned,) = calls["plan"]
    assert planned.startswith("--gpus 1 --gpu H200 --recipe moe-46m")
    assert "--moe-capacity-factor 1.5" in done.stdout
    assert "--seed 7" in done.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--tokns", "5"], "got --tokns"),
        (["--tokens", "5"], "of a step, 262144, or more, got 5"),
        (["sparse-17m"], "got sparse"),
        (["--gpus", "3"], "that 3 GPUs can share, got 256"),
        (["--gpus", "0"], "that 0 GPUs can share"),
    ],
)
def test_mistakes_are_said(frontier, words, problem):
    done, calls = frontier(*words)
    assert done.returncode != 0
    assert problem in done.stderr
    assert not calls["train"]
