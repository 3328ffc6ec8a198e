"""Padding: a masked layer on padded tokens is the layer on the real ones alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from layers_oracle import assert_close
from mb_layers import MoE, MoEConfig, dMoE
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SIZES = {
    "hidden_size": 16,
    "ffn_hidden_size": 16,
    "num_experts": 6,
    "top_k": 2,
    "init_method_std": 0.3,
    "z_loss_weight": 0.1,
}
KINDS = {
    "dMoE": {},
    "top1": {"top_k": 1},
    "capacity": {"capacity_factor": 0.7},
    "capacity-probability": {"capacity_factor": 0.7, "drop_policy": "probability"},
    "deepseek-v3": {
        "score_function": "sigmoid",
        "renormalize": True,
        "num_expert_groups": 3,
        "top_k_groups": 2,
        "balancing_bias": True,
        "shared_expert_hidden_size": 32,
    },
    "shared-gate-biases": {
        "shared_expert_hidden_size": 16,
        "shared_expert_gate": True,
        "shared_expert_bias": True,
        "shared_expert_weighted_sum": True,
        "mlp_bias": True,
        "output_bias": True,
    },
    "output-bias": {"output_bias": True},
    "recompute": {"recompute": True},
    "sparse": {"mlp_impl": "sparse", "ffn_hidden_size": 128},
    "global": {"balance_over": "global_batch"},
}


def build(**overrides) -> dMoE:
    config = MoEConfig(**(SIZES | overrides))
    layer = (dMoE if config.capacity_factor is None else MoE)(config, dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.endswith(("bias", "b1", "b2")):
                parameter.normal_(std=0.5)
    if config.balance_over == "global_batch":
        layer.reduce_counts = lambda counts_E: counts_E + torch.arange(6)
    return layer


def run(layer: dMoE, x: Tensor, grad_y: Tensor, **arguments: Tensor) -> dict[str, Tensor]:
    x = x.detach().clone().requires_grad_()
    y, aux, metrics = layer(x, **arguments)
    names = dict(layer.named_parameters())
    grads = torch.autograd.grad((y * grad_y).sum() + aux, (x, *names.values()))
    named = dict(zip(("x", *names), grads, strict=True))
    return {"y": y.detach(), "aux_loss": aux.detach(), **metrics, **named}


@pytest.mark.parametrize("masked", [0.4, 1.0, 0.0])
@pytest.mark.parametrize("kind", KINDS)
def test_masked_layer_is_the_layer_of_the_real_tokens(kind: str, masked: float) -> None:
    layer = build(**KINDS[kind])
    x = torch.randn(3, 9, 16, dtype=torch.float64)
    mask = torch.rand(3, 9) >= masked
    x[~mask] = float("nan")  # what attention makes of rows that see nothing
    grad_y = torch.randn_like(x)
    expected = run(layer, x[mask], grad_y[mask])
    got = run(layer, x, grad_y, mask=mask.long())
    for name in ("y", "x"):
        assert not got[name][~mask].any(), name
        got[name] = got[name][mask]
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_close(name, got[name], tensor, dtype=torch.float64)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_masked_sequence_balance_is_the_mean_over_real_tokens(score_function: str) -> None:
    layer = build(balance_over="sequence", z_loss_weight=0.0, score_function=score_function)
    x = torch.randn(4, 7, 16, dtype=torch.float64)
    lengths = [7, 3, 0, 1]
    mask = torch.arange(7) < torch.tensor(lengths)[:, None]
    each = [layer(x[b : b + 1, :n]).aux_loss for b, n in enumerate(lengths)]
    expected = sum(n * loss for n, loss in zip(lengths, each, strict=True)) / sum(lengths)
    got = layer(x, mask=mask).aux_loss
    assert_close("aux_loss", got, expected, dtype=torch.float64)
    grads = [torch.autograd.grad(loss, layer.router.weight)[0] for loss in (got, expected)]
    assert_close("d router", *grads)


@pytest.mark.parametrize("lengths", [(10, 3), (1, 0)], ids=str)  # the mean below 1, too
def test_valid_tokens_make_uneven_shares_add_up(lengths: tuple[int, int]) -> None:
    """The mean over micro-batches of losses over the mean token number is that of all tokens."""
    layer = build(balance_over="global_batch")
    layer.reduce_counts = lambda counts_E: torch.tensor([5, 1, 4, 2, 8, 8])
    x = torch.randn(2, 10, 16, dtype=torch.float64)
    mask = torch.arange(10) < torch.tensor(lengths)[:, None]
    whole = layer(x, mask=mask).aux_loss
    shares = [layer(x[b], mask=mask[b], valid_tokens=mask.sum() / 2).aux_loss for b in (0, 1)]
    assert_close("aux_loss", sum(shares) / 2, whole)
    unmasked = [layer(x[0, :n], valid_tokens=sum(lengths) / 2).aux_loss for n in lengths]
    assert_close("first share", unmasked[0], shares[0])
    naive = [layer(x[b], mask=mask[b]).aux_loss for b in (0, 1)]
    assert abs(sum(naive) / 2 - whole) > 1e-4


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_padding_takes_the_fused_losses(scores: str) -> None:
    """One op for losses and metrics with a mask too: two `where`s and views more, not sixty ops."""

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            self.names = [*getattr(self, "names", []), op.name()]
            return op(*args, **(kwargs or {}))

    layer, x = build(score_function=scores), torch.randn(9, 16, dtype=torch.float64)
    launched = []
    for arguments in ({}, {"mask": torch.arange(9) < 6}):
        with Ops() as ops:
            layer(x, **arguments)
        assert ops.names.count("mb::router_losses") == 1
        launched.append(ops.names)
    assert len(launched[1]) <= len(launched[0]) + 9


def test_masked_capacity_counts_real_tokens_alone() -> None:
    layer = build(capacity_factor=1.0, top_k=1, num_experts=2)
    with torch.no_grad():
        layer.router.weight.zero_()  # all to expert 0
    x = torch.randn(20, 16, dtype=torch.float64)
    mask = torch.arange(20) >= 14  # six real tokens, behind the padding: C = 3
    y, _, metrics = layer(x, mask=mask)
    assert (y != 0).any(dim=1).nonzero().flatten().tolist() == [14, 15, 16]
    assert metrics["tokens_per_expert"].tolist() == [6, 0]
    assert metrics["dropped_fraction"].item() == 0.5


def test_masked_layer_compiles_without_graph_breaks() -> None:
    layer = build(capacity_factor=0.7)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    mask = torch.rand(2, 6) > 0.3
    for got, expected in zip(compiled(x, mask=mask)[:2], layer(x, mask=mask)[:2], strict=True):
        assert_close("output", got, expected)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "mask",
    [torch.ones(3), torch.ones(3, 2).bool(), torch.ones(2, 3, 16).bool(), [[1] * 3] * 2],
    ids=str,
)
def test_wrong_masks_are_named(mask: Tensor) -> None:
    with pytest.raises(ValueError, match=r"mask to be bool or integers of shape \(2, 3\).*got"):
        build()(torch.randn(2, 3, 16, dtype=torch.float64), mask=mask)


@pytest.mark.parametrize("balance_over", ["micro_batch", "sequence"])
def test_valid_tokens_may_be_any_one_number(balance_over: str) -> None:
    layer = build(balance_over=balance_over)
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    want = layer(x, valid_tokens=4).aux_loss
    for number in (torch.tensor([4]), torch.tensor([[4.0]]), np.int64(4), np.float32(4)):
        assert torch.equal(layer(x, valid_tokens=number).aux_loss, want)
    with pytest.raises(ValueError, match=r"valid_tokens to be one number, got shape \(2,\)"):
        layer(x, valid_tokens=torch.tensor([2, 2]))
    number = torch.tensor(4.0, dtype=torch.float64)
    aux_loss, metrics = layer.float()(x.float(), valid_tokens=number)[1:]
    floating = [m for m in metrics.values() if m.is_floating_point()]
    assert {t.dtype for t in (aux_loss, *floating)} == {torch.float32}


@pytest.mark.parametrize("number", [-1, float("nan")])
def test_valid_tokens_that_are_no_number_of_tokens_are_named(number: float) -> None:
    with pytest.raises(ValueError, match="valid_tokens >= 0, got"):
        build()(torch.randn(3, 16, dtype=torch.float64), valid_tokens=number)


@pytest.mark.parametrize("balance_over", ["micro_batch", "sequence"])
def test_a_nan_on_the_device_for_a_number_of_tokens_is_seen(balance_over: str) -> None:
    """It passed for 1 token: the losses were sums over all of them."""
    layer, x = build(balance_over=balance_over), torch.randn(2, 3, 16, dtype=torch.float64)
    assert layer(x, valid_tokens=torch.tensor(torch.nan)).aux_loss.isnan()
    assert layer(x, valid_tokens=torch.tensor(-2)).aux_loss < 0
