"""The command line: what it prints, and one line with exit code 2 for anything wrong."""

import contextlib
import errno
import io
import json
import os
import re
import resource
import subprocess
import sys

import mb_data
import numpy as np
import pytest
from mb_data import IndexedDataset, WorkerDiedError
from mb_data.arguments import command_line
from mb_data.cli import main
from mb_data.text.progress import Progress, ProgressLine, format_progress


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in ("a b", "", "Hello world")))
    return path


@pytest.fixture
def command(source, tmp_path):
    prefix = str(tmp_path / "out")
    return ["preprocess", "--input", str(source), "--output-prefix", prefix, "--workers", "1"]


def test_preprocess(command, tmp_path, capsys):
    assert main([*command, "--append-eod"]) == 0
    out = capsys.readouterr().out
    assert "2 documents, 6 tokens, 14 bytes of text; 1 empty document left out, 0 bad" in out
    assert "MB/s" in out
    assert f"{tmp_path}/out_text_document.bin and .idx" in out
    dataset = IndexedDataset(tmp_path / "out_text_document")
    assert [x.tolist() for x in dataset[:]] == [[64, 275, 50256], [15496, 995, 50256]]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--json-keys text title", True),
        ("--json-keys text title --keep-empty", False),
        ("--json-keys text", False),
    ],
)
def test_documents_of_several_keys_that_part_company(command, source, capsys, flags, said):
    lines = ({"text": "a", "title": ""}, {"text": "", "title": "b"})
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main([*command, *flags.split()]) == 0
    assert ("--keep-empty" in capsys.readouterr().out) == said


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--tokenizer-type", "GPT2BPETokenizer"],
        ["--engine", "python", "--dataset-impl", "mmap"],
    ],
    ids=["default", "Megatron's name", "readable"],
)
def test_ways_to_say_gpt2(command, tmp_path, flags):
    assert main([*command, *flags]) == 0
    dataset = IndexedDataset(tmp_path / "out_text_document")
    assert [x.tolist() for x in dataset[:]] == [[64, 275], [15496, 995]]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--worker", "2"], "unknown argument --worker, did you mean --workers?"),
        (["--tokenizer", "gpt-2"], "unknown tokenizer 'gpt-2'; did you mean gpt2?"),
        (["--tokenizer", ""], "unknown tokenizer ''. Known names: gpt2, "),
        (["--tokenizer", "nothere"], "unknown tokenizer 'nothere'. Known names: gpt2, "),
        (["--tokenizer", "meta/llama"], "meta/llama: no such file; nothing is downloaded"),
        (["--vocab-file", "vocab", "--merge-file", "m"], "tokenizer vocab: no such file"),
        (["--max-line-mb", "x"], "x: expected megabytes"),
        (["--vocab-file", "x"], "--vocab-file needs --tokenizer-type"),
        (["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "x"], "both --vocab-file and"),
        (["--tokenizer-type", "GPT2BPETokenizer", "--tokenizer", "x"], "goes without --tokenizer"),
        (["--tokenizer", "bert-base-uncased", "--cased"], "says itself what becomes of capitals"),
        (["--cased"], "tokenizer gpt2: expected the vocab.txt of a cased WordPiece"),
        (["--tokenizer-type", "BertWordPieceCase"], "needs --vocab-file"),
        (["--tokenizer-type", "SentencePieceTokenizer"], "needs --tokenizer-model"),
        (["--tokenizer-type", "NullTokenizer"], "needs --vocab-size"),
        (["--tokenizer-type", "Bert"], "invalid choice: 'Bert'"),
        (["--dtype", "uint8"], "uint8 holds ids up to 255"),
        (["--workers", "two"], "invalid int value: 'two'"),
        (["--dataset-impl", "lazy"], "invalid choice: 'lazy'"),
        (["--max-line-mb", "inf"], "--max-line-mb: inf: expected megabytes"),
        (["--split-sentences", "--lang", "xx"], "language 'xx': give an ISO 639 code"),
        (["--max-line-mb", "0"], "--max-line-mb: 0: expected megabytes"),
        (["--json-keys", "body"], "in.jsonl, line 1: no key 'body'; the keys are text; --on-error"),
    ],
)
def test_mistakes(command, tmp_path, capsys, flags, message):
    try:
        code = main([*command, *flags])
    except SystemExit as error:
        code = error.code
    assert code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("mb-data preprocess: ")
    assert error.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_message_does_not_command_the_terminal(command, source, capsys):
    source.write_text('{"\\u001b[2J": "b"}\n')
    assert main([*command, "--on-error", "stop"]) == 2
    said = capsys.readouterr().err
    assert "the keys are \\x1b[2J" in said
    assert "\x1b" not in said


def test_missing_input_and_directory(command, capsys):
    assert main([*command[:2], "missing.jsonl", *command[3:]]) == 2
    assert "missing.jsonl: no such file" in capsys.readouterr().err
    assert main([*command[:4], "no/where/out"]) == 2
    assert "no/where: no such directory for the output" in capsys.readouterr().err


def test_skipped_lines_are_told(command, source, tmp_path, capsys):
    with open(source, "a") as file:
        file.write("oops\n")
    assert main([*command, "--on-error", "skip"]) == 0
    out = capsys.readouterr().out
    assert "1 bad line skipped" in out
    assert f"bad lines are listed in {tmp_path}/out_skipped.txt" in out


def test_standard_input_through_the_shell(source, tmp_path):
    flags = ["--input", "-", "--output-prefix", tmp_path / "out", "--workers", "2"]
    run = subprocess.run(
        [sys.executable, "-m", "mb_data", "preprocess", *flags],
        input=source.read_bytes(),
        capture_output=True,
        check=True,
    )
    assert b"2 documents" in run.stdout
    assert len(IndexedDataset(tmp_path / "out_text_document")) == 2


def test_a_flag_given_twice_adds_to_the_first(command, source, tmp_path):
    source.write_text('{"text": "a", "title": "b"}\n')
    more = ["--json-keys", "text", "--input", str(source), "--json-keys", "title"]
    assert main([*command, *more]) == 0
    prefixes = [str(tmp_path / f"out_{key}_document") for key in ("text", "title")]
    assert [len(IndexedDataset(prefix)) for prefix in prefixes] == [2, 2]
    merge = ["merge", "--input", prefixes[0], "--input", prefixes[1]]
    assert main([*merge, "--output-prefix", str(tmp_path / "both")]) == 0
    assert len(IndexedDataset(tmp_path / "both")) == 4


def test_interrupt(command, tmp_path, capsys, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["mb_data.preprocess"], "preprocess", interrupt)
    assert main(command) == 130  # nothing is done yet, or the input was a pipe
    assert capsys.readouterr().err == "\nmb-data preprocess: interrupted\n"
    (tmp_path / "out.partial").mkdir()
    assert main(command) == 130
    assert "goes on from here when the same command is given again" in capsys.readouterr().err
    monkeypatch.setattr("mb_data.maintenance.inspect", interrupt)
    assert main(["inspect", "a"]) == 130
    assert capsys.readouterr().err == "\nmb-data inspect: interrupted\n"


@pytest.mark.parametrize(
    "error",
    [
        WorkerDiedError("worker process 7 ended by signal 9"),
        OSError(errno.ENOSPC, "No space left on device", "out.partial/0.tokens"),
        ModuleNotFoundError("pip install 'mb-data[zstd]'"),
    ],
    ids=["killed worker", "disk full", "missing extra"],
)
def test_what_the_system_does_is_told_in_one_line(command, capsys, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(sys.modules["mb_data.preprocess"], "preprocess", fail)
    assert main(command) == 2
    assert capsys.readouterr().err == f"mb-data preprocess: {error}\n"


@contextlib.contextmanager
def little_room(monkeypatch):
    """No file may grow beyond a thousand bytes. Bytecode would be cut: none is written.

    Not a fixture: that would still be in force when pytest reports the test, perhaps into a file.
    """
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("words", "file"),
    [
        (["sample-corpus", "out.jsonl"], "out.jsonl"),
        (["machine-corpus", "out.jsonl", "--only-added", "--add", "own=text"], "out.jsonl"),
        (["merge", "--input", "tokens", "--output-prefix", "out"], "out.bin"),
        (["shuffle", "--input", "documents", "--output-prefix", "out"], "out.idx"),
        # A vocabulary reaches its engine as a temporary file, from a thread.
        (["preprocess", "--input", "in.jsonl", "--output-prefix", "out", "--quiet"], ".*/ranks"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_full_disk_is_said_with_the_name_of_the_file(
    source, tmp_path, monkeypatch, capsys, words, file
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "README").write_text("A line of words to read.\n" * 50)
    for name, count, length in (("tokens", 1, 600), ("documents", 100, 4)):
        with mb_data.IndexedDatasetBuilder(name, np.uint16) as builder:
            builder.add_documents(np.zeros(count * length, np.uint16), [length] * count)
    before = sorted(os.listdir())
    with little_room(monkeypatch):
        assert main(words) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(rf"mb-data {words[0]}: .*File too large: '{file}'\n", said)
    assert sorted(os.listdir()) == before


def test_every_command_and_argument_has_a_help():
    (commands,) = (action for action in command_line()._actions if action.dest == "command")
    for name, parser in commands.choices.items():
        assert parser.description, name
        for action in parser._actions:
            assert action.help, (name, action.dest)


def test_help_without_the_engines():
    code = (
        "import sys; from mb_data.cli import main\n"
        "try: main(['preprocess', '--help'])\n"
        "except SystemExit: pass\n"
        "assert 'gigatoken' not in sys.modules and 'torch' not in sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--append-eod" in run.stdout


def test_progress_line():
    progress = Progress(
        position=1_200_000_000,
        total=2_400_000_000,
        documents=3000,
        text_bytes=1_100_000_000,
        seconds=2.0,
        resumed_position=400_000_000,
        resumed_documents=1000,
        resumed_text_bytes=500_000_000,
    )
    assert format_progress(progress) == (
        "[==========          ]  50% 1.20/2.40 GB, 1,000 documents/s, 300.0 MB/s, 0:00:03 left"
    )


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_on_a_terminal_and_in_a_log():
    progress = Progress(0, 0, 5, 7_000_000, 1.0, 0, 0, 0)
    terminal, log = Terminal(), io.StringIO()
    for stream in (terminal, log):
        line = ProgressLine(stream)
        line(progress)
        line.close()
    assert terminal.getvalue() == "\r0.01 GB of text, 5 documents/s, 7.0 MB/s\n"
    assert log.getvalue() == ""


def test_a_process_without_streams(command, tmp_path, monkeypatch):
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert main(command) == 0
    assert main(["decode", f"{tmp_path}/out_text_document", "0"]) == 0
    assert len(IndexedDataset(tmp_path / "out_text_document")) == 2


def test_what_the_outputs_encoding_lacks_is_escaped(command, source, tmp_path, monkeypatch):
    """Windows' pipes have cp1252."""
    source.write_text(json.dumps({"text": "\xfcber \u6f22"}))
    out = io.TextIOWrapper(io.BytesIO(), "cp1252")
    monkeypatch.setattr(sys, "stdout", out)
    assert main(command) == 0
    assert main(["decode", f"{tmp_path}/out_text_document", "0"]) == 0
    out.flush()
    assert b"\xfcber \\u6f22" in out.buffer.getvalue()


def run_cli(*arguments, **options):
    command = [sys.executable, "-m", "mb_data", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def test_no_input_says_what_to_add():
    run = run_cli("preprocess", "--tokenizer", "gpt2")
    assert run.returncode == 2
    assert "--input is missing" in run.stderr
    assert "mb-data sample-corpus corpus.jsonl" in run.stderr
    assert "Traceback" not in run.stderr


def test_a_warning_is_a_line():
    code = (
        "import sys, warnings; from mb_data import cli\n"
        "cli._COMMANDS['inspect'] = lambda options: warnings.warn('one\\n two')\n"
        "sys.argv = ['mb-data', 'inspect', 'a']\nsys.exit(cli.main())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stderr == "mb-data: warning: one two\n"


def test_version():
    assert run_cli("--version").stdout == f"mb-data {mb_data.__version__}\n"


def test_standard_input_closed(tmp_path):
    command = f"{sys.executable} -m mb_data preprocess --input - --output-prefix {tmp_path}/o <&-"
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr == (
        "mb-data preprocess: standard input (-) is closed; give files, or pipe text into it\n"
    )


def test_output_that_nobody_reads(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n')
    command = f"{sys.executable} -m mb_data preprocess --input {path} --output-prefix {tmp_path}/o"
    run = subprocess.run(
        ["bash", "-c", f"({command}; echo $? >&2) | true"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in run.stderr
    assert (tmp_path / "o_text_document.idx").exists()


def test_what_a_type_of_tokenizer_is_not_made_from_is_said(command, tmp_path, capsys):
    words = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-size", "9"]
    assert main([*command, *words]) == 0
    type_of = "--vocab-size has no effect with --tokenizer-type GPT2BPETokenizer\n"
    assert f"mb-data preprocess: {type_of}" in capsys.readouterr().err
    assert main([*command, *words, "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["decode", f"{tmp_path}/out_text_document", "0", *words]) == 0
    assert capsys.readouterr().err == f"mb-data decode: {type_of}"


def test_megatrons_flags_and_the_pair_of_gpt2(tmp_path, capsys):
    """The command of Megatron's README, and MegaBlocks' --vocab-file and --merge-file."""
    gpt2 = mb_data.load_tokenizer("gpt2", engine="python")
    letters = gpt2.readable.letters
    vocabulary = {"".join(letters[b] for b in t): i for i, t in gpt2.byte_strings.items()}
    files = tmp_path / f"12{os.pathsep}30"  # a folder's name may have the sign between two paths
    files.mkdir()
    (files / "gpt2-vocab.json").write_text(json.dumps(vocabulary))
    merges = "#version: 0.2\r\n" + "\r\n".join(gpt2.readable.merges) + "\r\n"
    (files / "gpt2-merges.txt").write_bytes(merges.encode())
    (tmp_path / "a.jsonl").write_text('{"text": "Hello world"}\n')
    arguments = ["preprocess", "--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "o"]
    arguments += ["--merge-file", files / "gpt2-merges.txt", "--append-eod", "--workers", "1"]
    for name, *extra in (
        ("--vocab-file",),
        ("--vocab", "--tokenizer-type", "GPT2BPETokenizer", "--dataset-impl", "mmap"),
    ):
        flags = ["--chunk-size", "32", "--log-interval", "1000", "--partitions", "1"]
        flags += ["--keep-sequential-samples", name, str(files / "gpt2-vocab.json"), *extra]
        flags += ["--padded-vocab-size", "50304", "--trust-remote-code", "--legacy-tokenizer"]
        flags += ["--tokenizer-metadata", "a", "--tokenizer-hf-no-use-fast"]
        assert main([*map(str, arguments), *flags]) == 0
        said = capsys.readouterr().err
        assert "--chunk-size has no effect here" in said
        assert "--tokenizer-hf-no-use-fast has no effect here" in said
        dataset = mb_data.IndexedDataset(tmp_path / "o_text_document")
        assert dataset[0].tolist() == [15496, 995, 50256]
    (files / "vocab.json").write_text(json.dumps(vocabulary))
    (files / "merges.txt").write_bytes(merges.encode())
    for path in (files, files / "vocab.json"):
        assert mb_data.load_tokenizer(path).encode("Hello world") == [15496, 995]


def test_flags_of_sentences_say_that_there_are_none(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "Hello. World."}\n')
    arguments = ["preprocess", "--input", tmp_path / "a.jsonl", "--workers", "1", "--output-prefix"]
    words = [*map(str, arguments), str(tmp_path / "o"), "--lang", "german", "--keep-newlines"]
    assert main(words) == 0
    said = capsys.readouterr().err
    assert "--lang has no effect without --split-sentences" in said
    assert "--keep-newlines has no effect without --split-sentences" in said
    assert main([*words, "--split-sentences", "--tokenizer", "bert-base-uncased"]) == 0
    assert "no effect" not in capsys.readouterr().err


def test_shards_by_slurm(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 10)
    arguments = ["preprocess", "--input", str(tmp_path / "a.jsonl"), "--workers", "1", "--shard"]
    with pytest.raises(SystemExit):
        main([*arguments, "slurm", "--output-prefix", f"{tmp_path}/x"])
    assert "SLURM_ARRAY_TASK_ID' is not set; no array job" in capsys.readouterr().err
    # A few tasks given again are no array of their own: --array=5, --array=1,7, --array=0-6:2.
    for array in (("5", "5", "1"), ("1", "7", "2"), ("0", "6", "4")):
        for name, value in zip(("MIN", "MAX", "COUNT"), array, strict=True):
            monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", array[0])
        with pytest.raises(SystemExit):
            main([*arguments, "slurm", "--output-prefix", f"{tmp_path}/x"])
        assert "an array from 0 or 1 without gaps" in capsys.readouterr().err
    for name, value in (("MIN", "1"), ("MAX", "2"), ("COUNT", "2")):
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    for task in ("1", "2"):
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", task)
        assert main([*arguments, "slurm", "--output-prefix", f"{tmp_path}/part{task}"]) == 0
    lengths = [len(mb_data.IndexedDataset(f"{tmp_path}/part{i}_text_document")) for i in (1, 2)]
    assert lengths == [10, 0]  # one block is not cut
