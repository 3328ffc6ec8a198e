"""The model: its loss against PyTorch's, causality, experts, recompute, initial loss."""

import math

import pytest
import torch
import torch.nn.functional as F
from mb_parallel.recompute import apply_recompute
from mb_train.config import TrainConfig
from mb_train.tasks import GPTTask

SIZES = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 9,
    "micro_batch_size": 2, "train_iters": 1, "lr": 1e-3, "ffn_hidden_size": 48,
    "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
MOE = {"moe_num_experts": 4, "moe_top_k": 2, "activation": "swiglu"}
V = 61


def make(**change):
    torch.manual_seed(3)
    dtype = change.pop("compute_dtype", torch.float32)
    config = TrainConfig(**{**SIZES, **change})
    return GPTTask(config, vocab_size=V, eod=0).build_model(compute_dtype=dtype)


def tokens(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(V, (2, 9), generator=generator)


@pytest.mark.parametrize("change", [{}, MOE], ids=["dense", "dmoe"])
def test_the_loss_is_the_cross_entropy_of_the_logits(change):
    model, x = make(**change).eval(), tokens()
    labels = tokens(1)
    expected = F.cross_entropy(model.logits(x).flatten(0, 1), labels.flatten())
    torch.testing.assert_close(model(x, labels_BS=labels).losses["lm loss"], expected)
    assert expected.item() == pytest.approx(math.log(V), abs=0.1)  # small weights know nothing


@pytest.mark.parametrize("change", [{}, MOE, {"glu": True}], ids=["dense", "dmoe", "glu"])
def test_later_tokens_do_not_change_earlier_logits(change):
    model, x = make(**change).eval(), tokens()
    other = x.clone()
    other[:, 5:] = (other[:, 5:] + 1) % V
    a, b = model.logits(x), model.logits(other)
    torch.testing.assert_close(a[:, :5], b[:, :5])
    assert (a[:, 5:] - b[:, 5:]).abs().max() > 1e-4


def test_experts_report_their_load_and_their_loss():
    model = make(**MOE, moe_loss_weight=0.5)
    output = model(tokens(), labels_BS=tokens(1))
    assert output.metrics["tokens_per_expert"].shape == (2, 4)
    assert output.metrics["tokens_per_expert"].sum(1).tolist() == [36, 36]
    unweighted = output.metrics["load_balancing_loss"].mean()
    torch.testing.assert_close(output.aux_loss.detach(), 0.5 * unweighted)
    dense = make()(tokens(), labels_BS=tokens(1))
    assert dense.aux_loss is None
    assert dense.metrics == {}


@pytest.mark.parametrize("change", [{}, MOE], ids=["dense", "dmoe"])
def test_recompute_changes_no_gradient(change):
    grads = []
    for granularity in (None, "full", "selective"):
        model = make(**change, hidden_dropout=0.2)
        if granularity:
            apply_recompute(model.stack.blocks.values(), granularity)
        torch.manual_seed(7)
        output = model(tokens(), labels_BS=tokens(1))
        output.total().backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b, c in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(a, c)


def test_bf16_activations_leave_fp32_gradients():
    # All four experts for every token: a choice that rounding changes would hide the rounding.
    every = {**MOE, "moe_top_k": 4}
    wanted, got = make(**every), make(**every, compute_dtype=torch.bfloat16)
    for model in (wanted, got):
        model(tokens(), labels_BS=tokens(1)).losses["lm loss"].backward()
    for (name, a), b in zip(got.named_parameters(), wanted.parameters(), strict=True):
        assert a.grad.dtype == torch.float32, name
        assert (a.grad - b.grad).norm() < 0.05 * b.grad.norm(), name


def test_output_projections_start_smaller():
    model = make(init_method_std=0.1, hidden_size=64, ffn_hidden_size=256)
    down = model.stack.blocks["0"].mlp.down.weight.std().item()
    assert down == pytest.approx(0.1 / math.sqrt(4), rel=0.05)
    assert model.stack.blocks["0"].mlp.up.weight.std().item() == pytest.approx(0.1, rel=0.05)
