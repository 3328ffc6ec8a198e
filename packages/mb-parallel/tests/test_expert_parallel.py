"""A whole model under expert parallelism takes the steps of one process: losses, every gradient.

What `apply_data_parallel` does to gradients is done by hand here: a sum over the data-parallel
ranks divided by their number, for experts over the replicas of their ep group.
"""

import contextlib
import copy
import functools
import socket
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mb_kernels.testing import assert_close
from mb_layers import add_lora
from mb_layers.config import MoEConfig
from mb_layers.experts import Experts
from mb_layers.moe import dMoE
from mb_parallel import (
    ParallelDims,
    ParallelMesh,
    apply_data_parallel,
    parallelize_experts,
    rebalance_experts,
    set_micro_batch,
)
from mb_parallel.expert_parallel import peer_memory
from mb_parallel.recompute import apply_recompute
from mb_parallel.testing import run_ranks
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

HIDDEN, STEPS, MICRO_BATCHES = 8, 3, 2
CONFIG: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "ffn_hidden_size": 16,
    "num_experts": 4,
    "top_k": 2,
    "init_method_std": 0.3,
    "balance_over": "global_batch",
    "load_balancing_loss_weight": 0.1,
    "z_loss_weight": 0.01,
}


class Model(nn.Module):
    def __init__(self, **overrides: Any) -> None:
        super().__init__()
        torch.manual_seed(11)
        config = MoEConfig(**(CONFIG | overrides))
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(HIDDEN), "moe": dMoE(config)}) for _ in range(2)
        )
        self.head = nn.Linear(HIDDEN, 5)

    def forward(self, x, labels):
        """Sum over tokens of cross entropy, and the mean auxiliary loss of the layers."""
        aux = torch.zeros(())
        for layer in self.layers:
            out = layer["moe"](layer["norm"](x))
            x, aux = x + out.y, aux + out.aux_loss / len(self.layers)
        return nn.functional.cross_entropy(self.head(x), labels, reduction="sum"), aux


def _data(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    shape = (STEPS, MICRO_BATCHES, tokens)
    x = torch.randn(*shape, HIDDEN, generator=generator)
    return x, torch.randint(0, 5, shape, generator=generator)


def _reduce(model: nn.Module, mesh: ParallelMesh) -> None:
    experts = {id(p) for m in model.modules() if isinstance(m, Experts) for p in m.parameters()}
    for parameter in model.parameters():
        assert parameter.grad is not None
        grad = parameter.grad
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        for axis in ("edp_replicate", "edp_shard") if id(parameter) in experts else ("dp",):
            mesh.all_reduce(local, axis)
        local /= mesh.dp_size


def _train(model: nn.Module, mesh: ParallelMesh, lengths: list[int]) -> list[dict[str, Any]]:
    """Per step: the global loss, and every gradient by name, whole."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03, foreach=False)
    total, rank = sum(lengths), mesh.dp_rank
    mine = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
    history = []
    for x, labels in zip(*_data(total), strict=True):
        loss = torch.zeros(())
        for m in range(MICRO_BATCHES):
            set_micro_batch(model, m)
            ce, aux = model(x[m, mine], labels[m, mine])
            # The mean over ranks is the mean over all tokens, however many each of them has.
            share = mesh.dp_size / (total * MICRO_BATCHES)
            part = (ce + aux * lengths[rank]) * share
            part.backward()
            loss += part.detach()
        _reduce(model, mesh)
        grads = {
            name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad.clone()
            for name, p in model.named_parameters()
        }
        history.append({"loss": mesh.all_reduce(loss, "dp") / mesh.dp_size, **grads})
        optimizer.step()
        optimizer.zero_grad()
    return history


CASES = {
    "all_gather": ("all_gather", {}, (9,)),
    "all_to_all": ("all_to_all", {}, (9,)),
    "unequal": ("all_to_all", {}, (9, 4)),
    "latent": ("all_to_all", {"latent_size": 5}, (9, 4)),
    "unequal-all_gather": ("all_gather", {}, (4, 9)),
    "a-rank-without-tokens": ("all_to_all", {}, (11, 0)),
    "shared-experts": ("all_gather", {"share": "module"}, (9,)),
    "shared-experts-in-chunks": ("all_to_all", {"share": "module"}, (9,)),
    # The first layer gathers, since its tokens need all ranks.
    "experts-shared-with-chunks": ("auto", {"share": "module", "first_top_k": 4}, (9,)),
    "tied-weights": ("all_to_all", {"share": "w1"}, (9,)),
    "router-bias-to-one-expert": ("all_to_all", {"router_bias": True, "top_k": 1}, (7,)),
}


def _build(overrides: dict[str, Any]) -> Model:
    overrides = dict(overrides)
    share, first_top_k = overrides.pop("share", None), overrides.pop("first_top_k", None)
    model = Model(**overrides)
    if first_top_k is not None:
        model.layers[0]["moe"] = dMoE(MoEConfig(**(CONFIG | {"top_k": first_top_k})))
    first, second = (layer["moe"] for layer in model.layers)
    if share == "module":
        second.experts = first.experts
    elif share == "w1":
        second.experts.w1 = first.experts.w1
    for layer in model.layers:
        if layer["moe"].router.bias is not None:
            layer["moe"].router.bias.data[0] = 50.0  # every token wants expert 0
    return model


def _alone(overrides: dict[str, Any]) -> Model:
    """The same model for one process: what the ranks are compared with."""
    model = _build(overrides)
    parallelize_experts(model, ParallelDims().build("cpu"))
    return model


def _lengths(lengths: tuple[int, ...], ranks: int) -> list[int]:
    return [lengths[rank % len(lengths)] for rank in range(ranks)]


def _worker(rank, ranks, sizes, cases):
    mesh = ParallelDims(**sizes).build("cpu")
    histories = []
    for case in cases:
        dispatcher, overrides, lengths = CASES[case]
        model = _build(overrides)
        equal = len(lengths) == 1
        chunks = 2 if "chunks" in case else 1
        parallelize_experts(model, mesh, dispatcher=dispatcher, equal_tokens=equal, chunks=chunks)
        if "share" in overrides:
            model = copy.deepcopy(model)  # as for an average of weights, or a model of reference
        histories.append(_train(model, mesh, _lengths(lengths, ranks)))
    return histories


@pytest.mark.parametrize(
    ("ranks", "sizes", "cases"),
    [
        (2, {"dp_shard": 2, "ep": 2}, list(CASES)),
        (4, {"dp_shard": 4, "ep": 2}, ["all_gather", "unequal"]),
        (4, {"dp_replicate": 2, "dp_shard": 2, "ep": 4}, ["all_to_all", "a-rank-without-tokens"]),
        pytest.param(
            *(8, {"dp_shard": 8, "ep": 8}, ["all_gather", "unequal"]),  # of four experts
            marks=pytest.mark.slow,
        ),
    ],
    ids=["ep2", "dp2 ep2", "ep4", "ep8"],
)
def test_ranks_train_as_one_process(ranks, sizes, cases):
    results = run_ranks(_worker, ranks, sizes, cases)
    for number, case in enumerate(cases):
        _, overrides, lengths = CASES[case]
        total = sum(_lengths(lengths, ranks))
        expected = _train(_alone(overrides), ParallelDims().build("cpu"), [total])
        assert "layers.1.moe.router.weight" in expected[0]
        for one in results:
            for step, (got, want) in enumerate(zip(one[number], expected, strict=True)):
                assert got.keys() == want.keys()
                for name, value in want.items():
                    assert_close(f"{case}, step {step}: {name}", got[name], value)


def _sequence_parallel(rank, ranks):
    """Each tp rank brings a part of the tokens, all share one loss: contributions add up."""
    results = []
    for ep in (1, 2):
        mesh = ParallelDims(tp=2, ep=ep).build("cpu")
        model = _build({"balance_over": "micro_batch"})
        parallelize_experts(model, mesh, sequence_parallel=True)
        x, labels = (t[0, 0].chunk(2)[rank] for t in _data(12))
        ce, aux = model(x, labels)
        (ce / 12 + aux).backward()
        grads = {}
        for name, p in model.named_parameters():
            grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            if not isinstance(p.grad, DTensor):
                dist.all_reduce(grad)
            grads[name] = grad
        results.append({"aux": aux.detach(), **grads})
    return results


def test_sequence_parallel_ranks_bring_their_own_tokens():
    model = _build({"balance_over": "micro_batch"})
    x, labels = (t[0, 0] for t in _data(12))
    ce, aux = model(x, labels)
    (ce / 12 + aux).backward()
    expected = {"aux": aux.detach(), **{n: p.grad for n, p in model.named_parameters()}}
    for result in run_ranks(_sequence_parallel, 2):
        for got in result:
            for name, value in expected.items():
                assert_close(name, got[name], value)


def _sharded(rank, ranks, cases):
    mesh = ParallelDims(dp_shard=4, ep=2).build("cpu")
    results = []
    for overrides in cases:
        model = _build(overrides)
        parallelize_experts(model, mesh)
        apply_data_parallel(model, mesh, blocks=[layer["moe"] for layer in model.layers])
        mine = slice(3 * rank, 3 * rank + 3)
        x, labels = (t[0, 0, mine] for t in _data(12))
        ce, aux = model(x, labels)
        (ce / 12 + aux / 4).backward()
        results.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})
    return results


def test_experts_sharded_further_by_data_parallelism():
    cases = [{"mlp_bias": True}, {"num_experts": 1, "top_k": 1, "mlp_bias": True}]
    results = run_ranks(_sharded, 4, cases)
    for number, overrides in enumerate(cases):
        model = _alone(overrides)
        x, labels = (t[0, 0] for t in _data(12))
        ce, aux = model(x, labels)
        (ce / 12 + aux).backward()
        for result in results:
            for name, parameter in model.named_parameters():
                assert_close(f"{overrides}: {name}", result[number][name], parameter.grad)


def _compiled(rank, ranks):
    model = _build({})
    mesh = ParallelDims(dp_shard=2, ep=2).build("cpu")
    parallelize_experts(model, mesh)
    model.layers[1]["moe"].compile(backend="eager")  # the second: its input has a gradient
    return _train(model, mesh, [5, 3])


@pytest.mark.slow
def test_compiled_layers_train_as_one_process():
    expected = _train(_alone({}), ParallelDims().build("cpu"), [8])
    for result in run_ranks(_compiled, 2):
        for got, want in zip(result, expected, strict=True):
            for name, value in want.items():
                assert_close(name, got[name], value)


def test_the_load_of_a_step_is_counted_up_to_its_micro_batch():
    """Two micro-batches of one process: the second's loss has the counts of both."""
    model = _alone({"z_loss_weight": 0.0})
    x, labels = _data(6)
    seen = []
    for m in (0, 1):
        set_micro_batch(model, m)
        _, aux = model(x[0, m], labels[0, m])
        out = model.layers[0]["moe"](model.layers[0]["norm"](x[0, m]))
        seen.append((out.metrics["tokens_per_expert"], out.aux_loss, aux))
        set_micro_batch(model, m)  # what ran before is given up
        again = model.layers[0]["moe"](model.layers[0]["norm"](x[0, m]))
        assert torch.equal(again.aux_loss, out.aux_loss)
        with torch.no_grad():  # an evaluation is no part of the step
            model.eval()(x[0, 1 - m], labels[0, 1 - m])
        model.train()
    layer = model.layers[0]
    probs = layer["moe"].router(layer["norm"](x[0, 1])).probs_TE
    counts_E = (seen[0][0] + seen[1][0]).float()
    expected = 0.1 * 4 * (probs.mean(0) * counts_E / counts_E.sum()).sum()
    torch.testing.assert_close(seen[1][1], expected)
    set_micro_batch(model, 0)
    assert torch.equal(model(x[0, 0], labels[0, 0])[1], seen[0][2])


def test_a_sum_of_counts_of_ones_own_stays():
    layer = dMoE(MoEConfig(**CONFIG))
    own = layer.reduce_counts = torch.clone
    parallelize_experts(layer, ParallelDims().build("cpu"))
    assert layer.reduce_counts is own


@pytest.mark.parametrize("how", ["kept", "recomputed", "recomputed by reentrant checkpoints"])
def test_all_passes_of_a_micro_batch_through_a_layer_count_once(how):
    """As of a tower for both kinds of text; in the order of the backward pass or of the forward."""
    layer = _alone({"z_loss_weight": 0.0}).layers[0]["moe"]
    call = layer
    if how == "recomputed":
        apply_recompute([layer], "full")
    elif how != "kept":
        call = functools.partial(checkpoint, lambda x: layer(x)[:2], use_reentrant=True)
    x = torch.randn(2, 2, 9, HIDDEN, generator=torch.Generator().manual_seed(5), requires_grad=True)
    total, earlier_E = torch.zeros(()), torch.zeros(4)
    for m in (0, 1):
        set_micro_batch(layer, m)
        aux = [call(x[m, place])[1] for place in (0, 1)]
        torch.stack(aux).sum().backward()
        routed = [layer.router(x[m, place]) for place in (0, 1)]
        counts = [r.expert_ids_TK.long().flatten().bincount(minlength=4) for r in routed]
        for found, of_pass, own_E in zip(aux, routed, counts, strict=True):
            load_E = earlier_E + own_E
            expected = 0.1 * 4 * (of_pass.probs_TE.mean(0) * load_E / load_E.sum()).sum()
            torch.testing.assert_close(found, expected)
            total = total + expected
        earlier_E = earlier_E + sum(counts)
    (expected,) = torch.autograd.grad(total, layer.router.weight)
    torch.testing.assert_close(layer.router.weight.grad, expected)


def _save(rank, ranks, folder):
    model = _build({"mlp_bias": True})
    said = parallelize_experts(model, ParallelDims(dp_shard=ranks, ep=ranks).build("cpu"))
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    return said


def _load(rank, ranks, folder):
    model = _build({"mlp_bias": True})
    for parameter in model.parameters():
        parameter.data.zero_()
    parallelize_experts(model, ParallelDims(dp_shard=ranks, ep=ranks).build("cpu"))
    state = model.state_dict()
    dcp.load({"model": state}, checkpoint_id=folder)
    return {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in state.items()}


@pytest.mark.parametrize(("saved", "loaded"), [(2, 4), (8, 1)])
def test_checkpoints_cross_expert_parallel_sizes(saved, loaded, tmp_path):
    said = run_ranks(_save, saved, str(tmp_path))[0]
    assert f"over ep = {saved}: 2 layers: " in said
    metadata = dcp.FileSystemReader(str(tmp_path)).read_metadata().state_dict_metadata
    shapes = {n: m.size for n, m in metadata.items() if isinstance(m, TensorStorageMetadata)}
    assert shapes["model.layers.1.moe.experts.w1"] == (4, 32, HIDDEN)
    assert shapes["model.layers.1.moe.experts.w2"] == (4, HIDDEN, 16)
    expected = _build({"mlp_bias": True}).state_dict()
    assert {f"model.{name}" for name in expected} == set(shapes)
    results = run_ranks(_load, loaded, str(tmp_path)) if loaded > 1 else [_load(0, 1, tmp_path)]
    for result in results:
        for name, value in expected.items():
            assert torch.equal(result[name], value), name


def _drawn(config: MoEConfig, zero_stage: int | None, ep: int) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        layer = dMoE(config)
        add_lora(layer.experts, rank=2, alpha=2)
    model = nn.Sequential(layer)
    if dist.is_initialized():
        mesh = ParallelDims(dp_shard=2, ep=ep).build("cpu")
        parallelize_experts(model, mesh)
        if zero_stage:
            apply_data_parallel(model, mesh, blocks=[layer], zero_stage=zero_stage)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    layer.reset_parameters()
    if zero_stage == 0:  # replicas take the first rank's weights
        apply_data_parallel(model, mesh, blocks=[layer], zero_stage=0)
    whole = {name: getattr(p, "full_tensor", p.detach) for name, p in layer.named_parameters()}
    return {name: take().detach() for name, take in whole.items()}


def _drawn_by_rank(rank, ranks, config, layouts):
    return [_drawn(config, *layout) for layout in layouts]


def test_a_spread_layer_draws_the_weights_of_one_process():
    config = MoEConfig(
        hidden_size=8, ffn_hidden_size=6, num_experts=2, top_k=1, router_bias=True, mlp_bias=True,
        shared_expert_hidden_size=3, shared_expert_gate=True,
    )  # fmt: skip
    expected = _drawn(config, None, 1)
    layouts = [(None, 2), (0, 2), (3, 1), (3, 2)]
    for drawn in run_ranks(_drawn_by_rank, 2, config, layouts):
        for layout, weights in zip(layouts, drawn, strict=True):
            assert weights.keys() == expected.keys()
            for name, weight in weights.items():
                assert torch.equal(weight, expected[name]), (layout, name)


def _refusals(rank, ranks):
    mesh = ParallelDims(tp=2, ep=2).build("cpu")
    said = []
    blocks = {"num_experts": 1, "top_k": 1, "mlp_impl": "sparse", "ffn_hidden_size": 128}
    for overrides, twice in (({"num_experts": 3}, False), (blocks, False), ({}, True)):
        model = _build(overrides)
        try:
            for _ in range(1 + twice):
                parallelize_experts(model, mesh, sequence_parallel=True)
        except ValueError as error:
            said.append(str(error))
    held = [DistributedDataParallel(_build({})), _build({})]
    fully_shard(held[1].layers[1]["moe"])
    elsewhere = _build({})
    elsewhere.w1 = elsewhere.layers[0]["moe"].experts.w1
    begun = _build({})
    parallelize_experts(begun, ParallelDims(dp_shard=2).build("cpu"))
    other = r"a mesh of .*dp_shard=2, .*tp=1, .* in an earlier call for this model, got one .*tp=2"
    with pytest.raises(ValueError, match=other):
        apply_data_parallel(begun, mesh, blocks=[])
    with pytest.raises(ValueError, match=other):
        rebalance_experts(begun, {}, mesh)
    around = _build({})
    around.layers[0]["moe"].experts = nn.Sequential(around.layers[0]["moe"].experts)
    for model in (*held, elsewhere, around):
        try:
            parallelize_experts(model, mesh, sequence_parallel=False)
        except ValueError as error:
            said.append(str(error))
    return said


def _ask_for_peers(rank: int, _ranks: int) -> list[str | None]:
    """Why not, where two ranks on GPUs would be fine but for one thing; the last lacks nothing."""
    mesh = ParallelDims(dp_shard=2, ep=2).build("cpu")
    told = parallelize_experts(Model(), mesh, dispatcher="peer")
    assert "by all_to_all" in told, told
    assert "not peer: the model is not on a GPU" in told, told
    ep = mesh.axis("ep")
    assert ep is not None
    place = peer_memory.Place(ep.get_group())

    def fails_on_rank_1(*_: object) -> None:
        if rank == 1:
            raise RuntimeError("no such handle\nat some line")

    def problem(width: int = HIDDEN, *patches: Any) -> str | None:
        fine = [
            mock.patch.object(torch.cuda, "current_device", return_value=rank),
            mock.patch.object(torch.cuda, "can_device_access_peer", return_value=True),
            mock.patch.object(peer_memory, "symmetric_arena", return_value=None),
        ]
        with contextlib.ExitStack() as stack:
            for patch in (*fine, *patches):
                stack.enter_context(patch)
            return peer_memory.peer_problem(place, "cuda", (HIDDEN, width))

    return [
        problem(12),
        problem(HIDDEN, mock.patch.object(torch.version, "hip", "7.0")),
        problem(HIDDEN, mock.patch.object(socket, "gethostname", return_value=f"host{rank}")),
        problem(
            HIDDEN,
            mock.patch.object(torch.cuda, "can_device_access_peer", lambda mine, _: mine == 0),
        ),
        problem(HIDDEN, mock.patch.object(peer_memory, "symmetric_arena", fails_on_rank_1)),
        problem(),
    ]


def test_peers_that_cannot_be_reached_are_done_without():
    for problems in run_ranks(_ask_for_peers, 2):  # alike on both, whichever of them saw it
        assert problems == [
            "hidden_size = 12 is no multiple of 8",
            "on AMD it is compiled but not measured yet",
            "the ranks of an ep group are on several hosts",
            "the GPUs cannot address each other's memory",
            "symmetric memory is not available (no such handle)",
            None,
        ]


def test_models_that_cannot_be_spread_are_named():
    said = run_ranks(_refusals, 2)[0]
    uneven, halved, twice, wrapped, sharded, elsewhere, around = said
    assert "ep = 2 for 3 experts" in uneven
    assert "multiples of 128 for mlp_impl='sparse' where 2 ranks share an expert" in halved
    assert "layers.0.moe, got AllToAllDispatcher" in twice
    assert "got DistributedDataParallel" in wrapped
    assert "plain parameters in layers.1.moe, got DTensors" in sharded
    assert "experts of layers.0.moe to share parameters with other experts alone" in elsewhere
    assert "mb_layers' Experts in layers.0.moe, got Sequential" in around


# Each decides what is exchanged.
EITHER = {
    "equal_tokens": True, "chunks": 2, "keep_rows": True, "row_policy": "exact", "row_budget": 3.0,
}  # fmt: skip


def _disagreeing(rank, world_size):
    """What is said where ranks bring other layers, or ask for other dispatchers."""
    mesh, said = ParallelDims(dp_shard=2, ep=2).build("cpu"), []
    sizes = {"hidden_size": 8, "ffn_hidden_size": 4, "top_k": 1}
    for experts, dispatcher in ((2, "auto"), (4, "auto" if rank else "all_gather")):
        layer = dMoE(MoEConfig(num_experts=experts + 2 * rank * (experts == 2), **sizes))
        with pytest.raises(ValueError, match="parallelize_experts is given to be equal") as error:
            parallelize_experts(layer, mesh, dispatcher=dispatcher)
        said.append(str(error.value))
    layer = dMoE(MoEConfig(num_experts=2, **sizes))
    for name, value in EITHER.items():
        with pytest.raises(ValueError, match=f"rank 1: {name} = "):
            parallelize_experts(layer, mesh, **({name: value} if rank else {}))
    return said


def test_ranks_that_disagree_about_their_layers_all_say_so():
    first, second = run_ranks(_disagreeing, 2)
    assert first == second
    assert "rank 0: the layer.num_experts = 2\n  rank 1: the layer.num_experts = 4" in first[0]
    assert "rank 0: dispatcher = 'all_gather'\n  rank 1: dispatcher = 'auto'" in first[1]


def _unequal_stages(rank, world_size):
    """What is said of layers that stage 0 alone has and that are refused. Then, with more layers on
    stage 0, how many groups are made (two, for a grid of ranks), and whether one made later works.
    """
    mesh = ParallelDims(pp=2, dp_shard=2, ep=2).build("cpu")
    sizes = {"hidden_size": 8, "ffn_hidden_size": 4, "num_experts": 1, "top_k": 1}
    said = []
    for change, how in (
        ({}, "fixed"),
        ({"num_experts": 3}, "auto"),
        ({"ffn_hidden_size": 3}, "auto"),
    ):
        refused = dMoE(MoEConfig(**sizes | change))
        with pytest.raises(ValueError, match="Expected") as error:
            parallelize_experts(nn.Linear(2, 2) if mesh.pp_rank else refused, mesh, dispatcher=how)
        said.append(str(error.value))
    config = MoEConfig(**sizes)
    layers = [nn.ModuleList(dMoE(config) for _ in range(count)) for count in (3, 0)]
    before = len(dist.distributed_c10d._world.pg_map)
    parallelize_experts(layers[mesh.pp_rank], mesh)
    made = len(dist.distributed_c10d._world.pg_map) - before
    total = torch.ones(())
    dist.all_reduce(total, group=dist.new_group())
    return said, made, total.item()


def test_stages_may_have_other_numbers_of_layers_whose_experts_ranks_share():
    first, *others = run_ranks(_unequal_stages, 4, timeout_s=60.0)
    assert others == [first] * 3
    (capacity, uneven, width), made, total = first
    assert (made, total) == (2, 4.0)
    assert "capacity for dispatcher='fixed' in the layer" in capacity
    assert "ep = 2 for 3 experts" in uneven
    assert "the 2 ranks that share an expert of the layer to divide its width" in width
