"""Matrix kernels for Hopper, in Gluon, whose epilogue runs at the same time as the next product.

In the portable kernels one set of warps multiplies, then works through the epilogue while the
matrix units idle. Here a program has two sets:

    multiply   8 warps: start the copies of operand blocks some steps ahead, issue the matrix
               instructions, leave each finished tile in shared memory
    epilogue   4 warps: everything between a finished tile and global memory

They synchronise by barriers in shared memory: operand blocks are ``ready``, a tile is ``full`` or
``drained``. The tile is handed over in the dtype of the tensors, so it is rounded where torch's
eager products round.

This module has the product of rows and their expert's weights, which both ops share; ``hopper.up``
and ``hopper.dact`` have the epilogues.

Letters: N rows, K contraction, M columns of the product, E experts.
"""

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.tools.tensor_descriptor import TensorDescriptor

from mb_kernels.bins import row_tiles
from mb_kernels.language.memory import ragged_place
from mb_kernels.language.tiles import locate, piece
from mb_kernels.runtime.descriptors import ragged
from mb_kernels.runtime.gluon import OLD_REINTERPRET, async_load, with_layout
from mb_kernels.runtime.launch import launch
from mb_kernels.runtime.plan import plan_of
from mb_kernels.targets.table import Tile

MULTIPLY_WARPS = gl.constexpr(8)
EPILOGUE_WARPS = gl.constexpr(4)
# Of 168 for each thread of twelve warps; `multiply` keeps 160, of which 128 hold the accumulator.
EPILOGUE_REGISTERS = gl.constexpr(184)
# Columns of a tile are handed over in pieces of 64, whole 128-byte lines of a row. dact in one loop
# over pieces of 64 rows: 0.25 ms, with 32 columns 0.31 (top-1, hidden 768, ffn 3072).
PIECES = gl.constexpr(4)


@gluon.jit
def _advance(
    stage, item, step, e, row, row_end, column, x, w, tiles_ptr, x_ring, w_ring, ready, items,
    STEPS: gl.constexpr, COLUMNS: gl.constexpr, TRANSPOSE: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Start the copies of one step into ``stage``; the step and the item that follow it."""
    if item < items:
        barrier = ready.index(stage)
        mbarrier.expect(barrier, x.block_type.nbytes + w.block_type.nbytes)
        k = step * x.block_shape[3]
        # Through these coordinates the rows past the expert's last are zeros.
        ragged, end, start = ragged_place(row, row_end - row, 0)
        async_load(x, [ragged, end, start, k], barrier, x_ring.index(stage))
        if TRANSPOSE:
            at = [e * w.block_shape[0], column * w.block_shape[1], k]
        elif len(w.block_shape) == 4:
            at = [e, 0, k, column * w.block_shape[3]]
        else:
            at = [e, k, column * w.block_shape[2]]
        async_load(w, at, barrier, w_ring.index(stage))
        step += 1
        if step == STEPS:
            step = 0
            item += gl.num_programs(0)
            e, row, row_end, column = locate(
                gl.minimum(item, items - 1), items // COLUMNS, tiles_ptr, COLUMNS, GROUP_M
            )
    return item, step, e, row, row_end, column


@gluon.jit
def multiply(
    x,  # [N, K]: ragged tensor descriptor of blocks [1, 1, BLOCK_M, BLOCK_K]
    w,  # [E, K, M]: tensor descriptor of blocks [1, BLOCK_K, BLOCK_N], or see TRANSPOSE; or, of
    # gates beside ups, [E, 2, K, M / 2]: blocks [1, 2, BLOCK_K, BLOCK_N / 2]
    tiles_ptr,  # from schedule()
    x_ring,
    w_ring,
    tile,
    ready,
    full,
    drained,
    items,
    STEPS: gl.constexpr,
    COLUMNS: gl.constexpr,
    TRANSPOSE: gl.constexpr,  # w is [E * PARTS, M / PARTS, K], blocks [PARTS, .., BLOCK_K]
    GROUP_M: gl.constexpr,
):
    """Rows times their expert's weights, for every item of this program, into ``tile``."""
    STAGES: gl.constexpr = x_ring.shape[0]
    BLOCK_M: gl.constexpr = x_ring.shape[3]
    BLOCK_K: gl.constexpr = x_ring.shape[4]
    BLOCK_N: gl.constexpr = PIECES * tile.shape[2]
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[MULTIPLY_WARPS, 1],
        # 32 bytes of each operand's rows.
        instr_shape=[16, BLOCK_N, 32 * BLOCK_M * BLOCK_K // x.block_type.nbytes],
    )
    first = gl.program_id(0)
    if first < items:
        # The copies run STAGES - 1 steps ahead of the products, into the next item too, and so
        # have an item and a step of their own.
        item = first
        step = 0
        e, row, row_end, column = locate(first, items // COLUMNS, tiles_ptr, COLUMNS, GROUP_M)
        for i in gl.static_range(STAGES - 1):
            item, step, e, row, row_end, column = _advance(
                i, item, step, e, row, row_end, column, x, w, tiles_ptr, x_ring, w_ring, ready,
                items, STEPS, COLUMNS, TRANSPOSE, GROUP_M,
            )  # fmt: skip
        stage = 0
        before = STAGES - 1
        phase = 0
        parity = 1
        for _ in range(first, items, gl.num_programs(0)):
            acc = warpgroup_mma_init(gl.zeros((BLOCK_M, BLOCK_N), gl.float32, ACC))
            for product in range(STEPS):
                mbarrier.wait(ready.index(stage), phase)
                if TRANSPOSE:
                    w_block = w_ring.index(stage).reshape((BLOCK_N, BLOCK_K)).permute((1, 0))
                elif len(w_ring.shape) == 5:
                    # As it lies in memory: 64 columns of the gate, 64 of up, and so on.
                    BLOCK: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
                        [BLOCK_K, BLOCK_N], w_ring.dtype
                    )
                    if OLD_REINTERPRET:
                        w_block = w_ring.index(stage)._reinterpret(
                            w_ring.dtype, [BLOCK_K, BLOCK_N], BLOCK
                        )
                    else:
                        w_block = w_ring.index(stage).reinterpret(
                            w_ring.dtype, [BLOCK_K, BLOCK_N], BLOCK
                        )
                else:
                    w_block = w_ring.index(stage).reshape((BLOCK_K, BLOCK_N))
                x_block = x_ring.index(stage).reshape((BLOCK_M, BLOCK_K))
                acc = warpgroup_mma(x_block, w_block, acc, use_acc=product > 0, is_async=True)
                acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[acc]))
                # The product before this one is done: its place takes the next copies.
                item, step, e, row, row_end, column = _advance(
                    before, item, step, e, row, row_end, column, x, w, tiles_ptr, x_ring, w_ring,
                    ready, items, STEPS, COLUMNS, TRANSPOSE, GROUP_M,
                )  # fmt: skip
                before = stage
                last = stage == STAGES - 1
                stage = gl.where(last, 0, stage + 1)
                phase = gl.where(last, phase ^ 1, phase)
            done = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.wait(drained, parity)
            parity ^= 1
            for i in gl.static_range(PIECES):
                tile.index(i).store(piece(done, i, PIECES).to(tile.dtype))
            mbarrier.arrive(full)


@gluon.jit
def shared(
    x, w, kind: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Rings of operand blocks, the finished tile, and the barriers."""
    PIECE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_N // PIECES], kind)
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES] + x.block_shape, x.layout)  # noqa: RUF005
    w_ring = gl.allocate_shared_memory(w.dtype, [STAGES] + w.block_shape, w.layout)  # noqa: RUF005
    tile = gl.allocate_shared_memory(kind, [PIECES, BLOCK_M, BLOCK_N // PIECES], PIECE)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    drained = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    mbarrier.init(full, count=1)
    mbarrier.init(drained, count=1)
    return x_ring, w_ring, tile, ready, full, drained


def run(
    kernel: Any, rows: Tensor, w: TensorDescriptor, experts: int, columns: int, tile: Tile,
    *args: Any, **constants: Any,
) -> None:  # fmt: skip
    """Launch a kernel of (x, w, *args): rows times blocks of w, ``columns`` tiles wide."""
    plan = plan_of(rows)
    items = row_tiles(rows.shape[0], experts, tile.block_m) * columns
    launch(
        kernel,
        (plan.programs(items, tile),),
        with_layout(ragged(rows, (tile.block_m, tile.block_k))),
        with_layout(w),
        *args,
        **constants,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        STAGES=tile.num_stages,
        GROUP_M=tile.group_m,
        num_warps=tile.num_warps,
        **tile.options,
    )
