"""Which parameters decay, and which are matrices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from mb_layers.experts import Experts, SharedExpert
from torch import Tensor, nn

from mb_parallel.arguments import at_least_0, one_module, several
from mb_parallel.gradient_sync import free_gathered

# Tables of rows, and kernels: the last two axes of a kernel are its taps, no map.
_NO_MATRICES = (
    nn.Embedding, nn.EmbeddingBag,
    nn.Conv1d, nn.Conv2d, nn.Conv3d,
    nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not: biases, norms, and stacked biases [E, F] of experts too.

    Returns:
        Two groups with `params`, `weight_decay` and `decays`, which tells a schedule of the decay
        which is which. They hold only parameters that require a gradient.

    Raises:
        ValueError: `weight_decay` is below 0 or no number.
    """
    one_module(model)
    at_least_0(weight_decay=weight_decay)
    free_gathered(model)
    matrices, vectors = [], []
    for parameter, axes in _with_axes(model):
        (matrices if axes > 1 else vectors).append(parameter)
    return [
        {"params": matrices, "decays": True, "weight_decay": weight_decay},
        {"params": vectors, "decays": False, "weight_decay": 0.0},
    ]


def muon_groups(
    model: nn.Module,
    weight_decay: float,
    *,
    heads: Iterable[nn.Module] = (),
    fused: Mapping[Tensor, tuple[int, ...]] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Groups for `Muon`: the matrices inside the model.

    Embeddings, heads, convolutions and vectors take AdamW. torch's modules of the first and third
    kind are recognised, and a head tied to an embedding; name heads with a weight of their own in
    `heads`, and modules of yours that convolve. A weight of more axes is a stack of matrices. Gate
    and up of gated experts are taken as two matrices; name other weights that hold several in
    `fused`, with their rows as `Muon` expects them.

    Raises:
        ValueError: a weight in `fused` that is no parameter of the model, one module instead of
            several for `heads`, or the other way, or a `weight_decay` below 0.
    """
    one_module(model)
    heads = several(heads, "heads")
    free_gathered(model)
    if not fused.keys() <= set(model.parameters()):
        raise ValueError(
            "Expected fused by parameters of the model, got another tensor or a name. Look the "
            "parameters up after what replaces them: parallelize_tensors, apply_data_parallel."
        )
    others = [module for module in model.modules() if isinstance(module, _NO_MATRICES)]
    apart = {id(p) for module in (*others, *heads) for p in module.parameters()}
    rows = {id(parameter): parts for parameter, parts in fused.items()}
    for module in _stacks(model):
        w1 = dict(module.named_parameters(recurse=False)).get("w1")  # None under an adapter
        if w1 is not None and module.config.is_glu:
            rows[id(w1)] = (w1.shape[-2] // 2,) * 2
    muon: dict[tuple[int, ...], list[Tensor]] = {}
    for p, axes in _with_axes(model):
        if axes > 1 and id(p) not in apart:
            muon.setdefault(rows.get(id(p), ()), []).append(p)
    taken = {id(p) for ps in muon.values() for p in ps}
    about = {"decays": True, "weight_decay": weight_decay, "muon": True}
    groups = [{"params": ps, "fused": parts, **about} for parts, ps in muon.items()]
    for group in decay_groups(model, weight_decay):
        rest = [p for p in group["params"] if id(p) not in taken]
        groups.append({**group, "params": rest, "muon": False})
    # Of groups without parameters torch's distributed state dicts take one.
    return [group for group in groups if group["params"]] or groups[-1:]


def _stacks(model: nn.Module) -> list[Experts | SharedExpert]:
    return [module for module in model.modules() if isinstance(module, Experts | SharedExpert)]


def _with_axes(model: nn.Module) -> list[tuple[Tensor, int]]:
    """What trains, with its number of axes without the one that stacks experts."""
    stacks = {
        id(parameter)
        for module in _stacks(model)
        for name, parameter in module.named_parameters(recurse=False)
        if name in ("w1", "w2", "b1", "b2")
    }
    return [(p, p.ndim - (id(p) in stacks)) for p in model.parameters() if p.requires_grad]
