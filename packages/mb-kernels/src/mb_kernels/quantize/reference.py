"""Reference of ``mb_kernels.quantize``: group-wise symmetric 4- and 8-bit codes.

Letters: R rows (all leading dims), C columns, G groups of a row, P codes stored per row in bytes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP_SIZE = 128
"""Columns that share one fp32 scale, which adds 3 % to 8-bit codes and 6 % to those of 4 bits."""


def largest_code(bits: int) -> int:
    """127 for 8 bits, 7 for 4: codes are symmetric, the most negative number is not used."""
    return 2 ** (bits - 1) - 1


def largest_scale(bits: int) -> float:
    """Times the largest code still a number of fp32, whose largest over 127 is rounded up."""
    return torch.finfo(torch.float32).max * (1 - 2.0**-23) / largest_code(bits)


def quantize(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Twin of ``mb_kernels.quantize``."""
    x_GC = _groups(x.float())
    largest_G = x_GC.abs().amax(dim=-1)  # NaN if the group holds one
    scales_G = (largest_G / largest_code(bits)).clamp(max=largest_scale(bits))
    scales_G = torch.where(largest_G.isfinite(), scales_G, torch.nan)
    # A group of zeros, or so small that its scale underflows, has scale 0 and codes 0.
    divisor_G1 = torch.where(scales_G > 0, scales_G, 1.0)[..., None]
    codes = torch.round(x_GC / divisor_G1)
    codes = torch.where(scales_G[..., None] > 0, codes, 0).clamp(
        -largest_code(bits), largest_code(bits)
    )
    codes = codes.flatten(-2)[..., : x.shape[-1]].to(torch.int8)
    return (codes if bits == 8 else _pack(codes)), scales_G


def dequantize(codes: Tensor, scales: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Twin of ``mb_kernels.dequantize``."""
    values = codes if bits == 8 else _unpack(codes)
    columns = values.shape[-1]
    scaled_GC = _groups(values.float()) * scales[..., None]
    return scaled_GC.flatten(-2)[..., :columns].to(dtype)


def empty_quantized(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Uninitialised codes and scales, as ``quantize`` returns them."""
    *rows, columns = x.shape
    code_dtype = torch.int8 if bits == 8 else torch.uint8
    codes = x.new_empty((*rows, columns * bits // 8), dtype=code_dtype)
    groups = (columns + GROUP_SIZE - 1) // GROUP_SIZE
    return codes, x.new_empty((*rows, groups), dtype=torch.float32)


def _groups(x: Tensor) -> Tensor:
    """[..., C] to [..., G, GROUP_SIZE], the last group filled up with zeros."""
    padding = -x.shape[-1] % GROUP_SIZE
    return F.pad(x, (0, padding)).unflatten(-1, (-1, GROUP_SIZE))


def _pack(codes: Tensor) -> Tensor:
    """Codes -7..7 of columns 2p (low nibble) and 2p + 1 (high nibble), plus 8, in byte p."""
    even, odd = (codes + 8).to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return (even | (odd << 4)).to(torch.uint8)


def _unpack(packed: Tensor) -> Tensor:
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).to(torch.int8) - 8
