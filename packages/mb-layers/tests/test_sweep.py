"""Random layers against a loop over tokens: the combinations that no list of cases has.

Each seed draws a config, an input of some shape and memory order, and perhaps a mask, forced
experts or a number of valid tokens. Outputs and all gradients are compared in fp64, and those of
the same layer in fp32 with them: fp64 alone hides what underflows.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from layers_oracle import ACTIVATIONS, GATES, assert_close, loop_over_tokens
from mb_layers import MoE, MoEConfig, RouterOutput, dMoE

SEEDS, PER_TEST = 120, 20


def draw_config(rng: random.Random) -> MoEConfig:
    """A config that the library accepts, most options on in some of them."""

    def maybe(share: float) -> bool:
        return rng.random() < share

    num_experts = rng.choice([1, 2, 4, 6])
    fields: dict[str, Any] = {
        "hidden_size": rng.choice([4, 8, 12, 16]),
        "ffn_hidden_size": rng.choice([4, 6, 16, 20]),
        "num_experts": num_experts,
        "top_k": rng.randint(1, min(num_experts, 3)),
        "activation": rng.choice([*ACTIVATIONS, *GATES]),
        "score_function": rng.choice(["softmax", "sigmoid"]),
        "renormalize": maybe(0.5),
        "renormalize_p": rng.choice([1, 2]),
        "routed_scaling_factor": rng.choice([1.0, 2.5]),
        "balancing_bias": maybe(0.3),
        "uniform_assignment": maybe(0.1),
        "weights_on_input": maybe(0.15),
        "router_fp32": maybe(0.8),
        "router_bias": maybe(0.3),
        "mlp_bias": maybe(0.25),
        "output_bias": maybe(0.3),
        "load_balancing_loss_weight": rng.choice([0, 0.01, 1.0]),
        "z_loss_weight": rng.choice([0, 0.5]),
        "recompute": maybe(0.2),
    }
    if not fields["renormalize"]:
        del fields["renormalize_p"]
    if num_experts > 2 and maybe(0.3):
        fields |= {"num_expert_groups": 2, "top_k_groups": rng.randint(1, 2), "group_score_top": 1}
        fields["top_k"] = min(fields["top_k"], num_experts // 2)
    elif maybe(0.2):
        fields["num_zero_experts"] = rng.randint(1, 3)
    if not (fields["mlp_bias"] or "num_zero_experts" in fields) and maybe(0.2):
        fields["latent_size"] = rng.choice([3, 8, 20])
    if maybe(0.4):
        fields |= {
            "shared_expert_hidden_size": rng.choice([4, 10, 16]),
            "shared_expert_gate": maybe(0.4),
            "shared_expert_weighted_sum": maybe(0.3) and not fields["weights_on_input"],
            "shared_expert_bias": maybe(0.3),
        }
    if maybe(0.4):
        fields |= {
            "capacity_factor": rng.choice([0.25, 0.5, 1.1, 1 / 3, 2]),
            "min_capacity": rng.choice([0, 0, 2]),
            "drop_policy": "position"
            if fields["weights_on_input"]
            else rng.choice(["position", "probability"]),
        }
    if maybe(0.15):
        fields |= {"mlp_impl": "sparse", "ffn_hidden_size": 128, "mlp_bias": False}
        if "shared_expert_hidden_size" in fields:
            fields |= {"shared_expert_hidden_size": 128, "shared_expert_bias": False}
    return MoEConfig(**fields)


def draw_tokens(rng: random.Random, hidden: int) -> torch.Tensor:
    shape = rng.choice([(rng.randint(1, 13),), (2, 5), (1, 1), (2, 2, 3), (0,), (2, 0)])
    options = {"dtype": torch.float64}
    order = rng.choice(["contiguous", "strided", "expanded", "transposed"])
    if order == "strided":
        return torch.randn(*shape, 2 * hidden, **options)[..., ::2]
    if order == "expanded":
        return torch.randn(*(1 for _ in shape), hidden, **options).expand(*shape, hidden)
    if order == "transposed" and len(shape) == 2:
        return torch.randn(*shape[::-1], hidden, **options).transpose(0, 1)
    return torch.randn(*shape, hidden, **options)


def compare(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    config = draw_config(rng)
    layer = (dMoE if config.capacity_factor is None else MoE)(config, dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.6)
        if layer.router.balancing_bias is not None:
            layer.router.balancing_bias.normal_(std=0.3)
    x = draw_tokens(rng, config.hidden_size).requires_grad_()
    tokens = x.shape[:-1]
    arguments: dict[str, Any] = {}
    if rng.random() < 0.35:
        arguments["mask"] = torch.rand(tokens) < rng.choice([0.0, 0.5, 1.0])
    if rng.random() < 0.2:
        arguments["valid_tokens"] = rng.choice([3, torch.tensor(2.5)])
    if rng.random() < 0.2:
        arguments["routing"] = torch.randint(-1, config.num_choices + 1, (*tokens, config.top_k))
    y, aux, _ = layer(x, **arguments)

    params = {n: t.detach().clone().double() for n, t in layer.state_dict().items()}
    leaves = {n: params[n].requires_grad_() for n, _ in layer.named_parameters()}
    x_TD = x.detach().reshape(-1, config.hidden_size).clone().requires_grad_()
    mask, routing = arguments.get("mask"), arguments.get("routing")
    expected, expected_aux = loop_over_tokens(
        config,
        params,
        x_TD,
        mask=None if mask is None else mask.flatten().tolist(),
        valid_tokens=arguments.get("valid_tokens"),
        expert_ids=None if routing is None else routing.reshape(-1, config.top_k).tolist(),
    )
    grad_y = torch.randn_like(y)
    got = torch.autograd.grad(
        (y * grad_y).sum() + 3 * aux, (x, *layer.parameters()), materialize_grads=True
    )
    loss = (expected * grad_y.reshape(expected.shape)).sum() + 3 * expected_aux + 0 * x_TD.sum()
    wanted = torch.autograd.grad(loss, (x_TD, *leaves.values()), materialize_grads=True)
    what = f"seed {seed}, {config}: "
    assert_close(what + "y", y.reshape(expected.shape), expected)
    assert_close(what + "aux_loss", aux, expected_aux)
    for name, a, b in zip(("x", *leaves), got, wanted, strict=True):
        assert_close(f"{what}d {name}", a.reshape(b.shape), b)

    narrow, x = copy.deepcopy(layer).float(), x.detach().float().requires_grad_()
    y32, aux32, _ = narrow(x, **arguments)
    got32 = torch.autograd.grad(
        (y32 * grad_y).sum() + 3 * aux32, (x, *narrow.parameters()), materialize_grads=True
    )
    names = ("y", "aux_loss", "d x", *(f"d {name}" for name in leaves))
    for name, a, b in zip(names, (y32, aux32, *got32), (y, aux, *got), strict=True):
        error, scale = (a - b).norm(), b.norm()
        assert error <= 1e-4 * scale + 1e-3, f"{what}{name} in fp32: {error:.1e} of {scale:.1e}"


@pytest.mark.filterwarnings("ignore:top_k=1 with renormalize")
@pytest.mark.parametrize("first", range(0, SEEDS, PER_TEST))
def test_random_layers_equal_a_loop_over_tokens(first: int) -> None:
    for seed in range(first, first + PER_TEST):
        compare(seed)


@pytest.mark.filterwarnings("ignore:top_k=1 with renormalize")
def test_torchs_default_dtype_and_device_change_nothing() -> None:
    def run(layer: MoE | dMoE, x: torch.Tensor, routing: RouterOutput | None) -> list[Any]:
        y, aux, metrics = layer(x, routing=routing)
        leaves = (x, *layer.parameters())
        grads = torch.autograd.grad(y.sum() + aux, leaves, materialize_grads=True)
        return [y, aux, metrics, grads]

    for seed in range(12):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        config = draw_config(rng)
        layer = (dMoE if config.capacity_factor is None else MoE)(config)
        x = torch.randn(300, config.hidden_size, requires_grad=True)
        routing = None
        if seed % 3 == 0:  # without the probabilities and logits of losses
            routed = layer.router(x.detach())
            routing = RouterOutput(routed.weights_TK.detach(), routed.expert_ids_TK, None, None)
        want = run(layer, x, routing)
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("meta"):
                got = run(layer, x, routing)
        finally:
            torch.set_default_dtype(torch.float32)
        torch.testing.assert_close(got, want, rtol=0, atol=0, msg=f"seed {seed}, {config}")
