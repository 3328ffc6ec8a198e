"""Experts with other numbers are the same model: losses of the steps before and after are equal."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from mb_layers import add_lora
from mb_layers.config import MoEConfig
from mb_layers.experts import Experts
from mb_layers.moe import MoE, dMoE
from mb_parallel import (
    ParallelDims,
    apply_data_parallel,
    parallelize_experts,
    rebalance_experts,
    set_gradient_sync,
)
from mb_parallel.expert_parallel import balanced_order, fullest_rank
from mb_parallel.optimizer import (
    Adafactor,
    AdamW,
    Muon,
    hold_working_copies,
    local,
    muon_groups,
)
from mb_parallel.testing import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor

HIDDEN, EXPERTS, TOKENS, STEPS = 8, 8, 24, 5
CONFIG: dict[str, Any] = {
    "hidden_size": HIDDEN, "ffn_hidden_size": 16, "num_experts": EXPERTS, "top_k": 2,
    "init_method_std": 0.4, "router_bias": True, "mlp_bias": True, "balancing_bias": True,
}  # fmt: skip


class Model(nn.Module):
    def __init__(self, **overrides: Any) -> None:
        super().__init__()
        torch.manual_seed(5)
        config = MoEConfig(**(CONFIG | overrides))
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        kind = dMoE if config.capacity_factor is None else MoE
        self.moes = nn.ModuleList(kind(config) for _ in range(2))
        for moe in self.moes:
            nn.init.normal_(moe.router.weight, std=1.0)
            moe.router.bias.data[:EXPERTS].copy_(torch.tensor([3.0, 2.0, 2.0, 1.0, 0, 0, 0, -1]))
            moe.router.balancing_bias[:EXPERTS].copy_(torch.linspace(0.1, 0, EXPERTS))

    def forward(self, x):
        aux, counts = 0.0, {}
        for i, (norm, moe) in enumerate(zip(self.norms, self.moes, strict=True)):
            out = moe(norm(x))
            x, aux = x + out.y, aux + out.aux_loss
            counts[f"moes.{i}"] = out.metrics["tokens_per_expert"]
        return x, aux, counts


def _adamw(model, copies):
    return AdamW(model.parameters(), lr=1e-2, working_copies=copies)


def _two(model, copies):
    own = [p for m in model.modules() if isinstance(m, Experts) for p in m.parameters()]
    rest = [p for p in model.parameters() if p not in set(own)]
    return [torch.optim.SGD(own, lr=1e-2, momentum=0.9), AdamW(rest, lr=1e-2)]


OPTIMIZERS = {
    "two": _two,
    "adamw": _adamw,
    "muon": lambda model, copies: Muon(muon_groups(model, 0.1), lr=1e-2, working_copies=copies),
    "adafactor": lambda model, copies: Adafactor(model.parameters(), lr=1e-2),
    "momentum": lambda model, copies: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
}


def _losses(mesh, optimizer_name, options, *, rebalance):
    """Losses of a few steps, and what was rebalanced between them."""
    overrides = dict(options)
    stage = overrides.pop("zero_stage", None)
    dtype = overrides.pop("dtype", torch.float32)
    lora, copies = overrides.pop("lora", False), overrides.pop("copies", None)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = Model(**overrides).to(dtype)
    for moe in model.moes if lora else ():
        add_lora(moe.experts, rank=2, alpha=4.0)
        for name, parameter in moe.experts.named_parameters():
            if name.endswith(".b"):  # these factors begin at 0
                nn.init.normal_(parameter, std=0.3)
    parallelize_experts(model, mesh)
    if stage is not None:
        routers = [moe.router for moe in model.moes]
        apply_data_parallel(model, mesh, blocks=model.moes, keep_fp32=routers, zero_stage=stage)
    held = None if copies is None else hold_working_copies([model], copies)
    optimizer = OPTIMIZERS[optimizer_name](model, held)
    generator = torch.Generator().manual_seed(3)
    losses, moved = [], []
    for step in range(STEPS):
        x = torch.randn(TOKENS, HIDDEN, generator=generator).chunk(world_size)[rank].to(dtype)
        y, aux, counts = model(x)
        loss = ((y - x.roll(1, -1)).float() ** 2).sum() / TOKENS + 0.1 * aux / world_size
        loss.backward()
        if stage is None:
            own = {id(p) for m in model.modules() if isinstance(m, Experts) for p in m.parameters()}
            for p in model.parameters():
                if p.grad is not None and id(p) not in own:
                    dist.all_reduce(p.grad)
        if rebalance and step == 1:  # gradients go along
            moved += rebalance_experts(model, counts, mesh, optimizer=optimizer)
        for one in optimizer if isinstance(optimizer, list) else [optimizer]:
            one.step()
            one.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
        if rebalance and step == 3:
            with torch.no_grad():
                model(x)  # an evaluation, which leaves weights gathered
            moved += rebalance_experts(model, counts, mesh, optimizer=optimizer)
            for parameter, copy in (held or {}).items():
                assert torch.equal(copy, local(parameter).to(copy.dtype))
    return losses, moved


def _all_losses(rank, world_size, cases):
    found = []
    for dims, options, optimizer in cases:
        mesh = ParallelDims(**dims).build("cpu")
        found.append(
            [_losses(mesh, optimizer, options, rebalance=rebalance) for rebalance in (False, True)]
        )
    return found


EP2 = {"dp_shard": 2, "ep": 2}
EP2_OF_4 = {"dp_shard": 4, "ep": 2}
# Ranks, cases of dims, options and optimizer.
CASES = [
    pytest.param(
        2,
        [
            (EP2, {}, "adamw"),
            (EP2, {"num_zero_experts": 2, "top_k": 3}, "momentum"),
            (EP2, {"copies": torch.bfloat16}, "adamw"),
            (EP2, {"dtype": torch.bfloat16}, "adamw"),
            (EP2, {"lora": True}, "adamw"),
            (EP2, {}, "two"),
            (EP2, {"capacity_factor": 1.0}, "adafactor"),
            (EP2, {"activation": "swiglu"}, "muon"),
        ],
        id="2",
    ),
    pytest.param(
        4,
        [
            (EP2_OF_4, {"zero_stage": 2}, "muon"),
            ({"dp_replicate": 2, "dp_shard": 2, "ep": 2}, {"zero_stage": 3}, "momentum"),
        ],
        id="4",
    ),
    pytest.param(
        4,
        [
            ({"dp_shard": 4, "ep": 4}, {}, "momentum"),
            (EP2_OF_4, {"zero_stage": 1}, "adafactor"),
            (EP2_OF_4, {"zero_stage": 3}, "adamw"),
        ],
        id="4, further",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("ranks", "cases"), CASES)
def test_the_same_losses(ranks, cases):
    found = run_ranks(_all_losses, ranks, cases)
    for case, (_, options, _) in enumerate(cases):
        plain, (losses, moved) = found[0][case]
        assert [r.layer for r in moved][:2] == ["moes.0", "moes.1"]
        assert all(of_rank[case][1][1] == moved for of_rank in found)
        assert all(r.after <= 0.98 * r.before for r in moved)
        coarse = "dtype" in options or "copies" in options
        torch.testing.assert_close(
            torch.tensor(losses), torch.tensor(plain[0]), rtol=5e-3 if coarse else 1e-5, atol=0,
            msg=lambda said, options=options: f"{options}: {said}",
        )  # fmt: skip


def _left_alone(rank, world_size):
    mesh = ParallelDims(dp_shard=2, ep=2).build("cpu")
    counts_E = torch.tensor([9.0, 9, 9, 9, 1, 1, 1, 1])
    untouched = []
    for options in (
        {"num_expert_groups": 2, "top_k_groups": 1},
        {"uniform_assignment": True},
        {},
    ):
        model = Model(**options)
        if not options:
            model.moes[1].experts = model.moes[0].experts
        parallelize_experts(model, mesh)
        names = {f"moes.{i}": counts_E for i in range(2)}
        untouched.append(rebalance_experts(model, names, mesh) == [])
    model = Model()
    parallelize_experts(model, mesh)
    even = {"moes.0": torch.ones(EXPERTS)}
    untouched.append(rebalance_experts(model, even, mesh) == [])
    with pytest.raises(ValueError, match=r"got .moes\.7. with 8 counts"):
        rebalance_experts(model, {"moes.7": counts_E}, mesh)
    with pytest.raises(ValueError, match=r"got .moes\.1. with 4 counts"):
        rebalance_experts(model, {"moes.1": counts_E[:4]}, mesh)
    with pytest.raises(ValueError, match=r"a tensor of a count .* got .moes\.1. with list"):
        rebalance_experts(model, {"moes.1": counts_E.tolist()}, mesh)
    with pytest.raises(ValueError, match="optimizer to be one or several, got ParameterList"):
        rebalance_experts(model, {}, mesh, optimizer=[nn.ParameterList()])
    return untouched


def _differing(rank, world_size):
    mesh = ParallelDims(dp_shard=2, ep=2).build("cpu")
    model = Model()
    parallelize_experts(model, mesh)
    counts = {f"moes.{i}": torch.arange(1.0, 9.0) for i in range(2)}
    told = []
    for names, options in (
        (("moes.0", "moes.1")[: rank + 1], {}),
        (counts, {"least_gain": 0.1 * rank}),
        (counts, {"optimizer": AdamW(model.parameters()) if rank else None}),
    ):
        with pytest.raises(ValueError, match="what rebalance_experts is given to be equal") as got:
            rebalance_experts(model, {name: counts[name] for name in names}, mesh, **options)
        told.append(str(got.value))
    return told


def test_arguments_that_differ_between_ranks_are_named():
    for names, gains, optimizers in run_ranks(_differing, 2, timeout_s=30.0):
        assert "rank 0: tokens_per_expert of = ['moes.0']\n" in names
        assert "rank 1: least_gain = 0.1\n" in gains
        assert "rank 1: optimizers = ['AdamW']\n" in optimizers


def _an_average(rank, world_size):
    """Weights that were kept aside, and those after, put in the order that is returned."""
    mesh = ParallelDims(dp_shard=2, ep=2).build("cpu")
    model = Model()
    parallelize_experts(model, mesh)
    w1, name = model.moes[1].experts.w1, "moes.1"
    before = w1.full_tensor().clone()
    (moved,) = rebalance_experts(model, {name: torch.arange(8.0, 0.0, -1.0) ** 2}, mesh)
    assert not torch.equal(w1.full_tensor(), before)
    return moved.layer == name and torch.equal(w1.full_tensor(), before[list(moved.order)])


def test_the_new_order_is_told():
    assert run_ranks(_an_average, 2, timeout_s=30.0) == [True, True]


def _amid_a_step(rank, world_size, zero_stage):
    mesh = ParallelDims(dp_shard=2, ep=2).build("cpu")
    model = Model()
    parallelize_experts(model, mesh)
    apply_data_parallel(model, mesh, blocks=model.moes, zero_stage=zero_stage)
    counts = {"moes.1": torch.arange(8.0, 0.0, -1.0) ** 2}
    x = torch.randn(TOKENS, HIDDEN)
    set_gradient_sync(model, False)
    model(x)[0].sum().backward()
    with pytest.raises(ValueError, match="got some of micro-batches before the last"):
        rebalance_experts(model, counts, mesh)
    set_gradient_sync(model, True)
    model(x)[0].sum().backward()
    before = {name: _whole(p.grad) for name, p in model.moes[1].named_parameters()}
    (moved,) = rebalance_experts(model, counts, mesh)
    after = {name: _whole(p.grad) for name, p in model.moes[1].named_parameters()}
    return all(torch.equal(after[name], grad[list(moved.order)]) for name, grad in before.items())


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_gradients_are_put_in_order_when_they_are_sums_and_not_before(zero_stage):
    assert run_ranks(_amid_a_step, 2, zero_stage, timeout_s=60.0) == [True, True]


def _wrong_on_one(rank, world_size):
    mesh = ParallelDims(dp_shard=2, tp=2, ep=2).build("cpu")
    model = Model()
    parallelize_experts(model, mesh, sequence_parallel=True)
    counts = {"moes.0": torch.arange(1.0, 9.0)}
    told = []
    for wrong_counts, options in (
        (counts, {"least_gain": 0.1}),
        ({"moes.0": torch.ones(7)}, {}),
        (counts, {"optimizer": "adamw"}),
    ):
        given = (wrong_counts, options) if rank == 1 else (counts, {})
        with pytest.raises(ValueError, match="Expected") as got:
            rebalance_experts(model, given[0], mesh, **given[1])
        told.append(str(got.value))
    layer = Model(top_k=1 + (rank == 1))
    with pytest.raises(ValueError, match=r"rank 1: moes\.0\.top_k = 2"):
        parallelize_experts(layer, mesh, sequence_parallel=True)
    with pytest.raises(ValueError, match="chunks to be an integer >= 1, got 0"):
        parallelize_experts(Model(), mesh, chunks=int(rank != 1))
    with pytest.raises(ValueError, match="ParallelDims to be equal on all 4 ranks"):
        ParallelDims(dp_shard=4 + (rank == 1)).build("cpu")
    stages, stage = ParallelDims(pp=2, dp_shard=2, ep=2).build("cpu"), Model()
    parallelize_experts(stage, stages)
    mine = f"moes.{stages.pp_rank}"  # stages have layers of their own
    (moved,) = rebalance_experts(stage, {mine: torch.arange(8.0)}, stages)
    assert moved.layer == mine
    return told


def test_what_one_rank_refuses_all_refuse():
    """Also ranks that share neither dp nor tp with it, which would wait for those that do."""
    for gains, counts, optimizers in run_ranks(_wrong_on_one, 4, timeout_s=30.0):
        assert "rank 1: least_gain = 0.1\n" in gains
        assert "'moes.0' with 7 counts" in counts
        assert "got str" in optimizers


def test_where_numbers_mean_something_or_nothing_is_gained():
    assert run_ranks(_left_alone, 2) == [[True] * 4] * 2


def test_one_rank_has_nothing_to_even_out():
    mesh = ParallelDims().build("cpu")
    assert rebalance_experts(Model(), {"moes.0": torch.arange(8.0)}, mesh) == []


@pytest.mark.parametrize(("experts", "ranks"), [(8, 2), (12, 3), (64, 8), (4, 4), (6, 1)])
def test_the_order_shares_loads_out(experts, ranks):
    generator = torch.Generator().manual_seed(experts)
    for _ in range(20):
        loads_E = torch.rand(experts, generator=generator) ** 4
        order_E = balanced_order(loads_E, ranks)
        assert sorted(order_E.tolist()) == list(range(experts))
        placed = fullest_rank(loads_E[order_E], ranks)
        assert placed <= fullest_rank(loads_E, ranks) + 1e-6
        # Graham's bound: nobody is more than one expert above an even share.
        assert placed * loads_E.sum() / ranks <= loads_E.sum() / ranks + loads_E.max()
    assert fullest_rank(torch.zeros(experts), ranks) == 1.0
    with pytest.raises(ValueError, match="ranks to be an integer >= 1, got 0"):
        balanced_order(loads_E, 0)
    with pytest.raises(ValueError, match="Expected ranks to divide the 5 experts, got 2"):
        fullest_rank(torch.ones(5), 2)
