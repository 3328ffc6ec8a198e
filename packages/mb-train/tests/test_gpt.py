"""The model: its loss against PyTorch's, causality, experts, recompute, initial loss."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from mb_parallel.recompute import apply_recompute
from mb_train.config import TrainConfig
from mb_train.optimizer import apply_schedule, build_optimizer
from mb_train.schedule import build_schedule
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


def test_muon_takes_the_matrices_between_the_ends():
    change = {"optimizer": "muon", "untie_embeddings_and_output_weights": True}
    model = make(**change, **MOE)
    names = {parameter: name for name, parameter in model.named_parameters()}

    def groups(**more):
        config = TrainConfig(**{**SIZES, **change, **MOE, **more})
        optimizer = build_optimizer(SimpleNamespace(parts=[model], working_copies=None), config)
        groups = optimizer.param_groups
        return [({names[p] for p in group["params"]}, group["fused"]) for group in groups]

    *muon, (matrices, _), (vectors, _) = groups()
    head = model.stack.blocks["0"].attention.head_size
    apart = {name: rows for names, rows in muon for name in names if rows}
    assert {name: rows for name, rows in apart.items() if "experts" not in name} == {
        f"stack.blocks.{layer}.attention.qkv.weight": (head,) * 3 for layer in (0, 1)
    }
    whole = set().union(*(names for names, rows in groups(muon_split_qkv=False) if not rows))
    assert whole >= {name for name in apart if "qkv" in name}
    muon = set().union(*(names for names, _ in muon))
    ends = {"embedding.tokens.weight", "embedding.positions.weight", "head.weight"}
    assert matrices == ends
    assert "stack.blocks.0.mlp.router.weight" in muon
    assert all(name.endswith("bias") or ".norm" in name for name in vectors)


@pytest.mark.parametrize("kind", ["adam", "muon", "adafactor", "sgd"])
def test_routers_have_a_rate_of_their_own(kind):
    def trained(**change):
        change = {"optimizer": kind, "weight_decay": 0.1, "lr_decay_style": "constant"} | change
        config, model = TrainConfig(**{**SIZES, **change, **MOE}), make(**change, **MOE)
        optimizer = build_optimizer(SimpleNamespace(parts=[model], working_copies=None), config)
        schedule, generator = build_schedule(config, 2), torch.Generator().manual_seed(0)
        for step in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            apply_schedule(optimizer, schedule, 2 * step)
            optimizer.step()
        return dict(model.named_parameters())

    whole, half, mixed = trained(), trained(lr=5e-4), trained(moe_router_lr_mult=0.5)
    for name, parameter in mixed.items():
        expected, other = (half, whole) if ".router." in name else (whole, half)
        torch.testing.assert_close(parameter, expected[name], msg=name)
        assert not torch.equal(parameter, other[name])
