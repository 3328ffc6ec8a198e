"""One norm over every way a parameter can lie on ranks, against that of the whole gradients."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from mb_parallel import ParallelDims, ParallelMesh, apply_data_parallel
from mb_parallel.optimizer import (
    Adafactor,
    AdamW,
    GradScaler,
    Muon,
    clip_and_step,
    clip_grad_norm,
    grad_norm,
    zeros_in_grad,
)
from mb_parallel.shards import local, local_grad
from mb_parallel.testing import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

SHAPES = {"plain": (5,), "replicate": (6, 3), "partial": (7,), "shard": (5, 6), "col": (6, 5),
          "two": (7, 6), "mixed": (4, 5), "expert": (4, 3, 2), "expert_two": (4, 6, 3)}  # fmt: skip


def whole(stage):
    """Weights and gradients of a stage by name."""
    generator = torch.Generator().manual_seed(30 + stage)
    return {n: torch.randn(2, *s, generator=generator).unbind(0) for n, s in SHAPES.items()}


def laid_out(mesh):
    """The parameters of this rank's stage over its meshes, gradients set."""
    dense, expert = mesh.dense, mesh.expert
    tp, both = dense["tp"], dense["dp_shard", "tp"]
    layouts = {
        "replicate": (tp, [Replicate()]),
        "partial": (tp, [Replicate()]),
        "shard": (tp, [Shard(0)]),
        "col": (dense["dp_shard"], [Shard(1)]),
        "two": (both, [Shard(0), Shard(1)]),
        "mixed": (both, [Shard(0), Replicate()]),
        "expert": (expert["ep"], [Shard(0)]),
        "expert_two": (expert["edp_shard", "ep"], [Shard(1), Shard(0)]),
    }
    parameters = {}
    for name, (weight, grad) in whole(mesh.pp_rank).items():
        if name == "plain":
            parameters[name] = nn.Parameter(weight.clone())
            parameters[name].grad = grad.clone()
            continue
        parameters[name] = nn.Parameter(distribute_tensor(weight, *layouts[name]))
        parameters[name].grad = distribute_tensor(grad, *layouts[name])
    # As autograd leaves it under sequence parallelism: the sum over tp still to be taken.
    size = tp.size()
    share = whole(mesh.pp_rank)["partial"][1] / size
    parameters["partial"].grad = DTensor.from_local(share, tp, [Partial()], run_check=False)
    return parameters


@pytest.mark.parametrize("turned", ["weight", "gradient"])
def test_a_gradient_gets_the_strides_of_its_weight(turned):
    grad = torch.arange(12.0).view(3, 4)
    by_column = grad.mT.contiguous().mT
    weight = nn.Parameter((by_column if turned == "weight" else grad).clone())
    weight.grad = grad if turned == "weight" else by_column
    shard = local_grad(weight)
    assert shard.stride() == weight.stride()
    assert torch.equal(shard, grad)
    assert weight.grad is shard  # what is written into it is written into the gradient


def norms(rank, world_size, layouts):
    mesh = ParallelDims(tp=world_size).build("cpu").axis("tp")
    under_way = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False).redistribute(
        placements=[Replicate()], async_op=True
    )
    # A kernel, which reads an address, would not wait for the sum.
    assert type(local(under_way)) is torch.Tensor
    results = []
    for sizes in layouts:
        mesh = ParallelDims(**sizes).build("cpu")
        parameters = laid_out(mesh)
        all_, some = list(parameters.values()), [parameters["plain"]]
        tied = some if mesh.pp_rank else []
        found = [grad_norm(all_, mesh), grad_norm(all_, mesh, uncounted=tied)]
        clip_grad_norm(all_, 0.25, mesh)
        found.append(grad_norm(all_, mesh))
        del parameters["two"].grad  # never used: counts as nothing, and nobody waits for it
        found.append(grad_norm(all_, mesh))
        parameters = laid_out(mesh)
        for name, parameter in parameters.items():
            if name != "partial":  # zero only once it has been summed
                local(parameter.grad).clamp_(min=0)
        tied = [parameters["plain"]] if mesh.pp_rank else []
        found.append(zeros_in_grad(parameters.values(), mesh, uncounted=tied))
        results.append([float(value) for value in found])
    return results


LAYOUTS = [
    {"dp_shard": 2, "tp": 2, "ep": 2},
    {"dp_shard": 2, "tp": 2, "ep": 4},
    {"dp_replicate": 2, "tp": 2, "ep": 2},
    {"pp": 2, "tp": 2, "ep": 2},
    {"pp": 2, "dp_shard": 2, "ep": 1},
    {"pp": 4},
]


def test_norm_and_zeros_count_everything_once():
    results = run_ranks(norms, 4, LAYOUTS)
    for place, sizes in enumerate(LAYOUTS):
        stages = [whole(stage) for stage in range(sizes.get("pp", 1))]
        squares = [{n: float(g.square().sum()) for n, (_, g) in stage.items()} for stage in stages]
        total = sum(sum(stage.values()) for stage in squares)
        tied = sum(stage["plain"] for stage in squares[1:])
        without = sum(stage["two"] for stage in squares)
        zeros = sum(
            int((g <= 0).sum())
            for place, stage in enumerate(stages)
            for n, (_, g) in stage.items()
            if n != "partial" and not (n == "plain" and place)
        )
        expected = [total**0.5, (total - tied) ** 0.5, 0.25, 0.25 * (1 - without / total) ** 0.5]
        expected.append(zeros)
        for got in results:
            assert got[place] == results[0][place]  # bit for bit
            assert got[place] == pytest.approx(expected, rel=1e-5), sizes


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def skips(rank, world_size):
    """A NaN on one rank, in one shard or in one copy of what should be equal on all."""
    mesh = ParallelDims(dp_shard=2, tp=2, ep=2).build("cpu")
    results = []
    for name in ("expert_two", "plain"):
        for make in (AdamW, Adafactor, muon):
            parameters = laid_out(mesh)
            before = {n: full(p).clone() for n, p in parameters.items()}
            optimizer = make(list(parameters.values()))
            if rank == 3:
                grad = parameters[name].grad
                (grad.to_local() if isinstance(grad, DTensor) else grad).view(-1)[0] = torch.nan
            bad = clip_and_step(optimizer, max_norm=1.0, mesh=mesh)
            still = all(torch.equal(full(p), before[n]) for n, p in parameters.items())
            again = laid_out(mesh)
            for n, p in parameters.items():
                p.grad = again[n].grad
            good = clip_and_step(optimizer, max_norm=1.0, mesh=mesh)
            finite = all(bool(full(p).isfinite().all()) for p in parameters.values())
            moved = not torch.equal(full(parameters["shard"]), before["shard"])
            results.append((float(bad.skipped), float(good.skipped), still, finite, moved))
    return results


def muon(parameters):
    matrices = [p for p in parameters if p.ndim > 1]
    rest = [p for p in parameters if p.ndim == 1]
    return Muon([{"params": matrices, "muon": True}, {"params": rest}])


def test_nan_on_one_rank_skips_the_step_on_all():
    for results in run_ranks(skips, 4):
        assert results == [(1.0, 0.0, True, True, True)] * 6


def test_a_rank_without_parameters_sums_where_the_others_do():
    """On its host the sum would wait for theirs, which are on devices."""
    mesh = ParallelMesh(ParallelDims(dp_shard=2), SimpleNamespace(device_type="meta"), None, None)
    assert zeros_in_grad([], mesh).device.type == "meta"


def on_a_second_mesh(rank, world_size):
    """torch gives parameters of shapes that it has seen on an equal mesh the groups of that one."""

    def spread(mesh, rows):
        model = nn.Sequential(*(nn.Linear(4, n, bias=False) for n in rows))
        for module in model:
            weight = distribute_tensor(
                torch.ones(module.weight.shape), mesh.dense["tp"], [Shard(0)]
            )
            module.weight = nn.Parameter(weight)
        apply_data_parallel(model, mesh, blocks=list(model))
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        return grad_norm(model.parameters(), mesh)

    # Two stages that differ: what their ranks have seen of the shapes of the second differs too.
    pipeline = ParallelDims(pp=2, tp=2).build("cpu")
    spread(pipeline, (6, 10) if pipeline.pp_rank else (6,))
    return float(spread(ParallelDims(dp_shard=2, tp=2).build("cpu"), (6, 10)))


def test_a_second_mesh_of_the_same_ranks():
    assert run_ranks(on_a_second_mesh, 4, timeout_s=60.0) == pytest.approx([8.0] * 4)


def _other_settings(rank, world_size):
    """What a first step says on this rank, of one setting after the other that rank 2 has alone."""
    mesh = ParallelDims(dp_shard=2, tp=2).build("cpu")
    mine = rank == 2
    weight, other = (torch.nn.Parameter(torch.ones(size)) for size in (3, 2))
    said = []
    for rates, norm, scale, more in (
        ({"lr": 0.2 if mine else 0.1}, 1.0, 8.0, []),
        ({"betas": (torch.tensor(0.9), 0.98 if mine else 0.99)}, 1.0, 8.0, []),
        ({}, 2.0 if mine else 1.0, 8.0, []),
        ({}, 1.0, 16.0 if mine else 8.0, []),
        ({}, 1.0, 8.0, [] if mine else [other]),
        ({}, 1.0, 8.0, []),
    ):
        optimizer = AdamW([weight, *more], **rates)
        weight.grad = torch.ones(3)
        how = {"max_norm": norm, "mesh": mesh, "scaler": GradScaler(scale)}
        try:
            clip_and_step(optimizer, **how)
        except ValueError as error:
            said.append(str(error))
    assert weight.ne(1.0).all()  # of the last
    with mock.patch.object(dist, "all_gather_object", None):  # compared once
        clip_and_step(optimizer, **how)
    return said


def test_ranks_that_step_otherwise_are_told():
    first, *others = run_ranks(_other_settings, 4)
    assert others == [first] * 3
    lr, betas, norm, scale, parameters = first
    assert "rank 0: optimizers[0].defaults.lr = 0.1, optimizers[0].param_groups[0].lr = 0.1" in lr
    assert "rank 2: optimizers[0].defaults.lr = 0.2, " in lr
    assert "rank 3: optimizers[0].defaults.lr = 0.1, " in lr
    assert "param_groups[0].betas = [0.8999999761581421, 0.98]" in betas
    assert "rank 1: max_norm = 1.0\n  rank 2: max_norm = 2.0\n" in norm
    assert "rank 2: scaler.state = [16.0, 0.0, 2.0]\n" in scale
    assert "rank 1: optimizers[0].param_groups[0].params = '2 tensors, 5 numbers'" in parameters
    assert "rank 2: optimizers[0].param_groups[0].params = '1 tensors, 3 numbers'" in parameters
