"""JSON Lines to token files: ``<prefix>_<key>_document.{bin,idx}``, as Megatron names them."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mb_data.indexed_dataset import IndexedDatasetBuilder, best_dtype
from mb_data.tokenizer import Tokenizer, load_tokenizer

BLOCK_BYTES = 2 << 20


@dataclass(frozen=True)
class Summary:
    """What a run did.

    ``documents`` counts what was written over all keys, ``empty`` what had no token and was left
    out, ``text_bytes`` the UTF-8 of the texts, ``outputs`` the prefixes of the datasets written.
    """

    documents: int
    tokens: int
    text_bytes: int
    empty: int
    seconds: float
    outputs: tuple[str, ...]


def preprocess(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] = "gpt2",
    json_keys: Sequence[str] = ("text",),
    append_eod: bool = False,
    workers: int | None = None,
) -> Summary:
    """Tokenize JSON Lines files into indexed datasets, one per key.

    Args:
        inputs: one path or several, each with one JSON object per line.
        output_prefix: ``out/wiki`` gives ``out/wiki_text_document.bin`` and ``.idx``.
        tokenizer: name or file for ``load_tokenizer``.
        json_keys: which values of the object to tokenize.
        append_eod: end each document with the tokenizer's end-of-document token.
        workers: processes that encode; the number of cores by default.

    Raises:
        ValueError: a line is no JSON object, lacks a key or holds no text there; the file and the
            line are named. Nothing is left under the output's name.
        FileNotFoundError: an input, or the directory of the output, is missing.
    """
    started = time.perf_counter()
    paths = [inputs] if isinstance(inputs, (str, os.PathLike)) else list(inputs)
    for path in paths:
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path}: no such file")
    prefix = os.fspath(output_prefix)
    if not Path(prefix).parent.is_dir():
        raise FileNotFoundError(f"{Path(prefix).parent}: no such directory for the output")
    encoder = load_tokenizer(tokenizer)
    if append_eod:
        encoder.special_id("eod")
    dtype = best_dtype(encoder.vocab_size)
    encode = partial(_encode_block, encoder, tuple(json_keys), append_eod, dtype)
    outputs = tuple(f"{prefix}_{key}_document" for key in json_keys)
    documents = tokens = text_bytes = empty = 0
    blocks = (block for path in paths for block in _blocks(Path(path)))
    with ExitStack() as stack:
        builders = [stack.enter_context(IndexedDatasetBuilder(output, dtype)) for output in outputs]
        workers = workers or os.cpu_count() or 1
        if workers > 1:
            pool = stack.enter_context(multiprocessing.Pool(workers, _start, (encode,)))
            results = pool.imap(_work, blocks)
        else:
            results = map(encode, blocks)
        for result in results:
            for builder, (values, lengths, size) in zip(builders, result, strict=True):
                kept = lengths[lengths > 0]
                builder.add_documents(values, kept)
                documents += len(kept)
                empty += len(lengths) - len(kept)
                tokens += len(values)
                text_bytes += size
        if not documents:
            raise ValueError(f"no document in {', '.join(map(str, paths))}")
    seconds = time.perf_counter() - started
    return Summary(documents, tokens, text_bytes, empty, seconds, outputs)


Block = tuple[str, int, bytes]
Encoded = list[tuple[npt.NDArray, npt.NDArray[np.int64], int]]


def _blocks(path: Path) -> Iterator[Block]:
    """Whole lines of a file in blocks, with the number of the first line."""
    number = 1
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            block += file.readline()
            yield str(path), number, block
            number += block.count(b"\n")


def _encode_block(
    encoder: Tokenizer, keys: tuple[str, ...], append_eod: bool, dtype: np.dtype, block: Block
) -> Encoded:
    path, number, data = block
    texts: dict[str, list[bytes]] = {key: [] for key in keys}
    for offset, line in enumerate(data.split(b"\n")):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError(f"expected a JSON object, got {type(record).__name__}")
            for key in keys:
                if key not in record:
                    raise ValueError(f"no key {key!r}; the keys are {', '.join(record)}")
                if not isinstance(record[key], str):
                    kind = type(record[key]).__name__
                    raise ValueError(f"the value of {key!r} must be text, got {kind}")
                texts[key].append(record[key].encode())
        except ValueError as error:
            raise ValueError(f"{path}, line {number + offset}: {error}") from None
    result: Encoded = []
    for values in texts.values():
        tokens, lengths = encoder.encode_documents(values)
        if append_eod:
            full = lengths > 0
            tokens = np.insert(tokens, lengths[full].cumsum(), encoder.eod)
            lengths = lengths + full
        result.append((tokens.astype(dtype), lengths, sum(map(len, values))))
    return result


_encode: partial[Encoded]  # of a worker process, from its start to its end


def _start(encode: partial[Encoded]) -> None:
    global _encode
    _encode = encode


def _work(block: Block) -> Encoded:
    return _encode(block)
