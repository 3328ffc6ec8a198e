"""Fill-in-the-middle: the parts that its marks show, put together again, are the document."""

import numpy as np
import pytest
from mb_data import FillInTheMiddle, MiddleTokens

EOD = 999
MARKS = MiddleTokens(prefix=1001, middle=1002, suffix=1003)


def undo(text):
    """The document that a rearranged one was, None if it was cut off."""
    prefix, middle, suffix = (text.index(mark) if mark in text else -1 for mark in MARKS)
    if prefix < 0:
        return text
    if min(middle, suffix) < 0:
        return None
    if suffix == prefix + 1:  # suffix first
        return text[middle + 1 :] + text[suffix + 1 : middle]
    return text[1:suffix] + text[middle + 1 :] + text[suffix + 1 : middle]


def test_fill_in_the_middle_loses_nothing():
    rng = np.random.default_rng(0)
    samples = [rng.integers(1, 900, size=200) for _ in range(50)]
    for sample in samples:
        sample[rng.integers(0, 200, size=6)] = EOD
    everything = FillInTheMiddle(samples, MARKS, eod=EOD, rate=1.0, suffix_first_rate=0.0, seed=3)
    for i, sample in enumerate(samples):
        changed = everything[i].tolist()
        assert len(changed) == len(sample)
        assert changed == everything[i].tolist()  # a function of index and seed
        before = " ".join(map(str, sample.tolist())).split(f"{EOD}")
        after = " ".join(map(str, changed)).split(f"{EOD}")
        for old, new in zip(before[:3], after[:3], strict=True):  # the last ones may be cut off
            if new.split():
                assert list(map(str, undo(list(map(int, new.split()))))) == old.split()
    nothing = FillInTheMiddle(samples, MARKS, eod=EOD, rate=0.0, seed=3)
    assert all((nothing[i] == sample).all() for i, sample in enumerate(samples))
    # Cuts are at every place: some documents begin with their middle.
    assert 0 < _suffix_first(everything) < 0.2
    swapped = FillInTheMiddle(samples, MARKS, eod=EOD, rate=1.0, suffix_first_rate=1.0, seed=3)
    assert _suffix_first(swapped) > 0.99  # all but one whose suffix was cut off
    half = FillInTheMiddle(samples, MARKS, eod=EOD, seed=3)
    share = sum((half[i] == 1001).sum() for i in range(50)) / sum(
        (everything[i] == 1001).sum() for i in range(50)
    )
    assert 0.35 < share < 0.65
    assert 0.35 < _suffix_first(half) < 0.65


def _suffix_first(dataset):
    """The share of rearranged documents that have nothing before their suffix."""
    tokens = np.concatenate([dataset[i] for i in range(len(dataset))])
    starts = np.flatnonzero(tokens[:-1] == MARKS.prefix)
    return np.mean(tokens[starts + 1] == MARKS.suffix)


def test_fill_in_the_middle_of_fragments():
    """A repository's files are rearranged each by itself; what `leave` holds for is not."""
    rng = np.random.default_rng(1)
    documents = [  # of fragments of 0 to 39 tokens; fragments that begin with 7 are to be left
        [[*([7] * (rng.random() < 0.3)), *rng.integers(10, 900, rng.integers(0, 40)).tolist()]
         for _ in range(rng.integers(1, 6))]
        for _ in range(60)
    ]  # fmt: skip
    joined = [[t for f in fragments for t in (*f, 1004)][:-1] for fragments in documents]
    samples = [np.array([*text, EOD] + [EOD] * 60) for text in joined]
    options = {"eod": EOD, "fragment_end": 1004, "leave": lambda text: text[0] == 7, "seed": 5}
    changed = FillInTheMiddle(samples, MARKS, rate=1.0, fragment_rate=1.0, **options)
    for i, fragments in enumerate(documents):
        text = changed[i].tolist()
        found = [[]]
        for token in text[: text.index(EOD)]:
            if token == 1004:
                found.append([])
            else:
                found[-1].append(token)
        for old, new in zip(fragments, found, strict=True):
            if not old or old[0] == 7:
                assert new == old
            else:
                assert new != old
                assert undo(new) == old
    counts = {}
    for rates in ((0.5, 1.0), (1.0, 0.5), (0.0, 1.0)):
        some = FillInTheMiddle(samples, MARKS, rate=rates[0], fragment_rate=rates[1], **options)
        counts[rates] = sum((some[i] == 1001).sum() for i in range(60))
    whole = sum((changed[i] == 1001).sum() for i in range(60))
    assert 0.3 < counts[0.5, 1.0] / whole < 0.7
    # Half of the fragments, and those documents whole that have one alone.
    alone = sum(len(f) == 1 and len(f[0]) > 0 and f[0][0] != 7 for f in documents)
    assert 0.3 < (counts[1.0, 0.5] - alone) / (whole - alone) < 0.7
    assert counts[0.0, 1.0] == 0
    # A document without the token between fragments has no fragments to choose from.
    alone = FillInTheMiddle([np.arange(1, 9)], MARKS, rate=1.0, fragment_rate=0.0, **options)
    assert 1001 in alone[0]


def test_fill_in_the_middle_refuses():
    with pytest.raises(ValueError, match="rate must lie between 0 and 1"):
        FillInTheMiddle([], MARKS, eod=EOD, rate=2, seed=0)
    with pytest.raises(ValueError, match="different tokens"):
        FillInTheMiddle([], MARKS, eod=1001, seed=0)
    with pytest.raises(ValueError, match="different tokens"):
        FillInTheMiddle([], MARKS, eod=EOD, fragment_end=EOD, seed=0)
    with pytest.raises(ValueError, match="fragment_rate must lie"):
        FillInTheMiddle([], MARKS, eod=EOD, fragment_rate=-1, seed=0)
    with pytest.raises(ValueError, match=r"seed must lie between 0 .* got -1"):
        FillInTheMiddle([], MARKS, eod=EOD, seed=-1)
