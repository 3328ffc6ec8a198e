"""Letters on which libraries disagree, because they contain Unicode tables of different years.

A splitting pattern asks of every character whether it is a letter, a digit, a mark or none of
these. For one that Unicode has added lately, an engine and the code it must equal may answer
differently, and then the tokens differ. ``vocabularies/disputed_letters.txt``, made by
``benchmarks/disputed_letters.py``, lists these letters. Text around them is encoded by the readable
implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib import resources

import numpy as np
import numpy.typing as npt

POINTS = 0x110000


class DisputedLetters:
    """Finds texts in UTF-8 that contain any of some letters, in far less time than encoding takes.

    Args:
        points: bool [0x110000], True for the letters to find; none of them may be ASCII.
    """

    def __init__(self, points: npt.NDArray[np.bool_]) -> None:
        self.points = points
        # The first two bytes of a letter say which 1, 64 or 4,096 letters it is one of: [256, 64].
        starts = np.zeros((256, 64), dtype=bool)
        starts[0xC2:0xE0] = points[0x80:0x800].reshape(30, 64)
        starts[0xE0:0xF0] = points[:0x10000].reshape(16, 64, 64).any(axis=2)
        planes = np.append(points, np.zeros(0x140000 - POINTS, dtype=bool))
        starts[0xF0:0xF5] = planes.reshape(5, 64, 4096).any(axis=2)
        self._starts = starts.reshape(-1)
        self._leads: npt.NDArray[np.bool_] = np.any(starts, axis=1)

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
        found = set(np.searchsorted(ends, hits, side="right").tolist())
        return [some[i] for i in sorted(found)]  # np.unique would import numpy.ma, in each worker


@lru_cache(maxsize=2)
def disputed_letters(*, wordpiece: bool = False) -> DisputedLetters:
    """Those of splitting patterns; or those of WordPiece, with capital sigma, whose small form
    depends on whether it ends a word."""
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


def _decode(data: npt.NDArray[np.uint8], places: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """The letters that start at these places of valid UTF-8."""
    a, b, c, d = (data[places + i].astype(np.intp) & 0x3F for i in range(4))
    lead = data[places]
    two = (a & 0x1F) << 6 | b
    three = (a & 0xF) << 12 | b << 6 | c
    four = (a & 7) << 18 | b << 12 | c << 6 | d
    return np.where(lead < 0xE0, two, np.where(lead < 0xF0, three, four))
