"""Make ``vocabularies/disputed_letters.txt``: the letters that libraries of other years class
otherwise. Run it with the oldest Python that is supported, whose Unicode tables are the oldest:

    python packages/mb-data/benchmarks/disputed_letters.py > .../disputed_letters.txt

- ``patterns``: letters that Unicode 14 does not know yet, or that a later version of it has put
  into another category. Splitting patterns (``\\p{L}``, ``\\s``) fall differently on them.
- ``wordpiece``: further letters that BERT's rules and the tokenizers library's treat differently,
  in one of four settings.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

import regex
from mb_data.tokenizer.wordpiece import ReadableWordPiece, WordPiece

CATEGORIES = ("L", "Lu", "Ll", "Lt", "Lm", "Lo", "N", "M", "Mn", "P", "S", "Zs")
POINTS = [*range(0xD800), *range(0xE000, 0x110000)]


def disputed_by_patterns() -> set[int]:
    newest = {name: regex.compile(rf"\p{{{name}}}") for name in CATEGORIES}
    found = set()
    for point in POINTS:
        letter = chr(point)
        category = unicodedata.category(letter)
        if category == "Cn" or any(
            (pattern.match(letter) is not None) != category.startswith(name)
            for name, pattern in newest.items()
        ):
            found.add(point)
    return found


def disputed_by_wordpiece(lower_case: bool) -> set[int]:
    readable = ReadableWordPiece({}, lower_case=lower_case)
    engine = WordPiece.load_engine({"[UNK]": 0}, lower_case)
    found = set()
    for point in POINTS:
        for text in (f"a{chr(point)}b", f"a {chr(point)}"):
            normal = engine.normalizer.normalize_str(text)
            if [w for w, _ in engine.pre_tokenizer.pre_tokenize_str(normal)] != readable.words(
                text
            ):
                found.add(point)
    return found


def ranges(points: Iterable[int]) -> list[str]:
    rows: list[list[int]] = []
    for point in sorted(points):
        if rows and rows[-1][1] == point - 1:
            rows[-1][1] = point
        else:
            rows.append([point, point])
    return [f"{first:x}-{last:x}" for first, last in rows]


def main() -> None:
    patterns = disputed_by_patterns()
    wordpiece = disputed_by_wordpiece(True) | disputed_by_wordpiece(False)
    for name, points in (("patterns", patterns), ("wordpiece", wordpiece - patterns)):
        print(name, " ".join(ranges(points)))


if __name__ == "__main__":
    main()
