"""Which tokens count for the load of experts, with `balance_over="global_batch"`.

The loss of a micro-batch multiplies its own probabilities by the load of the whole batch (arXiv
2501.11873). The later micro-batches of a step are not known yet. So the load is that of all ranks
in the micro-batches up to this one, as with the paper's buffer. In a step of one micro-batch this
is exactly the load of the global batch.

Letters: E experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from mb_kernels.uncompiled import uncompiled
from mb_layers.model import in_backward
from torch import Tensor, nn

from mb_parallel.arguments import one_module


class StepCounts:
    """Tokens per expert of all ranks, in the step's micro-batches up to the current one.

    Args:
        over_ranks: adds counts up over the ranks.

    A micro-batch may pass a layer several times, as one tower of a retriever does for queries and
    for blocks; later micro-batches count all of these passes, each of them itself alone. What is
    recomputed counts once. Later passes do not count one without gradients, such as an evaluation
    in the middle of a step.
    """

    def __init__(self, over_ranks: Callable[[Tensor], Tensor]) -> None:
        self._over_ranks = over_ranks
        self._number = 0
        self._counts: dict[int, Tensor] = {}
        self._complete: set[int] = set()  # micro-batches that were counted in their forward pass

    @uncompiled
    def __call__(self, counts_E: Tensor) -> Tensor:
        """For a layer's `reduce_counts`."""
        counts_E = self._over_ranks(counts_E)
        earlier = [c for n, c in self._counts.items() if n < self._number]
        # The forward pass has not counted where torch's reentrant checkpoint runs it without
        # gradients: then the backward pass does, which computes it again.
        if torch.is_grad_enabled() and not (in_backward() and self._number in self._complete):
            before = self._counts.get(self._number)
            self._counts[self._number] = counts_E if before is None else before + counts_E
            if not in_backward():
                self._complete.add(self._number)
        return torch.stack([*earlier, counts_E]).sum(0)

    def begin(self, number: int) -> None:
        """The next forward pass is of micro-batch `number`; 0 begins a step."""
        if number == 0:
            self._counts.clear()
            self._complete.clear()
        self._counts.pop(number, None)  # of a forward pass that was given up
        self._complete.discard(number)
        self._number = number

    def resume(self, number: int) -> None:
        """The next backward pass is of micro-batch `number`."""
        self._number = number


def step_counts(model: nn.Module) -> list[StepCounts]:
    """The counts of the layers in `model` that balance over the global batch."""
    found = (getattr(module, "reduce_counts", None) for module in model.modules())
    return [counts for counts in found if isinstance(counts, StepCounts)]


def set_micro_batch(model: nn.Module, number: int) -> None:
    """Tell layers that balance over the global batch which micro-batch of the step comes next.

    Call it before every forward pass with 0, 1, ...; `Pipeline` does so itself. Without it each
    micro-batch counts as a batch of its own. What is recomputed in a backward pass counts as of the
    number told last: where layers recompute, run it before the next micro-batch's forward pass.
    """
    one_module(model)
    for counts in step_counts(model):
        counts.begin(number)
