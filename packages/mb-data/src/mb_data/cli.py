"""The command line: ``mb-data preprocess | inspect | validate | merge | shuffle | decode |
convert | sample-corpus | machine-corpus``. Wrong input is one line on stderr and exit code 2."""

from __future__ import annotations

import argparse
import difflib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from mb_data import __version__
from mb_data.sample_corpus import DEFAULT_MAX_BYTES, write_sample_corpus
from mb_data.sources import TEXT_UNITS
from mb_data.tokenizer import Tokenizer, load_tokenizer, megatron_tokenizer
from mb_data.tokenizer.load import MEGATRON_TYPES, NAMES

INTERRUPTED = 130
SETTLED = ("log_interval", "chunk_size", "partitions", "find_optimal_num_workers")
SETTLED += ("workers_to_check", "max_documents", "performance_dir", "keep_sequential_samples")
NO_INPUT = """mb-data preprocess: {missing} is missing. For example, on text that every machine has:

  mb-data sample-corpus corpus.jsonl
  mb-data preprocess --tokenizer {tokenizer} --append-eod --input corpus.jsonl --output-prefix out
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack letters: Windows' pipes
        sys.stdout.reconfigure(errors="backslashreplace")
    options, unknown = _parser().parse_known_args(arguments)
    if unknown:
        options.parser.refuse(unknown[0])
    try:
        return options.run(options) or 0
    except KeyboardInterrupt:
        again = ""
        # Nothing is kept of a pipe, nor before the first block is on disk.
        if options.command == "preprocess" and os.path.isdir(f"{options.output_prefix}.partial"):
            again = "; it goes on from here when the same command is given again"
        print(f"\nmb-data {options.command}: interrupted{again}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has gone
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # or the flush at exit fails too
        return 0
    except (ValueError, IndexError, OSError, ModuleNotFoundError, RuntimeError) as error:
        print(f"mb-data {options.command}: {error}", file=sys.stderr)
        return 2


class _Parser(argparse.ArgumentParser):
    """No abbreviated flags, one line for a mistake, the nearest flag for an unknown one."""

    def __init__(self, **options: object) -> None:
        super().__init__(allow_abbrev=False, **options)  # ty: ignore[invalid-argument-type]

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def refuse(self, word: str) -> NoReturn:
        near = difflib.get_close_matches(word.split("=")[0], self._option_string_actions, n=1)
        hint = f", did you mean {near[0]}?" if near else ""
        self.error(f"unknown argument {word}{hint}")


def _parser() -> _Parser:
    parser = _Parser(prog="mb-data", description="Text to tokens, in Megatron's file format.")
    parser.add_argument("--version", action="version", version=f"mb-data {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)

    command = commands.add_parser("preprocess", help="tokenize JSON Lines")
    command.add_argument(
        "--input",
        nargs="+",
        action="extend",
        help="JSON Lines, .txt or Parquet: files, directories, quoted patterns, pipes, URLs, or - "
        "for stdin; plain, .gz, .bz2, .xz or .zst",
    )
    command.add_argument("--output-prefix", help="path without _<key>_document.bin")
    command.add_argument("--json-keys", nargs="+", action="extend", help="default: text")
    command.add_argument("--append-eod", action="store_true", help="end documents with a token")
    command.add_argument(
        "--prepend-bos", action="store_true", default=None, help="begin documents with a token"
    )
    command.add_argument("--split-sentences", action="store_true", help="a sequence per sentence")
    command.add_argument("--lang", default="english", help="of the sentences (default: english)")
    command.add_argument(
        "--keep-newlines", action="store_true", help="keep the white space after sentences"
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
        "--text-unit", choices=TEXT_UNITS, default="line", help="a document of a .txt"
    )
    command.add_argument(
        "--max-line-mb", type=_megabytes, default=64.0, help="a longer line is bad (default: 64)"
    )
    command.add_argument("--dtype", help="of the tokens (default: uint16 if they fit, or int32)")
    command.add_argument(
        "--dataset-impl", choices=["mmap"], default="mmap", help="the one format there is"
    )
    command.add_argument("--quiet", action="store_true", help="no progress on stderr")
    settled = command.add_argument_group("Megatron's, without effect here")
    settled.add_argument("--log-interval", type=int, help="progress is shown by time")
    settled.add_argument("--chunk-size", type=int, help="work is cut by bytes")
    settled.add_argument("--partitions", type=int, help="any number of workers writes one output")
    settled.add_argument("--keep-sequential-samples", action="store_true", help="always kept")
    settled.add_argument("--find-optimal-num-workers", action="store_true", help="one per core")
    settled.add_argument("--workers-to-check", nargs="+", type=int)
    settled.add_argument("--max-documents", type=int)
    settled.add_argument("--performance-dir")
    _add_tokenizer(command)
    command.set_defaults(run=_preprocess, parser=command)

    command = commands.add_parser("inspect", help="what is in these files?")
    command.add_argument("prefix", nargs="+", help="path without .bin or .idx")
    command.set_defaults(run=_inspect, parser=command)

    command = commands.add_parser("validate", help="are these files whole?")
    command.add_argument("prefix", nargs="+", help="path without .bin or .idx")
    command.add_argument("--vocab-size", type=int, help="every token must be below it")
    command.set_defaults(run=_validate, parser=command)

    command = commands.add_parser("merge", help="join datasets")
    command.add_argument(
        "--input",
        nargs="+",
        action="extend",
        required=True,
        help="prefixes, or directories for all in them",
    )
    command.add_argument("--output-prefix", required=True)
    command.set_defaults(run=_merge, parser=command)

    command = commands.add_parser("shuffle", help="write the documents in a random order")
    command.add_argument("--input", required=True, help="path without .bin or .idx")
    command.add_argument("--output-prefix", required=True)
    command.add_argument("--seed", type=int, default=1234)
    command.set_defaults(run=_shuffle, parser=command)

    command = commands.add_parser("decode", help="show a document's text")
    command.add_argument("prefix", help="path without .bin or .idx")
    command.add_argument("document", type=int, nargs="+", help="counted from 0")
    _add_tokenizer(command)
    command.set_defaults(run=_decode, parser=command)

    command = commands.add_parser("convert", help="bring a TNTIDX dataset up to date")
    command.add_argument("--input", required=True, help="path without .bin or .idx")
    command.add_argument("--output-prefix", required=True)
    command.set_defaults(run=_convert, parser=command)

    command = commands.add_parser(
        "sample-corpus", help="write the standard library's sources as JSON Lines"
    )
    command.add_argument("output")
    command.add_argument("--max-bytes", type=int, default=DEFAULT_MAX_BYTES)
    command.set_defaults(run=_sample_corpus, parser=command)

    command = commands.add_parser(
        "machine-corpus", help="write the machine's sources and documentation, each text once"
    )
    command.add_argument("output")
    command.add_argument("--max-bytes", type=int, help="stop at so much text; default all")
    command.add_argument("--seed", type=int, default=1234, help="of the order; default 1234")
    command.add_argument(
        "--add", action="append", default=[], metavar="NAME=FOLDER",
        help="a folder to take as well, under that name; several times for several",
    )  # fmt: skip
    command.add_argument("--only-added", action="store_true", help="nothing but --add")
    command.add_argument("--workers", type=int, default=1, help="processes that read; default 1")
    command.set_defaults(run=_machine_corpus, parser=command)
    return parser


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
    group.add_argument("--vocab-file", help="for --tokenizer-type")
    group.add_argument("--merge-file", help="for --tokenizer-type")
    group.add_argument("--tokenizer-model", help="for --tokenizer-type")
    group.add_argument("--vocab-size", type=int, help="of the NullTokenizer, the TikTokenizer")
    group.add_argument("--tiktoken-pattern", choices=("v1", "v2"), help="of the TikTokenizer")
    group.add_argument("--tiktoken-num-special-tokens", type=int, help="of the TikTokenizer")
    group.add_argument("--tiktoken-special-tokens", nargs="+", help="of the TikTokenizer")
    group.add_argument("--eod-token", help="the special token that ends documents")
    group.add_argument("--vocab-extra-ids", type=int, default=0, help="append <extra_id_0>, ...")
    group.add_argument("--cased", action="store_true", help="a WordPiece --tokenizer file is cased")
    group.add_argument(
        "--engine", default="auto", help="auto, python (slow, readable) or a library's name"
    )


def _tokenizer(options: argparse.Namespace) -> Tokenizer:
    files = ("vocab_file", "merge_file", "tokenizer_model", "vocab_size")
    files += tuple(name for name in vars(options) if name.startswith("tiktoken_"))
    given = {name: getattr(options, name) for name in files if getattr(options, name) is not None}
    shared = {"engine": options.engine, "num_extra_ids": options.vocab_extra_ids}
    shared["eod_token"] = options.eod_token
    if given.keys() == {"vocab_file", "merge_file"} and not options.tokenizer:
        options.tokenizer_type = options.tokenizer_type or "GPT2BPETokenizer"
    if options.tokenizer_type:
        if options.tokenizer or options.cased:
            raise ValueError("--tokenizer-type goes without --tokenizer and --cased")
        return megatron_tokenizer(options.tokenizer_type, **given, **shared)
    if given:
        flag = f"--{next(iter(given)).replace('_', '-')}"
        raise ValueError(f"{flag} needs --tokenizer-type; or give the file as --tokenizer")
    name = "gpt2" if options.tokenizer is None else options.tokenizer
    return load_tokenizer(name, lower_case=not options.cased, **shared)


def _preprocess(options: argparse.Namespace) -> None:
    if not (options.input and options.output_prefix):
        missing = "--input" if not options.input else "--output-prefix"
        name = options.tokenizer or "gpt2"
        options.parser.exit(2, NO_INPUT.format(missing=missing, tokenizer=name))
    from mb_data.preprocess import preprocess
    from mb_data.progress import ProgressLine

    for name in SETTLED:
        if getattr(options, name) not in (None, False) and not options.quiet:
            flag = f"--{name.replace('_', '-')}"
            print(f"mb-data preprocess: {flag} has no effect here", file=sys.stderr)
    # pythonw and some supervisors give a process no stderr.
    show = None if options.quiet or sys.stderr is None else ProgressLine(sys.stderr)
    summary = preprocess(
        options.input,
        options.output_prefix,
        tokenizer=_tokenizer(options),
        json_keys=options.json_keys or ["text"],
        append_eod=options.append_eod,
        prepend_bos=options.prepend_bos,
        split_sentences=options.split_sentences,
        language=options.lang,
        keep_newlines=options.keep_newlines,
        dtype=options.dtype,
        on_error=options.on_error,
        restart=options.restart,
        shard=options.shard,
        text_unit=options.text_unit,
        workers=options.workers,
        max_line_bytes=int(options.max_line_mb * (1 << 20)),
        on_progress=show,
    )
    if show:
        show.close()
    megabytes = (summary.text_bytes - summary.resumed_text_bytes) / 1e6
    print(
        f"{summary.documents:,} documents, {summary.tokens:,} tokens, "
        f"{summary.text_bytes:,} bytes of text; {summary.empty:,} empty documents left out, "
        f"{summary.bad_lines:,} bad lines skipped"
    )
    if summary.careful:
        print(f"{summary.careful:,} documents with letters new to Unicode took the readable way")
    print(f"{summary.seconds:.1f} s, {megabytes / summary.seconds:.1f} MB/s of text", end="")
    if summary.resumed_text_bytes:
        print(f", after {summary.resumed_text_bytes / 1e6:,.1f} MB done before", end="")
    print()
    for output in summary.outputs:
        print(f"{output}.bin and .idx")
    if summary.bad_lines_file:
        print(f"bad lines are listed in {summary.bad_lines_file}")


def _inspect(options: argparse.Namespace) -> None:
    from mb_data.maintenance import inspect

    for prefix in options.prefix:
        found = inspect(prefix)
        print(
            f"{prefix}: {found.documents:,} documents, {found.sequences:,} sequences, "
            f"{found.tokens:,} tokens, {found.dtype}\n"
            f"  tokens of a sequence: {found.shortest:,} to {found.longest:,}, "
            f"mean {found.mean:,.1f}; {found.empty_sequences:,} empty\n"
            f"  .bin {found.bin_bytes:,} bytes, .idx {found.idx_bytes:,} bytes"
        )


def _validate(options: argparse.Namespace) -> int:
    from mb_data.maintenance import validate

    problems = 0
    for prefix in options.prefix:
        found = validate(prefix, vocab_size=options.vocab_size)
        problems += len(found)
        for problem in found:
            print(f"mb-data validate: {problem}", file=sys.stderr)
        if not found:
            print(f"{prefix}: whole")
    return 2 if problems else 0


def _merge(options: argparse.Namespace) -> None:
    from mb_data.maintenance import merge

    count = merge(options.input, options.output_prefix)
    print(f"{options.output_prefix}: {count} datasets joined")


def _shuffle(options: argparse.Namespace) -> None:
    from mb_data.maintenance import shuffle

    count = shuffle(options.input, options.output_prefix, seed=options.seed)
    print(f"{options.output_prefix}: {count:,} documents")


def _decode(options: argparse.Namespace) -> None:
    from mb_data.maintenance import decode

    tokenizer = _tokenizer(options)
    for document in options.document:
        print(decode(options.prefix, document, tokenizer))


def _convert(options: argparse.Namespace) -> None:
    from mb_data.maintenance import convert

    print(f"{options.output_prefix}: {convert(options.input, options.output_prefix):,} sequences")


def _sample_corpus(options: argparse.Namespace) -> None:
    path = write_sample_corpus(options.output, max_bytes=options.max_bytes)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


def _machine_corpus(options: argparse.Namespace) -> None:
    from mb_data.machine_corpus import machine_folders, write_machine_corpus

    folders = {} if options.only_added else machine_folders()
    for word in options.add:
        name, equals, folder = word.partition("=")
        if not (equals and name and folder and "/" not in name):
            raise ValueError(f"Expected NAME=FOLDER for --add, got {word!r}.")
        if name in folders:
            raise ValueError(f"--add {word}: {name} is {folders[name]} already; give another name")
        folders[name] = Path(folder)
    if not folders:
        raise ValueError("--only-added takes nothing but --add NAME=FOLDER; give one at least")
    facts = write_machine_corpus(
        options.output,
        folders=folders,
        max_bytes=options.max_bytes,
        seed=options.seed,
        workers=options.workers,
    )
    print(f"{options.output}: {facts.documents:,} documents, {facts.text_bytes:,} bytes of text")
    for name, size in sorted(facts.origins.items(), key=lambda item: -item[1]):
        print(f"  {name}: {size:,} bytes, {100 * size / facts.text_bytes:.1f} %")
    print(f"  left out: {facts.copies:,} copies and near copies, {facts.unfit:,} that are no text")
    print(f"  gzip: {facts.gzip_bits_per_byte:.3f} bits per byte")
