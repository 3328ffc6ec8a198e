"""Mixture-of-Experts kernels in Triton, with a reference in plain PyTorch.

    weights, expert_ids, probs = topk_softmax(logits_TE, top_k)
    bins = bin_tokens(expert_ids, num_experts)
    y = expert_mlp(x_TD, w1, w2, bins, weights, activation="swiglu")

- Routing: `topk_softmax`, `topk_ids`, `bin_tokens`, `Bins`, `router_losses`, `RouterLosses`.
- Tokens to rows and back: `gather`, `combine`.
- Experts: `expert_mlp`, `grouped_experts`, `grouped_gemm`, `gmm`, `is_glu`.
- Compiling ahead: `warm_up`, `compile_ahead`, `rehearse_linear_cross_entropy`.
- Block-sparse: `sdd`, `dsd`, `dds`, `topology`, `pad_bins`, `sparse_expert_mlp`.
- Activations in few bits: `quantize`, `dequantize`, `Quantized`.
- Products in 8-bit floats: `to_float8`, `Float8`, `float8_linear`.
- The rest of a step: `relative_attention`, `state_space_scan`, `linear_cross_entropy`,
  `VocabularyShard`, `accumulate_grad`, `sum_of_squares`, `adamw_step`, `muon_momentum`,
  `muon_step`, `symmetric_matmul`.
- `reference`: all of these in plain PyTorch, as they run on a CPU.

`help(mb_kernels.expert_mlp)` says what one takes, returns and raises.
"""

from mb_kernels import reference as reference
from mb_kernels.accumulate_grad import accumulate_grad as accumulate_grad
from mb_kernels.activation import is_glu as is_glu
from mb_kernels.adamw import adamw_step as adamw_step
from mb_kernels.block_sparse import dds as dds
from mb_kernels.block_sparse import dsd as dsd
from mb_kernels.block_sparse import pad_bins as pad_bins
from mb_kernels.block_sparse import sdd as sdd
from mb_kernels.block_sparse import sparse_expert_mlp as sparse_expert_mlp
from mb_kernels.block_sparse import topology as topology
from mb_kernels.expert_mlp import expert_mlp as expert_mlp
from mb_kernels.expert_mlp import grouped_experts as grouped_experts
from mb_kernels.float8 import Float8 as Float8
from mb_kernels.float8 import float8_linear as float8_linear
from mb_kernels.float8 import to_float8 as to_float8
from mb_kernels.grouped_gemm import gmm as gmm
from mb_kernels.grouped_gemm import grouped_gemm as grouped_gemm
from mb_kernels.linear_cross_entropy import VocabularyShard as VocabularyShard
from mb_kernels.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from mb_kernels.muon import muon_momentum as muon_momentum
from mb_kernels.muon import muon_step as muon_step
from mb_kernels.permute import combine as combine
from mb_kernels.permute import gather as gather
from mb_kernels.quantize import Quantized as Quantized
from mb_kernels.quantize import dequantize as dequantize
from mb_kernels.quantize import quantize as quantize
from mb_kernels.relative_attention import relative_attention as relative_attention
from mb_kernels.router_losses import RouterLosses as RouterLosses
from mb_kernels.router_losses import router_losses as router_losses
from mb_kernels.routing import Bins as Bins
from mb_kernels.routing import bin_tokens as bin_tokens
from mb_kernels.routing import topk_ids as topk_ids
from mb_kernels.routing import topk_softmax as topk_softmax
from mb_kernels.state_space import state_space_scan as state_space_scan
from mb_kernels.sum_of_squares import sum_of_squares as sum_of_squares
from mb_kernels.symmetric_matmul import symmetric_matmul as symmetric_matmul
from mb_kernels.warm_up import compile_ahead as compile_ahead
from mb_kernels.warm_up import (
    rehearse_linear_cross_entropy as rehearse_linear_cross_entropy,
)
from mb_kernels.warm_up import warm_up as warm_up

__version__ = "0.1.0"
