"""Saves experts' adapters in PEFT's format, a pair of matrices for each expert and projection.

`add_lora` and PEFT's `target_parameters` both put one adapter on the stacked weights of all
experts, and save it as such. Inference engines expect an adapter for each expert:

    base_model.model.model.layers.0.mlp.experts.3.gate_proj.lora_A.weight   [r, D]

A gate and its up projection are one stacked weight here: they share lora_A, and each has its half
of lora_B. So it is with a shared expert, whose adapters are in the file too.

Letters: E experts, D hidden, F expert ffn width, r rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mb_layers.experts import Experts, SharedExpert
from mb_layers.factored import Factored, LowRank, weight_of
from mb_layers.tensors import is_dtensor, to_plain
from mb_layers.transformers.block_adapter import BlockAdapter
from mb_layers.transformers.blocks import SHARED_EXPERTS

_GATE_UP, _UP, _DOWN = slice(0, 2), slice(1, 2), slice(2, 3)  # of the projections' names


def adapters_by_expert(
    model: nn.Module, *, projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> tuple[dict[str, Tensor], float]:
    """Return the tensors of all experts' adapters by PEFT's names, and their common scaling.

    Where the model is spread over ranks all have to call it: adapters are gathered.

    Args:
        model: a transformers model whose experts PEFT adapts by `target_parameters`, or one after
            `swap_blocks`, its experts and shared experts adapted so or by `add_lora`.
        projections: what the model's checkpoints call gate, up and down projection of an expert;
            Mixtral's are ("w1", "w3", "w2").

    Raises:
        ValueError: no adapters, adapters of different scalings or ranks, weights of another
            layout, or PEFT before 0.21.
    """
    tensors: dict[str, Tensor] = {}
    forms = set()
    for place, experts, stacked, added in _adapted(model):
        forms.add((added.scaling, added.rhs.shape[1]))
        names = projections[stacked]
        lhs, rhs = (to_plain(factor, factor.shape[0]) for factor in (added.lhs, added.rhs))
        for name, part in zip(names, lhs.chunk(len(names), dim=1), strict=True):
            for e, (a, b) in enumerate(zip(rhs, part, strict=True)):
                network = place if isinstance(experts, SharedExpert) else f"{place}.{e}"
                for side, factor in (("lora_A", a), ("lora_B", b)):
                    # A copy: safetensors takes no tensor twice, and gate and up share theirs.
                    copy = factor.detach().clone(memory_format=torch.contiguous_format)
                    tensors[f"base_model.model.{network}.{name}.{side}.weight"] = copy
    if len(forms) != 1:
        raise ValueError(
            "expected adapters on the experts of a model, all of one alpha / rank and one rank, "
            f"got {'none' if not forms else sorted(forms)}"
        )
    return tensors, forms.pop()[0]


def save_adapters(
    model: nn.Module,
    folder: Path | str,
    *,
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> None:
    """Write the experts' adapters into a folder as a PEFT adapter, expert by expert.

    Adapters that PEFT has on other modules of the model are not in it. PEFT 0.21 passes over some
    of it without an error where transformers stacks the experts, a shared expert's beside them for
    one: to go on with PEFT save by its `save_pretrained`. `model`, `projections` and errors are
    those of `adapters_by_expert`. Of ranks that share a model the first writes.
    """
    from safetensors.torch import save_file

    tensors, scaling = adapters_by_expert(model, projections=projections)
    if any(map(is_dtensor, model.parameters())) and torch.distributed.get_rank() > 0:
        return
    rank = next(iter(tensors.values())).shape[0]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": getattr(getattr(model, "config", None), "_name_or_path", None),
        "r": rank,
        "lora_alpha": scaling * rank,
        "target_modules": list(projections),
        "bias": "none",
        "inference_mode": True,
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _adapted(model: nn.Module) -> Iterator[tuple[str, nn.Module, slice, LowRank]]:
    """(their name in the original model, experts, the projections of a weight, its adapter)."""
    for name, module in model.named_modules():
        place = _place(model, name)
        if isinstance(module, Experts | SharedExpert):
            for weight, stacked in _stacked(module).items():
                parts = weight_of(module, weight)
                added = parts.added if isinstance(parts, Factored) else ()
                if len(added) > 1:
                    raise ValueError(f"expected one adapter on {name}.{weight}, got {len(added)}")
                for one in added:
                    yield place, module, stacked, one
        elif type(module).__name__ == "ParamWrapper":
            wrapper: Any = module
            base, weight = wrapper.get_base_layer(), wrapper.parameter_name
            stacked = _stacked(base).get(weight)
            if stacked is None and "expert" not in type(base).__name__.lower():
                continue  # a router's, say
            if stacked is None or _is_transposed(base):
                raise ValueError(
                    "expected adapters on gate_up_proj, up_proj or down_proj of layout [E, rows, "
                    f"columns], got {weight!r} of {type(base).__name__}"
                )
            if len(wrapper.active_adapters) != 1:
                raise ValueError(
                    f"expected one active adapter on {place}.{weight}, got "
                    f"{', '.join(wrapper.active_adapters) or 'none'}; choose one by set_adapter"
                )
            if not hasattr(wrapper, "get_delta_factors"):
                raise ValueError(
                    "expected adapters of PEFT 0.21 or later, got an earlier one, which adds them "
                    "to the weights; load them with a later PEFT"
                )
            (adapter,) = wrapper.active_adapters
            lhs, rhs, scaling = wrapper.get_delta_factors(adapter)
            # LongCat's first weight has rows for its zero experts too, which compute nothing.
            real = getattr(base, "num_routed_experts", lhs.shape[0])
            added = LowRank(lhs[:real], rhs[:real], scaling)
            yield place, base, stacked, added


def _place(model: nn.Module, name: str) -> str:
    """What the original model calls a module of one that PEFT has wrapped or that was swapped."""
    block, is_swapped, part = name.partition(".moe.")
    place = block
    if is_swapped:
        adapter = model.get_submodule(block)
        if part.startswith("shared_expert") and isinstance(adapter, BlockAdapter):
            part = next(n for n in SHARED_EXPERTS if f"{n}.down_proj.weight" in adapter._names)
        place = f"{block}.{part}"
    return place.removeprefix("base_model.model.").replace(".base_layer", "")


def _is_transposed(experts: Any) -> bool:
    """Whether the weights are [E, D, 2F] and [E, F, D].

    Of transformers' classes that have no attribute for it, Llama-4's are so and LongCat's are not.
    """
    if isinstance(experts, Experts | SharedExpert) or hasattr(experts, "is_transposed"):
        return getattr(experts, "is_transposed", False)
    return experts.gate_up_proj.shape[2] != experts.down_proj.shape[1]


def _stacked(experts: nn.Module) -> dict[str, slice]:
    """Which projections each of the experts' weights stacks, by its name."""
    if isinstance(experts, Experts | SharedExpert):
        return {"w1": _GATE_UP if experts.config.is_glu else _UP, "w2": _DOWN}
    return {"gate_up_proj": _GATE_UP, "up_proj": _UP, "down_proj": _DOWN}
