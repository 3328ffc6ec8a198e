"""The dMoE layer beside its kernels: what router, losses and metrics add in time and memory.

    python packages/mb-layers/benchmarks/run.py            # on a GPU
    python packages/mb-layers/benchmarks/run.py --smoke    # tiny, on CPU

The baseline is `mb_kernels.bin_tokens` and `expert_mlp`, forward and backward, on the routing that
the layer's router makes of the same tokens. Variants run alternately in one process, five passes
queued between two readings of the clock; times are medians. "graph ms" is forward and backward
replayed from a CUDA graph: what the GPU needs when it does not wait for the host. "held" is what
lives between forward and backward: the tokens, and what autograd keeps besides parameters. Prints a
table, then one line of JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import mb_kernels
import torch
from mb_layers import MoEConfig, dMoE

# name: tokens, hidden, ffn, experts, top-k, activation
SHAPES = {
    "olmoe": (32768, 2048, 1024, 64, 8, "swiglu"),
    "qwen3-30b": (32768, 2048, 768, 128, 8, "swiglu"),
    "mixtral": (8192, 4096, 14336, 8, 2, "swiglu"),
    "paper-125m": (16384, 768, 3072, 64, 1, "gelu"),
    "smoke": (96, 32, 48, 4, 2, "swiglu"),
}


Pass = tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]


def variants(shape: tuple[int, int, int, int, int, str], device: str) -> dict[str, Callable]:
    """Each returns outputs, the inputs to differentiate for, and the outputs' gradients."""
    tokens, hidden, ffn, experts, top_k, activation = shape
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config = MoEConfig(
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_experts=experts,
        top_k=top_k,
        activation=activation,
        z_loss_weight=1e-3,
    )
    layer = dMoE(config, device=device, dtype=dtype)
    x = torch.randn(tokens, hidden, device=device, dtype=dtype, requires_grad=True)
    dy = torch.randn_like(x)
    with torch.no_grad():
        routed = layer.router(x)
    one = torch.ones((), device=device)
    w1, w2 = layer.experts.w1, layer.experts.w2

    def kernels() -> Pass:
        weights = routed.weights_TK.clone().requires_grad_()  # the routing counts as held
        bins = mb_kernels.bin_tokens(routed.expert_ids_TK, experts)
        y = mb_kernels.expert_mlp(x, w1, w2, bins, weights, activation=activation)
        return [y], [x, w1, w2, weights], [dy]

    def whole(run: Callable) -> Pass:
        y, aux_loss, _ = run(x)
        return [y, aux_loss], [x, *layer.parameters()], [dy, one]

    compiled = torch.compile(layer, fullgraph=True)
    named = {"kernels": kernels, "layer": lambda: whole(layer)}
    return named | {"layer, compiled": lambda: whole(compiled)} if device == "cuda" else named


def measure(run: Callable, device: str, passes: int = 5) -> tuple[float, float]:
    """Milliseconds of one forward, and of one forward and backward."""
    with torch.no_grad():
        run()
        times = [_now(device)]
        for _ in range(passes):
            run()
    times.append(_now(device))
    for _ in range(passes):
        torch.autograd.grad(*run())
    times.append(_now(device))
    if device == "cuda":
        torch.cuda.synchronize()
        spans = [a.elapsed_time(b) for a, b in itertools.pairwise(times)]
    else:
        spans = [1e3 * (b - a) for a, b in itertools.pairwise(times)]
    return spans[0] / passes, spans[1] / passes


def measure_graph(run: Callable, replays: int = 10) -> float:
    """Milliseconds of one forward and backward, replayed from a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.autograd.grad(*run())
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.autograd.grad(*run())
    graph.replay()
    start = _now("cuda")
    for _ in range(replays):
        graph.replay()
    end = _now("cuda")
    torch.cuda.synchronize()
    return start.elapsed_time(end) / replays


def _now(device: str) -> Any:
    if device == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def held_bytes(run: Callable, device: str) -> int:
    """Bytes that live between forward and backward because of this run, the tokens among them."""
    if device == "cpu":
        seen: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if not isinstance(tensor, torch.nn.Parameter):
                seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = run()
        del outputs
        return sum(seen.values())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    outputs = run()
    torch.cuda.synchronize()
    # y is not kept for the backward pass; x, of the same size, is.
    held = torch.cuda.memory_allocated() - before
    torch.autograd.grad(*outputs)
    return held


def benchmark(name: str, device: str, repeats: int) -> list[dict[str, Any]]:
    """One row per variant."""
    named = variants(SHAPES[name], device)
    times: dict[str, list[tuple[float, float]]] = {variant: [] for variant in named}
    held = {}
    for variant, run in named.items():
        for _ in range(3):
            measure(run, device)
        held[variant] = held_bytes(run, device)
    for _ in range(repeats):
        for variant, run in named.items():
            times[variant].append(measure(run, device))
    rows = []
    for variant in named:
        forward, both = (statistics.median(t) for t in zip(*times[variant], strict=True))
        row = {"shape": name, "variant": variant, "forward_ms": forward, "both_ms": both}
        # Inductor's code is captured by its own means, not by ours.
        graph_ms = None
        if device == "cuda" and "compiled" not in variant:
            graph_ms = measure_graph(named[variant])
        rows.append(row | {"graph_ms": graph_ms, "held_bytes": held[variant]})
    for row in rows:
        row["time_over_kernels"] = row["both_ms"] / rows[0]["both_ms"] - 1
        row["memory_over_kernels"] = row["held_bytes"] / max(rows[0]["held_bytes"], 1) - 1
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="The dMoE layer beside its kernels.")
    default = ["olmoe", "qwen3-30b", "mixtral", "paper-125m"]
    parser.add_argument("--shapes", nargs="+", default=default, choices=SHAPES)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--smoke", action="store_true", help="one tiny shape, two repeats")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.smoke:
        arguments.shapes, arguments.repeats = ["smoke"], 2
    elif device == "cpu":
        parser.error("expected a GPU; for a tiny run on CPU use --smoke")
    chip = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{chip}, torch {torch.__version__}, median of {arguments.repeats}")
    titles = ("fwd ms", "fwd+bwd", "over", "held MiB", "over", "graph ms")
    print(f"{'shape':12} {'variant':16} " + " ".join(f"{title:>8}" for title in titles))
    rows = []
    for name in arguments.shapes:
        for row in benchmark(name, device, arguments.repeats):
            rows.append(row)
            print(
                f"{row['shape']:12} {row['variant']:16} {row['forward_ms']:8.2f} "
                f"{row['both_ms']:8.2f} {row['time_over_kernels']:+8.1%} "
                f"{row['held_bytes'] / 2**20:8.1f} {row['memory_over_kernels']:+8.1%} "
                + ("" if row["graph_ms"] is None else f"{row['graph_ms']:8.2f}")
            )
    print(json.dumps({"benchmark": "mb-layers", "chip": chip, "rows": rows}))


if __name__ == "__main__":
    main()
