"""How an op of namespace ``mb`` is registered, and which implementation a tensor gets.

Every op is a ``torch.library`` op with a fake implementation, an autograd formula where it has a
gradient, and a FLOP formula where it multiplies matrices. CUDA and ROCm tensors run Triton, those
of other devices the plain PyTorch reference. Under ``TRITON_INTERPRET=1`` CPU tensors run the
Triton kernels through Triton's interpreter, which is how they are tested without a GPU. Under
``MB_DEBUG=1`` an op may check the values it is given, which makes the host wait for the device.

Triton is imported on the first call that needs it, never on ``import mb_kernels``.
"""

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mb_kernels.derivatives import once_differentiable
from mb_kernels.exporting import transforms_active
from mb_kernels.runtime.recording import recorded

_library = torch.library.Library("mb", "DEF")
# Read once: Triton itself decides at decoration time whether a kernel is interpreted.
interpret = os.environ.get("TRITON_INTERPRET") == "1"
_debug = os.environ.get("MB_DEBUG") == "1"
_has_triton = importlib.util.find_spec("triton") is not None
if not _has_triton:
    # It warns when imported that it will not count Triton kernels; ours have FLOP formulas.
    logging.getLogger("torch.utils.flop_counter").disabled = True


# Private names of torch. Without them ops take more host time, and some errors are less clear.
_below_autograd = getattr(torch._C, "_AutoDispatchBelowAutograd", None)
_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
if _below_autograd is None:
    warnings.warn(
        f"mb_kernels registers its gradients by torch's public call, slower on every call: torch "
        f"{torch.__version__} has no torch._C._AutoDispatchBelowAutograd.",
        stacklevel=2,
    )


def debugging(x: Tensor) -> bool:
    """Whether ``MB_DEBUG=1``: the values of ``x`` may be looked at, and the host may wait.

    Not while a CUDA graph is captured, which nothing may wait for.
    """
    return _debug and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def use_triton(x: Tensor) -> bool:
    """True if ops on ``x`` run Triton kernels, False if they run the reference.

    float64 always runs the reference: the kernels accumulate in float32. In a rehearsal (see
    ``recording``) meta tensors stand for a GPU's.
    """
    if not _has_triton or x.dtype is torch.float64:
        return False
    if x.is_meta:
        return recorded() is not None
    return x.is_cuda or (interpret and x.device.type == "cpu")


_here = contextlib.nullcontext()


def device_of(x: Tensor) -> contextlib.AbstractContextManager[None]:
    """A context in which kernels run where ``x`` is: Triton launches on the current device."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return _here


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """A context in which torch's own ops on ``x`` compute in the dtypes that they are given."""
    if x.is_meta:  # autocast does not know this device, which has shapes alone
        return _here
    return torch.autocast(x.device.type, enabled=False)


def register(
    schema: str,
    *,
    reference: Callable[..., Any],
    kernels: str,
    fake: Callable[..., Any],
    flops: Callable[..., int] | None = None,
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    differentiable_twice: bool = False,
    strided: bool = False,
    debug_check: Callable[..., object] | None = None,
) -> None:
    """Define op ``mb::<schema>``.

    Args:
        schema: "name(Tensor x, ...) -> Tensor", or a list of tensors first; the first tensor
            decides who computes; no defaults.
        reference: the op in plain PyTorch, any device, called without autograd.
        kernels: the module whose function ``name`` launches the Triton kernels.
        fake: shapes and dtypes only.
        flops: FLOP formula over shapes, as ``register_flop_formula`` takes it.
        setup_context, backward: the autograd formula, as ``torch.autograd.Function`` takes it.
        differentiable_twice: ``backward`` consists of differentiable ops alone, so that a second
            derivative is right. Otherwise ``create_graph=True`` is an error.
        strided: the op wants its tensors, and returns its results, in the memory order they have.
            Otherwise both are contiguous.
        debug_check: called with the op's arguments before it computes, if ``MB_DEBUG=1``; raises
            what is wrong with their values. Never sees fake tensors, nor a graph's capture.
    """
    name = schema.split("(", 1)[0]

    @functools.cache
    def launch() -> Callable[..., Any]:
        return getattr(importlib.import_module(kernels), name)

    # torch's public call drops tangents without a word, and what it calls sees none of them.
    drops_tangents = backward is not None and _below_autograd is None

    def implementation(*args: Any) -> Any:
        if drops_tangents and getattr(forward_ad, "_current_level", -1) >= 0:
            what = "forward-mode derivatives (jvp)"
            raise NotImplementedError(_REFUSAL.format(name=name, what=what))
        if _any_autocast():  # it would cast some of the op's steps and not others
            with without_autocast(_first(args)):
                return compute(*args)
        return compute(*args)

    def compute(*args: Any) -> Any:
        if not strided:
            args = tuple(a.contiguous() if isinstance(a, Tensor) else a for a in args)
        x = _first(args)
        if debug_check is not None and debugging(x):
            debug_check(*args)
        if not use_triton(x):
            return reference(*args) if strided else _contiguous(reference(*args))
        with device_of(x):
            return launch()(*args)

    def without_memory(*args: Any) -> Any:
        return fake(*args) if recorded() is None else launch()(*args)

    _library.define(schema)
    _library.impl(name, implementation, "CompositeExplicitAutograd")  # on devices of every kind
    torch.library.register_fake(f"mb::{name}", without_memory, lib=_library)
    op = getattr(torch.ops.mb, name).default
    if setup_context is not None and backward is not None:
        formula = backward
        if not differentiable_twice:
            refusal = _REFUSAL.format(name=name, what="second derivatives")
            formula = once_differentiable(backward, refusal)
        if _below_autograd is None:
            torch.library.register_autograd(
                f"mb::{name}", formula, setup_context=setup_context, lib=_library
            )
        else:
            _library.impl(name, _autograd(name, op, setup_context, formula), "Autograd")
    if flops is not None:
        from torch.utils.flop_counter import register_flop_formula

        register_flop_formula(getattr(torch.ops.mb, name))(flops)


def _first(args: tuple[Any, ...]) -> Tensor:
    return args[0] if isinstance(args[0], Tensor) else args[0][0]


def _contiguous(outputs: Any) -> Any:
    """What ``fake`` promises: a reference may return a view of something larger."""
    if isinstance(outputs, Tensor):
        return outputs.contiguous()
    return tuple(output.contiguous() for output in outputs)


def _autograd(
    name: str,
    op: Callable[..., Any],
    setup_context: Callable[..., None],
    formula: Callable[..., Any],
) -> Callable[..., Any]:
    """``op`` with an autograd formula, to be its implementation for the dispatch key Autograd.

    ``torch.library.register_autograd`` does the same for first derivatives, but walks the schema on
    every call, 60 us of a layer's step under cProfile, and is silent about what it cannot do.
    """

    class Formula(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            output = below(*args)
            setup_context(ctx, args, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return formula(ctx, *grads)

    def below(*args: Any) -> Any:
        assert _below_autograd is not None
        with _below_autograd():
            return op(*args)

    def implementation(*args: Any) -> Any:
        if transforms_active():
            what = "the transforms of torch.func"
            raise NotImplementedError(_REFUSAL.format(name=name, what=what))
        if getattr(forward_ad, "_current_level", 0) >= 0 and any(map(_has_tangent, args)):
            what = "forward-mode derivatives (jvp)"
            raise NotImplementedError(_REFUSAL.format(name=name, what=what))
        if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
            return Formula.apply(*args)
        return below(*args)

    return implementation


_REFUSAL = (
    "mb::{name}: expected first derivatives by backward() or torch.autograd.grad; got a call for "
    "{what}, of which the kernels have none. Use its twin in mb_kernels.reference, plain PyTorch, "
    "and no fp8, whose rounding has none anywhere."
)


def _has_tangent(a: Any) -> bool:
    return isinstance(a, Tensor) and forward_ad.unpack_dual(a).tangent is not None
