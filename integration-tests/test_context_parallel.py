"""Runs whose ranks share sequences: started by `torchrun`, stopped, continued on other ranks, used.

That every layout takes the steps of one process is `test_parallel.py`'s part.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_run
import torch
from mb_parallel.testing import run_ranks
from mb_train.cli import main
from test_resume_bitwise import DROPOUT, _same

CP = "--context-parallel-size"
# Parts of a sequence drop other numbers than the whole.
SAME = "--num-attention-heads 4 --attention-dropout 0 --hidden-dropout 0"
GPU_DOCUMENTS = (
    "--device cuda --bf16 --no-compile --attention-dropout 0 --hidden-dropout 0 --seq-length 512 "
    "--hidden-size 128 --tokenizer null:29 --reset-attention-mask --reset-position-ids "
    "--eod-mask-loss --group-query-attention --num-query-groups 1 --num-attention-heads 4"
)


STATES = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
    "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 32 "
    "--linear-value-head-dim 32"
)


@pytest.fixture(scope="module")
def one_process(tokens, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("one") / "run"
    assert tiny_run.train(tiny_run.flags(tokens, run, SAME)) == 0
    return run


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_ranks_share_sequences(one_process, tokens, tmp_path, ranks):
    run = tmp_path / "run"
    line = tiny_run.flags(tokens, run, SAME, f"{CP} {ranks}")
    if ranks == 2:
        tiny_run.torchrun(line, ranks)  # whose every process imports torch anew: not for four
    else:
        assert run_ranks(tiny_run.on_a_rank, ranks, [line])[0][0] == [""]
    assert tiny_run.losses(run) == pytest.approx(tiny_run.losses(one_process), rel=1e-5)
    got, wanted = ([e["lm_loss"] for e in tiny_run.events(r, "eval")] for r in (run, one_process))
    assert got == pytest.approx(wanted, rel=1e-5)
    # A group's samples and tokens are counted once.
    for name in ("consumed_samples", "tokens_per_expert"):
        assert [e[name] for e in tiny_run.events(run, "train")] == [
            e[name] for e in tiny_run.events(one_process, "train")
        ]


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks_for_a_sequence(one_process, tokens, tmp_path):
    """Two, one, two, and four of which each pair shares sequences."""
    run = tmp_path / "run"
    begin = tiny_run.flags(tokens, run, SAME, f"{CP} 2 --exit-interval 2")
    go_on = ["--load", str(run)]
    (failed, out), (_, silence) = run_ranks(tiny_run.on_a_rank, 2, [begin])
    assert (failed, silence) == ([""], "")
    assert "world size: 2, data-parallel-size: 1, context-parallel-size: 2, tensor-mod" in out
    assert tiny_run.train([*go_on, CP, "1", "--exit-interval", "4"]) == 0
    six = [*go_on, CP, "2", "--exit-interval", "6", "--zero-stage", "3"]
    assert run_ranks(tiny_run.on_a_rank, 2, [six])[0][0] == [""]
    last = [*go_on, "--micro-batch-size", "1", "--data-parallel-replicas", "2"]
    assert run_ranks(tiny_run.on_a_rank, 4, [last])[0][0] == [""]
    assert tiny_run.losses(run) == pytest.approx(tiny_run.losses(one_process), rel=2e-5)


@pytest.mark.slow
def test_a_stop_changes_nothing_to_the_bit(tokens, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    more = f"{CP} 2 {DROPOUT} --expert-model-parallel-size 2 --moe-dispatcher all_to_all"
    lines = [
        tiny_run.flags(tokens, whole, more),
        tiny_run.flags(tokens, parts, more, "--exit-interval 3"),
        ["--load", str(parts)],
    ]
    assert run_ranks(tiny_run.on_a_rank, 2, lines)[0][0] == ["", "", ""]
    assert tiny_run.losses(parts) == tiny_run.losses(whole)
    assert _same(whole, parts, 8)


def test_parts_of_a_sequence_drop_other_numbers(tokens, tmp_path):
    run = tmp_path / "run"
    line = tiny_run.flags(tokens, run, f"{CP} 2 {DROPOUT}", moe=False)
    first, second = drawn = run_ranks(_drawn, 2, line)
    assert run_ranks(_drawn, 2, line) == drawn
    assert len(first) > 8
    assert all(a != b for a, b in zip(first, second, strict=True))


def _drawn(rank: int, world_size: int, arguments: list[str]) -> list[float]:
    """A number for each mask of the run, of its places."""
    seen: list[float] = []

    def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], y: torch.Tensor) -> None:
        if isinstance(module, torch.nn.Dropout) and module.training:
            seen.append(float((y != 0).double().flatten() @ torch.arange(y.numel()).double()))

    with torch.nn.modules.module.register_module_forward_hook(hook):
        assert tiny_run.on_a_rank(rank, world_size, [arguments])[0] == [""]
    return seen


@pytest.mark.slow
def test_batches_grow_by_whole_sequences(tokens, tmp_path):
    grow = "--train-samples 24 --rampup-batch-size 2 2 8 --lr-decay-samples 24 --lr-warmup-samples"
    more = f"{SAME} {grow} 4 --micro-batch-size 1"
    drop = ("--train-iters", "--lr-decay-iters", "--lr-warmup-iters")

    def flags(run: Path, *also: str) -> list[str]:
        words = tiny_run.flags(tokens, run, more, *also)
        for name in drop:
            at = words.index(name)
            del words[at : at + 2]
        return words

    one, four = tmp_path / "one", tmp_path / "four"
    assert tiny_run.train(flags(one)) == 0
    assert run_ranks(tiny_run.on_a_rank, 4, [flags(four, f"{CP} 2")])[0][0] == [""]
    assert tiny_run.losses(four) == pytest.approx(tiny_run.losses(one), rel=1e-5)
    assert tiny_run.events(four, "train")[-1]["consumed_samples"] == 24


def test_what_is_trained_so_is_used_like_any_other_model(tokens, tmp_path, capsys):
    run = tmp_path / "run"
    begin = tiny_run.flags(tokens, run, f"{CP} 2 --train-iters 2", moe=False)
    assert run_ranks(tiny_run.on_a_rank, 2, [begin])[0][0] == [""]
    text = tmp_path / "text.txt"
    text.write_text(" ".join(map(str, range(40))))
    capsys.readouterr()
    assert main(["eval", str(run), str(text), "--device", "cpu"]) == 0
    assert "ppl" in capsys.readouterr().out
    prompt = ["--prompt", "1 2 3", "--max-new-tokens", "2", "--device", "cpu"]
    assert main(["generate", str(run), *prompt]) == 0


def test_what_cannot_be_shared_is_refused_on_all_ranks(tokens, tmp_path):
    run = tmp_path / "run"
    lines = [
        tiny_run.flags(tokens, run, f"{CP} 2 --seq-length 15"),
        tiny_run.flags(tokens, run, f"{CP} 4"),
        tiny_run.flags(tokens, run, f"{CP} 4 {SAME}"),
    ]
    for said, _ in run_ranks(tiny_run.on_a_rank, 2, lines):
        for text, words in zip(
            said,
            (
                "Expected --seq-length to be a multiple of --context-parallel-size, got 15 and 2.",
                "Expected --num-attention-heads to be a multiple of --context-parallel-size 4, for",
                "Expected --context-parallel-size to divide the 2 data-parallel ranks",
            ),
            strict=True,
        ):
            assert words in text
    assert not run.exists()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("more", ["", "--zero-stage 3 --compile", "--expert-model-parallel-size 2"])
@pytest.mark.parametrize("model", ["", STATES], ids=["attention", "states"])
def test_documents_over_two_gpus_are_those_of_one(tokens, tmp_path, model, more):
    """Flash attention within documents, whose key-value head is repeated for both."""
    one, two = tmp_path / "one", tmp_path / "two"
    tiny_run.torchrun(tiny_run.flags(tokens, one, GPU_DOCUMENTS, model), 1)
    tiny_run.torchrun(tiny_run.flags(tokens, two, GPU_DOCUMENTS, model, f"{CP} 2 {more}"), 2)
    assert tiny_run.losses(two) == pytest.approx(tiny_run.losses(one), rel=5e-3)
