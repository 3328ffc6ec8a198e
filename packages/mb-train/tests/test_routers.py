"""Experts that choose their tokens, and learned noise on scores: by their flags, to the end."""

import pytest
import torch
from mb_layers import ExpertChoiceRouter, NoisyTopKRouter
from mb_layers.moe import MoELayer
from mb_train.cli import main
from mb_train.convert import export_model
from mb_train.flags.command_line import parse, resolve
from mb_train.folder.run_folder import checkpoint_in
from mb_train.tasks.ict import embedded_at_once
from mb_train.tasks.make import whole_model

RUN = [
    *("--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2"),
    *("--seq-length", "8", "--micro-batch-size", "2", "--train-iters", "2", "--lr", "1e-3"),
    *("--device", "cpu"),
]
EXPERTS = ["--moe-num-experts", "4", "--moe-top-k", "2"]
NO_DROPOUT = ["--attention-dropout", "0", "--hidden-dropout", "0"]
MOCK = ["--mock-data", "--tokenizer", "null:39", "--no-bf16", "--save-interval", "1"]
CHOICE = ["--moe-router-type", "expert_choice"]
NOISE = ["--moe-router-noise"]


def model_of(*typed: str):
    config = resolve(parse([*RUN, *EXPERTS, *NO_DROPOUT, *typed]))
    torch.manual_seed(0)
    return config, whole_model(config, vocab_size=40)


def layers(model) -> list[MoELayer]:
    return [module for module in model.modules() if isinstance(module, MoELayer)]


def test_experts_of_a_bert_choose_its_tokens():
    config, model = model_of("--model", "bert", *CHOICE)
    layer = layers(model)[0]
    assert isinstance(layer.router, ExpertChoiceRouter)
    x_BSD, valid_BS = torch.randn(2, 8, 16), torch.ones(2, 8, dtype=torch.bool)
    valid_BS[1, 5:] = False
    y_BSD, _, metrics = layer(x_BSD, mask=valid_BS)
    places = -(-config.moe_top_k * 13 // 4)
    assert metrics["tokens_per_expert"].tolist() == [places] * 4
    # What the experts do for the tokens that are theirs, one by one.
    score_TE = (x_BSD @ layer.router.weight.T).softmax(-1)[valid_BS]
    x_TD, wanted_TD = x_BSD[valid_BS], torch.zeros(13, 16)
    act = torch.nn.GELU(approximate="tanh")
    for e, score_T in enumerate(score_TE.T):
        for t in score_T.topk(places).indices:
            hidden_F = act(layer.experts.w1[e] @ x_TD[t])
            wanted_TD[t] += score_T[t] * (layer.experts.w2[e] @ hidden_F)
    torch.testing.assert_close(y_BSD[valid_BS], wanted_TD)
    assert not y_BSD[~valid_BS].any()


def test_a_text_that_is_compared_lies_where_it_lies_alone():
    assert embedded_at_once(model_of("--model", "ict", *CHOICE)[0]) == 1
    assert embedded_at_once(model_of("--model", "ict")[0]) > 1


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--model gpt", "another --moe-router-type .* gpt: .* bert, ict, classifier"),
        ("--model t5 --decoder-seq-length 8", "another --moe-router-type .* with --model t5"),
        ("--model bert --moe-renormalize", "topk with --moe-renormalize, .* got expert_choice"),
        ("--model bert --moe-num-zero-experts 1", "topk with --moe-num-zero-experts, "),
        ("--model bert --moe-balance-by scores", "topk with --moe-balance-by scores, "),
        ("--model bert --moe-balance-over sequence", "topk with --moe-balance-over sequence, "),
        ("--model bert --moe-router-noise", "topk with --moe-router-noise, "),
        ("--model bert --moe-router-enable-expert-bias", "topk with --moe-router-enable-exp"),
    ],
)
def test_what_a_choice_by_experts_would_ignore_is_refused(typed, says):
    with pytest.raises(ValueError, match=says):
        resolve(parse([*RUN, *EXPERTS, *CHOICE, *typed.split()]))
    assert resolve(parse([*RUN, *CHOICE, *typed.split()])).moe_num_experts is None


def test_noise_is_learned_and_of_training_alone():
    _, noisy = model_of(*NOISE, "--moe-loss-weight", "0.1")
    _, plain = model_of("--moe-loss-weight", "0.1")
    assert all(isinstance(layer.router, NoisyTopKRouter) for layer in layers(noisy))
    added = [name for name in noisy.state_dict() if name not in plain.state_dict()]
    assert added == [f"stack.blocks.{n}.mlp.router.noise_weight" for n in range(2)]
    noisy.load_state_dict(plain.state_dict(), strict=False)
    x_BS = torch.randint(40, (2, 8))

    def loss(model):
        return model(x_BS, labels_BS=x_BS.roll(-1, 1)).total()

    drawn = {loss(noisy).item() for _ in range(3)}
    assert len(drawn) == 3
    loss(noisy).backward()
    assert all(layer.router.noise_weight.grad.any() for layer in layers(noisy))
    assert loss(noisy.eval()) == loss(plain.eval())


def test_a_run_keeps_its_noise(tmp_path, capsys):
    run = tmp_path / "run"
    assert main([*RUN, *EXPERTS, *NOISE, *MOCK, "--save", str(run)]) == 0
    assert main(["--load", str(run), "--train-iters", "3"]) == 0
    capsys.readouterr()
    assert main(["--load", str(run), "--train-iters", "4", "--no-moe-router-noise"]) != 0
    assert "its --moe-router-noise is True, this run's is False" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--moe-router-noise True"):
        export_model(checkpoint_in(run), tmp_path / "out")
    assert not (tmp_path / "out").exists()
