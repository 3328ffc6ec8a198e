"""Data that does not fit the tokenizer is said: documents without its end, tokens it has not."""

import dataclasses

import mb_data
import numpy as np
import pytest
from mb_train.cli import main
from mb_train.config import TrainConfig
from mb_train.data.ends import without_ends

EOD = 40
RUN = {
    "num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 16,
    "micro_batch_size": 2, "train_iters": 1, "lr": 1e-3, "eval_iters": 0, "device": "cpu",
    "tokenizer": f"null:{EOD}",
}  # fmt: skip
CONFIG = TrainConfig(**RUN)


@pytest.fixture(scope="module")
def tokenizer():
    return mb_data.load_tokenizer(f"null:{EOD}")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Prefixes of documents by what is special about their ends."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    texts = [rng.integers(EOD, size=n) for n in rng.integers(1, 30, size=60)]
    ended = [np.append(text, EOD) for text in texts]
    kinds = {
        "ended": ended,
        "bare": texts,
        "empty": [[]] * 3,
        "packed": [np.concatenate((*ended[:9], texts[9])), *texts[:2]],
        "others": [*[[]] * 9, *texts, ended[0]],
        "one long": [np.resize(texts[0], 20_000)],
    }
    for name, documents in kinds.items():
        with mb_data.IndexedDatasetBuilder(folder / name, np.uint16) as builder:
            for document in documents:
                builder.add_document(document)
    return {name: str(folder / name) for name in kinds}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reset_attention_mask": True, "eod_mask_loss": True},
         "by which --reset-attention-mask, --eod-mask-loss would"),
        ({"reset_position_ids": True}, "by which --reset-position-ids would"),
        ({"document_packing": "best_fit"}, "by which --document-packing best_fit would"),
        ({"fim_data": True}, "by which --fim-data would"),
        ({}, None),
    ],
)  # fmt: skip
def test_which_data_sets_have_no_ends(data, tokenizer, change, words):
    config = dataclasses.replace(CONFIG, **change)
    lines = without_ends(config, [*data.values(), data["bare"]], tokenizer)
    assert len(lines) == (words is not None)
    if words is not None:
        named = f"{data['bare']}, {data['one long']} do not end with {EOD}"
        assert lines[0].startswith(f"data: documents of {named}, this run's")
        assert words in lines[0]
    have = [data[name] for name in ("ended", "packed", "others", "empty")]
    assert without_ends(config, have, tokenizer) == []


def test_a_run_says_so(data, capsys):
    line = [f"--{name.replace('_', '-')}={value}" for name, value in RUN.items()]
    for name, said in (("bare", 1), ("ended", 0)):
        asks = ["--split=1", "--data-path", data[name], "--reset-attention-mask"]
        assert main([*line, *asks]) == 0
        assert capsys.readouterr().out.count(f"do not end with {EOD}") == said


def test_a_run_tells_of_tokens_that_its_tokenizer_has_not(data, capsys):
    """The model has rows for them, those that make its vocabulary a multiple of 128."""
    line = [f"--{name.replace('_', '-')}={value}" for name, value in RUN.items()]
    for size, said in ((EOD, 0), (EOD - 1, 1)):
        tokenizer = ["--tokenizer", f"null:{size}", "--split=1", "--data-path", data["ended"]]
        assert main([*line, *tokenizer]) == 0
        out = capsys.readouterr().out
        words = f"holds token {EOD}, and null:{size} has those from 0 to {size}: was it made with"
        assert out.count(words) == said
        assert out.count("another tokenizer") == said
