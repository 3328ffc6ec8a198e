"""Tensor and pipeline parallelism over NCCL on two GPUs, equal to one process on the CPU."""

from dataclasses import replace

import pytest
import tiny_gpt
import torch
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


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_one_process(layout):
    options = LAYOUTS[layout]
    by_rank = run_ranks(tiny_gpt.train, 2, options, device_type="cuda")
    alone = replace(options, tp=1, pp=1, ep=1, stages_per_rank=1, device="cpu")
    worst = compare(by_rank, tiny_gpt.train(0, 1, alone), tolerance=1e-4)
    print(f"{layout}: largest relative deviation {worst:.1e}")
