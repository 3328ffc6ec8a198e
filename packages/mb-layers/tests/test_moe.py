"""The layers against a per-token loop over experts in fp64: outputs, losses and every gradient."""

from __future__ import annotations

import mb_kernels
import pytest
import torch
from layers_oracle import assert_close, loop_over_tokens
from mb_layers import MoE, MoEConfig, RouterOutput, capacity, dMoE

SMALL = {"hidden_size": 16, "ffn_hidden_size": 16, "num_experts": 5, "top_k": 2}

VARIANTS = {
    "top2": {},
    "top1": {"top_k": 1},
    "all-experts": {"top_k": 5},
    "one-expert": {"num_experts": 1, "top_k": 1},
    "renormalize": {"renormalize": True},
    "renormalize-p2": {"renormalize": True, "renormalize_p": 2},
    "p2-top1": {"renormalize": True, "renormalize_p": 2, "top_k": 3},
    "sigmoid": {"score_function": "sigmoid", "routed_scaling_factor": 2.5},
    "sigmoid-renormalize": {"score_function": "sigmoid", "renormalize": True},
    "groups": {"num_experts": 8, "num_expert_groups": 4, "top_k_groups": 2},
    "groups-by-best": {
        "num_experts": 6,
        "num_expert_groups": 3,
        "top_k_groups": 1,
        "group_score_top": 1,
    },
    "deepseek-v3": {
        "num_experts": 8,
        "top_k": 3,
        "num_expert_groups": 4,
        "top_k_groups": 2,
        "score_function": "sigmoid",
        "renormalize": True,
        "routed_scaling_factor": 2.5,
        "balancing_bias": True,
    },
    "softmax-balancing-bias": {"balancing_bias": True},
    "router-bias": {"router_bias": True, "renormalize": True},
    "z-loss": {"z_loss_weight": 0.1},
    "recompute": {"recompute": True},
    "sparse": {"mlp_impl": "sparse", "ffn_hidden_size": 128},
    "sparse-gelu-recompute": {
        "mlp_impl": "sparse",
        "ffn_hidden_size": 128,
        "activation": "gelu_tanh",
        "recompute": True,
        "shared_expert_hidden_size": 128,
    },
    "mlp-bias": {"mlp_bias": True},
    "mlp-bias-recompute-gelu": {"mlp_bias": True, "recompute": True, "activation": "gelu"},
    "output-bias": {"output_bias": True},
    "shared": {"shared_expert_hidden_size": 32},
    "shared-gate-bias": {
        "shared_expert_hidden_size": 32,
        "shared_expert_gate": True,
        "shared_expert_bias": True,
    },
    "shared-weighted": {
        "shared_expert_hidden_size": 16,
        "shared_expert_weighted_sum": True,
        "activation": "gelu",
        "output_bias": True,
    },
    "latent": {
        "latent_size": 6,
        "activation": "squared_relu",
        "shared_expert_hidden_size": 12,
        "output_bias": True,
    },
    "latent-wide-input-weights": {"latent_size": 24, "weights_on_input": True},
    **{
        name: {"activation": name}
        for name in ("geglu", "geglu_tanh", "reglu", "gelu", "gelu_tanh", "silu", "relu")
    },
    "squared_relu": {"activation": "squared_relu"},
    # Widths that the kernels do not take.
    "odd": {"hidden_size": 13, "ffn_hidden_size": 20, "shared_expert_hidden_size": 5},
    "odd-ffn": {"ffn_hidden_size": 7, "activation": "gelu", "recompute": True},
    "odd-bias": {"hidden_size": 18, "ffn_hidden_size": 9, "mlp_bias": True},
    "odd-sparse": {"hidden_size": 10, "ffn_hidden_size": 128, "mlp_impl": "sparse"},
}


def build(cls: type = dMoE, dtype: torch.dtype = torch.float64, **overrides) -> dMoE:
    """A layer with weights large enough that no gradient hides below the tolerance."""
    config = MoEConfig(**(SMALL | {"init_method_std": 0.3} | overrides))
    layer = cls(config, dtype=dtype)
    with torch.no_grad():
        if config.balancing_bias:
            layer.router.balancing_bias.normal_(std=0.3)
        for name, parameter in layer.named_parameters():
            if name.endswith(("bias", "b1", "b2")):
                assert not parameter.any()
                parameter.normal_(std=0.5)
    return layer


def check_against_loop(layer: dMoE, x: torch.Tensor) -> None:
    """Compare y, aux_loss and the gradients of a random linear function of both."""
    grad_y, grad_aux = torch.randn_like(x), 1.7
    x = x.requires_grad_()
    y, aux, _ = layer(x)
    inputs = {"x": x, **dict(layer.named_parameters())}
    got = torch.autograd.grad((y * grad_y).sum() + grad_aux * aux, inputs.values())

    oracle_inputs = {name: p.detach().clone().requires_grad_() for name, p in inputs.items()}
    buffers = dict(layer.named_buffers())
    hidden = layer.config.hidden_size
    y_loop, aux_loop = loop_over_tokens(
        layer.config, oracle_inputs | buffers, oracle_inputs["x"].reshape(-1, hidden)
    )
    loss = (y_loop * grad_y.reshape(-1, hidden)).sum() + grad_aux * aux_loop
    expected = torch.autograd.grad(loss, oracle_inputs.values(), materialize_grads=True)

    assert_close("y", y.reshape(-1, hidden), y_loop)
    assert_close("aux_loss", aux, aux_loop, dtype=y.dtype)
    for name, g, e in zip(inputs, got, expected, strict=True):
        assert_close(f"d {name}", g, e)


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS.keys())
def test_dmoe_equals_a_loop_over_tokens(overrides: dict) -> None:
    hidden = overrides.get("hidden_size", 16)
    check_against_loop(build(**overrides), torch.randn(3, 7, hidden, dtype=torch.float64))


def test_a_token_without_leading_dimensions_is_one() -> None:
    check_against_loop(build(), torch.randn(16, dtype=torch.float64))


@pytest.mark.parametrize("overrides", [{}, {"z_loss_weight": 0.01, "recompute": True}])
def test_dmoe_equals_the_loop_in_fp32(overrides: dict) -> None:
    check_against_loop(build(dtype=torch.float32, **overrides), torch.randn(19, 16))


@pytest.mark.parametrize("factor", [0.3, 0.5, 1.0, 1.1, 4.0])
def test_moe_drops_as_the_loop_does(factor: float) -> None:
    layer = build(MoE, capacity_factor=factor, top_k=3)
    check_against_loop(layer, torch.randn(2, 9, 16, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_moe_with_enough_capacity_equals_dmoe_bitwise(dtype: torch.dtype) -> None:
    dropless = build(dtype=dtype)
    capped = build(MoE, dtype=dtype, capacity_factor=5.0)
    capped.load_state_dict(dropless.state_dict())
    x = torch.randn(23, 16, dtype=dtype)
    results = []
    for layer in (dropless, capped):
        y, aux, metrics = layer(x)
        grads = torch.autograd.grad((y**2).sum() + aux, layer.parameters())
        results.append((y, aux, *grads, *metrics.values()))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("bits", "bound"), [(8, 0.02), (4, 0.25)])
def test_quantised_activations_change_gradients_a_little_and_the_output_not(
    bits: int, bound: float
) -> None:
    layer = build(shared_expert_hidden_size=32)
    rounded = build(shared_expert_hidden_size=32, saved_activation_bits=bits)
    rounded.load_state_dict(layer.state_dict())
    x = torch.randn(40, 16, dtype=torch.float64)
    y, y_rounded = layer(x).y, rounded(x).y
    assert torch.equal(y, y_rounded)
    exact = torch.autograd.grad(y.square().sum(), layer.parameters())
    got = torch.autograd.grad(y_rounded.square().sum(), rounded.parameters())
    errors = [(a - b).norm() / b.norm() for a, b in zip(got, exact, strict=True)]
    assert 1e-5 < max(errors) < bound


@pytest.mark.parametrize("capacity_factor", [None, 0.8])
def test_products_in_8_bits_are_of_rounded_operands(capacity_factor: float | None) -> None:
    """Of routed experts and the shared one; what is not a product with a weight is not rounded."""
    fields = {"shared_expert_hidden_size": 32, "capacity_factor": capacity_factor, "mlp_bias": True}
    cls = dMoE if capacity_factor is None else MoE
    plain, layer = build(cls, **fields), build(cls, **fields, fp8=True)
    layer.load_state_dict(plain.state_dict())
    x = torch.randn(40, 16, dtype=torch.float64)
    y, aux_loss, metrics = layer(x)
    expected = plain(x)
    assert torch.equal(aux_loss, expected.aux_loss)
    assert torch.equal(metrics["tokens_per_expert"], expected.metrics["tokens_per_expert"])
    assert_close("y", y, _with_rounded_products(plain, x), torch.float32)
    exact = torch.autograd.grad(expected.y.square().sum(), plain.parameters())
    got = torch.autograd.grad(y.square().sum(), layer.parameters())
    errors = [(a - b).norm() / b.norm() for a, b in zip(got, exact, strict=True)]
    assert 5e-3 < max(errors) < 0.2


def _with_rounded_products(layer: dMoE | MoE, x: torch.Tensor) -> torch.Tensor:
    """The output of a layer of gated experts whose products are of what `to_float8` leaves."""

    def rounded(t: torch.Tensor) -> torch.Tensor:
        codes, scales = mb_kernels.to_float8(t.detach())
        return codes.double() * scales.double()[..., None]

    def network(experts: torch.nn.Module, e: int, x: torch.Tensor) -> torch.Tensor:
        h = rounded(x) @ rounded(experts.w1[e]).T
        h = h if experts.b1 is None else h + experts.b1[e]
        gate, up = h.chunk(2, dim=1)
        y = rounded(torch.nn.functional.silu(gate) * up) @ rounded(experts.w2[e]).T
        return y if experts.b2 is None else y + experts.b2[e]

    routed, factor = layer.router(x), layer.config.capacity_factor
    most = 40 if factor is None else capacity(40, 2, 5, factor)
    y, taken = network(layer.shared_expert, 0, x), [0] * 5
    for t, ids in enumerate(routed.expert_ids_TK.tolist()):
        for k, e in enumerate(ids):
            taken[e] += 1
            if taken[e] <= most:
                y[t] += routed.weights_TK[t, k] * network(layer.experts, e, x[t : t + 1])[0]
    return y


def test_one_expert_takes_everything() -> None:
    layer = build()
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[3, 0], layer.router.weight[1, 0] = 9, 8
    x = torch.randn(11, 16, dtype=torch.float64)
    x[:, 0] = x[:, 0].abs() + 1
    check_against_loop(layer, x)
    assert layer(x).metrics["tokens_per_expert"].tolist() == [0, 11, 0, 11, 0]


@pytest.mark.parametrize("cls", [dMoE, MoE])
@pytest.mark.parametrize("balance_over", ["micro_batch", "sequence", "global_batch"])
@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16), (0, 3, 16)], ids=str)
@pytest.mark.parametrize("groups", [None, 2])
def test_zero_tokens(
    cls: type, balance_over: str, shape: tuple[int, ...], groups: int | None
) -> None:
    factor = None if cls is dMoE else 1.0
    layer = build(
        cls,
        capacity_factor=factor,
        balance_over=balance_over,
        z_loss_weight=1.0,
        num_experts=6,
        num_expert_groups=groups,
        top_k_groups=groups,
    )
    if balance_over == "global_batch":
        layer.reduce_counts = lambda counts_E: counts_E
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    y, aux, metrics = layer(x)
    assert y.shape == shape
    assert aux.item() == 0
    grads = torch.autograd.grad(y.sum() + aux, (x, *layer.parameters()))
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)
    assert all(torch.isfinite(value).all() for value in metrics.values())


@pytest.mark.parametrize("shape", [(16,), (1, 16), (1, 1, 16)], ids=str)
def test_one_token(shape: tuple[int, ...]) -> None:
    layer = build()
    x = torch.randn(shape, dtype=torch.float64)
    assert layer(x).y.shape == shape
    check_against_loop(layer, x)


def test_nan_in_one_token_stays_there() -> None:
    layer = build()
    x = torch.randn(9, 16, dtype=torch.float64)
    clean = layer(x).y
    x[4] = float("nan")
    y = layer(x).y
    assert y[4].isnan().all()
    others = [t for t in range(9) if t != 4]
    assert_close("y of the other tokens", y[others], clean[others])


def test_eval_leaves_no_state() -> None:
    layer = build(z_loss_weight=1.0, jitter_eps=0.3).eval()
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    x = torch.randn(6, 16, dtype=torch.float64)
    attributes = set(vars(layer)) | set(vars(layer.router)) | set(vars(layer.experts))
    first, second = layer(x), layer(x)
    assert first.aux_loss.item() == 0
    assert not first.aux_loss.requires_grad
    assert torch.equal(first.y, second.y)  # no jitter either
    assert set(vars(layer)) | set(vars(layer.router)) | set(vars(layer.experts)) == attributes
    assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items())


def test_metrics_count_what_happened() -> None:
    layer = build(MoE, capacity_factor=0.5, top_k=2)
    with torch.no_grad():
        layer.router.weight.zero_()  # ties go to experts 0 and 1
    aux, metrics = layer(torch.randn(10, 16, dtype=torch.float64))[1:]
    assert metrics["tokens_per_expert"].dtype == torch.int32
    assert metrics["tokens_per_expert"].tolist() == [10, 10, 0, 0, 0]
    assert metrics["dropped_fraction"].item() == pytest.approx(1 - 2 * 2 / 20)  # C = 2
    assert metrics["load_imbalance"].item() == pytest.approx(2.5)
    assert metrics["router_entropy"].item() == pytest.approx(torch.log(torch.tensor(5.0)).item())
    assert metrics["load_balancing_loss"].item() == pytest.approx(1.0)
    assert metrics["z_loss"].item() == pytest.approx(torch.log(torch.tensor(5.0)).item() ** 2)
    assert not any(value.requires_grad for value in metrics.values())
    assert aux.requires_grad


def test_counts_are_the_callers_own() -> None:
    layer = build(load_balancing_loss_weight=1.0)
    x = torch.randn(10, 16, dtype=torch.float64)
    expected = torch.autograd.grad(layer(x).aux_loss, layer.router.weight)
    aux, metrics = layer(x)[1:]
    metrics["tokens_per_expert"] += torch.arange(5, dtype=torch.int32)  # as an all-reduce does
    assert torch.equal(*torch.autograd.grad(aux, layer.router.weight), *expected)


def test_bf16_stays_near_fp32() -> None:
    layer = build(dtype=torch.float32)
    x = torch.randn(33, 16)
    expected = layer(x).y
    half = build(dtype=torch.bfloat16)
    half.load_state_dict(layer.state_dict())
    with torch.no_grad():  # the same weights and tokens, so that the routing agrees
        layer.load_state_dict(half.state_dict())
        expected = layer(x.bfloat16().float()).y
    y, aux, _ = half(x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert aux.dtype == torch.float32
    assert_close("y", y.float(), expected, dtype=torch.bfloat16)


def test_fp32_master_weights_serve_bf16_tokens() -> None:
    layer = build(dtype=torch.float32)
    x = torch.randn(12, 16).bfloat16()
    y, aux, _ = layer(x)
    assert y.dtype == torch.bfloat16
    grads = torch.autograd.grad(y.float().square().sum() + aux, layer.parameters())
    half = build(dtype=torch.bfloat16)
    half.load_state_dict(layer.state_dict())
    assert_close("y", y, half(x).y, dtype=torch.bfloat16)
    assert all(g.dtype == torch.float32 for g in grads)


def test_weights_in_16_bits_serve_fp32_tokens() -> None:
    options = {
        "mlp_bias": True,
        "output_bias": True,
        "shared_expert_hidden_size": 24,
        "shared_expert_bias": True,
        "shared_expert_gate": True,
        "shared_expert_weighted_sum": True,
    }
    layer = build(dtype=torch.bfloat16, **options)
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(12, 16)
    wide = build(dtype=torch.float32, **options)
    wide.load_state_dict(layer.state_dict())
    assert_close("y", layer(x).y, wide(x).y)


class _Elsewhere(torch.nn.Module):
    """A router of one's own that sends slots to experts that do not exist."""

    def forward(self, x_TD: torch.Tensor) -> RouterOutput:
        ids = torch.tensor([[0, 7], [1, -3], [-1, -1], [5, 2]], dtype=torch.int32)
        logits = torch.zeros(4, 5)
        return RouterOutput(torch.ones(4, 2), ids, logits.softmax(-1), logits)


def test_ids_of_no_expert_are_counted_as_dropped() -> None:
    layer = build(dtype=torch.float32)
    layer.router = _Elsewhere()
    metrics = layer(torch.randn(4, 16)).metrics
    assert metrics["tokens_per_expert"].tolist() == [1, 1, 1, 0, 0]
    assert metrics["dropped_fraction"].item() == pytest.approx(3 / 6)  # -1 means no expert


@pytest.mark.parametrize("bad", [torch.zeros(3, 8), torch.zeros(()), torch.zeros(3, 16).int()])
def test_wrong_input_is_named(bad: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"expected floating-point x of shape \[\.\.\., 16\], got"):
        build()(bad)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.int8], ids=str)
def test_parameters_of_another_dtype_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"floating-point dtype of 16 bits or more, got {dtype}"):
        build(dtype=dtype)


@pytest.mark.parametrize("bits", [8, 4])
def test_gradients_with_few_bits_are_those_at_the_rounded_pre_activations(bits: int) -> None:
    """Of a shared expert's gate and of the router too, which sum few numbers that cancel.

    So they are off by up to their own size in 4 bits, but by rounding alone.
    """
    torch.manual_seed(3)
    config = MoEConfig(
        hidden_size=32,
        ffn_hidden_size=48,
        num_experts=1,
        score_function="sigmoid",
        shared_expert_hidden_size=48,
        shared_expert_gate=True,
        init_method_std=0.1,
        load_balancing_loss_weight=0.0,
        saved_activation_bits=bits,
    )
    layer = dMoE(config)
    x = torch.randn(7, 32, requires_grad=True)
    grad_y = torch.randn(7, 32)
    names, leaves = zip(*layer.named_parameters(), strict=True)
    got = torch.autograd.grad((layer(x).y * grad_y).sum(), (x, *leaves))
    exact = dict(zip(names, leaves, strict=True))

    def network(prefix: str, gate: str) -> torch.Tensor:
        h = x @ exact[f"{prefix}.w1"][0].T
        codes, scales = mb_kernels.quantize(h, bits)
        rounded = mb_kernels.dequantize(codes, scales, bits=bits, dtype=h.dtype)
        left, right = (h + (rounded - h).detach()).chunk(2, dim=1)
        y = (torch.nn.functional.silu(left) * right) @ exact[f"{prefix}.w2"][0].T
        return torch.sigmoid(x @ exact[gate].T) * y

    y = network("experts", "router.weight") + network("shared_expert", "shared_expert.gate")
    wanted = torch.autograd.grad((y * grad_y).sum(), (x, *leaves))
    for name, a, b in zip(("x", *names), got, wanted, strict=True):
        assert_close(name, a, b)
