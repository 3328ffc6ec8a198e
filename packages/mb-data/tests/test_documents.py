"""Documents of packed batches: cumulative lengths, positions, loss mask; against a loop."""

from __future__ import annotations

import numpy as np
import pytest
from mb_data.samples.document_layout import document_layout


def loop(rows, eod):
    """The same, token by token."""
    cumulative, positions, mask = [0], [], []
    total = 0
    for row in rows:
        position = 0
        for token in row:
            positions.append(position)
            mask.append(0.0 if token == eod else 1.0)
            position += 1
            total += 1
            if token == eod:
                cumulative.append(total)
                position = 0
        if cumulative[-1] != total:
            cumulative.append(total)
    return cumulative, positions, mask


def test_golden():
    layout = document_layout(np.array([[5, 0, 6, 7], [0, 0, 8, 0]]), eod=0)
    assert layout.cumulative_lengths.tolist() == [0, 2, 4, 5, 6, 8]
    assert layout.max_length == 2
    assert layout.position_ids.tolist() == [[0, 1, 0, 1], [0, 0, 0, 1]]
    assert layout.loss_mask.tolist() == [[1, 0, 1, 1], [0, 0, 1, 0]]


@pytest.mark.parametrize("vocabulary", [2, 5, 1000])
@pytest.mark.parametrize("shape", [(1,), (9,), (1, 7), (5, 1), (4, 33)])
def test_against_a_loop(shape, vocabulary):
    rng = np.random.default_rng(vocabulary)
    for _ in range(20):
        tokens = rng.integers(0, vocabulary, shape)
        before = tokens.copy()
        layout = document_layout(tokens, eod=0)
        assert (tokens == before).all()
        cumulative, positions, mask = loop(np.atleast_2d(tokens).tolist(), 0)
        assert layout.cumulative_lengths.tolist() == cumulative
        assert layout.max_length == max(np.diff(cumulative))
        assert layout.position_ids.shape == layout.loss_mask.shape == shape
        assert layout.position_ids.ravel().tolist() == positions
        assert layout.loss_mask.ravel().tolist() == mask
        assert layout.cumulative_lengths.dtype == np.int32
        assert layout.position_ids.dtype == np.int64


def test_attention_equals_the_dense_mask():
    """Same document by cumulative lengths == Megatron's S × S mask with --reset-attention-mask."""
    tokens = np.array([3, 0, 4, 4, 0, 0, 5])
    dense = np.tril(np.ones((7, 7), bool))
    for end in np.flatnonzero(tokens == 0):
        dense[end + 1 :, : end + 1] = False
    edges = document_layout(tokens, eod=0).cumulative_lengths
    document = np.searchsorted(edges, np.arange(7), side="right")
    assert (dense == np.tril(document[:, None] == document[None])).all()


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (1, 2, 3)])
def test_bad_shape(shape):
    with pytest.raises(ValueError, match=r"expected tokens of shape \[S\] or \[B, S\]"):
        document_layout(np.zeros(shape, int), eod=0)
