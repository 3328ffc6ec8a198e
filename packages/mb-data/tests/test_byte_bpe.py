"""Files of the structure that today's models publish, on the engine, against the library that each
belongs to. The vocabularies are GPT-2's merges or small ones: what differs between models is how
text is normalized and cut, and what is special."""

import json
import random
import unicodedata

import numpy as np
import pytest
from mb_data import load_tokenizer
from mb_data.tokenizer import fast_bpe
from mb_data.tokenizer.disputed import disputed_letters
from mb_data.tokenizer.fast_bpe import SINGLE_BYTES
from mb_data.tokenizer.readable_bpe import ReadableBPE
from tokenizer_helpers import GPT2, QWEN, STRUCTURES, TEXTS, added, bpe_json, library, random_texts

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture(scope="module", params=STRUCTURES)
def structure(request, tmp_path_factory):
    description = bpe_json(*STRUCTURES[request.param])
    path = tmp_path_factory.mktemp(request.param) / "tokenizer.json"
    path.write_text(json.dumps(description))
    return path, library(description)


@pytest.mark.sweep(2)
def test_byte_level_structures_reach_the_engine(structure):
    path, judge = structure
    tokenizer, readable = load_tokenizer(path), load_tokenizer(path, engine="python")
    assert tokenizer.engine == "gigatoken"
    texts = [*TEXTS, *random_texts(1, 300)]
    known = disputed_letters()
    rows = tokenizer.encode_batch(texts)
    assert tokenizer.careful_documents == len(known.find([t.encode() for t in texts])) + 1
    for text, row in zip(texts, rows, strict=True):
        assert row == readable.encode(text)
        if not known.find([text.encode()]):
            assert row == judge.encode(text, add_special_tokens=False).ids
    assert max(map(max, filter(None, rows))) < 50256  # no control token
    form = tokenizer.readable.form
    for text in TEXTS:
        normal = unicodedata.normalize(form, text) if form else text
        assert tokenizer.decode(tokenizer.encode(text)) == normal
    assert load_tokenizer(path, eod_token="<think>").eod == 50256


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "pattern", [r" ?[^(\s|[.,!?…。])]+", r"\p{Han}+|[\p{L}&&[^\p{Han}]]+|\s*[\r\n]+|\s"]
)
@pytest.mark.parametrize("engine", ["auto", "python"])
def test_sets_of_letters_within_sets(tmp_path, pattern, engine):
    """BLOOM's and Kimi's expressions, which `regex` reads otherwise by default."""
    description = bpe_json((pattern,), None, False)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(description))
    tokenizer, judge = load_tokenizer(path, engine=engine), library(description)
    for text in ("abc, (def) x|y&z [a]. 你好abc\n\n1", *random_texts(2, 30)):
        assert tokenizer.encode(text) == judge.encode(text, add_special_tokens=False).ids


@pytest.mark.sweep(2)
def test_every_letter_of_unicode(structure):
    """Engine and twin agree on every undisputed letter in four surroundings, and where a letter is
    disputed the document takes the readable way.

    The engine asks the same tables for all structures: letters are shared out between them.
    """
    path, _ = structure
    number = list(STRUCTURES).index(path.parent.name[:-1])
    tokenizer = load_tokenizer(path)
    known = disputed_letters()
    skip = {*range(0xD800, 0xE000), *range(0x3400, 0x9FF0), *range(0xAC10, 0xD7A0)}
    points = [p for p in range(0x80, 0x30000) if p not in skip and not known.points[p]]
    points = [p for p in points if p < 0x250 or p % (5 if p < 0x3000 else 55) == number]
    surroundings = ["a{0}b {0} {0}c{0}'s 1{0}2\n{0}\r\n", "A{0}A{0}{0}.{0}\t{0} {0}\u0301"]
    for around in surroundings:
        texts = [around.format(chr(p)).encode() for p in points]
        tokens, lengths = tokenizer.encode_documents(texts)
        ends = lengths.cumsum()
        for text, n, end in zip(texts, lengths.tolist(), ends.tolist(), strict=True):
            assert tokens[end - n : end].tolist() == tokenizer.readable.encode(text.decode()), text
    assert tokenizer.careful_documents == 0
    text = "a\U0001fae9's \U00010d4a"  # Unicode 16
    assert tokenizer.encode(text) == tokenizer.readable.encode(text)
    assert tokenizer.careful_documents == 1


@pytest.mark.sweep(2)
def test_care_is_taken_of_what_surrounds_a_letter_not_of_the_document(structure, monkeypatch):
    tokenizer = load_tokenizer(structure[0])
    rng = random.Random(1)
    signs = [*" \n\t'aZ0.(/é中²\u0301", "\n\n", "  ", "'s ", " = ", "word ", " 2026"]
    texts = []
    for letters in (0, 1, 3, 0, 2):
        text = rng.choices(signs, k=4000)
        for place in range(letters):
            text[1000 + 40 * place] = "\U00010d4a"
        texts.append("".join(text))
    read: list[bytes] = []
    monkeypatch.setattr(
        tokenizer, "_read", lambda texts, way=tokenizer._read: read.extend(texts) or way(texts)
    )
    tokens, lengths = tokenizer.encode_documents([text.encode() for text in texts])
    assert lengths.tolist() == [len(tokenizer.readable.encode(text)) for text in texts]
    assert tokens.tolist() == [i for text in texts for i in tokenizer.readable.encode(text)]
    assert tokenizer.careful_documents == 3
    assert sum("\U00010d4a" in piece.decode() for piece in read) == len(read) > 2
    assert sum(map(len, read)) < 3000

    odd = ReadableBPE(SINGLE_BYTES, [], [r"\S+ ?|\s+"])  # whose words end with the space
    assert odd.pieces(texts[1].encode()) == [texts[1].encode()]


def test_the_engine_is_loaded_for_the_first_text(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text(json.dumps(bpe_json(*STRUCTURES["qwen3"])))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.engine == "gigatoken"
    assert "engine" not in vars(tokenizer._fast)
    tokens = tokenizer.encode("a b")
    assert tokens == tokenizer.readable.encode("a b")
    assert "engine" in vars(tokenizer._fast)

    def refuse(*_):
        raise RuntimeError("rank 17 is odd")

    tokenizer = load_tokenizer(tmp_path)
    monkeypatch.setattr(fast_bpe, "_from_merges", refuse)
    with pytest.warns(RuntimeWarning, match="cannot read this vocabulary .rank 17 is odd"):
        assert tokenizer.encode("a b") == tokens
    assert tokenizer.engine == "python"


@pytest.mark.parametrize("append_eod", [False, True])
def test_no_text_is_a_separator(append_eod):
    """A document that ended like the separator's start used to lose its tail to the next one."""
    tokenizer = load_tokenizer("gpt2")
    marks = ["\x00<mb-data: end of document>", "\x00<mb-data: end of document>\x00"]
    pieces = [mark[a:b] for mark in marks for a in (0, 1) for b in range(len(mark) - 2, 29)]
    rng = random.Random(0)
    texts = ["".join(rng.choices([*pieces, "x", "y "], k=3)) for _ in range(300)]
    texts += [f"{'x' * count}{marks[0]} y" for count in range(220, 260)]  # cut in the middle of it
    tokens, lengths = tokenizer.encode_documents(
        [text.encode() for text in texts], append_eod=append_eod
    )
    ends = lengths.cumsum()
    tail = [50256] if append_eod else []
    for text, n, end in zip(texts, lengths.tolist(), ends.tolist(), strict=True):
        assert tokens[end - n : end].tolist() == GPT2.encode(text) + tail


def test_added_white_space_is_text(tmp_path):
    """GPT-NeoX keeps runs of spaces as added tokens: text, not control."""
    description = bpe_json((QWEN,), None, False)
    description["added_tokens"] += [added(50300, " " * 8, False, normalized=True)]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(description))
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("a" + " " * 8 + "b").count(50300) == 1
    assert 50256 not in tokenizer.encode("<think>")
    assert tokenizer.decode([50256, 64]) == "<think>a"


def test_disputed_letters_are_found_in_any_company():
    rng = random.Random(9)
    known = disputed_letters()
    pool = [
        0x20,
        0x61,
        0xE9,
        0x416,
        0x4F60,
        0xAC00,
        0x1F642,
        0x295,
        0x378,
        0x20C1,
        0x1FAE9,
        0xE0080,
    ]
    texts = ["".join(map(chr, rng.choices(pool, [9] * 7 + [1] * 5, k=6))) for _ in range(2000)]
    expected = [i for i, t in enumerate(texts) if any(known.points[ord(c)] for c in t)]
    assert 100 < len(expected) < 1900
    assert known.find([t.encode() for t in texts]) == expected
    everything = np.flatnonzero(~known.points)
    text = "".join(map(chr, everything[(everything < 0xD800) | (everything > 0xDFFF)].tolist()))
    assert known.find([text.encode()]) == []
