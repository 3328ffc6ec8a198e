"""The optimizer of a run: AdamW or SGD, no weight decay for biases and other vectors.

Parameters are fp32 (sharded ones DTensors); torch's fused kernels update them in one pass.
"""

from __future__ import annotations

import torch
from torch import nn

from mb_train.config import TrainConfig
from mb_train.schedule import Schedule


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Two groups of parameters: matrices decay, biases and norms (one axis) do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "decays": True},
        {"params": [p for p in parameters if p.ndim <= 1], "decays": False, "weight_decay": 0.0},
    ]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=config.sgd_momentum, fused=True)
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=config.adam_eps, fused=True)


def apply_schedule(optimizer: torch.optim.Optimizer, schedule: Schedule, samples: int) -> float:
    """Set the rates of the step that begins after `samples` samples; return its learning rate."""
    lr, weight_decay = schedule.lr(samples), schedule.weight_decay(samples)
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["weight_decay"] = weight_decay if group["decays"] else 0.0
    return lr
