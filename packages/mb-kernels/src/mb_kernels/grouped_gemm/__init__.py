"""Rows sorted by expert times per-expert weights."""

from mb_kernels.grouped_gemm.gmm import gmm as gmm
from mb_kernels.grouped_gemm.op import grouped_gemm as grouped_gemm
