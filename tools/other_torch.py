"""Run tests with the oldest torch that the packages support, or with the newest there is.

    make oldest
    make newest

Releases of torch differ in collectives, FSDP2, DTensor, pipelines and the compiler: with one of
them gradients were zero, without an error. Each release also brings its own Triton, and one of
these did not compile the experts.

`oldest` puts the oldest torch in front of the environment of `uv sync`, which is not changed, and
runs the tests that depend on torch's internals. `newest` makes an environment of its own, without
the workspace's lock. It also runs the kernels' tests and compiles all kernels for every target; a
kernel that spills is printed but is no failure. If uv finds no such torch (no index, or a folder of
wheels without it), this says so and does not fail.
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
    "packages/mb-train/tests/test_segments.py",
    "packages/mb-train/tests/test_tensor_plans.py",
    "packages/mb-train/tests/test_sinks.py",
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MEMBERS = PROJECT["project"]["dependencies"]


def oldest() -> list[str]:
    """The command that runs a Python beside the oldest torch."""
    project = tomllib.loads((ROOT / "packages/mb-parallel/pyproject.toml").read_text())["project"]
    (bound,) = (d.removeprefix("torch>=") for d in project["dependencies"] if d.startswith("torch"))
    # The interpreter of the Triton that comes with it does not work with a later NumPy.
    return ["uv", "run", "--with", f"torch=={bound}.*", "--with", "numpy<2.4", "python"]


def newest() -> list[str]:
    """The command that runs a Python beside the newest torch."""
    group = PROJECT["dependency-groups"]["dev"]
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
        print(f"SKIPPED: the {sys.argv[1]} supported torch could not be installed here.")
        return 0
    print(found.stdout, end="", flush=True)
    tests = TESTS if which is oldest else ["packages/mb-kernels", *TESTS]
    words = ["-m", "pytest", "-q", "-m", "slow or not slow", *tests]
    code = subprocess.run([*python, *words], cwd=ROOT).returncode
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
