"""Whether ranks have added up a model's gradients, for those who know only its parameters.

Between the micro-batches of a step FSDP2 keeps gradients that are not yet summed over ranks out of
`parameter.grad`. An optimizer would not see them: it would step without them, and `zero_grad` would
leave them to be added to the next step's.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mb_parallel.engines import is_fsdp

_SYNC = "_mb_gradient_sync"


class GradientSync:
    """What a model and its parameters share.

    apart: the next backward, or the last, leaves gradients apart that ranks have to add up.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self.apart = False

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()  # of no model; a type that `torch.load` takes with a parameter

    def drop(self) -> None:
        """Forget the gradients that are apart."""
        model = self._model()
        if model is not None:
            _drop_units(model)


def share_sync(model: nn.Module) -> None:
    """Let the model and its parameters, sharded already, have one `GradientSync`."""
    _watch_torch()
    sync = GradientSync(model)
    for one in (model, *model.parameters()):
        setattr(one, _SYNC, sync)


def sync_of(one: nn.Module | Tensor) -> GradientSync | None:
    """That of a model or a parameter, if `share_sync` was called."""
    sync = getattr(one, _SYNC, None)
    return sync if isinstance(sync, GradientSync) else None


@functools.cache
def _watch_torch() -> None:
    """For the rest of the process, let torch's own optimizers and modules know of such gradients.

    A step refuses them, and `zero_grad`, for which torch has no hook, forgets them: that of a
    module those of any FSDP2 model.
    """
    register_optimizer_step_pre_hook(_refuse_apart)
    _let_zero_grad(torch.optim.Optimizer, drop_apart)
    _let_zero_grad(nn.Module, _drop_units)


def _let_zero_grad(kind: Any, drop: Callable[[Any], None]) -> None:
    """Call `drop` after each `zero_grad` of this kind."""
    zero_grad = vars(kind)["zero_grad"]

    @functools.wraps(zero_grad)
    def zero_all(self: Any, *args: Any, **kwargs: Any) -> None:
        zero_grad(self, *args, **kwargs)
        drop(self)

    kind.zero_grad = zero_all


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _refuse_apart(optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
    if any(map(callable, (*args, *kwargs.values()))):
        return  # a closure computes gradients first, those of the last micro-batch perhaps
    for parameter in _parameters(optimizer):
        has_grad(parameter)


def has_grad(parameter: Tensor) -> bool:
    """Whether there is a gradient.

    Raises:
        ValueError: it is not yet the sum over ranks.
    """
    sync = sync_of(parameter)
    if sync is not None and sync.apart:
        raise ValueError(
            "Expected gradients that are summed over the ranks, got some of micro-batches before "
            "the last. Call set_gradient_sync(model, True) before the last backward of a step, and "
            "with False only after the step."
        )
    return parameter.grad is not None


def drop_apart(optimizer: torch.optim.Optimizer) -> None:
    """Forget the gradients of the optimizer's models that ranks have not added up.

    Whatever `apart` says: a step may be given up in its last micro-batch, before the backward.
    """
    for sync in filter(None, {sync_of(parameter) for parameter in _parameters(optimizer)}):
        sync.drop()


def _drop_units(module: nn.Module) -> None:
    """Forget what FSDP2's units in a module have not added up."""
    for unit in module.modules():
        if not is_fsdp(unit):
            continue
        state: Any = unit._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one at most
        for group in filter(None, [state._fsdp_param_group] if groups is None else groups):
            group._partial_reduce_output = None
            for held in group.fsdp_params:
                held.unsharded_accumulated_grad = None
                if hasattr(held, "_unsharded_param"):
                    held._unsharded_param.grad = None
