"""Tokens to rows sorted by expert, and back."""

from mb_kernels.permute.op import combine as combine
from mb_kernels.permute.op import gather as gather
