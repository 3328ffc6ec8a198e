"""Fields of the learning rate: its peak, its warm-up, its decay."""

from __future__ import annotations

from dataclasses import dataclass

from mb_train.config.field import AT_LEAST_0, FRACTION, POSITIVE, flag, flag_name

_STYLES = ("linear", "cosine", "inverse-square-root", "WSD")
_FALLING = ("lr_decay_style", *_STYLES)
_WARM_UP = (("lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples"),)


@dataclass(frozen=True, kw_only=True)
class RateFields:
    """The learning rate over the run."""

    lr: float | None = flag("peak learning rate", bounds=POSITIVE, on_load="said", required=True)
    min_lr: float = flag(
        "learning rate at the end of the decay and after it", 0.0, bounds=AT_LEAST_0,
        on_load="said", needs=_FALLING,
    )  # fmt: skip
    decoupled_lr: float | None = flag(
        "peak learning rate of the embeddings of tokens and of the head; default --lr",
        bounds=POSITIVE, on_load="said",
    )  # fmt: skip
    decoupled_min_lr: float | None = flag(
        "theirs at the end of the decay; default --min-lr", bounds=AT_LEAST_0, on_load="said",
        needs=[("decoupled_lr",), _FALLING],
    )  # fmt: skip
    lr_decay_style: str = flag(
        "shape of the decay", "linear",
        choices=("constant", *_STYLES), on_load="said",
    )  # fmt: skip
    lr_decay_iters: int | None = flag(
        "steps until --min-lr; default the length of training", bounds=POSITIVE, on_load="said",
        in_force="decay_length",
    )  # fmt: skip
    lr_decay_samples: int | None = flag(
        "sequences until --min-lr, with --train-samples", bounds=POSITIVE, on_load="said",
        in_force="decay_length",
    )  # fmt: skip
    lr_wsd_decay_style: str = flag(
        "shape of the decay at the end of WSD: warm-up, then --lr, then a decay", "exponential",
        choices=("exponential", "linear", "cosine", "minus_sqrt"), on_load="said",
        needs=("lr_decay_style", "WSD"),
    )  # fmt: skip
    lr_wsd_decay_iters: int | None = flag(
        "steps of that decay, the last of --lr-decay-iters; 0: none", bounds=AT_LEAST_0,
        on_load="said",
        needs=("lr_decay_style", "WSD"),
    )  # fmt: skip
    lr_wsd_decay_samples: int | None = flag(
        "sequences of that decay, with --train-samples", bounds=AT_LEAST_0, on_load="said",
        needs=("lr_decay_style", "WSD"),
    )  # fmt: skip
    lr_warmup_init: float = flag(
        "learning rate at which the warm-up begins", 0.0, bounds=AT_LEAST_0, on_load="said",
        needs=_WARM_UP,
    )  # fmt: skip
    lr_warmup_fraction: float | None = flag(
        "share of the decay spent in linear warm-up",
        bounds=FRACTION,
        on_load="said",
        also=("--warmup",),
        instead_of=("lr_warmup_iters", "lr_warmup_samples"),
    )
    lr_warmup_iters: int = flag(
        "steps of linear warm-up",
        0,
        bounds=AT_LEAST_0,
        on_load="said",
        instead_of=("lr_warmup_fraction", "lr_warmup_samples"),
    )
    lr_warmup_samples: int = flag(
        "sequences of linear warm-up, with --train-samples",
        0,
        bounds=AT_LEAST_0,
        on_load="said",
        instead_of=("lr_warmup_fraction", "lr_warmup_iters"),
    )

    @property
    def rates_of_ends(self) -> tuple[float, float] | None:
        """Peak and least rate of embeddings and head; None: those of everything else."""
        if self.decoupled_lr is None:
            return None
        least = self.min_lr if self.decoupled_min_lr is None else self.decoupled_min_lr
        return self.decoupled_lr, least

    def check_rates(self, *, by_samples: bool) -> None:
        """Raise ValueError for settings of the schedule that contradict each other."""
        if self.min_lr > (self.lr or 0):
            raise ValueError(
                f"Expected --min-lr of at most --lr {self.lr}, got {self.min_lr}. Give both: a "
                "recipe has both, and so has the run to go on from."
            )
        if self.rates_of_ends is not None and self.rates_of_ends[1] > self.rates_of_ends[0]:
            raise ValueError(
                f"Expected --decoupled-min-lr of at most --decoupled-lr {self.decoupled_lr}, got "
                f"{self.rates_of_ends[1]}, by default --min-lr's. Give both."
            )
        for name in ("lr", "decoupled_lr"):
            if self.lr_warmup_init > (peak := getattr(self, name) or self.lr_warmup_init):
                raise ValueError(
                    f"Expected --lr-warmup-init of at most {flag_name(name)} {peak}, got "
                    f"{self.lr_warmup_init}."
                )
        unit, other = ("samples", "iters") if by_samples else ("iters", "samples")
        for course in ("lr_decay", "lr_warmup", "lr_wsd_decay", "weight_decay_incr"):
            if getattr(self, name := f"{course}_{other}"):
                raise ValueError(
                    f"Expected the schedule in the unit of --train-{unit}, got {flag_name(name)}."
                )
        if self.lr_decay_style == "WSD" and getattr(self, f"lr_wsd_decay_{unit}") is None:
            raise ValueError(f"Expected --lr-wsd-decay-{unit} with --lr-decay-style WSD, got none.")
        warmup = self.lr_warmup_iters or self.lr_warmup_samples
        if self.lr_warmup_fraction is not None and warmup:
            raise ValueError("Expected one kind of warm-up, got --lr-warmup-fraction and another.")
