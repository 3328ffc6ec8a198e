"""Letters on which libraries disagree, because each brings the Unicode tables of its own year.

A splitting pattern asks of every letter whether it is a letter, a digit, a mark or none of these.
For one that Unicode has added lately an engine and the code it must equal may answer differently,
and then the tokens differ. Which letters those are is known: ``vocabularies/disputed_letters.txt``,
made by ``benchmarks/disputed_letters.py``. A document with such a letter takes the readable way.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib import resources

import numpy as np
import numpy.typing as npt

POINTS = 0x110000


class DisputedLetters:
    """Finds texts that contain any of some letters, in UTF-8, at a cost far below encoding them.

    Args:
        points: bool [0x110000], True for the letters to find; none of them may be ASCII.
    """

    def __init__(self, points: npt.NDArray[np.bool_]) -> None:
        self.points = points
        # The first two bytes of a letter say which 1, 64 or 4,096 letters it is one of.
        self._starts = np.zeros(1 << 14, dtype=bool)
        for first in range(0xC2, 0xF5):
            for second in range(0x80, 0xC0):
                low, high = _letters(first, second)
                self._starts[first << 6 | second & 0x3F] = bool(points[low:high].any())
        self._leads: npt.NDArray[np.bool_] = np.any(self._starts.reshape(256, 64), axis=1)

    def find(self, texts: Sequence[bytes]) -> list[int]:
        """Numbers of the texts with such a letter, ascending."""
        some = [i for i, text in enumerate(texts) if not text.isascii()]
        if not some:
            return []
        data = np.frombuffer(b"\n".join([texts[i] for i in some]) + b"\n\n\n", dtype=np.uint8)
        places = np.flatnonzero(data >= 0xC2)
        places = places[self._leads[data[places]]]
        key = (data[places].astype(np.intp) << 6) | (data[places + 1] & 0x3F)
        places = places[self._starts[key]]
        hits = places[self.points[_decode(data, places)]]
        ends = np.cumsum([len(texts[i]) + 1 for i in some])
        return [some[i] for i in np.unique(np.searchsorted(ends, hits, side="right")).tolist()]


@lru_cache(maxsize=2)
def disputed_letters(*, wordpiece: bool = False) -> DisputedLetters:
    """Those of splitting patterns; or those of WordPiece, and its capital sigma besides: whether it
    ends a word decides its small form."""
    text = resources.files("mb_data").joinpath("vocabularies", "disputed_letters.txt").read_text()
    points = np.zeros(POINTS, dtype=bool)
    for line in text.splitlines():
        name, *ranges = line.split()
        if name == "patterns" or wordpiece:
            for part in ranges:
                first, _, last = part.partition("-")
                points[int(first, 16) : int(last, 16) + 1] = True
    points[ord("Σ")] = wordpiece
    return DisputedLetters(points)


def _letters(first: int, second: int) -> tuple[int, int]:
    """The range of letters whose UTF-8 starts with these two bytes."""
    tail = second & 0x3F
    if first < 0xE0:
        low, count = (first & 0x1F) << 6 | tail, 1
    elif first < 0xF0:
        low, count = (first & 0xF) << 12 | tail << 6, 1 << 6
    else:
        low, count = (first & 7) << 18 | tail << 12, 1 << 12
    return low, min(low + count, POINTS)


def _decode(data: npt.NDArray[np.uint8], places: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """The letters that start at these places of valid UTF-8."""
    a, b, c, d = (data[places + i].astype(np.intp) & 0x3F for i in range(4))
    lead = data[places]
    two = (a & 0x1F) << 6 | b
    three = (a & 0xF) << 12 | b << 6 | c
    four = (a & 7) << 18 | b << 12 | c << 6 | d
    return np.where(lead < 0xE0, two, np.where(lead < 0xF0, three, four))
