"""Around a model of several layers: losses, metrics, one bias update per step, y alone."""

from __future__ import annotations

import copy

import pytest
import torch
from layers_oracle import assert_close
from mb_layers import AsMLP, MoE, MoEConfig, collect, dMoE, update_balancing_biases
from mb_layers.router import update_balancing_bias
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def config(**overrides) -> MoEConfig:
    sizes = {"hidden_size": 16, "ffn_hidden_size": 16, "num_experts": 4, "top_k": 2}
    return MoEConfig(**(sizes | {"z_loss_weight": 0.1, "init_method_std": 0.3} | overrides))


def sequential(*, aux_scale: float | None = None, **overrides) -> nn.Sequential:
    layers = [AsMLP(dMoE(config(**overrides)), aux_scale=aux_scale) for _ in range(3)]
    return nn.Sequential(layers[0], nn.LayerNorm(16), *layers[1:])


def test_collected_loss_is_the_mean_and_has_its_gradient() -> None:
    model = sequential()
    x = torch.randn(5, 16)
    with collect(model) as moe:
        y = model(x)
    h, losses = x, []
    for module in model:
        if isinstance(module, AsMLP):
            h, aux, _ = module.layer(h)
            losses.append(aux)
        else:
            h = module(h)
    assert_close("y", y, h)
    expected = torch.stack(losses).mean()
    assert_close("aux_loss", moe.aux_loss(), expected)
    weight = model[0].layer.router.weight
    grads = [torch.autograd.grad(loss, weight)[0] for loss in (moe.aux_loss(), expected)]
    assert_close("d router", *grads)
    assert moe.metrics()["tokens_per_expert"].shape == (3, 4)
    assert moe.metrics()["z_loss"].shape == (3,)
    model(x)  # outside: not collected
    assert len(moe.passes) == 3
    assert list(moe.tokens_per_expert()) == ["0.layer", "2.layer", "3.layer"]


def test_layers_on_several_devices_are_summed_on_the_last_ones() -> None:
    class Spread(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for module in self:
                x = module(x.to(next(module.parameters()).device))
            return x

    model = Spread(*sequential())
    model[-1].to("meta")
    with collect(model) as moe:
        model(torch.randn(5, 16))
    assert moe.aux_loss().device.type == "meta"
    assert {m.device.type for m in moe.metrics().values()} == {"meta"}
    assert moe.metrics()["tokens_per_expert"].shape == (3, 4)


def test_a_pass_that_failed_is_not_collected() -> None:
    model, x = sequential(), torch.randn(5, 16)
    with collect(model) as expected:
        model(x)

    def fail(*_) -> None:
        raise RuntimeError("no memory")

    with collect(model) as moe:
        model(x)
        failing = model[2].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="no memory"):
            model(2 * x)
        failing.remove()
    assert_close("aux_loss", moe.aux_loss(), expected.aux_loss())
    assert [name for name, _, _ in moe.passes] == ["0.layer", "2.layer", "3.layer"]


def test_a_copy_is_not_collected() -> None:
    model, x = sequential(), torch.randn(5, 16)
    with collect(model) as moe:
        model(x)
        other = copy.deepcopy(model)  # of a reference policy, with the hooks
        other(x)
    other(x)
    assert [name for name, _, _ in moe.passes] == ["0.layer", "2.layer", "3.layer"]


def test_a_graph_compiled_with_its_hooks_collects() -> None:
    model = sequential()
    x = torch.randn(5, 16)
    with collect(model) as moe:
        model(x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with collect(model) as traced:
        compiled(x)
    assert_close("aux_loss", traced.aux_loss(), moe.aux_loss())
    torch._dynamo.reset()


@pytest.mark.parametrize("inside", [False, True], ids=["backward-outside", "backward-inside"])
def test_recomputation_is_not_collected_again(inside: bool) -> None:
    model = sequential()
    x = torch.randn(5, 16, requires_grad=True)
    with collect(model) as moe:
        y = checkpoint(model, x, use_reentrant=False)
        if inside:
            (y.sum() + moe.aux_loss()).backward()
    if not inside:
        (y.sum() + moe.aux_loss()).backward()
    assert len(moe.passes) == 3
    assert model[0].layer.router.weight.grad is not None
    with collect(model) as lost:
        checkpoint(model, x, use_reentrant=True)
    with pytest.raises(ValueError, match="use_reentrant=False"):
        lost.aux_loss()
    with collect(model) as some:  # the first of three
        model[1:](checkpoint(model[0], x, use_reentrant=True))
    with pytest.raises(ValueError, match=r"none from 0\.layer:"):
        some.aux_loss()
    without = sequential(z_loss_weight=0, load_balancing_loss_weight=0)
    with collect(without) as none:  # nothing to lose
        checkpoint(without, x, use_reentrant=True)
    assert none.aux_loss() == 0
    with torch.no_grad(), collect(model) as quiet:
        model(x)
    with torch.no_grad():
        assert not quiet.aux_loss().requires_grad


def test_one_bias_update_for_a_step_of_micro_batches() -> None:
    model = sequential(balancing_bias=True)
    twin = sequential(balancing_bias=True)
    twin.load_state_dict(model.state_dict())
    x = torch.randn(2, 40, 16)
    passes = []
    for part in x:
        with collect(model) as moe:
            model(part)
        passes.append(moe)
    update_balancing_biases(passes, rate=0.1, reduce_counts=lambda counts_LE: counts_LE.flip(1))
    with collect(twin) as moe:
        twin(x)
    for name, counts in moe.tokens_per_expert().items():
        router = twin.get_submodule(name).router
        update_balancing_bias(router, counts.flip(0), rate=0.1)
        assert_close(name, model.get_submodule(name).router.balancing_bias, router.balancing_bias)
        assert router.balancing_bias.abs().max() > 0.01


def test_a_layer_left_out_of_a_pass_moves_its_bias_by_the_others() -> None:
    model = sequential(score_function="sigmoid", balancing_bias=True)
    x = torch.randn(11, 16)
    passes = []
    for layers in (model, model[:1]):  # layer drop: the second micro-batch visits the first alone
        with collect(model) as moe:
            layers(x)
        passes.append(moe)
    whole = passes[0].tokens_per_expert()
    update_balancing_biases(passes, rate=0.1)
    for name, counts in whole.items():
        expected = dMoE(config(score_function="sigmoid", balancing_bias=True)).router
        update_balancing_bias(expected, counts, rate=0.1)
        got = model.get_submodule(name).router.balancing_bias
        assert_close(name, got, expected.balancing_bias)
    with collect(model) as moe:
        model[:1](x)
    before = model[2].layer.router.balancing_bias.clone()
    update_balancing_biases([moe], rate=0.1)  # visited by nobody: as it was
    assert torch.equal(model[2].layer.router.balancing_bias, before)


@pytest.mark.parametrize("wrap", [lambda router: router, torch.compile], ids=["plain", "wrapped"])
def test_a_shared_routers_bias_moves_once_by_the_counts_of_its_layers(wrap) -> None:
    shared = config(balancing_bias=True)
    first = dMoE(shared)
    second = dMoE(shared, router=first.router)
    model = nn.Sequential(*(AsMLP(layer, aux_scale=None) for layer in (first, second)))
    with collect(model) as moe:
        model(torch.randn(11, 16))
    expected = dMoE(shared).router
    update_balancing_bias(expected, sum(moe.tokens_per_expert().values()), rate=0.1)
    first.router, second.router = wrap(first.router), wrap(second.router)
    update_balancing_biases([moe], rate=0.1)
    assert_close("bias", second.router.balancing_bias, expected.balancing_bias)


def test_layers_may_have_different_numbers_of_experts() -> None:
    configs = [config(num_experts=n, balancing_bias=True) for n in (2, 5)]
    model = nn.Sequential(*(AsMLP(dMoE(c), aux_scale=None) for c in configs))
    with collect(model) as moe:
        model(torch.randn(11, 16))
    counts = moe.tokens_per_expert()
    first, second = moe.metrics()["tokens_per_expert"].tolist()
    assert first == [*counts["0.layer"].tolist(), 0, 0, 0]
    assert second == counts["1.layer"].tolist()
    update_balancing_biases([moe], rate=0.1)
    for alone, (name, of_layer) in zip(configs, counts.items(), strict=True):
        expected = dMoE(alone).router
        update_balancing_bias(expected, of_layer, rate=0.1)
        assert_close(name, model.get_submodule(name).router.balancing_bias, expected.balancing_bias)


def test_what_cannot_be_collected_is_an_error() -> None:
    with pytest.raises(ValueError, match="found none"), collect(nn.Linear(2, 2)):
        pass
    model = sequential()
    with collect(model) as moe:
        pass
    assert moe.metrics() == {}
    with pytest.raises(ValueError, match="none did"):
        moe.aux_loss()
    with pytest.raises(ValueError, match="balancing_bias=True"):
        update_balancing_biases([moe], rate=0.1)
    with pytest.raises(ValueError, match=r"of one micro-batch pass \[moe\]"):
        update_balancing_biases(moe, rate=0.1)
    with collect(sequential(balancing_bias=True)) as moe:  # and a model that was compiled before
        pass
    with pytest.raises(ValueError, match=r"none did; .* update_balancing_bias for each router"):
        update_balancing_biases([moe], rate=0.1)


@pytest.mark.parametrize("aux_scale", [None, 0.5])
def test_y_alone_carries_the_loss_or_leaves_it(aux_scale: float | None) -> None:
    mlp = AsMLP(dMoE(config(), dtype=torch.float64), aux_scale=aux_scale)
    x = torch.randn(7, 16, dtype=torch.float64)
    y, aux, _ = mlp.layer(x)
    loss = y.square().sum() + (0.5 * aux if aux_scale else 0)
    expected = torch.autograd.grad(loss, mlp.layer.router.weight)
    got: Tensor = mlp(x)
    assert torch.equal(got, y)
    assert_close(
        "d router", *torch.autograd.grad(got.square().sum(), mlp.layer.router.weight), *expected
    )
    assert torch.equal(mlp.eval()(x), y)


def test_repr_names_widths_and_capacity() -> None:
    text = repr(MoE(config(capacity_factor=1.25, shared_expert_hidden_size=24)))
    assert "16 -> 16 -> 16, capacity_factor=1.25, drop_policy='position', load_balanc" in text
    assert "16 -> 16 -> 16, load_balancing_loss_weight=0.01" in repr(dMoE(config()))
    assert "SharedExpert(16 -> 24 -> 16, gate=False)" in text
