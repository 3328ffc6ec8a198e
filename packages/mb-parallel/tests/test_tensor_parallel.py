"""Tensor and sequence parallelism: five steps equal to one process, and what is refused."""

from dataclasses import replace

import pytest
import tiny_gpt
from mb_parallel.testing import run_ranks
from tiny_gpt import Options, compare

CASES = {
    "dense": Options(),
    "gated-rms-qknorm-untied": Options(gated=True, rms=True, qk_norm=True, tied=False),
    "padded": Options(padded=True),
    "moe": Options(experts=4),
    "moe-padded-shared": Options(experts=4, padded=True, shared_expert=16),
    # With sequence parallelism capacity counts tokens rank by rank: as they come for one sequence.
    "moe-capacity": Options(experts=4, capacity_factor=0.75, batch=1),
}


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp2", "tp2-sp"])
def test_equals_one_process(sequence_parallel):
    cases = [replace(c, tp=2, sequence_parallel=sequence_parallel) for c in CASES.values()]
    by_rank = run_ranks(tiny_gpt.train_all, 2, *cases)
    for number, (name, options) in enumerate(CASES.items()):
        want = tiny_gpt.train(0, 1, options)
        worst = compare([results[number] for results in by_rank], want)
        print(f"{name}: largest relative deviation {worst:.1e}")


MIXED = {
    "dp2-tp2": Options(dp=2, tp=2, experts=4),
    "dp2-tp2-ep2": Options(dp=2, tp=2, ep=2, experts=4, padded=True),
    "dp2-tp2-sp-ep4": Options(
        dp=2, tp=2, ep=4, experts=4, padded=True, sequence_parallel=True, zero_stage=2
    ),
}


def test_with_data_and_expert_parallelism():
    by_rank = run_ranks(tiny_gpt.train_all, 4, *MIXED.values())
    for number, (name, options) in enumerate(MIXED.items()):
        alone = replace(options, dp=1, tp=1, ep=1)
        worst = compare([results[number] for results in by_rank], tiny_gpt.train(0, 1, alone))
        print(f"{name}: largest relative deviation {worst:.1e}")
