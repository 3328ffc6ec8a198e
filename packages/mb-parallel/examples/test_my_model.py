"""How to test a model of your own on several ranks: a plain pytest file, no launcher, no GPU.

    pytest packages/mb-parallel/examples/test_my_model.py

`run_ranks` starts processes joined by gloo, calls a top-level function on each, and gives back what
each returned. So a test reads: compute it in one process, compute it on ranks, compare.
"""

import torch
from mb_layers import MoEConfig, dMoE
from mb_parallel import ParallelDims, parallelize_experts
from mb_parallel.testing import run_ranks
from torch import Tensor, nn


class MyBlock(nn.Module):
    """Any model that holds layers of mb_layers; it knows nothing of ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # equal parameters on every rank
        self.moe = dMoE(MoEConfig(hidden_size=16, ffn_hidden_size=32, num_experts=4, top_k=2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(x).y


def my_tokens() -> Tensor:
    return torch.randn(10, 16, generator=torch.Generator().manual_seed(1))


def on_a_rank(rank: int, world_size: int, dispatcher: str) -> Tensor:
    """Called on every rank; what it returns must pickle."""
    model = MyBlock()
    mesh = ParallelDims(dp_shard=world_size, ep=world_size).build("cpu")
    print(parallelize_experts(model, mesh, dispatcher=dispatcher))
    return model(my_tokens().tensor_split(world_size)[rank]).detach()


def test_experts_on_two_ranks_give_the_same_output():
    expected = MyBlock()(my_tokens())
    for dispatcher in ("all_gather", "all_to_all"):
        parts = run_ranks(on_a_rank, 2, dispatcher)
        torch.testing.assert_close(torch.cat(parts), expected)
