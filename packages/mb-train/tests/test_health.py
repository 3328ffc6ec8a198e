"""When a run has diverged, and which documents its bad batch held."""

import math

import mb_data
import numpy as np
import pytest
import torch
from mb_data import IndexedDataset
from mb_train.checkpoint.finite import all_finite
from mb_train.train.health import DivergenceGuard, documents_of


def test_the_guard_counts_steps_in_a_row():
    guard = DivergenceGuard(3)
    nan, inf = math.nan, math.inf
    assert not guard.see([1.0, nan, nan], 3)
    assert not guard.see([2.0, nan], 5)  # a number between: begins anew
    assert guard.since == 5
    assert not guard.see([inf], 6)
    assert guard.see([nan, 1.0, 1.0], 9)
    assert (guard.since, guard.bad) == (5, 3)
    never = DivergenceGuard(0)
    assert not never.see([nan] * 1000, 1000)


def data_set(folder, name, documents=12, length=7):
    with mb_data.IndexedDatasetBuilder(folder / name, dtype=np.uint16) as builder:
        for document in range(documents):
            builder.add_document(np.full(length, document, dtype=np.uint16))
    return IndexedDataset(folder / name)


def test_documents_are_those_that_the_samples_hold(tmp_path):
    indexed = data_set(tmp_path, "a")
    dataset = mb_data.GPTDataset(indexed, range(12), seq_length=5, num_samples=30, seed=3)
    for sample in range(30):
        held = set(dataset[sample].tolist())  # a token is its document's number
        named = documents_of(dataset, range(sample, sample + 1))
        assert named.endswith(" of " + str(tmp_path / "a") + ".bin")
        assert {int(n) for n in named.split(" of ")[0].split(", ")} == held


def test_documents_of_a_blend_and_of_many(tmp_path):
    sources = [
        mb_data.GPTDataset(
            data_set(tmp_path, name), range(12), seq_length=5, num_samples=20, seed=1
        )
        for name in ("a", "b")
    ]
    blend = mb_data.BlendedDataset(sources, [1.0, 1.0], 20)
    named = documents_of(blend, range(20))
    assert f"of {tmp_path / 'a'}.bin; " in named
    assert named.endswith(f"of {tmp_path / 'b'}.bin")
    assert "more of" in named


def test_the_reason_points_at_the_first_bad_batch(tmp_path):
    indexed = data_set(tmp_path, "a")
    dataset = mb_data.GPTDataset(indexed, range(12), seq_length=5, num_samples=30, seed=3)
    guard = DivergenceGuard(2)
    assert guard.see([1.0, 1.0, math.nan, math.nan], 14)
    reason = guard.reason(dataset, range(24, 26))
    assert "since iteration 13 (2 steps in a row)" in reason
    assert documents_of(dataset, range(24, 26)) in reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_bad_number_is_seen_wherever_it_is(dtype):
    whole = [torch.ones(2, 3).to(dtype), torch.empty(0, 4), torch.tensor(2.0), torch.arange(3)]
    whole[0][0, 0] = torch.finfo(dtype).max
    assert all_finite(whole)
    for bad in (math.nan, math.inf, -math.inf):
        for at in ((0, 0), (1, 1), (1, 2)):
            tensor = whole[0].clone()
            tensor[at] = bad
            assert not all_finite([*whole[1:], tensor])
