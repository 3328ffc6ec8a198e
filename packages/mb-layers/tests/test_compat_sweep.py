"""Random MegaBlocks `Arguments` against a plain loop written from its semantics alone."""

from __future__ import annotations

import functools
import math
import random
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layers_oracle import assert_close
from mb_layers.compat import dmoe, moe
from mb_layers.compat.arguments import Arguments
from torch import Tensor

GELU_TANH = functools.partial(F.gelu, approximate="tanh")


def draw(rng: random.Random) -> tuple[str, Arguments]:
    kind, experts = rng.choice(["dMoE", "MoE"]), rng.choice([1, 2, 4, 6])
    shared = rng.random() < 0.4
    fields: dict[str, Any] = {
        "hidden_size": rng.choice([4, 12, 16]),
        "ffn_hidden_size": rng.choice([8, 16, 20]),
        "bias": rng.random() < 0.5,
        "return_bias": rng.random() < 0.5,
        "activation_fn": rng.choice([GELU_TANH, F.gelu, F.silu, F.relu]),
        "moe_num_experts": experts,
        "moe_top_k": rng.randint(1, min(experts, 3)),
        "moe_capacity_factor": rng.choice([0, 0.5, 1, 1.25, 2]),
        "moe_normalize_expert_weights": rng.choice([None, 1, 2]),
        "moe_loss_weight": rng.choice([0, 0.1, 1]),
        "moe_zloss_weight": rng.choice([0, 0.01]),
        "mlp_type": "mlp" if kind == "MoE" else rng.choice(["mlp", "glu"]),
        "memory_optimized_mlp": rng.random() < 0.5,
        "uniform_expert_assignment": rng.random() < 0.15,
        "shared_expert": shared,
        "shared_expert_hidden_size": rng.choice([None, 8]),
        "shared_expert_weighted_sum": shared and rng.random() < 0.5,
        "fp16": False,
        "device": "cpu",
    }
    if rng.random() < 0.15 and not (shared and fields["bias"]):
        sparse = {"mlp_impl": "sparse", "ffn_hidden_size": 128, "shared_expert_hidden_size": None}
        fields |= sparse
    return kind, Arguments(**fields)


def by_hand(
    args: Arguments, kind: str, params: dict[str, Tensor], x: Tensor
) -> tuple[Tensor, Tensor]:
    """y, with a bias that is returned apart added to it, and the weighted losses."""
    x_TD = x.reshape(-1, args.hidden_size)
    experts, top_k, tokens = args.moe_num_experts, args.moe_top_k, len(x_TD)
    logits = x_TD @ params["router.layer.weight"].T
    probs = logits.softmax(dim=-1)
    weights, ids = probs.topk(top_k, dim=-1)
    if args.moe_normalize_expert_weights:
        norm = args.moe_normalize_expert_weights
        weights = weights / torch.norm(weights, p=norm, dim=-1, keepdim=True)
    if args.uniform_expert_assignment:
        ids = (torch.arange(tokens * top_k) % experts).view(tokens, top_k)
    capacity: float = math.inf
    if kind == "MoE" and args.moe_capacity_factor:
        capacity = math.ceil(Fraction(args.moe_capacity_factor) * top_k * tokens / experts)
    w1, w2, v1 = (params.get(f"experts.mlp.{name}") for name in ("w1", "w2", "v1"))
    used = [0] * experts
    y = [torch.zeros_like(token) for token in x_TD]
    for t, token in enumerate(x_TD):
        for k in range(top_k):
            e = int(ids[t, k])
            used[e] += 1
            if used[e] > capacity:
                continue
            if w1.dim() == 3:  # MoE: [E, D, F]
                h, back = args.activation_fn(token @ w1[e]), w2[e]
            else:  # dMoE: [E F, D]
                h = args.activation_fn(w1.unflatten(0, (experts, -1))[e] @ token)
                back = w2.unflatten(0, (experts, -1))[e]
            if v1 is not None:
                h = h * (v1.unflatten(0, (experts, -1))[e] @ token)
            y[t] = y[t] + weights[t, k] * (h @ back)
    out = torch.stack(y)
    if args.bias:
        out = out + params["experts.bias"]

    def linear(name: str, x: Tensor) -> Tensor:
        bias = params.get(f"shared_expert.{name}.bias")
        return F.linear(x, params[f"shared_expert.{name}.weight"], bias)

    if args.shared_expert:
        h = args.activation_fn(linear("gate_proj" if v1 is not None else "up_proj", x_TD))
        shared = linear("down_proj", h * linear("up_proj", x_TD) if v1 is not None else h)
        weighted = args.shared_expert_weighted_sum
        out = (shared + top_k * out) / (top_k + 1) if weighted else shared + out
    counts = torch.bincount(ids.flatten(), minlength=experts).to(x.dtype)
    balance = experts / (tokens * top_k) * (counts * probs.mean(dim=0)).sum()
    z = torch.logsumexp(logits, dim=-1).square().mean()
    return out.view(x.shape), args.moe_loss_weight * balance + args.moe_zloss_weight * z


@pytest.mark.filterwarnings("ignore:top_k=1 with renormalize")
@pytest.mark.parametrize("first", [0, 20])
def test_random_arguments_compute_what_megablocks_means(first: int) -> None:
    for seed in range(first, first + 20):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        kind, args = draw(rng)
        layer = {"dMoE": dmoe.dMoE, "MoE": moe.MoE}[kind](args).double()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.normal_(std=0.5)
        shape = rng.choice([(3, 2), (7,), (1, 1), (5, 1)])
        x = torch.randn(*shape, args.hidden_size, dtype=torch.float64, requires_grad=True)
        moe.clear_load_balancing_loss()
        moe.clear_router_zloss()
        got = layer(x)
        params = dict(layer.named_parameters())
        if args.bias and args.return_bias:
            got, bias = got
            got = got + bias
        losses = moe.batched_load_balancing_loss(args)
        if args.moe_zloss_weight:
            losses = losses + moe.batched_router_zloss(args).sum()
        expected, expected_losses = by_hand(args, kind, params, x)
        what = f"seed {seed}, {kind}, {args}: "
        assert_close(what + "y", got, expected)
        grad_y = torch.randn_like(got)
        leaves = {"x": x, **params}
        options = {"allow_unused": True, "materialize_grads": True}
        grads = [
            torch.autograd.grad((y * grad_y).sum() + losses, leaves.values(), **options)
            for y, losses in ((got, losses), (expected, expected_losses))
        ]
        for name, a, b in zip(leaves, *grads, strict=True):
            torch.testing.assert_close(
                a, b, rtol=1e-6, atol=1e-8, msg=lambda m, n=name, w=what: f"{w}d {n}: {m}"
            )
    moe.clear_load_balancing_loss()
    moe.clear_router_zloss()
