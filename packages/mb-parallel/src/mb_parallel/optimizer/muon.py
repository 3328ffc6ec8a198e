"""Muon: matrices move along the orthogonal matrix nearest to their momentum; AdamW for the rest.

By Jordan et al. (kellerjordan.github.io/posts/muon), with the step size of Moonlight (arXiv
2502.16982): 0.2 sqrt(max(rows, columns)) times the learning rate, so that updates are as large as
AdamW's and both share rate and decay. Experts [E, F, D] are E matrices, orthogonalised in one
batched Newton-Schulz iteration. A weight may hold several matrices among its rows, as a fused
projection of queries, keys and values does: each is orthogonalised for itself.

Communication: the iteration needs whole matrices. Experts that are whole on their rank (expert
parallelism, or FSDP over dimension 0) need none. Where ranks hold parts of matrices, those of one
shape, from several layers, are dealt out among these ranks: each gets some whole ones, iterates on
them and sends the parts back, which makes two exchanges in `ns_dtype`. A single matrix, or one that
two axes of the mesh cut, is gathered on all of these ranks, and each iterates on it. Each number is
read and written once before the iteration and once after it (`mb_kernels.muon_momentum`,
`muon_step`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, cycle, islice
from numbers import Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import mb_kernels
import torch
from mb_layers.tensors import without_autocast
from torch import Tensor

from mb_parallel.arguments import above_0, at_least_1, floating
from mb_parallel.engines import is_dtensor
from mb_parallel.optimizer.adamw import AdamW
from mb_parallel.optimizer.working_copies import WorkingCopies
from mb_parallel.shards import local, local_grad, moved, on_meta, spread

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

Coefficients: TypeAlias = tuple[float, float, float]

# Of the iteration x -> a x + b G x + c G^2 x, with the Gram matrix G = x x^T: a triple (a, b, c)
# for each of the first steps, and those of the steps behind them, by turns. Five steps take
# singular values from 0.01 to 1 to 0.68 to 1.14, 0.97 to 1.04 and 0.87 to 1.13, eight of the last
# to 1.
_NAMED: Mapping[str, tuple[Sequence[Coefficients], Sequence[Coefficients]]] = MappingProxyType({
    # Jordan's own, kellerjordan.github.io/posts/muon.
    "simple": ((), [(3.4445, -4.7750, 2.0315)]),
    # You's, from the records of github.com/KellerJordan/modded-nanogpt; Megatron Core's default.
    "quintic": ((), [
        (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012),
    ]),
    # Polar Express, Amsel et al., arXiv 2505.16932.
    "polar_express": ([
        (8.2051, -22.9019, 16.4607), (4.0664, -2.8612, 0.5184), (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853), (2.2779, -1.6198, 0.3985), (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
    ], [(1.8750, -1.2500, 0.3750)]),
})  # fmt: skip
# Numbers of parameters of one shape that are orthogonalised in one batch, which takes 1.2 GB. What
# one of four GPUs holds of a dMoE-125M takes an H100 25 ms so, 12 of them the host's; 27 to 31, all
# of it the host's, with half as many; 25 and 7 with twice as many, but 2.9 GB (mb-train's
# benchmarks/results/2026-11-26-h100.md).
_TOGETHER = 2**27


class Muon(AdamW):
    """Muon for groups with `muon=True`, AdamW for those without; see `muon_groups`.

    Args:
        params: groups; those with `muon=True` hold matrices [.., rows, columns] in fp32. With
            `fused=(a, b, ..)` they hold one matrix for each number: of every a + b + .. rows the
            first a are the first matrix's, the next b the second's. Gate over up is (F, F).
        lr, betas, eps, weight_decay, state_dtype, working_copies: as for `AdamW`; rate and decay
            serve both.
        momentum: of the gradients.
        nesterov: a matrix moves along where the momentum will be, a step ahead.
        ns_steps: iterations of Newton-Schulz.
        ns_coefficients: of these, "simple", "quintic" or "polar_express" (Megatron Core's names);
            or a triple (a, b, c) for all of them, as torch's Muon takes it.
        scale: of a step, in units of sqrt(max(rows, columns)) times the learning rate.
        ns_dtype: that they run in; not fp16, of too small a range for gradients.

    State of a matrix: `momentum_buffer`, fp32.

    Raises:
        ValueError: parameters without groups; a number or dtype outside its range; a vector, or a
            16-bit parameter, in a group of Muon's; rows that `fused` does not divide.
    """

    # What torch's Muon calls the size of these steps, at a `scale` of 0.2.
    _fixed = MappingProxyType({**AdamW._fixed, "adjust_lr_fn": "match_rms_adamw"})

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_coefficients: str | Coefficients = "simple",
        scale: float = 0.2,
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
        constants = {
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "ns_coefficients": ns_coefficients,
            "scale": scale,
        }
        params = list(params)
        self._matrices: set[Tensor] = set()
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            state_dtype=state_dtype,
            working_copies=working_copies,
            group_defaults={"muon": False, "fused": (), **constants},
        )
        if not any(isinstance(group, dict) for group in params):
            raise ValueError(
                "Expected groups, those of matrices with muon=True, got parameters alone, all of "
                "which AdamW would train. Make groups by muon_groups(model, weight_decay)."
            )

    def check(self, group: dict[str, Any]) -> None:
        super().check(group)
        momentum = group["momentum"]
        at_least_1(ns_steps=group["ns_steps"])
        coefficients_of(group["ns_coefficients"], 1)
        above_0(scale=group["scale"])
        if not (isinstance(momentum, Real) and 0 <= momentum < 1):
            raise ValueError(f"Expected momentum from 0 up to but not 1, got {momentum!r}.")
        for rows in group["fused"]:
            at_least_1(rows_of_fused=rows)
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
            return {"momentum_buffer": on_meta(parameter)}
        return super().planned_state(parameter)

    def make_state(self, parameter: Tensor) -> dict[str, Tensor]:
        if parameter in self._matrices:
            return {"momentum_buffer": torch.zeros_like(parameter)}
        return super().make_state(parameter)

    def rehearse(
        self, group: dict[str, Any], parameters: list[Tensor], grads: list[Tensor]
    ) -> None:
        if not group["muon"]:
            super().rehearse(group, parameters, grads)

    def update(
        self, group: dict[str, Any], parameters: list[Tensor], divisor: Tensor, skip: Tensor
    ) -> None:
        if not group["muon"]:
            super().update(group, parameters, divisor, skip)
            return
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        coefficients = coefficients_of(group["ns_coefficients"], group["ns_steps"])
        for alike in _batches(parameters):
            directions = [
                mb_kernels.muon_momentum(
                    local_grad(parameter),
                    local(self.state[parameter]["momentum_buffer"]),
                    momentum=group["momentum"],
                    nesterov=group["nesterov"],
                    grad_scale=divisor,
                    found_inf=skip,
                    dtype=self.ns_dtype,
                )
                for parameter in alike
            ]
            updates = _updates(directions, alike, coefficients, group["fused"])
            for parameter, update in zip(alike, updates, strict=True):
                copy = self._copies.get(parameter)
                mb_kernels.muon_step(
                    local(parameter).detach(),
                    update,
                    None if copy is None else local(copy).detach(),
                    size=lr * group["scale"],
                    decay=lr * decay,
                    found_inf=skip,
                )
        self._copies.written(parameters)


def _batches(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters of one shape and one layout together, up to _TOGETHER numbers a rank.

    Alike on all ranks: the collectives of `_updates` are in this order.
    """
    alike: dict[tuple[torch.Size, Hashable], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        layout: Hashable = parameter.device
        if is_dtensor(parameter):
            layout = parameter.device_mesh, parameter.placements
        alike[parameter.shape, layout].append(parameter)
    for (shape, _), those in alike.items():
        one, ranks = those[0], 1
        if is_dtensor(one) and (axis := _dealt_over(one)) is not None:
            ranks = one.device_mesh.size(axis)
        count = max(_TOGETHER * ranks // max(math.prod(shape), 1), 1)
        for first in range(0, len(those), count):
            yield those[first : first + count]


def _updates(
    shards: list[Tensor],
    parameters: list[Tensor],
    coefficients: Sequence[Coefficients],
    fused: tuple[int, ...],
) -> Iterable[Tensor]:
    """This rank's shards of the updates whose directions' shards on this rank are `shards`."""
    one, *others = parameters
    stacked = torch.stack(shards) if others else shards[0][None]
    if not is_dtensor(one):
        return _matrix_by_matrix(stacked, coefficients, fused).unbind()
    from torch.distributed.tensor import Replicate, Shard

    placements = [moved(placement, 1) for placement in one.placements]
    size = (len(shards), *one.shape)
    whole = spread(stacked, one.device_mesh, placements, size)
    # Matrices in parts come together: each on one rank, or, where that cannot be, on all.
    axis = _dealt_over(one) if others else None
    turned = [
        (Shard(0) if index == axis else Replicate()) if _cuts(one, placement) else placements[index]
        for index, placement in enumerate(one.placements)
    ]
    matrices = whole.redistribute(placements=turned)
    done = _matrix_by_matrix(local(matrices).contiguous(), coefficients, fused)
    whole = spread(done, one.device_mesh, turned, size)
    return local(whole.redistribute(placements=placements)).contiguous().unbind()


def _dealt_over(parameter: DTensor) -> int | None:
    """The axis of the mesh over which alike matrices are dealt out: the only one that cuts them."""
    from torch.distributed.tensor import Shard

    cutting = [axis for axis, p in enumerate(parameter.placements) if _cuts(parameter, p)]
    alone = len(cutting) == 1 and isinstance(parameter.placements[cutting[0]], Shard)
    return cutting[0] if alone else None


def _cuts(parameter: DTensor, placement: Placement) -> bool:
    """Whether ranks have parts of matrices, other than whole ones of a stack."""
    return getattr(placement, "dim", -1) >= parameter.ndim - 2


def _matrix_by_matrix(
    x: Tensor, coefficients: Sequence[Coefficients], fused: tuple[int, ...]
) -> Tensor:
    """Updates of [..., rows, columns] for a rate and a scale of 1; `fused` as in `Muon`."""
    if not fused:
        return newton_schulz(x, coefficients, size=max(x.shape[-2:]) ** 0.5)
    runs = x.unflatten(-2, (-1, sum(fused))).split(fused, dim=-2)  # [..., repeats, rows, columns]
    done = [
        _matrix_by_matrix(run.flatten(-3, -2), coefficients, ()).view(run.shape) for run in runs
    ]
    return torch.cat(done, dim=-2).view(x.shape)


def coefficients_of(said: str | Coefficients, steps: int) -> list[Coefficients]:
    """The triple of each step.

    Args:
        said: as `Muon` takes them.

    Raises:
        ValueError: neither a name that is known nor three numbers.
    """
    if isinstance(said, str) and said in _NAMED:
        first, then = _NAMED[said]
        return list(islice(chain(first, cycle(then)), steps))
    three = isinstance(said, tuple | list) and len(said) == 3
    if not three or not all(isinstance(number, Real) for number in said):
        raise ValueError(
            f"Expected ns_coefficients to be one of {', '.join(_NAMED)}, or three numbers, got "
            f"{said!r}."
        )
    return [tuple(said)] * steps


def newton_schulz(x: Tensor, coefficients: Sequence[Coefficients], *, size: float = 1.0) -> Tensor:
    """The orthogonal matrices near [..., rows, columns] times `size`, by batched products.

    A step takes x to p(G) x, with p(G) = a + b G + c G^2 of the Gram matrix G = x x^T (x^T x of a
    tall x) and a triple of `coefficients`. The next step's Gram matrix is p(G) G p(G): two steps
    are one product with x, and what is between them is small and symmetric. A third from the same
    G would not do: in 16 bits small eigenvalues of G may be negative, and each step has them grow.
    """
    if not x.numel():
        return x
    shape, tall = x.shape, x.shape[-2] > x.shape[-1]
    x = x.reshape(-1, *shape[-2:])
    for step in range(0, len(coefficients), 2):
        one, *other = coefficients[step : step + 2]
        rows = x.mT if tall else x
        gram = mb_kernels.symmetric_matmul(rows, rows)
        if step == 0:  # of x over its norm, whose square is the trace
            norm = gram.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=torch.float32)
            norm = norm.clamp(min=1e-14)[:, None, None].to(x.dtype)
            gram = gram / norm
        factor = _polynomial(gram, one)
        if other:
            gram = mb_kernels.symmetric_matmul(mb_kernels.symmetric_matmul(factor, gram), factor)
            factor = mb_kernels.symmetric_matmul(_polynomial(gram, *other), factor)
        if step == 0:
            factor = factor * norm.rsqrt()
        last = step + 2 >= len(coefficients)
        with without_autocast(x):  # a step may be taken where a forward pass was
            x = torch.baddbmm(
                x, *((x, factor) if tall else (factor, x)), beta=0, alpha=size if last else 1.0
            )
    return x.reshape(shape)


def _polynomial(gram: Tensor, coefficients: Coefficients) -> Tensor:
    a, b, c = coefficients
    return mb_kernels.symmetric_matmul(gram, gram, gram, alpha=c, beta=b, diagonal=a)
