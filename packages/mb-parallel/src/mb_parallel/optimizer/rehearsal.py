"""A step's launches on tensors without memory, so that their kernels can be compiled ahead."""

from __future__ import annotations

from collections.abc import Iterable

import mb_kernels
import torch
from torch import Tensor

from mb_parallel.optimizer.sharded import ShardedOptimizer
from mb_parallel.shards import on_meta


@torch.no_grad()
def rehearse_step(optimizer: ShardedOptimizer, grads: dict[Tensor, torch.dtype]) -> None:
    """Launch what `clip_and_step` would for this rank, for `mb_kernels.compile_ahead`.

        compiling = mb_kernels.compile_ahead(partial(rehearse_step, optimizer, {}))

    Covered are the norm and `AdamW`'s update, that of vectors and embeddings beside `Muon` too.

    Args:
        optimizer: of this package; nothing of it changes.
        grads: dtype of a parameter's gradient, of those that are not in their parameter's.
    """
    norm = []
    for group in optimizer.param_groups:
        parameters = [p for p in group["params"] if p.requires_grad]
        here = [on_meta(p, dtype=grads.get(p, p.dtype)) for p in parameters]
        norm += here
        if parameters:
            optimizer.rehearse(group, parameters, here)
    if norm:
        mb_kernels.sum_of_squares(norm)


@torch.no_grad()
def rehearse_accumulation(copies: Iterable[Tensor]) -> None:
    """Launch what `WorkingCopies` would for the second and a later micro-batch of a step.

    Args:
        copies: what the model computes with, whose gradients are to be added up.
    """
    for copy in copies:
        grad = on_meta(copy)
        mb_kernels.accumulate_grad(mb_kernels.accumulate_grad(grad, grad), grad)
