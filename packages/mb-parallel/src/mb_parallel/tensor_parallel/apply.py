"""`parallelize_tensors`: a plan of styles applied to a model, over torch's `parallelize_module`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from mb_parallel.mesh import ParallelMesh
from mb_parallel.tensor_parallel.styles import Region, Style

Plan: TypeAlias = Mapping[str, Style | Callable[[nn.Module], Style]]


def parallelize_tensors(
    model: nn.Module, mesh: ParallelMesh, plan: Plan, *, sequence_parallel: bool = True
) -> None:
    """Share the dense layers of `model` out over the tp ranks, in place; free for one rank.

    Parameters that a style shards become DTensors on the tp axis with their global shape, in the
    model's own names; the others stay plain, equal on all tp ranks with equal gradients. Where one
    parameter belongs to two modules (a tied head) it goes on doing so.

    Apply it before `parallelize_experts` and `apply_data_parallel`. All tp ranks see the same
    batch; the gradients of a loss that each of them computes are right as they stand, but for the
    experts', see `TokenParallel`.

    Args:
        model: the same weights on every tp rank. A pipeline stage may lack modules of the plan.
        plan: style by pattern of module names, as `parallelize_module` reads it: "blocks.*.norm_1",
            "" for the model itself. A function of the module returns its style.
        sequence_parallel: between the blocks each rank holds its own run of the sequence, which tp
            must divide, instead of all of it: norms, dropout and residuals are computed once, the
            same bytes travel, and dropout must be seeded differently on every tp rank.

    Raises:
        ValueError: heads, widths or a vocabulary that tp does not divide, or a parameter of which
            no style of the plan says what becomes of it; names the module.
    """
    tp = mesh.axis("tp")
    if tp is None:
        return
    region = Region(tp, sequence_parallel)
    names = {id(module): name for name, module in model.named_modules()}
    shared = _shared_parameters(model)
    covered: set[int] = set()
    for pattern, style in plan.items():
        bound = _Bound(style, region, names, covered)
        if pattern == "":
            bound._apply(model, tp)
        elif _has_match(model, pattern.split(".")):
            parallelize_module(model, tp, {pattern: bound})
    _share_again(shared)
    loose = [
        f"{names[id(module)]}.{name}".removeprefix(".")
        for module in model.modules()
        if id(module) not in covered
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    if loose:
        raise ValueError(
            f"Expected the plan to cover every parameter, got none for {', '.join(loose)}. Add a "
            "style for each: SequenceParallel() for what works token by token, Replicated() for "
            "what all ranks compute alike."
        )


class _Bound(ParallelStyle):
    """A style with what it needs to know, as torch applies them."""

    def __init__(
        self,
        style: Style | Callable[[nn.Module], Style],
        region: Region,
        names: Mapping[int, str],
        covered: set[int],
    ) -> None:
        self.style, self.region, self.names, self.covered = style, region, names, covered

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        style = self.style if isinstance(self.style, Style) else self.style(module)
        try:
            style.apply(module, self.region)
        except ValueError as error:
            raise ValueError(f"{self.names[id(module)] or 'the model'}: {error}") from error
        self.covered |= {id(child) for child in style.covers(module)}
        return module


def _has_match(module: nn.Module, path: list[str]) -> bool:
    """Whether a pattern names any module: torch warns of each that does not."""
    from fnmatch import fnmatch

    if not path:
        return True
    return any(
        fnmatch(name, path[0]) and _has_match(child, path[1:])
        for name, child in module.named_children()
    )


def _shared_parameters(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Places of each parameter that more than one module has."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    return [group for group in places.values() if len(group) > 1]


def _share_again(shared: list[list[tuple[nn.Module, str]]]) -> None:
    for group in shared:
        module, name = group[0]
        for other, other_name in group[1:]:
            other._parameters[other_name] = module._parameters[name]
