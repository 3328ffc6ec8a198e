"""SentencePiece models: Megatron's ids and roles, and the engine against the library."""

import json
import pickle
import random

import pytest
from mb_data import hugging_face_files, load_tokenizer, megatron_tokenizer
from tokenizer_helpers import TEXTS, added, random_texts


@pytest.mark.parametrize("name", ["GPTSentencePieceTokenizer", "Llama2Tokenizer", None])
def test_todays_sentencepiece_appends_nothing(model_file, name):
    """Documents end with the model's own </s>: an id beyond the model is no row of an embedding."""
    import sentencepiece

    oracle = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
    tokenizer = (
        megatron_tokenizer(name, tokenizer_model=model_file) if name else load_tokenizer(model_file)
    )
    assert tokenizer.eod == tokenizer.eos == oracle.eos_id()
    assert tokenizer.vocab_size == oracle.get_piece_size()
    assert tokenizer.prepend_bos == (name == "Llama2Tokenizer")
    assert pickle.loads(pickle.dumps(tokenizer)).prepend_bos == tokenizer.prepend_bos
    with pytest.raises(ValueError, match="no cls token"):
        _ = tokenizer.cls
    assert load_tokenizer(model_file, eod_token="<s>").eod == oracle.bos_id()
    with pytest.raises(ValueError, match="has no token '<nope>' to end documents with"):
        load_tokenizer(model_file, eod_token="<nope>")


def test_old_sentencepiece_appends_roles(model_file):
    import sentencepiece

    tokenizer = megatron_tokenizer(
        "SentencePieceTokenizer", tokenizer_model=model_file, num_extra_ids=2
    )
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
    text = "the brown box <EOD> </s>"
    assert tokenizer.encode(text) == oracle.encode(text)
    assert tokenizer.eod not in tokenizer.encode("<EOD>")
    # <CLS> <SEP> <EOD> <MASK> <PAD>; <s> and </s> are the model's own
    roles = [tokenizer.cls, tokenizer.sep, tokenizer.eod, tokenizer.mask, tokenizer.pad]
    assert roles == [37, 38, 39, 40, 41]
    assert (tokenizer.bos, tokenizer.eos) == (oracle.bos_id(), oracle.eos_id())
    assert tokenizer.extra_ids == (42, 43)
    assert tokenizer.vocab_size == 44
    ids = tokenizer.encode("the box")
    assert tokenizer.decode([*ids, tokenizer.eod, *ids]) == "the box<EOD>the box"
    with pytest.raises(ValueError, match="surrogates"):
        tokenizer.encode("\ud800")


@pytest.mark.parametrize(
    ("about", "sentinels"),
    [
        ({"extra_ids": 3}, (39, 38, 37)),
        ({"tokenizer_class": "T5Tokenizer"}, tuple(range(136, 36, -1))),
        ({"tokenizer_class": "LlamaTokenizer"}, ()),
    ],
)
def test_the_sentinels_of_a_t5_of_hugging_faces(model_file, tmp_path, about, sentinels):
    """Its model has none: they follow backwards, so that <extra_id_0> is the last."""
    path = tmp_path / "spiece.model"
    path.write_bytes(model_file.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    tokenizer = load_tokenizer(path)
    assert tokenizer.extra_ids == sentinels
    assert tokenizer.vocab_size == 37 + len(sentinels)
    names = "".join(f"<extra_id_{i}>" for i in range(len(sentinels)))
    assert tokenizer.decode(sentinels) == names
    assert pickle.loads(pickle.dumps(tokenizer)).extra_ids == sentinels
    # Megatron's flag is Megatron's order.
    assert load_tokenizer(path, num_extra_ids=2).extra_ids == (37, 38)


def test_a_number_of_sentinels_that_is_none(model_file, tmp_path):
    path = tmp_path / "spiece.model"
    path.write_bytes(model_file.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"extra_ids": "many"}')
    with pytest.raises(ValueError, match=r"expected extra_ids from 0 to .*, got 'many'"):
        load_tokenizer(path)


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
    tokenizers = pytest.importorskip("tokenizers")
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
    # Bytes that are cut off hide no letter that is spelt in front of them.
    joined = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}]
    joined += [{"type": kind} for kind in ("ByteFallback", "Fuse")]
    description["decoder"] = {"type": "Sequence", "decoders": joined}
    judge = tokenizers.Tokenizer.from_str(json.dumps({**description, "added_tokens": kept}))
    description["added_tokens"].append(added(341, "\r\r\r", False))  # 340 to the library
    path.write_text(json.dumps(description))
    tokenizer = load_tokenizer(path)
    assert tokenizer.decode([*tokenizer.encode("a\r\r\r"), 340]).lstrip() == "a\r\r\r<think>"
    for text in texts:  # runs of spaces, too
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == judge.decode(ids, skip_special_tokens=False)
    ids = tokenizer.encode("ab ☃🙂")
    for cut, said in enumerate(("☃🙂", *["☃\ufffd"] * 3, "☃", "\ufffd", "\ufffd", "")):
        for each in (tokenizer, model):
            assert each.decode(ids[: len(ids) - cut]).lstrip() == f"ab {said}"
    begun = description["model"]["vocab"]["<0xE2>"]
    assert tokenizer.decode([*ids[-7:], begun, *ids[-4:]]) == "☃🙂\ufffd🙂"
    # The engine merges what the library then takes whole; none of the probes is such a text.
    description["model"]["ignore_merges"] = True
    path.write_text(json.dumps(description))
    assert load_tokenizer(path).engine == "tokenizers"
