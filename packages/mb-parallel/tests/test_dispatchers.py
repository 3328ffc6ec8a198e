"""Each dispatcher against `LocalDispatcher` on the same tokens: outputs, every gradient, counts.

Ranks run in one go per world size: starting them costs more than all the cases together.
"""

import functools
import math
import os
from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from mb_kernels import bin_tokens
from mb_kernels.testing import assert_close
from mb_layers import add_lora, freeze_in_bits
from mb_layers.config import MoEConfig
from mb_layers.dispatch import LocalDispatcher
from mb_layers.moe import MoE, dMoE
from mb_parallel import ParallelDims, ParallelMesh, parallelize_experts, within_budget
from mb_parallel.expert_parallel import apply, choose_dispatcher
from mb_parallel.expert_parallel.apply import keeps_rows_anyway
from mb_parallel.expert_parallel.collectives import (
    Place,
    exchange_rows,
    gather_rows,
    join_rows,
    split_rows,
    sum_rows,
)
from mb_parallel.expert_parallel.global_capacity import batch_order
from mb_parallel.expert_parallel.overlap import Exchange
from mb_parallel.expert_parallel.placement import Placement
from mb_parallel.expert_parallel.rows import Rows
from mb_parallel.expert_parallel.surround import _capacity_group
from mb_parallel.optimizer import hold_working_copies
from mb_parallel.shards import local
from mb_parallel.testing import run_ranks
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

NAMES = ("all_gather", "all_to_all", "all_to_all in 3 chunks")


class Case(NamedTuple):
    """lengths: tokens of each rank, cycled; routing: which experts they go to."""

    lengths: tuple[int, ...] = (6, 5)
    routing: str = "random"
    experts: int = 4
    top_k: int = 2
    config: Mapping[str, Any] = MappingProxyType({})
    dtype: torch.dtype = torch.float32
    adapters: bool = False


CASES = {
    "random": Case(),
    "equal-lengths": Case((6,)),
    "top-1": Case(top_k=1),
    "all-experts": Case(top_k=4),
    "a-rank-without-tokens": Case((7, 0)),
    "no-tokens-at-all": Case((0,)),
    "one-token": Case((0, 1)),
    "all-on-one-rank": Case(routing="one"),
    "zipf": Case(routing="zipf", experts=8),
    "chosen-twice": Case(routing="twice", top_k=3),
    "masked": Case(routing="masked"),
    "all-masked": Case(routing="nobody"),
    "bias": Case(config={"mlp_bias": True}),
    "plain-activation": Case(config={"activation": "gelu"}),
    "recompute": Case(config={"recompute": True}),
    "adapters": Case(adapters=True),
    "fp64": Case(dtype=torch.float64),
    "capacity": Case(routing="zipf", config={"capacity_factor": 1.0}),
    "capacity-by-probability": Case(
        (6, 3), "zipf", config={"capacity_factor": 0.75, "drop_policy": "probability"}
    ),
    "capacity-at-least": Case(routing="zipf", config={"capacity_factor": 0.25, "min_capacity": 2}),
    "capacity-masked": Case(routing="masked", config={"capacity_factor": 0.25}),
    "capacity-chosen-twice": Case(routing="twice", top_k=3, config={"capacity_factor": 0.5}),
    "capacity-without-tokens": Case((7, 0), "one", config={"capacity_factor": 1.25}),
    "capacity-no-tokens-at-all": Case((0,), config={"capacity_factor": 1.0}),
    "capacity-recompute": Case(
        (6,), "zipf", config={"capacity_factor": 0.75, "recompute": True, "mlp_bias": True}
    ),
    "capacity-fp64": Case((6,), "zipf", config={"capacity_factor": 1.0}, dtype=torch.float64),
}

THREE = {
    "odd-sizes": Case((4, 0, 7), experts=3, top_k=2),
    "one-expert": Case((4, 0, 7), experts=1, top_k=1, config={"mlp_bias": True}),
}
CASES |= THREE
WIDE = ["random", "bias", "plain-activation", "top-1", "a-rank-without-tokens", "capacity",
        "capacity-recompute", "capacity-without-tokens"]  # fmt: skip


def _layer(case: Case) -> MoE | dMoE:
    torch.manual_seed(3)
    config = MoEConfig(
        hidden_size=6,
        ffn_hidden_size=24,
        num_experts=case.experts,
        top_k=case.top_k,
        init_method_std=0.5,
        **case.config,
    )
    layer = (dMoE if config.capacity_factor is None else MoE)(config, dtype=case.dtype)
    for name, parameter in layer.experts.named_parameters():
        if name.startswith("b"):
            torch.nn.init.normal_(parameter)
    if case.adapters:
        add_lora(layer.experts, rank=2, alpha=4)
        for parameter in layer.experts.parametrizations.parameters():
            torch.nn.init.normal_(parameter)
    return layer


def _inputs(case: Case, ranks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
    """Tokens, weights and ids of all ranks, and each rank's number of them."""
    lengths = [case.lengths[rank % len(case.lengths)] for rank in range(ranks)]
    tokens, generator = sum(lengths), torch.Generator().manual_seed(7)
    x = torch.randn(tokens, 6, generator=generator, dtype=case.dtype)
    weights = torch.rand(tokens, case.top_k, generator=generator, dtype=torch.float32)
    if case.dtype is torch.float64:
        weights = weights.double()
    scores = torch.rand(tokens, case.experts, generator=generator)
    if case.routing == "zipf":
        scores = scores / (1 + torch.arange(case.experts))
    ids = scores.topk(case.top_k).indices.int()
    if case.routing == "one":
        ids = torch.arange(case.top_k).int().repeat(tokens, 1)
    elif case.routing == "twice":  # hashes may collide; fewer experts on a rank than choices
        ids[::2, 1] = ids[::2, 0]
        ids[1::3] = 2
    elif case.routing == "masked":
        ids[torch.rand(ids.shape, generator=generator) < 0.4] = -1
        ids[::3] = case.experts
    elif case.routing == "nobody":
        ids[:] = -1
    return x, weights, ids, lengths


def _through(layer, x, weights, ids) -> dict[str, torch.Tensor]:
    """The experts on given routing: output, gradients of a loss that differs in each element."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    dispatched = layer.dispatcher.dispatch(x, weights, ids)
    y = layer.dispatcher.combine(layer.experts(dispatched), dispatched)
    (y * torch.cos(3 * x.detach())).sum().backward()
    result = {"y": y.detach(), "dx": x.grad, "dweights": weights.grad}
    result["kept"] = dispatched.kept_slots
    result["counts"] = dispatched.tokens_per_expert_E
    for name, parameter in layer.experts.named_parameters():
        grad = parameter.grad
        if not parameter.requires_grad:
            continue
        assert grad is not None, f"no gradient for {name}"
        result[f"d{name}"] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return result


def _run(case: Case, name: str, mesh: ParallelMesh) -> dict[str, torch.Tensor]:
    layer, rank, ranks = _layer(case), mesh.ep_rank, mesh.ep_size
    equal = len(set(case.lengths)) == 1
    dispatcher, *chunks = name.split(" in ")
    options = {"equal_tokens": equal, "chunks": 3 if chunks else 1}
    said = parallelize_experts(layer, mesh, dispatcher=dispatcher, **options)
    assert f"by {name}, as asked for" in said
    x, weights, ids, lengths = _inputs(case, ranks)
    first = sum(lengths[:rank])
    mine = slice(first, first + lengths[rank])
    once = _through(layer, x[mine], weights[mine], ids[mine])
    if ranks > 2 and case is not CASES["random"]:  # two ranks run every case again
        return once
    layer.zero_grad()
    again = _through(layer, x[mine], weights[mine], ids[mine])
    for key, value in once.items():
        assert torch.equal(value, again[key]), f"{key} differs when run again"
    return once


def _all_cases(rank, ranks, pairs):
    torch.use_deterministic_algorithms(True)  # receive buffers are NaN until they are written
    mesh = ParallelDims(dp_shard=ranks, ep=ranks).build("cpu")
    return [_run(CASES[case], name, mesh) for case, name in pairs]


def _names(case: Case, ranks: int) -> tuple[str, ...]:
    names = NAMES if ranks < 4 else NAMES[:2]  # chunks know nothing of the number of ranks
    return names if case.config.get("capacity_factor") is None else (*names, "fixed")


def _in_one_process(case: Case, ranks: int, *, by_rank: bool) -> dict[str, torch.Tensor]:
    """All tokens at once, or, for a capacity of each rank's own, one rank's after the other's."""
    x, weights, ids, lengths = _inputs(case, ranks)
    if not by_rank:
        return _through(_layer(case), x, weights, ids)
    layer, parts = _layer(case), [t.split(lengths) for t in (x, weights, ids)]
    results = [_through(layer, *part) for part in zip(*parts, strict=True)]
    whole = dict(results[-1])  # gradients of parameters have added up
    for name in ("y", "dx", "dweights"):
        whole[name] = torch.cat([one[name] for one in results])
    for name in ("kept", "counts"):
        whole[name] = torch.stack([one[name] for one in results]).sum(0)
    return whole


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        pytest.param(2, [name for name in CASES if name not in THREE], id="two"),
        pytest.param(3, list(THREE), id="three"),
        pytest.param(
            4,
            ["random", "top-1", "all-experts", "chosen-twice", "masked", "capacity"],
            id="four, with an expert each",
        ),
        pytest.param(
            *(8, WIDE), id="eight, which share the width of four experts", marks=pytest.mark.slow
        ),
    ],
)
def test_ranks_compute_and_learn_as_one_process(ranks, cases):
    pairs = [(case, name) for case in cases for name in _names(CASES[case], ranks)]
    results = run_ranks(_all_cases, ranks, pairs)
    for number, (case_name, name) in enumerate(pairs):
        case, what = CASES[case_name], f"{case_name}, {name}"
        _, _, ids, lengths = _inputs(case, ranks)
        expected = _in_one_process(case, ranks, by_rank=name == "fixed")
        got = [by_rank[number] for by_rank in results]
        for key in ("y", "dx", "dweights"):
            joined = torch.cat([one[key] for one in got])
            assert_close(f"{what}: {key}", joined, expected[key])
        for rank, one in enumerate(got):
            first = sum(lengths[:rank])
            own = ids[first : first + lengths[rank]]
            chosen = torch.bincount(own[(own >= 0) & (own < case.experts)], minlength=case.experts)
            assert torch.equal(one["counts"], chosen.int()), what
            assert one.keys() == expected.keys()  # what is frozen stays frozen
            for key in set(expected) - {"y", "dx", "dweights", "kept", "counts"}:
                assert_close(f"{what}: {key}", one[key], expected[key])
        if case.config.get("capacity_factor") is not None:
            assert sum(int(one["kept"]) for one in got) == int(expected["kept"]), what
            dropped = int(expected["kept"]) < int(expected["counts"].sum())
            assert dropped or not sum(lengths), "nothing was dropped"


@pytest.mark.parametrize(
    ("experts", "ranks", "ids", "expected"),
    [
        (4, 2, [[0, 1], [1, 2], [3, 3], [-1, 4]], [[0, -1], [0, 1], [-1, 1], [-1, -1]]),
        (8, 4, [[0, 7], [1, 0], [-1, 5]], [[0, 3], [0, -1], [-1, 2]]),
        (2, 4, [[1], [0], [2]], [[2, 3], [0, 1], [-1, -1]]),
    ],
)
def test_a_token_goes_to_a_rank_once(experts, ranks, ids, expected):
    placement = Placement(experts, ranks, 0)
    ids = torch.tensor(ids, dtype=torch.int32)
    destinations = placement.pack(torch.ones(ids.shape), ids).peers_TC
    assert destinations.tolist() == expected


def test_a_batch_is_in_the_order_of_its_sequences():
    """Two ranks have halves of two sequences, two of one, two none; padding is in between."""
    per_rank = [[4, 2], [4, 2], [2, 1], [2, 1], [0, 0], [0, 0]]
    rows = batch_order(per_rank, 4, 2, torch.device("cpu")).tolist()
    assert sorted(rows) == list(range(24))
    padding = {10, 11, 14, 15, *range(16, 24)}
    expected = [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13]
    assert [row for row in rows if row not in padding] == expected
    for sequences in (0, 3):  # no rank has a token
        assert batch_order([[0, sequences]] * 4, 0, 2, torch.device("cpu")).tolist() == []


def test_the_larger_of_ep_and_cp_times_tp_shares_a_capacity():
    def group(ep: int, tp: int, cp: int = 1) -> str:
        mesh = SimpleNamespace(ep_size=ep, tp_size=tp, cp_size=cp, dims=SimpleNamespace())
        mesh.dims.cp_tp = cp * tp
        mesh.axis = lambda name: SimpleNamespace(get_group=lambda: name)
        return _capacity_group(mesh)

    assert [group(1, 2), group(2, 4), group(4, 2)] == ["cp_tp", "cp_tp", "ep"]
    assert [group(1, 1, 2), group(4, 2, 2), group(4, 2, 4)] == ["cp_tp", "ep", "cp_tp"]
    with pytest.raises(ValueError, match=r"one of ep and tp to .* got ep = 3 and tp = 2"):
        group(3, 2)
    with pytest.raises(ValueError, match=r"got ep = 6 and cp \* tp = 4 \* 1"):
        group(6, 1, 4)


def test_local_ids_are_those_of_the_rank():
    ids = torch.tensor([[0, 3], [2, -1], [4, 1]], dtype=torch.int32)
    words = Placement(4, 2, 1).pack(torch.ones(ids.shape), ids).words_TW
    assert Placement(4, 2, 1).unpack(words)[1].tolist() == [[-1, 1], [0, -1], [-1, -1]]
    assert Placement(2, 4, 1).unpack(words[:1])[1].tolist() == [[0]]
    with pytest.raises(ValueError, match="ep = 4 for 6 experts"):
        Placement(6, 4, 0)


def _dies(rank, ranks):
    layer = _layer(Case())
    parallelize_experts(layer, ParallelDims(dp_shard=2, ep=2).build("cpu"), dispatcher="all_to_all")
    layer(torch.ones(3, 6))
    if rank == 1:
        os._exit(0)
    layer(torch.ones(3, 6))


def test_a_dead_rank_leaves_a_message_that_names_the_place():
    said = r"rank 0 could not exchange counts in the layer with ranks \[0, 1\]"
    with pytest.raises(RuntimeError, match=said):
        run_ranks(_dies, 2)


def _passes_more_often(rank, ranks):
    store, cpu = dist.distributed_c10d._get_default_store(), torch.device("cpu")
    dist.group.WORLD._get_backend(cpu)._set_default_timeout(timedelta(seconds=0.5 if rank else 60))
    layer = _layer(Case())
    parallelize_experts(layer, ParallelDims(dp_shard=2, ep=2).build("cpu"), dispatcher="all_to_all")
    layer(torch.ones(3 * rank, 6))  # none on rank 0
    if rank == 1:
        with pytest.raises(RuntimeError) as told:
            layer(torch.ones(3, 6))
        store.set("told", str(told.value))
    said = store.get("told").decode()
    dist.destroy_process_group()  # in which nothing can be sent any more
    store = dist.PrefixStore("afterwards", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    return said


def test_a_rank_that_has_more_micro_batches_is_told_what_the_others_lack():
    said, _ = run_ranks(_passes_more_often, 2)
    assert "rank 1 could not exchange counts in the layer with ranks [0, 1]: [" in said
    assert "If none did, they called the layer unequally often: let each run as many" in said


def _out_of_memory(rank, ranks):
    place = Place(dist.group.WORLD)
    with pytest.raises(torch.OutOfMemoryError, match=r"^20 GiB$"), place.step("exchange"):
        raise torch.OutOfMemoryError("20 GiB")


def test_a_rank_without_memory_says_so_itself():
    run_ranks(_out_of_memory, 2)


def _in_halves(x, place):
    exchange = Exchange([2, 2], [2, 2], place)
    return exchange.end(exchange.begin(x))


def _turned(rank, ranks):
    """Rows, and gradients of them, that lie in memory column by column."""
    place = Place(dist.group.WORLD)
    exchange = functools.partial(exchange_rows, to=[2, 2], from_=[2, 2])
    for call in (gather_rows, sum_rows, split_rows, join_rows, exchange, _in_halves):
        found = []
        for turn in (torch.clone, lambda x: x.mT.contiguous().mT):
            x = turn(torch.arange(12.0).view(4, 3) + 100 * rank).requires_grad_()
            y = call(x, place=place)
            y.backward(turn(torch.arange(1.0, 1 + y.numel()).view_as(y) * (1 + rank)))
            found.append((y.detach(), x.grad))
        for got, expected in zip(found[1], found[0], strict=True):
            assert torch.equal(got, expected), call


def test_rows_are_sent_in_whatever_order_they_lie_in_memory():
    run_ranks(_turned, 2)


class _Sent(TorchDispatchMode):
    """Names of the collectives that were called, and rows and splits of what was exchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            exchanged = (len(args[1]), *args[3:5]) if name == "alltoall_base_" else ()
            self.calls.append((name, *exchanged))
        return func(*args, **(kwargs or {}))


def _what_is_sent(rank, ranks):
    layer = _layer(Case(config={"capacity_factor": 0.5, "eval_capacity_factor": 1.0}))
    mesh = ParallelDims(dp_shard=2, ep=2).build("cpu")
    said = parallelize_experts(layer, mesh, dispatcher="fixed", equal_tokens=True)
    assert "2 of 4 experts a rank by fixed, as asked for" in said
    held = local(layer.experts.w1)
    assert held.untyped_storage().nbytes() == held.nbytes  # no other rank's part
    x = torch.randn(6, 6, requires_grad=True)
    calls = []
    for _ in range(2):  # routing to one expert, and to all
        with _Sent() as sent:
            out = layer(x)
            (out.y.sum() + out.aux_loss).backward()
        calls.append(sent.calls)
        torch.nn.init.zeros_(layer.router.weight)
    layer.eval()
    with _Sent() as sent, torch.no_grad():
        layer(x)
    gathers = _layer(Case(config={"capacity_factor": 0.5}))
    parallelize_experts(gathers, mesh, dispatcher="all_gather", equal_tokens=True)
    with _Sent() as gathered, torch.no_grad():
        gathers(x)
    return [*calls, sent.calls, [name for name, *_ in gathered.calls]]


def test_a_capacity_of_each_rank_is_one_exchange_each_way_and_no_other_collective():
    for first, second, evaluated, gathered in run_ranks(_what_is_sent, 2):
        # ceil(0.5 * 2 * 6 / 4) = 2 rows from each rank for each of 4 experts; there, home and back.
        assert first == second == 4 * [("alltoall_base_", 8, [4, 4], [4, 4])]
        assert evaluated == 2 * [("alltoall_base_", 12, [6, 6], [6, 6])]
        # Choices, for a capacity that all share; tokens and their routing; home.
        assert gathered == [*["_allgather_base_"] * 3, "alltoall_base_"]


POLICIES = [("random", "budget", 1.9), ("one", "budget", 1.0), ("one", "exact", 1.0)]


def _budgets(rank, ranks):
    results = []
    mesh = ParallelDims(dp_shard=2, ep=2).build("cpu")
    for routing, policy, budget in POLICIES:
        case = Case((6,), routing)
        layer = _layer(case)
        parallelize_experts(
            layer, mesh, dispatcher="all_gather", equal_tokens=True, row_policy=policy,
            row_budget=budget,
        )  # fmt: skip
        mine = slice(6 * rank, 6 * rank + 6)
        x, weights, ids, _ = _inputs(case, 2)
        arguments = (layer, x[mine], weights[mine], ids[mine])
        alone = _through(*arguments)["y"]
        layer.zero_grad()
        drawn = []

        def step():
            drawn.append(torch.rand(()))  # noqa: B023
            return _through(*arguments)  # noqa: B023

        result, redone = within_budget([layer], step, torch.device("cpu"))
        assert len(drawn) == 1 + redone
        assert drawn[0] == drawn[-1]
        with torch.no_grad():  # nobody would run that again
            dispatched = layer.dispatcher.dispatch(*arguments[1:])
            y = layer.dispatcher.combine(layer.experts(dispatched), dispatched)
        assert torch.equal(y, result["y"])
        results.append((alone, result, redone))
    return results


def test_rows_beyond_the_budget_are_nan_and_the_step_runs_again():
    by_rank = run_ranks(_budgets, 2)
    for number, (routing, policy, _) in enumerate(POLICIES):
        case = Case((6,), routing)
        expected = _through(_layer(case), *_inputs(case, 2)[:3])
        over = (routing, policy) == ("one", "budget")
        first, second = (results[number] for results in by_rank)
        for alone, _, redone in (first, second):  # the rank without rows learns of it too
            assert redone == over
            assert alone.isnan().any() == over
        for name, want in expected.items():
            got = [result[name] for _, result, _ in (first, second)]
            if name in ("y", "dx", "dweights"):
                assert_close(f"{routing}, {policy}: {name}", torch.cat(got), want)
            elif name.startswith("d"):
                assert_close(f"{routing}, {policy}: {name}", got[0], want)


def _room(rows, slots, tokens=4):
    """For so many slots of the first of two ranks, of four experts; 2000 could come."""
    ids = torch.full((2000, 1), -1, dtype=torch.int32)
    ids[:slots] = 0
    bins = bin_tokens(ids, 2)
    return rows.most(bins, Placement(4, 2, 0), tokens, 1)


def test_what_the_fullest_layer_got_is_told_once():
    rows = Rows("budget", 1.0)
    assert rows.take_fill() is None
    for slots in (1, 3, 2):
        assert _room(rows, slots) == 2
    assert rows.take_fill() == 1.5
    assert rows.take_fill() == 0
    assert _room(rows, 0, tokens=0) == _room(Rows("exact"), 0) == 1


def test_one_slot_too_many_of_many_is_too_many():
    rows, last = Rows("budget", 1.0), 2**25 + 1  # a float of 32 bits cannot tell it from 2^25
    slots = torch.empty(2**26, device="meta")
    bins = SimpleNamespace(offsets_E1=torch.tensor([0, last]), order_N=slots)
    assert rows.most(bins, Placement(4, 2, 0), 2**26, 1) == 2**25
    assert rows.take_fill() > 1


def test_a_step_runs_again_for_its_own_rows_alone():
    rows, layer = Rows("budget", 1.0), torch.nn.Module()
    layer.dispatcher = SimpleNamespace(inner=SimpleNamespace(rows=rows))
    _room(rows, 300, tokens=400)  # in no step

    def step(slots):
        return within_budget([layer], lambda: _room(rows, slots, tokens=400), torch.device("cpu"))

    # Once it was 1.5 times the even 200, and then there is room for 1.25 of that, in eighths.
    assert [step(slots) for slots in (200, 300, 375, 200)] == [
        (200, False), (300, True), (375, False), (475, False)
    ]  # fmt: skip
    assert rows.policy == "budget"


def test_there_is_no_room_for_more_than_could_come():
    assert _room(Rows("budget", 1e300), 3) == 2000


def test_the_multiple_does_not_grow_where_no_more_could_come():
    """It grew from step to step where a rank got nearly all slots, until it was infinite."""
    rows = Rows("budget", 2.0)
    for _ in range(9):
        assert _room(rows, 1900, tokens=2000) == 2000
        rows.follow(rows.take_fill().item())
    assert _room(rows, 300, tokens=400) == 475  # 1.25 times 1.9


def test_room_is_for_what_steps_needed_lately():
    rows = Rows("budget", 1.5)
    layer = torch.nn.Module()
    layer.dispatcher = SimpleNamespace(rows=rows)
    rooms = []
    for slots in (1000, *60 * [300]):
        step = functools.partial(_room, rows, slots, tokens=400)
        room, redone = within_budget([layer], step, torch.device("cpu"))
        assert redone == (slots == 1000)
        rooms.append(room)
    # 5 times the even 200 was needed, then 1.5 times. It fades by 1 % a step.
    assert rooms[:3] == [1000, 1250, 1250]
    assert rooms[-1] == 200 * math.ceil(8 * 1.25 * 5 * 0.99**59) / 8
    assert len(set(rooms)) < 25
    for _ in range(100):
        within_budget([layer], step, torch.device("cpu"))
    assert _room(rows, 300, tokens=400) == 375  # 1.25 times 1.5


@pytest.mark.parametrize(
    ("wanted", "top_k", "ep", "problem", "bounded", "chosen"),
    [
        ("auto", 1, 2, None, False, "peer"),
        ("auto", 1, 4, None, False, "peer"),
        ("auto", 1, 8, None, False, "all_to_all"),
        ("auto", 8, 8, None, True, "peer"),
        ("auto", 8, 4, "no GPU", False, "all_gather"),
        ("peer", 1, 8, None, False, "peer"),
        ("peer", 1, 8, "no GPU", False, "all_to_all"),
        ("all_gather", 1, 8, None, False, "all_gather"),
    ],
)
def test_the_rule_of_choice(wanted, top_k, ep, problem, bounded, chosen):
    name, why = choose_dispatcher(wanted, top_k, ep, problem, bounded=bounded)
    assert name == chosen
    assert ("not peer: no GPU" in why) == (wanted == "peer" and problem is not None)
    assert ("wants bounded rows" in why) == ((wanted, chosen) == ("auto", "all_to_all"))


def _chosen(rank: int, world_size: int):
    """By which dispatcher peers would reach the experts of eight ranks."""
    said = []
    with (
        mock.patch.object(apply, "peer_problem", return_value=None),
        mock.patch.object(apply, "_WORST_CASE_RANKS", 1),
    ):
        for config in ({}, {"capacity_factor": 1.0}):
            mesh = ParallelDims(dp_shard=world_size, ep=world_size).build("cpu")
            said.append(parallelize_experts(_layer(Case(config=config)), mesh))
    return said


def test_a_capacity_bounds_the_rows_that_peers_send():
    for without, bounded in run_ranks(_chosen, 2):
        assert "by all_to_all" in without
        assert "by peer, since the GPUs reach each other's memory and rows are bounded" in bounded


@pytest.mark.parametrize(
    ("top_k", "ranks", "config", "kept"),
    [
        (1, 2, {}, True),
        (1, 2, {"mlp_bias": True}, True),
        (2, 4, {"saved_activation_bits": 8}, True),  # an expert on each rank
        (2, 2, {}, False),
        (1, 2, {"recompute": True}, False),
        (1, 2, {"mlp_impl": "sparse"}, False),
    ],
)
def test_who_keeps_rows_is_not_sent_them_again(top_k, ranks, config, kept):
    config = MoEConfig(hidden_size=16, ffn_hidden_size=128, num_experts=4, top_k=top_k, **config)
    assert keeps_rows_anyway(config, Placement(4, ranks, 0)) == kept


def _twice(rank, ranks):
    """The gradient of tokens, differentiated again, by experts that have second derivatives."""
    mesh = ParallelDims(dp_shard=ranks, ep=ranks).build("cpu")
    case = Case()
    x, weights, ids, _ = _inputs(case, 1)
    for dispatcher in ("all_gather", "all_to_all"):
        layer = _layer(case)
        parallelize_experts(layer, mesh, dispatcher=dispatcher)
        leaf = x.clone().requires_grad_()
        dispatched = layer.dispatcher.dispatch(leaf, weights, ids)
        y = layer.dispatcher.combine(dispatched.x_RD.square(), dispatched)
        with pytest.raises(NotImplementedError, match="expected first derivatives alone"):
            torch.autograd.grad(y.square().sum(), leaf, create_graph=True)


def test_a_second_derivative_is_an_error():
    run_ranks(_twice, 2)


def _evaluated_and_compiled(rank, ranks):
    case = Case(routing="zipf", config={"capacity_factor": 0.25, "eval_capacity_factor": 0.75})
    layer = _layer(case).eval()
    parallelize_experts(layer, ParallelDims(dp_shard=2, ep=2).build("cpu"))
    x = _inputs(case, 2)[0][6 * rank : 6 * rank + 6 - rank]
    out = layer(x)
    # The exchange breaks the compiler's graph, behind which a padded token is still none.
    fixed, mask = _layer(case), torch.arange(len(x)) < 4
    parallelize_experts(fixed, ParallelDims(dp_shard=2, ep=2).build("cpu"), dispatcher="fixed")
    for trained in (layer.train(), fixed):
        compiled = torch.compile(trained, backend="eager")(x, mask=mask)
        assert torch.equal(compiled.y, trained(x, mask=mask).y)
    # Selective recompute is such a mode: torch 2.13 lost floats made of sizes in it.
    exact, rows = _layer(Case()), {"dispatcher": "all_gather", "equal_tokens": True}
    parallelize_experts(
        exact, ParallelDims(dp_shard=2, ep=2).build("cpu"), row_policy="exact", **rows
    )
    with BaseTorchFunctionMode(), torch.no_grad():
        compiled = torch.compile(exact, backend="eager", dynamic=True)(x[:5])
    assert torch.equal(compiled.y, exact(x[:5]).y)
    with pytest.raises(ValueError, match="add adapters first"):
        add_lora(layer.experts, rank=2, alpha=4)
    frozen = _layer(Case())
    freeze_in_bits(frozen.experts, 8)
    add_lora(frozen.experts, rank=2, alpha=4)
    with pytest.raises(ValueError, match="over 2 ranks, got weights frozen in bits"):
        parallelize_experts(frozen, ParallelDims(dp_shard=2, ep=2).build("cpu"))
    copied = _layer(Case())
    hold_working_copies([copied], torch.bfloat16)
    with pytest.raises(ValueError, match="Call hold_working_copies last"):
        parallelize_experts(copied, ParallelDims(dp_shard=2, ep=2).build("cpu"))
    return out.y.detach(), out.metrics["dropped_fraction"]


@pytest.mark.slow
def test_capacity_of_evaluation_and_compiled():
    case = Case(routing="zipf", config={"capacity_factor": 0.25, "eval_capacity_factor": 0.75})
    expected = _layer(case).eval()(_inputs(case, 2)[0])
    (first, dropped), (second, more) = run_ranks(_evaluated_and_compiled, 2)
    assert_close("y", torch.cat((first, second)), expected.y.detach())
    assert 0 < float(expected.metrics["dropped_fraction"]) < 0.5
    assert float(6 * dropped + 5 * more) / 11 == pytest.approx(
        float(expected.metrics["dropped_fraction"])
    )


def _replicated(rank, ranks):
    """Tensor parallelism without sequence parallelism: both ranks hold all tokens."""
    torch.use_deterministic_algorithms(True)
    results = []
    for ep in (1, 2):
        for case in ("random", "capacity"):
            layer = _layer(CASES[case])
            mesh = ParallelDims(tp=2, ep=ep).build("cpu")
            parallelize_experts(layer, mesh, sequence_parallel=False)
            x, weights, ids, _ = _inputs(CASES[case], 1)
            x, weights, ids = x[:5], weights[:5], ids[:5]  # odd: shares are padded
            result = _through(layer, x, weights, ids)
            if ep == 1:
                for parameter in layer.experts.parameters():
                    dist.all_reduce(parameter.grad)
                result |= {f"d{n}": p.grad for n, p in layer.experts.named_parameters()}
            results.append(result)
    return results


def test_tokens_that_tensor_parallel_ranks_share():
    for result in run_ranks(_replicated, 2):
        for number, got in enumerate(result):
            case = CASES[("random", "capacity")[number % 2]]
            x, weights, ids, _ = _inputs(case, 1)
            layer = _layer(case)
            expected = _through(layer, x[:5], weights[:5], ids[:5])
            for key, value in expected.items():
                if key in ("kept", "counts"):
                    assert torch.equal(got[key], value), key
                else:
                    assert_close(key, got[key], value)


def test_what_cannot_be_spread_is_named():
    layer = _layer(Case())
    mesh = ParallelDims().build("cpu")
    assert "ep = 1, all experts of 1 layer" in parallelize_experts(layer, mesh)
    parallelize_experts(_layer(Case(config={"balance_over": "sequence"})), mesh)
    assert isinstance(layer.dispatcher, LocalDispatcher)
    assert "no MoE layers" in parallelize_experts(torch.nn.Linear(2, 2), mesh)
    with pytest.raises(ValueError, match=r"dispatcher to be one of auto, .* got 'ring'"):
        parallelize_experts(layer, mesh, dispatcher="ring")
    with pytest.raises(ValueError, match=r"a capacity for dispatcher='fixed' in the layer, got a"):
        parallelize_experts(layer, mesh, dispatcher="fixed")
    with pytest.raises(ValueError, match=r"row_policy to be one of worst, .* got 'some'"):
        parallelize_experts(layer, mesh, row_policy="some")
    for budget in (0.5, math.inf):
        with pytest.raises(ValueError, match=rf"row_budget of at least 1, .* got {budget}"):
            parallelize_experts(layer, mesh, row_policy="budget", row_budget=budget)
    for wrong in ({"chunks": 0}, {"max_tokens": 0}, {"timeout_s": 0.0}):
        (name,) = wrong
        with pytest.raises(ValueError, match=rf"[Ee]xpected {name} .*, got 0"):
            parallelize_experts(layer, mesh, **wrong)
    with pytest.raises(ValueError, match=r"several modules, got one dMoE"):
        within_budget(layer, lambda: None, torch.device("cpu"))
