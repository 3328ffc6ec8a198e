"""Random streams: equal where ranks share an activation, different where they hold parts of it."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from mb_parallel.random import (
    distinct,
    make_distinct,
    mix,
    rng_state,
    seed_micro_batch,
    set_rng_state,
)
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

CPU = torch.device("cpu")


def test_import_star_does_not_hide_pythons_random():
    names = {}
    exec("from mb_parallel import *", names)
    assert "ParallelMesh" in names
    assert "random" not in names


def test_seeds_differ_in_each_number_and_its_place():
    seeds = {
        mix(*numbers) for numbers in [(0,), (1,), (0, 0), (0, 1), (1, 0), (7, 3, 2), (7, 2, 3)]
    }
    assert len(seeds) == 7
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert mix(0) == 0xE220A8397B1DCDAF >> 1  # splitmix64's first number: a resumed run goes on


def test_integers_of_numpy_and_torch_seed_as_pythons_do():
    draws = []
    for kind in (int, np.int64, np.uint8, torch.tensor):
        seed_micro_batch(kind(5), step=kind(3), place=kind(1))
        with distinct(kind(2), "cpu"):
            draws.append(torch.rand(4))
    assert all(torch.equal(draw, draws[0]) for draw in draws)


def test_a_micro_batch_draws_the_same_whatever_came_before():
    draws = {}
    for step in range(3):
        for place in range(4):
            seed_micro_batch(5, step=step, place=place)
            draws[step, place] = torch.rand(4)
    seed_micro_batch(5, step=1, place=2)
    assert torch.equal(torch.rand(4), draws[1, 2])
    assert len({tuple(draw.tolist()) for draw in draws.values()}) == 12


def test_ranks_differ_inside_and_agree_outside():
    inside, outside = [], []
    for rank in range(3):
        torch.manual_seed(1)
        with distinct(rank):
            inside.append(torch.rand(4))
        with distinct(rank):
            inside.append(torch.rand(4))
        outside.append(torch.rand(4))
    assert len({tuple(draw.tolist()) for draw in inside}) == 6
    assert torch.equal(outside[0], outside[1])
    assert torch.equal(outside[0], outside[2])


def test_checkpoint_draws_the_same_masks_again():
    dropout, masks = nn.Dropout(0.5), []
    make_distinct([dropout], rank=1)

    def run(x):
        masks.append(dropout(x))
        return (masks[-1] * x).sum()

    x = torch.ones(50, requires_grad=True)
    torch.manual_seed(3)
    checkpoint(run, x, use_reentrant=False).backward()
    assert len(masks) == 2
    assert torch.equal(masks[0], masks[1])
    dropout.eval()
    before = torch.get_rng_state()
    assert torch.equal(dropout(x), x)
    assert torch.equal(before, torch.get_rng_state())


class Core(nn.Module):
    def forward(self, lengths, *, x):
        return x


def test_a_tensor_on_the_host_does_not_hide_the_device(monkeypatch):
    seen, core, lengths = [], Core(), torch.ones(2)
    make_distinct([core], rank=1)

    def switched(rank, device):
        seen.append(device)
        return nullcontext()

    monkeypatch.setattr("mb_parallel.random.distinct", switched)
    with FakeTensorMode(allow_non_fake_inputs=True):
        core(lengths, x=torch.empty(3, device="cuda:0"))
    core(lengths, x=torch.ones(3, device="meta"))
    assert seen == [torch.device("cuda", 0), None]


def test_state_is_put_back():
    torch.manual_seed(9)
    state = rng_state(CPU)
    first = torch.rand(3)
    set_rng_state(state, "cpu")
    assert torch.equal(torch.rand(3), first)


@pytest.mark.gpu
def test_ranks_differ_on_a_gpu_and_agree_after():
    device, inside, outside = torch.device("cuda"), [], []
    for rank in range(2):
        torch.manual_seed(1)
        with distinct(rank, device):
            inside.append(torch.rand(4, device=device))
        outside.append(torch.rand(4, device=device))
    assert not torch.equal(*inside)
    assert torch.equal(*outside)
    state = rng_state(device)
    first = torch.rand(3, device=device)
    set_rng_state(state, device)
    assert torch.equal(torch.rand(3, device=device), first)
