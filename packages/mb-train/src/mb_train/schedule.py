"""Learning rate, weight decay and batch size as functions of the number of samples consumed.

A schedule keeps no state: step i of a run trains with the values at the samples consumed before it,
so a resumed run, or one on another number of ranks, needs nothing but that count. Settings in
iterations are turned into samples with the global batch. The rules are Megatron-LM's:

    warm-up   lr = start + (peak - start) * n / warmup        n <= warmup
    linear    lr = min + (1 - r) (peak - min)                 r = (n - warmup) / (decay - warmup)
    cosine    lr = min + (1 + cos(pi r)) / 2 (peak - min)
    inverse   lr = max(min, peak * sqrt(warmup) / sqrt(n))
    WSD       lr = peak, and at the end of the decay min + share(r) (peak - min), with
              r = (n - (decay - anneal)) / anneal                 n > decay - anneal
              share = 1 - r; (1 + cos(pi r)) / 2; 2^(1-r) - 1 (exponential); 1 - sqrt(r)
    past the end of the decay  lr = min                           (but constant stays constant)

The first step of a warm-up therefore trains at its start, --lr-warmup-init, which is 0. A step that
is skipped (fp16, an overflow) does not move the rates on though its samples are consumed: they
count the samples of the steps that were taken. With --no-load-optim they begin anew, and count the
samples from there on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import mb_data

from mb_train.config import TrainConfig

# What is left of a decay, of 1, when `r` of it is over.
_SHARES: Mapping[str, Callable[[float], float]] = {
    "linear": lambda r: 1 - r,
    "cosine": lambda r: 0.5 * (math.cos(math.pi * r) + 1),
    "exponential": lambda r: 2.0 ** (1 - r) - 1,
    "minus_sqrt": lambda r: 1 - math.sqrt(r),
}


@dataclass(frozen=True)
class Schedule:
    """Rates over a run; all lengths are samples."""

    start: float
    peak: float
    minimum: float
    style: str
    warmup: float
    decay: int
    anneal: int
    anneal_style: str
    weight_decay_start: float
    weight_decay_end: float
    weight_decay_style: str
    weight_decay_length: int

    def lr(self, samples: int) -> float:
        """Learning rate of the step that begins after `samples` samples of steps taken."""
        if self.warmup > 0 and samples <= self.warmup:
            return self.start + (self.peak - self.start) * samples / self.warmup
        if self.style == "constant":
            return self.peak
        if samples > self.decay:
            return self.minimum
        if self.style == "inverse-square-root":
            root = math.sqrt(max(self.warmup, 1)) / math.sqrt(max(samples, 1))
            return max(self.minimum, self.peak * root)
        begin, shape = self.warmup, self.style
        if self.style == "WSD":
            begin, shape = self.decay - self.anneal, self.anneal_style
        ratio = max(samples - begin, 0.0) / (self.decay - begin or 1)  # WSD may have no decay
        return self.minimum + _SHARES[shape](ratio) * (self.peak - self.minimum)

    def between(self, peak: float, minimum: float) -> Schedule:
        """The same course between other rates."""
        return dataclasses.replace(self, peak=peak, minimum=minimum)

    def weight_decay(self, samples: int) -> float:
        """Weight decay of the step that begins after `samples` samples of steps taken."""
        if self.weight_decay_style == "constant":
            return self.weight_decay_end
        ratio = min(samples / self.weight_decay_length, 1.0)
        share = ratio
        if self.weight_decay_style == "cosine":
            share = 0.5 * (math.cos(math.pi * (1 - ratio)) + 1)
        span = self.weight_decay_end - self.weight_decay_start
        return self.weight_decay_start + share * span


def build_schedule(config: TrainConfig, batch_size: int) -> Schedule:
    """The schedule of a run with `batch_size` samples per step.

    Raises:
        ValueError: a warm-up that is not shorter than the decay, or WSD's last part longer.
    """
    total = train_samples(config, batch_size)
    if config.by_samples:
        decay: int = config.lr_decay_samples or total
        warmup: float = config.lr_warmup_samples
        incr: int = config.weight_decay_incr_samples or total
    else:
        decay = (config.lr_decay_iters or 0) * batch_size or total
        warmup = config.lr_warmup_iters * batch_size
        incr = (config.weight_decay_incr_iters or 0) * batch_size or total
    if config.lr_warmup_fraction is not None:
        warmup = config.lr_warmup_fraction * decay
    if warmup >= decay:
        raise ValueError(
            f"Expected the warm-up to be shorter than the decay, got {warmup:.0f} and {decay} "
            "samples. Shorten the warm-up (--lr-warmup-iters, -samples or -fraction) or lengthen "
            "--lr-decay-iters (or -samples)."
        )
    anneal = config.lr_wsd_decay_samples or (config.lr_wsd_decay_iters or 0) * batch_size
    if config.lr_decay_style == "WSD" and anneal > decay:
        raise ValueError(
            f"Expected --lr-wsd-decay-iters (or -samples) of at most the decay's, got {anneal} and "
            f"{decay} samples. Shorten it, or lengthen --lr-decay-iters (or -samples)."
        )
    assert config.lr is not None
    constant = config.weight_decay_incr_style == "constant"
    return Schedule(
        peak=config.lr,
        start=config.lr_warmup_init,
        minimum=config.min_lr,
        style=config.lr_decay_style,
        warmup=warmup,
        decay=decay,
        anneal=anneal,
        anneal_style=config.lr_wsd_decay_style,
        weight_decay_start=config.weight_decay if constant else config.start_weight_decay or 0.0,
        weight_decay_end=config.weight_decay if constant else config.end_weight_decay or 0.0,
        weight_decay_style=config.weight_decay_incr_style,
        weight_decay_length=incr,
    )


class BatchSizes:
    """How many sequences each step takes: as many each time, or more and more (ramp-up).

    With `--rampup-batch-size START INCREMENT SAMPLES` the batch grows from START by INCREMENT after
    every equal share of SAMPLES consumed, Megatron's rule. A function of the samples consumed: a
    run that is resumed, or that runs on another number of ranks, takes the same steps.

    Args:
        config: the run.
        full: sequences of a step once the ramp-up is over.
        step: sequences of a micro-batch on each data-parallel rank; divides every size.

    Raises:
        ValueError: increments that do not lead to `full`, or a size that is no such multiple.
    """

    def __init__(self, config: TrainConfig, full: int, *, step: int = 1) -> None:
        self.full, self._step = full, step
        self._rampup: mb_data.BatchRampup | None = None
        if config.rampup_batch_size is not None:
            start, increment, samples = config.rampup_batch_size
            self._rampup = mb_data.BatchRampup(
                start=start, increment=increment, samples=samples, global_batch_size=full
            )
            uneven = [size for size in self._rampup.sizes if size % step]
            if uneven:
                raise ValueError(
                    f"Expected every batch of --rampup-batch-size to be a multiple of micro batch "
                    f"x data-parallel ranks = {step}, got {uneven[0]}. Change START or INCREMENT."
                )

    @property
    def all(self) -> list[int]:
        """Every size that a step may have."""
        return [self.full] if self._rampup is None else list(self._rampup.sizes)

    def size(self, consumed_samples: int) -> int:
        """Sequences of the step that begins after `consumed_samples`."""
        if self._rampup is None:
            return self.full
        return self._rampup.batch_size(consumed_samples)

    def micro_batches(self, size: int) -> int:
        """Of each rank in a step of `size` sequences."""
        return size // self._step

    def steps(self, samples: int, consumed: int = 0) -> int:
        """Whole steps from `consumed` to `samples`; what does not fill the last one is left out."""
        steps = 0
        while (size := self.size(consumed)) < self.full and consumed + size <= samples:
            steps, consumed = steps + 1, consumed + size
        return steps + max(samples - consumed, 0) // self.full


def train_iterations(
    config: TrainConfig, sizes: BatchSizes, *, iteration: int = 0, consumed_samples: int = 0
) -> int:
    """Number of steps of the run, which stands at `iteration`: those before may have had batches
    of other sizes.

    Raises:
        ValueError: a run of no step.
    """
    if config.train_samples is not None:
        steps = sizes.steps(config.train_samples, consumed_samples)
        if not steps and not consumed_samples:
            raise ValueError(
                f"Expected --train-samples of at least {sizes.size(0)}, the batch of the first "
                f"step, got {config.train_samples}. Raise it, or lower --global-batch-size."
            )
        return iteration + steps
    assert config.train_iters is not None
    return config.train_iters


def train_samples(config: TrainConfig, batch_size: int) -> int:
    """Sequences of the run, those of an incomplete last batch included."""
    if config.train_samples is not None:
        return config.train_samples
    assert config.train_iters is not None
    return config.train_iters * batch_size
