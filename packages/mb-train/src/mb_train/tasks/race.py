"""Questions on a text with four answers to choose from: RACE (Lai et al., 2017).

Its files are JSON Lines: an "article", "questions" on it, for each its four "options", and the
"answers", A to D. Megatron-LM's reading: the option stands in the question where it has its blank,
`_`, or else behind it; this is the first part of a text, the article the second.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mb_train.tasks.examples import Example, lines_of
from mb_train.untrusted import json_of

LETTERS = "ABCD"
QUESTION_AT_MOST = 128  # tokens of a question with its option, Megatron-LM's --max-qa-length
_BLANK = re.compile("_+")


def read_questions(path: Path) -> list[Example]:
    """All questions of a file, or of a folder's.

    Raises:
        ValueError: a line that is not as described, named by its number; no question.
        OSError: a file that cannot be read.
    """
    questions: list[Example] = []
    for file in files_in(path):
        for number, line in enumerate(lines_of(file), start=1):
            if not line.strip():
                continue
            try:
                questions += _questions_in(json_of(line))
            except (ValueError, KeyError, TypeError) as error:
                said = error.args[0] if type(error) is ValueError else f"{line[:60]!r}"
                raise ValueError(
                    f'{file}, line {number}: expected JSON with an "article", "questions", four '
                    f'"options" and one of "answers" A to D for each, got {said}.'
                ) from None
    if not questions:
        where = f"files *.txt of {path}" if path.is_dir() else path
        raise ValueError(f"Expected questions of RACE in {where}, got none.")
    return questions


def files_in(path: Path) -> list[Path]:
    """A file itself; of a folder all files *.txt, those of the folders in it too."""
    return sorted(path.rglob("*.txt")) if path.is_dir() else [path]


def _questions_in(found: Any) -> Iterator[Example]:
    article, *lists = (found[name] for name in ("article", "questions", "options", "answers"))
    for each in lists:
        _check_list(each)
    questions, options, answers = map(len, lists)
    if not questions == options == answers:
        raise ValueError(f"{questions} questions, {options} lists of options and {answers} answers")
    for question, options, answer in zip(*lists, strict=True):
        _check_list(options)
        for text in (article, question, *options):
            _check_text(text)
        if len(options) != len(LETTERS):
            raise ValueError(f"{len(options)} options for {question!r}")
        if answer not in tuple(LETTERS):
            raise ValueError(f"the answer {answer!r} to {question!r}")
        asked = (_with_option(question, option) for option in options)
        yield Example(tuple((text, article) for text in asked), LETTERS.index(answer))


def _check_list(found: Any) -> None:
    if not isinstance(found, list):
        raise ValueError(f"{found!r} for a list")


def _check_text(text: Any) -> None:
    if not isinstance(text, str):
        raise ValueError(f"{text!r} for a text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("a half of a surrogate pair") from None


def _with_option(question: str, option: str) -> str:
    if "_" in question:
        return _BLANK.sub(lambda blank: option, question)
    return f"{question} {option}"
