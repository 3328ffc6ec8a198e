"""Ranks with a part of the samples each take the same steps as one process with all of them."""

import gc
import pickle
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mb_layers import MoEConfig, dMoE
from mb_layers.experts import Experts
from mb_parallel import (
    ParallelDims,
    ParallelMesh,
    apply_data_parallel,
    gather_rest,
    parallelize_experts,
    rebalance_experts,
    set_gradient_sync,
    set_micro_batch,
    sum_gradients,
)
from mb_parallel.engines import torch_release
from mb_parallel.optimizer import (
    SGD,
    Adafactor,
    AdamW,
    Muon,
    clip_and_step,
    clip_grad_norm,
    decay_groups,
    hold_working_copies,
    muon,
    muon_groups,
)
from mb_parallel.recompute import apply_recompute
from mb_parallel.tensor_parallel import parallelize_tensors
from mb_parallel.testing import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils.checkpoint import checkpoint

STEPS, MICRO_BATCHES, SAMPLES, WIDTH = 2, 4, 6, 7  # odd width: shards are uneven


class Block(nn.Module):
    def __init__(self, experts=4):
        super().__init__()
        self.norm, self.dense = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        sizes = {"hidden_size": WIDTH, "ffn_hidden_size": 6, "num_experts": experts, "top_k": 2}
        self.moe = dMoE(MoEConfig(**sizes, mlp_bias=True, init_method_std=0.5))

    def forward(self, x):
        return x + self.moe(torch.tanh(self.dense(self.norm(x)))).y


def build(*, tied: bool = False) -> nn.Sequential:
    """Two blocks and a head; or, tied, blocks that share weights, one of which runs twice."""
    torch.manual_seed(5)
    first, second, head = Block(), Block(), nn.Linear(WIDTH, 1)
    if not tied:
        return nn.Sequential(first, second, head)
    second.dense.weight = first.dense.weight
    second.moe.experts.w1 = first.moe.experts.w1
    second.moe.router = first.moe.router
    return nn.Sequential(first, second, first, head)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


OPTIMIZERS = {
    "adamw": lambda model: AdamW(decay_groups(model, 0.1), lr=0.03),
    "muon": lambda model: Muon(
        muon_groups(model, 0.1, fused={block.dense.weight: (3, 4) for block in list(model)[:2]}),
        lr=0.03,
        ns_dtype=torch.float32,
    ),
    "adafactor": lambda model: Adafactor(decay_groups(model, 0.1), lr=0.1),
    "tied": lambda model: AdamW(decay_groups(model, 0.1), lr=0.03),
    "sgd": lambda model: SGD(decay_groups(model, 0.1), lr=0.1, momentum=0.9),
}


def train(dims, zero_stage, name, recompute=None, device="cpu"):
    """Losses, norms, gradients, and every parameter and moment whole, of all steps.

    Micro-batch m goes to rank m % dp. They are of unequal sizes, one has no sample at all; losses
    add up over ranks to the mean over samples.
    """
    # Without sizes: this process alone, in whatever world.
    alone = ParallelMesh(ParallelDims(), None, None, None)
    model = build(tied=name == "tied").to(device)
    mesh = ParallelDims(**dims).build(device) if dims else alone
    parallelize_experts(model, mesh, dispatcher="all_to_all")
    if recompute is not None:
        apply_recompute(list(model)[:2], recompute)
    apply_data_parallel(model, mesh, blocks=list(model)[:-1], zero_stage=zero_stage)
    optimizer = OPTIMIZERS[name](model)
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(STEPS, MICRO_BATCHES, SAMPLES, WIDTH, generator=generator).to(device)
    valid = torch.tensor([6, 0, 3, 5])
    history = []
    for step in range(STEPS):
        mine = [m for m in range(MICRO_BATCHES) if m % mesh.dp_size == mesh.dp_rank]
        total = torch.zeros((), device=device)
        for m in mine:
            set_gradient_sync(model, m == mine[-1])
            loss = (model(data[step, m, : int(valid[m])]) - 1).square().sum() / valid.sum()
            loss.backward()
            total += loss.detach()
        result = clip_and_step(optimizer, max_norm=0.5, mesh=mesh)
        grads = {n: full(p.grad) for n, p in model.named_parameters()}
        optimizer.zero_grad()
        mesh.all_reduce(total, "dp")
        history.append({"loss": total, "norm": result.grad_norm, **grads})
    state = {
        f"{n}.{kind}": full(value)
        for n, p in model.named_parameters()
        for kind, value in {"weight": p.detach(), **optimizer.state[p]}.items()
    }
    return history, state


CASES = [
    (2, {"dp_shard": 2}, 0, "adamw"),
    (2, {"dp_shard": 2}, 0, "adamw", "full"),
    (2, {"dp_shard": 2}, 0, "tied"),
    (2, {"dp_shard": 2, "ep": 2}, 0, "muon"),
    (4, {"dp_replicate": 2, "dp_shard": 2}, 0, "adamw"),
    (4, {"dp_shard": 4, "ep": 2}, 0, "adafactor"),
    (2, {"dp_shard": 2}, 1, "adamw"),
    (2, {"dp_shard": 2}, 2, "adamw"),
    (2, {"dp_shard": 2}, 3, "adamw"),
    (2, {"dp_shard": 2}, 3, "adamw", "full"),
    (2, {"dp_shard": 2, "ep": 2}, 1, "adamw", "moe"),
    (2, {"dp_shard": 2}, 2, "sgd"),
    (2, {"dp_shard": 2}, 3, "muon"),
    (2, {"dp_shard": 2}, 3, "tied"),
    (4, {"dp_shard": 4}, 3, "adamw"),
    (4, {"dp_replicate": 2, "dp_shard": 2}, 1, "adamw"),
    (4, {"dp_replicate": 2, "dp_shard": 2, "ep": 2}, 2, "adamw"),
    (4, {"dp_shard": 4, "ep": 2}, 3, "adamw"),
    (4, {"dp_shard": 4, "ep": 4}, 2, "adamw"),
    (4, {"dp_shard": 4, "ep": 2}, 2, "tied"),
    (4, {"dp_shard": 4, "ep": 2}, 2, "muon"),
    (4, {"dp_shard": 4, "ep": 2}, 2, "adafactor"),
]
IDS = ["-".join((*(f"{k}{v}" for k, v in d.items()), f"zero{z}", *n)) for _, d, z, *n in CASES]


def train_cases(rank, world_size, cases):
    return [train(*case) for case in cases]


@pytest.fixture(scope="module")
def results(request):
    """What each rank got in each case that is asked for, and one process; ranks start once."""
    got = {name: train({}, 3, name) for name in OPTIMIZERS}
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    asked = {call.params["case"] for call in calls if call and "case" in call.params}
    for ranks in (2, 4):
        mine = [i for i, case in enumerate(CASES) if case[0] == ranks and IDS[i] in asked]
        by_rank = run_ranks(train_cases, ranks, [CASES[i][1:] for i in mine], timeout_s=280.0)
        got |= {IDS[i]: [one[place] for one in by_rank] for place, i in enumerate(mine)}
    return got


FURTHER = (
    *("dp_shard2-zero0-tied", "dp_shard2-zero1-adamw", "dp_shard2-zero3-muon"),
    *("dp_shard4-ep2-zero0-adafactor", "dp_shard4-ep2-zero2-tied"),
    *("dp_replicate2-dp_shard2-zero0-adamw", "dp_shard4-zero3-adamw", "dp_shard4-ep4-zero2-adamw"),
)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("case", "name"),
    [
        pytest.param(case, name, id=case, marks=[pytest.mark.slow] * (case in FURTHER))
        for case, name in zip(IDS, CASES, strict=True)
    ],
)
def test_ranks_match_one_process(results, case, name):
    history, state = results[name[3]]
    assert history[0]["loss"] != history[-1]["loss"]
    for got_history, got_state in results[case]:
        torch.testing.assert_close(got_history, history, rtol=1e-5, atol=1e-6)
        assert got_state.keys() == state.keys()
        torch.testing.assert_close(got_state, state, rtol=1e-5, atol=2e-6)


def train_on_gpus(rank, world_size):
    cases = [case for case in CASES if case[0] == world_size]
    alone = {name: train({}, 3, name, device="cuda") for name in {case[3] for case in cases}}
    for _, *case in cases:
        for got, want in zip(train(*case, device="cuda"), alone[case[2]], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_match_one():
    run_ranks(train_on_gpus, 2, device_type="cuda", timeout_s=280.0)


def turned(rank, world_size):
    """Stacks of matrices that Muon orthogonalises here, of five linear layers and one."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)), nn.Linear(8, 2))
    mesh = ParallelDims(dp_shard=world_size).build("cpu")
    apply_data_parallel(model, mesh, blocks=list(model))
    optimizer = Muon(muon_groups(model, 0.1))
    model(torch.ones(3, 8)).sum().backward()
    with mock.patch.object(muon, "newton_schulz", wraps=muon.newton_schulz) as iteration:
        optimizer.step()
    return [tuple(call.args[0].shape) for call in iteration.call_args_list]


def test_muon_deals_layers_out_among_the_ranks_that_share_their_weights():
    first, second = run_ranks(turned, 2)
    assert first == [(3, 8, 8), (1, 2, 8)]
    assert second == [(2, 8, 8), (1, 2, 8)]  # what is alone is everyone's


class Probe(nn.Linear):
    """Remembers the dtypes that its forward pass saw."""

    def forward(self, input):
        self.seen = (input.dtype, self.weight.dtype)
        return super().forward(input.to(self.weight.dtype))


class ProbedExperts(Experts):
    def forward(self, dispatched):
        self.seen = (dispatched.x_RD.dtype, self.w1.dtype, dispatched.weights_RK.dtype)
        return super().forward(dispatched)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.router_like, self.dense, self.moe = (
            Probe(WIDTH, WIDTH),
            Probe(WIDTH, WIDTH),
            dMoE(MoEConfig(hidden_size=WIDTH, ffn_hidden_size=6, num_experts=4)),
        )
        self.moe.experts.__class__ = ProbedExperts

    def forward(self, x):
        return self.moe(self.dense(self.router_like(x)).to(x.dtype)).y


def dtypes(rank, world_size):
    model = nn.Sequential(Probe(WIDTH, WIDTH), Layers())
    layers, plain = model[1], nn.Sequential(Probe(WIDTH, WIDTH))
    mesh = ParallelDims(dp_shard=world_size).build("cpu")
    apply_data_parallel(
        model,
        mesh,
        blocks=[layers],
        compute_dtype=torch.bfloat16,
        keep_fp32=[layers.router_like, layers.moe.router],
    )
    apply_data_parallel(plain, mesh, blocks=[], compute_dtype=torch.bfloat16, cast_inputs=False)
    plain(torch.ones(3, WIDTH))
    (model(torch.ones(3, WIDTH)).sum() * 256**rank).backward()
    seen = [
        m.seen for m in (plain[0], model[0], layers.router_like, layers.dense, layers.moe.experts)
    ]
    for name, parameter in model.named_parameters():
        if "router" not in name:  # a bf16 gradient and 256 times the same: in bf16 only the latter
            sum_ = full(parameter.grad)
            assert sum_.any()
            assert torch.equal((sum_ / 257).bfloat16().float() * 257, sum_), name
    return seen, {p.grad.dtype for p in model.parameters()}, {p.dtype for p in model.parameters()}


def test_bf16_compute_with_fp32_routers_routing_weights_gradients_sums_and_weights():
    full, half = torch.float32, torch.bfloat16
    for seen, grads, weights in run_ranks(dtypes, 2):
        assert seen == [(full, half), (half, half), (half, full), (full, half), (half, half, full)]
        assert grads == weights == {full}


class Adds(nn.Module):
    """A block with an fp32 residual stream, and a table that all blocks are given."""

    def __init__(self):
        super().__init__()
        self.dense = Probe(WIDTH, WIDTH)

    def forward(self, x, *, table):
        self.seen = x.dtype, table.dtype
        return x.float() + self.dense(x * table)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Adds() for _ in range(3)), nn.Linear(WIDTH, 1)

    def forward(self, x):
        table = torch.ones(WIDTH)
        for block in self.blocks:
            x = block(x, table=table)
        return self.head(x.to(self.head.weight.dtype))


def what_blocks_are_given(rank, world_size, zero_stage):
    model, mesh = Stack(), ParallelDims(dp_shard=world_size).build("cpu")
    how = {"compute_dtype": torch.bfloat16, "zero_stage": zero_stage}
    apply_data_parallel(model, mesh, blocks=model.blocks, **how)
    model(torch.ones(3, WIDTH)).sum().backward()
    return [block.seen for block in model.blocks]


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_every_block_is_given_the_compute_dtype(zero_stage):
    """With torch 2.11 it was the first of joined ones alone."""
    half = torch.bfloat16
    assert run_ranks(what_blocks_are_given, 2, zero_stage) == [[(half, half)] * 3] * 2


def routers_joined(rank, world_size, recomputing):
    """Whether the routers of two blocks, so many of which recompute, are one unit."""
    model, mesh = build(), ParallelDims(dp_shard=world_size).build("cpu")
    blocks = list(model)[:2]
    if recomputing:
        apply_recompute(blocks[:recomputing], "full")
    routers = [block.moe.router for block in blocks]
    how = {"compute_dtype": torch.bfloat16, "keep_fp32": routers, "zero_stage": 1}
    apply_data_parallel(model, mesh, blocks=blocks, **how)
    model(torch.ones(2, WIDTH)).sum().backward()
    first, second = (router._get_fsdp_state() for router in routers)
    return first is second


@pytest.mark.parametrize("recomputing", [0, 1, 2])
def test_a_unit_runs_again_as_a_whole(recomputing):
    """FSDP2 of torch 2.11 warns where a part of one does."""
    assert run_ranks(routers_joined, 2, recomputing) == [recomputing != 1] * 2


def blocks_joined(rank, world_size, in_training):
    """Whether two blocks, of which so many run in training alone, are one unit."""
    model, mesh = build(), ParallelDims(dp_shard=world_size).build("cpu")
    blocks = list(model)[:2]
    apart = [module for block in blocks[:in_training] for module in block.modules()]
    how = {"zero_stage": 1, "cast_inputs": False}  # torch 2.11 joins none whose inputs it casts
    apply_data_parallel(model, mesh, blocks=blocks, in_training=apart, **how)
    model(torch.ones(2, WIDTH)).sum().backward()
    first, second = (block._get_fsdp_state() for block in blocks)
    return first is second


@pytest.mark.parametrize("in_training", [0, 1, 2])
def test_a_unit_is_left_out_as_a_whole(in_training):
    """In evaluation; FSDP2 of torch 2.11 warns where a part of one is."""
    assert run_ranks(blocks_joined, 2, in_training) == [in_training != 1] * 2


def collectives(rank, world_size, zero_stage):
    """What a step of three micro-batches sends, and what is whole between two of them."""
    model, mesh = build(), ParallelDims(dp_shard=world_size).build("cpu")
    blocks = list(model)[:2]
    routers = [block.moe.router for block in blocks]  # in fp32 as all else, so no units
    how = {"keep_fp32": routers, "zero_stage": zero_stage, "cast_inputs": False}
    apply_data_parallel(model, mesh, blocks=blocks, **how)
    whole, counts = [], dict.fromkeys(("foreach_all_gather", "foreach_reduce"), 0)

    def counted(name, collective):
        def call(*args, **kwargs):
            counts[name] += 1
            return collective(*args, **kwargs)

        return mock.patch.object(fsdp, name, call)

    with ExitStack() as patches:
        for name in counts:
            patches.enter_context(counted(name, getattr(fsdp, name)))
        for m in range(3):
            set_gradient_sync(model, m == 2)
            model(torch.ones(2, WIDTH)).sum().backward()
            weight = model[0].dense.weight
            whole.append(not isinstance(weight, DTensor))
    return counts, whole


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("zero_stage", "gathers", "reductions"), [(1, 4, 4), (2, 4, 12), (3, 27, 15)]
)
def test_what_a_stage_gathers_and_keeps_between_micro_batches(zero_stage, gathers, reductions):
    # Units: two blocks, joined but for stage 3, the experts of each, and the rest. Stage 3 gathers
    # all but the rest twice.
    for counts, whole in run_ranks(collectives, 2, zero_stage):
        assert counts["foreach_all_gather"] == gathers
        assert counts["foreach_reduce"] == reductions
        assert whole == [zero_stage < 3, zero_stage < 3, False]


def steps_too_early(rank, world_size, zero_stage):
    """Says what refuses gradients that ranks have not added up; and steps once they have."""
    model, mesh = build(), ParallelDims(dp_shard=world_size, ep=world_size).build("cpu")
    parallelize_experts(model, mesh)
    apply_data_parallel(model, mesh, blocks=list(model)[:2], zero_stage=zero_stage)
    parameters = list(model.parameters())
    optimizer = AdamW(parameters)
    experts = [p for block in list(model)[:2] for p in block.moe.experts.parameters()]
    set_gradient_sync(model, False)
    model(torch.ones(2, WIDTH)).sum().backward()
    for call in (
        optimizer.step,
        torch.optim.AdamW(parameters).step,
        torch.optim.SGD(experts).step,
        lambda: clip_and_step(optimizer, mesh=mesh),
        lambda: clip_grad_norm(parameters, 1.0, mesh),
    ):
        # In stage 2 without replicas each micro-batch's gradients are complete.
        for told in (False, True)[: 3 - zero_stage]:
            set_gradient_sync(model, told)
            with pytest.raises(ValueError, match=r"Call set_gradient_sync\(model, True\) before"):
                call()

    def last_micro_batch():
        set_gradient_sync(model, True)
        loss = model(torch.ones(2, WIDTH)).sum()
        loss.backward()
        return loss

    torch.optim.SGD(parameters, lr=0.0).step(last_micro_batch)
    norm = float(clip_and_step(optimizer, mesh=mesh).grad_norm)
    model.zero_grad(set_to_none=False)
    assert not any(full(p.grad).any() for p in parameters)
    return norm


def branches(rank, world_size, zero_stage):
    """Gradients of a model of which each rank uses another part in each of two micro-batches."""
    torch.manual_seed(5)
    model = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "abc"})
    model.forward = lambda x, name: model[name](x)
    apply_data_parallel(
        model, ParallelDims(dp_shard=world_size).build("cpu"), blocks=[], zero_stage=zero_stage
    )
    model.set_reduce_scatter_unused_params(True)
    for m, names in enumerate(("ab", "bb")):
        set_gradient_sync(model, m == 1)
        model(torch.full((2, WIDTH), rank + m + 1.0), names[rank]).sum().backward()
    return {name: full(model[name].weight.grad) for name in model}


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="from torch 2.13 on"
)
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_ranks_may_use_other_parameters_if_the_model_is_told(zero_stage):
    for grads in run_ranks(branches, 2, zero_stage):
        # Two rows of rank + m + 1: a by rank 0 at first, b by rank 1 and then by both.
        for name, value in {"a": 2.0, "b": 2 * (2 + 2 + 3.0), "c": 0.0}.items():
            assert torch.equal(grads[name], torch.full((WIDTH, WIDTH), value))


def in_turn(rank, world_size, zero_stage):
    """Gradients of two branches of one size, each used by all ranks in one of two micro-batches."""
    model = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "ab"})
    model.forward = lambda x, name: model[name](x)
    mesh = ParallelDims(dp_replicate=world_size).build("cpu")
    apply_data_parallel(model, mesh, blocks=[], zero_stage=zero_stage)
    try:
        for m, name in enumerate("ab"):
            set_gradient_sync(model, m == 1)
            model(torch.full((2, WIDTH), rank + m + 1.0), name).sum().backward()
    except ValueError as error:
        return str(error)
    return {name: full(model[name].weight.grad) for name in model}


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_micro_batches_of_replicas_do_not_mix_up_branches(zero_stage):
    """Torch before 2.15 gave the second branch the first one's gradient too, without an error."""
    for grads in run_ranks(in_turn, 2, zero_stage):
        if zero_stage > 1 and torch_release() < (2, 15):
            assert "use the same parameters of ModuleDict" in grads
            continue
        for name, value in {"a": 2 * (1 + 2.0), "b": 2 * (2 + 3.0)}.items():
            assert torch.equal(grads[name], torch.full((WIDTH, WIDTH), value))


def gives_up(rank, world_size, zero_stage, dtype, replicas):
    """The norms of a step alone, and after one whose gradients were dropped, in several ways."""
    dims = ParallelDims(dp_replicate=replicas, dp_shard=world_size // replicas)
    norms = []
    for dropped_by in (None, "optimizer", "torch", "model", "around"):
        model, mesh = build(), dims.build("cpu")
        how = {"compute_dtype": dtype, "zero_stage": zero_stage}
        apply_data_parallel(model, mesh, blocks=list(model)[:2], **how)
        optimizer = AdamW(model.parameters())
        others = {
            "torch": torch.optim.AdamW(model.parameters()), "model": model,
            "around": nn.ModuleList([model]),
        }  # fmt: skip
        drops = others.get(dropped_by, optimizer)
        for _ in range(0 if dropped_by is None else 1):
            for kept in (False, True):
                set_gradient_sync(model, False)
                drops.zero_grad(set_to_none=kept)
                model(torch.ones(2, WIDTH)).sum().backward()
            set_gradient_sync(model, True)  # of a micro-batch that fails before its backward
            drops.zero_grad()
        for m in range(2):
            set_gradient_sync(model, m == 1)
            model(torch.ones(2, WIDTH)).sum().backward()
        norms.append(float(clip_and_step(optimizer, mesh=mesh).grad_norm))
    return norms


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("zero_stage", "dtype", "replicas"),
    [(0, torch.float32, 1), (1, torch.float32, 1), (1, torch.bfloat16, 1), (3, torch.float32, 2)],
)
def test_a_step_that_is_given_up_leaves_nothing_behind(zero_stage, dtype, replicas):
    for fresh, *after in run_ranks(gives_up, 2, zero_stage, dtype, replicas):
        assert after == [fresh] * 4


def raises_in_backward(rank, world_size, zero_stage):
    """The norms of two steps as they are, and of two with a backward pass that raised between."""
    norms = []
    for drops in (None, "optimizer", "model"):
        model, mesh = build(), ParallelDims(dp_shard=world_size).build("cpu")
        apply_data_parallel(model, mesh, blocks=list(model)[:2], zero_stage=zero_stage)
        optimizer, found = AdamW(model.parameters(), lr=0.1), []
        for step in range(2):
            if step and drops:
                hook = model[1].register_full_backward_pre_hook(lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    model(torch.ones(2, WIDTH)).sum().backward()
                hook.remove()
                {"optimizer": optimizer, "model": model}[drops].zero_grad()
            model(torch.ones(2, WIDTH)).sum().backward()
            found.append(float(clip_and_step(optimizer, mesh=mesh).grad_norm))
            optimizer.zero_grad()
        norms.append(found)
    return norms


@pytest.mark.skipif(torch_release() < (2, 13), reason="FSDP2 has no way to begin anew")
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_zero_grad_gives_up_a_backward_pass_that_raised(zero_stage):
    """FSDP2 reduced no more gradients, and steps were refused for those of earlier passes."""
    for undisturbed, *after in run_ranks(raises_in_backward, 2, zero_stage):
        assert after == [undisturbed] * 2


@pytest.mark.sweep(3)
@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_a_step_before_the_last_micro_batch_is_refused(zero_stage):
    """In stage 1 the experts, which have their gradients at once, would train alone."""
    first, second = run_ranks(steps_too_early, 2, zero_stage)
    assert first == second


def replicas(rank, world_size):
    """What `zero_stage` 0 does besides training as one process does."""
    torch.manual_seed(rank)  # other weights on each rank
    model, mesh = nn.Linear(WIDTH, 1), ParallelDims(dp_shard=world_size).build("cpu")
    apply_data_parallel(model, mesh, blocks=[], zero_stage=0)
    weight, x = model.weight.detach().clone(), torch.full((1, WIDTH), rank + 1.0)
    model(x).sum().backward()
    sums = [model.weight.grad.clone()]
    with pytest.raises(ValueError, match="no gradient that is summed over the ranks already"):
        model(x).sum().backward()
    model.zero_grad(set_to_none=False)
    model(x).sum().backward()
    sums.append(model.weight.grad.clone())
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    model(x).sum().backward()
    sums.append(model.weight.grad.clone())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.grad.fill_(rank + 1.0)  # as a CUDA graph leaves it
    sum_gradients(model)
    sums.append(model.weight.grad)
    for copy in (deepcopy(model), pickle.loads(pickle.dumps(model))):
        copy.zero_grad()
        copy(x).sum().backward()
        sums.append(copy.weight.grad)
    return weight, sums


def test_replicas_have_the_first_ranks_weights_and_summed_gradients():
    (first, sums), (second, _) = run_ranks(replicas, 2)
    assert torch.equal(first, second)
    assert all(torch.equal(grad, torch.full((1, WIDTH), 3.0)) for grad in sums)


def groups_of_other_seeds(rank, world_size, ep):
    """A model's weights, whole, of a rank whose own were others than every other rank's."""
    model = build()
    for parameter in model.parameters():
        parameter.data += rank
    mesh = ParallelDims(dp_replicate=2, dp_shard=2, ep=ep).build("cpu")
    parallelize_experts(model, mesh)
    apply_data_parallel(model, mesh, blocks=list(model), zero_stage=3)
    return [full(p).detach() for p in model.parameters()]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_sharded_groups_start_with_the_first_ones_weights(ep):
    first, *others = run_ranks(groups_of_other_seeds, 4, ep)
    for weights in others:
        for weight, expected in zip(weights, first, strict=True):
            torch.testing.assert_close(weight, expected, rtol=0, atol=0)


def changed_replicas(rank, world_size):
    """Gradients of all ranks' sums, of models that something was done to: what each rank has, and
    what it should have."""
    mesh = ParallelDims(dp_shard=world_size).build("cpu")
    x = torch.full((2, WIDTH), rank + 1.0)
    found = {}

    def layers(seed=5):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def compare(name, model, forward=None, dtype=torch.float32):
        plain = layers().to(dtype)
        plain.load_state_dict(model.state_dict())
        (model if forward is None else forward)(x.to(dtype)).sum().backward()
        plain(x.to(dtype)).sum().backward()
        for grad in (expected := [p.grad for p in plain.parameters()]):
            dist.all_reduce(grad)
        found[name] = ([p.grad for p in model.parameters()], expected)

    model = layers(rank)  # other weights on each rank
    model[0].requires_grad_(False)
    apply_data_parallel(model, mesh, blocks=[], zero_stage=0)
    model[0].requires_grad_(True)
    by_parts = lambda x: model[2](model[1](model[0](x)))  # noqa: E731
    compare("unfrozen, its parts called", model, by_parts)
    model.load_state_dict(found_in(model), assign=True)
    compare("loaded, its parts called", model, by_parts)
    model[0].weight = nn.Parameter(model[0].weight.detach())
    model.zero_grad()
    gather_rest(model)
    compare("of a new parameter, its parts called", model, by_parts)
    found["weights"] = [p.detach().clone() for p in model.parameters()]

    model.zero_grad()
    torch.func.functional_call(model, {n: p * 1 for n, p in model.named_parameters()}, x)
    torch.func.grad(lambda p: torch.func.functional_call(model, p, x).sum())(found_in(model))
    compare("called with others", model)

    parts = list(model)
    del model
    gc.collect()
    model = nn.Sequential(*parts)
    model.zero_grad()
    apply_data_parallel(model, mesh, blocks=[], zero_stage=0)
    compare("made of a replicated model's parts", model)

    model = layers().bfloat16()
    apply_data_parallel(model, mesh, blocks=[], zero_stage=0)
    compare("in 16 bits", model, dtype=torch.bfloat16)
    return found


def unequal_micro_batches(rank, world_size):
    """Gradients of ranks with one micro-batch and with two, whose experts have working copies."""
    model, mesh = build(), ParallelDims(dp_shard=world_size).build("cpu")
    apply_data_parallel(model, mesh, blocks=[], zero_stage=0)
    hold_working_copies([model], torch.bfloat16)
    for m in range(rank + 1):
        set_gradient_sync(model, m == rank)
        model(torch.full((2, WIDTH), 0.5)).sum().backward()
    return [p.grad for p in model.parameters()]


def test_replicas_may_run_different_numbers_of_micro_batches():
    whole = build()
    (3 * whole(torch.full((2, WIDTH), 0.5)).sum()).backward()
    expected = [p.grad for p in whole.parameters()]
    for grads in run_ranks(unequal_micro_batches, 2):
        torch.testing.assert_close(grads, expected, rtol=0.05, atol=0.2)


def found_in(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_replicas_sum_whatever_was_done_to_the_model():
    first, second = run_ranks(changed_replicas, 2)
    weights = [found.pop("weights") for found in (first, second)]
    assert all(map(torch.equal, *weights))
    for found in (first, second):
        assert len(found) == 6
        for got, expected in found.values():
            torch.testing.assert_close(got, expected)


def copies_of_experts(rank, world_size):
    """Gradients of two ranks' copies of an expert, cast to other dtypes and back; then refused."""
    mesh = ParallelDims(dp_shard=world_size, ep=2).build("cpu")
    model = build()
    parallelize_experts(model, mesh, dispatcher="all_to_all")
    apply_data_parallel(model, mesh, blocks=[], zero_stage=0)
    model.double().float()
    experts = list(model[0].moe.experts.parameters())
    for parameter in set(model.parameters()) - set(experts):
        parameter.requires_grad_(False)
    x = torch.full((2, WIDTH), rank + 1.0)
    model(x).sum().backward()
    grads = [full(p.grad) for p in experts]
    model.zero_grad()
    hold_working_copies([model], torch.bfloat16)
    for enabled in (False, False, True):
        set_gradient_sync(model, enabled)
        model(x).sum().backward()
    with pytest.raises(ValueError, match="summed over the ranks already"):
        model(x).sum().backward()
    return grads


def test_copies_of_an_expert_are_summed_once():
    whole = build()
    sum(whole(torch.full((2, WIDTH), rank + 1.0)).sum() for rank in range(4)).backward()
    expected = [p.grad for p in whole[0].moe.experts.parameters()]
    for grads in run_ranks(copies_of_experts, 4):
        torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-4)


def refused_by_replicas(rank, world_size):
    """Gradients that would be wrong without an error."""
    mesh = ParallelDims(dp_shard=world_size).build("cpu")
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    apply_data_parallel(model, mesh, blocks=[], zero_stage=0)
    for whole in (model, nn.Sequential(model)):
        for stage in (0, 1):
            with pytest.raises(ValueError, match="no part is replicated or sharded yet"):
                apply_data_parallel(whole, mesh, blocks=[], zero_stage=stage)
    sharded = nn.Sequential(nn.Linear(WIDTH, 1))
    fully_shard(sharded[0], mesh=mesh.dp)
    with pytest.raises(ValueError, match="no part is replicated or sharded yet"):
        apply_data_parallel(sharded, mesh, blocks=[], zero_stage=0)
    stages = ParallelDims(pp=world_size).build("cpu")
    with pytest.raises(ValueError, match=r"first one, got the meta device's weight\. Call"):
        apply_data_parallel(nn.Linear(1, 1, device="meta"), mesh, blocks=[], zero_stage=0)
    with pytest.raises(ValueError, match="zero_stage 1, 2 or 3 for a stage of a pipeline"):
        apply_data_parallel(nn.Linear(1, 1), stages, blocks=[], zero_stage=0)
    wrapped = nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(1, 1)))
    older = nn.Sequential(FullyShardedDataParallel(nn.Linear(1, 1), device_id=torch.device("cpu")))
    spread = nn.Linear(WIDTH, 2, bias=False)
    spread.weight = nn.Parameter(distribute_tensor(spread.weight.detach(), mesh.dp, [Shard(0)]))
    for whole, stage, says in (
        (
            spread,
            0,
            r"weight to be the same on each of the ranks \[0, 1\], got a DTensor over \[0, 1\]",
        ),
        (wrapped, 0, "got DistributedDataParallel, which averages"),
        (wrapped, 1, "got DistributedDataParallel, which averages"),
        (older, 0, "got FullyShardedDataParallel, which averages"),
        (older, 1, "got FullyShardedDataParallel, which averages"),
    ):
        with pytest.raises(ValueError, match=says):
            apply_data_parallel(whole, mesh, blocks=[], zero_stage=stage)
    x = torch.full((1, WIDTH), rank + 1.0)
    model(x).sum().backward()
    with pytest.raises(ValueError, match="got sums, which the last backward pass left"):
        sum_gradients(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for enabled in (True, False):
        set_gradient_sync(model, enabled)
        with pytest.raises(ValueError, match="no gradient that is summed over the ranks already"):
            model(x).sum().backward()
    # Whatever is zeroed may be added to: by an optimizer of some of the parameters, by a part.
    torch.optim.SGD(model[1].parameters()).zero_grad(set_to_none=False)
    model[0].zero_grad(set_to_none=False)
    for enabled in (False, True):
        set_gradient_sync(model, enabled)
        model(x).sum().backward()
    bias = model[1].bias.grad.clone()
    model.zero_grad()
    again = x.clone().requires_grad_()
    for _ in range(2):  # a backward pass for each, inside that of the whole
        again = checkpoint(model[0], again, use_reentrant=True)
    with pytest.raises(ValueError, match="no gradient that is summed over the ranks already"):
        model[1](again).sum().backward()
    model.zero_grad()
    with pytest.raises(ValueError, match="Expected all ranks to use the same parameters"):
        (model[rank].bias.sum()).backward()
    with pytest.raises(ValueError, match="summed over the ranks, got some of micro-batches"):
        torch.optim.SGD(model.parameters()).step()
    model.zero_grad()
    model(x).sum().backward()
    return bias, model[1].bias.grad


class Again(nn.Module):
    """Blocks under checkpoints: each word's block has so many, of so many runs; a dot has none."""

    def __init__(self, blocks):
        super().__init__()
        torch.manual_seed(0)
        self.below = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in blocks.split())
        self.words = blocks.split()

    def forward(self, x, use_reentrant):
        x = self.below(x)
        for block, word in zip(self.blocks, self.words, strict=True):
            times = 2 if "+" in word else 1

            def run(x, block=block, times=times):
                for _ in range(times):
                    x = block(x).tanh()
                return x

            for _ in range(word.count("c")):
                x = x + checkpoint(run, x, use_reentrant=use_reentrant)
            x = x + run(x) if word == "." else x
        return x


def reentrant(rank, world_size):
    mesh, x = ParallelDims(dp_shard=world_size).build("cpu"), torch.ones(3, WIDTH) * (rank + 1)
    several, joined = "has several in a pass", "is the last of several that are gathered together"
    late = torch_release() >= (2, 13)
    for blocks, stage, says in (
        ("c .", 3, None),
        ("c+ .", 3, None),
        (". c", 3, None),
        ("cc .", 3, several),
        ("c c c", 1, None if late else joined),
        ("c .", 2, None),
        (". c .", 1, None),
        (". c", 1, joined),
        ("c . c", 2, joined),
        # Before, FSDP2 gathers nothing for a second checkpoint of any kind in joined blocks.
        *([("c cc", 1, several)] if late else []),
    ):
        grads = []
        for use_reentrant in (False, True):
            model = Again(blocks)
            apply_data_parallel(model, mesh, blocks=model.blocks, zero_stage=stage,
                                compute_dtype=torch.float32, cast_inputs=False)  # fmt: skip
            refused = use_reentrant and says
            for _ in range(2):
                loss = model(x, use_reentrant).square().sum()
                expected = pytest.raises(ValueError, match=says) if refused else nullcontext()
                with expected:
                    loss.backward()
                if refused:
                    break
            grads.append([] if refused else [p.grad.full_tensor() for p in model.parameters()])
        if not says:
            torch.testing.assert_close(*grads)


def test_reentrant_checkpoints_that_fsdp2_would_sum_wrongly_are_refused():
    run_ranks(reentrant, 2)


def test_replicas_refuse_what_they_would_sum_wrongly():
    for bias, after in run_ranks(refused_by_replicas, 2):
        assert bias == 4
        assert after == 2


def evaluates_before_the_step(rank, world_size, zero_stage):
    """Losses of evaluations between backward and step, and without them; the groups' parameters."""
    losses: list[list[float]] = []
    for between in (False, True):
        model, mesh = build(), ParallelDims(dp_shard=world_size, ep=world_size).build("cpu")
        parallelize_experts(model, mesh)
        apply_data_parallel(model, mesh, blocks=list(model)[:2], zero_stage=zero_stage)
        x = torch.ones(2, WIDTH)
        if zero_stage == 1:
            model.to("cpu")  # puts other parameters in place of these
        else:
            model.load_state_dict(model.state_dict(), assign=True)
        parameters = set(model.parameters())
        with torch.no_grad():
            model(x)
        groups = decay_groups(model, 0.1)
        assert {p for group in groups for p in group["params"]} == parameters
        kind = AdamW if zero_stage < 3 else torch.optim.AdamW
        optimizer = kind(groups, lr=0.1)
        losses.append([])
        for _ in range(2):
            loss = model(x).sum()
            loss.backward()
            if between:
                gather_rest(model)
                with torch.no_grad():
                    model(x)
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(float(loss))
    return losses


@pytest.mark.sweep(3)
@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_an_evaluation_before_the_step_changes_nothing(zero_stage):
    for without, between in run_ranks(evaluates_before_the_step, 2, zero_stage):
        assert between == without
        assert without[1] != without[0]


def zeroes_what_is_gathered(rank, world_size):
    """Gradients of each stage, of the same pass three times: zeroed by the model and by a part."""
    found = []
    for zero_stage in (0, 1, 3):
        model, mesh = build(), ParallelDims(dp_shard=world_size, ep=world_size).build("cpu")
        parallelize_experts(model, mesh)
        apply_data_parallel(model, mesh, blocks=[], zero_stage=zero_stage)
        optimizer = SGD(model.parameters(), lr=0.0)
        x, grads = torch.full((2, WIDTH), 0.5), []
        for zeroed in ([], [model], list(model)):
            with torch.no_grad():
                model(x)
            for module in zeroed:
                module.zero_grad()
            model(x).sum().backward()
            grads.append(float(clip_and_step(optimizer, mesh=mesh).grad_norm))
        found.append(grads)
    return found


def test_gradients_are_zeroed_by_a_model_that_was_evaluated():
    for found in run_ranks(zeroes_what_is_gathered, 2):
        for first, *others in found:
            assert first > 0
            assert others == [first] * 2


def freezes_what_is_gathered(rank, world_size):
    """Which parameters a step moves that were frozen, or not any more, behind an evaluation."""
    moved = []
    for zero_stage in (0, 1, 3):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        model[0].requires_grad_(False)
        mesh, x = ParallelDims(dp_shard=world_size).build("cpu"), torch.ones(2, WIDTH)
        apply_data_parallel(model, mesh, blocks=[model[0]], zero_stage=zero_stage)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.0)
        (group,) = optimizer.param_groups
        for listed in (model.parameters, lambda mine=group["params"]: mine):
            model(x).sum().backward()
            optimizer.zero_grad()
            with torch.no_grad():
                model(x)
            for parameter in listed():
                parameter.requires_grad = not parameter.requires_grad
            before = [full(parameter.detach()).clone() for parameter in group["params"]]
            model(x).sum().backward()
            clip_and_step(optimizer, mesh=mesh)
            after = [full(parameter.detach()) for parameter in group["params"]]
            moved.append([not torch.equal(a, b) for a, b in zip(before, after, strict=True)])
            optimizer.zero_grad()
    return moved


def test_what_is_frozen_after_an_evaluation_stays():
    for moved in run_ranks(freezes_what_is_gathered, 2):
        assert moved == [[True, True, False, False], [False, False, True, True]] * 3


def saves_after_an_evaluation(rank, world_size, zero_stage):
    """Gradients of two micro-batches, with an evaluation in between or not; what is saved then."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    norms = []
    for between in (False, True):
        model, mesh = build(), ParallelDims(dp_shard=world_size).build("cpu")
        parallelize_experts(model, mesh)
        apply_data_parallel(model, mesh, blocks=list(model)[1:], zero_stage=zero_stage)
        optimizer, x = SGD(model.parameters(), lr=0.0), torch.full((2, WIDTH), 0.5)
        for last in (False, True):
            set_gradient_sync(model, last)
            model(x).sum().backward()
            if between:
                model.eval()
                with torch.no_grad():
                    model(x)
                assert model.train() is model
        norms.append(float(clip_and_step(optimizer, mesh=mesh).grad_norm))
    gather_rest(model)
    model.eval()
    with torch.no_grad():
        model[0](x)
        model(x)
    model.train()
    _, saved = get_state_dict(model, optimizer)
    assert saved["state"].keys() == dict(model.named_parameters()).keys()
    return norms


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_a_model_that_trains_again_has_its_parameters(zero_stage):
    for without, between in run_ranks(saves_after_an_evaluation, 2, zero_stage):
        assert without == between > 0


def penalized(model, x):
    """The gradients of a loss to which that of the gradient by the input is added."""
    x = x.clone().requires_grad_()
    y = model(x).square().sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    set_gradient_sync(model, True)
    (y + slope.square().sum()).backward()
    return [full(parameter.grad) for parameter in model.parameters()]


def penalizes_gradients(rank, world_size):
    parts = torch.randn(world_size, 2, WIDTH, generator=torch.Generator().manual_seed(1))
    mesh = ParallelDims(dp_shard=world_size).build("cpu")
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    for zero_stage in (0, 1, 2):
        model = deepcopy(whole)
        apply_data_parallel(model, mesh, blocks=[model[0]], zero_stage=zero_stage)
        set_gradient_sync(model, False)
        found = penalized(model, parts[rank])
        torch.testing.assert_close(found, penalized(deepcopy(whole), parts.flatten(0, 1)))


def test_a_penalty_on_a_gradient_of_what_stays_gathered():
    run_ranks(penalizes_gradients, 2)


def steps_of_an_early_optimizer(rank, world_size, zero_stage):
    """What optimizers say that have the parameters from before the model was spread."""
    model, mesh = build(), ParallelDims(dp_shard=world_size, ep=world_size).build("cpu")
    model(torch.full((2, WIDTH), 0.5)).sum().backward()  # so that the old ones have gradients
    ours, theirs = SGD(model.parameters()), torch.optim.SGD(model.parameters())
    parallelize_experts(model, mesh)
    apply_data_parallel(model, mesh, blocks=list(model), zero_stage=zero_stage)
    model.zero_grad()
    model(torch.full((2, WIDTH), 0.5)).sum().backward()
    for step in (ours.step, theirs.step, lambda: clip_and_step(ours, mesh=mesh)):
        with pytest.raises(ValueError, match="the model has now, got some that were replaced"):
            step()
    optimizer = SGD(model.parameters(), lr=0.1)
    clip_and_step(optimizer, mesh=mesh)


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_an_optimizer_that_was_made_before_is_refused(zero_stage):
    run_ranks(steps_of_an_early_optimizer, 2, zero_stage)


def joins_late(rank, world_size, zero_stage):
    """Sums of the weights of a head that came after the model was sharded, on both ranks."""
    mesh = ParallelDims(dp_shard=world_size).build("cpu")
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    apply_data_parallel(model, mesh, blocks=list(model), zero_stage=zero_stage)
    torch.manual_seed(1)
    model[1] = nn.Linear(WIDTH, 1)
    model(torch.full((2, WIDTH), rank + 1.0)).sum().backward()
    optimizers = SGD(model.parameters()), torch.optim.SGD(model.parameters(), foreach=False)
    steps = (*(o.step for o in optimizers), lambda: clip_and_step(optimizers[0], mesh=mesh))
    for step in steps:
        if zero_stage == 0:
            step()
            continue
        with pytest.raises(ValueError, match=r"got 1.weight, 1.bias, of which each rank would"):
            step()
    for optimizer in optimizers:
        optimizer.zero_grad()
        optimizer.step()  # nothing is to be summed
    return float(model[1].weight.sum())


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_parameters_that_came_after_sharding_train_alike_or_not_at_all(zero_stage):
    first, second = run_ranks(joins_late, 2, zero_stage)
    assert first == second


def steps_within(rank, world_size, zero_stage):
    """A step in the hook of the only parameter, as optimizers take that keep no gradients."""
    mesh = ParallelDims(dp_shard=world_size).build("cpu")
    model = nn.Sequential(nn.Linear(WIDTH, 1, bias=False))
    apply_data_parallel(model, mesh, blocks=[], zero_stage=zero_stage)
    optimizer = torch.optim.SGD(model.parameters())
    model[0].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step() and None)
    with pytest.raises(ValueError, match=r"behind the backward pass, .* got one within it"):
        model(torch.ones(2, WIDTH)).sum().backward()


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_a_step_within_the_backward_pass_is_refused(zero_stage):
    run_ranks(steps_within, 2, zero_stage)


class Collects(nn.Module):
    """Blocks that put losses of theirs where the model finds them."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(Collecting(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        found = {
            "list": [], "nested": {"losses": ([],)}, "replaced": [x.sum()], "field": Losses(),
            "popped": [x.sum(), x.sum()],
        }[self.how]  # fmt: skip
        for block in self.blocks:
            x = block(x, found=found, how=self.how)
        if self.how == "field":
            return found.total
        return sum(found["losses"][0] if self.how == "nested" else found, x.sum())


@dataclass
class Losses:
    total: torch.Tensor | float = 0.0


class Collecting(nn.Linear):
    def forward(self, x, found, how):
        y = super().forward(x)
        loss = y.square().sum()
        if how == "field":
            found.total = found.total + loss
        elif how == "replaced":
            found[0] = found[0] + loss
        elif how == "popped":
            y = y * found.pop()
        else:
            (found["losses"][0] if how == "nested" else found).append(loss)
        return y


def collects(rank, world_size, how):
    """The gradient of losses that blocks put where they are told, where FSDP2 makes no copies."""
    mesh = ParallelDims(dp_shard=world_size).build("cpu")
    x = torch.full((1, WIDTH), rank + 1.0)

    def collecting(zero_stage, cast):
        torch.manual_seed(2)
        model, blocks = Collects(how), {"cast_inputs": cast, "zero_stage": zero_stage}
        apply_data_parallel(model, mesh, blocks=model.blocks, **blocks)
        return model

    kind = {"field": "Losses"}.get(how, "list")
    with pytest.raises(ValueError, match=f"got a Collecting that writes into a {kind} it is given"):
        collecting(2, True)(x)
    models = [collecting(2, False), collecting(0, True)]  # joined blocks, of which one has copies
    for model in models:
        model(x).backward()
    # Each by itself may have one, as soon as a tensor with a gradient is in there.
    with mock.patch("mb_parallel.fsdp_units._JOINED", 1):
        apart = collecting(2, False)
    refused = ""
    try:  # what is copied then differs between releases of torch
        apart(x).backward()
        models.append(apart)
    except ValueError as error:
        refused = str(error)
    assert not refused or "got a Collecting that writes into" in refused
    return [full(model.blocks[0].weight.grad) for model in models]


@pytest.mark.parametrize("how", ["list", "nested", "replaced", "popped", "field"])
def test_what_blocks_write_into_what_they_are_given_is_there_or_refused(how):
    for found in run_ranks(collects, 2, how):
        for grad in found[1:]:
            torch.testing.assert_close(grad, found[0])


def averages(rank, world_size, zero_stage, ep):
    """Weights of an average that was made before the model was sharded, and its loss."""
    mesh = ParallelDims.for_world(world_size, ep=ep).build("cpu")
    model = build()
    average = AveragedModel(model, avg_fn=get_ema_avg_fn(0.6))
    for one in (model, average.module):
        parallelize_experts(one, mesh)
        apply_data_parallel(one, mesh, blocks=list(one)[:2], zero_stage=zero_stage)
    optimizer = AdamW(model.parameters(), lr=0.03)
    x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).chunk(world_size)[rank]
    for _ in range(3):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        with torch.no_grad():
            loss = mesh.all_reduce(average(x).square().sum(), "dp")
        average.train()
    return [loss, *map(full, average.module.parameters())]


@pytest.mark.slow
def test_an_average_made_before_is_that_of_one_process():
    expected = run_ranks(averages, 1, 0, 1)[0]
    for zero_stage in range(4):
        for found in run_ranks(averages, 2, zero_stage, 1 + zero_stage % 2):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def keeps_marks(rank, world_size):
    """What stands on a dense weight and an expert's after each step of what spreads them."""
    mesh = ParallelDims(dp_shard=world_size, ep=world_size).build("cpu")
    model = build(tied=True)
    model[1].dense.weight.decays = model[1].moe.experts.w1.decays = False
    parallelize_experts(model, mesh)
    found = [model[1].moe.experts.w1.decays]
    apply_data_parallel(model, mesh, blocks=[], zero_stage=3)
    return [*found, *(getattr(p, "decays", True) for p in model.parameters())]


def test_marks_on_parameters_stay():
    whole = build(tied=True)
    marked = {id(whole[0].dense.weight), id(whole[0].moe.experts.w1)}
    expected = [False, *(id(p) not in marked for p in whole.parameters())]
    assert run_ranks(keeps_marks, 2) == [expected] * 2


def masks_gradients(rank, world_size):
    """Which gradients of two weights hooks have zeroed, set before or after each stage."""
    model, mesh = build(), ParallelDims(dp_shard=world_size, ep=world_size).build("cpu")
    model[0].moe.experts.w1.register_hook(torch.zeros_like)
    with pytest.raises(ValueError, match=r"hooks .* got some of 0.moe.experts.w1, which would not"):
        parallelize_experts(model, mesh)
    mesh = ParallelDims(dp_shard=world_size).build("cpu")
    for zero_stage in range(4):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
        model[0].weight.register_hook(torch.zeros_like).remove()
        if zero_stage == 0:
            model[0].weight.register_hook(torch.zeros_like)
        else:
            model[0].bias.register_post_accumulate_grad_hook(zero)
            with pytest.raises(ValueError, match=r"hooks .* got some of 0.bias, which would not"):
                apply_data_parallel(model, mesh, blocks=list(model), zero_stage=zero_stage)
            model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
        apply_data_parallel(model, mesh, blocks=list(model), zero_stage=zero_stage)
        if zero_stage > 0:
            model[0].weight.register_post_accumulate_grad_hook(zero)
        model(torch.full((2, WIDTH), rank + 1.0)).sum().backward()
        assert full(model[0].weight.grad).count_nonzero() == 0
        assert full(model[1].weight.grad).count_nonzero() > 0


def zero(parameter):
    parameter.grad.zero_()


def test_hooks_of_parameters_run_or_are_refused():
    run_ranks(masks_gradients, 2)


class Filter(nn.Module):
    """What is left of a signal where its spectrum is multiplied by a learned one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0, 1, WIDTH).to(torch.complex64))

    def forward(self, x):
        return torch.fft.ifft(torch.fft.fft(x) * self.weight).real


def filters(rank, world_size, zero_stage):
    """Gradients of a complex weight and of one in fp64: of replicas, and of parts of it."""
    mesh, found = ParallelDims(dp_shard=world_size).build("cpu"), []
    for one, dtype in zip(unusual(), (torch.float32, torch.float64), strict=True):
        model = nn.Sequential(one)
        how = {"zero_stage": zero_stage, "compute_dtype": dtype}
        apply_data_parallel(model, mesh, blocks=list(model), **how)
        model(signal(rank, dtype)).square().sum().backward()
        found.append(full(one.weight.grad))
    return found


def unusual():
    torch.manual_seed(0)
    return Filter(), nn.Linear(WIDTH, 2, bias=False, dtype=torch.float64)


def signal(rank, dtype):
    return torch.arange(WIDTH).add(rank).to(dtype).cos()


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_gradients_of_complex_and_fp64_weights_are_summed_as_such(zero_stage):
    grads = run_ranks(filters, 2, zero_stage)
    for place, (whole, dtype) in enumerate(
        zip(unusual(), (torch.float32, torch.float64), strict=True)
    ):
        sum(whole(signal(rank, dtype)).square().sum() for rank in range(2)).backward()
        rounding = 20 * torch.finfo(dtype).eps
        for found in grads:
            torch.testing.assert_close(
                found[place], whole.weight.grad, rtol=rounding, atol=rounding
            )


def refused_by_one(rank, world_size):
    """What each rank is told of arguments, and of a model, that one of them gives."""
    said = []
    mesh = ParallelDims(dp_shard=world_size).build("cpu")
    if rank == 0:  # which has a model of its own, too
        apply_data_parallel(build(), ParallelMesh(ParallelDims(), *[None] * 3), blocks=[])
    for wrong in ("blocks", "device"):
        model, mine = nn.Sequential(nn.Linear(WIDTH, WIDTH)), rank == 1
        if mine and wrong == "device":
            model.to("meta")
        blocks = [nn.Linear(1, 1)] if mine and wrong == "blocks" else list(model)
        with pytest.raises(ValueError, match="Expected") as refused:
            apply_data_parallel(model, mesh, blocks=blocks, zero_stage=0)
        said.append(str(refused.value))
    return said


def test_what_one_rank_refuses_all_refuse():
    for blocks, device in run_ranks(refused_by_one, 2, timeout_s=30.0):
        assert "blocks to be submodules of the model, got a Linear" in blocks
        assert "got the meta device's 0.weight" in device


def disagreeing(rank, world_size):
    """What each rank is told if one has another stage, and if one has a layer more."""
    said = []
    mesh = ParallelDims(dp_shard=world_size).build("cpu")
    for other in ("stage", "layer"):
        model, mine = build(), rank == 1
        if mine and other == "layer":
            model.append(nn.Linear(1, 1))
        stage = 3 if mine and other == "stage" else 0
        with pytest.raises(ValueError, match="Expected what apply_data_parallel is given") as told:
            apply_data_parallel(model, mesh, blocks=list(model), zero_stage=stage)
        said.append(str(told.value))
    return said


def test_ranks_that_disagree_all_say_so():
    first, second = run_ranks(disagreeing, 2, timeout_s=30.0)
    assert first == second
    assert "rank 0: zero_stage = 0\n  rank 1: zero_stage = 3" in first[0]
    assert "3.weight = ((1, 1), torch.float32, 'trains')" in first[1]


def test_one_process_is_left_alone():
    model = build()
    before = dict(model.named_parameters())
    apply_data_parallel(model, ParallelDims().build("cpu"), blocks=list(model))
    set_gradient_sync(model, False)
    assert type(model) is nn.Sequential
    assert all(p is before[name] for name, p in model.named_parameters())


def test_an_unknown_stage_is_named():
    with pytest.raises(ValueError, match="zero_stage 0, 1, 2 or 3, got 4"):
        apply_data_parallel(build(), ParallelDims().build("cpu"), blocks=[], zero_stage=4)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"blocks": nn.ModuleDict({"0": nn.Linear(1, 1)})}, "got '0' among them"),
        ({"blocks": None}, "blocks to be several modules, got one NoneType"),
        ({"keep_fp32": nn.Linear(1, 1)}, "keep_fp32 to be several modules, got one Linear"),
        ({"blocks": [nn.Linear(1, 1)]}, "blocks to be submodules of the model, got a Linear"),
        ({"compute_dtype": "bf16"}, "compute_dtype to be a floating-point dtype"),
        ({"mesh": ParallelDims()}, "a ParallelMesh, got ParallelDims"),
    ],
    ids=["blocks", "none", "keep", "foreign", "dtype", "mesh"],
)
def test_what_ranks_would_refuse_one_process_refuses(given, says):
    with pytest.raises(ValueError, match=says):
        apply_data_parallel(build(), **{"mesh": ParallelDims().build("cpu"), "blocks": [], **given})


def test_the_model_is_no_block_of_its_own():
    model = build()
    with pytest.raises(ValueError, match="blocks to be submodules of the model, got the model its"):
        apply_data_parallel(model, ParallelDims().build("cpu"), blocks=[model])


@pytest.mark.parametrize("given", ["blocks", "keep_fp32"])
def test_a_list_of_blocks_is_no_block(given):
    """Nobody calls it, so FSDP2 would never gather what it holds."""
    model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]))
    arguments = {"blocks": [], given: [model[0]]}
    with pytest.raises(ValueError, match=f"Expected {given} that are called, got a ModuleList"):
        apply_data_parallel(model, ParallelDims().build("cpu"), **arguments)


def test_several_modules_for_one_are_refused():
    parts, mesh = [build()], ParallelDims().build("cpu")
    calls = [
        lambda: apply_data_parallel(parts, mesh, blocks=[]),
        lambda: set_gradient_sync(parts, False),
        lambda: gather_rest(parts),
        lambda: set_micro_batch(parts, 0),
        lambda: parallelize_experts(parts, mesh),
        lambda: parallelize_tensors(parts, mesh, {}),
        lambda: rebalance_experts(parts, {}, mesh),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="Expected one module, got list"):
            call()


def past_forward(rank, world_size, compiled):
    """Gradients of what calls the modules one by one, before any forward pass of the model."""
    found = []
    for dims in ({}, {"dp_shard": world_size}):
        mesh = (
            ParallelDims(**dims).build("cpu") if dims else ParallelMesh(ParallelDims(), *[None] * 3)
        )
        model = build()
        apply_data_parallel(model, mesh, blocks=list(model)[:2], zero_stage=2)
        gather_rest(torch.compile(model, backend="eager") if compiled else model)
        x = tokens().chunk(world_size)[rank] if dims else tokens()
        for module in list(model):
            x = module(x)
        x.square().sum().backward()
        found.append([full(p.grad) for p in model.parameters()])
    return found


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_another_method_than_forward(compiled):
    for alone, spread in run_ranks(past_forward, 2, compiled):
        torch.testing.assert_close(spread, alone)


def mixed_dtypes(rank, world_size):
    """What is said of bf16 blocks with an fp32 norm; what trains where that is named.

    Other models are refused on the way.
    """
    half, mesh = torch.bfloat16, ParallelDims(dp_shard=world_size).build("cpu")
    whole, spread = build(), ParallelDims(dp_shard=world_size, ep=world_size).build("cpu")
    with pytest.raises(ValueError, match="spread over ep = 2, got whole ones"):
        apply_data_parallel(whole, spread, blocks=list(whole)[:2])
    frozen = build()
    for block in list(frozen)[:2]:
        block.moe.experts.requires_grad_(False)
    apply_data_parallel(frozen, spread, blocks=list(frozen)[:2])  # nobody trains these
    with pytest.raises(ValueError, match="know of tp = 2, got one that counts"):
        apply_data_parallel(whole, ParallelDims(tp=world_size).build("cpu"), blocks=[])
    early = build()
    hold_working_copies([early], half)
    with pytest.raises(ValueError, match="hold_working_copies after apply_data_parallel"):
        apply_data_parallel(early, mesh, blocks=list(early)[:2])
    tied = build()
    tied[2].weight = tied[0].dense.weight
    with pytest.raises(ValueError, match=r"got 0.dense.weight, which is 2.weight too"):
        apply_data_parallel(tied, mesh, blocks=list(tied)[:2])
    shared, *heads = (nn.Linear(WIDTH, 1) for _ in range(3))
    apply_data_parallel(nn.Sequential(shared, heads[0]), mesh, blocks=[])
    with pytest.raises(ValueError, match=r"got a DTensor over \[0, 1\].* for a module that holds"):
        apply_data_parallel(nn.Sequential(shared, heads[1]), mesh, blocks=[])
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    second.weight = first.weight
    apply_data_parallel(first, mesh, blocks=[])
    with pytest.raises(ValueError, match=r"no other model has, got weight, in whose place"):
        apply_data_parallel(second, mesh, blocks=[])
    fully_shard(early[1].norm)  # by hand: how its gradients are summed is the caller's
    set_gradient_sync(early[1].norm, False)
    model, other = (build().to(half) for _ in range(2))
    for block in (model[1], other[1]):
        block.norm.float()
    said = ""
    try:
        apply_data_parallel(model, mesh, blocks=list(model)[:2])
    except ValueError as error:
        said = str(error)
    apply_data_parallel(
        other, mesh, blocks=list(other)[:2], compute_dtype=half, keep_fp32=[other[1].norm]
    )
    with pytest.raises(ValueError, match="sharded yet, got FSDPSequential"):
        apply_data_parallel(other, mesh, blocks=list(other)[:2], compute_dtype=half)
    other[1].norm.register_forward_hook(lambda module, args, y: y.to(half))
    other[1].norm.register_forward_pre_hook(lambda module, args: args[0].float())
    other(torch.ones(3, WIDTH)).sum().backward()
    return said, {p.grad.dtype for p in other.parameters()}


def test_weights_of_two_dtypes_in_a_unit_are_refused_by_name():
    for said, grads in run_ranks(mixed_dtypes, 2):
        assert "torch.bfloat16 and torch.float32 in Block" in said
        assert "keep_fp32" in said
        assert grads == {torch.float32, torch.bfloat16}


def uncut(rank, world_size):
    """Gradients beside a scale of no axis and a weight of no number, in the stages that take it."""
    mesh, found = ParallelDims(dp_shard=world_size).build("cpu"), []
    for size, trains in (((), True), ((), False), ((0, WIDTH), True), ((0, WIDTH), False)):
        for zero_stage in (0, 1, 3):
            model = nn.Linear(WIDTH, 1)
            nn.init.ones_(model.weight)
            model.other = nn.Parameter(torch.ones(size), requires_grad=trains)
            taken = zero_stage == 0 or not (trains or size == ())
            says = f"zero_stage {zero_stage} can cut, got other of"
            with nullcontext() if taken else pytest.raises(ValueError, match=says):
                apply_data_parallel(model, mesh, blocks=[], zero_stage=zero_stage)
            if taken:
                model(torch.ones(1, WIDTH)).sum().backward()
                found.append(full(model.weight.grad))
    return found


def test_parameters_that_cannot_be_cut_are_refused_at_the_start():
    for grads in run_ranks(uncut, 2):
        assert len(grads) == 6
        assert all(bool((grad == 2).all()) for grad in grads)


def half_precision_experts(rank, world_size, ep):
    """Two steps of experts in bf16 on one copy of them (ep = world) or two: weights at the end."""
    model, mesh = build(), ParallelDims(dp_shard=world_size, ep=ep).build("cpu")
    parallelize_experts(model, mesh, dispatcher="all_to_all")
    blocks, half = list(model)[:2], torch.bfloat16
    apply_data_parallel(model, mesh, blocks=blocks, compute_dtype=half, zero_stage=1)
    experts = [block.moe.experts for block in blocks]
    assert [isinstance(e, FSDPModule) for e in experts] == [ep == 1] * 2
    copies = hold_working_copies([model], half)
    assert len(copies) == (0 if ep == 1 else 4)
    optimizer = AdamW(model.parameters(), lr=0.03, eps=1e-2, working_copies=copies)
    for _ in range(2):
        for m in range(2):
            set_gradient_sync(model, m == 1)
            model(tokens().chunk(world_size)[rank] * (m + 1)).square().mean().backward()
        norm = clip_and_step(optimizer, max_norm=0.5, mesh=mesh).grad_norm
        optimizer.zero_grad()
    return norm, {n: full(p.detach()) for n, p in model.named_parameters()}


def test_experts_with_one_copy_need_no_sharding():
    (norm, alone), _ = run_ranks(half_precision_experts, 2, 2)
    (expected_norm, expected), _ = run_ranks(half_precision_experts, 2, 1)
    torch.testing.assert_close(norm, expected_norm, rtol=2e-2, atol=0)
    for name, value in expected.items():
        assert (alone[name] - value).norm() < 2e-2 * value.norm(), name


def expert_grads(rank, world_size, layouts):
    """Gradients of experts whose tokens come in parts from tensor-parallel ranks, one loss."""
    results = []
    for sizes in layouts:
        model, mesh = build(), ParallelDims(**sizes).build("cpu")
        experts = model[0].moe.experts  # in another order in memory, as transposed weights come
        experts.w1 = nn.Parameter(experts.w1.detach().mT.contiguous().mT)
        parallelize_experts(model, mesh, dispatcher="all_to_all", sequence_parallel=True)
        apply_data_parallel(model, mesh, blocks=list(model)[:2], zero_stage=2)
        part = mesh.dp_rank * mesh.tp_size + mesh.tp_rank
        x = tokens().chunk(mesh.dp_size * mesh.tp_size)[part]
        ((model(x) - 1).square().sum() / len(tokens())).backward()
        results.append({n: full(p.grad) for n, p in model.named_parameters() if "experts" in n})
    return results


def tokens():
    return torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(8))


def test_experts_add_up_what_tensor_parallel_ranks_bring():
    model = build()
    ((model(tokens()) - 1).square().sum() / len(tokens())).backward()
    expected = {n: p.grad for n, p in model.named_parameters() if "experts" in n}
    layouts = {
        2: [{"tp": 2}, {"tp": 2, "ep": 2}],
        4: [{"dp_shard": 2, "tp": 2}, {"dp_shard": 2, "tp": 2, "ep": 2},
            {"dp_replicate": 2, "tp": 2, "ep": 4}],
    }  # fmt: skip
    for ranks, some in layouts.items():
        for results in run_ranks(expert_grads, ranks, some):
            for got in results:
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def save_state(rank, world_size, folder, name):
    model, mesh = build(), ParallelDims(dp_shard=world_size, ep=2).build("cpu")
    parallelize_experts(model, mesh)
    apply_data_parallel(model, mesh, blocks=list(model)[:2])
    optimizer = OPTIMIZERS[name](model)
    for _ in range(2):
        model(tokens().chunk(world_size)[rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)
    return {f"{n}.{k}": full(v) for n, p in model.named_parameters()
            for k, v in optimizer.state[p].items()}  # fmt: skip


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_state_of_four_ranks_loads_on_one(name, tmp_path):
    saved = run_ranks(save_state, 4, str(tmp_path), name)[0]
    model = build()
    optimizer = OPTIMIZERS[name](model)
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=str(tmp_path), no_dist=True)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    loaded = {f"{n}.{k}": v for n, p in model.named_parameters()
              for k, v in optimizer.state[p].items()}  # fmt: skip
    assert loaded.keys() == saved.keys()
    for key, value in saved.items():
        assert torch.equal(loaded[key], value), key
