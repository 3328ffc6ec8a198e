"""Which samples a data-parallel rank trains on next, given how many have been consumed so far.

A sampler is a list of micro-batches of sample indices for one rank. It holds no position: the
trainer counts consumed samples (over all ranks), saves that number, and builds the sampler from it
again, on as many ranks as there are then. N micro-batches in a row are the same global set of
samples for every product micro_batch_size × world_size × N, so a run resumed on another number of
ranks consumes what it would have consumed.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mb_data.mersenne import check_seed
from mb_data.words import counted


class SequentialSampler:
    """Samples in order, each once. Megatron's ``--dataloader-type single``.

    Each step takes the next micro_batch_size × world_size samples; rank r gets the r-th slice.

    Args:
        total_samples: in the dataset.
        consumed_samples: already used, by all ranks together; the iteration starts there.
        micro_batch_size: samples of one rank in one micro-batch.
        rank, world_size: of data parallelism.
        drop_last: leave out a last step that does not fill every rank; otherwise its slices are
            shorter, and empty on the later ranks.

    Raises:
        ValueError: an argument out of range, or no sample left.
    """

    def __init__(
        self,
        total_samples: int,
        *,
        consumed_samples: int,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        drop_last: bool = True,
    ) -> None:
        total_samples, consumed_samples, micro_batch_size, rank, world_size = _checked(
            total_samples, consumed_samples, micro_batch_size, rank, world_size
        )
        if consumed_samples >= total_samples:
            raise ValueError(
                f"no samples left: {consumed_samples:,} of {total_samples:,} are consumed; "
                "build the dataset with more samples, or start again from 0"
            )
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.rank = rank
        self.world_size = world_size
        self.drop_last = drop_last

    def __len__(self) -> int:
        """Micro-batches of this rank from ``consumed_samples`` on."""
        left, step = self.total_samples - self.consumed_samples, self._step
        return left // step if self.drop_last else -(-left // step)

    def __iter__(self) -> Iterator[list[int]]:
        for begin in range(self.consumed_samples, self.total_samples, self._step):
            if self.drop_last and begin + self._step > self.total_samples:
                return
            start = begin + self.rank * self.micro_batch_size
            yield list(range(start, min(start + self.micro_batch_size, self.total_samples)))

    @property
    def _step(self) -> int:
        return self.micro_batch_size * self.world_size


class CyclicSampler:
    """Endless epochs, each in a new random order. Megatron's ``--dataloader-type cyclic``.

    The order of epoch e is ``torch.randperm`` seeded with ``seed + e``, as in Megatron (where the
    seed is 0), computed without torch.

    By default one order covers the whole dataset, epochs follow each other without a gap, and of
    the next micro_batch_size × world_size samples rank r gets the r-th slice. So position
    ``consumed_samples`` means the same on any number of ranks, and micro-batches hold the same
    samples. The steps are those of Megatron's ``--no-data-sharding`` if the dataset is a multiple
    of a step, the only case in which that resumes on another number of ranks; there the ranks get
    the samples of a step by turns.

    With ``data_sharding``, Megatron's default, every rank shuffles its own contiguous part of the
    dataset, and samples beyond a multiple of a step are left out. The parts follow from the number
    of ranks: resumed on another number, an epoch repeats some samples and misses others.

    Args:
        total_samples: in the dataset.
        consumed_samples: already used, by all ranks together; may lie in any epoch.
        micro_batch_size: samples of one rank in one micro-batch.
        rank, world_size: of data parallelism.
        seed: of epoch 0.
        data_sharding: see above.

    Raises:
        ValueError: an argument out of range; with ``data_sharding``, a dataset smaller than a
            step, or a position inside one.
    """

    def __init__(
        self,
        total_samples: int,
        *,
        consumed_samples: int,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        seed: int = 0,
        data_sharding: bool = False,
    ) -> None:
        total_samples, consumed_samples, micro_batch_size, rank, world_size = _checked(
            total_samples, consumed_samples, micro_batch_size, rank, world_size
        )
        seed = check_seed(seed)
        step, ranks = micro_batch_size * world_size, counted(world_size, "rank")
        if data_sharding and total_samples < step:
            raise ValueError(
                f"{total_samples} samples do not fill one step of {micro_batch_size} samples on "
                f"{ranks}; use a smaller micro-batch or data_sharding=False"
            )
        if data_sharding and consumed_samples % step:
            raise ValueError(
                f"{consumed_samples} consumed samples lie inside a step of {micro_batch_size} "
                f"samples on {ranks}; with data_sharding resume on whole steps"
            )
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.data_sharding = data_sharding

    def __iter__(self) -> Iterator[list[int]]:
        return self._iterate_sharded() if self.data_sharding else self._iterate_global()

    def _iterate_global(self) -> Iterator[list[int]]:
        epoch, position = divmod(self.consumed_samples, self.total_samples)
        order = randperm(self.total_samples, self.seed + epoch)
        step = self.micro_batch_size * self.world_size
        while True:
            chunk = order[position : position + step]
            position += step
            while len(chunk) < step:
                position = step - len(chunk)
                epoch += 1
                order = randperm(self.total_samples, self.seed + epoch)
                chunk = chunk + order[:position]
            yield chunk[self.rank * self.micro_batch_size :][: self.micro_batch_size]

    def _iterate_sharded(self) -> Iterator[list[int]]:
        steps = self.total_samples // (self.micro_batch_size * self.world_size)
        bucket = steps * self.micro_batch_size  # samples of one rank in one epoch
        epoch, position = divmod(self.consumed_samples // self.world_size, bucket)
        while True:
            order = randperm(bucket, self.seed + epoch)
            for start in range(position, bucket, self.micro_batch_size):
                chunk = order[start : start + self.micro_batch_size]
                yield [self.rank * bucket + index for index in chunk]
            epoch, position = epoch + 1, 0


@dataclass(frozen=True, kw_only=True)
class BatchRampup:
    """A global batch that grows while training. Megatron's ``--rampup-batch-size``.

    From ``start``, by ``increment`` after every equal share of ``samples``, to
    ``global_batch_size`` once ``samples`` are consumed. Micro-batches do not change, only how many
    of them make a step, so the samplers know nothing of it.

    Raises:
        ValueError: the sizes are not positive, or increments do not lead from the first to the
            last; Megatron's division by zero when both are equal is a constant batch here.
    """

    start: int
    increment: int
    samples: int
    global_batch_size: int

    def __post_init__(self) -> None:
        grow = self.global_batch_size - self.start
        if self.start < 1 or self.increment < 1 or self.samples < 0 or grow < 0:
            raise ValueError(
                "batch ramp-up: expected a start and an increment of at least 1, samples of at "
                f"least 0 and a global batch not below the start, got {self}"
            )
        if grow % self.increment:
            raise ValueError(
                f"batch ramp-up: {self.global_batch_size} - {self.start} = {grow} is no multiple "
                f"of the increment {self.increment}"
            )

    @property
    def sizes(self) -> range:
        """Every global batch size that will be used, in order."""
        return range(self.start, self.global_batch_size + 1, self.increment)

    def batch_size(self, consumed_samples: int) -> int:
        """Samples of the next step, all ranks together."""
        increments = len(self.sizes) - 1
        if consumed_samples > self.samples or not (self.samples and increments):
            return self.global_batch_size
        # Megatron's float division, so that the batch grows at the same step as there.
        return self.start + int(consumed_samples / (self.samples / increments)) * self.increment

    def num_micro_batches(
        self, consumed_samples: int, *, micro_batch_size: int, world_size: int
    ) -> int:
        """Micro-batches that each rank runs in the next step.

        Raises:
            ValueError: some size of the ramp-up is no multiple of micro_batch_size x world_size.
        """
        step = micro_batch_size * world_size
        uneven = [size for size in self.sizes if size % step]
        if uneven:
            raise ValueError(
                f"batch ramp-up: sizes {uneven} are no multiples of micro_batch_size x world_size "
                f"= {micro_batch_size} x {world_size} = {step}; change start or increment"
            )
        return self.batch_size(consumed_samples) // step


def randperm(n: int, seed: int) -> list[int]:
    """``torch.randperm(n)`` after ``torch.manual_seed(seed)`` on CPU, as a list.

    Both torch and NumPy's legacy generator are MT19937 seeded by the same rule. torch swaps entry
    i with entry i + z % (n - i), where z is the next 32-bit output, for i from 0 to n - 2. (From
    n = 2**32 / 20 on torch draws 64 bits; there the order is a different one.)
    """
    words = np.random.RandomState(seed % 2**32).randint(0, 2**32, max(n - 1, 0), dtype=np.uint32)
    steps = words % np.arange(n, n - len(words), -1, dtype=np.uint32)
    # Not a list: swapping boxed numbers all over the heap takes twice as long.
    order = array("q", range(n))
    for i, step in enumerate(steps.tolist()):
        j = i + step
        order[i], order[j] = order[j], order[i]
    return order.tolist()


def _checked(*numbers: int) -> list[int]:
    """What both samplers are given, as ints of Python: products of NumPy's may overflow."""
    values = [operator.index(number) for number in numbers]
    names = ("total_samples", "consumed_samples", "micro_batch_size", "rank", "world_size")
    for name, value, least in zip(names, values, (1, 0, 1, None, 1), strict=True):
        if least is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    *_, rank, world_size = values
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must lie between 0 and world_size - 1, got {rank} of {world_size}")
    return values
