"""What tests of layers with a state share."""

import torch


def documents(tokens):
    """Where some begin: at a chunk's first and last tokens, behind each other, by chance."""
    begins_BS = torch.rand(2, tokens, generator=torch.Generator().manual_seed(3)) < 0.04
    for place in (place for place in (1, 2, 63, 64, 128) if place < tokens):
        begins_BS[0, place] = True
    return begins_BS


def with_gradients(computed, leaves):
    """Of a sum of outputs and states with numbers of their own."""
    generator = torch.Generator().manual_seed(5)
    total = sum(
        (x * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)).sum()
        for x in computed
    )
    return [*computed, *torch.autograd.grad(total, leaves)]
