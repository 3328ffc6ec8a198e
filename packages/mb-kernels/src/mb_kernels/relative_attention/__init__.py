"""Attention within segments, with a bias by distance that is never spread over pairs."""

from mb_kernels.relative_attention.op import relative_attention as relative_attention
