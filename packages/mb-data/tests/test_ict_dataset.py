"""ICT samples: queries, blocks and their titles."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from mb_data.samples.ict import ICTDataset
from mb_data.samples.reference import block_mapping
from sentence_helpers import CLS, PAD, SEP, write


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

    @pytest.mark.parametrize("titles", [True, False], ids=["titles", "no-titles"])
    def test_blocks_leave_room_for_titles_and_special_tokens(self, tmp_path, titles):
        dataset = self.dataset(tmp_path, range(3, 20), titles)
        want = block_mapping(
            dataset.indexed.sizes.tolist(),
            dataset.indexed.document_indices.tolist(),
            [(d + 1) % 5 if titles else 0 for d in range(20)],
            max_length=16 - (3 if titles else 2),
            min_sentences=2,
            num_samples=1,
        )
        found = {tuple(row[:3]) for row in dataset.mapping.tolist()}
        assert found == {row[:3] for row in want if row[2] >= 3}

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
        with pytest.raises(ValueError, match=r"has 1 title, .* 20 documents; .* same lines"):
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
