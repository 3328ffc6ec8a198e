"""Recompute: forget activations in the forward, compute them again in the backward.

Applied to a model from outside, over `torch.utils.checkpoint` (not reentrant), before compilation
and `apply_data_parallel`. What is kept of a block of hidden size D, per token:

    "full"       the block's input, D
    "moe"        everything but the inside of its MoE layers: router, dispatched rows, experts
    "selective"  everything but the inside of the attention core: scores where the backend keeps
                 them, output and statistics where it does not (Korthikanti et al., arXiv
                 2205.05198)

The states of the random streams are put back before the second time, so that dropout drops the same
numbers. A dispatcher's exchange happens again as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from mb_layers.moe import MoELayer
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from mb_parallel.arguments import at_least_1, one_of, several
from mb_parallel.forwards import wrap_forward

Mode = Literal["full", "moe", "selective"]
_MODE = "_mb_recomputes"  # on modules of which something runs again, the mode


def apply_recompute(blocks: Iterable[nn.Module], mode: Mode, *, every: int = 1) -> int:
    """Make `blocks` recompute, in place; outputs, gradients and names of parameters stay.

    Args:
        blocks: in the order they run.
        mode: "full", "moe" or "selective"; `mb_parallel.recompute` says what each keeps.
        every: take blocks 0, every, 2 every, ...; the others keep what they computed.

    Returns:
        How many modules recompute now.

    Raises:
        ValueError: another mode, an `every` below 1, one module, nothing to apply "moe" to, or what
            recomputes already, which would be computed three times. "moe" goes with "selective".
    """
    one_of(get_args(Mode), mode=mode)
    at_least_1(every=every)
    chosen = list(dict.fromkeys(several(blocks, "blocks")[::every]))
    if mode == "moe":
        found = (m for block in chosen for m in block.modules() if isinstance(m, MoELayer))
        chosen = list(dict.fromkeys(found))  # blocks may share a layer
        if not chosen:
            raise ValueError(
                "Expected blocks with an MoE or dMoE layer for mode 'moe', got none. Use 'full' or "
                "'selective' for a dense model."
            )
    for module in chosen:
        if hasattr(module, _MODE):
            raise ValueError(
                f"Expected modules that do not recompute yet, got a {type(module).__name__} that "
                f"does, with mode {getattr(module, _MODE)!r}. Call apply_recompute once for each."
            )
    call = _call_selective if mode == "selective" else _call_checkpointed
    for module in chosen:
        wrap_forward(module, call)
        setattr(module, _MODE, mode)
    return len(chosen)


def recomputed(model: nn.Module) -> set[nn.Module]:
    """The modules of `model` that are called a second time, in the backward pass."""
    whole = (
        module for module in model.modules() if getattr(module, _MODE, None) in ("full", "moe")
    )
    return {inner for module in whole for inner in module.modules() if inner is not module}


def _call_checkpointed(
    module: nn.Module, forward: Callable[..., Any], *args: Any, **kw: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kw)
    return _checkpointed(forward, args, kw)


def _checkpointed(
    function: Callable[..., Any], args: tuple[Any, ...], kw: Mapping[str, Any]
) -> Any:
    """`function(*args, **kw)`, computed again in the backward.

    Torch is given all tensors one by one, positionally. It looks there for the devices whose
    streams it puts back, and has autograd save them: so hooks see them, nothing else holds them,
    and a backward pass is an error if one of them has been written into since the forward, as
    without recomputation. By name it would take some, such as `debug`, for its own. The first time
    the function is given what the caller gave, so that what it appends to a list is there; the
    second time lists and dicts that are like those, for the caller has it already.
    """
    if torch.compiler.is_compiling():  # a graph computes from its inputs as they were
        return checkpoint(lambda args, kw: function(*args, **kw), args, kw, use_reentrant=False)
    leaves, structure = tree_flatten((args, kw))
    # Autograd saves none of inference mode, which needs no gradient.
    held = [isinstance(x, Tensor) and x.is_inference() for x in leaves]
    inference = {place: leaves[place] for place, kept in enumerate(held) if kept}
    caller = [(args, kw)]

    def call(*leaves: Any) -> Any:
        if caller:
            args, kw = caller.pop()
            return function(*args, **kw)
        args, kw = tree_unflatten(
            [inference.get(place, leaf) for place, leaf in enumerate(leaves)], structure
        )
        return function(*args, **kw)

    given = [None if kept else leaf for leaf, kept in zip(leaves, held, strict=True)]
    return checkpoint(call, *given, use_reentrant=False)


def _call_selective(module: nn.Module, forward: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kw)
    seen: list[bool] = []
    with _RecomputedAttention(seen):
        result = forward(*args, **kw)
    if not seen:
        raise ValueError(
            "Expected a block that calls F.scaled_dot_product_attention for mode 'selective', got "
            f"{type(module).__name__}, which does not. Use mode 'full'."
        )
    return result


class _RecomputedAttention(TorchFunctionMode):
    """Within it the attention core is computed again in the backward; `seen` grows per core."""

    def __init__(self, seen: list[bool]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self._seen.append(True)
            return _checkpointed(func, args, kwargs)
        if func is Tensor.unflatten:  # in Python, by super(), which the compiler does not follow
            func = torch.unflatten
        return func(*args, **kwargs)
