"""This rank's part of a tensor, and the groups over which the parts of one are spread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mb_parallel.engines import is_dtensor, is_under_way

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, its own storage; a plain tensor itself.

    To write into a parameter, use `local(parameter).detach()`: a detached DTensor has another shard
    on the same storage, and autograd does not count writes to that one as the parameter's.
    """
    if not is_dtensor(tensor):
        return tensor
    shard: Any = tensor._local_tensor  # `to_local` leaves a collective under way under way
    return shard.wait() if is_under_way(shard) else shard


def on_meta(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A stand-in for this rank's shard, in its order of elements, without memory."""
    return torch.empty_like(local(tensor).detach(), dtype=dtype, device="meta")


def local_grad(parameter: Tensor) -> Tensor:
    """This rank's shard of the gradient, dense and with the strides of its parameter's.

    Autograd leaves a gradient in the layout that the backward pass made. That of a norm's weight
    under sequence parallelism, for instance, is still to be summed (Partial). It is first brought
    to its parameter's layout, and `parameter.grad` is replaced, so that this happens once and what
    is written into the shard is written into the gradient.
    """
    grad = parameter.grad
    assert grad is not None
    if grad.is_sparse:
        raise ValueError(
            "Expected dense gradients, got a sparse one. Build the nn.Embedding with sparse=False."
        )
    both = is_dtensor(parameter) and is_dtensor(grad)
    if both and grad.placements != parameter.placements:
        grad = grad.redistribute(parameter.device_mesh, parameter.placements)
        parameter.grad = grad
    shard, weight = local(grad), local(parameter)
    if shard.stride() != weight.stride() and not (shard.is_contiguous() and weight.is_contiguous()):
        with torch.no_grad():
            shard = torch.empty_like(weight, dtype=shard.dtype).copy_(shard)
            parameter.grad = shaped_like(shard, parameter)
    return shard


def zeros_like(
    parameter: Tensor, dtype: torch.dtype | None = None, *, on_host: bool = False
) -> Tensor:
    """Zeros sharded like `parameter`; torch's own for the meta device would import SymPy.

    Args:
        on_host: in memory of the host, pinned beside a GPU, so that kernels there reach it.
    """
    if parameter.is_meta:
        return parameter.new_zeros(parameter.shape, dtype=dtype)
    if on_host:
        return torch.zeros_like(parameter, dtype=dtype, device="cpu", pin_memory=parameter.is_cuda)
    return torch.zeros_like(parameter, dtype=dtype)


def shaped_like(shard: Tensor, parameter: Tensor) -> Tensor:
    """A shard of the size of `parameter`'s as what the parameter is: plain or a DTensor."""
    if not is_dtensor(parameter):
        return shard
    size, stride = parameter.shape, parameter.stride()
    return spread(shard, parameter.device_mesh, parameter.placements, size, stride)


def spread(
    shard: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Any],
    shape: Sequence[int],
    stride: Sequence[int] | None = None,
) -> DTensor:
    """A DTensor of this size, contiguous or with this stride, of which this rank has `shard`.

    Nothing is sent. Without the size torch would multiply the shard's, which is wrong where the
    ranks do not divide a dimension.
    """
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        shard,
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride() if stride is None else tuple(stride),
    )


def part_of(parameter: nn.Parameter, mesh: DeviceMesh, dims: Sequence[int]) -> nn.Parameter:
    """This rank's part of a parameter that all ranks hold alike, as a DTensor over `mesh`.

    Args:
        dims: what each axis of the mesh cuts; its ranks divide that dimension.
    """
    from torch.distributed.tensor import DTensor, Shard

    part = parameter.detach()
    for axis, dim in enumerate(dims):
        part = part.chunk(mesh.size(axis), dim)[mesh.get_local_rank(axis)]
    # A copy lets go of the other ranks' parts.
    part = part.clone(memory_format=torch.contiguous_format)
    sharded = DTensor.from_local(part, mesh, [Shard(dim) for dim in dims], run_check=False)
    return nn.Parameter(sharded, requires_grad=parameter.requires_grad)


def moved(placement: Any, by: int) -> Any:
    """A placement where `by` dimensions more lie in front of what it shards, or fewer, below 0."""
    if placement.is_replicate():
        return placement
    # FSDP2 strides over what tensor parallelism has sharded along the same dimension.
    strides = {"split_factor": placement.split_factor} if hasattr(placement, "split_factor") else {}
    return type(placement)(placement.dim + by, **strides)


def shard_groups(
    tensor: Tensor, dims: Iterable[int] | None = None
) -> tuple[dist.ProcessGroup, ...]:
    """The groups whose ranks hold different parts of `tensor`; none for a plain one.

    Args:
        dims: count only where one of these dimensions (not negative) is sharded. None: any.

    Raises:
        ValueError: a tensor that is still to be summed (Partial), which no parameter is.
    """
    if not is_dtensor(tensor):
        return ()
    wanted = None if dims is None else set(dims)
    groups = []
    for axis, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise ValueError(f"Expected a parameter sharded or replicated, got {placement}.")
        if placement.is_replicate() or tensor.device_mesh.size(axis) == 1:
            continue
        if wanted is None or getattr(placement, "dim", None) in wanted:
            groups.append(tensor.device_mesh.get_group(axis))
    return tuple(groups)


def one_for_same_ranks(groups: Iterable[tuple[dist.ProcessGroup, ...]]) -> list[tuple[Any, ...]]:
    """`groups` with one group, the first, for all that have the same ranks.

    torch treats equal meshes as the same one and caches results of operators with them, such as a
    detached parameter. So when there is a second mesh of the same sizes, some parameters are on the
    groups of the first, and which ones depends on what a rank has computed before.
    """
    groups = list(groups)
    first: dict[tuple[int, ...], dist.ProcessGroup] = {}
    one = {
        group: first.setdefault(tuple(dist.get_process_group_ranks(group)), group)
        for group in dict.fromkeys(group for mine in groups for group in mine)
    }
    return [tuple(one[group] for group in mine) for mine in groups]


@torch.no_grad()
def take_first(parameter: Tensor, groups: Sequence[dist.ProcessGroup]) -> None:
    """Write the first rank's weights into this rank's shard, group by group.

    Nothing happens on the meta device.
    """
    if parameter.is_meta or not groups:
        return
    for weight in _plain(local(parameter).detach()):
        first = weight.contiguous()
        for group in groups:
            # As bytes: gloo does not know 8-bit floats.
            dist.broadcast(first.view(-1).view(torch.uint8), group=group, group_src=0)
        weight.copy_(first)


def _plain(tensor: Tensor) -> list[Tensor]:
    """What a tensor is made of: codes and scales, or itself."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [plain for name in names for plain in _plain(getattr(tensor, name))]


def all_reduce_together(
    parts: Sequence[Tensor], groups: Sequence[tuple[dist.ProcessGroup, ...]]
) -> list[Tensor]:
    """Sum each tensor, all of one dtype, over each of its groups; a collective a group and round.

    Every rank of a group passes the tensors that it shares with the others in the same order.
    """
    parts, groups = list(parts), one_for_same_ranks(groups)
    for round_ in range(max(map(len, groups), default=0)):
        together: dict[dist.ProcessGroup, list[int]] = {}
        for index, mine in enumerate(groups):
            if round_ < len(mine):
                together.setdefault(mine[round_], []).append(index)
        for group, indices in together.items():
            flat = torch.cat([parts[index].reshape(-1) for index in indices])
            dist.all_reduce(flat, group=group)
            pieces = flat.split([parts[index].numel() for index in indices])
            for index, piece in zip(indices, pieces, strict=True):
                parts[index] = piece.view(parts[index].shape)
    return parts
