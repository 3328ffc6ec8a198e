"""Every op of mb-kernels at sizes drawn at random, on a GPU against fp64: a tool, not a test.

    python integration-tests/sweep_kernels.py --draws 400 --seed 1 --workers 8

A draw is an op, sizes that fill no tile, a dtype, and how each tensor lies in memory (as it is
made, transposed, every second column, behind an odd number of elements); of `expert_mlp` also the
activation, biases, routing, capacity, what is kept, and the plan of Hopper or the portable one.
Outputs and gradients are compared with the plain twin in fp64; where rounding to few bits is the
point, with the twin in the same dtype. What an op refuses is said with its message. With `--device
cpu` the twins are compared with themselves, which tries this tool.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import multiprocessing
import random
import sys
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
from mb_kernels import expert_mlp, reference
from mb_kernels.activation import GLU_ACTIVATIONS, PLAIN_ACTIVATIONS
from mb_kernels.runtime.plan import assume, plan_of
from mb_kernels.testing import (
    NUMBERED,
    ROUTINGS,
    TOLERANCES,
    Case,
    error,
    make_inputs,
    relative_error,
    run_expert_mlp,
)
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "packages/mb-kernels/tests"))
from every_op import OPS, make_op, results

DTYPES = [torch.bfloat16, torch.bfloat16, torch.float16, torch.float32]
# Whose results are codes of few bits, and the error that one code more or less may make.
IN_FEW_BITS = {
    **{"quantize": 2e-2, "dequantize": 1e-6, "to_float8": 2e-2, "to_float8_transposed": 2e-2},
    **{"float8_linear": 3e-2, "expert_mlp_fp8": 3e-2, "expert_mlp_8bit": 2e-2},
}
# What an op computes in; numbers beside it (routing weights, biases, decays) stay in fp32.
MAIN = {"x", "w", "w1", "w2", "w3", "a", "b", "c", "rows", "q", "k", "v", "dense", "data", "logits",
        "scores", "weight", "add"}  # fmt: skip


def lying(rng: random.Random, t: Tensor) -> tuple[str, Tensor]:
    """The same numbers, somewhere else in memory."""
    how = rng.choice(["", "", "", "transposed", "strided", "offset"])
    if t.ndim == 0 or not how:
        return "", t
    if how == "transposed":
        return how, t.mT.contiguous().mT if t.ndim > 1 else t
    if how == "strided":
        wide = t.new_zeros(*t.shape[:-1], 2 * t.shape[-1])
        wide[..., ::2] = t
        return how, wide[..., ::2]
    flat = t.new_zeros(t.numel() + 1)
    flat[1:] = t.reshape(-1)
    return how, flat[1:].view(t.shape)


def size(rng: random.Random, most: int) -> int:
    """Small ones as often as large ones, every second a multiple of 16."""
    drawn = int(2 ** rng.uniform(0, torch.tensor(most).log2().item()))
    return max(drawn // 16 * 16, 16) if rng.random() < 0.5 else drawn


def worse_than(errors: dict[str, float], twins: dict[str, float]) -> dict[str, float]:
    """Without those that the twin has too, in the same dtype.

    Sums that cancel, a gradient on the other side of a limit, halves that overflow.
    """

    def has_it(name: str) -> bool:
        twin = twins.get(name, 0.0)
        return twin != twin or errors[name] <= 3 * twin

    return {n: e for n, e in errors.items() if not has_it(n)}


def an_op(rng: random.Random, device: str) -> tuple[str, float, dict[str, float]]:
    """Any op: what was drawn, the bound, and the errors."""
    name, dtype = rng.choice(OPS), rng.choice(DTYPES)
    experts = rng.choice([1, 2, 3, 7, 8, 33, 64, 129])
    sizes = {
        "tokens": rng.choice([0, 1, 2, 5, size(rng, 700), size(rng, 4000)]),
        "hidden": size(rng, 600),
        "ffn": size(rng, 400),
        "experts": experts,
        "top_k": min(rng.choice([1, 2, 3, 8]), experts),
    }
    if name in ("quantize", "expert_mlp_8bit"):
        sizes |= {"hidden": 2 * sizes["hidden"], "ffn": 2 * sizes["ffn"]}
    if name == "state_space_scan":
        sizes |= {
            "tokens": min(sizes["tokens"], 700),
            "hidden": size(rng, 140),
            "ffn": size(rng, 140),
        }
    if name == "relative_attention":
        sizes |= {"tokens": min(sizes["tokens"], 900), "hidden": size(rng, 140)}
    op = make_op(name, **sizes)
    few = name in IN_FEW_BITS
    if op.bf16_on_a_gpu:
        op, dtype = op.on_a_gpu(), torch.bfloat16
    lie, tensors = [], {}
    for n, t in op.tensors.items():
        cast = t.to(dtype) if n in MAIN and t.dtype is torch.float32 and name != "dequantize" else t
        how, tensors[n] = lying(rng, cast.to(device))
        lie += [f"{n} {how}"] if how else []
    said = f"{name} {sizes} {dtype} {', '.join(lie)}"
    got = results(op, tensors)
    exact = {
        n: t if few else t.double() if t.is_floating_point() else t for n, t in tensors.items()
    }
    want = results(op, exact, call=op.twin)
    bound = IN_FEW_BITS.get(name, TOLERANCES[dtype])
    measure = relative_error if few else lambda g, w: error(g, w, dtype)
    errors = {}
    for n, w in want.items():
        if got[n].shape != w.shape:
            errors[f"{n}: shape {tuple(got[n].shape)}, not {tuple(w.shape)}"] = 9.0
        elif not w.is_floating_point():
            errors[n] = 0.0 if torch.equal(got[n].long(), w.long()) else 9.0
        else:
            errors[n] = measure(got[n], w)
    if not all(e <= bound for e in errors.values()):
        rounded = results(op, tensors, call=op.twin)
        twins = {n: measure(rounded[n], w) for n, w in want.items() if w.is_floating_point()}
        errors = worse_than(errors, twins)
    return said, bound, errors


def an_expert_mlp(rng: random.Random, device: str) -> tuple[str, float, dict[str, float]]:
    """`expert_mlp` with everything that it can be told."""
    dtype, experts = rng.choice(DTYPES), rng.choice([1, 2, 3, 8, 31, 64, 160])
    activation = rng.choice([*GLU_ACTIVATIONS, *PLAIN_ACTIVATIONS, *NUMBERED, "swiglu", "gelu"])
    kinks = "relu" in activation or activation.startswith("reglu")
    tokens = rng.choice([1, 3, 8, 40, size(rng, 600), size(rng, 5000)])
    case = Case(
        tokens, size(rng, 900), size(rng, 700), experts, min(rng.choice([1, 1, 2, 4, 8]), experts),
        rng.choice(ROUTINGS), rng.choice([None, None, None, size(rng, 300)]), activation,
        None if kinks else rng.choice([None, None, dtype, torch.float32]),
        (rng.random() < 0.3, rng.random() < 0.3),
    )  # fmt: skip
    # Few bits move numbers across a limit or a kink, which the gradient takes or leaves whole.
    smooth = not kinks and "limit" not in activation and "cap" not in activation
    bits = rng.choice([None, None, None, 8, 4]) if smooth and not case.ffn % 2 else None
    options: dict[str, int] = {"saved_activation_bits": bits} if bits else {}
    if bits is None:
        options["recompute"] = rng.random() < 0.4
    if bits is None and rng.random() < 0.3:
        options["max_rows"] = case.tokens * case.top_k + rng.choice([0, 1, 100])
    portable = dtype is torch.bfloat16 and rng.random() < 0.3
    said = f"expert_mlp {case} {dtype} {options}{' portable' if portable else ''}"
    exact = make_inputs(case, dtype=torch.float64, device=device)
    inputs = make_inputs(case, dtype=dtype, device=device)
    how, x = lying(rng, inputs["x"].detach())
    inputs["x"] = x.requires_grad_()
    said += f" x {how}"
    with contextlib.ExitStack() as stack:
        if portable:  # the backward pass, too, is to assume it
            plan = plan_of(torch.empty(0, dtype=torch.bfloat16, device=device))
            plan = dataclasses.replace(plan, specialized=False)
            stack.enter_context(assume(lambda kind: dataclasses.replace(plan, dtype=kind)))
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        got = run_expert_mlp(expert_mlp, inputs, activation=activation, **options)
    want = run_expert_mlp(reference.expert_mlp, exact, activation=activation)
    errors = {n: error(got[n], want[n], dtype) for n in want}
    for n in errors.keys() & {"d_b1", "d_b2"}:
        errors[n] *= min(TOLERANCES[dtype] / TOLERANCES[got[n].dtype], 1.0)
    bound = {None: TOLERANCES[dtype], 8: 3e-2, 4: 4e-1}[bits]
    if not all(e <= bound for e in errors.values()):
        inputs["x"] = x.detach().requires_grad_()
        rounded = run_expert_mlp(reference.expert_mlp, inputs, activation=activation, **options)
        errors = worse_than(errors, {n: error(rounded[n], want[n], dtype) for n in want})
    return said, bound, errors


def draw(seed: str, device: str) -> str:
    """One draw: its verdict, with what was drawn."""
    rng = random.Random(seed)
    make = rng.choice([an_op, an_op, an_expert_mlp])
    try:
        said, bound, errors = make(rng, device)
    except ValueError as refusal:
        return f"refused {seed}: {refusal}"
    except Exception:
        return f"DEFECT {seed}: {traceback.format_exc()[-1500:]}"
    worst = max(errors, key=lambda n: (errors[n] != errors[n], errors[n])) if errors else ""
    fine = not errors or errors[worst] <= 2 * bound  # few rows round less evenly than many
    found = f"{worst} {errors[worst]:.1e} of {bound:.0e}" if errors else ""
    return f"{'ok' if fine else 'DIFFERS'} {seed}: {said}: {found}"


def main(arguments: argparse.Namespace) -> int:
    """Run all draws, print what was not right, and how many were; how many were not."""
    counts: Counter[str] = Counter()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.workers, context) as pool:
        seeds = [f"{arguments.seed} {n}" for n in range(arguments.draws)]
        for done in as_completed([pool.submit(draw, seed, arguments.device) for seed in seeds]):
            verdict = done.result()
            counts[verdict.split()[0]] += 1
            if arguments.all or not verdict.startswith("ok"):
                print(verdict, flush=True)
    print(dict(counts))
    return counts["DEFECT"] + counts["DIFFERS"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Random calls of every op, a GPU against fp64.")
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--all", action="store_true", help="print the right ones too")
    raise SystemExit(main(parser.parse_args()) != 0)
