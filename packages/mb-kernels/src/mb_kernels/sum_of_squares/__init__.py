"""The sum of the squares of many tensors, for the norm of all gradients."""

from mb_kernels.sum_of_squares.op import sum_of_squares as sum_of_squares
