"""Training on conversations over several ranks: losses and answers are those of one process."""

from __future__ import annotations

import sys
from pathlib import Path

import mb_data
import pytest
import tiny_run
from mb_parallel.testing import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages" / "mb-data" / "tests"))
from chat_helpers import chat_folder, chats

# As many rows for the vocabulary as one process has.
TENSORS = "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 128"
# Conversations of many lengths: ranks and micro-batches have unequal numbers of learned tokens.
PAIRS = [[("user", "a" * (3 * n % 17 + 1)), ("assistant", "b" * (n % 7 + 1))] for n in range(40)]


@pytest.fixture(scope="module")
def conversations(tmp_path_factory) -> tuple[str, str]:
    """Prefix and tokenizer."""
    folder = tmp_path_factory.mktemp("chats")
    model = chat_folder(folder / "model")
    source = chats(folder / "in.jsonl", *PAIRS)
    return mb_data.preprocess_chats(source, folder / "out", tokenizer=model).output, str(model)


def words(conversations: tuple[str, str], run: Path, *more: str) -> list[str]:
    prefix, tokenizer = conversations
    flags = (
        "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 64 --lr 1e-2 "
        "--micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr-warmup-iters 0 "
        "--log-interval 1 --eval-interval 4 --eval-iters 1 --split 80,20,0 --device cpu --sft "
        "--attention-dropout 0 --hidden-dropout 0 --moe-num-experts 4 --moe-top-k 2 --swiglu "
        "--make-vocab-size-divisible-by 256"
    )
    more = (*flags.split(), *(word for words in more for word in words.split()))
    return [*more, "--tokenizer", tokenizer, "--data-path", prefix, "--save", str(run)]


@pytest.fixture(scope="module")
def one_process(conversations, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("one") / "run"
    assert tiny_run.train(words(conversations, run)) == 0
    return run


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, "--zero-stage 3"),
        pytest.param(2, "--context-parallel-size 2", marks=pytest.mark.slow),
        (2, f"{TENSORS} --sequence-parallel"),
        pytest.param(2, "--pipeline-model-parallel-size 2", marks=pytest.mark.slow),
        (4, "--pipeline-model-parallel-size 2 --context-parallel-size 2"),
        (4, "--expert-model-parallel-size 4 --moe-dispatcher all_to_all"),
    ],
    ids=["zero 3", "cp", "tp", "pp", "pp and cp", "ep"],
)
def test_every_layout_learns_the_same(conversations, one_process, tmp_path, ranks, layout):
    run = tmp_path / "run"
    assert run_ranks(tiny_run.on_a_rank, ranks, [words(conversations, run, layout)])[0][0] == [""]
    assert tiny_run.losses(run) == pytest.approx(tiny_run.losses(one_process), rel=2e-5)
    got, wanted = ([e["lm_loss"] for e in tiny_run.events(r, "eval")] for r in (run, one_process))
    assert got == pytest.approx(wanted, rel=2e-5)
