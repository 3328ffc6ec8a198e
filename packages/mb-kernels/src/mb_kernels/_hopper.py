"""Matrix kernels whose epilogue runs beside the next product: for Hopper, in Gluon.

In the portable kernels one set of warps multiplies, then works through the epilogue while the
matrix units idle. Here a program has two sets:

    multiply   8 warps: start the copies of operand blocks some steps ahead, issue the matrix
               instructions, leave each finished tile in shared memory
    epilogue   4 warps: everything between a finished tile and global memory

They meet at barriers in shared memory: operand blocks are ``ready``, a tile is ``full`` or
``drained``. The tile passes in the dtype of the tensors: rounded where torch's eager products are.

`multiply` is one pipeline for every product. What differs is where an item's blocks lie, so an op
brings a pair of functions: LOCATE gives an item's number of steps and four coordinates, COPY starts
the copies of one step there.

Letters: N rows, D hidden, F ffn width, E experts; P and Q columns of the operands of a weight
gradient.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor as PlainDescriptor

from mb_kernels._activation import activate_with_derivative
from mb_kernels._launch import launch, matrices, programs, ragged
from mb_kernels._schedule import locate, piece
from mb_kernels.activation import base_function, is_glu
from mb_kernels.targets import TILES, GateCase, Target, Tile

_MULTIPLY_WARPS = gl.constexpr(8)
_EPILOGUE_WARPS = gl.constexpr(4)
# Columns of a tile are handed over in pieces, so that an epilogue holds few of them in registers.
# In fewer pieces that of dact spills.
_PIECES = gl.constexpr(8)
# Of 168 for each thread; `multiply` keeps 160, of which 128 hold the accumulator.
_EPILOGUE_REGISTERS = gl.constexpr(176)
_BILLION = gl.constexpr(0x40000000)  # of ragged descriptors, see triton.tools.ragged_tma


@gluon.jit
def _advance(
    stage, item, step, steps, c0, c1, c2, c3, a, b, index_ptr, a_ring, b_ring, ready, items,
    LOCATE: gl.constexpr, COPY: gl.constexpr, BLOCK_K: gl.constexpr, STEPS: gl.constexpr,
    TILES_A: gl.constexpr, TILES_B: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Start the copies of one step into ``stage``; the step and the item that follow it."""
    if item < items:
        barrier = ready.index(stage)
        mbarrier.expect(barrier, a.block_type.nbytes + b.block_type.nbytes)
        COPY(
            a, b, a_ring.index(stage), b_ring.index(stage), barrier, step * BLOCK_K, c0, c1, c2, c3
        )
        step += 1
        if step == steps:
            step = 0
            item += gl.num_programs(0)
            steps, c0, c1, c2, c3 = LOCATE(
                gl.minimum(item, items - 1), items, index_ptr, STEPS, TILES_A, TILES_B, GROUP_M
            )
    return item, step, steps, c0, c1, c2, c3


@gluon.jit
def multiply(
    a,  # tensor descriptor of blocks [.., BLOCK_M, BLOCK_K]
    b,  # tensor descriptor of blocks [.., BLOCK_K, BLOCK_N]
    index_ptr,  # what LOCATE reads
    a_ring,
    b_ring,
    tile,
    ready,
    full,
    drained,
    items,
    LOCATE: gl.constexpr,
    COPY: gl.constexpr,
    A_TRANSPOSED: gl.constexpr,  # blocks of a are [.., BLOCK_K, BLOCK_M]
    BLOCK_K: gl.constexpr,
    STEPS: gl.constexpr,  # this one and the rest are for LOCATE
    TILES_A: gl.constexpr,
    TILES_B: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """Sums of a block times b block over the steps of every item of this program, into ``tile``."""
    STAGES: gl.constexpr = b_ring.shape[0]
    BLOCK_M: gl.constexpr = tile.shape[1]
    BLOCK_N: gl.constexpr = _PIECES * tile.shape[2]
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[_MULTIPLY_WARPS, 1], instr_shape=[16, BLOCK_N, 16]
    )
    first = gl.program_id(0)
    if first < items:
        # The copies run STAGES - 1 steps ahead of the products, into the next item too, and so
        # have an item and a step of their own.
        item = first
        step = 0
        steps, c0, c1, c2, c3 = LOCATE(item, items, index_ptr, STEPS, TILES_A, TILES_B, GROUP_M)
        for i in gl.static_range(STAGES - 1):
            item, step, steps, c0, c1, c2, c3 = _advance(
                i, item, step, steps, c0, c1, c2, c3, a, b, index_ptr, a_ring, b_ring, ready,
                items, LOCATE, COPY, BLOCK_K, STEPS, TILES_A, TILES_B, GROUP_M,
            )  # fmt: skip
        stage = 0
        before = STAGES - 1
        phase = 0
        parity = 1
        for current in range(first, items, gl.num_programs(0)):
            products, _, _, _, _ = LOCATE(
                current, items, index_ptr, STEPS, TILES_A, TILES_B, GROUP_M
            )
            acc = warpgroup_mma_init(gl.zeros((BLOCK_M, BLOCK_N), gl.float32, ACC))
            for product in range(products):
                mbarrier.wait(ready.index(stage), phase)
                if A_TRANSPOSED:
                    a_block = a_ring.index(stage).reshape((BLOCK_K, BLOCK_M)).permute((1, 0))
                else:
                    a_block = a_ring.index(stage)
                b_block = b_ring.index(stage).reshape((BLOCK_K, BLOCK_N))
                acc = warpgroup_mma(a_block, b_block, acc, use_acc=product > 0, is_async=True)
                acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[acc]))
                # The product before this one is done: its place takes the next copy.
                item, step, steps, c0, c1, c2, c3 = _advance(
                    before, item, step, steps, c0, c1, c2, c3, a, b, index_ptr, a_ring, b_ring,
                    ready, items, LOCATE, COPY, BLOCK_K, STEPS, TILES_A, TILES_B, GROUP_M,
                )  # fmt: skip
                before = stage
                last = stage == STAGES - 1
                stage = gl.where(last, 0, stage + 1)
                phase = gl.where(last, phase ^ 1, phase)
            done = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.wait(drained, parity)
            parity ^= 1
            for i in gl.static_range(_PIECES):
                tile.index(i).store(piece(done, i, _PIECES).to(tile.dtype))
            mbarrier.arrive(full)


@gluon.jit
def _shared(a, b, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):
    """Rings of operand blocks, the finished tile, and the barriers."""
    kind: gl.constexpr = a.dtype
    PIECE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_N // _PIECES], kind)
    a_ring = gl.allocate_shared_memory(kind, [STAGES] + a.block_shape, a.layout)  # noqa: RUF005
    b_ring = gl.allocate_shared_memory(kind, [STAGES] + b.block_shape, b.layout)  # noqa: RUF005
    tile = gl.allocate_shared_memory(kind, [_PIECES, BLOCK_M, BLOCK_N // _PIECES], PIECE)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    drained = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    mbarrier.init(full, count=1)
    mbarrier.init(drained, count=1)
    return a_ring, b_ring, tile, ready, full, drained


@gluon.jit
def _locate_rows(item, items, tiles_ptr, STEPS: gl.constexpr, TILES_A: gl.constexpr,
                 TILES_B: gl.constexpr, GROUP_M: gl.constexpr):  # fmt: skip
    e, row, row_end, column = locate(item, items // TILES_B, tiles_ptr, TILES_B, GROUP_M)
    return STEPS, e, row, row_end, column


@gluon.jit
def _copy_rows(a, b, a_block, b_block, barrier, k, e, row, row_end, column):
    tma.async_copy_global_to_shared(a, [row, k], barrier, a_block)
    tma.async_copy_global_to_shared(b, [e, k, column * b.block_shape[2]], barrier, b_block)


@gluon.jit
def _load_h(h, at, cols, F: gl.constexpr, BLOCK_N: gl.constexpr):
    return gl.load(h + at) if F % BLOCK_N == 0 else gl.load(h + at, mask=cols < F, other=0.0)


@gluon.jit
def _finish_dact(
    order_ptr,
    weights_ptr,
    tiles_ptr,
    h_ptr,
    dh_ptr,
    a_ptr,
    partials_ptr,
    rows,
    tile,
    full,
    drained,
    items,
    F: gl.constexpr,
    COLUMNS: gl.constexpr,
    GLU: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    BLOCK_M: gl.constexpr = tile.shape[1]
    W: gl.constexpr = tile.shape[2]
    BLOCK_N: gl.constexpr = _PIECES * W
    PARTS: gl.constexpr = GLU + 1
    BLOCK: gl.constexpr = gl.BlockedLayout([1, 8], [256 // W, W // 8], [_EPILOGUE_WARPS, 1], [1, 0])
    r = gl.arange(0, BLOCK_M, gl.SliceLayout(1, BLOCK))
    c = gl.arange(0, W, gl.SliceLayout(0, BLOCK))[None, :]
    parity = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        _, row, row_end, column = locate(item, items // COLUMNS, tiles_ptr, COLUMNS, GROUP_M)
        live = r < row_end - row
        # Rows past the end read the last row's operands instead of a mask, which costs registers.
        near = gl.minimum(r, row_end - row - 1)
        slot = gl.load(order_ptr + row + near)
        s = gl.load(weights_ptr + slot).to(gl.float32)[:, None]
        h = h_ptr + row.to(gl.int64) * (PARTS * F)
        dh = dh_ptr + row.to(gl.int64) * (PARTS * F)
        a = a_ptr + row.to(gl.int64) * F
        cols = column * BLOCK_N + c
        at = near[:, None] * (PARTS * F) + cols
        ahead = _load_h(h, at, cols, F, BLOCK_N)
        partial = gl.zeros((BLOCK_M,), gl.float32, gl.SliceLayout(1, BLOCK))
        mbarrier.wait(full, parity)
        parity ^= 1
        for i in range(_PIECES):
            z = ahead.to(gl.float32)
            # h of the next piece is on its way while this one is worked on.
            step = gl.where(i + 1 < _PIECES, W, 0)
            ahead = _load_h(h, at + step, cols + step, F, BLOCK_N)
            q = tile.index(i).load(BLOCK).to(gl.float32)
            mask = live[:, None] if F % BLOCK_N == 0 else live[:, None] & (cols < F)
            to_h = r[:, None] * (PARTS * F) + cols
            value, slope = activate_with_derivative(z, ACTIVATION, True)
            if GLU:
                up = _load_h(h + F, at, cols, F, BLOCK_N).to(gl.float32)
                product = value * up
                partial += gl.sum(q * product, 1)
                q *= s
                gl.store(a + (r[:, None] * F + cols), (product * s).to(tile.dtype), mask=mask)
                gl.store(dh + F + to_h, (q * value).to(tile.dtype), mask=mask)
                slope *= up
            else:
                partial += gl.sum(q * value, 1)
                q *= s
                gl.store(a + (r[:, None] * F + cols), (value * s).to(tile.dtype), mask=mask)
            gl.store(dh + to_h, (q * slope).to(tile.dtype), mask=mask)
            at += step
            cols += W
        mbarrier.arrive(drained)
        gl.store(partials_ptr + column.to(gl.int64) * rows + row + r, partial, mask=live)


@gluon.jit
def dact_kernel(
    do,  # [N, D] in the order of rows: tensor descriptor
    w,  # [E, D, F]: tensor descriptor
    order_ptr,  # [N] int32: slot of each row
    weights_ptr,  # [T, K]
    tiles_ptr,  # from schedule()
    h_ptr,  # [N, F], or [N, 2F] for GLU
    dh_ptr,  # like h
    a_ptr,  # [N, F], s * act(h)
    partials_ptr,  # [column tiles, N] fp32: <q, act(h)> per column tile
    rows,
    D: gl.constexpr,
    F: gl.constexpr,
    GLU: gl.constexpr,
    ACTIVATION: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    COLUMNS: gl.constexpr = (F + BLOCK_N - 1) // BLOCK_N
    STEPS: gl.constexpr = (D + BLOCK_K - 1) // BLOCK_K
    items = gl.load(tiles_ptr + 3) * COLUMNS
    a_ring, b_ring, tile, ready, full, drained = _shared(do, w, BLOCK_M, BLOCK_N, STAGES)
    gl.warp_specialize(
        [
            (
                multiply,
                (do, w, tiles_ptr, a_ring, b_ring, tile, ready, full, drained, items,
                 _locate_rows, _copy_rows, False, BLOCK_K, STEPS, 1, COLUMNS, GROUP_M),
            ),
            (
                _finish_dact,
                (order_ptr, weights_ptr, tiles_ptr, h_ptr, dh_ptr, a_ptr, partials_ptr, rows,
                 tile, full, drained, items, F, COLUMNS, GLU, ACTIVATION, GROUP_M),
            ),
        ],
        [_EPILOGUE_WARPS],
        [_EPILOGUE_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _place(item, TILES_P: gl.constexpr, TILES_Q: gl.constexpr, GROUP_M: gl.constexpr):
    """(expert, row tile, column tile) of an item; GROUP_M row tiles go through all columns."""
    within = item % (TILES_P * TILES_Q)
    first = within // (GROUP_M * TILES_Q) * GROUP_M
    height = gl.minimum(TILES_P - first, GROUP_M)
    within = within % (GROUP_M * TILES_Q)
    return item // (TILES_P * TILES_Q), first + within % height, within // height


@gluon.jit
def _locate_ragged(item, items, offsets_ptr, BLOCK_K: gl.constexpr, TILES_P: gl.constexpr,
                   TILES_Q: gl.constexpr, GROUP_M: gl.constexpr):  # fmt: skip
    e, p, q = _place(item, TILES_P, TILES_Q, GROUP_M)
    end = gl.load(offsets_ptr + e + 1)
    count = end - gl.load(offsets_ptr + e)
    # An expert without rows takes one step over rows that read as zeros, and so writes its zeros.
    return gl.maximum(gl.cdiv(count, BLOCK_K), 1), p, q, end, count


@gluon.jit
def _copy_ragged(a, b, a_block, b_block, barrier, k, p, q, end, count):
    # The coordinates of triton.tools.ragged_tma.load_ragged: zeros past the expert's last row.
    k += _BILLION - count
    at = [_BILLION, end, k, p * a.block_shape[3]]
    tma.async_copy_global_to_shared(a, at, barrier, a_block)
    at = [_BILLION, end, k, q * b.block_shape[3]]
    tma.async_copy_global_to_shared(b, at, barrier, b_block)


@gluon.jit
def _finish_outer(
    out_ptr,
    tile,
    full,
    drained,
    items,
    P: gl.constexpr,
    Q: gl.constexpr,
    TILES_P: gl.constexpr,
    TILES_Q: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    BLOCK_M: gl.constexpr = tile.shape[1]
    W: gl.constexpr = tile.shape[2]
    BLOCK_N: gl.constexpr = _PIECES * W
    BLOCK: gl.constexpr = gl.BlockedLayout([1, 8], [256 // W, W // 8], [_EPILOGUE_WARPS, 1], [1, 0])
    r = gl.arange(0, BLOCK_M, gl.SliceLayout(1, BLOCK))[:, None]
    c = gl.arange(0, W, gl.SliceLayout(0, BLOCK))[None, :]
    parity = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        e, p, q = _place(item, TILES_P, TILES_Q, GROUP_M)
        out = out_ptr + e.to(gl.int64) * (P * Q) + p.to(gl.int64) * (BLOCK_M * Q)
        cols = q * BLOCK_N + c
        mbarrier.wait(full, parity)
        parity ^= 1
        for i in range(_PIECES):
            block = tile.index(i).load(BLOCK)
            if P % BLOCK_M == 0 and Q % BLOCK_N == 0:
                gl.store(out + (r * Q + cols), block)
            else:
                mask = (p * BLOCK_M + r < P) & (cols < Q)
                gl.store(out + (r * Q + cols), block, mask=mask)
            cols += W
        mbarrier.arrive(drained)


@gluon.jit
def outer_kernel(
    a,  # [N, P]: ragged tensor descriptor
    b,  # [N, Q]: ragged tensor descriptor
    offsets_ptr,  # [E + 1] int32
    out_ptr,  # [E, P, Q]
    E: gl.constexpr,
    P: gl.constexpr,
    Q: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    TILES_P: gl.constexpr = (P + BLOCK_M - 1) // BLOCK_M
    TILES_Q: gl.constexpr = (Q + BLOCK_N - 1) // BLOCK_N
    items = E * TILES_P * TILES_Q
    a_ring, b_ring, tile, ready, full, drained = _shared(a, b, BLOCK_M, BLOCK_N, STAGES)
    gl.warp_specialize(
        [
            (
                multiply,
                (a, b, offsets_ptr, a_ring, b_ring, tile, ready, full, drained, items,
                 _locate_ragged, _copy_ragged, True, BLOCK_K, BLOCK_K, TILES_P, TILES_Q, GROUP_M),
            ),
            (
                _finish_outer,
                (out_ptr, tile, full, drained, items, P, Q, TILES_P, TILES_Q, GROUP_M),
            ),
        ],
        [_EPILOGUE_WARPS],
        [_EPILOGUE_REGISTERS],
    )  # fmt: skip


def dact(
    do: Tensor,
    w2: Tensor,
    order: Tensor,
    weights: Tensor,
    tiles: Tensor,
    h: Tensor,
    dh: Tensor,
    a: Tensor,
    partials: Tensor,
    activation: str,
    *,
    tile: Tile,
) -> None:
    """``_dact.dact`` into dh, a and partials."""
    _, hidden, ffn = w2.shape
    launch(
        dact_kernel,
        (programs(do),),
        _descriptor(matrices(do, (tile.block_m, tile.block_k))),
        _descriptor(matrices(w2, (1, tile.block_k, tile.block_n))),
        order,
        weights,
        tiles,
        h,
        dh,
        a,
        partials,
        order.shape[0],
        D=hidden,
        F=ffn,
        GLU=is_glu(activation),
        ACTIVATION=base_function(activation),
        **_constants(tile),
    )


def outer(a: Tensor, b: Tensor, offsets: Tensor, out: Tensor, *, tile: Tile) -> None:
    """``_outer.outer`` into out."""
    launch(
        outer_kernel,
        (programs(a),),
        _descriptor(ragged(a, (tile.block_k, tile.block_m))),
        _descriptor(ragged(b, (tile.block_k, tile.block_n))),
        offsets,
        out,
        E=out.shape[0],
        P=out.shape[1],
        Q=out.shape[2],
        **_constants(tile),
    )


def _constants(tile: Tile) -> dict[str, Any]:
    return {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "STAGES": tile.num_stages,
        "GROUP_M": tile.group_m,
        "num_warps": tile.num_warps,
        **tile.options,
    }


def _layout(block: Sequence[int], dtype: str) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, dtype))


def _descriptor(plain: PlainDescriptor) -> TensorDescriptor:
    """The same descriptor with the layout its blocks have in shared memory."""
    layout = _layout(plain.block_shape, str(plain.base.dtype).removeprefix("torch."))
    return TensorDescriptor(plain.base, plain.shape, plain.strides, plain.block_shape, layout)


def gate_cases(target: Target) -> list[GateCase]:
    if target.name != "sm90":
        return []

    def case(name: str, kernel: Any, op: str, pointers: dict[str, str],
             operands: dict[str, Sequence[int]], **constants: Any) -> GateCase:  # fmt: skip
        blocks = {
            n: f"tensordesc<bf16[{', '.join(map(str, b))}],{_layout(b, 'bfloat16')!r}>"
            for n, b in operands.items()
        }
        tile = TILES[op]["sm90"]
        options = _constants(tile)
        num_warps = options.pop("num_warps")
        return GateCase(
            name=name,
            kernel=kernel,
            signature={**pointers, **blocks},
            constexprs={**constants, **{k: v for k, v in options.items() if k.isupper()}},
            is_gemm=True,
            num_warps=num_warps,
            num_stages=tile.num_stages,
            options=tile.options,
        )

    t = TILES["dact_hopper"]["sm90"]
    u = TILES["outer_few_rows_hopper"]["sm90"]
    index = {"order_ptr": "*i32", "weights_ptr": "*fp32", "tiles_ptr": "*i32", "rows": "i32"}
    written = {"h_ptr": "*bf16", "dh_ptr": "*bf16", "a_ptr": "*bf16", "partials_ptr": "*fp32"}
    return [
        *(
            case(
                f"dact_{activation}_hopper_bf16",
                dact_kernel,
                "dact_hopper",
                {**index, **written},
                {"do": (t.block_m, t.block_k), "w": (1, t.block_k, t.block_n)},
                D=2048,
                F=ffn,
                GLU=is_glu(activation),
                ACTIVATION=base_function(activation),
            )
            for activation, ffn in (("swiglu", 1024), ("gelu", 3072), ("geglu", 720))
        ),
        case(
            "outer_few_rows_hopper_bf16",
            outer_kernel,
            "outer_few_rows_hopper",
            {"offsets_ptr": "*i32", "out_ptr": "*bf16"},
            {"a": (1, 1, u.block_k, u.block_m), "b": (1, 1, u.block_k, u.block_n)},
            E=64,
            P=768,
            Q=3072,
        ),
    ]
