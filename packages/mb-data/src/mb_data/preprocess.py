"""JSON Lines to token files: ``<prefix>_<key>_document.{bin,idx}``, as Megatron names them.

The input is read in blocks of about 4 MB of whole lines, which worker processes parse, encode and
write to their final place (``pipeline``); the state on disk lets a killed run go on
(``partial``). The output depends on the input and the settings alone, not on the workers.

Memory: a worker holds its tokenizer, up to three blocks with their tokens, and what the engine
remembers of words, which it drops at 256 MB: together some 0.5 GB at worst, 0.2 GB on common text.
A line longer than a block takes 12 bytes for each of its own, so up to 0.8 GB more at the limit,
``max_line_bytes`` = 64 MB. None of this depends on the size of the input.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mb_data.indexed_dataset import DTYPE_CODES, best_dtype
from mb_data.partial import PartialOutput, Place, State
from mb_data.reading import STDIN, Block, Source, blocks, find_sources
from mb_data.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from mb_data.pipeline import Result

FORMAT = 1  # of the partial output: raise it when a resumed run would differ
BLOCK_BYTES = 4 << 20
MAX_LINE_BYTES = 64 << 20
SAVE_INTERVAL = 1.0  # seconds of work a kill may cost, besides the blocks under way


@dataclass(frozen=True)
class Progress:
    """How far a run is: bytes of input on disk (``total`` 0 if unknown), and what came of them."""

    position: int
    total: int
    documents: int
    text_bytes: int
    seconds: float
    resumed_position: int
    resumed_documents: int
    resumed_text_bytes: int


@dataclass(frozen=True)
class Summary:
    """What a run did, all keys together.

    ``documents`` were written, ``empty`` had no token and were left out, ``bad_lines`` were
    skipped and are listed in ``bad_lines_file``. ``text_bytes`` is the UTF-8 of the texts.
    ``resumed_text_bytes`` of them had been done by a run before, which was interrupted.
    ``outputs`` are the prefixes of the datasets.
    """

    documents: int
    tokens: int
    text_bytes: int
    empty: int
    bad_lines: int
    bad_lines_file: str | None
    seconds: float
    resumed_text_bytes: int
    outputs: tuple[str, ...]


def preprocess(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | Tokenizer = "gpt2",
    json_keys: Sequence[str] = ("text",),
    append_eod: bool = False,
    split_sentences: bool = False,
    language: str = "english",
    keep_newlines: bool = False,
    dtype: str | None = None,
    on_error: str = "stop",
    workers: int | None = None,
    max_line_bytes: int = MAX_LINE_BYTES,
    block_bytes: int = BLOCK_BYTES,
    on_progress: Callable[[Progress], None] | None = None,
) -> Summary:
    """Tokenize JSON Lines into indexed datasets, one per key.

    Args:
        inputs: files, directories, glob patterns or "-" for standard input, plain or compressed
            with gzip, xz or Zstandard; each line one JSON object.
        output_prefix: ``out/wiki`` gives ``out/wiki_text_document.bin`` and ``.idx``;
            ``out/wiki_text_sentence.*`` with ``split_sentences``.
        tokenizer: name or file for ``load_tokenizer``, or a tokenizer.
        json_keys: which values of the object to tokenize.
        append_eod: end each document with the tokenizer's end-of-document token.
        split_sentences: make each sentence a sequence; ``language`` as Megatron's ``--lang``,
            ``keep_newlines`` keeps the white space after sentences.
        dtype: of the tokens; by default uint16 where the vocabulary fits, else int32.
        on_error: "stop" at the first bad line, or "skip" it and list it.
        workers: processes that encode; by default one for each core.
        max_line_bytes: a longer line is bad; bounds the memory.
        block_bytes: size of the unit of work.
        on_progress: called about five times a second.

    The workers are forked where that is safe. Where this process runs other threads, or is no Linux
    process, they start afresh: a script then needs ``if __name__ == "__main__":``.

    Raises:
        ValueError: wrong settings; a bad line, with file and line number; another run writing the
            same prefix. Nothing is left behind.
        FileNotFoundError: an input, or the directory of the output, is missing.
        WorkerDiedError, OSError: a worker was killed, the disk is full; what is done is kept, and
            the same call goes on from there.
    """
    started = time.perf_counter()
    if isinstance(inputs, (str, os.PathLike)):
        inputs = [inputs]
    keys = tuple(json_keys)
    if not keys or len(set(keys)) < len(keys):
        raise ValueError(f"JSON keys must be one or more different names, got {list(keys)}")
    for key in keys:
        if "/" in key or not key:
            raise ValueError(f"JSON key {key!r} cannot be part of a file's name")
    if on_error not in ("stop", "skip"):
        raise ValueError(f"on_error {on_error!r}: expected stop or skip")
    for name, value in (("block_bytes", block_bytes), ("max_line_bytes", max_line_bytes)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if workers is None:
        workers = _cores()
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    prefix = os.fspath(output_prefix)
    if not Path(prefix).name or not Path(prefix).parent.is_dir():
        raise FileNotFoundError(f"{Path(prefix).parent}: no such directory for the output")
    sources = find_sources(inputs)
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = load_tokenizer(tokenizer)
    if append_eod:
        tokenizer.special_id("eod")

    from mb_data.encode import Job
    from mb_data.pipeline import run_workers
    from mb_data.sentences import SentenceSplitter

    splitter = SentenceSplitter(language, keep_newlines=keep_newlines) if split_sentences else None
    job = Job(tokenizer, keys, append_eod, _dtype(tokenizer, dtype), max_line_bytes, splitter)
    level = "sentence" if split_sentences else "document"
    outputs = tuple(f"{prefix}_{key}_{level}" for key in keys)
    settings: dict[str, Any] = {
        "format": FORMAT,
        "sources": [[s.path, s.size, s.modified_ns] for s in sources],
        "tokenizer": [tokenizer.name, tokenizer.fingerprint],
        "keys": list(keys),
        "append_eod": append_eod,
        "sentences": [splitter.code, keep_newlines] if splitter else None,
        "dtype": job.dtype.str,
        "on_error": on_error,
        "max_line_bytes": max_line_bytes,
        "block_bytes": block_bytes,
    }
    resume = all(source.path != STDIN for source in sources)
    with PartialOutput(prefix, outputs, job.dtype, settings, resume=resume) as partial:
        run = _Run(partial, sources, skip=on_error == "skip", on_progress=on_progress)
        todo = enumerate(blocks(sources, block_bytes, max_line_bytes))
        with run:
            run_workers(
                job,
                (item for item in todo if item[0] >= partial.state.blocks),
                workers=min(workers, _count_blocks(sources, block_bytes) or workers),
                files=[partial.key_files(key) for key in range(len(keys))],
                place=run.place,
                written=run.written,
                tick=run.tick,
            )
        state = run.saved
        _check_complete(state, sources, keys)
        partial.finish(state)
    return Summary(
        documents=state.documents,
        tokens=state.tokens,
        text_bytes=state.text_bytes,
        empty=state.empty,
        bad_lines=state.bad_lines,
        bad_lines_file=str(partial.report_target) if state.bad_lines else None,
        seconds=time.perf_counter() - started,
        resumed_text_bytes=partial.state.text_bytes,
        outputs=outputs,
    )


class _Run(AbstractContextManager):
    """Keeps the books of a run: places and line numbers in order, state that is safely written.

    While entered, a thread records that state on disk every ``SAVE_INTERVAL``; syncing early also
    spreads the writing, so that little is left for the end.
    """

    def __init__(
        self,
        partial: PartialOutput,
        sources: Sequence[Source],
        *,
        skip: bool,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self.partial = partial
        self.skip = skip
        self.on_progress = on_progress
        self.total = 0 if any(s.path == STDIN for s in sources) else sum(s.size for s in sources)
        self.placed = self.saved = partial.state
        self.states: dict[int, State] = {}
        self.done: set[int] = set()
        self.started = self.shown = time.perf_counter()
        self.saver: threading.Thread | None = None
        self.failure: BaseException | None = None
        self.stopping = threading.Event()

    def place(self, number: int, block: Block, result: Result) -> list[Place]:
        """Where the data of the next block goes; raises ValueError for what must stop the run."""
        before = self.placed
        lines = before.lines if block.start else 0
        if result.fatal:
            line, message = result.fatal
            raise ValueError(f"{block.path}, line {lines + line + 1}, {message}")
        reported = before.reported
        for first, last, message in result.errors:
            numbers = f"line {lines + first + 1}"
            if last > first:
                numbers = f"lines {lines + first + 1} to {lines + last + 1}"
            if not self.skip:
                raise ValueError(f"{block.path}, {numbers}: {message}")
            reported = self.partial.report(f"{block.path}, {numbers}: {message}")
        places = [
            Place(p.tokens + k.tokens, p.sequences + k.sequences, p.counts + k.counts)
            for p, k in zip(before.places, result.keys, strict=True)
        ]
        self.placed = State(
            places=tuple(places),
            blocks=number + 1,
            lines=lines + result.lines,
            position=block.position,
            documents=before.documents + sum(k.documents for k in result.keys),
            empty=before.empty + sum(k.empty for k in result.keys),
            text_bytes=before.text_bytes + sum(k.text_bytes for k in result.keys),
            bad_lines=before.bad_lines + result.bad_lines,
            reported=reported,
        )
        self.states[number] = self.placed
        return list(before.places)

    def written(self, number: int) -> None:
        """A block's data is in the files."""
        self.done.add(number)
        while self.saved.blocks in self.done:
            number = self.saved.blocks
            self.done.remove(number)
            self.saved = self.states.pop(number)

    def tick(self) -> None:
        if self.saver is None:  # only now: a process with threads must not fork
            self.saver = threading.Thread(target=self._save_often, daemon=True)
            self.saver.start()
        if self.failure:
            raise self.failure
        now = time.perf_counter()
        if self.on_progress and now - self.shown > 0.2:
            self.shown = now
            self.on_progress(self._progress())

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        if self.saver:
            self.saver.join()
        if self.on_progress:
            self.on_progress(self._progress())

    def _progress(self) -> Progress:
        start, now = self.partial.state, self.placed
        return Progress(
            position=now.position,
            total=self.total,
            documents=now.documents,
            text_bytes=now.text_bytes,
            seconds=time.perf_counter() - self.started,
            resumed_position=start.position,
            resumed_documents=start.documents,
            resumed_text_bytes=start.text_bytes,
        )

    def _save_often(self) -> None:
        last = self.saved
        while not self.stopping.wait(SAVE_INTERVAL):
            state = self.saved
            if state is not last:
                try:
                    self.partial.save(state)
                except BaseException as error:
                    self.failure = error
                    return
                last = state


def _count_blocks(sources: Sequence[Source], block_bytes: int) -> int:
    """How many blocks there are, 0 if reading alone can tell."""
    if not all(source.seekable for source in sources):
        return 0
    return max(1, sum(-(-source.size // block_bytes) for source in sources))


def _cores() -> int:
    if sys.platform == "linux":  # those this process may use, as in a container
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _dtype(tokenizer: Tokenizer, name: str | None) -> np.dtype:
    if name is None:
        return best_dtype(tokenizer.vocab_size)
    integers: dict[str, np.dtype] = {str(d.name): d for d in DTYPE_CODES if d.kind in "iu"}
    if name not in integers:
        raise ValueError(f"dtype {name!r}: expected one of {', '.join(integers)}")
    limit = int(np.iinfo(integers[name].str).max)
    if tokenizer.vocab_size - 1 > limit:
        raise ValueError(
            f"tokenizer {tokenizer.name} has {tokenizer.vocab_size:,} entries, {name} holds ids up "
            f"to {limit:,}; leave --dtype out or take int32"
        )
    return integers[name]


def _check_complete(state: State, sources: Sequence[Source], keys: tuple[str, ...]) -> None:
    names = ", ".join(source.path for source in sources[:3])
    if len(sources) > 3:
        names += f" and {len(sources) - 3} more"
    for key, place in zip(keys, state.places, strict=True):
        if not place.sequences:
            found = f"{state.empty} empty, {state.bad_lines} bad lines"
            raise ValueError(f"no document with text under {key!r} in {names} ({found})")
    for source in sources:
        if source.path != STDIN:
            status = os.stat(source.path)
            if (status.st_size, status.st_mtime_ns) != (source.size, source.modified_ns):
                raise ValueError(f"{source.path}: changed while it was being read; run again")
