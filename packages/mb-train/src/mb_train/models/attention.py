"""Attention: fused projections, rotary positions, over torch's SDPA or within segments.

A model builds the `BlockContext` once and hands it to all its blocks. Which token sees which is in
it as a mask, or as the bounds of segments (`models.segments`).

Letters: B sequences, S tokens of a sequence (Q that attend, S attended to), D hidden, H query
heads, G key-value heads, R query heads of a group (H / G), C width of a head, V of its value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mb_train.models.cache import KVCache
from mb_train.models.config import TransformerConfig
from mb_train.models.linear import Linear, Norm
from mb_train.models.relative import RelativeBias
from mb_train.models.rotary import Rope, ropes, rotate
from mb_train.models.segments import (
    Bounds,
    Grid,
    Segments,
    attend,
    equally_wide,
    flash_takes,
    within_segments,
)
from mb_train.models.sinks import with_sink_key
from mb_train.models.states import StateContext


class BlockContext(NamedTuple):
    """What all blocks of a stack share.

    causal: no token sees a later one.
    mask: bool [B or 1, 1, Q, S], true where attention is allowed, or numbers [B or 1, H, Q, S] that
        are added to the scores, -inf where it is not; `causal` already in it. None allows
        everything that `causal` does. With sinks it has one more behind the S.
    near: the same of layers with a window.
    bounds: in place of a mask, for the kernel that attends within segments.
    grid: beside a mask, where blocks see one row of what was kept of the batch: its sequences.
    rope: cosine and sine, fp32 [B or 1, S, 1, rotated width of a head].
    local_rope: the same of layers with a window, if they turn otherwise.
    source_BSD: what a cross attention attends to, an encoder's output.
    valid_BS: nonzero for real tokens, which alone visit experts; None if none is padding.
    cache: keys and values of tokens that came before; `mask` is over all of them.
    states: of layers with a state; None: nothing divides sequences.
    """

    causal: bool = True
    mask: Tensor | None = None
    near: Tensor | None = None
    bounds: Bounds | None = None
    grid: Grid | None = None
    rope: Rope | None = None
    local_rope: Rope | None = None
    source_BSD: Tensor | None = None
    valid_BS: Tensor | None = None
    cache: KVCache | None = None
    states: StateContext | None = None


def context_of(
    segments: Segments,
    positions_BS: Tensor,
    valid_BS: Tensor,
    config: TransformerConfig,
    *,
    causal: bool,
    relative: RelativeBias | None,
    dtype: torch.dtype,
    training: bool,
) -> BlockContext:
    """That of blocks whose tokens attend within segments, to their own sequence.

    Args:
        positions_BS: of what the segments keep.
        valid_BS: nonzero for tokens that are not padding, of all places.
        relative: the table of relative positions, if these are.
        dtype: of the activations.
        training: attention may have a dropout.
    """
    how = {"training": training, "relative": relative is not None}
    within = within_segments(
        segments,
        causal=causal,
        flash=flash_takes(config, dtype, valid_BS.device, **how),
        bias_HA=None if relative is None else relative(segments.length),
        dtype=dtype,
    )
    turns = ropes(config, positions_BS)
    return BlockContext(**within, **turns, valid_BS=segments.keep(valid_BS))


class CoreAttention(nn.Module):
    """softmax(q k^T / sqrt(C)) v: the part without weights, a unit of selective recompute.

    Values may be wider or narrower than queries and keys.

    Args:
        window: how many tokens before its own a token sees; None: all.
    """

    def __init__(
        self, dropout: float, scale: float | None = None, window: int | None = None
    ) -> None:
        super().__init__()
        self.dropout, self.scale, self.window = dropout, scale, window

    def forward(
        self,
        q_BQHC: Tensor,
        k_BSGC: Tensor,
        v_BSGV: Tensor,
        context: BlockContext,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Return y_BQHV.

        Args:
            sinks_H: of these query heads, see `models.sinks`; then `context` is of a model with
                them.
        """
        scale, V = self.scale, v_BSGV.shape[3]
        if context.bounds is not None:
            how = {"causal": context.causal, "scale": scale, "window": self.window}
            return attend(q_BQHC, k_BSGC, v_BSGV, context.bounds, **how, sinks_H=sinks_H)
        mask = context.mask if self.window is None else context.near
        assert mask is not None or (self.window is None and sinks_H is None)
        if context.grid is not None:
            q_BQHC = context.grid.queries.spread(q_BQHC)
            k_BSGC, v_BSGV = map(context.grid.keys.spread, (k_BSGC, v_BSGV))
        if sinks_H is not None:
            q_BQHC, k_BSGC, v_BSGV, scale = with_sink_key(q_BQHC, k_BSGC, v_BSGV, scale, sinks_H)
        if q_BQHC.device.type == "cpu":  # where the other kernel keeps a score for every pair
            q_BQHC, k_BSGC, v_BSGV, scale = equally_wide(q_BQHC, k_BSGC, v_BSGV, scale)
        y_BHQV = F.scaled_dot_product_attention(
            q_BQHC.transpose(1, 2),
            k_BSGC.transpose(1, 2),
            v_BSGV.transpose(1, 2),
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=context.causal and mask is None,
            scale=scale,
            enable_gqa=q_BQHC.shape[2] != k_BSGC.shape[2],
        )
        y_BQHV = y_BHQV.transpose(1, 2)[..., :V]
        return y_BQHV if context.grid is None else context.grid.queries.collect(y_BQHV)


class Attention(nn.Module):
    """Multi-head attention, x_BSD to y_BSD; grouped queries if G < H.

    `qkv`'s rows are [G][R query heads, key, value][C], with gates [G][R query heads, their R gates,
    key, value][C]; with `cross` queries have a map `q` of their own, `kv`'s rows are [G][key,
    value][C], and there are no gates. `sinks` [H] are in the order of the query heads.

    Args:
        window: how many tokens before its own a token sees; None: all.
        rotates: positions turn queries and keys, where the context has rotary ones.
    """

    sinks: nn.Parameter | None

    def __init__(
        self,
        config: TransformerConfig,
        *,
        window: int | None = None,
        rotates: bool = True,
        cross: bool = False,
    ) -> None:
        super().__init__()
        hidden, head = config.hidden_size, config.head_size
        heads, groups = config.num_heads, config.num_kv_heads
        self.head_size, self.per_group = head, heads // groups
        bias = config.bias if config.qkv_bias is None else config.qkv_bias

        def project(*maps: int) -> Linear:
            """To groups of `maps` heads each: the maps take turns, group by group."""
            rows = tuple(count * head for count in maps)
            fused = rows if len(maps) > 1 else ()
            return Linear(hidden, groups * sum(rows), std=config.init_std, bias=bias, fused=fused)

        self.rotates, self.gated = rotates, config.output_gate and not cross
        if cross:
            self.q, self.kv = project(self.per_group), project(1, 1)
        elif self.gated:
            self.qkv = project(self.per_group, self.per_group, 1, 1)
        else:
            self.qkv = project(self.per_group, 1, 1)
        self.qk_norm, self.clip = config.qk_norm, config.clip_qkv
        self.norm_q = self.norm_k = None
        self.eps = config.norm_eps
        if config.qk_norm not in ("none", "l2"):
            over_width, eps = config.qk_norm == "width", config.qk_norm_eps
            self.norm_q = Norm(config, heads * head if over_width else head, eps=eps)
            self.norm_k = Norm(config, groups * head if over_width else head, eps=eps)
        self.core = CoreAttention(config.attention_dropout, config.attention_scale, window)
        self.softmax = "vanilla" if cross else config.softmax
        learned = self.softmax == "learnable"
        self.register_parameter("sinks", nn.Parameter(torch.zeros(heads)) if learned else None)
        self.out = Linear(heads * head, hidden, std=config.output_init_std, bias=config.bias)

    def forward(self, x_BSD: Tensor, context: BlockContext) -> Tensor:
        q, k, v, gate = self._project(x_BSD, context)
        late = self.qk_norm == "turned-head"
        q, k = (q, k) if late else self._normed(q, k)
        if self.clip is not None:
            q, k, v = (heads.clamp(-self.clip, self.clip) for heads in (q, k, v))
        q, k = self._turned(q, k, context)
        q, k = self._normed(q, k) if late else (q, k)
        if context.cache is not None:
            k, v = context.cache.extend(self, k, v)
        sinks_H = self.sinks
        if self.softmax == "off-by-one":
            sinks_H = q.new_zeros(q.shape[2], dtype=torch.float32)
        y = self.core(q, k, v, context, sinks_H=sinks_H)
        if gate is not None:
            y = (y * gate.float().sigmoid()).to(y.dtype)
        return self.out(y.flatten(2))

    def _project(
        self, x_BSD: Tensor, context: BlockContext
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q_BQHC, k_BSGC, v_BSGC, and the gates of what attention returns [B, Q, H, C]."""
        C = self.head_size
        if context.source_BSD is None:
            rows = self.qkv(x_BSD)
            # Whole groups, or of one group some queries: tensor-parallel ranks may share one.
            R = min(self.per_group, (rows.shape[2] // C - 2) // (1 + self.gated))
            gates = R if self.gated else 0
            qkv = rows.unflatten(2, (-1, R + gates + 2, C))
            q, gate, k, v = qkv.split([R, gates, 1, 1], dim=3)
            gate = gate.flatten(2, 3) if self.gated else None
            return q.flatten(2, 3), k.squeeze(3), v.squeeze(3), gate
        k, v = self.kv(context.source_BSD).unflatten(2, (-1, 2, C)).unbind(3)
        return self.q(x_BSD).unflatten(2, (-1, C)), k, v, None

    def _turned(
        self, q_BQHC: Tensor, k_BSGC: Tensor, context: BlockContext
    ) -> tuple[Tensor, Tensor]:
        rope = context.rope
        if self.core.window is not None and context.local_rope is not None:
            rope = context.local_rope
        if not self.rotates or rope is None:
            return q_BQHC, k_BSGC
        return rotate(q_BQHC, rope), rotate(k_BSGC, rope)

    def _normed(self, q_BQHC: Tensor, k_BSGC: Tensor) -> tuple[Tensor, Tensor]:
        if self.qk_norm == "l2" and self.rotates:
            size = q_BQHC.shape[-1:]
            return F.rms_norm(q_BQHC, size, eps=self.eps), F.rms_norm(k_BSGC, size, eps=self.eps)
        if self.norm_q is None or self.norm_k is None:
            return q_BQHC, k_BSGC
        if self.qk_norm != "width":
            return self.norm_q(q_BQHC), self.norm_k(k_BSGC)
        q_BQN, k_BSN = self.norm_q(q_BQHC.flatten(2)), self.norm_k(k_BSGC.flatten(2))
        return q_BQN.view_as(q_BQHC), k_BSN.view_as(k_BSGC)
