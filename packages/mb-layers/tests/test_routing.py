"""Routing from outside, other routers and other kinds of routing, against slow loops."""

from __future__ import annotations

import math

import pytest
import torch
from layers_oracle import assert_close, run_one_expert
from mb_layers import (
    ExpertChoiceRouter,
    MoE,
    MoEConfig,
    NoisyTopKRouter,
    Router,
    RouterOutput,
    SinkhornRouter,
    SparseMixerRouter,
    dMoE,
)
from torch import Tensor, nn

SIZES = {
    "hidden_size": 16,
    "ffn_hidden_size": 16,
    "num_experts": 5,
    "top_k": 2,
    "init_method_std": 0.3,
    "z_loss_weight": 0.1,
}
ROUTERS = [ExpertChoiceRouter, SinkhornRouter, NoisyTopKRouter, SparseMixerRouter]


def build(router: type | None = None, **overrides) -> dMoE:
    config = MoEConfig(**(SIZES | overrides))
    cls = dMoE if config.capacity_factor is None else MoE
    own = None if router is None else router(config, dtype=torch.float64)
    return cls(config, router=own, dtype=torch.float64)


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, 16, dtype=torch.float64)


def expert(layer: dMoE, x: Tensor, e: int) -> Tensor:
    if e >= layer.config.num_experts:
        return x
    return run_one_expert(layer.config, x, dict(layer.named_parameters()), "experts", e)


def compare(layer: dMoE, y: Tensor, expected: Tensor) -> None:
    """Outputs, and the gradients of every parameter."""
    assert_close("y", y, expected)
    grad_y = torch.randn_like(y)
    named = dict(layer.named_parameters())
    got, want = (
        torch.autograd.grad((out * grad_y).sum(), named.values(), materialize_grads=True)
        for out in (y, expected)
    )
    for name, a, b in zip(named, got, want, strict=True):
        assert_close(f"d {name}", a, b)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"renormalize": True},
        {"score_function": "sigmoid", "renormalize": True, "routed_scaling_factor": 2.5},
        {"balancing_bias": True},
    ],
    ids=str,
)
def test_replayed_routing_is_the_routing(overrides: dict) -> None:
    layer = build(**overrides)
    x = tokens(3, 4)
    free = layer(x)
    ids = layer.router(x.view(-1, 16)).expert_ids_TK.view(3, 4, 2)
    replayed = layer(x, routing=ids.long())
    assert_close("aux_loss", replayed.aux_loss, free.aux_loss, dtype=torch.float64)
    compare(layer, replayed.y, free.y)
    for name, value in free.metrics.items():
        assert_close(name, replayed.metrics[name], value, dtype=torch.float64)


@pytest.mark.parametrize(("renormalize", "nobody"), [(False, 7), (True, 2**32)])
def test_forced_experts_get_the_routers_weights(renormalize: bool, nobody: int) -> None:
    layer = build(renormalize=renormalize)
    x = tokens(6)
    ids = torch.tensor([[0, 1], [4, 3], [-1, 2], [2, 0], [-1, -1], [1, nobody]])
    y, aux, metrics = layer(x, routing=ids)
    probs = torch.softmax(x @ layer.router.weight.T, dim=-1)
    rows = []
    for t, chosen in enumerate(ids.tolist()):
        known = [e for e in chosen if 0 <= e < 5]
        norm = sum(probs[t, e] for e in known) if renormalize else 1.0
        rows.append(sum((probs[t, e] / norm * expert(layer, x[t], e) for e in known), 0 * x[t]))
    assert metrics["tokens_per_expert"].tolist() == [2, 2, 2, 1, 1]
    assert metrics["dropped_fraction"].item() == pytest.approx(1 / 9)  # nobody
    assert aux.requires_grad
    compare(layer, y, torch.stack(rows))


def test_a_whole_routing_from_outside() -> None:
    layer = build()
    layer.router.weight.requires_grad_(False)
    x = tokens(3)
    weights = torch.rand(3, 2, dtype=torch.float64)
    ids = torch.tensor([[0, 3], [1, 4], [2, 2]], dtype=torch.int32)
    y, aux, metrics = layer(x, routing=RouterOutput(weights, ids, None, None))
    rows = [
        sum(w * expert(layer, x[t], e) for w, e in zip(weights[t], ids[t].tolist(), strict=True))
        for t in range(3)
    ]
    assert_close("y", y, torch.stack(rows))
    assert aux.item() == 0
    assert metrics["load_balancing_loss"].item() == 0
    further = layer(x).metrics
    for name in ("load_balancing_loss", "z_loss", "router_entropy"):  # added up over layers, say
        metrics[name] += further[name]
        assert_close(name, metrics[name], further[name].float())


def test_a_layer_routes_without_running_its_experts() -> None:
    layer, x = build(), tokens(2, 3)
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]]).bool()
    routed = layer.route(x, mask=mask)
    assert (routed.expert_ids_TK[~mask.view(-1)] == -1).all()
    real = layer.router(x[mask])
    assert torch.equal(routed.expert_ids_TK[mask.view(-1)], real.expert_ids_TK)
    assert torch.equal(layer(x, mask=mask, routing=routed).y, layer(x, mask=mask).y)


@pytest.mark.parametrize("shape", [(3, 1), (4, 2), (6,)], ids=str)
def test_routing_of_the_wrong_shape_is_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"routing of int32 or int64 \(3, 2\).*got torch.int64"):
        build()(tokens(3), routing=torch.zeros(shape, dtype=torch.int64))


def test_routing_of_other_tokens_or_another_type_is_named() -> None:
    layer, x = build(), tokens(3)
    routed = layer.router(x)
    with pytest.raises(ValueError, match="or a RouterOutput, got a tuple"):
        layer(x, routing=tuple(routed))
    for name, values in (("probs_TE", routed.probs_TE), ("logits_TE", routed.logits_TE)):
        fewer = routed._replace(**{name: values[:2]})
        with pytest.raises(ValueError, match=rf"{name} for each of 3 .*got .*\(2, 5\)"):
            layer(x, routing=fewer)
    for fewer in (
        routed._replace(expert_ids_TK=routed.expert_ids_TK.T),
        routed._replace(weights_TK=routed.weights_TK[:, :1]),
        routed._replace(token_ids_N=torch.tensor([2, 1])),
    ):
        with pytest.raises(ValueError, match="expected a row of expert_ids_TK and of weights_TK"):
            layer(x, routing=fewer, mask=torch.ones(3, dtype=torch.bool))
    none = RouterOutput(torch.ones(3, 0), torch.ones(3, 0, dtype=torch.int32), None, None)
    for weights_on_input in (False, True):
        with pytest.raises(ValueError, match=r"of at least one choice, got .*\(3, 0\)"):
            build(weights_on_input=weights_on_input)(x, routing=none)
    column = routed._replace(token_ids_N=torch.tensor([[0], [1], [2]]))
    with pytest.raises(ValueError, match=r"token_ids_N of one dimension, got .*\(3, 1\)"):
        layer(x, routing=column)
    reals = torch.tensor([0.0, 1.0, 2.0])
    with pytest.raises(ValueError, match=r"int32 or int64 token_ids_N .*got torch\.float32"):
        layer(x, routing=routed._replace(token_ids_N=reals))
    with pytest.raises(ValueError, match=r"probs_TE for each of 3 .*got torch.* \(3,\)"):
        layer(x, routing=routed._replace(probs_TE=routed.probs_TE[:, 0]))
    for name in ("weights_TK", "expert_ids_TK", "balanced_ids_TK"):
        with pytest.raises(ValueError, match=f"expected {name} to be a tensor, got a list"):
            layer(x, routing=routed._replace(**{name: [[0, 1]] * 3}))
    layer.router = _Pair()
    with pytest.raises(ValueError, match="returns a RouterOutput, got a tuple"):
        layer(x)


class _Pair(nn.Module):
    """A router that leaves out what it has no use for."""

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        return x_TD[:, :2], torch.zeros(len(x_TD), 2, dtype=torch.int32)


class _Hash(nn.Module):
    """A router of a user's own: by position, equal weights."""

    def forward(self, x_TD: Tensor) -> RouterOutput:
        ids = (torch.arange(len(x_TD))[:, None] + torch.arange(2)).int() % 5
        return RouterOutput(x_TD.new_full((len(x_TD), 2), 0.5), ids, None, None)


def test_a_router_of_ones_own() -> None:
    config = MoEConfig(**SIZES)
    layer = dMoE(config, router=_Hash(), dtype=torch.float64)
    x = tokens(7)
    rows = [(expert(layer, x[t], t % 5) + expert(layer, x[t], (t + 1) % 5)) / 2 for t in range(7)]
    compare(layer, layer(x).y, torch.stack(rows))
    layer.reset_parameters()


class _Sharp(Router):
    """A router whose scores alone are its own."""

    def scores(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        return super().scores(3 * logits_TE)


def test_a_router_may_do_one_step_in_its_own_way() -> None:
    layer, x = build(_Sharp, z_loss_weight=0.0), tokens(9)
    got = layer(x)
    plain = Router(layer.config, dtype=torch.float64)
    plain.weight = nn.Parameter(3 * layer.router.weight.detach())
    layer.router = plain
    expected = layer(x)
    assert_close("y", got.y, expected.y)
    assert_close("aux_loss", got.aux_loss, expected.aux_loss)


def test_a_step_may_be_replaced_on_one_router() -> None:
    of_class, x = build(_Sharp, z_loss_weight=0.0), tokens(9)
    layer = build(z_loss_weight=0.0)
    layer.load_state_dict(of_class.state_dict())
    plain = layer(x)
    layer.router.scores = lambda logits: Router.scores(layer.router, 3 * logits)
    got, expected = layer(x), of_class(x)
    assert_close("y", got.y, expected.y)
    assert_close("aux_loss", got.aux_loss, expected.aux_loss)
    assert not torch.equal(got.y, plain.y)
    layer.router.choice = lambda scores, logits, mask: torch.eye(5)[[3, 3, 3]].repeat(3, 1)
    assert layer(x).metrics["tokens_per_expert"].tolist() == [9, 0, 0, 9, 0]


@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_expert_choice_is_each_experts_best_tokens(num_tokens: int) -> None:
    layer = build(ExpertChoiceRouter)
    x = tokens(num_tokens)
    y, aux, metrics = layer(x)
    probs = torch.softmax(x @ layer.router.weight.T, dim=-1)
    limit = math.ceil(2 * num_tokens / 5)
    expected = torch.zeros_like(x) + 0 * probs.sum()
    for e in range(5):
        best = sorted(range(num_tokens), key=lambda t: -probs[t, e].item())[:limit]
        for t in best:
            row = torch.zeros_like(x)
            row[t] = 1
            expected = expected + row * (probs[t, e] * expert(layer, x[t], e))
    assert metrics["tokens_per_expert"].tolist() == [limit] * 5
    assert metrics["dropped_fraction"].item() == 0
    assert aux.requires_grad
    compare(layer, y, expected)


@pytest.mark.parametrize("router", [ExpertChoiceRouter, SinkhornRouter])
@pytest.mark.parametrize("kept", [0.6, 0.0])
def test_routers_that_look_at_all_tokens_do_not_see_padding(router: type, kept: float) -> None:
    layer = build(router)
    x = tokens(3, 8)
    mask = torch.rand(3, 8) < kept
    x[~mask] += 3
    masked, alone = layer(x, mask=mask), layer(x[mask])
    assert not masked.y[~mask].any()
    assert_close("aux_loss", masked.aux_loss, alone.aux_loss, dtype=torch.float64)
    assert_close(
        "counts",
        masked.metrics["tokens_per_expert"].double(),
        alone.metrics["tokens_per_expert"].double(),
    )
    compare(layer, masked.y[mask], alone.y)


@pytest.mark.parametrize("router", [ExpertChoiceRouter, SinkhornRouter, NoisyTopKRouter])
def test_experts_chosen_elsewhere_are_visited_whatever_the_router(router: type) -> None:
    layer = build(router).eval()
    x, ids = tokens(9), torch.randint(0, 5, (9, 2))
    y = layer(x, routing=ids).y
    plain = Router(layer.config, dtype=torch.float64)
    plain.weight = layer.router.weight
    layer.router = plain
    assert_close("y", y, layer(x, routing=ids).y)


def test_expert_choice_refuses_balance_over_sequences() -> None:
    """When it is built; as part of a layer with another config when that is called."""
    with pytest.raises(ValueError, match="chooses tokens for experts"):
        build(ExpertChoiceRouter, balance_over="sequence")
    layer = build(Router, balance_over="sequence")
    layer.router = build(ExpertChoiceRouter).router
    with pytest.raises(ValueError, match="chooses tokens for experts"):
        layer(tokens(2, 5))


@pytest.mark.parametrize(
    ("router", "field", "value"),
    [
        (ExpertChoiceRouter, "renormalize", True),
        (ExpertChoiceRouter, "num_zero_experts", 2),
        (ExpertChoiceRouter, "uniform_assignment", True),
        (ExpertChoiceRouter, "balancing_bias", True),
        (ExpertChoiceRouter, "balance_by", "scores"),
        (SinkhornRouter, "balancing_bias", True),
        (SparseMixerRouter, "score_function", "sigmoid"),
        (SparseMixerRouter, "renormalize", True),
        (SparseMixerRouter, "balancing_bias", True),
        (SparseMixerRouter, "uniform_assignment", True),
    ],
)
def test_routers_refuse_what_they_would_ignore(router: type, field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"expected {field}=.* for {router.__name__}"):
        build(router, **{field: value})


@pytest.mark.parametrize("router", [SinkhornRouter, NoisyTopKRouter])
def test_routers_refuse_groups_or_honour_them(router: type) -> None:
    groups = {"num_experts": 6, "num_expert_groups": 3, "top_k_groups": 1, "group_score_top": 1}
    if router is SinkhornRouter:
        with pytest.raises(ValueError, match="num_expert_groups=None for SinkhornRouter"):
            build(router, **groups)
        return
    ids = build(router, **groups).router(tokens(40)).expert_ids_TK
    assert torch.equal(ids[:, 0] // 2, ids[:, 1] // 2)


def test_expert_choice_jitters_what_it_chooses_by() -> None:
    layer = build(ExpertChoiceRouter, jitter_eps=0.3)
    x = tokens(9)
    torch.manual_seed(2)
    noise = torch.empty_like(x).uniform_(0.7, 1.3)
    torch.manual_seed(2)
    assert_close("logits", layer.router(x).logits_TE, (x * noise) @ layer.router.weight.T)
    assert_close("eval", layer.eval().router(x).logits_TE, x @ layer.router.weight.T)


def test_fewer_valid_slots_than_top_k_weigh_as_they_are() -> None:
    """One of a token's two ids is no expert's: the one slot left is the whole load."""
    for score_function in ("softmax", "sigmoid"):
        layer = build(score_function=score_function)
        x = tokens(1)
        _, _, metrics = layer(x, routing=torch.tensor([[3, -1]]))
        probs = layer.router(x).probs_TE
        assert_close("loss", metrics["load_balancing_loss"], 5 * probs[0, 3].detach())


def test_sinkhorn_balances_in_training_alone() -> None:
    layer = build(SinkhornRouter, top_k=1)
    with torch.no_grad():
        layer.router.weight[3] += 0.5  # everyone's favourite for positive tokens
    x = tokens(400).abs()
    balanced = layer(x)
    plain = layer.eval()(x)
    counts = balanced.metrics["tokens_per_expert"]
    assert plain.metrics["load_imbalance"] > 3
    assert counts.max() < 1.5 * counts.double().mean()
    ids = layer.train().router(x).expert_ids_TK.long()
    probs = torch.softmax(x @ layer.router.weight.T, dim=-1)
    assert_close("weights", layer.router(x).weights_TK, probs.gather(1, ids))


def test_sinkhorn_is_rows_and_columns_scaled_in_turn() -> None:
    router = SinkhornRouter(MoEConfig(**SIZES), iterations=30, dtype=torch.float64)
    logits = torch.randn(12, 5, dtype=torch.float64)
    mass = logits.exp()
    for _ in range(200):
        mass = mass / mass.sum(dim=1, keepdim=True)
        mass = mass / mass.sum(dim=0, keepdim=True)
    got = torch.softmax(router.choice(logits, logits, None), dim=-1)
    assert_close("mass", got, mass / mass.sum(dim=1, keepdim=True), dtype=torch.float32)


@pytest.mark.parametrize("iterations", [1, 8, 200])
def test_sinkhorn_tells_small_logits_apart_however_often_it_scales(iterations: int) -> None:
    """Sums of columns are T / E: in logarithms they would grow with each iteration."""
    router = SinkhornRouter(MoEConfig(**SIZES), iterations=iterations)
    logits = 0.02 * torch.randn(900, 5)
    got = router.choice(logits, logits, None).double()
    wanted = router.choice(logits.double(), logits.double(), None)
    assert (got - wanted).abs().max() < 1e-6


@pytest.mark.parametrize("std", [0.02, 0.5, 2.0])
def test_sinkhorn_chooses_as_a_loop_until_nothing_moves(std: float) -> None:
    """The loop of Megatron Core: until the experts' scales move by less than 1e-4 on average."""
    router = SinkhornRouter(MoEConfig(**SIZES | {"num_experts": 16}))
    logits = std * (torch.randn(700, 16) + torch.randn(16)) / math.sqrt(2)
    mass = logits.double().exp()
    scale, moved = torch.ones(16, dtype=torch.float64), 1.0
    while moved > 1e-4:
        tokens_scale = 1 / (mass * scale).sum(dim=1, keepdim=True) / 700
        before, scale = scale, 1 / (mass * tokens_scale).sum(dim=0) / 16
        moved = (scale - before).abs().mean().item()
    got = router.choice(logits, logits, None).topk(2).indices.sort().values
    wanted = (mass * scale).topk(2).indices.sort().values
    by_score = logits.topk(2).indices.sort().values
    assert (got != wanted).any(dim=1).sum() <= 1
    assert (by_score != wanted).any(dim=1).sum() > 100


@pytest.mark.parametrize("padding", [0, 1, 7])
def test_sinkhorn_lets_a_token_alone_choose_by_its_logits(padding: int) -> None:
    """Its balanced masses are all the same number, so that rounding chose."""
    layer, x = build(SinkhornRouter, num_experts=13).float(), tokens(60).float()
    wanted = layer.router.logits(x).topk(2).indices
    mask = torch.tensor([False] * padding + [True]) if padding else None
    for token, experts in zip(x, wanted, strict=True):
        alone = torch.cat([torch.randn(padding, 16), token[None]])
        ids = layer.route(alone, mask=mask).expert_ids_TK[-1]
        assert torch.equal(ids, experts.int())


def test_sinkhorn_leaves_out_an_expert_that_is_closed() -> None:
    layer, x = build(SinkhornRouter, router_bias=True), tokens(40)
    open_experts = [0, 1, 3, 4]
    others = build(SinkhornRouter, router_bias=True, num_experts=4)
    with torch.no_grad():
        layer.router.bias[2] = -torch.inf
        others.router.weight.copy_(layer.router.weight[open_experts])
    ids = layer.router(x).expert_ids_TK
    assert torch.equal(ids, torch.tensor(open_experts)[others.router(x).expert_ids_TK.long()])


def test_noise_widens_with_its_weight_and_learns() -> None:
    layer = build(NoisyTopKRouter)
    x = tokens(5000)
    plain = x @ layer.router.weight.T
    noise = layer.router.logits(x) - plain
    assert abs(noise.std() - math.log(2)) < 0.02  # softplus(0)
    with torch.no_grad():
        layer.router.noise_weight.normal_()
    wide = layer.router.logits(x) - plain
    width = torch.nn.functional.softplus(x @ layer.router.noise_weight.T)
    assert abs((wide / width).std() - 1) < 0.02
    output = layer(x[:9])
    (output.y.sum() + output.aux_loss).backward()
    assert layer.router.noise_weight.grad.abs().max() > 0
    assert_close("eval", layer.eval().router.logits(x), plain)
    layer.reset_parameters()
    assert not layer.router.noise_weight.any()


@pytest.mark.parametrize("top_k", [1, 2])
def test_weights_on_the_input(top_k: int) -> None:
    layer = build(weights_on_input=True, top_k=top_k, shared_expert_hidden_size=16)
    x = tokens(7)
    routed = layer.router(x)
    rows = []
    for t in range(7):
        y = run_one_expert(layer.config, x[t], dict(layer.named_parameters()), "shared_expert", 0)
        for w, e in zip(routed.weights_TK[t], routed.expert_ids_TK[t].tolist(), strict=True):
            y = y + expert(layer, x[t] * w, e)
        rows.append(y)
    compare(layer, layer(x).y, torch.stack(rows))


@pytest.mark.parametrize("capacity", [None, 0.5])
def test_zero_experts_return_their_token(capacity: float | None) -> None:
    layer = build(num_zero_experts=3, top_k=3, balancing_bias=True, capacity_factor=capacity)
    assert layer.router.weight.shape == (8, 16)
    x = tokens(11)
    routed = layer.router(x)
    ids = routed.expert_ids_TK.tolist()
    assert any(e >= 5 for row in ids for e in row)
    real = sum(e < 5 for row in ids for e in row)
    limit = math.inf if capacity is None else math.ceil(capacity * real / 5)
    load, rows = [0] * 8, []
    dropped = 0
    for t, chosen in enumerate(ids):
        y = 0 * x[t]
        for w, e in zip(routed.weights_TK[t], chosen, strict=True):
            if e >= 5 or load[e] < limit:
                y = y + w * expert(layer, x[t], e)
            else:
                dropped += 1
            load[e] += 1
        rows.append(y)
    output = layer(x)
    assert output.metrics["tokens_per_expert"].tolist() == load
    assert output.metrics["dropped_fraction"].item() == pytest.approx(dropped / 33)
    compare(layer, output.y, torch.stack(rows))
    mask = torch.arange(11) < 6
    assert_close("masked", layer(x, mask=mask).y[:6], layer(x[:6]).y)
    unknown = torch.full((11, 3), 8, dtype=torch.int32)  # neither an expert nor a zero expert
    output = layer(x, routing=RouterOutput(routed.weights_TK, unknown, None, None))
    assert not output.y.any()
    assert output.metrics["dropped_fraction"].item() == 1


def test_minimum_and_evaluation_capacity() -> None:
    layer = build(top_k=1, capacity_factor=0.5, eval_capacity_factor=5.0, min_capacity=3)
    with torch.no_grad():
        layer.router.weight.zero_()  # all to expert 0
    x = tokens(10)
    assert (layer(x).y != 0).any(dim=1).sum() == 3  # ceil(0.5 * 10 / 5) is 1
    own = MoE(layer.config, dispatcher=layer.dispatcher, router=layer.router, dtype=x.dtype)
    assert (own.eval()(x).y != 0).any(dim=1).sum() == 3
    assert (layer.eval()(x).y != 0).any(dim=1).sum() == 10
    x = tokens(40)
    assert (layer.train()(x).y != 0).any(dim=1).sum() == 4


def sparse_mixed(logits: Tensor, tolerance: float, draws: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(weights, their derivatives by the logits, ids) of one token's two experts, in loops."""
    left, weights, slopes, ids = logits.tolist(), [], [], []
    for _ in range(2):
        best = max(left)
        near = [v > -math.inf and best - v <= 2 * tolerance * max(abs(v), best) for v in left]
        shares = [math.exp(v - best) * n for v, n in zip(left, near, strict=True)]
        shares = [share / sum(shares) for share in shares]
        chosen = left.index(best)
        if draws:
            noise = torch.empty(len(left), dtype=logits.dtype).exponential_().log().tolist()
            values = [v - n if k else -math.inf for v, n, k in zip(left, noise, near, strict=True)]
            chosen = values.index(max(values))
            whole = torch.rand(1, dtype=logits.dtype).item() > 0.75 or chosen == left.index(best)
        share = shares[chosen]
        slopes.append([share * ((e == chosen) - other) for e, other in enumerate(shares)])
        weights.append(share if not draws or whole else share / 3)
        ids.append(chosen)
        left[chosen] = -math.inf
    found = (torch.tensor(numbers, dtype=torch.float64) for numbers in (weights, slopes))
    return *found, torch.tensor(ids)


@pytest.mark.parametrize("draws", [False, True])
def test_sparse_mixer_equals_a_loop(draws: bool) -> None:
    config = MoEConfig(**SIZES | {"num_experts": 9})
    router = SparseMixerRouter(config, tolerance=0.2, dtype=torch.float64).train(draws)
    seen = set()
    for seed in range(30):
        x = tokens(1).requires_grad_()
        torch.manual_seed(seed)
        routed = router(x)
        torch.manual_seed(seed)
        weights, slopes, ids = sparse_mixed(routed.logits_TE[0].detach(), 0.2, draws)
        assert routed.expert_ids_TK[0].tolist() == ids.tolist()
        assert_close("weights", routed.weights_TK[0], weights)
        for weight, slope in zip(routed.weights_TK[0], slopes, strict=True):
            (gradient,) = torch.autograd.grad(weight, x, retain_graph=True)
            assert_close("slope", gradient[0], slope @ router.weight)
        seen.add((ids != routed.logits_TE[0].topk(2).indices).any().item())
        again = router.eval()(x, expert_ids_TK=routed.expert_ids_TK).weights_TK
        router.train(draws)
        whole = torch.isclose(again, routed.weights_TK) | torch.isclose(
            again / 3, routed.weights_TK
        )
        assert whole.all()
    assert seen == ({False, True} if draws else {False})


def test_sparse_mixer_weighs_no_expert_by_nothing() -> None:
    router = build(SparseMixerRouter).router.eval()
    x = tokens(9)
    best = router(x).expert_ids_TK[:, :1]
    routed = router(x, expert_ids_TK=torch.cat([torch.full_like(best, -1), best], dim=1))
    assert not routed.weights_TK[:, 0].any()
    assert_close("best", routed.weights_TK[:, 1], router(x).weights_TK[:, 0])


@pytest.mark.sweep(4)
@pytest.mark.parametrize("router", ROUTERS)
def test_routers_compile_without_graph_breaks(router: type) -> None:
    layer = build(router)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    x, mask = tokens(6), torch.arange(6) < 4
    y, aux, _ = compiled(x, mask=mask)
    (y.sum() + aux).backward()
    if router not in (
        NoisyTopKRouter,
        SparseMixerRouter,
    ):  # the generator is consumed in another order
        assert_close("y", y, layer(x, mask=mask).y)
    torch._dynamo.reset()


@pytest.mark.parametrize("router", ROUTERS)
def test_routers_are_exported_with_a_dynamic_batch(router: type) -> None:
    layer = build(router).eval()
    shapes = ({0: torch.export.Dim("batch", min=2, max=64)},)
    program = torch.export.export(layer, (tokens(6, 4),), dynamic_shapes=shapes).module()
    for number in (2, 6, 11):
        x = tokens(number, 4)
        assert_close("y", program(x).y, layer(x).y)


@pytest.mark.parametrize(
    ("router", "overrides"),
    [
        (None, {"num_zero_experts": 2}),
        (None, {"weights_on_input": True}),
        (ExpertChoiceRouter, {}),
    ],
    ids=["zero-experts", "weights-on-input", "expert-choice"],
)
def test_tokens_in_16_bits_stay_in_16_bits(router: type | None, overrides: dict) -> None:
    layer, x = build(router, **overrides).bfloat16(), tokens(7, 4).bfloat16()
    y = layer(x).y
    assert y.dtype == torch.bfloat16
    exact = layer.double()(x.double()).y
    assert (y - exact).norm() < 0.01 * exact.norm()
