"""Conversations to token files, ``<prefix>_<key>_document.{bin,idx}``.

A conversation is a document, and its sequences are, by turns, what is read and what is learned of
it; the format's mode of a sequence (see ``indexed_dataset``) says which: ``READ`` or ``LEARNED``.
Who does not look at the modes finds ordinary documents.
"""

from __future__ import annotations

import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mb_data.chat.conversation import TURNS, Written, conversation_of
from mb_data.chat.tokens import ChatTokenizer, Encoded
from mb_data.dataset_builder import (
    IndexedDatasetBuilder,
    check_no_directory,
    check_output_prefix,
)
from mb_data.indexed_dataset import best_dtype
from mb_data.samples.conversations import LEARNED, READ
from mb_data.system import written_whole
from mb_data.text.parquet import DamagedParquetError, read_rows
from mb_data.text.parse import ARRAY_TO_LINES
from mb_data.text.reading import Block, blocks, read_lines
from mb_data.text.sources import find_sources
from mb_data.tokenizer import load_tokenizer
from mb_data.untrusted import json_of
from mb_data.words import counted

BLOCK_BYTES, MAX_LINE_BYTES = 4 << 20, 64 << 20
TOGETHER = 256  # conversations that the library encodes at once, on all cores
MAX_MESSAGE = 1000  # letters said of a bad line: what it quotes may be all of the line
_MARK = b"\xef\xbb\xbf"  # of byte order, which some programs begin a file with


@dataclass(frozen=True)
class ChatSummary:
    """What ``preprocess_chats`` did.

    ``documents`` were made of ``conversations``: as many, but with ``turns="each"``. ``learned`` of
    the ``tokens`` are learned. ``bad_lines`` were skipped and are listed in ``bad_lines_file``.
    ``longest`` is the tokens of the longest document. ``output`` is the prefix of the dataset.
    """

    conversations: int
    documents: int
    tokens: int
    learned: int
    longest: int
    bad_lines: int
    bad_lines_file: str | None
    seconds: float
    output: str


def preprocess_chats(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str],
    key: str = "messages",
    turns: str = "all",
    variables: Mapping[str, Any] | None = None,
    on_error: str = "stop",
    max_line_bytes: int = MAX_LINE_BYTES,
    on_progress: Callable[[int], None] | None = None,
) -> ChatSummary:
    """Write conversations as their model reads them, and which tokens it is to learn.

    Args:
        inputs: files, directories, patterns, … of JSON Lines or Parquet, as for ``preprocess``.
            Each line has a list of messages with ``role`` and ``content`` (or ``from`` and
            ``value``), and perhaps a list ``tools``; the template knows what else a message may
            have.
        output_prefix: ``out/chats`` gives ``out/chats_messages_document.bin`` and ``.idx``.
        tokenizer: folder of a chat model, with tokenizer.json and its chat template.
        key: where the messages are.
        turns: which answers are learned: "all" in one document; "each" in a document of its own,
            which ends with it; only the "last". Templates that write earlier answers otherwise,
            without their thoughts for instance, ask for one of the latter two.
        variables: for the template, as ``{"enable_thinking": False}``.
        on_error: "stop" at the first bad line, or "skip" it and list it.
        max_line_bytes: a longer line is bad.
        on_progress: called with the number of conversations, each time some are done.

    Raises:
        ValueError: wrong settings, a folder without a template, a bad line with its file and
            number, no conversation at all.
        FileNotFoundError: an input, or the directory of the output, is missing.
        ModuleNotFoundError: Jinja2, tokenizers or a library for the input is not installed.

    After an error nothing is left behind, and what was there before is as it was. A warning says so
    if the template ends answers with no special token.
    """
    started = time.perf_counter()
    for name, value, known in (("turns", turns, TURNS), ("on_error", on_error, ("stop", "skip"))):
        if value not in known:
            raise ValueError(f"{name} {value!r}: expected one of {', '.join(known)}")
    if not key or "/" in key:
        raise ValueError(f"key {key!r} cannot be part of a file's name")
    prefix = check_output_prefix(output_prefix)
    output = check_output_prefix(f"{prefix}_{key}_document")
    report = check_no_directory(f"{prefix}_skipped.txt")
    chats = ChatTokenizer(os.fspath(tokenizer), variables)
    words = load_tokenizer(tokenizer)
    if isinstance(inputs, (str, os.PathLike)):
        inputs = [inputs]
    bad: list[str] = []

    def texts() -> Iterator[list[Written]]:
        for where, record in _records(inputs, key, max_line_bytes):
            try:
                if isinstance(record, ValueError):
                    raise record
                yield chats.texts(conversation_of(record, key), turns)
            except ValueError as error:
                said = f"{where}: {str(error)[:MAX_MESSAGE]}"
                if on_error == "stop":
                    raise ValueError(f"{said}; --on-error skip leaves bad lines out") from error
                bad.append(said)

    conversations = documents = tokens = learned = longest = endless = 0
    with IndexedDatasetBuilder(output, best_dtype(words.vocab_size)) as builder:
        made = texts()
        while some := list(itertools.islice(made, TOGETHER)):
            encoded = chats.encode([text for each in some for text in each])
            _add(builder, encoded)
            conversations += len(some)
            documents += len(encoded)
            tokens += sum(len(one.tokens) for one in encoded)
            learned += sum(int(one.learned.sum()) for one in encoded)
            longest = max(longest, *(len(one.tokens) for one in encoded))
            endless += sum(chats.end_of(one) is None for one in encoded)
            if on_progress is not None:
                on_progress(conversations)
        if not documents:
            raise ValueError(
                f"no conversation under {key!r} in {', '.join(map(str, inputs))} "
                f"({counted(len(bad), 'bad line')}{': ' + bad[0] if bad else ''})"
            )
    if endless:
        warnings.warn(
            f"{chats.template.name} puts no special token behind the last answer of {endless:,} of "
            f"{documents:,} documents, so that a model of them does not learn where to stop: let "
            "the template write the token that ends a text there",
            RuntimeWarning,
            stacklevel=2,
        )
    return ChatSummary(
        conversations=conversations,
        documents=documents,
        tokens=tokens,
        learned=learned,
        longest=longest,
        bad_lines=len(bad),
        bad_lines_file=_listed(bad, report),
        seconds=time.perf_counter() - started,
        output=output,
    )


def _records(
    inputs: Sequence[str | os.PathLike[str]], key: str, max_line_bytes: int
) -> Iterator[tuple[str, Any]]:
    """Where each line is, as ``chats.jsonl, line 7``, and its object, or what is wrong with it."""
    lines = 0
    for item in blocks(find_sources(inputs), BLOCK_BYTES, max_line_bytes):
        for block in [item] if isinstance(item, Block) else item.blocks():
            if not block.start:
                lines = 0
            noun = "row" if block.unit == "parquet" else "line"
            for record in _of_block(block, key, max_line_bytes):
                lines += 1
                if record is not None:
                    yield f"{block.path}, {noun} {lines}", record


def _of_block(block: Block, key: str, max_line_bytes: int) -> Iterator[Any]:
    """Objects, and errors in place of bad ones; None for a blank line."""
    if block.problem:
        yield ValueError(block.problem)
    elif block.unit == "parquet":
        try:
            for row in read_rows(block.path, range(block.start, block.stop), key, "tools"):
                yield {name: _given(value, kept="content") for name, value in row.items()}
        except DamagedParquetError as error:
            yield error
            yield from [None] * (error.rows - 1)
    elif block.unit != "json":
        raise ValueError(f"{block.path}: expected JSON Lines or Parquet, got plain text")
    else:
        for line in read_lines(block, max_line_bytes):
            yield _of_line(bytes(line).removeprefix(_MARK), max_line_bytes)


def _given(value: Any, *, kept: str | None = None) -> Any:
    """A value of a Parquet file without what is null in its objects: each of them has all fields
    there that any of them has, so that calls and tools would have those of all others. ``kept``
    stays in a message, though not within it."""
    if isinstance(value, dict):
        found = {name: one for name, one in value.items() if one is not None or name == kept}
        return {name: _given(one) for name, one in found.items()}
    return [_given(one, kept=kept) for one in value] if isinstance(value, list) else value


def _of_line(line: bytes, max_line_bytes: int) -> Any:
    if not line or line.isspace():
        return None
    if len(line) > max_line_bytes:
        return ValueError(f"longer than {max_line_bytes:,} bytes, the limit that bounds memory")
    try:
        return json_of(line.decode())
    except ValueError as error:
        hint = f"; {ARRAY_TO_LINES}" if line.lstrip().startswith(b"[") else ""
        return ValueError(f"{error}{hint}")


def _add(builder: IndexedDatasetBuilder, documents: Sequence[Encoded]) -> None:
    """Documents whose sequences begin where what is read changes to what is learned, and back."""
    lengths: list[npt.NDArray[np.int64]] = []
    modes: list[npt.NDArray[np.bool_]] = []
    for tokens, learned in documents:
        starts = np.flatnonzero(np.diff(learned, prepend=~learned[:1]))
        lengths.append(np.diff(starts, append=len(tokens)))
        modes.append(learned[starts])
    builder.add_documents(
        np.concatenate([one.tokens for one in documents]),
        np.concatenate(lengths),
        [len(each) for each in lengths],
        np.where(np.concatenate(modes), LEARNED, READ),
    )


def _listed(bad: Sequence[str], path: str) -> str | None:
    """The file that bad lines are listed in; one of an earlier run says nothing now."""
    if not bad:
        Path(path).unlink(missing_ok=True)
        return None
    with written_whole(path) as file:
        file.write("".join(f"{line}\n" for line in bad).encode(errors="backslashreplace"))
    return path
