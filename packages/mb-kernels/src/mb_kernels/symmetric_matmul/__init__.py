"""Matrix products whose result is symmetric, of which little more than half is computed."""

from mb_kernels.symmetric_matmul.op import symmetric_matmul as symmetric_matmul
