"""Attention: fused projections, rotary positions, documents and padding, over torch's SDPA.

Which token sees which is one notion, a segment: tokens attend within the segment they are of. A
packed sequence of several samples has one segment for each, a padded one has its padding in a
segment of its own. A model builds the `BlockContext` once and hands it to all its blocks. It holds
the segments as a mask, and where a batch says how they end, as places too: flash attention then
runs over the segments alone and reads no mask, if it has all that is asked for.

Letters: B sequences, S tokens of a sequence (Q that attend, S attended to), N segments of a
sequence, D hidden, H query heads, G key-value heads, R query heads of a group (H / G), C width of a
head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mb_train.models.cache import KVCache
from mb_train.models.config import TransformerConfig
from mb_train.models.documents import Documents, attend
from mb_train.models.linear import Linear, Norm


class BlockContext(NamedTuple):
    """What all blocks of a stack share.

    causal: no token sees a later one.
    mask: bool [B or 1, 1, Q, S], true where attention is allowed, `causal` already in it; None
        allows everything that `causal` does.
    bounds: the same for segments that lie one behind the other: int32 [B N + 1] each, where they
        begin in the Q and in the S tokens of the whole batch laid end to end. None if not known.
    bias: added to the scores, [1, H, Q, S] (T5's relative positions).
    rope: cosine and sine, fp32 [B or 1, S, 1, rotated width of a head].
    source_BSD: what a cross attention attends to, an encoder's output.
    valid_BS: nonzero for real tokens, which alone visit experts; None if none is padding.
    documents: what `mask` would say of packed documents, for a kernel that needs no mask.
    cache: keys and values of tokens that came before; `mask` is over all of them.
    """

    causal: bool = True
    mask: Tensor | None = None
    bounds: tuple[Tensor, Tensor] | None = None
    bias: Tensor | None = None
    rope: tuple[Tensor, Tensor] | None = None
    source_BSD: Tensor | None = None
    valid_BS: Tensor | None = None
    documents: Documents | None = None
    cache: KVCache | None = None


def segment_mask(segments_BQ: Tensor, segments_BS: Tensor | None = None, *, causal: bool) -> Tensor:
    """Allowed pairs, bool [B, 1, Q, S]: equal segments and, if `causal`, no later position.

    Args:
        segments_BQ: integer id of each token's segment.
        segments_BS: of the tokens attended to; None means the same tokens.
    """
    other_BS = segments_BQ if segments_BS is None else segments_BS
    mask = segments_BQ[:, None, :, None] == other_BS[:, None, None, :]
    return mask.tril() if causal else mask


def within_segments(
    ends_BN: Tensor, length: int, *, causal: bool, attended: tuple[Tensor, int] | None = None
) -> dict[str, Any]:
    """`causal`, `mask` and `bounds` of a `BlockContext` for segments that lie in a row.

    Args:
        ends_BN: the place behind each segment of a sequence, ascending to `length`; a segment may
            be empty. With N = 1 nothing divides a sequence, and there is no mask.
        length: tokens of a sequence.
        attended: the ends, as many, and the length of the sequences attended to; None means the
            same sequences.

    Raises:
        ValueError: another number of segments in the sequences attended to.
    """
    other_BN, others = (ends_BN, length) if attended is None else attended
    if other_BN.shape != ends_BN.shape:
        raise ValueError(
            f"Expected the ends of as many segments on both sides, got {list(ends_BN.shape)} and "
            f"{list(other_BN.shape)}."
        )
    found: dict[str, Any] = {"causal": causal}
    if ends_BN.shape[1] == 1:
        return found
    segments_BQ, segments_BS = segments_of(ends_BN, length), segments_of(other_BN, others)
    found["mask"] = segment_mask(segments_BQ, segments_BS, causal=causal)
    found["bounds"] = _bounds(ends_BN, length), _bounds(other_BN, others)
    return found


def segments_of(ends_BN: Tensor, length: int) -> Tensor:
    """Number of the segment that each token is of, [B, length]."""
    places_S = torch.arange(length, device=ends_BN.device)
    return (places_S >= ends_BN[..., None]).sum(1)


def positions_of(ends_BN: Tensor, length: int) -> Tensor:
    """Each token's place in its segment, [B, length]."""
    starts_BN = F.pad(ends_BN[:, :-1], (1, 0))
    places_S = torch.arange(length, device=ends_BN.device)
    return places_S - starts_BN.gather(1, segments_of(ends_BN, length))


def _bounds(ends_BN: Tensor, length: int) -> Tensor:
    rows_B1 = torch.arange(len(ends_BN), device=ends_BN.device)[:, None] * length
    return F.pad((ends_BN + rows_B1).flatten(), (1, 0)).int()


def rotary_tables(config: TransformerConfig, positions_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of rotary positions (RoFormer, arXiv 2104.09864, in the halves' layout).

    Args:
        positions_BS: integer position of each token, [B or 1, S].

    Returns:
        Two fp32 tensors [B or 1, S, 1, width], width the rotated part of a head.
    """
    width = int(config.head_size * config.rope_fraction) // 2 * 2
    steps = torch.arange(0, width, 2, device=positions_BS.device, dtype=torch.float32)
    angles = positions_BS[..., None].float() * config.rope_base ** (-steps / width)
    angles = torch.cat([angles, angles], dim=-1)[:, :, None]
    return angles.cos(), angles.sin()


def rotate(x_BSHC: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the first `width` channels of each head by their position's angles, in fp32."""
    cos, sin = rope
    width = cos.shape[-1]
    turned, rest = x_BSHC[..., :width].float(), x_BSHC[..., width:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned.to(x_BSHC.dtype), rest], dim=-1)


class CoreAttention(nn.Module):
    """softmax(q k^T / sqrt(C)) v: the part without weights, a unit of selective recompute."""

    def __init__(self, dropout: float, scale: float | None = None) -> None:
        super().__init__()
        self.dropout, self.scale = dropout, scale

    def forward(
        self, q_BQHC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor, context: BlockContext
    ) -> Tensor:
        """Return y_BQHC."""
        if context.documents is not None:
            return attend(q_BQHC, k_BSGC, v_BSGC, context.documents, self.scale)
        dropout = self.dropout if self.training else 0.0
        if context.bounds is not None and self._flash(q_BQHC, k_BSGC, context, dropout):
            # In torch for GPUs alone; Q and S tokens are the longest that a segment can be.
            from torch.nn.attention.varlen import varlen_attn

            packed = (x.flatten(0, 1) for x in (q_BQHC, k_BSGC, v_BSGC))
            y = varlen_attn(*packed, *context.bounds, q_BQHC.shape[1], k_BSGC.shape[1])
            assert isinstance(y, Tensor)
            return y.view_as(q_BQHC)
        mask = context.mask
        if context.bias is not None:
            if mask is None and context.causal:
                mask = torch.ones_like(context.bias, dtype=torch.bool).tril()
            mask = context.bias if mask is None else context.bias.masked_fill(~mask, -torch.inf)
            mask = mask.to(q_BQHC.dtype)
        y_BHQC = F.scaled_dot_product_attention(
            q_BQHC.transpose(1, 2),
            k_BSGC.transpose(1, 2),
            v_BSGC.transpose(1, 2),
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=context.causal and mask is None,
            scale=self.scale,
            enable_gqa=q_BQHC.shape[2] != k_BSGC.shape[2],
        )
        return y_BHQC.transpose(1, 2)

    def _flash(self, q_BQHC: Tensor, k_BSGC: Tensor, context: BlockContext, dropout: float) -> bool:
        """Whether torch's flash attention over segments has all that is asked for."""
        return (
            q_BQHC.is_cuda
            and q_BQHC.dtype in (torch.bfloat16, torch.float16)
            and q_BQHC.shape[2] == k_BSGC.shape[2]
            and not context.causal
            and context.bias is None
            and self.scale is None
            and dropout == 0.0
        )


class Attention(nn.Module):
    """Multi-head attention, x_BSD to y_BSD; grouped queries if G < H.

    `qkv`'s rows are [G][R query heads, key, value][C]; with `cross` queries have a map `q` of their
    own and `kv`'s rows are [G][key, value][C].
    """

    def __init__(self, config: TransformerConfig, *, cross: bool = False) -> None:
        super().__init__()
        hidden, head = config.hidden_size, config.head_size
        heads, groups = config.num_heads, config.num_kv_heads
        self.head_size, self.per_group = head, heads // groups
        bias = config.bias if config.qkv_bias is None else config.qkv_bias
        if cross:
            self.q = Linear(hidden, heads * head, std=config.init_std, bias=bias)
            self.kv = Linear(hidden, 2 * groups * head, std=config.init_std, bias=bias)
        else:
            self.qkv = Linear(hidden, (heads + 2 * groups) * head, std=config.init_std, bias=bias)
        self.qk_norm = config.qk_norm
        self.norm_q = self.norm_k = None
        if config.qk_norm != "none":
            by_head = config.qk_norm == "head"
            self.norm_q = Norm(config, head if by_head else heads * head)
            self.norm_k = Norm(config, head if by_head else groups * head)
        self.core = CoreAttention(config.attention_dropout, config.attention_scale)
        self.out = Linear(heads * head, hidden, std=config.output_init_std, bias=config.bias)

    def forward(self, x_BSD: Tensor, context: BlockContext) -> Tensor:
        q, k, v = self._project(x_BSD, context)
        if self.norm_q is not None and self.norm_k is not None:
            q, k = self._normed(self.norm_q, q), self._normed(self.norm_k, k)
        if context.rope is not None:
            q, k = rotate(q, context.rope), rotate(k, context.rope)
        if context.cache is not None:
            k, v = context.cache.extend(self, k, v)
        return self.out(self.core(q, k, v, context).flatten(2))

    def _project(self, x_BSD: Tensor, context: BlockContext) -> tuple[Tensor, Tensor, Tensor]:
        """q_BQHC, k_BSGC, v_BSGC."""
        C, R = self.head_size, self.per_group
        if context.source_BSD is None:
            qkv = self.qkv(x_BSD).unflatten(2, (-1, R + 2, C))
            q, k, v = qkv.split([R, 1, 1], dim=3)
            return q.flatten(2, 3), k.squeeze(3), v.squeeze(3)
        k, v = self.kv(context.source_BSD).unflatten(2, (-1, 2, C)).unbind(3)
        return self.q(x_BSD).unflatten(2, (-1, C)), k, v

    def _normed(self, norm: Norm, x_BSHC: Tensor) -> Tensor:
        if self.qk_norm == "head":
            return norm(x_BSHC)
        return norm(x_BSHC.flatten(2)).view_as(x_BSHC)
