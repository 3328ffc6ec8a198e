"""Replaces the MoE blocks of a transformers model by `dMoE` layers, and puts them back.

From outside the model stays the same: its forward takes and returns the same, and its state dict,
and so `save_pretrained`, has the names and shapes of the original blocks. Only the balancing loss
of our layers is new. It is added to `outputs.loss`, so that whatever the trainer does to the loss
(division by accumulation steps, loss scale, mean over ranks) applies to it too.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from mb_layers.arguments import a_module, described
from mb_layers.model import Chain, in_backward, mean_loss, weighs_losses
from mb_layers.moe import dMoE
from mb_layers.state_dicts import put_in, tells_what_trains
from mb_layers.tensors import is_dtensor
from mb_layers.transformers.block_routing import BLOCKS, RETURN_PAIRS
from mb_layers.transformers.blocks import (
    block_rules,
    moe_from_block,
    translate_block,
    translate_layer,
)
from mb_layers.transformers.emptied import EMPTY, emptied, opened
from mb_layers.transformers.experts import refuse_offload_by_other_names
from mb_layers.transformers.replacing import refuse_replacing, refuse_subclasses


class BlockAdapter(nn.Module):
    """A `dMoE` in the place of a transformers block: takes and returns hidden states.

    Its state dict is that of the block it replaced, in both directions.
    """

    def __init__(self, moe: dMoE, block: nn.Module, losses: _LossOfForward) -> None:
        super().__init__()
        self.moe = moe
        self._losses = losses
        self._names = tuple(block.state_dict())
        self._in_pair = type(block).__name__ in RETURN_PAIRS
        # The block without its weights, for the way back; in a tuple it is no submodule.
        self._block = (emptied(block),)
        # Its parts are found by name, though, for what follows the names of the state dict:
        # torch.distributed.checkpoint, and some models' save_pretrained, which looks up shapes.
        self.__dict__.update(block._modules | block._parameters | block._buffers)
        self.register_load_state_dict_pre_hook(_load_block_names)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_names", ()):  # a weight of the block itself
            raise ValueError(EMPTY)
        super().__setattr__(name, value)

    def forward(self, hidden_states: Tensor) -> Tensor | tuple[Tensor, None]:
        """hidden_states [B, S, D] to the same shape; with None if the block returned a pair."""
        refuse_offload_by_other_names(self.moe.router)
        y, aux_loss, _ = self.moe(hidden_states)
        self._losses.take(aux_loss, weighted=weighs_losses(self.moe))
        return (y, None) if self._in_pair else y

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state dict of the block that this layer replaced; adapters by names of their own."""
        destination, prefix = kwargs.get("destination"), kwargs.get("prefix", "")
        state = {} if destination is None else destination
        ours = self.moe.state_dict(keep_vars=kwargs.get("keep_vars", False))
        places = _places(ours)
        weights = {name: ours.pop(place) for name, place in places.items()}
        theirs = translate_layer(weights, self.moe.config, self._names)
        state.update({prefix + name: theirs[name] for name in self._names})
        state.update({f"{prefix}moe.{name}": tensor for name, tensor in ours.items()})
        return state

    def block(self) -> nn.Module:
        """Return the original block with this layer's weights."""
        (block,) = self._block
        if any(map(is_dtensor, self.moe.parameters())):
            raise ValueError(
                "expected a layer with whole weights, got DTensors, with which a block of "
                "transformers computes nothing; restore_blocks before parallelize_experts and "
                "fully_shard, or load get_model_state_dict's full_state_dict into another model"
            )
        with tells_what_trains():
            state = self.state_dict(keep_vars=True)
            if more := state.keys() - set(self._names):
                raise ValueError(
                    f"expected a block without adapters, got {', '.join(sorted(more))}; merge them "
                    "first: merge_lora, or PEFT's merge_and_unload"
                )
            put_in(opened(block), state)
        return block.train(self.training)


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
    functions and options do not. Accelerate's `cpu_offload`, `disk_offload` and `dispatch_model` to
    a CPU or a disk need the tensors by the names of the new layers, and an error says how. Tensors
    that lie otherwise in a block (GPT-OSS's experts, a shared expert's gate and up projection) are
    copies there: what is written into the state dict reaches the model by `load_state_dict` alone.
    Under FSDP2 all ranks have to call it, for it gathers shared experts.
    """
    a_module(model=model)
    _refuse_router_logits(model)
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
    losses = _LossOfForward()
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
        adapter._losses.unwatch()
    return list(adapters)


class _LossOfForward:
    """Collects the blocks' losses from the start to the end of one forward of the model."""

    def __init__(self) -> None:
        self._taken: Chain | None = None
        self._lost_gradients = False
        self._hooks: list[Any] = []

    def watch(self, model: nn.Module) -> None:
        self._hooks = [
            model.register_forward_pre_hook(self._open, with_kwargs=True),
            model.register_forward_hook(self._add, with_kwargs=True),
        ]

    def unwatch(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def take(self, aux_loss: Tensor, *, weighted: bool) -> None:
        if not weighted:  # always 0: it needs no place, and its gradient is no loss
            aux_loss = aux_loss.detach()
        if self._taken is not None:
            self._taken.add(aux_loss)
            self._lost_gradients |= weighted and not torch.is_grad_enabled()
        elif aux_loss.requires_grad and not in_backward():
            # In the backward pass it is a recomputation, whose loss was taken the first time.
            raise ValueError(
                "expected swapped blocks to run inside the model that swap_blocks was given, got a "
                "call from elsewhere, whose balancing loss would be lost; swap the blocks of the "
                "module that is called, or set load_balancing_loss_weight=0 and z_loss_weight=0"
            )

    def _open(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("output_router_logits"):
            raise ValueError(
                "expected output_router_logits=False, got True: the swapped blocks return no "
                "router logits; record_routing and collect tell what their routers do"
            )
        if kwargs.get("output_router_logits") is None:  # False wins over the config
            _refuse_router_logits(model)
        if getattr(model, "_is_replica", False) and model.training and torch.is_grad_enabled():
            raise ValueError(
                "expected one process per GPU, got nn.DataParallel, whose threads would mix up "
                "their balancing losses; start the processes with torchrun or accelerate launch, "
                "or show this one a single GPU (CUDA_VISIBLE_DEVICES=0)"
            )
        self._taken, self._lost_gradients = Chain(), False

    def _add(self, model: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any) -> None:
        chain, self._taken = self._taken, None
        taken = [] if chain is None else chain.entries()
        if not taken or not (model.training and torch.is_grad_enabled()):
            return
        aux_loss = mean_loss(taken, taken[-1].device)
        if self._lost_gradients and any(p.requires_grad for p in model.parameters()):
            raise ValueError(
                "expected balancing losses with gradients, but reentrant checkpointing loses "
                'them; pass gradient_checkpointing_kwargs={"use_reentrant": False}'
            )
        if isinstance(outputs, tuple | list | Tensor):  # a layer of a model returns a tensor
            if not aux_loss.requires_grad:
                return
            raise ValueError(
                f"expected a model that returns its outputs by name, got {described(outputs)} from "
                f"{type(model).__name__}, which has no place for the balancing loss; swap the "
                "blocks of the whole model, and train it with return_dict=True"
            )
        plain = type(outputs) is dict  # transformers' are dicts too, with attributes
        loss = outputs.get("loss") if plain else getattr(outputs, "loss", None)
        more = {"aux_loss": aux_loss}
        if loss is not None:
            part = torch.as_tensor(_share(model, args, kwargs, outputs), device=aux_loss.device)
            more["loss"] = loss + (part * aux_loss).to(loss.device)
        for name, value in more.items():
            if plain:
                outputs[name] = value
            else:
                setattr(outputs, name, value)


def _refuse_router_logits(model: nn.Module) -> None:
    """Raise if the model's config, or that of its text part, asks for router logits."""
    config = getattr(model, "config", None)
    text_config = getattr(config, "text_config", None)
    for name, part in (("config", config), ("config.text_config", text_config)):
        if getattr(part, "output_router_logits", False):
            raise ValueError(
                f"expected {name}.output_router_logits=False, got True: the swapped blocks bring "
                "their own balancing loss; set it to False"
            )


def _share(model: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any) -> Tensor | float:
    """The part of the whole batch that this micro-batch is, if the loss is normalised by that."""
    items = kwargs.get("num_items_in_batch")
    if items is None or str(getattr(model, "loss_type", None)).endswith("Classification"):
        return 1.0  # classifiers take the number, and leave their loss a mean
    named = dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) | kwargs
    if named.get("start_positions") is not None:  # of answers to questions, half a loss each
        answers = torch.cat([named["start_positions"], named["end_positions"]])
        return (answers < outputs.start_logits.shape[1]).sum() / (2 * items)
    shifted = named.get("shift_labels")
    labels = named["labels"][..., 1:] if shifted is None else shifted
    return (labels != -100).sum() / items


def _load_block_names(
    adapter: nn.Module,
    state: dict[str, Tensor],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing_keys: list[str],
    *_: Any,
) -> None:
    """Rename what `load_state_dict` brings from the block's names to the layer's.

    It may be a part: of a checkpoint in several files `Trainer` loads one after the other.
    """
    assert isinstance(adapter, BlockAdapter)
    _refuse_adapters_of_the_block(state, prefix)
    given = {n for n in adapter._names if prefix + n in state}
    ours = adapter.moe.state_dict(keep_vars=True)
    places = _places(ours)

    def keep(name: str) -> None:
        """What is missing is named as the block has it: by the layer's name it is there."""
        state[f"{prefix}moe.{places[name]}"] = ours[places[name]]

    if not given:
        own = {f"{prefix}moe.{place}": ours[place] for place in places.values()}
        if all(state.get(name, mine) is mine for name, mine in own.items()):
            missing_keys += [prefix + name for name in adapter._names]
            for name in places:
                keep(name)
        return
    theirs = {n: state.pop(prefix + n) for n in adapter._names if n in given}
    if absent := set(adapter._names) - given:
        theirs |= {n: t for n, t in adapter.state_dict().items() if n in absent}
    config = adapter.moe.config
    translated = translate_block(theirs, config)
    for rule in block_rules(theirs, config):
        missing_keys += [prefix + n for n in rule.sources if n in absent]
        if given.isdisjoint(rule.sources):
            keep(rule.target)
            continue
        place = places[rule.target]
        state[f"{prefix}moe.{place}"] = _sharded_as(translated[rule.target], ours[place])


def _refuse_adapters_of_the_block(state: Iterable[str], prefix: str) -> None:
    """Raise for what PEFT loads with strict=False and would miss without a word."""
    theirs = re.compile(rf"{re.escape(prefix)}(?!moe\.).*{_OF_ADAPTERS}")
    if name := next(filter(theirs.match, state), None):
        raise ValueError(
            f"expected adapters of a swapped block by the names of its `.moe`, got {name!r}, of "
            "the block that was swapped; load and merge them before swap_blocks, or take "
            "mb_layers.transformers.use, which keeps the names"
        )


def _sharded_as(tensor: Any, ours: Any) -> Tensor:
    """A DTensor sharded as ours is, of one that `state_dict` had to gather or of a whole tensor.

    torch's `set_model_state_dict` shards the whole ones of a `full_state_dict` by the names of
    modules, and so none of a block.
    """
    placements = getattr(ours, "placements", None)
    if placements is None or getattr(tensor, "placements", None) == placements:
        return tensor
    if not is_dtensor(tensor):
        from torch.distributed.tensor import DTensor, Replicate

        everywhere = [Replicate()] * len(placements)
        tensor = DTensor.from_local(tensor, ours.device_mesh, everywhere, run_check=False)
    return tensor.redistribute(placements=placements)


def _places(names: Iterable[str]) -> dict[str, str]:
    """The place of each of a layer's tensors in its state dict, by name: adapters move some."""
    places = {}
    for place in names:
        name = re.sub(r"\b(base_layer|original_module)\.", "", place)  # PEFT's
        name = re.sub(r"\bparametrizations\.(\w+)\.original$", r"\1", name)  # add_lora's
        if not re.search(_OF_ADAPTERS, name):
            places[name] = place
    return places


_OF_ADAPTERS = r"\b(lora_\w+|modules_to_save|parametrizations)\."
