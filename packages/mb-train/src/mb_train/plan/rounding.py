"""What rounding to 8-bit floats moves through the memory of a GPU, beside the products.

Both operands of a product are rounded by their rows: each number is read in 16 bits, and its code
is written. The rows of a weight are output channels of the forward pass. For the backward pass a
weight is rounded by its columns, for which it is read twice (`mb_kernels.float8.kernels`).
"""

from __future__ import annotations

from typing import NamedTuple

from mb_kernels.activation import is_glu
from mb_parallel import ParallelDims

from mb_train.models.workload import Pass, Workload
from mb_train.plan.flops import attention_maps, dense_maps, expert_weights, visited
from mb_train.plan.step_time import Demand

# Bytes of a number that is rounded.
_BY_ROWS, _BY_COLUMNS = 3, 5


class Rounded(NamedTuple):
    """Numbers that a layer rounds.

    forward, backward: of a token, in the mean, in either pass.
    dense, experts: its weights, in each pass once a micro-batch.
    """

    forward: float
    backward: float
    dense: int
    experts: int


def rounding(
    work: Workload, dims: ParallelDims, *, micro_batch: int, micro_batches: int, repeated: float
) -> Demand:
    """Of a step on a rank; of a pipeline in the mean over its stages.

    Args:
        micro_batch: samples of one.
        repeated: share of the layers that compute their forward pass again.
    """
    moved = 0.0
    for each in (*work.passes, *work.behind):
        tokens = micro_batch * each.tokens / dims.cp_tp
        for layer in filter(each.blocks.in_fp8, range(each.blocks.num_layers)):
            found, forward = rounded(each, layer), _BY_ROWS * (1 + repeated)
            moved += tokens * (forward * found.forward + _BY_ROWS * found.backward)
            weights = found.dense / dims.tp + found.experts / dims.ep
            moved += weights * (forward + _BY_COLUMNS)
    return Demand(moved=moved * micro_batches / dims.pp)


def rounded(each: Pass, layer: int) -> Rounded:
    """Of a layer in FP8."""
    config, moe = each.blocks, each.blocks.moe
    maps = [one for one in attention_maps(each, layer) if not one.exact]
    found = Rounded(0.0, 0.0, 0, 0)
    if moe is None or not config.has_experts(layer):
        maps += dense_maps(config, layer)
    else:
        D, up = config.hidden_size, 2 if is_glu(config.activation) else 1
        # Tokens are rounded before they are copied to the rows of their experts.
        chosen = visited(moe.top_k, moe.num_experts, moe.num_zero_experts) * moe.ffn_hidden_size
        shared = moe.shared_expert_hidden_size or 0
        inside = moe.experts_hidden_size
        tokens = inside + (D if shared else 0)
        found = Rounded(
            forward=tokens + chosen + shared,
            backward=tokens + up * (chosen + shared),
            dense=(up + 1) * D * shared,
            experts=expert_weights(config),
        )
    return Rounded(
        forward=found.forward + sum(one.share * one.inputs for one in maps),
        backward=found.backward + sum(one.share * one.outputs for one in maps),
        dense=found.dense + sum(one.inputs * one.outputs for one in maps),
        experts=found.experts,
    )
