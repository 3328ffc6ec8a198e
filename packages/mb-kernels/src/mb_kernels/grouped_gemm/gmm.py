"""``gmm``: grouped products with the name and arguments that the package grouped_gemm has.

For frameworks that route by themselves and call ``grouped_gemm.ops.gmm`` (OLMo-core, NeMo
Automodel, MegaBlocks): ``from mb_kernels import gmm`` in its place.

Letters: N rows, K contraction, M output columns, E experts.
"""

import torch
from torch import Tensor

from mb_kernels.grouped_gemm.op import check_sizes, offsets_of, product
from mb_kernels.runtime import checks
from mb_kernels.runtime.widths import cut, lacking, widened


def gmm(
    a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool = False, *, trans_a: bool = False
) -> Tensor:
    """Products of runs of rows, one run and one product per expert.

    Args:
        a: [N, K]; fp32, bf16 or fp16.
        b: [E, K, M]; [E, M, K] with ``trans_b``; [N, M] with ``trans_a``. Dtype of a.
        batch_sizes: [E] int32 or int64, rows of each expert, in order. On the device of a, where
            nothing waits for the host, or on the CPU, as grouped_gemm wants it.
        trans_b: multiply by the transposes of the matrices in b. Fourth, as in ``ops.gmm``.
        trans_a: contract over rows instead: a_e^T b_e for each expert.

    Returns:
        [N, M]; [E, K, M] with ``trans_a``, zeros for an expert without rows. Differentiable in a
        and b, twice too. Rows that ``batch_sizes`` does not count give and get zeros.

    Raises:
        ValueError: sizes, dtypes or devices do not match, both transposes at once; if
            ``batch_sizes`` is on the CPU, a size below 0 or more rows together than a has; on a GPU
            sizes that ``grouped_gemm`` refuses.
    """
    if trans_a and trans_b:
        raise ValueError("trans_a, trans_b: expected one of them at most; got both.")
    checks.require_same("a", a, b=b)
    layout, shared = ("[E, M, K]", 2) if trans_b else ("[E, K, M]", 1)
    if trans_a:
        layout, shared = "[N, M]", 0
    if a.ndim != 2 or b.ndim != (2 if trans_a else 3) or b.shape[shared] != a.shape[min(shared, 1)]:
        raise ValueError(
            f"b: expected {layout} beside a [N, K]; got a {tuple(a.shape)} and b {tuple(b.shape)}."
        )
    check_sizes("batch_sizes", batch_sizes, None if trans_a else b.shape[0], a.shape[0])
    if batch_sizes.device.type == "cpu":
        batch_sizes = batch_sizes.to(a.device, non_blocking=True)
    checks.require_device("a", a, batch_sizes=batch_sizes)
    offsets_E1 = offsets_of(batch_sizes)
    if not trans_a:
        return product("b", a, b, offsets_E1, transpose_weight=trans_b)
    checks.require_addressable("a, b", a, (a.shape[1], b.shape[1]))
    wider = (widened(t, lacking(t, t.shape[1])) for t in (a, b))
    out_EKM = torch.ops.mb.grouped_outer(*wider, offsets_E1)
    return cut(out_EKM, b.shape[1], a.shape[1])
