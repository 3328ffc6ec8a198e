"""Of what has first derivatives alone a second one is an error, never a wrong number."""

import functools
from collections.abc import Callable
from typing import Any

import torch

_REFUSAL = (
    "expected first derivatives alone, got create_graph=True, for second derivatives of experts or "
    "of an exchange between ranks that have none. Leave create_graph out."
)


def once_differentiable(
    backward: Callable[..., Any], refusal: str = _REFUSAL
) -> Callable[..., Any]:
    """``backward`` of a ``torch.autograd.Function``, or NotImplementedError under create_graph.

    The gradients that torch's decorator of this name returns raise when they are differentiated.
    But ``torch.autograd.grad`` does not come by there on its way to the inputs that it is asked
    for: their second derivatives lacked this part, without a word.
    """

    @functools.wraps(backward)
    def first(ctx: Any, *grads: Any) -> Any:
        # A graph that torch.compile makes of this has no second derivatives, and says so.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            raise NotImplementedError(refusal)
        return backward(ctx, *grads)

    return first
