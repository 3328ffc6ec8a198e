"""The launch scripts: what they hand to torchrun is a whole run."""

import gzip
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import mb_data
import mb_train
import pytest
from mb_train.flags.command_line import parse, resolve

RUNS = Path(mb_train.__file__).parent / "runs"


def handed_over(tmp_path, script, *arguments, check=True, **environment):
    """What the script passes to torchrun, a line for each word."""
    _stand_in(tmp_path / "torchrun", 'printf "%s\\n" "$@"')
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", **environment}
    command = ["bash", str(RUNS / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if not check:
        return done
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def _stand_in(path, line):
    path.write_text(f"#!/bin/bash\n{line}\n")
    path.chmod(0o755)


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
    assert config.expert_parallel_size(8) == (1 if experts is None else 8)


def test_one_gpu_trains_dense_models_at_its_own_rate(tmp_path):
    words = handed_over(tmp_path, "dense.sh", "125m", "a", GPUS="1")
    config = resolve(parse(words[words.index("mb_train") + 1 :]))
    assert (config.lr, config.min_lr, config.micro_batch_size) == (1.5e-4, 1e-5, 32)
    assert words[2] == "1"


@pytest.mark.parametrize("script", ["dense.sh", "dmoe.sh", "moe.sh"])
def test_scripts_take_part_in_several_nodes(tmp_path, script):
    nodes = {"NNODES": "4", "NODE_RANK": "3", "MASTER_ADDR": "first", "MASTER_PORT": "7000"}
    words = handed_over(tmp_path, script, "46m", "a", GPUS="2", **nodes)
    assert words[: words.index("-m")] == [
        "--nnodes", "4", "--node_rank", "3", "--master_addr", "first", "--master_port", "7000",
        "--nproc_per_node", "2",
    ]  # fmt: skip
    del nodes["MASTER_PORT"]
    assert "29500" in handed_over(tmp_path, script, "46m", "a", **nodes)
    del nodes["NODE_RANK"]
    done = handed_over(tmp_path, script, "46m", "a", check=False, NODE_RANK="", **nodes)
    assert done.returncode == 2
    assert "expected NODE_RANK with NNODES=4, got none" in done.stderr


@pytest.mark.parametrize(
    ("script", "given", "words"),
    [
        *((f"{name}.sh", given, "SIZE DATA") for name in ("bert", "dense", "dmoe", "moe")
          for given in ([], ["46m"])),
        ("data.sh", ["corpus.jsonl"], "INPUT PREFIX"), ("ict.sh", ["runs/bert"], "BERT DATA"),
        ("t5.sh", [], "DATA"), ("frontier_data.sh", [], "PREFIX"),
    ],
)  # fmt: skip
def test_scripts_say_what_they_lack(tmp_path, script, given, words):
    done = handed_over(tmp_path, script, *given, check=False)
    assert done.returncode != 0
    assert f"expected {script} {words} [flags]" in done.stderr
    assert done.stdout == ""


def test_slurm_starts_a_launcher_on_every_node(tmp_path):
    _stand_in(tmp_path / "scontrol", "echo a1; echo a2")
    # As Slurm does it: the same words on every node, each with its number.
    _stand_in(
        tmp_path / "srun",
        f'echo "$SRUN_CPUS_PER_TASK" >{tmp_path}/cores; '
        'shift; for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done',
    )
    slurm = {
        "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "a[1-2]", "SLURM_GPUS_ON_NODE": "4",
        "SLURM_JOB_ID": "123456", "SLURM_CPUS_PER_TASK": "64", "RUNS": str(RUNS),
    }  # fmt: skip
    words = handed_over(tmp_path, "slurm.sh", "--recipe", "dmoe-46m", "--save", "a b", **slurm)
    half = len(words) // 2
    for rank, node in enumerate((words[:half], words[half:])):
        assert node == [
            "--nnodes", "2", "--node_rank", str(rank), "--master_addr", "a1", "--master_port",
            "23456", "--nproc_per_node", "4", "-m", "mb_train", "--recipe", "dmoe-46m", "--save",
            "a b",
        ]  # fmt: skip
    assert (tmp_path / "cores").read_text() == "64\n"


def test_slurm_outside_of_a_job_says_so(tmp_path):
    done = handed_over(tmp_path, "slurm.sh", "--recipe", "dmoe-46m", check=False, SLURM_JOB_ID="")
    assert done.returncode == 2
    assert "expected a job of Slurm's, got none. Start it by sbatch" in done.stderr


def test_ranks_get_the_signals_and_the_time_to_save(tmp_path):
    """torchrun itself, and a stand-in for mb-train, which says whether it was left alone."""
    rank = """
        import pathlib, signal
        signal.signal(signal.SIGUSR1, lambda *_: pathlib.Path("saved").touch())
        signal.alarm(120)  # nobody else ends it, if torchrun does not
        pathlib.Path("started").touch()
        signal.pause()
    """
    (tmp_path / "mb_train").mkdir()
    (tmp_path / "mb_train" / "__init__.py").touch()
    (tmp_path / "mb_train" / "__main__.py").write_text(textwrap.dedent(rank))
    _stand_in(
        tmp_path / "torchrun",
        'echo "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" >patience\n'
        f'exec {sys.executable} -m torch.distributed.run "$@"',
    )
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("TORCH_ELAST")},
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(tmp_path), "GPUS": "1",
    }  # fmt: skip
    command = ["bash", str(RUNS / "launch.sh")]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as launcher:
        deadline = time.monotonic() + 120
        while not (tmp_path / "started").exists() and launcher.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        launcher.send_signal(signal.SIGUSR1)
        said = launcher.communicate(timeout=120)[0]
    assert (tmp_path / "saved").exists(), said
    assert int((tmp_path / "patience").read_text()) == 120  # 30, where nothing is said


def test_data_prepares_a_corpus(tmp_path):
    _stand_in(tmp_path / "mb-data", f'exec {sys.executable} -m mb_data "$@"')
    corpus = tmp_path / "corpus.jsonl.gz"
    with gzip.open(corpus, "wt") as file:
        file.write('{"text": "One."}\n{"text": "Two, three."}\n')
    prefix = tmp_path / "made" / "tokens"
    handed_over(tmp_path, "data.sh", str(corpus), str(prefix), "--workers", "1")
    dataset = mb_data.IndexedDataset(f"{prefix}_text_document")
    gpt2 = mb_data.load_tokenizer("gpt2")
    assert [list(document) for document in dataset] == [
        [*gpt2.encode(text), gpt2.eod] for text in ("One.", "Two, three.")
    ]


def test_a_pinned_corpus_holds_its_wheels_alone(tmp_path):
    """Two wheels with the same path inside, fetched by a stand-in for pip."""
    wheels, prefix = tmp_path / "wheels", tmp_path / "made" / "pinned"
    names = [f"{name}-1.0-py3-none-any" for name in ("one", "two")]
    wheels.mkdir()
    for name in names:
        with zipfile.ZipFile(wheels / f"{name}.whl", "w") as wheel:
            wheel.writestr("same/text.py", f"# A line of {name}\n" * 30)
    pip = f'if [ "$3" = download ]; then cp -r {wheels} {prefix}.wheels; fi'
    other = f'exec {sys.executable} "$@"'
    _stand_in(tmp_path / "python", f'if [ "$2" = pip ]; then {pip}; else {other}; fi')
    _stand_in(tmp_path / "mb-data", f'exec {sys.executable} -m mb_data "$@"')
    left = tmp_path / "made" / "pinned.pinned" / "old.py"  # by another list
    left.parent.mkdir(parents=True)
    left.write_text("# An old line\n" * 30)
    handed_over(tmp_path, "frontier_data.sh", str(prefix), PINNED="list")
    records = [json.loads(line) for line in Path(f"{prefix}.jsonl").read_text().splitlines()]
    assert sorted(r["path"] for r in records) == [f"pinned/{n}/same/text.py" for n in names]
    assert len(mb_data.IndexedDataset(f"{prefix}_text_document")) == 2
