"""Rotary positions: queries and keys turn by angles that grow with their place.

RoFormer, arXiv 2104.09864, in the layout of halves. For texts longer than those trained on they may
turn slower, see `RopeScaling`.

Letters: B sequences, S tokens of a sequence, H heads, C width of a head, W turned pairs of a head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mb_train.models.config import RopeScaling, TransformerConfig

# Llama 3.1's, as Megatron has them: the length trained on, and how many turns within it are few
# (slowed by the whole factor) and many (not slowed).
TRAINED_ON, FEW_TURNS, MANY_TURNS = 8192, 1.0, 4.0


def rotary_tables(config: TransformerConfig, positions_BS: Tensor) -> tuple[Tensor, Tensor] | None:
    """Cosine and sine of the angles; None where positions are not rotary.

    Args:
        positions_BS: integer position of each token, [B or 1, S].

    Returns:
        Two fp32 tensors [B or 1, S, 1, width], width the rotated part of a head.
    """
    if config.positions != "rope":
        return None
    width = int(config.head_size * config.rope_fraction) // 2 * 2
    steps_W = torch.arange(0, width, 2, device=positions_BS.device, dtype=torch.float32)
    speeds_W = config.rope_base ** (-steps_W / width)
    if config.rope_scaling is not None:
        speeds_W = _slowed(speeds_W, config.rope_scaling)
    angles = positions_BS[..., None].float() * speeds_W
    angles = torch.cat([angles, angles], dim=-1)[:, :, None]
    return angles.cos(), angles.sin()


def _slowed(speeds_W: Tensor, scaling: RopeScaling) -> Tensor:
    slow_W = speeds_W / scaling.factor
    if scaling.kind == "linear":
        return slow_W
    turns_W = speeds_W * (TRAINED_ON / (2 * math.pi))
    kept_W = ((turns_W - FEW_TURNS) / (MANY_TURNS - FEW_TURNS)).clamp(0, 1)
    return torch.lerp(slow_W, speeds_W, kept_W)


def rotate(x_BSHC: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the first `width` channels of each head by their position's angles, in fp32."""
    cos, sin = rope
    width = cos.shape[-1]
    turned, rest = x_BSHC[..., :width].float(), x_BSHC[..., width:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned.to(x_BSHC.dtype), rest], dim=-1)
