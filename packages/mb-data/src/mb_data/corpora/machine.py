"""A corpus of hundreds of megabytes from what a machine has: sources and documentation.

``write_machine_corpus`` walks folders (by default Python's library, the installed packages,
Debian's documentation, Perl's library, C headers) and writes the text files in them as JSON Lines,
each once. Nothing is downloaded.

Files come in the order of a hash of their place and a seed. So the order is a shuffle, any prefix
of the output looks like the rest, and two machines with the same files make the same corpus.

A file is left out as a near copy if half of its sketch has been seen. The sketch is the ``SKETCH``
smallest hashes of its shingles, which are every three lines in a row (Broder, "On the resemblance
and containment of documents", 1997). This removes other versions of a package, and files that
several packages contain; otherwise a validation set would hold text that was trained on.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import json
import multiprocessing
import os
import site
import sysconfig
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mb_data.corpora.markup import text_of_markup
from mb_data.system import written_whole

_PROGRAMS = {".py", ".pyi", ".pm", ".pl", ".tcl", ".rb", ".el", ".c", ".cc", ".cpp", ".cu", ".cuh"}
_PROGRAMS |= {".h", ".hpp", ".go", ".rs", ".java", ".lisp", ".scm", ".hs", ".ml", ".vim"}
_MARKUP = {".html", ".htm", ".xhtml", ".page", ".docbook"}
SUFFIXES = _PROGRAMS | _MARKUP | {".md", ".rst", ".txt", ".pod", ".info"}
NAMES = ("changelog", "README", "NEWS")  # documentation without a suffix
_COPIES = {"_sources", "_modules", "_static"}  # Sphinx's, of what its pages show
SKIPPED_FOLDERS = _COPIES | {"__pycache__", ".git", "encodings", "pydoc_data", "locale", "i18n"}
MAX_FILE_BYTES = 1 << 18  # beyond it are tables and generated code
MIN_FILE_BYTES = 200
MIN_PAGE_BYTES, PARAGRAPH = 2000, 60  # pages shorter, or mostly of shorter lines, are indices
SKETCH, SHINGLE_LINES = 32, 3


@dataclass
class CorpusFacts:
    """What a corpus is made of.

    Attributes:
        documents, text_bytes: written; text in UTF-8.
        gzip_bytes: of the same text in one zlib stream, level 6.
        origins: text bytes by the folder that they came from.
        copies: files left out as copies or near copies.
        unfit: files left out as tables, minified or generated text, or other encodings.
    """

    documents: int = 0
    text_bytes: int = 0
    gzip_bytes: int = 0
    copies: int = 0
    unfit: int = 0
    origins: dict[str, int] = field(default_factory=dict)

    @property
    def gzip_bits_per_byte(self) -> float:
        """Entropy of the text as zlib sees it."""
        return 8 * self.gzip_bytes / max(self.text_bytes, 1)


def machine_folders() -> dict[str, Path]:
    """Folders with text that this machine has, by name."""
    paths = sysconfig.get_paths()
    found = {"python": Path(paths["stdlib"]), "packages": Path(paths["purelib"])}
    if paths["platlib"] != paths["purelib"]:
        found["packages-platform"] = Path(paths["platlib"])
    for number, folder in enumerate(site.getsitepackages()):
        found[f"packages-{number}"] = Path(folder)
    found |= {
        "debian-python": Path("/usr/lib/python3"),
        "documentation": Path("/usr/share/doc"),
        "perl": Path("/usr/share/perl"),
        "headers": Path("/usr/include"),
    }
    real: dict[Path, str] = {}
    for name, folder in found.items():
        if folder.is_dir():
            real.setdefault(folder.resolve(), name)
    return {name: folder for folder, name in real.items()}


def write_machine_corpus(
    path: str | os.PathLike[str],
    *,
    folders: Mapping[str, str | os.PathLike[str]] | None = None,
    max_bytes: int | None = None,
    seed: int = 1234,
    workers: int = 1,
) -> CorpusFacts:
    """Write the corpus: lines of ``{"text": ..., "path": "packages/torch/nn/functional.py"}``.

    Args:
        folders: folders to walk by name; default `machine_folders()`.
        max_bytes: stop when there is so much text; None takes all there is.
        seed: of the order.
        workers: processes that read; the corpus is the same for any number.

    Raises:
        ValueError: a folder that does not exist, no text in any, or no worker.
    """
    if workers < 1:
        raise ValueError(f"expected workers of at least 1, got {workers}")
    named = machine_folders() if folders is None else {n: Path(f) for n, f in folders.items()}
    for folder in named.values():
        if not folder.is_dir():
            raise ValueError(f"expected a folder of text, got {folder}, which is none")
    facts, seen = CorpusFacts(), set[int]()
    compressor = zlib.compressobj(6)
    with written_whole(path) as file, _mapper(workers) as mapped:
        files = _in_order(named, seed)
        for (name, _), taken in zip(files, mapped(_take, [f for _, f in files]), strict=True):
            if taken is None:
                facts.unfit += 1
                continue
            text, sketch = taken
            if 2 * len(seen & sketch) >= len(sketch):
                facts.copies += 1
                continue
            encoded = text.encode()
            seen |= sketch
            shown = name.encode(errors="backslashreplace").decode()  # a name may be any bytes
            file.write(json.dumps({"text": text, "path": shown}, ensure_ascii=False).encode())
            file.write(b"\n")
            facts.gzip_bytes += len(compressor.compress(encoded))
            facts.documents += 1
            facts.text_bytes += len(encoded)
            origin = name.partition("/")[0]
            facts.origins[origin] = facts.origins.get(origin, 0) + len(encoded)
            if max_bytes is not None and facts.text_bytes >= max_bytes:
                break
        if not facts.documents:
            raise ValueError(f"no text in {', '.join(map(str, named.values()))}")
    facts.gzip_bytes += len(compressor.flush())
    return facts


def _in_order(folders: Mapping[str, Path], seed: int) -> list[tuple[str, Path]]:
    """Every text file with its name, by a hash of name and seed."""
    inside = {folder.resolve() for folder in folders.values()}
    found = [
        (f"{name}/{source.relative_to(folder).as_posix()}", source)
        for name, folder in folders.items()
        for source in _text_files(folder, others=inside - {folder.resolve()})
    ]

    def key(item: tuple[str, Path]) -> tuple[bytes, str]:
        name = item[0]
        spelled = f"{seed}:{name}".encode("utf-8", "surrogateescape")
        return hashlib.blake2b(spelled, digest_size=8).digest(), name

    return sorted(found, key=key)


def _text_files(folder: Path, others: Iterable[Path]) -> Iterator[Path]:
    """Files whose names say that they are text. Folders in ``others`` are left out: their files are
    found under a name of their own."""
    apart = {str(other) for other in others}
    for place, folders, files in os.walk(folder):
        real = os.path.realpath(place)
        folders[:] = [
            name
            for name in folders
            if name not in SKIPPED_FOLDERS and os.path.join(real, name) not in apart
        ]
        for name in files:
            source = Path(place, name)
            stem = source.with_suffix("") if source.suffix == ".gz" else source
            wanted = stem.suffix in SUFFIXES or stem.name.startswith(NAMES)
            if wanted and os.path.isfile(source) and not source.is_symlink():
                yield source


@contextlib.contextmanager
def _mapper(workers: int) -> Generator[Callable[..., Iterable]]:
    """`map`, by that many processes where more than one is asked for."""
    if workers == 1:
        yield map
        return
    with multiprocessing.Pool(workers) as pool:
        yield functools.partial(pool.imap, chunksize=32)


def _take(source: Path) -> tuple[str, set[int]] | None:
    """The text of a file and its sketch; None if it cannot be read, or is not worth reading."""
    markup = (source.with_suffix("") if source.suffix == ".gz" else source).suffix in _MARKUP
    text = _read(source, limit=4 * MAX_FILE_BYTES if markup else MAX_FILE_BYTES)
    if text is not None and markup:
        text = text_of_markup(text)
        paragraphs = sum(len(line) for line in text.split("\n") if len(line) >= PARAGRAPH)
        if not MIN_PAGE_BYTES <= len(text) <= min(2 * paragraphs, MAX_FILE_BYTES):
            return None
        return text, _sketch(text)
    if text is None or not _is_prose_or_program(text):
        return None
    return text, _sketch(text)


def _read(source: Path, limit: int) -> str | None:
    """The text of a file, plain or gzipped; None if it is no UTF-8, too short or too long."""
    try:
        if source.suffix == ".gz":
            with gzip.open(source) as file:
                data = file.read(limit + 1)
        elif source.stat().st_size > limit:
            return None
        else:
            data = source.read_bytes()
        if not MIN_FILE_BYTES <= len(data) <= limit:
            return None
        return data.decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError):
        return None


def _is_prose_or_program(text: str) -> bool:
    """Lines of a length to read, and more letters and spaces than anything else."""
    lines = text.count("\n") + 1
    if "\0" in text or len(text) > 160 * lines:
        return False
    part = text[: 1 << 16]
    return 2 * sum(map(str.isalpha, part)) + 2 * part.count(" ") > 1.2 * len(part)


def _sketch(text: str) -> set[int]:
    """The smallest hashes of its shingles; of a text shorter than a shingle, the hash of it all."""
    lines = [stripped for line in text.splitlines() if (stripped := line.strip())]
    last = max(len(lines) - SHINGLE_LINES, 0)
    shingles = {
        zlib.crc32("\n".join(lines[at : at + SHINGLE_LINES]).encode("utf-8", "surrogatepass"))
        for at in range(last + 1)
    }
    return set(sorted(shingles)[:SKETCH])
