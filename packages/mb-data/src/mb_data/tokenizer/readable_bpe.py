"""Byte-level byte-pair encoding in plain Python: GPT-2's tokenizer and its descendants.

The algorithm (Sennrich, Haddow and Birch 2016, arXiv:1508.07909; on bytes: Radford et al. 2019,
"Language Models are Unsupervised Multitask Learners"): a regular expression cuts the text into
words, each word starts as its bytes, and the adjacent pair that was learnt first is merged until
no pair is left that was learnt.

``ReadableBPE`` is that algorithm, nothing else: it documents, it serves where the engine is not
installed, and every preprocessing run compares the two on a sample.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush
from itertools import pairwise, product
from typing import Any, Literal

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

BEFORE_SPACES = re.compile(rb"[!-~](?= [!-~])")
PIECE_BYTES = 256
REMEMBERED = 64  # letters of a word

Form = Literal["NFC", "NFD", "NFKC", "NFKD"]


class ReadableBPE:
    """Byte-level BPE in plain Python.

    Args:
        ids: the id of every entry of the vocabulary: bytes, or bytes written as letters (see
            ``byte_to_letter``), as in files of merges.
        merges: lines ``Ġ t``, in the order they were learnt. None where the order of the ids is
            that of learning, and any two entries that make a third may merge (tiktoken's files).
        patterns: regular expressions; the first cuts the text, the next one its pieces, and so on.
            What lies between two matches is a piece too. The last pieces are the words.
        ignore_merges: a word that is itself in the vocabulary is taken whole (Llama 3, tiktoken).
        form: Unicode normalization of the text before all else (Qwen: NFC).
    """

    def __init__(
        self,
        ids: Mapping[str, int] | Mapping[bytes, int],
        merges: Sequence[str] | None,
        patterns: Sequence[str] = (GPT2_PATTERN,),
        *,
        ignore_merges: bool = False,
        form: Form | None = None,
    ) -> None:
        self.ids: Mapping[Any, int] = ids
        self.merges = merges
        self.ranks = ids if merges is None else dict(zip(merges, range(len(merges)), strict=True))
        self.patterns = tuple(patterns)
        self.ignore_merges = ignore_merges
        self.form: Form | None = form
        self.spelt = isinstance(next(iter(ids), ""), str)
        self.letters = byte_to_letter() if self.spelt else {b: bytes((b,)) for b in range(256)}
        self._nothing: Any = "" if self.spelt else b""
        self._between: Any = self._nothing if merges is None else " "
        self._remembered = lru_cache(maxsize=1 << 16)(self._encode_word)

    @cached_property
    def expressions(self) -> list[Any]:
        import regex  # here: a run that only loads a tokenizer need not wait for its tables

        # Version 1 reads sets within sets, and && between them, as the libraries' expressions do.
        try:
            return [regex.compile(pattern, regex.VERSION1) for pattern in self.patterns]
        except regex.error as error:
            raise ValueError(f"pattern {error.pattern!r} cannot be read: {error}") from None

    def encode(self, text: str) -> list[int]:
        return [token for word in self.words(text) for token in self.encode_word(word)]

    def encode_start(self, text: str, letters: int) -> list[int]:
        """The first tokens of ``encode(text)``, looking at no more than ``letters`` letters.

        The last two words of a cut text are left out: what follows may change where they end.
        """
        words = list(self.words(text[:letters]))
        if len(text) > letters:
            words = words[:-2]
        return [token for word in words for token in self.encode_word(word)]

    def pieces(self, text: bytes) -> list[bytes]:
        """A text cut into pieces of a few hundred bytes whose words are those of the text.

        It is cut before a space between two signs of ASCII, where today's patterns always end a
        word; by patterns that do not, it stays whole.
        """
        if not self._spaces_begin_words:
            return [text]
        places = [0]
        for match in BEFORE_SPACES.finditer(text):
            if match.end() - places[-1] >= PIECE_BYTES:
                places.append(match.end())
        return [text[a:b] for a, b in pairwise([*places, len(text)])]

    @cached_property
    def _spaces_begin_words(self) -> bool:
        for before, after in product("aZ09.,;:'\"!?()[]{}<>/\\|@#$%&*+-=_~^`", "aZst0'\"(./"):
            left, right = f"x y{before}", f" {after}b c\n"
            if [*self.words(left + right)] != [*self.words(left), *self.words(right)]:
                return False
        return True

    def encode_word(self, word: str) -> tuple[int, ...]:
        # Long words seldom come again, and remembering them costs memory.
        return self._remembered(word) if len(word) < REMEMBERED else self._encode_word(word)

    def words(self, text: str) -> Iterator[str]:
        if self.form:
            text = unicodedata.normalize(self.form, text)
        return self._cut(text, 0)

    def _cut(self, text: str, level: int) -> Iterator[str]:
        if level == len(self.expressions):
            yield text
            return
        end = 0
        for match in self.expressions[level].finditer(text):
            if match.start() > end:
                yield from self._cut(text[end : match.start()], level + 1)
            if match.end() > match.start():
                yield from self._cut(match.group(), level + 1)
            end = match.end()
        if end < len(text):
            yield from self._cut(text[end:], level + 1)

    def _encode_word(self, word: str) -> tuple[int, ...]:
        parts: list[Any] = [self.letters[b] for b in word.encode()]
        if self.ignore_merges and (whole := self.ids.get(self._nothing.join(parts))) is not None:
            return (whole,)
        # Neighbours of each part, and a heap of the pairs that may merge, earliest learnt first,
        # then from the left. A pair whose parts have changed meanwhile is passed over.
        after = list(range(1, len(parts) + 1))
        before = list(range(-1, len(parts) - 1))

        def pair(left: int, right: int) -> tuple[int, int, Any, Any] | None:
            if left < 0 or right == len(parts):
                return None
            a, b = parts[left], parts[right]
            rank = self.ranks.get(a + self._between + b)
            return None if rank is None else (rank, left, a, b)

        heap = [p for right in range(1, len(parts)) if (p := pair(right - 1, right))]
        heapify(heap)
        while heap:
            _, left, a, b = heappop(heap)
            right = after[left]
            if right == len(parts) or parts[left] != a or parts[right] != b:
                continue
            parts[left], parts[right] = a + b, None
            after[left] = after[right]
            if after[right] < len(parts):
                before[after[right]] = left
            for neighbours in (pair(before[left], left), pair(left, after[left])):
                if neighbours:
                    heappush(heap, neighbours)
        return tuple([self.ids[part] for part in parts if part is not None])


@lru_cache(maxsize=1)
def byte_to_letter() -> dict[int, str]:
    """GPT-2's spelling of bytes in vocabulary files: printable ones as themselves, the others as
    letters from U+0100 on. In the order of the ids: a byte's position here is its id in GPT-2."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    letters = {b: chr(b) for b in printable}
    return letters | {b: chr(0x100 + i) for i, b in enumerate(others)}
