"""The sum of the gradients of several micro-batches."""

from mb_kernels.accumulate_grad.op import accumulate_grad as accumulate_grad
