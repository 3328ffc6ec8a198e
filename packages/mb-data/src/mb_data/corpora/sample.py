"""Real text that is on every machine: the standard library of the running Python.

``write_sample_corpus`` makes a JSON Lines file of its sources, one module per line with its text
and its path; ``write_documentation_corpus`` one of its docstrings, which are sentences where
sources are not. Always in the same order for one Python version.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import sysconfig
import warnings
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from mb_data.system import written_whole

DEFAULT_MAX_BYTES = 8 << 20


def write_sample_corpus(
    path: str | os.PathLike[str], *, max_bytes: int = DEFAULT_MAX_BYTES
) -> Path:
    """Write the corpus, at most ``max_bytes`` long; returns its path.

    Each line is ``{"text": source, "path": "json/decoder.py"}``. Modules come in an order that
    mixes the packages, by a hash of the path, so that any prefix of the file looks like the rest.

    Raises ValueError if not one module fits, or this Python came without its sources.
    """
    library = _library()

    def records() -> Iterator[dict[str, str]]:
        for source, text in _sources(library):
            yield {"text": text, "path": source.relative_to(library).as_posix()}

    return _write(path, records(), max_bytes, "Python source", library)


def write_documentation_corpus(
    path: str | os.PathLike[str], *, max_bytes: int = DEFAULT_MAX_BYTES
) -> Path:
    """Write the library's docstrings, at most ``max_bytes`` long; returns the path.

    Each line is ``{"text": docstrings, "title": "json decoder JSONDecoder"}``: those of a module
    and its functions, or of a class and its methods, if they are two sentences or more. Left out
    are prompts of the interpreter and what is indented: examples, tables, drawings.

    Raises ValueError if not one document fits, or this Python came without its docstrings.
    """
    library = _library()

    def records() -> Iterator[dict[str, str]]:
        for source, text in _sources(library):
            name = source.relative_to(library).with_suffix("").as_posix().replace("/", " ")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                try:
                    module = ast.parse(text)
                except SyntaxError:  # a module of another version, kept for its converter
                    continue
            for owner, title in _owners(module, name.removesuffix(" __init__")):
                prose = _docstrings(owner)
                if len(prose.split(". ")) > 1:
                    yield {"text": prose, "title": title}

    return _write(path, records(), max_bytes, "docstrings", library)


_Owner = ast.Module | ast.ClassDef


def _owners(module: ast.Module, name: str) -> Iterator[tuple[_Owner, str]]:
    """The module and its classes, with their names."""
    yield module, name
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            yield node, f"{name} {node.name}"


def _docstrings(owner: _Owner) -> str:
    """The prose of a module or class and of the functions right in it, a paragraph for each."""
    nodes = [
        owner,
        *(n for n in owner.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))),
    ]
    found = (ast.get_docstring(node, clean=False) for node in nodes)
    return "\n\n".join(filter(None, (_prose(text) for text in found if text)))


def _prose(docstring: str) -> str:
    """A docstring without what is indented, on one line, its last sentence ended."""
    lines = inspect.cleandoc(docstring).splitlines()
    kept = [line for line in lines if not re.match(r"\s|>>>|\.\.\.|[-=+*|_~^#]{3}", line)]
    prose = " ".join(" ".join(kept).split())
    return f"{prose}." if prose and prose[-1].isalnum() else prose


def _library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _write(
    path: str | os.PathLike[str],
    records: Iterable[dict[str, str]],
    max_bytes: int,
    what: str,
    library: Path,
) -> Path:
    """Write the records that fit, one a line, whole or not at all."""
    written = 0
    with written_whole(path) as file:
        for record in records:
            line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
            if written + len(line) > max_bytes:
                continue
            file.write(line)
            written += len(line)
        if not written:
            raise ValueError(f"no {what} of at most {max_bytes} bytes in {library}")
    return Path(path)


def _sources(library: Path) -> Iterator[tuple[Path, str]]:
    """Modules and their texts, those that have one."""
    for source in _modules(library):
        try:
            text = source.read_text("utf-8")
        except UnicodeDecodeError:  # test data in other encodings
            continue
        if text.strip():
            yield source, text


def _modules(library: Path) -> list[Path]:
    """Modules of the library proper: neither what was installed into it nor its test suite."""
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    skip |= {"encodings", "pydoc_data"}  # tables, not prose or programs
    found: list[Path] = []
    for folder, folders, names in os.walk(library):  # rglob would read all of site-packages
        folders[:] = [name for name in folders if name not in skip]
        found += [Path(folder, name) for name in names if name.endswith(".py")]

    def key(source: Path) -> tuple[int, str]:
        name = source.relative_to(library).as_posix()
        return zlib.crc32(name.encode()), name

    return sorted(found, key=key)
