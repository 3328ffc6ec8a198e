"""ParallelDims: what it accepts, what its errors say, and which ranks share a group."""

import gc
import math
import os
import queue
import re
import runpy
import socket
import warnings
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mb_layers import MoEConfig, dMoE
from mb_parallel import (
    ParallelDims,
    any_rank,
    check_same,
    decline,
    distributed,
    parallelize_experts,
    world,
)
from mb_parallel.mesh import DENSE_AXES, EXPERT_AXES
from mb_parallel.testing import run_ranks
from torch.distributed.tensor import DTensor, Replicate, Shard

OTHERS = ("dp", "cp", "cp_tp")


def test_one_process_needs_no_mesh():
    dims = ParallelDims()
    mesh = dims.build("cpu")
    assert dims.world_size == dims.dp == dims.edp == 1
    assert mesh.dense is mesh.expert is None
    assert all(mesh.axis(name) is None for name in (*DENSE_AXES, *EXPERT_AXES, *OTHERS))
    assert (mesh.dp_rank, mesh.tp_rank, mesh.pp_rank, mesh.ep_rank) == (0, 0, 0, 0)
    assert (mesh.dp_size, mesh.tp_size, mesh.pp_size, mesh.ep_size) == (1, 1, 1, 1)
    assert (mesh.cp_rank, mesh.data_rank, mesh.cp_size, mesh.data_size) == (0, 0, 1, 1)
    assert mesh.all_reduce(torch.ones(2), "dp").tolist() == [1, 1]
    assert any_rank(True)
    assert not any_rank(False)
    check_same({"seed": 1}, "the config")


def test_a_torch_without_distributed_is_named(monkeypatch):
    monkeypatch.setattr(dist, "is_available", lambda: False)
    with pytest.raises(ImportError, match=r"needs torch\.distributed, without which this torch"):
        runpy.run_module("mb_parallel.__init__")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_flag_in_a_group_of_nccl_alone():
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert any_rank(True)
        assert not any_rank(False)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("backends", "device"), [("cuda:nccl", "cuda:1"), ("cpu:gloo", "cpu"),
                                                  ("cpu:gloo,cuda:nccl", "cpu")])  # fmt: skip
def test_flags_lie_where_the_group_carries_them(monkeypatch, backends, device):
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert world._carried() == torch.device(device)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"dp_shard": 0}, "dp_shard to be an integer >= 1, got 0"),
        ({"tp": 2.0}, "tp to be an integer >= 1, got 2.0"),
        ({"pp": True}, "pp to be an integer >= 1, got True"),
        ({"dp_replicate": 2, "dp_shard": 1, "tp": 3, "ep": 4}, "divide the 6 ranks of a pipeline"),
        ({"pp": 8, "ep": 8}, "divide the 1 ranks of a pipeline"),
        ({"dp_shard": 3, "tp": 2, "cp": 2}, "cp to divide the 3 data-parallel ranks"),
    ],
    ids=["zero", "float", "bool", "ep-does-not-divide", "ep-over-stages", "cp-over-tp"],
)
def test_bad_sizes_are_named(sizes, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        ParallelDims(**sizes)


def test_product_must_be_the_number_of_ranks():
    with pytest.raises(ValueError, match=re.escape("number of ranks, 1, got 2 * 1 * 1 * 3 = 6")):
        ParallelDims(dp_replicate=2, pp=3).build("cpu")


def test_the_number_of_ranks_is_a_number():
    with pytest.raises(ValueError, match="world_size to be an integer >= 1, got '4'"):
        ParallelDims.for_world("4")


def test_for_world_gives_the_rest_to_shards():
    expected = ParallelDims(dp_replicate=2, dp_shard=2, tp=2, pp=3, ep=4)
    assert ParallelDims.for_world(24, tp=2, pp=3, ep=4, dp_replicate=2) == expected
    assert expected.world_size == 24
    shared = ParallelDims.for_world(24, tp=2, pp=3, cp=2)
    assert (shared.dp_shard, shared.dp, shared.data, shared.cp_tp) == (4, 4, 2, 4)
    with pytest.raises(ValueError, match=re.escape("1 * 5 * 1 = 5 on 12 ranks")):
        ParallelDims.for_world(12, tp=5)
    with pytest.raises(ValueError, match=re.escape("2 * 2 * 1 = 4 on 2 ranks")):
        ParallelDims.for_world(2, tp=2, dp_replicate=2)
    with pytest.raises(ValueError, match="tp to be an integer"):
        ParallelDims.for_world(12, tp=0)


def test_sizes_of_numpys_are_those_of_python():
    by_numpy = ParallelDims.for_world(np.int64(24), tp=np.int32(2), ep=np.int64(4))
    # Torch makes no mesh of NumPy's, and by their looks ranks would differ.
    assert repr(by_numpy) == repr(ParallelDims.for_world(24, tp=2, ep=4))


@pytest.mark.parametrize(
    ("sizes", "edp"),
    [
        ({"dp_replicate": 2, "dp_shard": 4, "ep": 2}, (2, 2)),  # within a replica: hybrid as dense
        ({"dp_replicate": 2, "dp_shard": 4, "ep": 4}, (2, 1)),
        ({"dp_replicate": 2, "dp_shard": 4, "ep": 8}, (1, 1)),  # over both replicas
        ({"dp_replicate": 4, "ep": 2}, (2, 1)),
        ({"dp_shard": 2, "tp": 4, "ep": 2}, (1, 4)),
    ],
)
def test_experts_are_replicated_as_dense_layers_are(sizes, edp):
    dims = ParallelDims(**sizes)
    assert (dims.edp_replicate, dims.edp_shard) == edp
    assert dims.edp == edp[0] * edp[1]


@pytest.mark.parametrize("given", ["gpu", "cuda:0", torch.device("cpu"), None], ids=str)
def test_another_device_type_is_not_taken_for_the_cpu(given):
    expected = re.escape(f'device_type "cpu" or "cuda" (ROCm\'s name too), got {given!r}')
    with pytest.raises(ValueError, match=expected), distributed(given):
        pass
    with pytest.raises(ValueError, match=expected):
        ParallelDims().build(given)


def test_unknown_axis_is_named():
    with pytest.raises(ValueError, match=r"axis of pp, dp_replicate, .*, ep, got 'sp'"):
        ParallelDims().build("cpu").axis("sp")


@pytest.fixture
def sixteen_ranks(monkeypatch):
    """Rank 6 of sixteen on two nodes, with a process group that sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    dist.init_process_group("fake", store=FakeStore(), rank=6, world_size=16)
    yield
    dist.destroy_process_group()


def _ranks(mesh, name):
    return dist.get_process_group_ranks(mesh.axis(name).get_group())


@pytest.mark.parametrize("ranks", ["", "$SLURM_NTASKS_PER_NODE"])
def test_a_launcher_that_says_no_number_of_ranks(sixteen_ranks, monkeypatch, ranks):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert world.ranks_on_host() == 0
    assert ParallelDims(dp_shard=8, tp=2).build("cpu").tp_size == 2


def test_the_picture_of_the_docstring(sixteen_ranks):
    mesh = ParallelDims(dp_replicate=2, dp_shard=2, tp=2, pp=2, ep=4).build("cpu")
    assert {name: _ranks(mesh, name) for name in ("pp", "dp_replicate", "dp_shard", "tp")} == {
        "pp": [6, 14], "dp_replicate": [2, 6], "dp_shard": [4, 6], "tp": [6, 7],
    }  # fmt: skip
    assert _ranks(mesh, "dp") == [0, 2, 4, 6]
    assert (mesh.pp_rank, mesh.dp_rank, mesh.tp_rank, mesh.ep_rank) == (0, 3, 0, 2)
    assert (mesh.pp_size, mesh.dp_size, mesh.tp_size, mesh.ep_size) == (2, 4, 2, 4)
    assert (_ranks(mesh, "ep"), _ranks(mesh, "edp_replicate")) == ([4, 5, 6, 7], [2, 6])
    assert mesh.axis("edp_shard") is None
    assert _ranks(mesh, "cp_tp") == [6, 7]


def test_ranks_that_share_sequences_are_neighbours(sixteen_ranks):
    mesh = ParallelDims(dp_replicate=2, dp_shard=2, tp=2, pp=2, ep=4, cp=2).build("cpu")
    assert (_ranks(mesh, "cp"), _ranks(mesh, "cp_tp")) == ([4, 6], [4, 5, 6, 7])
    assert (mesh.cp_rank, mesh.cp_size, mesh.data_rank, mesh.data_size) == (1, 2, 1, 2)
    assert (mesh.dp_rank, mesh.dp_size) == (3, 4)
    mesh = ParallelDims(dp_replicate=4, dp_shard=2, tp=2, cp=4).build("cpu")  # over two replicas
    assert (_ranks(mesh, "cp"), _ranks(mesh, "cp_tp")) == ([0, 2, 4, 6], list(range(8)))
    assert (mesh.cp_rank, mesh.data_rank) == (3, 0)
    mesh = ParallelDims(dp_shard=16, cp=8).build("cpu")
    assert _ranks(mesh, "cp") == _ranks(mesh, "cp_tp") == list(range(8))


def test_groups_over_several_nodes(sixteen_ranks):
    mesh = ParallelDims(dp_shard=16, ep=16).build("cpu")
    assert _ranks(mesh, "ep") == _ranks(mesh, "dp") == list(range(16))
    dist.destroy_process_group()
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=16)
    with pytest.warns(UserWarning, match="tp = 16 does not divide the 8 ranks of a node"):
        ParallelDims(tp=16).build("cpu")
    with warnings.catch_warnings(action="error"):
        ParallelDims(tp=8, dp_shard=2).build("cpu")


def _inside(rank, world_size):
    with distributed("cpu") as device:
        assert device.type == "cpu"
    return dist.get_world_size()


def test_a_group_that_is_there_is_used_and_not_left():
    assert run_ranks(_inside, 2) == [2, 2]


def _joins_again(rank, world_size, port):
    dist.barrier()  # a rank that leaves while others still connect would be a crash to them
    dist.destroy_process_group()
    # As under torchrun, whose store is there before the ranks and after them.
    torchrun = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= torchrun | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    sums = []
    for timeout_s in (20.0, 1e300, math.inf):
        with distributed("cpu", timeout_s=timeout_s):
            options = dist.group.WORLD._get_backend(torch.device("cpu")).options
            assert options._timeout.total_seconds() == min(timeout_s, 1e9)
            total = torch.ones(1)
            dist.all_reduce(total)
            sums.append(total.item())
    store = dist.PrefixStore("the end", dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    return sums


def test_ranks_that_left_may_join_again():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert run_ranks(_joins_again, 3, server.port) == [[3.0] * 3] * 3


def _joins_without_its_gpu(rank, world_size, port):
    torch.cuda.device_count = lambda: 2
    torch.cuda.set_device = lambda device: None
    dist.barrier()
    dist.destroy_process_group()
    torchrun = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= torchrun | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    said = ""
    try:
        with distributed("cpu" if rank else "cuda", timeout_s=20.0):
            pass
    except ValueError as error:
        said = str(error)
    store = dist.PrefixStore("the end", dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    return said


def test_a_node_that_has_lost_its_gpus_is_told_on_all_ranks():
    """The others waited in NCCL for ranks that had never heard of it."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for said in run_ranks(_joins_without_its_gpu, 2, server.port, timeout_s=60.0):
        assert "device for all 2 ranks, got cuda on rank 0, cpu on rank 1. Look" in said


def _declines(rank, world_size, end, port, declining):
    dist.barrier()
    dist.destroy_process_group()
    launchers = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or end)}
    os.environ |= launchers | {"TORCHELASTIC_USE_AGENT_STORE": str(not port)}
    said = ""
    if rank == declining:
        decline("there is no checkpoint in x", timeout_s=20.0)
    else:
        with (
            pytest.raises(ValueError, match="could not begin") as raised,
            distributed("cpu", timeout_s=20.0),
        ):
            pass
        said = str(raised.value)
    store = dist.PrefixStore("the end", dist.TCPStore("127.0.0.1", end, is_master=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    decline("of what is in the group already, nobody is told")
    return said


@pytest.mark.parametrize("launched", [True, False], ids=["launcher's store", "rank 0's store"])
@pytest.mark.parametrize("declining", [0, 2])
def test_a_rank_that_cannot_begin_ends_the_others(launched, declining):
    """They waited for it until the timeout."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = 0 if launched else free.getsockname()[1]
    said = run_ranks(_declines, 3, server.port, port, declining, timeout_s=60.0)
    told = (
        f"Rank {declining} of 3 could not begin, and all end with it: there is no checkpoint in x"
    )
    assert said == ["" if rank == declining else told for rank in range(3)]


def _meshes_again(rank, world_size, port):
    if port:
        dist.barrier()
        dist.destroy_process_group()
        torchrun = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= torchrun | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    sums = []
    for tp in (1, 2, 1):  # the same ep groups each time, by other names
        with distributed("cpu", timeout_s=20.0):
            mesh = ParallelDims.for_world(world_size, tp=tp, ep=2).build("cpu").axis("ep")
            x = DTensor.from_local(torch.full((1,), float(rank)), mesh, [Shard(0)])
            doubled = x * 2
            assert doubled.device_mesh.get_group() is mesh.get_group()
            sums.append(doubled.sum().full_tensor().item())
    if port:
        store = dist.PrefixStore("the end", dist.TCPStore("127.0.0.1", port, is_master=False))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    return sums


@pytest.mark.parametrize("joined", [True, False], ids=["in one world", "each in its own"])
def test_meshes_of_an_earlier_run_are_forgotten(joined):
    """DTensor's caches named those of the earlier run."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    sums = run_ranks(_meshes_again, 4, 0 if joined else server.port)
    assert sums == [[2.0] * 3] * 2 + [[10.0] * 3] * 2


def _meshes_closed(rank, world_size):
    """Threads and open files before, and after meshes that were used and closed."""
    counts = []
    for cp in (1, 1, 2, 1):
        counts.append([len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd")])
        mesh = ParallelDims.for_world(world_size, tp=2, cp=cp, ep=2).build("cpu")
        x = DTensor.from_local(torch.ones(2), mesh.axis("ep"), [Shard(0)])
        assert (x * 2).sum().full_tensor().item() == 8
        assert (x * 3).redistribute(placements=[Replicate()]).to_local().sum() == 12
        mesh.close()
        assert x.to_local().sum() == 2
        del mesh, x
        gc.collect()
        dist.barrier()  # the world's own group is there
    return counts


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="has no /proc")
@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="keeps meshes itself")
def test_a_mesh_that_is_closed_leaves_no_threads_of_its_groups():
    _, *later = run_ranks(_meshes_closed, 4)[0]
    assert later == [later[0]] * 3


@pytest.mark.parametrize(
    ("stale", "told"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2, RANK=,"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "RANK=2,"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "h"}, "MASTER_PORT="),
        ({"WORLD_SIZE": "", "RANK": "0"}, "WORLD_SIZE=, RANK=0"),
    ],
)
def test_an_environment_that_names_no_rank_is_told(monkeypatch, stale, told):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in stale.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(ValueError, match="Start the ranks with torchrun") as raised,
        distributed("cpu"),
    ):
        pass
    assert told in str(raised.value)
    monkeypatch.setenv("WORLD_SIZE", "1")  # alone, whatever else is left over
    with distributed("cpu"):
        assert not dist.is_initialized()


def test_a_port_that_is_taken_and_ranks_that_do_not_come_are_told(monkeypatch):
    def told() -> str:
        with pytest.raises(ConnectionError) as raised, distributed("cpu", timeout_s=1.0):
            pass
        return str(raised.value)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0"}
        for name, value in said.items():
            monkeypatch.setenv(name, value)
        error = told()
    assert f"rank 0 of 2 could not join the others at 127.0.0.1:{port}: " in error
    assert "MASTER_PORT is taken" in error
    monkeypatch.setattr("mb_parallel.world._PATIENCE_S", 0.2)
    waits = rf"rank 0 of 2 has waited .* 127\.0\.0\.1:{port}, and does so for 1 s"
    with pytest.warns(RuntimeWarning, match=waits):
        error = told()
    assert "1/2 clients joined" in error
    assert "a rank did not start within the timeout" in error


def test_a_wait_without_an_end_is_told_as_one(monkeypatch):
    for name, value in {"LOCAL_RANK": "0", "MASTER_ADDR": "first", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("mb_parallel.world._PATIENCE_S", 0.0)
    told: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(warnings, "warn", lambda message, *_, **__: told.put(message))
    with world._waiting_told(2, 0, math.inf):
        message = told.get(timeout=60)
    assert "come to first:1, and does so without an end: look for ranks" in message


def _sums(rank, world_size):
    mesh = ParallelDims(dp_shard=2, tp=2, ep=2).build("cpu")
    sums = {name: mesh.all_reduce(torch.tensor(rank), name) for name in ("dp", "tp", "ep", "pp")}
    pairs = torch.arange(6).view(3, 2) * (rank + 1)
    mesh.all_reduce(pairs[:, 0], "tp")
    return {name: int(total) for name, total in sums.items()} | {
        "column": pairs.tolist(),
        "most": int(mesh.all_reduce(torch.tensor(rank), "dp", dist.ReduceOp.MAX)),
        "last": any_rank(rank == world_size - 1),
        "none": any_rank(False),
    }


def test_sums_over_the_groups_of_four_ranks():
    first, *_, last = run_ranks(_sums, 4)
    assert first.pop("column") == [[0, 1], [6, 3], [12, 5]]
    assert last.pop("column") == [[0, 4], [14, 12], [28, 20]]
    assert first == {"dp": 2, "tp": 1, "ep": 1, "pp": 0, "most": 2, "last": True, "none": False}
    assert last == {"dp": 4, "tp": 5, "ep": 5, "pp": 3, "most": 3, "last": True, "none": False}


def _timeouts(rank, world_size):
    def backend(group):
        return group._get_backend(torch.device("cpu"))

    backend(dist.group.WORLD)._set_default_timeout(timedelta(seconds=41))
    mesh = ParallelDims(dp_shard=2, tp=2, ep=4, cp=2).build("cpu")
    meshes = (mesh.dense, mesh.dp, mesh.expert, mesh.context, mesh.cp_tp)
    groups = [group for part in meshes for group in part.get_all_groups()]
    layer = dMoE(MoEConfig(hidden_size=8, ffn_hidden_size=4, num_experts=2, top_k=1))
    parallelize_experts(layer, mesh, sequence_parallel=True)
    groups.append(layer.experts.width.group)
    return {backend(group).options._timeout.total_seconds() for group in groups}


def test_groups_wait_as_long_as_the_world():
    assert run_ranks(_timeouts, 4) == [{41.0}] * 4


@dataclass
class _Config:
    lr: float
    seed: int = 1


def _configs(rank, world_size, different):
    check_same(_Config(0.1), "the config")
    check_same(["plain", "values"], "the list")
    # Sets have no order, but their reprs do: here by what came first, of strings by the process.
    skipped = {0, 8} if rank else {8, 0}
    check_same({"skipped": skipped}, "the set")
    check_same({"skipped": [({"of": skipped, "at": 1} if rank else {"at": 1, "of": skipped},)]}, "")
    said = ""
    try:
        check_same(_Config(0.1 + different * (rank == 1)), "the config")
    except ValueError as error:
        said = str(error)
    return said


def test_different_configs_are_found_on_every_rank():
    assert run_ranks(_configs, 2, 0.0) == ["", ""]
    for said in run_ranks(_configs, 2, 0.5):
        assert "the config to be equal on all 2 ranks" in said
        assert "rank 0: lr = 0.1\n" in said
        assert "rank 1: lr = 0.6\n" in said
        assert "seed" not in said
