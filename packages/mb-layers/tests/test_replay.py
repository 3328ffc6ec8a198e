"""Routing recorded in one run and replayed in another: same experts, live weights, recompute."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from layers_oracle import assert_close
from mb_layers import (
    AsMLP,
    ExpertChoiceRouter,
    MoE,
    MoEConfig,
    NoisyTopKRouter,
    RecordedRouting,
    SinkhornRouter,
    collect,
    dMoE,
    record_routing,
    replay_routing,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

SIZES = {"hidden_size": 16, "ffn_hidden_size": 16, "num_experts": 6, "top_k": 2}


class Blocks(nn.Module):
    def __init__(self, recompute: bool = False, **overrides) -> None:
        super().__init__()
        config = MoEConfig(**(SIZES | {"init_method_std": 0.3} | overrides))
        cls = dMoE if config.capacity_factor is None else MoE
        layers = [AsMLP(cls(config, dtype=torch.float64), aux_scale=None) for _ in range(2)]
        self.layers = nn.ModuleList(layers)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x))
        return x


def experts_of(model: nn.Module, x: Tensor) -> list[list[int]]:
    with collect(model) as moe:
        model(x)
    return moe.metrics()["tokens_per_expert"].tolist()


@pytest.mark.parametrize(
    "overrides",
    [{}, {"score_function": "sigmoid", "renormalize": True}, {"capacity_factor": 0.7}],
    ids=["softmax", "sigmoid", "capacity"],
)
def test_replayed_experts_are_the_recorded_ones_with_live_weights(overrides: dict) -> None:
    rollout, trained = Blocks(**overrides), Blocks(**overrides)
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    with record_routing(rollout) as routing, collect(rollout) as moe:
        rollout(x)
    ids = routing.expert_ids()
    assert {name: i.shape for name, i in ids.items()} == dict.fromkeys(
        ("layers.0.layer", "layers.1.layer"), (2, 7, 2)
    )
    expected = moe.metrics()["tokens_per_expert"].tolist()
    assert experts_of(trained, x) != expected
    with replay_routing(trained, ids), collect(trained) as moe:
        y = trained(x)
        y.square().sum().backward()
    assert moe.metrics()["tokens_per_expert"].tolist() == expected
    assert all(layer.layer.router.weight.grad.abs().sum() > 0 for layer in trained.layers)
    by_hand = x
    for layer, each in zip(trained.layers, ids.values(), strict=True):
        by_hand = by_hand + layer.layer(by_hand, routing=each).y
    assert_close("y", y, by_hand)
    assert experts_of(trained, x) != expected  # nothing stays
    with replay_routing(trained, torch.stack(tuple(ids.values()), dim=-2).flatten(0, 1).short()):
        assert_close("y from [T, L, K]", trained(x), y)


def test_recomputed_layers_replay_too_or_say_so() -> None:
    plain = Blocks()
    recomputed = Blocks(recompute=True)
    recomputed.load_state_dict(plain.state_dict())
    x = torch.randn(9, 16, dtype=torch.float64)
    ids = torch.randint(0, 6, (9, 2, 2))
    grads = []
    for model, early_stop in ((plain, True), (recomputed, True), (recomputed, False)):
        model.zero_grad()
        with (
            replay_routing(model, ids),
            record_routing(model) as routing,
            set_checkpoint_early_stop(early_stop),
        ):
            model(x).square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
        for name, each in zip(routing.expert_ids().values(), ids.unbind(1), strict=True):
            assert torch.equal(name, each.int())
    for expected, *others in zip(*grads, strict=True):
        for got in others:
            assert_close("gradient", got, expected)
    with replay_routing(recomputed, ids):
        loss = recomputed(x).sum()
    twin = pickle.loads(pickle.dumps(copy.deepcopy(recomputed)))
    with pytest.raises(ValueError, match="expected the backward pass inside replay_routing"):
        loss.backward()
    for model in (recomputed, twin):
        model(x=x).sum().backward()  # the next pass is a plain one
        for layer in model.layers:
            assert not layer.layer._forward_pre_hooks
            assert not layer.layer._forward_hooks


def test_a_pass_recomputed_in_the_context_of_another_is_an_error() -> None:
    """As in DPO, whose loss is of two passes: the ids of one have the shape of the other's."""
    x, ids = torch.randn(9, 16, dtype=torch.float64), torch.randint(0, 6, (2, 9, 2, 2))
    for model in (Blocks(), Blocks(recompute=True)):
        with replay_routing(model, ids[0]):
            chosen = model(x).sum()
        with replay_routing(model, ids[1]):
            loss = chosen - model(x).sum()
            if not model.recompute:
                loss.backward()
                continue
            with pytest.raises(ValueError, match=r"'layers\.1\.layer' recomputed inside another"):
                loss.backward()
            with (
                pytest.raises(ValueError, match="expected one replay_routing at a time"),
                replay_routing(model, ids[0]),
            ):
                pass


def test_a_reentrant_checkpoint_is_refused() -> None:
    """It keeps nothing of its first pass that could tell whose ids it had."""
    model = Blocks()
    x = torch.randn(9, 16, dtype=torch.float64, requires_grad=True)
    with replay_routing(model, torch.randint(0, 6, (9, 2, 2))):
        loss = checkpoint(model, x, use_reentrant=True).sum()
        with pytest.raises(ValueError, match=r"use_reentrant=False inside .* True of 'layers\.1"):
            loss.backward()


def test_what_a_replayed_layer_returns_may_be_written_into() -> None:
    model = Blocks()
    layer = model.layers[0].layer
    x = torch.randn(9, 16, dtype=torch.float64, requires_grad=True)
    with replay_routing(layer, {"": torch.randint(0, 6, (9, 2))}):
        expected = torch.autograd.grad((layer(x).y + x).square().sum(), x)
        y = layer(x).y
        y += x
        assert_close("dx", torch.autograd.grad(y.square().sum(), x)[0], expected[0])


def test_passes_of_several_batches_are_not_joined() -> None:
    model = Blocks()
    with record_routing(model) as routing:
        for batch in (3, 2):
            model(torch.randn(batch, 5, 16, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"batches of \(2,\), \(3,\) in 'layers.0"):
        routing.expert_ids()


@pytest.mark.slow
def test_a_compiled_model_replays() -> None:
    model = Blocks()
    x, ids = torch.randn(9, 16, dtype=torch.float64), torch.randint(0, 6, (9, 2, 2))
    with replay_routing(model, ids):
        expected = model(x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with replay_routing(model, ids):
        assert_close("y", compiled(x), expected)
    assert_close("y afterwards", compiled(x), model(x))
    assert not torch.allclose(compiled(x), expected)
    with record_routing(model) as routing:
        compiled(x)
    with pytest.raises(ValueError, match="a model that was compiled before has no hooks"):
        routing.expert_ids()
    torch._dynamo.reset()


def test_tokens_without_ids_are_the_routers() -> None:
    model = Blocks()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    with record_routing(model) as routing:
        expected = model(x)
    ids = torch.stack(tuple(routing.expert_ids().values()), dim=-2)
    ids[:, 2:] = -1
    with replay_routing(model, ids):
        assert_close("y", model(x), expected)
    with replay_routing(model, torch.full_like(ids, -1)):
        assert_close("y", model(x), expected)
    ids = torch.full_like(ids, -1)
    ids[0, 0, 0] = torch.tensor([3, -1])  # one slot of two: the other stays empty
    with replay_routing(model, ids):
        first = model.layers[0].layer(x)
    whole = model.layers[0].layer(x)
    assert first.metrics["tokens_per_expert"].sum() == whole.metrics["tokens_per_expert"].sum() - 1


def test_any_negative_number_is_no_expert() -> None:
    """Also one that is an expert's in its last 32 bits."""
    model, x = Blocks(), torch.randn(3, 16, dtype=torch.float64)
    ids = torch.tensor([1, -1]).expand(3, 2, 2)
    with replay_routing(model, ids):
        expected = model(x)
    with replay_routing(model, torch.where(ids < 0, 2 - 2**32, ids)):
        assert_close("y of one expert", model(x), expected)


def test_a_copy_is_not_recorded() -> None:
    model, x = Blocks(), torch.randn(2, 5, 16, dtype=torch.float64)
    with record_routing(model) as routing:
        model(x)
        other = copy.deepcopy(model)
        other(2 - x)
    other(2 - x)
    with record_routing(model) as expected:
        model(x)
    for name, ids in expected.expert_ids().items():
        assert torch.equal(routing.expert_ids()[name], ids)


def test_a_copy_is_not_replayed() -> None:
    """Nothing would end it: an average of the weights was routed by its first step for ever."""
    model, x = Blocks(), torch.randn(2, 5, 16, dtype=torch.float64)
    with record_routing(model) as routing:
        model(2 - x)
    with replay_routing(model, routing.expert_ids()):
        other = copy.deepcopy(model)
        saved = pickle.dumps(model)
    expected = model(x)
    for copied in (other, pickle.loads(saved)):
        assert torch.equal(copied(x), expected)
        assert not any(layer._forward_pre_hooks for layer in copied.modules())


def test_tokens_without_ids_are_routed_beside_the_real_ones_alone() -> None:
    config = MoEConfig(**SIZES, init_method_std=0.3)
    layer = dMoE(config, router=SinkhornRouter(config), dtype=torch.float64)
    x, mask = torch.randn(9, 16, dtype=torch.float64), torch.arange(9) < 6
    x[~mask] = torch.nan
    expected = layer(x, mask=mask).y
    with replay_routing(layer, {"": torch.full((9, 2), -1)}):
        assert_close("y", layer(x, mask=mask).y, expected)


@pytest.mark.parametrize(
    ("router", "overrides"),
    [(None, {"jitter_eps": 0.3}), (NoisyTopKRouter, {}), (None, {"uniform_assignment": True})],
    ids=["jitter", "noisy", "uniform"],
)
def test_a_replayed_pass_weighs_the_experts_as_the_recorded_one(
    router: type[NoisyTopKRouter] | None, overrides: dict
) -> None:
    config = MoEConfig(**SIZES, init_method_std=0.3, **overrides)
    layer = dMoE(config, router=router and router(config), dtype=torch.float64).double()
    for parameter in layer.router.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(9, 16, dtype=torch.float64)
    torch.manual_seed(3)
    with record_routing(layer) as routing:
        expected = layer(x)
    after = torch.rand(1)
    ids = routing.expert_ids()[""]
    for free in (0, 4, 9):  # the router runs twice for tokens without ids: with the same noise
        torch.manual_seed(3)
        with replay_routing(layer, {"": torch.where(torch.arange(9)[:, None] < free, -1, ids)}):
            got = layer(x)
        assert_close("y", got.y, expected.y)
        assert torch.equal(torch.rand(1), after)


def test_layers_that_run_twice_in_a_pass_are_named() -> None:
    model, x = Blocks(), torch.randn(3, 16, dtype=torch.float64)
    model.layers.insert(1, model.layers[0])  # and after it one that runs once
    with record_routing(model) as routing:
        model(x)
    assert len(routing.passes["layers.0.layer"]) == 2
    with pytest.raises(ValueError, match=r"several runs of layers\.0\.layer"):
        routing.expert_ids()
    with record_routing(model) as routing:
        for _ in range(2):
            model.layers[0](x)  # no pass of the model
    assert routing.expert_ids()["layers.0.layer"].shape == (6, 2)


@pytest.mark.parametrize("error", [RuntimeError("no memory"), KeyboardInterrupt()], ids=repr)
def test_a_pass_that_failed_is_not_recorded(error: BaseException) -> None:
    """The first layer's ids were those of the failed pass and of the one after it."""
    model, x = Blocks(), torch.randn(3, 16, dtype=torch.float64)

    def fail(*_) -> None:
        raise error

    with record_routing(model) as expected:
        model(x)
    with record_routing(model) as routing:
        failing = model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(type(error)):
            model(x)
        failing.remove()
        model(x)
        failing = model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(type(error)):
            model(x)
    failing.remove()
    ids = expected.expert_ids()
    for name, recorded in routing.expert_ids().items():
        assert torch.equal(recorded, ids[name])
    with replay_routing(model, routing.expert_ids()):
        model(x)


def test_ids_may_be_arrays() -> None:
    model, x = Blocks(), torch.randn(3, 16, dtype=torch.float64)
    ids = torch.randint(0, 6, (3, 2, 2))
    with replay_routing(model, ids):
        expected = model(x)
    array = ids.numpy().astype(np.uint16)
    array.flags.writeable = False
    by_name = dict(zip(("layers.0.layer", "layers.1.layer"), array.swapaxes(0, 1), strict=True))
    integers = (np.int8, np.uint8, np.uint64)
    for given in (array, by_name, torch.from_numpy(array.copy()), *map(array.astype, integers)):
        with replay_routing(model, given):
            assert_close("y", model(x), expected)


def test_ids_are_those_of_when_the_context_was_opened() -> None:
    """A buffer that the next rollout is written to before this one is recomputed."""
    model, x = Blocks(recompute=True), torch.randn(3, 16, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, 6, (3, 2, 2), dtype=torch.int32)
    grads = []
    for buffer, following in ((ids.clone(), ids), (ids.clone(), -1), (ids.clone().numpy(), -1)):
        with replay_routing(model, buffer):
            y = model(x)
            buffer[:] = following
            grads += torch.autograd.grad(y.square().sum(), x)
    assert torch.equal(grads[1], grads[0])
    assert torch.equal(grads[2], grads[0])


def test_recorded_ids_are_the_callers_own() -> None:
    model, x = Blocks(), torch.randn(5, 16, dtype=torch.float64)
    grads = []
    for elsewhere in (0, 1):
        with record_routing(model) as routing, collect(model) as moe:
            y = model(x)
        for (ids,) in routing.passes.values():
            ids.data += elsewhere  # behind autograd's back, as `dist.broadcast` writes
        loss = y.square().sum() + moe.aux_loss()
        grads += torch.autograd.grad(loss, model.layers[0].layer.router.weight)
    assert torch.equal(*grads)


def test_generated_passes_join_to_the_routing_of_the_sequence() -> None:
    pytest.importorskip("transformers")
    import mb_layers.transformers as mb
    from tiny_models import build

    model = build("qwen3_moe").eval()
    mb.swap_blocks(model)
    prompt = torch.randint(3, 60, (2, 6))
    with record_routing(model) as routing:
        tokens = model.generate(prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    ids = routing.expert_ids()
    assert all(each.shape == (2, 9, 3) for each in ids.values())
    with record_routing(model) as at_once:
        model(tokens[:, :-1], use_cache=False)
    for name, each in at_once.expert_ids().items():
        assert torch.equal(each, ids[name])
    trained = copy.deepcopy(model).train()
    with torch.no_grad():
        for layer in trained.model.layers:
            layer.mlp.moe.router.weight.normal_()
    with replay_routing(trained, ids), record_routing(trained) as replayed:
        trained(tokens[:, :-1], labels=tokens[:, :-1]).loss.backward()
    for name, each in replayed.expert_ids().items():
        assert torch.equal(each, ids[name])


def test_other_ids_are_named() -> None:
    model, x = Blocks(), torch.randn(3, 16, dtype=torch.float64)
    for bad, why in (
        (torch.zeros(3, 3, 2).int(), r"\[\.\.\., 2 MoE layers, K\], got a tensor of shape \(3, 3"),
        ({"layers.0.layer": torch.zeros(3, 2).int()}, "got those of layers.0.layer"),
        (torch.full((3, 2, 2), 6), r"below 6 for 'layers.0.layer', got torch.int64 up to 6"),
        (torch.zeros(3, 2, 2), "integer expert ids below 6 .* got torch.float32"),
        (torch.zeros(3, 2, 2).cfloat(), "integer expert ids below 6 .* got torch.complex64"),
        (None, "ids of all layers as a tensor or an array, got a NoneType"),
        (RecordedRouting(), r"got a RecordedRouting; pass its expert_ids\(\)"),
        ({"layers.0.layer": [[1]], "layers.1.layer": [[1]]}, "'layers.0.layer' as a tensor or an"),
    ):
        with pytest.raises(ValueError, match=why), replay_routing(model, bad):
            pass
    with (
        replay_routing(model, torch.zeros(4, 2, 2).int()),
        pytest.raises(ValueError, match=r"of shape \(3, 2\) for 'layers.0.layer', got \(4, 2\)"),
    ):
        model(x)
    layer = dMoE(MoEConfig(**SIZES), router=ExpertChoiceRouter(MoEConfig(**SIZES)))
    x, free = torch.randn(6, 16), {"": torch.full((6, 2), -1)}
    for context in (record_routing(layer), replay_routing(layer, free)):
        with context, pytest.raises(ValueError, match="chooses tokens for experts"):
            layer(x)
    with pytest.raises(ValueError, match="found none"), record_routing(nn.Linear(2, 2)):
        pass


def test_routing_that_no_router_made_cannot_be_recorded() -> None:
    layer = dMoE(MoEConfig(**SIZES))
    x = torch.randn(3, 16)
    routed = layer.router(x)
    with (
        record_routing(layer),
        pytest.raises(ValueError, match="router of '' to run, got a call with a RouterOutput"),
    ):
        layer(x, routing=routed)


def test_what_a_shared_router_chose_for_one_layer_is_not_recorded_for_another() -> None:
    first = dMoE(MoEConfig(**SIZES))
    second = dMoE(MoEConfig(**SIZES), router=first.router)
    x = torch.randn(3, 16)
    routed = second.route(-x)
    with record_routing(nn.ModuleList([first, second])) as routing:
        first(x)
        second(-x)
        assert torch.equal(routing.expert_ids()["1"], routed.expert_ids_TK)
        first(x)
        with pytest.raises(ValueError, match="router of '1' to run, got a call with a RouterOut"):
            second(x, routing=routed)
