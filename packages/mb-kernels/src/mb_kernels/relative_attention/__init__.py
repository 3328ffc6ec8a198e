"""Attention within segments with a bias by distance, which is never expanded to all pairs."""

from mb_kernels.relative_attention.op import relative_attention as relative_attention
