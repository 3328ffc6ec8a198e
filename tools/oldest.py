"""Tests of what stands on torch's internals, with the oldest torch that the packages take.

    make oldest

Collectives, FSDP2, DTensor, pipelines and the compiler are where releases of torch differ, once so
that gradients were zero without a word. That torch is laid over the environment of `uv sync`, which
stays as it is. Fetching it takes an index, or a folder of wheels, that has it: where uv finds none,
this says so, and it is no failure.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = [
    "integration-tests/test_parallel.py",  # the longest first
    "packages/mb-parallel",
    "packages/mb-layers/tests/test_living.py",
    "packages/mb-train/tests/test_tensor_plans.py",
]


def main() -> int:
    project = tomllib.loads((ROOT / "packages/mb-parallel/pyproject.toml").read_text())["project"]
    (bound,) = (d.removeprefix("torch>=") for d in project["dependencies"] if d.startswith("torch"))
    # The interpreter of the Triton that comes with it does not work with a later NumPy.
    over = ["--with", f"torch=={bound}.*", "--with", "numpy<2.4"]
    python = ["uv", "run", *over, "python"]
    version = "import torch; print(f'torch {torch.__version__}')"
    found = subprocess.run([*python, "-c", version], cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        print(found.stderr, file=sys.stderr)
        print(f"SKIPPED: torch {bound}, the oldest that is taken, could not be installed here.")
        return 0
    print(found.stdout, end="", flush=True)
    return subprocess.run([*python, "-m", "pytest", "-q", *TESTS], cwd=ROOT).returncode


if __name__ == "__main__":
    raise SystemExit(main())
