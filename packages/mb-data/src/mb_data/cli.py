"""The command line: ``mb-data preprocess | chats | inspect | validate | merge | shuffle | decode |
convert | sample-corpus | machine-corpus``. Wrong input is one line on stderr and exit code 2."""

from __future__ import annotations

import argparse
import io
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from mb_data.arguments import command_line
from mb_data.corpora.sample import write_sample_corpus
from mb_data.tokenizer import Tokenizer, load_tokenizer, megatron_tokenizer
from mb_data.tokenizer.megatron import MADE_FROM
from mb_data.untrusted import printable
from mb_data.words import counted

INTERRUPTED = 130
NO_INPUT = """mb-data preprocess: {missing} is missing. For example, on text that every machine has:

  mb-data sample-corpus corpus.jsonl
  mb-data preprocess --tokenizer {tokenizer} --append-eod --input corpus.jsonl --output-prefix out
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack letters: Windows' pipes
        sys.stdout.reconfigure(errors="backslashreplace")
    if arguments is None:  # the process is this program's
        warnings.formatwarning = _as_a_line  # ty: ignore[invalid-assignment]
    options, unknown = command_line().parse_known_args(arguments)
    if unknown:
        options.parser.refuse(unknown[0])
    try:
        return _COMMANDS[options.command](options) or 0
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
        print(printable(f"mb-data {options.command}: {error}"), file=sys.stderr)
        return 2


def _as_a_line(message: Warning | str, *_where: object) -> str:
    return printable(f"mb-data: warning: {' '.join(str(message).split())}") + "\n"


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
        why = f"with --tokenizer-type {options.tokenizer_type}"
        _say_idle(options, {n: why for n in given if n not in MADE_FROM[options.tokenizer_type]})
        return megatron_tokenizer(options.tokenizer_type, **given, **shared)
    if given:
        flag = f"--{next(iter(given)).replace('_', '-')}"
        raise ValueError(f"{flag} needs --tokenizer-type; or give the file as --tokenizer")
    name = "gpt2" if options.tokenizer is None else options.tokenizer
    return load_tokenizer(name, lower_case=not options.cased, **shared)


def _say_idle(options: argparse.Namespace, idle: dict[str, str]) -> None:
    """Name options that do nothing, each with the reason."""
    if getattr(options, "quiet", False):  # which not all commands have
        return
    for name, why in idle.items():
        flag = f"--{name.replace('_', '-')}"
        print(f"mb-data {options.command}: {flag} has no effect {why}", file=sys.stderr)


def _preprocess(options: argparse.Namespace) -> None:
    if not (options.input and options.output_prefix):
        missing = "--input" if not options.input else "--output-prefix"
        name = options.tokenizer or "gpt2"
        options.parser.exit(2, NO_INPUT.format(missing=missing, tokenizer=name))
    from mb_data.preprocess import preprocess
    from mb_data.text.progress import ProgressLine

    idle = {name: "here" for name in options.idle if getattr(options, name) not in (None, False)}
    if not options.split_sentences:  # who names a language wants sentences, as BERT, T5 and ICT do
        of_sentences = {"lang": options.lang != "english", "keep_newlines": options.keep_newlines}
        idle |= {name: "without --split-sentences" for name in of_sentences if of_sentences[name]}
    _say_idle(options, idle)
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
        keep_empty=options.keep_empty,
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
        f"{counted(summary.documents, 'document')}, {counted(summary.tokens, 'token')}, "
        f"{counted(summary.text_bytes, 'byte')} of text; "
        f"{counted(summary.empty, 'empty document')} "
        f"{'kept' if options.keep_empty else 'left out'}, "
        f"{counted(summary.bad_lines, 'bad line')} skipped"
    )
    if summary.empty and len(summary.outputs) > 1 and not options.keep_empty:
        print(
            "documents of the same number are not of the same line under every key: --keep-empty "
            "keeps them side by side, as titles and their texts have to be"
        )
    if summary.careful:
        careful = counted(summary.careful, "document")
        print(f"{careful} with letters new to Unicode took the readable way")
    print(f"{summary.seconds:.1f} s, {megabytes / summary.seconds:.1f} MB/s of text", end="")
    if summary.resumed_text_bytes:
        print(f", after {summary.resumed_text_bytes / 1e6:,.1f} MB done before", end="")
    print()
    for output in summary.outputs:
        print(f"{output}.bin and .idx")
    if summary.bad_lines_file:
        print(f"bad lines are listed in {summary.bad_lines_file}")


def _chats(options: argparse.Namespace) -> None:
    from mb_data.chat.preprocess import preprocess_chats

    def show(conversations: int) -> None:
        print(f"\r{counted(conversations, 'conversation')}", end="", file=sys.stderr, flush=True)

    shown = not options.quiet and sys.stderr is not None and sys.stderr.isatty()
    summary = preprocess_chats(
        options.input,
        options.output_prefix,
        tokenizer=options.tokenizer,
        key=options.json_key,
        turns=options.turns,
        variables=options.template_variables,
        on_error=options.on_error,
        max_line_bytes=int(options.max_line_mb * (1 << 20)),
        on_progress=show if shown else None,
    )
    if shown:
        print(file=sys.stderr)
    print(
        f"{counted(summary.conversations, 'conversation')} in "
        f"{counted(summary.documents, 'document')}, {counted(summary.tokens, 'token')}, "
        f"{summary.learned:,} of them learned; the longest document has {summary.longest:,}; "
        f"{counted(summary.bad_lines, 'bad line')} skipped"
    )
    print(f"{summary.seconds:.1f} s\n{summary.output}.bin and .idx")
    if summary.bad_lines_file:
        print(f"bad lines are listed in {summary.bad_lines_file}")


def _inspect(options: argparse.Namespace) -> None:
    from mb_data.maintenance import inspect

    for prefix in options.prefix:
        found = inspect(prefix)
        print(
            f"{prefix}: {counted(found.documents, 'document')}, "
            f"{counted(found.sequences, 'sequence')}, {counted(found.tokens, 'token')}, "
            f"{found.dtype}\n"
            f"  tokens of a sequence: {found.shortest:,} to {found.longest:,}, "
            f"mean {found.mean:,.1f}; {found.empty_sequences:,} empty\n"
            f"  .bin {found.bin_bytes:,} bytes, .idx {found.idx_bytes:,} bytes"
        )
        if found.tokens_by_mode:
            shares = (f"{count:,} of {mode}" for mode, count in found.tokens_by_mode.items())
            print(f"  tokens by mode (1: learned, in conversations): {', '.join(shares)}")


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
    print(f"{options.output_prefix}: {counted(count, 'dataset')} joined")


def _shuffle(options: argparse.Namespace) -> None:
    from mb_data.maintenance import shuffle

    count = shuffle(options.input, options.output_prefix, seed=options.seed)
    print(f"{options.output_prefix}: {counted(count, 'document')}")


def _decode(options: argparse.Namespace) -> None:
    from mb_data.maintenance import decode

    tokenizer = _tokenizer(options)
    shown = printable if sys.stdout is not None and sys.stdout.isatty() else str
    for document in options.document:
        print(shown(decode(options.prefix, document, tokenizer)))


def _convert(options: argparse.Namespace) -> None:
    from mb_data.maintenance import convert

    count = convert(options.input, options.output_prefix)
    print(f"{options.output_prefix}: {counted(count, 'sequence')}")


def _sample_corpus(options: argparse.Namespace) -> None:
    path = write_sample_corpus(options.output, max_bytes=options.max_bytes)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


def _machine_corpus(options: argparse.Namespace) -> None:
    from mb_data.corpora.machine import machine_folders, write_machine_corpus

    folders = {} if options.only_added else machine_folders()
    for word in options.add:
        name, equals, folder = word.partition("=")
        if not (equals and name and folder and "/" not in name):
            raise ValueError(f"expected NAME=FOLDER for --add, got {word!r}")
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
    documents = counted(facts.documents, "document")
    print(f"{options.output}: {documents}, {facts.text_bytes:,} bytes of text")
    for name, size in sorted(facts.origins.items(), key=lambda item: -item[1]):
        print(f"  {name}: {size:,} bytes, {100 * size / facts.text_bytes:.1f} %")
    print(f"  left out: {facts.copies:,} copies and near copies, {facts.unfit:,} that are no text")
    print(f"  gzip: {facts.gzip_bits_per_byte:.3f} bits per byte")


_COMMANDS = {
    "preprocess": _preprocess,
    "chats": _chats,
    "inspect": _inspect,
    "validate": _validate,
    "merge": _merge,
    "shuffle": _shuffle,
    "decode": _decode,
    "convert": _convert,
    "sample-corpus": _sample_corpus,
    "machine-corpus": _machine_corpus,
}
