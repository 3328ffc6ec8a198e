"""Expert parallelism on two GPUs: every dispatcher against one GPU, and what only a GPU shows.

That dispatchers wait for nothing and can be captured shows on one GPU too, by a group of one rank.
"""

import os
import time

import pytest
import torch
import torch.distributed as dist
from mb_kernels.testing import relative_error
from mb_layers.config import MoEConfig
from mb_layers.moe import MoE, dMoE
from mb_parallel import ParallelDims, parallelize_experts, within_budget
from mb_parallel.expert_parallel import AllGatherDispatcher, FixedDispatcher, Place
from mb_parallel.expert_parallel.global_capacity import GlobalCapacity
from mb_parallel.optimizer import local
from mb_parallel.testing import run_ranks
from torch.distributed.tensor import DTensor

pytestmark = pytest.mark.gpu
GPUS = min(torch.cuda.device_count(), 2)
two_gpus = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
no_gpu = pytest.mark.skipif(GPUS < 1, reason="needs a GPU")

TOKENS, HIDDEN = 777, 256
DISPATCHERS = ("all_gather", "all_to_all", "all_to_all in 3 chunks", "peer")
CASES = {
    "top-1": {"top_k": 1},
    "top-4": {"top_k": 4, "renormalize": True},
    "recompute": {"top_k": 2, "recompute": True},
    "capacity": {"top_k": 2, "capacity_factor": 1.0},
    "gelu": {"top_k": 2, "activation": "gelu"},
}


def _layer(dtype: torch.dtype, **overrides) -> MoE | dMoE:
    torch.manual_seed(5)
    fields = {"hidden_size": HIDDEN, "ffn_hidden_size": 128, "num_experts": 8} | overrides
    config = MoEConfig(**fields, init_method_std=0.1)
    kind = dMoE if config.capacity_factor is None else MoE
    return kind(config, device="cuda", dtype=dtype)


def _tokens(ranks: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(ranks * TOKENS, HIDDEN, generator=generator).to("cuda", dtype)


def _through(layer, x: torch.Tensor) -> dict[str, torch.Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = x + layer(x).y
    with torch.no_grad():
        layer(x.flip(0))  # other tokens in the buffers that layers share
    (y * torch.cos(3 * x.detach())).sum().backward()
    assert x.grad is not None
    result = {"y": y.detach(), "dx": x.grad}
    for name, parameter in layer.named_parameters():
        grad = parameter.grad
        result[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return result


def _compare(rank: int, ranks: int, dtype: torch.dtype) -> list[tuple[str, float]]:
    mesh = ParallelDims(dp_shard=ranks, ep=ranks).build("cuda")
    x = _tokens(ranks, dtype)
    mine = slice(rank * TOKENS, (rank + 1) * TOKENS)
    errors = []
    for case, overrides in CASES.items():
        expected = _through(_layer(dtype, **overrides), x)
        for dispatcher in DISPATCHERS:
            layer = _layer(dtype, **overrides)
            kind, *chunks = dispatcher.split(" in ")
            said = parallelize_experts(layer, mesh, dispatcher=kind, chunks=3 if chunks else 1)
            assert f"by {dispatcher}, as asked for" in said, said
            got = _through(layer, x[mine])
            again = _through(layer, x[mine])
            for name, value in got.items():
                assert torch.equal(value, again[name]), f"{dispatcher}: {name} differs"
                if name.startswith("router"):
                    torch.distributed.all_reduce(value)
                want = expected[name][mine] if name in ("y", "dx") else expected[name]
                errors.append((f"{case}, {dispatcher}: {name}", relative_error(value, want)))
    return errors


@two_gpus
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"]
)
def test_two_gpus_match_one(dtype, bound):
    for errors in run_ranks(_compare, 2, dtype, device_type="cuda", timeout_s=280):
        assert not [pair for pair in errors if not pair[1] <= bound]


def _spread(layer: MoE | dMoE, ranks: int, dispatcher: str, keep_rows: bool) -> None:
    """As `parallelize_experts` does it; it leaves a single rank alone."""
    mesh = ParallelDims(dp_shard=ranks, ep=ranks).build("cuda")
    said = parallelize_experts(
        layer, mesh, dispatcher=dispatcher, keep_rows=keep_rows, equal_tokens=True
    )
    if ranks > 1:
        assert f"by {dispatcher}, as asked for" in said, said
        return
    experts, factor = layer.config.num_experts, layer.config.capacity_factor
    assert dist.group.WORLD is not None
    place = Place(dist.group.WORLD)
    if dispatcher == "fixed":
        layer.dispatcher = FixedDispatcher(layer.dispatcher, place, equal_tokens=True)
        return
    layer.dispatcher = AllGatherDispatcher(experts, place, equal_tokens=True)
    if factor is not None:
        layer.dispatcher = GlobalCapacity(
            layer.dispatcher, experts, factor, place, equal_tokens=True
        )


def _without_a_sync(
    rank: int, ranks: int, dispatcher: str, keep_rows: bool, capacity_factor: float | None
) -> tuple[list[float], list[float]]:
    """Errors of a captured step against an eager one, and of that against this rank alone."""
    dtype = torch.bfloat16
    layer = _layer(dtype, top_k=2, capacity_factor=capacity_factor)
    _spread(layer, ranks, dispatcher, keep_rows)
    batches = _tokens(ranks * 3, dtype).view(3, ranks, TOKENS, HIDDEN)[:, rank]

    x = batches[0].clone().requires_grad_()

    def step() -> torch.Tensor:
        out = layer(x)
        (out.y.sum() + out.aux_loss).backward()
        return out.y

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")  # a read back to the host raises
        step()
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()

    for parameter in (x, *layer.parameters()):
        parameter.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    errors, against_alone = [], []
    alone = _layer(dtype, top_k=2, capacity_factor=capacity_factor)
    for batch in batches:
        with torch.no_grad():
            x.copy_(batch)
        for parameter in (x, *layer.parameters()):
            parameter.grad.zero_()
        graph.replay()
        got = [y.clone(), x.grad.clone(), layer.router.weight.grad.clone()]
        got.append(local(layer.experts.w1.grad).clone())
        for parameter in (x, *layer.parameters()):
            parameter.grad.zero_()
        y_eager = step()
        want = [y_eager, x.grad, layer.router.weight.grad, local(layer.experts.w1.grad)]
        errors += [relative_error(a, b) for a, b in zip(got, want, strict=True)]
        if capacity_factor is None or dispatcher == "fixed":  # what others bring changes nothing
            alone.zero_grad()
            x_alone = batch.clone().requires_grad_()
            out = alone(x_alone)
            (out.y.sum() + out.aux_loss).backward()
            one = [out.y, x_alone.grad, alone.router.weight.grad]
            against_alone += [relative_error(a, b) for a, b in zip(want, one, strict=False)]
    return errors, against_alone


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("peer", False, None), id="peer-sent-again", marks=two_gpus),
        pytest.param(("peer", True, None), id="peer-kept", marks=two_gpus),
        pytest.param(("peer", False, 1.0), id="peer-capacity", marks=two_gpus),
        pytest.param(("all_gather", False, None), id="all_gather", marks=no_gpu),
        pytest.param(("all_gather", False, 1.0), id="all_gather-capacity", marks=no_gpu),
        pytest.param(("fixed", False, 1.0), id="fixed", marks=no_gpu),
    ],
)
def test_a_layer_in_a_graph_and_without_a_host_sync(options):
    results = run_ranks(_without_a_sync, GPUS, *options, device_type="cuda", timeout_s=280)
    for errors, against_alone in results:
        assert max(errors) == 0.0
        assert not [error for error in against_alone if not error <= 2e-2]


def _beyond_the_budget(rank: int, ranks: int) -> list[tuple[str, float]]:
    """All tokens to one rank's experts, with room for balanced routing alone."""
    mesh = ParallelDims(dp_shard=ranks, ep=ranks).build("cuda")
    x = _tokens(ranks, torch.float32)[rank * TOKENS : (rank + 1) * TOKENS]
    errors = []
    for dispatcher in ("all_gather", "peer"):
        results = []
        for policy in ("worst", "exact", "budget"):
            layer = _layer(torch.float32, top_k=2, router_bias=True)
            with torch.no_grad():
                layer.router.bias[:2] = 50.0
            parallelize_experts(
                layer, mesh, dispatcher=dispatcher, row_policy=policy, row_budget=1.0
            )
            result, redone = within_budget([layer], lambda: _through(layer, x), x.device)  # noqa: B023
            assert redone == (policy == "budget")
            results.append(result)
        for other in results[1:]:
            errors += [(f"{dispatcher}: {n}", relative_error(other[n], v))
                       for n, v in results[0].items()]  # fmt: skip
    return errors


@two_gpus
def test_a_step_beyond_the_budget_runs_again():
    for errors in run_ranks(_beyond_the_budget, 2, device_type="cuda", timeout_s=280):
        assert not [pair for pair in errors if not pair[1] <= 1e-6]


def _compiled(rank: int, ranks: int) -> list[tuple[str, float]]:
    """Layers that torch.compile cuts at the exchange, against the same layers eagerly."""
    mesh = ParallelDims(dp_shard=ranks, ep=ranks).build("cuda")
    x = _tokens(ranks, torch.float32)[rank * TOKENS : (rank + 1) * TOKENS]
    errors = []
    for dispatcher in ("all_gather", "all_to_all", "peer"):
        for policy in ("worst",) if dispatcher == "all_to_all" else ("worst", "exact", "budget"):
            layer = _layer(torch.float32, top_k=1)
            parallelize_experts(
                layer, mesh, dispatcher=dispatcher, row_policy=policy, row_budget=1.5
            )
            want = _through(layer, x)
            layer.compile()
            got = _through(layer, x)
            errors += [(f"{dispatcher}, {policy}: {n}", relative_error(got[n], v))
                       for n, v in want.items()]  # fmt: skip
    return errors


@two_gpus
def test_compiled_layers_with_every_policy_of_rows_match_eager_ones():
    for errors in run_ranks(_compiled, 2, device_type="cuda", timeout_s=280):
        assert not [pair for pair in errors if not pair[1] <= 1e-5]


def _absent(rank: int, ranks: int) -> str:
    mesh = ParallelDims(dp_shard=ranks, ep=ranks).build("cuda")
    layer = _layer(torch.bfloat16)
    parallelize_experts(layer, mesh, dispatcher="peer", timeout_s=2.0)
    x = _tokens(1, torch.bfloat16)
    layer(x)
    torch.cuda.synchronize()
    if rank == 1:
        time.sleep(30)
        os._exit(0)
    try:
        for _ in range(3):
            layer(x)
            torch.cuda.synchronize()
    except RuntimeError as error:
        raise AssertionError(str(error)) from error
    return "nobody was missed"


@two_gpus
def test_a_rank_that_stops_is_named_by_the_kernels_wait():
    said = r"rank 0 waited 2 s in vain for rank 1 in dispatch of the layer"
    with pytest.raises(RuntimeError, match=said):
        run_ranks(_absent, 2, device_type="cuda")
