"""Text to token files: ``<prefix>_<key>_document.{bin,idx}``, as Megatron names them.

The input is read in blocks of about 4 MB of whole documents, which worker processes parse, encode
and write to their final place (``mb_data.text.run``); the state on disk lets a killed run go on
(``partial_output``). The output depends on the input and the settings alone, not on the workers.

Memory: a worker holds its tokenizer, up to three blocks with their tokens, and what the engine
remembers of words, which it drops at 256 MB: together some 0.6 GB at worst, 0.2 GB on common text.
A line longer than a block takes up to 30 bytes for each of its own, so 1.9 GB at the limit,
``max_line_bytes`` = 64 MB. None of this depends on the size of the input, but for Parquet, whose
row groups are read as they are.
"""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mb_data.dataset_builder import check_no_directory, check_output_prefix
from mb_data.indexed_dataset import DTYPE_CODES, best_dtype
from mb_data.system import cores
from mb_data.text.partial_output import PartialOutput
from mb_data.text.progress import Progress
from mb_data.text.sources import TEXT_UNITS, Source, find_sources
from mb_data.tokenizer import Tokenizer, load_tokenizer

FORMAT = 6  # of the partial output: raise it when a resumed run would differ
BLOCK_BYTES = 4 << 20
MAX_LINE_BYTES = 64 << 20


@dataclass(frozen=True)
class Summary:
    """What a run did, all keys together.

    ``documents`` were written; ``empty`` ones had no token and were left out, or are among them
    with ``keep_empty``. ``bad_lines`` were skipped and are listed in ``bad_lines_file``.
    ``careful`` documents have letters that are too new for some library, and were encoded by the
    slow, readable implementation. ``text_bytes`` is the size of the texts in UTF-8;
    ``resumed_text_bytes`` of them had been done by an earlier, interrupted run. ``outputs`` are the
    prefixes of the datasets.
    """

    documents: int
    tokens: int
    text_bytes: int
    empty: int
    bad_lines: int
    bad_lines_file: str | None
    careful: int
    seconds: float
    resumed_text_bytes: int
    outputs: tuple[str, ...]


def preprocess(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | Tokenizer = "gpt2",
    json_keys: str | Sequence[str] = ("text",),
    append_eod: bool = False,
    prepend_bos: bool | None = None,
    split_sentences: bool = False,
    language: str = "english",
    keep_newlines: bool = False,
    keep_empty: bool = False,
    dtype: str | None = None,
    on_error: str = "stop",
    restart: bool = False,
    shard: tuple[int, int] | None = None,
    text_unit: str = "line",
    workers: int | None = None,
    max_line_bytes: int = MAX_LINE_BYTES,
    block_bytes: int = BLOCK_BYTES,
    on_progress: Callable[[Progress], None] | None = None,
) -> Summary:
    """Tokenize JSON Lines, plain text or Parquet into indexed datasets, one per key.

    Args:
        inputs: files, directories, glob patterns, pipes, URLs that fsspec knows, or "-" for
            standard input, plain or compressed with gzip, bzip2, xz or Zstandard. Each line is
            one JSON object; ``.txt`` is plain text, Parquet is known by its first bytes.
        output_prefix: ``out/wiki`` gives ``out/wiki_text_document.bin`` and ``.idx``;
            ``out/wiki_text_sentence.*`` with ``split_sentences``.
        tokenizer: name or file for ``load_tokenizer``, or the ``Tokenizer`` that it returned.
        json_keys: which values of the object to tokenize: a key, or several.
        append_eod: end each document with the tokenizer's end-of-document token.
        prepend_bos: begin each with its beginning-of-sequence token; by default the tokenizer
            decides, see ``Tokenizer``.
        split_sentences: make each sentence a sequence; ``language`` as Megatron's ``--lang``,
            ``keep_newlines`` keeps the white space after sentences.
        keep_empty: write a document of no sequence for a text without tokens, as Megatron Core
            does, so that document i is of line i under every key.
        dtype: of the tokens; by default uint16 where the vocabulary fits, else int32.
        on_error: "stop" at the first bad line or damaged archive, or "skip" it and list it.
        restart: drop what an interrupted run has left there.
        shard: (i, n), from 0: read the i-th of n parts of the input. The parts' outputs, merged in
            their order, are the bytes of one run over all of it.
        text_unit: what a document is in a ``.txt`` input, a "line" or the "file".
        workers: processes that encode; by default one for each core.
        max_line_bytes: a longer line is bad; bounds the memory.
        block_bytes: size of the unit of work.
        on_progress: called about five times a second.

    The workers are forked where that is safe. If this process runs other threads, or the system is
    not Linux, they are new processes: a script then needs ``if __name__ == "__main__":``.

    Raises:
        ValueError: wrong settings; a bad line, with file and line number; another run writing the
            same prefix, or one of other settings interrupted there.
        FileNotFoundError: an input, or the directory of the output, is missing.
        WorkerDiedError, OSError: a worker was killed, the disk is full.

    After an error, finished work is kept in ``<prefix>.partial``, and the same call, or one with
    ``on_error="skip"``, continues from there. If nothing is finished yet, nothing is left behind.
    """
    started = time.perf_counter()
    if isinstance(inputs, (str, os.PathLike)):
        inputs = [inputs]
    keys = (json_keys,) if isinstance(json_keys, str) else tuple(json_keys)
    # NumPy's numbers are as good, but JSON, which keeps them for a later run, does not know them.
    workers = operator.index(cores() if workers is None else workers)
    block_bytes, max_line_bytes = operator.index(block_bytes), operator.index(max_line_bytes)
    shard = None if shard is None else (operator.index(shard[0]), operator.index(shard[1]))
    sizes = {"workers": workers, "block_bytes": block_bytes, "max_line_bytes": max_line_bytes}
    _check_settings(keys, on_error, text_unit, shard, sizes)
    prefix = check_output_prefix(output_prefix)
    level = "sentence" if split_sentences else "document"
    outputs = tuple(check_output_prefix(f"{prefix}_{key}_{level}") for key in keys)
    # An earlier run may have left its list of bad lines among the texts of the input.
    report = os.path.realpath(check_no_directory(f"{prefix}_skipped.txt"))
    found = find_sources(inputs, text_unit=text_unit)
    sources = [source for source in found if os.path.realpath(source.path) != report]
    _check_sources(sources, keys, shard)
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = load_tokenizer(tokenizer)
    eod = tokenizer.special_id("eod") if append_eod else None
    bos = None
    if tokenizer.prepend_bos if prepend_bos is None else prepend_bos:
        bos = tokenizer.special_id("bos")

    # Here: whoever imports mb_data for its datasets need not wait for multiprocessing.
    from mb_data.text.encode import Job
    from mb_data.text.run import encode_sources
    from mb_data.text.sentences import SentenceSplitter

    splitter = SentenceSplitter(language, keep_newlines=keep_newlines) if split_sentences else None
    width = _dtype(tokenizer, dtype)
    job = Job(tokenizer, keys, append_eod, bos, width, max_line_bytes, splitter, keep_empty)
    settings: dict[str, Any] = {
        "format": FORMAT,
        "sources": [[s.path, s.size, s.version, s.unit] for s in sources],
        "shard": list(shard) if shard else None,
        "tokenizer": [tokenizer.name, tokenizer.fingerprint],
        "keys": list(keys),
        "eod": eod,
        "bos": bos,
        "sentences": [splitter.code, keep_newlines] if splitter else None,
        "dtype": job.dtype.str,
        "block_bytes": block_bytes,
        "keep_empty": keep_empty,
    }
    skip = on_error == "skip"
    resume = not any(source.stream for source in sources)
    with PartialOutput(
        prefix, outputs, job.dtype, settings, resume=resume, restart=restart
    ) as partial:
        tokenizer.prepare()  # once, for all workers that are forked
        _check_limits(partial, skip=skip, max_line_bytes=max_line_bytes)
        state = encode_sources(
            job,
            sources,
            partial,
            shard=shard,
            block_bytes=block_bytes,
            workers=workers,
            skip=skip,
            on_progress=on_progress,
        )
        partial.finish(state)
    return Summary(
        documents=state.documents,
        tokens=state.tokens,
        text_bytes=state.text_bytes,
        empty=state.empty,
        bad_lines=state.bad_lines,
        bad_lines_file=str(partial.report_target) if state.bad_lines else None,
        careful=state.careful,
        seconds=time.perf_counter() - started,
        resumed_text_bytes=partial.state.text_bytes,
        outputs=outputs,
    )


def _check_settings(
    keys: tuple[str, ...],
    on_error: str,
    text_unit: str,
    shard: tuple[int, int] | None,
    sizes: Mapping[str, int],
) -> None:
    """Raise ValueError for what is wrong whatever the input is."""
    if not keys or len(set(keys)) < len(keys):
        raise ValueError(f"JSON keys must be one or more different names, got {list(keys)}")
    for key in keys:
        if "/" in key or not key:
            raise ValueError(f"JSON key {key!r} cannot be part of a file's name")
    if on_error not in ("stop", "skip"):
        raise ValueError(f"on_error {on_error!r}: expected stop or skip")
    if text_unit not in TEXT_UNITS:
        raise ValueError(f"text_unit {text_unit!r}: expected {' or '.join(TEXT_UNITS)}")
    if shard is not None and not 0 <= shard[0] < shard[1]:
        raise ValueError(f"shard {shard}: expected (i, n) with i from 0 to n - 1")
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def _check_sources(
    sources: Sequence[Source], keys: tuple[str, ...], shard: tuple[int, int] | None
) -> None:
    """Raise ValueError for inputs that the settings do not go with."""
    if shard is not None and any(source.stream for source in sources):
        raise ValueError("a pipe cannot be read in shards: give files")
    texts = [source.path for source in sources if source.unit in TEXT_UNITS]
    if texts and len(keys) > 1:
        raise ValueError(f"{texts[0]} is plain text, without keys; give one --json-keys")


def _check_limits(partial: PartialOutput, *, skip: bool, max_line_bytes: int) -> None:
    """Raise ValueError if an interrupted run left lines out that this one would not."""
    before = partial.state
    if before.bad_lines and not skip:
        raise ValueError(
            f"{partial.directory} keeps a run that left out {before.bad_lines:,} bad lines; "
            "give --on-error skip to go on, or --restart to drop it"
        )
    if before.bad_lines and before.line_limit != max_line_bytes:
        raise ValueError(
            f"{partial.directory} keeps a run whose longest line was {before.line_limit:,} "
            "bytes; give that --max-line-mb again, or --restart to drop it"
        )


def _dtype(tokenizer: Tokenizer, name: str | None) -> np.dtype:
    integers: dict[str, np.dtype] = {str(d.name): d for d in DTYPE_CODES if d.kind in "iu"}
    if name is None:
        name = best_dtype(tokenizer.vocab_size).name
    if name not in integers:
        raise ValueError(f"dtype {name!r}: expected one of {', '.join(integers)}")
    limit = int(np.iinfo(integers[name].str).max)
    if tokenizer.vocab_size - 1 > limit:
        raise ValueError(
            f"tokenizer {tokenizer.name} has {tokenizer.vocab_size:,} entries, {name} holds ids up "
            f"to {limit:,}; give a wider --dtype"
        )
    return integers[name]
