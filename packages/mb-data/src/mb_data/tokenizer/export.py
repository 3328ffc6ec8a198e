"""A tokenizer as files of Hugging Face's, from which transformers gets the same ids.

Of use where there are no such files: for GPT-2's and BERT's vocabularies inside this package, and
where ids are appended or a bare file does not say how it is used.
"""

from __future__ import annotations

import json
from typing import Any

from mb_data.tokenizer.base import Tokenizer
from mb_data.tokenizer.byte_bpe import ByteLevelBPE
from mb_data.tokenizer.libraries import SentencePieceTokenizer
from mb_data.tokenizer.readable_bpe import GPT2_PATTERN
from mb_data.tokenizer.wordpiece import UNKNOWN, WordPiece, description


def hugging_face_files(tokenizer: Tokenizer, *, sentences: bool = False) -> dict[str, str]:
    """tokenizer.json and tokenizer_config.json: their contents by name.

    The ids of a text are the same, with two exceptions: transformers takes the name of a special
    token within a text for that token, and around letters that are newer than its library's Unicode
    tables, and with WordPiece around those of private use, it may cut words otherwise.

    Args:
        tokenizer: WordPiece, byte-level BPE that cuts words as GPT-2 does, or SentencePiece's BPE
            as Llama 2 has it, to which nothing is appended; {} for others.
        sentences: put BERT's marks around a text, and between the two of a pair.
    """
    if isinstance(tokenizer, WordPiece):
        parts, special = _wordpiece(tokenizer)
        settings: dict[str, Any] = {"do_lower_case": tokenizer.readable.lower_case}
    elif isinstance(tokenizer, ByteLevelBPE) and _cuts_as_gpt2(tokenizer):
        parts, special = _byte_level(tokenizer)
        settings = {}
    elif isinstance(tokenizer, SentencePieceTokenizer) and not sentences:
        found = _sentencepiece(tokenizer)
        if found is None:
            return {}
        parts, special = found
        settings = {"unk_token": parts["model"]["unk_token"]}
    else:
        return {}
    if sentences:
        parts["post_processor"] = _between_marks(tokenizer)
    marks = [_added(i, text) for i, text in sorted(special.items())]
    parts["added_tokens"] = [*parts.get("added_tokens", ()), *marks]
    roles = dict(tokenizer.special)
    if not sentences and "eod" in roles:  # a text of a GPT ends where its document does
        roles["eos"] = roles["eod"]
    for role in ("bos", "eos", "cls", "sep", "mask", "pad"):
        if (found := roles.get(role)) is not None:
            settings[f"{role}_token"] = special[found]
    if isinstance(tokenizer, WordPiece):
        settings["unk_token"] = UNKNOWN
    # Without them a GPT gets types of tokens, and looks them up as if they were tokens.
    types = ["token_type_ids"] if sentences else []
    settings["model_input_names"] = ["input_ids", *types, "attention_mask"]
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    return {
        "tokenizer.json": json.dumps({"version": "1.0", **parts}, ensure_ascii=False) + "\n",
        "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
    }


def _cuts_as_gpt2(tokenizer: ByteLevelBPE) -> bool:
    bpe = tokenizer.readable
    plain = bpe.spelt and bpe.merges is not None and not bpe.ignore_merges and bpe.form is None
    return plain and bpe.patterns == (GPT2_PATTERN,)


def _byte_level(tokenizer: ByteLevelBPE) -> tuple[dict[str, Any], dict[int, str]]:
    special = tokenizer.special_text
    stage = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    model = {
        "type": "BPE",
        "vocab": {**tokenizer.readable.ids, **{text: i for i, text in special.items()}},
        "merges": tokenizer.readable.merges,
    }
    parts = {"model": model, "normalizer": None, "pre_tokenizer": stage, "decoder": stage}
    return parts, special


def _wordpiece(tokenizer: WordPiece) -> tuple[dict[str, Any], dict[int, str]]:
    ids = {piece: i for i, piece in enumerate(tokenizer.pieces)}
    marks = {*tokenizer.special.values(), *tokenizer.extra_ids, ids[UNKNOWN]}
    parts = description(ids, lower_case=tokenizer.readable.lower_case)
    return parts, {i: tokenizer.pieces[i] for i in marks}


def _sentencepiece(
    tokenizer: SentencePieceTokenizer,
) -> tuple[dict[str, Any], dict[int, str]] | None:
    """None if the ids would be others, or are not those of the model's file alone."""
    try:
        parts, differing = tokenizer.description()
    except RuntimeError:
        return None
    pieces = {i: text for text, i in parts["model"]["vocab"].items()}
    if differing is not None or len(pieces) != tokenizer.vocab_size:
        return None
    unknown = parts["model"]["vocab"][parts["model"]["unk_token"]]
    special = {i: pieces[i] for i in {*tokenizer.special.values(), unknown}}
    spaced = len(parts["normalizer"]["normalizers"]) > 1
    space = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    joined = [space, {"type": "ByteFallback"}, {"type": "Fuse"}]
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if spaced else []
    parts = {
        **parts,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [*joined, *strip]},
    }
    if tokenizer.prepend_bos:
        parts["post_processor"] = _behind(special[tokenizer.bos], tokenizer.bos)
    return parts, special


def _behind(begin: str, number: int) -> dict[str, Any]:
    """Texts that begin with a token of their own."""
    text, other = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    marks = [{"SpecialToken": {"id": begin, "type_id": kind}} for kind in (0, 1)]
    return {
        "type": "TemplateProcessing",
        "single": [marks[0], text],
        "pair": [marks[0], text, marks[1], other],
        "special_tokens": {begin: {"id": begin, "ids": [number], "tokens": [begin]}},
    }


def _between_marks(tokenizer: Tokenizer) -> dict[str, Any]:
    """[CLS] A [SEP], and [CLS] A [SEP] B [SEP]."""
    marks = {"[CLS]": tokenizer.cls, "[SEP]": tokenizer.sep}

    def mark(text: str, kind: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": text, "type_id": kind}}

    def sentence(name: str, kind: int) -> list[dict[str, Any]]:
        return [{"Sequence": {"id": name, "type_id": kind}}, mark("[SEP]", kind)]

    one = [mark("[CLS]", 0), *sentence("A", 0)]
    return {
        "type": "TemplateProcessing",
        "single": one,
        "pair": [*one, *sentence("B", 1)],
        "special_tokens": {
            text: {"id": text, "ids": [i], "tokens": [text]} for text, i in marks.items()
        },
    }


def _added(number: int, text: str) -> dict[str, Any]:
    kind = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": number, "content": text, **kind, "special": True}
