"""How much arithmetic a sample costs.

A multiplication and an addition count as two. The backward pass costs twice the forward pass, and
what is computed again for it does not count: model FLOPs (PaLM, arXiv 2204.02311, appendix B).
Attention is counted over the whole square of positions there, and here, though a causal kernel
computes half of it and padding may be left out; in layers with a window over the window of each.
"""

from __future__ import annotations

from typing import NamedTuple

from mb_kernels.activation import is_glu

from mb_train.models.config import DeltaSizes, MambaSizes, TransformerConfig
from mb_train.models.workload import Pass, Workload


class Flops(NamedTuple):
    """FLOPs of a sample's forward and backward pass.

    blocks: all products of blocks with weights, and of what joins further tokens to hidden states;
    attention: those between queries, keys, values and states; heads: those on top of the blocks.
    """

    blocks: float
    attention: float
    heads: float


class Map(NamedTuple):
    """A product with a weight [outputs, inputs], of every token or of a share of them.

    exact: in layers in FP8 it is not.
    """

    inputs: int
    outputs: int
    share: float = 1.0
    exact: bool = False

    @property
    def flops(self) -> float:
        """Of a token's forward pass, in the mean."""
        return 2 * self.share * self.inputs * self.outputs


def flops(work: Workload) -> Flops:
    """FLOPs of a sample; of the experts those of the chosen ones, in the mean."""
    blocks = attention = 0.0
    for each in (*work.passes, *work.behind):
        config = each.blocks
        blocks += sum(_layer(each, layer) for layer in range(config.num_layers))
        attended = sum(_attended(each, layer) for layer in range(config.num_layers))
        attention += 3 * each.tokens * attended
    hidden = work.passes[0].blocks.hidden_size
    # A module for further tokens maps two hidden states to one.
    blocks += sum(3 * 2 * 2 * hidden * hidden * each.tokens for each in work.behind)
    on_top = sum(3 * 2 * hidden * head.places * head.outputs for head in work.heads)
    return Flops(blocks, attention, float(on_top))


def flops_again(work: Workload) -> float:
    """Those of a sample that experts compute a second time, with --moe-recompute."""
    found = 0.0
    for each in (*work.passes, *work.behind):
        config, moe = each.blocks, each.blocks.moe
        if moe is None or not moe.recompute:
            continue
        layers = sum(map(config.has_experts, range(config.num_layers)))
        chosen = visited(moe.top_k, moe.num_experts, moe.num_zero_experts)
        up = chosen * moe.ffn_hidden_size * (2 if is_glu(config.activation) else 1)
        found += 2 * each.tokens * layers * config.hidden_size * up
    return found


def flops_in_fp8(work: Workload) -> float:
    """Those of `flops(work).blocks` that are of layers in FP8."""
    return sum(
        _layer(each, layer, exact=False)
        for each in (*work.passes, *work.behind)
        for layer in range(each.blocks.num_layers)
        if each.blocks.in_fp8(layer)
    )


def _layer(each: Pass, layer: int, *, exact: bool = True) -> float:
    """Of a sample's forward and backward pass through the products of a layer with weights.

    Args:
        exact: count those that are not in FP8 where the others are.
    """
    maps = sum(one.flops for one in attention_maps(each, layer) if exact or not one.exact)
    return 3 * each.tokens * (maps + _ffn(each.blocks, layer))


def _attended(each: Pass, layer: int) -> float:
    """Of a token's forward pass, between its query and what it sees in a layer.

    That is keys of its own sequence, in a window perhaps, and of the source; or a state, which it
    asks, by the delta rule, changes and reads, whatever is computed beside that within chunks.
    """
    config = each.blocks
    if not config.has_mixer(layer):
        return 0.0
    if config.has_convolution(layer):
        return 0.0
    if config.mamba is not None and config.has_mamba(layer):
        return 2 * 2 * config.mamba.heads * config.mamba.state * config.mamba.width
    if config.delta is not None and config.has_state(layer):
        return 3 * 2 * config.delta.value_heads * config.delta.key * config.delta.value
    near = config.window_of(layer)
    own = each.length if near is None else min(near + 1, each.length)
    return (own + each.source) * 2 * config.num_heads * (config.head_size + config.value_size)


def attention_maps(each: Pass, layer: int) -> list[Map]:
    """The maps of a layer's attention, or state, and of attention to the source."""
    config, latent = each.blocks, each.blocks.latent
    if not config.has_mixer(layer):
        return []
    D = config.hidden_size
    if config.has_convolution(layer):
        return [Map(D, 3 * D), Map(D, D)]
    if config.mamba is not None and config.has_mamba(layer):
        wide, common = mamba_widths(config.mamba)
        steps = Map(D, config.mamba.heads, exact=True)
        return [Map(D, 2 * wide), Map(D, common), steps, Map(wide, D)]
    if config.delta is not None and config.has_state(layer):
        keys, values = delta_widths(config.delta)
        gates = Map(D, 2 * config.delta.value_heads, exact=True)
        return [Map(D, 2 * keys + 2 * values), gates, Map(values, D)]
    heads = config.num_heads * config.head_size
    if latent is not None:
        queries, values = [Map(D, heads)], config.num_heads * latent.value
        if latent.q_rank is not None:
            queries = [Map(D, latent.q_rank), Map(latent.q_rank, heads)]
        content = config.num_heads * latent.content
        down, up = Map(D, latent.kv_rank + latent.rotated), Map(latent.kv_rank, content + values)
        return [*queries, down, up, Map(values, D)]
    keys = config.num_kv_heads * config.head_size
    gates = heads if config.output_gate else 0
    maps = [Map(D, heads + gates + 2 * keys), Map(heads, D)]
    if each.source:
        of_source = Map(D, 2 * keys, share=each.source / each.length)
        maps += [Map(D, heads), of_source, Map(heads, D)]
    return maps


def delta_widths(delta: DeltaSizes) -> tuple[int, int]:
    """Of the keys of all heads of a layer with a state, and of their values."""
    return delta.key_heads * delta.key, delta.value_heads * delta.value


def mamba_widths(mamba: MambaSizes) -> tuple[int, int]:
    """Of what all heads of a layer of Mamba-2 write, and of what groups have in common."""
    return mamba.heads * mamba.width, 2 * mamba.groups * mamba.state


def dense_maps(config: TransformerConfig, layer: int) -> list[Map]:
    """The maps of a layer's feed-forward, if that is one without experts."""
    if not config.has_feed_forward(layer) or config.has_experts(layer):
        return []
    up, down = Map(config.hidden_size, config.ffn_size), Map(config.ffn_size, config.hidden_size)
    return [*([up] * (2 if is_glu(config.activation) else 1)), down]


def _ffn(config: TransformerConfig, layer: int) -> float:
    """Of a token's forward pass through a layer's feed-forward."""
    D, moe = config.hidden_size, config.moe
    if moe is None or not config.has_experts(layer):
        return sum(one.flops for one in dense_maps(config, layer))
    matrices = 3 if is_glu(config.activation) else 2
    chosen = visited(moe.top_k, moe.num_experts, moe.num_zero_experts)
    routed = chosen * moe.ffn_hidden_size * moe.experts_hidden_size
    shared = (moe.shared_expert_hidden_size or 0) * D
    around = D * (moe.num_choices + moe.shared_expert_gate + 2 * (moe.latent_size or 0))
    return 2 * (matrices * (routed + shared) + around)


def expert_weights(config: TransformerConfig) -> int:
    """Of all experts of a layer together, biases apart; 0 without experts."""
    if config.moe is None:
        return 0
    matrices = 3 if is_glu(config.activation) else 2
    expert = matrices * config.moe.ffn_hidden_size * config.moe.experts_hidden_size
    return config.moe.num_experts * expert


def visited(top_k: int, experts: int, zero_experts: int) -> float:
    """Experts that compute for a token whose choices are even; zero experts compute nothing."""
    return top_k * experts / (experts + zero_experts)
