"""Every op with arguments drawn at random, outputs and gradients against the float64 reference.

    TRITON_INTERPRET=1 python packages/mb-kernels/tests/interpreter/test_fuzz.py FIRST COUNT
    python packages/mb-kernels/tests/interpreter/test_fuzz.py FIRST COUNT cuda

runs that many seeds and prints those that fail; CI runs a few dozen. Each seed draws everything
that a user may choose: sizes (0 and 1 too), dropped slots, capacity, dtypes, activation, biases,
the bound on rows, what is saved, which inputs have gradients, memory orders, and the width of
indices. On a GPU sizes are larger, as its tiles are. Each op's outputs are also compared with what
it promises the compiler about them: shape, dtype, strides, and no memory in common.
"""

import sys
import traceback
from typing import Any

import mb_kernels
import pytest
import torch
from fuzz_dice import Dice, Draw, wide
from fuzz_experts import block_sparse, expert_mlp, gmm, grouped, grouped_experts, sparse_expert_mlp
from fuzz_others import (
    adamw,
    attention,
    binning,
    cross_entropy,
    losses,
    muon,
    permuted,
    quantized,
    routing,
    squares,
    symmetric,
    travelling,
)
from mb_kernels import reference
from mb_kernels.testing import TOLERANCES, bf16_interpreted, error
from torch._subclasses.fake_utils import CrossRefFakeMode

SEEDS = range(28)

OPS = (
    *((expert_mlp,) * 7),
    *(grouped, gmm, grouped_experts, permuted, permuted, routing, binning, losses, quantized),
    *(cross_entropy, block_sparse, block_sparse, sparse_expert_mlp, adamw, muon, squares),
    *(attention, travelling, symmetric),
)


def results(draw: Draw, module: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Outputs, and gradients of a fixed projection of those that have some."""
    given = {n: t.detach().requires_grad_(n in draw.leaves) for n, t in tensors.items()}
    found = draw.call(module, **given)
    found = found if isinstance(found, tuple) else (found,)
    out = {f"output {i}": t for i, t in enumerate(found)}
    if draw.leaves:
        score = sum(
            (
                t * torch.linspace(0.5, 1, t.numel(), dtype=wide(t), device=t.device).view(t.shape)
            ).sum()
            for t in found
            if t.requires_grad
        )
        grads = torch.autograd.grad(score, [given[n] for n in draw.leaves])
        out |= {f"gradient of {n}": g for n, g in zip(draw.leaves, grads, strict=True)}
    return out


def check(seed: int, reachable: list[torch.Tensor], device: str = "cpu") -> None:
    """Raise if the op of this seed is not what its reference is, on a CPU."""
    dice = Dice(seed, reachable, device)
    op = dice.choice.choice(OPS)
    draw = op(dice)
    if draw.anywhere and op is not attention:  # among equal keys or values its gradients are zero
        draw = draw._replace(tensors={n: dice.expanded(t) for n, t in draw.tensors.items()})
    if draw.anywhere and dice.sometimes(0.2):
        longer = {n: t.long() for n, t in draw.tensors.items() if t.dtype is torch.int32}
        draw = draw._replace(tensors=draw.tensors | longer)
    scattered = {n: t.to(device) for n, t in draw.tensors.items()}
    if draw.anywhere:
        scattered = {n: dice.somewhere(t) for n, t in scattered.items()}
    with CrossRefFakeMode(ignore_op_fn=lambda op: op.namespace != "mb"):
        got = results(draw, mb_kernels, scattered)
    exact = {n: t.double() if t.is_floating_point() else t for n, t in draw.tensors.items()}
    rounded: dict[str, torch.Tensor] = {}
    for name, want in results(draw, reference, exact).items():
        value, what = got[name].cpu(), f"{op.__name__}: {name}"
        assert value.shape == want.shape, f"{what} {value.shape}, not {want.shape}"
        if not value.is_floating_point():
            assert torch.equal(value, want.to(value.dtype)), what
            continue
        loose = dice.dtype if value.dtype is torch.float32 else value.dtype
        bound, found = draw.slack * TOLERANCES[loose], error(value, want, loose)
        if not found <= bound:
            # What nearly cancels is only as right as its terms, the reference's too.
            rounded = rounded or results(draw, reference, draw.tensors)
            bound = max(bound, 3 * error(rounded[name], want, loose))
        assert found <= bound, f"{what} off by {found:.1e}, allowed are {bound:.0e}"


@pytest.mark.sweep(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_any_arguments(seed, reachable):
    check(seed, reachable)


def main() -> None:
    first, count = (int(a) for a in sys.argv[1:3])
    failed = 0
    for seed in range(first, first + count):
        if seed > first and (seed - first) % 100 == 0:
            print(f"{seed - first} seeds, {failed} failed", flush=True)
        try:
            with bf16_interpreted():
                check(seed, [], *sys.argv[3:])
        except Exception:
            failed += 1
            print(f"seed {seed}: {traceback.format_exc().strip().splitlines()[-1]}", flush=True)
    print(f"{count} seeds, {failed} failed")


if __name__ == "__main__":
    main()
