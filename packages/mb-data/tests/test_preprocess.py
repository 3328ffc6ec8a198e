"""JSON Lines in, the bytes Megatron would write out; or one clear error and nothing at all."""

import json
import os
import random

import pytest
from mb_data import IndexedDataset, load_tokenizer, preprocess
from mb_data.cli import main

TEXTS = ["Hello world", "", "a<|endoftext|>b", "Grüße 你好\n\n  x", "z" * 5000, " "]


def write(path, records):
    path.write_bytes(b"".join(json.dumps(r).encode() + b"\n" for r in records))
    return path


def documents(prefix):
    dataset = IndexedDataset(prefix)
    return [x.tolist() for x in dataset[:]]


@pytest.mark.parametrize("append_eod", [False, True])
def test_documents_in_order_without_the_empty(tmp_path, append_eod):
    source = write(tmp_path / "in.jsonl", [{"id": i, "text": t} for i, t in enumerate(TEXTS)])
    summary = preprocess(source, tmp_path / "out", append_eod=append_eod, workers=1)
    gpt2 = load_tokenizer("gpt2", engine="python")
    eod = [50256] if append_eod else []
    expected = [gpt2.encode(text) + eod for text in TEXTS if text]
    assert documents(tmp_path / "out_text_document") == expected
    assert summary.documents == 5
    assert summary.empty == 1
    assert summary.tokens == sum(map(len, expected))
    assert summary.text_bytes == sum(len(t.encode()) for t in TEXTS)
    assert summary.outputs == (f"{tmp_path}/out_text_document",)
    assert IndexedDataset(summary.outputs[0]).dtype.name == "uint16"


def test_output_does_not_depend_on_workers(tmp_path):
    rng = random.Random(1)
    words = ["the", "of", "a", "to", "MoE", "expert", "12", "router,", "(x)", "=", "y\n"]
    records = [{"text": " ".join(rng.choices(words, k=rng.randrange(3000)))} for _ in range(800)]
    source = write(tmp_path / "in.jsonl", records)
    outputs = set()
    for workers in (1, 2, 3):
        preprocess(source, tmp_path / f"{workers}", append_eod=True, workers=workers)
        stem = tmp_path / f"{workers}_text_document"
        outputs.add((stem.with_suffix(".bin").read_bytes(), stem.with_suffix(".idx").read_bytes()))
    assert len(outputs) == 1


def test_several_keys_and_files(tmp_path):
    a = write(tmp_path / "a.jsonl", [{"title": "A", "text": "first"}, {"title": "", "text": "x"}])
    b = write(tmp_path / "b.jsonl", [{"title": "B", "text": "last"}])
    summary = preprocess([a, b], tmp_path / "out", json_keys=["text", "title"], workers=1)
    encode = load_tokenizer("gpt2").encode
    assert documents(tmp_path / "out_text_document") == [
        encode("first"),
        encode("x"),
        encode("last"),
    ]
    assert documents(tmp_path / "out_title_document") == [encode("A"), encode("B")]
    assert (summary.documents, summary.empty) == (5, 1)


BAD_LINES = {
    "broken JSON": (b'{"text": "a', "in.jsonl, line 3: Unterminated string"),
    "not an object": (b'["text"]', "line 3: expected a JSON object, got list"),
    "missing key": (b'{"txt": "a", "id": 1}', "line 3: no key 'text'; the keys are txt, id"),
    "not text": (b'{"text": null}', "line 3: the value of 'text' must be text, got NoneType"),
    "invalid UTF-8": (b'{"text": "a\xff"}', "line 3: .* can't decode byte 0xff"),
    "half a surrogate pair": (b'{"text": "a\\ud800"}', "line 3: .*surrogates not allowed"),
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("case", BAD_LINES)
def test_bad_line_names_its_place_and_leaves_nothing(tmp_path, case, workers, capsys):
    line, message = BAD_LINES[case]
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"text": "a"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=message):
        preprocess(source, tmp_path / "out", workers=workers)
    assert os.listdir(tmp_path) == ["in.jsonl"]


@pytest.mark.parametrize("content", [b"", b"\n\n", b'{"text": ""}\n'], ids=["0", "blank", "empty"])
def test_nothing_to_write(tmp_path, content):
    source = tmp_path / "in.jsonl"
    source.write_bytes(content)
    with pytest.raises(ValueError, match=r"no document in .*in\.jsonl"):
        preprocess(source, tmp_path / "out", workers=1)
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_command_line(tmp_path, capsys):
    source = write(tmp_path / "in.jsonl", [{"text": t} for t in TEXTS])
    arguments = ["preprocess", "--input", str(source), "--output-prefix", str(tmp_path / "out")]
    assert main([*arguments, "--append-eod", "--workers", "1"]) == 0
    assert "5 documents" in capsys.readouterr().out
    assert main([*arguments, "--tokenizer", "gpt3"]) == 2
    assert capsys.readouterr().err == (
        "mb-data preprocess: unknown tokenizer 'gpt3'; known: gpt2\n"
    )
    assert main([*arguments[:2], "missing.jsonl", *arguments[3:]]) == 2
    assert "missing.jsonl: no such file" in capsys.readouterr().err
    assert main([*arguments[:-1], str(tmp_path / "no" / "out")]) == 2
    assert "no such directory" in capsys.readouterr().err
