"""The sum of the squares of many tensors, each read once: what a norm of gradients is made of."""

from mb_kernels.sum_of_squares.op import sum_of_squares as sum_of_squares
