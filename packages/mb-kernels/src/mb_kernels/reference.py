"""Every op in plain PyTorch: CPU path, oracle and documentation.

Same names and arguments as the ops, except for arguments about other ranks.
"""

from mb_kernels.accumulate_grad.reference import accumulate_grad
from mb_kernels.adamw.reference import adamw_step
from mb_kernels.block_sparse.mlp_reference import pad_bins, sparse_expert_mlp, topology
from mb_kernels.block_sparse.reference import dds, dsd, sdd
from mb_kernels.expert_mlp.reference import expert_mlp, grouped_experts
from mb_kernels.float8.reference import float8_linear, to_float8
from mb_kernels.grouped_gemm.reference import gmm, grouped_gemm
from mb_kernels.linear_cross_entropy.reference import linear_cross_entropy
from mb_kernels.muon.reference import muon_momentum, muon_step
from mb_kernels.permute.reference import combine, gather
from mb_kernels.quantize.reference import dequantize, quantize
from mb_kernels.relative_attention.reference import relative_attention
from mb_kernels.router_losses.reference import router_losses
from mb_kernels.routing.reference import bin_tokens, topk_ids, topk_softmax
from mb_kernels.state_space.reference import state_space_scan
from mb_kernels.sum_of_squares.reference import sum_of_squares
from mb_kernels.symmetric_matmul.reference import symmetric_matmul

__all__ = [
    "accumulate_grad",
    "adamw_step",
    "bin_tokens",
    "combine",
    "dds",
    "dequantize",
    "dsd",
    "expert_mlp",
    "float8_linear",
    "gather",
    "gmm",
    "grouped_experts",
    "grouped_gemm",
    "linear_cross_entropy",
    "muon_momentum",
    "muon_step",
    "pad_bins",
    "quantize",
    "relative_attention",
    "router_losses",
    "sdd",
    "sparse_expert_mlp",
    "state_space_scan",
    "sum_of_squares",
    "symmetric_matmul",
    "to_float8",
    "topk_ids",
    "topk_softmax",
    "topology",
]
