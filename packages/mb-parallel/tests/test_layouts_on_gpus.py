"""Tensor and pipeline parallelism over NCCL on two GPUs, equal to one process on the CPU."""

import socket
from dataclasses import replace

import pytest
import tiny_gpt
import torch
import torch.distributed as dist
from mb_parallel.testing import run_ranks
from tiny_gpt import Options, compare

MOE = Options(experts=4, padded=True, device="cuda")
LAYOUTS = {
    "tp2": replace(MOE, tp=2),
    "tp2-sp": replace(MOE, tp=2, sequence_parallel=True),
    "tp2-sp-ep2": replace(MOE, tp=2, ep=2, sequence_parallel=True),
    "gpipe": replace(MOE, pp=2, schedule="gpipe"),
    "1f1b": replace(MOE, pp=2),
    "interleaved": replace(MOE, pp=2, schedule="interleaved-1f1b", stages_per_rank=2),
    "zero-bubble": replace(MOE, pp=2, schedule="interleaved-zero-bubble", stages_per_rank=2),
    "zbv": replace(MOE, pp=2, schedule="zbv-zero-bubble", stages_per_rank=2),
}


def over_nccl(rank, world_size, port, options):
    dist.destroy_process_group()
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world_size,
        device_id=torch.device("cuda", rank),
    )
    return tiny_gpt.train(rank, world_size, options)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_one_process(layout):
    options = LAYOUTS[layout]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    by_rank = run_ranks(over_nccl, 2, port, options)
    alone = replace(options, tp=1, pp=1, ep=1, stages_per_rank=1, device="cpu")
    worst = compare(by_rank, tiny_gpt.train(0, 1, alone), tolerance=1e-4)
    print(f"{layout}: largest relative deviation {worst:.1e}")
