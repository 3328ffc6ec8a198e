"""Choosing tokens, and text from a trained run."""

from collections import Counter

import pytest
import torch
from mb_train.cli import main
from mb_train.config import TrainConfig
from mb_train.generate import Sampling, choose, continue_tokens
from mb_train.models.gpt import GPT
from mb_train.tasks.architecture import transformer_config

SCORES = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15]).log()


def drawn(sampling, times=400):
    generator = torch.Generator().manual_seed(1)
    return Counter(choose(SCORES, sampling, generator) for _ in range(times))


@pytest.mark.parametrize(
    ("sampling", "possible"),
    [
        (Sampling(temperature=0), {1}),
        (Sampling(top_k=1), {1}),
        (Sampling(top_k=2), {1, 3}),
        (Sampling(top_p=0.39), {1}),
        (Sampling(top_p=0.41), {1, 3}),
        (Sampling(top_p=0.75), {1, 3, 4}),
        (Sampling(top_k=3, top_p=0.8), {1, 3}),
        (Sampling(), {0, 1, 2, 3, 4}),
    ],
    ids=repr,
)
def test_only_the_kept_tokens_are_drawn(sampling, possible):
    assert set(drawn(sampling)) == possible


def test_draws_follow_the_probabilities():
    counts = drawn(Sampling(top_k=2), times=7000)
    assert counts[1] / 7000 == pytest.approx(4 / 7, abs=0.02)
    cold = drawn(Sampling(top_k=2, temperature=0.5), times=7000)
    assert cold[1] / 7000 == pytest.approx(16 / 25, abs=0.02)


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}], ids=repr
)
def test_wrong_sampling_is_refused(wrong):
    with pytest.raises(ValueError, match="Expected"):
        Sampling(**wrong)


def test_greedy_tokens_are_the_likeliest_and_padding_is_never_chosen():
    torch.manual_seed(0)
    config = TrainConfig(
        num_layers=1, hidden_size=16, num_attention_heads=1, seq_length=4, micro_batch_size=1,
        train_iters=1, lr=1.0, moe_num_experts=2,
    )  # fmt: skip
    model = GPT(transformer_config(config, 32))
    with torch.no_grad():
        model.embedding.tokens.weight[20:] *= 100  # the padded rows would win
    stream = continue_tokens(model, [3, 1], Sampling(temperature=0), vocab_size=20, context=4)
    tokens = [3, 1]
    for token, _ in zip(stream, range(6), strict=False):
        logits = model.logits(torch.tensor([tokens[-4:]]))[0, -1, :20]
        assert token == logits.argmax()
        tokens.append(token)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps on the sample corpus."""
    folder = tmp_path_factory.mktemp("generate") / "run"
    arguments = "--train-iters 2 --eval-iters 0 --hidden-size 32 --ffn-hidden-size 32 --device cpu"
    assert main(["--recipe", "quickstart", "--save", str(folder), *arguments.split()]) == 0
    return folder


def test_text_from_a_run(run, capsys):
    words = ["generate", str(run), "--prompt", "def f(", "--max-new-tokens", "5", "--device", "cpu"]
    capsys.readouterr()
    assert main([*words, "--top-k", "5", "--seed", "3"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("def f(")
    assert len(first) > len("def f(")
    assert main([*words, "--top-k", "5", "--seed", "3"]) == 0
    assert capsys.readouterr().out == first


def test_wrong_input_is_one_line(run, tmp_path, capsys):
    capsys.readouterr()
    for words, says in (
        ([str(tmp_path)], "Expected a checkpoint in"),
        ([str(run), "--top-p", "2"], "Expected top-p in (0, 1], got 2.0"),
        ([str(run), "--tpo-k", "2"], "Unrecognized arguments: --tpo-k"),
    ):
        assert main(["generate", *words]) == 2
        error = capsys.readouterr().err
        assert says in error
        assert error.count("\n") == 1
