"""Arguments at the border: a number is taken whatever its kind, everything else is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mb_layers import (
    AsMLP,
    ExpertChoiceRouter,
    Experts,
    LocalDispatcher,
    MoEConfig,
    NoisyTopKRouter,
    Router,
    SinkhornRouter,
    add_lora,
    attach_aux_loss,
    capacity,
    collect,
    dMoE,
    freeze_in_bits,
    load_balancing_loss,
    merge_lora,
    sequence_load_balancing_loss,
    update_balancing_bias,
    update_balancing_biases,
    z_loss,
)

CONFIG = MoEConfig(hidden_size=16, ffn_hidden_size=16, num_experts=4, balancing_bias=True)
PLAIN = MoEConfig(hidden_size=16, ffn_hidden_size=16, num_experts=4)
X = torch.ones(3, 16)
IDS = torch.zeros(1, 3, 2, dtype=torch.int64)
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
    (
        "valid_tokens to be a real number, got torch.bool",
        lambda: dMoE(PLAIN)(X, valid_tokens=X.sum() > 0),
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
    *(
        ("expected a MoEConfig, got a dict", lambda part=part: part({"hidden_size": 16}))
        for part in (dMoE, Experts, Router, SinkhornRouter, NoisyTopKRouter, ExpertChoiceRouter)
    ),
    ("layer to be a module, got a MoEConfig", lambda: AsMLP(PLAIN, aux_scale=1)),
    ("yields for each micro-batch, got a dict", lambda: update_balancing_biases([{}], rate=0.1)),
    ("TokenDispatcher, got 'all_to_all'", lambda: dMoE(PLAIN, dispatcher="all_to_all")),
    ("one of position, probability, got 'probs'", lambda: LocalDispatcher(4, drop_policy="probs")),
    ("capacity_factor with min_capacity=4, got", lambda: LocalDispatcher(4, min_capacity=4)),
    (
        "capacity_factor with drop_policy='probability', got None",
        lambda: LocalDispatcher(4, drop_policy="probability"),
    ),
    ("num_experts to be an integer >= 1, got 0", lambda: capacity(8, 2, 0, 1.0)),
    *(
        (f"num_tokens to be an integer >= 0, got {v!r}", lambda v=v: capacity(v, 2, 4, 1.0))
        for v in (-1, 16.5, "16", True)
    ),
    ("top_k to be an integer >= 0, got 2.5", lambda: capacity(8, 2.5, 4, 1.0)),
    (
        "min_capacity to be an integer >= 0, got 2.5",
        lambda: LocalDispatcher(4, 1.0, min_capacity=2.5),
    ),
    *(
        (f"capacity_factor to be a number > 0, got {v!r}", lambda v=v: LocalDispatcher(4, v))
        for v in (-1, 0, NAN, "1.25", True)
    ),
    (
        r"mask_T to be .* of shape \(3,\), one value .*\(1,\)",
        lambda: z_loss(X, mask_T=X[0, :1].bool()),
    ),
    ("mask_T to be bool or integers .* torch.float32", lambda: z_loss(X, mask_T=X[:, 0])),
    *(
        (f"finite num_tokens >= 0, got {v!r}", lambda v=v: z_loss(X, num_tokens=v))
        for v in (-3, NAN, "3")
    ),
    (
        r"num_tokens to be one number, got shape \(4,\)",
        lambda: load_balancing_loss(X[:, :4], X[0, :4], num_tokens=X[0, :4]),
    ),
    (
        "integer expert_ids_BSK .* got torch.float32",
        lambda: sequence_load_balancing_loss(X[None], X[None, :, :1]),
    ),
    (
        "integer expert_ids_BSK .* got torch.bool",
        lambda: sequence_load_balancing_loss(X[None], X[None, :, :1] > 0),
    ),
    (
        "return counts .* got a NoneType",
        lambda: sequence_load_balancing_loss(X[None], IDS, reduce_counts=lambda counts: None),
    ),
    ("probs_TE to be a floating-point tensor, got a list", lambda: load_balancing_loss([X], X[0])),
    ("logits_TE to be a floating-point tensor, got torch.int64", lambda: z_loss(X.long())),
    ("one count per column .* got a list", lambda: load_balancing_loss(X, [1] * 16)),
    ("y to be a tensor with gradient, got torch.int64", lambda: attach_aux_loss(IDS, X.sum())),
    ("with dMoE or MoE layers, found none", lambda: AsMLP(torch.nn.Linear(4, 4), aux_scale=1)),
    (
        "router to be a module, got a NoneType",
        lambda: update_balancing_bias(None, torch.arange(4), rate=0.1),
    ),
]


@pytest.mark.parametrize(("why", "call"), WRONG, ids=[why for why, _ in WRONG])
def test_what_is_no_such_argument_is_named(why: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=why):
        call()


def test_losses_take_the_masks_that_layers_take() -> None:
    probs, ids = torch.rand(2, 3, 4), torch.randint(4, (2, 3, 2))
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])  # as a tokenizer of transformers returns it
    for loss in (
        lambda mask: z_loss(probs.view(6, 4), mask_T=mask.view(-1)),
        lambda mask: load_balancing_loss(probs.view(6, 4), torch.arange(4), mask_T=mask.view(-1)),
        lambda mask: sequence_load_balancing_loss(probs, ids, mask_BS=mask),
    ):
        assert loss(mask) == loss(mask.bool())
        assert loss(3 * mask) == loss(mask.bool())


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
