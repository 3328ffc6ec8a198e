"""Checks of an op's arguments: a call gives right numbers or raises a ValueError.

Every public function first checks by what is here whether it got tensors, and their devices and
dtypes; then it checks shapes itself. Behind it, the registered op gets contiguous tensors of one
device, in dtypes that it computes in.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mb_kernels.bins import Bins, offsets_list
from mb_kernels.runtime.registration import use_triton
from mb_kernels.targets.table import current_target

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INDICES = (torch.int32, torch.int64)


def require_dense(name: str, x: Tensor) -> None:
    """ValueError if ``x`` is no tensor, or of a sparse or another layout without strides."""
    if not isinstance(x, Tensor):
        raise ValueError(
            f"{name}: expected a tensor; got a {type(x).__name__}. Make it one by torch.as_tensor."
        )
    # Not while compiling: torch.compile cannot read `layout` in the backward of a user's Function.
    if not torch.compiler.is_compiling() and x.layout is not torch.strided:
        raise ValueError(f"{name}: expected a dense tensor; got {x.layout}. Use .to_dense().")


def require_floating(name: str, x: Tensor) -> None:
    """ValueError unless ``x`` is dense, of a dtype that kernels or reference compute in."""
    require_dense(name, x)
    if x.dtype not in DTYPES:
        raise ValueError(
            f"{name}: expected float32, bfloat16, float16 or float64; got {x.dtype}. "
            f"Cast it with .to(torch.bfloat16)."
        )


def require_integer(**numbers: object) -> None:
    """ValueError for a float, 2.0 too: ops take integers."""
    for name, number in numbers.items():
        if isinstance(number, float):
            raise ValueError(
                f"{name}: expected an integer; got {number!r}, a float. Round it, by math.ceil say."
            )


def require_constant(**numbers: object) -> None:
    """ValueError for a tensor that is to learn: as a number it would, in silence, have no part."""
    for name, number in numbers.items():
        if isinstance(number, Tensor) and number.requires_grad:
            raise ValueError(
                f"{name}: expected a number, which has no gradient; got a tensor that requires "
                "one. Multiply what it scales by it, or detach it."
            )


def require_device(what: str, first: Tensor, **others: Tensor | None) -> None:
    """ValueError unless every other tensor given is dense and on the device of ``first``."""
    for name, tensor in others.items():
        if tensor is not None:
            _require_beside(what, first, name, tensor)


def _require_beside(what: str, first: Tensor, name: str, tensor: Tensor) -> None:
    require_dense(name, tensor)
    if tensor.device != first.device:
        raise ValueError(
            f"{name}: expected it on {first.device}, where {what} is; got {tensor.device}. "
            f"Move it with .to({str(first.device)!r})."
        )


def require_same(what: str, first: Tensor, **others: Tensor) -> None:
    """ValueError unless all have the device and dtype of ``first``, and ops compute in it."""
    require_floating(what, first)
    for name, tensor in others.items():
        _require_beside(what, first, name, tensor)
        if tensor.dtype is not first.dtype:
            raise ValueError(
                f"{name}: expected {first.dtype}, the dtype of {what}; got {tensor.dtype}. "
                "Cast one of them (autocast does not reach into this op)."
            )


def require_exactly(
    name: str,
    x: Tensor,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | str] | None = None,
    like: Tensor | None = None,
) -> None:
    """ValueError unless ``x`` is dense, of one of ``dtypes`` and this shape, where ``like`` is.

    None: any shape, anywhere.
    """
    require_dense(name, x)
    shape, like = x.shape if shape is None else shape, x if like is None else like
    if x.dtype not in dtypes or tuple(x.shape) != tuple(shape) or x.device != like.device:
        raise ValueError(
            f"{name}: expected {' or '.join(map(str, dtypes))} {tuple(shape)} on {like.device}; "
            f"got {x.dtype} {tuple(x.shape)} on {x.device}."
        )


def require_float8(name: str, x: Tensor) -> None:
    """ValueError unless 8-bit products can be computed where ``x`` is: anywhere but on some GPUs.

    On a GPU results are bf16: products of codes reach beyond what fp16 holds.
    """
    require_float8_codes(x)
    if x.is_cuda and use_triton(x) and x.dtype is not torch.bfloat16:
        raise ValueError(f"{name}: expected bfloat16 for fp8 on a GPU; got {x.dtype}. Cast it.")


def require_float8_codes(x: Tensor) -> None:
    """ValueError where ``x`` is on a GPU that has no 8-bit floats."""
    if x.is_cuda and use_triton(x) and current_target(x.device).float8 is None:
        raise ValueError(
            f"fp8: expected a GPU that multiplies 8-bit floats, NVIDIA's from Ada and Hopper on "
            f"(compute capability 8.9) or AMD's MI300, MI350 and RX 9070 (gfx942, gfx950, gfx12); "
            f"got {torch.cuda.get_device_name(x.device)}. Leave fp8 out."
        )


def require_scalar(name: str, x: Tensor, like: Tensor) -> None:
    """ValueError unless ``x`` is an fp32 scalar tensor where ``like`` is."""
    if not isinstance(x, Tensor):
        got = repr(x)
    elif x.ndim or x.dtype is not torch.float32 or x.device != like.device:
        got = f"{x.dtype} {tuple(x.shape)} on {x.device}"
    else:
        return
    raise ValueError(
        f"{name}: expected a float32 scalar tensor on {like.device}; got {got}. "
        f"Make it by torch.tensor(1.0, device={str(like.device)!r})."
    )


def require_indices(what: str, first: Tensor, **indices: Tensor) -> None:
    """ValueError unless every tensor holds int32 or int64, on the device of ``first``."""
    for name, tensor in indices.items():
        _require_beside(what, first, name, tensor)
        if tensor.dtype not in _INDICES:
            raise ValueError(
                f"{name}: expected int32, as bin_tokens returns it, or int64; got {tensor.dtype}."
            )


def int32(*indices: Tensor) -> tuple[Tensor, ...]:
    """The indices in int32, as ops take them: coordinates of tensor descriptors have 32 bits."""
    # A cast that changes nothing takes the host 0.29 us, this test 0.12.
    return tuple(i if i.dtype is torch.int32 else i.int() for i in indices)


def require_bins(what: str, first: Tensor | None, bins: Bins) -> None:
    """``require_indices`` of the arrays of ``bins`` that ops read.

    Without ``first`` they have to be where the first of them is.
    """
    if not isinstance(bins, Bins):
        raise ValueError(
            f"bins: expected Bins; got a {type(bins).__name__}. Make them by bin_tokens of the ids."
        )
    if first is None:
        require_dense(what, bins.order_N)
        first = bins.order_N
    require_indices(
        what,
        first,
        **{
            "bins.order_N": bins.order_N,
            "bins.inverse_N": bins.inverse_N,
            "bins.offsets_E1": bins.offsets_E1,
        },
    )


def require_addressable(name: str, like: Tensor, shape: Sequence[int]) -> None:
    """ValueError if a matrix, of one expert say, is too large for 32-bit offsets within it.

    Kernels compute such offsets within the matrix, and within tiles of up to 128 rows or columns,
    which may reach beyond its edge.
    """
    rows, columns = shape[-2], shape[-1]  # a slice or ``max`` would take the host 0.2 us each
    if use_triton(like) and (rows * columns >= 2**31 or rows >= 2**24 or columns >= 2**24):
        raise ValueError(
            f"{name}: expected fewer than 2**31 elements in a matrix, and fewer than 2**24 rows "
            f"and columns; got {(rows, columns)}. Split it."
        )


def require_countable(what: str, count: int) -> None:
    """ValueError if ``count`` is beyond what kernels number in 32 bits.

    2**30, not 2**31: a program counts past the end of its last tile, and a ragged tensor descriptor
    (``language.memory.ragged_place``) has room for so many rows. Called where kernels are launched,
    so that a compiler sees no condition on a size.
    """
    if count >= 2**30:
        raise ValueError(f"{what}: expected fewer than 2**30 on a GPU; got {count}. Split them.")


def debug_offsets(offsets_E1: Tensor, rows: int) -> None:
    """Under ``MB_DEBUG=1``: ValueError unless the offsets are a division of the rows."""
    offsets_list(offsets_E1, rows)


def debug_expert_ids(ids: Tensor, num_experts: int) -> None:
    """Under ``MB_DEBUG=1``: ValueError unless each id is an expert's, or -1 or E for none."""
    wrong = ((ids < -1) | (ids > num_experts)).nonzero()
    if wrong.shape[0]:
        token, choice = wrong[0].tolist()
        raise ValueError(
            f"expert_ids_TK: expected 0 to {num_experts - 1}, or -1 or {num_experts} for a slot "
            f"that no expert takes; got {ids[token, choice].item()} at [{token}, {choice}], the "
            f"first of {wrong.shape[0]} such ids. Pass the ids of {num_experts} experts, and -1 "
            "for padding."
        )
