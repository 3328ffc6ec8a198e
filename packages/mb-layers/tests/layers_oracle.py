"""Shared by the tests of mb-layers: a loop over tokens as oracle, one tolerance table."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from mb_layers import MoEConfig
from torch import Tensor

TOLERANCE = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda h: torch.nn.functional.gelu(h, approximate="tanh"),
    "silu": lambda h: h * torch.sigmoid(h),
    "relu": lambda h: h.clamp(min=0),
    "squared_relu": lambda h: h.clamp(min=0) ** 2,
}
GATES = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}


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
    config: MoEConfig, logits: Tensor, balancing_bias: Tensor | None
) -> dict[int, Tensor]:
    """Return {expert id: weight} for one token, best first, from the definitions."""
    num_experts = config.num_experts
    if config.score_function == "softmax":
        scores = torch.exp(logits) / torch.exp(logits).sum()
    else:
        scores = 1 / (1 + torch.exp(-logits))
    choice = scores.detach().tolist()
    if balancing_bias is not None:
        choice = [c + float(b) for c, b in zip(choice, balancing_bias, strict=True)]
    allowed = set(range(num_experts))
    if config.num_expert_groups is not None:
        size = num_experts // config.num_expert_groups
        groups = [range(g * size, (g + 1) * size) for g in range(config.num_expert_groups)]
        score = [
            sum(sorted((choice[e] for e in g), reverse=True)[: config.group_score_top])
            for g in groups
        ]
        best = sorted(range(len(groups)), key=lambda g: (-score[g], g))[: config.top_k_groups]
        allowed = {e for g in best for e in groups[g]}
    chosen = sorted(allowed, key=lambda e: (-choice[e], e))[: config.top_k]
    weights = {e: scores[e] for e in chosen}
    if config.renormalize:
        p = config.renormalize_p
        norm = sum(w**p for w in weights.values()) ** (1 / p)
        weights = {e: w / norm for e, w in weights.items()}
    return {e: w * config.routed_scaling_factor for e, w in weights.items()}


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
        y = w2 @ (ACTIVATIONS[GATES[config.activation]](gate) * up)
    else:
        y = w2 @ ACTIVATIONS[config.activation](h)
    return y + params[f"{prefix}.b2"][e] if f"{prefix}.b2" in params else y


def loop_over_tokens(
    config: MoEConfig, params: dict[str, Tensor], x_TD: Tensor
) -> tuple[Tensor, Tensor]:
    """The oracle: y_TD and the weighted auxiliary loss of a layer, one token and expert at a time.

    `params` is the layer's state dict, with gradients wanted where they are to be compared.
    With a capacity the first C slots of an expert are kept, in token order.
    """
    num_experts = config.num_experts
    limit = math.inf
    if config.capacity_factor is not None:
        limit = math.ceil(config.capacity_factor * config.top_k * len(x_TD) / num_experts)
    load, probs, z, outputs = [0] * num_experts, [], [], []
    for x in x_TD:
        logits = params["router.weight"] @ x
        if "router.bias" in params:
            logits = logits + params["router.bias"]
        y = torch.zeros_like(x)
        chosen = route_one_token(config, logits, params.get("router.balancing_bias"))
        for e, weight in chosen.items():
            if load[e] < limit:
                y = y + weight * run_one_expert(config, x, params, "experts", e)
            load[e] += 1
        if config.output_bias:
            y = y + params["bias"]
        if config.shared_expert_hidden_size is not None:
            shared = run_one_expert(config, x, params, "shared_expert", 0)
            if config.shared_expert_gate:
                shared = shared / (1 + torch.exp(-(params["shared_expert.gate"] @ x)))
            k = config.top_k
            y = (shared + k * y) / (k + 1) if config.shared_expert_weighted_sum else shared + y
        outputs.append(y)
        if config.score_function == "softmax":
            probs.append(torch.exp(logits) / torch.exp(logits).sum())
        else:
            scores = 1 / (1 + torch.exp(-logits))
            probs.append(scores / scores.sum())
        z.append(torch.log(torch.exp(logits).sum()) ** 2)
    counts = torch.tensor(load, dtype=x_TD.dtype)
    mean_probs = torch.stack(probs).mean(dim=0)
    balance = num_experts / (config.top_k * len(x_TD)) * (counts * mean_probs).sum()
    aux = config.load_balancing_loss_weight * balance
    aux = aux + config.z_loss_weight * torch.stack(z).mean()
    return torch.stack(outputs), aux
