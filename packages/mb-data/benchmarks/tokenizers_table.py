"""Which tokenizer files reach the engine, how fast, and whether it differs from their library.

    python packages/mb-data/benchmarks/tokenizers_table.py [FILE ...]

Each FILE is anything that ``load_tokenizer`` takes. Without any, files of the structure of today's
models are made: GPT-2's vocabulary under their patterns and normalization, and small SentencePiece
models. Text is Python's standard library. Prints a Markdown table: MB of text a processor second
on one core, warm, of the engine and of the library (or the readable twin) that judges it, and how
many documents differ.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mb_data import Tokenizer, load_tokenizer, write_sample_corpus

TESTS = Path(__file__).parents[1] / "tests"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--megabytes", type=float, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        corpus = write_sample_corpus(
            folder / "corpus.jsonl", max_bytes=int(options.megabytes * 1e6)
        )
        texts = [json.loads(line)["text"] for line in corpus.read_text("utf-8").splitlines()]
        files = {str(path): path for path in options.files} or structures(folder, texts)
        print("| file | engine | MB/s | judge | MB/s | documents that differ |")
        print("|---|---|---|---|---|---|")
        for name, path in files.items():
            row(name, path, texts)


def row(name: str, path: Path, texts: list[str]) -> None:
    tokenizer = load_tokenizer(path)
    data = [text.encode() for text in texts]
    size = sum(map(len, data)) / 1e6
    tokenizer.encode_documents(data)
    seconds, (tokens, lengths) = measured(lambda: tokenizer.encode_documents(data))
    ends = lengths.cumsum().tolist()
    rows = [tokens[end - n : end].tolist() for n, end in zip(lengths, ends, strict=True)]
    label, judge = find_judge(path, tokenizer)
    few = slice(None, None, 4)
    slow, expected = measured(lambda: [judge(text) for text in texts[few]])
    part = sum(map(len, data[few])) / 1e6
    differ = sum(a != b for a, b in zip(rows[few], expected, strict=True))
    print(
        f"| {name} | {getattr(tokenizer, 'engine', '')} | {size / seconds:.0f} | {label} | "
        f"{part / slow:.1f} | {differ} of {len(expected)} |",
        flush=True,
    )


def find_judge(path: Path, tokenizer: Tokenizer) -> tuple[str, Callable[[str], list[int]]]:
    """The library a file belongs to, where there is one; else the readable twin."""
    library = getattr(tokenizer, "library", "python")
    if path.name == "tokenizer.json":
        library = "tokenizers"
    twin = load_tokenizer(path, engine=library)
    return "readable twin" if library == "python" else library, twin.encode


def measured(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.process_time()
    result = work()
    return time.process_time() - started, result


def structures(folder: Path, texts: list[str]) -> dict[str, Path]:
    """Files like those of today's models, made as the tests make them."""
    import sentencepiece

    sys.path.insert(0, str(TESTS))
    from tokenizer_helpers import STRUCTURES, bpe_json

    files = {}
    for name, structure in STRUCTURES.items():
        path = folder / name / "tokenizer.json"
        path.parent.mkdir()
        path.write_text(json.dumps(bpe_json(*structure)))
        files[f"{name} (tokenizer.json)"] = path
    runs = ["\n" * n for n in range(2, 9)] + ["▁" * n for n in range(2, 32)]
    for name, options in {
        "llama-2": {"add_dummy_prefix": True},
        "gemma": {"add_dummy_prefix": False, "user_defined_symbols": runs},
    }.items():
        path = folder / f"{name}.model"
        with open(path, "wb") as file:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=(text[:2000] for text in texts),
                model_writer=file,
                vocab_size=2000,
                model_type="bpe",
                byte_fallback=True,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                minloglevel=2,
                **options,
            )
        files[f"{name} (.model)"] = path
        description, _ = load_tokenizer(path).description()
        described = folder / f"{name}-json" / "tokenizer.json"
        described.parent.mkdir()
        described.write_text(json.dumps(description))
        files[f"{name} (tokenizer.json)"] = described
    return files


if __name__ == "__main__":
    sys.exit(main())
