"""`relative_attention` beside SDPA with the bias as a mask, in turns on one GPU.

    python packages/mb-kernels/benchmarks/attention.py [--tiles] [--seconds 2]

The size of T5-base: 12 heads of 64, 32 sequences of 64 to 512 tokens in bf16. SDPA computes on
padded sequences with a mask [B, H, S, S] that holds the bias, as in models without a kernel for it.
Its backward ends at the gradient of the mask; summing that by distance is not counted. The kernel
takes the real tokens, one sequence after another. "flash" is torch's attention on the same tokens
without a bias: what could be reached. --tiles: the same with other tiles, one kernel at a time.
Every line is printed as it is measured.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from mb_kernels import relative_attention
from mb_kernels.targets import table
from timing import eight_of_ten, in_turns, median

H, C = 12, 64
# name, sequences, longest, shortest, causal
SHAPES = (
    ("encoder 512", 32, 512, 64, False),
    ("decoder 128", 32, 128, 16, True),
    ("encoder 2048", 8, 2048, 256, False),
)
TILES = {
    "attention": ((64, 64, 4), (128, 64, 8), (128, 128, 8), (128, 64, 4), (64, 32, 4)),
    "attention_dkv": ((64, 32, 4), (128, 32, 8), (64, 64, 4), (128, 64, 8), (32, 64, 4)),
    "attention_dbias": ((64, 64, 4), (64, 64, 8), (32, 32, 4), (128, 128, 8)),
}


class Case:
    """Inputs of one shape."""

    def __init__(self, count: int, longest: int, shortest: int, causal: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(shortest, longest + 1, (count,), generator=generator)
        self.count, self.longest, self.causal = count, longest, causal
        self.lengths, self.tokens = lengths.cuda(), int(lengths.sum())
        self.offsets = F.pad(self.lengths.cumsum(0), (1, 0)).int()
        self.bias = torch.randn(H, 2 * longest - 1, device="cuda")

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

        self.row = [normal(self.tokens, H, C) for _ in range(4)]
        self.batch = [normal(count, H, longest, C) for _ in range(4)]

    def kernel(self, *, need_bias: bool = True) -> dict[str, Callable[[], object]]:
        """Forward, and backward of it."""
        *given, dy = self.row
        how = (self.causal, C**-0.5)
        inputs = (*given, self.bias, self.offsets)
        y, norms = torch.ops.mb.relative_attention(*inputs, *how)
        backward = torch.ops.mb.relative_attention_backward
        return {
            "forward": lambda: torch.ops.mb.relative_attention(*inputs, *how),
            "backward": lambda: backward(dy, *inputs, y, norms, *how, need_bias),
        }

    def sdpa(self) -> dict[str, Callable[[], object]]:
        """The same under a mask."""
        *given, dy = [x.requires_grad_() for x in self.batch]
        places = torch.arange(self.longest, device="cuda")
        bias = self.bias[:, places - places[:, None] + self.longest - 1].bfloat16()
        seen = (places < self.lengths[:, None])[:, None, None] | torch.eye(
            self.longest, device="cuda", dtype=torch.bool
        )
        if self.causal:
            seen = seen.tril()
        mask = bias.masked_fill(~seen, -torch.inf).requires_grad_()
        y = F.scaled_dot_product_attention(*given, attn_mask=mask)
        leaves = [*given, mask]
        return {
            "forward": lambda: F.scaled_dot_product_attention(*given, attn_mask=mask),
            "backward": lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True),
        }

    def flash(self) -> dict[str, Callable[[], object]]:
        """Without a bias."""
        from torch.nn.attention.varlen import varlen_attn

        *given, dy = [x.detach().requires_grad_() for x in self.row]
        where = (self.offsets, self.offsets, self.longest, self.longest)
        window = (-1, 0 if self.causal else -1)
        y = varlen_attn(*given, *where, window_size=window)
        return {
            "forward": lambda: varlen_attn(*given, *where, window_size=window),
            "backward": lambda: torch.autograd.grad(y, given, dy, retain_graph=True),
        }


def check(case: Case) -> None:
    """Print how far the kernel is from fp64, gradients too, on two sequences."""
    end = int(case.offsets[2])
    row = [x[:end].detach() for x in case.row[:3]]
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        where = "cuda" if dtype is torch.bfloat16 else "cpu"
        bias = case.bias.to(where, torch.promote_types(dtype, torch.float32))
        leaves = [x.to(where, dtype).requires_grad_() for x in row] + [bias.requires_grad_()]
        y = relative_attention(*leaves, case.offsets[:3].to(where), causal=case.causal)
        weight = case.row[3][:end].to(where, dtype)
        found.append([y, *torch.autograd.grad((y * weight).sum(), leaves)])
    errors = [
        ((got.cpu().double() - want).norm() / want.norm()).item()
        for got, want in zip(*found, strict=True)
    ]
    names = ("y", "dq", "dk", "dv", "d_bias")
    print("  error:", ", ".join(f"{n} {e:.1e}" for n, e in zip(names, errors, strict=True)))


def show(calls: dict[str, Callable[[], object]], seconds: float) -> None:
    """A line for each call."""
    for name, times in in_turns(calls, seconds=seconds, burst_ms=5).items():
        print(f"  {name:44} {median(times):8.3f} ms  {eight_of_ten(times)}", flush=True)


def other_tiles(case: Case, seconds: float) -> None:
    """Forward and backward with other tiles of one kernel; what does not compile says so."""
    calls = case.kernel()
    chip = table.current_target(torch.device("cuda")).name
    for op, shapes in TILES.items():
        kept, timed = table.TILES[op][chip], {}
        for rows, columns, warps in shapes:
            for stages in (2, 3):
                tile = replace(
                    kept, block_m=rows, block_n=columns, num_warps=warps, num_stages=stages
                )

                def run(tile: table.Tile = tile, op: str = op) -> None:
                    table.TILES[op][chip] = tile
                    for call in calls.values():
                        call()

                name = f"{op} {rows} x {columns}, {warps} warps, {stages} stages"
                try:
                    run()
                    torch.cuda.synchronize()
                    timed[name] = run
                except Exception as error:
                    print(f"  {name}: {str(error)[:90]}", flush=True)
        show(timed, seconds)
        table.TILES[op][chip] = kept


def main() -> None:
    """Measure every shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tiles", action="store_true", help="other tiles, encoder's first shape")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each table")
    options = parser.parse_args()
    for name, *sizes in SHAPES:
        case = Case(*sizes)
        print(f"{name}: {case.tokens} tokens of {case.count * case.longest} places", flush=True)
        check(case)
        calls = {}
        ways = {"kernel": case.kernel, "SDPA": case.sdpa, "flash": case.flash}
        ways["kernel, bias fixed"] = lambda case=case: {
            "backward": case.kernel(need_bias=False)["backward"]
        }
        for way, make in ways.items():
            try:
                calls |= {f"{way}: {what}": call for what, call in make().items()}
            except (ImportError, RuntimeError, TypeError) as error:
                print(f"  {way}: {str(error)[:90]}", flush=True)
        show(calls, options.seconds)
    if options.tiles:
        other_tiles(Case(*SHAPES[0][1:]), options.seconds)


if __name__ == "__main__":
    main()
