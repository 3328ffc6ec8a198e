"""A dense model with its feed-forwards copied into experts: sparse upcycling (arXiv 2212.05055).

Every expert of a layer begins as its feed-forward, routers begin anew, all else stays. While the
weights of a token's experts sum to one, the model therefore computes what the dense one did.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from mb_layers.on_demand import OnDemand
from mb_layers.router import Router
from torch import Tensor, nn

from mb_train.config import GROUPS, TrainConfig, flag_name
from mb_train.convert.new_run import refuse_run, write_run
from mb_train.flags.command_line import CommandLine, resolve, without_effect
from mb_train.loading import outlined
from mb_train.models.unfilled import unfilled
from mb_train.tasks.make import whole_model

_OF_EXPERTS = {field.name for field in dataclasses.fields(GROUPS["moe"])}
# The maps of a dense feed-forward that an expert's tensor is made of, one above the other.
_PARTS = {
    "w1": ("gate.weight", "up.weight"), "w2": ("down.weight",),
    "b1": ("gate.bias", "up.bias"), "b2": ("down.bias",),
}  # fmt: skip


def upcycle(
    source: Path, target: Path, experts: CommandLine, *, say: Callable[[str], None] = print
) -> None:
    """Make a run folder with experts of a dense one: to `--load` with `--finetune`.

    Args:
        experts: flags of the experts. The default is two for each token, with weights that sum to
            one.

    Raises:
        ValueError: a model with experts; other flags than theirs; experts that no copy fits.
        OSError: files that cannot be read or written.
    """
    refuse_run(target)
    others = [flag_name(name) for name in sorted(experts.values.keys() - _OF_EXPERTS)]
    others += ["--recipe"] if experts.recipe is not None else []
    others += ["--print-config"] if experts.print_config else []
    if others or experts.values.get("moe_num_experts") is None:
        raise ValueError(
            "Expected --moe-num-experts, and beside it flags of the experts alone, got "
            f"{', '.join(others) or 'no number of them'}. The run that goes on takes the others."
        )
    from mb_train.checkpoint.weights import SavedWeights

    dense = outlined(source, kinds=("gpt", "bert", "t5"), mtp_num_layers=None)
    if dense.config.moe_num_experts is not None:
        raise ValueError(f"Expected a dense model in {source}, got one with experts.")
    biases = dense.config.add_bias_linear
    # Not one expert a token: its weight would be 1 whatever the router says, which then learns
    # nothing from the loss.
    begins: dict[str, Any] = {"moe_top_k": 2, "moe_renormalize": True, "moe_mlp_bias": biases}
    for name in ("hybrid_layer_pattern", "mtp_hybrid_override_pattern"):
        if (pattern := getattr(dense.config, name)) is not None:
            begins[name] = pattern.replace("-", "E")
    config = resolve(experts, dense.saved.inherited() | begins)
    for name, there, here in (
        ("--moe-ffn-hidden-size", config.ffn_size, config.expert_ffn_size),
        ("--moe-mlp-bias", biases, config.moe_mlp_bias),
        ("--moe-shared-expert-intermediate-size", None, config.moe_shared_expert_intermediate_size),
        ("--moe-latent-size", None, config.moe_latent_size),
        ("--moe-weights-on-input", False, config.moe_weights_on_input),
    ):
        if here != there:
            raise ValueError(
                f"Expected {name} {there} of experts that begin as the feed-forwards of "
                f"{source}, got {here}. Leave it out."
            )
    for note in (*experts.notes, *without_effect(experts, config)):
        say(f"note: {note}")
    with unfilled():
        model = whole_model(config, vocab_size=dense.vocab_size)
    saved = SavedWeights(dense.checkpoint, dense.model)
    weights = _Upcycled(saved, model, _routers(model, config.seed))
    write_run(target, config, weights, run=dense.checkpoint.parent, say=say)
    if config.moe_capacity_factor or not _sums_to_one(config):
        say(
            "it does not compute what the dense model did: the weights of a token's experts do "
            "not sum to one, or a capacity drops tokens"
        )


class _Upcycled(OnDemand[str]):
    """Weights of a model with experts, each copied or drawn when it is asked for.

    Args:
        dense: those of the dense model.
        model: with experts, without numbers.
        routers: theirs.
    """

    def __init__(
        self, dense: Mapping[str, Tensor], model: nn.Module, routers: Mapping[str, Tensor]
    ) -> None:
        super().__init__()
        self._dense, self._routers, self._outlines = dense, routers, model.state_dict()
        self.places = {name: name for name in self._outlines}

    def read(self, place: str) -> Tensor:
        shape = self._outlines[place].shape
        of_expert = re.fullmatch(r"(.*\.mlp\.)experts\.(\w+)", place)
        if of_expert is not None:
            maps = (of_expert[1] + part for part in _PARTS[of_expert[2]])
            whole = torch.cat([self._dense[part] for part in maps if part in self._dense])
            return whole.expand(shape).contiguous()
        if place in self._dense:
            return self._dense[place]
        # What no dense model has beside a router is a bias behind all experts.
        return self._routers[place] if place in self._routers else torch.zeros(shape)

    def outlines(self) -> dict[str, Tensor]:
        return self._outlines


def _routers(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """The routers' weights, drawn, of a model that is without numbers."""
    drawn: dict[str, Tensor] = {}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for path, outline in model.named_modules():
            if isinstance(outline, Router):
                router = copy.deepcopy(outline).to_empty(device="cpu")
                router.reset_parameters()
                drawn |= router.state_dict(prefix=f"{path}.")
    return drawn


def _sums_to_one(config: TrainConfig) -> bool:
    scaled = config.moe_renormalize_p != 1 or config.moe_router_topk_scaling_factor != 1
    return config.moe_renormalize and not scaled and not config.moe_num_zero_experts
