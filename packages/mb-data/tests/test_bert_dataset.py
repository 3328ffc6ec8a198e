"""BERT samples: golden ones of Megatron's, and what must hold for every sample."""

from __future__ import annotations

import pickle
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from mb_data.samples.bert import BertDataset, trim
from mb_data.samples.masking import mask_bert
from sentence_helpers import CLS, MASK, PAD, SENTENCES, SEP, VOCABULARY, WORD_STARTS, write

# What Megatron-LM's build_training_sample gives for SENTENCES, target 15, mask_prob 0.3.
BERT_GOLDEN = {
    11: {
        "text": [1, 30, 31, 36, 33, 50, 35, 40, 37, 2, 24, 25, 26, 1, 20, 3, 29, 2],
        "types": [0] * 10 + [1] * 8,
        "labels": [-1] * 5 + [34] + [-1] * 7 + [27, 28, 32, -1, -1],
        "is_random": 1,
    },
    12: {
        "text": [1, 24, 25, 3, 27, 28, 32, 29, 30, 31, 36, 2, 3, 35, 40, 3, 38, 2],
        "types": [0] * 12 + [1] * 6,
        "labels": [-1] * 3 + [26] + [-1] * 8 + [34, -1, -1, 37, 38, -1],
        "is_random": 0,
    },
}


class TestBert:
    def test_golden_samples(self, tmp_path):
        dataset = BertDataset(
            write(tmp_path / "d", [SENTENCES]),
            range(1),
            vocabulary=VOCABULARY,
            seq_length=18,
            num_samples=2,
            seed=11,
            mask_prob=0.3,
            short_seq_prob=0,
        )
        assert dataset.mapping.tolist() == [[0, 4, 15]] * 2
        for index, want in enumerate(BERT_GOLDEN.values()):
            sample = dataset[index]
            assert sample["truncated"] == 1
            assert sample["padding_mask"].tolist() == [1] * 18
            for name, value in want.items():
                assert np.asarray(sample[name]).tolist() == value, (index, name)

    def test_golden_single_segment(self, tmp_path):
        dataset = BertDataset(
            write(tmp_path / "d", [SENTENCES]),
            range(1),
            vocabulary=VOCABULARY,
            seq_length=20,
            num_samples=1,
            seed=9,
            mask_prob=0.3,
            short_seq_prob=0,
            binary_head=False,
        )
        sample = dataset[0]
        assert sample["text"].tolist() == (
            [1, 21, 24, 25, 3, 27, 28, 32, 3, 30, 31, 36, 3, 34, 24, 42, 37, 38, 2, 0]
        )
        assert sample["labels"].tolist() == (
            [-1, -1, -1, -1, 26, -1, -1, -1, 29, -1, -1, -1, 33, -1, 35, 40, -1, -1, -1, -1]
        )
        assert sample["types"].tolist() == [0] * 20
        assert sample["loss_mask"].sum() == 5
        assert sample["padding_mask"].tolist() == [1] * 19 + [0]

    @pytest.mark.parametrize("binary_head", [True, False], ids=["pairs", "single"])
    def test_every_sample_is_its_text_with_words_hidden(self, indexed, binary_head):
        dataset = BertDataset(
            indexed,
            range(indexed.num_documents),
            vocabulary=VOCABULARY,
            seq_length=40,
            num_samples=200,
            seed=1,
            binary_head=binary_head,
        )
        assert len(dataset) >= 200
        swapped = Counter()
        for index in range(len(dataset)):
            sample = dataset[index]
            start, end, target = dataset.mapping[index].tolist()
            hidden = sample["labels"] >= 0
            assert (sample["loss_mask"] == hidden).all()
            length = int(sample["padding_mask"].sum())
            assert (sample["text"][length:] == PAD).all()
            assert (sample["types"][length:] == 0).all()
            original = np.where(hidden, sample["labels"], sample["text"])[:length]
            budget = 0.15 * target
            assert hidden.sum() <= max(1, round(0.15 * length))
            assert hidden.sum() <= max(budget, 1)
            a = original[sample["types"][:length] == 0].tolist()
            b = original[sample["types"][:length] == 1].tolist()
            assert (a[0], a[-1]) == (CLS, SEP)
            if binary_head:
                assert b[-1] == SEP
            first, second = (b[:-1], a[1:-1]) if sample["is_random"] else (a[1:-1], b[:-1])
            text = [t for i in range(start, end) for t in indexed[i].tolist()]
            if not sample["truncated"]:
                assert first + second == text
            else:
                assert len(first) + len(second) == target
                joined = "".join(map(chr, text))
                assert "".join(map(chr, first)) in joined
                assert "".join(map(chr, second)) in joined
            swapped[sample["is_random"]] += 1
        if binary_head:
            assert 0.3 < swapped[1] / len(dataset) < 0.7
        else:
            assert swapped[1] == 0

    def test_same_sample_in_any_order_and_process(self, indexed, reads_pages_one_by_one):
        settings = {"vocabulary": VOCABULARY, "seq_length": 40, "num_samples": 50}
        documents = range(indexed.num_documents)
        dataset = BertDataset(indexed, documents, seed=5, **settings)
        backwards = [dataset[i]["text"].tolist() for i in reversed(range(50))][::-1]
        twin = pickle.loads(pickle.dumps(dataset))
        assert [twin[i]["text"].tolist() for i in range(50)] == backwards
        assert reads_pages_one_by_one(twin)
        assert dataset[-1]["text"].tolist() == dataset[len(dataset) - 1]["text"].tolist()
        other = BertDataset(indexed, documents, seed=6, **settings)
        assert [other[i]["text"].tolist() for i in range(50)] != backwards
        with pytest.raises(IndexError, match=f"sample {len(dataset)} of"):
            dataset[len(dataset)]
        settings |= {"seq_length": np.int64(40), "num_samples": np.int32(50)}
        again = BertDataset(indexed, documents, seed=np.uint32(5), **settings)
        assert again._index.path == dataset._index.path
        for part in (range(indexed.num_documents + 1), range(0, 20, 2), range(0)):
            with pytest.raises(ValueError, match="is no part of its 40 documents"):
                BertDataset(indexed, part, seed=5, **settings)

    def test_without_masking(self, indexed):
        dataset = BertDataset(
            indexed,
            range(40),
            vocabulary=VOCABULARY,
            seq_length=40,
            num_samples=1,
            seed=1,
            mask_prob=0,
        )
        sample = dataset[0]
        assert sample["loss_mask"].sum() == 0
        assert MASK not in sample["text"]

    def test_shown_in_place_of_hidden_tokens(self):
        tokens = [CLS, *np.random.default_rng(0).integers(20, 60, 4000).tolist(), SEP]
        shown, hidden = mask_bert(
            tokens, VOCABULARY, np.random.RandomState(1), probability=0.5, max_predictions=2000
        )
        what = Counter(
            "mask" if shown[i] == MASK else "kept" if shown[i] == tokens[i] else "random"
            for i in hidden
        )
        assert hidden == sorted(set(hidden))
        assert 1900 < len(hidden) <= 2000
        assert 0.77 < what["mask"] / len(hidden) < 0.83
        assert 0.07 < what["kept"] / len(hidden) < 0.13
        unhidden = set(range(len(tokens))) - set(hidden)
        assert all(shown[i] == tokens[i] for i in unhidden)
        # Whole words: what is hidden is a union of words.
        positions, edges = VOCABULARY.words(tokens)
        assert positions == list(range(1, 4001))
        words = [positions[start:stop] for start, stop in pairwise(edges)]
        assert len(words) == 1 + sum(WORD_STARTS[t] for t in tokens[2:-1])
        assert all(len({i in set(hidden) for i in word}) == 1 for word in words if len(word) < 9)

    @pytest.mark.parametrize(
        ("tokens", "probability", "most", "hidden"),
        [
            ([21, 24, 28], 1.0, 3, 3),  # one word, as long as the budget
            ([21, 24, 28], 1.0, 2, 0),
            ([21, 22, 23], 0.01, 9, 1),  # one at least
            ([21, 22, 23], 0.0, 9, 0),  # but none without a probability
            ([CLS, SEP], 1.0, 9, 0),
        ],
    )
    def test_budget_of_short_texts(self, tokens, probability, most, hidden):
        for seed in range(8):
            rng = np.random.RandomState(seed)
            found = mask_bert(
                tokens, VOCABULARY, rng, probability=probability, max_predictions=most
            )
            assert len(found[1]) == hidden

    def test_trim_takes_from_the_longer(self):
        a, b = trim(10, 4, 9, np.random.RandomState(0))
        assert (len(a), len(b)) == (5, 4)
        assert trim(3, 2, 9, np.random.RandomState(0)) == (range(3), range(2))
        a, b = trim(7, 7, 3, np.random.RandomState(0))
        assert {len(a), len(b)} == {1, 2}
