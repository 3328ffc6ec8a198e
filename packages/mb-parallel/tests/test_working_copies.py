"""Experts that compute with kept 16-bit copies train as those that cast at each use, bit by bit."""

import copy
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from mb_layers import MoEConfig, add_lora, dMoE
from mb_parallel import ParallelDims, parallelize_experts
from mb_parallel.optimizer import (
    SGD,
    Adafactor,
    AdamW,
    Muon,
    WorkingCopies,
    clip_and_step,
    decay_groups,
    hold_working_copies,
    muon_groups,
)
from mb_parallel.shards import local
from mb_parallel.testing import run_ranks
from torch import nn
from torch.nn.utils import parametrize, prune

CONFIG = {"hidden_size": 16, "ffn_hidden_size": 32, "num_experts": 4, "top_k": 2}


class _Model(nn.Module):
    def __init__(self, **change) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(dMoE(MoEConfig(**(CONFIG | change))) for _ in range(2))

    def forward(self, x):
        aux = 0.0
        for layer in self.layers:
            output = layer(x)
            x, aux = x + output.y, aux + output.aux_loss
        return x, aux


def _losses(model, optimizer, *, micro_batches, steps=3, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(steps):
        for _ in range(micro_batches):
            x = torch.randn(2, 6, 16, generator=generator).to(dtype)
            y, aux = model(x)
            loss = (y.float() - x.float().roll(1, -1)).square().mean() + aux
            (loss / micro_batches).backward()
            losses.append(loss.detach())
        clip_and_step(optimizer, max_norm=0.5)
        optimizer.zero_grad(set_to_none=True)
    return torch.stack(losses)


def _muon(model, copies):
    return Muon(muon_groups(model, 0.1), lr=1e-2, working_copies=copies)


OPTIMIZERS = {
    "adamw": lambda model, copies: AdamW(decay_groups(model, 0.1), lr=1e-2, working_copies=copies),
    "adamw that knows of no copies": lambda model, copies: AdamW(model.parameters(), lr=1e-2),
    "muon": _muon,
    "adafactor": lambda model, copies: Adafactor(decay_groups(model, 0.1), lr=1e-2),
    "sgd": lambda model, copies: SGD(model.parameters(), lr=1e-1),
}


def _tied():
    model = _Model()
    model.layers[1].experts.w1 = model.layers[0].experts.w1
    return model


def test_experts_alone_have_copies():
    """A shared expert's weights are no more than those of any other layer."""
    sizes = {"hidden_size": 8, "ffn_hidden_size": 4, "num_experts": 2, "top_k": 1}
    layer = dMoE(MoEConfig(**sizes, shared_expert_hidden_size=4))
    copies = hold_working_copies([layer], torch.bfloat16)
    assert layer.experts.working_copies.keys() == {"w1", "w2"}
    assert not layer.shared_expert.working_copies
    assert len(copies) == 2
    assert not hold_working_copies([layer.bfloat16()], torch.bfloat16)  # already as narrow


def test_layers_that_share_a_weight_share_its_copy():
    plain, kept = _tied(), _tied()
    copies = hold_working_copies([kept], torch.bfloat16)
    assert len(copies) == 3
    expected = _losses(plain, AdamW(plain.parameters(), lr=1e-2), micro_batches=1)
    ours = AdamW(kept.parameters(), lr=1e-2, working_copies=copies)
    torch.testing.assert_close(_losses(kept, ours, micro_batches=1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trains_as_without_copies(name, micro_batches):
    plain, kept = _Model(), _Model()
    copies = hold_working_copies([kept], torch.bfloat16)
    assert len(copies) == 4
    expected = _losses(plain, OPTIMIZERS[name](plain, None), micro_batches=micro_batches)
    got = _losses(kept, OPTIMIZERS[name](kept, copies), micro_batches=micro_batches)
    assert torch.equal(got, expected)
    for (key, parameter), other in zip(kept.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter, other), key


def test_gradients_are_16_bit_until_they_are_added_up():
    model = _Model()
    hold_working_copies([model], torch.bfloat16)
    x = torch.randn(5, 16).bfloat16()
    w1 = model.layers[0].experts.w1
    model(x)[0].sum().backward()
    assert (w1.grad.dtype, w1.dtype) == (torch.bfloat16, torch.float32)
    first = w1.grad.float()
    model(x)[0].sum().backward()
    assert torch.equal(w1.grad, 2 * first)
    assert w1.grad.dtype == torch.float32


def _spread(rank, world_size, folder):
    """On two ranks with half of the experts each: whether copies are what their weights are.

    A DTensor's shard is a tensor of its own, whose writes are counted apart.
    """
    mesh = ParallelDims(dp_shard=2, ep=2).build("cpu")

    def spread():
        model = _Model()
        parallelize_experts(model, mesh)
        return model, hold_working_copies([model], torch.bfloat16)

    def equal(model, copies):
        model(torch.randn(5, 16).bfloat16())
        return all(torch.equal(copy, local(p).bfloat16()) for p, copy in copies.items())

    done = {}
    for name, optimizer in OPTIMIZERS.items():
        model, copies = spread()
        _losses(model, optimizer(model, copies), micro_batches=1)
        done[name] = equal(model, copies)
    other, _ = spread()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-1.5)
    dcp.save(other.state_dict(), checkpoint_id=folder)
    for how in ("load_state_dict", "by hand", "checkpoint"):
        model, copies = spread()
        if how == "load_state_dict":
            model.load_state_dict(other.state_dict())
        elif how == "by hand":
            with torch.no_grad():
                for mine, new in zip(model.parameters(), other.parameters(), strict=True):
                    mine.copy_(new)
        else:
            dcp.load(model.state_dict(), checkpoint_id=folder)
        done[how] = equal(model, copies)
        assert torch.equal(local(model.layers[0].experts.w1), local(other.layers[0].experts.w1))
    return done


def test_copies_of_spread_experts_are_cast_again_too(tmp_path):
    for done in run_ranks(_spread, 2, tmp_path):
        assert [what for what, equal in done.items() if not equal] == []


def _half_an_expert(rank, world_size):
    """Losses and the dtype of a weight's gradient, without copies and with them."""
    mesh = ParallelDims(dp_shard=2, ep=2).build("cpu")
    found = []
    for dtype in (torch.float32, torch.bfloat16):  # in fp32 there are no copies
        model = _Model(num_experts=1, top_k=1, activation="swiglu")
        parallelize_experts(model, mesh)
        optimizer = AdamW(model.parameters(), working_copies=hold_working_copies([model], dtype))
        losses = _losses(model, optimizer, micro_batches=2)
        model(torch.randn(5, 16).bfloat16())[0].sum().backward()
        found.append((losses, model.layers[0].experts.w1.grad.dtype))
    return found


def test_ranks_that_share_an_expert_compute_with_copies_of_their_parts():
    for (expected, plain), (got, kept) in run_ranks(_half_an_expert, 2):
        assert torch.equal(got, expected)
        assert (plain, kept) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("how", ["load_state_dict", "by hand", "data", "uncounted"])
def test_a_written_parameter_is_cast_again(how):
    model, other = _Model(), _Model()
    copies = hold_working_copies([model], torch.bfloat16)
    x = torch.randn(5, 16).bfloat16()
    model(x)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-1.5)
        if how == "load_state_dict":
            model.load_state_dict(other.state_dict())
        for mine, new in zip(model.parameters(), other.parameters(), strict=True):
            if how == "by hand":
                mine.copy_(new)
            if how == "data":
                mine.data = new.clone()
            if how == "uncounted":
                mine.data.copy_(new)
    if how == "uncounted":
        copies.refresh(everything=True)
    assert torch.equal(model(x)[0], other(x)[0])


@pytest.mark.parametrize("how", ["assign", "functional_call", "parametrization", "prune"])
def test_another_parameter_in_the_place_of_one_is_refused(how):
    model = _Model()
    hold_working_copies([model], torch.bfloat16)
    experts, x = model.layers[0].experts, torch.randn(5, 16).bfloat16()
    other = {name: -parameter.detach() for name, parameter in model.named_parameters()}
    if how == "assign":
        model.load_state_dict(other, assign=True)
    if how == "parametrization":
        parametrize.register_parametrization(experts, "w1", nn.Tanh())
    if how == "prune":
        prune.random_unstructured(experts, "w1", 0.5)
    with pytest.raises(ValueError, match="Expected the 'w1' that hold_working_copies found"):
        torch.func.functional_call(model, other if how == "functional_call" else {}, (x,))


def test_copies_and_pickles_of_a_model_stand_alone():
    model = _Model()
    hold_working_copies([model], torch.bfloat16)
    x = torch.randn(5, 16).bfloat16()
    for other in (copy.deepcopy(model.layers[0]), pickle.loads(pickle.dumps(model.layers[0]))):
        with torch.no_grad():
            other.experts.w1.mul_(2)
        fresh = _Model().layers[0]
        fresh.load_state_dict(other.state_dict())
        assert torch.equal(other(x).y, fresh(x).y)
        other(x).y.sum().backward()
        assert other.experts.w1.grad is not None


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_copy_of_model_and_optimizer_trains_on_alike(name):
    model = _Model()
    optimizer = OPTIMIZERS[name](model, hold_working_copies([model], torch.bfloat16))
    _losses(model, optimizer, micro_batches=1, steps=1)
    copied = copy.deepcopy((model, optimizer))
    got = _losses(*copied, micro_batches=1)
    assert torch.equal(got, _losses(model, optimizer, micro_batches=1))


def test_state_dict_and_parameters_are_as_before():
    model = _Model()
    names = list(model.state_dict())
    hold_working_copies([model], torch.float16)
    assert list(model.state_dict()) == names == [name for name, _ in model.named_parameters()]
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_frozen_adapted_and_fp32_experts():
    model = _Model()
    assert not hold_working_copies([model], torch.float32)
    model.layers[0].experts.requires_grad_(False)
    copies = hold_working_copies([model], torch.bfloat16)
    x = torch.randn(5, 16).bfloat16()
    model(x)[0].sum().backward()
    assert [p.grad is None for p in copies] == [True, True, False, False]
    model.layers[0].experts.requires_grad_(True)  # and the other way round, between steps
    model.layers[1].experts.requires_grad_(False)
    model.zero_grad()
    model(x)[0].sum().backward()
    assert [p.grad is None for p in copies] == [False, False, True, True]
    adapted = _Model()
    for layer in adapted.layers:
        add_lora(layer.experts, rank=2, alpha=4)
    assert not hold_working_copies([adapted], torch.bfloat16)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("mlp_bias", [False, True])
def test_under_compile(mlp_bias):
    plain, kept = _Model(mlp_bias=mlp_bias), _Model(mlp_bias=mlp_bias)
    copies = hold_working_copies([kept], torch.bfloat16)
    for layer in kept.layers:
        layer.compile(backend="aot_eager")
    expected = _losses(plain, AdamW(plain.parameters(), lr=1e-2), micro_batches=2)
    ours = AdamW(kept.parameters(), lr=1e-2, working_copies=copies)
    torch.testing.assert_close(_losses(kept, ours, micro_batches=2), expected, rtol=1e-4, atol=1e-4)


def test_other_dtypes_and_sizes_are_refused():
    weight = nn.Parameter(torch.zeros(2, 3))
    for bad in (torch.zeros(2, 3), torch.zeros(3, 2, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="copies of the same local size in bf16 or fp16"):
            WorkingCopies({weight: bad})
