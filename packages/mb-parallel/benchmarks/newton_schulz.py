"""Muon's orthogonalisation: ours against the same five steps by torch's products.

    python packages/mb-parallel/benchmarks/newton_schulz.py [--rounds 12]

For stacks of bf16 matrices: the Gram matrix by `mb_kernels.symmetric_matmul` and by `torch.bmm`,
and the whole iteration; medians of calls in turns. Then how far each iteration is from the same one
in fp64, for matrices of random numbers and for some of low rank under noise.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
import triton
from mb_kernels import symmetric_matmul
from mb_parallel.optimizer.muon import Coefficients, coefficients_of, newton_schulz
from torch import Tensor
from turns import in_turns

DEVICE = "cuda"
# 64 experts of GPT-2 125M, OLMoE's, fine ones; a dense layer; a few large ones.
SHAPES = (
    *((64, 3072, 768), (64, 768, 3072), (64, 2048, 1024), (256, 768, 768)),
    *((1, 768, 768), (1, 2304, 768), (12, 2304, 768), (8, 8192, 4096)),
)


def plain(x: Tensor, coefficients: Sequence[Coefficients]) -> Tensor:
    """The iteration as it is written down, each step a product of x with its polynomial."""
    tall = x.shape[-2] > x.shape[-1]
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for a, b, c in coefficients:
        gram = x.mT @ x if tall else x @ x.mT
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, *((x, factor) if tall else (factor, x)), beta=a)
    return x


def exact(x: Tensor, coefficients: Sequence[Coefficients]) -> Tensor:
    """What the iteration does to singular values, in fp64."""
    u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / s.norm(dim=-1, keepdim=True)
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    return (u * s[..., None, :]) @ v


def calls_of(x: Tensor) -> dict[str, Callable[[], object]]:
    rows = x.mT if x.shape[-2] > x.shape[-1] else x
    return {
        "bmm": partial(torch.bmm, rows, rows.mT),
        "symmetric": partial(symmetric_matmul, rows, rows),
        "plain": partial(plain, x, coefficients_of("simple", 5)),
        "ours": partial(newton_schulz, x, coefficients_of("simple", 5)),
    }


def deviations(
    rows: int, columns: int, coefficients: Sequence[Coefficients]
) -> list[tuple[str, str, float, float]]:
    """Kind of matrix, iteration, its relative error and the largest singular value it leaves."""
    noise = torch.randn(2, rows, columns, device=DEVICE)
    few = max(rows // 13, 1)
    strengths = torch.rand(few, device=DEVICE) ** 4
    low = torch.randn(2, rows, few, device=DEVICE) * strengths
    low = low @ torch.randn(2, few, columns, device=DEVICE) + 0.02 * noise
    found = []
    for kind, x in (("random", noise), ("low rank under noise", low)):
        want = exact(x, coefficients)
        for name, iteration in (("plain", plain), ("ours", newton_schulz)):
            got = iteration(x.bfloat16(), coefficients).double()
            error = float((got - want).norm() / want.norm())
            found.append((kind, name, error, float(torch.linalg.svdvals(got).max())))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__, sep=", ")
    print(f"{'ms':20}{'bmm':>10}{'symmetric':>10}{'plain':>10}{'ours':>10}")
    for shape in SHAPES:
        times = in_turns(calls_of(torch.randn(shape, device=DEVICE).bfloat16()), rounds)
        told = (f"{statistics.median(values):10.3f}" for values in times.values())
        print(f"{shape!s:20}" + "".join(told), flush=True)
    for said in ("simple", "quintic", "polar_express"):
        for kind, name, error, largest in deviations(768, 3072, coefficients_of(said, 5)):
            found = f"relative error {error:.4f}, largest singular value {largest:.3f}"
            print(f"{said}, {kind}, {name}: {found}")


if __name__ == "__main__":
    main()
