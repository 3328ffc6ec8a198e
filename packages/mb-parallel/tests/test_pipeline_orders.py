"""What is told of schedules beforehand, against the orders in which torch runs them."""

from types import SimpleNamespace

import pytest
from mb_parallel.pipeline_parallel import SCHEDULES, passes_kept, waiting_share

# (ranks, micro-batches)
SIZES = [(2, 2), (2, 4), (4, 4), (4, 12), (3, 9), (5, 20), (4, 18)]
FEWER = [(2, 1), (4, 1), (4, 2), (4, 3)]


def orders(schedule, pp, micro_batches, several):
    """Of each rank the (what, stage, micro-batch) that it computes, by torch's own text."""
    from torch.distributed.pipelining import schedules

    names = {
        schedules.FORWARD: "F", schedules.FULL_BACKWARD: "B",
        schedules.BACKWARD_INPUT: "I", schedules.BACKWARD_WEIGHT: "W",
    }  # fmt: skip
    rounds = max(1, micro_batches // pp)
    told = SimpleNamespace(
        pp_group_size=pp, n_local_stages=several, num_stages=pp * several,
        _n_microbatches=micro_batches, number_of_rounds=rounds,
        microbatches_per_round=micro_batches // rounds,
    )  # fmt: skip
    kind = getattr(schedules, SCHEDULES[schedule].name)
    for rank in range(pp):
        actions = kind._calculate_single_rank_operations(told, rank)
        yield [(names[a[1]], a[0], a[2]) for a in actions if a is not None]


def one_stage_a_rank(schedule, pp, micro_batches):
    """Like `orders`, of the two schedules that torch writes down as loops."""
    for rank in range(pp):
        first = micro_batches if schedule == "gpipe" else min(pp - rank, micro_batches)
        order = [("F", rank, n) for n in range(first)]
        for n in range(micro_batches):
            order.append(("B", rank, n))
            if first + n < micro_batches:
                order.append(("F", rank, first + n))
        yield order


def span(ranks, num_stages):
    """How long they take, of stages whose backward pass takes twice as long as the forward one."""
    takes = {"F": 1, "B": 2, "I": 1, "W": 1}
    ended, free, left = {}, [0] * len(ranks), [list(order) for order in ranks]
    while any(left):
        before = len(ended)
        for rank, order in enumerate(left):
            while order:
                what, stage, n = order[0]
                awaited = ("F", stage, n) if stage == num_stages - 1 else ("B", stage + 1, n)
                if what == "F":
                    awaited = ("F", stage - 1, n)
                if what != "W" and awaited[1] >= 0 and awaited not in ended:
                    break
                free[rank] = max(free[rank], ended.get(awaited, 0)) + takes[what]
                ended["B" if what == "I" else what, stage, n] = free[rank]
                order.pop(0)
        assert len(ended) > before, "the orders wait for each other"
    return max(free)


STAGES = {
    "gpipe": [1], "1f1b": [1], "interleaved-1f1b": [2, 3], "interleaved-zero-bubble": [2, 3],
    "zbv-zero-bubble": [2],
}  # fmt: skip
CASES = [
    (schedule, *size, several)
    for size in SIZES + FEWER
    for schedule, numbers in STAGES.items()
    for several in numbers
    if not (schedule.startswith("interleaved") and size == (4, 18))  # in rounds of as many
]


def order_of(schedule, pp, micro_batches, several):
    if several == 1:
        return list(one_stage_a_rank(schedule, pp, micro_batches))
    return list(orders(schedule, pp, micro_batches, several))


@pytest.mark.parametrize(("schedule", "pp", "micro_batches", "several"), CASES)
def test_the_first_rank_keeps_what_is_forward_and_not_yet_back(
    schedule, pp, micro_batches, several
):
    kept = most = 0
    for what, *_ in order_of(schedule, pp, micro_batches, several)[0]:
        kept += {"F": 1, "B": -1, "I": 0, "W": -1}[what]
        most = max(most, kept)
    told = passes_kept(schedule, micro_batches=micro_batches, pp_size=pp, stages_per_rank=several)
    assert told == most / several


@pytest.mark.parametrize(("schedule", "pp", "micro_batches", "several"), CASES)
def test_a_pipeline_fills_and_empties(schedule, pp, micro_batches, several):
    told = waiting_share(schedule, micro_batches=micro_batches, pp_size=pp, stages_per_rank=several)
    took = span(order_of(schedule, pp, micro_batches, several), pp * several)
    found = took / (3 * micro_batches * several) - 1
    kind = SCHEDULES[schedule]
    if kind.in_halves and micro_batches < (2 * pp - 1 if kind.v else pp):
        # Of so few that not all ranks have one, nothing is said to be put off.
        assert 0.49 * found < told < 3 * found
    else:
        assert told == pytest.approx(found)
