"""`mb-train doctor`: what this machine is, and what is wrong with it.

Every line is a fact found by trying; lines that begin with "problem:" say what to do.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from pathlib import Path

_MIN_TORCH = (2, 11)
_MIN_DISK_GIB = 2.0


def diagnose(folder: Path) -> tuple[list[str], list[str]]:
    """Facts and problems of this machine; `folder` is where runs would be written."""
    facts = [
        f"python      {platform.python_version()} ({sys.executable})",
        f"system      {platform.system()} {platform.machine()}, {_cores()} usable cores",
    ]
    problems: list[str] = []
    for name in ("mb-kernels", "mb-layers", "mb-parallel", "mb-data", "mb-train"):
        try:
            facts.append(f"{name:11} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            facts.append(f"{name:11} not installed, imported from the path")
    _check_torch(facts, problems)
    _check_optional(facts, problems)
    _check_disk(folder, facts, problems)
    return facts, problems


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _check_torch(facts: list[str], problems: list[str]) -> None:
    try:
        import torch
    except ImportError as error:
        problems.append(f"torch cannot be imported: {error}. Install torch 2.11 or later.")
        return
    major, minor, *_ = torch.__version__.split("+")[0].split(".")
    build = "CPU only"
    if torch.version.hip:
        build = f"ROCm {torch.version.hip}"
    elif torch.version.cuda:
        build = f"CUDA {torch.version.cuda}"
    facts.append(f"torch       {torch.__version__}, {build}, {torch.get_num_threads()} threads")
    if (int(major), int(minor)) < _MIN_TORCH:
        problems.append(f"torch {torch.__version__} is too old: expected 2.11 or later.")
    backends = [
        name
        for name, there in (
            ("gloo", torch.distributed.is_gloo_available()),
            ("nccl", torch.distributed.is_nccl_available()),
        )
        if there
    ]
    facts.append(f"distributed {', '.join(backends) or 'no backend'}")
    try:
        import triton

        facts.append(f"triton      {triton.__version__}")
    except ImportError:
        facts.append("triton      none (needed on GPUs only)")
        if torch.cuda.is_available():
            problems.append("Triton is missing, and the kernels need it on a GPU. Install triton.")
    _check_gpus(facts, problems)


def _check_gpus(facts: list[str], problems: list[str]) -> None:
    import torch

    if not torch.cuda.is_available():
        facts.append("GPU         none: training runs on the CPU, in fp32")
        vendor_file = Path("/proc/driver/nvidia/version"), Path("/dev/kfd")
        if any(path.exists() for path in vendor_file):
            problems.append(
                "A GPU driver is loaded, but this torch sees no GPU. Install a CUDA or ROCm build."
            )
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        kind = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
        kind = kind or f"sm{properties.major}{properties.minor}"
        free, total = torch.cuda.mem_get_info(index)
        facts.append(
            f"GPU {index}       {properties.name}, {kind}, {free / 2**30:.1f} of "
            f"{total / 2**30:.1f} GiB free, bf16 {'yes' if _bf16_works(index) else 'no'}"
        )
        if not _bf16_works(index):
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


def _check_optional(facts: list[str], problems: list[str]) -> None:
    for name, needed_for in (
        ("matplotlib", "the picture of the loss"),
        ("gigatoken", "fast tokenization; a slow one replaces it"),
        ("tensorboard", "--tensorboard-dir"),
    ):
        try:
            facts.append(f"{name:11} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            facts.append(f"{name:11} none (for {needed_for})")
            if name == "matplotlib":
                problems.append("matplotlib is missing: runs draw no picture. Install matplotlib.")


def _check_disk(folder: Path, facts: list[str], problems: list[str]) -> None:
    existing = next(
        path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()
    )
    free = shutil.disk_usage(existing).free / 2**30
    facts.append(f"disk        {free:.1f} GiB free for {folder}")
    if free < _MIN_DISK_GIB:
        problems.append(
            f"Less than {_MIN_DISK_GIB:g} GiB free at {existing}: checkpoints may fail."
        )
    if not os.access(existing, os.W_OK):
        problems.append(f"{existing} is not writable. Give another --save folder.")
