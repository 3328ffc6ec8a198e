"""Activations of a run that wait in the host's memory, by Megatron Core's names of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
from mb_layers import Experts
from mb_parallel.offload import Offload, apply_offload, evenly_spread
from torch import nn

from mb_train.config import TrainConfig
from mb_train.config.offloading import EXPERT_MODULES, LAYER_INPUT
from mb_train.models.attention import CoreAttention
from mb_train.models.states import StateCore
from mb_train.models.transformer import Block

# What projects the hidden state, or a latent of it, to queries, keys and values.
_PROJECTIONS = (
    "qkv", "q", "kv", "q_down", "q_up", "kv_down", "kv_up", "qkvz", "ba", "xz", "bc", "dt",
    "bcx",
)  # fmt: skip


def offload_of(config: TrainConfig, device: torch.device) -> Offload | None:
    """For the stages of a rank; None where nothing goes to the host."""
    if config.offloads is None or device.type != "cuda":
        return None
    return Offload(device, least_numbers=config.min_offloaded_tensor_size)


def keep_on_host(blocks: list[Block], config: TrainConfig, offload: Offload) -> None:
    """Let the blocks of a stage keep there what the run says; those to be compiled already are."""
    parts: Callable[[nn.Module], Iterable[nn.Module]] | None = None
    if config.offload_modules not in (None, [LAYER_INPUT]):
        parts = partial(_parts, config.offload_modules)
    places = layers_on_host(config, len(blocks))
    if config.offload_modules is not None:  # all of these, of which the first may be recomputed
        blocks = blocks[: len(places)]
    apply_offload(blocks, offload, count=len(places), parts=parts)


def layers_on_host(config: TrainConfig, layers: int) -> list[int]:
    """Which of a stage's layers have something there."""
    if config.offload_modules is None:
        return evenly_spread(config.cpu_offloading_num_layers, layers)
    if config.offload_modules == [LAYER_INPUT] and config.recompute_method == "block":
        return [*range(min(config.recompute_num_layers, layers))]
    return [*range(layers)]


def _parts(names: Iterable[str], block: nn.Module) -> Iterator[nn.Module]:
    assert isinstance(block, Block)
    attentions = [a for a in (block.attention, block.cross) if a is not None]
    inside = list(block.modules())
    found: Mapping[str, Iterable[nn.Module | None]] = {
        "attn_norm": (block.norm_1, block.norm_cross),
        "qkv_linear": (a._modules.get(name) for a in attentions for name in _PROJECTIONS),
        "core_attn": (m for m in inside if isinstance(m, CoreAttention | StateCore)),
        "attn_proj": (a._modules.get("out") for a in attentions),
        "mlp_norm": (block.norm_2,),
        **dict.fromkeys(EXPERT_MODULES, tuple(m for m in inside if isinstance(m, Experts))),
    }
    for name in names:
        yield from (module for module in found[name] if module is not None)
