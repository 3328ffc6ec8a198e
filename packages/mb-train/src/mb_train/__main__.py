"""`python -m mb_train`, for torchrun."""

from mb_train.cli import program

program()
