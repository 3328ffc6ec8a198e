"""How a program of a kernel over many tensors finds its tensor: see ``runtime.tables``."""

import triton
import triton.language as tl


@triton.jit
def find(ends_ptr, N: tl.constexpr):
    """(tensor, place within it) of this program; ends_ptr [N]: programs up to and with each."""
    program = tl.program_id(0)
    ends = tl.load(ends_ptr + tl.arange(0, N))
    before = ends <= program
    return tl.sum(before.to(tl.int32)), program - tl.max(tl.where(before, ends, 0))


@triton.jit
def pointer(column_ptr, tensor, TYPE, ALIGNED):
    """To the tensor whose address stands in a column of the table."""
    address = tl.load(column_ptr + tensor).to(tl.pointer_type(TYPE))
    # A hint on the pointer: one on the integer it is made from would be lost.
    return tl.multiple_of(address, 16) if ALIGNED else address
