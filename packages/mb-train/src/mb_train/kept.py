"""What the forward pass of a GPT leaves for its backward pass, counted from the text of its blocks.

Of every layer the tensors that its backward pass reads, and of the loss a slice of the logits.
"""

from __future__ import annotations

from mb_parallel import ParallelDims
from mb_parallel.expert_parallel import choose_dispatcher

from mb_train.config import TrainConfig, whole

# Logits that the loss has at once, `linear_cross_entropy`'s on a GPU, and their tokens.
_LOGITS, _LOGIT_ROWS = 2**29, 8192


def activations_bytes(config: TrainConfig, dims: ParallelDims, width: int) -> float:
    """Bytes that a micro-batch's forward pass leaves for its backward pass."""
    hidden, tokens = whole(config.hidden_size), whole(config.micro_batch_size)
    tokens *= whole(config.seq_length)
    rows, tokens_here = _room(config, dims, on_gpu=width == 2)
    by_layer = kept_by_layer(config, dims, width, rows=rows, tokens_here=tokens_here)
    inputs = hidden / (dims.tp if config.sequence_parallel else 1)
    again = [n for n, a in zip(by_layer, recomputes(config, len(by_layer)), strict=True) if a]
    # Of blocks that compute again their inputs are kept, and one's inside, as long as it is at it.
    kept = sum(by_layer) - sum(again) + inputs * len(again) + max(again, default=0)
    # A pipeline's first stage keeps as many micro-batches as there are stages (1F1B).
    in_flight = dims.pp
    ends = 4 * tokens * hidden * 2  # fp32 embeddings; hidden states and their gradient at the head
    return width * tokens * kept * in_flight + ends


def recomputes(config: TrainConfig, layers: int) -> list[bool]:
    """Which of a stage's layers compute their forward pass again, as `assemble` has it."""
    first = config.recompute_num_layers if config.recompute_method == "block" else layers
    full = config.recompute_granularity == "full"
    return [full and layer < first for layer in range(layers)]


def kept_by_layer(
    config: TrainConfig,
    dims: ParallelDims,
    width: int,
    *,
    rows: float = 1.0,
    tokens_here: float = 0.0,
) -> list[float]:
    """Numbers of `width` bytes that a token leaves in each layer of the first stage.

    Args:
        rows, tokens_here: see `_room`; without them only what is computed of the room counts.
    """
    hidden = whole(config.hidden_size)
    heads = whole(config.num_attention_heads) * config.head_size
    kv = config.kv_heads * config.head_size
    rotated = heads + kv if config.position_embedding_type == "rope" else 0
    around = 4 * hidden  # the inputs of both norms, and what comes out of them
    if config.fp32_residual_connection:
        around += 2 * hidden * (4 - width) // width  # what goes into the norms
    if config.hidden_dropout:
        around += 2 * hidden // width  # masks of a byte
    inside = heads + 2 * kv + rotated + heads  # q, k, v, what attention returns
    gated = 2 if config.is_glu else 1
    dense = (4 if config.is_glu else 2) * config.ffn_size
    experts = config.moe_top_k * gated * config.expert_ffn_size * rows
    if config.moe_recompute:
        experts = 0
    elif config.moe_saved_activation_bits is not None:
        experts = experts * config.moe_saved_activation_bits // (8 * width)
    if dims.ep > 1:
        experts += hidden * tokens_here
    experts += gated * (config.moe_shared_expert_intermediate_size or 0)
    experts += (4 * (config.moe_num_experts or 0) * 3) // width  # logits and scores in fp32
    split = dims.tp if config.sequence_parallel else 1
    found = []
    for layer in range(-(-whole(config.num_layers) // dims.pp)):
        ffn = experts / split if config.has_experts(layer) else dense / dims.tp
        found.append(around / split + inside / dims.tp + ffn)
    return found


def _room(config: TrainConfig, dims: ParallelDims, *, on_gpu: bool) -> tuple[float, float]:
    """Rows that experts have room for, over the even share; tokens that are kept, over a rank's."""
    ep, top_k = dims.ep, config.moe_top_k
    if ep == 1 or config.moe_num_experts is None:
        return 1.0, 0.0
    bounded = config.moe_row_policy != "worst"
    problem = None if on_gpu else "there is no GPU"
    chosen, _ = choose_dispatcher(config.moe_dispatcher, top_k, ep, problem, bounded=bounded)
    if chosen == "fixed":  # rows that came, and those that came home
        return config.moe_capacity_factor, 2 * config.moe_capacity_factor * top_k
    visited = min(top_k, ep)
    if chosen == "all_to_all" or config.moe_row_policy == "exact":
        return 1.0, visited
    if config.moe_row_policy == "budget":
        return config.moe_row_budget, visited * config.moe_row_budget
    here = max(config.moe_num_experts // ep, 1)
    return ep * min(top_k, here) / top_k, ep


def loss_bytes(config: TrainConfig, vocab_size: int, dims: ParallelDims, width: int) -> float:
    """Bytes that the loss needs: a slice of logits, and the gradient of the head's weight."""
    tokens = whole(config.micro_batch_size) * whole(config.seq_length)
    rows = min(tokens, _LOGIT_ROWS, _LOGITS // vocab_size)
    share = vocab_size / dims.tp
    return rows * share * width + 4 * share * whole(config.hidden_size)
