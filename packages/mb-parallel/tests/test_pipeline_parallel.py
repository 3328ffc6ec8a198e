"""Pipelines: five steps equal to one process by every schedule."""

from dataclasses import replace

import pytest
import tiny_gpt
from mb_parallel.testing import run_ranks
from tiny_gpt import Options, compare

MOE = Options(experts=4, padded=True)
LAYOUTS = {
    2: {
        "gpipe": Options(pp=2, schedule="gpipe"),
        "1f1b": replace(MOE, pp=2),
        "1f1b-untied-uneven": replace(MOE, pp=2, tied=False, first_lighter=2, micro_batches=1),
        "1f1b-scaled": replace(MOE, pp=2, loss_scale=1024.0),
        "interleaved": replace(MOE, pp=2, schedule="interleaved-1f1b", stages_per_rank=2),
        "zero-bubble": replace(MOE, pp=2, schedule="interleaved-zero-bubble", stages_per_rank=2),
        "zbv": replace(MOE, pp=2, schedule="zbv-zero-bubble", stages_per_rank=2),
    },
    4: {
        "pp4": replace(MOE, pp=4),
        "tp2-pp2": replace(MOE, tp=2, pp=2),
        "tp2-pp2-ep2": replace(MOE, tp=2, pp=2, ep=2),
        "tp2-sp-pp2-ep2": replace(MOE, tp=2, pp=2, ep=2, sequence_parallel=True),
        "dp2-pp2": replace(MOE, dp=2, pp=2),
        "dp2-interleaved": replace(
            MOE, dp=2, pp=2, schedule="interleaved-1f1b", stages_per_rank=2, micro_batches=8
        ),
        "tp2-sp-pp2": replace(MOE, tp=2, pp=2, sequence_parallel=True, gated=True),
    },
}


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_equals_one_process(ranks):
    by_rank = run_ranks(tiny_gpt.train_all, ranks, *LAYOUTS[ranks].values())
    for number, (name, options) in enumerate(LAYOUTS[ranks].items()):
        alone = replace(
            options, dp=1, tp=1, ep=1, pp=1, stages_per_rank=1, loss_scale=1.0, first_lighter=0
        )
        worst = compare([results[number] for results in by_rank], tiny_gpt.train(0, 1, alone))
        print(f"{name}: largest relative deviation {worst:.1e}")
