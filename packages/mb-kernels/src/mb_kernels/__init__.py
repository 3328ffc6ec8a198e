"""Mixture-of-Experts kernels in Triton, with a reference in plain PyTorch."""

__version__ = "0.1.0"
