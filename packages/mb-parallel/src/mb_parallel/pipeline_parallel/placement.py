"""Which layers make a stage, and which stages a rank runs.

looped (all schedules but zbv, with        V (zbv): each rank has one stage of the
one stage a rank or several)               way down and one of the way up

rank   0  1  2  3                          rank   0  1  2  3
stage  0  1  2  3                          stage  0  1  2  3
       4  5  6  7                                 7  6  5  4
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from mb_parallel.arguments import at_least_1


class Kind(NamedTuple):
    """A schedule.

    name: of its class in `torch.distributed.pipelining.schedules`.
    many: whether a rank may run several stages.
    v: whether a rank runs two, in the V above.
    in_halves: whether gradients of inputs and of weights are computed separately.
    """

    name: str
    many: bool
    v: bool = False
    in_halves: bool = False

    def load(self, *, micro_batches: int, num_stages: int, train: bool) -> Any:
        """The class to run so many micro-batches with."""
        # Imported late: it brings in much of torch's compiler.
        from torch.distributed.pipelining import schedules

        name = self.name
        if not self.many and (not train or micro_batches < num_stages):
            name = "ScheduleGPipe"  # 1F1B would run alike, but torch's refuses so few micro-batches
        elif not self.v and not train:
            name = "ScheduleLoopedBFS"
        return getattr(schedules, name)


SCHEDULES: Mapping[str, Kind] = MappingProxyType(
    {
        "gpipe": Kind("ScheduleGPipe", many=False),
        "1f1b": Kind("Schedule1F1B", many=False),
        "interleaved-1f1b": Kind("ScheduleInterleaved1F1B", many=True),
        "interleaved-zero-bubble": Kind("ScheduleInterleavedZeroBubble", many=True, in_halves=True),
        "zbv-zero-bubble": Kind("ScheduleZBVZeroBubble", many=True, v=True, in_halves=True),
    }
)


def schedule_kind(name: str) -> Kind:
    """The schedule of this name.

    Raises:
        ValueError: there is none.
    """
    if name not in SCHEDULES:
        raise ValueError(f"Expected a schedule of {', '.join(SCHEDULES)}, got {name!r}.")
    return SCHEDULES[name]


def stage_indices(
    schedule: str, *, pp_size: int, pp_rank: int, stages_per_rank: int = 1
) -> list[int]:
    """The stages of a rank, out of pp_size * stages_per_rank.

    Raises:
        ValueError: more or fewer stages than the schedule runs on a rank, or no such rank.
    """
    kind = schedule_kind(schedule)
    at_least_1(pp_size=pp_size, stages_per_rank=stages_per_rank)
    if not 0 <= pp_rank < pp_size:
        raise ValueError(f"Expected pp_rank from 0 up to but not {pp_size}, got {pp_rank}.")
    if stages_per_rank > 1 and not kind.many:
        raise ValueError(
            f"Expected one stage per rank with {schedule}, got {stages_per_rank}. For several take "
            "interleaved-1f1b."
        )
    if kind.v:
        if stages_per_rank != 2:
            raise ValueError(
                f"Expected 2 stages per rank with {schedule}, got {stages_per_rank}. Cut the "
                f"layers into {2 * pp_size} stages."
            )
        return [pp_rank, 2 * pp_size - 1 - pp_rank]
    return [pp_rank + turn * pp_size for turn in range(stages_per_rank)]


def check_micro_batches(schedule: str, micro_batches: int, *, pp_size: int) -> None:
    """Raise ValueError if a step of so many micro-batches cannot be run by `schedule`.

    Interleaved schedules take them in rounds of as many, micro_batches // pp_size rounds.
    """
    kind = schedule_kind(schedule)
    at_least_1(micro_batches=micro_batches, pp_size=pp_size)
    if kind.many and not kind.v and micro_batches % max(micro_batches // pp_size, 1):
        raise ValueError(
            f"Expected micro-batches of a step in a multiple of pp with {schedule}, got "
            f"{micro_batches} and pp = {pp_size}. Change their number, or take 1f1b."
        )


def passes_kept(
    schedule: str, *, micro_batches: int, pp_size: int, stages_per_rank: int = 1
) -> float:
    """Micro-batches of a step whose forward passes the first rank keeps at once, at the most.

    In the mean over its stages: 2.5 are all of one stage's and half of another's, say.
    """
    kind, several = schedule_kind(schedule), stages_per_rank
    if kind.v:  # on the way down as many as come before the first is back, on the way up one
        return (min(micro_batches, 2 * pp_size - 1) + 1) / 2
    if not kind.many:
        return micro_batches if schedule == "gpipe" else min(micro_batches, pp_size)
    of_a_round = micro_batches // max(micro_batches // pp_size, 1)
    hops = (1 if kind.in_halves else 2) * (pp_size - 1)
    return min((several - 1) * of_a_round + hops + 1, micro_batches * several) / several


def waiting_share(
    schedule: str, *, micro_batches: int, pp_size: int, stages_per_rank: int = 1
) -> float:
    """How long a rank waits for others in a step, over how long it computes, stages being equal.

    That is while the pipeline fills and empties. Gradients of weights, a third of what is computed,
    can be put off until then, as zero-bubble schedules do.
    """
    # Micro-batches that are too few for all ranks to have one at once wait in each stage.
    missing, filling = max(pp_size - micro_batches, 0), min(pp_size, micro_batches) - 1
    left = 1 / 3 if schedule_kind(schedule).in_halves else 1.0
    return (missing + left * filling / stages_per_rank) / micro_batches


def rank_of_stage(schedule: str, stage: int, *, pp_size: int) -> int:
    """The rank that `stage_indices` gives a stage."""
    turn, place = divmod(stage, pp_size)
    return pp_size - 1 - place if schedule_kind(schedule).v and turn % 2 else place


def split_layers(
    num_layers: int, num_stages: int, *, first_lighter: int = 0, last_lighter: int = 0
) -> list[range]:
    """The layers of each stage, split as evenly as possible; early stages get the remainder.

    Args:
        first_lighter, last_lighter: how many layers fewer the first and the last stage get, because
            they have the embedding and the head. A head over a vocabulary of V costs as much as
            V / (12 D) dense layers of width D.

    Raises:
        ValueError: a stage would be without layers, or a negative number.
    """
    at_least_1(num_layers=num_layers, num_stages=num_stages)
    if first_lighter < 0 or last_lighter < 0:
        raise ValueError(
            f"Expected ends lighter by 0 or more layers, got {first_lighter} and {last_lighter}."
        )
    share, left = divmod(num_layers + first_lighter + last_lighter, num_stages)
    sizes = [share + (stage < left) for stage in range(num_stages)]
    sizes[0] -= first_lighter
    sizes[-1] -= last_lighter
    if min(sizes) < 1:
        raise ValueError(
            f"Expected every stage to have a layer, got {sizes} for {num_layers} layers, the first "
            f"stage lighter by {first_lighter} and the last by {last_lighter}. Take fewer stages."
        )
    ends = [sum(sizes[: stage + 1]) for stage in range(num_stages)]
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
