"""The tokenizer's files in the run folder: it is of use where nothing else is left of its start."""

import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import mb_data
import numpy as np
import pytest
from mb_data.tokenizer.megatron import MADE_FROM
from mb_train.cli import main
from mb_train.config import TrainConfig
from mb_train.config.data import TOKENIZER_TYPES
from mb_train.config.recipes import recipe
from mb_train.convert.hugging_face.tokenizer import find_tokenizer
from mb_train.data.sample import sample_corpus
from mb_train.data.tokenizer_files import keep_tokenizer
from mb_train.data.tokenizers import chat_tokenizer, load_tokenizer
from mb_train.data.vocabulary import vocabulary_rows
from mb_train.flags.command_line import parse, resolve
from mb_train.folder.history import set_aside, set_later_aside
from mb_train.tasks.make import one_process_task

TINY = [
    "--num-layers=1", "--hidden-size=16", "--seq-length=16", "--num-attention-heads=1", "--lr=1e-3",
    "--micro-batch-size=2", "--train-iters=1", "--eval-iters=0", "--num-workers=0", "--device=cpu",
    "--vocab-file=words/gpt2-vocab.json", "--merge-file=words/gpt2-merges.txt",
]  # fmt: skip


def bytes_alone(folder, *, eod="<|endoftext|>"):
    """A byte-level vocabulary without a merge."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [256 + i for i in range(256 - len(plain))]
    words = {chr(c): i for i, c in enumerate([*plain, *others])} | {eod: 256}
    folder.mkdir(exist_ok=True)
    (folder / "gpt2-vocab.json").write_text(json.dumps(words))
    (folder / "gpt2-merges.txt").write_text("#version: 0.2\n")


def generate(run):
    return main(["generate", str(run), "--prompt=a", "--max-new-tokens=1"])


def test_a_run_takes_its_tokenizer_along(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    bytes_alone(tmp_path / "words")
    (tmp_path / "text.jsonl").write_text('{"text": "some words of a text"}\n' * 50)
    from mb_data.cli import main as mb_data

    flags = [*TINY[-2:], "--tokenizer-type=GPT2BPETokenizer"]
    assert mb_data(["preprocess", "--input=text.jsonl", "--output-prefix=t", *flags]) == 0
    assert main([*TINY, "--data-path=t_text_document", "--save=run"]) == 0
    shutil.move("words", "elsewhere")
    shutil.move("run", "moved")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert generate("../moved") == 0
    data = "--data-path=../t_text_document"
    assert main(["--load=../moved", "--save=next", data, "--train-iters=2"]) == 0
    # Begun anew in the same folder, whose copies move aside.
    assert main(["--load=next", "--save=next", "--finetune", data, "--train-iters=1"]) == 0
    assert generate("next") == 0
    assert main(["convert", "next", "theirs"]) == 0
    assert main(["convert", "theirs", "ours"]) == 0
    shutil.rmtree("theirs")
    shutil.move("ours", "again")
    assert generate("again") == 0
    capsys.readouterr()
    bytes_alone(tmp_path / "here" / "words", eod="<|end|>")
    assert generate("next") == 2
    assert "was trained on another tokenizer than" in capsys.readouterr().err


def test_a_folder_is_kept_and_a_known_name_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bytes_alone(tmp_path / "bytes")
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / "bytes" / f"gpt2-{name}").rename(tmp_path / "bytes" / name)
    (tmp_path / "bytes" / "weights").write_text("many")
    (tmp_path / "run").mkdir()
    fields = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "seq_length": 16}
    fields |= {"lr": 1.0, "micro_batch_size": 1, "train_iters": 1}
    of_folder = TrainConfig(**fields, tokenizer="bytes")
    before = load_tokenizer(of_folder).fingerprint
    keep_tokenizer(of_folder, tmp_path / "run")
    kept = tmp_path / "run" / "tokenizer" / "bytes"
    assert sorted(p.name for p in kept.iterdir()) == ["merges.txt", "vocab.json"]
    (kept / "merges.txt").write_text("of another run")
    keep_tokenizer(of_folder, tmp_path / "run")
    shutil.move("bytes", "gpt2")
    keep_tokenizer(of_folder, tmp_path / "run", tmp_path / "run")  # the copies are the files
    assert load_tokenizer(of_folder, tmp_path / "run").fingerprint == before
    with pytest.raises(ValueError, match="bytes"):
        load_tokenizer(of_folder)
    keep_tokenizer(TrainConfig(**fields, tokenizer="gpt2"), tmp_path / "other")
    assert not (tmp_path / "other").exists()
    # A folder's name may have the sign that stands between two files.
    shutil.move("gpt2", f"12{os.pathsep}30")
    of_file = TrainConfig(**fields, tokenizer=f"12{os.pathsep}30/vocab.json")
    (tmp_path / "new").mkdir()
    keep_tokenizer(of_file, tmp_path / "new")
    kept = tmp_path / "new" / "tokenizer"
    assert sorted(p.name for p in kept.iterdir()) == ["merges.txt", "vocab.json"]
    shutil.move(f"12{os.pathsep}30", "gone")
    assert load_tokenizer(of_file, tmp_path / "new").fingerprint == before


@pytest.mark.parametrize("kind", ["HuggingFaceTokenizer", "Llama2Tokenizer"])
def test_what_is_said_beside_a_file_is_kept(tmp_path, kind):
    """Which of the special tokens ends a document: the file itself does not say."""
    special = [{"id": i, "content": f"<{i}>", "special": True} for i in (256, 257)]
    bytes_alone(tmp_path / "words")
    words = json.loads((tmp_path / "words" / "gpt2-vocab.json").read_text())
    del words["<|endoftext|>"]
    model = {"type": "BPE", "vocab": words, "merges": []}
    described = {"model": model, "added_tokens": special, "pre_tokenizer": {"type": "ByteLevel"}}
    file = tmp_path / "words" / "tokenizer.json"
    file.write_text(json.dumps(described))
    file.with_name("tokenizer_config.json").write_text(json.dumps({"eos_token": "<257>"}))
    config = TrainConfig(
        num_layers=1, hidden_size=16, num_attention_heads=1, seq_length=16, micro_batch_size=1,
        train_iters=1, lr=1.0, tokenizer_type=kind, tokenizer_model=str(file),
    )  # fmt: skip
    keep_tokenizer(config, tmp_path / "run")
    with mock.patch("shutil.copyfile", full_after_a_half):
        keep_tokenizer(config, tmp_path / "run")  # the copies that it has stay
        (tmp_path / "run" / "tokenizer" / "tokenizer.json").write_text("of an earlier run")
        with pytest.raises(OSError, match="No space left"):
            keep_tokenizer(config, tmp_path / "run")
    copies = {path.name: path for path in (tmp_path / "run" / "tokenizer").iterdir()}
    assert sorted(copies) == ["tokenizer.json", "tokenizer_config.json"]
    assert copies["tokenizer.json"].read_text() == "of an earlier run"
    keep_tokenizer(config, tmp_path / "run")
    shutil.rmtree(tmp_path / "words")
    assert load_tokenizer(config, tmp_path / "run").eod == 257


def full_after_a_half(source, target):
    """A disk that takes no more."""
    Path(target).write_bytes(Path(source).read_bytes()[:9])
    raise OSError(28, "No space left on device")


def test_a_tokenizer_goes_aside_with_its_run(tmp_path):
    for name in ("tokenizer/vocab.json", "iter_0000001/run.json", "iter_0000002/run.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("{}")
    branch = set_later_aside(tmp_path, 1)
    assert (branch / "tokenizer" / "vocab.json").exists()
    assert (tmp_path / "tokenizer" / "vocab.json").exists()
    whole = set_aside(tmp_path)
    assert (whole / "tokenizer" / "vocab.json").exists()
    assert not (tmp_path / "tokenizer").exists()


def test_a_vocabulary_that_ranks_cannot_share_is_said():
    """GPT-2 of Hugging Face's has 50,257 rows."""
    config = TrainConfig(**recipe("quickstart") | {"make_vocab_size_divisible_by": 128})
    rows = [vocabulary_rows(config, 500, ranks=2, saved=n) for n in (0, 499, 500, 502)]
    assert rows == [512, 512, 500, 502]
    with pytest.raises(ValueError, match="2 tensor-parallel ranks can share, got one of 501 rows"):
        vocabulary_rows(config, 500, ranks=2, saved=501)


def test_a_vocabulary_of_as_many_rows_as_are_asked_for():
    """The published models', whatever the tokenizer and however many ranks share them."""
    config = TrainConfig(**recipe("qwen3-30b-a3b"))
    rows = [vocabulary_rows(config, tokens, ranks=n) for tokens, n in ((151_643, 1), (500, 4))]
    assert rows == [151_936] * 2
    with pytest.raises(ValueError, match=r"at least 151937, the tokens of the tokenizer, got"):
        vocabulary_rows(config, 151_937, ranks=1)
    with pytest.raises(ValueError, match=r"a multiple of --tensor-model-parallel-size 3, got 151"):
        vocabulary_rows(config, 500, ranks=3)
    padded = resolve(parse(["--recipe", "qwen3-30b-a3b", "--make-vocab-size-divisible-by", "64"]))
    assert vocabulary_rows(padded, 500, ranks=2) == 512  # what is said later counts
    asked = resolve(parse(["--pad-vocab-size-to", "640"]))  # Megatron-DeepSpeed's name
    assert vocabulary_rows(asked, 500, ranks=2) == 640


def test_types_are_those_of_mb_data():
    assert TOKENIZER_TYPES == MADE_FROM


def test_documents_end_as_mb_data_was_told(tmp_path):
    """BERT's vocabulary has no end of a document of its own."""
    text, said = tmp_path / "text.jsonl", {"tokenizer": "bert-base-uncased", "eod_token": "[SEP]"}
    text.write_text('{"text": "one two"}\n{"text": "three"}\n')
    theirs = mb_data.load_tokenizer("bert-base-uncased", eod_token="[SEP]")
    mb_data.preprocess(text, tmp_path / "text", tokenizer=theirs, append_eod=True, workers=1)
    (tokens,) = [np.concatenate(mb_data.IndexedDataset(tmp_path / "text_text_document")[:])]
    config = TrainConfig(**recipe("quickstart") | said | {"reset_attention_mask": True})
    tokenizer = load_tokenizer(config)
    assert tokenizer.fingerprint == theirs.fingerprint
    batch = one_process_task(config, tokenizer, vocab_size=32000).collate([tokens])
    assert batch["ends_BN"].tolist() == [[3, 4]]
    told = TrainConfig(**recipe("quickstart") | said | {"eod_token": None})
    with pytest.raises(ValueError, match="bert-base-uncased, which has none"):
        one_process_task(told, load_tokenizer(told), vocab_size=32000)


def test_a_model_learns_another_end_from_its_weights_on(tmp_path, monkeypatch, capsys):
    """As a converted one, whose folder names the end of a text, where the data has turns."""
    monkeypatch.chdir(tmp_path)
    assert main([*TINY[:-2], "--mock-data", "--vocab-extra-ids=1", "--save=run"]) == 0
    on = ["--load=run", "--save=next", "--eod-token=<extra_id_0>"]
    assert main([*on, "--train-iters=2"]) == 2
    assert "--eod-token" in capsys.readouterr().err
    assert main([*on, "--train-iters=1", "--finetune"]) == 0
    (file,) = (tmp_path / "next" / "data").glob("*.bin")
    assert mb_data.IndexedDataset(file.with_suffix(""))[0][-1] == 50257


def test_a_library_that_reads_a_tokenizer_is_named(tmp_path, monkeypatch, capsys):
    """By every command as the caller's to install, and to clients of a server too."""
    words = {"type": "WordLevel", "vocab": {"a": 0, "<e>": 1}, "unk_token": "<e>"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": words, "added_tokens": []}))
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    config = TrainConfig(**recipe("quickstart") | {"tokenizer": str(tmp_path)})
    for read in (load_tokenizer, chat_tokenizer):
        with pytest.raises(ValueError, match="needs the tokenizers library: pip install"):
            read(config)
    with pytest.raises(ValueError, match="needs the tokenizers library: pip install"):
        find_tokenizer(tmp_path)
    assert main([*TINY[:-2], "--mock-data", f"--tokenizer={tmp_path}"]) == 2
    assert "needs the tokenizers library: pip install" in capsys.readouterr().err


def test_a_sample_corpus_with_another_end_is_another(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mb_train.data.sample._SAMPLE_BYTES", 30_000)
    for end in ([], ["--eod-token=<extra_id_0>"]):
        assert main([*TINY[:-2], "--vocab-extra-ids=1", *end]) == 0
    files = (tmp_path / "runs" / "data").glob("*.bin")
    ends = sorted(mb_data.IndexedDataset(path.with_suffix(""))[0][-1] for path in files)
    assert ends == [50256, 50257]


def test_a_sample_corpus_of_another_tokenizer_at_the_same_place_is_another(tmp_path, monkeypatch):
    """The first one's tokens were trained on, which mean something else."""
    monkeypatch.setattr("mb_train.data.sample._SAMPLE_BYTES", 30_000)
    letters = [chr(code) for code in range(33, 127)]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{c}" for c in letters)]
    (tmp_path / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))
    for kind in ("BertWordPieceLowerCase", "BertWordPieceCase"):
        tokenizer = mb_data.megatron_tokenizer(
            kind, vocab_file=tmp_path / "vocab.txt", eod_token="[SEP]"
        )
        task = SimpleNamespace(sentences=False)
        tokens = mb_data.IndexedDataset(sample_corpus(tokenizer, task, tmp_path / "data", print))[0]
        text = json.loads((tmp_path / "data" / "sample.jsonl").read_text().split("\n")[0])["text"]
        assert tokens.tolist() == [*tokenizer.encode(text), tokenizer.eod]
