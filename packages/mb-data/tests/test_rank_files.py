"""Vocabularies as byte strings by rank, against tiktoken."""

import base64
import json
import unicodedata

import pytest
from mb_data import load_tokenizer, megatron_tokenizer
from mb_data.tokenizer.rank_files import MEGATRON_PATTERNS, PATTERNS, PUBLICATIONS
from tokenizer_helpers import GPT2, undisputed


def ranks():
    """GPT-2's ranks: bytes by id."""
    return {GPT2.byte_strings[i]: i for i in range(50256)}


def oracle(pattern, first=0, table=None):
    import tiktoken

    encoding = tiktoken.Encoding(
        "oracle", pat_str=pattern, mergeable_ranks=table or ranks(), special_tokens={}
    )
    return lambda text: [first + token for token in encoding.encode_ordinary(text)]


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
