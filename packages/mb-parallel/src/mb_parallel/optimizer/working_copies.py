"""16-bit copies of fp32 weights to compute with, kept from step to step, not cast at each use.

A weight is used in 16 bits and updated in 32. Casting it in every forward pass, and its gradient
back in every backward pass, moves 12 bytes a parameter; for a model of experts that is a tenth of a
step's time. Here the copy is a leaf of its own: the model computes with it, its gradient becomes
the parameter's without a cast, and the optimizer writes it in the pass that updates the parameter
(`AdamW(working_copies=...)`). `parameters()`, checkpoints and the user still see the parameter.

If anything else writes a parameter (another optimizer, `load_state_dict`, your own code), its copy
is out of date. Autograd counts writes, so the next forward pass notices it and casts again. It does
not count what `torch.distributed.checkpoint` writes into the DTensors of a state dict, so all
copies are cast again after a state dict was asked for. Writes into `parameter.data`, and those of a
collective (`dist.broadcast`), cannot be noticed: call `refresh(everything=True)` after them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import mb_kernels
import torch
from mb_layers import Experts
from torch import Tensor, nn

from mb_parallel.arguments import floating, several
from mb_parallel.engines import is_fsdp
from mb_parallel.optimizer.unwritten import Unwritten
from mb_parallel.shards import local, shaped_like

HALVES = (torch.bfloat16, torch.float16)


class WorkingCopies(Mapping[Tensor, Tensor]):
    """Maps a parameter to the 16-bit tensor to compute with, of this rank's shard.

    When the gradient of a copy is complete, its parameter gets it: the first of a step as it is, in
    16 bits; those of further micro-batches are added in fp32. Then the parameter's hooks after
    accumulation run. Autograd meets the copy alone: others do not run, so register them on
    `copies[parameter]`, and `torch.autograd.grad` with respect to the parameter finds no graph; use
    `backward`.

    Args:
        pairs: fp32 parameters, plain or DTensors, and tensors of their local sizes in bf16 or fp16,
            whose values are set here.

    Raises:
        ValueError: other dtypes or sizes.
    """

    def __init__(self, pairs: Mapping[Tensor, Tensor]) -> None:
        self._copies = dict(pairs)
        self._equal = Unwritten()  # to their copies
        for parameter, copy in self._copies.items():
            same_size = local(parameter).shape == copy.shape
            if parameter.dtype != torch.float32 or copy.dtype not in HALVES or not same_size:
                raise ValueError(
                    "Expected fp32 parameters and copies of the same local size in bf16 or fp16, "
                    f"got {tuple(local(parameter).shape)} in {parameter.dtype} and "
                    f"{tuple(copy.shape)} in {copy.dtype}."
                )
            parameter.grad_dtype = None  # any: its gradient comes in the copy's
            copy.requires_grad_()  # which a hook has to see; `refresh` says what it is
            copy.register_post_accumulate_grad_hook(functools.partial(_hand_over, parameter))
        self.refresh()

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkingCopies, ({},)  # a copy of the model casts at each use

    def __getitem__(self, parameter: Tensor) -> Tensor:
        return self._copies[parameter]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._copies)

    def __len__(self) -> int:
        return len(self._copies)

    @torch.no_grad()
    def refresh(self, everything: bool = False) -> None:
        """Cast again what was written, except by an optimizer that writes the copy too.

        Also lets a copy require a gradient if its parameter now does, and only then.
        """
        for parameter, copy in self._copies.items():
            copy.requires_grad_(parameter.requires_grad)
            if everything or parameter not in self._equal:
                copy.copy_(local(parameter))
                self.written([parameter])

    def forget(self) -> None:
        """Cast everything again in the next `refresh`."""
        self._equal.clear()

    def written(self, parameters: Iterable[Tensor]) -> None:
        """Note that these parameters and their copies are equal now."""
        self._equal.note(p for p in parameters if p in self._copies)


def hold_working_copies(models: Iterable[nn.Module], dtype: torch.dtype) -> WorkingCopies:
    """Let the experts of `models` compute with copies of `w1` and `w2` in `dtype`.

    Experts that FSDP2 shards, and weights made of parts (adapters), get no copies: both cast by
    themselves. Copies are brought up to date whenever one of `models` is called, and all are cast
    again after its `state_dict` was called. Step with an optimizer of this package: torch's Adam
    takes no 16-bit gradient for a 32-bit weight.

    Args:
        models: the modules that are called; their experts already on the device and sharded.
        dtype: of the copies. With fp32, or if there is nothing to copy, the result is empty.

    Raises:
        ValueError: one module instead of several, or no floating-point dtype. Later, when one of
            `models` is called: a parameter was replaced, and not only written.
    """
    floating(dtype=dtype)
    models = several(models, "models")
    pairs: dict[Tensor, Tensor] = {}
    places: list[tuple[Experts, str, Tensor]] = []
    for module in (module for model in models for module in model.modules()):
        if not isinstance(module, Experts) or is_fsdp(module):
            continue
        for name in ("w1", "w2"):
            parameter = module._parameters.get(name)
            if dtype not in HALVES or parameter is None or parameter.dtype != torch.float32:
                continue
            if parameter not in pairs:  # else layers share it
                pairs[parameter] = torch.empty_like(local(parameter).detach(), dtype=dtype)
            module.working_copies[name] = pairs[parameter]
            places.append((module, name, parameter))
    copies = WorkingCopies(pairs)

    def bring_up_to_date(*_: Any) -> None:
        _check_places(places)
        copies.refresh()

    for model in models if copies else ():
        model.register_forward_pre_hook(bring_up_to_date)
        model.register_state_dict_post_hook(lambda *_: copies.forget())
    return copies


def _check_places(places: Iterable[tuple[Experts, str, Tensor]]) -> None:
    """ValueError where a module has another parameter: its copy would be used all the same."""
    for module, name, parameter in places:
        if module._parameters.get(name) is not parameter:
            raise ValueError(
                f"Expected the {name!r} that hold_working_copies found in {type(module).__name__}, "
                "got another in its place (load_state_dict with assign=True, functional_call, a "
                "parametrization, pruning). Write into it, or replace it before you call "
                "hold_working_copies."
            )


@torch.no_grad()
def _hand_over(parameter: Tensor, copy: Tensor) -> None:
    grad, copy.grad = copy.grad, None
    assert grad is not None
    before = None if parameter.grad is None else local(parameter.grad)  # of another micro-batch
    total = grad if before is None else mb_kernels.accumulate_grad(before, grad)
    if total is not before:
        parameter.grad = shaped_like(total, parameter)
    hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)
    for hook in list((hooks or {}).values()):
        hook(parameter)
