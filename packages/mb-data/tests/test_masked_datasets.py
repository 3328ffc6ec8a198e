"""What the builders of BERT, T5 and ICT datasets share: splits, blends, and what they refuse."""

from __future__ import annotations

from functools import partial
from inspect import signature
from types import SimpleNamespace

import numpy as np
import pytest
from mb_data.samples.bert import BertDataset, build_bert_datasets
from mb_data.samples.blend import BlendedDataset
from mb_data.samples.ict import ICTDataset, build_ict_datasets
from mb_data.samples.masking import Vocabulary, mask_bert, mask_t5
from mb_data.samples.t5 import T5Dataset, build_t5_datasets
from sentence_helpers import TOKENIZER, VOCABULARY, random_documents, write

BUILD_SETTINGS = {"split": "8,2", "num_samples": (30, 5, 5), "seed": 1}


class TestBuilders:
    """Split by documents, not by sentences; blends; tokenizers that lack something."""

    @pytest.mark.parametrize("build", [build_bert_datasets, build_t5_datasets, build_ict_datasets])
    def test_a_seed_of_numpy_is_the_same_seed(self, indexed, tmp_path, build):
        """One more than it, of which the order is drawn, is 0 in eight bits."""
        sizes = {"encoder_seq_length": 40, "decoder_seq_length": 16, "seq_length": 40}
        sizes = {name: size for name, size in sizes.items() if name in signature(build).parameters}
        if build is build_ict_datasets:
            sizes["titles_prefix"] = None
        how = {**BUILD_SETTINGS, **sizes, "tokenizer": TOKENIZER}
        found = [
            build(indexed.prefix, **{**how, "seed": seed}, cache_dir=tmp_path / type(seed).__name__)
            for seed in (255, np.uint8(255))
        ]
        assert np.array_equal(*(train.mapping for train, _, _ in found))

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

    @pytest.mark.parametrize(
        ("build", "dataset", "settings"),
        [
            (build_bert_datasets, BertDataset, {"seq_length": 40}),
            (build_t5_datasets, T5Dataset, {"encoder_seq_length": 40, "decoder_seq_length": 16}),
            (build_ict_datasets, ICTDataset, {"seq_length": 40, "titles_prefix": None}),
        ],
        ids=["bert", "t5", "ict"],
    )
    def test_what_is_handed_on(self, indexed, tmp_path, build, dataset, settings):
        """The place of the indices, and defaults that are the dataset's own."""
        settings = settings | BUILD_SETTINGS | {"cache_dir": tmp_path / "cache"}
        build(indexed.prefix, tokenizer=TOKENIZER, **settings)
        assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [".mbindex"] * 2
        assert not (tmp_path / "d_index").exists()
        own = signature(dataset).parameters
        for name, parameter in signature(build).parameters.items():
            if name in own:
                assert parameter.default == own[name].default

    @pytest.mark.parametrize(
        "build", [build_bert_datasets, partial(build_ict_datasets, titles_prefix=None)]
    )
    def test_text_that_was_not_split_into_sentences(self, tmp_path, build):
        """One document of them is enough, where it is a part of the split. A blend has several."""
        write(tmp_path / "d", [[[30] * 9] * 2] * 3 + [[[30] * 9]])
        with pytest.raises(ValueError, match=r"data for test: .*d: none of 1 documents has 2 "):
            build(
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

    def test_a_share_of_less_than_one_token(self, indexed):
        """Of which no sample would hide any: a run would learn nothing, and say a loss of 0."""
        settings = {"tokenizer": TOKENIZER, **BUILD_SETTINGS}
        with pytest.raises(ValueError, match=r"mask_prob 0.15 of a sample's 6 tokens, .* less"):
            build_bert_datasets(indexed.prefix, seq_length=9, **settings)
        train, _, _ = build_bert_datasets(indexed.prefix, seq_length=10, **settings)
        assert any(train[i]["loss_mask"].any() for i in range(30))
        lengths = {"encoder_seq_length": 8, "decoder_seq_length": 16}
        with pytest.raises(ValueError, match=r"mask_prob 0.15 of a sample's 6 tokens, .* less"):
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


def test_runs_are_as_long_as_megatrons():
    """BERT: 1, 2 or 3 words, n of them 1/n as often as one. T5: geometric, p = 0.2, up to 10."""
    words = [21] * 10_000  # each a word, and so few hidden that runs seldom touch
    many = Vocabulary(**{**vars(VOCABULARY), "sentinels": tuple(range(1000))})
    bert, t5 = [], []
    for seed in range(25):
        rng = np.random.RandomState(seed)
        options = {"probability": 0.02, "max_predictions": 200}
        _, hidden = mask_bert(words, VOCABULARY, rng, **options)
        starts = np.flatnonzero(np.diff(hidden, prepend=-2) > 1)
        bert += np.diff(starts, append=len(hidden)).tolist()
        t5 += map(len, mask_t5(words, many, rng, max_target=10_000, **options))
    shares = [np.mean(np.equal(bert, n)) for n in (1, 2, 3)]
    assert shares == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.03)
    assert max(t5) == 10
    assert np.mean(t5) == pytest.approx((1 - 0.8**10) / 0.2, abs=0.25)
    assert np.mean(np.equal(t5, 1)) == pytest.approx(0.2, abs=0.03)


@pytest.mark.parametrize("token", [60, -1])  # which NumPy counts from the end
def test_tokens_of_another_tokenizer_are_named(token):
    message = f"token {token}: the vocabulary has ids 0 to 59; was the"
    with pytest.raises(ValueError, match=message):
        VOCABULARY.words([21, token, 22])
