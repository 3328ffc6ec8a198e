"""Whether a program is being exported, in all ways that torch traces it."""

import pytest
import torch
from mb_kernels.exporting import is_exporting


class Says(torch.nn.Module):
    def forward(self, x):
        return x + 1 if is_exporting() else x


def test_only_an_export_is_one():
    zero = torch.zeros(3)
    assert torch.equal(Says()(zero), zero)
    # Dynamo of torch 2.11 takes torch's own word for true here.
    assert torch.equal(torch.compile(Says(), backend="eager", fullgraph=True)(zero), zero)


@pytest.mark.parametrize("strict", [False, True])
def test_every_export_is_one(strict):
    program = torch.export.export(Says(), (torch.zeros(3),), strict=strict)
    assert torch.equal(program.module()(torch.zeros(3)), torch.ones(3))
