"""Files of the structure that today's models publish, on the engine, against the library that each
belongs to. The vocabularies are GPT-2's merges or small ones: what differs between models is how
text is normalized and cut, and what is special."""

import base64
import json
import random
import unicodedata

import numpy as np
import pytest
from mb_data import hugging_face_files, load_tokenizer, megatron_tokenizer
from mb_data.tokenizer import fast_bpe
from mb_data.tokenizer.disputed import disputed_letters
from mb_data.tokenizer.fast_bpe import SINGLE_BYTES
from mb_data.tokenizer.rank_files import MEGATRON_PATTERNS, PATTERNS, PUBLICATIONS
from mb_data.tokenizer.readable_bpe import ReadableBPE

tokenizers = pytest.importorskip("tokenizers")
GPT2 = load_tokenizer("gpt2", engine="python")
QWEN = PATTERNS["qwen2"]
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
STRUCTURES = {
    "llama3": ((PATTERNS["olmo3"],), None, True),
    "qwen3": ((QWEN,), "NFC", False),
    "deepseek-v3": (DEEPSEEK, None, False),
    "gpt-oss": ((PATTERNS["o200k"],), None, False),
    "mistral-nemo": ((PATTERNS["nemotron"],), None, False),
}
CONTROL = ["<think>", "<|fim_prefix|>", "<tool_call>", "<|im_end|>", "<|endoftext|>"]
TEXTS = [
    "",
    " ",
    "Hello world, it's  2026!\n\n  x = y[12345] ** 2\t# I'LL, we've ok",
    "<think>a</think> <|fim_prefix|>b<tool_call> <|im_end|>\n<|endoftext|>",
    "Grüße, 你好世界 カタカナ, привет мир, e\u0301 u\u0308 ½ ② ΟΔΟΣ 각 \u1112\u1161\u11ab",
    "\u0301a \u0338b >\u0338 a\r\n\r\n b \u00a0\u3000\u2028x",
    "🙂👩‍👩‍👧‍👦 🤣 नमस्ते مرحبا שלום ไทย",
    "x" * 300 + " " * 50 + "9" * 50 + "/" * 40 + "\n" * 9,
    "\x00<mb-data: end of document>",
]


def bpe_json(patterns, form, ignore_merges):
    ids = {"".join(GPT2.readable.letters[b] for b in GPT2.byte_strings[i]): i for i in range(50256)}
    stages = [
        {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False}
        for p in patterns
    ]
    words = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    return {
        "version": "1.0",
        "added_tokens": [added(50256 + i, text, i > 2) for i, text in enumerate(CONTROL)],
        "normalizer": {"type": form} if form else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*stages, words | {"use_regex": False}],
        },
        "post_processor": None,
        "decoder": words | {"use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": ids,
            "merges": [merge.split() for merge in GPT2.readable.merges],
            "ignore_merges": ignore_merges,
        },
    }


def added(token, text, special, normalized=False):
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    return {"id": token, "content": text, "special": special, "normalized": normalized} | flags


def library(description):
    """The judge: the tokenizers library on the file without its control tokens."""
    return tokenizers.Tokenizer.from_str(json.dumps({**description, "added_tokens": []}))


@pytest.fixture(scope="module", params=STRUCTURES)
def structure(request, tmp_path_factory):
    description = bpe_json(*STRUCTURES[request.param])
    path = tmp_path_factory.mktemp(request.param) / "tokenizer.json"
    path.write_text(json.dumps(description))
    return path, library(description)


def random_texts(seed, count):
    rng = random.Random(seed)
    letters = [
        *"etaoin SHRDLU  \n\n\r\t.,'-/#$_(){}<>0123456789", *map(chr, range(0xA0, 0x600)),
        *"你好世界、。カナ각\u0301\u0308\u00a0\u2028\u3000½②ǅ🙂\U0001d518", "'ll", "'S", "\r\n",
        "   ",
    ]  # fmt: skip
    return ["".join(rng.choices(letters, k=rng.randrange(80))) for _ in range(count)]


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


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """SentencePiece BPE with byte fallback, as Llama 2 (dummy prefix) and as Gemma (user-defined
    white space and marks)."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("models")
    rng = random.Random(3)
    words = ["the", "quick", "Expert", "router(", "x =", "if", "return", "12", "é", "你好", "\n"]
    text = [" ".join(rng.choices(words, k=30)) + "  " * rng.randrange(3) for _ in range(200)]
    runs = ["\n\n", "\n\n\n", "▁▁", "▁▁▁", "▁▁▁▁", "<h1>", "<mask>"]
    for name, options in {
        "llama": {"add_dummy_prefix": True},
        "gemma": {"add_dummy_prefix": False, "user_defined_symbols": runs},
    }.items():
        with open(folder / f"{name}.model.v3", "wb") as file:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(text), model_writer=file, vocab_size=340,
                model_type="bpe", byte_fallback=True, normalization_rule_name="identity",
                remove_extra_whitespaces=False, minloglevel=2, **options,
            )  # fmt: skip
    return folder


SPACES = [
    "a  b   c    d     e",
    " ",
    "   ",
    "\n\n\n\n\n",
    " " * 200,
    "▁▁▁ ▁",
    "<s></s><mask>",
    "é\x00",
]


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize(
    "defined",
    [["<tool>"], ["▁the"], [" <h1>"], ["\n\n"], ["\t\t", "▁▁▁"], ["▁▁", "▁▁▁", "▁▁▁▁"]],
    ids=repr,
)
def test_pieces_that_users_defined(tmp_path, defined, prefix):
    """Those at the start of a text, and those that no merges make, used to get other tokens."""
    sentencepiece = pytest.importorskip("sentencepiece")
    lines = ["the quick Expert router(12) is the other one, a thread of theirs"] * 20
    path = tmp_path / "some.model"
    with open(path, "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=file, vocab_size=300, model_type="bpe",
            byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
            minloglevel=2, hard_vocab_limit=False, add_dummy_prefix=prefix,
            user_defined_symbols=defined,
        )  # fmt: skip
    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokenizer = load_tokenizer(path)
    rng = random.Random(4)
    signs = [*defined, " ", "▁", "the", "a", "\n", "\t", "<h1>", "é", "router", "   "]
    texts = ["".join(rng.choices(signs, k=n % 6)) for n in range(300)]
    tokens, lengths = tokenizer.encode_documents([text.encode() for text in texts])
    assert tokenizer.engine == "gigatoken"
    expected = [library.encode(text) for text in texts]
    assert lengths.tolist() == [len(row) for row in expected]
    assert tokens.tolist() == [token for row in expected for token in row]


@pytest.mark.parametrize("begins", [False, True])
def test_transformers_gives_the_ids_of_a_sentencepiece_model(models, tmp_path, begins):
    transformers = pytest.importorskip("transformers")
    kind = "Llama2Tokenizer" if begins else "GPTSentencePieceTokenizer"
    model = models / "llama.model.v3"
    tokenizer = megatron_tokenizer(kind, tokenizer_model=model)
    for file, text in hugging_face_files(tokenizer).items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(theirs) == tokenizer.vocab_size
    assert theirs.eos_token_id == tokenizer.eod
    for text in [*TEXTS, *SPACES, *random_texts(4, 100)]:
        if not any(piece in text for piece in ("<s>", "</s>", "<unk>")):
            ids = tokenizer.encode(text)
            assert theirs.encode(text) == [tokenizer.bos] * begins + ids
            assert theirs.decode(ids) == tokenizer.decode(ids)
    for others in (
        load_tokenizer(models / "gemma.model.v3"),
        load_tokenizer(model, num_extra_ids=1),
    ):
        assert hugging_face_files(others) == {}  # the ids of some texts would be others


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_sentencepiece_models_reach_the_engine(models, name):
    import sentencepiece

    path = models / f"{name}.model.v3"
    judge = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokenizer = load_tokenizer(path)
    assert tokenizer.engine == "gigatoken"
    texts = [*TEXTS, *SPACES, *random_texts(2, 300)]
    tokens, lengths = tokenizer.encode_documents([t.encode() for t in texts], append_eod=True)
    expected = [[*judge.encode(t), judge.eos_id()] if t else [] for t in texts]
    assert lengths.tolist() == [len(row) for row in expected]
    assert tokens.tolist() == [token for row in expected for token in row]
    tokenizer.forget()
    assert tokenizer.encode_documents([b"the Expert"])[0].tolist() == judge.encode("the Expert")
    for text in texts:
        expected = tokenizer.reference_start(text, 20)
        if expected is not None:
            assert tokenizer.encode_documents([text.encode()])[0].tolist() == expected
    assert tokenizer.reference_start("the quick router " * 20, 100) is None  # they agree


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_tokenizer_json_with_byte_fallback_reaches_the_engine(models, tmp_path, name):
    pytest.importorskip("sentencepiece")
    model = load_tokenizer(models / f"{name}.model.v3")
    description = json.loads(model._fast._data)
    description["model"] |= {"dropout": None, "continuing_subword_prefix": None}
    description["model"] |= {"end_of_word_suffix": None, "ignore_merges": False}
    description["added_tokens"] += [added(1, "<s>", True), added(340, "<think>", False)]
    if name == "gemma":
        ids = description["model"]["vocab"]
        runs = ("\n\n", "\n\n\n", "▁▁", "▁▁▁")
        description["added_tokens"] += [added(ids[run], run, False) for run in runs]
        description["pre_tokenizer"] = {
            "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious",
            "invert": False,
        }  # fmt: skip
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(description))
    kept = [e for e in description["added_tokens"] if not e["content"].strip(" \n▁")]
    judge = tokenizers.Tokenizer.from_str(json.dumps({**description, "added_tokens": kept}))
    tokenizer = load_tokenizer(path)
    assert tokenizer.engine == "gigatoken"
    assert load_tokenizer(path, engine="tokenizers").engine == "tokenizers"
    texts = [*TEXTS, *SPACES, *random_texts(4, 300)]
    tokens, lengths = tokenizer.encode_documents([t.encode() for t in texts])
    ends = lengths.cumsum()
    for text, n, end in zip(texts, lengths.tolist(), ends.tolist(), strict=True):
        assert tokens[end - n : end].tolist() == judge.encode(text, add_special_tokens=False).ids
    assert not {1, 340} & set(tokens.tolist())
    assert tokenizer.decode([340]) == "<think>"
    # The engine merges what the library then takes whole; none of the probes is such a text.
    description["model"]["ignore_merges"] = True
    path.write_text(json.dumps(description))
    assert load_tokenizer(path).engine == "tokenizers"


def ranks():
    """GPT-2's ranks: bytes by id."""
    return {GPT2.byte_strings[i]: i for i in range(50256)}


def oracle(pattern, first=0, table=None):
    import tiktoken

    encoding = tiktoken.Encoding(
        "oracle", pat_str=pattern, mergeable_ranks=table or ranks(), special_tokens={}
    )
    return lambda text: [first + token for token in encoding.encode_ordinary(text)]


def undisputed(seed):
    texts = [*TEXTS, *random_texts(seed, 200)]
    found = set(disputed_letters().find([t.encode() for t in texts]))
    return [t for i, t in enumerate(texts) if i not in found]


def rank_rows(first=0):
    return [
        {"rank": rank, "token_bytes": base64.b64encode(text).decode(), "token_str": None}
        for text, rank in sorted(ranks().items(), key=lambda entry: entry[1])
    ]


def write_ranks(path, table):
    lines = [f"{base64.b64encode(text).decode()} {rank}" for text, rank in table.items()]
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("name", ["r50k_base", "cl100k_base", "o200k_base"])
def test_tiktoken_files(tmp_path, name):
    path = tmp_path / f"{name}.tiktoken"
    write_ranks(path, ranks())
    tokenizer = load_tokenizer(path)
    assert tokenizer.engine == "gigatoken"
    expected = oracle(tokenizer.readable.patterns[0])
    readable = load_tokenizer(path, engine="python")
    for text in undisputed(5):
        assert tokenizer.encode(text) == expected(text) == readable.encode(text)
    assert tokenizer.decode([tokenizer.eod]) == "<|endoftext|>"
    tokens, lengths = tokenizer.encode_documents([b"a b", b"", b"c"], append_eod=True)
    assert lengths.tolist() == [3, 0, 2]
    assert tokens.tolist() == [*expected("a b"), tokenizer.eod, *expected("c"), tokenizer.eod]
    path.rename(tmp_path / "my.tiktoken")
    with pytest.raises(ValueError, match=r"known by their names are r50k_base\.tiktoken"):
        load_tokenizer(tmp_path / "my.tiktoken")
    (tmp_path / "r50k_base.tiktoken").write_text("what\n")
    with pytest.raises(ValueError, match=r"r50k_base\.tiktoken: expected lines of base64"):
        load_tokenizer(tmp_path / "r50k_base.tiktoken")


@pytest.mark.parametrize("name", ["tokenizer.model", "qwen.tiktoken"])
def test_ranks_of_llama_and_qwen(tmp_path, monkeypatch, name):
    """Llama 3 and 4 call theirs a model; some words of Llama 3's are made by no merges."""
    size, path = 50258, tmp_path / name
    odd = {b"qzxjq": size - 2, b" zqx\xffzqx": size - 1}
    table = ranks() | odd if name == "tokenizer.model" else ranks()
    ends = {"<|begin_of_text|>": size, "<|end_of_text|>": size + 1}
    monkeypatch.setitem(
        PUBLICATIONS, size, PUBLICATIONS[128_000]._replace(special=ends, size=size + 256)
    )
    write_ranks(path, table)
    tokenizer = load_tokenizer(path)
    assert tokenizer.engine == "gigatoken"
    expected = oracle(tokenizer.readable.patterns[0], table=table)
    for text in [*undisputed(7), "qzxjq qzxjq", "aqzxjq", "aaaaaaaaaaaa" * 9, "=== ====  ====="]:
        if name == "qwen.tiktoken":
            text = unicodedata.normalize("NFC", text)
        assert tokenizer.encode(text) == expected(text)
    if name == "tokenizer.model":
        assert tokenizer.encode("qzxjq") == [size - 2]
        assert (tokenizer.bos, tokenizer.eod, tokenizer.vocab_size) == (size, size + 1, size + 256)
        assert tokenizer.decode([size + 1, size + 2]) == f"<|end_of_text|><SPECIAL_{size + 2}>"
        write_ranks(path, ranks())
        with pytest.raises(ValueError, match=r"by its size tokenizer\.model of Llama 3 and 4"):
            load_tokenizer(path)
    else:
        assert (tokenizer.eod, tokenizer.vocab_size) == (151643, 151851)
        assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")
        write_ranks(path, ranks() | odd)
        tokenizer = load_tokenizer(path)  # which nobody has said such words of
        assert tokenizer.encode("qzxjq a") == [size - 2, *GPT2.encode(" a")]
        assert tokenizer.engine == "gigatoken"


def test_tekken(tmp_path):
    path = tmp_path / "tekken.json"
    config = {"pattern": PATTERNS["nemotron"], "default_vocab_size": 51256}
    config |= {"default_num_special_tokens": 1000, "num_vocab_tokens": 50256, "version": "v3"}
    special = [{"rank": i, "token_str": t, "is_control": True} for i, t in enumerate(
        ["<unk>", "<s>", "</s>", "[INST]"])]  # fmt: skip
    path.write_text(json.dumps({"config": config, "vocab": rank_rows(), "special_tokens": special}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.engine == "gigatoken"
    expected = oracle(PATTERNS["nemotron"], 1000)
    for text in undisputed(6):
        assert tokenizer.encode(text) == expected(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.bos, tokenizer.eos, tokenizer.eod) == (1, 2, 2)
    assert tokenizer.vocab_size == 51256
    assert tokenizer.decode([3, 17]) == "[INST]<SPECIAL_17>"
    path.write_text(json.dumps({"config": {}}))
    with pytest.raises(ValueError, match=r"not a tekken\.json"):
        load_tokenizer(path)


@pytest.mark.parametrize("pattern", ["v1", "v2"])
def test_megatrons_tiktokenizer(tmp_path, pattern):
    path = tmp_path / "vocab.json"
    path.write_text(json.dumps(rank_rows()))
    options = {"tokenizer_model": path, "vocab_size": 51_256, "tiktoken_pattern": pattern}
    tokenizer = megatron_tokenizer("TikTokenizer", **options)
    assert tokenizer.engine == ("gigatoken" if pattern == "v2" else "python")
    expected = oracle(MEGATRON_PATTERNS[pattern], 1000)
    for text in undisputed(7)[:100]:
        assert tokenizer.encode(text) == expected(text)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.bos) == (51_256, 2, 1)
    assert (tokenizer.mask, tokenizer.pad, tokenizer.cls, tokenizer.sep) == (3, 4, 5, 6)
    with pytest.raises(ValueError, match="byte 0x21 is not in the vocabulary"):
        megatron_tokenizer("TikTokenizer", **{**options, "vocab_size": 900})
    with pytest.raises(ValueError, match="needs --tiktoken-pattern"):
        megatron_tokenizer("TikTokenizer", tokenizer_model=path)
    with pytest.raises(ValueError, match="lack </s>"):
        megatron_tokenizer("TikTokenizer", **options, tiktoken_special_tokens=["<unk>", "<s>"])


def test_bert_on_letters_equals_the_readable_twin():
    """All of the alphabets, one in seven of the rest; benchmarks/disputed_letters.py tries all."""
    tokenizer = load_tokenizer("bert-base-uncased")
    skip = {*range(0xD800, 0xE000), *range(0x3500, 0x9F00), *range(0xAC10, 0xD7A0)}
    points = [*range(0x80, 0x3000), *range(0x3000, 0x20000, 7)]
    texts = [f"a{chr(p)}b {chr(p)}c x{chr(p)}" for p in points if p not in skip]
    assert tokenizer.encode_batch(texts) == list(map(tokenizer.readable.encode, texts))
    before = tokenizer.careful_documents
    assert tokenizer.encode("ΟΔΟΣ ΟΔΟΣ.") == tokenizer.readable.encode("οδος οδος.")
    assert tokenizer.careful_documents == before + 1


@pytest.mark.parametrize("engine", ["auto", "python"])
def test_bert_keeps_letters_of_private_use(engine):
    """As Megatron does: fonts have bullets and icons there. The library drops them."""
    tokenizer = load_tokenizer("bert-base-uncased", engine=engine)
    unknown = tokenizer.token_id("[UNK]")
    a, b = tokenizer.encode("a b")
    for letter in "\ue000\uf0b7\uf8ff\U000f0000\U0010fffd":
        assert tokenizer.encode(f"a {letter} b a{letter}b") == [a, unknown, b, unknown]


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
