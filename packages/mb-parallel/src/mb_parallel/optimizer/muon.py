"""Muon: matrices move along the orthogonal matrix nearest to their momentum; AdamW for the rest.

By Jordan et al. (kellerjordan.github.io/posts/muon), with the step size of Moonlight (arXiv
2502.16982): 0.2 sqrt(max(rows, columns)) times the learning rate, so that updates are as large as
AdamW's and both share rate and decay. Experts [E, F, D] are E matrices, orthogonalised in one
batched Newton-Schulz iteration. A weight may hold several matrices among its rows, as a fused
projection of queries, keys and values does: each is orthogonalised for itself.

Communication: the iteration needs whole matrices. Experts that lie whole on their rank (sharded by
expert: expert parallelism, FSDP over dimension 0) need none. A matrix in parts is gathered from its
shards in `ns_dtype`, 2 bytes a parameter in bf16, and every rank that holds a part iterates on all
of it. Around the iteration each number is read and written once before it and once after it
(`mb_kernels.muon_momentum`, `muon_step`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mb_kernels
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from mb_parallel.arguments import floating
from mb_parallel.optimizer.adamw import AdamW
from mb_parallel.optimizer.shards import local, local_grad, shaped_like
from mb_parallel.optimizer.working_copies import WorkingCopies

# Jordan's quintic: singular values go to about 1 in five iterations, from 0.7 to 1.2.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(AdamW):
    """Muon for groups with `muon=True`, AdamW for those without; see `muon_groups`.

    Args:
        params: groups; those with `muon=True` hold matrices [.., rows, columns] in fp32. With
            `fused=(a, b, ..)` they hold one matrix for each number: of every a + b + .. rows the
            first a are the first matrix's, the next b the second's. Gate over up is (F, F).
        lr, betas, eps, weight_decay, state_dtype, working_copies: as for `AdamW`; rate and decay
            serve both.
        momentum: Nesterov's.
        ns_steps: iterations of Newton-Schulz.
        ns_dtype: that they run in; not fp16, of too small a range for gradients.

    State of a matrix: `momentum_buffer`, fp32.

    Raises:
        ValueError: a number or dtype outside its range; a vector, or a 16-bit parameter, in a group
            of Muon's; rows that `fused` does not divide.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        momentum: float = 0.95,
        ns_steps: int = 5,
        ns_dtype: torch.dtype = torch.bfloat16,
        state_dtype: torch.dtype = torch.float32,
        working_copies: WorkingCopies | None = None,
    ) -> None:
        floating(ns_dtype=ns_dtype)
        if ns_dtype is torch.float16:
            raise ValueError(
                "Expected ns_dtype to be torch.bfloat16 or wider, got torch.float16, in which "
                "gradients of 1e-7 are 0."
            )
        self.ns_dtype = ns_dtype
        self._more_of_groups = {"muon": False, "momentum": momentum, "ns_steps": ns_steps,
                                "fused": ()}  # fmt: skip
        self._matrices: set[Tensor] = set()
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            state_dtype=state_dtype,
            working_copies=working_copies,
        )

    def check(self, group: dict[str, Any]) -> None:
        super().check(group)
        momentum, ns_steps = group["momentum"], group["ns_steps"]
        if not (0 <= momentum < 1 and ns_steps >= 1):
            raise ValueError(
                "Expected momentum from 0 up to but not 1 and ns_steps of at least 1, got "
                f"momentum={momentum}, ns_steps={ns_steps}."
            )
        for parameter in group["params"] if group["muon"] else ():
            if parameter.ndim < 2 or parameter.dtype is not torch.float32:
                raise ValueError(
                    "Expected matrices in fp32 in a group with muon=True, got "
                    f"{tuple(parameter.shape)} in {parameter.dtype}. See muon_groups."
                )
            if group["fused"] and parameter.shape[-2] % sum(group["fused"]):
                raise ValueError(
                    f"Expected rows in multiples of {' + '.join(map(str, group['fused']))}, "
                    f"by `fused` of their group, got {tuple(parameter.shape)}."
                )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["muon"]:
            self._matrices.update(group["params"])

    def planned_state(self, parameter: Tensor) -> dict[str, Tensor]:
        if parameter in self._matrices:
            return {"momentum_buffer": torch.empty_like(local(parameter), device="meta")}
        return super().planned_state(parameter)

    def make_state(self, parameter: Tensor) -> dict[str, Tensor]:
        if parameter in self._matrices:
            return {"momentum_buffer": torch.zeros_like(parameter)}
        return super().make_state(parameter)

    def update(
        self, group: dict[str, Any], parameters: list[Tensor], divisor: Tensor, skip: Tensor
    ) -> None:
        if not group["muon"]:
            super().update(group, parameters, divisor, skip)
            return
        lr = float(group["lr"])
        steps, fused = group["ns_steps"], group["fused"]
        for parameter in parameters:
            direction = mb_kernels.muon_momentum(
                local_grad(parameter),
                local(self.state[parameter]["momentum_buffer"]),
                momentum=group["momentum"],
                grad_scale=divisor,
                found_inf=skip,
                dtype=self.ns_dtype,
            )
            copy = self._copies.get(parameter)
            mb_kernels.muon_step(
                local(parameter).detach(),
                _update(direction, parameter, steps, fused),
                None if copy is None else local(copy).detach(),
                size=lr,
                decay=lr * group["weight_decay"],
                found_inf=skip,
            )
        self._copies.written(parameters)


def _update(shard: Tensor, parameter: Tensor, steps: int, fused: tuple[int, ...]) -> Tensor:
    """This rank's shard of the update whose direction's shard on this rank is `shard`."""
    whole = shaped_like(shard, parameter)
    if not isinstance(whole, DTensor):
        return _matrix_by_matrix(whole, steps, fused)
    # Shards of leading dimensions are whole matrices and stay; shards of matrices come together.
    lead = parameter.ndim - 2
    kept = [
        placement if getattr(placement, "dim", lead) < lead else Replicate()
        for placement in whole.placements
    ]
    matrices = whole.redistribute(placements=kept)
    done = DTensor.from_local(
        _matrix_by_matrix(local(matrices), steps, fused),
        whole.device_mesh,
        kept,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    return local(done.redistribute(placements=whole.placements))


def _matrix_by_matrix(x: Tensor, steps: int, fused: tuple[int, ...]) -> Tensor:
    """Updates of [..., rows, columns] for a rate of 1; `fused` as in `Muon`."""
    if not fused:
        return newton_schulz(x, steps, size=0.2 * max(x.shape[-2:]) ** 0.5)
    runs = x.unflatten(-2, (-1, sum(fused))).split(fused, dim=-2)  # [..., repeats, rows, columns]
    done = [_matrix_by_matrix(run.flatten(-3, -2), steps, ()).view(run.shape) for run in runs]
    return torch.cat(done, dim=-2).view(x.shape)


def newton_schulz(x: Tensor, steps: int, *, size: float = 1.0) -> Tensor:
    """The orthogonal matrices near [..., rows, columns] times `size`, by batched products."""
    if not x.numel():
        return x
    a, b, c = _COEFFICIENTS
    shape, tall = x.shape, x.shape[-2] > x.shape[-1]
    x = x.reshape(-1, *shape[-2:])
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for step in range(1, steps + 1):
        scale = size if step == steps else 1.0
        gram = x.mT @ x if tall else x @ x.mT
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, *((x, factor) if tall else (factor, x)), beta=a * scale, alpha=scale)
    return x.reshape(shape)
