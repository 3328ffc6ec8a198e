"""Each wheel installs alone, with its declared dependencies, and runs its README example there.

`uv lock` does not check the bounds between workspace members; installing the built wheels does.
Third-party releases are held at those of the running environment, so that nothing is downloaded
that `uv sync` has not fetched already.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MEMBERS = ["mb-kernels", "mb-layers", "mb-parallel", "mb-data", "mb-train"]
UV = shutil.which("uv")
pytestmark = pytest.mark.skipif(UV is None, reason="needs uv")


def uv(*arguments: str, cwd: Path) -> str:
    result = subprocess.run([str(UV), *arguments], cwd=cwd, capture_output=True, text=True)
    assert result.returncode == 0, f"uv {' '.join(arguments)}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheels")
    for member in MEMBERS:
        uv("build", "--no-sources", "--wheel", "--package", member, "--out-dir", str(out), cwd=ROOT)
    return out


@pytest.fixture(scope="module")
def releases_in_use(tmp_path_factory: pytest.TempPathFactory) -> Path:
    frozen = uv("pip", "freeze", "--python", sys.executable, cwd=ROOT).splitlines()
    # torch==2.13.0+cpu becomes torch==2.13.0, which every build of that release satisfies.
    releases = [line.split("+")[0] for line in frozen if "==" in line and "@" not in line]
    path = tmp_path_factory.mktemp("constraints") / "constraints.txt"
    path.write_text("\n".join(releases))
    return path


@pytest.mark.parametrize("member", MEMBERS)
def test_wheel_runs_its_readme_example_alone(
    member: str, wheels: Path, releases_in_use: Path, tmp_path: Path
) -> None:
    links = [str(wheels), *re.split(r"[, ]+", os.environ.get("UV_FIND_LINKS", ""))]
    environment = tmp_path / "venv"
    uv("venv", "--python", sys.executable, str(environment), cwd=tmp_path)
    python = environment / "bin" / "python"
    uv(
        *("pip", "install", "--python", str(python), "--constraint", str(releases_in_use)),
        *(option for link in links if link for option in ("--find-links", link)),
        member,
        cwd=tmp_path,
    )
    readme = (ROOT / "packages" / member / "README.md").read_text()
    example = re.search(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    assert example is not None, f"packages/{member}/README.md has no python example"
    result = subprocess.run(
        [str(python), "-c", example[1]], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
