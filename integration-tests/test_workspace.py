"""Promises of the repository itself: the lock, the arrows between packages, the READMEs."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MEMBERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


def in_checkout() -> bool:
    return shutil.which("git") is not None and (ROOT / ".git").exists()


@pytest.mark.skipif(not in_checkout(), reason="needs the git checkout")
def test_committed_lock_holds_no_address() -> None:
    # The working copy does hold addresses after a sync; what counts is the committed file.
    lock = subprocess.run(
        ["git", "show", "HEAD:uv.lock"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert 'name = "torch"' in lock
    assert "://" not in lock, "restore uv.lock with `git checkout uv.lock`, or run `make lock`"


def test_stripping_keeps_versions_and_drops_addresses(tmp_path: Path) -> None:
    lock = tmp_path / "uv.lock"
    lock.write_text(
        '[[package]]\nname = "a"\nversion = "1.2"\n'
        'source = { registry = "https://example.org/simple" }\n'
        'sdist = { url = "https://example.org/a.tar.gz", hash = "sha256:0" }\n'
        'wheels = [\n    { url = "https://example.org/a.whl", hash = "sha256:0" },\n]\n\n'
        '[package.metadata]\nrequires-dist = [\n    { name = "b", specifier = ">=1" },\n]\n'
    )
    subprocess.run(
        [sys.executable, str(ROOT / "tools/strip_lock.py"), str(lock)], check=True, cwd=tmp_path
    )
    assert lock.read_text() == (
        '[[package]]\nname = "a"\nversion = "1.2"\nsource = { registry = "." }\n\n'
        "[package.metadata]\nrequires-dist = []\n"
    )


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_a_benchmark_that_fails_fails_them_all_at_the_end(tmp_path: Path) -> None:
    uv = tmp_path / "uv"
    uv.write_text('#!/bin/sh\necho "ran $3"\n[ "$3" != packages/mb-kernels/benchmarks/run.py ]\n')
    uv.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        ["make", "bench"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path},
    )
    assert result.returncode != 0
    assert result.stdout.count("ran packages/") == len(MEMBERS)


def test_import_arrows_point_one_way() -> None:
    lint_imports = shutil.which("lint-imports", path=str(Path(sys.executable).parent))
    if lint_imports is None:
        pytest.skip("import-linter is not installed")
    result = subprocess.run([lint_imports], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def names_of(requirements: list[str]) -> set[str]:
    """The modules of what is required, by the packages' names."""
    return {re.split(r"[<>=;\[ ]", required)[0].replace("-", "_") for required in requirements}


@pytest.mark.parametrize("member", MEMBERS)
def test_member_declares_what_it_imports(member: str) -> None:
    """Every third-party module imported at the top of a file is a declared dependency."""
    package = ROOT / "packages" / member
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    declared = names_of(project["dependencies"])
    if "torch" in declared:
        declared.add("triton")  # torch brings the one that fits it, where it ships one
    own = member.replace("-", "_")
    for path in (package / "src").rglob("*.py"):
        # A module, or a folder, named after the library that it serves: an extra. Or one named
        # after an extra, whose libraries it may import.
        optional = {path.stem, path.parent.name}
        optional |= names_of(project.get("optional-dependencies", {}).get(path.stem, []))
        for statement in ast.parse(path.read_text()).body:
            if isinstance(statement, ast.Import):
                modules = [alias.name for alias in statement.names]
            elif isinstance(statement, ast.ImportFrom) and statement.module:
                modules = [statement.module]
            else:
                continue
            imported = {module.split(".")[0] for module in modules}
            undeclared = imported - sys.stdlib_module_names - {own} - optional - declared
            assert not undeclared, f"{path.relative_to(ROOT)} imports {undeclared}"


@pytest.mark.parametrize("member", MEMBERS)
def test_version_is_said_once_in_metadata_and_once_in_code(member: str) -> None:
    package = ROOT / "packages" / member
    version = tomllib.loads((package / "pyproject.toml").read_text())["project"]["version"]
    source = (package / "src" / member.replace("-", "_") / "__init__.py").read_text()
    assert f'__version__ = "{version}"' in source
    assert f"[v{version}]" in (package / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("member", MEMBERS)
def test_help_of_a_package_names_what_it_exports(member: str) -> None:
    """`help(package)` lists modules alone: what was imported into a package it leaves out."""
    name = member.replace("-", "_")
    module = ast.parse((ROOT / "packages" / member / "src" / name / "__init__.py").read_text())
    imports = [s for s in module.body if isinstance(s, ast.ImportFrom)]
    exported = {alias.asname for statement in imports for alias in statement.names}
    assert set(re.findall(r"`(\w+)`", ast.get_docstring(module) or "")) >= exported


def test_readme_example_runs() -> None:
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert example is not None
    exec(compile(example[1], "README.md", "exec"), {"__name__": "readme"})


def test_readme_tree_names_files_that_exist() -> None:
    tree = (ROOT / "README.md").read_text().split("```\npackages/\n")[1].split("```")[0]
    folder = ROOT
    for line in tree.splitlines():
        if line.startswith("  mb-"):
            folder = ROOT / "packages" / line.strip().rstrip("/")
            continue
        for name in re.findall(r"(?:^|(?<= ))[\w/]+(?:\.py|/)(?=;| |$)", line.split("  ;")[0]):
            if folder != ROOT and line.startswith("    "):
                assert (folder / name).exists(), f"README names {folder / name}"


@pytest.mark.parametrize(("one_in", "always"), [(1, 7), (2, 4), (3, 3), (9, 1)])
def test_of_a_sweep_some_cases_always_run(request, one_in: int, always: int) -> None:
    settings = request.config.pluginmanager.getplugin(str(ROOT / "conftest.py"))

    class Case:
        def __init__(self, test: str, name: str, *marks: pytest.Mark) -> None:
            self.nodeid, self.name, self.marks = f"{test}[{name}]", name, list(marks)

        def get_closest_marker(self, name: str) -> pytest.Mark | None:
            return next((mark for mark in self.marks if mark.name == name), None)

        def add_marker(self, mark: pytest.MarkDecorator) -> None:
            self.marks.append(mark.mark)

    sweep, slow = pytest.mark.sweep(one_in).mark, pytest.mark.slow.mark
    swept = [Case("file::test_swept", str(number), sweep) for number in range(7)]
    further = [Case("file::test_swept", f"slow {number}", sweep, slow) for number in range(7)]
    plain = [Case("file::test_plain", str(number)) for number in range(7)]
    settings.mark_further_cases([*swept, *further, *plain])
    assert sum(case.get_closest_marker("slow") is None for case in swept) == always
    assert all(case.get_closest_marker("slow") for case in further)
    assert not any(case.get_closest_marker("slow") for case in plain)
