"""MT19937-64: the 64-bit Mersenne Twister, C++'s ``std::mt19937_64``, which NumPy lacks.

Megatron-LM shuffles its BERT, T5 and ICT samples with it. Nishimura (2000), "Tables of 64-bit
Mersenne Twisters".
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

WORDS, HALF = 312, 156
MATRIX = np.uint64(0xB5026F5AA96619E9)
UPPER = np.uint64(0xFFFFFFFF80000000)
LOWER = np.uint64(0x7FFFFFFF)


def check_seed(seed: int) -> int:
    """``seed``, if a Mersenne Twister of 32 bits takes it: NumPy's ``RandomState``, which Megatron
    seeds almost everything else with. Raises ValueError, or TypeError if it is no integer."""
    seed = operator.index(seed)
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must lie between 0 and 2**32 - 1, got {seed}")
    return seed


def outputs(seed: int) -> Iterator[npt.NDArray[np.uint64]]:
    """The endless output of a generator seeded with ``seed``, 312 numbers at a time."""
    words = [seed % 2**64]
    for i in range(1, WORDS):
        words.append((6364136223846793005 * (words[-1] ^ (words[-1] >> 62)) + i) % 2**64)
    state = np.array(words, dtype=np.uint64)
    while True:
        # Each word is made from itself, the next and the one half a turn on, in order: the second
        # half already sees the first half's new words, and the last word sees the new first one.
        state[:HALF] = _twist(state[:HALF], state[1 : HALF + 1]) ^ state[HALF:]
        state[HALF:-1] = _twist(state[HALF:-1], state[HALF + 1 :]) ^ state[: HALF - 1]
        state[-1:] = _twist(state[-1:], state[:1]) ^ state[HALF - 1 : HALF]
        x = state.copy()
        x ^= (x >> np.uint64(29)) & np.uint64(0x5555555555555555)
        x ^= (x << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
        x ^= (x << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
        x ^= x >> np.uint64(43)
        yield x


def permutation(n: int, seed: int) -> npt.NDArray[np.int64]:
    """``range(n)`` in Megatron's random order: from the end, swap entry i with z % (i + 1)."""
    # Not a list: swapping boxed numbers all over the heap takes twice as long.
    order = array("q", range(n))
    numbers = outputs(seed)
    for high in range(n - 1, 0, -WORDS):
        last = np.arange(high, max(high - WORDS, 0), -1, dtype=np.uint64)
        others = next(numbers)[: len(last)] % (last + np.uint64(1))
        for i, j in zip(range(high, 0, -1), others.tolist(), strict=False):
            order[i], order[j] = order[j], order[i]
    return np.array(order)


def _twist(upper: npt.NDArray[np.uint64], lower: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (upper & UPPER) | (lower & LOWER)
    return (x >> np.uint64(1)) ^ np.where(x & np.uint64(1), MATRIX, np.uint64(0))
