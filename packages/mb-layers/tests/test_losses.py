"""Closed-form values of the losses, their gradients, and what attach_aux_loss does to them."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace

import pytest
import torch
from layers_oracle import assert_close
from mb_layers import (
    MoE,
    MoEConfig,
    Router,
    RouterOutput,
    attach_aux_loss,
    dMoE,
    load_balancing_loss,
    record_routing,
    sequence_load_balancing_loss,
    z_loss,
)
from mb_layers.balance import router_losses
from torch import nn
from torch.utils.checkpoint import checkpoint


@pytest.mark.parametrize("num_experts", [1, 4, 64])
@pytest.mark.parametrize("top_k", [1, 2])
def test_balanced_load_gives_exactly_one(num_experts: int, top_k: int) -> None:
    top_k = min(top_k, num_experts)
    probs = torch.full((128, num_experts), 1 / num_experts)
    counts = torch.full((num_experts,), 128 * top_k // num_experts, dtype=torch.int32)
    loss = load_balancing_loss(probs, counts)
    assert loss.dtype == torch.float32
    assert loss.item() == 1.0


@pytest.mark.parametrize("alpha", [0.01, 0.1])
@pytest.mark.parametrize("balance_over", ["micro_batch", "sequence", "global_batch"])
def test_balanced_layer_gives_exactly_alpha(alpha: float, balance_over: str) -> None:
    config = MoEConfig(
        hidden_size=8,
        ffn_hidden_size=16,
        num_experts=8,
        top_k=2,
        load_balancing_loss_weight=alpha,
        uniform_assignment=True,
        balance_over=balance_over,
    )
    layer = dMoE(config)
    if balance_over == "global_batch":
        layer.reduce_counts = lambda counts_E: 3 * counts_E
    torch.nn.init.zeros_(layer.router.weight)
    assert layer(torch.randn(2, 16, 8)).aux_loss.item() == pytest.approx(alpha, rel=1e-7)


@pytest.mark.parametrize(("own", "other"), [("sigmoid", "softmax"), ("softmax", "sigmoid")])
def test_the_loss_is_of_the_routers_own_scores(own: str, other: str) -> None:
    sizes = {"hidden_size": 8, "ffn_hidden_size": 4, "num_experts": 3, "init_method_std": 0.5}
    router = Router(MoEConfig(**sizes, score_function=own), dtype=torch.float64)
    layer = dMoE(MoEConfig(**sizes, score_function=other), router=router, dtype=torch.float64)
    x = torch.randn(7, 8, dtype=torch.float64)
    _, got, metrics = layer(x)
    probs, counts = router(x).probs_TE, metrics["tokens_per_expert"]
    want = layer.config.load_balancing_loss_weight * load_balancing_loss(probs, counts)
    assert_close("aux_loss", got, want)
    grads = (torch.autograd.grad(loss, router.weight)[0] for loss in (got, want))
    assert_close("d router.weight", *grads)


@pytest.mark.parametrize("of_all_modules", [False, True])
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_the_loss_is_of_what_a_hook_of_the_router_returns(
    score_function: str, of_all_modules: bool
) -> None:
    """A function of ours that is called behind the router returns nothing, and changes nothing."""
    sizes = {"hidden_size": 8, "ffn_hidden_size": 4, "num_experts": 3, "init_method_std": 0.5}
    config = MoEConfig(**sizes, score_function=score_function, load_balancing_loss_weight=1.0)
    layer = dMoE(config, dtype=torch.float64)
    x, returned = torch.randn(7, 8, dtype=torch.float64), []

    def soften(module: nn.Module, args: object, routed: RouterOutput) -> RouterOutput | None:
        if module is not layer.router:
            return None
        returned.append(routed._replace(probs_TE=torch.softmax(routed.logits_TE / 3, dim=-1)))
        return returned[-1]

    _, before, _ = layer(x)
    with record_routing(layer):
        assert torch.equal(layer(x).aux_loss, before)
    if of_all_modules:
        hook = nn.modules.module.register_module_forward_hook(soften)
    else:
        hook = layer.router.register_forward_hook(soften)
    _, got, metrics = layer(x)
    hook.remove()
    want = load_balancing_loss(returned[0].probs_TE, metrics["tokens_per_expert"])
    assert_close("aux_loss", got, want)
    weight = layer.router.weight
    grads = (torch.autograd.grad(loss, weight, retain_graph=True)[0] for loss in (got, want))
    assert_close("d router.weight", *grads)


def test_all_tokens_to_one_expert_gives_num_experts() -> None:
    probs = torch.zeros(10, 5)
    probs[:, 2] = 1
    assert load_balancing_loss(probs, torch.tensor([0, 0, 10, 0, 0])).item() == 5


def test_gradient_reaches_probs_and_not_counts() -> None:
    probs = torch.softmax(torch.randn(7, 3, dtype=torch.float64), dim=-1).requires_grad_()
    counts = torch.tensor([9, 4, 1])
    (grad,) = torch.autograd.grad(load_balancing_loss(probs, counts), probs)
    # E / (K T) * n_e / T
    expected = (3 / 14 * counts.double() / 7).expand(7, 3)
    assert_close("d probs", grad, expected)


def test_global_counts_average_to_the_global_loss() -> None:
    """The mean over equal micro-batches, each with the global counts, is the global loss."""
    probs = torch.softmax(torch.randn(4, 6, 5, dtype=torch.float64), dim=-1)
    counts = torch.randint(0, 9, (5,))
    local = [load_balancing_loss(p, counts) for p in probs]
    assert_close("mean", sum(local) / 4, load_balancing_loss(probs.flatten(0, 1), counts))


def test_layer_reduces_counts_over_the_global_batch() -> None:
    config = MoEConfig(
        hidden_size=8, ffn_hidden_size=16, num_experts=4, top_k=2, balance_over="global_batch"
    )
    elsewhere = torch.tensor([100, 0, 0, 0])
    layer = dMoE(config, reduce_counts=lambda counts_E: counts_E + elsewhere, dtype=torch.float64)
    x = torch.randn(16, 8, dtype=torch.float64)
    counts = layer(x).metrics["tokens_per_expert"]
    assert counts.sum() == 32  # the metric stays this micro-batch's own
    expected = load_balancing_loss(layer.router(x).probs_TE, counts + elsewhere)
    assert_close("loss", layer(x).metrics["load_balancing_loss"], expected.detach())


def test_counts_may_be_reduced_in_place_but_have_to_be_returned() -> None:
    """As `dist.all_reduce` does, which returns None."""
    config = MoEConfig(
        hidden_size=8, ffn_hidden_size=16, num_experts=4, top_k=2, balance_over="global_batch"
    )
    x = torch.randn(16, 8)
    layer = dMoE(config, reduce_counts=lambda counts_E: counts_E.mul_(2))
    metrics = layer(x).metrics
    assert metrics["tokens_per_expert"].sum() == 32
    assert metrics["dropped_fraction"] == 0
    for returned in (None, torch.ones(3)):
        layer.reduce_counts = lambda counts_E, value=returned: value
        with pytest.raises(ValueError, match=r"to return counts of shape \(4,\), got"):
            layer(x)


def test_reduced_counts_may_be_a_total_that_goes_on() -> None:
    """Of a step's micro-batches, whose backward passes come behind the last forward pass."""
    config = MoEConfig(
        hidden_size=8, ffn_hidden_size=16, num_experts=4, top_k=2, balance_over="global_batch"
    )
    layer, batches = dMoE(config), torch.randn(3, 16, 8)
    grads = []
    for own in (torch.clone, lambda total_E: total_E):
        total_E = torch.zeros(4, dtype=torch.int32)
        layer.reduce_counts = lambda counts_E, t=total_E, own=own: own(t.add_(counts_E))
        loss = torch.stack([layer(x).aux_loss for x in batches]).sum()
        grads += torch.autograd.grad(loss, layer.router.weight)
    assert torch.equal(*grads)


def test_reduce_counts_needs_the_global_batch() -> None:
    config = MoEConfig(hidden_size=8, ffn_hidden_size=16, num_experts=4)
    with pytest.raises(ValueError, match="balance_over='micro_batch'"):
        dMoE(config, reduce_counts=lambda counts_E: counts_E)


def test_sequence_loss_is_the_mean_over_sequences() -> None:
    probs = torch.softmax(torch.randn(3, 5, 4, dtype=torch.float64), dim=-1)
    ids = probs.topk(2).indices
    each = [
        load_balancing_loss(p, torch.bincount(i.flatten(), minlength=4))
        for p, i in zip(probs, ids, strict=True)
    ]
    assert_close("loss", sequence_load_balancing_loss(probs, ids), sum(each) / 3)


@pytest.mark.parametrize("balance_over", ["micro_batch", "sequence", "global_batch"])
@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"balancing_bias": True, "score_function": "sigmoid"}, False),
        ({"balancing_bias": True, "num_expert_groups": 2, "top_k_groups": 1}, False),
        ({"num_zero_experts": 2, "balancing_bias": True}, False),
        ({"uniform_assignment": True}, False),
        ({"uniform_assignment": True}, True),
        ({}, True),
        ({}, False),
    ],
)
def test_balance_by_scores_counts_the_best_whatever_is_visited(
    options: dict, given: bool, balance_over: str
) -> None:
    torch.manual_seed(0)
    config = MoEConfig(
        hidden_size=8, ffn_hidden_size=4, num_experts=6, top_k=2, balance_over=balance_over,
        load_balancing_loss_weight=1.0, balance_by="scores", **options,
    )  # fmt: skip
    layer = dMoE(config)
    torch.nn.init.normal_(layer.router.weight)
    if config.balancing_bias:
        layer.router.balancing_bias.copy_(torch.randn(config.num_choices))
    if balance_over == "global_batch":
        layer.reduce_counts = lambda counts_E: 3 * counts_E
    x, mask = torch.randn(2, 5, 8), torch.tensor([[1, 1, 0, 1, 1], [0, 1, 1, 1, 0]]).bool()
    routing = torch.randint(0, 6, (2, 5, 2)) if given else None
    out = layer(x, mask=mask, routing=routing)
    scores = x @ layer.router.weight.T
    probs = scores.softmax(-1)
    if config.score_function == "sigmoid":
        probs = scores.sigmoid() / scores.sigmoid().sum(-1, keepdim=True)
    best = scores.topk(2).indices
    if balance_over == "sequence":
        want = sequence_load_balancing_loss(probs, best, mask_BS=mask)
    else:
        counts = torch.bincount(best[mask].flatten(), minlength=config.num_choices)
        want = load_balancing_loss(probs[mask], counts)
    assert_close("aux_loss", out.aux_loss, want)
    visits = layer.route(x, mask=mask).expert_ids_TK if routing is None else routing.view(-1, 2)
    visits = visits[mask.flatten()].long().flatten()
    there = torch.bincount(visits, minlength=config.num_choices)
    assert out.metrics["tokens_per_expert"].tolist() == there.tolist()
    got, wanted = (
        torch.autograd.grad(loss, layer.router.weight, retain_graph=True)[0]
        for loss in (out.aux_loss, want)
    )
    assert_close("gradient", got, wanted)


def test_a_routing_that_does_not_say_the_best_is_an_error_in_training() -> None:
    config = MoEConfig(hidden_size=8, ffn_hidden_size=4, num_experts=6, balance_by="scores")
    layer, x = dMoE(config), torch.randn(5, 8)
    routed = layer.route(x)
    assert layer(x, routing=routed).aux_loss > 0
    visits_alone = routed._replace(balanced_ids_TK=None)
    with pytest.raises(ValueError, match=r"expected balanced_ids_TK .* with balance_by='scores'"):
        layer(x, routing=visits_alone)
    assert layer(x, routing=visits_alone._replace(probs_TE=None)).aux_loss == 0
    assert layer.eval()(x, routing=visits_alone).aux_loss == 0


@pytest.mark.parametrize("sequence_dim", [-2, -3, 0, 1])
def test_layer_balances_along_the_sequence_it_is_told(sequence_dim: int) -> None:
    config = MoEConfig(
        hidden_size=8,
        ffn_hidden_size=16,
        num_experts=4,
        top_k=2,
        balance_over="sequence",
        sequence_dim=sequence_dim,
        init_method_std=1.0,
    )
    layer = dMoE(config)
    x = torch.randn(6, 3, 8)
    x_BSD = x if sequence_dim in (-2, 1) else x.transpose(0, 1)
    routed = layer.router(x_BSD.reshape(-1, 8))
    expected = sequence_load_balancing_loss(
        routed.probs_TE.view(*x_BSD.shape[:2], 4), routed.expert_ids_TK.view(*x_BSD.shape[:2], 2)
    )
    assert_close("loss", layer(x).metrics["load_balancing_loss"], expected.detach())


def test_sequence_loss_masks_ids_of_experts_and_divides_by_the_number_it_is_told() -> None:
    """A layer's padding has no expert already; a caller's own may still have one."""
    probs = torch.softmax(torch.randn(2, 5, 4, dtype=torch.float64), dim=-1)
    ids = probs.topk(2).indices
    mask = torch.arange(5) < torch.tensor([3, 1])[:, None]
    first, second = (
        sequence_load_balancing_loss(probs[b : b + 1, :n], ids[b : b + 1, :n].short())
        for b, n in enumerate((3, 1))
    )
    got = sequence_load_balancing_loss(probs, ids, mask_BS=mask)
    assert_close("loss", got, (3 * first + second) / 4)
    for number in (0.5, torch.tensor(0.5)):
        one = load_balancing_loss(probs[0], torch.arange(4), num_tokens=number)
        assert_close("of one", one, 10 * load_balancing_loss(probs[0], torch.arange(4)))
        got = sequence_load_balancing_loss(probs, ids, mask_BS=mask, num_tokens=number)
        assert_close("over a mean below 1", got, (3 * first + second) / 0.5)


def test_the_mean_over_parts_of_sequences_is_the_loss_of_the_whole() -> None:
    """Each part with the counts of all, as ranks have them that hold one each."""
    probs = torch.softmax(torch.randn(3, 6, 4, dtype=torch.float64), dim=-1)
    ids = probs.topk(2).indices
    parts = [(probs[:, at : at + 2], ids[:, at : at + 2]) for at in (0, 2, 4)]
    counts: list[torch.Tensor] = []

    def note(counts_BE: torch.Tensor) -> torch.Tensor:
        counts.append(counts_BE)
        return counts_BE

    apart = [sequence_load_balancing_loss(*part, reduce_counts=note) for part in parts]
    total = torch.stack(counts).sum(0)
    assert torch.equal(total.sum(1), torch.full((3,), 12.0, dtype=torch.float64))
    losses = [sequence_load_balancing_loss(*part, reduce_counts=lambda _: total) for part in parts]
    expected = sequence_load_balancing_loss(probs, ids)
    assert_close("loss", torch.stack(losses).mean(), expected)
    assert abs(torch.stack(apart).mean() - expected) > 1e-2


def test_losses_of_one_token_in_16_bits_are_in_fp32() -> None:
    probs = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.bfloat16)
    expected = 3 * probs[0, 0].float()
    alone = load_balancing_loss(probs, torch.tensor([1, 0, 0]))
    in_sequence = sequence_load_balancing_loss(probs[None], torch.zeros(1, 1, 1, dtype=torch.int32))
    assert torch.equal(alone, expected)
    assert torch.equal(in_sequence, expected)


def test_entropy_of_16_bit_probabilities_is_in_fp32() -> None:
    """Added up in fp16, the entropies of some ten thousand tokens are infinite."""
    probs = torch.full((30_000, 64), 1 / 64, dtype=torch.float16)
    routed = RouterOutput(probs[:, :1], torch.zeros(30_000, 1, dtype=torch.int32), probs, None)
    layer = dMoE(MoEConfig(hidden_size=2, ffn_hidden_size=2, num_experts=64))
    found = layer(torch.randn(30_000, 2), routing=routed).metrics["router_entropy"]
    assert_close("entropy", found, torch.tensor(math.log(64)))


def test_load_imbalance_is_beyond_int32() -> None:
    """The fullest expert's slots times the experts are more than any count."""
    counts = torch.zeros(2**16, dtype=torch.int32)
    counts[3] = 2**15
    found = router_losses(
        MoEConfig(hidden_size=2, ffn_hidden_size=2, num_experts=len(counts)),
        RouterOutput(torch.ones(2**15, 1), torch.full((2**15, 1), 3), None, None),
        SimpleNamespace(tokens_per_expert_E=counts, kept_slots=counts.sum()),
        torch.Size((2**15, 2)),
        balance_counts_E=counts,
        mask_T=None,
        num_tokens=None,
        score_function=None,
        ids_are_experts=True,
    )
    assert found.load_imbalance.item() == len(counts)


def test_sequence_loss_stays_fp32_under_autocast() -> None:
    probs_BSE = torch.softmax(torch.randn(2, 9, 5), dim=-1)
    ids_BSK = probs_BSE.topk(2).indices
    expected = sequence_load_balancing_loss(probs_BSE, ids_BSK)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(sequence_load_balancing_loss(probs_BSE, ids_BSK), expected)


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_balance_over_sequences_leaves_the_other_metrics_as_they_are(weight: float) -> None:
    """It takes the definitions, the micro-batch's balance the op."""
    found = []
    x = torch.randn(2, 9, 8)
    for balance_over in ("micro_batch", "sequence"):
        config = MoEConfig(
            hidden_size=8,
            ffn_hidden_size=16,
            num_experts=4,
            top_k=2,
            capacity_factor=0.7,
            init_method_std=1.0,
            load_balancing_loss_weight=weight,
            balance_over=balance_over,
        )
        torch.manual_seed(3)
        layer = MoE(config)
        out = layer(x)
        assert not any(value.requires_grad for value in out.metrics.values())
        assert_close("aux_loss", out.aux_loss, weight * out.metrics["load_balancing_loss"])
        over_twice = layer(x, valid_tokens=36).metrics
        for name in ("load_balancing_loss", "z_loss", "router_entropy"):
            assert_close(name, 2 * over_twice[name], out.metrics[name])
        found.append({k: v for k, v in out.metrics.items() if k != "load_balancing_loss"})
    assert found[0]["dropped_fraction"] > 0
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, msg=lambda m, n=name: f"{n}: {m}")
    alone, within = layer(x[0, 0]), layer(x[:1, :1])  # a token without a sequence is one
    assert_close("aux_loss", alone.aux_loss, within.aux_loss)


def test_a_sequence_that_x_does_not_have_is_named() -> None:
    config = MoEConfig(
        hidden_size=8, ffn_hidden_size=16, num_experts=4, balance_over="sequence", sequence_dim=2
    )
    with pytest.raises(ValueError, match=r"leading dimension of x of shape \(6, 3, 8\), got 2"):
        dMoE(config)(torch.randn(6, 3, 8))


def test_global_balance_without_reduced_counts_is_an_error_in_training() -> None:
    config = MoEConfig(
        hidden_size=8, ffn_hidden_size=16, num_experts=4, balance_over="global_batch"
    )
    layer = dMoE(config)
    with pytest.raises(ValueError, match="expected reduce_counts with balance_over='global_batch'"):
        layer(torch.randn(3, 8))
    assert layer.eval()(torch.randn(3, 8)).aux_loss == 0


def test_sequence_loss_sees_what_the_micro_batch_hides() -> None:
    """Two sequences, each on one expert: balanced together, not apart."""
    probs = torch.tensor([[[1.0, 0.0]] * 4, [[0.0, 1.0]] * 4])
    ids = torch.tensor([[[0]] * 4, [[1]] * 4])
    assert load_balancing_loss(probs.flatten(0, 1), torch.tensor([4, 4])).item() == 1
    assert sequence_load_balancing_loss(probs, ids).item() == 2


def test_z_loss_is_mean_squared_logsumexp() -> None:
    logits = torch.full((6, 4), 3.0, dtype=torch.bfloat16, requires_grad=True)
    loss = z_loss(logits)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx((3 + math.log(4)) ** 2)
    (grad,) = torch.autograd.grad(loss, logits)
    assert grad[0, 0].item() == pytest.approx(2 * (3 + math.log(4)) / 4 / 6, rel=1e-2)


@pytest.mark.parametrize("balance_over", ["micro_batch", "sequence"])
def test_an_infinite_loss_of_no_weight_adds_nothing(balance_over: str) -> None:
    config = MoEConfig(
        hidden_size=16, ffn_hidden_size=16, num_experts=4, top_k=2, balance_over=balance_over
    )
    x = torch.randn(2, 3, 16)
    x[0, 0, 0] = 1e30
    out = dMoE(config)(x)
    assert out.metrics["z_loss"].isinf()
    assert out.aux_loss.isfinite()


def test_zero_tokens_give_zero_and_zero_gradient() -> None:
    probs = torch.zeros(0, 4, requires_grad=True)
    loss = load_balancing_loss(probs, torch.zeros(4, dtype=torch.int32)) + z_loss(probs)
    assert loss.item() == 0
    assert torch.autograd.grad(loss, probs)[0].shape == (0, 4)


def test_counts_of_the_wrong_length_are_named() -> None:
    with pytest.raises(ValueError, match=r"shape \(4,\), one count per column.*got .*\(3,\)"):
        load_balancing_loss(torch.zeros(2, 4), torch.zeros(3))


def test_tokens_of_other_dimensions_are_named() -> None:
    """Sequences whose length is the number of experts used to pass, and mean nothing."""
    with pytest.raises(ValueError, match=r"probs_TE of 2 dimensions, got \(2, 4, 4\)"):
        load_balancing_loss(torch.zeros(2, 4, 4), torch.zeros(4))
    with pytest.raises(ValueError, match=r"logits_TE of 2 dimensions, got \(2, 4, 4\)"):
        z_loss(torch.zeros(2, 4, 4))
    ids = torch.zeros(4, 2, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"probs_BSE of 3 dimensions, got \(4, 4\)"):
        sequence_load_balancing_loss(torch.zeros(4, 4), ids)
    with pytest.raises(ValueError, match=r"shape \(2, 4, 'K'\), one row per row.*\(4, 2, 2\)"):
        sequence_load_balancing_loss(torch.zeros(2, 4, 4), ids)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_attach_aux_loss_equals_adding_it(as_tensor: bool) -> None:
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    # A number keeps all digits of aux_loss's dtype, which 0.1 needs.
    scale, factor = (torch.tensor(0.25), 0.25) if as_tensor else (0.1, 0.1)
    (x.sin().sum() + factor * x.square().sum()).backward()
    expected, x.grad = x.grad, None
    y = attach_aux_loss(x.sin(), x.square().sum(), scale)
    assert torch.equal(y, x.sin())
    y.sum().backward()
    assert_close("d x", x.grad, expected)


def test_attach_aux_loss_leaves_the_scale_alone() -> None:
    """With an aux_loss that is a leaf, as one that another pipeline stage has sent."""
    aux_loss, scale = torch.zeros((), requires_grad=True), torch.tensor(2.0)
    for _ in range(2):
        attach_aux_loss(torch.ones(3, requires_grad=True), aux_loss, scale).sum().backward()
    assert (aux_loss.grad, scale) == (4, 2)


@pytest.mark.parametrize("how", ["compiled", "checkpointed"])
def test_attach_aux_loss_lives_in_other_peoples_code(how: str) -> None:
    layer = dMoE(
        MoEConfig(hidden_size=16, ffn_hidden_size=16, num_experts=4, top_k=2), dtype=torch.float64
    )

    def stage(x: torch.Tensor) -> torch.Tensor:  # as in a pipeline: one tensor in, one out
        y, aux_loss, _ = layer(x)
        return attach_aux_loss(y, aux_loss, 0.5)

    run = torch.compile(stage, fullgraph=True, backend="aot_eager")
    if how == "checkpointed":
        run = functools.partial(checkpoint, stage, use_reentrant=False)
    x = torch.randn(9, 16, dtype=torch.float64)
    y, aux_loss, _ = layer(x)
    expected = torch.autograd.grad(y.sum() + 0.5 * aux_loss, layer.parameters())
    got = torch.autograd.grad(run(x).sum(), layer.parameters())
    for (name, _), a, b in zip(layer.named_parameters(), got, expected, strict=True):
        assert_close(f"d {name}", a, b)


def test_attach_aux_loss_wants_a_scalar() -> None:
    with pytest.raises(ValueError, match=r"scalar aux_loss, got shape \(2,\)"):
        attach_aux_loss(torch.zeros(3), torch.zeros(2))


def test_attach_aux_loss_refuses_a_scale_that_learns() -> None:
    """Its gradient would be missing in silence."""
    with pytest.raises(ValueError, match="a scale without gradient"):
        attach_aux_loss(torch.zeros(3), torch.zeros(()), torch.ones((), requires_grad=True))


@pytest.mark.parametrize("balance_over", ["micro_batch", "sequence"])
def test_a_token_whose_sigmoids_underflow_leaves_the_loss_finite(balance_over: str) -> None:
    config = MoEConfig(
        hidden_size=16,
        ffn_hidden_size=16,
        num_experts=4,
        score_function="sigmoid",
        balance_over=balance_over,
    )
    layer = dMoE(config)
    torch.nn.init.constant_(layer.router.weight, -1)
    x = torch.randn(1, 5, 16)
    x[0, 2] = 20.0  # logits of -320
    _, aux_loss, metrics = layer(x)
    aux_loss.backward()
    assert aux_loss.isfinite()
    assert metrics["router_entropy"].isfinite()
    assert layer.router.weight.grad.isfinite().all()
