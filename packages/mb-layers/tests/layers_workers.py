"""What the spawned ranks of `test_living.py` run: importable by name, so that spawn can find it."""

from __future__ import annotations

import multiprocessing
import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from layers_oracle import assert_close
from mb_layers import MoEConfig, dMoE
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

WORLD = 2
CONFIG = MoEConfig(
    hidden_size=16,
    ffn_hidden_size=16,
    num_experts=5,
    top_k=2,
    init_method_std=0.3,
    z_loss_weight=0.1,
    router_bias=True,
    mlp_bias=True,
    output_bias=True,
    shared_expert_hidden_size=16,
    shared_expert_gate=True,
)


def run_on_ranks() -> None:
    """Run the checks on WORLD processes joined by gloo; an error in any of them is raised here."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    forks = multiprocessing.get_context("forkserver")  # imports torch once for all of them
    forks.set_forkserver_preload(
        ["mb_layers", "torch.distributed.fsdp", "torch.distributed.tensor"]
    )
    mp.start_processes(_join, args=(port,), nprocs=WORLD, start_method="forkserver")


def _join(rank: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    for check in (fsdp2, dtensor_weights, global_batch_balance):
        torch.manual_seed(11)  # the same weights and tokens on every rank
        check()
    dist.barrier()
    dist.destroy_process_group()


def _loss(layer: dMoE, x: torch.Tensor) -> torch.Tensor:
    y, aux, _ = layer(x)
    return y.square().sum() + aux


def _expected(layer: dMoE, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients summed over the ranks' shares of the tokens, on one process."""
    sum(_loss(layer, share) for share in tokens).backward()
    grads = {name: p.grad.clone() for name, p in layer.named_parameters()}
    layer.zero_grad()
    return grads


def fsdp2() -> None:
    """fully_shard: gradients are the mean over ranks, the state dict stays whole."""
    layer = dMoE(CONFIG, dtype=torch.float64)
    tokens = torch.randn(WORLD, 7, 16, dtype=torch.float64)
    expected = _expected(layer, tokens)
    fully_shard(layer, mesh=init_device_mesh("cpu", (WORLD,)))
    assert all(isinstance(p, DTensor) for p in layer.parameters())
    _loss(layer, tokens[dist.get_rank()]).backward()
    for name, p in layer.named_parameters():
        assert_close(f"d {name}", p.grad.full_tensor(), expected[name] / WORLD)
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    assert torch.isfinite(_loss(layer, tokens[dist.get_rank()]))


def dtensor_weights() -> None:
    """Weights sharded any way: the layer gathers them and sums their gradients over the ranks."""
    layer = dMoE(CONFIG, dtype=torch.float64)
    tokens = torch.randn(WORLD, 7, 16, dtype=torch.float64)
    expected = _expected(layer, tokens)
    mesh = init_device_mesh("cpu", (WORLD,))
    placements = {"w1": Shard(1), "w2": Shard(2), "b1": Shard(1), "weight": Shard(0)}
    for module in list(layer.modules()):
        for name, p in list(module.named_parameters(recurse=False)):
            sharded = distribute_tensor(p.detach(), mesh, [placements.get(name, Replicate())])
            module.register_parameter(name, torch.nn.Parameter(sharded))
    _loss(layer, tokens[dist.get_rank()]).backward()
    for name, p in layer.named_parameters():
        assert_close(f"d {name}", p.grad.full_tensor(), expected[name])
    with pytest.raises(ValueError, match=r"got a DTensor, of which \.to_local\(\) are this rank's"):
        layer(distribute_tensor(tokens[0], mesh, [Shard(0)]))


def global_batch_balance() -> None:
    """All-reduced counts: the ranks' mean loss and its gradient are those of all tokens at once."""
    config = MoEConfig(
        hidden_size=16, ffn_hidden_size=16, num_experts=5, top_k=2, balance_over="global_batch"
    )

    def over_ranks(counts_E: torch.Tensor) -> torch.Tensor:
        counts_E = counts_E.clone()
        dist.all_reduce(counts_E)
        return counts_E

    whole = dMoE(config, dtype=torch.float64, reduce_counts=lambda counts_E: counts_E)
    layer = dMoE(config, dtype=torch.float64, reduce_counts=over_ranks)
    layer.load_state_dict(whole.state_dict())
    tokens = torch.randn(WORLD, 9, 16, dtype=torch.float64)
    aux_whole = whole(tokens).aux_loss
    (expected,) = torch.autograd.grad(aux_whole, whole.router.weight)
    aux = layer(tokens[dist.get_rank()]).aux_loss
    (grad,) = torch.autograd.grad(aux, layer.router.weight)
    mean_aux = aux.detach().clone()
    for tensor in (grad, mean_aux):
        dist.all_reduce(tensor)
    assert_close("d router.weight", grad / WORLD, expected)
    assert_close("aux_loss", mean_aux / WORLD, aux_whole.detach())
