"""`parallelize_tensors`: a plan of styles applied to a model.

Plans read like those of torch's `parallelize_module`, but the styles are our own. Torch's compute
on DTensors, which costs the host 50 to 100 us for each op, and which supports neither our ops nor
weights that are cast on use. Ours compute on plain tensors. Only parameters are DTensors, as FSDP2
and checkpoints need them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from mb_layers import Experts
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mb_parallel.arguments import one_module, parameters_of
from mb_parallel.engines import is_dtensor, is_fsdp
from mb_parallel.gradient_sync import replacing
from mb_parallel.mesh import ParallelMesh, check_mesh, keep_sizes
from mb_parallel.shards import take_first
from mb_parallel.tensor_parallel.adapt import adapt, is_adapted
from mb_parallel.tensor_parallel.styles import (
    Region,
    Replicated,
    RowParallel,
    SplitSequence,
    Style,
)
from mb_parallel.tensor_parallel.vocabulary import VocabParallelEmbedding
from mb_parallel.world import check_same

Plan: TypeAlias = Mapping[str, Style | Callable[[nn.Module], Style]]


def parallelize_tensors(
    model: nn.Module, mesh: ParallelMesh, plan: Plan, *, sequence_parallel: bool = True
) -> None:
    """Split the dense layers of `model` over the tp ranks, in place; does nothing for one rank.

    Parameters that a style shards become DTensors on the tp axis. They keep their names and their
    global shapes. The others stay plain tensors, with equal values and gradients on all tp ranks.
    A parameter that two modules share (a tied head) stays shared.

    Call it before `parallelize_experts` and `apply_data_parallel`, on all tp ranks together, which
    take the first one's values of what they all hold. All tp ranks see the same batch, and each
    computes the loss. Every gradient is then complete, except those of experts, see `ExpertLayer`.

    Args:
        model: with the same weights on every tp rank. It may lack modules of the plan, as a
            pipeline stage does.
        plan: styles by patterns of module names, such as "blocks.*.norm_1"; "" is the model itself.
            Instead of a style, a function that is given the module and returns its style. Patterns
            that fit no module are ignored.
        sequence_parallel: between the blocks each rank holds its part of the sequence, which tp
            must divide, instead of all of it. Norms, dropout and residuals are then computed once
            instead of on every rank, and as many bytes are sent. Dropout must be seeded differently
            on every tp rank.

    Raises:
        ValueError: heads, widths or a vocabulary that tp does not divide, a parameter that no style
            of the plan covers, a module that two styles claim, an embedding that leaves sequences
            whole although `sequence_parallel` says that ranks hold parts, a shared parameter that
            two styles split along different dimensions, a model that is split already, or one that
            differs between the ranks, as the plan may. The message names the module.
    """
    one_module(model)
    check_mesh(mesh, model)
    if not (isinstance(plan, Mapping) and all(isinstance(pattern, str) for pattern in plan)):
        raise ValueError(
            "Expected a plan of styles by patterns of module names, such as "
            f'{{"layers.*.norm": SequenceParallel()}}, got {plan!r}.'
        )
    tp = mesh.axis("tp")
    if tp is None:
        return
    # A function is at another address on each rank.
    styles_of = {f"{p!r}": re.sub(r" at 0x\w+", "", f"{style}") for p, style in plan.items()}
    alike = parameters_of(model) | styles_of | {"sequence_parallel": sequence_parallel}
    check_same(alike, "what parallelize_tensors is given", group=tp.get_group())
    for name, module in model.named_modules():
        if is_adapted(module) or is_fsdp(module):
            raise ValueError(
                f"Expected a model that is not shared out yet, got {name or 'one'} that is. Call "
                "parallelize_tensors once, before apply_data_parallel."
            )
    region = Region(tp, sequence_parallel)
    names = {module: name for name, module in model.named_modules()}
    shared = _shared_parameters(model)
    covered: set[nn.Module] = set()
    styles: dict[nn.Module, list[Style]] = {}
    with replacing(model):
        for pattern, entry in plan.items():
            for module in [module for module, name in names.items() if _matches(name, pattern)]:
                try:
                    style = _style(entry, module, pattern)
                    _refuse_second(module, styles.setdefault(module, []), style)
                    style.apply(module, region)
                except ValueError as error:
                    raise ValueError(f"{names[module] or 'the model'}: {error}") from error
                styles[module].append(style)
                covered.update(style.covers(module))
        _share_again(shared, names, region)
    loose = [
        f"{names[module]}.{name}".removeprefix(".")
        for module in model.modules()
        if module not in covered
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    if loose:
        raise ValueError(
            f"Expected the plan to cover every parameter, got none for {', '.join(loose)}. Add a "
            "style for each: SequenceParallel() for what works token by token, PartialGradients() "
            "for what each rank computes a part with, Replicated() for what all compute alike."
        )
    if sequence_parallel:
        _refuse_whole_sequences(styles, names)
    _equal(model, tp.get_group())
    keep_sizes(mesh, model)


def _equal(model: nn.Module, group: ProcessGroup) -> None:
    """Let all ranks have the first one's values of what they all hold; experts are still to cut.

    Each rank's stream would be another one, if embeddings differed.
    """
    of_experts = {p for m in model.modules() if isinstance(m, Experts) for p in m.parameters()}
    for parameter in model.parameters():
        if not is_dtensor(parameter) and parameter not in of_experts:
            take_first(parameter, [group])


def _matches(name: str, pattern: str) -> bool:
    """Whether a module's name fits a pattern; the parts between dots are compared one by one."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _style(entry: Any, module: nn.Module, pattern: str) -> Style:
    style = entry
    if callable(entry) and not isinstance(entry, type):
        style = entry(module)
    if not isinstance(style, Style):
        raise ValueError(
            f"Expected a style for {pattern!r}, such as RowParallel(), or a function of the module "
            f"that returns one, got {style!r}."
        )
    return style


def _refuse_second(module: nn.Module, earlier: list[Style], style: Style) -> None:
    """Two styles on one module would communicate twice, and so add up sums again."""
    for other in earlier:
        both = all(module in one.covers(module) for one in (other, style))
        if both or type(other) is type(style):
            raise ValueError(
                f"Expected one pattern of the plan to fit, got {type(other).__name__} and then "
                f"{type(style).__name__}. Make the patterns narrower, or leave one out."
            )


def _refuse_whole_sequences(
    styles: Mapping[nn.Module, list[Style]], names: Mapping[nn.Module, str]
) -> None:
    """A stream that is whole on all ranks would be joined from copies: gradients would be wrong."""
    applied = [(module, style) for module, mine in styles.items() for style in mine]
    kinds = {type(style) for _, style in applied}
    if RowParallel not in kinds or kinds & {SplitSequence, VocabParallelEmbedding}:
        return
    for module, style in applied:
        for whole in style.covers(module) if isinstance(style, Replicated) else ():
            if isinstance(whole, nn.Embedding):
                raise ValueError(
                    "Expected SplitSequence() or VocabParallelEmbedding() where hidden states "
                    f"begin, got Replicated() for {names[whole] or 'the model'} and nothing that "
                    "gives each rank its part of the sequence. Change that style, or pass "
                    "sequence_parallel=False."
                )


def _shared_parameters(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """For each parameter that several modules share: the modules, and its name in each."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    return [group for group in places.values() if len(group) > 1]


def _share_again(
    shared: list[list[tuple[nn.Module, str]]], names: Mapping[nn.Module, str], region: Region
) -> None:
    """Make one parameter of each group again: what a style made of it, if one did."""
    for group in shared:
        made = [module._parameters[name] for module, name in group]
        one = max(made, key=is_dtensor)
        where = ", ".join(f"{names[module]}.{name}".removeprefix(".") for module, name in group)
        if len({parameter.placements for parameter in made if is_dtensor(parameter)}) > 1:
            raise ValueError(
                f"Expected styles that cut {where}, which are one parameter, along one dimension, "
                "got several. Make them two parameters."
            )
        for (module, name), parameter in zip(group, made, strict=True):
            module._parameters[name] = one
            if is_dtensor(one) and not is_dtensor(parameter):
                refuse = functools.partial(_refuse_part, where)
                adapt(module, region.adapted, where, views={name: refuse})


def _refuse_part(where: str, parameter: Tensor) -> Tensor:
    """Instead of a parameter that the running module expects whole."""
    raise ValueError(
        f"Expected all of {where}, which are one parameter, where it is used, got this rank's part "
        "of it, for another module's style cuts it. Keep it whole for both (SplitSequence() for an "
        "embedding, Replicated()), or cut it for both (VocabParallelEmbedding(), "
        "ColumnParallel(enter=False)) and compute the loss by VocabParallelLoss()."
    )
