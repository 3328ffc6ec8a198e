"""Each wheel installs alone and runs its README example; a new one runs beside older ones.

`uv lock` does not check the bounds between workspace members; installing the built wheels does.
Third-party releases are held at those of the running environment, so that nothing is downloaded
that `uv sync` has not fetched already.
"""

import email
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("release", ROOT / "tools" / "release.py")
assert spec is not None
assert spec.loader is not None
release = importlib.util.module_from_spec(spec)
spec.loader.exec_module(release)
MEMBERS = release.MEMBERS
pytestmark = pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheels and sdists of all members, as a release stamps them."""
    folder = tmp_path_factory.mktemp("releases")
    for member in MEMBERS:
        copy = release.copy_member(member, folder)
        release.stamp(copy, "https://example.org/mb", f"{member}-v0.1.0")
        release.build(copy, folder / "dist")
    return folder / "dist"


@pytest.fixture(scope="module")
def third_parties(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options that hold other projects at the releases in use, and find them where uv does."""
    frozen = release.run("uv", "pip", "freeze", "--python", sys.executable).splitlines()
    # torch==2.13.0+cpu becomes torch==2.13.0, which every build of that release satisfies.
    releases = [line.split("+")[0] for line in frozen if "==" in line and "@" not in line]
    path = tmp_path_factory.mktemp("constraints") / "constraints.txt"
    path.write_text("\n".join(releases))
    links = re.split(r"[, ]+", os.environ.get("UV_FIND_LINKS", ""))
    found = [option for link in links if link for option in ("--find-links", link)]
    return ["--constraint", str(path), *found]


def _members_in(python: Path) -> set[str]:
    lines = release.run("uv", "pip", "freeze", "--python", str(python)).splitlines()
    return {*MEMBERS} & {re.split(r"==| @ ", line)[0] for line in lines}


@pytest.mark.parametrize("members", [MEMBERS[:3], MEMBERS[3:4]], ids=["torch", "no torch"])
def test_wheels_run_their_readme_examples_alone(
    members: Sequence[str], dist: Path, third_parties: list[str], tmp_path: Path
) -> None:
    """Each beside what it depends on and nothing else: the environment grows with the arrows."""
    options = (*third_parties, "--only-binary", ":all:", "--find-links", str(dist))
    for member in members:
        python = release.install(tmp_path / "venv", *options, member)
        assert _members_in(python) == {*members[: members.index(member) + 1]}
        result = release.run_example(member, python, tmp_path)
        assert result.returncode == 0, result.stderr
        # torch, which does not require NumPy, remarks on its absence by itself.
        lines = result.stderr.splitlines()
        assert [line for line in lines if "arning" in line and "NumPy" not in line] == []


@pytest.mark.slow
def test_a_new_version_runs_beside_older_wheels(
    third_parties: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """What release.yml runs, for the member in the middle: it has bounds, and two have some on it.

    It installs all five and runs their examples, so mb-train's needs no test of its own.
    """
    real = release.install
    monkeypatch.setattr(release, "install", lambda where, *what: real(where, *third_parties, *what))
    text = (ROOT / "packages" / "mb-layers" / "pyproject.toml").read_text()
    major, minor, patch = map(int, tomllib.loads(text)["project"]["version"].split("."))
    words = ["mb-layers", "--out", str(tmp_path / "dist"), "--version"]

    newer = f"{major}.{minor}.{patch + 1}"
    release.main([*words, newer, "--home", "https://example.org/mb", "--tag", "mb-layers-vX"])
    assert "mb-layers: in " in capsys.readouterr().out
    names = [f"mb_layers-{newer}-py3-none-any.whl", f"mb_layers-{newer}.tar.gz"]
    assert sorted(os.listdir(tmp_path / "dist")) == names
    with zipfile.ZipFile(tmp_path / "dist" / names[0]) as archive:
        assert f'__version__ = "{newer}"' in archive.read("mb_layers/__init__.py").decode()

    breaking = f"{major}.{minor + 1}.0" if major == 0 else f"{major + 1}.0.0"
    with pytest.raises(SystemExit, match=r"mb-train==\S+ depends on mb-layers>=") as refused:
        release.main([*words, breaking])
    assert breaking in str(refused.value)
    with pytest.raises(SystemExit):
        release.main([*words, newer, "--home", "https://example.org/mb"])
    assert "expected --home and --tag together" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path / "dist")) == names  # what was refused is not there
    assert text == (ROOT / "packages" / "mb-layers" / "pyproject.toml").read_text()


@pytest.mark.parametrize("member", MEMBERS)
def test_a_release_carries_licence_addresses_and_absolute_links(member: str, dist: Path) -> None:
    stem = member.replace("-", "_")
    (wheel,) = dist.glob(f"{stem}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [name for name in names if name.endswith("METADATA")]
        fields = email.message_from_string(archive.read(metadata).decode())
    licence = (ROOT / "LICENSE").read_text()
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert (ROOT / "packages" / member / "LICENSE").read_text() == licence
    assert f"{stem}/py.typed" in names
    (sdist,) = dist.glob(f"{stem}-*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert any(re.fullmatch(r"[^/]+/LICENSE", name) for name in archive.getnames())

    assert "Typing :: Typed" in fields.get_all("Classifier", [])
    urls = dict(field.split(", ", 1) for field in fields.get_all("Project-URL", []))
    assert urls["Repository"] == "https://example.org/mb"
    assert urls["Changelog"].endswith(f"/packages/{member}/CHANGELOG.md")
    readme = str(fields.get_payload())
    links = re.findall(r"\]\(([^)]+)\)", readme)
    assert [link for link in links if not re.match(r"https?://|#", link)] == []
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", readme)
    assert [p for p in pictures if "/raw/" not in p] == []  # under /blob/ is a page


def test_import_without_triton_prints_nothing() -> None:
    """As on macOS and Windows, and beside a CPU build of torch: the reference runs, unremarked."""
    hidden = "import sys; sys.modules['triton'] = sys.modules['stk'] = None; "
    packages = ", ".join(member.replace("-", "_") for member in MEMBERS)
    run = "; import torch; from mb_layers import MoEConfig, dMoE; import mb_train.train; " + (
        "dMoE(MoEConfig(hidden_size=16, ffn_hidden_size=16, num_experts=2))(torch.ones(3, 16))"
    )
    command = [sys.executable, "-c", f"{hidden}import {packages}{run}"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
