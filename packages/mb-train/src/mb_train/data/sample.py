"""The sample corpus: what a run without `--data-path` reads.

It is text that is on every machine: the running Python's own library, its source or, for tasks
that want sentences, its docstrings. It is written as JSON Lines and tokenized once, into the run
folder. `--mock-data` writes documents that count instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mb_data
import numpy as np
from mb_data import Tokenizer
from mb_data.indexed_dataset import best_dtype

from mb_train.folder.lock import lock_of
from mb_train.tasks import Task

# 5 MB of source is 2.1 M tokens, of which nine tenths are trained on: about 3,800 steps of
# `quickstart` see new samples only.
_SAMPLE_BYTES = 5_000_000
_MOCK_DOCUMENTS, _MOCK_LENGTH = 1000, 4096  # 2 M tokens


def sample_corpus(
    tokenizer: Tokenizer,
    task: Task,
    folder: Path,
    say: Callable[[str], None],
    *,
    mock: bool = False,
    own_end: bool = True,
) -> str:
    """Prefix of the sample corpus's token files, or the mock one's, made if they are not there.

    Args:
        task: whether its samples are of sentences.
        folder: to write into; several runs may do so at once.
        say: prints a line of progress.
        own_end: documents end as the tokenizer has it of itself; else the files are others.

    Raises:
        ValueError: the folder cannot be written.
    """
    words = _called(tokenizer)
    if not (own_end or task.sentences):
        words += f"-{tokenizer.eod}"
    name = "".join(c if c.isalnum() else "-" for c in words)
    output = folder / f"{'mock' if mock else 'sample'}-{name}"
    prefix = f"{output}_text_{'sentence' if task.sentences else 'document'}"

    def there() -> bool:
        found = Path(f"{prefix}.idx").exists() and Path(f"{prefix}.bin").exists()
        if found:
            say(f"data: {prefix}.bin, made by an earlier run")
        return found

    try:
        if there():
            return prefix
        folder.mkdir(parents=True, exist_ok=True)
        with lock_of(folder):  # runs without a folder of their own share this one
            if not there():
                if mock:
                    tokens = _write_mock_corpus(tokenizer, prefix)
                else:
                    tokens = _write_corpus(tokenizer, task.sentences, folder, output, say)
                say(f"data: {tokens}: {prefix}.bin")
    except OSError as error:
        raise ValueError(
            f"Cannot write the sample corpus into {folder}: {error.strerror or error}. Give "
            "--data-path, or a --save that can be written."
        ) from error
    return prefix


def _called(tokenizer: Tokenizer) -> str:
    """A tokenizer in the name of a file; one that is read from files by what it makes of a text."""
    if tokenizer.fingerprint.startswith(tokenizer.name):
        return tokenizer.name
    makes = f"{tokenizer.fingerprint}, {tokenizer.prepend_bos}"
    made = hashlib.sha256(makes.encode()).hexdigest()[:8]
    return f"{Path(tokenizer.name).name}-{made}"


def _write_corpus(
    tokenizer: Tokenizer, sentences: bool, folder: Path, output: Path, say: Callable[[str], None]
) -> str:
    """Write the text, if it is not there, and the token files; what they hold, in words."""
    common: dict[str, Any] = {"tokenizer": tokenizer, "workers": 1}
    if sentences:
        text = folder / "documentation.jsonl"
        if not text.exists():
            mb_data.write_documentation_corpus(text, max_bytes=_SAMPLE_BYTES)
            say(f"data: wrote {text}, the docstrings of Python's own library")
        # Titles first: what is there last says that all is.
        mb_data.preprocess(text, output, json_keys=("title",), **common)
        summary = mb_data.preprocess(text, output, split_sentences=True, **common)
    else:
        text = folder / "sample.jsonl"
        if not text.exists():
            mb_data.write_sample_corpus(text, max_bytes=_SAMPLE_BYTES)
            say(f"data: wrote {text}, the source of Python's own library")
        summary = mb_data.preprocess(text, output, append_eod=True, **common)
    return f"{summary.documents} documents, {summary.tokens} tokens in {summary.seconds:.1f} s"


def _write_mock_corpus(tokenizer: Tokenizer, prefix: str) -> str:
    """Documents as Megatron Core's mock data has them, 1, 2, 3, … and an end, fewer of them."""
    lengths = np.random.default_rng(0).integers(1, _MOCK_LENGTH, _MOCK_DOCUMENTS)
    with mb_data.IndexedDatasetBuilder(prefix, best_dtype(tokenizer.vocab_size)) as builder:
        for length in lengths:
            counted = np.arange(1, length) % tokenizer.vocab_size
            builder.add_document(np.append(counted, tokenizer.eod))
    return f"{len(lengths)} mock documents, {lengths.sum()} tokens"
