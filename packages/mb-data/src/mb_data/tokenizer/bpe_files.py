"""Byte-level BPE from files: merges alone (GPT-2), ``vocab.json`` + ``merges.txt``, and
``tokenizer.json``, which falls to the tokenizers library where it is something else."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, cast, get_args

from mb_data.tokenizer.base import Tokenizer, check_engine
from mb_data.tokenizer.byte_bpe import ByteLevelBPE
from mb_data.tokenizer.libraries import HuggingFaceTokenizer
from mb_data.tokenizer.readable_bpe import GPT2_PATTERN, Form, byte_to_letter
from mb_data.untrusted import json_of

END_OF_TEXT = "<|endoftext|>"
# What ends a document, for files whose tokenizer_config.json does not say.
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>")
CONFIG_ROLES = ("bos", "eos", "pad", "cls", "sep", "mask")
# {1,3}+ gives nothing back to tiktoken and to Python, but to the expressions of the tokenizers
# library, Oniguruma's, it repeats {1,3}.
_REPEATED_INTERVAL = re.compile(r"\{\d*,?\d*\}\+")


def from_merges(
    name: str, merges_text: str, *, fingerprint: str, num_extra_ids: int, engine: str
) -> ByteLevelBPE:
    """GPT-2's scheme of ids: 256 bytes in the order of their letters, the merges, end of text."""
    merges = merge_lines(name, merges_text.split("\n"))
    entries = [*byte_to_letter().values(), *(merge.replace(" ", "") for merge in merges)]
    ids = {entry: i for i, entry in enumerate(entries)}
    return ByteLevelBPE(
        name,
        ids,
        merges,
        fingerprint=fingerprint,
        special={"eod": len(ids)},
        special_text={len(ids): END_OF_TEXT},
        num_extra_ids=num_extra_ids,
        scheme="gpt2",
        engine=engine,
    )


def from_vocab_and_merges(
    name: str, vocab: bytes, merges: bytes, *, fingerprint: str, num_extra_ids: int, engine: str
) -> ByteLevelBPE:
    """The two files GPT-2 was published as. What the merges do not make is a special token."""
    try:
        text, lines = vocab.decode(), merge_lines(name, merges.decode().split("\n"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: not a vocabulary: {error}") from error
    try:
        entries = json_of(text)
    except ValueError as error:
        raise ValueError(f"{name}: vocab.json is not JSON: {error}") from error
    if not isinstance(entries, dict) or not all(isinstance(i, int) for i in entries.values()):
        raise ValueError(f"{name}: vocab.json must map strings to ids")
    made = {*byte_to_letter().values(), *(line.replace(" ", "") for line in lines)}
    ids = {entry: i for entry, i in entries.items() if entry in made}
    added = {entry: i for entry, i in entries.items() if entry not in made}
    special = {"eod": added[END_OF_TEXT]} if END_OF_TEXT in added else {}
    return ByteLevelBPE(
        name,
        ids,
        lines,
        fingerprint=fingerprint,
        special=special,
        special_text={i: entry for entry, i in added.items()},
        num_extra_ids=num_extra_ids,
        engine=engine,
    )


def from_tokenizer_json(
    name: str, path: Path, data: bytes, *, fingerprint: str, num_extra_ids: int, engine: str
) -> Tokenizer:
    """Byte-level BPE on the fast engine; everything else through the tokenizers library.

    What the file puts around a text is left out; see ``Tokenizer.begins_with``. And no text is
    special: an added token is a control token (``<think>``, ``<|fim_prefix|>``) that only code
    places, whatever the file says of it. Only those of nothing but white space, which some
    vocabularies have for runs of it, are text.
    """
    description = _parse(path, data)
    model = description["model"]
    added = {entry["content"]: entry["id"] for entry in description["added_tokens"]}
    vocabulary = model.get("vocab")
    known = added | vocabulary if isinstance(vocabulary, dict) else added
    special = _special_ids(path.with_name("tokenizer_config.json"), known)
    text_tokens = [e for e in description["added_tokens"] if not e["content"].strip(" \t\n\r▁")]
    control = _control(model, added.keys() - {entry["content"] for entry in text_tokens})
    words = _byte_level_words(description)
    tokenizer: Tokenizer | None = None
    if words is not None and not text_tokens and engine != "tokenizers":
        lines = merge_lines(name, model["merges"])
        ids = {entry: i for entry, i in vocabulary.items() if entry not in control}
        try:
            tokenizer = ByteLevelBPE(
                name,
                ids,
                lines,
                fingerprint=fingerprint,
                special=special,
                special_text={i: text for text, i in added.items()},
                num_extra_ids=num_extra_ids,
                patterns=words[0],
                ignore_merges=bool(model.get("ignore_merges")),
                form=words[1],
                engine=engine,
            )
        except RuntimeError:  # gigatoken knows the patterns of the common models only
            if engine == "gigatoken":
                raise
    if tokenizer is None:
        check_engine(engine, f"{path}, which is no plain byte-level BPE", "tokenizers")
        tokenizer = HuggingFaceTokenizer(
            name,
            {**description, "model": _out_of_reach(model, control)}
            | {"added_tokens": text_tokens, "post_processor": None},
            fingerprint=fingerprint,
            special=special,
            added=added,
            num_extra_ids=num_extra_ids,
            fast=engine == "auto",
        )
    first = _first_of_template(description.get("post_processor"))
    tokenizer.begins_with = None if first is None else known.get(first)
    return tokenizer


def _control(model: Mapping[str, Any], names: Set[str]) -> set[str]:
    """Of added tokens, those that no text may become. One of a single letter, or of which merges
    know, is an ordinary entry too: who pads with ``!`` has not taken it out of all texts."""
    merges = model.get("merges")
    known = set()
    for merge in merges if isinstance(merges, list) else ():
        words = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(words, list):
            continue  # `merge_lines`, or the library, tells of these
        words = list(map(str, words))
        known.update((*words, "".join(words)))
    return {name for name in names if len(name) > 1 and name not in known}


def _out_of_reach(model: dict[str, Any], control: Set[str]) -> dict[str, Any]:
    """A model whose entries for control tokens have other names, which no text can know: Unigram
    and WordLevel find an entry wherever it stands in a text, ``</s>`` too."""
    secret, vocabulary = f"\0{secrets.token_hex(16)} ", model.get("vocab")
    names = {name: secret + name for name in control - {model.get("unk_token")}}
    if isinstance(vocabulary, dict):
        return {**model, "vocab": {names.get(e, e): i for e, i in vocabulary.items()}}
    if isinstance(vocabulary, list) and all(isinstance(row, list) and row for row in vocabulary):
        rows = [[names.get(str(row[0]), row[0]), *row[1:]] for row in vocabulary]
        return {**model, "vocab": rows}
    return model


def _first_of_template(post: Any) -> str | None:
    """The token in front of a text, if a file's template is that and the text."""
    match post:
        case {"type": "Sequence", "processors": list(parts)}:
            return next(filter(None, map(_first_of_template, parts)), None)
        case {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": str(token)}}, {"Sequence": _}],
        }:
            return token
    return None


def _parse(path: Path, data: bytes) -> dict[str, Any]:
    """A tokenizer.json with the fields that are read here of the types that they must have."""
    try:
        description = json_of(data.decode())
    except ValueError as error:
        raise ValueError(f"{path}: not a tokenizer.json: {error}") from error
    if not isinstance(description, dict) or not isinstance(description.get("model"), dict):
        hint = "; a vocab.json needs its merges.txt too" if isinstance(description, dict) else ""
        raise ValueError(f'{path}: not a tokenizer.json: it has no object "model"{hint}')
    added = description.get("added_tokens") or []
    for entry in added if isinstance(added, list) else [added]:
        fields = entry if isinstance(entry, dict) else {}
        if type(fields.get("id")) is not int or not isinstance(fields.get("content"), str):
            raise ValueError(
                f'{path}: not a tokenizer.json: added token {entry!r} lacks its "id" or "content"'
            )
    # Dropout is for training, as a limit of length is: a document's tokens are always the same.
    model = {name: value for name, value in description["model"].items() if name != "dropout"}
    return {**description, "model": model, "added_tokens": added}


def merge_lines(name: str, merges: Sequence[Any]) -> list[str]:
    """Lines ``Ġ t`` from the lines of a file, or from pairs of words."""
    try:
        lines = [
            line.rstrip("\r") if isinstance(line, str) else " ".join(line)
            for line in merges
            if line and line != "\r"
        ]
    except TypeError as error:
        raise ValueError(f"{name}: merges must be lines or pairs of words: {error}") from None
    if lines and lines[0].startswith("#version"):
        del lines[0]
    for line in lines:
        if line.count(" ") != 1:
            raise ValueError(f"{name}: a merge must be two words, got {line!r}")
    return lines


def _byte_level_words(description: dict[str, Any]) -> tuple[tuple[str, ...], Form | None] | None:
    """Patterns and normalization, if the file describes byte-level BPE and nothing besides."""
    model = description["model"]
    plain = (
        model.get("type", "BPE") == "BPE"
        and isinstance(model.get("vocab"), dict)
        and isinstance(model.get("merges"), list)
        and not any(
            model.get(option)
            for option in (
                "unk_token",
                "continuing_subword_prefix",
                "end_of_word_suffix",
                "byte_fallback",
            )
        )
    )
    forms = _steps(description.get("normalizer"), "normalizers")
    stages = _steps(description.get("pre_tokenizer"), "pretokenizers")
    if not plain or forms is None or stages is None or len(forms) > 1:
        return None
    form = forms[0].get("type") if forms else None
    if forms and form not in get_args(Form):
        return None
    patterns = []
    for part in stages[:-1]:
        match part:
            case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated"}:
                if part.get("invert") or _REPEATED_INTERVAL.search(pattern):
                    return None
                patterns.append(pattern)
            case {"type": "Digits", "individual_digits": bool(single)}:
                patterns.append(r"\p{N}" if single else r"\p{N}+")
            case _:
                return None
    last = stages[-1] if stages else {}
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    if last.get("use_regex", True):
        patterns.append(GPT2_PATTERN)
    return (tuple(patterns), cast("Form | None", form)) if patterns else None


def _steps(step: Any, within: str) -> list[dict[str, Any]] | None:
    """Those that a step is or has ``within`` it, none for null; None for what is no step, of which
    the tokenizers library tells."""
    if isinstance(step, dict) and step.get("type") == "Sequence":
        steps = step.get(within)
    else:
        steps = [] if step is None else [step]
    known = isinstance(steps, list) and all(isinstance(one, dict) for one in steps)
    return steps if known else None


def said_beside(config: Path) -> dict[str, Any]:
    """What a tokenizer_config.json says; {} without one."""
    if not config.is_file():
        return {}
    try:
        fields = json_of(config.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{config}: not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{config}: expected an object, got {type(fields).__name__}")
    return fields


def _special_ids(config: Path, known: Mapping[str, int]) -> dict[str, int]:
    """Ids by role, from the tokenizer_config.json beside the file, else by their common names."""
    special: dict[str, int] = {}
    fields = said_beside(config)
    for role in CONFIG_ROLES:
        token = fields.get(f"{role}_token")
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and text in known:
            special[role] = known[text]
    for text in ENDS:
        if "eos" not in special and text in known:
            special["eos"] = known[text]
    if "eos" in special:
        special["eod"] = special["eos"]
    return special
