"""`mb-train eval RUN --task NAME FILE`: Megatron-LM's zero-shot tasks, on a file the user names.

lambada      the last word of each text: accuracy. JSON Lines with a "text" each. With `strict` the
             last word is the last of the text's words, and all its tokens must be right; else it is
             the last token (Megatron's default).
wikitext     WikiText-103's test file, its spaces around punctuation taken back: loss per token of
             ours, PPL, and PPL adjusted to the tokens that the file itself is made of.
perplexity   any text, or JSON Lines (.jsonl, .json, .ndjson) with a "text" each: loss per token,
             PPL, bits per byte.

The last two move a window over the text by `stride` tokens and score what is new in it, each token
once. Where documents begin with a token of their own, texts do too. Elsewhere wikitext's first
token is not scored, as in Megatron-LM, and texts of perplexity come behind the end of a document,
as in training: so bits per byte are of all bytes, of short texts too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from mb_data.text.sources import JSON_KINDS

from mb_train.data.tokenizers import beginning, preceding
from mb_train.inference.scoring import continuation, rolling, score
from mb_train.loading import Trained
from mb_train.logs import megatron_lines
from mb_train.untrusted import json_of


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """How to evaluate.

    Args:
        strict: see the module, on lambada.
        stride: by how many tokens the window moves (Megatron's --overlapping-eval).
        batch_size: windows at a time.
    """

    strict: bool = False
    stride: int = 32
    batch_size: int = 8

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"Expected a batch of at least 1, got {self.batch_size}.")


def lambada(trained: Trained, path: Path, options: EvalOptions) -> dict[str, float]:
    """Share of texts whose last word is predicted: `accuracy`, `examples`, `correct`."""
    tokenizer, context = trained.tokenizer, trained.config.positions
    begin, windows = beginning(tokenizer), []
    for number, text in _texts_of_lines(path):
        if options.strict:
            word = text.split()[-1]
            rest = text[: text.rfind(word)].strip()
            # Encoded with what is before it: SentencePiece puts a space of its own before a text.
            encoded, before = tokenizer.encode(f"{rest} {word}"), tokenizer.encode(rest)
            tokens = encoded[len(before) :]
        else:
            encoded = tokenizer.encode(text)
            before, tokens = encoded[:-1], encoded[-1:]
        if not before or not tokens:
            raise ValueError(f"{path}, line {number}: expected a word and text before it.")
        if len(tokens) > context:
            raise ValueError(
                f"{path}, line {number}: expected a last word of at most {context} tokens, the "
                f"model's context, got {len(tokens)}."
            )
        windows.append(continuation([*begin, *before], tokens, context))
    if not windows:
        raise ValueError(f"{path} holds no text.")
    scores = score(trained.model, windows, batch_size=options.batch_size)
    correct = sum(found.greedy for found in scores)
    return {
        "accuracy": correct / len(scores),
        "correct": correct,
        "examples": len(scores),
        "loss": -sum(found.log_prob for found in scores) / sum(w.scored for w in windows),
    }


def wikitext(trained: Trained, path: Path, options: EvalOptions) -> dict[str, float]:
    """Loss per token, `ppl`, and `adjusted_ppl` per token of the file's own (its words)."""
    text = _text(path)
    original = len(text.strip().split(" "))
    tokens = [*beginning(trained.tokenizer), *trained.tokenizer.encode(detokenized(text))]
    if original < 2 or len(tokens) < 2:
        raise ValueError(f"Expected at least two words and two tokens in {path}, got fewer.")
    loss = _loss(trained, [tokens], options) / (len(tokens) - 1)
    ratio = (len(tokens) - 1) / (original - 1)
    return {
        "loss": loss,
        "ppl": megatron_lines.perplexity(loss),
        "adjusted_ppl": megatron_lines.perplexity(loss * ratio),
        "token_ratio": ratio,
        "tokens": len(tokens),
        "original_tokens": original,
    }


def perplexity(trained: Trained, path: Path, options: EvalOptions) -> dict[str, float]:
    """Loss per token, `ppl`, `bits_per_byte` over all texts of a file."""
    lines = path.suffix.lower() in JSON_KINDS
    texts = [t for _, t in _texts_of_lines(path)] if lines else [_text(path)]
    begin = preceding(trained.tokenizer)
    encoded = [[*begin, *trained.tokenizer.encode(text)] for text in texts]
    scored = sum(len(tokens) - 1 for tokens in encoded)
    size = sum(len(text.encode()) for text in texts)
    if scored == 0 or size == 0:
        raise ValueError(f"{path} holds no text.")
    total = _loss(trained, encoded, options)
    loss = total / scored
    return {
        "loss": loss,
        "ppl": megatron_lines.perplexity(loss),
        "bits_per_byte": total / math.log(2) / size,
        "tokens": scored,
        "bytes": size,
        "texts": len(texts),
    }


Measure: TypeAlias = Callable[..., dict[str, float]]
_TASKS: dict[str, Measure] = {"lambada": lambada, "wikitext": wikitext, "perplexity": perplexity}


def task_of(name: str) -> Measure:
    """A task by name, which takes a model, `path` and `options`, and returns results by name.

    It raises ValueError for a file that is not what it reads and for a model that has diverged, and
    OSError where there is no such file.

    Raises:
        ValueError: an unknown task.
    """
    if name not in _TASKS:
        raise ValueError(f"Expected a task of {', '.join(_TASKS)}, got {name!r}.")
    return _TASKS[name]


def _loss(trained: Trained, texts: Sequence[Sequence[int]], options: EvalOptions) -> float:
    """Sum over the tokens of all texts, each text for itself, in nats."""
    context = trained.config.positions
    stride = min(options.stride, context)
    windows = [window for tokens in texts for window in rolling(tokens, context, stride)]
    scores = score(trained.model, windows, batch_size=options.batch_size)
    return -sum(found.log_prob for found in scores)


def _texts_of_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Line number and "text" of every line; empty lines and texts are left out."""
    for number, line in enumerate(_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            text = json_of(line)["text"]
            text.encode()  # half a surrogate pair is no text
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError(
                f'{path}, line {number}: expected JSON with a "text", got {line[:60]!r}.'
            ) from None
        if text.strip():
            yield number, text


def _text(path: Path) -> str:
    try:
        # As it stands, whatever its lines end with; some editors begin files with a mark.
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"Expected {path} to be text in UTF-8: {error}.") from None


def detokenized(text: str) -> str:
    """WikiText as it was before it was cut into words, as far as Megatron-LM takes it back.

    It has spaces around punctuation, and @ around what joins numbers and words. They go in the same
    order as there, else a perplexity is of another text: `Jr . ,` becomes `Jr.,`, and what stands
    between two apostrophes is taken for a quotation.
    """
    text = text.replace("s '", "s'")
    for sign in "-,.":
        text = text.replace(f" @{sign}@ ", sign)
    for sign in ":;.!?,":
        text = text.replace(f" {sign} ", f"{sign} ")
    for left, right in ("()", "[]", "{}", '""', "''"):
        text = _tightened(text, left, right)
    for depth in (4, 3, 2):  # of headings
        text = text.replace(" ".join("=" * depth), "=" * depth)
    text = text.replace(" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}")
    text = text.replace(" \n", "\n").replace("\n ", "\n").replace(" N ", " 1 ")
    return text.replace(" 's", "'s")


def _tightened(text: str, left: str, right: str) -> str:
    """A text without the spaces inside of these brackets or quotation marks."""
    parts, done = [], 0
    while (at := text.find(left, done)) >= 0 and (end := text.find(right, at + 1)) >= 0:
        parts += [text[done:at], left, text[at + 1 : end].strip(), right]
        done = end + 1
    return "".join([*parts, text[done:]])
