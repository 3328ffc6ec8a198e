"""`PeerDispatcher` against `LocalDispatcher`: two processes that write each other's memory.

A file that both map takes the place of symmetric memory, and Triton's interpreter that of a GPU.
"""

import contextlib
import os
import time
from functools import partial
from typing import NamedTuple

import pytest
import torch
from mb_kernels.testing import assert_close, interpreted_quickly
from mb_layers.config import MoEConfig
from mb_layers.dispatch import LocalDispatcher
from mb_layers.moe import dMoE
from mb_parallel import ParallelDims, ParallelMesh
from mb_parallel.expert_parallel import GlobalCapacity, PeerBuffers, PeerDispatcher, Place, Rows
from mb_parallel.expert_parallel.placement import Placement
from mb_parallel.expert_parallel.shard import experts_meshes, shard_experts
from mb_parallel.testing import run_ranks
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="Triton reads TRITON_INTERPRET=1 at its import: tests/test_interpreter.py sets it",
)
if os.environ.get("TRITON_INTERPRET") == "1":  # of every rank too, for as long as it lives
    QUICKLY = contextlib.ExitStack()
    QUICKLY.enter_context(interpreted_quickly())
HIDDEN, FFN = 16, 16


class Case(NamedTuple):
    lengths: tuple[int, int]
    top_k: int = 2
    experts: int = 4
    masked: bool = False
    one_rank: bool = False
    keep_rows: bool = False
    depth: int = 1
    policy: str = "worst"
    bounded: bool = False  # told the most rows that there can be, as by a capacity
    hooked: bool = False  # a hook changes the experts' result
    capacity: float | None = None
    dtype: torch.dtype = torch.float32

    @property
    def stored_home(self) -> bool:
        return self.policy != "budget" and not self.hooked and self.dtype is torch.float32


CASES = [
    Case((5, 3), depth=2),
    Case((4, 4), top_k=1, keep_rows=True, bounded=True),
    Case((3, 0), top_k=3, keep_rows=True, depth=2),
    Case((4, 5), masked=True, policy="exact"),
    Case((3, 4), top_k=1, one_rank=True, policy="budget"),
    Case((2, 2), hooked=True),
    Case((2, 3), experts=1, top_k=1),  # the width is shared
    Case((5, 4), experts=6, capacity=0.7, depth=2),  # six counts: no multiple of 16 bytes
    Case((4, 0), capacity=0.5, masked=True),
    Case((2, 3), dtype=torch.float64),
]


class SharedFiles:
    """Allocates arenas as files in a folder, mapped by every rank."""

    def __init__(self, folder: str) -> None:
        self.folder, self.made = folder, 0
        self.errors: list[torch.Tensor] = []

    def __call__(self, nbytes: int, place: Place):
        paths = [f"{self.folder}/{self.made}-{rank}" for rank in range(place.size)]
        self.made += 1
        with open(paths[place.rank], "wb") as file:
            file.truncate(nbytes)
        torch.distributed.barrier(place.group)
        arenas = [torch.from_file(path, True, nbytes, dtype=torch.uint8) for path in paths]
        table = torch.tensor([arena.data_ptr() for arena in arenas])
        self.errors.append(torch.zeros(3, dtype=torch.int32))
        return arenas[place.rank], table, self.errors[-1], arenas


def _layer(case: Case) -> dMoE:
    torch.manual_seed(3)
    config = MoEConfig(
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN * 2,
        num_experts=case.experts,
        top_k=case.top_k,
        init_method_std=0.5,
    )
    layer = dMoE(config)
    if case.capacity is not None:
        layer.dispatcher = LocalDispatcher(case.experts, case.capacity)
    if case.hooked:
        layer.experts.register_forward_hook(lambda module, given, y: 3 * y)
    return layer.to(case.dtype)


def _inputs(case: Case):
    generator = torch.Generator().manual_seed(7)
    tokens = sum(case.lengths)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    weights = torch.rand(tokens, case.top_k, generator=generator)
    ids = torch.rand(tokens, case.experts, generator=generator).topk(case.top_k).indices.int()
    if case.masked:
        ids[torch.rand(ids.shape, generator=generator) < 0.4] = -1
    if case.one_rank:
        ids[:] = case.experts - 1
    return x.to(case.dtype), weights.to(case.dtype), ids


def _through(
    layer: dMoE, depth: int, x, weights, ids, max_rows=None, how: str = "as it is"
) -> dict[str, torch.Tensor]:
    """Layers one after the other that share their experts and, spread, their buffers."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()

    def one(x):
        dispatched = layer.dispatcher.dispatch(x, weights, ids)
        if max_rows is not None:
            dispatched = dispatched._replace(max_rows=max_rows)
        return x + layer.dispatcher.combine(layer.experts(dispatched), dispatched), dispatched

    if how == "compiled":
        one = torch.compile(one, backend="aot_eager")
    if how == "recomputed":
        one = partial(checkpoint, one, use_reentrant=False)
    y = x
    for _ in range(depth):
        y, dispatched = one(y)
    (y * torch.cos(3 * x.detach())).sum().backward()
    result = {"y": y.detach(), "dx": x.grad, "dweights": weights.grad}
    result["counts"] = dispatched.tokens_per_expert_E
    result["stored home"] = torch.tensor(dispatched.home_P is not None)
    for name, parameter in layer.experts.named_parameters():
        grad = parameter.grad
        result[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return result


def _spread(layer: dMoE, case: Case, mesh: ParallelMesh, buffers: PeerBuffers) -> None:
    ep = mesh.axis("ep")
    assert ep is not None
    place = Place(ep.get_group(), "layers.1.moe")
    spread_over = experts_meshes(mesh, [case.experts])[case.experts]
    placement = Placement(case.experts, place.size, place.rank)
    shard_experts(layer.experts, spread_over, placement, "moe", {})
    rows = Rows(case.policy, budget=2.0)  # all on one of two ranks: just enough
    layer.dispatcher = PeerDispatcher(
        *(case.experts, place, buffers),
        keep_rows=case.keep_rows,
        rows=rows,
        stores_home=layer.experts.stores_home,
    )
    if case.capacity is not None:
        layer.dispatcher = GlobalCapacity(
            layer.dispatcher, case.experts, case.capacity, place, equal_tokens=False
        )
        assert layer.dispatcher._peers is not None


def _ranks(rank: int, ranks: int, folder: str, cases: list[Case]):
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    mesh = ParallelDims(dp_shard=2, ep=2).build("cpu")
    buffers = PeerBuffers(
        Place(mesh.axis("ep").get_group()), max_tokens=5, allocate=SharedFiles(folder)
    )
    results = []
    for case in cases:
        layer = _layer(case)
        _spread(layer, case, mesh, buffers)
        first = sum(case.lengths[:rank])
        mine = slice(first, first + case.lengths[rank])
        x, weights, ids = (t[mine] for t in _inputs(case))
        most = sum(case.lengths) * case.top_k if case.bounded else None  # of ranks with room for 10
        results.append(_through(layer, case.depth, x, weights, ids, most))
        assert bool(results[-1]["stored home"]) == case.stored_home
        if case.depth > 1:
            for how in ("compiled", "recomputed"):
                layer.zero_grad()
                again = _through(layer, case.depth, x, weights, ids, most, how)
                for name, value in again.items():
                    assert torch.equal(value, results[-1][name]), f"{name} differs, {how}"
    said = []
    for tokens in (6, 2):  # more than there is room for; then another layer in between
        x, weights = torch.zeros(tokens, HIDDEN), torch.ones(tokens, 1)
        ids = torch.zeros(tokens, 1, dtype=torch.int32)
        try:
            dispatched = layer.dispatcher.dispatch(x, weights, ids)
            layer.dispatcher.dispatch(x, weights, ids)
            layer.dispatcher.combine(layer.experts(dispatched), dispatched)
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
    dispatched = layer.dispatcher.dispatch(x, weights, ids)
    with pytest.raises(ValueError, match="in the memory of other ranks already") as raised:
        layer.dispatcher.combine(3 * layer.experts(dispatched), dispatched)
    assert "the experts of layers.1.moe" in str(raised.value)
    return results, said


@pytest.mark.parametrize(
    "cases",
    [CASES[7:8], pytest.param(CASES[:7] + CASES[8:], marks=pytest.mark.slow)],
    ids=["some", "further"],
)
def test_two_processes(tmp_path, cases):
    results = run_ranks(_ranks, 2, str(tmp_path), cases, timeout_s=280)
    for number, case in enumerate(cases):
        expected = _through(_layer(case), case.depth, *_inputs(case))
        got = [by_rank[number] for by_rank, _ in results]
        for name in ("y", "dx", "dweights"):
            assert_close(f"{case}: {name}", torch.cat([g[name] for g in got]), expected[name])
        assert torch.equal(sum(g["counts"] for g in got), expected["counts"])
        for one in got:
            for name in ("w1", "w2"):
                assert_close(f"{case}: {name}", one[name], expected[name])
    for _, (too_many, between) in results:
        assert "at most 5 tokens per rank" in too_many
        assert "another layer's exchange" in between


def _grown(rank: int, ranks: int, folder: str):
    """A batch of two tokens a rank, one of four, whose backward pass comes first, and two again."""
    mesh = ParallelDims(dp_shard=2, ep=2).build("cpu")
    place = Place(mesh.axis("ep").get_group())
    files = SharedFiles(folder)
    buffers = PeerBuffers(place, equal_tokens=True, allocate=files)
    layer = _layer(GROWN)
    _spread(layer, GROWN, mesh, buffers)
    x, weights, ids = _inputs(GROWN)
    parts = [slice(2 * rank, 2 * rank + 2), slice(4 + 4 * rank, 8 + 4 * rank)]
    sources = [x[part].clone().requires_grad_() for part in parts]

    def through(x: torch.Tensor, part: slice) -> torch.Tensor:
        dispatched = layer.dispatcher.dispatch(x, weights[part], ids[part])
        return layer.dispatcher.combine(layer.experts(dispatched), dispatched)

    with torch.inference_mode():  # an evaluation, before all training
        through(x[parts[0]], parts[0])
    ys = [through(*pair) for pair in zip(sources, parts, strict=True)]
    for y, source in reversed(list(zip(ys, sources, strict=True))):
        (y * torch.cos(3 * source.detach())).sum().backward()
    assert torch.equal(through(sources[0], parts[0]), ys[0])
    # A CUDA graph may hold exchanges through the memory of before.
    assert len(buffers.arenas) == 2
    buffers.check_all()
    files.errors[0][0] = 1
    with pytest.raises(RuntimeError, match="in vain"):
        buffers.check_all()
    return [(y.detach(), source.grad) for y, source in zip(ys, sources, strict=True)]


GROWN = Case((6, 6))


def test_a_larger_batch_gets_larger_memory(tmp_path):
    results = run_ranks(_grown, 2, str(tmp_path))
    x, weights, ids = _inputs(GROWN)
    layer, x = _layer(GROWN), x.requires_grad_()
    dispatched = layer.dispatcher.dispatch(x, weights, ids)
    y = layer.dispatcher.combine(layer.experts(dispatched), dispatched)
    (y * torch.cos(3 * x.detach())).sum().backward()
    for number, rows in enumerate((slice(0, 4), slice(4, 12))):
        got_y, got_dx = (torch.cat(two) for two in zip(*(r[number] for r in results), strict=True))
        assert_close("y", got_y, y.detach()[rows])
        assert_close("dx", got_dx, x.grad[rows])


def _absent(rank: int, ranks: int, folder: str):
    case = Case((2, 2))
    mesh = ParallelDims(dp_shard=2, ep=2).build("cpu")
    buffers = PeerBuffers(
        Place(mesh.axis("ep").get_group()), timeout_s=2e-5, allocate=SharedFiles(folder)
    )
    layer = _layer(case)
    _spread(layer, case, mesh, buffers)
    x, weights, ids = (t[:2] for t in _inputs(case))
    if rank == 1:
        buffers.memory(x, 4)
        time.sleep(3)  # never dispatches
        return None
    layer.dispatcher.dispatch(x, weights, ids)
    with pytest.raises(RuntimeError) as raised:
        layer.dispatcher.dispatch(x, weights, ids)
    return str(raised.value)


def test_a_rank_that_does_not_come_is_named(tmp_path):
    said, _ = run_ranks(_absent, 2, str(tmp_path))
    assert "rank 0 waited 2e-05 s in vain for rank 1 in dispatch of layers.1.moe" in said


FROZEN = Case((3, 3))


def _ahead(rank: int, ranks: int, folder: str):
    """Only the experts learn, rank 1 takes its time before their backward, and rank 0 goes on."""
    mesh = ParallelDims(dp_shard=2, ep=2).build("cpu")
    place = Place(mesh.axis("ep").get_group())
    buffers = PeerBuffers(place, max_tokens=3, allocate=SharedFiles(folder))
    layer = _layer(FROZEN)
    _spread(layer, FROZEN, mesh, buffers)
    x, weights, ids = (t[3 * rank : 3 * rank + 3] for t in _inputs(FROZEN))
    gradients = []
    for step in range(2):
        layer.zero_grad()
        dispatched = layer.dispatcher.dispatch((step + 1) * x, weights, ids)
        rows = layer.experts(dispatched)
        if rank == 1:
            rows.register_hook(lambda _: time.sleep(1))
        layer.dispatcher.combine(rows, dispatched).sum().backward()
        gradients.append([p.grad for p in layer.experts.parameters()])
    return [[grad.full_tensor() for grad in one] for one in gradients]


def test_a_rank_waits_until_its_peers_have_read_its_tokens(tmp_path):
    x, weights, ids = _inputs(FROZEN)
    by_rank = run_ranks(_ahead, 2, str(tmp_path))
    for step in range(2):
        layer = _layer(FROZEN)
        dispatched = layer.dispatcher.dispatch((step + 1) * x, weights, ids)
        layer.dispatcher.combine(layer.experts(dispatched), dispatched).sum().backward()
        for gradients in by_rank:
            for (name, p), got in zip(
                layer.experts.named_parameters(), gradients[step], strict=True
            ):
                assert_close(f"{name}, step {step}", got, p.grad)


def _ahead_of_recompute(rank: int, ranks: int, folder: str):
    """As `_ahead` with two passes, recomputed wholly once their gradients have been sent."""
    mesh = ParallelDims(dp_shard=2, ep=2).build("cpu")
    place = Place(mesh.axis("ep").get_group())
    buffers = PeerBuffers(place, max_tokens=3, allocate=SharedFiles(folder))
    layer, case = _layer(FROZEN), FROZEN._replace(keep_rows=True)
    _spread(layer, case, mesh, buffers)
    x, weights, ids = (t[3 * rank : 3 * rank + 3] for t in _inputs(case))
    recomputing: list[bool] = []

    def one(x: torch.Tensor) -> torch.Tensor:
        dispatched = layer.dispatcher.dispatch(x, weights, ids)
        y = layer.dispatcher.combine(layer.experts(dispatched), dispatched)
        if rank == 1 and recomputing:
            time.sleep(1)
        return y

    with set_checkpoint_early_stop(False):
        ys = [checkpoint(one, (step + 1) * x, use_reentrant=False) for step in range(2)]
    recomputing.append(True)
    for step, y in enumerate(ys):
        ((step + 1) * y).sum().backward()
    return [p.grad.full_tensor() for p in layer.experts.parameters()]


def test_a_rank_waits_until_its_peers_have_read_gradients_behind_a_recompute(tmp_path):
    x, weights, ids = _inputs(FROZEN)
    layer = _layer(FROZEN)
    for step in range(2):
        dispatched = layer.dispatcher.dispatch((step + 1) * x, weights, ids)
        y = layer.dispatcher.combine(layer.experts(dispatched), dispatched)
        ((step + 1) * y).sum().backward()
    for gradients in run_ranks(_ahead_of_recompute, 2, str(tmp_path)):
        for (name, p), got in zip(layer.experts.named_parameters(), gradients, strict=True):
            assert_close(name, got, p.grad)


def _twice(rank: int, ranks: int, folder: str):
    case = Case((2, 2))
    mesh = ParallelDims(dp_shard=2, ep=2).build("cpu")
    place = Place(mesh.axis("ep").get_group())
    layer = _layer(case)
    _spread(layer, case, mesh, PeerBuffers(place, max_tokens=2, allocate=SharedFiles(folder)))
    x, weights, ids = (t[2 * rank : 2 * rank + 2] for t in _inputs(case))
    x = x.clone().requires_grad_()
    layer.dispatcher.stores_home = lambda: False  # what stands in for the experts does not
    dispatched = layer.dispatcher.dispatch(x, weights, ids)
    y = layer.dispatcher.combine(dispatched.x_RD.square(), dispatched)
    with pytest.raises(NotImplementedError, match="expected first derivatives alone"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


def test_a_second_derivative_is_an_error(tmp_path):
    run_ranks(_twice, 2, str(tmp_path))
