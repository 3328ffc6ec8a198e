"""How much memory to allocate for rows whose number only the device knows: three policies.

"all_gather" and "peer" bring tokens to experts in static shapes. Only the device knows how many
slots are for this rank's experts, but the host allocates what the experts save for the backward.
No policy drops a row:

    "worst"    room for every slot that could come. Nothing overflows, the host never waits.
    "exact"    room for the slots that came. The host reads their number once a layer, and waits.
    "budget"   room for a multiple of the slots of balanced routing. If more come, the output is
               NaN, the device notes it, and `within_budget` runs the step again as "exact" would.
               From then on the multiple follows what steps need.

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
from mb_kernels.uncompiled import uncompiled
from mb_layers.dispatch import innermost
from torch import Tensor, nn

from mb_parallel.arguments import one_of, several
from mb_parallel.expert_parallel.placement import Placement
from mb_parallel.random import rng_state, set_rng_state

Policy = Literal["worst", "exact", "budget"]
Result = TypeVar("Result")

# Room for a quarter more than steps needed lately, in eighths of the balanced slots, so that sizes
# of allocations seldom change. What a step needed counts for 1 % less with each one after it. Of a
# dMoE-125M's first 60 steps on four GPUs one ran twice (mb-train's results of 2026-11-26, four
# GPUs); with a fixed multiple of 2 nearly all did. Other values were not tried.
_MARGIN = 1.25
_FRACTION = 8
_FADING = 0.99


class Rows:
    """The policy, one object for all layers of a model.

    Args:
        policy: see above.
        budget: for "budget": the least room, as a multiple of the slots of balanced routing, at
            least 1.

    Raises:
        ValueError: another policy, or a budget below 1 or infinite.
    """

    def __init__(self, policy: str = "worst", budget: float = 2.0) -> None:
        one_of(get_args(Policy), row_policy=policy)
        if not (isinstance(budget, int | float) and 1 <= budget < math.inf):
            raise ValueError(
                "Expected a finite row_budget of at least 1, the share of balanced routing, got "
                f"{budget!r}. Room for whatever could come is row_policy='worst'."
            )
        self.policy, self.budget = policy, budget
        self._multiple = float(budget)
        self._needed = 0.0
        self._exactly = False
        self._fill: Tensor | None = None

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
    @uncompiled
    def _room(self, bins: Bins, placement: Placement, tokens: int, top_k: int) -> int:
        slots = bins.offsets_E1[-1]
        if self.policy == "exact" or not torch.is_grad_enabled():
            return max(int(slots), 1)
        wanted = math.ceil(self._multiple * placement.balanced_slots(tokens, top_k))
        room = max(min(wanted, bins.order_N.shape[0]), 1)
        # Over `wanted`, not `room`: `follow` multiplies it by the multiple, which would grow with
        # each step in which nearly all slots came. In 32 bits 2^24 slots and one more would be as
        # many.
        fill = slots.double() / max(float(wanted), 1.0)
        if self._fill is None:
            self._fill = fill
        else:
            torch.maximum(self._fill, fill, out=self._fill)  # in place, for CUDA graphs
        return max(int(slots), 1) if self._exactly else room

    def take_fill(self) -> Tensor | None:
        """The most slots since the last call over what the multiple gives, fp64 on the device.

        Above 1 some overflowed. None if no layer ran.
        """
        if self._fill is None:
            return None
        found = self._fill.clone()
        self._fill.zero_()
        return found

    def follow(self, fill: float) -> None:
        """Make room for steps like the one whose `take_fill` this is, and those lately before."""
        self._needed = max(fill * self._multiple, _FADING * self._needed)
        wanted = math.ceil(_FRACTION * _MARGIN * self._needed) / _FRACTION
        self._multiple = max(self.budget, wanted)

    @contextlib.contextmanager
    def exactly(self) -> Generator[None]:
        """Within it there is room for what comes, as with "exact"."""
        self._exactly = True
        try:
            yield
        finally:
            self._exactly = False


def within_budget(
    parts: Iterable[nn.Module], step: Callable[[], Result], device: torch.device
) -> tuple[Result, bool]:
    """Run a step's forward and backward passes; if rows overflowed on any rank, run them again.

    The second time there is room for all rows. It starts without gradients, and draws the same
    random numbers as the first. Later steps have room for a quarter more than was needed lately.
    Every rank of the world calls this. The host waits for the device once for each run. If one rank
    alone raises, in `step` too, the others wait for it, until the process group's timeout.

    Args:
        parts: the model's stages on this rank, without gradients, after `parallelize_experts` with
            `row_policy="budget"`; a stage without experts is fine.
        step: runs the forward and backward passes of all micro-batches. Called once or twice, and
            must use the same batches both times. What it counts or collects (`mb_layers.collect`,
            for balancing biases) has to begin anew with each call.
        device: this rank's.

    Returns:
        What `step` returned, and whether it ran twice.

    Raises:
        ValueError: one module instead of several.
    """
    parts = several(parts, "parts")
    rows = budgets_of(parts)
    for one in rows:
        one.take_fill()  # of forward passes that were no part of a step
    before = rng_state(device)
    result = step()
    fill = _most_of_all_ranks(rows, device)
    redone = fill > 1
    if redone:
        for part in parts:
            part.zero_grad(set_to_none=True)
        set_rng_state(before, device)
        with contextlib.ExitStack() as stack:
            for one in rows:
                stack.enter_context(one.exactly())
            result = step()
        # What layers got behind the first that overflowed came from its NaN.
        fill = _most_of_all_ranks(rows, device)
        if device.type == "cuda":  # blocks of the sizes that were too small fit nothing any more
            torch.cuda.empty_cache()
    for one in rows:
        one.follow(fill)
    return result, redone


def _most_of_all_ranks(rows: Iterable[Rows], device: torch.device) -> float:
    fills = [fill for one in rows if (fill := one.take_fill()) is not None]
    most = torch.zeros((), dtype=torch.float64, device=device)
    if fills:
        most = torch.stack(fills).amax()
    if dist.is_initialized():
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most.item()


def budgets_of(parts: Iterable[nn.Module]) -> set[Rows]:
    """The `Rows` of the layers in `parts` that have the policy "budget"."""
    dispatchers = (getattr(m, "dispatcher", None) for part in parts for m in part.modules())
    found = (getattr(innermost(dispatcher), "rows", None) for dispatcher in dispatchers)
    return {rows for rows in found if isinstance(rows, Rows) and rows.policy == "budget"}
