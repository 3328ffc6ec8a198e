"""MoE and dMoE layers for any PyTorch model."""

__version__ = "0.1.0"
