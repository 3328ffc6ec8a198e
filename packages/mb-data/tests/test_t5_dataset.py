"""T5 samples: golden ones of Megatron's, and what must hold for every sample."""

from __future__ import annotations

import numpy as np
import pytest
from mb_data.samples.masking import Vocabulary, mask_t5
from mb_data.samples.t5 import T5Dataset, build_t5_datasets
from sentence_helpers import BOS, EOS, PAD, SENTENCES, TOKENIZER, VOCABULARY, write

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
    def test_golden_samples(self, tmp_path, reads_pages_one_by_one):
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
        assert reads_pages_one_by_one(dataset)
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

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"mean_span": 0.5}, "at least 1 word"),
            ({"mean_span": float("inf")}, "at least 1 word, and finite, got inf"),
            ({"decoder_seq_length": 0}, "decoder_seq_length must be at least 1, got 0"),
        ],
    )
    def test_bad_arguments(self, indexed, change, message):
        settings = {"encoder_seq_length": 40, "decoder_seq_length": 40, "num_samples": 1, "seed": 3}
        with pytest.raises(ValueError, match=message):
            T5Dataset(indexed, range(1), vocabulary=VOCABULARY, **settings | change)

    @pytest.mark.parametrize(
        ("mask_prob", "decoder", "sentinels"),
        [(0.15, 40, 10), (0.5, 40, 10), (0.9, 6, 10), (0.5, 40, 1), (0.0, 1, 10), (0.5, 3, 10)],
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

    def test_t5s_own_tokenizer_has_only_padding_and_an_end(self, tmp_path):
        class Own:
            vocab_size, pad, eos, extra_ids = 60, PAD, EOS, TOKENIZER.extra_ids
            word_starts = staticmethod(TOKENIZER.word_starts)

            def __getattr__(self, role):
                raise ValueError(f"no {role} token")

        write(tmp_path / "d", [SENTENCES])
        own, fuller = (
            build_t5_datasets(
                tmp_path / "d",
                tokenizer=tokenizer,
                encoder_seq_length=18,
                decoder_seq_length=14,
                split="100,0,0",
                num_samples=(5, 0, 0),
                seed=7,
                mask_prob=0.3,
            )[0]
            for tokenizer in (Own(), TOKENIZER)
        )
        for index in range(5):
            sample, expected = own[index], fuller[index]
            assert sample["text_dec"][0] == PAD
            assert sample["dec_mask"][0] == 1
            expected["text_dec"][0] = PAD
            for name, value in expected.items():
                np.testing.assert_array_equal(sample[name], value)

    @pytest.mark.parametrize("share", [False, True])
    def test_a_decoder_without_room_for_a_hidden_token_is_refused(self, indexed, share):
        def dataset(decoder, mask_prob=0.3):
            return T5Dataset(
                indexed,
                range(indexed.num_documents),
                vocabulary=VOCABULARY,
                encoder_seq_length=18,
                decoder_seq_length=decoder,
                num_samples=100,
                seed=3,
                mask_prob=mask_prob,
                short_seq_prob=0,
                share_decoder=share,
            )

        least = 4 if share else 3  # of which a text of 16 in an encoder of 18 has 3
        found = dataset(least)
        assert max(int(found[i]["loss_mask"].sum()) for i in range(100)) == 3
        with pytest.raises(ValueError, match="need 3, so none would be hidden; raise it"):
            dataset(least - 1)
        dataset(least - 1, mask_prob=0)  # nothing is asked for

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
