"""Expert parallelism on the GPUs of one host: bandwidth of the exchange, time of a layer.

    torchrun --nproc_per_node=2 packages/mb-parallel/benchmarks/run.py
    torchrun --nproc_per_node=2 packages/mb-parallel/benchmarks/run.py --only layer --seconds 5

- exchange: every rank sends its tokens of 16, 64 and 256 MiB, and those of the layer paper-125m,
  to uniformly drawn ranks (top-1), and gets them back. "peer" gathers the rows, stores them and
  waits; the baseline is an `all_to_all_single` of the same bytes in equal parts, without gathering
  or sorting anything. Both are captured as CUDA graphs of several exchanges: launched one by one,
  what is small waits for Python. GB/s are bus bytes: those that leave a rank, (P - 1) / P of all.
- layer: a dMoE layer, forward and backward, with each dispatcher, against a layer with all experts
  on this GPU and the same tokens. Routing is uniform or by Zipf's law, the popular experts
  anywhere, "sorted", all on the first rank, or "placed" by `rebalance_experts`. Ranks wait for the
  one with the most rows: how many times the mean it has is printed, and no dispatcher takes less
  than so many times the experts' part of the time. The layer of one GPU and the peers' are captured
  too: what is left is the GPU's.
  "pushed": the experts' results are sent by a kernel of their own instead of by those that make
  them, as where experts cannot store them.

Calls that are compared run in turns, a few at a time, between two events of the GPU; times are
medians of the slower rank. Prints tables, then one line of JSON.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from mb_kernels import bin_tokens, warm_up
from mb_layers import MoEConfig, dMoE
from mb_parallel import (
    ParallelDims,
    ParallelMesh,
    distributed,
    parallelize_experts,
    rebalance_experts,
)
from mb_parallel.expert_parallel import PeerBuffers, Place, fullest_rank
from torch import Tensor

MIB = 2**20
CAPTURED = 8  # calls in a graph
_SILENT = 40  # seconds
ROUTINGS = ("uniform", "zipf", "zipf, sorted", "zipf, placed")
CAPTURED_WAYS = ("one GPU", "peer", "peer, pushed")
# name: tokens of each rank, hidden, ffn, experts, top-k, activation
LAYERS = {
    "paper-125m": (32768, 768, 3072, 64, 1, "gelu"),
    "olmoe": (16384, 2048, 1024, 64, 8, "swiglu"),
}
# tokens of each rank, hidden
EXCHANGES = [(size * MIB // (2 * 2048), 2048) for size in (16, 64, 256)] + [(32768, 768)]
# How rows come to experts: arguments of `parallelize_experts`.
WAYS: dict[str, dict[str, Any]] = {
    "all_gather": {"dispatcher": "all_gather"},
    "all_to_all": {"dispatcher": "all_to_all"},
    "all_to_all, 2 chunks": {"dispatcher": "all_to_all", "chunks": 2},
    "peer": {"dispatcher": "peer"},
    "peer, pushed": {"dispatcher": "peer", "pushed": True},  # results by a kernel of their own
    "peer, rows kept": {"dispatcher": "peer", "keep_rows": True},
    "peer, exact": {"dispatcher": "peer", "row_policy": "exact"},
}


def slowest_in_turns(
    calls: Mapping[str, Callable[[], Any]], seconds: float, repeats: int = 5
) -> dict[str, float]:
    """Median milliseconds of each call on the slowest rank, over rounds in which all have a turn.

    All ranks run the same number of rounds, in the same order, decided by rank 0.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    stop = time.monotonic() + seconds
    going = torch.ones(1)
    while going.item():
        for name, call in calls.items():
            call()  # alone: after a barrier of another kind the first one waits for its peer
            events = []
            for _ in range(repeats):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                call()
                end.record()
                events.append((start, end))
            torch.cuda.synchronize()
            times[name] += [start.elapsed_time(end) for start, end in events]
        going.fill_(time.monotonic() < stop or len(next(iter(times.values()))) < 4 * repeats)
        dist.broadcast(going, 0)
    medians = torch.tensor([statistics.median(values) for values in times.values()])
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return dict(zip(calls, medians.tolist(), strict=True))


def captured(call: Callable[[], Any]) -> Callable[[], None]:
    """`call`, several times in one graph, which keeps nothing alive of what `call` refers to."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(CAPTURED):
            call()
    return graph.replay


def say(line: str) -> None:
    """Rank 0 does; if it then says nothing for a while, where each thread stands."""
    if dist.get_rank() == 0:
        print(line, flush=True)
    faulthandler.dump_traceback_later(_SILENT, repeat=True)


def exchange(mesh: ParallelMesh, tokens: int, hidden: int, seconds: float) -> dict[str, float]:
    """Times of a rank's bf16 tokens, there and back."""
    ep = mesh.axis("ep")
    assert ep is not None
    place, ranks = Place(ep.get_group(), "the benchmark"), mesh.ep_size
    x_TD = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    memory = PeerBuffers(place, max_tokens=tokens).memory(x_TD, words=2)
    peers_T1 = torch.randint(0, ranks, (tokens, 1), device="cuda", dtype=torch.int32)
    bins = bin_tokens(peers_T1, ranks)
    routing_TW = torch.ones(tokens, 2, device="cuda")
    out_TD = torch.empty_like(x_TD)

    def dispatch() -> Tensor:
        memory.push(
            "tokens",
            x_TD,
            bins.tokens_per_expert_E,
            order_N=bins.order_N,
            payload=routing_TW,
        )
        return memory.wait("tokens")

    def combine() -> None:
        memory.push("home", memory.rows("tokens"), counts_P)
        memory.wait("home")
        memory.sum_home(memory.rows("home"), peers_T1, bins.inverse_N, bins.offsets_E1)

    def all_to_all() -> None:
        dist.all_to_all_single(out_TD, x_TD, group=place.group)

    def gathered_all_to_all() -> None:
        order_T = bins.order_N.long()
        dist.all_to_all_single(out_TD, x_TD[order_T], group=place.group)

    counts_P = dispatch()  # what `combine` sends home
    calls: dict[str, Callable[[], Any]] = {
        "all_to_all": all_to_all,
        "gather + all_to_all": gathered_all_to_all,
        "peer dispatch": dispatch,
        "peer combine": combine,
    }
    graphs = {name: captured(call) for name, call in calls.items()}
    return {name: ms / CAPTURED for name, ms in slowest_in_turns(graphs, seconds).items()}


def layer(
    mesh: ParallelMesh, name: str, routing: str, seconds: float, *, graphs: bool
) -> tuple[dict[str, float], float]:
    """Times of one layer forward and backward with each dispatcher, and on this GPU alone.

    Also the rows of the fullest rank over the mean.
    """
    tokens, hidden, ffn, experts, top_k, activation = LAYERS[name]
    config = MoEConfig(
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_experts=experts,
        top_k=top_k,
        activation=activation,
        router_bias=True,
    )
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)

    # Softmax of -log(rank) is Zipf's law.
    popularity = torch.arange(experts) + 1.0
    if routing in ("zipf", "zipf, placed"):
        popularity = popularity[torch.randperm(experts, generator=torch.Generator().manual_seed(0))]

    def build(options: dict[str, Any] | None) -> Callable[[], None]:
        torch.manual_seed(0)
        moe = dMoE(config, device="cuda", dtype=torch.bfloat16)
        if routing != "uniform":
            assert moe.router.bias is not None
            with torch.no_grad():
                moe.router.weight.normal_(std=1 / hidden**0.5)
                moe.router.bias.copy_(-popularity.log())
        counts_E = moe(x).metrics["tokens_per_expert"]
        if options is not None:
            _spread(moe, mesh, **options)
            moved = []
            if routing == "zipf, placed":
                moved = rebalance_experts(moe, {"": counts_E}, mesh)
            dist.all_reduce(counts_E)
            fullest.append(moved[0].after if moved else fullest_rank(counts_E, mesh.ep_size))

        def run() -> None:
            y, aux_loss, _ = moe(x)
            torch.autograd.backward([y, aux_loss], [dy, torch.ones_like(aux_loss)])
            x.grad = None
            for parameter in moe.parameters():
                parameter.grad = None

        return run

    fullest: list[float] = []
    ways: dict[str, dict[str, Any] | None] = {"one GPU": None, **WAYS}
    if not graphs:
        calls = {way: build(options) for way, options in ways.items()}
        return slowest_in_turns(calls, seconds), fullest[0]
    layers = {way: build(ways[way]) for way in CAPTURED_WAYS}  # alive while their graphs run
    replays: dict[str, Callable[[], None]] = {}
    for way, run in layers.items():
        replays[way] = captured(run)
        say(f"    {way} captured")
    times = slowest_in_turns(replays, seconds)
    return {way: ms / CAPTURED for way, ms in times.items()}, fullest[0]


def _spread(moe: dMoE, mesh: ParallelMesh, *, pushed: bool = False, **options: Any) -> None:
    parallelize_experts(moe, mesh, equal_tokens=True, **options)
    if pushed:
        moe.dispatcher.stores_home = lambda: False


def _compile_ahead(ranks: int) -> None:
    """The experts' kernels of all layers, in threads: one after the other they take a minute."""
    names = ("tokens", "hidden_size", "ffn_hidden_size", "num_experts", "top_k", "activation")
    layers = [dict(zip(names, sizes, strict=True)) for sizes in LAYERS.values()]
    started = [warm_up(**layer, ranks=n) for layer in layers for n in (1, ranks)]
    for compiled in started:
        compiled.result()


def memory_of(mesh: ParallelMesh, name: str) -> dict[str, float]:
    """MiB that a layer holds between forward and backward, with each way of keeping rows."""
    tokens, hidden, ffn, experts, top_k, activation = LAYERS[name]
    config = MoEConfig(
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_experts=experts,
        top_k=top_k,
        activation=activation,
    )
    held = {}
    budget = {"dispatcher": "peer", "row_policy": "budget", "row_budget": 1.25}
    for way, options in (WAYS | {"peer, budget 1.25": budget}).items():
        moe = dMoE(config, device="cuda", dtype=torch.bfloat16)
        _spread(moe, mesh, **options)
        x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        moe(x).y.sum().backward()
        torch.cuda.synchronize()
        gc.collect()  # the layer before, which holds itself in a cycle
        before = torch.cuda.memory_allocated()
        y: Tensor = moe(x).y
        torch.cuda.synchronize()
        held[way] = (torch.cuda.memory_allocated() - before - y.nbytes) / MIB
        y.sum().backward()
        del moe, y  # whose graph holds the layer's parameters
    return held


def main() -> None:
    parser = argparse.ArgumentParser(description="Benchmark expert parallelism.")
    parser.add_argument("--only", choices=("exchange", "layer", "memory"))
    parser.add_argument("--captured", action="store_true", help="layers in CUDA graphs alone")
    parser.add_argument("--seconds", type=float, default=3.0, help="per comparison")
    arguments = parser.parse_args()
    result: dict[str, Any] = {}
    with distributed("cuda"):
        ranks = dist.get_world_size()
        mesh = ParallelDims(dp_shard=ranks, ep=ranks).build("cuda")

        if arguments.only in (None, "exchange"):
            say(f"exchange over {ranks} ranks, bf16 rows: ms, and GB/s of bus bytes")
            for tokens, hidden in EXCHANGES:
                times = exchange(mesh, tokens, hidden, arguments.seconds)
                result[f"exchange {tokens} x {hidden}"] = times
                size = tokens * hidden * 2
                bus = size * (ranks - 1) / ranks
                told = [f"{n} {ms:.3f} ({bus / ms / 1e6:.0f})" for n, ms in times.items()]
                once = times["all_to_all"]
                there, back = times["peer dispatch"], times["peer combine"]
                told += [f"dispatch x {once / there:.2f}, both x {2 * once / (there + back):.2f}"]
                say(f"  {size // MIB} MiB, {tokens} x {hidden}  {'  '.join(told)}")
        if arguments.only in (None, "layer"):
            say("layer, forward and backward, ms (against one GPU with the same tokens)")
            start = time.monotonic()
            _compile_ahead(ranks)
            say(f"  kernels compiled in {time.monotonic() - start:.0f} s")
            forms = (True,) if arguments.captured else (False, True)
            for graphs, routing, name in itertools.product(forms, ROUTINGS, LAYERS):
                times, fullest = layer(mesh, name, routing, arguments.seconds, graphs=graphs)
                what = f"{name}, {routing} (fullest {fullest:.2f}){', captured' * graphs}"
                result[f"layer {what}"] = times
                base = times["one GPU"]
                told = [f"{way} {ms:.2f} (x {ms / base:.2f})" for way, ms in times.items()]
                say(f"  {what}:  {'  '.join(told)}")
        if arguments.only in (None, "memory"):
            say("held between forward and backward, MiB")
            for name in LAYERS:
                held = memory_of(mesh, name)
                result[f"memory {name}"] = held
                say(f"  {name}:  {'  '.join(f'{n} {m:.0f}' for n, m in held.items())}")
        if dist.get_rank() == 0:
            print(json.dumps({"device": torch.cuda.get_device_name(), "ranks": ranks, **result}))


if __name__ == "__main__":
    main()
