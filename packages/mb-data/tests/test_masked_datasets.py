"""BERT, T5 and ICT samples: golden ones of Megatron's, and what must hold for every sample."""

from __future__ import annotations

import pickle
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from mb_data.dataset_builder import IndexedDatasetBuilder
from mb_data.indexed_dataset import IndexedDataset
from mb_data.samples.bert import BertDataset, build_bert_datasets, trim
from mb_data.samples.blend import BlendedDataset
from mb_data.samples.ict import ICTDataset, build_ict_datasets
from mb_data.samples.masking import Vocabulary, mask_bert, mask_t5
from mb_data.samples.t5 import T5Dataset, build_t5_datasets

# 60 ids: 0 to 5 are special, 10 to 19 sentinels, multiples of 4 from 20 on continue a word.
PAD, CLS, SEP, MASK, BOS, EOS = range(6)
WORD_STARTS = np.array([not (i >= 20 and i % 4 == 0) for i in range(60)])
VOCABULARY = Vocabulary(
    cls=CLS,
    sep=SEP,
    mask=MASK,
    pad=PAD,
    bos=BOS,
    eos=EOS,
    word_starts=WORD_STARTS,
    sentinels=tuple(range(10, 20)),
)
TOKENIZER = SimpleNamespace(
    vocab_size=60,
    cls=CLS,
    sep=SEP,
    mask=MASK,
    pad=PAD,
    bos=BOS,
    eos=EOS,
    extra_ids=tuple(range(10, 20)),
    word_starts=lambda: WORD_STARTS,
)
SENTENCES = [[21, 24, 25], [26, 27, 28, 32, 29], [30, 31, 36, 33], [34, 35, 40, 37, 38]]


def write(prefix, documents) -> IndexedDataset:
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for sentences in documents:
            tokens = np.array([t for sentence in sentences for t in sentence], dtype=np.int64)
            builder.add_document(tokens, [len(sentence) for sentence in sentences])
    return IndexedDataset(prefix)


def random_documents(seed, documents=40, longest=25):
    rng = np.random.default_rng(seed)
    return [
        [
            rng.integers(20, 60, int(rng.integers(1, longest))).tolist()
            for _ in range(int(rng.integers(0, 12)))
        ]
        for _ in range(documents)
    ]


@pytest.fixture
def indexed(tmp_path):
    return write(tmp_path / "d", random_documents(0))


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


# What Megatron-LM's T5 build_training_sample gives for SENTENCES, target 16, mask_prob 0.3.
T5_GOLDEN = {
    7: {
        "text_enc": [21, 24, 25, 26, 27, 28, 32, 29, 10, 33, 11, 35, 40, 37, 0, 0, 0, 0],
        "text_dec": [4, 10, 30, 31, 36, 11, 34, 0, 0, 0, 0, 0, 0, 0],
        "labels": [10, 30, 31, 36, 11, 34, 5, -1, -1, -1, -1, -1, -1, -1],
    },
    8: {
        "text_enc": [21, 24, 25, 26, 27, 28, 32, 29, 30, 10, 11, 35, 40, 37, 0, 0, 0, 0],
        "text_dec": [4, 10, 31, 36, 11, 33, 34, 0, 0, 0, 0, 0, 0, 0],
        "labels": [10, 31, 36, 11, 33, 34, 5, -1, -1, -1, -1, -1, -1, -1],
    },
}


class TestT5:
    def test_golden_samples(self, tmp_path):
        dataset = T5Dataset(
            write(tmp_path / "d", [SENTENCES]),
            range(1),
            vocabulary=VOCABULARY,
            encoder_seq_length=18,
            decoder_seq_length=14,
            num_samples=2,
            seed=7,
            mask_prob=0.3,
            short_seq_prob=0,
        )
        for index, want in enumerate(T5_GOLDEN.values()):
            sample = dataset[index]
            assert sample["truncated"] == 1
            assert sample["enc_mask"].tolist() == [1] * 14 + [0] * 4
            assert sample["dec_mask"].tolist() == sample["loss_mask"].tolist()
            assert sample["loss_mask"].tolist() == [1] * 7 + [0] * 7
            for name, value in want.items():
                assert sample[name].tolist() == value, (index, name)

    def test_samples_that_share_sequences_fit_side_by_side(self, indexed):
        found = {}
        for shared in (False, True):
            dataset = T5Dataset(
                indexed,
                range(indexed.num_documents),
                vocabulary=VOCABULARY,
                encoder_seq_length=40,
                decoder_seq_length=11,
                num_samples=100,
                seed=3,
                mask_prob=0.3,
                mean_span=1.5,
                share_decoder=shared,
            )
            lengths = dataset.lengths()
            real = np.array(
                [
                    [np.sum(s["enc_mask"]), np.sum(s["dec_mask"])]
                    for s in map(dataset.__getitem__, range(len(dataset)))
                ]
            )
            assert (real <= lengths).all()
            found[shared] = lengths, real
        share = np.maximum(found[True][0][:, 0] * 11 // 40, 1)
        assert found[True][0][:, 1].tolist() == share.tolist()
        assert set(found[False][0][:, 1].tolist()) == {11}
        assert found[True][1][:, 1].sum() < found[False][1][:, 1].sum()

    def test_spans_are_as_long_as_asked_for(self, indexed):
        means = []
        for mean_span in (1.0, 1.5, 5.0):
            dataset = T5Dataset(
                indexed,
                range(indexed.num_documents),
                vocabulary=VOCABULARY,
                encoder_seq_length=40,
                decoder_seq_length=40,
                num_samples=100,
                seed=3,
                mask_prob=0.3,
                mean_span=mean_span,
            )
            samples = [dataset[i] for i in range(100)]
            written = [s["text_dec"][s["dec_mask"] == 1] for s in samples]
            spans = sum(int((tokens < 20).sum()) - 1 for tokens in written)
            means.append((sum(map(len, written)) - len(written) - spans) / spans)
        assert means[0] < means[1] < means[2]
        with pytest.raises(ValueError, match="at least 1 word"):
            T5Dataset(
                indexed,
                range(1),
                vocabulary=VOCABULARY,
                encoder_seq_length=40,
                decoder_seq_length=40,
                num_samples=1,
                seed=3,
                mean_span=0.5,
            )

    @pytest.mark.parametrize(
        ("mask_prob", "decoder", "sentinels"),
        [(0.15, 40, 10), (0.5, 40, 10), (0.9, 6, 10), (0.5, 40, 1), (0.0, 1, 10), (0.5, 2, 10)],
    )
    def test_encoder_and_decoder_make_the_text(self, indexed, mask_prob, decoder, sentinels):
        vocabulary = Vocabulary(
            **{**vars(VOCABULARY), "sentinels": tuple(range(10, 10 + sentinels))}
        )
        dataset = T5Dataset(
            indexed,
            range(indexed.num_documents),
            vocabulary=vocabulary,
            encoder_seq_length=40,
            decoder_seq_length=decoder,
            num_samples=100,
            seed=3,
            mask_prob=mask_prob,
        )
        for index in range(len(dataset)):
            sample = dataset[index]
            start, end, target = dataset.mapping[index].tolist()
            text = [t for i in range(start, end) for t in indexed[i].tolist()]
            assert sample["truncated"] == (len(text) > target)
            encoder = sample["text_enc"][sample["enc_mask"] == 1].tolist()
            decoded = sample["text_dec"][sample["dec_mask"] == 1].tolist()
            labels = sample["labels"][sample["loss_mask"] == 1].tolist()
            assert decoded[0] == BOS
            assert labels == [*decoded[1:], EOS]
            runs: dict[int, list[int]] = {}
            for token in decoded[1:]:
                if token < 20:
                    runs[token] = run = []
                else:
                    run.append(token)
            assert list(runs) == list(range(10, 10 + len(runs)))
            restored = [t for token in encoder for t in (runs.get(token) or [token])]
            assert restored == text[:target]
            assert sum(map(len, runs.values())) <= max(mask_prob * target, 1)
            assert (mask_prob > 0) or not runs

    @pytest.mark.parametrize(
        ("tokens", "target", "spans"),
        [
            ([21, 24, 28], 4, [[0, 1, 2]]),  # a sentinel and one word
            ([21, 24, 28], 3, []),
            ([21, 22], 4, [[0], [1]]),
        ],
    )
    def test_runs_fill_the_target_to_the_last_token(self, tokens, target, spans):
        rng = np.random.RandomState(0)
        found = mask_t5(
            tokens,
            VOCABULARY,
            rng,
            probability=1.0,
            max_predictions=9,
            max_target=target,
            mean_span=1.0,
        )
        assert found == spans

    def test_vocabulary_of_a_tokenizer(self):
        assert vars(Vocabulary.for_t5(TOKENIZER)) == vars(VOCABULARY)
        assert vars(Vocabulary.for_bert(TOKENIZER)) == vars(VOCABULARY) | {
            "bos": -1,
            "eos": -1,
            "sentinels": (),
        }

    def test_long_texts_do_not_run_out_of_sentinels(self):
        tokens = np.random.default_rng(0).integers(20, 60, 2000).tolist()
        spans = mask_t5(
            tokens,
            VOCABULARY,
            np.random.RandomState(0),
            probability=0.15,
            max_predictions=300,
            max_target=10**6,
        )
        assert len(spans) == 10
        assert spans == sorted(spans)


class TestICT:
    @staticmethod
    def documents():
        return [
            [[100 * d + 10 * s + t for t in range(4)] for s in range(5 if d % 3 else 1)]
            for d in range(1, 21)
        ]

    @staticmethod
    def titles(tmp_path):
        return write(tmp_path / "t", [[[9000 + d] * (d % 5)] for d in range(1, 21)])

    def dataset(self, tmp_path, documents=range(20), titles=True, **change):
        settings = {"seq_length": 16, "num_samples": 60, "seed": 4} | change
        return ICTDataset(
            write(tmp_path / "d", self.documents()),
            documents,
            titles=self.titles(tmp_path) if titles else None,
            cls=CLS,
            sep=SEP,
            pad=PAD,
            **settings,
        )

    @pytest.mark.parametrize("documents", [range(20), range(12, 20)], ids=["all", "last"])
    @pytest.mark.parametrize("titles", [True, False], ids=["titles", "no-titles"])
    @pytest.mark.parametrize("probability", [0.0, 0.5, 1.0])
    def test_query_and_block(self, tmp_path, documents, titles, probability):
        dataset = self.dataset(tmp_path, documents, titles, query_in_block_prob=probability)
        kept = []  # of the samples on whose block it shows
        for index in range(len(dataset)):
            sample = dataset[index]
            start, end, document, _ = sample["block_data"].tolist()
            assert document in documents
            query = sample["query_tokens"][sample["query_pad_mask"] == 1].tolist()
            block = sample["block_tokens"][sample["block_pad_mask"] == 1].tolist()
            assert (query[0], query[-1], block[0], block[-1]) == (CLS, SEP, CLS, SEP)
            assert (sample["query_tokens"][len(query) :] == PAD).all()
            assert all(token // 100 == document + 1 for token in query[1:-1])
            text = block[1:-1]
            if titles:
                title = (document + 1) % 5
                assert text[:title] == [9001 + document] * title
                assert text[title] == SEP
                text = text[title + 1 :]
            sentences = [dataset.indexed[i].tolist() for i in range(start, end)]
            assert query[1:-1] in sentences
            without = [t for s in sentences if s != query[1:-1] for t in s]
            full = [t for s in sentences for t in s]
            room = 16 - 2 - ((document + 1) % 5 + 1 if titles else 0)
            assert text in (without[:room], full[:room])
            if full[:room] != without[:room]:
                kept.append(text == full[:room])
            whole, mask = dataset.get_block(start, end, document)
            assert mask.sum() == 2 + ((document + 1) % 5 + 1 if titles else 0) + len(full[:room])
            assert whole.shape == (16,)
        share = np.mean(kept)
        assert {0.0: share == 0, 0.5: 0.2 < share < 0.8, 1.0: share == 1}[probability]

    def test_sample_does_not_depend_on_what_was_read_before(self, tmp_path, reads_pages_one_by_one):
        dataset = self.dataset(tmp_path)
        forward = [dataset[i]["query_tokens"].tolist() for i in range(60)]
        again = [dataset[i]["query_tokens"].tolist() for i in reversed(range(60))]
        assert forward == again[::-1]
        twin = pickle.loads(pickle.dumps(dataset))
        assert twin[7]["block_tokens"].tolist() == dataset[7]["block_tokens"].tolist()
        assert reads_pages_one_by_one(twin)

    def test_one_sentence_documents(self, tmp_path):
        assert 0 not in {d % 3 for d in self.dataset(tmp_path).mapping[:, 2] + 1}
        dataset = self.dataset(tmp_path, use_one_sent_docs=True, query_in_block_prob=0.0)
        alone = [i for i, row in enumerate(dataset.mapping) if row[1] - row[0] == 1]
        assert alone
        for index in alone:
            sample = dataset[index]
            query = sample["query_tokens"][sample["query_pad_mask"] == 1].tolist()[1:-1]
            assert set(query) <= set(sample["block_tokens"].tolist())

    def test_titles_are_documents(self, tmp_path):
        # As Core and `--keep-empty` write them: without a sequence, or of several sentences.
        titles = [[[9000 + d] for _ in range(d % 4)] for d in range(1, 21)]
        dataset = ICTDataset(
            write(tmp_path / "d", self.documents()),
            range(3, 20),
            titles=write(tmp_path / "t", titles),
            cls=CLS,
            sep=SEP,
            pad=PAD,
            seq_length=32,
            num_samples=60,
            seed=4,
        )
        for index, (_, _, document, _) in enumerate(dataset.mapping.tolist()):
            block = dataset[index]["block_tokens"].tolist()
            title = [9001 + document] * ((document + 1) % 4)
            assert block[1 : block.index(SEP)] == title == dataset.title(document)

    def test_title_longer_than_a_sample(self, tmp_path):
        dataset = ICTDataset(
            write(tmp_path / "d", [[[5] * 4, [6] * 4, [7] * 4]]),
            range(1),
            titles=write(tmp_path / "t", [[[8] * 100]]),
            cls=CLS,
            sep=SEP,
            pad=PAD,
            seq_length=16,
            num_samples=1,
            seed=1,
        )
        block = dataset[0]["block_tokens"].tolist()
        assert block[:10] == [CLS, *[8] * 8, SEP]
        assert block[-1] == SEP
        assert set(block[10:-1]) <= {5, 6, 7}

    @pytest.mark.parametrize("seq_length", [4, 5, 6])
    def test_shortest_samples_hold_some_of_a_title(self, tmp_path, seq_length):
        dataset = self.dataset(tmp_path, seq_length=seq_length)
        for index in range(len(dataset)):
            block = dataset[index]["block_tokens"].tolist()
            title = (int(dataset.mapping[index][2]) + 1) % 5
            kept = title if title <= seq_length - 3 else min(seq_length // 2, seq_length - 3)
            assert [t for t in block if t > 9000] == block[1 : 1 + kept]
            assert len(block) == seq_length
            assert block.count(SEP) == 2

    def test_bad_arguments(self, tmp_path):
        with pytest.raises(ValueError, match="query_in_block_prob must lie between 0 and 1"):
            self.dataset(tmp_path, query_in_block_prob=2)
        with pytest.raises(ValueError, match=r"seed must lie between 0 .* got -1"):
            self.dataset(tmp_path, seed=-1)
        with pytest.raises(ValueError, match="seq_length 3 has no room"):
            self.dataset(tmp_path, seq_length=3)
        with pytest.raises(ValueError, match=r"has 1 titles, .* 20 documents; .* same lines"):
            ICTDataset(
                write(tmp_path / "d", self.documents()),
                range(20),
                titles=write(tmp_path / "t", [[[1]]]),
                cls=CLS,
                sep=SEP,
                pad=PAD,
                seq_length=16,
                num_samples=1,
                seed=1,
            )


BUILD_SETTINGS = {"split": "8,2", "num_samples": (30, 5, 5), "seed": 1}


class TestBuilders:
    """Split by documents, not by sentences; blends; tokenizers that lack something."""

    def test_bert(self, indexed, tmp_path):
        train, valid, test = build_bert_datasets(
            indexed.prefix, tokenizer=TOKENIZER, seq_length=40, **BUILD_SETTINGS
        )
        assert test is None
        edge = int(indexed.document_indices[32])
        assert train.mapping[:, 1].max() <= edge <= valid.mapping[:, 0].min()
        write(tmp_path / "e", random_documents(1))
        mixed, _, _ = build_bert_datasets(
            ["1", indexed.prefix, "3", str(tmp_path / "e")],
            tokenizer=TOKENIZER,
            seq_length=40,
            **BUILD_SETTINGS,
        )
        assert isinstance(mixed, BlendedDataset)
        assert len(mixed) == 30
        assert mixed[29]["text"].shape == (40,)

    def test_t5(self, indexed):
        train, valid, test = build_t5_datasets(
            indexed.prefix,
            tokenizer=TOKENIZER,
            encoder_seq_length=40,
            decoder_seq_length=16,
            **BUILD_SETTINGS,
        )
        assert test is None
        assert train[0]["text_dec"].shape == (16,)
        assert len(valid) >= 5

    def test_ict(self, indexed, tmp_path):
        titles = write(tmp_path / "t", [[[20 + d]] for d in range(40)])
        train, valid, test = build_ict_datasets(
            indexed.prefix,
            titles_prefix=titles.prefix,
            tokenizer=TOKENIZER,
            seq_length=40,
            **BUILD_SETTINGS,
        )
        assert test is None
        assert train.mapping[:, 2].max() < 32 <= valid.mapping[:, 2].min()
        for index in range(len(valid)):
            sample = valid[index]
            assert sample["block_tokens"][1] == 20 + sample["block_data"][2]
        with pytest.raises(TypeError, match="not list"):  # a blend, whose sources share no titles
            build_ict_datasets(
                ["1", indexed.prefix, "1", indexed.prefix],
                titles_prefix=titles.prefix,
                tokenizer=TOKENIZER,
                seq_length=40,
                **BUILD_SETTINGS,
            )
        with pytest.raises(ValueError, match="expected three numbers"):
            build_ict_datasets(
                indexed.prefix,
                titles_prefix=None,
                tokenizer=TOKENIZER,
                seq_length=40,
                split="1",
                num_samples=(1,),
                seed=1,
            )

    def test_text_that_was_not_split_into_sentences(self, tmp_path):
        """One document of them is enough, where it is a part of the split."""
        write(tmp_path / "d", [[[30] * 9] * 2] * 3 + [[[30] * 9]])
        with pytest.raises(ValueError, match="data for test: none of 1 documents has 2 sentences"):
            build_bert_datasets(
                tmp_path / "d",
                tokenizer=TOKENIZER,
                seq_length=40,
                **{**BUILD_SETTINGS, "split": "2,1,1"},
            )

    def test_no_sentinels(self, indexed):
        bare = SimpleNamespace(**{**vars(TOKENIZER), "extra_ids": ()})
        with pytest.raises(ValueError, match="load it with extra ids"):
            build_t5_datasets(
                indexed.prefix,
                tokenizer=bare,
                encoder_seq_length=40,
                decoder_seq_length=16,
                **BUILD_SETTINGS,
            )

    def test_bad_seed(self, indexed):
        settings = {"tokenizer": TOKENIZER, **BUILD_SETTINGS, "seed": 2**32}
        with pytest.raises(ValueError, match="seed must lie between"):
            build_bert_datasets(indexed.prefix, seq_length=40, **settings)
        lengths = {"encoder_seq_length": 40, "decoder_seq_length": 16}
        with pytest.raises(ValueError, match="seed must lie between"):
            build_t5_datasets(indexed.prefix, **lengths, **settings)

    @pytest.mark.parametrize("mask_prob", [-0.1, 1.0])
    def test_bad_mask_prob(self, indexed, mask_prob):
        with pytest.raises(ValueError, match="mask_prob must be at least 0 and below 1"):
            build_bert_datasets(
                indexed.prefix,
                tokenizer=TOKENIZER,
                seq_length=40,
                mask_prob=mask_prob,
                **BUILD_SETTINGS,
            )
        with pytest.raises(ValueError, match="mask_prob must be at least 0 and below 1"):
            build_t5_datasets(
                indexed.prefix,
                tokenizer=TOKENIZER,
                encoder_seq_length=40,
                decoder_seq_length=16,
                mask_prob=mask_prob,
                **BUILD_SETTINGS,
            )


def test_tokens_of_another_tokenizer_are_named():
    with pytest.raises(ValueError, match=r"token 60: the vocabulary has ids 0 to 59; was the"):
        VOCABULARY.words([21, 60, 22])
