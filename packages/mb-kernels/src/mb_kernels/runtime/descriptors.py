"""Operands of the matrix kernels: aligned tensors, and tensor descriptors made without checks."""

from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# Whether ``_descriptor`` sets every field of a TensorDescriptor that has no default.
_FIELDS = fields(TensorDescriptor) if is_dataclass(TensorDescriptor) else ()
_KNOWN = [f.name for f in _FIELDS if f.default is MISSING] == [
    *("base", "shape", "strides", "block_shape")
]


def operand(x: Tensor) -> Tensor:
    """``x``, or a copy if it is not contiguous or not aligned as 16-byte loads need."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def matrices(w: Tensor, block: Sequence[int]) -> TensorDescriptor:
    """Descriptor of a stack of matrices [count, rows, columns], bounds-checked in each.

    In torch the stride of a dimension of size 1 may be any number, but the hardware checks it.
    """
    count, rows, columns = w.shape
    strides = [
        w.stride(0) if count > 1 else rows * columns,
        w.stride(1) if rows > 1 else columns,
        1,
    ]
    return _descriptor(w, [count, rows, columns], strides, list(block))


def side_by_side(w: Tensor, block: Sequence[int]) -> TensorDescriptor:
    """Descriptor of matrices [count, rows, 2C] as [count, 2, rows, C], bounds-checked in each."""
    count, rows, columns = w.shape
    half = columns // 2
    strides = [rows * columns, half, columns, 1]
    return _descriptor(w, [count, 2, rows, half], strides, list(block))


def ragged(x: Tensor, block: Sequence[int], parts: int | None = None) -> TensorDescriptor:
    """Triton's ``create_ragged_descriptor`` of x [N, columns], or [N, parts, columns / parts].

    The same descriptor, made from numbers: Triton's function makes views of x.
    """
    columns = x.shape[1]
    tail = [columns] if parts is None else [parts, columns // parts]
    strides = [columns, 1] if parts is None else [columns, columns // parts, 1]
    return _descriptor(
        x,
        [0x7FFF0000, 0x7FFF0000, 0x40000000, *tail],
        [2**34 - columns, columns, *strides],
        [1, 1, *block],
    )


def _descriptor(
    base: Tensor, shape: list[int], strides: list[int], block: list[int]
) -> TensorDescriptor:
    """A TensorDescriptor without its checks, which take the host twice as long as the rest.

    ``operand`` and widths that are multiples of 16 satisfy them, and the driver checks again.
    """
    if not _KNOWN:
        return TensorDescriptor(base, shape, strides, block)
    descriptor = object.__new__(TensorDescriptor)
    descriptor.base = base
    descriptor.shape = shape
    descriptor.strides = strides
    descriptor.block_shape = block
    return descriptor
