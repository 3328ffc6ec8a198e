"""Vocabularies as lists of byte strings by rank: ``….tiktoken``, ``tekken.json``, the
``tokenizer.model`` of Llama 3 and 4, and Megatron's TikTokenizer. Merges are not listed: of two
neighbours that make an entry, the lowest ranked merge first. Such a file seldom says how text is
cut into words; that is known from its name or size.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mb_data.tokenizer.base import check_vocabulary
from mb_data.tokenizer.byte_bpe import ByteLevelBPE
from mb_data.tokenizer.readable_bpe import GPT2_PATTERN, Form
from mb_data.untrusted import json_of

PATTERNS = {
    "gpt2": GPT2_PATTERN,
    "olmo3": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "gpt4": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
        r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s+"
    ),
    "o200k": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "nemotron": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}


class Publication(NamedTuple):
    """What a file of ranks does not say: how text is cut and normalized, and what is special.

    ``size`` is that of the vocabulary, if more special ids are reserved than have a name.
    ``merged`` is False if some entries are words that no merges make (588 of Llama 3's), so that
    they are found whole or not at all. The engine panics at such ranks and is given merges instead.
    """

    scheme: str
    special: dict[str, int]
    form: Form | None = None
    size: int = 0
    merged: bool = True


_GPT2 = Publication("gpt2", {"<|endoftext|>": 50256})
_QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))
# By the names of the files, and by their numbers of ranks where all have the name tokenizer.model.
PUBLICATIONS: dict[str | int, Publication] = {
    "r50k_base": _GPT2,
    "gpt2": _GPT2,
    "cl100k_base": Publication(
        "gpt4",
        {"<|endoftext|>": 100257, "<|fim_prefix|>": 100258, "<|fim_middle|>": 100259}
        | {"<|fim_suffix|>": 100260, "<|endofprompt|>": 100276},
    ),
    "o200k_base": Publication("o200k", {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
    "qwen": Publication("qwen2", {text: 151643 + i for i, text in enumerate(_QWEN)}, "NFC"),
    128_000: Publication(  # Llama 3
        "olmo3", {"<|begin_of_text|>": 128000, "<|end_of_text|>": 128001}, None, 128256, False
    ),
    200_000: Publication(  # Llama 4
        "o200k", {"<|begin_of_text|>": 200000, "<|end_of_text|>": 200001}, None, 202048
    ),
}
# Megatron's TikTokenizer: two patterns, and special tokens below the ranks.
MEGATRON_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": PATTERNS["nemotron"],
}
MEGATRON_SPECIAL = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
ROLES = {"<s>": "bos", "</s>": "eos", "<mask>": "mask", "<pad>": "pad", "<cls>": "cls"} | {
    "<sep>": "sep",
    "<|endoftext|>": "eos",
    "<|begin_of_text|>": "bos",
    "<|end_of_text|>": "eos",
}


def from_tiktoken(
    name: str, path: Path, data: bytes, *, fingerprint: str, num_extra_ids: int, engine: str
) -> ByteLevelBPE:
    """Lines of base64 and rank: OpenAI's and Qwen's ``.tiktoken`` files, known by their names, and
    the ``tokenizer.model`` of Llama 3 and 4, known by its size."""
    try:
        words = data.split()  # half the time of line by line
        if len(words) != 2 * sum(map(bool, map(bytes.strip, data.split(b"\n")))):
            raise ValueError("a line of more or fewer than two words")
        texts = [binascii.a2b_base64(word, strict_mode=True) for word in words[::2]]
        ranks = dict(zip(texts, map(int, words[1::2]), strict=True))
    except (ValueError, binascii.Error) as error:
        raise ValueError(f"{path}: expected lines of base64 and a rank: {error}") from error
    known = PUBLICATIONS.get(path.stem if path.suffix == ".tiktoken" else len(ranks))
    if known is None:
        names = [f"{name}.tiktoken" for name in PUBLICATIONS if isinstance(name, str)]
        raise ValueError(
            f"{path}: such a file does not say how text is cut into words; known by their names "
            f"are {', '.join(names)}, by its size tokenizer.model of Llama 3 and 4. Take the "
            "model's tokenizer.json"
        )
    taken = {*ranks.values(), *known.special.values()}
    reserved = {f"<SPECIAL_{i}>": i for i in range(known.size) if i not in taken}
    return _build(
        name,
        ranks,
        known.special | reserved,
        pattern=PATTERNS[known.scheme],
        form=known.form,
        merged=known.merged,
        lines=data,
        fingerprint=fingerprint,
        num_extra_ids=num_extra_ids,
        engine=engine,
    )


def from_tekken(
    name: str, path: Path, data: bytes, *, fingerprint: str, num_extra_ids: int, engine: str
) -> ByteLevelBPE:
    """Mistral's ``tekken.json``: special tokens first, then the ranks."""
    try:
        description = json_of(data.decode())
        config = description["config"]
        first = int(config["default_num_special_tokens"])
        check_vocabulary(name, [first])
        rows = description["vocab"][: int(config["default_vocab_size"]) - first]
        ranks = _ranks(rows, first)
        listed = description.get("special_tokens") or [
            {"rank": rank, "token_str": text} for rank, text in enumerate(("<unk>", "<s>", "</s>"))
        ]
        special = {str(entry["token_str"]): int(entry["rank"]) for entry in listed}
        pattern = str(config["pattern"])
    except (ValueError, KeyError, TypeError, OverflowError, binascii.Error) as error:
        raise ValueError(f"{path}: not a tekken.json: {error!r}") from error
    special |= {f"<SPECIAL_{i}>": i for i in range(first) if i not in special.values()}
    return _build(
        name,
        ranks,
        special,
        pattern=pattern,
        fingerprint=fingerprint,
        num_extra_ids=num_extra_ids,
        engine=engine,
    )


def from_megatron_ranks(
    name: str,
    path: Path,
    data: bytes,
    *,
    tiktoken_pattern: str,
    vocab_size: int | None,
    tiktoken_num_special_tokens: int,
    tiktoken_special_tokens: Sequence[str] | None,
    fingerprint: str,
    num_extra_ids: int,
    engine: str,
) -> ByteLevelBPE:
    """Megatron's TikTokenizer: a JSON list of ranks and bytes; ``</s>`` ends documents."""
    if tiktoken_pattern not in MEGATRON_PATTERNS:
        raise ValueError(f"tiktoken pattern {tiktoken_pattern!r}: expected v1 or v2")
    texts = list(tiktoken_special_tokens or MEGATRON_SPECIAL)
    if len(texts) > tiktoken_num_special_tokens or len(set(texts)) < len(texts):
        raise ValueError(
            f"{len(texts)} special tokens, all different, must fit into "
            f"{tiktoken_num_special_tokens}: {texts}"
        )
    for needed in ("<unk>", "<s>", "</s>"):
        if needed not in texts:
            raise ValueError(f"the special tokens lack {needed}, which Megatron needs")
    try:
        rows = json_of(data.decode())
        inner = (1 << 17 if vocab_size is None else vocab_size) - tiktoken_num_special_tokens
        ranks = _ranks(rows[: max(inner, 0)], tiktoken_num_special_tokens)
    except (ValueError, KeyError, TypeError, binascii.Error) as error:
        raise ValueError(f"{path}: expected a list of ranks and token_bytes: {error!r}") from error
    texts += [f"<SPECIAL_{i}>" for i in range(len(texts), tiktoken_num_special_tokens)]
    return _build(
        name,
        ranks,
        {text: i for i, text in enumerate(texts)},
        pattern=MEGATRON_PATTERNS[tiktoken_pattern],
        fingerprint=f"{fingerprint}, {tiktoken_pattern}, {vocab_size}, {texts}",
        num_extra_ids=num_extra_ids,
        engine=engine,
    )


def _ranks(rows: Sequence[Mapping[str, Any]], first: int) -> dict[bytes, int]:
    return {base64.b64decode(row["token_bytes"]): first + int(row["rank"]) for row in rows}


def _build(
    name: str,
    ranks: Mapping[bytes, int],
    special: Mapping[str, int],
    *,
    pattern: str,
    form: Form | None = None,
    merged: bool = True,
    lines: bytes | None = None,
    fingerprint: str,
    num_extra_ids: int,
    engine: str,
) -> ByteLevelBPE:
    roles = {ROLES[text]: i for text, i in special.items() if text in ROLES}
    if "eos" in roles:
        roles["eod"] = roles["eos"]
    schemes = {known: scheme for scheme, known in PATTERNS.items()}
    first, last = min(ranks.values(), default=0), max(ranks.values(), default=0)
    options: dict[str, Any] = {
        "fingerprint": fingerprint,
        "special": roles,
        "special_text": {i: text for text, i in special.items()},
        "num_extra_ids": num_extra_ids,
        "patterns": (pattern,),
        "form": form,
        "scheme": schemes.get(pattern) if merged and len(ranks) == last - first + 1 else None,
        "ranks": lines,
    }
    try:
        return ByteLevelBPE(name, ranks, None, engine=engine, **options)
    except RuntimeError:  # a pattern that the engine does not know
        if engine == "gigatoken":
            raise
        return ByteLevelBPE(name, ranks, None, engine="python", **options)
