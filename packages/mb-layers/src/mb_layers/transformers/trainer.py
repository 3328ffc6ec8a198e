"""Balancing without a loss under transformers' `Trainer`.

Models of DeepSeek-V3's kind choose experts with a bias that pre-training moved once per step
(arXiv 2408.15664); `Trainer` leaves it where it is. After `swap_blocks`:

    Trainer(model, ..., callbacks=[BalancingBiasCallback(rate=1e-3)])
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from transformers.trainer_callback import TrainerCallback

from mb_layers.model import Collected, collect, update_balancing_biases


class BalancingBiasCallback(TrainerCallback):
    """Moves the balancing biases of a model's layers by `rate` once per optimizer step.

    Args:
        rate: the step, 1e-3 in the paper.
        reduce_counts: sums counts [L, E] over the ranks that hold copies of the routers. None: over
            all ranks of the default process group, if there is one.
    """

    def __init__(
        self, *, rate: float, reduce_counts: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.rate = rate
        self.reduce_counts = reduce_counts or _sum_over_ranks
        self._stack = ExitStack()
        self._collected: Collected | None = None

    def on_step_begin(self, *args: Any, model: nn.Module, **kwargs: Any) -> None:
        """Count from the first micro-batch of a step on."""
        self._stack.close()
        self._collected = self._stack.enter_context(collect(model))

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Behind the optimizer's step: move the biases by what all its micro-batches counted."""
        self._stack.close()
        assert self._collected is not None
        update_balancing_biases([self._collected], rate=self.rate, reduce_counts=self.reduce_counts)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Leave nothing on the model."""
        self._stack.close()
        self._collected = None


def _sum_over_ranks(counts_LE: Tensor) -> Tensor:
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(counts_LE)
    return counts_LE
