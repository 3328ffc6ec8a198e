"""Whether `torch.export` is tracing: a saved program holds no function of Python's."""

import torch


def is_exporting() -> bool:
    """As ``torch.compiler.is_exporting``, which torch 2.11's Dynamo takes for true in any trace."""
    return getattr(torch.compiler, "_is_exporting_flag", torch.compiler.is_exporting())
