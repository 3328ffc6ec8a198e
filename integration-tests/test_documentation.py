"""What the pages say can be done: links lead somewhere, commands are taken as they are printed."""

import ast
import pkgutil
import re
import shlex
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
from mb_data.cli import main as mb_data
from mb_train.cli import main as mb_train
from mb_train.commands import COMMANDS
from mb_train.flags.command_line import parse, resolve

ROOT = Path(__file__).parents[1]
PAGES = [
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "packages/*/*.md", "packages/*/docs/*.md")
    for path in sorted(ROOT.glob(pattern))
]


def prose(page: str) -> str:
    """A page without its code."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text("utf-8"), flags=re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


@cache
def anchors(page: Path) -> set[str]:
    """What a link can lead to in a page: its headings, as they are written in addresses."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ +(.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), f"{page}: {link}"
        assert not anchor or path.suffix != ".md" or anchor in anchors(path), f"{page}: {link}"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_reads_alike_in_the_repository_and_on_the_site(page: str) -> None:
    """Where the two kinds of Markdown differ: what belongs to an item of a list is indented by 4,
    and a `|` inside a table's cell cannot be written for both."""
    for line in (ROOT / page).read_text("utf-8").splitlines():
        assert not re.match(r" {1,3}(```|[-*] |\d+\. )", line), f"{page}: {line}"
        assert not (line.startswith("|") and "\\|" in line), f"{page}: {line}"


FILES = r"(?:packages/[\w-]+/)?(?:(?:integration-)?tests|benchmarks|examples)/[\w/]+\.(?:py|sh)"


@pytest.mark.parametrize("page", PAGES)
def test_programs_and_tests_that_a_page_names_exist(page: str) -> None:
    """From the repository's root or from the page's package; a test's bare name, anywhere in it."""
    text, folders = (ROOT / page).read_text("utf-8"), [ROOT, *(ROOT / page).parents]
    package = folders[1 : folders.index(ROOT, 1)]
    for name in re.findall(rf"(?<![\w/-]){FILES}", text):
        assert any((folder / name).exists() for folder in folders), f"{page}: {name}"
    for name in re.findall(r"(?<![\w/])test_\w+\.py", text):
        found = [path for folder in package or [ROOT] for path in folder.rglob(name)]
        assert found, f"{page}: {name}"


NAME = r"\bmb_(?:kernels|layers|parallel|data|train)(?:\.[A-Za-z]\w*)+"
NAMING = [page for page in PAGES if "CHANGELOG" not in page]  # which names what there was


@pytest.mark.parametrize("page", [*NAMING, "tools/docs_pages.py"])
def test_modules_that_a_page_names_exist(page: str) -> None:
    """And what it names in them; the tool lists the modules whose docstrings become pages."""
    text = (ROOT / page).read_text("utf-8")
    names = re.findall(NAME, text)
    if page not in PAGES:
        names = [f"{package}.{name}" for package, room in references(text) for name in room]
        assert "mb_train.train" in names
    for name in names:
        pkgutil.resolve_name(name)


@pytest.mark.parametrize("package", sorted(path.name for path in ROOT.glob("packages/*")))
def test_modules_that_docstrings_and_comments_name_exist(package: str) -> None:
    """A module that moves leaves its old name in texts of others, which nothing else reads."""
    for folder in ("src", "benchmarks", "examples"):
        for path in sorted((ROOT / "packages" / package / folder).rglob("*.py")):
            for name in re.findall(NAME, path.read_text("utf-8")):
                try:
                    pkgutil.resolve_name(name)
                except (ImportError, AttributeError):
                    pytest.fail(f"{path.relative_to(ROOT)}: {name}")


def references(source: str) -> Iterable[tuple[str, list[str]]]:
    """What `REFERENCE` in tools/docs_pages.py holds, without mkdocs, which that imports."""
    (found,) = (
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "REFERENCE"
    )
    return eval(ast.unparse(found)).items()


def commands(page: str) -> list[list[str]]:
    """The words of every command in a page's blocks of code, from the program's name on."""
    blocks = re.findall(r"```\w*\n(.*?)```", (ROOT / page).read_text("utf-8"), flags=re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    program = r"\s*(uv run )?(torchrun [^#]*-m )?(?=(mb-train|mb_train|mb-data)( |$))"
    starts = [(line, re.match(program, line)) for line in lines]
    return [shlex.split(line[found.end() :], comments=True) for line, found in starts if found]


COMMANDS_OF_PAGES = [
    pytest.param(words, id=f"{page}: {shlex.join(words)}")
    for page in PAGES
    for words in commands(page)
]


def test_there_are_commands_to_try() -> None:
    assert len(COMMANDS_OF_PAGES) > 20


@pytest.mark.parametrize("words", COMMANDS_OF_PAGES)
def test_a_printed_command_is_taken(words: list[str], tmp_path, monkeypatch, capsys) -> None:
    """Its flags are known and go together; what it lacks here are its files."""
    monkeypatch.chdir(tmp_path)
    program, *arguments = words
    if program == "mb-data":
        if arguments[0] == "sample-corpus":
            arguments += ["--max-bytes", "1000"]
        arguments = [re.sub(r"\$SLURM\w+", "1", word) for word in arguments]
        try:
            mb_data(arguments)
        except SystemExit:  # argparse, of flags
            pytest.fail(capsys.readouterr().err)
    elif arguments and arguments[0] in COMMANDS:
        mb_train(arguments)
        assert "nknown" not in capsys.readouterr().err
    elif "--load" not in arguments:  # which takes the rest from a run
        resolve(parse(arguments))


def test_the_first_page_predicts_what_the_plan_does(capsys) -> None:
    """Of the run that it prints: GiB, and minutes on two GPUs."""
    page = (ROOT / "README.md").read_text("utf-8")
    (run,) = (words for words in commands("README.md") if "dmoe-46m" in words)
    said = re.search(r"here (\d+) GiB and (\w+) minutes, on an H100 (\w+)\.", page)
    assert said is not None
    found = []
    for gpu in ("H200", "H100"):
        mb_train(["plan", *run[1:], "--gpu", gpu])
        plan = capsys.readouterr().out
        found += re.findall(r"memory +([\d.]+) GiB|steps, (\d+) seconds", plan)
    (gib, _), (_, on_h200), _, (_, on_h100) = found
    number = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight"]
    minutes = [number[round(int(seconds) / 60)] for seconds in (on_h200, on_h100)]
    assert [f"{float(gib):.0f}", *minutes] == list(said.groups())


def test_the_first_page_counts_the_models_beside_megatron_core() -> None:
    """Those of the tool, which needs Megatron Core to be imported."""
    source = (ROOT / "integration-tests" / "against_core.py").read_text("utf-8")
    (cases,) = (
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "CASES"
    )
    assert isinstance(cases, ast.Dict)
    assert len(cases.keys) == 14
    assert "Small GPTs of fourteen kinds," in (ROOT / "README.md").read_text("utf-8")
