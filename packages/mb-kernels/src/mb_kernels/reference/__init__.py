"""Every op in plain PyTorch, same name and signature: CPU path, oracle and documentation."""

from mb_kernels.reference.expert_mlp import expert_mlp
from mb_kernels.reference.grouped_gemm import grouped_gemm
from mb_kernels.reference.permute import combine, gather
from mb_kernels.reference.quantize import dequantize, quantize
from mb_kernels.reference.routing import bin_tokens, topk_softmax

__all__ = [
    "bin_tokens",
    "combine",
    "dequantize",
    "expert_mlp",
    "gather",
    "grouped_gemm",
    "quantize",
    "topk_softmax",
]
