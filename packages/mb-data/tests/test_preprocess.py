"""JSON Lines in, the bytes Megatron would write out; or one clear error and nothing at all."""

import gzip
import os
from pathlib import Path

import mb_data.maintenance
import numpy as np
import pytest
from mb_data import IndexedDataset, load_tokenizer
from mb_data.text.encode import Job, encode_block
from mb_data.text.reading import Block
from mb_data.text.sentences import SentenceSplitter
from preprocess_helpers import GPT2, documents, output_bytes, preprocess, random_records, write

TEXTS = ["Hello world", "", "a<|endoftext|>b", "Grüße 你好\n\n  x", "z" * 5000, " "]


@pytest.mark.parametrize("append_eod", [False, True])
def test_documents_in_order_without_the_empty(tmp_path, append_eod):
    source = write(tmp_path / "in.jsonl", [{"id": i, "text": t} for i, t in enumerate(TEXTS)])
    summary = preprocess(source, tmp_path / "out", append_eod=append_eod, workers=1)
    gpt2 = load_tokenizer("gpt2", engine="python")
    eod = [50256] if append_eod else []
    expected = [gpt2.encode(text) + eod for text in TEXTS if text]
    assert documents(tmp_path / "out_text_document") == expected
    assert (summary.documents, summary.empty, summary.bad_lines) == (5, 1, 0)
    assert summary.tokens == sum(map(len, expected))
    assert summary.text_bytes == sum(len(t.encode()) for t in TEXTS)
    assert summary.outputs == (f"{tmp_path}/out_text_document",)
    assert IndexedDataset(summary.outputs[0]).dtype.name == "uint16"
    assert sorted(os.listdir(tmp_path)) == [
        "in.jsonl",
        "out_text_document.bin",
        "out_text_document.idx",
    ]


def test_output_depends_neither_on_workers_nor_on_blocks_nor_on_the_engine(tmp_path):
    source = write(tmp_path / "in.jsonl", random_records(1, 400))
    packed = tmp_path / "in.jsonl.gz"
    packed.write_bytes(gzip.compress(source.read_bytes()))
    outputs = set()
    for workers, block_bytes, path, engine in [
        (1, 4 << 20, source, "gigatoken"),
        (2, 10_000, source, "gigatoken"),
        (3, 1000, source, "python"),
        (2, 5000, packed, "gigatoken"),
    ]:
        preprocess(
            path,
            tmp_path / "out",
            tokenizer=load_tokenizer("gpt2", engine=engine),
            append_eod=True,
            workers=workers,
            block_bytes=block_bytes,
        )
        outputs.add(output_bytes(tmp_path / "out_text_document"))
    assert len(outputs) == 1


def test_several_keys_and_files(tmp_path):
    a = write(tmp_path / "a.jsonl", [{"title": "A", "text": "first"}, {"title": "", "text": "x"}])
    b = write(tmp_path / "b.jsonl", [{"title": "B", "text": "last"}])
    summary = preprocess([a, b], tmp_path / "out", json_keys=["text", "title"], workers=1)
    encode = GPT2.encode
    assert documents(tmp_path / "out_text_document") == [*map(encode, ["first", "x", "last"])]
    assert documents(tmp_path / "out_title_document") == [encode("A"), encode("B")]
    assert (summary.documents, summary.empty) == (5, 1)
    preprocess(b, tmp_path / "one", json_keys="title", workers=1)
    assert documents(tmp_path / "one_title_document") == [encode("B")]


@pytest.mark.parametrize("split", [False, True])
def test_empty_documents_kept(tmp_path, split):
    if split:
        pytest.importorskip("sentencex")
    texts = [("", "a"), ("One. Two.", ""), ("", ""), ("Three.", "b"), ("Four.", "c"), ("", "d")]
    source = write(tmp_path / "in.jsonl", [{"text": t, "title": n} for t, n in texts])
    how = {"json_keys": ["text", "title"], "append_eod": True, "split_sentences": split}
    written = set()
    for workers, block_bytes in (1, 4 << 20), (2, 40):
        summary = preprocess(
            source,
            tmp_path / "out",
            keep_empty=True,
            workers=workers,
            block_bytes=block_bytes,
            **how,
        )
        written.add(tuple(map(output_bytes, map(Path, summary.outputs))))
    assert len(written) == 1
    assert (summary.documents, summary.empty) == (12, 5)
    # Every document is of its line; what has tokens is as without those that have none.
    for output, column in zip(summary.outputs, zip(*texts, strict=True), strict=True):
        assert mb_data.maintenance.validate(output) == []
        found = IndexedDataset(output)
        assert [len(found.document(i)) > 0 for i in range(6)] == [text != "" for text in column]
    kept = [documents(output) for output in summary.outputs]
    preprocess(source, tmp_path / "out", workers=1, **how)
    assert kept == [documents(output) for output in summary.outputs]


@pytest.mark.parametrize("append_eod", [False, True])
@pytest.mark.parametrize("keep_newlines", [False, True])
def test_split_sentences(tmp_path, append_eod, keep_newlines):
    pytest.importorskip("sentencex")
    texts = ["One here. Two there.\n\nThree, Dr. Smith?", "", " \n ", "Alone", "Tail. \n"]
    source = write(tmp_path / "in.jsonl", [{"text": t} for t in texts])
    summary = preprocess(
        source,
        tmp_path / "out",
        split_sentences=True,
        keep_newlines=keep_newlines,
        append_eod=append_eod,
        workers=1,
    )
    assert summary.outputs == (f"{tmp_path}/out_text_sentence",)
    dataset = IndexedDataset(summary.outputs[0])
    found = [
        [GPT2.decode(s) for s in dataset[a:b]]
        for a, b in zip(dataset.document_indices, dataset.document_indices[1:], strict=False)
    ]
    end = "<|endoftext|>" if append_eod else ""
    if keep_newlines:
        assert ["".join(document) for document in found] == [t + end for t in texts if t]
        assert len(found[0]) >= 3
    else:
        assert found == [
            ["One here.", "Two there.", f"Three, Dr. Smith?{end}"],
            [f"Alone{end}"],
            [f"Tail.{end}"],
        ]
    assert summary.documents == len(found)
    assert summary.empty == len(texts) - len(found)


@pytest.mark.parametrize("keep_newlines", [False, True])
@pytest.mark.parametrize("space", ["\u00a0", "\u2009", "\u2028", "\u3000", " \u00a0"])
def test_a_wide_space_between_an_initial_and_its_full_stop(space, keep_newlines):
    """Whatever space it is, and it stays in the sentence."""
    pytest.importorskip("sentencex")
    text = f"É. Take plan B{space}. Then go\u00a0on. Said J{space}. K. Rowling."
    plain = text.replace(space, " ")
    found, expected = (SentenceSplitter(keep_newlines=keep_newlines)(t) for t in (text, plain))
    assert [sentence.replace(space, " ") for sentence in found] == expected
    assert len(expected) > 2


def test_a_text_that_sentencex_panics_at_is_a_bad_line(tmp_path, monkeypatch):
    class PanicException(BaseException):  # as Rust's
        pass

    def panic(code, text):
        if "worse" in text:
            raise PanicException("byte index 3")
        return [text]

    monkeypatch.setattr(SentenceSplitter, "_segment", staticmethod(lambda: panic))
    job = Job(GPT2, ("text",), False, None, np.dtype("<u2"), 1000, SentenceSplitter())
    lines = b"".join(b'{"text": "%s"}\n' % text for text in (b"bad", b"worse", b"worst"))
    arrays, result = encode_block(job, Block("in.jsonl", 0, len(lines), lines, 0))
    assert arrays[0].tolist() == [*GPT2.encode("bad"), *GPT2.encode("worst")]
    assert result.errors == [(1, 1, "sentencex cannot split this text: byte index 3")]


@pytest.mark.parametrize("content", [b"", b"\n\n", b'{"text": ""}\n'], ids=["0", "blank", "empty"])
def test_nothing_to_write(tmp_path, content):
    source = tmp_path / "in.jsonl"
    source.write_bytes(content)
    with pytest.raises(ValueError, match=r"no document with text under 'text' in .*in\.jsonl"):
        preprocess(source, tmp_path / "out", workers=1)
    assert os.listdir(tmp_path) == ["in.jsonl"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": object()}, "file or folder, got object; give one of transformers as"),
        ({"tokenizer": "gpt3"}, "unknown tokenizer 'gpt3'; did you mean gpt2"),
        ({"dtype": "uint8"}, "gpt2 has 50,257 entries, uint8 holds ids up to 255"),
        ({"dtype": "float64"}, "dtype 'float64': expected one of uint8, "),
        ({"tokenizer": "bert-base-uncased", "append_eod": True}, "has no eod token"),
        ({"json_keys": []}, "one or more different names"),
        ({"json_keys": ["a", "a"]}, "one or more different names"),
        ({"json_keys": ["a/b"]}, "'a/b' cannot be part of a file's name"),
        ({"workers": 0}, "workers must be at least 1"),
        ({"output_prefix": "out/"}, "'out/': expected one that ends in a name"),
        ({"output_prefix": "."}, "'.': expected one that ends in a name"),
        ({"on_error": "ignore"}, "expected stop or skip"),
        ({"split_sentences": True, "language": "klingonese"}, "give an ISO 639 code"),
    ],
)
def test_wrong_settings(tmp_path, options, message):
    options = dict(options)
    source = write(tmp_path / "in.jsonl", [{"text": "a"}])
    if "split_sentences" in options:
        pytest.importorskip("sentencex")
    with pytest.raises(ValueError, match=message):
        preprocess(source, options.pop("output_prefix", tmp_path / "out"), **options)
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_numbers_of_numpy_and_no_fractions(tmp_path):
    source = write(tmp_path / "in.jsonl", random_records(0, 40))
    for name, number in (("plain", int), ("numpy", np.int64)):
        sizes = {"block_bytes": number(500), "max_line_bytes": number(10**6)}
        preprocess(
            source, tmp_path / name, workers=number(2), shard=(number(1), number(2)), **sizes
        )
    assert output_bytes(tmp_path / "numpy_text_document") == output_bytes(
        tmp_path / "plain_text_document"
    )
    before = sorted(os.listdir(tmp_path))
    for wrong in ({"workers": 1.5}, {"block_bytes": 1e6}, {"shard": (0, 2.0)}):
        with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
            preprocess(source, tmp_path / "out", **wrong)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_directory_where_the_output_goes(tmp_path):
    source = write(tmp_path / "in.jsonl", [{"text": "a"}])
    (tmp_path / "out_text_document.idx").mkdir()
    with pytest.raises(ValueError, match=r"out_text_document\.idx is a directory"):
        preprocess(source, tmp_path / "out", workers=1)
    (tmp_path / "bad_skipped.txt").mkdir()  # found at the end, with the dataset in its place
    with pytest.raises(ValueError, match=r"bad_skipped\.txt is a directory; choose another output"):
        preprocess(source, tmp_path / "bad", workers=1)
    with pytest.raises(FileNotFoundError, match=r"no: no such directory for the output"):
        preprocess(source, tmp_path / "no" / "out")
    assert sorted(os.listdir(tmp_path)) == [
        "bad_skipped.txt",
        "in.jsonl",
        "out_text_document.idx",
    ]


def test_a_name_that_is_too_long_for_the_output_is_said_before_the_work(tmp_path):
    """That of the unfinished output is shorter, and would be taken."""
    source = tmp_path / "in.jsonl"
    source.write_text("a bad line")
    with pytest.raises(OSError, match=r"too long: .*y_text_document.bin"):
        preprocess(source, tmp_path / ("y" * 240), workers=1)


class TooFew(mb_data.Tokenizer):
    """Whose size leaves its special token out: 65,536 does not fit what the others do."""

    name, fingerprint, vocab_size = "too few", "1", 60_000
    special = {"eod": 65_536}  # noqa: RUF012, as tokenizers have it

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode()


def test_a_token_beyond_its_tokenizers_size_is_told_of(tmp_path):
    """As uint16 it was 0."""
    source = write(tmp_path / "in.jsonl", [{"text": "a"}, {"text": ""}])
    preprocess(source, tmp_path / "out", tokenizer=TooFew(), workers=1)
    assert documents(tmp_path / "out_text_document") == [[97]]
    with pytest.raises(ValueError, match=r"line 1: tokenizer too few gave token 65536, but its v"):
        preprocess(source, tmp_path / "out", tokenizer=TooFew(), workers=1, append_eod=True)


def test_chosen_dtype(tmp_path):
    source = write(tmp_path / "in.jsonl", [{"text": "a b"}])
    preprocess(source, tmp_path / "out", dtype="int64", workers=1)
    assert IndexedDataset(tmp_path / "out_text_document").dtype == np.int64
    assert documents(tmp_path / "out_text_document") == [[64, 275]]
    with pytest.raises(ValueError, match="int32 holds ids up to 2,147,483,647; give a wider"):
        preprocess(source, tmp_path / "out", tokenizer="null:3000000000", workers=1)


class LyingEngine:
    """The real engine, but for one token."""

    def __init__(self, engine):
        self.engine = engine

    def encode(self, data):
        tokens = self.engine.encode(data)
        tokens[tokens == 3290] = 3797  # " dog" becomes " cat"
        return tokens


@pytest.mark.parametrize("append_eod", [False, True])
@pytest.mark.parametrize("tail", ["", " and more." * 1000], ids=["short", "long"])
def test_a_difference_between_engines_stops_the_run(tmp_path, append_eod, tail):
    tokenizer = load_tokenizer("gpt2")
    tokenizer._fast.engine = LyingEngine(tokenizer._fast.engine)
    source = write(tmp_path / "in.jsonl", [{"text": f"The quick dog.{tail}"}])
    with pytest.raises(ValueError, match=r"line 1, 'text': .* differ at token 2, letter 9: \[3797"):
        preprocess(source, tmp_path / "out", tokenizer=tokenizer, append_eod=append_eod, workers=1)
    assert os.listdir(tmp_path) == ["in.jsonl"]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("packing", ["", ".gz"])
@pytest.mark.parametrize("count", [1, 3, 7])
def test_shards_merge_to_the_bytes_of_one_run(tmp_path, packing, count):
    sources = []
    for i in range(4):
        source = write(tmp_path / f"{i}.jsonl", random_records(i, 40))
        if packing:
            (tmp_path / f"{i}.jsonl.gz").write_bytes(gzip.compress(source.read_bytes()))
        sources.append(tmp_path / f"{i}.jsonl{packing}")
    options = {"workers": 1, "block_bytes": 3000, "append_eod": True}
    preprocess(sources, tmp_path / "once", **options)
    parts = []
    for i in range(count):
        parts += preprocess(sources, tmp_path / f"p{i}", shard=(i, count), **options).outputs
    mb_data.maintenance.merge(parts, tmp_path / "merged")
    assert output_bytes(tmp_path / "merged") == output_bytes(tmp_path / "once_text_document")


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("append_eod", [False, True])
def test_prepend_bos(tmp_path, split, append_eod):
    if split:
        pytest.importorskip("sentencex")
    texts = ["One here. Two there.", "", "Three."]
    source = write(tmp_path / "in.jsonl", [{"text": t} for t in texts])
    tokenizer = load_tokenizer("bert-base-uncased", eod_token="[SEP]")
    options = {"append_eod": append_eod, "split_sentences": split, "prepend_bos": True}
    preprocess(source, tmp_path / "out", tokenizer=tokenizer, workers=1, **options)
    dataset = IndexedDataset(tmp_path / f"out_text_{'sentence' if split else 'document'}")
    sequences = [["One here.", "Two there."], ["Three."]] if split else [[texts[0]], [texts[2]]]
    expected = []
    for document in sequences:
        rows = [tokenizer.encode(text) for text in document]
        rows[0] = [tokenizer.bos, *rows[0]]
        if append_eod:
            rows[-1] = [*rows[-1], tokenizer.eod]
        expected += rows
    assert [row.tolist() for row in dataset[:]] == expected
