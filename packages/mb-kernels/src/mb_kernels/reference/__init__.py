"""Every op in plain PyTorch, same name and signature: CPU path, oracle and documentation."""

from mb_kernels.linear_cross_entropy.reference import linear_cross_entropy
from mb_kernels.reference.block_sparse import dds, dsd, sdd
from mb_kernels.reference.expert_mlp import expert_mlp
from mb_kernels.reference.grouped_gemm import grouped_gemm
from mb_kernels.reference.permute import combine, gather
from mb_kernels.reference.quantize import dequantize, quantize
from mb_kernels.reference.router_losses import router_losses
from mb_kernels.reference.routing import bin_tokens, topk_softmax
from mb_kernels.reference.sparse_mlp import pad_bins, sparse_expert_mlp, topology

__all__ = [
    "bin_tokens",
    "combine",
    "dds",
    "dequantize",
    "dsd",
    "expert_mlp",
    "gather",
    "grouped_gemm",
    "linear_cross_entropy",
    "pad_bins",
    "quantize",
    "router_losses",
    "sdd",
    "sparse_expert_mlp",
    "topk_softmax",
    "topology",
]
