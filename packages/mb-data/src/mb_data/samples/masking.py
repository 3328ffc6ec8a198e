"""Which tokens a BERT or T5 sample hides, and what it shows in their place.

Whole words are hidden: a word is a token and those after it that continue it. Words are visited in
random order; at each, a run of n words is hidden if it fits the budget (with fewer words if not)
and touches none hidden before. BERT (Devlin et al., 2018, with ALBERT's n-grams, Lan et al., 2019)
draws n in proportion to 1/n and shows [MASK] for 80 % of the hidden tokens, the token itself for
10 % and a random one for 10 %. T5 (Raffel et al., 2019) draws n from a geometric distribution, as
SpanBERT does (Joshi et al., 2019), and shows one sentinel for each run.

The random numbers are drawn in Megatron-LM's order, so a sample for a seed equals its sample.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

BERT_NGRAMS = 3
_WEIGHTS = 1.0 / np.arange(1, BERT_NGRAMS + 1)
_WEIGHTS /= _WEIGHTS.sum()
# Share of the runs that have at most n words, rounded as Megatron and RandomState.choice do it.
_CUMULATIVE = np.cumsum(_WEIGHTS / _WEIGHTS.sum())
_SHARES: list[float] = (_CUMULATIVE / _CUMULATIVE[-1]).tolist()
T5_LONGEST_SPAN = 10  # words
T5_MEAN_SPAN = 5.0  # words, before clipping: SpanBERT's geometric distribution with p = 0.2


class MaskingTokenizer(Protocol):
    """What is needed of a tokenizer; those of ``load_tokenizer`` have it.

    Where it has no such token the property of one raises ValueError.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def extra_ids(self) -> tuple[int, ...]: ...
    @property
    def cls(self) -> int: ...
    @property
    def sep(self) -> int: ...
    @property
    def mask(self) -> int: ...
    @property
    def pad(self) -> int: ...
    @property
    def bos(self) -> int: ...
    @property
    def eos(self) -> int: ...
    def word_starts(self) -> npt.NDArray[np.bool_]: ...


class Words(NamedTuple):
    """Word i of W is `positions[edges[i] : edges[i + 1]]`.

    Attributes:
        positions: of the tokens that belong to words, ascending.
        edges: W + 1 indices into `positions`.
    """

    positions: list[int]
    edges: list[int]


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A tokenizer's special tokens and words: small, so that it travels to worker processes.

    Attributes:
        word_starts: bool [vocab_size], False for tokens that continue a word (``##ing``).
        sentinels: stand for T5's hidden runs, in order.
    """

    cls: int
    sep: int
    mask: int
    pad: int
    word_starts: npt.NDArray[np.bool_]
    bos: int = -1
    eos: int = -1
    sentinels: tuple[int, ...] = ()

    @classmethod
    def for_bert(cls, tokenizer: MaskingTokenizer) -> Vocabulary:
        """ValueError if the tokenizer lacks one of BERT's special tokens."""
        return cls(
            cls=tokenizer.cls,
            sep=tokenizer.sep,
            mask=tokenizer.mask,
            pad=tokenizer.pad,
            word_starts=tokenizer.word_starts(),
        )

    @classmethod
    def for_t5(cls, tokenizer: MaskingTokenizer) -> Vocabulary:
        """Of what a tokenizer for T5 has: T5's own has no [CLS], [SEP], [MASK] and [BOS].

        The first three are in no sample. A decoder begins with padding where there is no [BOS], as
        T5's does (Raffel et al., 2019).

        Raises:
            ValueError: it has no padding, end or sentinels.
        """
        if not tokenizer.extra_ids:
            raise ValueError(
                "T5 needs sentinel tokens and this tokenizer has none; load it with extra ids "
                "(--vocab-extra-ids 100)"
            )
        return cls(
            cls=_id_or(tokenizer, "cls", -1),
            sep=_id_or(tokenizer, "sep", -1),
            mask=_id_or(tokenizer, "mask", -1),
            pad=tokenizer.pad,
            word_starts=tokenizer.word_starts(),
            bos=_id_or(tokenizer, "bos", tokenizer.pad),
            eos=tokenizer.eos,
            sentinels=tuple(tokenizer.extra_ids),
        )

    def words(self, tokens: Sequence[int]) -> Words:
        """The words of a text. [CLS] and [SEP] belong to none.

        A token that continues a word belongs to the word before, even across [SEP]: as in
        Megatron, where trimming may cut a segment in the middle of a word.
        """
        ids = np.asarray(tokens, dtype=np.int64)
        outside = (ids < 0) | (ids >= len(self.word_starts))
        if outside.any():
            raise ValueError(
                f"token {ids[outside][0]}: the vocabulary has ids 0 to "
                f"{len(self.word_starts) - 1:,}; was the dataset made with another tokenizer?"
            )
        positions = np.flatnonzero((ids != self.cls) & (ids != self.sep))
        starts = self.word_starts[ids[positions]]
        starts[:1] = True
        return Words(positions.tolist(), [*np.flatnonzero(starts).tolist(), len(positions)])


def _id_or(tokenizer: MaskingTokenizer, role: str, otherwise: int) -> int:
    try:
        return getattr(tokenizer, role)
    except ValueError:
        return otherwise


def mask_bert(
    tokens: Sequence[int],
    vocabulary: Vocabulary,
    rng: np.random.RandomState,
    *,
    probability: float,
    max_predictions: float,
) -> tuple[list[int], list[int]]:
    """Hide about ``probability`` of the tokens, at most ``max_predictions``.

    Returns:
        The tokens to show, and the positions, ascending, whose original tokens are to be predicted.
    """
    shown = list(tokens)
    hidden: list[int] = []

    def words_to_hide() -> int:  # RandomState.choice with weights 1/n, without its 20 us
        return bisect_right(_SHARES, rng.random_sample()) + 1

    budget = _budget(len(tokens), probability, max_predictions)
    for span in _spans(vocabulary.words(tokens), rng, budget=budget, draw=words_to_hide):
        hidden += span
        for position in span:
            if rng.random_sample() < 0.8:
                shown[position] = vocabulary.mask
            elif rng.random_sample() >= 0.5:
                shown[position] = int(rng.randint(0, len(vocabulary.word_starts)))
    return shown, sorted(hidden)


def mask_t5(
    tokens: Sequence[int],
    vocabulary: Vocabulary,
    rng: np.random.RandomState,
    *,
    probability: float,
    max_predictions: float,
    max_target: int,
    mean_span: float = T5_MEAN_SPAN,
) -> list[list[int]]:
    """Choose the runs of positions to hide, in order, of ``mean_span`` words before clipping.

    Never more runs than sentinels, nor more tokens than ``max_target`` holds with a sentinel before
    each run; Megatron fails on samples that need more.
    """
    spans: list[list[int]] = []
    used = 0

    def fits(span: list[int]) -> bool:
        return len(spans) < len(vocabulary.sentinels) and used + 1 + len(span) <= max_target

    def words_to_hide() -> int:
        return min(int(rng.geometric(1 / mean_span)), T5_LONGEST_SPAN)

    budget = _budget(len(tokens), probability, max_predictions)
    words = vocabulary.words(tokens)
    for span in _spans(words, rng, budget=budget, draw=words_to_hide, fits=fits):
        spans.append(span)
        used += 1 + len(span)
    return sorted(spans)


def check_share(mask_prob: float, longest: int) -> float:
    """A share of tokens to hide; ValueError for none, or one that hides nothing of ``longest``."""
    if not 0 <= mask_prob < 1:
        raise ValueError(f"mask_prob must be at least 0 and below 1, got {mask_prob}")
    if 0 < mask_prob * longest < 1 and longest > 1:
        raise ValueError(
            f"mask_prob {mask_prob} of a sample's {longest} tokens, without the special ones, is "
            "less than one: none would be hidden; raise it or the sequence length"
        )
    return mask_prob


def _budget(num_tokens: int, probability: float, max_predictions: float) -> float:
    if probability == 0:
        return 0
    return min(max_predictions, max(1, round(num_tokens * probability)))


def _spans(
    words: Words,
    rng: np.random.RandomState,
    *,
    budget: float,
    draw: Callable[[], int],
    fits: Callable[[list[int]], bool] = lambda span: True,
) -> Iterator[list[int]]:
    """Runs of whole words, disjoint, of ``budget`` tokens at most, as positions.

    A generator, because BERT draws its replacements between one run and the next. The last draws of
    a sample are these, so they end where no word fits any more; Megatron visits the others in vain.
    """
    positions, edges = words
    count = len(edges) - 1
    order = np.arange(count)
    rng.shuffle(order)
    shortest = min((stop - start for start, stop in pairwise(edges)), default=0)
    covered: set[int] = set()  # words
    used = 0  # tokens
    for first in order.tolist():
        if used + shortest > budget:
            return
        start = edges[first]
        for n in range(draw(), 0, -1):
            run = range(first, min(first + n, count))
            stop = edges[run.stop]
            if used + stop - start <= budget:
                break
        else:
            continue
        span = positions[start:stop]
        if covered.isdisjoint(run) and fits(span):
            covered.update(run)
            used += len(span)
            yield span


def pad_to(values: Sequence[int], length: int, filler: int) -> npt.NDArray[np.int64]:
    """int64 [length]: the values, then the filler."""
    padded = np.full(length, filler, dtype=np.int64)
    padded[: len(values)] = values
    return padded


def ones(places: range, length: int) -> npt.NDArray[np.int64]:
    """int64 [length]: 1 at the places, 0 elsewhere."""
    marked = np.zeros(length, dtype=np.int64)
    marked[places.start : places.stop] = 1
    return marked


def visible(tokens: Sequence[int], spans: Sequence[Sequence[int]]) -> Iterator[Sequence[int]]:
    """The pieces of the tokens before, between and after the runs: one more than runs."""
    edges = [0, *chain.from_iterable((span[0], span[-1] + 1) for span in spans), len(tokens)]
    return (tokens[start:stop] for start, stop in list(pairwise(edges))[0::2])
