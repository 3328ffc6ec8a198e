"""The optimizer of a run and its rates: matrices decay, biases and norms do not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from mb_layers import Router
from mb_parallel.optimizer import (
    SGD,
    Adafactor,
    AdamW,
    GradScaler,
    Muon,
    ShardedOptimizer,
    decay_groups,
    muon_groups,
)
from torch import Tensor, nn

from mb_train.assembly.assemble import Assembled
from mb_train.config import TrainConfig
from mb_train.models.embedding import Embedding
from mb_train.models.gpt import GPT
from mb_train.models.linear import Linear
from mb_train.models.states import ShortConvolution
from mb_train.models.t5 import T5
from mb_train.schedule import Schedule

_STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build_optimizer(model: Assembled, config: TrainConfig) -> ShardedOptimizer:
    """The optimizer of `--optimizer` over all parts of the model on this rank."""
    groups = parameter_groups(model.parts, config)
    if config.optimizer == "sgd":
        return SGD(groups, momentum=config.sgd_momentum)
    if config.optimizer == "adafactor":
        # Scripts of MegaBlocks' fork give it Adam's rate, its 760M script for example: steps are
        # not to be scaled by the weights once more, which are a hundredth.
        return Adafactor(groups, scale_parameter=False)
    rates: dict[str, Any] = {
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_eps,
        "state_dtype": _STATE_DTYPES[config.optimizer_state_dtype],
    }
    if config.optimizer == "muon":
        rates |= {
            "momentum": config.muon_momentum,
            "nesterov": config.muon_nesterov,
            "ns_steps": config.muon_num_ns_steps,
            "ns_coefficients": config.muon_coefficient_type,
            "scale": config.muon_extra_scale_factor,
        }
        return Muon(groups, **rates, working_copies=model.working_copies)
    return AdamW(
        groups,
        **rates,
        working_copies=model.working_copies,
        offload_fraction=config.offload_fraction,
    )


def parameter_groups(parts: Sequence[nn.Module], config: TrainConfig) -> list[dict[str, Any]]:
    """The parameters of a model's parts, in groups as `--optimizer` takes them."""
    groups: list[dict[str, Any]] = []
    for part in parts:
        if config.optimizer == "muon":
            # None of a stage without, or tied; the second is BERT's for the order of sentences.
            ends = (getattr(part, name, None) for name in ("head", "order_head"))
            heads = [head for head in ends if head is not None]
            # Nor are the taps of a convolution a map: each row is a channel for itself.
            heads += [m for m in part.modules() if isinstance(m, ShortConvolution)]
            linear = [module for module in part.modules() if isinstance(module, Linear)]
            fused = {m.weight: m.fused for m in linear} if config.muon_split_qkv else {}
            groups += muon_groups(part, config.weight_decay, heads=heads, fused=fused)
        else:
            groups += decay_groups(part, config.weight_decay)
    modules = [module for part in parts for module in part.modules()]
    ends: list[Tensor] = []
    if config.rates_of_ends is not None:
        tables = [m.tokens.weight for m in modules if isinstance(m, Embedding)]
        heads = [m.head.weight for m in modules if isinstance(m, GPT | T5) and m.head is not None]
        ends = [*tables, *heads]
        groups = _apart(groups, ends, rates=config.rates_of_ends)
    if config.moe_router_lr_mult != 1:
        routers = (p for m in modules if isinstance(m, Router) for p in m.parameters())
        groups = _apart(groups, routers, lr_mult=config.moe_router_lr_mult)
    if config.wider != 1:
        embeddings = (p for m in modules if isinstance(m, Embedding) for p in m.parameters())
        decaying = (p for group in groups if group["decays"] for p in group["params"])
        matrices = _without(decaying, embeddings)
        groups = _apart(groups, matrices, eps=config.adam_eps / config.wider)
        groups = _apart(groups, _without(matrices, ends), lr_mult=1 / config.wider)
    return [group for group in groups if group["params"]]


def _apart(
    groups: list[dict[str, Any]], chosen: Iterable[Tensor], *, lr_mult: float = 1.0, **own: Any
) -> list[dict[str, Any]]:
    """Groups without the chosen parameters, behind each its chosen ones, if any, with `own`.

    Their `lr_mult` multiplies that which they have already.
    """
    ids = set(map(id, chosen))
    apart = []
    for group in groups:
        theirs = [p for p in group["params"] if id(p) in ids]
        others = [p for p in group["params"] if id(p) not in ids]
        rate = lr_mult * group.get("lr_mult", 1.0)
        apart += [
            {**group, "params": others},
            {**group, "params": theirs, "lr_mult": rate, **own},
        ]
    return apart


def _without(tensors: Iterable[Tensor], others: Iterable[Tensor]) -> list[Tensor]:
    ids = set(map(id, others))
    return [tensor for tensor in tensors if id(tensor) not in ids]


def build_scaler(config: TrainConfig) -> GradScaler | None:
    """The loss scale of an fp16 run; None for other dtypes."""
    if not config.fp16:
        return None
    if config.loss_scale is not None:
        return GradScaler.constant(config.loss_scale)
    return GradScaler(
        config.initial_loss_scale,
        growth_interval=config.loss_scale_window,
        hysteresis=config.hysteresis,
        min_scale=config.min_loss_scale,
    )


def apply_schedule(optimizer: torch.optim.Optimizer, schedule: Schedule, samples: int) -> None:
    """Set the rates of the step that begins after `samples` samples.

    A group's `lr_mult` multiplies its own; its `rates` are a peak and a least rate of its own.
    """
    weight_decay = schedule.weight_decay(samples)
    for group in optimizer.param_groups:
        own = schedule.between(*group["rates"]) if "rates" in group else schedule
        group["lr"] = own.lr(samples) * group.get("lr_mult", 1.0)
        group["weight_decay"] = weight_decay if group["decays"] else 0.0
