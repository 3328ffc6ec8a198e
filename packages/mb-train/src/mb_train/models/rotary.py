"""Rotary positions: queries and keys turn by angles that grow with their place.

RoFormer, arXiv 2104.09864, in the layout of halves. For texts longer than those trained on they may
turn slower, see `RopeScaling`. Of these ways YaRN (arXiv 2309.00071) also multiplies the scores:
through cosine and sine, which both of a query and a key have, and in latent attention directly.
LongRoPE (arXiv 2402.13753) does so through cosine and sine alone.

Letters: B sequences, S tokens of a sequence, H heads, C width of a head, W turned pairs of a head.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from mb_train.models.config import RopeScaling, TransformerConfig

# Llama 3.1's, as Megatron has them: the length trained on, and how many turns within it are few
# (slowed by the whole factor) and many (not slowed).
TRAINED_ON, FEW_TURNS, MANY_TURNS = 8192, 1.0, 4.0


Rope: TypeAlias = tuple[Tensor, Tensor]


def ropes(config: TransformerConfig, positions_BS: Tensor) -> dict[str, Rope | None]:
    """Those of all blocks, as `BlockContext` has them; see `rotary_tables`."""
    local = None
    if config.local_rope_base is not None:
        plain = replace(config, rope_base=config.local_rope_base, rope_scaling=None)
        local = rotary_tables(plain, positions_BS)
    return {"rope": rotary_tables(config, positions_BS), "local_rope": local}


def rotary_tables(config: TransformerConfig, positions_BS: Tensor) -> Rope | None:
    """Cosine and sine of the angles; None where positions are not rotary.

    Args:
        positions_BS: integer position of each token, [B or 1, S].

    Returns:
        Two fp32 tensors [B or 1, S, 1, width], width the rotated part of a head.
    """
    if config.positions != "rope":
        return None
    width, scaling = config.rotated_size, config.rope_scaling
    steps_W = torch.arange(0, width, 2, device=positions_BS.device, dtype=torch.float32)
    speeds_W = config.rope_base ** (-steps_W / width)
    if scaling is not None:
        speeds_W = _slowed(speeds_W, scaling, config.rope_base)
    angles = positions_BS[..., None].float() * speeds_W
    angles = torch.cat([angles, angles], dim=-1)[:, :, None]
    cos, sin = angles.cos(), angles.sin()
    if scaling is None or scaling.kind not in ("yarn", "longrope"):
        return cos, sin
    longer = sharpening(scaling, scaling.mscale) / sharpening(scaling, scaling.mscale_all_dim)
    longer = scaling.mscale if scaling.kind == "longrope" else longer
    return cos * longer, sin * longer


def sharpening(scaling: RopeScaling, mscale: float) -> float:
    """By how much YaRN makes queries and keys longer; 1 for other ways, and for a factor up to 1.

    Args:
        mscale: how much of it: `scaling.mscale` for the rotated part of a head,
            `scaling.mscale_all_dim` for all of it. The former's table is divided by the latter,
            which latent attention has in its scores.
    """
    if scaling.kind != "yarn" or scaling.factor <= 1:
        return 1.0
    return 1.0 + 0.1 * mscale * math.log(scaling.factor)


def _slowed(speeds_W: Tensor, scaling: RopeScaling, base: float) -> Tensor:
    if scaling.kind == "longrope":
        return speeds_W / _on(speeds_W.device, scaling.factors)
    slow_W = speeds_W / scaling.factor
    if scaling.kind == "linear":
        return slow_W
    if scaling.kind == "yarn":
        return torch.lerp(speeds_W, slow_W, _share_of_slow(len(speeds_W), scaling, base, speeds_W))
    turns_W = speeds_W * (TRAINED_ON / (2 * math.pi))
    kept_W = ((turns_W - FEW_TURNS) / (MANY_TURNS - FEW_TURNS)).clamp(0, 1)
    return torch.lerp(slow_W, speeds_W, kept_W)


@functools.cache  # a graph cannot capture that the host tells numbers
def _on(device: torch.device, factors: tuple[float, ...]) -> Tensor:
    return torch.tensor(factors, device=device)


def _share_of_slow(pairs: int, scaling: RopeScaling, base: float, like: Tensor) -> Tensor:
    """YaRN's, of each pair: 0 up to the one that turns `beta_fast` times, 1 from `beta_slow` on."""

    def pair_that_turns(times: float) -> float:
        """Its number, between whole ones: speeds fall by the base over all pairs."""
        return pairs * math.log(scaling.trained_on / (times * 2 * math.pi)) / math.log(base)

    first, last = map(pair_that_turns, (scaling.beta_fast, scaling.beta_slow))
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    steps_W = torch.arange(pairs, device=like.device, dtype=like.dtype)
    # Within a few tokens, or with a small base, the last may come before the first: none is slowed
    # then, or all are, as everywhere else.
    return ((steps_W - first) / (last - first or 1e-3)).clamp(0, 1)


def rotate(x_BSHC: Tensor, rope: Rope) -> Tensor:
    """Turn the first `width` channels of each head by their position's angles, in fp32."""
    cos, sin = rope
    width = cos.shape[-1]
    turned, rest = x_BSHC[..., :width].float(), x_BSHC[..., width:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned.to(x_BSHC.dtype), rest], dim=-1)
