"""The words that ``mb-data`` takes: a parser for each command."""

from __future__ import annotations

import argparse
import difflib
import os
from typing import Any, NoReturn

from mb_data import __version__
from mb_data.chat.conversation import TURNS
from mb_data.corpora.sample import DEFAULT_MAX_BYTES
from mb_data.text.sources import TEXT_UNITS
from mb_data.tokenizer.load import NAMES
from mb_data.tokenizer.megatron import MEGATRON_TYPES
from mb_data.untrusted import json_of

_IDLE: dict[str, dict[str, Any]] = {
    "--log-interval": {"type": int, "help": "progress is shown by time"},
    "--chunk-size": {"type": int, "help": "work is cut by bytes"},
    "--partitions": {"type": int, "help": "any number of workers writes one output"},
    "--keep-sequential-samples": {"action": "store_true", "help": "always kept"},
    "--find-optimal-num-workers": {"action": "store_true", "help": "one per core"},
    "--workers-to-check": {"nargs": "+", "type": int, "help": "for the flag above"},
    "--max-documents": {"type": int, "help": "the same"},
    "--performance-dir": {"help": "the same"},
    "--padded-vocab-size": {"type": int, "help": "the model's, of which the files say nothing"},
    "--trust-remote-code": {"action": "store_true", "help": "no code of a model is run"},
    "--tokenizer-hf-include-special-tokens": {"action": "store_true", "help": "the default"},
    "--tokenizer-metadata": {"help": "there is one kind of tokenizer"},
    "--legacy-tokenizer": {"action": "store_true", "help": "the same"},
    "--tokenizer-sentencepiece-legacy": {"action": "store_true", "help": "the same"},
    "--tokenizer-hf-use-fast": {"action": "store_true", "help": "the same"},
    "--tokenizer-hf-no-use-fast": {"action": "store_true", "help": "the same"},
    "--use-gigatoken": {"action": "store_true", "help": "the same"},
}

_RESULT = "path of the result without .bin or .idx"


class Parser(argparse.ArgumentParser):
    """No abbreviated flags, one line for a mistake, the nearest flag for an unknown one."""

    def __init__(self, **options: object) -> None:
        super().__init__(allow_abbrev=False, **options)  # ty: ignore[invalid-argument-type]

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def refuse(self, word: str) -> NoReturn:
        near = difflib.get_close_matches(word.split("=")[0], self._option_string_actions, n=1)
        hint = f", did you mean {near[0]}?" if near else ""
        self.error(f"unknown argument {word}{hint}")


def command_line() -> Parser:
    """The parser of all commands; ``idle`` of ``preprocess`` names what has no effect."""
    parser = Parser(prog="mb-data", description="Text to tokens, in Megatron's file format.")
    parser.add_argument("--version", action="version", version=f"mb-data {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)

    def add(name: str, about: str) -> Parser:
        return commands.add_parser(name, help=about, description=about)

    command = add("preprocess", "Text, JSON Lines or Parquet to tokens.")
    _add_preprocess(command)
    _add_tokenizer(command)

    command = add("chats", "Conversations to tokens, those to be learned marked.")
    _add_chats(command)

    command = add("inspect", "What is in these files?")
    command.add_argument("prefix", nargs="+", help="path without .bin or .idx")

    command = add("validate", "Are these files whole?")
    command.add_argument("prefix", nargs="+", help="path without .bin or .idx")
    command.add_argument("--vocab-size", type=int, help="every token must be below it")

    command = add("merge", "Join datasets in the order given.")
    command.add_argument(
        "--input",
        nargs="+",
        action="extend",
        required=True,
        help="prefixes, or directories for all in them",
    )
    command.add_argument("--output-prefix", required=True, help=_RESULT)

    command = add("shuffle", "Write the documents in a random order.")
    command.add_argument("--input", required=True, help="path without .bin or .idx")
    command.add_argument("--output-prefix", required=True, help=_RESULT)
    command.add_argument("--seed", type=int, default=1234, help="of the order; default 1234")

    command = add("decode", "Show the text of documents.")
    command.add_argument("prefix", help="path without .bin or .idx")
    command.add_argument("document", type=int, nargs="+", help="counted from 0")
    _add_tokenizer(command)

    command = add("convert", "Write a dataset of Megatron's former format, TNTIDX, in today's.")
    command.add_argument("--input", required=True, help="path without .bin or .idx")
    command.add_argument("--output-prefix", required=True, help=_RESULT)

    command = add("sample-corpus", "Write the sources of Python's standard library as JSON Lines.")
    command.add_argument("output", help="file to write")
    command.add_argument(
        "--max-bytes", type=int, default=DEFAULT_MAX_BYTES,
        help=f"stop at so much text; default {DEFAULT_MAX_BYTES}",
    )  # fmt: skip

    command = add(
        "machine-corpus",
        "Write the machine's sources and documentation as JSON Lines, each text once.",
    )
    command.add_argument("output", help="file to write")
    command.add_argument("--max-bytes", type=int, help="stop at so much text; default all")
    command.add_argument("--seed", type=int, default=1234, help="of the order; default 1234")
    command.add_argument(
        "--add", action="append", default=[], metavar="NAME=FOLDER",
        help="a folder to take as well, under that name; several times for several",
    )  # fmt: skip
    command.add_argument("--only-added", action="store_true", help="nothing but --add")
    command.add_argument("--workers", type=int, default=1, help="processes that read; default 1")

    for command in commands.choices.values():
        command.set_defaults(parser=command)
    return parser


def _add_preprocess(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--input",
        nargs="+",
        action="extend",
        help="JSON Lines, .txt or Parquet: files, directories, quoted patterns, pipes, URLs, or - "
        "for stdin; plain, .gz, .bz2, .xz or .zst",
    )
    command.add_argument(
        "--output-prefix", help="OUT gives OUT_<key>_document.bin and .idx, or _sentence"
    )
    command.add_argument("--json-keys", nargs="+", action="extend", help="default: text")
    command.add_argument("--append-eod", action="store_true", help="end documents with a token")
    command.add_argument(
        "--prepend-bos",
        action=argparse.BooleanOptionalAction,
        help="begin documents with a token (default: as the --tokenizer-type does)",
    )
    command.add_argument(
        "--tokenizer-hf-no-include-special-tokens",
        action="store_false",
        dest="prepend_bos",
        default=None,
        help="Megatron's --no-prepend-bos",
    )
    command.add_argument("--split-sentences", action="store_true", help="a sequence per sentence")
    command.add_argument("--lang", default="english", help="of the sentences (default: english)")
    command.add_argument(
        "--keep-newlines",
        action="store_true",
        help="keep the white space after sentences",
    )
    command.add_argument(
        "--keep-empty",
        action="store_true",
        help="write a document without tokens for an empty text, as Megatron Core does, so that "
        "those of several --json-keys remain side by side",
    )
    command.add_argument("--workers", type=int, help="processes (default: one per core)")
    command.add_argument(
        "--on-error",
        choices=["stop", "skip"],
        default="stop",
        help="at a bad line; skipped ones are listed in <prefix>_skipped.txt (default: stop)",
    )
    command.add_argument(
        "--restart", action="store_true", help="drop what an interrupted run has left"
    )
    command.add_argument(
        "--shard",
        type=_shard,
        help="I/N: read the I-th of N parts, from 0; slurm: as this task of a Slurm array",
    )
    command.add_argument(
        "--text-unit",
        choices=TEXT_UNITS,
        default="line",
        help="a document of a .txt (default: line)",
    )
    command.add_argument(
        "--max-line-mb", type=_megabytes, default=64.0, help="a longer line is bad (default: 64)"
    )
    command.add_argument("--dtype", help="of the tokens (default: uint16 if they fit, or int32)")
    command.add_argument(
        "--dataset-impl", choices=["mmap"], default="mmap", help="the one format there is"
    )
    command.add_argument("--quiet", action="store_true", help="no progress on stderr")
    group = command.add_argument_group("Megatron's, without effect here")
    idle = [group.add_argument(flag, **how).dest for flag, how in _IDLE.items()]
    command.set_defaults(idle=idle)


def _add_chats(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--input", nargs="+", action="extend", required=True,
        help="JSON Lines or Parquet with a list of messages in each line; as for preprocess",
    )  # fmt: skip
    command.add_argument(
        "--output-prefix", required=True, help="OUT gives OUT_<key>_document.bin and .idx"
    )
    command.add_argument(
        "--tokenizer", required=True, metavar="FOLDER",
        help="of a chat model: tokenizer.json and its chat template",
    )  # fmt: skip
    command.add_argument("--json-key", default="messages", help="default: messages")
    command.add_argument(
        "--turns", choices=TURNS, default="all",
        help="answers to learn: all in one text, each in a text that ends with it, only the last",
    )  # fmt: skip
    command.add_argument(
        "--template-variables", type=_object, metavar="JSON",
        help="""for the template, as '{"enable_thinking": false}'""",
    )  # fmt: skip
    command.add_argument(
        "--on-error", choices=["stop", "skip"], default="stop",
        help="at a bad line; skipped ones are listed in <prefix>_skipped.txt (default: stop)",
    )  # fmt: skip
    command.add_argument(
        "--max-line-mb", type=_megabytes, default=64.0, help="a longer line is bad (default: 64)"
    )
    command.add_argument("--quiet", action="store_true", help="no progress on stderr")


def _object(text: str) -> dict[str, Any]:
    try:
        found = json_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: expected a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text}: expected a JSON object")
    return found


def _megabytes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1 << 20:
        raise argparse.ArgumentTypeError(f"{text}: expected megabytes, more than 0, at most a TB")
    return value


def _shard(text: str) -> tuple[int, int]:
    if text == "slurm":
        try:
            names = (f"SLURM_ARRAY_TASK_{name}" for name in ("ID", "MIN", "MAX", "COUNT"))
            number, first, last, count = (int(os.environ[name]) for name in names)
        except KeyError as error:
            raise argparse.ArgumentTypeError(f"slurm: {error} is not set; no array job") from None
        # Else it is likely that a few tasks of a larger array are given again.
        if first > 1 or last - first + 1 != count:
            raise argparse.ArgumentTypeError(
                f"slurm: expected an array from 0 or 1 without gaps, got {count} tasks from "
                f"{first} to {last}; say --shard I/N yourself, N the tasks of the whole array"
            )
        return number - first, count
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"{text}: expected I/N, I from 0 to N - 1, as in 0/8")
    return int(index), int(count)


def _add_tokenizer(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("tokenizer")
    group.add_argument("--tokenizer", help=f"{', '.join(NAMES)}, or a file (default: gpt2)")
    group.add_argument("--tokenizer-type", choices=MEGATRON_TYPES, help="Megatron's name of it")
    # The README of Megatron says --vocab, which its parser takes for an abbreviation.
    group.add_argument(
        "--vocab-file", "--vocab",
        help="vocab.json with --merge-file, or vocab.txt of a BertWordPiece type",
    )  # fmt: skip
    group.add_argument("--merge-file", help="merges.txt with --vocab-file")
    group.add_argument("--tokenizer-model", help="file of the other --tokenizer-types")
    group.add_argument("--vocab-size", type=int, help="of the NullTokenizer, the TikTokenizer")
    group.add_argument("--tiktoken-pattern", choices=("v1", "v2"), help="of the TikTokenizer")
    group.add_argument("--tiktoken-num-special-tokens", type=int, help="of the TikTokenizer")
    group.add_argument(
        "--tiktoken-special-tokens", "--tokenizer-special-tokens", nargs="+",
        help="of the TikTokenizer",
    )  # fmt: skip
    group.add_argument("--eod-token", help="the special token that ends documents")
    group.add_argument("--vocab-extra-ids", type=int, default=0, help="append <extra_id_0>, ...")
    group.add_argument("--cased", action="store_true", help="a WordPiece --tokenizer file is cased")
    group.add_argument(
        "--engine", default="auto", help="auto, python (slow, readable) or a library's name"
    )
