"""How much arithmetic a token costs, and how much of a GPU's peak that is.

A multiplication and an addition count as two. The backward pass costs twice the forward pass, and
what is computed again for it does not count: model FLOPs (PaLM, arXiv 2204.02311, appendix B).
Attention is counted over the whole square of positions there, and here, though a causal kernel
computes half of it.

Letters: D hidden, F ffn width, H query heads, G key-value heads, C width of a head, S sequence,
E experts, K experts per token, V padded vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from mb_train.config import TrainConfig, whole

# Dense bf16 peak in TFLOP/s by a part of the device's name, the more particular first: the makers'
# data sheets. MI250X and MI250 are two devices, of half the card's peak each.
_PEAK_TFLOPS = {
    "GB200": 2500.0, "B200": 2250.0, "H200": 989.0, "H100 PCIe": 756.0, "H100": 989.0,
    "A100": 312.0, "L40S": 362.0, "MI355X": 2500.0, "MI350X": 2300.0, "MI325X": 1307.0,
    "MI300X": 1307.0, "MI300A": 981.0, "MI250X": 191.5, "MI250": 181.0, "MI210": 181.0,
    "7900 XTX": 123.0,
}  # fmt: skip


def flops_per_token(config: TrainConfig, vocab_size: int) -> float:
    """Forward and backward pass of one token of a decoder or an encoder; experts: the K chosen.

    Args:
        vocab_size: V.
    """
    hidden, layers = whole(config.hidden_size), whole(config.num_layers)
    width = whole(config.num_attention_heads) * config.head_size
    projections = 2 * hidden * (2 * width + 2 * config.kv_heads * config.head_size)
    matrices = 3 if config.is_glu else 2
    dense = 2 * matrices * hidden * config.ffn_size
    experts = 2 * matrices * hidden * config.expert_ffn_size * config.moe_top_k
    experts += 2 * hidden * (config.moe_num_experts or 0)
    experts += 2 * matrices * hidden * (config.moe_shared_expert_intermediate_size or 0)
    forward = 0.0
    for layer in range(layers):
        forward += projections + (experts if config.has_experts(layer) else dense)
    return 3 * forward + attention_flops(config) + head_flops(config, vocab_size)


def attention_flops(config: TrainConfig) -> float:
    """Of them those between queries, keys and values."""
    width = whole(config.num_attention_heads) * config.head_size
    return 3.0 * 4 * whole(config.seq_length) * width * whole(config.num_layers)


def head_flops(config: TrainConfig, vocab_size: int) -> float:
    """Of them the head's."""
    return 3.0 * 2 * whole(config.hidden_size) * vocab_size


def peak_flops(device: str) -> float | None:
    """FLOP/s that a device of this name can do at most in bf16; None if it is not known."""
    tflops = of_device(_PEAK_TFLOPS, device)
    return None if tflops is None else 1e12 * tflops


def of_device(table: Mapping[str, float], device: str) -> float | None:
    """The first entry whose name is a part of this device's; numbers whole: no A100 is in A1000."""
    named = (part for part in table if re.search(rf"{part}(?!\d)", device, re.IGNORECASE))
    return next((table[part] for part in named), None)


def known_devices() -> list[str]:
    """Parts of the names of the devices whose peaks are known."""
    return list(_PEAK_TFLOPS)
