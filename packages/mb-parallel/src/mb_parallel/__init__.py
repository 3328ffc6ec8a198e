"""Data, expert, tensor and pipeline parallelism for MoE models on torch's own engines."""

__version__ = "0.1.0"
