"""The command line: ``mb-data preprocess``, ``mb-data sample-corpus``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mb_data.sample_corpus import DEFAULT_MAX_BYTES, write_sample_corpus


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; wrong input is one line on stderr and exit code 2."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"mb-data {options.command}: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mb-data", description="Text to tokens, in Megatron's file format."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    command = commands.add_parser("preprocess", help="tokenize JSON Lines")
    command.add_argument("--input", nargs="+", required=True, help="JSON Lines files")
    command.add_argument("--output-prefix", required=True, help="path without _<key>_document.bin")
    command.add_argument("--tokenizer", default="gpt2", help="name or file (default: gpt2)")
    command.add_argument("--json-keys", nargs="+", default=["text"], help="default: text")
    command.add_argument("--append-eod", action="store_true", help="end documents with a token")
    command.add_argument("--workers", type=int, help="processes (default: one per core)")
    command.set_defaults(run=_preprocess)

    command = commands.add_parser(
        "sample-corpus", help="write the standard library's sources as JSON Lines"
    )
    command.add_argument("output")
    command.add_argument("--max-bytes", type=int, default=DEFAULT_MAX_BYTES)
    command.set_defaults(run=_sample_corpus)
    return parser


def _preprocess(options: argparse.Namespace) -> None:
    from mb_data.preprocess import preprocess

    summary = preprocess(
        options.input,
        options.output_prefix,
        tokenizer=options.tokenizer,
        json_keys=options.json_keys,
        append_eod=options.append_eod,
        workers=options.workers,
    )
    megabytes = summary.text_bytes / 1e6
    print(
        f"{summary.documents:,} documents, {summary.tokens:,} tokens, {megabytes:,.1f} MB of text "
        f"in {summary.seconds:.1f} s ({megabytes / summary.seconds:.1f} MB/s): "
        f"{', '.join(f'{output}.bin' for output in summary.outputs)}"
    )


def _sample_corpus(options: argparse.Namespace) -> None:
    path = write_sample_corpus(options.output, max_bytes=options.max_bytes)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    sys.exit(main())
