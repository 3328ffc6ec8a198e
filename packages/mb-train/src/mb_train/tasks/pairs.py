"""Pairs of sentences with a label, from the TSV files of MNLI and QQP.

A file's first line names its columns and is passed over. MNLI (Williams et al., 2018) has the two
sentences in its 9th and 10th column and the label in its last; QQP, Quora's questions, in its 4th,
5th and 6th. GLUE's train.tsv of QQP has lines that were torn in two; they are left out, as by
Megatron-LM.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from mb_train.tasks.examples import Example, lines_of


class Form(NamedTuple):
    """Columns of the two sentences and of the label, how many there are at least, the classes."""

    first: int
    second: int
    label: int
    columns: int
    classes: tuple[str, ...]


FORMS: Mapping[str, Form] = MappingProxyType(
    {
        "mnli": Form(8, 9, -1, 11, ("contradiction", "entailment", "neutral")),
        "qqp": Form(3, 4, 5, 6, ("0", "1")),
    }
)


def read_pairs(path: Path, task: str) -> list[Example]:
    """All pairs of a file. Lines with too few columns are left out with a warning.

    Raises:
        ValueError: an unknown label, named by its line's number; no pair.
        OSError: a file that cannot be read.
    """
    form, pairs, torn = FORMS[task], [], []
    for number, line in enumerate(lines_of(path)[1:], start=2):
        if not line.strip():
            continue
        row = line.rstrip("\r").split("\t")
        if len(row) < form.columns:
            torn.append(
                f"{path}, line {number}: expected at least {form.columns} columns of {task}, the "
                f"sentences in columns {form.first + 1} and {form.second + 1} and the label in the "
                f"{'last' if form.label < 0 else f'{form.label + 1}th'}, got {len(row)}."
            )
            continue
        label = row[form.label].strip()
        if label not in form.classes:
            raise ValueError(
                f"{path}, line {number}: expected a label of {', '.join(form.classes)}, got "
                f"{label!r}."
            )
        texts = ((row[form.first], row[form.second]),)
        pairs.append(Example(texts, form.classes.index(label)))
    if not pairs:
        none = f"Expected pairs of sentences below the first line of {path}, got none."
        raise ValueError(torn[0] if torn else none)
    if torn:
        lines = "This line is" if len(torn) == 1 else f"{len(torn)} lines like this are"
        warnings.warn(f"{torn[0]} {lines} left out.", stacklevel=2)
    return pairs
