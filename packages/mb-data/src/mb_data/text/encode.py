"""From a block to tokens: what a worker process does, as a function of the block alone.

In each block one document is encoded a second time, by the tokenizer's readable twin, and compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mb_data.text.parse import Problems, Texts, parse_block
from mb_data.text.partial_output import Place, sum_of
from mb_data.text.reading import Block
from mb_data.text.sentences import SentenceSplitter
from mb_data.tokenizer import Tokenizer

CHECKED_LETTERS = 512  # of one document a block: some 0.3 ms of 25


@dataclass(frozen=True)
class Job:
    """What to do with every block.

    ``keys`` are the values of each line's object to encode, ``splitter`` cuts them into sentences.
    ``bos`` is the token that begins each document, if any. With ``keep_empty`` a text without
    tokens is a document of no sequence.
    """

    tokenizer: Tokenizer
    keys: tuple[str, ...]
    append_eod: bool
    bos: int | None
    dtype: np.dtype
    max_line_bytes: int
    splitter: SentenceSplitter | None = None
    keep_empty: bool = False


class Tokens(NamedTuple):
    """Documents of one key: S sequences in D documents, in order.

    Those without tokens are gone, unless the job keeps them.
    """

    tokens: npt.NDArray  # [n], in the job's dtype
    sizes: npt.NDArray[np.int32]  # [S]
    counts: npt.NDArray[np.int32]  # [D], sequences of each document; empty if all have one
    documents: int
    empty: int
    text_bytes: int

    @property
    def arrays(self) -> tuple[npt.NDArray, npt.NDArray, npt.NDArray]:
        """For the files of ``PartialOutput.key_files``."""
        return self.tokens, self.sizes, self.counts


class Result(NamedTuple):
    """What a worker reports of a block: how much is in it, and what was wrong.

    ``lengths`` and ``sums`` are of each key's arrays; ``documents`` and the like are of all keys
    together.
    ``errors`` holds (first line, last line, message), lines counted from 0 within the block.
    ``fatal`` is the line and message of a document on which two implementations disagree.
    ``careful`` counts documents that the tokenizer left to its readable twin.
    """

    lengths: list[Place]
    sums: list[Place]
    documents: int
    empty: int
    text_bytes: int
    lines: int
    bad_lines: int
    errors: list[tuple[int, int, str]]
    fatal: tuple[int, str] | None
    careful: int


def encode_block(job: Job, block: Block) -> tuple[list[npt.NDArray], Result]:
    """Parse and encode all documents of a block: tokens, sizes and counts of each key, by turns,
    for the files of ``PartialOutput.key_files``; and what to report of them."""
    careful = job.tokenizer.careful_documents
    problems = Problems()
    texts = parse_block(block, job.keys, job.max_line_bytes, problems)
    try:
        encoded = [_encode(job, column) for column in texts.columns]
    except ValueError:
        texts = _without_refused(job, texts, problems)
        encoded = [_encode(job, column) for column in texts.columns]
    careful = job.tokenizer.careful_documents - careful
    fatal = None
    documents = len(texts.numbers)
    for key, (_, unit) in zip(job.keys, encoded, strict=True):
        if documents and not fatal:
            row = (block.start >> 10) * 2_654_435_761 % documents  # any, but always the same
            difference = _compare(job, *unit(row))
            if difference:
                fatal = texts.numbers[row], f"{key!r}: {difference}"
    keys = [tokens for tokens, _ in encoded]
    result = Result(
        lengths=[Place(*map(len, k.arrays)) for k in keys],
        sums=[Place(*map(sum_of, k.arrays)) for k in keys],
        documents=sum(k.documents for k in keys),
        empty=sum(k.empty for k in keys),
        text_bytes=sum(k.text_bytes for k in keys),
        lines=texts.lines,
        bad_lines=problems.count,
        errors=sorted(problems.errors),
        fatal=fatal,
        careful=careful,
    )
    return [array for k in keys for array in k.arrays], result


def _without_refused(job: Job, texts: Texts, problems: Problems) -> Texts:
    """Without the documents that the tokenizer itself refuses; those become problems."""
    kept = []
    for row, document in enumerate(zip(*texts.columns, strict=True)):
        try:
            for text in document:
                _encode(job, [text])
            kept.append(row)
        except ValueError as error:
            problems.add(texts.numbers[row], str(error))
    columns = [[column[row] for row in kept] for column in texts.columns]
    return Texts(columns, [texts.numbers[row] for row in kept], texts.lines)


Unit = tuple[bytes, npt.NDArray]


def _encode(job: Job, texts: list[bytes]) -> tuple[Tokens, Callable[[int], Unit]]:
    """Tokens of some documents; and a function giving one document's first text and tokens."""
    return _encode_whole(job, texts) if job.splitter is None else _encode_split(job, texts)


def _encode_whole(job: Job, texts: list[bytes]) -> tuple[Tokens, Callable[[int], Unit]]:
    """Encode each document as one sequence."""
    append = job.append_eod and job.bos is None  # beside a bos it is _framed's
    tokens, lengths = job.tokenizer.encode_documents(texts, append_eod=append)
    starts = lengths.cumsum() - lengths
    sizes = lengths[lengths > 0]
    framed = tokens
    if job.bos is not None:
        framed, sizes = _framed(job, tokens, sizes, np.ones(len(sizes), dtype=np.int64))

    def text(row: int) -> Unit:
        start, size = int(starts[row]), int(lengths[row])
        return texts[row], tokens[start : start + size - (append and size > 0)]

    counts = (lengths > 0) if job.keep_empty else np.zeros(0)
    done = Tokens(
        _stored(job, framed),
        sizes.astype(np.int32),
        counts=counts.astype(np.int32),
        documents=len(texts) if job.keep_empty else len(sizes),
        empty=len(texts) - len(sizes),
        text_bytes=sum(map(len, texts)),
    )
    return done, text


def _encode_split(job: Job, texts: list[bytes]) -> tuple[Tokens, Callable[[int], Unit]]:
    """Encode each sentence of a document as a sequence."""
    assert job.splitter is not None
    split = [job.splitter(text.decode()) for text in texts]
    sentences = [sentence.encode() for document in split for sentence in document]
    tokens, lengths = job.tokenizer.encode_documents(sentences)
    starts = lengths.cumsum() - lengths
    document_of = np.repeat(np.arange(len(texts)), [len(document) for document in split])
    kept = lengths > 0
    counts = np.bincount(document_of[kept], minlength=len(texts))
    full = counts[counts > 0]
    framed, sizes = _framed(job, tokens, lengths[kept], full)
    if not job.keep_empty:
        counts = full

    def first_sentence(row: int) -> Unit:
        sentence = int(np.searchsorted(document_of, row))
        if sentence == len(document_of) or document_of[sentence] != row:
            return b"", tokens[:0]
        start = int(starts[sentence])
        return sentences[sentence], tokens[start : start + int(lengths[sentence])]

    done = Tokens(
        _stored(job, framed),
        sizes.astype(np.int32),
        counts=counts.astype(np.int32),
        documents=len(counts),
        empty=len(texts) - len(full),
        text_bytes=sum(map(len, texts)),
    )
    return done, first_sentence


def _stored(job: Job, tokens: npt.NDArray) -> npt.NDArray:
    """Tokens in the job's dtype; ValueError for one that is beyond the vocabulary, and so perhaps
    beyond that dtype, in which it would be another."""
    if tokens.size and tokens.max() >= job.tokenizer.vocab_size:
        raise ValueError(
            f"tokenizer {job.tokenizer.name} gave token {tokens.max()}, but its vocab_size is "
            f"{job.tokenizer.vocab_size}: that has to count all ids, of special tokens too"
        )
    return tokens.astype(job.dtype, copy=False)


def _framed(
    job: Job, tokens: npt.NDArray, sizes: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
) -> tuple[npt.NDArray, npt.NDArray[np.int64]]:
    """Tokens with those that begin and end each document, in its first and last sequence.

    Args:
        sizes: of all sequences; counts: sequences of each document.
    """
    last = counts.cumsum() - 1
    first = last + 1 - counts
    ends = sizes.cumsum()
    starts = ends - sizes
    sizes = sizes.copy()
    where, values = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=tokens.dtype)]
    # The end of a document before the start of the next one, which is the same place.
    if job.append_eod:
        where.append(ends[last])
        values.append(np.full(len(last), job.tokenizer.eod, dtype=tokens.dtype))
        sizes[last] += 1
    if job.bos is not None:
        where.append(starts[first])
        values.append(np.full(len(first), job.bos, dtype=tokens.dtype))
        sizes[first] += 1
    return np.insert(tokens, np.concatenate(where), np.concatenate(values)), sizes


def _compare(job: Job, text: bytes, tokens: npt.NDArray) -> str | None:
    """What differs between a text's tokens and those of the tokenizer's twin, if anything."""
    letters = text.decode()
    expected = job.tokenizer.reference_start(letters, CHECKED_LETTERS)
    if expected is None:
        return None
    got = (tokens if len(letters) <= CHECKED_LETTERS else tokens[: len(expected)]).tolist()
    if got == expected:
        return None
    pairs = zip(got, expected, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(got), len(expected)))
    offset = len(job.tokenizer.decode(expected[:place]))
    return (
        f"the engine and its readable twin differ at token {place}, letter {offset}: "
        f"{got[place : place + 3]} and {expected[place : place + 3]} for "
        f"{letters[offset : offset + 20]!r}; please report it, and use --engine python meanwhile"
    )
