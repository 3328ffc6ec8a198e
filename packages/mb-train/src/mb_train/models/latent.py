"""Multi-head latent attention: keys and values of all heads are made of one narrow latent.

That of DeepSeek-V2 (arXiv 2405.04434) and V3. A token's hidden state is mapped down to a latent,
which is normed and mapped up to the heads' keys and values. Positions would not commute with the
map up, so they are in a part of their own: beside the latent each token has one rotated key, which
all heads share, and a head's query has a rotated part to match. Queries may be made of a latent of
their own. With RMS norms and without biases these are DeepSeek's maps, by other names:

    q_down, q_norm, q_up      q_a_proj, q_a_layernorm, q_b_proj; without a latent q, q_proj
    kv_down, kv_norm, kv_up   kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj
    out                       o_proj

Rows are in DeepSeek's order too, but for the rotated ones, which pair halves, not neighbours. A
cache holds the heads' keys and values, not the latent.

Letters: B sequences, S tokens of a sequence, D hidden, H heads, C width of a head's query and key,
of which N are without position and P are rotated, V width of its value, R rank of the latent.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mb_train.models.attention import BlockContext, CoreAttention
from mb_train.models.config import TransformerConfig
from mb_train.models.linear import Linear, Norm
from mb_train.models.rotary import rotate, sharpening


class LatentAttention(nn.Module):
    """Attention by latents, x_BSD to y_BSD; a token attends to its own sequence.

    The rows of `q` or `q_up` are [H][N, P], those of `kv_down` [R, P], those of `kv_up` [H][N, V].
    Only `out` has a bias, if maps have one, as in Megatron Core.

    Args:
        config: with `latent`.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        assert config.latent is not None
        self.sizes = sizes = config.latent
        hidden, heads, head = config.hidden_size, config.num_heads, config.head_size
        normed = config.qk_norm == "latent"

        def project(inputs: int, outputs: int, fused: tuple[int, ...] = ()) -> Linear:
            return Linear(inputs, outputs, std=config.init_std, bias=False, fused=fused)

        if sizes.q_rank is None:
            self.q = project(hidden, heads * head)
        else:
            self.q_down = project(hidden, sizes.q_rank)
            self.q_norm = Norm(config, sizes.q_rank, eps=config.qk_norm_eps) if normed else None
            self.q_up = project(sizes.q_rank, heads * head)
        of_kv, of_head = (sizes.kv_rank, sizes.rotated), (sizes.content, sizes.value)
        self.kv_down = project(hidden, sum(of_kv), fused=of_kv)
        self.kv_norm = Norm(config, sizes.kv_rank, eps=config.qk_norm_eps) if normed else None
        self.kv_up = project(sizes.kv_rank, heads * sum(of_head), fused=of_head)
        # What is done to the one input of the heads that no map of theirs takes in: nothing, but
        # under tensor parallelism, see `mb_parallel.tensor_parallel.block_plan`.
        self.shared_key = nn.Identity()
        scale = config.attention_scale
        if scale is None:
            scaling = config.rope_scaling
            sharper = 1.0 if scaling is None else sharpening(scaling, scaling.mscale_all_dim)
            scale = sharper**2 * head**-0.5
        self.core = CoreAttention(config.attention_dropout, scale)
        self.out = Linear(heads * sizes.value, hidden, std=config.output_init_std, bias=config.bias)

    def forward(self, x_BSD: Tensor, context: BlockContext) -> Tensor:
        assert context.rope is not None
        N, P, V = self.sizes.content, self.sizes.rotated, self.sizes.value
        latent_BSR, key_BSP = self.kv_down(x_BSD).split([self.sizes.kv_rank, P], dim=2)
        if self.kv_norm is not None:
            latent_BSR = self.kv_norm(latent_BSR)
        k_BSHN, v_BSHV = self.kv_up(latent_BSR).unflatten(2, (-1, N + V)).split([N, V], dim=3)
        key_BSHP = rotate(self.shared_key(key_BSP)[:, :, None], context.rope)
        key_BSHP = key_BSHP.expand(*k_BSHN.shape[:3], P)
        q_BSHN, q_BSHP = self._queries(x_BSD).unflatten(2, (-1, N + P)).split([N, P], dim=3)
        q_BSHC = torch.cat([q_BSHN, rotate(q_BSHP, context.rope)], dim=3)
        k_BSHC = torch.cat([k_BSHN, key_BSHP], dim=3)
        if context.cache is not None:
            k_BSHC, v_BSHV = context.cache.extend(self, k_BSHC, v_BSHV)
        return self.out(self.core(q_BSHC, k_BSHC, v_BSHV, context).flatten(2))

    def _queries(self, x_BSD: Tensor) -> Tensor:
        """Of all heads, one behind the other."""
        if self.sizes.q_rank is None:
            return self.q(x_BSD)
        latent_BSR = self.q_down(x_BSD)
        return self.q_up(latent_BSR if self.q_norm is None else self.q_norm(latent_BSR))
