"""Parallelism over NCCL on two GPUs, equal to one process on the CPU."""

from dataclasses import replace

import pytest
import tiny_gpt
import torch
from mb_parallel.testing import run_ranks
from tiny_gpt import Options, compare

MOE = Options(experts=4, padded=True, device="cuda")
PIPE = replace(MOE, pp=2)
LAYOUTS = {
    "tensor": {
        "tp2": replace(MOE, tp=2),
        "tp2-sp": replace(MOE, tp=2, sequence_parallel=True),
        "tp2-sp-ep2": replace(MOE, tp=2, ep=2, sequence_parallel=True),
    },
    "pipeline": {
        "gpipe": replace(PIPE, schedule="gpipe"),
        "1f1b": PIPE,
        "interleaved": replace(PIPE, schedule="interleaved-1f1b", stages_per_rank=2),
    },
    "zero-bubble": {
        "looped": replace(PIPE, schedule="interleaved-zero-bubble", stages_per_rank=2),
        "v": replace(PIPE, schedule="zbv-zero-bubble", stages_per_rank=2),
    },
    "activations on the host": {
        "1f1b": replace(PIPE, offload=True),
        "interleaved": replace(PIPE, schedule="interleaved-1f1b", stages_per_rank=2, offload=True),
        "looped": replace(
            PIPE, schedule="interleaved-zero-bubble", stages_per_rank=2, offload=True
        ),
        "tp2-sp": replace(MOE, tp=2, sequence_parallel=True, offload=True),
        "ep2": replace(MOE, dp=2, ep=2, zero_stage=1, offload=True),  # rows of peers stay
        "zero3": replace(MOE, dp=2, offload=True),
    },
}


@pytest.fixture(scope="module")
def alone():
    return tiny_gpt.train(0, 1, replace(MOE, device="cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", LAYOUTS)
def test_equals_one_process(kind, alone):
    layouts = LAYOUTS[kind]
    by_layout = zip(
        *run_ranks(tiny_gpt.train_all, 2, *layouts.values(), device_type="cuda", timeout_s=90.0),
        strict=True,
    )
    for name, by_rank in zip(layouts, by_layout, strict=True):
        worst = compare(by_rank, alone, tolerance=1e-4)
        print(f"{name}: largest relative deviation {worst:.1e}")
