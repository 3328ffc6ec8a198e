"""Capacity: its exact value, who is dropped, and that the rest stays put."""

from __future__ import annotations

import itertools

import pytest
import torch
from layers_oracle import assert_close
from mb_layers import LocalDispatcher, MoE, MoEConfig, capacity, dMoE
from mb_layers.dispatch import Capacity


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "factor", "expected"),
    [
        (64, 1, 8, 1.0, 8),
        (64, 2, 8, 1.25, 20),
        (65, 1, 8, 1.0, 9),  # rounds up, MegaBlocks rounds down
        (4, 1, 8, 1.0, 1),  # and never to 0, which MegaBlocks takes for "drop nothing"
        (100, 1, 10, 1.1, 11),  # 1.1 * 10 is 11.000000000000002 in binary
        (0, 2, 8, 1.0, 0),
    ],
)
def test_capacity(
    num_tokens: int, top_k: int, num_experts: int, factor: float, expected: int
) -> None:
    assert capacity(num_tokens, top_k, num_experts, factor) == expected


@pytest.mark.parametrize("policy", ["position", "probability"])
@pytest.mark.parametrize("num_tokens", [0, 1, 33])
def test_dropped_slots_are_those_of_a_slow_count(policy: str, num_tokens: int) -> None:
    num_experts, top_k, factor = 4, 2, 0.7
    weights = torch.rand(num_tokens, top_k)
    weights[: num_tokens // 2] = 0.5  # ties go to the earlier slot
    ids = torch.rand(num_tokens, num_experts).argsort(dim=-1)[:, :top_k].int()
    dispatcher = LocalDispatcher(num_experts, factor, drop_policy=policy)
    dispatched = dispatcher.dispatch(torch.randn(num_tokens, 8), weights, ids)

    limit = capacity(num_tokens, top_k, num_experts, factor)
    kept = []
    for e in range(num_experts):
        slots = [s for s, i in enumerate(ids.flatten().tolist()) if i == e]
        if policy == "probability":
            slots.sort(key=lambda s: -weights.flatten()[s].item())
        kept.append(sorted(slots[:limit]))
    bins = dispatched.bins
    offsets = bins.offsets_E1.tolist()
    order = bins.order_N.tolist()
    assert [order[a:b] for a, b in itertools.pairwise(offsets)] == kept
    assert sorted(order) == list(range(num_tokens * top_k))
    for slot, row in enumerate(bins.inverse_N.tolist()):
        assert row == (order.index(slot) if order.index(slot) < offsets[-1] else -1)
    counts = torch.bincount(ids.flatten(), minlength=num_experts)
    assert dispatched.tokens_per_expert_E.tolist() == counts.tolist()
    assert dispatched.kept_slots == sum(map(len, kept))


def test_dropping_by_probability_keeps_the_largest_weights() -> None:
    """Against dMoE with the dropped weights set to zero: outputs and gradients."""
    config = MoEConfig(
        hidden_size=16,
        ffn_hidden_size=16,
        num_experts=4,
        top_k=2,
        capacity_factor=0.5,
        drop_policy="probability",
        init_method_std=0.3,
    )
    layer = MoE(config, dtype=torch.float64)
    x = torch.randn(21, 16, dtype=torch.float64)
    routed = layer.router(x)
    mask = torch.zeros_like(routed.weights_TK)
    limit = capacity(21, 2, 4, 0.5)
    for e in range(4):
        of_e = torch.where(routed.expert_ids_TK == e, routed.weights_TK, -1.0).flatten()
        best = of_e.topk(limit).indices
        mask.view(-1)[best[of_e[best] > 0]] = 1
    free = LocalDispatcher(4).dispatch(x, routed.weights_TK * mask, routed.expert_ids_TK)
    expected = layer.experts(free)
    got = layer(x).y
    assert_close("y", got, expected)
    grads = [torch.autograd.grad(y.square().sum(), layer.parameters()) for y in (got, expected)]
    for name, a, b in zip(dict(layer.named_parameters()), *grads, strict=True):
        assert_close(f"d {name}", a, b)


@pytest.mark.parametrize("options", [{}, {"min_capacity": 2**40}, {"drop_policy": "probability"}])
@pytest.mark.parametrize("factor", [1e-9, 1.5e9, 1e30])
def test_a_factor_of_any_size_is_taken_at_its_word(factor, options) -> None:
    ids_TK = torch.tensor([[0, 1], [0, 2], [0, 1]])
    dispatcher = LocalDispatcher(3, factor, **options)
    kept = dispatcher.dispatch(torch.zeros(3, 4), torch.rand(3, 2), ids_TK).kept_slots
    is_one_each = factor < 1 and "min_capacity" not in options
    assert kept == (3 if is_one_each else 6)


def test_a_capacity_on_the_device_is_that_on_the_host() -> None:
    slots, largest = 2**30 - 1, 2**31 - 1
    for factor in (1e-6, 1.234567, 4095.999999, 123456789.123456, 2147483646.123457):
        limit = Capacity(3, factor)
        assert limit.on_device(torch.tensor(slots)) == min(limit.of(slots), largest)


def test_uniform_assignment_spreads_slots_evenly() -> None:
    config = MoEConfig(
        hidden_size=16, ffn_hidden_size=16, num_experts=8, top_k=3, uniform_assignment=True
    )
    layer = dMoE(config)
    x = torch.randn(16, 16)
    routed = layer.router(x)
    assert routed.expert_ids_TK.flatten().tolist() == [s % 8 for s in range(48)]
    assert torch.equal(routed.weights_TK, torch.softmax(x @ layer.router.weight.T, -1).topk(3)[0])
    assert layer(x).metrics["load_imbalance"].item() == 1


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 1},
        {"recompute": True},
        {"mlp_bias": True},
        {"mlp_bias": True, "recompute": True},
        {"mlp_impl": "sparse", "ffn_hidden_size": 128},
        {"hidden_size": 12},
        {"saved_activation_bits": 8},
        {"fp8": True},
    ],
    ids=str,
)
def test_tokens_whose_memory_is_written_again_have_their_gradients(options):
    """As by a dispatcher into whose buffers the next layer's tokens come before the backward."""
    sizes = {"hidden_size": 16, "ffn_hidden_size": 32, "num_experts": 4, "top_k": 2}
    layer = dMoE(MoEConfig(**(sizes | options)))
    config = layer.config
    results = []
    for overwritten in (False, True):
        torch.manual_seed(4)
        x = torch.randn(6, config.hidden_size)
        ids = torch.randint(4, (6, config.top_k), dtype=torch.int32)
        weights = torch.rand(6, config.top_k).requires_grad_()
        dispatched = layer.dispatcher.dispatch(x.requires_grad_(), weights, ids)
        y = layer.experts(dispatched._replace(x_stays=not overwritten))
        if overwritten:
            x.data.fill_(torch.nan)
        parameters = list(layer.experts.parameters())
        results.append(torch.autograd.grad(y.square().sum(), [x, weights, *parameters]))
    for stayed, gone in zip(*results, strict=True):
        assert torch.equal(stayed, gone)
