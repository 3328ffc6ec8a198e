"""GPT-2's ids against tiktoken, an independent implementation, built from the same merges."""

import random
import subprocess
import sys
import unicodedata

import pytest
import tiktoken
from mb_data import load_tokenizer, padded_vocab_size
from mb_data.tokenizer.byte_bpe import ByteLevelBPE
from mb_data.tokenizer.fast_bpe import SEPARATOR
from mb_data.tokenizer.readable_bpe import GPT2_PATTERN, ReadableBPE, byte_to_letter

TEXTS = {
    "empty": "",
    "words": "Hello world, it's 2026 and they'll say I'd've 'tis",
    "end of text": "a<|endoftext|>b <|endoftext|>",
    "separator": f"x{SEPARATOR}y{SEPARATOR}",
    "half a separator": SEPARATOR[:-1] + " " + SEPARATOR[1:],
    "whitespace": "  a\n\n   b\t\tc\r\n \n x  ",
    "blank": "\n",
    "no-break space": "a\u00a0\u00a0b\u3000c\u2028d\u0085e",
    "code": "def f(x):\n    return x['a'] ** 2  # ok\n\n\nclass A:\n\tpass\n",
    "scripts": "Grüße, 你好世界, привет мир, שלום, สวัสดี, 👩‍👩‍👧‍👦 e\u0301 ½ ② Ⅷ",
    "nul": "a\x00b\x00",
    "long word": "a" * 3000 + "!" * 500 + " " * 700,
}


@pytest.fixture(scope="module")
def gpt2():
    return load_tokenizer("gpt2")


@pytest.fixture(scope="module")
def oracle(gpt2):
    return tiktoken.Encoding(
        name="gpt2-from-merges",
        pat_str=GPT2_PATTERN,
        mergeable_ranks={text: i for i, text in gpt2.byte_strings.items() if i != 50256},
        special_tokens={"<|endoftext|>": 50256},
    )


def random_texts(seed, count):
    """Mostly ASCII with runs of spaces, quotes and letters of every plane that is assigned."""
    rng = random.Random(seed)
    alphabet = "etaoin shrdlu  \n\t'''.,;:0123456789ABC(){}[]_-=\"\\/"
    for _ in range(count):
        letters = rng.choices(alphabet, k=rng.randrange(400))
        for _ in range(rng.randrange(20)):
            point = rng.choice([rng.randrange(0x80, 0x3000), rng.randrange(0x3000, 0xD800)])
            letters.insert(rng.randrange(len(letters) + 1), chr(point))
        yield "".join(letters)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("engine", ["gigatoken", "python"])
def test_gpt2_equals_tiktoken(name, engine, oracle):
    tokenizer = load_tokenizer("gpt2", engine=engine)
    assert tokenizer.engine == engine
    ids = tokenizer.encode(TEXTS[name])
    assert ids == oracle.encode_ordinary(TEXTS[name])
    assert tokenizer.decode(ids) == TEXTS[name]


def test_random_texts_equal_tiktoken(gpt2, oracle):
    texts = list(random_texts(0, 1000))
    expected = [oracle.encode_ordinary(text) for text in texts]
    assert gpt2.encode_batch(texts) == expected
    assert [gpt2.readable.encode(text) for text in texts[:300]] == expected[:300]


def test_every_letter_equals_tiktoken(gpt2, oracle):
    # Those of Unicode 3.2: what came later may be missing from one library's tables.
    known = unicodedata.ucd_3_2_0
    letters = [c for c in map(chr, range(0x110000)) if known.category(c) not in ("Cn", "Cs", "Co")]
    assert len(letters) > 90_000
    texts = [
        "\n".join(f"a{c}1 {c}{c} 'b" for c in letters[start : start + 500])
        for start in range(0, len(letters), 500)
    ]
    assert gpt2.encode_batch(texts) == [oracle.encode_ordinary(text) for text in texts]


def test_end_of_text_in_a_document_stays_text(gpt2):
    ids = gpt2.encode("<|endoftext|>")
    assert ids == [27, 91, 437, 1659, 5239, 91, 29]
    assert gpt2.eod == 50256 not in ids
    assert gpt2.decode([gpt2.eod]) == "<|endoftext|>"


@pytest.mark.sweep(2)
@pytest.mark.parametrize("engine", ["gigatoken", "python"])
@pytest.mark.parametrize("texts", [[], ["", ""], ["", "a b", "", "c"], [SEPARATOR, "d"]])
def test_bulk_forms_agree_with_one_by_one(engine, texts):
    tokenizer = load_tokenizer("gpt2", engine=engine)
    rows = [tokenizer.encode(text) for text in texts]
    data = [text.encode() for text in texts]
    for append_eod in (False, True):
        ended = [[*row, tokenizer.eod] if row and append_eod else row for row in rows]
        tokens, lengths = tokenizer.encode_documents(data, append_eod=append_eod)
        assert tokens.tolist() == [t for row in ended for t in row]
        assert lengths.tolist() == [len(row) for row in ended]
    assert tokenizer.encode_batch(texts) == rows


def test_vocabulary(gpt2):
    assert gpt2.vocab_size == 50257
    assert gpt2.decode([0, 188, 220, 255, 256]) == "!\x00 \ufffd t"
    with pytest.raises(ValueError, match="token 50257 is not in 0 to 50256"):
        gpt2.decode([1, 50257])
    with pytest.raises(ValueError, match="gpt2 has no mask token; it has: eod"):
        _ = gpt2.mask


def test_surrogates_are_refused(gpt2):
    with pytest.raises(ValueError, match="surrogates"):
        gpt2.encode("a\ud800b")


def test_merges_of_equal_rank_go_left_to_right():
    ids = {"a": 97, "aa": 256, "aaa": 257, "aaaa": 258}
    assert ReadableBPE(ids, ["a a", "aa a", "aa aa"]).encode("aaaaa") == [256, 257]


def test_broken_vocabularies():
    ids = {letter: byte for byte, letter in byte_to_letter().items()}
    kwargs = {"fingerprint": "x", "special": {}, "special_text": {}}
    with pytest.raises(ValueError, match="byte 0x61 is not in"):
        ByteLevelBPE("x", {letter: i for letter, i in ids.items() if letter != "a"}, [], **kwargs)
    with pytest.raises(ValueError, match=r"merge 'a b' makes no entry"):
        ByteLevelBPE("x", ids, ["a b"], **kwargs)
    with pytest.raises(ValueError, match=r"a letter of entry 'a你' stands for no byte"):
        ByteLevelBPE("x", ids | {"a你": 256}, [], **kwargs)
    with pytest.raises(ValueError, match="expected auto, gigatoken or python"):
        load_tokenizer("gpt2", engine="rust")


@pytest.mark.parametrize("engine", ["gigatoken", "python"])
def test_an_ordinary_entry_may_end_documents(engine):
    ids = {letter: byte for byte, letter in byte_to_letter().items()}
    kwargs = {"fingerprint": "x", "special": {"eod": 0}, "special_text": {}, "engine": engine}
    tokenizer = ByteLevelBPE("x", ids, [], **kwargs)
    texts = [b"a\0b", b"c"]
    tokens, lengths = tokenizer.encode_documents(texts, append_eod=True)
    assert (tokens.tolist(), lengths.tolist()) == ([97, 0, 98, 0, 99, 0], [4, 2])
    tokens, lengths = tokenizer.encode_documents(texts)
    assert (tokens.tolist(), lengths.tolist()) == ([97, 0, 98, 99], [3, 1])


def test_fallback_without_gigatoken():
    code = (
        "import sys; sys.modules['gigatoken'] = None; from mb_data import load_tokenizer\n"
        "t = load_tokenizer('gpt2'); print(t.engine, t.encode('Hello world'))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "python [15496, 995]"


@pytest.mark.parametrize(
    ("size", "options", "expected"),
    [
        (50257, {}, 50304),
        (50257, {"divisible_by": 1024}, 51200),
        (50257, {"tensor_parallel": 8}, 51200),
        (128, {}, 128),
        (1, {"divisible_by": 1}, 1),
    ],
)
def test_padded_vocab_size(size, options, expected):
    assert padded_vocab_size(size, **options) == expected


def test_padded_vocab_size_refuses_zero():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        padded_vocab_size(50257, tensor_parallel=0)
