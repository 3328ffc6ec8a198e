"""The balancing losses of a model's swapped blocks, on their way into the model's loss."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from mb_layers.arguments import described
from mb_layers.model import Chain, in_backward, mean_loss


class LossOfForward:
    """Collects the blocks' losses from the start to the end of one forward of the model."""

    def __init__(self) -> None:
        self._taken: Chain | None = None
        self._lost_gradients = False
        self._hooks: list[Any] = []

    def watch(self, model: nn.Module) -> None:
        """Add them to what this model's forward returns."""
        self._hooks = [
            model.register_forward_pre_hook(self._open, with_kwargs=True),
            model.register_forward_hook(self._add, with_kwargs=True),
        ]

    def unwatch(self) -> None:
        """Leave the model alone again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def take(self, aux_loss: Tensor, *, weighted: bool) -> None:
        """Keep a block's loss until the forward ends; one that is not `weighted` is always 0."""
        if not weighted:  # it needs no place, and its gradient is no loss
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
            refuse_router_logits(model)
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


def refuse_router_logits(model: nn.Module) -> None:
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
