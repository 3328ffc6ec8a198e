"""What a step's load moves: balancing biases, and the places of experts."""

import itertools
from unittest.mock import patch

import pytest
import torch
from mb_layers import Router
from mb_layers.model import moe_layers
from mb_parallel import ParallelDims
from mb_parallel.expert_parallel import Rebalanced
from mb_parallel.pipeline_parallel import split_layers, stage_indices
from mb_parallel.testing import run_ranks
from mb_train.assembly.balance import LoadBalance
from mb_train.config import TrainConfig
from mb_train.tasks.make import whole_model

OF_STAGES = {  # models with experts, of four layers
    "gpt": {},
    "bert": {"model": "bert"},
    "t5": {"model": "t5", "num_layers": 2, "decoder_num_layers": 2, "decoder_seq_length": 8},
    "modules": {"mtp_num_layers": 2},
    "modules of two such layers": {
        "hybrid_layer_pattern": "E*EE", "mtp_hybrid_override_pattern": "EE", "mtp_num_layers": 2,
        "position_embedding_type": "none",
    },
}  # fmt: skip
STAGES = {"1f1b": 1, "zbv-zero-bubble": 2}  # of a rank


def _against_by_rank(rank, world_size):
    """Which expert the biases of a rank's layers go against, and which they should."""
    mesh, found = ParallelDims(pp=2).build("cpu"), []
    for kind, schedule in itertools.product(OF_STAGES, STAGES):
        sizes = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 8}
        moe = {"moe_num_experts": 16, "moe_router_enable_expert_bias": True}
        moe |= {} if "hybrid_layer_pattern" in OF_STAGES[kind] else {"moe_layer_freq": 2}
        config = TrainConfig(
            **{**sizes, **moe, **OF_STAGES[kind]}, micro_batch_size=1, train_iters=1, lr=1.0,
            pipeline_schedule=schedule, pipeline_model_parallel_size=2,
            num_layers_per_virtual_pipeline_stage=1 if STAGES[schedule] > 1 else None,
        )  # fmt: skip
        in_order = [name for name, _ in _routers(whole_model(config, vocab_size=16))]
        runs = split_layers(4, 2 * STAGES[schedule])
        indices = stage_indices(schedule, pp_size=2, pp_rank=rank, stages_per_rank=STAGES[schedule])
        parts = []
        for index in indices:
            part = whole_model(config, vocab_size=16)
            part.keep(runs[index], first=index == 0, last=index == len(runs) - 1)
            parts.append(part)
        balance = LoadBalance(parts, config, mesh)
        balance.see({"tokens_per_expert": 8.0 * torch.eye(16)[: len(in_order)]})
        balance.update(1, torch.optim.SGD([p for part in parts for p in part.parameters()]))
        found += [
            (int(router.balancing_bias.argmin()), in_order.index(name))
            for part in parts
            for name, router in _routers(part)
        ]
    return found


def _routers(model):
    return [(name, m) for name, m in model.named_modules() if isinstance(m, Router)]


def test_a_balancing_bias_moves_by_the_load_of_its_own_layer():
    """In a pipeline a rank finds its layers among those of all stages."""
    for found in run_ranks(_against_by_rank, 2):
        assert all(against == row for against, row in found)
        assert len({row for _, row in found}) > 2, found


@pytest.mark.parametrize("shared", [True, False])
def test_a_balancing_bias_moves_by_all_texts_of_its_tower(shared):
    config = TrainConfig(
        num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=8, micro_batch_size=1,
        train_iters=1, lr=1.0, model="ict", biencoder_shared_query_context_model=shared,
        moe_num_experts=4, moe_router_enable_expert_bias=True,
    )  # fmt: skip
    model = whole_model(config, vocab_size=16)
    routers = [module for module in model.modules() if isinstance(module, Router)]
    mesh = ParallelDims().build("cpu")
    balance = LoadBalance([model], config, mesh)
    queries, blocks = torch.eye(4)[:2], 8.0 * torch.eye(4)[2:]
    balance.see({"tokens_per_expert": torch.cat([queries, blocks])})
    balance.update(1, torch.optim.SGD(model.parameters()))
    fullest = [2, 3] if shared else [0, 1, 2, 3]
    assert [int(router.balancing_bias.argmin()) for router in routers] == fullest


def test_experts_change_places_at_intervals_by_the_load_of_that_step(monkeypatch):
    config = TrainConfig(
        num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=8, micro_batch_size=1,
        train_iters=1, lr=1.0, moe_num_experts=4, moe_rebalance_interval=2,
    )  # fmt: skip
    loads, order = [], (0, 2, 1, 3)
    moved = [
        Rebalanced("stack.blocks.0.mlp", 1.25, 1.1, order),
        Rebalanced("stack.blocks.1.mlp", 2.0, 1.0, order[::-1]),
    ]

    def rebalance(part, counts, mesh, *, optimizer):
        loads.append(torch.stack([*counts.values()]))
        return moved

    monkeypatch.setattr("mb_train.assembly.balance.rebalance_experts", rebalance)
    model = whole_model(config, vocab_size=16)
    mesh = ParallelDims().build("cpu")
    balance = LoadBalance([model], config, mesh)
    changed = []
    for step in (1, 2, 3):
        for _ in range(3):  # passes
            balance.see({"tokens_per_expert": step * torch.arange(8.0).view(2, 4)})
        changed.append(balance.update(step, torch.optim.SGD(model.parameters())))
    assert changed[0] is changed[2] is None
    said, orders = changed[1]
    assert "2 layers changed places after step 2: the fullest rank had 2.00 times" in said
    assert "now 1.10" in said
    assert orders == {0: order, 1: order[::-1]}
    assert torch.stack(loads).tolist() == [[[0, 6, 12, 18], [24, 30, 36, 42]]]


def test_each_text_of_a_tower_is_counted_by_the_new_numbers(monkeypatch):
    config = TrainConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=8, micro_batch_size=1,
        train_iters=1, lr=1.0, model="ict", biencoder_shared_query_context_model=True,
        moe_num_experts=4, moe_rebalance_interval=1,
    )  # fmt: skip
    model, order = whole_model(config, vocab_size=16), (3, 2, 1, 0)
    (name,) = moe_layers(model)
    moved = [Rebalanced(name, 2.0, 1.0, order)]
    monkeypatch.setattr("mb_train.assembly.balance.rebalance_experts", lambda *_, **__: moved)
    mesh = ParallelDims().build("cpu")
    balance = LoadBalance([model], config, mesh)
    balance.see({"tokens_per_expert": torch.ones(2, 4)})
    changed = balance.update(1, torch.optim.SGD(model.parameters()))
    assert changed.orders == {0: order, 1: order}


def _change_places(rank, world_size):
    """A stage each, with one layer of experts; only the second's change places."""
    config = TrainConfig(
        num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=8, micro_batch_size=1,
        train_iters=1, lr=1.0, moe_num_experts=4, moe_rebalance_interval=1,
    )  # fmt: skip
    model = whole_model(config, vocab_size=16)
    model.keep(range(rank, rank + 1), first=rank == 0, last=rank == 1)
    (name,) = moe_layers(model)
    moved = [Rebalanced(name, 1.5, 1.25, (1, 0, 2, 3))] if rank else []
    balance = LoadBalance([model], config, ParallelDims(pp=2).build("cpu"))
    balance.see({"tokens_per_expert": torch.ones(2, 4)})
    with patch("mb_train.assembly.balance.rebalance_experts", lambda *_, **__: moved):
        return balance.update(1, torch.optim.SGD(model.parameters()))


def test_every_stage_hears_of_experts_that_change_places_on_another():
    for said, orders in run_ranks(_change_places, 2):
        assert "experts of 1 layer changed places after step 1" in said
        assert "had 1.50 times an even share, as they are now 1.25" in said
        assert orders == {1: (1, 0, 2, 3)}
