"""Who is at work: `torch.export`, whose programs hold no function of Python's, or `torch.func`."""

import torch

# Whether a transform, such as vmap, is. A private name of torch, without which none is seen.
transforms_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)


def is_exporting() -> bool:
    """As ``torch.compiler.is_exporting``, which torch 2.11's Dynamo takes for true in any trace."""
    return getattr(torch.compiler, "_is_exporting_flag", torch.compiler.is_exporting())
