"""A corpus indexed and asked: the blocks found are those that a plain computation finds."""

import json

import mb_data
import numpy as np
import pytest
import torch
from mb_train.cli import main
from mb_train.config import TrainConfig
from mb_train.convert import write_run
from mb_train.folder.run_folder import find_checkpoint
from mb_train.inference.retrieval import Retriever, build_index
from mb_train.tasks.make import whole_model

pytest.importorskip("faiss")
pytest.importorskip("sentencex")
WORDS = [f"w{i}" for i in range(27)]
V = 7 + len(WORDS)  # five special tokens, and two that the tokenizer adds


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A run of a retriever, and a corpus of 12 documents with titles."""
    folder = tmp_path_factory.mktemp("retrieval")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    g = np.random.default_rng(0)

    def sentence():
        return " ".join(g.choice(WORDS, size=g.integers(2, 7))).capitalize() + "."

    text = folder / "text.jsonl"
    documents = [
        {"text": " ".join(sentence() for _ in range(4)), "title": f"w{i}"} for i in range(12)
    ]
    text.write_text("".join(json.dumps(document) + "\n" for document in documents))
    tokenizer = mb_data.load_tokenizer(str(folder / "vocab.txt"))
    common = {"tokenizer": tokenizer, "workers": 1}
    mb_data.preprocess(text, folder / "x", json_keys=("title",), **common)
    mb_data.preprocess(text, folder / "x", split_sentences=True, **common)
    return folder, write_retriever(folder / "run", folder), tokenizer


def write_retriever(run, folder, **change):
    """A run with random weights; the model."""
    config = TrainConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=16, micro_batch_size=2,
        train_iters=1, lr=1.0, model="ict", init_method_std=0.3, biencoder_projection_dim=8,
        vocab_file=str(folder / "vocab.txt"), make_vocab_size_divisible_by=V, **change,
    )  # fmt: skip
    torch.manual_seed(0)
    model = whole_model(config, vocab_size=V).eval()
    write_run(run, config, model.state_dict(), say=lambda line: None)
    return model


@torch.no_grad()
def plain_scores(model, retriever, tokenizer, query, rows):
    """Score of each block by itself, the best first, with its document."""
    tokens = [tokenizer.cls, *tokenizer.encode(query), tokenizer.sep]
    q, _ = model.query(torch.tensor([tokens]), torch.ones(1, len(tokens)).long())
    found = []
    for start, end, document, _ in rows:
        block, valid = retriever._dataset.get_block(start, end, document)
        d, _ = model.block(torch.tensor(block)[None], torch.tensor(valid)[None])
        found.append((float((q * d).sum()), f"w{document}"))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("kind", ["Flat", "IVF2,Flat"])
def test_answers_are_the_nearest_blocks(corpus, tmp_path, kind, capsys):
    folder, model, tokenizer = corpus
    run, prefix, index = folder / "run", str(folder / "x_text_sentence"), tmp_path / "index"
    found = build_index(run, prefix, index, kind=kind, say=lambda line: None)
    assert found["blocks"] >= 12
    assert 0 <= found["recall@5"] <= 1
    assert found["BM25 recall@20"] > 0.8
    assert sorted(path.name for path in index.iterdir()) == [
        "blocks.npy", "index.json", "vectors.faiss",
    ]  # fmt: skip
    retriever = Retriever(run, index, lists=64)
    query = "w3 w1 w20"
    answers = retriever.ask(query, 100 if kind == "Flat" else 2)
    rows = np.load(index / "blocks.npy").tolist()
    best = plain_scores(model, retriever, tokenizer, query, rows)
    if kind == "Flat":
        assert [answer.title for answer in answers] == [title for _, title in best]
        want = [score for score, _ in best]
        assert [answer.score for answer in answers] == pytest.approx(want, abs=1e-4)
        documents = [json.loads(line) for line in (folder / "text.jsonl").open()]
        whole = {one["title"]: one["text"].lower().replace(".", " ") for one in documents}
        for answer in answers:
            words = answer.text.replace("[UNK]", "").split()  # the full stops
            assert len(words) >= 2
            assert " ".join(words) in " ".join(whole[answer.title].split())
    else:
        assert len(answers) <= 2
        assert answers[0].score <= best[0][0] + 1e-4
    assert main(["retrieve", str(run), query, "--index", str(index), "-k", "1"]) == 0
    assert answers[0].text in capsys.readouterr().out


def test_blocks_do_not_take_each_others_places_at_experts_with_a_capacity(corpus, tmp_path):
    folder, _, tokenizer = corpus
    run, prefix, index = tmp_path / "run", str(folder / "x_text_sentence"), tmp_path / "index"
    experts = {"moe_num_experts": 4, "moe_capacity_factor": 0.05}
    model = write_retriever(run, folder, **experts)
    measured = build_index(run, prefix, index, say=lambda line: None)
    retriever = Retriever(run, index, lists=1)
    rows = np.load(index / "blocks.npy").tolist()
    want = [score for score, _ in plain_scores(model, retriever, tokenizer, "w3 w1", rows)]
    answers = retriever.ask("w3 w1", 100)
    assert [answer.score for answer in answers] == pytest.approx(want, abs=1e-4)
    # And what is measured is of such embeddings.
    dataset = retriever._dataset
    samples = {tuple(s["block_data"][:3]): s for s in (dataset[i] for i in range(len(dataset)))}
    sides = []
    for side in ("query", "block"):
        names = (f"{side}_tokens", f"{side}_pad_mask")
        texts = [[torch.tensor(s[name])[None] for name in names] for s in samples.values()]
        with torch.no_grad():
            found = [getattr(model, side)(*text)[0] for text in texts]
        sides.append(torch.cat(found))
    scores = sides[0] @ sides[1].T
    ranks = (scores >= scores.diagonal()[:, None]).sum(1) - 1
    assert [measured[f"recall@{k}"] for k in (1, 5)] == [
        float((ranks < k).double().mean()) for k in (1, 5)
    ]


def test_of_an_index_in_lists_as_many_are_searched_as_asked(corpus, tmp_path, capsys):
    folder, _, _ = corpus
    run, prefix = folder / "run", str(folder / "x_text_sentence")
    found = {}
    for kind in ("Flat", "IVF4,Flat", "L2norm,IVF4,Flat"):
        build_index(run, prefix, tmp_path / kind, kind=kind, say=lambda line: None)
        found[kind] = Retriever(run, tmp_path / kind, lists=64).ask("w3 w1 w20", 100)
    texts = {kind: {answer.text for answer in answers} for kind, answers in found.items()}
    assert texts["IVF4,Flat"] == texts["L2norm,IVF4,Flat"] == texts["Flat"]
    assert found["IVF4,Flat"][0].text == found["Flat"][0].text
    one = Retriever(run, tmp_path / "IVF4,Flat", lists=1).ask("w3 w1 w20", 100)
    assert 0 < len(one) < len(found["Flat"])
    asked = ["retrieve", str(run), "w3", "--index", str(tmp_path / "Flat"), "--lists", "0"]
    assert main(asked) == 2
    assert "at least one list of an index to search, got 0" in capsys.readouterr().err


def test_what_is_no_index_is_refused_and_nothing_is_written(corpus, tmp_path, capsys):
    folder, _, _ = corpus
    run, prefix = str(folder / "run"), str(folder / "x_text_sentence")
    index = tmp_path / "index"

    def refused(says, *arguments):
        assert main([str(a) for a in arguments]) == 2
        assert says in capsys.readouterr().err

    flags = ("--corpus", prefix, "--output", index)
    refused("mb-data preprocess", "index", run, "--corpus", tmp_path / "no", "--output", index)
    refused("'Nonsense'", "index", run, *flags, "--kind", "Nonsense")
    refused("vectors of 8", "index", run, *flags, "--kind", "IVF99,Flat")
    refused("--queries of at least 1", "index", run, *flags, "--queries", 0)
    other = mb_data.load_tokenizer("bert-base-uncased")
    text, y = folder / "text.jsonl", folder / "y"
    mb_data.preprocess(text, y, tokenizer=other, split_sentences=True, workers=1)
    refused("another tokenizer", "index", run, "--corpus", f"{y}_text_sentence", "--output", index)
    refused(f"in {index}, found none", "retrieve", run, "w1", "--index", index)
    refused(f"an index in {run}/index", "retrieve", find_checkpoint(folder / "run"), "w1")
    assert not list(tmp_path.iterdir())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    (tmp_path / "mine" / "index.json").touch()
    for there in ("mine", "mine/file"):
        refused("to replace", "index", run, "--corpus", prefix, "--output", tmp_path / there)
    assert (tmp_path / "mine" / "file").is_file()
    assert main(["index", run, *map(str, flags)]) == 0
    refused("at least one word", "retrieve", run, " ", "--index", index)
    for file in ("vectors.faiss", "blocks.npy"):
        whole = (index / file).read_bytes()
        for kept in (0, len(whole) // 2):
            (index / file).write_bytes(whole[:kept])
            refused(f"{index / file} is damaged: ", "retrieve", run, "w1", "--index", index)
        other = bytes([*whole[:-1], whole[-1] ^ 1])  # as of a disk that returns another bit
        (index / file).write_bytes(other)
        refused(f"{index / file} is damaged: ", "retrieve", run, "w1", "--index", index)
        (index / file).write_bytes(whole)
    about = json.loads((index / "index.json").read_text())
    for change, says in (
        ({"iteration": 7}, "iteration 7"), ({"corpus_bytes": 1}, "has changed"),
        ({"written": 1.0, "checkpoint": "a/iter_0000000"}, "made with a/iter_0000000"),
    ):  # fmt: skip
        (index / "index.json").write_text(json.dumps(about | change))
        refused(says, "retrieve", run, "w1", "--index", index)
    for damaged in ({}, about | {"titles": 5}, about | {"sums": None}):
        (index / "index.json").write_text(json.dumps(damaged))
        refused("index.json is damaged", "retrieve", run, "w1", "--index", index)


def test_an_index_is_replaced_and_asked_from_another_folder(corpus, tmp_path, monkeypatch):
    folder, _, tokenizer = corpus
    index = tmp_path / "index"
    monkeypatch.chdir(folder)
    with mb_data.IndexedDatasetBuilder("named", np.uint16) as builder:
        for _ in range(12):
            builder.add_document(tokenizer.encode("w5"))
    index.mkdir()
    for name in ("vectors.faiss", "blocks.npy", "index.json"):
        (index / name).touch()
    build_index(folder / "run", "x_text_sentence", index, titles="named", say=lambda line: None)
    assert [path.name for path in tmp_path.iterdir()] == ["index"]
    monkeypatch.chdir(tmp_path)
    retriever = Retriever(folder / "run", index, lists=64)
    assert retriever.ask("w3", 1)[0].title == "w5"
    # Of a long query as much as the model reads: 16 tokens, [CLS] and [SEP] among them.
    assert retriever.ask("w3 w4 " * 20, 3) == retriever.ask("w3 w4 " * 7, 3)
    with pytest.raises(ValueError, match="at least one answer to be asked for, got 0"):
        retriever.ask("w3", 0)
