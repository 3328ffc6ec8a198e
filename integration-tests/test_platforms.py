"""All five packages install from wheels alone, wherever torch does, with the one Triton it brings.

uv resolves for platforms it is not on. Of our members only what they require matters, so stand-ins
with their metadata take their place. So do torch's builds for CPU, CUDA and ROCm, which live on
indexes of their own: each is a wheel that requires what the real one requires.
"""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MEMBERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
PLATFORMS = {
    "Linux x86-64": "x86_64-manylinux_2_28",
    "Linux arm64": "aarch64-manylinux_2_28",
    "macOS arm64": "aarch64-apple-darwin",
    "Windows": "x86_64-pc-windows-msvc",
}
# uv takes macOS 13 for granted. For that torch has wheels up to 2.11, and faiss none for
# Python 3.14.
MACOS = {"MACOSX_DEPLOYMENT_TARGET": "14.0"}
pytestmark = pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv")


# All but block-sparse, whose stanford-stk comes as source alone.
EXTRAS = ["mb-layers[transformers]", "mb-data[all]"]
EXTRAS += ["mb-train[tensorboard,convert,delta,retrieval,serve]"]


def stand_in(
    folder: Path,
    name: str,
    version: str,
    requires: list[str],
    extras: dict[str, list[str]] | None = None,
) -> None:
    """Write a wheel of nothing but metadata."""
    stem = f"{name.replace('-', '_')}-{version}"
    metadata = [f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n"]
    metadata += [f"Requires-Dist: {requirement}\n" for requirement in requires]
    for extra, more in (extras or {}).items():
        metadata.append(f"Provides-Extra: {extra}\n")
        for requirement in more:
            words, _, marker = requirement.partition(";")
            marker = f'({marker}) and extra == "{extra}"' if marker else f'extra == "{extra}"'
            metadata.append(f"Requires-Dist: {words}; {marker}\n")
    wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{stem}.dist-info/METADATA", "".join(metadata))
        archive.writestr(f"{stem}.dist-info/WHEEL", wheel)
        archive.writestr(f"{stem}.dist-info/RECORD", "")


@pytest.fixture
def members(tmp_path: Path) -> Path:
    for member in MEMBERS:
        text = (ROOT / "packages" / member / "pyproject.toml").read_text()
        project = tomllib.loads(text)["project"]
        extras = project.get("optional-dependencies", {})
        stand_in(tmp_path, member, project["version"], project["dependencies"], extras)
    return tmp_path


def resolve(
    links: Path, platform: str, *options: str, extras: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Start resolving; one release a line, like `torch==2.13.0`, comes on stdout."""
    command = ["uv", "pip", "compile", "-", "--quiet", "--no-header", "--no-annotate"]
    command += ["--only-binary", ":all:", "--python", sys.executable]
    command += ["--python-platform", platform, "--find-links", str(links)]
    process = subprocess.Popen(
        [*command, *options],
        cwd=links,
        env=os.environ | MACOS,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write("\n".join([*MEMBERS, *extras]))
    process.stdin.close()
    process.stdin = None
    return process


def test_every_platform_has_wheels(members: Path) -> None:
    """With their extras, from the index in use; the resolutions wait for it side by side."""
    probe = ["uv", "pip", "compile", "-", "--quiet", "--refresh"]
    reached = subprocess.run(probe, input="regex", cwd=members, capture_output=True, text=True)
    if reached.returncode:
        pytest.skip("no package index can be reached")
    running = {
        name: resolve(members, platform, extras=EXTRAS) for name, platform in PLATFORMS.items()
    }
    for name, process in running.items():
        resolved, errors = process.communicate()
        assert process.returncode == 0, f"{name}\n{errors}"
        names = {line.split("==")[0] for line in resolved.split()}
        assert names >= {*MEMBERS, "torch", "pyarrow", "transformers", "uvicorn"}, name
        assert "stanford-stk" not in names, name


@pytest.mark.parametrize(
    ("build", "triton"),
    [
        ("cpu", None),
        ("cu130", "triton"),
        ("rocm7.1", "triton-rocm"),
        ("rocm6.4", "pytorch-triton-rocm"),
    ],
)
def test_torch_brings_the_only_triton(members: Path, build: str, triton: str | None) -> None:
    """A Triton asked for by its CUDA name would be written over the one of a ROCm torch."""
    stand_in(members, "torch", f"2.13.0+{build}", [f"{triton}==3.7.1"] if triton else [])
    for name in ("triton", "triton-rocm", "pytorch-triton-rocm"):
        stand_in(members, name, "3.7.1", [])
    for name in ("numpy", "regex", "gigatoken", "matplotlib", "filelock"):
        stand_in(members, name, "9999.0", [])
    resolved, errors = resolve(members, PLATFORMS["Linux x86-64"], "--no-index").communicate()
    assert f"torch==2.13.0+{build}" in resolved, errors
    found = {line.split("==")[0] for line in resolved.split() if "triton" in line}
    assert found == ({triton} if triton else set())
