"""BERT's tokenizer against the library and its readable twin."""

import random

import pytest
from mb_data import load_tokenizer, megatron_tokenizer
from tokenizer_helpers import UNDISPUTED_TEXTS

BERT = load_tokenizer("bert-base-uncased")


def test_bert_equals_the_library():
    transformers = pytest.importorskip("transformers")
    vocab = {piece: i for i, piece in enumerate(BERT.pieces[:30522])}
    oracle = transformers.BertTokenizer(vocab=vocab, do_lower_case=True)
    readable = load_tokenizer("bert-base-uncased", engine="python")
    for text in [t for t in UNDISPUTED_TEXTS if "[" not in t]:
        expected = oracle.encode(text, add_special_tokens=False)
        assert BERT.encode(text) == expected
        assert readable.encode(text) == expected


def test_bert_twins_agree_on_random_text():
    pytest.importorskip("tokenizers")
    assert BERT.engine == "tokenizers"
    rng = random.Random(1)
    letters = [
        *"etaoin shrd  \n\t.,'-$^~[]#",
        *map(chr, range(0xA0, 0x530)),
        *"你好世界、。\u2028\u3000",
    ]
    for _ in range(500):
        text = "".join(rng.choices(letters, k=60))
        expected = BERT.reference_start(text, 1000)
        if expected is not None:  # no letter whose class has changed
            assert BERT.encode(text) == expected


def test_bert_special_tokens_are_text_in_a_document():
    ids = BERT.encode("[SEP] [MASK]")
    assert BERT.sep not in ids
    assert BERT.mask not in ids
    assert BERT.decode(ids) == "[ sep ] [ mask ]"


def test_bert_vocabulary():
    tokenizer = load_tokenizer("bert-base-uncased", num_extra_ids=2)
    assert (tokenizer.cls, tokenizer.sep, tokenizer.pad, tokenizer.mask) == (101, 102, 0, 103)
    assert (tokenizer.bos, tokenizer.eos) == (30522, 30523)
    assert tokenizer.extra_ids == (30524, 30525)
    assert tokenizer.vocab_size == 30526
    ids = tokenizer.encode("unbelievably good")
    assert tokenizer.decode(ids) == "unbelievably good"
    starts = tokenizer.word_starts()
    assert len(starts) == 30526
    pieces = ["un", "##bel", "##ie", "##va", "##bly", "good"]
    assert [tokenizer.pieces[i] for i in ids] == pieces
    assert [bool(starts[i]) for i in ids] == [True, False, False, False, False, True]
    assert tokenizer.encode("a" * 201) == [100]
    with pytest.raises(ValueError, match=r"it has: cls, sep.*--eod-token\) names one"):
        _ = tokenizer.eod
    with pytest.raises(ValueError, match="token 30526 is not in 0 to 30525"):
        tokenizer.decode([30526])


@pytest.mark.parametrize("engine", ["auto", "python"])
def test_a_vocabulary_is_cut_at_line_ends_alone(tmp_path, engine):
    """U+2028 and the like are letters to Megatron's reader: ids behind them used to shift."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a\u2028b", "\x85", "c"]
    for end in ("\n", "\r\n"):
        (tmp_path / "vocab.txt").write_bytes(end.join([*pieces, ""]).encode())
        assert load_tokenizer(tmp_path / "vocab.txt", engine=engine).encode("c") == [7]


@pytest.mark.parametrize("engine", ["auto", "python"])
def test_cased_wordpiece_from_a_file(tmp_path, engine):
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "Ab", "ab", "##c", "é", "e"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n")
    tokenizer = load_tokenizer(tmp_path / "vocab.txt", lower_case=False, engine=engine)
    assert tokenizer.encode("Ab abc é X") == [5, 6, 7, 8, 1]
    uncased = megatron_tokenizer(
        "BertWordPieceLowerCase", vocab_file=tmp_path / "vocab.txt", engine=engine
    )
    assert uncased.encode("Ab abc é") == [6, 6, 7, 9]
    # A special token keeps the id that the file gives it, wherever that is.
    many = [*pieces, "[EOS]", *(f"w{i}" for i in range(2000))]
    (tmp_path / "vocab.txt").write_text("\n".join(many) + "\n")
    tokenizer = load_tokenizer(tmp_path / "vocab.txt", num_extra_ids=1, engine=engine)
    assert (tokenizer.eos, tokenizer.bos, tokenizer.extra_ids) == (10, 2011, (2012,))
    assert (tokenizer.vocab_size, tokenizer.token_id("<extra_id_0>")) == (2013, 2012)
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n")
    with pytest.raises(ValueError, match=r"vocab\.txt: \[CLS\] is not in the vocabulary"):
        load_tokenizer(tmp_path / "vocab.txt")


def test_the_first_pieces_of_berts_vocabulary_spell_every_word():
    small = load_tokenizer("bert-base-uncased:4352")
    assert small.vocab_size < BERT.vocab_size
    text = "Returns zxqvjkw 0123456789; the abcdefghijklmnopqrstuvwxyz of __init__(self)"
    ids = list(small.encode(text))
    assert small.token_id("[UNK]") not in ids
    assert max(ids) < 4352
    assert small.decode(ids).replace(" ", "") == text.lower().replace(" ", "")
    for name in ("bert-base-uncased:4351", "bert-base-uncased:30523", "bert-base-uncased:x"):
        with pytest.raises(ValueError, match="expected a size from 4352 to 30522"):
            load_tokenizer(name)


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
