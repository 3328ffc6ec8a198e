"""Arguments at the border: a number is taken whatever its kind, everything else is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mb_layers import (
    MoEConfig,
    SinkhornRouter,
    add_lora,
    attach_aux_loss,
    collect,
    dMoE,
    freeze_in_bits,
    merge_lora,
    update_balancing_bias,
)

CONFIG = MoEConfig(hidden_size=16, ffn_hidden_size=16, num_experts=4, balancing_bias=True)
PLAIN = MoEConfig(hidden_size=16, ffn_hidden_size=16, num_experts=4)
X = torch.ones(3, 16)
NAN = float("nan")


def lora(**options: Any) -> dMoE:
    layer = dMoE(PLAIN)
    add_lora(layer.experts, **({"rank": 2, "alpha": 4} | options))
    return layer


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged)


def rate(value: Any, counts: Any = None) -> torch.Tensor:
    router = dMoE(CONFIG).router
    update_balancing_bias(router, torch.arange(4) if counts is None else counts, rate=value)
    return router.balancing_bias


def aux(loss: Any, scale: Any) -> torch.Tensor:
    y = torch.ones(2, requires_grad=True)
    return attach_aux_loss(y, loss, scale)


WRONG: list[tuple[str, Callable[[], object]]] = [
    *((rf"rank to be an integer >= 1, got {v!r}", lambda v=v: lora(rank=v)) for v in (2.5, True)),
    *((f"alpha to be a finite number, got {v!r}", lambda v=v: lora(alpha=v)) for v in ("3", NAN)),
    ("names to be a tuple of names", lambda: lora(names=None)),
    ("experts to be a module, got a NoneType", lambda: add_lora(None, rank=2, alpha=4)),
    ("experts to be a module, got a NoneType", lambda: merge_lora(None)),
    ("got 8.0 of type float", lambda: freeze_in_bits(dMoE(PLAIN).experts, 8.0)),
    ("names to be a tuple of names", lambda: freeze_in_bits(dMoE(PLAIN).experts, 8, names="w1")),
    *(
        (
            rf"finite valid_tokens >= 0, got {v!r}",
            lambda v=v: dMoE(PLAIN)(X, valid_tokens=v),
        )
        for v in ("3", True, float("inf"))
    ),
    *((f"finite rate >= 0, got {v!r}", lambda v=v: rate(v)) for v in ("1", NAN, -0.1)),
    (r"of shape \(4,\), got a list", lambda: rate(0.1, [1, 2, 3, 4])),
    *(
        (f"iterations to be .*, got {v}", lambda v=v: SinkhornRouter(PLAIN, iterations=v))
        for v in (2.5, 0)
    ),
    ("scale to be a finite number, got '3'", lambda: aux(torch.zeros(()), "3")),
    (r"scalar scale, got shape \(3,\)", lambda: aux(torch.zeros(()), torch.ones(3))),
    ("scalar aux_loss, got 0.5", lambda: aux(0.5, 1)),
    ("16 bits or more, got 'float32'", lambda: dMoE(PLAIN, dtype="float32")),
    (r"x of shape \[..., 16\], got a list", lambda: dMoE(PLAIN)([1.0])),
    (r"got a nested tensor, of which \.values\(\)", lambda: dMoE(PLAIN)(nested())),
    ("model to be a module, got a list", lambda: collect([]).__enter__()),
]


@pytest.mark.parametrize(("why", "call"), WRONG, ids=[why for why, _ in WRONG])
def test_what_is_no_such_argument_is_named(why: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=why):
        call()


def test_numpys_numbers_are_numbers() -> None:
    layer = lora(rank=np.int64(2), alpha=np.float64(4))
    torch.nn.init.ones_(layer.experts.parametrizations.w1[0].b)
    assert layer.experts.parametrizations.w1[0].scaling == 2
    layer(X).y.sum().backward()
    assert torch.equal(rate(np.float32(0.5)), rate(0.5))
    assert SinkhornRouter(PLAIN, iterations=np.int32(3)).iterations == 3
    aux_loss = torch.zeros((), requires_grad=True)
    aux(aux_loss, torch.full((1,), 3.0)).sum().backward()  # one number, whatever its shape
    assert aux_loss.grad == 3
