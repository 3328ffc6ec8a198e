"""Parallelism for Mixture-of-Experts models, applied from outside on torch's own engines.

- Ranks: `distributed`, `decline`, `world_size`, `rank`, `any_rank`, `of_all_ranks`, `check_same`.
- Groups: `ParallelDims`, `ParallelMesh`.
- Experts: `parallelize_experts`, `rebalance_experts`, `set_micro_batch`, `within_budget`.
- Data parallelism and ZeRO: `apply_data_parallel`, `gather_rest`, `set_gradient_sync`,
  `sum_gradients`.
- Gradients: `clip_grad_norm`.

More lies in `mb_parallel.optimizer`, `.tensor_parallel`, `.context_parallel`, `.pipeline_parallel`,
`.recompute`, `.random` and `.testing`.
"""

import types as _types

import torch as _torch

if not _torch.distributed.is_available():  # the imports below would miss some name of it
    raise ImportError(
        f"mb_parallel needs torch.distributed, without which this torch {_torch.__version__} was "
        "built. Install a torch with it; mb_kernels and mb_layers run with either."
    )

# Public API
from mb_parallel.data_parallel import apply_data_parallel as apply_data_parallel
from mb_parallel.data_parallel import gather_rest as gather_rest
from mb_parallel.data_parallel import set_gradient_sync as set_gradient_sync
from mb_parallel.data_parallel import sum_gradients as sum_gradients
from mb_parallel.expert_parallel import parallelize_experts as parallelize_experts
from mb_parallel.expert_parallel import rebalance_experts as rebalance_experts
from mb_parallel.expert_parallel import set_micro_batch as set_micro_batch
from mb_parallel.expert_parallel import within_budget as within_budget
from mb_parallel.mesh import ParallelDims as ParallelDims
from mb_parallel.mesh import ParallelMesh as ParallelMesh
from mb_parallel.optimizer import clip_grad_norm as clip_grad_norm
from mb_parallel.world import any_rank as any_rank
from mb_parallel.world import check_same as check_same
from mb_parallel.world import decline as decline
from mb_parallel.world import distributed as distributed
from mb_parallel.world import of_all_ranks as of_all_ranks
from mb_parallel.world import rank as rank
from mb_parallel.world import world_size as world_size

__version__ = "0.1.0"
# Without modules: `import *` would put one of ours in the place of the real `random`.
__all__ = [n for n, v in globals().items() if n[0] != "_" and not isinstance(v, _types.ModuleType)]
