"""The router's fp32 product, its selection rules and its balancing bias."""

from __future__ import annotations

import pytest
import torch
from layers_oracle import assert_close
from mb_layers import MoEConfig, Router, linear_fp32, update_balancing_bias
from mb_layers.linear_fp32 import _three_parts

SIZES = {"hidden_size": 48, "ffn_hidden_size": 16, "num_experts": 6, "top_k": 2}


def build(dtype: torch.dtype = torch.float32, **overrides) -> Router:
    return Router(MoEConfig(**(SIZES | {"init_method_std": 0.3} | overrides)), dtype=dtype)


def test_three_bf16_numbers_hold_an_fp32_number() -> None:
    x = torch.randn(1000) * torch.logspace(-20, 20, 1000)
    assert torch.equal(sum(part.double() for part in _three_parts(x)).float(), x)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bf16_tokens_get_fp32_logits(weight_dtype: torch.dtype) -> None:
    """Against fp64 on the same rounded numbers: as accurate as an fp32 product, not a bf16 one."""
    router = build(weight_dtype)
    x = torch.randn(33, 48).bfloat16()
    logits = router(x).logits_TE
    exact = x.double() @ router.weight.double().T
    assert logits.dtype == torch.float32
    assert (logits - exact).abs().max() < 1e-5 * exact.abs().max()


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bf16_tokens_get_gradients_rounded_once(weight_dtype: torch.dtype) -> None:
    router = build(weight_dtype)
    x = torch.randn(33, 48).bfloat16().requires_grad_()
    grad = torch.randn(33, 6)
    d_x, d_weight = torch.autograd.grad(router(x).logits_TE, (x, router.weight), grad)
    assert (d_x.dtype, d_weight.dtype) == (x.dtype, weight_dtype)
    weight = router.weight.detach()
    rounded = grad.bfloat16().double()
    exact_x = rounded @ weight.to(torch.bfloat16).double()
    exact_weight = rounded.T @ x.detach().double()
    assert (d_x - exact_x).abs().max() < 2**-8 * exact_x.abs().max()
    bound = 2**-8 if weight_dtype == torch.bfloat16 else 1e-6
    assert (d_weight - exact_weight).abs().max() < bound * exact_weight.abs().max()


def test_half_precision_router_on_request() -> None:
    x = torch.randn(9, 48).bfloat16()
    router = build(torch.bfloat16, router_fp32=False)
    expected = torch.nn.functional.linear(x, router.weight).float()
    assert torch.equal(router(x).logits_TE, expected)
    assert torch.equal(router.float()(x).logits_TE, expected)  # weights wider than tokens


def test_router_bias_is_a_parameter_of_the_router_s_dtype_added_in_fp32() -> None:
    router = build(torch.bfloat16, router_bias=True)
    assert (router.bias.shape, router.bias.dtype) == ((6,), torch.bfloat16)
    x = torch.randn(9, 48).bfloat16()
    plain = router(x).logits_TE
    torch.nn.init.normal_(router.bias)
    assert torch.equal(router(x).logits_TE, plain + router.bias.float())
    router.reset_parameters()
    assert not router.bias.any()


def test_fp16_tokens() -> None:
    router = build(torch.float16)
    x = torch.randn(9, 48).half()
    exact = x.double() @ router.weight.double().T
    assert_close("logits", router(x).logits_TE, exact.float())


def of_all_sizes(rows: int, columns: int) -> torch.Tensor:
    """Random numbers in columns from 1e-12 to 1e6, one of zeros and one without a normal fp16."""
    numbers = torch.randn(rows, columns) * torch.logspace(-12, 6, columns)
    numbers[:, 1] = 0.0
    numbers[:, 2] = torch.randn(rows) * 1e-6
    return numbers


def error_by_row(got: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest error of a number, relative to the largest of its row."""
    assert got.dtype == torch.float32
    largest = exact.abs().amax(dim=1, keepdim=True)
    return ((got - exact).abs() / largest.clamp(min=1e-300)).max().item()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_compiled_logits_are_as_accurate(monkeypatch, dtype: torch.dtype) -> None:
    """The compiler leaves out casts to 16 bits and back, by which parts of a weight were made."""
    monkeypatch.setattr(linear_fp32, "_in_halves", lambda x: True)
    x, weight = torch.randn(33, 48).to(dtype), of_all_sizes(48, 8).T
    logits = torch.compile(linear_fp32.linear_fp32)(x, weight)
    assert error_by_row(logits.T, (x.double() @ weight.double().T).T) < 1e-6


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [0, 33])
def test_fp16_tokens_by_matrix_units(monkeypatch, tokens: int, weight_dtype: torch.dtype) -> None:
    """What a GPU computes, on a CPU: as accurate as an fp32 product, whatever an expert's size."""
    monkeypatch.setattr(linear_fp32, "_in_halves", lambda x: True)
    x = torch.randn(tokens, 48).half().requires_grad_()
    weight = of_all_sizes(48, 8).T.to(weight_dtype).requires_grad_()
    logits = linear_fp32.linear_fp32(x, weight)
    exact = x.detach().double() @ weight.detach().double().T
    grad = of_all_sizes(tokens, 8) * torch.logspace(0, -6, tokens)[:, None]
    d_x, d_weight = torch.autograd.grad(logits, (x, weight), grad)
    assert (d_x.dtype, d_weight.dtype) == (x.dtype, weight_dtype)
    exact_weight = grad.double().T @ x.detach().double()
    if not tokens:
        assert (logits.shape, d_x.shape) == ((0, 8), (0, 48))
        assert not d_weight.any()
        return
    assert error_by_row(logits.T, exact.T) < 1e-6
    bound = 2**-10 if weight_dtype == torch.float32 else 2**-7
    assert error_by_row(d_weight.float(), exact_weight) < bound
    wide_x = linear_fp32._fp16_grad_x(grad, weight.detach())  # before its cast, which overflows
    assert torch.equal(d_x, wide_x.half())
    assert error_by_row(wide_x, grad.double() @ weight.detach().double()) < 2**-10


def test_fp16_logits_of_an_expert_without_numbers_leave_the_others_alone(monkeypatch) -> None:
    monkeypatch.setattr(linear_fp32, "_in_halves", lambda x: True)
    x, weight = torch.randn(9, 48).half(), torch.randn(6, 48)
    weight[1, 3], weight[4, 5] = torch.nan, torch.inf
    logits = linear_fp32.linear_fp32(x, weight)
    assert not logits[:, [1, 4]].isfinite().any()
    rest = [0, 2, 3, 5]
    assert error_by_row(logits[:, rest].T, (x.double() @ weight[rest].double().T).T) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_tokens_in_16_bits_on_a_gpu(dtype: torch.dtype, compiled: bool) -> None:
    x = torch.randn(333, 768, device="cuda").to(dtype).requires_grad_()
    weight = of_all_sizes(768, 64).T.cuda().requires_grad_()
    grad = of_all_sizes(333, 64).cuda()
    call = torch.compile(linear_fp32.linear_fp32) if compiled else linear_fp32.linear_fp32
    logits = call(x, weight)
    _, d_weight = torch.autograd.grad(logits, (x, weight), grad)
    x, weight, grad = (t.detach().double() for t in (x, weight, grad))
    assert error_by_row(logits.T, (x @ weight.T).T) < 3e-6
    assert error_by_row(d_weight, grad.T @ x) < (2**-9 if dtype == torch.float16 else 2**-7)


FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("x_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("weight_dtype", FLOATS, ids=str)
def test_any_dtype_of_tokens_meets_any_of_the_weight(
    x_dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    router = build(weight_dtype, top_k=1)
    for tokens in (7, 0):
        x = torch.randn(tokens, 48).to(x_dtype).requires_grad_()
        logits = router(x).logits_TE
        exact = x.double() @ router.weight.double().T
        wide = torch.float64 in (x_dtype, weight_dtype)
        assert logits.dtype == (torch.float64 if wide else torch.float32)
        assert_close("logits", logits, exact)
        grad = torch.randn(tokens, 6, dtype=torch.float64)
        wanted = (x, router.weight)
        got = torch.autograd.grad(logits, wanted, grad.to(logits.dtype))
        for name, a, b in zip(
            ("dx", "dw"), got, torch.autograd.grad(exact, wanted, grad), strict=True
        ):
            # Two roundings to 16 bits, of fp32 and of fp64 sums, may differ by one place.
            rounded = {torch.bfloat16, torch.float16} & {x_dtype, weight_dtype}
            low = max(rounded or {torch.float32}, key=lambda dtype: torch.finfo(dtype).eps)
            assert_close(name, a.double(), b.double(), low)


@pytest.mark.parametrize("overrides", [{}, {"balancing_bias": True}], ids=["fused", "chosen"])
def test_ties_go_to_the_lower_id(overrides: dict) -> None:
    router = build(**overrides)
    torch.nn.init.zeros_(router.weight)
    assert router(torch.randn(5, 48)).expert_ids_TK.tolist() == [[0, 1]] * 5


def test_renormalize_is_softmax_after_top_k() -> None:
    routed = build(renormalize=True)(torch.randn(7, 48))
    chosen = routed.logits_TE.gather(1, routed.expert_ids_TK.long())
    assert_close("weights", routed.weights_TK, torch.softmax(chosen, dim=-1))


def test_sigmoids_that_all_underflow_have_no_weights_but_probabilities() -> None:
    router = build(score_function="sigmoid", renormalize=True)
    torch.nn.init.normal_(router.weight, mean=-10)
    routed = router(torch.ones(3, 48))  # logits around -480, whose sigmoid is exp(logit)
    assert torch.equal(routed.weights_TK, torch.zeros(3, 2))
    assert_close("probabilities", routed.probs_TE, torch.softmax(routed.logits_TE, dim=-1))
    of_weights, of_probs = (
        torch.autograd.grad((part * 100).sum(0)[0], router.weight, retain_graph=True)[0]
        for part in (routed.weights_TK, routed.probs_TE)
    )
    assert torch.equal(of_weights, torch.zeros_like(of_weights))
    expected = torch.softmax(routed.logits_TE, dim=-1)
    (expected,) = torch.autograd.grad((expected * 100).sum(0)[0], router.weight)
    assert_close("gradient", of_probs, expected)


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("score_function", ["sigmoid", "softmax"])
def test_a_token_that_visits_no_expert_leaves_the_gradient_as_it_is(score_function, p) -> None:
    router = build(score_function=score_function, renormalize=True, renormalize_p=p)
    x, ids = torch.randn(4, 48), torch.tensor([[0, 3], [-1, 6], [2, 1], [7, -1]])
    gradients = []
    for tokens in (x, x[[0, 2]]):
        routed = router(tokens, expert_ids_TK=ids if tokens is x else ids[[0, 2]])
        score = (routed.weights_TK * torch.tensor([90.0, -50.0])).sum()
        gradients += torch.autograd.grad(score, router.weight)
    assert gradients[1].count_nonzero()
    assert_close("gradient", *gradients)


def test_jitter_moves_the_router_in_training_alone() -> None:
    router = build(jitter_eps=0.2)
    x = torch.randn(50, 48)
    plain = x @ router.weight.T
    noisy = router(x).logits_TE
    assert not torch.allclose(noisy, plain)
    # |x (1 + u) w - x w| <= eps |x| |w|
    bound = 0.2 * x.abs() @ router.weight.abs().T
    assert ((noisy - plain).abs() <= bound + 1e-5).all()
    assert_close("eval", router.eval()(x).logits_TE, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("eps", [0.1, 0.01, 0.001])
def test_jitter_has_the_mean_and_the_spread_of_its_eps(eps: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.full((2000, 48), 1.25, dtype=dtype)
    noise = build(jitter_eps=eps).jitter(x).double() / 1.25 - 1
    assert noise.abs().max() <= 1.001 * eps
    assert noise.mean().abs() < 0.01 * eps
    assert abs(noise.std() / eps - 3**-0.5) < 0.01


def test_jitter_of_a_half_precision_router_is_rounded_once() -> None:
    router = build(torch.bfloat16, router_fp32=False, jitter_eps=0.01)
    noisy = router.jitter(torch.ones(2000, 48, dtype=torch.bfloat16))
    assert noisy.dtype == torch.bfloat16
    assert (noisy.double() - 1).mean().abs() < 1e-3
    assert {*noisy.unique().tolist()} == {k / 256 for k in (253, 254, 255, 256, 258)}


def test_balancing_bias_steers_the_choice_and_not_the_weights() -> None:
    router = build(balancing_bias=True)
    x = torch.randn(40, 48)
    before = router(x)
    router.balancing_bias[4] = 10
    after = router(x)
    assert (after.expert_ids_TK == 4).any(dim=1).all()
    scores = torch.softmax(after.logits_TE, dim=-1)
    assert_close("weights", after.weights_TK, scores.gather(1, after.expert_ids_TK.long()))
    assert torch.equal(after.probs_TE, before.probs_TE)


@pytest.mark.parametrize("cast", ["bfloat16", "half", "double", "to"])
def test_balancing_bias_stays_fp32_whatever_the_model_is_cast_to(cast: str) -> None:
    router = build(balancing_bias=True)
    router.balancing_bias.copy_(1 + torch.arange(6) * 1e-3)
    before = router.balancing_bias.clone()
    router = router.to(torch.bfloat16) if cast == "to" else getattr(router, cast)()
    assert router.weight.dtype != torch.float32
    assert torch.equal(router.balancing_bias, before)
    update_balancing_bias(router, torch.tensor([9, 0, 0, 0, 0, 0]), rate=1e-3)
    assert (router.balancing_bias - before).abs().min() > 1e-4
    assert torch.equal(dict(router.named_buffers())["balancing_bias"], router.balancing_bias)
    state = {name: tensor.bfloat16() for name, tensor in router.state_dict().items()}
    router.load_state_dict(state, assign=True)
    assert (router.weight.dtype, router.balancing_bias.dtype) == (torch.bfloat16, torch.float32)


def test_tokens_of_another_shape_are_named() -> None:
    """With a balancing bias a router of [B, S, D] used to choose among the tokens of a sequence."""
    router = build(balancing_bias=True)
    width = router.config.hidden_size
    for shape in ((2, 3, width), (2, width, width), (3, width + 1)):
        with pytest.raises(ValueError, match=r"expected x_TD of shape \[T, "):
            router(torch.zeros(shape))


class _Widened(Router):
    def choice(self, scores_TE, logits_TE, mask_T):
        return torch.cat([scores_TE, scores_TE + 1], dim=1)


def test_a_choice_has_a_number_for_each_expert() -> None:
    router = _Widened(MoEConfig(**SIZES))
    with pytest.raises(ValueError, match=r"a choice of shape \(3, 6\).*got \(3, 12\)"):
        router(torch.ones(3, 48))


def test_balancing_bias_evens_out_a_skewed_load() -> None:
    router = build(balancing_bias=True, score_function="sigmoid", num_experts=4, top_k=1)
    with torch.no_grad():
        router.weight[2] += 1.0
    x = torch.randn(400, 48) + 0.2

    def load() -> torch.Tensor:
        return torch.bincount(router(x).expert_ids_TK.flatten(), minlength=4)

    skewed = load().max().item()
    for _ in range(200):
        update_balancing_bias(router, load(), rate=0.01)
    assert load().max().item() < 130 < skewed
    assert_close("mean of the bias", router.balancing_bias.mean(), torch.zeros(()))


def test_update_balancing_bias_is_one_step_of_its_rate() -> None:
    router = build(balancing_bias=True, num_experts=4)
    update_balancing_bias(router, torch.tensor([10, 2, 2, 2]), rate=0.1)
    assert_close("bias", router.balancing_bias, torch.tensor([-0.15, 0.05, 0.05, 0.05]))
    with pytest.raises(ValueError, match=r"shape \(4,\), got .* of shape \(3,\)"):
        update_balancing_bias(router, torch.zeros(3), rate=0.1)
    with pytest.raises(ValueError, match="balancing_bias=True"):
        update_balancing_bias(build(), torch.zeros(6), rate=0.1)
    with pytest.raises(ValueError, match="balancing_bias=True"):
        update_balancing_bias(torch.nn.Linear(4, 4), torch.zeros(4), rate=0.1)  # one's own router


@pytest.mark.parametrize(
    "counts",
    [[2**24 + 1, 2**24, 2**24 - 1, 2**24], [1_000_008, 999_998, *[1_000_003] * 58]],
    ids=["counts", "sum"],
)
def test_a_load_that_is_the_mean_stays_so_beyond_fp32(counts: list[int]) -> None:
    """fp32 rounds counts beyond 2^24, and their sum: experts moved that had the mean."""
    router = build(balancing_bias=True, num_experts=len(counts))
    update_balancing_bias(router, torch.tensor(counts), rate=0.1)
    mean = sum(counts) // len(counts)
    expected = [0.1 * ((mean > count) - (mean < count)) for count in counts]
    assert_close("bias", router.balancing_bias, torch.tensor(expected))
