"""Ranks with a part of the samples each take the same steps as one process with all of them."""

import pytest
import torch
from mb_layers import MoEConfig, Router, dMoE
from mb_parallel import ParallelDims, apply_data_parallel, set_gradient_sync
from mb_parallel.optimizer import SGD, Adafactor, AdamW, Muon, clip_and_step, decay_groups, muon_groups
from mb_parallel.testing import run_ranks
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

STEPS, MICRO_BATCHES, SAMPLES, WIDTH = 5, 4, 6, 7  # odd width: shards are uneven


class Block(nn.Module):
    """A dense layer and experts, three of them: shards are uneven, with four ranks one is empty."""

    def __init__(self):
        super().__init__()
        self.norm, self.dense = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.moe = dMoE(
            MoEConfig(hidden_size=WIDTH, ffn_hidden_size=5, num_experts=3, top_k=2, mlp_bias=True)
        )

    def forward(self, x):
        return x + self.moe(torch.tanh(self.dense(self.norm(x)))).y


def build() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 1))


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


OPTIMIZERS = {
    "adamw": lambda model: AdamW(decay_groups(model, 0.1), lr=0.03),
    "muon": lambda model: Muon(muon_groups(model, 0.1), lr=0.03, ns_dtype=torch.float32),
    "adafactor": lambda model: Adafactor(decay_groups(model, 0.1), lr=0.1),
    "sgd": lambda model: SGD(decay_groups(model, 0.1), lr=0.1, momentum=0.9),
}


def train(rank, world_size, dims, zero_stage, name="adamw"):
    """Losses, norms, and every parameter and moment whole; micro-batch m goes to rank m % dp.

    Micro-batches are of unequal sizes, and one has no valid sample: losses are weighted so that the
    mean over ranks is the mean over samples.
    """
    model, mesh = build(), ParallelDims(**dims).build("cpu")
    apply_data_parallel(model, mesh, blocks=list(model)[:2], zero_stage=zero_stage)
    optimizer = OPTIMIZERS[name](model)
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(STEPS, MICRO_BATCHES, SAMPLES, WIDTH, generator=generator)
    valid = torch.tensor([6, 0, 3, 5])
    history = []
    for step in range(STEPS):
        mine = [m for m in range(MICRO_BATCHES) if m % mesh.dp_size == mesh.dp_rank]
        total = torch.zeros(())
        for m in mine:
            set_gradient_sync(model, m == mine[-1])
            x = data[step, m, : int(valid[m])]
            loss = (model(x) - 1).square().sum() / valid.sum()
            (loss * mesh.dp_size).backward()
            total += loss.detach()
        result = clip_and_step(optimizer, max_norm=0.5, mesh=mesh)
        grads = {n: full(p.grad).clone() for n, p in model.named_parameters()}
        optimizer.zero_grad()
        mesh.all_reduce(total, "dp")
        history.append((float(total), float(result.grad_norm), grads))
    state = {
        f"{name}.{kind}": full(value)
        for name, p in model.named_parameters()
        for kind, value in {"weight": p.detach(), **optimizer.state[p]}.items()
    }
    return history, state


CASES = [
    ({"dp_shard": 2}, 1, "adamw"),
    ({"dp_shard": 2}, 2, "adamw"),
    ({"dp_shard": 2}, 3, "adamw"),
    ({"dp_shard": 4}, 3, "adamw"),
    ({"dp_replicate": 2, "dp_shard": 2}, 1, "adamw"),
    ({"dp_replicate": 2, "dp_shard": 2}, 2, "adamw"),
    ({"dp_replicate": 2}, 2, "adamw"),
    ({"dp_shard": 2}, 2, "sgd"),
    ({"dp_shard": 4}, 2, "muon"),
    ({"dp_shard": 4}, 2, "adafactor"),
]


@pytest.fixture(scope="module")
def alone():
    return {name: train(0, 1, {}, 3, name) for name in OPTIMIZERS}


@pytest.mark.parametrize(
    ("dims", "zero_stage", "name"),
    CASES,
    ids=["-".join((*(f"{k}{v}" for k, v in d.items()), f"zero{z}", n)) for d, z, n in CASES],
)
def test_ranks_match_one_process(alone, dims, zero_stage, name):
    history, state = alone[name]
    assert history[0][0] != history[-1][0]
    world_size = dims.get("dp_shard", 1) * dims.get("dp_replicate", 1)
    for got_history, got_state in run_ranks(train, world_size, dims, zero_stage, name):
        torch.testing.assert_close(got_history, history, rtol=1e-5, atol=1e-6)
        assert got_state.keys() == state.keys()
        torch.testing.assert_close(got_state, state, rtol=1e-5, atol=1e-6)
