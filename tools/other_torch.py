"""Tests with the oldest torch that the packages take, or with the newest there is.

    make oldest
    make newest

Collectives, FSDP2, DTensor, pipelines and the compiler are where releases of torch differ, once so
that gradients were zero without a word; and each release brings a Triton of its own, one of which
did not compile the experts. The oldest torch is laid over the environment of `uv sync`, which stays
as it is, for what stands on torch's internals; the newest has an environment of its own, without
the workspace's lock, for the kernels too, and compiles these for every target, where spilling alone
is a finding to write down. Fetching a torch takes an index, or a folder of wheels, that has it:
where uv finds none, this says so, and it is no failure.
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
MEMBERS = ("mb-kernels", "mb-layers", "mb-parallel", "mb-data", "mb-train")


def oldest() -> list[str]:
    """The command that runs a Python beside the oldest torch."""
    project = tomllib.loads((ROOT / "packages/mb-parallel/pyproject.toml").read_text())["project"]
    (bound,) = (d.removeprefix("torch>=") for d in project["dependencies"] if d.startswith("torch"))
    # The interpreter of the Triton that comes with it does not work with a later NumPy.
    return ["uv", "run", "--with", f"torch=={bound}.*", "--with", "numpy<2.4", "python"]


def newest() -> list[str]:
    """The command that runs a Python beside the newest torch."""
    group = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["dev"]
    wanted = ["torch", *(d for d in group if not d.startswith("mb-"))]
    extras = dict(d.split("[") for d in group if d.startswith("mb-"))
    members = [f"packages/{m}[{extras[m]}" if m in extras else f"packages/{m}" for m in MEMBERS]
    command = ["uv", "run", "--isolated", "--no-project", "--no-config", "--no-sources"]
    command += [word for d in wanted for word in ("--with", d)]
    command += [word for member in members for word in ("--with-editable", member)]
    return [*command, "python"]


def main() -> int:
    which = {"oldest": oldest, "newest": newest}[sys.argv[1]]
    python = which()
    version = "import torch; print('torch', torch.__version__)"
    found = subprocess.run([*python, "-c", version], cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        print(found.stderr, file=sys.stderr)
        print(f"SKIPPED: the {sys.argv[1]} torch that is taken could not be installed here.")
        return 0
    print(found.stdout, end="", flush=True)
    tests = TESTS if which is oldest else ["packages/mb-kernels", *TESTS]
    code = subprocess.run([*python, "-m", "pytest", "-q", *tests], cwd=ROOT).returncode
    if which is newest:
        gate = subprocess.run(
            [*python, "-W", "ignore", "-m", "mb_kernels.targets"],
            cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        bad = [line for line in gate.stdout.splitlines() if "FAIL" in line]
        print("\n".join([*bad, *gate.stdout.splitlines()[-1:]]))
        beyond = [line for line in bad if "FAIL: spills" not in line]
        if beyond or (gate.returncode and not bad):  # the latter where it came to no table
            print(gate.stderr[-2000:], file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    raise SystemExit(main())
