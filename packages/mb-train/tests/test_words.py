"""Sentences that are said in several places, and numbers in them."""

from pathlib import Path

import pytest
from mb_train.words import counted, figure, missing_package, typed


def test_one_is_no_plural():
    said = [counted(number, "rank") for number in (0, 1, 2, 1024)]
    assert said == ["0 ranks", "1 rank", "2 ranks", "1,024 ranks"]


@pytest.mark.parametrize(
    ("number", "digits", "said"),
    [
        (0.0, 0, "0"), (0.0, 1, "0.0"), (0.00123, 0, "0.0012"), (0.5, 0, "0.50"), (4.24, 0, "4.2"),
        (42.4, 0, "42"), (42.4, 1, "42.4"), (12345.6, 0, "12,346"), (1.0, 1, "1.0"),
    ],
)  # fmt: skip
def test_two_digits_count_at_least(number, digits, said):
    assert figure(number, digits) == said


def test_a_package_that_is_missing_is_named_with_what_installs_it():
    said = str(missing_package("faiss", "for an index", "'mb-train[retrieval]'", ", or faiss-gpu"))
    assert said == (
        "Expected the faiss package for an index, found none. Install it with pip install "
        "'mb-train[retrieval]', or faiss-gpu."
    )


def test_a_path_is_said_as_a_shell_takes_it():
    said = [typed(Path(path)) for path in ("runs/a", "my run/iter_0000002", "-run", "it's")]
    assert said == ["runs/a", "'my run/iter_0000002'", "./-run", "'it'\"'\"'s'"]
