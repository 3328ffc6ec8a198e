"""Matrices in 8-bit floats."""

from mb_kernels.float8.linear import float8_linear as float8_linear
from mb_kernels.float8.op import Float8 as Float8
from mb_kernels.float8.op import to_float8 as to_float8
