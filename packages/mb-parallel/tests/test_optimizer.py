"""Each optimizer on one process against another's implementation, and what its state survives."""

import io
from copy import deepcopy
from inspect import signature

import mb_kernels
import pytest
import torch
from mb_kernels.runtime import recording, registration
from mb_layers import MoEConfig, dMoE
from mb_parallel import ParallelDims
from mb_parallel.optimizer import (
    SGD,
    Adafactor,
    AdamW,
    GradScaler,
    Muon,
    WorkingCopies,
    clip_and_step,
    clip_grad_norm,
    decay_groups,
    describe,
    grad_norm,
    hold_working_copies,
    muon_groups,
    rehearse_step,
    weight_norm,
    zeros_in_grad,
)
from mb_parallel.optimizer.muon import coefficients_of, newton_schulz
from mb_parallel.shards import local
from mb_parallel.testing import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

JORDANS = coefficients_of("simple", 5)
OURS = {
    "adamw": lambda ps: AdamW(ps, weight_decay=0.1),
    "adafactor": lambda ps: Adafactor(ps, weight_decay=0.1),
    "sgd": lambda ps: SGD(ps, momentum=0.9, weight_decay=0.1),
    "muon": lambda ps: Muon(_matrices_and_rest(ps), weight_decay=0.1),
}


def _matrices_and_rest(parameters):
    matrices = [p for p in parameters if p.ndim == 2]
    rest = [p for p in parameters if p.ndim != 2]
    return [{"params": matrices, "muon": True}, {"params": rest}]


def _theirs(name, parameters):
    from transformers.optimization import Adafactor as Oracle

    if name == "muon":
        matrices, rest = (group["params"] for group in _matrices_and_rest(parameters))
        kind = "match_rms_adamw"
        return [
            torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn=kind),
            torch.optim.AdamW(rest, weight_decay=0.1),
        ]
    if name == "adafactor":
        return [Oracle(parameters, lr=0.1, weight_decay=0.1, relative_step=False)]
    if name == "sgd":
        return [torch.optim.SGD(parameters, momentum=0.9, weight_decay=0.1)]
    return [torch.optim.AdamW(parameters, weight_decay=0.1)]


def _parameters(shapes=((5, 7), (9, 4), (3,))):
    generator = torch.Generator().manual_seed(2)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def _set_grads(parameters, step, scale=1.0):
    generator = torch.Generator().manual_seed(100 + step)
    for p in parameters:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.device, p.dtype)


def _set_lr(optimizer, step):
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / (step + 1)


@pytest.mark.parametrize("name", OURS)
def test_steps_with_clipping_match_another_implementation(name):
    mine, theirs = _parameters(), _parameters()
    ours, others = OURS[name](mine), _theirs(name, theirs)
    for step in range(6):
        _set_grads(mine, step)
        _set_grads(theirs, step)
        for optimizer in (ours, *others):
            _set_lr(optimizer, step)
        result = clip_and_step(ours, max_norm=2.0)
        expected = nn.utils.clip_grad_norm_(theirs, 2.0)
        torch.testing.assert_close(result.grad_norm, expected)
        for other in others:
            other.step()
    for a, b, start in zip(mine, theirs, _parameters(), strict=True):
        if name == "muon":  # its iteration runs in bf16, with products of another order
            assert (a - b).norm() < 0.05 * (b - start).norm()
        else:
            torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", OURS)
def test_a_compiled_step_is_compiled_once_whatever_the_learning_rate(name):
    results = []
    torch._dynamo.reset()
    for compiled in (False, True):
        parameters = _parameters()
        optimizer = OURS[name](parameters)

        def train(parameters=parameters, optimizer=optimizer):
            loss = sum(p.square().sum() for p in parameters)
            loss.backward()
            clip_and_step(optimizer, max_norm=2.0)
            optimizer.step()
            optimizer.zero_grad()

        run = torch.compile(train, backend="aot_eager") if compiled else train
        with torch._dynamo.config.patch(error_on_recompile=True):
            for step in range(3):
                _set_lr(optimizer, step)
                run()
        results.append(parameters)
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


def test_rates_that_are_tensors_reach_kernels_as_numbers(monkeypatch):
    seen = []
    for name in ("adamw_step", "muon_step"):
        step = getattr(mb_kernels, name)

        def record(*args, step=step, **rates):
            seen.append({k: v for k, v in rates.items() if k not in ("grad_scale", "found_inf")})
            step(*args, **rates)

        monkeypatch.setattr(mb_kernels, name, record)
    weights = []
    for number in (float, torch.tensor):
        parameters = _parameters()
        rates = {"betas": (number(0.5), number(0.9)), "weight_decay": number(0.25)}
        optimizer = Muon(_matrices_and_rest(parameters), lr=number(0.125), **rates)
        _set_grads(parameters, 0)
        optimizer.step()
        weights.append(parameters)
    for rates in seen:
        numbers = [*rates.pop("betas", ()), *rates.values()]
        assert all(type(value) is float for value in numbers)
    assert len(seen) == 6
    torch.testing.assert_close(*weights)


@pytest.mark.parametrize(
    "numbers",
    [{"nesterov": False}, {"momentum": 0.5}, {"ns_steps": 3}, {"ns_coefficients": (2, -1.5, 0.5)}],
    ids=str,
)
def test_muons_constants_mean_the_same_as_torchs(numbers):
    mine, theirs = ([p for p in _parameters() if p.ndim > 1] for _ in range(2))
    group = [{"params": mine, "muon": True}]
    ours = Muon(group, weight_decay=0.1, scale=1.0, ns_dtype=torch.float32, **numbers)
    other = torch.optim.Muon(theirs, weight_decay=0.1, adjust_lr_fn="match_rms_adamw", **numbers)
    for step in range(4):
        for optimizer, parameters in ((ours, mine), (other, theirs)):
            _set_grads(parameters, step)
            _set_lr(optimizer, step)
        for of in other.param_groups:  # steps of the size of Adam's: a fifth of ours
            of["lr"] *= 5
            of["weight_decay"] = 0.1 / 5
        ours.step()
        other.step()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-2)  # torch iterates in bf16


def test_several_optimizers_share_a_norm_and_skip_together():
    mine, other = _parameters(), _parameters()
    matrices, rest = [0, 1], range(2, len(mine))
    groups = [
        {"params": [other[i] for i in matrices], "muon": True},
        {"params": [other[i] for i in rest]},
    ]
    one = Muon(groups)
    two = Muon([{"params": [mine[i] for i in matrices], "muon": True}]), AdamW(mine[2:])
    for step, finite in enumerate((True, False, True)):
        _set_grads(mine, step)
        _set_grads(other, step)
        if not finite:
            mine[-1].grad[0] = other[-1].grad[0] = torch.nan
        got = clip_and_step(iter(two), max_norm=0.1)
        want = clip_and_step(one, max_norm=0.1)
        torch.testing.assert_close(got, want)
        assert bool(got.skipped) is not finite
    for a, b in zip(mine, other, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", OURS)
def test_a_step_that_is_not_finite_leaves_no_trace(name, bad):
    mine, other = _parameters(), _parameters()
    ours, clean = OURS[name](mine), OURS[name](other)
    skipped = 0
    for step, finite in enumerate((False, True, False, True, True)):
        _set_grads(mine, step)
        if not finite:
            mine[1].grad[2, 3] = bad
        skipped += float(clip_and_step(ours, max_norm=1.0).skipped)
        if finite:
            _set_grads(other, step)
            clip_and_step(clean, max_norm=1.0)
    assert skipped == 2
    for a, b in zip(mine, other, strict=True):
        assert torch.equal(a, b)
        for kind, value in ours.state[a].items():
            assert torch.equal(value, clean.state[b][kind]), kind


@pytest.mark.parametrize("name", OURS)
def test_state_dict_goes_on_where_it_was(name):
    mine, other = _parameters(), _parameters()
    ours, second = OURS[name](mine), OURS[name](other)
    for step in range(2):
        _set_grads(mine, step)
        ours.step()
    buffer = io.BytesIO()
    torch.save(ours.state_dict(), buffer)
    buffer.seek(0)
    second.load_state_dict(torch.load(buffer))
    for a, b in zip(mine, other, strict=True):
        b.data.copy_(a.data)
    for parameters, optimizer in ((mine, ours), (other, second)):
        _set_grads(parameters, 7)
        optimizer.step()
    for a, b in zip(mine, other, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", OURS)
def test_state_that_two_optimizers_load_is_each_ones_own(name):
    parameters = _parameters()
    first = OURS[name](parameters)
    _set_grads(parameters, 0)
    first.step()
    saved = first.state_dict()
    before = deepcopy(saved["state"])
    second = OURS[name](_parameters())
    second.load_state_dict(saved)
    _set_grads(second.param_groups[0]["params"], 1)
    second.step()
    torch.testing.assert_close(saved["state"], before, rtol=0, atol=0)
    kept = [value for state in first.state.values() for value in state.values()]
    first.load_state_dict(saved)  # its own, which needs no second copy in memory
    now = [value for state in first.state.values() for value in state.values()]
    assert all(a is b for a, b in zip(kept, now, strict=True))


@pytest.mark.parametrize("name", OURS)
def test_torchs_default_dtype_and_device_change_nothing(name):
    def train():
        parameters, scaler, got = mine.pop(), GradScaler(4.0), []
        optimizer = OURS[name](parameters)
        for grads in all_grads:
            for p, grad in zip(parameters, grads, strict=True):
                p.grad = grad.clone()
            got += [weight_norm(parameters), zeros_in_grad(parameters), grad_norm([])]
            got += clip_and_step(optimizer, max_norm=0.5, scaler=scaler)
            optimizer.step()
            optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
            scaler.load_state_dict(scaler.state_dict())
        return got, parameters, [optimizer.state[p] for p in parameters]

    mine, all_grads = [_parameters(), _parameters()], []
    for step in range(2):
        like = _parameters()
        _set_grads(like, step)
        all_grads.append([p.grad for p in like])
    want = train()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            got = train()
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("scale_parameter", [False, True])
def test_adafactor_of_other_numbers_matches_another_implementation(scale_parameter):
    from transformers.optimization import Adafactor as Oracle

    numbers = {"clip_threshold": 0.3, "decay_rate": -0.5, "eps": (0.05, 2.0)}
    numbers["scale_parameter"] = scale_parameter
    mine, theirs = _parameters(), _parameters()
    ours = Adafactor(mine, lr=0.1, **numbers)
    other = Oracle(theirs, lr=0.1, relative_step=False, **numbers)
    for step in range(3):
        for parameters, optimizer in ((mine, ours), (theirs, other)):
            _set_grads(parameters, step)
            optimizer.step()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)
        for kind in ours.state[a].keys() - {"step"}:
            torch.testing.assert_close(ours.state[a][kind], other.state[b][kind])


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_steps_are_counted_beyond_what_16_bits_hold(name):
    ours = OURS[name](mine := _parameters())
    for before in (0.0, 2.0**20):
        _set_grads(mine, 0)
        for p in mine:
            if before:
                ours.state[p]["step"].fill_(before)
        ours.step()
        assert {float(ours.state[p]["step"]) for p in mine} == {before + 1}


def test_muon_of_matrices_alone_goes_through_torchs_state_dicts():
    model = nn.Linear(3, 4, bias=False)
    first, second = (Muon(iter(muon_groups(model, 0.1)), lr=0.1) for _ in range(2))
    _set_grads(list(model.parameters()), 0)
    first.step()
    set_optimizer_state_dict(model, second, get_optimizer_state_dict(model, first))
    kept, loaded = (one.state[model.weight]["momentum_buffer"] for one in (first, second))
    assert torch.equal(kept, loaded)
    model.requires_grad_(False)
    assert [group["params"] for group in muon_groups(model, 0.1)] == [[]]


def test_adamw_state_is_torchs_by_name():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    ours = AdamW(decay_groups(model, 0.1), lr=0.1)
    _set_grads(list(model.parameters()), 0)
    ours.step()
    state = get_optimizer_state_dict(model, ours)
    theirs = torch.optim.AdamW(decay_groups(model, 0.1), lr=0.1)
    set_optimizer_state_dict(model, theirs, state)
    again = AdamW(decay_groups(model, 0.1), lr=0.1)
    set_optimizer_state_dict(model, again, get_optimizer_state_dict(model, theirs))
    for p in model.parameters():
        assert ours.state[p].keys() == theirs.state[p].keys() == again.state[p].keys()
        for kind, value in ours.state[p].items():
            assert torch.equal(value, again.state[p][kind])
    assert [g["weight_decay"] for g in again.param_groups] == [0.1, 0.0]
    # A whole state dict takes groups of the same entries.
    entries = {key: theirs.defaults[key] for key in theirs.defaults.keys() - ours.defaults.keys()}
    again = AdamW([{**group, **entries} for group in decay_groups(model, 0.1)], lr=0.1)
    whole = StateDictOptions(full_state_dict=True)
    model.zero_grad()
    state = get_optimizer_state_dict(model, theirs, options=whole)
    set_optimizer_state_dict(model, again, state, options=whole)
    for p in model.parameters():
        assert torch.equal(ours.state[p]["exp_avg"], again.state[p]["exp_avg"])


def test_torchs_state_of_16_bit_parameters_loads_without_masters():
    half = [nn.Parameter(p.detach().bfloat16()) for p in _parameters()]
    theirs, ours = torch.optim.AdamW(half, lr=0.1), AdamW(half, lr=0.1)
    _set_grads(half, 0)
    theirs.step()
    ours.load_state_dict(theirs.state_dict())
    before = [p.detach().clone() for p in half]
    for p, weight in zip(half, before, strict=True):
        assert torch.equal(ours.state[p]["master"], weight.float())
    ours.step()
    assert not any(torch.equal(p, weight) for p, weight in zip(half, before, strict=True))


def test_a_loaded_group_keeps_what_torchs_flat_state_dicts_leave_out():
    parameters = _parameters()
    ours = OURS["muon"](parameters)
    _set_grads(parameters, 0)
    state = ours.state_dict()
    groups = state["param_groups"]
    state["param_groups"] = [{k: v for k, v in g.items() if v != ()} for g in groups]
    ours.load_state_dict(state)
    assert all(group["fused"] == () for group in ours.param_groups)
    ours.step()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda state: state["state"][0].update(exp_avg=torch.zeros(2, 7)), r"exp_avg of \(5, 7\)"),
        (lambda state: state["state"][0].pop("exp_avg_sq"), "state of AdamW, step, exp_avg, exp_a"),
        (lambda state: state["param_groups"][0].update(betas=(0.9, 1.0)), "two betas"),
    ],
)
def test_state_that_is_not_the_parameters_is_refused(spoil, says):
    parameters = _parameters()
    first, second = AdamW(parameters), AdamW(parameters)
    _set_grads(parameters, 0)
    first.step()
    state = deepcopy(first.state_dict())
    spoil(state)
    with pytest.raises(ValueError, match=says):
        second.load_state_dict(state)
    assert not second.state


def test_hooks_adapt_and_see_the_state_that_is_loaded():
    first, second = _parameters(((3,), (3,)))
    saved, ours = AdamW([first, second]), AdamW([second, first])
    _set_grads([first, second], 0)
    saved.step()
    kept = deepcopy(saved.state)

    def turn_round(optimizer, state):
        (group,) = state["param_groups"]
        return {**state, "param_groups": [{**group, "params": group["params"][::-1]}]}

    seen = []
    ours.register_load_state_dict_pre_hook(turn_round)
    ours.register_load_state_dict_post_hook(lambda one: seen.append(one.state[first]["exp_avg"]))
    for _ in range(2):
        ours.load_state_dict(saved.state_dict())
        assert seen.pop() is ours.state[first]["exp_avg"]
        for parameter, state in zip((first, second), kept.values(), strict=True):
            assert torch.equal(ours.state[parameter]["exp_avg"], state["exp_avg"])


@pytest.mark.parametrize(
    ("theirs", "ours", "says"),
    [
        (lambda p: torch.optim.AdamW(p, amsgrad=True), AdamW, "amsgrad=False, got True"),
        (lambda p: torch.optim.AdamW(p, maximize=True), AdamW, "maximize=False, got True"),
        (torch.optim.Adam, AdamW, "decoupled_weight_decay=True, got False"),
        (lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True), SGD, "nesterov=False"),
        (lambda p: torch.optim.SGD(p, momentum=0.9, dampening=0.5), SGD, "dampening=0, got 0.5"),
        (torch.optim.Muon, lambda p: Muon([{"params": p, "muon": True}]), "adjust_lr_fn='match_"),
    ],
)
def test_options_of_torchs_that_are_not_obeyed_are_refused(theirs, ours, says):
    parameters = _parameters(((5, 7),))
    saved, optimizer = theirs(parameters), ours(parameters)
    _set_grads(parameters, 0)
    saved.step()
    with pytest.raises(ValueError, match=says):
        optimizer.load_state_dict(saved.state_dict())
    assert not optimizer.state
    with pytest.raises(ValueError, match=says):
        ours(parameters).add_param_group({**saved.param_groups[0], "params": _parameters()[:1]})


def test_parameters_without_gradient_keep_still_and_without_state():
    used, unused, idle = _parameters()
    ours = AdamW([used, unused, idle])
    theirs = torch.optim.AdamW(others := _parameters())
    for _ in range(3):
        for p in (used, others[0]):
            p.grad = torch.ones_like(p)
        for p in (idle, others[2]):  # an expert without tokens
            p.grad = torch.zeros_like(p)
        ours.step()
        theirs.step()
    assert unused not in ours.state
    for a, b in zip((used, unused, idle), others, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_a_master_follows_a_weight_that_was_written_between_steps():
    (parameter,) = parameters = [
        nn.Parameter(p.detach().bfloat16()) for p in _parameters(((5, 7),))
    ]
    optimizer = AdamW(parameters, lr=1e-3)

    def step(number):
        _set_grads(parameters, number)
        optimizer.step()
        return optimizer.state[parameter]["master"].clone()

    kept = step(0), deepcopy(optimizer.state_dict()), parameter.detach().clone()
    expected = step(1)
    # The weight with its master, as a checkpoint has them: the bits below the weight's stay.
    with torch.no_grad():
        parameter.copy_(kept[2])
    optimizer.load_state_dict(deepcopy(kept[1]))
    assert torch.equal(step(1), expected)
    # Some of the weight alone, as if by hand: those numbers go on from there, the others as before.
    optimizer.load_state_dict(kept[1])
    with torch.no_grad():
        parameter.copy_(kept[2])
        parameter[2:] = 3.0
    torch.testing.assert_close(step(1)[:2], expected[:2], rtol=0, atol=0)
    assert (parameter[2:] - 3.0).abs().max() < 0.05
    # A write that autograd does not count, as by `dist.broadcast`, and is told of.
    parameter.data.fill_(4.0)
    torch.autograd.graph.increment_version(parameters)
    step(1)
    assert (parameter - 4.0).abs().max() < 0.05
    # Another optimizer, given the state of this one and weights of a third: those are what trains.
    again = AdamW(parameters, lr=1e-3)
    again.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        parameter.fill_(-2.0)
    _set_grads(parameters, 1)
    again.step()
    assert (parameter + 2.0).abs().max() < 0.05
    other = deepcopy(again.state_dict())  # and so after a step of its own
    other["state"][0]["master"] += 1.0
    again.load_state_dict(other)
    _set_grads(parameters, 1)
    again.step()
    assert (parameter + 2.0).abs().max() < 0.05


def test_a_master_follows_data_that_came_to_lie_where_the_last_lay():
    memory = bytearray(16)  # an allocator gives what was freed to what comes next

    def lying_there():
        return torch.frombuffer(memory, dtype=torch.bfloat16)

    parameter = nn.Parameter(lying_there())
    optimizer = AdamW([parameter], lr=0.0, weight_decay=0.0)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    parameter.data = lying_there().fill_(0.5)
    optimizer.step()
    assert (parameter == 0.5).all()


def test_a_master_just_made_follows_nothing(monkeypatch):
    """It would take the memory of two more."""
    parameters = [nn.Parameter(p.detach().bfloat16()) for p in _parameters(((5, 7),))]
    optimizer = AdamW(parameters, lr=1e-3)
    followed = []
    monkeypatch.setattr("mb_parallel.optimizer.adamw._follow", lambda *_: followed.append(1))
    for number in range(2):
        _set_grads(parameters, number)
        optimizer.step()
    assert not followed


def test_sixteen_bit_parameters_have_a_master_weight():
    full = _parameters()
    half = [nn.Parameter(p.detach().bfloat16()) for p in full]
    for p, h in zip(full, half, strict=True):
        p.data.copy_(h)
    ours, masters = AdamW(half, lr=1e-5), torch.optim.AdamW(full, lr=1e-5)
    for step in range(20):
        _set_grads(half, step)
        for p, h in zip(full, half, strict=True):
            p.grad = h.grad.float()
        ours.step()
        masters.step()
    again = AdamW(half, lr=1e-5)
    again.load_state_dict(ours.state_dict())
    for p, h in zip(full, half, strict=True):
        torch.testing.assert_close(ours.state[h]["master"], p.detach(), rtol=1e-6, atol=1e-7)
        assert torch.equal(h, ours.state[h]["master"].bfloat16())
        assert torch.equal(again.state[h]["master"], ours.state[h]["master"])


def test_working_copies_are_written_with_the_update():
    parameters = _parameters()
    copies = WorkingCopies({p: torch.empty_like(p, dtype=torch.bfloat16) for p in parameters[:2]})
    optimizer = AdamW(parameters, lr=0.1, working_copies=copies)
    _set_grads(parameters, 0)
    optimizer.step()
    for p, copy in copies.items():
        assert torch.equal(copy, p.detach().bfloat16())


def test_bf16_moments_stay_bf16_when_loaded():
    parameters = _parameters()
    optimizer = AdamW(parameters, state_dtype=torch.bfloat16)
    _set_grads(parameters, 0)
    optimizer.step()
    other = AdamW(parameters, state_dtype=torch.bfloat16)
    other.load_state_dict(optimizer.state_dict())
    for p in parameters:
        assert other.state[p]["exp_avg_sq"].dtype is torch.bfloat16
        assert other.state[p]["step"].dtype is torch.float32
        assert torch.equal(other.state[p]["exp_avg"], optimizer.state[p]["exp_avg"])


def test_gradients_in_another_order_of_memory():
    weight, other = (nn.Parameter(torch.ones(4, 6).T) for _ in "ab")
    values = torch.randn(6, 4)
    weight.grad, other.grad = values.clone(), values.clone()
    AdamW([weight], lr=0.1).step()
    torch.optim.AdamW([other], lr=0.1).step()
    torch.testing.assert_close(weight, other, rtol=1e-6, atol=1e-7)
    weight.grad = values.clone()
    clip_grad_norm([weight, nn.Parameter(torch.ones(3))], 0.5)  # one without a gradient
    torch.testing.assert_close(weight.grad.norm(), torch.tensor(0.5), rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", [(3, 8, 5), (2, 3, 5, 8), (6, 6)], ids=str)
def test_newton_schulz_takes_each_matrix_of_a_stack_to_an_orthogonal_one(shape):
    stack = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    done = newton_schulz(stack, JORDANS)
    for got, matrix in zip(
        done.reshape(-1, *shape[-2:]), stack.reshape(-1, *shape[-2:]), strict=True
    ):
        torch.testing.assert_close(got, newton_schulz(matrix, JORDANS), rtol=1e-4, atol=1e-5)
        u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
        assert float(torch.linalg.matrix_norm(got - u @ vh, 2)) < 0.35
    assert newton_schulz(stack[:0], JORDANS).shape == stack[:0].shape


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 10])
@pytest.mark.parametrize("said", ["simple", "quintic", "polar_express", (2, -1.5, 0.5)], ids=str)
@pytest.mark.parametrize("shape", [(8, 5), (5, 8)], ids=str)
def test_two_steps_of_newton_schulz_in_one_are_those_of_the_plain_loop(shape, said, steps):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    want = matrix / matrix.norm()
    coefficients = coefficients_of(said, steps)
    assert len(coefficients) == steps
    for a, b, c in coefficients:
        gram = want @ want.T
        want = a * want + (b * gram + c * gram @ gram) @ want
    got = newton_schulz(matrix, coefficients, size=3.0)
    torch.testing.assert_close(got, 3 * want, rtol=1e-4, atol=1e-4)


def test_coefficients_are_those_of_the_publications():
    assert coefficients_of("simple", 3) == [(3.4445, -4.7750, 2.0315)] * 3
    quintic = coefficients_of("quintic", 7)  # five, which begin anew behind the last
    assert (quintic[0], quintic[4]) == ((4.0848, -6.8946, 2.9270), (2.8366, -3.0525, 1.2012))
    assert quintic[5:] == quintic[:2]
    polar = coefficients_of("polar_express", 10)  # eight, the last of which goes on
    assert (polar[0], polar[6]) == ((8.2051, -22.9019, 16.4607), (1.8564, -1.2132, 0.3568))
    assert polar[7:] == [(1.875, -1.25, 0.375)] * 3


@pytest.mark.parametrize(
    ("said", "steps", "near"),
    [("simple", 5, 0.35), ("quintic", 5, 0.2), ("polar_express", 8, 0.01)],
)
def test_coefficients_take_singular_values_to_1(said, steps, near):
    values = torch.linspace(0.05, 1, 8, dtype=torch.float64)
    values = values / values.norm()
    for a, b, c in coefficients_of(said, steps):
        values = a * values + b * values**3 + c * values**5
    assert float((values - 1).abs().max()) < near


@pytest.mark.parametrize(
    ("of", "around"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16)],
    ids=str,
)
def test_newton_schulz_under_autocast_stays_in_its_dtype(of, around):
    matrix = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)).to(of)
    want = newton_schulz(matrix, JORDANS)
    with torch.autocast("cpu", around):
        got = newton_schulz(matrix, JORDANS)
    assert got.dtype is of
    assert torch.equal(got, want)


def _moe():
    config = MoEConfig(
        hidden_size=8, ffn_hidden_size=4, num_experts=3, mlp_bias=True, router_bias=True,
        shared_expert_hidden_size=4, shared_expert_gate=True,
    )  # fmt: skip
    return nn.ModuleDict(
        {"embedding": nn.Embedding(5, 8), "norm": nn.LayerNorm(8), "moe": dMoE(config)}
    )


def test_vectors_do_not_decay_stacked_or_not():
    model = _moe()
    names = {p: name for name, p in model.named_parameters()}
    decays, rest = ([names[p] for p in g["params"]] for g in decay_groups(model, 0.1))
    assert {n for n in names.values() if n.endswith((".w1", ".w2", "gate"))} <= set(decays)
    assert {"embedding.weight", "moe.router.weight"} <= set(decays)
    assert "moe.experts.b1" in rest
    assert {n.rsplit(".")[-1] for n in rest} == {"weight", "bias", "b1", "b2"} - (
        set() if "norm.weight" in rest else {"weight"}
    )
    assert [g["decays"] for g in decay_groups(model, 0.1)] == [True, False]
    *muon, matrices, vectors = muon_groups(model, 0.1)
    assert [g["decays"] for g in (*muon, matrices, vectors)] == [*[True] * (len(muon) + 1), False]
    muon = [names[p] for group in muon for p in group["params"]]
    adamw = [[names[p] for p in group["params"]] for group in (matrices, vectors)]
    assert sorted(muon) == sorted(set(decays) - {"embedding.weight"})
    assert adamw == [["embedding.weight"], rest]
    *muon, matrices, _ = muon_groups(model, 0.1, heads=[model["moe"].router])
    ends = {model["embedding"].weight, model["moe"].router.weight}
    assert set(matrices["params"]) == ends
    assert {names[p] for g in muon for p in g["params"]} == set(decays) - {names[p] for p in ends}


def test_what_torch_convolves_or_looks_up_is_no_matrix_of_muons():
    """Of a kernel [out, in, 3, 3] each 3 x 3 taps would be made orthogonal for themselves."""
    model = nn.ModuleList(
        [nn.Conv1d(4, 4, 3, groups=4), nn.Conv2d(2, 4, 3), nn.ConvTranspose3d(2, 4, 1)]
    )
    model += [nn.EmbeddingBag(5, 4), nn.Linear(4, 2), nn.Bilinear(2, 3, 4)]
    *muon, matrices, vectors = muon_groups(model, 0.1)
    assert [p for group in muon for p in group["params"]] == [model[4].weight, model[5].weight]
    assert matrices["params"] == [module.weight for module in model[:4]]
    assert all(p.ndim == 1 for p in vectors["params"])
    # An instance of another kind than these is not asked: its module is named.
    *_, matrices, _ = muon_groups(model, 0.1, heads=[model[5]])
    assert model[5].weight in set(matrices["params"])


def test_matrices_that_share_a_weight_are_orthogonalised_apart():
    """Gate and up of experts, and rows that take turns, move as weights of their own would."""
    weights = [(3, 8, 6), (12, 6), (10, 6)]
    together, apart = _parameters(weights), []
    places = [  # of each matrix that the weights hold
        (0, slice(0, 4)), (0, slice(4, 8)),
        (1, [0, 1, 4, 5, 8, 9]), (1, [2, 6, 10]), (1, [3, 7, 11]),
        (2, slice(0, 10)),
    ]  # fmt: skip
    for weight, rows in places:
        apart.append(nn.Parameter(together[weight].detach()[..., rows, :].clone()))
    groups = [
        {"params": [weight], "muon": True, "fused": fused}
        for weight, fused in zip(together, ((4, 4), (2, 1, 1), ()), strict=True)
    ]
    fp32 = {"ns_dtype": torch.float32, "weight_decay": 0.1}
    fused, single = Muon(groups, **fp32), Muon([{"params": apart, "muon": True}], **fp32)
    for step in range(3):
        _set_grads(together, step)
        for (weight, rows), matrix in zip(places, apart, strict=True):
            matrix.grad = together[weight].grad[..., rows, :].clone()
        for optimizer in (fused, single):
            _set_lr(optimizer, step)
            optimizer.step()
    for (weight, rows), matrix in zip(places, apart, strict=True):
        torch.testing.assert_close(together[weight][..., rows, :], matrix, rtol=1e-5, atol=1e-6)
    config = {"hidden_size": 8, "ffn_hidden_size": 4, "num_experts": 3, "activation": "swiglu"}
    moe = dMoE(MoEConfig(**config, shared_expert_hidden_size=6))
    halves = {moe.experts.w1: (4, 4), moe.shared_expert.w1: (6, 6), moe.router.weight: (1, 2)}
    found = muon_groups(moe, 0.1, fused={moe.router.weight: (1, 2)})
    assert {p: g["fused"] for g in found if g["muon"] for p in g["params"]} == halves | {
        moe.experts.w2: (), moe.shared_expert.w2: (),
    }  # fmt: skip
    plain = dMoE(MoEConfig(hidden_size=8, ffn_hidden_size=4, num_experts=3, activation="gelu"))
    assert all(not g["fused"] for g in muon_groups(plain, 0.1) if g["muon"])  # no gate over up


def test_clip_without_a_step():
    parameters = _parameters()
    _set_grads(parameters, 0)
    before = [p.grad.clone() for p in parameters]
    norm = clip_grad_norm(parameters, 0.0)
    assert all(torch.equal(p.grad, g) for p, g in zip(parameters, before, strict=True))
    clip_grad_norm(parameters, 0.5)
    torch.testing.assert_close(grad_norm(parameters), torch.tensor(0.5), rtol=1e-5, atol=0)
    torch.testing.assert_close(norm, torch.cat([g.flatten() for g in before]).norm())
    assert clip_grad_norm([], 1.0) == 0
    one = parameters[0]  # itself, as with torch, and not its rows
    torch.testing.assert_close(clip_grad_norm(one, 0.0), one.grad.norm())
    assert grad_norm(parameters[:1], uncounted=one) == 0


def test_a_parameter_that_is_given_twice_is_clipped_once():
    one, tied = _parameters(((5, 7), (3,)))
    _set_grads([one, tied], 0)
    expected = torch.cat([one.grad.flatten(), tied.grad]).norm()
    torch.testing.assert_close(clip_grad_norm([one, tied, tied], 0.5), expected)
    torch.testing.assert_close(grad_norm([tied, one, tied]), torch.tensor(0.5))


def test_the_norm_counts_what_was_frozen_after_its_gradient_came():
    mine, theirs = _parameters(), _parameters()
    ours, others = AdamW(mine), torch.optim.AdamW(theirs)
    for parameters in (mine, theirs):
        _set_grads(parameters, 0)
        parameters[0].requires_grad_(False)
    torch.testing.assert_close(
        clip_and_step(ours, max_norm=1.0).grad_norm, nn.utils.clip_grad_norm_(theirs, 1.0)
    )
    others.step()
    torch.testing.assert_close(mine, theirs)
    mine[0].grad[0, 0] = float("nan")
    assert clip_and_step(ours, max_norm=1.0).skipped
    assert all(p.isfinite().all() for p in mine)


def test_the_norm_of_weights_is_of_the_frozen_ones_too():
    parameters = _parameters()
    whole = torch.cat([p.detach().flatten() for p in parameters]).norm()
    parameters[1].requires_grad_(False)  # as the weights are that have adapters
    torch.testing.assert_close(weight_norm(parameters), whole)
    assert zeros_in_grad(parameters) == 0


def test_sgd_of_fp64_steps_in_fp64():
    mine, theirs = ([nn.Parameter(p.detach().double()) for p in _parameters()] for _ in range(2))
    pairs = (SGD(mine, lr=0.1, momentum=0.9), torch.optim.SGD(theirs, lr=0.1, momentum=0.9))
    for step in range(3):
        _set_grads([*mine], step)
        _set_grads([*theirs], step)
        for optimizer in pairs:
            optimizer.step()
    torch.testing.assert_close(mine, theirs, rtol=1e-14, atol=1e-14)


def test_clipping_leaves_small_gradients_and_takes_any_iterable():
    model = nn.Linear(3, 4)
    _set_grads(list(model.parameters()), 0)
    before = model.weight.grad.clone()
    norm = clip_grad_norm(model.parameters(), 1e6)
    assert torch.equal(model.weight.grad, before)
    of_weight = clip_grad_norm(model.parameters(), 0.0, uncounted=[model.bias])
    torch.testing.assert_close(of_weight, before.norm())
    clip_grad_norm(model.parameters(), 0.5)
    torch.testing.assert_close(model.weight.grad, before * 0.5 / norm)
    clip_and_step(SGD(model.requires_grad_(False).parameters()))  # a stage of frozen layers


def test_scale_falls_from_2_to_the_32_to_15_in_18_skips_as_megatrons_does():
    scaler, overflow, clean = GradScaler(), torch.tensor(1.0), torch.tensor(0.0)
    skips = 0
    # fp16 gradients of this loss overflow above 2^15.
    while float(scaler.scale(torch.tensor(1.0))) > 2**15:
        scaler.update(overflow)
        skips += 1
    assert skips == 18
    for _ in range(999):
        scaler.update(clean)
    assert scaler.state_dict()["scale"] == 2**15
    scaler.update(clean)
    assert scaler.state_dict() == {"scale": 2.0**16, "growth_tracker": 0, "hysteresis_tracker": 2}
    scaler.update(overflow)  # forgiven once again
    assert scaler.state_dict()["scale"] == 2**16
    scaler.update(overflow)
    assert scaler.state_dict()["scale"] == 2**15
    again = GradScaler()
    again.load_state_dict(scaler.state_dict())
    again.update(overflow)
    assert again.state_dict()["scale"] == 2**14  # and not before the scale grows
    while not again.lowest():
        assert again.state_dict()["scale"] > 1
        again.update(overflow)
    again.update(overflow)
    assert again.state_dict()["scale"] == 1


def test_a_scale_without_hysteresis_falls_at_once_and_a_constant_one_may_be_below_1():
    strict, overflow, clean = GradScaler(8.0, hysteresis=1), torch.tensor(1.0), torch.tensor(0.0)
    strict.update(overflow)
    assert strict.state_dict()["scale"] == 4
    small = GradScaler.constant(0.5)
    for flag in (overflow, overflow, *[clean] * 1001):
        small.update(flag)
        assert small.lowest()
    assert small.state_dict()["scale"] == 0.5
    with pytest.raises(ValueError, match="backoff_factor above 0"):
        GradScaler(backoff_factor=0.0)
    for scale in (1e39, 1e-46):  # infinity and 0 in fp32: no step would ever be taken
        with pytest.raises(ValueError, match=r"2\*\*-126 <= .* < 2\*\*128, got init_scale"):
            GradScaler.constant(scale)


@pytest.mark.parametrize("name", ["sgd", "adamw"])  # AdamW's step is the same for any scale
@pytest.mark.parametrize("max_norm", [0.0, 1.0])
def test_a_scaled_loss_takes_the_same_step(name, max_norm):
    scaled, plain = _parameters(), _parameters()
    scaler = GradScaler(2.0**10)
    with_scale, without = OURS[name](scaled), OURS[name](plain)
    for step in range(3):
        _set_grads(scaled, step, float(scaler.scale(torch.tensor(1.0))))
        _set_grads(plain, step)
        got = clip_and_step(with_scale, max_norm=max_norm, scaler=scaler)
        want = clip_and_step(without, max_norm=max_norm)
        torch.testing.assert_close(got.grad_norm, want.grad_norm)
    for a, b in zip(scaled, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_the_scaler_hears_of_every_step():
    parameters = _parameters()
    optimizer, scaler = SGD(parameters), GradScaler(8.0, hysteresis=1)
    for bad, scale, clean in ((1.0, 8, 1), (torch.inf, 4, 0), (1.0, 4, 1)):
        _set_grads(parameters, 0, bad)
        clip_and_step(optimizer, scaler=scaler)
        state = scaler.state_dict()
        assert (state["scale"], state["growth_tracker"]) == (scale, clean)


def test_defaults_are_those_of_torch():
    for kind in (SGD, AdamW, Adafactor, Muon):
        theirs = signature(getattr(torch.optim, kind.__name__)).parameters
        for name in ("lr", "betas", "momentum", "ns_steps", "weight_decay"):
            ours = signature(kind).parameters.get(name)
            if ours is not None and name in theirs and (kind, name) != (Muon, "weight_decay"):
                assert ours.default == theirs[name].default, (kind, name)


def test_describe_tells_before_the_first_step_what_there_is_after():
    model = _moe()
    optimizer = Muon(muon_groups(model, 0.1), state_dtype=torch.bfloat16)
    before = describe(optimizer)
    _set_grads(list(model.parameters()), 0)
    optimizer.step()
    assert describe(optimizer) == before
    assert "exp_avg_sq: 0.000 GB bfloat16" in before
    assert "momentum_buffer: 0.000 GB float32" in before
    assert "no state before" in describe(torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: AdamW(p, state_dtype=torch.float16), "state_dtype"),
        (lambda p: AdamW(p, betas=(0.9, 1.0)), "betas"),
        (lambda p: AdamW(p, eps=0.0), "eps.* above 0, got 0.0"),
        (lambda p: AdamW(p, offload_fraction=1.5), "from 0 to 1, got offload_fraction=1.5"),
        (lambda p: AdamW(p, offload_fraction=float("nan")), "from 0 to 1, got .*=nan"),
        (lambda p: AdamW(p, offload_fraction="all"), "from 0 to 1, got .*='all'"),
        (lambda p: AdamW([nn.Parameter(torch.zeros(2, dtype=torch.float64))]), "float64"),
        (lambda p: Muon([{"params": p, "muon": True}]), r"matrices in fp32.*\(3,\)"),
        (lambda p: Muon([{"params": p, "muon": True, "fused": (3, 1)}]), r"3 \+ 1.*\(5, 7\)"),
        (lambda p: Adafactor([nn.Parameter(p[0].detach().half())]), "float16"),
        (lambda p: Adafactor(p, weight_decay=float("nan")), "got weight_decay=nan"),
        (lambda p: SGD(p, lr=-1.0), "got lr=-1.0"),
        (lambda p: AdamW(p, betas=(0.9,)), "two betas"),
        (lambda p: Muon(p), r"Expected groups, .* got parameters alone, .*muon_groups\(model"),
        (lambda p: Muon(p, ns_steps=0), "ns_steps to be an integer >= 1, got 0"),
        (lambda p: Muon(p, ns_dtype="bfloat16"), "ns_dtype to be a floating-point dtype"),
        (lambda p: Muon(p, ns_dtype=torch.float16), "ns_dtype to be torch.bfloat16 or wider"),
        (lambda p: Muon(p, ns_steps=2.5), "ns_steps to be an integer >= 1, got 2.5"),
        (lambda p: Muon(p, ns_coefficients="quartic"), "simple, quintic, .* got 'quartic'"),
        (lambda p: Muon(p, ns_coefficients=(1.0, 2.0)), r"three numbers, got \(1.0, 2.0\)"),
        (lambda p: Muon(p, momentum="0.9"), "momentum from 0 .* got '0.9'"),
        (lambda p: SGD(p, momentum=-0.5), "momentum=-0.5"),
        (lambda p: Muon(p, momentum=1.0), "momentum from 0 .* got 1.0"),
        (lambda p: Muon(p, scale=0.0), "scale above 0, got 0.0"),
        (
            lambda p: Muon([{"params": [nn.Parameter(p[0].detach().half())], "muon": True}]),
            r"matrices in fp32 .* got \(5, 7\) in torch.float16",
        ),
        (lambda p: Muon([{"params": p[:1], "muon": True, "fused": (6, -1)}]), "fused .* got -1"),
        (lambda p: AdamW(p, working_copies={}), "what hold_working_copies returned, got dict"),
        (lambda p: Adafactor(p, decay_rate=0.8), "decay_rate=0.8"),
        (lambda p: Adafactor(p, decay_rate="x"), "decay_rate=x"),
        (lambda p: Adafactor(p, clip_threshold=0.0), "clip_threshold"),
        (lambda p: Adafactor(p, eps=1e-8), "eps of two numbers"),
        (lambda p: Adafactor(p, eps=(0.0, 1e-3)), "the first above 0"),
        (lambda p: decay_groups(nn.Linear(2, 2), float("nan")), "weight_decay=nan"),
        (lambda p: hold_working_copies([nn.Linear(2, 2)], "bfloat16"), "dtype to be a floating"),
        (lambda p: decay_groups([nn.Linear(2, 2)], 0.1), "one module, got list"),
        (lambda p: muon_groups(nn.Linear(2, 2), 0.1, heads=nn.Linear(2, 2)), "heads to be several"),
        (lambda p: muon_groups(nn.Linear(5, 7), 0.1, fused={p[0]: (2, 3)}), "got another tensor"),
        (lambda p: grad_norm(nn.Linear(2, 2)), r"such as model.parameters\(\), got Linear"),
        (lambda p: grad_norm(nn.Linear(2, 2).named_parameters()), r"parameters\(\), got tuple"),
        (lambda p: clip_grad_norm(p, max_norm=None), "max_norm=None"),
        (lambda p: clip_grad_norm(p, 1.0, ParallelDims()), "a ParallelMesh, got ParallelDims"),
        (lambda p: clip_grad_norm(p, max_norm=float("nan")), "max_norm.*nan"),
        (lambda p: clip_and_step(SGD(p), max_norm=-1.0), "max_norm.*-1"),
        (lambda p: clip_and_step(SGD(p)), "Expected gradients, got none"),
        (
            lambda p: clip_and_step(SGD(p), scaler=torch.amp.GradScaler("cpu")),
            "got one of torch.amp",
        ),
        (lambda p: GradScaler().load_state_dict({"scale": 1.0}), "growth_tracker.* got scale"),
        (lambda p: GradScaler(growth_factor=float("nan")), "got growth_factor=nan"),
        (lambda p: GradScaler(growth_factor=0.5), "growth_factor of at least 1"),
        (lambda p: GradScaler(hysteresis=None), "got hysteresis=None"),
        (lambda p: clip_and_step(torch.optim.AdamW(p)), "cannot skip a step"),
        (lambda p: clip_and_step([SGD(p[:1]), torch.optim.SGD(p[1:])]), "cannot skip a step"),
        (lambda p: clip_and_step([]), "Expected an optimizer, got none"),
        (lambda p: clip_and_step(p), "one or several, got Parameter"),
        (lambda p: clip_and_step([SGD(p), AdamW(p[:1])]), "each parameter in one optimizer"),
        (lambda p: GradScaler(0.5), "min_scale <= init_scale"),
    ],
)
def test_what_cannot_be_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make(_parameters())


def test_a_group_added_later_trains_as_one_that_was_there():
    for kind, later in ((SGD, {"momentum": 0.9}), (Muon, {"muon": True, "fused": (2, 2)})):
        weights = []
        for together in (True, False):
            p, q = nn.Parameter(torch.ones(5, 7)), nn.Parameter(torch.ones(4, 6))
            groups = [{"params": [p]}, {"params": [q], **later}]
            optimizer = kind(groups if together else groups[:1], lr=0.1)
            p.grad = torch.arange(35.0).view(5, 7).cos()
            optimizer.step()
            if not together:
                optimizer.add_param_group(groups[1])
            q.grad = torch.arange(24.0).view(4, 6).cos()
            for _ in range(2):
                optimizer.step()
            weights.append(q.detach())
        assert torch.equal(*weights)
        assert not torch.equal(weights[0], torch.ones(4, 6))


def test_a_group_that_is_refused_is_not_added():
    cases = (
        (AdamW, torch.float64, {}, "float64"),
        (Adafactor, torch.float64, {}, "float64"),
        (Muon, torch.float32, {"muon": True}, "matrices in fp32"),
        (SGD, torch.float32, {"lr": -1.0}, "lr=-1.0"),
        (AdamW, torch.float32, {"betas": 0.9}, "two betas"),
    )
    for kind, dtype, more, says in cases:
        first = nn.Parameter(torch.zeros(2))
        optimizer = kind([{"params": [first]}])
        with pytest.raises(ValueError, match=says):
            optimizer.add_param_group(
                {"params": [nn.Parameter(torch.zeros(2, dtype=dtype))], **more}
            )
        (group,) = optimizer.param_groups
        assert group["params"][0] is first


def test_momentum_set_between_steps_is_obeyed():
    ours, theirs = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizers = SGD([ours], lr=0.1), torch.optim.SGD([theirs], lr=0.1)
    for momentum in (0.0, 0.9, 0.5):
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.param_groups[0]["momentum"] = momentum
            parameter.grad = torch.tensor([1.0, -2.0, momentum])
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse=False"):
        AdamW(embedding.parameters()).step()


@pytest.mark.parametrize(
    ("fraction", "offloaded"),
    [(0, ""), (0.1, "de"), (0.5, "bcde"), (0.9, "bcde"), (1, "abcde")],
)
def test_no_more_than_a_share_of_the_moments_is_offloaded(fraction, offloaded):
    sizes = {"a": 50, "b": 10, "c": 30, "d": 2, "e": 3}
    parameters = {name: nn.Parameter(torch.zeros(size)) for name, size in sizes.items()}
    first, *rest = parameters.values()
    optimizer = AdamW([{"params": [first]}], offload_fraction=fraction)
    optimizer.add_param_group({"params": rest})
    for one in (optimizer, deepcopy(optimizer)):
        given = dict(zip(sizes, (p for g in one.param_groups for p in g["params"]), strict=True))
        there = {name for name, p in given.items() if one.on_host(p, "exp_avg")}
        assert there == set(offloaded)
        assert there == {name for name, p in given.items() if one.on_host(p, "exp_avg_sq")}
        assert not any(one.on_host(p, "step") for p in given.values())


def _trained(parameters, optimizer, begin=0, steps=4):
    for step in range(begin, begin + steps):
        _set_grads(parameters, step)
        clip_and_step(optimizer, max_norm=2.0)
    return [p.detach().clone() for p in parameters]


@pytest.mark.gpu
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("halves", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("fraction", [0.4, 1.0])
def test_offloaded_moments_train_as_others_and_stay_where_they_are(state_dtype, halves, fraction):
    def made(share):
        parameters = [nn.Parameter(p.detach().cuda()) for p in _parameters(((50, 7), (0, 4), (3,)))]
        if halves:
            parameters = [nn.Parameter(p.detach().bfloat16()) for p in parameters]
        return parameters, AdamW(parameters, state_dtype=state_dtype, offload_fraction=share)

    (here, plain), (there, offloaded) = made(0.0), made(fraction)
    before = describe(offloaded)
    assert "exp_avg on the host" in before
    for a, b in zip(_trained(here, plain), _trained(there, offloaded), strict=True):
        assert torch.equal(a, b)
    assert describe(offloaded) == before
    # What either has saved is loaded by the other.
    saved = deepcopy(offloaded.state_dict()), deepcopy(plain.state_dict())
    expected = _trained(here, plain, 4)
    for optimizer, parameters, state in ((plain, here, saved[0]), (offloaded, there, saved[1])):
        own = [p.detach().clone() for p in there]
        for p, weight in zip(parameters, own, strict=True):
            p.data.copy_(weight)
        torch.autograd.graph.increment_version(parameters)
        optimizer.load_state_dict(state)
    for parameters, optimizer in ((here, plain), (there, offloaded)):
        for a, b in zip(_trained(parameters, optimizer, 4), expected, strict=True):
            assert torch.equal(a, b)
        for p in parameters:
            for key, value in optimizer.state[p].items():
                away = optimizer.on_host(p, key)
                assert value.device.type == ("cpu" if away else "cuda"), key
                assert value.is_pinned() == (away and value.numel() > 0), key


def _saved_and_loaded(rank, ranks, fraction):
    """Weights of a sharded module, trained on from its state dict, loaded into another."""
    torch.manual_seed(1)
    weights = [nn.Linear(6, 5).cuda()]
    weights.append(deepcopy(weights[0]))
    mesh = init_device_mesh("cuda", (ranks,))
    for module in weights:
        fully_shard(module, mesh=mesh)
    optimizers = [AdamW(m.parameters(), offload_fraction=share) for m, share in
                  zip(weights, (fraction, 1.0 - fraction), strict=True)]  # fmt: skip
    x = torch.arange(24.0, device="cuda").view(4, 6).sin()

    def step(module, optimizer):
        module(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for full in (True, False):
        step(weights[0], optimizers[0])
        options = StateDictOptions(full_state_dict=full, broadcast_from_rank0=full)
        state = get_optimizer_state_dict(weights[0], optimizers[0], options=options)
        set_optimizer_state_dict(weights[1], optimizers[1], state, options=options)
        set_model_state_dict(
            weights[1], get_model_state_dict(weights[0], options=options), options=options
        )
    for module, optimizer in zip(weights, optimizers, strict=True):
        step(module, optimizer)
    placed = [
        local(state["exp_avg"]).is_pinned() or not local(state["exp_avg"]).numel()
        for optimizer in optimizers
        for state in optimizer.state.values()
    ]
    return [[p.full_tensor().cpu() for p in module.parameters()] for module in weights], placed


@pytest.mark.gpu
@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_offloaded_moments_of_shards_are_saved_and_loaded_by_torch(fraction):
    ranks = min(2, torch.cuda.device_count())
    for weights, placed in run_ranks(_saved_and_loaded, ranks, fraction, device_type="cuda"):
        for a, b in zip(*weights, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
        assert placed == [fraction == 1.0] * 2 + [fraction == 0.0] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("name", OURS)
def test_on_a_gpu_as_on_the_cpu_and_without_waiting_for_it(name):
    parameters = _parameters(((500, 701), (9, 4), (3,)))
    ours = OURS[name](parameters)
    on_gpu = [nn.Parameter(p.detach().cuda()) for p in parameters]
    theirs, scaler = OURS[name](on_gpu), GradScaler.constant(4.0)
    for step in range(4):
        _set_grads(parameters, step)
        if step == 2:
            parameters[1].grad[0, 0] = torch.nan
        for p, q in zip(parameters, on_gpu, strict=True):
            q.grad = p.grad.cuda() * 4.0
        want = clip_and_step(ours, max_norm=2.0)
        try:
            torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first may allocate
            got = clip_and_step(theirs, max_norm=2.0, scaler=scaler)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(got.grad_norm.cpu(), want.grad_norm)
        assert float(got.skipped) == float(want.skipped) == (step == 2)
    tolerance = 2e-2 if name == "muon" else 2e-6
    for p, q in zip(parameters, on_gpu, strict=True):
        torch.testing.assert_close(q.detach().cpu(), p.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["adamw", "muon", "halves", "bf16 moments"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_rehearsal_lists_the_kernels_of_a_step(name, micro_batches, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(registration, "interpret", True)  # a CPU's tensors would run the kernels
    model = nn.ModuleList(
        [dMoE(MoEConfig(hidden_size=32, ffn_hidden_size=48, num_experts=4)), nn.Linear(32, 50)]
    )
    copies, dtype = WorkingCopies({}), torch.float32
    if name == "halves":
        model.to(torch.bfloat16)
    else:
        copies = hold_working_copies([model], torch.bfloat16)
    if name == "bf16 moments":
        dtype = torch.bfloat16
    of = muon_groups(model, 0.1) if name == "muon" else decay_groups(model, 0.1)
    kind = Muon if name == "muon" else AdamW
    optimizer = kind(of, state_dtype=dtype, working_copies=copies)
    grads = {p: c.dtype for p, c in copies.items()} if micro_batches == 1 else {}
    with recording.record() as rehearsed:
        rehearse_step(optimizer, grads)
    assert not optimizer.state
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad_dtype = None
            p.grad = torch.ones_like(p, dtype=grads.get(p, p.dtype))
    with recording.record() as launched:
        clip_and_step(optimizer, max_norm=1.0)
    kernels = ("adamw_kernel", "sum_of_squares_kernel")
    step = [launch for launch in launched if launch.kernel.fn.__name__ in kernels]
    assert sorted(map(_compiled_for, rehearsed)) == sorted(map(_compiled_for, step))
    assert len({launch.kernel for launch in rehearsed}) == 2


def _compiled_for(launch):
    dtypes = [getattr(arg, "dtype", type(arg)) for arg in launch.args]
    return repr((launch.kernel.fn.__name__, launch.grid, dtypes, launch.constants))
