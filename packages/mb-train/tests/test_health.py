"""When a run has diverged, and which documents its bad batch held."""

import math

import mb_data
import numpy as np
import pytest
import torch
from mb_data import IndexedDataset
from mb_data.samples.masking import Vocabulary
from mb_train.checkpoint.finite import all_finite
from mb_train.data.documents import documents_of
from mb_train.train.health import DivergenceGuard


def test_the_guard_counts_steps_in_a_row():
    guard = DivergenceGuard(3)
    nan, inf = math.nan, math.inf
    assert not guard.see([1.0, nan, nan], [False] * 3, 3)
    assert not guard.see([2.0, nan], [False] * 2, 5)  # a number between: begins anew
    assert guard.since == 5
    assert not guard.see([inf], [False], 6)
    assert guard.see([nan, 1.0, 1.0], [False] * 3, 9)
    assert (guard.since, guard.bad) == (5, 3)
    never = DivergenceGuard(0)
    assert not never.see([nan] * 1000, [True] * 1000, 1000)


def test_the_guard_counts_steps_without_gradients_too():
    guard = DivergenceGuard(3)
    assert not guard.see([1.0, 1.0, 1.0, 1.0], [True, True, False, True], 4)
    assert guard.since == 4
    assert not guard.see([math.nan], [True], 5)
    assert guard.see([1.0], [True], 6)
    assert (guard.since, guard.bad) == (4, 3)
    assert guard.reason([], [7]).startswith("the loss is not a number since iteration 4 (3 steps")
    guard = DivergenceGuard(2)
    assert not guard.see([math.inf, 1.0], [True, False], 2)  # of before, and over
    assert guard.see([1.0, 1.0], [True, True], 4)
    assert guard.reason([], [7]).startswith("no gradient norm is finite since iteration 3 (2 steps")


def data_set(folder, name, documents=12, length=7, sentences=None):
    with mb_data.IndexedDatasetBuilder(folder / name, dtype=np.uint16) as builder:
        for document in range(documents):
            tokens = np.full(length, document, dtype=np.uint16)
            builder.add_document(tokens, sentences)
    return IndexedDataset(folder / name)


SPECIAL = 900  # tokens from here on are of no document


def dataset_of(kind, indexed):
    common = {"num_samples": 30, "seed": 3}
    if kind in ("bert", "packed bert"):
        words = Vocabulary(
            cls=900, sep=901, mask=902, pad=903, word_starts=np.ones(1000, dtype=bool)
        )
        bert = mb_data.BertDataset(
            indexed, range(3, 12), vocabulary=words, seq_length=12, mask_prob=0, **common
        )
        if kind == "bert":
            return bert
        return mb_data.PackedSamples(bert, bert.lengths(), rooms=[30], most=3)
    if kind == "packed":
        return mb_data.PackedDataset(indexed, range(12), seq_length=20, eod=SPECIAL, **common)
    gpt = mb_data.GPTDataset(indexed, range(12), seq_length=5, **common)
    if kind == "gpt":
        return gpt
    marks = mb_data.MiddleTokens(901, 902, 903)
    return mb_data.FillInTheMiddle(gpt, marks, eod=SPECIAL, rate=0, seed=1)


@pytest.mark.parametrize("kind", ["gpt", "middle last", "packed", "bert", "packed bert"])
def test_documents_are_those_that_the_samples_hold(tmp_path, kind):
    sentences = (2, 2, 3) if "bert" in kind else None
    dataset = dataset_of(kind, data_set(tmp_path, "a", sentences=sentences))
    for number in range(len(dataset)):
        sample = dataset[number]
        parts = sample if isinstance(sample, list) else [sample]
        text = np.concatenate([part["text"] if isinstance(part, dict) else part for part in parts])
        held = set(text[text < SPECIAL].tolist())  # a token is its document's number
        named = documents_of(dataset, range(number, number + 1))
        assert named.endswith(" of " + str(tmp_path / "a") + ".bin")
        assert {int(n) for n in named.split(" of ")[0].split(", ")} == held


def test_samples_of_no_documents_are_named_themselves():
    assert (
        documents_of([1, 2, 3], range(10)) == "unknown, samples 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
    )


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
    assert guard.see([1.0, 1.0, math.nan, math.nan], [False] * 4, 14)
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
