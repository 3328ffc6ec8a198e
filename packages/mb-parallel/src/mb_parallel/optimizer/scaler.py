"""The loss scale of fp16 training by Megatron-LM's rules, kept on the device.

fp16 holds no gradients below 6e-8. So the loss is multiplied by a scale, gradients are divided by
it again, and steps whose gradients overflow are skipped. The scale starts at 2^32. The first
overflow is forgiven (a hysteresis of 2), each one after it halves the scale. After 1000 steps in a
row without an overflow the scale doubles, and only then one is forgiven again. It never falls
below 1.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mb_parallel.arguments import at_least_0


class GradScaler:
    """A dynamic loss scale; `growth_factor=1, backoff_factor=1` keeps it constant.

    Args:
        init_scale: at the start.
        growth_interval: clean steps in a row after which the scale grows.
        hysteresis: overflows until it shrinks.
        growth_factor, backoff_factor: what it is multiplied by then.
        min_scale: it does not fall below.

    Raises:
        ValueError: a number outside its range.
    """

    def __init__(
        self,
        init_scale: float = 2.0**32,
        *,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        min_scale: float = 1.0,
    ) -> None:
        at_least_0(
            init_scale=init_scale,
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            min_scale=min_scale,
        )
        rules = {
            # The loss and the gradients meet the scale in fp32.
            "2**-126 <= min_scale <= init_scale < 2**128": (
                2.0**-126 <= min_scale <= init_scale < 2.0**128
            ),
            "growth_interval of at least 1": growth_interval >= 1,
            "hysteresis of at least 1": hysteresis >= 1,
            "growth_factor of at least 1": growth_factor >= 1,
            "backoff_factor above 0, at most 1": 0 < backoff_factor <= 1,
        }
        for rule, kept in rules.items():
            if not kept:
                raise ValueError(
                    f"Expected {rule}, got init_scale={init_scale}, min_scale={min_scale}, "
                    f"growth_interval={growth_interval}, hysteresis={hysteresis}, "
                    f"growth_factor={growth_factor}, backoff_factor={backoff_factor}."
                )
        self._growth_interval, self._hysteresis = growth_interval, hysteresis
        self._growth, self._backoff, self._min = growth_factor, backoff_factor, min_scale
        # Scale, clean steps in a row, overflows left: powers of two and small counts, exact.
        numbers = [init_scale, 0.0, float(hysteresis)]
        self._state = torch.tensor(numbers, dtype=torch.float64, device="cpu")

    @classmethod
    def constant(cls, scale: float) -> GradScaler:
        """A scale that stays; steps that overflow are skipped all the same."""
        return cls(scale, growth_factor=1.0, backoff_factor=1.0, min_scale=min(1.0, scale))

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the scale, to call `backward` on."""
        return loss * self.scale_on(loss.device)

    def scale_on(self, device: torch.device) -> Tensor:
        """The scale, fp32 scalar on `device`; moves there at the first call, and stays."""
        if self._state.device != device:
            self._state = self._state.to(device)
        return self._state[0].float()

    def lowest(self) -> Tensor:
        """Whether no overflow can lower the scale any more, a bool scalar on its device."""
        scale = self._state[0]
        return self._lowered(scale) >= scale

    def _lowered(self, scale: Tensor) -> Tensor:
        return (scale * self._backoff).clamp(min=self._min)

    def update(self, found_inf: Tensor) -> None:
        """Count a step whose gradients held an infinity (`found_inf` not 0) or were clean.

        The flag is agreed by all ranks, as `clip_and_step` returns it.
        """
        scale, clean, left = self._state.to(found_inf.device).unbind()
        overflow = found_inf.reshape(()) != 0
        left = torch.where(overflow, left - 1, left)
        clean = torch.where(overflow, 0, clean + 1)
        grows = clean >= self._growth_interval
        shrunk = torch.where(left <= 0, self._lowered(scale), scale)
        scale = torch.where(overflow, shrunk, torch.where(grows, scale * self._growth, scale))
        clean, left = torch.where(grows, 0, clean), torch.where(grows, self._hysteresis, left)
        self._state = torch.stack((scale, clean, left))

    def state_dict(self) -> dict[str, float]:
        """Scale and counters, numbers; the host waits for the device."""
        scale, clean, left = self._state.tolist()
        return {"scale": scale, "growth_tracker": clean, "hysteresis_tracker": left}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from `state_dict()`.

        Raises:
            ValueError: other entries, as those of torch's scaler.
        """
        names = ("scale", "growth_tracker", "hysteresis_tracker")
        if not set(names) <= state.keys():
            raise ValueError(f"Expected {', '.join(names)}, got {', '.join(state) or 'nothing'}.")
        numbers = [float(state[name]) for name in names]
        self._state = torch.tensor(numbers, dtype=torch.float64, device=self._state.device)
