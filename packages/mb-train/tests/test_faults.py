"""What a run does when something goes wrong: signals, two runs in a folder, NaN, a full disk."""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import mb_data
import mb_train.train.run
import numpy as np
import pytest
import torch
from mb_data.samples.masking import Vocabulary
from mb_parallel.testing import run_ranks
from mb_train.checkpoint import snapshot
from mb_train.cli import main
from mb_train.data.batches import DataError, check_tokens
from mb_train.data.same import check_same_data, identity
from mb_train.data.sample import sample_corpus
from mb_train.folder.run_folder import checkpoints, find_checkpoint
from mb_train.logs.boards import Boards
from mb_train.logs.run_log import read_log
from mb_train.machine.rank_zero import on_rank_zero_first
from mb_train.train import loop
from mb_train.train.own_folder import only_writer

TINY = [
    "--recipe=quickstart", "--num-layers=1", "--hidden-size=16", "--ffn-hidden-size=16",
    "--seq-length=16", "--num-attention-heads=1", "--micro-batch-size=2", "--moe-num-experts=2",
    "--moe-top-k=1", "--lr-decay-iters=100", "--eval-iters=1", "--eval-interval=100",
    "--log-interval=1", "--num-workers=0", "--device=cpu", "--split=90,10,0",
    "--tokenizer=null:500",
]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text"
    tokens = np.random.default_rng(0).integers(0, 500, (40, 64), dtype=np.uint16)
    with mb_data.IndexedDatasetBuilder(path, dtype=np.uint16) as builder:
        for document in tokens:
            builder.add_document(document)
    return str(path)


@pytest.fixture
def run(tmp_path, data):
    folder = tmp_path / "run"

    def start(*words):
        return main([*TINY, "--data-path", data, "--save", str(folder), *map(str, words)])

    start.folder = folder
    return start


def go_on(folder, *words):
    return main(["--load", str(folder), "--device", "cpu", *map(str, words)])


def losses(folder):
    found = {}
    for event in read_log(folder / "log.jsonl"):
        if event["event"] == "train":
            last = event["iteration"]
            for back, loss in enumerate(reversed(event["lm_losses"])):
                found[last - back] = loss
    return found


def names(folder):
    return [path.name for path in checkpoints(folder)]


def test_a_ctrl_c_within_no_grad_leaves_gradients_to_the_next_run(run, monkeypatch):
    def interrupted(*_, **__):
        torch.set_grad_enabled(False)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(mb_train.train.run.Run, "__init__", interrupted)
        assert run("--train-iters", 1) == 130
    assert torch.is_grad_enabled()
    with torch.no_grad():
        assert run("--train-iters", 1) == 0
        assert not torch.is_grad_enabled()


def test_a_picture_that_cannot_be_drawn_fails_no_run(run, monkeypatch, capsys):
    def draw(folder):
        raise ValueError("'nonsense' is no backend,\nnor another")  # as of MPLBACKEND

    monkeypatch.setattr("mb_train.report.pictures.draw", draw)
    assert run("--train-iters", 1) == 0
    said = capsys.readouterr().out
    assert " picture              none: 'nonsense' is no backend, nor another\n" in said
    assert "go on with" in said


def test_data_that_is_not_there_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        # Before a model is built, which takes minutes.
        patch.setattr("mb_train.train.run.assemble", None)
        assert main([*TINY, "--data-path=a/b"]) == 2
    said = capsys.readouterr().err
    assert "Expected a/b.bin to be a file" in said
    assert f"found none in {tmp_path}. Give" in said
    (tmp_path / "runs").touch()
    assert main([*TINY[1:], "--lr=1", "--train-iters=1"]) == 2  # no recipe, which has a --save
    assert "Cannot write the sample corpus into runs/data: Not a dir" in capsys.readouterr().err


def test_titles_that_are_not_there_are_said_before_the_corpus_is_made(tmp_path, capsys):
    words = ["--recipe=ict-quickstart", "--titles-data-path=no", f"--save={tmp_path / 'run'}"]
    assert main([*words, "--num-layers=1", "--hidden-size=16", "--num-attention-heads=2"]) == 2
    assert "Expected no.bin to be a file (from --titles-data-path)" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("what", ["take_over", "device_name", "outcome"])
def test_boards_are_closed_where_setting_up_fails(run, monkeypatch, what):
    """They stayed open, and the next run of the process met them."""
    calls = []
    board = SimpleNamespace(
        name="a board", add=lambda *_: None, close=lambda: calls.append("closed")
    )

    def fail(*_):
        if "opened" in calls:
            raise OSError(28, "No space left on device")
        return "cpu"

    def opened(config, say):
        calls.append("opened")
        return Boards([board], config, say)

    monkeypatch.setattr(mb_train.train.run, "open_boards", opened)
    monkeypatch.setattr(mb_train.train.run, what, fail)
    if what == "outcome":
        monkeypatch.setattr(mb_train.train.run, "compile_step", lambda *_, **__: "kernels")
    assert run("--train-iters", 1) == 2
    assert calls == ["opened", "closed"]


def test_runs_at_once_without_a_folder_make_the_sample_corpus_once(tmp_path, monkeypatch):
    """Each wrote it under the others' hands, and all of them ended."""
    made = []

    def preprocess(text, output, **_):
        made.append(text.read_text())
        time.sleep(0.3)  # for the others to come here too
        for suffix in (".bin", ".idx"):
            Path(f"{output}_text_document{suffix}").touch()
        return SimpleNamespace(documents=1, tokens=1, seconds=0.3)

    monkeypatch.setattr(mb_data, "write_sample_corpus", lambda path, **_: path.write_text("text"))
    monkeypatch.setattr(mb_data, "preprocess", preprocess)
    task, said = SimpleNamespace(sentences=False), []
    tokenizer = SimpleNamespace(name="a b", fingerprint="a b")
    with ThreadPoolExecutor(3) as pool:
        runs = [
            pool.submit(sample_corpus, tokenizer, task, tmp_path / "data", said.append)
            for _ in range(3)
        ]
    prefix = f"{tmp_path}/data/sample-a-b_text_document"
    assert [run.result() for run in runs] == [prefix] * 3
    assert made == ["text"]
    assert said[2:] == [f"data: {prefix}.bin, made by an earlier run"] * 2


def test_a_signal_saves_and_the_run_goes_on_to_the_bit(run, monkeypatch, capsys):
    assert run("--train-iters", 5, "--save-interval", 100) == 0
    expected = losses(run.folder)
    step = loop.train_step

    def signalled(a_run, *arguments):
        if a_run.progress.iteration == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return step(a_run, *arguments)

    monkeypatch.setattr(loop, "train_step", signalled)
    assert run("--train-iters", 5, "--save-interval", 100) == 0
    assert "stopping at iteration 3: SIGINT" in capsys.readouterr().out
    monkeypatch.undo()
    assert names(run.folder) == ["iter_0000003"]
    assert go_on(run.folder, "--train-iters", 5) == 0
    assert losses(run.folder) == expected


def test_a_dead_reader_of_samples_saves_and_the_run_goes_on_to_the_bit(run, monkeypatch, capfd):
    words = ("--train-iters", 8, "--eval-iters", 0, "--num-workers", 1)
    assert run(*words) == 0
    expected = losses(run.folder)
    batches = mb_train.train.run.batches
    monkeypatch.setattr(
        mb_train.train.run, "batches", lambda *a, **k: batches(*a, **k | {"apart": True})
    )

    class Killed(mb_data.SampleReaders):
        def __call__(self, indices):
            if indices[0] >= 6:  # of the fourth step
                self._readers[0]._process.kill()
                self._readers[0]._process.wait()
            return super().__call__(indices)

    monkeypatch.setattr(mb_data, "SampleReaders", Killed)
    assert run(*words) == 1
    said = capfd.readouterr()
    assert re.search(r"stopping at iteration [2-4]: process \d+, .* ended by signal 9", said.out)
    assert "Traceback" not in said.err
    monkeypatch.undo()
    assert go_on(run.folder, "--train-iters", 8) == 0
    assert losses(run.folder) == expected


def test_a_signal_ends_an_evaluation(run, monkeypatch, capsys):
    evaluate = loop.evaluate

    def signalled(*arguments):
        os.kill(os.getpid(), signal.SIGUSR1)
        return evaluate(*arguments)

    monkeypatch.setattr(loop, "evaluate", signalled)
    words = ("--train-iters", 4, "--eval-interval", 2, "--eval-iters", 50, "--log-interval", 3)
    assert run(*words) == 0
    out = capsys.readouterr().out
    assert "left off after batch 1 of 50" in out
    assert "stopping at iteration 2: SIGUSR1" in out
    assert names(run.folder) == ["iter_0000002"]
    assert sorted(losses(run.folder)) == [1, 2]  # what goes on begins behind them


@pytest.mark.parametrize("interval", [2, 3, 1], ids=["within", "at the end", "before the end"])
def test_the_end_of_the_time_ends_an_evaluation(run, monkeypatch, capsys, interval):
    """A job that is killed a minute later has its last step in a checkpoint."""
    evaluate, at_end = loop.evaluate, interval != 2
    found = []

    def late(a_run, dataset, place, stop):
        if a_run.progress.iteration == 2 and not names(run.folder):
            stop.deadline = time.monotonic()
        found.append((place, evaluate(a_run, dataset, place, stop), names(run.folder)))
        return found[-1][1]

    monkeypatch.setattr(loop, "evaluate", late)
    words = ("--train-iters", 2 if at_end else 4, "--eval-interval", interval)
    assert run(*words, "--eval-iters", 5, "--exit-duration-in-mins", 60) == 0
    out = capsys.readouterr().out
    assert "left off after batch 1 of 5" in out
    assert at_end or "stopping at iteration 2: --exit-duration-in-mins 60" in out
    assert names(run.folder) == ["iter_0000002"]
    at_the_end = [(losses != {}, kept) for place, losses, kept in found if place == loop.END]
    broken_off, whole = (False, []), (True, ["iter_0000002"])
    assert at_the_end == ([broken_off, whole] if at_end else [])


def test_a_signal_while_the_picture_is_drawn_is_too_late_to_end_the_run(run, monkeypatch):
    def draw(folder):
        os.kill(os.getpid(), signal.SIGUSR1)
        return folder / "loss.png"

    came = []
    monkeypatch.setattr("mb_train.report.pictures.draw", draw)
    before = signal.signal(signal.SIGUSR1, lambda *_: came.append("not taken"))
    try:
        assert run("--train-iters", 1) == 0
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not came


def test_a_second_run_in_the_folder_is_refused_and_changes_nothing(run, capsys):
    from mb_train.folder.lock import locked

    assert run("--train-iters", 2) == 0
    before = sorted(p.name for p in run.folder.iterdir() if not p.name.startswith(".lock"))
    with locked(run.folder):
        assert run("--train-iters", 2) == 2
        assert go_on(run.folder) == 2
    error = capsys.readouterr().err
    assert error.count("to be free, but process") == 2
    after = sorted(p.name for p in run.folder.iterdir() if not p.name.startswith(".lock"))
    assert after == before


def test_going_back_keeps_what_came_after(run, capsys):
    assert run("--train-iters", 4, "--save-interval", 1) == 0
    first = losses(run.folder)
    assert go_on(run.folder / "iter_0000002", "--train-iters", 4, "--lr", "0.1") == 0
    assert "going back: the later checkpoints" in capsys.readouterr().out
    assert names(run.folder) == [f"iter_{i:07d}" for i in (1, 2, 3, 4)]
    assert losses(run.folder) != first
    branch = run.folder / "previous-1"
    assert names(branch) == ["iter_0000003", "iter_0000004"]
    assert losses(branch) == first
    assert go_on(branch, "--train-iters", 5) == 0
    assert losses(branch).items() > first.items()


def test_a_checkpoint_behind_a_link_is_its_runs(run, tmp_path):
    assert run("--train-iters", 2) == 0
    (run.folder / "iter_0000002").rename(tmp_path / "on-another-disk")
    (run.folder / "iter_0000002").symlink_to("../on-another-disk")
    assert go_on(run.folder, "--train-iters", 3) == 0
    assert names(run.folder) == ["iter_0000002", "iter_0000003"]
    assert losses(run.folder).keys() == {1, 2, 3}


def test_loading_from_elsewhere_sets_an_earlier_run_aside(run, tmp_path):
    assert run("--train-iters", 2) == 0
    other = tmp_path / "other"
    words = ["--load", str(run.folder), "--save", str(other), "--device", "cpu"]
    assert main([*words, "--train-iters", "3"]) == 0
    assert main([*words, "--train-iters", "4"]) == 0
    assert names(other) == ["iter_0000004"]
    assert names(other / "previous-1") == ["iter_0000003"]
    assert 3 in losses(other)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_full_disk_does_not_end_the_run(run, monkeypatch, capsys, asynchronous):
    from mb_train.checkpoint.writer import Writer

    write, calls = Writer.write_data, 0

    def full(*arguments):
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(28, "No space left on device")
        return write(*arguments)

    monkeypatch.setattr(Writer, "write_data", full)
    words = ["--async-save"] if asynchronous else []
    assert run("--train-iters", 3, "--save-interval", 1, *words) == 0
    out = capsys.readouterr().out
    assert "could not save iteration 2: OSError: [Errno 28] No space left" in out
    assert names(run.folder) == ["iter_0000001", "iter_0000003"]
    assert not list(run.folder.glob("*.partial"))


def test_a_folder_that_cannot_be_listed_does_not_end_the_run(run, monkeypatch, capsys):
    def lost(folder):
        raise OSError(5, "Input/output error", str(folder))

    with monkeypatch.context() as patch:
        patch.setattr("mb_train.checkpoint.saver.checkpoints", lost)
        assert run("--train-iters", 2, "--save-interval", 1, "--keep-checkpoints", 1) == 0
    assert names(run.folder) == ["iter_0000001", "iter_0000002"]
    assert go_on(run.folder, "--train-iters", 3) == 0
    assert names(run.folder) == ["iter_0000003"]  # what was too many has gone with the next


@pytest.mark.parametrize("full", [False, True], ids=["saved", "full"])
def test_an_error_beside_a_save_leaves_its_outcome_told(run, monkeypatch, capsys, full):
    from mb_train.checkpoint.writer import Writer

    train_step, write = loop.train_step, Writer.write_data

    def step(at, *arguments):
        if at.progress.iteration == 2:
            raise DataError("damaged")
        return train_step(at, *arguments)

    def late(*arguments):
        if full and "iter_0000002" in str(arguments[0].path):
            raise OSError(28, "No space left on device")
        return write(*arguments)

    monkeypatch.setattr(loop, "train_step", step)
    monkeypatch.setattr(Writer, "write_data", late)
    words = ["--save-interval", 1, "--async-save", "--keep-checkpoints", 1]
    assert run("--train-iters", 3, *words) == 2
    told = capsys.readouterr()
    assert "After iteration 2: damaged" in told.err
    out = "could not save iteration 2: OSError" if full else "saved checkpoint at iteration       2"
    assert out in told.out
    assert names(run.folder) == ["iter_0000001" if full else "iter_0000002"]
    assert not list(run.folder.glob("*.partial"))


def test_too_little_memory_for_a_copy_does_not_end_the_run(run, monkeypatch, capsys):
    saves, allocating = itertools.count(1), snapshot.allocating

    @contextlib.contextmanager
    def short():
        with allocating():
            if next(saves) == 2:
                torch.empty(2**60, dtype=torch.uint8)
            yield

    monkeypatch.setattr(snapshot, "allocating", short)
    assert run("--train-iters", 3, "--save-interval", 1, "--async-save") == 0
    out = capsys.readouterr().out
    assert re.search(r"could not save iteration 2: MemoryError: .*allocate", out)
    assert "The latest checkpoint is that of iteration 1." in out
    assert names(run.folder) == ["iter_0000001", "iter_0000003"]
    assert not list(run.folder.glob("*.partial"))


def test_a_run_whose_end_is_not_saved_says_so(run, monkeypatch, capsys):
    from mb_train.checkpoint.writer import Writer

    def full(*arguments):
        raise OSError(28, "No space left on device")

    assert run("--train-iters", 1) == 0
    monkeypatch.setattr(Writer, "write_data", full)
    room = shutil.disk_usage(run.folder)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: room)
    assert go_on(run.folder, "--train-iters", 2) == 1
    out = capsys.readouterr().out
    assert "could not save iteration 2: 1e-06 GB are free for 0.0" in out
    assert "No space left on device. The latest checkpoint is that of iteration 1." in out
    assert "iter_0000001, the latest there is: the end of the run could not be saved" in out


@pytest.fixture
def diverging(monkeypatch):
    """From the fourth step on the weights are not numbers."""
    step = loop.train_step

    def poisoned(a_run, *arguments):
        if a_run.progress.iteration == 3:
            with torch.no_grad():
                next(a_run.model.parts[0].parameters()).fill_(torch.nan)
        return step(a_run, *arguments)

    monkeypatch.setattr(loop, "train_step", poisoned)


def test_a_run_that_diverges_stops_and_keeps_its_last_good_checkpoint(run, diverging, capsys, data):
    words = ("--save-interval", 1, "--keep-checkpoints", 1, "--nan-limit", 2)
    assert run("--train-iters", 9, *words) == 1
    out = capsys.readouterr().out
    assert "the loss is not a number since iteration 4 (2 steps in a row)" in out
    assert f"of {data}.bin" in out
    assert "not saved: at iteration 4 the loss is not a number" in out
    assert find_checkpoint(run.folder) == run.folder / "iter_0000003"
    assert f"checkpoint           {run.folder / 'iter_0000003'}" in out
    assert max(losses(run.folder)) == 5
    assert main(["report", str(run.folder)]) == 0
    assert "not a number from iteration 4 on" in capsys.readouterr().out
    assert main(["generate", str(run.folder), "--max-new-tokens", "2", "--device", "cpu"]) == 0


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", ["--bf16", "--fp16 --min-loss-scale 4 --initial-loss-scale 64"])
def test_a_run_without_gradients_stops_and_keeps_its_checkpoints(
    run, monkeypatch, capsys, data, dtype
):
    """Each step was skipped, for ever. Those in search of a loss scale do not count."""
    step = loop.train_step

    def overflowing(a_run, *arguments):
        if a_run.progress.iteration == 2:
            next(a_run.model.parts[0].parameters()).register_hook(lambda grad: grad * torch.inf)
        return step(a_run, *arguments)

    monkeypatch.setattr(loop, "train_step", overflowing)
    words = ("--save-interval", 1, "--nan-limit", 3, "--log-interval", 10, *dtype.split())
    assert run("--train-iters", 30, *words) == 1
    out = capsys.readouterr().out
    # In fp16 one is forgiven, and four more halve the scale from 64 to 4.
    first = 3 if dtype == "--bf16" else 8
    assert f"no gradient norm is finite since iteration {first} (3 steps in a row)" in out
    assert f"of {data}.bin. The loss is finite and the weights did not change" in out
    assert find_checkpoint(run.folder) == run.folder / "iter_0000010"  # of the report
    monkeypatch.undo()
    assert go_on(run.folder, "--train-iters", 11, "--log-interval", 1) == 0
    trained = [event for event in read_log(run.folder / "log.jsonl") if event["event"] == "train"]
    assert (trained[-1]["iteration"], trained[-1]["skipped_iterations"]) == (11, 0)


@pytest.mark.parametrize("order", ["single", "cyclic"])
def test_the_documents_of_a_bad_batch_are_those_it_was_made_of(run, monkeypatch, capsys, order):
    """Though the batch grows, and though samples come in another order."""
    step, seen = loop.train_step, []

    def watched(a_run, stream, accumulator):
        size = a_run.batch_sizes.size(a_run.progress.consumed_samples)
        batches = list(itertools.islice(stream, size // 2))
        seen.append(torch.cat([batch["tokens_BS"] for batch in batches]).unique())
        if len(seen) == 3:
            with torch.no_grad():
                next(a_run.model.parts[0].parameters()).fill_(torch.nan)
        return step(a_run, iter(batches), accumulator)

    with mb_data.IndexedDatasetBuilder(run.folder.with_name("own"), dtype=np.uint16) as builder:
        for document in range(60):  # a token is its document's number
            builder.add_document(np.full(17, document, np.uint16))
    monkeypatch.setattr(loop, "train_step", watched)
    words = [word for word in TINY if "decay" not in word]
    words += ["--data-path", str(run.folder.with_name("own")), "--dataloader-type", order]
    words += ["--train-samples", "80", "--global-batch-size", "8", "--nan-limit", "2"]
    words += ["--save", str(run.folder), "--rampup-batch-size", "2", "2", "12"]
    assert main(words) == 1
    named = re.search(r"Documents of that batch: ([\d, ]+) of", capsys.readouterr().out)
    assert set(map(int, named[1].split(", "))) >= set(seen[2].tolist())
    assert len(named[1].split(", ")) <= 2 * len(seen[2])


def test_weights_that_give_no_loss_do_not_push_out_a_good_checkpoint(run, monkeypatch, capsys):
    step = loop.train_step

    def far_off(a_run, *arguments):  # finite, but their products are not
        if a_run.progress.iteration == 2:
            with torch.no_grad():
                for parameter in a_run.model.parts[0].parameters():
                    parameter.fill_(1e30)
        return step(a_run, *arguments)

    monkeypatch.setattr(loop, "train_step", far_off)
    words = ("--save-interval", 1, "--keep-checkpoints", 1, "--nan-limit", 0, "--log-interval", 4)
    assert run("--train-iters", 4, *words) == 1  # its end is not saved
    assert "not saved: at iteration 4 the loss is not a number" in capsys.readouterr().out
    assert names(run.folder) == ["iter_0000002"]


def test_tokens_of_another_vocabulary_are_refused(run, capsys):
    assert run("--train-iters", 2, "--tokenizer", "null:100") == 2
    error = capsys.readouterr().err
    assert "Expected tokens below 128, the model's vocabulary, got 4" in error
    assert "--tokenizer" in error
    assert not (run.folder / "log.jsonl").exists()  # found before the folder is touched


@pytest.mark.parametrize("token", [-7, 640])
def test_a_token_damaged_further_on_ends_a_run_in_a_line(run, tmp_path, capsys, token):
    with mb_data.IndexedDatasetBuilder(tmp_path / "bad", dtype=np.int32) as builder:
        for number in range(20):
            builder.add_document([token if number == 7 else 5] * 64)
    words = ("--data-path", tmp_path / "bad", "--split", "100,0,0", "--num-workers", 2)
    assert run("--train-iters", 40, "--save-interval", 1, *words) == 2
    said = capsys.readouterr().err
    done = int(find_checkpoint(run.folder).name[-7:])
    assert done > 4  # whose samples are looked at before the run begins
    assert f"After iteration {done}: Expected tokens below 512, the model's" in said
    assert f"got {token}: " in said
    named = re.search(r"Documents of that batch: ([\d, ]+) of .*bad\.bin", said)
    assert 7 in map(int, named[1].split(", "))


def test_other_data_of_the_same_size_is_refused(run, data, tmp_path, capsys):
    assert run("--train-iters", 2) == 0
    for name, shape in (("shuffled", (-1, 64)), ("joined", (-1, 128))):
        tokens = mb_data.IndexedDataset(data).tokens.reshape(shape)
        with mb_data.IndexedDatasetBuilder(tmp_path / name, dtype=np.uint16) as builder:
            for document in tokens[::-1] if name == "shuffled" else tokens:
                builder.add_document(document)
        assert go_on(run.folder, "--data-path", tmp_path / name, "--train-iters", 4) == 2
        assert "files of the same sizes that begin with other" in capsys.readouterr().err
    assert go_on(run.folder, "--train-iters", 3) == 0


def test_data_is_compared_by_what_was_saved_of_it():
    now = {
        "bin_bytes": [8], "begin_with": [1], "weights": [0.5, 0.5], "epochs": [2],
        "shuffled_epochs": [[1, 1]], "sentence_samples": [30], "cycle": None,
    }  # fmt: skip
    said = []
    check_same_data(now, now, said.append)
    assert said == []
    check_same_data(now | {"shuffled_epochs": [[2]]}, now, said.append)
    assert "shuffles [[1, 1]] passes through its data as one, not [[2]]" in said.pop()
    before = now | {"weights": [0.2, 0.8], "epochs": [3], "sentence_samples": [20]}
    check_same_data(before, now, said.append)
    assert "by weights of [0.2, 0.8] until now, by [0.5, 0.5] from here on" in said[0]
    assert "passes [2] times through its data, not [3]" in said[1]
    assert "shuffles [30] samples of its data, not [20]" in said[2]
    with pytest.raises(ValueError, match=r"began with, \[8\] bytes of \.bin, got \[9\]\. Give"):
        check_same_data(now, now | {"bin_bytes": [9]}, said.append)


def test_an_epoch_that_a_longer_run_shuffles_with_the_others_is_noticed(data):
    """Of as many epochs, where more than 80 % of the last are wanted: all come in another order."""
    indexed = mb_data.IndexedDataset(data)
    documents = range(10)
    tokens = int(indexed.sizes[:10].sum())

    def of_length(epochs):
        dataset = mb_data.GPTDataset(
            indexed, documents, seq_length=32, num_samples=int(epochs * tokens) // 32, seed=1
        )
        return dataset.shuffle_idx[:5].tolist(), identity(dataset, [Path(f"{data}.bin")], [])

    (order, shown), (same_order, same), (other_order, other) = map(of_length, (2.3, 2.6, 2.95))
    assert (same_order, same) == (order, shown)
    assert other_order != order
    said = []
    check_same_data(shown, other, said.append)
    assert "shuffles [[3]] passes through its data as one, not [[2, 1]]" in said[0]


@pytest.mark.parametrize(
    "words",
    [["--data-path", 0.3, "{}", 0.7, "{}"], ["--data-path", "{}", "--document-packing=best_fit"]],
    ids=["blend", "packed"],
)
def test_a_cycle_of_other_length_is_noticed(run, data, capsys, words):
    """Blends and whole documents packed have as many samples as are wanted, all in one cycle."""
    words = [str(word).format(data) for word in words]
    assert run("--train-iters", 40, "--exit-interval", 1, "--dataloader-type=cyclic", *words) == 0
    assert go_on(run.folder, "--exit-interval", 2) == 0
    assert "another order" not in capsys.readouterr().out
    assert go_on(run.folder, "--train-iters", 80, "--exit-interval", 3) == 0
    assert "samples in each cycle, not" in capsys.readouterr().out


@pytest.mark.parametrize("packed", [False, True])
def test_sentences_that_a_longer_run_shuffles_otherwise_are_noticed(tmp_path, packed):
    with mb_data.IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
        for document in range(12):
            builder.add_document(np.full(9, document), [3, 3, 3])
    indexed = mb_data.IndexedDataset(tmp_path / "x")
    words = Vocabulary(cls=20, sep=21, mask=22, pad=23, word_starts=np.ones(24, dtype=bool))

    def of_length(num_samples):
        dataset = mb_data.BertDataset(
            indexed, range(12), vocabulary=words, seq_length=12, num_samples=num_samples, seed=1
        )
        found = mb_data.PackedSamples(dataset, dataset.lengths(), rooms=[30], most=2)
        shown = identity(found if packed else dataset, [tmp_path / "x.bin"], [])
        return dataset.mapping.tolist(), shown

    (order, shown), (same_order, same), (other_order, other) = map(of_length, (5, 6, 100))
    assert (same_order, same) == (order, shown)
    assert other_order[: len(order)] != order
    assert other != shown


def test_setting_up_is_part_of_the_time_a_run_has(run, monkeypatch, capsys):
    """A job's time is not longer for an index that takes minutes to build."""
    begin = mb_train.train.run.Run.__init__

    def slowly(*arguments):
        time.sleep(0.6)
        begin(*arguments)

    monkeypatch.setattr(mb_train.train.run.Run, "__init__", slowly)
    assert run("--train-iters", 2, "--exit-duration-in-mins", 0.01) == 0
    assert "stopping at iteration 1: --exit-duration-in-mins 0.01" in capsys.readouterr().out


def _heard(rank, _, checkpoint):
    def make():
        raise KeyError("of a library's")

    with pytest.raises(RuntimeError if rank else KeyError) as unforeseen:
        on_rank_zero_first(make)
    with pytest.raises(ValueError, match="which is a checkpoint"), only_writer(checkpoint):
        pass
    return str(unforeseen.value)


def test_other_ranks_do_not_wait_for_what_fails_on_rank_zero(tmp_path):
    (tmp_path / "run.json").touch()
    first, second = run_ranks(_heard, 2, str(tmp_path), timeout_s=30)
    assert second == f"Rank 0 failed: KeyError: {first}"


def test_an_index_beyond_the_memory_is_one_line(run, monkeypatch, capsys):
    def too_large(*_):
        raise MemoryError("Unable to allocate 542. GiB for an array")

    monkeypatch.setattr("mb_data.samples.gpt.build_sample_idx", too_large)
    assert run("--train-iters", 2, "--seed", 31) == 2  # whose index is in no cache
    said = capsys.readouterr().err
    assert "mb-train: not enough memory: " in said
    assert "1 times these 36 documents, an order that does not fit into memory" in said


def test_a_gpu_without_enough_memory_is_one_line(run, monkeypatch, capsys):
    """What takes less is said, and the run can be continued from what it saved."""

    step = loop.train_step

    def too_large(run, *rest):
        if run.progress.iteration == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return step(run, *rest)

    monkeypatch.setattr(loop, "train_step", too_large)
    assert run("--train-iters", 4, "--save-interval", 1) == 2
    said = capsys.readouterr().err
    assert "mb-train: not enough memory: CUDA out of memory. Tried to allocate 20.00 GiB. " in said
    assert "Lower --micro-batch-size, " in said
    assert find_checkpoint(run.folder).name == "iter_0000002"


def test_report_and_generate_of_what_never_was_a_number(run, monkeypatch, diverging, capsys):
    """Weights that were damaged by hand."""
    from mb_train.checkpoint import saver

    monkeypatch.setattr(saver, "all_finite", lambda weights: True)
    monkeypatch.setattr(loop, "all_finite", lambda losses: True)
    assert run("--train-iters", 5, "--nan-limit", 0) == 0
    assert "nan" in capsys.readouterr().out.lower()
    assert main(["report", str(run.folder)]) == 0
    assert main(["generate", str(run.folder), "--device", "cpu"]) == 2
    assert "scores are not numbers" in capsys.readouterr().err


def test_a_log_torn_by_a_kill_is_no_obstacle(run, capsys):
    assert run("--train-iters", 2) == 0
    log = run.folder / "log.jsonl"
    log.write_bytes(log.read_bytes() + b'{"event": "tra')
    assert go_on(run.folder, "--train-iters", 3) == 0
    assert sorted(losses(run.folder)) == [1, 2, 3]
    assert b'{"event": "tra\n{"event": "start"' in log.read_bytes()
    capsys.readouterr()
    assert main(["report", str(run.folder)]) == 0
    assert "1 line was cut short by a kill" in capsys.readouterr().out


def test_a_damaged_checkpoint_offers_the_one_before(run, capsys):
    assert run("--train-iters", 2, "--save-interval", 1) == 0
    shard = run.folder / "iter_0000002" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[1000] ^= 4
    shard.write_bytes(content)
    assert go_on(run.folder, "--train-iters", 3) == 2
    error = capsys.readouterr().err
    assert f"{shard} is damaged" in error
    offered = error.split("--load ")[1].strip()
    assert offered == str(run.folder / "iter_0000001")
    assert go_on(offered, "--train-iters", 3) == 0


def test_an_unknown_key_in_run_json_is_one_line(run, capsys):
    assert run("--train-iters", 1) == 0
    file = run.folder / "iter_0000001" / "run.json"
    content = json.loads(file.read_text())
    content["config"]["wings"] = 2
    file.write_text(json.dumps(content))
    assert main(["generate", str(run.folder)]) == 2
    assert f"{file} is damaged: it is not what was written." in capsys.readouterr().err
    (file.parent / "SHA256SUMS").unlink()
    for command in (["--load", str(run.folder)], ["generate", str(run.folder)]):
        assert main(command) == 2
        assert "'wings'" in capsys.readouterr().err


def test_a_micro_batch_without_a_masked_token_is_not_damaged():
    none, some = np.full((1, 4), -1), np.array([[7, -1, -1, -1]])
    for labels in (none, some):
        check_tokens({"labels_BM": labels, "tokens_BS": abs(labels)}, 8)
    # Of the first token alone, and beside what are no tokens.
    check_tokens({"tokens_BS": 0 * none, "positions_BS": 99 * some}, 8)
    for wrong in ({"labels_BM": some - 1}, {"labels_BM": some + 1}, {"tokens_BS": none}):
        with pytest.raises(DataError, match="Expected tokens below 8"):
            check_tokens(wrong, 8)
