"""Shared by the tests of mb-layers: a loop over tokens as oracle, one tolerance table."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import torch
from mb_layers import MoEConfig
from torch import Tensor

TOLERANCE = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
    torch.float16: {"rtol": 2e-3, "atol": 1e-4},
}

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda h: torch.nn.functional.gelu(h, approximate="tanh"),
    "silu": lambda h: h * torch.sigmoid(h),
    "relu": lambda h: h.clamp(min=0),
    "squared_relu": lambda h: h.clamp(min=0) ** 2,
}
GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{
        glu: lambda gate, up, act=ACTIVATIONS[plain]: act(gate) * up
        for glu, plain in (
            ("swiglu", "silu"),
            ("geglu", "gelu"),
            ("geglu_tanh", "gelu_tanh"),
            ("reglu", "relu"),
        )
    },
    "swigluoai": lambda gate, up: (
        gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7)) * (up.clamp(-7, 7) + 1)
    ),
}


def assert_close(
    what: str, got: Tensor, expected: Tensor, dtype: torch.dtype | None = None
) -> None:
    """Compare under the tolerance of `dtype`, of `got` by default, and name what differs."""
    torch.testing.assert_close(
        got,
        expected,
        **TOLERANCE[dtype or got.dtype],
        check_dtype=False,
        msg=lambda m: f"{what}: {m}",
    )


def route_one_token(
    config: MoEConfig,
    logits: Tensor,
    balancing_bias: Tensor | None,
    expert_ids: list[int] | None = None,
) -> list[tuple[int, Tensor]]:
    """Return (expert id, weight) of one token's slots, best first, from the definitions."""
    if config.score_function == "softmax":
        scores = torch.exp(logits) / torch.exp(logits).sum()
    else:
        scores = 1 / (1 + torch.exp(-logits))
    choice = scores.detach().tolist()
    if balancing_bias is not None:
        choice = [c + float(b) for c, b in zip(choice, balancing_bias, strict=True)]
    allowed = set(range(config.num_choices))
    if config.num_expert_groups is not None:
        size = config.num_experts // config.num_expert_groups
        groups = [range(g * size, (g + 1) * size) for g in range(config.num_expert_groups)]
        score = [
            sum(sorted((choice[e] for e in g), reverse=True)[: config.group_score_top])
            for g in groups
        ]
        best = sorted(range(len(groups)), key=lambda g: (-score[g], g))[: config.top_k_groups]
        allowed = {e for g in best for e in groups[g]}
    chosen = sorted(allowed, key=lambda e: (-choice[e], e))[: config.top_k]
    chosen = chosen if expert_ids is None else expert_ids
    weights = [scores[e] if 0 <= e < config.num_choices else 0 * scores[0] for e in chosen]
    norm: Tensor | float = 1.0
    if config.renormalize and any(w > 0 for w in weights):
        p = config.renormalize_p
        norm = sum(w**p for w in weights) ** (1 / p)
    return [
        (e, w / norm * config.routed_scaling_factor) for e, w in zip(chosen, weights, strict=True)
    ]


def run_one_expert(
    config: MoEConfig, x: Tensor, params: dict[str, Tensor], prefix: str, e: int
) -> Tensor:
    """W2 activation(W1 x + b1) + b2 of expert e, for one token x [D]."""
    w1, w2 = params[f"{prefix}.w1"][e], params[f"{prefix}.w2"][e]
    h = w1 @ x
    if f"{prefix}.b1" in params:
        h = h + params[f"{prefix}.b1"][e]
    if config.activation in GATES:
        gate, up = h[: w2.shape[1]], h[w2.shape[1] :]
        y = w2 @ GATES[config.activation](gate, up)
    else:
        y = w2 @ ACTIVATIONS[config.activation](h)
    return y + params[f"{prefix}.b2"][e] if f"{prefix}.b2" in params else y


def loop_over_tokens(
    config: MoEConfig,
    params: dict[str, Tensor],
    x_TD: Tensor,
    *,
    mask: list[bool] | None = None,
    valid_tokens: float | None = None,
    expert_ids: list[list[int]] | None = None,
) -> tuple[Tensor, Tensor]:
    """The oracle: y_TD and the weighted auxiliary loss of a layer, one token and expert at a time.

    `params` is the layer's state dict, with gradients wanted where they are to be compared. Loads
    are balanced over the micro-batch.
    """
    num_experts, choices = config.num_experts, config.num_choices
    mask = [True] * len(x_TD) if mask is None else mask
    probs, z, slots = [], [], []
    for t, x in enumerate(x_TD):
        logits = params["router.weight"] @ x
        if "router.bias" in params:
            logits = logits + params["router.bias"]
        given = None if expert_ids is None else expert_ids[t]
        by = None if config.uniform_assignment else given
        chosen = route_one_token(config, logits, params.get("router.balancing_bias"), by)
        if config.uniform_assignment:
            ids = given or [(t * config.top_k + k) % num_experts for k in range(config.top_k)]
            chosen = list(zip(ids, (w for _, w in chosen), strict=True))
        slots += [(t, e if mask[t] else -1, w) for e, w in chosen]
        if mask[t]:
            scores = torch.exp(logits) if config.score_function == "softmax" else logits.sigmoid()
            probs.append(scores / scores.sum())
            z.append(torch.log(torch.exp(logits).sum()) ** 2)
    load, kept = count_slots(config, slots)
    rows = list(x_TD)
    if config.latent_size is not None:
        rows = [params["latent_down.weight"] @ x for x in rows]
    y = {t: torch.zeros_like(x) for t, x in enumerate(rows)}
    for n, (t, e, weight) in enumerate(slots):
        if e >= num_experts and n in kept:  # returns its token
            y[t] = y[t] + weight * rows[t]
        elif n in kept and config.weights_on_input:
            y[t] = y[t] + run_one_expert(config, weight * rows[t], params, "experts", e)
        elif n in kept:
            y[t] = y[t] + weight * run_one_expert(config, rows[t], params, "experts", e)
    for t, x in enumerate(x_TD):
        if config.latent_size is not None:
            y[t] = params["latent_up.weight"] @ y[t]
        y[t] = add_unrouted(config, params, x, y[t]) if mask[t] else 0 * y[t]
    divisor = max(len(z) if valid_tokens is None else valid_tokens, 1)
    zero = x_TD.new_zeros(choices)
    counts = torch.tensor(load, dtype=x_TD.dtype)
    balance = choices * (counts / max(sum(load), 1) * sum(probs, zero)).sum() / divisor
    aux = config.load_balancing_loss_weight * balance
    aux = aux + config.z_loss_weight * sum(z, zero.sum()) / divisor
    return torch.stack(list(y.values())) if y else x_TD * 1, aux


def count_slots(
    config: MoEConfig, slots: list[tuple[int, int, Tensor]]
) -> tuple[list[int], set[int]]:
    """Load of each choice before capacity, and which slots are kept; zero experts keep all."""
    num_experts = config.num_experts
    limit = math.inf
    if config.capacity_factor is not None:
        routed = sum(0 <= e < num_experts for _, e, _ in slots)
        factor = Fraction(repr(float(config.capacity_factor)))
        limit = max(math.ceil(factor * routed / num_experts), config.min_capacity)
    order = list(range(len(slots)))
    if config.drop_policy == "probability":
        order.sort(key=lambda n: (-slots[n][2].item(), n))
    load, kept = [0] * config.num_choices, set()
    for n in order:
        e = slots[n][1]
        if not 0 <= e < config.num_choices:
            continue
        if e >= num_experts or load[e] < limit:
            kept.add(n)
        load[e] += 1
    return load, kept


def add_unrouted(config: MoEConfig, params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """What every token gets besides its experts: output bias and shared expert."""
    if config.output_bias:
        y = y + params["bias"]
    if config.shared_expert_hidden_size is None:
        return y
    shared = run_one_expert(config, x, params, "shared_expert", 0)
    if config.shared_expert_gate:
        shared = shared / (1 + torch.exp(-(params["shared_expert.gate"] @ x)))
    k = config.top_k
    return (shared + k * y) / (k + 1) if config.shared_expert_weighted_sum else shared + y
