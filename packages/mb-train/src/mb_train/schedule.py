"""Learning rate and weight decay as functions of the number of samples consumed.

A schedule keeps no state: step i of a run trains with the values at the samples consumed before it,
so a resumed run, or one on another number of ranks, needs nothing but that count. Settings in
iterations are turned into samples with the global batch. The rules are Megatron-LM's:

    warm-up   lr = peak * n / warmup                          n <= warmup
    linear    lr = min + (1 - r) (peak - min)                 r = (n - warmup) / (decay - warmup)
    cosine    lr = min + (1 + cos(pi r)) / 2 (peak - min)
    inverse   lr = max(min, peak * sqrt(warmup) / sqrt(n))
    past the end of the decay  lr = min                           (but constant stays constant)

The first step therefore trains at rate 0 when there is a warm-up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mb_train.config import TrainConfig


@dataclass(frozen=True)
class Schedule:
    """Rates over a run; all lengths are samples."""

    peak: float
    minimum: float
    style: str
    warmup: int
    decay: int
    total: int
    weight_decay_start: float
    weight_decay_end: float
    weight_decay_style: str

    def lr(self, samples: int) -> float:
        """Learning rate of the step that begins after `samples` samples."""
        if self.warmup > 0 and samples <= self.warmup:
            return self.peak * samples / self.warmup
        if self.style == "constant":
            return self.peak
        if samples > self.decay:
            return self.minimum
        if self.style == "inverse-square-root":
            root = math.sqrt(max(self.warmup, 1)) / math.sqrt(max(samples, 1))
            return max(self.minimum, self.peak * root)
        ratio = (samples - self.warmup) / (self.decay - self.warmup)
        share = 1 - ratio if self.style == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1)
        return self.minimum + share * (self.peak - self.minimum)

    def weight_decay(self, samples: int) -> float:
        """Weight decay of the step that begins after `samples` samples."""
        if self.weight_decay_style == "constant":
            return self.weight_decay_end
        ratio = min(samples / self.total, 1.0)
        share = ratio
        if self.weight_decay_style == "cosine":
            share = 0.5 * (math.cos(math.pi * (1 - ratio)) + 1)
        span = self.weight_decay_end - self.weight_decay_start
        return self.weight_decay_start + share * span


def build_schedule(config: TrainConfig, batch_size: int) -> Schedule:
    """The schedule of a run with `batch_size` samples per step.

    Raises:
        ValueError: a warm-up that is not shorter than the decay.
    """
    total = train_samples(config, batch_size)
    if config.by_samples:
        decay, warmup = config.lr_decay_samples or total, config.lr_warmup_samples
    else:
        decay = (config.lr_decay_iters or 0) * batch_size or total
        warmup = config.lr_warmup_iters * batch_size
    if config.lr_warmup_fraction is not None:
        warmup = int(config.lr_warmup_fraction * decay)
    if warmup >= decay:
        raise ValueError(
            f"Expected the warm-up to be shorter than the decay, got {warmup} and {decay} samples. "
            "Shorten the warm-up or lengthen --lr-decay-iters (or -samples)."
        )
    assert config.lr is not None
    constant = config.weight_decay_incr_style == "constant"
    return Schedule(
        peak=config.lr,
        minimum=config.min_lr,
        style=config.lr_decay_style,
        warmup=warmup,
        decay=decay,
        total=total,
        weight_decay_start=config.weight_decay if constant else config.start_weight_decay or 0.0,
        weight_decay_end=config.weight_decay if constant else config.end_weight_decay or 0.0,
        weight_decay_style=config.weight_decay_incr_style,
    )


def train_iterations(config: TrainConfig, batch_size: int) -> int:
    """Number of steps of the run."""
    if config.train_samples is not None:
        return config.train_samples // batch_size
    assert config.train_iters is not None
    return config.train_iters


def train_samples(config: TrainConfig, batch_size: int) -> int:
    """Number of samples of the run."""
    return train_iterations(config, batch_size) * batch_size
