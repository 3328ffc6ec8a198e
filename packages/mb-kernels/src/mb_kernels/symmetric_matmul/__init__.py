"""Products of matrices that are symmetric, half of them computed."""

from mb_kernels.symmetric_matmul.op import symmetric_matmul as symmetric_matmul
