"""A checkpoint of any layout loads into any other: stages, tensor, expert and data parallel shards.

The model has what the real ones have: layers that live on one pipeline stage, a weight that two
stages share, matrices split over tensor parallel ranks and then by FSDP, experts on a mesh of their
own, and vectors that all ranks hold.
"""

from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from mb_parallel.optimizer import SGD, Adafactor, AdamW, Muon, decay_groups, muon_groups
from mb_parallel.testing import run_ranks
from mb_train.checkpoint import writer
from mb_train.checkpoint.errors import CheckpointError
from mb_train.checkpoint.read import Progress, load_checkpoint
from mb_train.checkpoint.saver import Saver
from mb_train.folder.run_folder import find_checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

LAYERS = 3


@dataclass(frozen=True)
class Layout:
    pp: int = 1
    tp: int = 1
    ep: int = 1


LAYOUTS = {
    1: [Layout()],
    2: [Layout(), Layout(pp=2), Layout(tp=2), Layout(ep=2)],
    4: [Layout(), Layout(pp=2), Layout(tp=2, ep=2), Layout(pp=2, tp=2), Layout(ep=4), Layout(tp=4)],
}


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(4, 6, 5))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(6, 9)  # 9 rows: no even shards
        self.experts = Experts()
        self.norm = nn.LayerNorm(5)


class Model(nn.Module):
    def __init__(self, layers, *, shared):
        super().__init__()
        self.tokens = nn.Embedding(7, 4) if shared else None
        self.layers = nn.ModuleDict({str(number): Layer() for number in layers})


def fill(model):
    """Every weight by its name alone, whatever part of the model is here."""
    for name, parameter in model.named_parameters():
        seed = sum(ord(letter) * (place + 1) for place, letter in enumerate(name))
        with torch.no_grad():
            parameter.copy_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            )


def build(layout, rank, world, *, layers=LAYERS):
    stage = rank // (world // layout.pp)
    mine = range(layers)[stage * layers // layout.pp : (stage + 1) * layers // layout.pp]
    model = Model(mine, shared=stage in (0, layout.pp - 1))
    fill(model)
    if world == 1:
        return model
    dp = world // (layout.pp * layout.tp)
    edp = dp * layout.tp // layout.ep
    dense = init_device_mesh("cpu", (layout.pp, dp, layout.tp), mesh_dim_names=("pp", "dp", "tp"))
    expert = init_device_mesh(
        "cpu", (layout.pp, edp, layout.ep), mesh_dim_names=("pp", "edp", "ep")
    )
    for layer in model.layers.values():
        if layout.tp > 1:
            parallelize_module(layer.dense, dense["tp"], ColwiseParallel())
        if layout.ep > 1:
            w1 = distribute_tensor(layer.experts.w1.data, expert["ep"], [Shard(0)])
            layer.experts.w1 = nn.Parameter(w1)
        if edp > 1 and layout.ep != 2:  # with ep = 2 the replicas hold the same
            fully_shard(layer.experts, mesh=expert["edp"])
        if dp > 1:
            fully_shard(layer.dense, mesh=dense["dp"])
    return model


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_state(model):
    """An optimizer whose state is a function of each weight."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = [local(p).detach().clone() for p in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), before, strict=True):
            local(parameter).copy_(value)
            state = optimizer.state[parameter]
            local(state["exp_avg"]).copy_(2 * value + 1)
            local(state["exp_avg_sq"]).copy_(value.square())
            state["step"].fill_(17.0)
    return optimizer


def save(folder, layout, rank, world, *, asynchronous):
    model = build(layout, rank, world)
    saver = Saver(folder, asynchronous=asynchronous)
    saver.save(
        model, with_state(model), Progress(1, 1), config={}, identity={}, data={}
    )  # fmt: skip
    saver.wait()
    saver.close()
    assert saver.latest == 1


def check(folder, layout, rank, world):
    model = build(layout, rank, world)
    expected = [local(p).detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            local(parameter).zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    load_checkpoint(find_checkpoint(folder), model, optimizer)
    for parameter, value in zip(model.parameters(), expected, strict=True):
        state = optimizer.state[parameter]
        assert torch.equal(local(parameter), value)
        assert torch.equal(local(state["exp_avg"]), 2 * value + 1)
        assert torch.equal(local(state["exp_avg_sq"]), value.square())
        assert float(state["step"]) == 17.0


def _ranks(rank, world, folder):
    """Save in every layout of this world; load in each what two others have saved."""
    for number, layout in enumerate(LAYOUTS[world]):
        save(folder / f"{world}-{number}", layout, rank, world, asynchronous=number % 2 == 1)
    saved = sorted(folder.glob("*-*"))
    for number, layout in enumerate(LAYOUTS[world]):
        for one in (2 * number, 2 * number + 5):
            check(saved[one % len(saved)], layout, rank, world)


def test_any_layout_loads_any_other(tmp_path):
    for world in (1, 2, 4):
        if world == 1:
            _ranks(0, 1, tmp_path)
        else:
            run_ranks(_ranks, world, tmp_path)
    for saved in tmp_path.glob("*-*"):
        check(saved, Layout(), 0, 1)


def _missing(rank, world, folder):
    """Two stages of a model with a layer more, and of one with a layer less."""
    said = []
    for layers in (LAYERS + 1, LAYERS - 1):
        model = build(Layout(pp=2), rank, world, layers=layers)
        try:
            load_checkpoint(find_checkpoint(folder), model, None)
        except CheckpointError as error:
            said.append(str(error))
    return said


def test_names_are_accounted_for_over_all_stages(tmp_path):
    save(tmp_path, Layout(), 0, 1, asynchronous=False)
    first, second = run_ranks(_missing, 2, tmp_path)
    assert first == second
    assert "5 tensors are missing (model.layers.3.dense.bias" in first[0]
    assert "5 do not belong (model.layers.2.dense.bias" in first[1]


def timeout_of_the_writers(rank, world_size, folder):
    cpu = torch.device("cpu")
    dist.group.WORLD._get_backend(cpu)._set_default_timeout(timedelta(seconds=41))
    saver = Saver(folder, asynchronous=True)
    saver.close()
    return saver._group._get_backend(cpu).options._timeout.total_seconds()


def test_writing_threads_wait_for_each_other_as_long_as_the_world(tmp_path):
    """They waited half an hour for a rank that stood still, whatever the run's flag said."""
    assert run_ranks(timeout_of_the_writers, 2, tmp_path) == [41.0] * 2


def error_of_the_writers(rank, world_size, folder):
    def fail(*_):
        raise RuntimeError("of this rank alone")

    if rank == 0:
        writer.Writer = fail
    saver = Saver(folder, asynchronous=True)
    model = build(Layout(), rank, world_size)
    saver.save(model, None, Progress(1, 1), config={}, identity={}, data={})
    _, writing = saver._pending
    error = writing.exception(timeout=30)
    saver.close()
    return f"{type(error).__name__}: {error}"


def test_a_writing_thread_that_fails_alone_lets_the_others_know(tmp_path):
    """They waited for it, and their ranks for them at the end: until a time-out, on all ranks."""
    first, second = run_ranks(error_of_the_writers, 2, tmp_path)
    assert first == "RuntimeError: of this rank alone"
    assert second.startswith("RuntimeError: ")
    assert "Connection " in second


def test_a_damaged_shard_is_said_on_all_ranks(tmp_path):
    save(tmp_path, Layout(), 0, 1, asynchronous=False)
    shard = tmp_path / "iter_0000001" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    results = run_ranks(_damaged, 2, tmp_path)
    assert results[0] == results[1]
    assert f"{shard} is damaged" in results[0]


def _damaged(rank, world, folder):
    try:
        load_checkpoint(find_checkpoint(folder), build(Layout(), rank, world), None)
    except CheckpointError as error:
        return str(error)


def _unreadable_here(rank, world, folder, names):
    """What is said where the last rank's disk does not give it these files, one after the other."""
    said, open_path = [], Path.open
    for name, times in names:
        left = times

        def refused(path, *arguments, name=name, **keywords):
            nonlocal left
            if rank == world - 1 and path.name == name:
                if left == 0:
                    raise PermissionError(13, "Permission denied", str(path))
                left -= 1
            return open_path(path, *arguments, **keywords)

        with mock.patch.object(Path, "open", refused):
            said.append(_damaged(rank, world, folder))
    return said


def test_what_one_rank_alone_cannot_read_is_said_on_all_ranks(tmp_path):
    """The others waited for it in the next exchange, and ended with a closed connection."""
    save(tmp_path, Layout(), 0, 1, asynchronous=False)
    # The first time a file may be read for its checksum.
    names = [("SHA256SUMS", 0), (".metadata", 0), ("__0_0.distcp", 0), ("__0_0.distcp", 1)]
    first, second = run_ranks(_unreadable_here, 2, tmp_path, names)
    assert first == second
    for (name, _), said in zip(names, first, strict=True):
        assert "Permission denied" in said
        assert f"iter_0000001/{name}" in said


OPTIMIZERS = {
    "adamw": AdamW, "adafactor": Adafactor, "muon": Muon, "sgd": SGD,
    "momentum": partial(SGD, momentum=0.9),
    "bf16 moments": partial(AdamW, state_dtype=torch.bfloat16),
}  # fmt: skip


def trained(kind, world):
    """Two steps with the same gradients however the weights are sharded."""
    model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 5))
    fill(model)
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
    optimizer = OPTIMIZERS[kind](groups_of(model, kind), lr=0.1)
    for step in range(2):
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(step + len(name))
            gradient = torch.randn(parameter.shape, generator=generator)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        optimizer.step()
    return model, optimizer


def groups_of(model, kind):
    make_groups = muon_groups if kind == "muon" else decay_groups
    return [group for group in make_groups(model, 0.01) if group["params"]]


def _save_optimizers(rank, world, folder):
    for kind in OPTIMIZERS:
        model, optimizer = trained(kind, world)
        saver = Saver(folder / kind)
        saver.save(model, optimizer, Progress(1, 1), config={}, identity={}, data={})
        assert saver.latest == 1


def test_the_state_of_every_optimizer_is_resharded(tmp_path):
    run_ranks(_save_optimizers, 2, tmp_path)
    for kind in OPTIMIZERS:
        model, expected = trained(kind, 1)
        other = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 5))
        optimizer = OPTIMIZERS[kind](groups_of(other, kind), lr=0.1)
        load_checkpoint(find_checkpoint(tmp_path / kind), other, optimizer)
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(theirs, mine)
            before, after = expected.state.get(mine, {}), optimizer.state.get(theirs, {})
            assert before.keys() == after.keys()
            for name, value in before.items():
                torch.testing.assert_close(after[name], value, msg=f"{kind}: {name}")
