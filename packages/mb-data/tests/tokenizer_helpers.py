"""What the tests of tokenizers share: files of the structure that models publish, texts that are
hard to cut, and the library that judges."""

import json
import random

import pytest
from mb_data import load_tokenizer
from mb_data.tokenizer.disputed import disputed_letters
from mb_data.tokenizer.rank_files import PATTERNS

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
# Where no library's Unicode tables, of whatever year, differ.
UNDISPUTED_TEXTS = [
    "",
    "Hello world, it's  2026!\n\n  x = y[12345] ** 2\t# ok",
    "<|endoftext|> and </s> and [SEP] [MASK] <extra_id_0>",
    "Grüße, 你好世界, привет мир, e\u0301 ½ ②",
    "unbelievably " * 30,
]


def random_texts(seed, count):
    rng = random.Random(seed)
    letters = [
        *"etaoin SHRDLU  \n\n\r\t.,'-/#$_(){}<>0123456789", *map(chr, range(0xA0, 0x600)),
        *"你好世界、。カナ각\u0301\u0308\u00a0\u2028\u3000½②ǅ🙂\U0001d518", "'ll", "'S", "\r\n",
        "   ",
    ]  # fmt: skip
    return ["".join(rng.choices(letters, k=rng.randrange(80))) for _ in range(count)]


def undisputed(seed):
    texts = [*TEXTS, *random_texts(seed, 200)]
    found = set(disputed_letters().find([t.encode() for t in texts]))
    return [t for i, t in enumerate(texts) if i not in found]


def bpe_json(patterns, form, ignore_merges):
    """A tokenizer.json of GPT-2's merges under other patterns, with the tokens of ``CONTROL``."""
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
    tokenizers = pytest.importorskip("tokenizers")
    return tokenizers.Tokenizer.from_str(json.dumps({**description, "added_tokens": []}))
