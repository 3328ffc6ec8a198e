"""Samplers: every rank's slices, exact resume, and resume on another number of ranks."""

from __future__ import annotations

import hashlib
from itertools import chain, islice

import numpy as np
import pytest
from mb_data.sampler import BatchRampup, CyclicSampler, SequentialSampler, randperm


def flat(lists):
    return list(chain.from_iterable(lists))


def consume(kind, total, consumed, micro_batch_size, world_size, steps, **settings):
    """The samples of ``steps`` steps, step by step, over all ranks."""
    ranks = [
        islice(
            kind(
                total,
                consumed_samples=consumed,
                micro_batch_size=micro_batch_size,
                rank=rank,
                world_size=world_size,
                **settings,
            ),
            steps,
        )
        for rank in range(world_size)
    ]
    return [flat(step) for step in zip(*ranks, strict=True)]


def test_sequential_slices():
    sampler = SequentialSampler(23, consumed_samples=5, micro_batch_size=2, rank=1, world_size=3)
    assert list(sampler) == [[7, 8], [13, 14], [19, 20]]
    assert list(sampler) == [[7, 8], [13, 14], [19, 20]]
    assert len(sampler) == 3
    # One step less by a single sample: it is dropped for all ranks alike.
    one_less = SequentialSampler(22, consumed_samples=5, micro_batch_size=2, rank=1, world_size=3)
    assert len(one_less) == 2
    assert consume(SequentialSampler, 22, 5, 2, 3, 9) == [[*range(5, 11)], [*range(11, 17)]]


def test_sequential_keeps_the_rest_on_request():
    samplers = [
        SequentialSampler(
            9, consumed_samples=0, micro_batch_size=2, rank=r, world_size=3, drop_last=False
        )
        for r in range(3)
    ]
    assert [list(sampler) for sampler in samplers] == [
        [[0, 1], [6, 7]],
        [[2, 3], [8]],
        [[4, 5], []],
    ]
    assert [len(sampler) for sampler in samplers] == [2, 2, 2]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(SequentialSampler, {}), (CyclicSampler, {}), (CyclicSampler, {"seed": 5})],
    ids=["sequential", "cyclic", "cyclic-seed5"],
)
@pytest.mark.parametrize(("micro_batch_size", "world_size"), [(1, 12), (3, 2), (2, 3), (12, 1)])
def test_the_order_does_not_depend_on_the_ranks(kind, settings, micro_batch_size, world_size):
    total, batch = 125, 12
    steps = batch // (micro_batch_size * world_size)
    for consumed in (0, 12, 60):
        want = consume(kind, total, consumed, batch, 1, 3, **settings)
        got = consume(kind, total, consumed, micro_batch_size, world_size, 3 * steps, **settings)
        merged = [flat(got[i : i + steps]) for i in range(0, 3 * steps, steps)]
        assert merged == want


def test_cyclic_epochs_follow_without_a_gap():
    total = 10
    stream = flat(consume(CyclicSampler, total, 0, 3, 1, 20))
    for epoch in range(6):
        assert stream[epoch * total : (epoch + 1) * total] == randperm(total, epoch)
    # Resumed anywhere, in any epoch, it goes on; also when a step is longer than the dataset.
    for consumed in (0, 3, 9, 10, 27):
        assert (
            flat(consume(CyclicSampler, total, consumed, 3, 1, 5))
            == (stream[consumed : consumed + 15])
        )
    assert flat(consume(CyclicSampler, total, 3, 25, 1, 2)) == stream[3:53]


def test_cyclic_sharded_keeps_ranks_apart():
    total, steps = 29, 3  # 4 ranks × micro-batch 2: 24 samples an epoch
    epochs = consume(CyclicSampler, total, 0, 2, 4, 2 * steps, data_sharding=True)
    for epoch in (epochs[:steps], epochs[steps:]):
        assert sorted(flat(epoch)) == list(range(24))
    rank1 = CyclicSampler(
        total, consumed_samples=24, micro_batch_size=2, rank=1, world_size=4, data_sharding=True
    )
    order = [6 + i for i in randperm(6, 1)]
    assert list(islice(rank1, 3)) == [order[:2], order[2:4], order[4:]]
    (whole_step,) = consume(CyclicSampler, 8, 0, 2, 4, 1, data_sharding=True)
    assert sorted(whole_step) == list(range(8))
    for consumed in (8, 24, 40):
        assert consume(CyclicSampler, total, consumed, 2, 4, 1, data_sharding=True) == [
            epochs[consumed // 8]
        ]


# First three numbers and digest of torch.randperm(n, generator=Generator().manual_seed(seed)),
# as int64: hashlib.sha256(p.numpy().tobytes()).hexdigest()[:16]. torch itself is not needed here.
RANDPERM = {
    (3, 7): ([0, 1, 2], "ab25350e3e65efeb"),
    (1000, 0): ([44, 37, 675], "cee4a88ef6120e8e"),
    (1000, 1234): ([775, 760, 390], "ae8ae77dccd2f5e0"),
    (1000, 2**32 - 1): ([371, 805, 492], "7021b23ead0339fb"),
}


@pytest.mark.parametrize(("n", "seed"), RANDPERM)
def test_permutation_is_torch_randperm(n, seed):
    first, digest = RANDPERM[n, seed]
    order = randperm(n, seed)
    assert order[:3] == first
    assert sorted(order) == list(range(n))
    assert hashlib.sha256(np.array(order, "<i8").tobytes()).hexdigest()[:16] == digest


@pytest.mark.parametrize("n", [0, 1])
def test_smallest_permutations(n):
    assert randperm(n, 5) == list(range(n))


def test_permutation_of_epochs_behind_the_last_seed():
    """The largest seed of a sampler is 2**32 - 1, and an epoch is added to it."""
    assert randperm(9, 2**32 + 3) == randperm(9, 3)


@pytest.mark.parametrize("kind", [SequentialSampler, CyclicSampler])
def test_numbers_of_numpy_do_not_overflow(kind):
    """16 x 16 is 0 in eight bits: a rank would get no samples, and no error."""
    place = {"consumed_samples": 0, "micro_batch_size": 16, "rank": 15, "world_size": 16}
    small = {name: np.uint8(number) for name, number in place.items()}
    assert next(iter(kind(500, **small))) == next(iter(kind(500, **place)))
    assert next(iter(kind(np.uint16(500), **small))) == next(iter(kind(500, **place)))


@pytest.mark.parametrize("kind", [SequentialSampler, CyclicSampler])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"total_samples": 0}, "total_samples must be at least 1, got 0"),
        ({"consumed_samples": -1}, "consumed_samples must be at least 0, got -1"),
        ({"micro_batch_size": 0}, "micro_batch_size must be at least 1"),
        ({"world_size": 0}, "world_size must be at least 1"),
        ({"rank": 2}, "rank must lie between 0 and world_size - 1, got 2 of 2"),
        ({"rank": -1}, "rank must lie between"),
    ],
)
def test_bad_arguments(kind, change, message):
    arguments = {
        "total_samples": 9,
        "consumed_samples": 0,
        "micro_batch_size": 1,
        "rank": 0,
        "world_size": 2,
    } | change
    with pytest.raises(ValueError, match=message):
        kind(arguments.pop("total_samples"), **arguments)


def test_bad_positions():
    with pytest.raises(ValueError, match="no samples left: 9 of 9 are consumed; build"):
        SequentialSampler(9, consumed_samples=9, micro_batch_size=1, rank=0, world_size=1)
    with pytest.raises(ValueError, match="5 consumed samples lie inside a step of 2 samples on 2"):
        CyclicSampler(
            9, consumed_samples=5, micro_batch_size=2, rank=0, world_size=2, data_sharding=True
        )
    with pytest.raises(ValueError, match="3 samples do not fill one step of 2 samples on 2 ranks"):
        CyclicSampler(
            3, consumed_samples=0, micro_batch_size=2, rank=0, world_size=2, data_sharding=True
        )
    with pytest.raises(ValueError, match="seed must lie between"):
        CyclicSampler(3, consumed_samples=0, micro_batch_size=2, rank=0, world_size=2, seed=-1)


class TestBatchRampup:
    def test_grows_by_increments(self):
        ramp = BatchRampup(start=16, increment=8, samples=300, global_batch_size=40)
        assert list(ramp.sizes) == [16, 24, 32, 40]
        seen = {consumed: ramp.batch_size(consumed) for consumed in range(400)}
        assert [seen[n] for n in (0, 99, 100, 199, 200, 299, 300, 399)] == (
            [16, 16, 24, 24, 32, 32, 40, 40]
        )
        assert ramp.num_micro_batches(150, micro_batch_size=2, world_size=4) == 3

    def test_a_share_that_does_not_divide_grows_a_step_later(self):
        # 137 / (137 / 7) is 6.999..., in Megatron too: with 137 consumed six increments are over.
        ramp = BatchRampup(start=11, increment=5, samples=137, global_batch_size=46)
        assert [ramp.batch_size(n) for n in (136, 137, 138)] == [41, 41, 46]
        ramp = BatchRampup(start=11, increment=5, samples=0, global_batch_size=46)
        assert ramp.batch_size(0) == 46

    def test_grows_from_one_by_one(self):
        ramp = BatchRampup(start=1, increment=1, samples=4, global_batch_size=3)
        assert list(ramp.sizes) == [1, 2, 3]
        assert [ramp.batch_size(n) for n in range(6)] == [1, 1, 2, 2, 3, 3]

    def test_steps_through_the_samples(self):
        """Consumed as a trainer would: the sampler's micro-batches, grouped by the ramp-up."""
        ramp = BatchRampup(start=2, increment=2, samples=12, global_batch_size=6)
        batches = iter(
            SequentialSampler(40, consumed_samples=0, micro_batch_size=1, rank=1, world_size=2)
        )
        consumed, steps = 0, []
        while consumed < 24:
            n = ramp.num_micro_batches(consumed, micro_batch_size=1, world_size=2)
            steps.append(flat(islice(batches, n)))
            consumed += 2 * n
        assert steps == [[1], [3], [5], [7, 9], [11, 13], [15, 17, 19], [21, 23, 25]]

    def test_constant_when_start_is_the_end(self):
        ramp = BatchRampup(start=8, increment=4, samples=100, global_batch_size=8)
        assert {ramp.batch_size(n) for n in (0, 50, 100)} == {8}

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"start": 0}, "start and an increment of at least 1"),
            ({"increment": 0}, "increment of at least 1"),
            ({"samples": -1}, "samples of at least 0"),
            ({"start": 48}, "not below the start"),
            ({"increment": 7}, r"40 - 16 = 24 is no multiple of the increment 7"),
        ],
    )
    def test_bad_arguments(self, change, message):
        arguments = {"start": 16, "increment": 8, "samples": 300, "global_batch_size": 40}
        with pytest.raises(ValueError, match=message):
            BatchRampup(**(arguments | change))

    def test_sizes_must_fit_the_ranks(self):
        ramp = BatchRampup(start=16, increment=8, samples=300, global_batch_size=40)
        with pytest.raises(ValueError, match=r"sizes \[24, 40\] are no multiples .* 4 x 4 = 16"):
            ramp.num_micro_batches(0, micro_batch_size=4, world_size=4)
