"""Replaces the MoE blocks of a transformers model by `dMoE` layers, and puts them back.

From outside the model stays the same: its forward takes and returns the same, and its state dict,
and so `save_pretrained`, has the names and shapes of the original blocks. Only the balancing loss
of our layers is new. It is added to `outputs.loss`, so that whatever the trainer does to the loss
(division by accumulation steps, loss scale, mean over ranks) applies to it too.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from mb_layers.arguments import a_module
from mb_layers.moe import dMoE
from mb_layers.transformers.block_adapter import BlockAdapter
from mb_layers.transformers.block_losses import LossOfForward, refuse_router_logits
from mb_layers.transformers.block_routing import BLOCKS
from mb_layers.transformers.blocks import moe_from_block
from mb_layers.transformers.replacing import refuse_replacing, refuse_subclasses


def swap_blocks(model: nn.Module, **overrides: Any) -> dict[str, dMoE]:
    """Replace every MoE block that `moe_from_block` knows by a `dMoE`, in place.

    In training the mean auxiliary loss over the blocks is added to `outputs.loss`, with the weight
    that the model gives its own loss (`num_items_in_batch`), and returned as `outputs.aux_loss`. If
    the model is called without labels and the caller computes the loss, the caller has to add it:
    `Trainer` does not with `label_smoothing_factor`, nor with a `compute_loss_func` that leaves it
    out. Gradient checkpointing of layers with such losses must be non-reentrant. Blocks do not get
    the attention mask: padding is routed, as in transformers, and counted as load. With much
    padding, pack sequences or sort them by length.

    The layers' parameters are new ones. Make the optimizer afterwards: one that was made before
    goes on with the rest of the model alone. Writing into a block's weight by its old name
    (`mlp.gate.weight`), or putting another there, is an error. `torch.func.functional_call` does
    that with a state dict: give it tensors by the names of `named_parameters`.

    Args:
        model: a transformers model (or any module that holds such blocks, is called itself, and
            returns its outputs by name). Not its `.model`: the head that calls this one passes on
            no `aux_loss`.
        overrides: fields of `MoEConfig`, for every block.

    Returns:
        The new layers by the name of the block they replaced.

    Raises:
        ValueError: the model holds no such block, is spread over ranks already
            (DistributedDataParallel, fully_shard, parallelize_experts), has weights in few bits,
            or computes a balancing loss of its own from router logits, which are no longer there
            (its forward raises it if asked for it later); a block shares a part of its weights with
            another (one for several layers is fine), has hooks, or a half of one of ours frozen.

    The state dict has the names of the original blocks, while modules and parameters have those of
    the new layers, by which an optimizer's state is stored. `broadcast_from_rank0` of
    `torch.distributed.checkpoint.state_dict` takes the two for the same, so that other ranks than
    the first are given nothing for these blocks: `set_model_state_dict` raises there that their
    names are missing, or returns them with strict=False. It needs `restore_blocks` first; other
    functions and options do not. (Accelerate's `load_checkpoint_and_dispatch` without a device map
    loads everything, but warns of the new layers' names, which that module of torch has added.)
    Accelerate's `cpu_offload`, `disk_offload` and `dispatch_model` to a CPU or a disk need the
    tensors by the names of the new layers, and an error says how. Tensors that lie otherwise in a
    block (GPT-OSS's experts, a shared expert's gate and up projection) are copies there: what is
    written into the state dict reaches the model by `load_state_dict` alone. Under FSDP2 all ranks
    have to call it, for it gathers shared experts.
    """
    a_module(model=model)
    refuse_router_logits(model)
    modules = model.named_modules(remove_duplicate=False)  # a block may serve several layers
    blocks = {name: m for name, m in modules if type(m).__name__ in BLOCKS}
    if not blocks:
        if any(isinstance(module, BlockAdapter) for module in model.modules()):
            raise ValueError(
                "expected a model whose blocks are still to be swapped, got one whose blocks are; "
                "for other overrides restore_blocks first"
            )
        raise ValueError(
            f"expected a model with blocks of {', '.join(BLOCKS)}, found none; mb_layers."
            "transformers.use(model) runs the experts of others on the kernels, in their own blocks"
        )
    refuse_replacing(model, blocks)
    refuse_subclasses(blocks)
    layers = {block: moe_from_block(block, **overrides) for block in dict.fromkeys(blocks.values())}
    losses = LossOfForward()
    adapters = {
        block: BlockAdapter(layer, block, losses).train(layer.training)
        for block, layer in layers.items()
    }
    for name, block in blocks.items():
        model.set_submodule(name, adapters[block])
    losses.watch(model)
    return {name: layers[block] for name, block in blocks.items()}


def restore_blocks(model: nn.Module) -> list[str]:
    """Put the original blocks back, with the weights that the swapped ones have now.

    Their parameters are new ones, see `swap_blocks`.

    Returns:
        The names of the blocks.

    Raises:
        ValueError: the model holds no swapped block, one with adapters or hooks, one that shares a
            part of its weights with another, or one whose weights are spread over ranks
            (parallelize_experts, fully_shard, DistributedDataParallel). Nothing is restored then.
    """
    a_module(model=model)
    modules = model.named_modules(remove_duplicate=False)
    adapters = {name: m for name, m in modules if isinstance(m, BlockAdapter)}
    if not adapters:
        raise ValueError("expected a model with swapped blocks, found none; see swap_blocks")
    refuse_replacing(model, adapters)
    blocks = {
        adapter: adapter.block() for adapter in dict.fromkeys(adapters.values())
    }  # all, or none
    for name, adapter in adapters.items():
        model.set_submodule(name, blocks[adapter])
        adapter.losses.unwatch()
    return list(adapters)
