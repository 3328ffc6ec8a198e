"""How much memory to allocate for rows whose number only the device knows: three policies.

"all_gather" and "peer" bring tokens to experts in static shapes. Only the device knows how many
slots are for this rank's experts, but the host allocates what the experts save for the backward.
No policy drops a row:

    "worst"    room for every slot that could come. Nothing overflows, the host never waits.
    "exact"    room for the slots that came. The host reads their number once a layer, and waits.
    "budget"   room for `budget` times the slots of balanced routing. If more come, the output is
               NaN, the device notes it, and `within_budget` runs the step again with "exact".

Letters: E experts, P ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterable
from typing import Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from mb_kernels import Bins
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from mb_parallel.arguments import several
from mb_parallel.expert_parallel.placement import Placement
from mb_parallel.random import rng_state, set_rng_state

Policy = Literal["worst", "exact", "budget"]
Result = TypeVar("Result")


class Rows:
    """The policy, one object for all layers of a model.

    Args:
        policy: see above.
        budget: for "budget": room as a multiple of the slots of balanced routing, at least 1.

    Raises:
        ValueError: another policy or a budget below 1.
    """

    def __init__(self, policy: str = "worst", budget: float = 2.0) -> None:
        if policy not in get_args(Policy):
            known = ", ".join(get_args(Policy))
            raise ValueError(f"Expected row_policy to be one of {known}, got {policy!r}.")
        if not (isinstance(budget, int | float) and budget >= 1):
            raise ValueError(
                f"Expected row_budget of at least 1, the share of balanced routing, got {budget!r}."
            )
        self.policy, self.budget = policy, budget
        self._overflow: Tensor | None = None

    def most(self, bins: Bins, placement: Placement, tokens: int, top_k: int) -> int | None:
        """The number of slots to make room for, or None for all that could come.

        Args:
            bins: slots of this rank's experts.
            placement: of the experts on the ranks.
            tokens: of all ranks.
            top_k: choices of a token.
        """
        return None if self.policy == "worst" else self._room(bins, placement, tokens, top_k)

    # Takes integers: torch 2.13 loses a float made of sizes at a break of its graph (in a mode).
    @_disable_dynamo
    def _room(self, bins: Bins, placement: Placement, tokens: int, top_k: int) -> int:
        if self.policy == "exact" or not torch.is_grad_enabled():
            return max(int(bins.offsets_E1[-1]), 1)
        balanced = placement.balanced_slots(tokens, top_k)
        room = max(math.ceil(self.budget * balanced), 1)
        over = bins.offsets_E1[-1] > room
        if self._overflow is None:
            self._overflow = over
        else:
            self._overflow.logical_or_(over)  # in place, for CUDA graphs
        return room

    def take_overflow(self) -> Tensor | None:
        """Whether rows overflowed since the last call, on the device; None if no layer ran."""
        if self._overflow is None:
            return None
        found = self._overflow.clone()
        self._overflow.zero_()
        return found

    @contextlib.contextmanager
    def exactly(self) -> Generator[None]:
        """Within it the policy is "exact"."""
        policy, self.policy = self.policy, "exact"
        try:
            yield
        finally:
            self.policy = policy


def within_budget(
    parts: Iterable[nn.Module], step: Callable[[], Result], device: torch.device
) -> tuple[Result, bool]:
    """Run a step's forward and backward passes; if rows overflowed on any rank, run them again.

    The second time there is room for all rows. It starts without gradients, and draws the same
    random numbers as the first. Every rank of the world calls this. The host waits for the device
    once. If one rank alone raises, in `step` too, the others wait for it, until the process group's
    timeout.

    Args:
        parts: the model's stages on this rank, without gradients, after `parallelize_experts` with
            `row_policy="budget"`; a stage without experts is fine.
        step: runs the forward and backward passes of all micro-batches. Called once or twice, and
            must use the same batches both times.
        device: this rank's.

    Returns:
        What `step` returned, and whether it ran twice.

    Raises:
        ValueError: one module instead of several.
    """
    parts = several(parts, "parts")
    rows = budgets_of(parts)
    for one in rows:
        one.take_overflow()  # of forward passes that were no part of a step
    before = rng_state(device)
    result = step()
    found = [flag for flag in (one.take_overflow() for one in rows) if flag is not None]
    vote = torch.zeros((), dtype=torch.int32, device=device)
    if found:
        vote = torch.stack(found).any().int()
    if dist.is_initialized():
        dist.all_reduce(vote, op=dist.ReduceOp.MAX)
    if not vote.item():
        return result, False
    for part in parts:
        part.zero_grad(set_to_none=True)
    set_rng_state(before, device)
    with contextlib.ExitStack() as stack:
        for one in rows:
            stack.enter_context(one.exactly())
        return step(), True


def budgets_of(parts: Iterable[nn.Module]) -> set[Rows]:
    """The `Rows` of the layers in `parts` that have the policy "budget"."""
    found = (_rows_of(module) for part in parts for module in part.modules())
    return {rows for rows in found if rows is not None and rows.policy == "budget"}


def _rows_of(module: nn.Module) -> Rows | None:
    """The policy of a layer's dispatcher, whatever is around it."""
    dispatcher = getattr(module, "dispatcher", None)
    while dispatcher is not None and not isinstance(getattr(dispatcher, "rows", None), Rows):
        dispatcher = getattr(dispatcher, "inner", None)
    return None if dispatcher is None else dispatcher.rows
