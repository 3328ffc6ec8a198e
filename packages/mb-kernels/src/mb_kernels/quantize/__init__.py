"""Saved activations in 4 or 8 bits."""

from mb_kernels.quantize.op import GROUP_SIZE as GROUP_SIZE
from mb_kernels.quantize.op import Quantized as Quantized
from mb_kernels.quantize.op import dequantize as dequantize
from mb_kernels.quantize.op import quantize as quantize
