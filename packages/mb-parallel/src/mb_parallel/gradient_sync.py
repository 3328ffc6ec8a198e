"""What FSDP2 keeps of a model between passes, for those who know only its parameters.

Between the micro-batches of a step FSDP2 keeps gradients that are not yet summed over ranks out of
`parameter.grad`. An optimizer would not see them: it would step without them, and `zero_grad` would
leave them to be added to the next step's.

Gathered weights stay until the next backward, those of an evaluation too. If a step came before it,
passes would go on with the weights from before the step.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

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

    def is_apart(self) -> bool:
        """Whether gradients are apart; also if `apart` became False and no backward followed."""
        return self.apart or any(map(_holds, self._groups()))

    def drop(self) -> None:
        """Forget the gradients that are apart."""
        for group in self._groups():
            _drop(group)

    def free(self) -> None:
        """Give gathered weights up, which the next pass gathers again."""
        model = self._model()
        if model is not None:
            free_gathered(model)

    def _groups(self) -> Iterator[Any]:
        model = self._model()
        return iter(()) if model is None else _groups(model)


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
    """From now on, let all optimizers and modules, torch's own too, know what FSDP2 keeps.

    A step refuses gradients that are apart, and gives gathered weights up. `zero_grad`, for which
    torch has no hook, forgets gradients that are apart.
    """
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    _let_zero_grad(torch.optim.Optimizer, lambda optimizer: drop_apart(_parameters(optimizer)))
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


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
    # A closure computes gradients first, those of the last micro-batch perhaps.
    if not any(map(callable, (*args, *kwargs.values()))):
        refuse_apart(_parameters(optimizer))


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
    for sync in _syncs(_parameters(optimizer)):
        sync.free()


def refuse_apart(parameters: Iterable[Tensor]) -> None:
    """Check that the gradients of these parameters' models are sums over ranks.

    Raises:
        ValueError: some are not yet.
    """
    if any(sync.is_apart() for sync in _syncs(parameters)):
        raise ValueError(
            "Expected gradients that are summed over the ranks, got some of micro-batches before "
            "the last. Call set_gradient_sync(model, True) before the last backward of a step, and "
            "with False only after the step."
        )


def drop_apart(parameters: Iterable[Tensor]) -> None:
    """Forget the gradients of these parameters' models that ranks have not added up."""
    for sync in _syncs(parameters):
        sync.drop()


def _syncs(parameters: Iterable[Tensor]) -> set[GradientSync]:
    return {sync for parameter in parameters if (sync := sync_of(parameter)) is not None}


def _groups(module: nn.Module) -> Iterator[Any]:
    """FSDP2's groups of parameters in a module."""
    for unit in module.modules():
        if is_fsdp(unit):
            state: Any = unit._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one at most
            yield from filter(None, [state._fsdp_param_group] if groups is None else groups)


def _holds(group: Any) -> bool:
    """Whether a group has gradients that ranks have not added up."""
    return group._partial_reduce_output is not None or any(
        held.unsharded_accumulated_grad is not None
        or getattr(getattr(held, "_unsharded_param", None), "grad", None) is not None
        for held in group.fsdp_params
    )


def free_gathered(module: nn.Module) -> None:
    """Give gathered weights up, those that an evaluation left: they are no parameters to train."""
    for group in _groups(module):
        group._to_sharded()  # `reshard` would not after a forward that raised


def _drop(group: Any) -> None:
    group._partial_reduce_output = None
    for held in group.fsdp_params:
        held.unsharded_accumulated_grad = None
        if hasattr(held, "_unsharded_param"):
            held._unsharded_param.grad = None


def _drop_units(module: nn.Module) -> None:
    """Forget what FSDP2's units in a module have not added up."""
    for group in _groups(module):
        _drop(group)
