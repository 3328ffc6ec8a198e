"""What the machine is, and the variables that are set on it."""

import builtins
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mb_train.machine import doctor
from mb_train.machine.doctor import diagnose
from mb_train.machine.environment import VARIABLES, explain


def test_this_machine(tmp_path, monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    facts, _ = diagnose(tmp_path / "not" / "there")
    named = {line.split()[0] for line in facts}
    assert {"python", "system", "torch", "distributed", "memory", "disk", "GPU"} <= named
    assert not any(line.startswith("variable") for line in facts)
    (tmp_path / "file").touch()
    assert f"{tmp_path / 'file'} is no folder" in "".join(diagnose(tmp_path / "file" / "run")[1])


def test_what_this_user_may_not_see_is_a_problem_and_no_traceback(tmp_path, monkeypatch):
    hidden = tmp_path / "hidden" / "runs"
    real = os.stat

    def stat(path, **how):
        if hidden.parent in Path(os.fspath(path)).parents:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, **how)

    hidden.parent.mkdir()
    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(os, "access", lambda path, _: path != hidden.parent)
    assert f"{hidden.parent} is not writable" in "".join(diagnose(hidden)[1])


def test_a_gpu_that_cannot_be_used_is_a_problem_and_the_next_one_a_fact(tmp_path, monkeypatch):
    def free(index):
        if index == 0:
            raise RuntimeError("CUDA error: device is busy\nmore of it")
        return 30 * 2**30, 80 * 2**30

    gpus = {
        "is_available": lambda: True, "device_count": lambda: 2, "mem_get_info": free,
        "get_device_properties": lambda i: SimpleNamespace(name=f"G{i}", major=9, minor=0),
    }  # fmt: skip
    for name, answer in gpus.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    for works in ("_bf16_works", "_fp8_works"):
        monkeypatch.setattr(doctor, works, lambda index: False)
    facts, problems = diagnose(tmp_path)
    assert "GPU 1       G1, sm90, 30.0 of 80.0 GiB free, bf16 no, fp8 no" in facts
    said = [problem for problem in problems if problem.startswith("GPU")]
    assert said[0].startswith("GPU 0 cannot be used: CUDA error: device is busy. See what ")
    assert said[1:] == [
        "GPU 1 cannot multiply in bf16. Train with --no-bf16.",
        "GPU 1: more than half of its memory is in use by others.",
    ]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory to look at")
@pytest.mark.parametrize(
    ("size", "gpus", "found"), [(64e6, 2, True), (64e6, 1, False), (16e9, 2, False)]
)
def test_gpus_need_shared_memory_to_exchange_through(monkeypatch, size, gpus, found):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=size, free=size))
    problems = []
    doctor._check_memory([], problems, gpus=gpus)
    assert found == ("/dev/shm holds 0.06 GB, too little" in "".join(problems))


@pytest.mark.parametrize("lacking", [None, "compiler", "cache"])
def test_what_triton_needs_to_launch_a_kernel(tmp_path, monkeypatch, lacking):
    build = pytest.importorskip("triton.runtime.build")
    if shutil.which("gcc") is None:
        pytest.skip("needs a C compiler")
    find = getattr(build, "_find_compiler", None)
    if find is not None:  # Triton 3.8 looks at CC once in a process
        monkeypatch.setattr(build, "_find_compiler", find.__wrapped__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    cache = tmp_path / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    monkeypatch.setenv("CC", str(tmp_path / "cc") if lacking == "compiler" else "gcc")
    if lacking == "cache":
        cache.touch()
    said = [line for line in diagnose(tmp_path)[1] if line.startswith("Triton cannot launch")]
    assert len(said) == (lacking is not None)
    assert all(str(tmp_path) in line and "C compiler (gcc)" in line for line in said)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError("libcudart.so.13: cannot open shared object file"),
            "libcudart.so.13: cannot open shared object file. Install torch 2.11 or later.",
        ),
        (
            ValueError("\nInvalid log settings: foo,\ntry TORCH_LOGS='help'\n"),
            "Invalid log settings: foo, try TORCH_LOGS='help'. Unset that variable.",
        ),
    ],
)
def test_a_torch_that_cannot_be_imported_is_a_problem_and_no_traceback(
    error, said, tmp_path, monkeypatch
):
    real, errors = builtins.__import__, [error]

    def broken(name, *more):
        if name == "torch":  # the second time what the first left is in the way
            raise errors.pop() if errors else RuntimeError("Only a single TORCH_LIBRARY can be")
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", broken)
    facts, problems = diagnose(tmp_path)
    assert any(fact.startswith("disk") for fact in facts)
    assert problems[0] == f"torch cannot be imported: {said}"


def test_a_torch_without_collectives(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    for name in ("is_gloo_available", "is_nccl_available"):  # such a build has none of them
        monkeypatch.delattr(torch.distributed, name)
    facts, problems = diagnose(tmp_path)
    assert "distributed no backend" in facts
    assert "This torch was built without torch.distributed" in "".join(problems)


@pytest.mark.parametrize(
    ("setting", "vendor", "fact", "problem"),
    [
        ({"NCCL_P2P_DISABLE": "1"}, "amd", "through host memory", "NCCL_P2P_DISABLE='1'"),
        ({"NCCL_P2P_DISABLE": "0"}, "amd", "through host memory", None),
        ({"HSA_ENABLE_SDMA": "0"}, "amd", "folklore, 0 was a cure", None),
        ({"HSA_ENABLE_SDMA": "0"}, "nvidia", "no effect here, it is for amd", None),
        ({"CUDA_VISIBLE_DEVICES": ""}, "amd", "ROCm obeys it too", "CUDA_VISIBLE_DEVICES=''"),
        ({"MIOPEN_FIND_MODE": "3"}, "amd", "a transformer has none", None),
        ({"TRITON_INTERPRET": "1"}, None, "in Python", "TRITON_INTERPRET='1'"),
        ({"HIP_FORCE_DEV_KERNARG": "1"}, "amd", "kernel arguments", None),
    ],
    ids=str,
)
def test_a_variable_that_is_set(setting, vendor, fact, problem):
    facts, problems = explain({"PATH": "x", **setting}, vendor)
    (name,) = setting
    assert len(facts) == 1
    assert facts[0].startswith(f"variable    {name}=")
    assert fact in facts[0]
    assert len(problems) == (problem is not None)
    if problem is not None:
        assert problems[0].startswith(problem)
        assert problems[0].endswith("Unset it.")
