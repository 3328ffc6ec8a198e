"""MXFP4, in which GPT-OSS's experts are published: numbers of 4 bits, 32 with one power of two.

OCP Microscaling Formats, v1.0 (2023). A byte holds two numbers, the first in its lower half: a
sign, two bits of exponent and one of mantissa. A block's byte e stands for 2^(e - 127). Every
product of the two is a bf16 number, so nothing is rounded.

Letters: E experts, F rows, B blocks of a row, D columns, 32 B.
"""

from __future__ import annotations

import torch
from torch import Tensor

PACKED = BLOCKS, SCALES = "_blocks", "_scales"  # ends of the two tensors' names
_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """The matrices, fp32 [E, F, D].

    Args:
        blocks: uint8 [E, F, B, 16], numbers.
        scales: uint8 [E, F, B], exponents.

    Raises:
        ValueError: other shapes or dtypes.
    """
    shape = tuple(scales.shape)
    if len(shape) != 3 or blocks.shape != (*shape, 16):
        raise ValueError(
            "Expected MXFP4 scales [experts, rows, blocks] and blocks [experts, rows, blocks, 16], "
            f"got {list(shape)} and {list(blocks.shape)}."
        )
    if {blocks.dtype, scales.dtype} != {torch.uint8}:
        raise ValueError(
            f"Expected MXFP4 blocks and scales in uint8, got {blocks.dtype} and {scales.dtype}."
        )
    either = torch.tensor([*_SIZES, *(-size for size in _SIZES)])
    by_byte = torch.stack([either.repeat(16), either.repeat_interleave(16)], dim=1)
    found = torch.empty(*shape, 16, 2)
    for numbers, bytes_, exponents in zip(found, blocks, scales, strict=True):  # for the memory
        powers = torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127)
        torch.mul(by_byte[bytes_.int()], powers[..., None, None], out=numbers)
    return found.flatten(2)
