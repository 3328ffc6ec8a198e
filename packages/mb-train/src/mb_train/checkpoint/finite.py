"""What is worth a checkpoint: a loss that is not a number seldom recovers, such weights never do.

Neither is saved, lest it take the place of a checkpoint to go back to.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from mb_parallel import any_rank
from mb_parallel.optimizer import local
from torch import Tensor


@torch.no_grad()
def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether there is neither NaN nor infinity in any rank's tensors; all ranks call it."""
    verdicts = []
    for tensor in map(local, tensors):
        if tensor.is_floating_point() and tensor.numel():
            # What is no number passes through both: one reading, where isfinite writes four times.
            verdicts.append(torch.stack(tensor.aminmax()).isfinite().all())
    bad = bool(verdicts) and not bool(torch.stack(verdicts).all())
    return not any_rank(bad)
