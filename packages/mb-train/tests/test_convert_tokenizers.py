"""What lies beside a Hugging Face model's weights: tokenizers, and where texts begin and end."""

import json
import os
import shutil

import pytest
from mb_data import load_tokenizer
from mb_data.tokenizer.readable_bpe import byte_to_letter
from mb_train.cli import main
from mb_train.convert import export_model, import_model
from mb_train.convert.hugging_face.tokenizer import find_tokenizer
from mb_train.inference.decoding import Sampling
from mb_train.inference.generate import Generator
from mb_train.loading import load_trained
from their_models import DEEP, theirs, transformers


def test_what_lies_beside_the_weights_is_kept(tmp_path, monkeypatch):
    """Templates, generation settings, special tokens; from pieces, and through a moved folder."""
    monkeypatch.chdir(tmp_path)
    hf = tmp_path / "hf"
    theirs("olmoe", pad_token_id=3, bos_token_id=None, eos_token_id=2).save_pretrained(
        hf, max_shard_size="20KB"
    )
    assert len(list(hf.glob("*.safetensors"))) > 2
    words = {chr(33 + i): i + 4 for i in range(70)} | {"<e>": 2, "<p>": 3}
    model = {"type": "BPE", "vocab": words, "merges": []}
    added = [{"id": words[w], "content": w, "special": True} for w in ("<e>", "<p>")]
    beside = {
        "tokenizer.json": json.dumps({"model": model, "added_tokens": added}),
        "tokenizer_config.json": json.dumps({"eos_token": "<e>", "pad_token": "<p>"}),
        "chat_template.jinja": "{{ messages }}",
        "generation_config.json": json.dumps({"temperature": 0.7, "eos_token_id": [2, 3]}),
    }
    for name, text in beside.items():
        (hf / name).write_text(text)
    import_model(hf, tmp_path / "run", say=lambda line: None)
    (tmp_path / "run").rename("moved")
    export_model(tmp_path / "moved", tmp_path / "back", say=lambda line: None)
    assert {name: (tmp_path / "back" / name).read_text() for name in beside} == beside
    before, after = (json.loads((d / "config.json").read_text()) for d in (hf, tmp_path / "back"))
    special = [f"{role}_token_id" for role in ("bos", "eos", "pad")]
    assert [before[name] for name in special] == [after[name] for name in special]


def test_texts_end_as_theirs(tmp_path):
    """A chat model's end of a turn is not the end of a document: it names both, and more."""
    theirs("llama").save_pretrained(tmp_path / "hf")
    words = {chr(33 + i): i + 4 for i in range(70)} | {"<e>": 2}
    model = {"type": "BPE", "vocab": words, "merges": []}
    added = [{"id": 2, "content": "<e>", "special": True}]
    (tmp_path / "hf" / "tokenizer.json").write_text(
        json.dumps({"model": model, "added_tokens": added})
    )
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<e>"}))
    about = tmp_path / "hf" / "generation_config.json"
    about.unlink()
    import_model(tmp_path / "hf", tmp_path / "run", say=lambda line: None)

    def completed(run):
        generator = Generator(load_trained(tmp_path / run))
        steps = generator.stream(["Ab"], Sampling(temperature=0), max_new_tokens=6, likeliest=1)
        *_, (found,) = steps
        assert len(found.likelihoods) == len(found.tokens) + (found.end is not None)
        return found

    endless = completed("run")
    assert (len(endless.tokens), endless.finish_reason) == (6, "length")
    end = endless.tokens[4]
    until = endless.tokens[: endless.tokens.index(end)]
    for name, ends in (("one", end), ("several", [3, end])):
        about.write_text(json.dumps({"eos_token_id": ends}))
        import_model(tmp_path / "hf", tmp_path / name, say=lambda line: None)
        found = completed(name)
        assert (found.tokens, found.finish_reason) == (until, "stop")
    kept = tmp_path / "several" / "tokenizer" / about.name
    for wrong, says in (
        ("[", "is damaged"),
        ("[1]", "is damaged"),
        ('{"eos_token_id": "<e>"}', "'<e>'"),
    ):
        kept.write_text(wrong)
        with pytest.raises(ValueError, match=says):
            completed("several")


LETTERS = {"<s>": 0, "</s>": 1, **{letter: 2 + i for i, letter in enumerate("\u2581abc")}}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
}  # fmt: skip


@pytest.mark.parametrize(
    "after",
    [None, TEMPLATE, {"type": "Sequence", "processors": [TEMPLATE]}],
    ids=["nothing", "template", "sequence"],
)
def test_texts_begin_as_theirs(tmp_path, after, monkeypatch):
    """A Llama knows texts that begin with its token for that, and continues others badly."""
    theirs("llama").save_pretrained(tmp_path / "hf")
    spaces = {
        "type": "Metaspace",
        "replacement": "\u2581",
        "prepend_scheme": "first",
        "split": False,
    }
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = [
        {"id": i, "content": w, "special": True, **plain} for w, i in LETTERS.items() if i < 2
    ]
    files = {
        "tokenizer.json": {
            "model": {"type": "BPE", "vocab": LETTERS, "merges": []}, "added_tokens": special,
            "pre_tokenizer": spaces, "decoder": spaces, "post_processor": after,
        },
        "tokenizer_config.json": {
            "bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"
        },
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / "hf" / name).write_text(json.dumps(content))
    import_model(tmp_path / "hf", tmp_path / "run", say=lambda line: None)
    named = str(tmp_path / "hf" / "tokenizer.json")
    import_model(tmp_path / "hf", tmp_path / "named", tokenizer=named, say=lambda line: None)
    begins = load_trained(tmp_path / "named").tokenizer.prepend_bos
    assert begins == load_trained(tmp_path / "run").tokenizer.prepend_bos == (after is not None)
    # As of a run with --tokenizer, whose texts begin with nothing.
    read = "mb_train.convert.hugging_face.read.named_tokenizer"
    monkeypatch.setattr(read, lambda name: {"tokenizer": name})
    import_model(tmp_path / "hf", tmp_path / "bare", tokenizer=named, say=lambda line: None)
    lines: list[str] = []
    export_model(tmp_path / "bare", tmp_path / "from bare", say=lines.append)
    assert ("begins texts with <s>" in " ".join(lines)) == (after is not None)
    shutil.rmtree(tmp_path / "hf")
    lines.clear()
    export_model(tmp_path / "run", tmp_path / "back", say=lines.append)
    assert "begins texts" not in " ".join(lines)
    assert {name: json.loads((tmp_path / "back" / name).read_text()) for name in files} == files
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    generator = Generator(load_trained(tmp_path / "run"))
    for text in ("ab c", "a"):
        assert generator.tokens_of(text) == tokenizer(text)["input_ids"]
    assert generator.tokens_of("") == [0 if after else 1]


MADE = ["tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize(
    ("tokenizer", "kept"),
    [
        ("mine-vocab.json:mine-merges.txt", [*MADE, "merges.txt", "vocab.json"]),
        ("mine.json", ["tokenizer.json"]),
        ("mine-words.txt", [*MADE, "vocab.txt"]),
    ],
)
def test_tokenizer_files_have_the_names_that_theirs_know(tmp_path, tokenizer, kept):
    letters = byte_to_letter().values()
    words = {letter: i for i, letter in enumerate(letters)} | {"<|endoftext|>": 256}
    bpe = {"model": {"type": "BPE", "vocab": words, "merges": []}, "added_tokens": []}
    bpe["added_tokens"] = [{"id": 256, "content": "<|endoftext|>", "special": True}]
    (tmp_path / "mine-vocab.json").write_text(json.dumps(words))
    (tmp_path / "mine-merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "mine.json").write_text(json.dumps(bpe))
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (tmp_path / "mine-words.txt").write_text("\n".join([*marks, "hello"]) + "\n")
    for other in ("tokenizer.json", "vocab.txt", "spiece.model"):  # another's
        (tmp_path / other).write_text("{}")
    model = theirs("gpt2")
    model.save_pretrained(tmp_path / "hf")
    files = os.pathsep.join(str(tmp_path / name) for name in tokenizer.split(":"))
    import_model(tmp_path / "hf", tmp_path / "run", tokenizer=files, say=lambda line: None)
    export_model(tmp_path / "run", tmp_path / "back", say=lambda line: None)
    here = sorted(path.name for path in (tmp_path / "back").iterdir())
    assert here == sorted([*kept, "config.json", "model.safetensors"])
    if MADE[1] in kept:
        found, text = transformers.AutoTokenizer.from_pretrained(tmp_path / "back"), "hello, Été"
        assert found.encode(text, add_special_tokens=False) == load_tokenizer(files).encode(text)


def test_a_vocabulary_inside_mb_data_is_written(tmp_path, capsys):
    for kind in ("gpt2", "llama"):
        theirs(kind, vocab_size=50257).save_pretrained(tmp_path / kind)
        words = ["convert", f"{tmp_path / kind}", f"{tmp_path / kind}-run", "--tokenizer", "gpt2"]
        assert main(words) == 0
        assert main(["convert", words[2], f"{tmp_path / kind}-back"]) == 0
        assert "no files" not in capsys.readouterr().out
        tokenizer = transformers.AutoTokenizer.from_pretrained(f"{tmp_path / kind}-back")
        text = " Été 12\n\n  x<|endoftext|>"
        expected = [*load_tokenizer("gpt2").encode(text.removesuffix("<|endoftext|>")), 50256]
        assert dict(tokenizer(text)) == {
            "input_ids": expected, "attention_mask": [1] * len(expected),
        }  # fmt: skip


@pytest.mark.parametrize("about", ["{", "[]", DEEP], ids=["cut", "list", "deep"])
def test_a_damaged_word_on_a_tokenizer_is_named(tmp_path, about):
    (tmp_path / "vocab.txt").write_text("[UNK]\n")
    (tmp_path / "tokenizer_config.json").write_text(about)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is damaged"):
        find_tokenizer(tmp_path)
