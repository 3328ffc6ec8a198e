"""`mb_kernels.gmm` where a framework calls `grouped_gemm.ops.gmm`: the framework stays as it is.

    pytest packages/mb-kernels/examples/test_gmm_callers.py

Two ways of calling it, each with a small layer that does as the framework's own does:

- OLMo-core (`DroplessMoEMLP`) takes `grouped_gemm.ops.gmm` when a layer is made. Its w1, w2 and w3
  are all [E, F, D], so that two of its three products are of transposed weights.
- NeMo Automodel (`GroupedExpertsDeepEP`) imports `ops` at the top of a module. Gates and ups are
  one [E, D, 2F], the routing weight is part of the activation, and sizes are moved to the CPU,
  where grouped_gemm wants them. `gmm` takes them from the GPU as well, without a wait.
"""

import sys
import types

import mb_kernels
import pytest
import torch
import torch.nn.functional as functions
from torch import Tensor, nn

EXPERTS, HIDDEN, FFN = 4, 6, 5


def stand_in_for_grouped_gemm() -> dict[str, types.ModuleType]:
    """For `sys.modules`, before the framework is imported."""
    package, ops = types.ModuleType("grouped_gemm"), types.ModuleType("grouped_gemm.ops")
    ops.gmm = mb_kernels.gmm
    package.ops = ops
    return {"grouped_gemm": package, "grouped_gemm.ops": ops}


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    for name, module in stand_in_for_grouped_gemm().items():
        monkeypatch.setitem(sys.modules, name, module)


def parameter(*shape: int) -> nn.Parameter:
    generator = torch.Generator().manual_seed(sum(shape))
    return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))


class LikeOLMoCore(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (parameter(EXPERTS, FFN, HIDDEN) for _ in range(3))
        import grouped_gemm

        self.gmm = grouped_gemm.ops.gmm

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        gate = self.gmm(x, self.w1, sizes, trans_b=True)
        up = self.gmm(x, self.w3, sizes, trans_b=True)
        return self.gmm(functions.silu(gate) * up, self.w2, sizes, trans_b=False)

    def expert(self, e: int, x: Tensor) -> Tensor:
        return functions.silu(x @ self.w1[e].T) * (x @ self.w3[e].T) @ self.w2[e]


class LikeAutomodel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gates_and_ups = parameter(EXPERTS, HIDDEN, 2 * FFN)
        self.downs = parameter(EXPERTS, FFN, HIDDEN)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        from grouped_gemm import ops

        sizes = sizes.to("cpu")
        h = ops.gmm(x, self.gates_and_ups, sizes, trans_b=False)
        return ops.gmm(self.activation(h), self.downs, sizes, trans_b=False)

    def expert(self, e: int, x: Tensor) -> Tensor:
        return self.activation(x @ self.gates_and_ups[e]) @ self.downs[e]

    def activation(self, h: Tensor) -> Tensor:
        gate, up = h.chunk(2, dim=1)
        return 0.5 * functions.silu(gate) * up  # 0.5 is the routing weight


@pytest.mark.parametrize("layer", [LikeOLMoCore, LikeAutomodel])
@pytest.mark.parametrize("sizes", [[3, 0, 7, 1], [0, 0, 0, 11], [0, 0, 0, 0]], ids=str)
def test_a_layer_of_the_framework_computes_what_a_loop_does(layer, sizes):
    model, x = layer(), parameter(sum(sizes), HIDDEN)
    runs = x.split(sizes)
    ways = (
        model(x, torch.tensor(sizes)),
        torch.cat([model.expert(e, run) for e, run in enumerate(runs)]),
    )
    leaves = [x, *model.parameters()]
    slope = parameter(sum(sizes), HIDDEN)
    got, want = ([y, *torch.autograd.grad(y, leaves, slope)] for y in ways)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
