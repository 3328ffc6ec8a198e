"""The stand-ins for megablocks.layers: call sites that change an import alone."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
import types

import pytest
import torch
from layers_oracle import assert_close
from mb_layers import compat
from mb_layers.compat import from_megablocks, layer_from_arguments, router
from mb_layers.compat.arguments import Arguments, from_megatron
from mb_layers.compat.dmoe import dMoE
from mb_layers.compat.moe import (
    MoE,
    batched_load_balancing_loss,
    batched_router_zloss,
    clear_load_balancing_loss,
    clear_router_zloss,
    get_load_balancing_loss,
    save_load_balancing_loss,
)
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

SIZES = {
    "hidden_size": 16,
    "ffn_hidden_size": 32,
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "fp16": False,
}


@pytest.fixture(autouse=True)
def _clear() -> None:
    clear_load_balancing_loss()
    clear_router_zloss()


def build(kind: type = dMoE, **changes) -> dMoE:
    layer = kind(Arguments(**(SIZES | changes)))
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(std=0.3)
    return layer


@pytest.mark.parametrize("return_bias", [False, True])
@pytest.mark.parametrize(
    ("kind", "mlp_type", "factor"),
    [(dMoE, "mlp", 1), (dMoE, "glu", 1), (MoE, "mlp", 1.25), (MoE, "mlp", 0)],
)
def test_layer_computes_what_ours_does_under_their_names(
    kind: type, mlp_type: str, factor: float, return_bias: bool
) -> None:
    changes = {"mlp_type": mlp_type, "return_bias": return_bias, "moe_capacity_factor": factor}
    layer = build(kind, **changes)
    names = [name for name, _ in layer.named_parameters()]
    gated = ["experts.mlp.v1"] if mlp_type == "glu" else []
    assert sorted(names) == sorted(
        ["router.layer.weight", "experts.mlp.w1", *gated, "experts.mlp.w2", "experts.bias"]
    )
    # Their MoE has one layout, whether it drops tokens or not.
    shape = (4 * 32, 16) if kind is dMoE else (4, 16, 32)
    assert layer.experts.mlp.w1.shape == shape
    ours = layer_from_arguments(layer.args, layer=kind.kind)
    ours.load_state_dict(from_megablocks(layer.state_dict(), ours.config))
    x = torch.randn(5, 3, 16, requires_grad=True)
    out = layer(x)
    y = out
    if return_bias:
        y, bias = out
        assert torch.equal(bias, layer.experts.bias)
        y = y + bias
    expected = ours(x)
    assert_close("y", y, expected.y)
    grads = torch.autograd.grad(y.square().sum(), list(layer.parameters()))
    ours_grads = torch.autograd.grad(expected.y.square().sum(), list(ours.parameters()))
    named = dict(zip((n for n, _ in ours.named_parameters()), ours_grads, strict=True))
    translated = from_megablocks(dict(zip(names, grads, strict=True)), ours.config)
    for name, grad in named.items():
        assert_close(f"d {name}", translated[name], grad)


def test_the_losses_of_a_step() -> None:
    """Forward, batched losses, backward, clear: as LLM Foundry and the Megatron fork do."""
    changes = {"num_layers": 2, "moe_zloss_weight": 0.1, "bias": False}
    layers = [build(**changes) for _ in range(2)]
    args = layers[0].args
    ours = []
    for _ in range(2):  # steps
        x = torch.randn(7, 2, 16)
        expected = []
        for layer in layers:
            twin = layer_from_arguments(layer.args)
            twin.load_state_dict(from_megablocks(layer.state_dict(), twin.config))
            output = twin(x)
            expected.append((output.metrics["load_balancing_loss"], output.metrics["z_loss"]))
            y = layer(x)
            x = (x + y).detach()
        assert len(get_load_balancing_loss()) == 2
        counts, scores = get_load_balancing_loss()[0]
        assert counts.sum() == 28
        assert scores.shape == (14, 4)
        loss = batched_load_balancing_loss(args)
        assert_close("balance", loss, 0.1 * torch.stack([e[0] for e in expected]).mean())
        z = batched_router_zloss(args)
        assert_close("z", z, 0.1 * torch.stack([e[1] for e in expected]))
        (loss + z.mean()).backward()
        assert layers[0].router.layer.weight.grad.abs().max() > 0
        clear_load_balancing_loss()
        clear_router_zloss()
        ours.append(loss.item())
    with pytest.raises(ValueError, match="losses of 2 layers, got 0"):
        batched_load_balancing_loss(args)


def test_the_lists_are_those_of_their_modules() -> None:
    """The z-loss is in megablocks.layers.router; a layer of one's own saves what it has."""
    layer = build(num_layers=2, moe_zloss_weight=0.1)
    layer(torch.randn(6, 16))
    assert router.batched_router_zloss(layer.args).shape == (1,)
    router.clear_router_zloss()
    with pytest.raises(ValueError, match="got none"):
        batched_router_zloss(layer.args)
    ((counts, scores),) = get_load_balancing_loss()
    once = batched_load_balancing_loss(dataclasses.replace(layer.args, num_layers=1))
    save_load_balancing_loss((counts, scores))
    assert_close("loss", batched_load_balancing_loss(layer.args), once)


def test_pipeline_stages_sum_to_the_whole() -> None:
    whole = build(num_layers=4).args
    layer = build(num_layers=4, pipeline_model_parallel_size=2)
    x = torch.randn(6, 16)
    total = 0.0
    for _ in range(2):
        clear_load_balancing_loss()
        layer(x)
        layer(x)
        total = total + batched_load_balancing_loss(layer.args)
    clear_load_balancing_loss()
    for _ in range(4):
        layer(x)
    assert_close("loss", total, batched_load_balancing_loss(whole))


def test_nothing_stays_of_a_pass_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = build(), torch.randn(8, 2, 16)

    def fail(*_) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("mb_layers.moe.run_routed", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            layer(x)
    copy.deepcopy(layer)
    layer(x)
    assert len(get_load_balancing_loss()) == 1


def test_eval_and_recompute_add_nothing() -> None:
    layer = build(bias=False)
    x = torch.randn(6, 16, requires_grad=True)
    layer.eval()(x)
    assert not get_load_balancing_loss()
    y = checkpoint(layer.train(), x, use_reentrant=False)
    (y.sum() + batched_load_balancing_loss(layer.args)).backward()
    assert len(get_load_balancing_loss()) == 1
    assert layer.router.layer.weight.grad is not None


def test_layers_that_are_compiled_one_by_one_share_their_code() -> None:
    """Whatever has been collected before, and whether a layer runs for the first time."""
    layers = [build(moe_zloss_weight=0.1, return_bias=False) for _ in range(3)]
    x, got = torch.randn(5, 16), []
    expected = [layer(x) for layer in layers], get_load_balancing_loss()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for layer in layers:
        layer.compile(backend="eager", fullgraph=True)
    for _ in range(2):  # steps
        clear_load_balancing_loss()
        got = [layer(x) for layer in layers], get_load_balancing_loss()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert_close("y", torch.stack(got[0]), torch.stack(expected[0]))
    for one, other in zip(got[1], expected[1], strict=True):
        assert torch.equal(one[0], other[0])
        assert_close("scores", one[1], other[1])
    torch._dynamo.reset()


@pytest.mark.parametrize("strict", [False, True])
def test_a_program_that_would_lose_the_losses_is_not_exported(strict: bool) -> None:
    x = torch.randn(5, 16)
    with pytest.raises(Exception, match=r"in eval mode within torch\.export"):
        torch.export.export(build(), (x,), strict=strict)
    assert not get_load_balancing_loss()
    for layer in (build().eval(), build(moe_loss_weight=0)):
        program = torch.export.export(layer, (x,)).module()
        assert_close("y", program(x)[0], layer(x)[0])


def test_reentrant_checkpoints_end_and_lose_no_loss() -> None:
    """The bias that they return is no parameter, which would be its own input."""
    x = torch.randn(6, 16, requires_grad=True)
    layer = build(moe_loss_weight=0)
    expected = torch.autograd.grad(sum(layer(x)).square().sum(), layer.parameters())
    sum(checkpoint(layer, x, use_reentrant=True)).square().sum().backward()
    for (name, p), grad in zip(layer.named_parameters(), expected, strict=True):
        assert_close(name, p.grad, grad)
    layer = build()  # whose passes without gradients are no sign of it
    y = checkpoint(lambda x: sum(layer(x)).square().sin(), x, use_reentrant=False)
    with torch.no_grad():
        layer(x)
    y.sum().backward()
    y, _ = checkpoint(layer, x, use_reentrant=True)
    with pytest.raises(ValueError, match="use_reentrant=False"):
        y.sum().backward()


def by_pickle(layer: torch.nn.Module) -> torch.nn.Module:
    return pickle.loads(pickle.dumps(layer))


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle])
def test_copies_and_state_dicts_are_their_own(copied) -> None:
    layer = build(bias=False)
    twin = copied(layer)
    with torch.no_grad():
        twin.experts.mlp.w2.mul_(2)
    x = torch.randn(3, 16)
    assert_close("y", twin(x), 2 * layer(x))
    layer.load_state_dict(twin.state_dict())
    assert_close("y", twin(x), layer(x))
    assert len(get_load_balancing_loss()) == 4


def test_megatrons_namespace() -> None:
    class Namespace:
        hidden_size = 48
        moe_num_experts = 8
        tensor_model_parallel_size = 2  # not a field: left alone

    arguments = from_megatron(Namespace())
    assert (arguments.hidden_size, arguments.moe_num_experts) == (48, 8)
    assert arguments.ffn_hidden_size == 4096


def test_what_megablocks_itself_exports() -> None:
    layer = compat.dMoE(compat.Arguments(**SIZES))
    layer(torch.randn(3, 16))
    assert len(compat.get_load_balancing_loss()) == 1
    assert issubclass(compat.MoE, type(layer).__base__)


def test_the_state_of_an_optimizer_goes_to_the_same_weights() -> None:
    """It has no names: torch counts the parameters, of which some are of one shape."""
    layer = build(mlp_type="glu", shared_expert=True, shared_expert_hidden_size=32)
    assert [name for name, _ in layer.named_parameters()] == [
        "router.layer.weight",
        "experts.bias",
        "experts.mlp.w1",
        "experts.mlp.w2",
        "experts.mlp.v1",
        "shared_expert.up_proj.weight",
        "shared_expert.up_proj.bias",
        "shared_expert.down_proj.weight",
        "shared_expert.down_proj.bias",
        "shared_expert.gate_proj.weight",
        "shared_expert.gate_proj.bias",
    ]


@pytest.mark.parametrize("bias", [False, True])
def test_linears_are_found_by_their_type(bias: bool) -> None:
    """By what initialises the weights of a model, or sorts them into groups."""
    layer = build(mlp_type="glu", shared_expert=True, return_bias=False, bias=bias)
    linears = {n: part for n, part in layer.named_modules() if isinstance(part, nn.Linear)}
    assert set(linears) == {
        "router.layer",
        *(f"shared_expert.{name}_proj" for name in ("gate", "up", "down")),
    }
    down, router = linears["shared_expert.down_proj"], linears["router.layer"]
    assert (down.in_features, down.out_features, down.bias is not None) == (32, 16, bias)
    assert (router.in_features, router.out_features, router.bias) == (16, 4, None)
    for part in linears.values():
        part.reset_parameters()  # as torch's: kaiming_uniform_
        nn.init.normal_(part.weight, std=0.3)
    assert "in_features=16, out_features=4, bias=False" in repr(layer)
    with pytest.raises(ValueError, match=r"call layer\(x\)"):
        router(torch.randn(3, 16))
    copied, x = copy.deepcopy(layer), torch.randn(3, 16)
    assert torch.equal(copied(x), layer(x))


def test_the_router_jitters_by_its_own_mode() -> None:
    layer, x = build(moe_jitter_eps=0.5, bias=False), torch.randn(9, 16)
    assert not torch.equal(layer(x), layer(x))
    layer.router.eval()  # frozen, in a model that trains
    assert torch.equal(layer(x), layer(x))
    assert len(get_load_balancing_loss()) == 4
    layer.train()
    assert not torch.equal(layer(x), layer(x))


def test_the_losses_take_what_layers_take() -> None:
    fields = SIZES | {"moe_zloss_weight": 0.1, "bias": False}
    layer = dMoE(fields)
    layer(torch.randn(3, 16))
    for args in (fields, types.SimpleNamespace(**fields)):
        assert_close(
            "balance", batched_load_balancing_loss(args), batched_load_balancing_loss(layer.args)
        )
        assert_close("z", batched_router_zloss(args), batched_router_zloss(layer.args))


def test_weights_may_be_other_tensors_than_parameters() -> None:
    layer, x = build(mlp_type="glu", return_bias=False), torch.randn(7, 16)
    normed = copy.deepcopy(layer)
    nn.utils.parametrizations.weight_norm(normed.experts.mlp, "w1")
    assert_close("y", normed(x), layer(x))
    flat = torch.cat([p.detach().flatten() for p in layer.parameters()]).requires_grad_()
    views = flat.split([p.numel() for p in layer.parameters()])
    expected = torch.autograd.grad(layer(x).sum(), layer.parameters())
    for (name, p), view in zip(tuple(layer.named_parameters()), views, strict=True):  # as FSDP1
        module, _, last = name.rpartition(".")
        delattr(layer.get_submodule(module), last)
        setattr(layer.get_submodule(module), last, view.view(p.shape))
    (grad,) = torch.autograd.grad(layer(x).sum(), flat)
    assert_close("gradient", grad, torch.cat([g.flatten() for g in expected]))


def test_parts_are_neither_called_nor_watched() -> None:
    """With FSDP2's hooks, which never ran, gradients were sums over the ranks."""
    layer = build()
    for part in (layer.router, layer.router.layer, layer.experts, layer.experts.mlp):
        with pytest.raises(ValueError, match=r"call layer\(x\), or use mb_layers.dMoE"):
            part(torch.randn(3, 16))
        for register in (
            part.register_forward_hook,
            part.register_full_backward_pre_hook,
            part.register_full_backward_hook,
        ):
            with pytest.raises(ValueError, match=r"fully_shard\(layer\)"):
                register(lambda *args: None)


def test_wrapped_parts_are_refused() -> None:
    """As DDP(layer.experts), say, whose gradients would stay those of this rank."""

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def __getattr__(self, name: str):
            try:
                return super().__getattr__(name)
            except AttributeError:  # as FSDP1 and compiled modules do
                return getattr(self.module, name)

    layer = build()
    layer.experts = Wrapper(layer.experts)
    with pytest.raises(ValueError, match="expected experts as the layer made it, got Wrapper"):
        layer(torch.randn(3, 16))


def test_pruned_weights_are_set_in_every_pass() -> None:
    """By a hook before the forward of a part, which is not called as such."""
    layer = build(bias=False)
    mlp = layer.experts.mlp
    prune.random_unstructured(mlp, "w1", 0.5)
    x = torch.randn(7, 16)
    for _ in range(2):  # steps
        layer(x).square().sum().backward()
        with torch.no_grad():
            for p in layer.parameters():
                p -= p.grad
                p.grad = None
    twin = build(bias=False)
    pruned = {n.removesuffix("_orig"): p for n, p in layer.named_parameters()}
    twin.load_state_dict(pruned | {"experts.mlp.w1": mlp.w1_orig * mlp.w1_mask})
    assert_close("y", layer(x), twin(x))


def test_expert_parallelism_is_said_to_be_of_our_layers() -> None:
    with pytest.raises(ValueError, match="dispatcher= to layer_from_arguments"):
        build(moe_expert_model_parallelism=True)


def test_two_threads_may_call_one_layer() -> None:
    """The first returns while the second computes, unless the second waits for it."""
    layer, x = build(return_bias=False).eval(), torch.randn(7, 16)
    expected, results = layer(x), []
    second = threading.Thread(target=lambda: results.append(layer(x)))
    began, returned = threading.Event(), threading.Event()

    def interleave(*args) -> None:
        if threading.current_thread() is second:
            began.set()
            returned.wait()
        else:
            second.start()
            began.wait(0.2)

    layer._whole[0].router.register_forward_pre_hook(interleave)
    assert torch.equal(layer(x), expected)
    returned.set()
    second.join()
    (result,) = results
    assert torch.equal(result, expected)
