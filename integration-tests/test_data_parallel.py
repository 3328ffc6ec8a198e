"""Two ranks take the steps of one process; checkpoints cross over; `torchrun` starts them."""

import base64
import contextlib
import gc
import io
import os
import shutil
import signal
import socket
import threading
from pathlib import Path
from unittest import mock

import pytest
import tiny_run
import torch
import torch.distributed as dist
from mb_parallel.testing import run_ranks
from test_parallel import LATENT, MAMBA, SINKS, STATES


def _main(rank: int, world_size: int, arguments: list[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `mb-train` on one of several ranks; it leaves no thread."""
    out, err, before = io.StringIO(), io.StringIO(), threading.enumerate()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = tiny_run.train(arguments)
    assert threading.enumerate() == before
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def one_process(tokens, tmp_path_factory) -> Path:
    """The run on one process: two micro-batches per step."""
    run = tmp_path_factory.mktemp("one") / "run"
    assert tiny_run.train(tiny_run.flags(tokens, run, "--save-interval 4")) == 0
    return run


def test_two_ranks_take_the_same_steps_and_one_process_goes_on(one_process, tokens, tmp_path):
    two = tmp_path / "two"
    arguments = tiny_run.flags(tokens, two, "--exit-interval 4 --zero-stage 3", "--async-save")
    (code, out, _), (other_code, silence, _) = run_ranks(_main, 2, arguments)
    assert (code, other_code, silence) == (0, 0, "")
    assert out.count(" validation loss at") == 1
    expected = tiny_run.losses(one_process)
    assert tiny_run.losses(two) == pytest.approx(expected[:4], rel=1e-5)
    assert tiny_run.train(["--load", str(two)]) == 0
    assert tiny_run.losses(two) == pytest.approx(expected, rel=1e-5)


def _one_after_the_other(rank: int, world_size: int, *lines: list[str]) -> list[int]:
    return [_main(rank, world_size, arguments)[0] for arguments in lines]


@pytest.mark.slow
def test_two_ranks_in_bf16_stay_close_to_one_and_go_on_as_they_would_have(tokens, tmp_path):
    one, two, parts = tmp_path / "one", tmp_path / "two", tmp_path / "parts"
    assert tiny_run.train(tiny_run.flags(tokens, one, "--bf16")) == 0
    spread = "--bf16 --expert-model-parallel-size 2"
    lines = (
        tiny_run.flags(tokens, two, spread),
        tiny_run.flags(tokens, parts, spread, "--exit-interval 4"),
        ["--load", str(parts)],
    )
    assert run_ranks(_one_after_the_other, 2, *lines) == [[0, 0, 0]] * 2
    assert tiny_run.losses(two) == pytest.approx(tiny_run.losses(one), rel=2e-3)
    assert tiny_run.losses(parts) == tiny_run.losses(two)


def test_in_bf16_shared_out_weights_train_as_whole_ones(tokens, tmp_path):
    """What computes in fp32 has shards of its own, which are gone behind its forward."""
    kinds = {"latents": LATENT, "states": STATES, "mamba": MAMBA, "sinks": SINKS}
    lines = [
        tiny_run.flags(
            tokens, tmp_path / f"{kind}-{stage}",
            f"{more} --bf16 --zero-stage {stage} --train-iters 2 --log-interval 1 --eval-iters 0",
        )
        for kind, more in kinds.items()
        for stage in (1, 3)
    ]  # fmt: skip
    assert run_ranks(_one_after_the_other, 2, *lines) == [[0] * len(lines)] * 2
    for kind in kinds:
        whole, shared = (tiny_run.losses(tmp_path / f"{kind}-{stage}") for stage in (1, 3))
        assert len(whole) == 2
        assert shared == whole


def test_torchrun_goes_on_from_one_process(one_process, tmp_path):
    run = tmp_path / "run"
    tiny_run.torchrun(["--load", str(one_process / "iter_0000004"), "--save", str(run)])
    assert tiny_run.losses(run) == pytest.approx(tiny_run.losses(one_process)[4:], rel=1e-5)


def test_a_run_with_no_word_about_batches_trains_on_two_ranks_and_goes_on_on_one(
    tokens, tmp_path, capsys
):
    run = tmp_path / "run"
    short = f"--data-path {tokens} --save {run} --train-iters 2 --eval-iters 0 --device cpu"
    short += " --num-layers 1 --hidden-size 32 --ffn-hidden-size 32"
    words = ["--recipe", "quickstart", *short.split()]
    for code, _, err in run_ranks(_main, 2, words):
        assert code == 0, err
    assert tiny_run.train(["--load", str(run), "--train-iters", "3"]) == 0
    # Two ranks made 16 of the recipe's micro-batch of 8; one process makes two passes of it.
    assert [event["consumed_samples"] for event in tiny_run.events(run, "train")] == [32, 48]
    # Where it does not divide, the way out is named.
    capsys.readouterr()
    too_large = ["--load", str(run), "--micro-batch-size", "32", "--train-iters", "4"]
    assert tiny_run.train(too_large) == 2
    assert "Lower --micro-batch-size" in capsys.readouterr().err


def _mains(rank: int, world_size: int, *lines: list[str]) -> list[tuple[int, str, str]]:
    """Of each line; then of the last one's with another program, and environment, on each rank."""
    mine = [[word.format(rank=rank) for word in arguments] for arguments in lines]
    said = [_main(rank, world_size, arguments) for arguments in mine]
    of_rank = {"torch": "2.13", "mb-train": f"0.1.{rank}"}
    with mock.patch("mb_train.train.run.versions", return_value=of_rank):
        said.append(_main(rank, world_size, mine[-1]))
    with mock.patch.dict(os.environ, {"NVIDIA_TF32_OVERRIDE": "0"} if rank else {}):
        return [*said, _main(rank, world_size, mine[-1])]


def test_wrong_input_ends_all_ranks(tokens, tmp_path):
    run = tmp_path / "run"
    truncated = tiny_run.write_tokens(tmp_path)
    Path(truncated + ".bin").write_bytes(b"")
    batch = tiny_run.flags(tokens, run, "--global-batch-size 2")
    other = tiny_run.flags(tokens, run, "--seed 1{rank}")
    heads = "--num-attention-heads 3 --kv-channels 16"
    world = tiny_run.flags(tokens, run, f"--tensor-model-parallel-size 3 {heads}")
    lines = (batch, tiny_run.flags(truncated, run), other, world)
    for said in run_ranks(_mains, 2, *lines):
        assert [code for code, *_ in said] == [2] * 6
        by_batch, by_data, by_seed, by_world, by_program, by_environment = said
        assert "got rank 0: none of these rank 1: NVIDIA_TF32_OVERRIDE = '0'" in by_environment[2]
        assert "equal on all 2 ranks, got rank 0: seed = 10 rank 1: seed = 11" in by_seed[2]
        assert "got 1 * 3 * 1 = 3 on 2 ranks" in by_world[2]
        assert (
            "the program to be equal on all 2 ranks, got rank 0: mb-train = '0.1.0' rank 1: "
            in (by_program[2])
        )
        assert "micro batch x data-parallel ranks = 2 x 2 = 4, got 2" in by_batch[2]
        assert "walks.bin" in by_data[2]
    assert not run.exists()


def _leaves(rank: int, world_size: int, *lines: list[str]) -> list[tuple[int, int, int]]:
    """Of each line its exit code, and how many threads and open files there are behind it."""
    found = []
    for arguments in lines:
        with mock.patch.object(tiny_run, "collect", gc.collect):
            code = _main(rank, world_size, arguments)[0]
        found.append((code, *(len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd"))))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="has no /proc")
@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="keeps meshes itself")
def test_a_run_leaves_nothing_of_its_groups_to_the_next(tokens, tmp_path):
    one, two, bad = (
        tiny_run.flags(tokens, tmp_path / name, "--train-iters 1 --eval-iters 0", *more)
        for name, *more in (
            ("one", "--lr-warmup-iters 0 --async-save", "--tensor-model-parallel-size 2"),
            ("two", "--lr-warmup-iters 0 --zero-stage 3"),
            ("bad", "--lr-warmup-iters 9"),
        )
    )
    first, (code, *_), *later = run_ranks(_leaves, 2, one, bad, two, one)[0]
    assert code == 2
    assert later == [first, first]  # with an error goes what holds it, and so at the next end


def _without_room(rank: int, world_size: int, arguments: list[str]) -> tuple[int, str]:
    full = OSError(28, "No space left on device", "config.toml")
    with mock.patch("mb_train.train.run.take_over", side_effect=full):
        code, _, err = _main(rank, world_size, arguments)
    return code, err


def test_a_folder_that_rank_zero_cannot_begin_ends_all_ranks(tokens, tmp_path):
    """The others waited for it where the group of the writing threads is made."""
    arguments = tiny_run.flags(tokens, tmp_path / "run", "--async-save")
    ended = run_ranks(_without_room, 2, arguments, timeout_s=30.0)
    who = [f"mb-train, rank {rank} on {socket.gethostname()}" for rank in range(2)]
    assert ended == [(2, f"{one}: config.toml: No space left on device\n") for one in who]


def _in_its_own_folder(rank: int, world_size: int, nodes: Path, *lines: list[str]) -> list[str]:
    """What each line ends with on stderr, if it ends as wrong input does."""
    os.chdir(nodes / f"{rank}")
    said = []
    for arguments in lines:
        code, _, err = _main(rank, world_size, arguments)
        assert code == 2, err
        said.append(err)
    return said


def test_what_differs_between_nodes_ends_all_ranks(tmp_path):
    """Folders of one name that the nodes do not share: a run trained on whatever was in them."""
    for node in range(2):
        here = tmp_path / f"{node}"
        here.mkdir()
        tiny_run.write_tokens(here)
        more = "--save-interval 4"
        assert tiny_run.train(tiny_run.flags(str(here / "walks"), here / "run", more)) == 0
        words = [base64.b64encode(bytes([byte ^ node])).decode() for byte in range(256)]
        lines = (f"{word} {rank}\n" for rank, word in enumerate(words))
        (here / "qwen.tiktoken").write_text("".join(lines))
    with open(tmp_path / "1" / "walks.bin", "r+b") as tokens:
        tokens.write(bytes([29, 0]))
    for node, iteration in enumerate(("8", "4")):  # the end of a run, and its middle
        half = shutil.copytree(tmp_path / "0" / "run", tmp_path / f"{node}" / "half")
        (half / "latest_checkpointed_iteration.txt").write_text(iteration)
    flags = tiny_run.flags("walks")
    lines = (
        [*flags, "--tokenizer", "qwen.tiktoken"],
        flags,
        [*flags, "--save", "not/there"],
        ["--load", "run", "--data-path", "walks", "--save-interval", "0"],
        ["--load", "half", "--train-iters", "8"],
        [*tiny_run.flags("mine"), "--tokenizer", "qwen.tiktoken"],
        tiny_run.flags("cut"),
    )
    for kind in ("bin", "idx"):
        shutil.copy(tmp_path / "0" / f"walks.{kind}", tmp_path / "0" / f"mine.{kind}")
        for node in ("0", "1"):
            shutil.copy(tmp_path / "0" / f"walks.{kind}", tmp_path / node / f"cut.{kind}")
    os.truncate(tmp_path / "1" / "cut.idx", 100)
    said = run_ranks(_in_its_own_folder, 2, tmp_path, *lines, timeout_s=30.0)
    for *_, lost, cut in said:
        assert "Expected mine.bin to be a file" in lost
        assert "cut.idx: 100 bytes, but " in cut
    assert all("Rank 1 of 2 cannot go on, and all end with it: " in one for one in said[0][-2:])
    for model, data, folder, start, half, *_ in said:
        assert "Expected the model to be equal on all 2 ranks, got rank 0: tokenizer = " in model
        assert "Expected the data to be equal on all 2 ranks, got rank 0: begin_with = " in data
        assert "Expected --save not/there to be one folder for all ranks, got another" in folder
        assert "on rank 1 than on rank 0." in folder
        assert "go on from to be equal on all 2 ranks, got rank 0: written = " in start
        assert "rank 0: checkpoint = 'half/iter_0000008', ended = True, written = " in half
    assert not list(tmp_path.glob("*/not/*"))


def _alone_in_its_trouble(rank: int, world_size: int, port: int, *lines: list[str]) -> list[str]:
    """What each line ends with on stderr, under a launcher; `{rank}` in it is the rank's."""
    dist.barrier()
    dist.destroy_process_group()
    launchers = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    os.environ |= launchers | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    said, told = [], []
    for arguments in lines:
        with mock.patch("atexit.register", lambda tell, *reason: told.append((tell, reason))):
            code, _, err = _main(rank, world_size, [word.format(rank=rank) for word in arguments])
        assert code == 2, err
        said.append(err)
        for tell, reason in told:
            tell(*reason)
        told.clear()
    store = dist.PrefixStore("the end", dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    return said


def test_what_one_rank_alone_cannot_read_ends_all_with_its_name(one_process, tmp_path):
    """The others waited until the timeout for one that had not found what they had."""
    (tmp_path / "run0").symlink_to(one_process)
    (tmp_path / "0.toml").touch()
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    lines = (
        ["--load", f"{tmp_path}/run{{rank}}", "--device", "cpu"],
        ["--config", f"{tmp_path}/{{rank}}.toml", "--recipe", "quickstart", "--device", "cpu"],
    )
    others, own = run_ranks(_alone_in_its_trouble, 2, server.port, *lines, timeout_s=60.0)
    said = ("Expected a checkpoint in ", "Cannot read --config ")
    for theirs, mine, what in zip(others, own, said, strict=True):
        assert f"Rank 1 of 2 could not begin, and all end with it: {what}" in theirs
        assert "could not begin" not in mine


def _dies(rank: int, world_size: int, arguments: list[str]) -> None:
    from mb_train.train import loop

    step = loop.train_step

    def train_step(run, *rest):
        if rank == 1 and run.progress.iteration == 2:
            os._exit(0)
        return step(run, *rest)

    loop.train_step = train_step
    tiny_run.train(arguments)


def test_a_rank_that_dies_ends_the_others_with_a_word_of_it(tokens, tmp_path):
    said = r"(?s)rank 0 of 2 failed.*was in iteration 3\.\s+This is rank 0 of 2\. If another rank"
    with pytest.raises(RuntimeError, match=said):
        run_ranks(_dies, 2, tiny_run.flags(tokens, tmp_path / "run"))


def _is_told_to_stop(rank: int, world_size: int, arguments: list[str]) -> tuple[int, str, str]:
    from mb_train.train import loop

    step = loop.train_step

    def train_step(run, *rest):
        if rank == 1 and run.progress.iteration == 3:
            os.kill(os.getpid(), signal.SIGUSR1)
        return step(run, *rest)

    loop.train_step = train_step
    return _main(rank, world_size, arguments)


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="Windows has none")
def test_a_signal_to_one_rank_has_all_save_the_same_step(tokens, tmp_path):
    """While a checkpoint is on its way to the disk, too."""
    run = tmp_path / "run"
    more = "--pipeline-model-parallel-size 2 --async-save --save-interval 3"
    first, second = run_ranks(_is_told_to_stop, 2, tiny_run.flags(tokens, run, more))
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert "stopping at iteration 4: a signal to another rank" in first[1]
    assert sorted(path.name for path in run.glob("iter_*")) == ["iter_0000003", "iter_0000004"]
    assert tiny_run.train(["--load", str(run), "--pipeline-model-parallel-size", "1"]) == 0
    assert len(tiny_run.losses(run)) == 8


@pytest.mark.gpu
def test_gpus_take_the_steps_of_one_eager_gpu(tokens, tmp_path):
    import torch

    # The compiler draws dropout's masks in its own way: other ones than uncompiled code.
    still = "--device cuda --no-bf16 --attention-dropout 0 --hidden-dropout 0"
    losses = {}
    for ranks in range(1, 1 + min(torch.cuda.device_count(), 2)):
        for more in ("", "--compile"):
            run = tmp_path / f"{ranks}{more}"
            tiny_run.torchrun(tiny_run.flags(tokens, run, still, more), ranks)
            losses[f"{ranks} {more}"] = tiny_run.losses(run)
    eager = losses.pop("1 ")
    differ = {name: got for name, got in losses.items() if got != pytest.approx(eager, rel=1e-4)}
    assert not differ, (eager, differ)
