"""Build one member as a release does, and install it beside the last releases of the others.

    python tools/release.py mb-kernels --out dist                     # what release.yml runs
    python tools/release.py mb-kernels --out dist --version 0.1.1     # would this number fit?

Each member has its own version, so users will install a new wheel beside older ones of the others.
This tries it first: the others are built from their last tags (`mb-layers-v0.1.0`; from the working
tree if there is none), all five are installed into an empty environment, and the README example of
each runs there. If a bound does not allow the new version, the installer's error names both.

With `--home` and `--tag`, the address of the repository and the tag or branch to link to, the
package gets its project URLs, and relative links of its README become absolute, so that they work
on the package's page. Nothing is written to the working tree.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MEMBERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


def run(*command: str, cwd: Path = ROOT) -> str:
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{result.stdout}{result.stderr}")
    return result.stdout


def copy_member(member: str, to: Path, *, tag: str | None = None) -> Path:
    """Copy a member's folder, as it stands or as it was at `tag`, below `to`."""
    folder = to / member
    if tag is None:
        ignored = shutil.ignore_patterns("__pycache__", ".pytest_cache", "runs")
        shutil.copytree(ROOT / "packages" / member, folder, ignore=ignored)
        return folder
    archive = to / f"{tag}.tar"
    run("git", "archive", "--output", str(archive), f"{tag}:packages/{member}")
    shutil.unpack_archive(archive, folder)
    return folder


def set_version(folder: Path, version: str) -> None:
    """Write `version` where a package says its own: metadata and `__version__`."""
    init = next((folder / "src").glob("*/__init__.py"))
    for path, pattern in ((folder / "pyproject.toml", "version"), (init, "__version__")):
        text, times = re.subn(
            rf'^{pattern} = ".*"$', f'{pattern} = "{version}"', path.read_text(), flags=re.M
        )
        if times != 1:
            raise ValueError(f"expected one line `{pattern} = ...` in {path}, found {times}")
        path.write_text(text)


def stamp(folder: Path, home: str, tag: str) -> None:
    """Add project URLs below `home`, and make relative links of the README absolute."""
    here = f"{tag}/packages/{folder.name}"
    readme = folder / "README.md"
    text = readme.read_text()
    # A page under `blob` shows a picture; the picture itself is under `raw`.
    for link, kind in ((r"!\[[^\]]*\]\(", "raw"), (r"\]\(", "blob")):
        text = re.sub(rf"({link})(?!#|\w+:)", rf"\g<1>{home}/{kind}/{here}/", text)
    readme.write_text(text)
    project = folder / "pyproject.toml"
    urls = (
        f'Repository = "{home}"\nIssues = "{home}/issues"\n'
        f'Changelog = "{home}/blob/{here}/CHANGELOG.md"\n'
        f'Documentation = "{home}/blob/{here}/README.md"\n'
    )
    project.write_text(project.read_text().replace("[project.urls]\n", f"[project.urls]\n{urls}"))


def build(folder: Path, out: Path, *kinds: str) -> None:
    run("uv", "build", "--quiet", *kinds, "--out-dir", str(out.resolve()), str(folder))


def last_tag(member: str) -> str | None:
    """The newest release tag of a member in this history; None before its first release."""
    tags = run("git", "tag", "--merged", "HEAD", "--list", f"{member}-v*", "--sort=-v:refname")
    return next(iter(tags.split()), None)


def install(environment: Path, *arguments: str) -> Path:
    """Install `arguments` into an environment, made if it is not there; returns its Python."""
    python = environment / "bin" / "python"
    if not python.exists():
        run("uv", "venv", "--quiet", "--python", sys.executable, str(environment))
    run("uv", "pip", "install", "--quiet", "--python", str(python), *arguments)
    return python


def run_example(member: str, python: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the first Python example of a member's README outside the checkout."""
    readme = (ROOT / "packages" / member / "README.md").read_text()
    example = re.search(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    if example is None:
        raise ValueError(f"packages/{member}/README.md has no python example")
    command = [str(python), "-I", "-c", example[1]]  # -I: no PYTHONPATH, the environment alone
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def build_and_try(arguments: argparse.Namespace, scratch: Path) -> None:
    """Build a member, try it beside the others, and only then put it into `arguments.out`."""
    folder = copy_member(arguments.member, scratch / "new")
    if arguments.version:
        set_version(folder, arguments.version)
    if arguments.home:
        stamp(folder, arguments.home, arguments.tag)
    build(folder, scratch / "dist")
    for other in MEMBERS:
        if other != arguments.member:
            tag = last_tag(other)
            print(f"{other}: {tag or 'not released yet, as it stands'}")
            (scratch / "older").mkdir(exist_ok=True)
            build(copy_member(other, scratch / "older", tag=tag), scratch / "wheels", "--wheel")
    wheels = [*scratch.glob("dist/*.whl"), *scratch.glob("wheels/*.whl")]
    python = install(scratch / "venv", *map(str, wheels))
    for member in MEMBERS:
        result = run_example(member, python, scratch)
        if result.returncode:
            raise RuntimeError(f"{member} fails beside {arguments.member}:\n{result.stderr}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for path in (*scratch.glob("dist/*.whl"), *scratch.glob("dist/*.tar.gz")):
        shutil.copy(path, arguments.out)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("member", choices=MEMBERS)
    parser.add_argument("--out", type=Path, required=True, help="folder for wheel and sdist")
    parser.add_argument("--version", help="another version than the one in pyproject.toml")
    parser.add_argument("--home", help="address of the repository")
    parser.add_argument("--tag", help="tag or branch that links point to")
    arguments = parser.parse_args(words)
    if (arguments.home is None) != (arguments.tag is None):
        parser.error("expected --home and --tag together")

    try:
        with tempfile.TemporaryDirectory() as name:
            build_and_try(arguments, Path(name))
    except RuntimeError as error:
        sys.exit(str(error))
    print(f"{arguments.member}: in {arguments.out}, and it runs beside the others")


if __name__ == "__main__":
    main()
