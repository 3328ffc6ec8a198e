"""The first forward and backward of a layer whose kernels are not compiled yet.

    python packages/mb-kernels/benchmarks/run.py first_call [--shape olmoe ...]

For each shape three processes start and put inputs on the GPU. Then, one after another, each runs a
layer and waits for the GPU. "cold": Triton's cache is empty, and kernels are compiled as they are
launched. "ahead": the same with ``warm_up`` called right before. "cached": the kernels are in
Triton's cache on disk, as in a second run. "steady" is the same call once more.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
from layer import SHAPES, make_inputs, ours
from mb_kernels import warm_up

DEFAULT = ("olmoe", "paper-125m", "gpt-oss")  # three activations, top-1 and more
_HOW = ("cold", "ahead", "cached")


def measure(name: str, ahead: bool) -> dict[str, float]:
    """Wait for a line on stdin; then the seconds of the first step and of the next one."""
    shape = SHAPES[name]
    inputs = make_inputs(shape, "uniform")
    arguments = [inputs[n] for n in ("x", "logits", "w1", "w2")]
    layer, dy = ours(shape), torch.randn_like(inputs["x"])
    torch.autograd.grad(dy.requires_grad_() * 2, dy, dy)  # what torch itself imports for it, SymPy
    dy = dy.detach()
    torch.cuda.synchronize()
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.perf_counter()
    if ahead:
        sizes = {"tokens": shape.tokens, "hidden_size": shape.hidden, "ffn_hidden_size": shape.ffn}
        warm_up(**sizes, num_experts=shape.experts, top_k=shape.top_k, activation=shape.activation)
    seconds = []
    for _ in range(2):
        torch.autograd.grad(layer(*arguments), arguments, dy)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
    return {"first_s": round(seconds[0], 2), "steady_s": round(seconds[1], 4)}


def _start(name: str, how: str, cache: pathlib.Path) -> subprocess.Popen[str]:
    """A process that measures; a cached one finds what the cold one leaves behind."""
    folder = cache / f"{name}-{'cold' if how == 'cached' else how}"
    return subprocess.Popen(
        [sys.executable, __file__, name, how],
        env=os.environ | {"TRITON_CACHE_DIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _answer(process: subprocess.Popen[str]) -> dict[str, float]:
    """Let a process measure, once it is ready."""
    assert process.stdout
    process.stdout.readline()
    out, _ = process.communicate("go\n")
    if process.returncode:
        raise RuntimeError(f"a measuring process ended with {process.returncode}: {out}")
    return json.loads(out.splitlines()[-1])


def run(*, quick: bool = False) -> Iterator[list[dict[str, Any]]]:
    names = [n for n in DEFAULT if n in SHAPES] or list(SHAPES)
    for name in names[: 1 if quick else None]:
        with tempfile.TemporaryDirectory() as folder:
            cache = pathlib.Path(folder)
            started = {how: _start(name, how, cache) for how in _HOW}
            for how, process in started.items():
                found = _answer(process)
                kernels = len(list(cache.glob(f"{name}-{how}/*/*.cubin")))
                row = {"benchmark": "first_call", "shape": name, "what": how, **found}
                yield [row | ({"kernels": kernels} if kernels else {})]


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], sys.argv[2] == "ahead")))
