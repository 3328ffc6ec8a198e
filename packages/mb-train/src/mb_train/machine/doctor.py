"""`mb-train doctor`: what this machine is, and what is wrong with it.

Every line is a fact found by trying; lines that begin with "problem:" say what to do.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from mb_data.system import cores

from mb_train.machine.environment import explain
from mb_train.machine.memory import memory_limit
from mb_train.machine.versions import PACKAGES
from mb_train.words import counted

_MIN_TORCH = (2, 11)
# A run of the published size: 3.7 B parameters, 51 GB a checkpoint, two of them kept.
_MIN_DISK_GB, _ENOUGH_DISK_GB = 2.0, 100.0
# Asynchronous saves of it, and token files in the page cache.
_ENOUGH_RAM_GB = 32.0
# What NCCL's guide has containers of several GPUs started with (--shm-size=1g).
_MIN_SHARED_GB = 1.0


def diagnose(folder: Path) -> tuple[list[str], list[str]]:
    """Facts and problems of this machine; `folder` is where runs would be written."""
    facts = [
        f"python      {platform.python_version()} ({sys.executable})",
        f"system      {platform.system()} {platform.machine()}, {cores()} usable cores",
    ]
    problems: list[str] = []
    for name in PACKAGES:
        try:
            facts.append(f"{name:11} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            facts.append(f"{name:11} not installed, imported from the path")
    torch = _torch(problems)
    if torch is not None:
        _check_torch(facts, problems)
    _check_optional(facts, problems)
    _check_memory(facts, problems, gpus=0 if torch is None else torch.cuda.device_count())
    _check_disk(folder, facts, problems)
    _check_amd(facts, problems)
    said, wrong = explain(os.environ, _vendor(torch))
    return facts + said, problems + wrong


def _torch(problems: list[str]) -> Any:
    """The module; None where it cannot be imported, which is not tried again: the second time it
    fails otherwise, halfway through what the first has left."""
    try:
        import torch
    except (ImportError, OSError, ValueError) as error:  # lacks a library; a wrong TORCH_LOGS
        reason = " ".join(str(error).split()).rstrip(".")
        what = (
            "Unset that variable"
            if isinstance(error, ValueError)
            else "Install torch 2.11 or later"
        )
        problems.append(f"torch cannot be imported: {reason}. {what}.")
        return None
    return torch


def _check_torch(facts: list[str], problems: list[str]) -> None:
    import torch

    major, minor, *_ = torch.__version__.split("+")[0].split(".")
    build = "CPU only"
    if torch.version.hip:
        build = f"ROCm {torch.version.hip}"
    elif torch.version.cuda:
        build = f"CUDA {torch.version.cuda}"
    threads = counted(torch.get_num_threads(), "thread")
    facts.append(f"torch       {torch.__version__}, {build}, {threads}")
    if (int(major), int(minor)) < _MIN_TORCH:
        problems.append(f"torch {torch.__version__} is too old: expected 2.11 or later.")
    collectives = "RCCL" if torch.version.hip else "NCCL"
    backends = []
    if torch.distributed.is_available():  # a build without it has not the other questions either
        backends += ["gloo"] * torch.distributed.is_gloo_available()
        if torch.distributed.is_nccl_available():
            backends.append(f"nccl ({collectives} {_nccl_version()})")
    else:
        problems.append(
            "This torch was built without torch.distributed, which training needs on one process "
            "too. Install a torch with it."
        )
    facts.append(f"distributed {', '.join(backends) or 'no backend'}")
    try:
        import triton

        facts.append(f"triton      {triton.__version__}")
    except ImportError:
        facts.append("triton      none (needed on GPUs only)")
        if torch.cuda.is_available():
            problems.append("Triton is missing, and the kernels need it on a GPU. Install triton.")
    else:
        if torch.cuda.is_available():
            _check_compiler(problems)
    _check_gpus(facts, problems)


# What Triton builds before it launches a first kernel is such a module, in C.
_MODULE = """
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "mb_doctor"};
PyMODINIT_FUNC PyInit_mb_doctor(void) { return PyModule_Create(&module); }
"""


def _check_compiler(problems: list[str]) -> None:
    """Small containers have no C compiler, a system's Python comes without its headers, and the
    cache may be in a home that cannot be written."""
    from triton.runtime.build import compile_module_from_src

    try:
        compile_module_from_src(_MODULE, "mb_doctor")
    except (OSError, RuntimeError, ImportError, subprocess.CalledProcessError) as error:
        reason = str(error).rstrip(".")
        problems.append(
            f"Triton cannot launch kernels: {reason}. It needs a C compiler (gcc), Python's "
            "headers (python3-dev) and a cache that it can write (TRITON_CACHE_DIR)."
        )


def _check_gpus(facts: list[str], problems: list[str]) -> None:
    import torch

    if not torch.cuda.is_available():
        facts.append("GPU         none: training runs on the CPU, in fp32")
        drivers = Path("/proc/driver/nvidia/version"), Path("/dev/kfd")
        if any(driver.exists() for driver in drivers):
            problems.append(
                "A GPU driver is loaded, but this torch sees no GPU. Install a CUDA or ROCm build."
            )
        return
    for index in range(torch.cuda.device_count()):
        try:
            _check_gpu(index, facts, problems)
        except RuntimeError as error:  # broken, or taken by a process that lets no other on it
            reason = str(error).partition("\n")[0]
            tool = "rocm-smi" if torch.version.hip else "nvidia-smi"
            problems.append(f"GPU {index} cannot be used: {reason}. See what {tool} says of it.")


def _check_gpu(index: int, facts: list[str], problems: list[str]) -> None:
    import torch

    properties = torch.cuda.get_device_properties(index)
    kind = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
    kind = kind or f"sm{properties.major}{properties.minor}"
    free, total = torch.cuda.mem_get_info(index)
    bf16 = _bf16_works(index)
    facts.append(
        f"GPU {index}       {properties.name}, {kind}, {free / 2**30:.1f} of "
        f"{total / 2**30:.1f} GiB free, bf16 {'yes' if bf16 else 'no'}, "
        f"fp8 {'yes' if _fp8_works(index) else 'no'}"
    )
    if not bf16:
        problems.append(f"GPU {index} cannot multiply in bf16. Train with --no-bf16.")
    if free < 0.5 * total:
        problems.append(f"GPU {index}: more than half of its memory is in use by others.")


def _bf16_works(index: int) -> bool:
    import torch

    try:
        ones = torch.ones(16, 16, dtype=torch.bfloat16, device=f"cuda:{index}")
        return bool((ones @ ones)[0, 0].item() == 16)
    except RuntimeError:
        return False


def _fp8_works(index: int) -> bool:
    import mb_kernels
    import torch

    try:
        nothing = torch.empty(0, 16, dtype=torch.bfloat16, device=f"cuda:{index}")
        mb_kernels.float8_linear(nothing, nothing)
    except (RuntimeError, ValueError, ImportError):  # no GPU, none that can, no Triton
        return False
    return True


def _check_optional(facts: list[str], problems: list[str]) -> None:
    for name, needed_for in (
        ("matplotlib", "the picture of the loss"),
        ("gigatoken", "fast tokenization; a slow one replaces it"),
        ("tensorboard", "--tensorboard-dir"),
        ("safetensors", "mb-train convert"),
        ("uvicorn", "mb-train serve"),
    ):
        try:
            facts.append(f"{name:11} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            facts.append(f"{name:11} none (for {needed_for})")
            if name == "matplotlib":
                problems.append("matplotlib is missing: runs draw no picture. Install matplotlib.")


def _nccl_version() -> str:
    try:
        from torch.cuda import nccl

        version = nccl.version()
    except (ImportError, AttributeError, RuntimeError):  # a build without it
        return "none"
    return ".".join(map(str, version)) if isinstance(version, tuple) else f"{version}"


def _vendor(torch: Any) -> str | None:
    if torch is None:
        return None
    if torch.version.hip or Path("/dev/kfd").exists():
        return "amd"
    return "nvidia" if torch.version.cuda else None


def _check_memory(facts: list[str], problems: list[str], *, gpus: int) -> None:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return
    limit, whose = memory_limit(), ""
    if limit is not None and limit / 1e9 < size:
        size, whose = limit / 1e9, ", the limit of this container or job"
    enough = "" if size >= _ENOUGH_RAM_GB else f": small runs (the large want {_ENOUGH_RAM_GB:g})"
    facts.append(f"memory      {size:.1f} GB of RAM{whose}{enough}")
    shared = Path("/dev/shm")
    if shared.is_dir():
        room = shutil.disk_usage(shared).total / 1e9
        facts.append(f"shared      {room:.1f} GB in /dev/shm")
        if room < _MIN_SHARED_GB and gpus > 1:
            problems.append(
                f"/dev/shm holds {room:.2f} GB, too little for GPUs to exchange through. Start the "
                "container with --ipc=host or --shm-size=16g."
            )


def _check_amd(facts: list[str], problems: list[str]) -> None:
    """What keeps ROCm from a GPU that is there."""
    device = Path("/dev/kfd")
    if not device.exists():
        return
    if not os.access(device, os.R_OK | os.W_OK):
        problems.append(
            "/dev/kfd cannot be opened: add the user to the groups render and video, or start "
            "the container with --device=/dev/kfd --device=/dev/dri --group-add render."
        )
    balancing = Path("/proc/sys/kernel/numa_balancing")
    if os.access(balancing, os.R_OK) and balancing.read_text().strip() != "0":
        facts.append(
            "numa        automatic balancing is on; AMD advises to turn it off: "
            "echo 0 > /proc/sys/kernel/numa_balancing as root"
        )


def _check_disk(folder: Path, facts: list[str], problems: list[str]) -> None:
    folders = folder.absolute(), *folder.absolute().parents
    existing = next(path for path in folders if os.path.exists(path))  # as seen by this user
    free = shutil.disk_usage(existing).free / 1e9
    enough = "" if free >= _ENOUGH_DISK_GB else f": small runs (the large want {_ENOUGH_DISK_GB:g})"
    facts.append(f"disk        {free:.1f} GB free for {folder}{enough}")
    if free < _MIN_DISK_GB:
        problems.append(f"Less than {_MIN_DISK_GB:g} GB free at {existing}: checkpoints may fail.")
    if not existing.is_dir():
        problems.append(f"{existing} is no folder. Give another --save folder.")
    elif not os.access(existing, os.W_OK):
        problems.append(f"{existing} is not writable. Give another --save folder.")
