"""Fine-tuning on a user's file: the columns, the samples, and that it learns."""

import contextlib
import io
import json
import logging

import pytest
import torch
from mb_data import load_tokenizer
from mb_parallel.testing import run_ranks
from mb_train.cli import main
from mb_train.config import TrainConfig
from mb_train.convert import write_run
from mb_train.loading import load_trained
from mb_train.logs.run_log import read_log
from mb_train.tasks.examples import ExampleDataset
from mb_train.tasks.make import one_process_task, whole_model
from mb_train.tasks.pairs import read_pairs
from mb_train.tasks.race import read_questions
from mb_train.train import Result

WORDS = ["good", "bad", "well", "ill", *(f"w{i}" for i in range(23))]
V = 7 + len(WORDS)  # with the two that a tokenizer appends


def mnli_row(a, b, label):
    return "\t".join([*map(str, range(8)), a, b, "x", label, label])


def qqp_row(a, b, label):
    return "\t".join(["7", "8", "9", a, b, label])


ROWS = {"mnli": (mnli_row, "entailment", "neutral"), "qqp": (qqp_row, "1", "0")}


def write(path, task, count):
    """Pairs whose second sentence begins with the same word as the first, or with another."""
    row, same, other = ROWS[task]
    g, lines = torch.Generator().manual_seed(count), ["a header"]
    for i in range(count):
        word = torch.randint(2, (1,), generator=g).item()
        second = ("well", "ill")[word if i % 2 else 1 - word]
        filler = WORDS[4 + int(torch.randint(23, (1,), generator=g))]
        lines.append(row(f"{('good', 'bad')[word]} {filler}", second, same if i % 2 else other))
    path.write_text("\n".join(lines) + "\n")


def write_race(path, count):
    """Articles of one word, two questions each; the option that is right begins with its twin."""
    g, lines = torch.Generator().manual_seed(count), []
    for _ in range(count):
        word = int(torch.randint(2, (1,), generator=g))
        right = torch.randint(4, (2,), generator=g).tolist()
        twin, other = [("well", "ill"), ("ill", "well")][word]
        options = [[twin if at == place else other for at in range(4)] for place in right]
        lines.append(
            json.dumps({
                "article": ("good", "bad")[word], "questions": ["w1 _ w2", "w3"],
                "options": options, "answers": ["ABCD"[place] for place in right], "id": "x",
            })
        )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finetune")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    config = TrainConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=12, micro_batch_size=2,
        train_iters=1, lr=1.0, model="bert", init_method_std=0.2, moe_num_experts=2, moe_top_k=1,
        vocab_file=str(folder / "vocab.txt"), make_vocab_size_divisible_by=V,
    )  # fmt: skip
    torch.manual_seed(4)  # with which it learns within few steps
    state = whole_model(config, vocab_size=V).state_dict()
    write_run(folder / "run", config, state, say=lambda line: None)
    return folder / "run"


def test_it_learns(bert, tmp_path, capsys):
    train, valid = tmp_path / "train.tsv", tmp_path / "valid.tsv"
    write(train, "mnli", 301)
    write(valid, "mnli", 53)
    arguments = [
        "finetune", str(bert), "--task", "mnli", "--train-data", str(train), "--valid-data",
        str(valid), "--epochs", "4", "--micro-batch-size", "16", "--lr", "6e-3", "--save",
        str(tmp_path / "out"), "--device", "cpu", "--eval-interval", "1000",
        "--hidden-dropout", "0", "--attention-dropout", "0",
    ]  # fmt: skip
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "iteration       76/      76" in said
    assert "53 pairs of" in said
    found = {
        name: float(value)
        for name, value in (
            line.strip().split(": ") for line in said.splitlines()[-4:] if line.startswith("  ")
        )
    }
    assert found["most frequent label"] == pytest.approx(27 / 53, abs=1e-4)
    assert found["accuracy"] > 0.9
    # What fills up the last batch of an evaluation counts neither there nor in the loss.
    events = {event["event"]: event for event in read_log(tmp_path / "out/log.jsonl")}
    assert events["measured"]["accuracy"] == pytest.approx(found["accuracy"], abs=1e-4)
    trained = load_trained(tmp_path / "out", kinds=("classifier",))
    task = one_process_task(trained.config, trained.tokenizer, vocab_size=V)
    samples = task.build_datasets({"train": None, "valid": [str(valid)], "test": None}, [0] * 3)[1]
    batch = {k: torch.from_numpy(v) for k, v in task.collate([*samples]).items()}
    loss = trained.model(batch.pop("tokens_BS"), **batch).losses["classification loss"].item()
    assert events["eval"]["lm_loss"] == pytest.approx(loss / 53, rel=1e-4)


def test_it_learns_to_choose(bert, tmp_path, capsys):
    write_race(tmp_path / "train/high/1.txt", 60)
    write_race(tmp_path / "train/middle/2.txt", 41)
    for name in ("dev.txt", "test.txt"):
        write_race(tmp_path / name, 30 + len(name))
    arguments = [
        "finetune", str(bert), "--task", "race", "--train-data", str(tmp_path / "train"),
        "--valid-data", str(tmp_path / "dev.txt"), str(tmp_path / "test.txt"), "--epochs", "4",
        "--micro-batch-size", "16", "--lr", "6e-3", "--save", str(tmp_path / "out"), "--device",
        "cpu", "--hidden-dropout", "0", "--attention-dropout", "0",
    ]  # fmt: skip
    assert main(arguments) == 0
    said = capsys.readouterr().out.splitlines()
    assert sum("validation loss at iteration" in line for line in said) == 3
    for name, count in (("dev.txt", 74), ("test.txt", 76)):
        at = said.index(f" {count} questions of {tmp_path / name}:")
        accuracy = float(said[at + 1].removeprefix("  accuracy: "))
        assert accuracy > 0.9, said[at:]


def load_on_one(rank, world_size, folder):
    return rank == 0 and load_trained(folder, kinds=("bert",)).saved.iteration


def test_one_rank_loads_a_model_without_the_others(bert):
    assert run_ranks(load_on_one, 2, str(bert), timeout_s=60) == [0, False]


def finetune_on(rank, world_size, words):
    """What torch's tensors complain of."""
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("torch.distributed.tensor").addHandler(handler)
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(words) == 0
    return said


def test_ranks_that_are_joined_already_and_share_every_layer(bert, tmp_path):
    file = tmp_path / "pairs.tsv"
    write(file, "qqp", 4)
    words = ["finetune", str(bert), "--task", "qqp", "--train-data", str(file), "--valid-data"]
    words += [str(file), "--epochs", "1", "--micro-batch-size", "4", "--device", "cpu"]
    words += ["--save", str(tmp_path / "out"), "--tensor-model-parallel-size", "2"]
    words += ["--expert-model-parallel-size", "2"]
    assert run_ranks(finetune_on, 2, words) == [[], []]


def test_a_run_is_shown_and_what_it_cannot_be_is_said(bert, tmp_path, monkeypatch, capsys):
    file = tmp_path / "pairs.tsv"
    write(file, "qqp", 4)
    files = ["--task", "QQP", "--train-data", str(file), "--valid-data", str(file)]  # as Megatron
    there = sorted(bert.parent.rglob("*"))
    monkeypatch.chdir(bert)
    named = "--pretrained-checkpoint"
    for run in (
        [".", *files], ["iter_0000000", *files], [*files, named, bert],
        [f"{named}={bert}", *files], ["--keep-last", *files, "."],
    ):  # fmt: skip
        words = ["finetune", "--print-config", *map(str, run)]
        assert main(words) == 0
        assert f'save = "{bert}-qqp"' in capsys.readouterr().out
    # Ranks that share a model see the same samples: a step has those of two.
    write(file, "qqp", 64)
    monkeypatch.setenv("WORLD_SIZE", "4")
    words = ["--tensor-model-parallel-size", "2", "--micro-batch-size", "8", "--print-config"]
    assert main(["finetune", ".", *files, *words]) == 0
    said = capsys.readouterr().out.splitlines()
    assert {"train_iters = 12", "eval_interval = 4", "eval_iters = 4"} <= set(said)
    write(tmp_path / "test.tsv", "qqp", 65)
    words += ["--test-data-path", str(tmp_path / "test.tsv")]
    assert main(["finetune", ".", *files, *words]) == 0
    assert "eval_iters = 5" in capsys.readouterr().out.splitlines()
    monkeypatch.delenv("WORLD_SIZE")
    for words, says in (
        (["--epochs", "inf"], "--epochs above 0"),
        (["--load", "x"], "no --load"),
        (["--epochs", "3", "--train-iters", "9"], "one of --epochs and --train-iters, got both"),
    ):
        assert main(["finetune", ".", *files, *words]) == 2
        assert says in capsys.readouterr().err
    assert sorted(bert.parent.rglob("*")) == there


def test_a_run_whose_end_is_not_saved_says_so(bert, tmp_path, monkeypatch, capsys):
    from mb_train.checkpoint.writer import Writer

    write_data, saves = Writer.write_data, []

    def full_later(*arguments):
        saves.append(1)
        if len(saves) > 1:
            raise OSError(28, "No space left on device")
        return write_data(*arguments)

    monkeypatch.setattr(Writer, "write_data", full_later)
    file = tmp_path / "pairs.tsv"
    write(file, "qqp", 4)
    words = ["--train-data", str(file), "--valid-data", str(file), "--save", str(tmp_path / "out")]
    words += ["--micro-batch-size", "2", "--epochs", "2", "--save-interval", "2", "--device", "cpu"]
    # Shorter than that of the BERT; and its rows stay, whatever ranks would pad them to.
    words += ["--seq-length", "10", "--make-vocab-size-divisible-by", "50"]
    # Of a vocabulary that is gone the BERT's run has a copy.
    words += ["--vocab-file", str(tmp_path / "gone/vocab.txt")]
    assert main(["finetune", str(bert), "--task", "qqp", *words]) == 1
    assert (tmp_path / "out/tokenizer/vocab.txt").exists()
    said = capsys.readouterr().out
    assert "iter_0000002, the latest there is: the end of the run could not be saved" in said


def test_a_full_disk_under_its_notes_ends_no_run(bert, tmp_path, monkeypatch, capsys):
    class FullForAWhile(io.StringIO):
        def flush(self):
            if "note: " in self.getvalue():
                self.truncate(0)
                raise OSError(28, "No space left on device")

    result = Result(3, None, None, checkpoint=None, stopped_by=None, diverged=False)
    monkeypatch.setattr("mb_train.train.train", lambda config: result)
    monkeypatch.setattr("sys.stdout", FullForAWhile())
    file = tmp_path / "pairs.tsv"
    write(file, "qqp", 4)
    words = ["--train-data", str(file), "--valid-data", str(file), "--save-interval", "0"]
    words += ["--task", "qqp", "--use-flash-attn"]
    assert main(["finetune", str(bert), *words]) == 0
    assert capsys.readouterr().err == ""


def test_pairs_become_samples_of_two_segments(bert, tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("h\n" + mnli_row("good w1 w2", "bad", "contradiction") + "\r\n\n")
    pairs = read_pairs(path, "mnli")
    assert pairs == [((("good w1 w2", "bad"),), 0)]
    (tmp_path / "qqp.tsv").write_text("h\n" + qqp_row("a", "b", "1"))
    assert read_pairs(tmp_path / "qqp.tsv", "qqp") == [((("a", "b"),), 1)]
    torn = "7\t8\t9\tthe first\n half\tof it\t0\n"
    (tmp_path / "qqp.tsv").write_text("h\n" + torn + qqp_row("a", "b", "1"))
    with pytest.warns(UserWarning, match=r"line 2: .* got 4. 2 lines like this are left out."):
        assert read_pairs(tmp_path / "qqp.tsv", "qqp") == [((("a", "b"),), 1)]
    tokenizer = load_tokenizer(str(bert.parent / "vocab.txt"))
    sample = ExampleDataset(pairs, tokenizer, seq_length=9)[0]
    good, bad, w1, w2 = (tokenizer.token_id(word) for word in ("good", "bad", "w1", "w2"))
    assert sample["text"][0].tolist() == [2, good, w1, w2, 3, bad, 3, 0, 0]
    assert sample["types"][0].tolist() == [0, 0, 0, 0, 0, 1, 1, 0, 0]
    assert sample["padding_mask"][0].tolist() == [1] * 7 + [0] * 2
    short = ExampleDataset(pairs, tokenizer, seq_length=5)[0]
    assert short["text"][0].tolist() == [2, good, 3, bad, 3]
    again = ExampleDataset(pairs * 5, tokenizer, seq_length=9, num_samples=12, seed=1)
    assert len(again) == 12
    with pytest.raises(ValueError, match=r"--seq-length of at least 3, .* got 2"):
        ExampleDataset(pairs, tokenizer, seq_length=2)


def test_questions_become_samples_of_four_texts(bert, tmp_path):
    found = {
        "article": "w4 w5 w6", "questions": ["w1 _ w2 __", "w3"], "answers": ["C", "A"],
        "options": [["good", "bad", "well", "ill bad"], ["", "a", "b", "c"]],
    }  # fmt: skip
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/1.txt").write_text(json.dumps(found) + "\r\n\n", "utf-8-sig")
    (tmp_path / "deep/readme.md").write_text("not read")
    first, second = read_questions(tmp_path)
    asked = ["w1 good w2 good", "w1 bad w2 bad", "w1 well w2 well", "w1 ill bad w2 ill bad"]
    assert first == (tuple((text, "w4 w5 w6") for text in asked), 2)
    assert [text for text, _ in second.texts] == ["w3 ", "w3 a", "w3 b", "w3 c"]
    assert second.label == 0
    tokenizer = load_tokenizer(str(bert.parent / "vocab.txt"))

    def texts(size, most):
        how = {"seq_length": size, "first_at_most": most}
        sample = ExampleDataset([first], tokenizer, **how)[0]
        assert sample["text"].shape == sample["types"].shape == (4, size)
        return [tokenizer.decode(row[row != tokenizer.pad]) for row in sample["text"]]

    assert texts(11, 128)[2] == "[CLS] w1 well w2 well [SEP] w4 w5 w6 [SEP]"
    assert texts(9, 128)[2:] == [
        "[CLS] w1 well w2 well [SEP] w4 w5 [SEP]", "[CLS] w1 ill bad w2 ill bad [SEP] [SEP]",
    ]  # fmt: skip
    assert texts(8, 3)[0] == "[CLS] w1 good w2 [SEP] w4 w5 [SEP]"


def test_what_is_no_data_is_refused_and_nothing_is_written(bert, tmp_path, capsys):
    good, bad = tmp_path / "good.tsv", tmp_path / "bad.tsv"
    write(good, "qqp", 4)
    out = tmp_path / "out"

    def refused(says, train, *more):
        files = ["--train-data", str(train), "--valid-data", str(good), "--save", str(out)]
        assert main(["finetune", str(bert), "--task", "qqp", *files, *more]) == 2
        assert says in capsys.readouterr().err
        assert not out.exists()

    bad.write_text("header\n1\t2\n")
    refused(
        "6 columns of qqp, the sentences in columns 4 and 5 and the label in the 6th, got 2", bad
    )
    bad.write_text("header\n" + qqp_row("a", "b", "2"))
    refused("line 2: expected a label of 0, 1, got '2'", bad)
    bad.write_text("header\n")
    refused("below the first line", bad)
    refused("No such file", tmp_path / "none.tsv")
    refused("--epochs above 0", good, "--epochs", "0")


def test_what_is_no_question_is_refused(tmp_path):
    path = tmp_path / "1.txt"
    write_race(path, 1)
    line = path.read_text().strip()
    for wrong, got in (
        (line[:-5], repr(line[:60])),
        ("[3]", "'[3]'"),
        ("[" * 10**5, repr("[" * 60)),
        (line.replace('"article"', '"text"'), repr(line.replace('"article"', '"text"')[:60])),
        (line.replace('"article": "', '"article": 3, "id": "'), "3 for a text"),
        (line.replace('"w3"', '"\\ud800"'), "a half of a surrogate pair"),
        (line.replace('"w3"', '"w3", "w4"'), "3 questions, 2 lists of options and 2 answers"),
        (line.replace(', "ill"], [', "], ["), "3 options for 'w1 _ w2'"),
        (line.replace('"answers": ["', '"answers": ["AB'), "the answer 'AB"),
        (json.dumps(json.loads(line) | {"questions": "w1"}), "'w1' for a list"),
        (json.dumps(json.loads(line) | {"options": ["abcd", "abcd"]}), "'abcd' for a list"),
    ):
        path.write_text(f"{line}\n{wrong}\n")
        with pytest.raises(ValueError, match=r"1.txt, line 2: expected JSON with") as refused:
            read_questions(path)
        assert f"got {got}" in str(refused.value)
    path.write_text("\n")
    for where in (path, tmp_path):
        with pytest.raises(ValueError, match=r"Expected questions of RACE in .* got none"):
            read_questions(where)
