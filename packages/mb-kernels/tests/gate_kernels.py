"""Kernels for test_targets.py: one sound GEMM, and one kernel for each way to fail the gate."""

import triton
import triton.language as tl
from mb_kernels.targets import GateCase, Target


@triton.jit
def sound_kernel(a_ptr, b_ptr, c_ptr, K, SIZE: tl.constexpr):
    rows = tl.arange(0, SIZE)[:, None]
    columns = tl.arange(0, SIZE)[None, :]
    acc = tl.zeros((SIZE, SIZE), tl.float32)
    for k in range(0, K, SIZE):
        a = tl.load(a_ptr + rows * K + k + columns)
        b = tl.load(b_ptr + (k + rows) * SIZE + columns)
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + rows * SIZE + columns, acc)


@triton.jit
def spilling_kernel(x_ptr, y_ptr, N, SIZE: tl.constexpr):
    # Two SIZE x SIZE fp32 arrays live across a loop, in one warp's registers.
    offsets = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(x_ptr + offsets)
    y = tl.load(y_ptr + offsets)
    for _ in range(N):
        x, y = x * y, y + x
    tl.store(x_ptr + offsets, x)
    tl.store(y_ptr + offsets, y)


@triton.jit
def scalar_gemm_kernel(a_ptr, b_ptr, c_ptr, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)
    acc = tl.zeros((SIZE, SIZE), tl.float32)
    for k in range(SIZE):
        column = tl.load(a_ptr + offsets * SIZE + k)
        row = tl.load(b_ptr + k * SIZE + offsets)
        acc += column[:, None].to(tl.float32) * row[None, :]
    tl.store(c_ptr + offsets[:, None] * SIZE + offsets[None, :], acc)


@triton.jit
def forgotten_kernel(x_ptr):
    tl.store(x_ptr, 0.0)


def gate_cases(target: Target) -> list[GateCase]:
    gemm = {"a_ptr": "*fp16", "b_ptr": "*fp16", "c_ptr": "*fp32", "K": "i32"}
    # Other 8-bit floats than those of `to_float8`; an MI300's are cast to 16 bits.
    other = "*fp8e4nv" if target.backend == "hip" else "*fp8e5"
    small_gemm = {"a_ptr": "*fp16", "b_ptr": "*fp16", "c_ptr": "*fp32"}
    return [
        GateCase(
            name="sound",
            kernel=sound_kernel,
            signature=gemm,
            constexprs={"SIZE": 64},
            multiples_of_16=("K",),
            is_gemm=True,
        ),
        GateCase(
            name="spilling",
            kernel=spilling_kernel,
            signature={"x_ptr": "*fp32", "y_ptr": "*fp32", "N": "i32"},
            constexprs={"SIZE": 128 if target.wave_size == 64 else 64},
            num_warps=1,
        ),
        GateCase(
            name="too_much_shared",
            kernel=sound_kernel,
            signature=gemm,
            constexprs={"SIZE": 128},
            num_warps=8,
            num_stages=6,
            multiples_of_16=("K",),
            is_gemm=True,
        ),
        GateCase(
            name="no_matrix_instruction",
            kernel=scalar_gemm_kernel,
            signature=small_gemm,
            constexprs={"SIZE": 16},
            is_gemm=True,
        ),
        GateCase(
            name="other_float8",
            kernel=sound_kernel,
            signature=gemm | {"a_ptr": other, "b_ptr": other},
            constexprs={"SIZE": 64},
            multiples_of_16=("K",),
            is_gemm=True,
        ),
        GateCase(
            name="wrong_argument",
            kernel=scalar_gemm_kernel,
            signature=small_gemm,
            constexprs={"SIZES": 16},
        ),
    ]
