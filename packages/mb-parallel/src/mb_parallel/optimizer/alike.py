"""Whether the ranks that hold a model together step it alike.

Ranks with another rate or loss scale, or without some of the parameters, would train replicas that
part ways, or a model of which each shard has a rate of its own, and nothing would say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mb_parallel.mesh import ParallelMesh
from mb_parallel.optimizer.scaler import GradScaler
from mb_parallel.world import check_same_along

_COMPARED = "_mb_compared"  # on an optimizer, as the ranks had it


def check_alike(
    optimizers: Sequence[torch.optim.Optimizer],
    mesh: ParallelMesh | None,
    *,
    max_norm: float,
    scaler: GradScaler | None,
) -> None:
    """Compare, before the first step of each optimizer, what the ranks of a stage step with.

    That is an exchange over the host, and of rates and scales on the device the host waits for
    them: once. What a schedule makes of a rate later is not compared.

    Raises:
        ValueError: on all of these ranks, if some step otherwise; names what differs.
    """
    if mesh is None or all(hasattr(one, _COMPARED) for one in optimizers):
        return
    axes = [axis for axis in map(mesh.axis, ("dp", "tp")) if axis is not None]
    on_gpu = any(axis.device_type == "cuda" for axis in axes)
    if on_gpu and torch.cuda.is_current_stream_capturing():
        return  # nothing can be read
    alike: dict[str, Any] = {"max_norm": max_norm}
    for number, one in enumerate(optimizers):
        name = f"optimizers[{number}]"
        alike[name] = type(one).__name__
        alike |= _settings(f"{name}.defaults", one.defaults)
        for place, group in enumerate(one.param_groups):
            held = f"{name}.param_groups[{place}]"
            numbers = sum(p.numel() for p in group["params"])
            alike[f"{held}.params"] = f"{len(group['params'])} tensors, {numbers} numbers"
            alike |= _settings(held, group)
    alike["scaler"] = scaler is not None
    if scaler is not None:
        alike |= _settings("scaler", {key.strip("_"): value for key, value in vars(scaler).items()})
    check_same_along(
        alike,
        "what clip_and_step is given",
        [axis.get_group() for axis in axes],
        note="Give the optimizer and the loss scale the same parameters and rates on every rank.",
    )
    for one in optimizers:
        setattr(one, _COMPARED, True)


def _settings(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What can be compared by its looks, by the name under which it is found."""
    kinds = int | float | str | tuple | list | Tensor | None
    return {
        f"{name}.{key}": _shown(value)
        for key, value in settings.items()
        if key != "params" and isinstance(value, kinds)
    }


def _shown(value: Any) -> Any:
    """A value without the devices of its tensors, which are each rank's own."""
    if isinstance(value, tuple | list):
        return [_shown(item) for item in value]
    return value.tolist() if isinstance(value, Tensor) else value
