"""What a forward pass leaves for its backward pass, counted from the text of the blocks.

Of every layer the tensors that its backward pass reads, and of the loss a slice of the logits.
Padding counts like any token: a batch may have none of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from mb_kernels.activation import is_glu
from mb_kernels.chunks import CHUNK
from mb_parallel import ParallelDims
from mb_parallel.expert_parallel import choose_dispatcher

from mb_train.assembly.offloading import layers_on_host
from mb_train.config import TrainConfig, whole
from mb_train.config.offloading import LAYER_INPUT
from mb_train.models.config import TransformerConfig
from mb_train.models.workload import Pass, Workload
from mb_train.plan.flops import delta_widths, mamba_widths

# Logits that the loss has at once, `linear_cross_entropy`'s on a GPU, and their tokens.
_LOGITS, _LOGIT_ROWS = 2**29, 8192


class Kept(NamedTuple):
    """Numbers of a sample that a layer leaves: all of them, and among them its input.

    again: those that it leaves for a while, when a part of it is computed again: its core with a
        state, or its experts, whichever leaves more.
    modules: of all, those of modules, by the names of --offload-modules.
    """

    all: float
    input: float
    again: float
    modules: Mapping[str, float]


class Activations(NamedTuple):
    """Bytes that forward passes leave for their backward passes, on the first stage.

    here, there: on the device, and in the host's memory.
    again: besides, of what is computed again, the largest, as long as its backward pass is at it.
    block: of the largest block, all that its backward pass reads.
    """

    here: float
    there: float
    again: float
    block: float


def activations_bytes(
    work: Workload,
    config: TrainConfig,
    dims: ParallelDims,
    width: int,
    *,
    on_gpu: bool,
    under_way: float = 1.0,
) -> Activations:
    """What micro-batches leave, as many as are under way.

    Args:
        width: bytes of an activation.
        under_way: micro-batches; of a pipeline on its first rank, in the mean over its layers.
    """
    samples, hidden = whole(config.micro_batch_size), work.passes[0].blocks.hidden_size
    rows, tokens_here = _room(config, dims, on_gpu=on_gpu)
    layers = kept_by_layer(
        work, config, dims, width, rows=rows, tokens_here=tokens_here, pairs=not on_gpu
    )
    again = [n for n, a in zip(layers, recomputes(config, len(layers)), strict=True) if a]
    # Of blocks that compute again the input is kept.
    inside = [layer.all - layer.input for layer in again]
    kept = sum(layer.all for layer in layers) - sum(inside)
    part = max(layer.again for layer in layers)
    away = away_by_layer(config, layers) if on_gpu else []
    # A block's are on the way, there or back, and still or already here; two blocks' where nothing
    # else is let go of in between.
    kept -= sum(away)
    every = len(layers_on_host(config, len(layers))) == len(layers)
    travelling = sum(sorted(away)[-2 if every else -1 :])
    # fp32 embeddings; hidden states and their gradient at the head; of each module for further
    # tokens the same.
    tokens = work.tokens + sum(each.tokens for each in work.behind)
    ends = 4 * samples * tokens / dims.cp * hidden * 2
    each = width * samples
    return Activations(
        here=each * (kept * under_way + travelling) + ends,
        there=each * sum(away) * under_way,
        again=each * (max(inside, default=0) + part),
        block=each * (max(layer.all for layer in layers) + part),
    )


def away_by_layer(config: TrainConfig, layers: Sequence[Kept]) -> list[float]:
    """Numbers that each of a stage's layers leaves in the host's memory, of `layers`."""
    modules = config.offload_modules
    found = []
    for layer, again in zip(layers, recomputes(config, len(layers)), strict=True):
        whole_layer = layer.input if again else layer.all
        if modules is None or modules == [LAYER_INPUT]:
            found.append(whole_layer)
            continue
        # Attention's output is among what its core keeps; experts are one module.
        own = {"moe_act" if name == "expert_fc1" else name for name in modules}
        own -= {"attn_proj"} if "core_attn" in own else set()
        found.append(sum(layer.modules[name] for name in own))
    there = layers_on_host(config, len(layers))
    return [numbers if layer in there else 0.0 for layer, numbers in enumerate(found)]


def recomputes(config: TrainConfig, layers: int) -> list[bool]:
    """Which of a stage's layers compute their forward pass again, as `assemble` has it."""
    first = config.recompute_num_layers if config.recompute_method == "block" else layers
    full = config.recompute_granularity == "full"
    return [full and layer < first for layer in range(layers)]


def kept_by_layer(
    work: Workload,
    config: TrainConfig,
    dims: ParallelDims,
    width: int,
    *,
    rows: float = 1.0,
    tokens_here: float = 0.0,
    pairs: bool = False,
) -> list[Kept]:
    """What each layer of the first stage leaves, in numbers of `width` bytes.

    Modules for further tokens, which are on the last stage, are told of where that is the first.

    Args:
        rows, tokens_here: see `_room`; without them only what is computed of the room counts.
        pairs: attention keeps numbers for every pair of tokens where it has to: on a CPU, whose
            fast kernel knows neither dropout nor a learned bias, and which computes states in
            plain PyTorch.
    """
    split = dims.tp if config.sequence_parallel else 1
    selective = config.recompute_granularity == "selective"
    compiled = config.compile and not pairs
    found = []
    behind = work.behind if dims.pp == 1 else ()
    for number, each in enumerate((*work.passes, *behind)):
        around, dense, experts, remade = _of_token(each, width, rows)
        if number >= len(work.passes):  # two hidden states with their norms, and side by side
            around += 6 * each.blocks.hidden_size
        moe = each.blocks.moe
        experts += 0 if moe is None else moe.experts_hidden_size * tokens_here
        for layer in range(each.blocks.num_layers):
            some = pairs and not selective
            latents, attention = _in_attention(
                each, layer, dims, width, pairs=some, compiled=compiled
            )
            core = _in_core(each.blocks, layer, width, chunks=pairs, compiled=compiled)
            if not selective:
                attention, core = attention + core, 0.0
            remade_here = remade / split * each.blocks.has_experts(layer)
            ffn = experts / split if each.blocks.has_experts(layer) else dense / dims.tp
            ffn *= each.blocks.has_feed_forward(layer)
            token = (around + latents) / split + attention / dims.tp + ffn
            tokens, hidden = each.tokens / dims.cp, each.blocks.hidden_size / split
            norm = hidden * (4 // width if each.blocks.fp32_residual else 1)
            mixes, feeds = each.blocks.has_mixer(layer), each.blocks.has_feed_forward(layer)
            modules = {
                "attn_norm": norm * mixes,
                "qkv_linear": (hidden + latents / split) * mixes,
                "core_attn": attention / dims.tp,
                "attn_proj": _heads_width(each.blocks, layer) / dims.tp,
                "mlp_norm": norm * feeds,
                "moe_act": (experts / split + hidden) * each.blocks.has_experts(layer),
            }
            of_modules = {name: tokens * numbers for name, numbers in modules.items()}
            again = max(core / dims.tp, remade_here)
            own = (tokens * numbers for numbers in (token, hidden, again))
            found.append(Kept(*own, of_modules))
    return found[: -(-len(found) // dims.pp)]


def _of_token(each: Pass, width: int, rows: float) -> tuple[float, float, float, float]:
    """Numbers of a token: around the parts of a block, in a dense ffn, in experts; and of those
    that they drop, and compute again."""
    config, moe, hidden = each.blocks, each.blocks.moe, each.blocks.hidden_size
    parts = 3 if each.source else 2  # of a block, each with a norm
    if config.pattern is not None:
        parts = 1
    # What goes into norms, and what they put out; behind an output what made that went in.
    around = (3 if config.norms == "both" else 2) * parts * hidden
    if config.fp32_residual and config.norms != "output":
        around += parts * hidden * (4 - width) // width  # of what goes in
    if config.hidden_dropout:
        around += parts * hidden // width  # masks of a byte
    gated = is_glu(config.activation)
    dense = (4 if gated else 2) * config.ffn_size
    if moe is None:
        return around, dense, 0.0, 0.0
    up = 2 if gated else 1
    experts = moe.top_k * up * moe.ffn_hidden_size * rows
    remade = experts if moe.recompute else 0.0
    if moe.recompute:
        experts = 0.0
    elif moe.saved_activation_bits is not None:
        experts = experts * moe.saved_activation_bits // (8 * width)
    experts += up * (moe.shared_expert_hidden_size or 0) + 2 * (moe.latent_size or 0)
    # In fp32 probabilities; of sigmoids these, the logits they are made of, and the sigmoids.
    scores = 1 if moe.score_function == "softmax" else 3
    if config.router == "sparsemixer":
        scores += 1 + moe.top_k  # logits, and shares of those near each choice's best
    elif config.router == "noisy_topk":
        scores += 2  # the noise, and what its width is made of
    experts += (4 * moe.num_choices * scores) // width
    return around, dense, experts, remade


def _in_attention(
    each: Pass, layer: int, dims: ParallelDims, width: int, *, pairs: bool, compiled: bool
) -> tuple[float, float]:
    """Numbers of a token in a layer's attention: of its latents, and of its heads.

    Args:
        compiled: what the compiler makes again from what is kept anyway is left out, of layers in
            which that is much.
    """
    config = each.blocks
    if not config.has_mixer(layer):
        return 0.0, 0.0
    if config.has_convolution(layer):  # as projected, and in front of the map out
        return 0.0, 4 * config.hidden_size
    if config.mamba is not None and config.has_mamba(layer):
        (values, common), heads = mamba_widths(config.mamba), config.mamba.heads
        # Channels in front of the convolution, and the gate; sums of which steps are made, and
        # these; what the scan returned, or the map out takes.
        found = 2 * values + common + 2 * heads * 4 / width + values
        # In fp32 the gate, its SiLU, what the scan returned, both together, and behind the norm.
        return 0.0, found if compiled else found + 5 * values * 4 / width
    if config.delta is not None and config.has_state(layer):
        keys, values = delta_widths(config.delta)
        # In front of the convolution; what the state returned, behind its norm, and gated; the gate
        # and its SiLU.
        return 0.0, 2 * keys + values + 3 * values + 2 * values * 4 / width
    if config.num_kv_heads < dims.tp:  # ranks that share a key and its value keep one each
        config = replace(config, num_kv_heads=dims.tp)
        each = each._replace(blocks=config)
    latents, inside = _projected(each, width)
    inside += _exchanged(each, dims) + _as_attended(config, layer)
    return latents, inside + (_pairs(each) if pairs else 0)


def _in_core(
    config: TransformerConfig, layer: int, width: int, *, chunks: bool, compiled: bool
) -> float:
    """Numbers of a token in a layer's convolution and rule, or scan, if it has a state.

    Args:
        chunks: the rule in plain PyTorch leaves its own, see `models.gated_delta`.
        compiled: see `_in_attention`.
    """
    if config.has_convolution(layer):  # two behind zeros, their product, and the sums
        return (2 if compiled else 4) * config.hidden_size
    if config.mamba is not None and config.has_mamba(layer):
        # Behind zeros, and behind SiLU; sums of the convolution in fp32.
        return (2 if compiled else 2 + 4 / width) * sum(mamba_widths(config.mamba))
    if config.delta is None or not config.has_state(layer):
        return 0.0
    wide, heads = 4 / width, config.delta.value_heads
    keys, values = delta_widths(config.delta)
    mixed = 2 * keys + values
    # Behind the convolution; queries and keys before they have length 1; as the rule is given them.
    found = wide * mixed + wide * 2 * keys + mixed
    if not chunks:
        return found + heads * CHUNK  # a triangular matrix of each chunk
    of_heads = heads * config.delta.key  # as often as value heads
    # Queries and keys, also times what fades and is written; the system's right side, its solution,
    # values and what is written; five matrices of a chunk; states before and between chunks.
    own = 5 * of_heads + 2 * (of_heads + values) + 2 * values
    states = 2 * of_heads * config.delta.value / CHUNK
    return found + wide * (own + 5 * heads * CHUNK + states)


def _heads_width(config: TransformerConfig, layer: int) -> int:
    """Of what goes into the map out of a layer's attention, or state."""
    if not config.has_mixer(layer):
        return 0
    if config.has_convolution(layer):
        return config.hidden_size
    if config.mamba is not None and config.has_mamba(layer):
        return mamba_widths(config.mamba)[0]
    return config.num_heads * config.value_size


def _projected(each: Pass, width: int) -> tuple[float, float]:
    """Numbers of a token in an attention: of its latents, and of its heads as projected."""
    config, latent = each.blocks, each.blocks.latent
    heads = config.num_heads * config.head_size
    if latent is not None:
        normed = 2 if config.qk_norm == "latent" else 1
        latents = normed * (latent.kv_rank + (latent.q_rank or 0)) + latent.rotated
        values = config.num_heads * latent.value
        # Keys and values before the former are rotated, what attention returns.
        return latents, config.num_heads * latent.content + values + values
    kv = config.num_kv_heads * config.head_size
    inside = heads + 2 * kv + heads  # q, k, v, what attention returns
    if config.output_gate:  # as projected, behind the sigmoid in fp32, and what it lets through
        inside += heads + heads * 4 // width + heads
    if each.source:
        inside += 2 * heads + 2 * kv * each.source / each.length
    return 0.0, inside


def _as_attended(config: TransformerConfig, layer: int) -> float:
    """Numbers of a token's queries, keys and values of a layer, where they are not as projected."""
    heads, groups = config.num_heads, config.num_kv_heads
    turned, normed = config.rotates(layer), config.qk_norm != "none"
    clipped = config.clip_qkv is not None
    if turned or normed or clipped:
        # Norms behind a rotation keep what it gave them, and clipping what a norm did.
        late = turned and config.qk_norm == "turned-head"
        copies = 2 if late or (normed and clipped) else 1
        return (copies * (heads + groups) + clipped * groups) * config.head_size
    # Queries of several groups, between which were keys and values, are laid side by side.
    return heads * config.head_size if 1 < groups < heads else 0


def _exchanged(each: Pass, dims: ParallelDims) -> float:
    """Numbers of a token that context parallelism adds in an attention, of all its heads.

    What attention returns is kept as it was before its way back, too; keys and values are repeated
    where their heads are too few for the ranks.
    """
    if dims.cp == 1:
        return 0.0
    config = each.blocks
    groups = max(config.num_kv_heads // dims.tp, 1)
    more = math.lcm(groups, dims.cp) // groups - 1
    keys = config.num_kv_heads * (config.head_size + config.value_size)
    return config.num_heads * config.value_size + more * keys


def _pairs(each: Pass) -> int:
    """Numbers of a token for the tokens that it sees: scores; with dropout a mask, and both."""
    dropped = 3 if each.blocks.attention_dropout else 0
    own = dropped or each.blocks.positions == "relative"
    return each.blocks.num_heads * (own * each.length + dropped * each.source)


def _room(config: TrainConfig, dims: ParallelDims, *, on_gpu: bool) -> tuple[float, float]:
    """Rows that experts have room for, over the even share; tokens that are kept, over a rank's."""
    ep, top_k = dims.ep, config.moe_top_k
    if ep == 1 or config.moe_num_experts is None:
        return 1.0, 0.0
    capacity = config.moe_capacity_factor  # 0: none
    bounded = config.moe_row_policy != "worst" or capacity > 0
    problem = None if on_gpu else "there is no GPU"
    chosen, _ = choose_dispatcher(config.moe_dispatcher, top_k, ep, problem, bounded=bounded)
    if chosen == "fixed":  # rows that came, and those that came home
        return capacity, 2 * capacity * top_k
    visited = min(top_k, ep)
    if chosen == "all_to_all" or config.moe_row_policy == "exact":
        return 1.0, visited
    if config.moe_row_policy == "budget":
        return config.moe_row_budget, visited * config.moe_row_budget
    here = max(config.moe_num_experts // ep, 1)
    worst = ep * min(top_k, here) / top_k
    if 0 < capacity < worst:
        return capacity, visited * capacity
    return worst, ep


def loss_bytes(work: Workload, config: TrainConfig, dims: ParallelDims, width: int) -> float:
    """Bytes that the largest head needs: a slice of its logits, and the gradient of its weight."""
    needed = [0.0]
    for head in work.heads:
        rows = min(
            whole(config.micro_batch_size) * head.places // dims.cp,
            _LOGIT_ROWS,
            _LOGITS // head.outputs,
        )
        share = head.outputs / dims.tp
        needed.append(rows * share * width + 4 * share * work.passes[0].blocks.hidden_size)
    return max(needed)
