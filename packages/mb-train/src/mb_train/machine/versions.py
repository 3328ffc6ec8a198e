"""What computes: releases, sources and a few variables, to be equal on all ranks of a run.

Nodes of a cluster have environments of their own, and a checkout that one of them did not update
trains on without an error: with another loss, or until ranks wait for each other. Replicas of
weights that are rounded otherwise part ways.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import os
from pathlib import Path

# By which products and kernels round otherwise, or run in Python.
_VARIABLES = (
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TRITON_DEFAULT_FP_FUSION",
    "TRITON_INTERPRET",
)
PACKAGES = ("mb-kernels", "mb-layers", "mb-parallel", "mb-data", "mb-train")


def versions() -> dict[str, str]:
    """Versions of torch and Triton, and of our packages with a digest of their sources; variables
    of the environment that change numbers, if they are set."""
    found = {name: _version(name) for name in ("torch", "triton", *PACKAGES)}
    for name in PACKAGES:
        package = importlib.import_module(name.replace("-", "_"))
        (folder,) = map(Path, package.__path__)
        digest = hashlib.sha256()
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(folder).as_posix()}\n".encode())
            digest.update(path.read_bytes().replace(b"\r\n", b"\n"))
        found[name] += f", sources {digest.hexdigest()[:12]}"
    return found | {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # read from a path, or not there
        return "none"
