"""What is kept of a sharded model between passes, for optimizers, which know only its parameters.

Between the micro-batches of a step FSDP2 keeps gradients that are not yet summed over ranks out of
`parameter.grad`. An optimizer would not see them: it would step without them, and `zero_grad` would
leave them to be added to the next step's.

Gathered weights stay until the next backward, those of an evaluation too. If a step came before it,
passes would go on with the weights from before the step. And until then a module lists these as its
parameters: what is frozen or zeroed is them.

What shards a model replaces its parameters. An optimizer that was made before has the old ones, and
would train nothing; hooks of the old ones, such as one that masks a gradient, would not run.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from mb_layers.model import in_backward
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from mb_parallel.engines import is_dtensor, is_fsdp

_APART = "_mb_gradients_apart"  # on a model, as `keep_apart` sets it
REPLICAS = "_mb_replicas"  # on a model, its `Replicas`
_REPLACED = "_mb_replaced"  # on a parameter that is no model's any more
_UNITS = "_mb_fsdp_units"  # on a model, as `watch` found them: no unit is made or lost later
# Parameters bear no mark: `to` and `load_state_dict(assign=True)` put others in their place.
_WATCHED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def watch(model: nn.Module) -> None:
    """Let optimizers, this package's and torch's, know what is kept of a model between passes."""
    if model in _WATCHED:
        return
    _watch_torch()
    # To find them took 0.4 ms for 48 layers (of one CPU core), and a step asks four times.
    setattr(model, _UNITS, [unit for unit in model.modules() if is_fsdp(unit)])
    _WATCHED.add(model)


@contextmanager
def replacing(model: nn.Module) -> Generator[None]:
    """Within, parameters of a model may be replaced: steps on the old ones are refused then.

    What was set on the old ones, such as a mark that they do not decay, is set on the new ones.

    Raises:
        ValueError: one was replaced in another model already, or one that was replaced has hooks.
    """
    before = dict(model.named_parameters())
    if gone := [name for name, parameter in before.items() if hasattr(parameter, _REPLACED)]:
        raise ValueError(
            f"Expected parameters that no other model has, got {', '.join(gone)}, in whose place "
            "that has others since it was spread: they would part ways. Put both models into one "
            "module, and spread that."
        )
    yield
    after = dict(model.named_parameters(remove_duplicate=False))
    kept = set(map(id, after.values()))
    replaced = {name: parameter for name, parameter in before.items() if id(parameter) not in kept}
    for name, parameter in replaced.items():
        vars(after[name]).update(vars(parameter) | vars(after[name]))
        setattr(parameter, _REPLACED, True)
        _watch_torch()
    if hooked := [name for name, parameter in replaced.items() if _has_hooks(parameter)]:
        raise ValueError(
            f"Expected no hooks of parameters that are spread over ranks, got some of "
            f"{', '.join(hooked)}, which would not run: other parameters take their place. Call "
            "register_post_accumulate_grad_hook on these afterwards; what it finds in `grad` is "
            "this rank's part."
        )


def _has_hooks(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def keep_apart(model: nn.Module, apart: bool) -> None:
    """Say whether the next backward leaves gradients apart that ranks have to add up."""
    setattr(model, _APART, apart)


@functools.cache
def _watch_torch() -> None:
    """For the rest of the process, let torch's optimizers and modules know what FSDP2 keeps.

    A step refuses gradients that are apart, and gives gathered weights up, as `train()` of a model
    does. `zero_grad` forgets gradients that are apart: that of a module those of any FSDP2 model.
    For these torch has no hooks.
    """
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    _call_after(torch.optim.Optimizer, "zero_grad", drop_apart)
    _call_after(nn.Module, "zero_grad", _drop_all)
    _call_after(nn.Module, "train", _free_watched)


def _call_after(kind: Any, name: str, call: Callable[[Any], None]) -> None:
    """Call `call` after each such method of this kind."""
    method = vars(kind)[name]

    @functools.wraps(method)
    def both(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        call(self)
        return result

    setattr(kind, name, both)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
    refuse_replaced(_parameters(optimizer))
    # A closure computes gradients first, those of the last micro-batch perhaps.
    if not any(map(callable, (*args, *kwargs.values()))):
        refuse_apart(_parameters(optimizer))


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
    for model in _models(_parameters(optimizer)):
        free_gathered(model)


def refuse_replaced(parameters: Iterable[Tensor]) -> None:
    """Check that no parameter was replaced after the optimizer was made.

    Raises:
        ValueError: some were.
    """
    if any(hasattr(parameter, _REPLACED) for parameter in parameters):
        raise ValueError(
            "Expected the parameters that the model has now, got some that were replaced and would "
            "not train. Make the optimizer after parallelize_tensors, parallelize_experts and "
            "apply_data_parallel."
        )


def refuse_apart(parameters: Iterable[Tensor]) -> None:
    """Check that the gradients of these parameters' models are sums over ranks.

    Raises:
        ValueError: some are not yet, or are of parameters that FSDP2 does not know.
    """
    parameters = list(parameters)
    models = _models(parameters)
    if models and in_backward():  # weights that others still need would be given up, too
        raise ValueError(
            "Expected a step behind the backward pass, whose ranks add up gradients until its end, "
            "got one within it. Step when backward() has returned, not in a parameter's hook."
        )
    # It may be said that none are apart though no backward followed: see what there is, too.
    if any(getattr(model, _APART, False) or any(map(_holds, _groups(model))) for model in models):
        raise ValueError(
            "Expected gradients that are summed over the ranks, got some of micro-batches before "
            "the last. Call set_gradient_sync(model, True) before the last backward of a step, and "
            "with False only after the step."
        )
    sharded = [model for model in models if getattr(model, _UNITS)]
    if not sharded:
        return
    whole = {id(p) for p in parameters if p.grad is not None and not is_dtensor(p)}
    names = (pair for model in sharded if whole for pair in model.named_parameters())
    if late := [name for name, p in names if id(p) in whole]:
        raise ValueError(
            "Expected parameters that were there when apply_data_parallel sharded the model, "
            f"got {', '.join(late)}, of which each rank would train its own. Add modules and "
            "adapters, and replace heads, before that, or take zero_stage 0."
        )


def drop_apart(optimizer: torch.optim.Optimizer) -> None:
    """Forget the gradients of the optimizer's models that ranks have not added up."""
    parameters = list(_parameters(optimizer))
    for model in _models(parameters):
        _drop_units(model)
        _drop_replicas(model, parameters)


def _models(parameters: Iterable[Tensor]) -> list[nn.Module]:
    """The watched models that some of these parameters are of."""
    wanted = {id(parameter) for parameter in parameters} if _WATCHED else set()
    return [model for model in _WATCHED if any(id(p) in wanted for p in _optimized(model))]


def _optimized(model: nn.Module) -> Iterator[Tensor]:
    """A model's parameters as an optimizer has them; those that are gathered are others."""
    yield from model.parameters()
    yield from (held.sharded_param for group in _groups(model) for held in group.fsdp_params)


def _groups(module: nn.Module) -> Iterator[Any]:
    """FSDP2's groups of parameters in a module."""
    found: Any = getattr(module, _UNITS, None)
    for unit in filter(is_fsdp, module.modules()) if found is None else found:
        yield from groups_of(unit)


def groups_of(unit: Any) -> Iterator[Any]:
    """FSDP2's groups of parameters of a module that it shards, without those further in."""
    state: Any = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one at most
    yield from filter(None, [state._fsdp_param_group] if groups is None else groups)


def _holds(group: Any) -> bool:
    """Whether a group has gradients that ranks have not added up."""
    return group._partial_reduce_output is not None or any(map(has_gradient, group.fsdp_params))


def has_gradient(held: Any) -> bool:
    """Whether a parameter of a group has a gradient that was not reduced at all."""
    whole = getattr(held, "_unsharded_param", None)
    return held.unsharded_accumulated_grad is not None or getattr(whole, "grad", None) is not None


def keep_frozen(unit: Any, *, trains: bool) -> None:
    """Before a pass: what was frozen, or not any more, of weights that an evaluation gathered.

    Args:
        unit: a module that FSDP2 shards.
        trains: whether the pass does; if not, it leaves gathered weights.
    """
    for group in groups_of(unit):
        _follow_gathered(group)
        if not trains:
            group._mb_trained = [held.sharded_param.requires_grad for held in group.fsdp_params]


def _free_watched(module: nn.Module) -> None:
    if module.training and _UNITS in vars(module):  # `eval` may follow `gather_rest`
        free_gathered(module)


def _follow_gathered(group: Any) -> None:
    """Let parameters train where since an evaluation their gathered weights were told to, or not.

    Torch asks parameters, and would forget what only their weights were told.
    """
    before, group._mb_trained = getattr(group, "_mb_trained", None), None
    if before is None:
        return
    for held, trained in zip(group.fsdp_params, before, strict=True):
        gathered = getattr(held, "_unsharded_param", held.sharded_param)
        if gathered.requires_grad != trained:
            held.sharded_param.requires_grad_(not trained)
        gathered.requires_grad_(held.sharded_param.requires_grad)


def free_gathered(module: nn.Module) -> None:
    """Give gathered weights up, those that an evaluation left: they are no parameters to train."""
    for group in _groups(module):
        _follow_gathered(group)
        group._to_sharded()  # `reshard` would not after a forward that raised


def _drop_units(module: nn.Module) -> None:
    """Forget what FSDP2's units in a module have not added up, and a backward pass that raised."""
    if is_fsdp(module) and not in_backward():
        unit: Any = module
        state = unit._get_fsdp_state()
        # Torch takes the pass to be under way, and would reduce nothing at the end of another.
        broken = state._is_root and state._state_ctx.post_backward_final_callback_queued
        if broken and hasattr(unit, "reset_iter_state"):  # from torch 2.13 on
            unit.reset_iter_state()
    for group in _groups(module):
        group._partial_reduce_output = None
        for held in group.fsdp_params:
            if hasattr(held, "_unsharded_param"):
                held._unsharded_param.grad = None
            if held.unsharded_accumulated_grad is not None:  # in torch 2.15 a name for the former
                held.unsharded_accumulated_grad = None


def _drop_all(module: nn.Module) -> None:
    _drop_units(module)
    parameters = list(module.parameters())
    models = _models(parameters)
    _drop_sums([module, *models], parameters)
    for model in models:
        _drop_replicas(model, parameters)


def _drop_sums(models: Iterable[nn.Module], gathered: Iterable[Tensor]) -> None:
    """Forget the summed gradients of the parameters of which these are the gathered weights."""
    zeroed = set(map(id, gathered))
    for group in itertools.chain.from_iterable(map(_groups, models)):
        for held in group.fsdp_params:
            if id(getattr(held, "_unsharded_param", None)) in zeroed:
                held.sharded_param.grad = None


def _drop_replicas(model: nn.Module, parameters: Iterable[Tensor]) -> None:
    """Forget what a model's replicas have not added up of these parameters' gradients."""
    if (replicas := getattr(model, REPLICAS, None)) is not None:
        replicas.forget(model, set(map(id, parameters)))
