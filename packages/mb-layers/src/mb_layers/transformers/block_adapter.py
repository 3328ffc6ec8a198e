"""What stands in the place of a transformers block: a `dMoE` with the block's names.

Whatever asks for the state dict, or brings one, sees the block that was replaced.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from mb_layers.model import weighs_losses
from mb_layers.moe import dMoE
from mb_layers.state_dicts import put_in, tells_what_trains
from mb_layers.tensors import is_dtensor
from mb_layers.transformers.block_losses import LossOfForward
from mb_layers.transformers.block_routing import RETURN_PAIRS
from mb_layers.transformers.blocks import block_rules, translate_block, translate_layer
from mb_layers.transformers.emptied import EMPTY, emptied, opened
from mb_layers.transformers.experts import refuse_offload_by_other_names

# What of an adapter's names tells it from a weight: PEFT's, and torch's of add_lora.
_OF_ADAPTERS = r"\b(lora_\w+|modules_to_save|parametrizations)\."


class BlockAdapter(nn.Module):
    """A `dMoE` in the place of a transformers block: takes and returns hidden states.

    Its state dict is that of the block it replaced, in both directions.
    """

    def __init__(self, moe: dMoE, block: nn.Module, losses: LossOfForward) -> None:
        super().__init__()
        self.moe = moe
        self.losses = losses
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
        self.losses.take(aux_loss, weighted=weighs_losses(self.moe))
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
