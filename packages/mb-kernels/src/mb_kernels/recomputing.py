"""A function that is computed again in the backward pass, from the arguments that it had."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from mb_kernels.exporting import transforms_active

Result = TypeVar("Result")


def recomputed(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """``function(*args, **kwargs)``, of which only the arguments are kept for the backward pass.

    Raises:
        RuntimeError: in a backward pass, if one of their tensors has been written into since, by
            an optimizer's step between the two passes for one.
    """
    if torch.compiler.is_compiling():  # a graph computes from its inputs and nobody else's
        return checkpoint(function, *args, use_reentrant=False, **kwargs)
    if transforms_active():  # an entry of vmap is gone by the backward pass, so all is kept
        return function(*args, **kwargs)
    # Torch looks for writes into tensors that are arguments by themselves, in no tuple or keyword.
    leaves, structure = tree_flatten((args, kwargs))

    def call(*leaves: Any) -> Result:
        args, kwargs = tree_unflatten(leaves, structure)
        return function(*args, **kwargs)

    return checkpoint(call, *leaves, use_reentrant=False)
