"""Pipelines: steps equal to one process's by every schedule."""

import gc
import re
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import tiny_gpt
import torch
from mb_layers import MoEConfig, dMoE
from mb_layers.moe import MoELayer
from mb_parallel import ParallelDims, apply_data_parallel, parallelize_experts
from mb_parallel.expert_parallel import GlobalCapacity, PeerBuffers, PeerDispatcher, Place
from mb_parallel.optimizer import SGD, clip_and_step, hold_working_copies
from mb_parallel.pipeline_parallel import (
    SCHEDULES,
    Pipeline,
    check_micro_batches,
    split_layers,
    stage_indices,
)
from mb_parallel.pipeline_parallel.engine import Stage
from mb_parallel.pipeline_parallel.halves import must_stay_whole
from mb_parallel.pipeline_parallel.placement import rank_of_stage
from mb_parallel.testing import run_ranks
from tiny_gpt import Options, compare

MOE = Options(experts=4, padded=True)
LAYOUTS = {
    2: {
        "gpipe": Options(pp=2, schedule="gpipe"),
        "1f1b": replace(MOE, pp=2),
        "1f1b-untied-uneven": replace(MOE, pp=2, tied=False, first_lighter=2, micro_batches=1),
        "1f1b-scaled": replace(MOE, pp=2, loss_scale=1024.0),
        "1f1b-global-balance": replace(
            MOE, pp=2, balance_over="global_batch", recompute=True, micro_batches=3
        ),
        "interleaved": replace(MOE, pp=2, schedule="interleaved-1f1b", stages_per_rank=2),
        "zbv": replace(MOE, pp=2, schedule="zbv-zero-bubble", stages_per_rank=2),
    },
    4: {
        "pp4": replace(MOE, pp=4),
        "tp2-pp2": replace(MOE, tp=2, pp=2),
        "tp2-pp2-ep2": replace(MOE, tp=2, pp=2, ep=2),
        "tp2-sp-pp2-ep2": replace(MOE, tp=2, pp=2, ep=2, sequence_parallel=True),
        "dp2-pp2": replace(MOE, dp=2, pp=2),
        "dp2-interleaved": replace(
            MOE, dp=2, pp=2, schedule="interleaved-1f1b", stages_per_rank=2, micro_batches=8
        ),
        "tp2-sp-pp2": replace(MOE, tp=2, pp=2, sequence_parallel=True, gated=True),
        "dp2-zero-bubble": replace(
            MOE,
            dp=2,
            pp=2,
            schedule="interleaved-zero-bubble",
            stages_per_rank=2,
            micro_batches=8,
            zero_stage=1,
            frozen="attention.out",
        ),
        "dp2-ep2-zbv": replace(
            MOE,
            dp=2,
            pp=2,
            ep=2,
            schedule="zbv-zero-bubble",
            stages_per_rank=2,
            micro_batches=6,
            zero_stage=2,
            empty=True,
        ),
    },
}


# Of four ranks those that have most at once.
ALWAYS = ("tp2-sp-pp2-ep2", "dp2-zero-bubble", "dp2-ep2-zbv")
BY_RANKS = [
    pytest.param(2, [*LAYOUTS[2]], id="2"),
    pytest.param(4, [*ALWAYS], id="4"),
    pytest.param(
        *(4, [name for name in LAYOUTS[4] if name not in ALWAYS]),
        id="4, further",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("ranks", "names"), BY_RANKS)
def test_equals_one_process(ranks, names):
    layouts = {name: LAYOUTS[ranks][name] for name in names}
    by_rank = run_ranks(tiny_gpt.train_all, ranks, *layouts.values(), timeout_s=280.0)
    for number, (name, options) in enumerate(layouts.items()):
        alone = replace(
            options, dp=1, tp=1, ep=1, pp=1, stages_per_rank=1, loss_scale=1.0, first_lighter=0,
            recompute=False,
        )  # fmt: skip
        worst = compare([results[number] for results in by_rank], tiny_gpt.train(0, 1, alone))
        print(f"{name}: largest relative deviation {worst:.1e}")


@pytest.mark.parametrize(
    ("arguments", "lighter", "sizes"),
    [
        ((8, 4), {}, [2, 2, 2, 2]),
        ((10, 4), {}, [3, 3, 2, 2]),
        ((12, 4), {"last_lighter": 2}, [4, 4, 3, 1]),
        ((14, 4), {"first_lighter": 1, "last_lighter": 1}, [3, 4, 4, 3]),
        ((3, 1), {}, [3]),
    ],
)
def test_layers_are_split(arguments, lighter, sizes):
    runs = split_layers(*arguments, **lighter)
    assert [len(run) for run in runs] == sizes
    assert [layer for run in runs for layer in run] == list(range(arguments[0]))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_stage_has_one_rank(schedule, ranks):
    per_rank = 2 if SCHEDULES[schedule].many else 1
    held = [
        stage_indices(schedule, pp_size=ranks, pp_rank=rank, stages_per_rank=per_rank)
        for rank in range(ranks)
    ]
    assert sorted(stage for stages in held for stage in stages) == list(range(ranks * per_rank))
    assert held[0][0] == 0
    assert ranks * per_rank - 1 in held[0 if SCHEDULES[schedule].v else -1]
    for rank, stages in enumerate(held):
        assert {rank_of_stage(schedule, stage, pp_size=ranks) for stage in stages} == {rank}


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "train", "name"),
    [
        ("gpipe", 8, True, "ScheduleGPipe"),
        ("1f1b", 4, True, "Schedule1F1B"),
        ("1f1b", 3, True, "ScheduleGPipe"),
        ("1f1b", 8, False, "ScheduleGPipe"),
        ("interleaved-1f1b", 2, True, "ScheduleInterleaved1F1B"),
        ("interleaved-1f1b", 8, False, "ScheduleLoopedBFS"),
        ("interleaved-zero-bubble", 2, True, "ScheduleInterleavedZeroBubble"),
        ("zbv-zero-bubble", 2, True, "ScheduleZBVZeroBubble"),
        ("zbv-zero-bubble", 8, False, "ScheduleZBVZeroBubble"),
    ],
)
def test_a_pass_is_run_by_the_schedule_that_was_asked_for(schedule, micro_batches, train, name):
    """Another one would have the same numbers, and keep more activations or wait longer."""
    kind = SCHEDULES[schedule].load(micro_batches=micro_batches, num_stages=4, train=train)
    assert kind.__name__ == name


def test_bad_places_are_named():
    with pytest.raises(ValueError, match=r"have a layer, got \[1, 1, 0\] for 2 layers"):
        split_layers(2, 3)
    with pytest.raises(ValueError, match=r"have a layer, got \[3, 0\] .* the last by 2"):
        split_layers(3, 2, last_lighter=2)
    with pytest.raises(ValueError, match="0 or more layers, got -1 and 0"):
        split_layers(3, 2, first_lighter=-1)
    with pytest.raises(ValueError, match=r"schedule of gpipe, 1f1b, .* got '2f2b'"):
        stage_indices("2f2b", pp_size=2, pp_rank=0)
    with pytest.raises(ValueError, match="one stage per rank with 1f1b, got 2"):
        stage_indices("1f1b", pp_size=2, pp_rank=0, stages_per_rank=2)
    with pytest.raises(ValueError, match="2 stages per rank with zbv-zero-bubble, got 1"):
        stage_indices("zbv-zero-bubble", pp_size=2, pp_rank=0)
    for micro_batches, pp_size in ((1, 2), (3, 2), (4, 2), (10, 4), (5, 1)):
        check_micro_batches("interleaved-1f1b", micro_batches, pp_size=pp_size)
    for schedule in ("1f1b", "zbv-zero-bubble"):
        check_micro_batches(schedule, 5, pp_size=2)
    with pytest.raises(ValueError, match="with interleaved-zero-bubble, got 5 and pp = 2"):
        check_micro_batches("interleaved-zero-bubble", 5, pp_size=2)
    with pytest.raises(ValueError, match="pp_rank from 0 up to but not 2, got 2"):
        stage_indices("1f1b", pp_size=2, pp_rank=2)
    for call, name in (
        (lambda: split_layers("12", 2), "num_layers"),
        (lambda: split_layers(12, 2.0), "num_stages"),
        (
            lambda: stage_indices("interleaved-1f1b", pp_size=2, pp_rank=0, stages_per_rank=1.5),
            "st",
        ),
        (lambda: stage_indices("1f1b", pp_size="2", pp_rank=0), "pp_size"),
        (lambda: check_micro_batches("interleaved-1f1b", 4, pp_size=0), "pp_size"),
    ):
        with pytest.raises(ValueError, match=rf"expected {name}.* to be an integer >= 1, got"):
            call()
    mesh, settings = ParallelDims().build("cpu"), {"schedule": "1f1b", "first_input": "x"}
    for given, change, message in (
        (mesh, {}, "mesh with pp > 1"),
        (None, {}, "Expected a ParallelMesh, got NoneType"),
        (mesh, {"hidden_size": 0}, "hidden_size to be an integer >= 1"),
        (mesh, {"dtype": torch.int64}, "dtype to be .*got torch.int64"),
    ):
        with pytest.raises(ValueError, match=message):
            Pipeline([torch.nn.Linear(1, 1)], given, **{"hidden_size": 1} | settings | change)


def _compiled_in_halves(rank, world_size):
    """Whether compiled blocks have the gradients of others, behind a pass that is left whole."""
    options = Options(pp=2, schedule="zbv-zero-bubble", stages_per_rank=2, steps=1)
    mesh, (batches,) = ParallelDims(pp=2).build("cpu"), tiny_gpt.data(options)
    grads = []
    for backend in (None, "aot_eager"):
        parts = [tiny_gpt.build(options) for _ in range(2)]
        for part, index in zip(parts, (rank, 3 - rank), strict=True):
            part.keep(split_layers(4, 4)[index], first=index == 0, last=index == 3)
            for block in part.stack.blocks.values():
                if backend is not None:
                    block.mlp.compile(backend=backend)
        pipeline = Pipeline(
            parts, mesh, schedule=options.schedule, first_input="tokens", hidden_size=tiny_gpt.D
        )
        for count in (1, 4):  # of the only micro-batch nothing is taken apart
            pipeline.step(batches[:count])
        grads.append([p.grad for part in parts for p in part.parameters()])
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*grads, strict=True))


def test_compiled_blocks_train_in_halves():
    assert run_ranks(_compiled_in_halves, 2) == [True, True]


def _pieces(rank, world_size):
    """What a pipeline says and does besides training, on two ranks with a tied head."""
    options = Options(pp=2, micro_batches=3, steps=1)
    mesh = ParallelDims(pp=2).build("cpu")
    stage = tiny_gpt.build(options)
    stage.keep(split_layers(tiny_gpt.L, 2)[rank], first=rank == 0, last=rank == 1)
    tied = "embedding.tokens.weight" if rank == 0 else "head.weight"
    parameter = stage.get_parameter(tied)
    with torch.no_grad():
        parameter.add_(rank)  # the copies differ until the pipeline is made
        parameter.data = parameter.mT.contiguous().mT  # only what is contiguous can be sent
    arguments = {"schedule": "1f1b", "first_input": "tokens", "hidden_size": tiny_gpt.D}
    names = {"embedding.tokens.weight": "head.weight"}
    pipeline = Pipeline([stage], mesh, tied=names, **arguments)
    (batches,) = tiny_gpt.data(options)
    seen = []
    pipeline.step(batches, before=seen.append)
    assert seen == [3 * rank + number for number in range(3)]
    once = parameter.grad.clone()
    pipeline.step(batches)  # gradients add up over steps
    twice = parameter.grad.clone()
    without = {name: value for name, value in batches[0].items() if name != "tokens"}
    for bad, message in (
        ([batches[0], {k: v[:1] for k, v in batches[1].items()}], "of it; got (1, 8), (2, 8)"),
        ([], "micro-batches of one shape, for hidden states travel in buffers of it; got none"),
        ([without], "micro-batches with the entries tokens, by first_input"),
        (batches[0], "micro-batches with the entries tokens, by first_input"),
    ):
        with _refused(message):
            pipeline.step(bad)
    assert torch.equal(parameter.grad, twice)
    for bad, message in (
        ({"embedding.words": "head.words"}, f"{('embedding', 'head')[rank]}.words' in the stage"),
        ({"embedding.tokens.weight": "head.words"}, "'head.words' in the stage"),  # on both ranks
        ({"embedding.tokens.weight": "stack.norm.weight"}, "got parts of [16] in torch.float32"),
        ({"embedding.tokens.weight": {3: "head.weight"}}, "1 to 1, one on each, got {3: 'head"),
        ({"embedding.tokens.weight": {0: "head.weight"}}, "1 to 1, one on each, got {0: 'head"),
        ({"embedding.tokens.weight": {1: "head.weight", -1: "x"}}, "got {1: 'head.weight', -1:"),
        (["embedding.tokens.weight"], "tied to be names by name, such as"),
    ):
        with _refused(message):
            Pipeline([stage], mesh, tied=bad, **arguments)
    with _refused("Expected what Pipeline is given to be equal on all 2 ranks, got\n  rank 0: hid"):
        Pipeline([stage], mesh, **arguments | {"hidden_size": tiny_gpt.D + rank})
    with _refused("Expected micro-batches to be equal on all 2 ranks, got\n  rank 0: number = 2"):
        Pipeline([stage], mesh, **arguments).step(batches[rank:][:2] * (1 + rank))
    assert [parameter is copy for copy in pipeline.copies] == [True] * rank
    pipeline.step(batches[:2])  # lets go of the buffers for three
    gc.collect()
    assert sum(type(one) is Stage for one in gc.get_objects()) == 1
    parameter.grad, loss = None, stage.cross_entropy

    def without_head(x, weight, *rest, **how):
        return loss(x, weight.detach(), *rest, **how)

    with mock.patch.object(stage, "cross_entropy", without_head):
        pipeline.step(batches)
    of_embedding = parameter.grad.clone()  # the head's, which has none of its own, is as large
    halves = arguments | {"schedule": "zbv-zero-bubble"}
    copied = [tiny_gpt.build(replace(options, experts=2)) for _ in range(2)]
    earlier = Pipeline(copied, mesh, **halves)
    hold_working_copies(copied, torch.bfloat16)
    for late in (lambda: Pipeline(copied, mesh, **halves), lambda: earlier.step(batches)):
        with _refused("without working copies with zbv-zero-bubble"):
            late()
    peers = [tiny_gpt.build(replace(options, experts=2)) for _ in range(2)]
    place = Place(mesh.axis("pp").get_group())
    layer = next(module for module in peers[1].modules() if isinstance(module, MoELayer))
    inner = PeerDispatcher(2, place, PeerBuffers(place))
    if rank == 1:
        layer.dispatcher = GlobalCapacity(inner, 2, 1.0, place)
    with _refused("reached by collectives with zbv-zero-bubble"):
        Pipeline(peers, mesh, **halves)
    wrapped = [torch.compile(tiny_gpt.build(options)) for _ in range(2)]
    with _refused("with zbv-zero-bubble that torch.compile has not wrapped"):
        Pipeline(wrapped, mesh, **halves)
    compiled = [tiny_gpt.build(options) for _ in range(2)]
    compiled[1].stack.compile()
    with mock.patch.object(torch, "__version__", "2.11.0+cu130"):
        with pytest.raises(ValueError, match=r"not compiled with zbv-.* on torch 2\.11"):
            Pipeline(compiled, mesh, **halves)
        Pipeline(compiled[:1] * 2, mesh, **halves)  # as they were built
    with mock.patch.object(torch, "__version__", "2.13.0"):
        Pipeline(compiled, mesh, **halves)
    sharded = [tiny_gpt.build(options) for _ in range(2)]
    for one in sharded:
        setattr(one, "_mb_zero_stage", 3)  # noqa: B010, as `apply_data_parallel` leaves it
    with _refused("zero_stage 1 or 2 with zbv-zero-bubble"):
        Pipeline(sharded, mesh, **halves)
    parameter.requires_grad_(rank == 1)
    with _refused("parts of [32, 16] in torch.float32 and [32, 16] in torch.float32 (frozen)"):
        Pipeline([stage], mesh, tied=names, **arguments)
    parameter.requires_grad_(False)
    with _refused("requires_grad=True, as when the pipeline was made, got False"):
        pipeline.step(batches)
    parameter.grad = None
    deeper = [batch | {"mask": torch.ones(2, 8, 3)} for batch in batches]  # [B, S, ...]
    Pipeline([stage], mesh, tied=names, streams=[["mask"]], **arguments).step(deeper)
    assert parameter.grad is None
    parameter.requires_grad_()
    calls, told = torch.zeros(1), []
    counting = stage.register_forward_hook(
        lambda _, __, output: output._replace(metrics={"calls": calls.add_(1)})
    )
    Pipeline([stage], mesh, **arguments).step(batches, measured=told.append)
    assert [metrics["calls"].tolist() for metrics in told] == [[1, 1], [2, 2], [3, 3]]
    counting.remove()
    late = {"late": torch.zeros(2)}
    stage.register_forward_hook(lambda _, __, output: output._replace(metrics=late))
    graphs = []
    stage.register_forward_hook(lambda _, __, output: graphs.append(torch.is_grad_enabled()))
    pipeline.evaluate(batches)  # what it reports may differ from a step's
    assert graphs == [False] * 3
    with _refused("got metric 'late' [2] in torch.float32 instead of nothing in micro-batch 0"):
        pipeline.step(batches)
    return parameter.detach(), once, twice, of_embedding


def _refused(message):
    return pytest.raises(ValueError, match=re.escape(message))


def test_tied_parameters_hooks_and_errors():
    first, last = run_ranks(_pieces, 2)
    for one, other in zip(first, last, strict=True):
        assert torch.equal(one, other)
    torch.testing.assert_close(first[2], 2 * first[1])


def _adds_up(rank, world_size):
    """Gradients of passes of several shapes: each by itself, and added up with an evaluation."""
    options = Options(pp=2, dp=2, micro_batches=3, steps=1)
    mesh = options.dims.build("cpu")
    stage = tiny_gpt.build(options)
    number = mesh.pp_rank
    stage.keep(split_layers(tiny_gpt.L, 2)[number], first=number == 0, last=number == 1)
    apply_data_parallel(stage, mesh, blocks=stage.stack.blocks.values())
    pipeline = Pipeline(
        [stage], mesh, schedule="1f1b", first_input="tokens", hidden_size=tiny_gpt.D
    )
    (batches,) = tiny_gpt.data(options)
    passes = [batches, batches[:2], batches[1:]]
    alone = []
    for part in passes:
        pipeline.step(part)
        alone.append([p.grad.full_tensor() for p in stage.parameters()])
        stage.zero_grad()
    for part in passes:
        pipeline.step(part)
        pipeline.evaluate(part)
    for parameter, *parts in zip(stage.parameters(), *alone, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), sum(parts))


def test_gradients_add_up_over_shapes_and_evaluations():
    run_ranks(_adds_up, 4)


def _trained_in_part(rank, world_size, options):
    """This rank's parameters, those of the first one frozen, and the norm of all gradients."""
    mesh, stages, pipeline = tiny_gpt.spread(options)
    parameters = {name: p for stage in stages for name, p in stage.named_parameters()}
    for parameter in parameters.values():
        parameter.requires_grad_(rank == 1)
    optimizers = [SGD(parameters.values())] if rank else []
    pipeline.step(next(tiny_gpt.data(options)))
    return list(parameters), float(clip_and_step(optimizers, mesh=mesh).grad_norm)


def test_a_rank_without_an_optimizer_where_nothing_trains():
    options = Options(pp=2, tied=False, zero_stage=1)
    (_, norm), (names, same) = run_ranks(_trained_in_part, 2, options)
    model, batches = tiny_gpt.build(options), next(tiny_gpt.data(options))
    sum(tiny_gpt.call(model, batch).losses["lm loss"] for batch in batches).backward()
    gradients = [model.get_parameter(name).grad for name in names]
    assert norm == same == pytest.approx(float(torch.nn.utils.get_total_norm(gradients)))


def _announced_otherwise(rank, world_size):
    options = Options(pp=2, steps=1)
    stage = tiny_gpt.build(options)
    stage.keep(split_layers(tiny_gpt.L, 2)[rank], first=rank == 0, last=rank == 1)
    arguments = {"first_input": "tokens", "hidden_size": tiny_gpt.D, "dtype": torch.bfloat16}
    mesh = ParallelDims(pp=2).build("cpu")
    pipeline = Pipeline([stage], mesh, schedule="gpipe", **arguments)
    pipeline.step(next(tiny_gpt.data(options)))


def test_states_of_another_dtype_are_not_sent():
    expected = (
        r"stage 0 to return x \[2, 8, 16\] in torch.bfloat16.* got \[2, 8, 16\] in torch.float32"
    )
    with pytest.raises(RuntimeError, match=expected):
        run_ranks(_announced_otherwise, 2)


def test_a_stage_without_states_for_the_next_is_told_so():
    stage = Stage.__new__(Stage)
    stage.stage_index, stage.leaving = 0, (torch.empty(2, 8, 16, device="meta"),)
    with _refused("stage 0 to return x [2, 8, 16] in torch.float32, by the pipeline's hidden_size"):
        stage._checked(None)


class Twice(torch.nn.Module):
    """A stage that uses its weights twice, those of experts too."""

    def __init__(self, index):
        super().__init__()
        torch.manual_seed(index)
        self.first, self.last = index == 0, index == 3
        self.layer = torch.nn.Linear(4, 4)
        sizes = {"hidden_size": 4, "ffn_hidden_size": 8, "num_experts": 4, "top_k": 2}
        self.experts = dMoE(MoEConfig(**sizes, mlp_bias=True, init_method_std=0.5))

    def forward(self, x):
        aux_loss = 0.0
        for _ in range(2):
            out = self.experts(self.layer(x).tanh())
            x, aux_loss = x + out.y, aux_loss + out.aux_loss
        losses = {"loss": x.square().sum()} if self.last else {}
        return tiny_gpt.Output(x, losses, aux_loss, {})


class Layer(torch.nn.Module):
    """A FSDP2 unit of two inputs, through which the gradients of both go."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x, offset):
        return x + self.linear(x * offset).tanh()


class Shares(torch.nn.Module):
    """A stage whose layers, two or one, take the same offset, made of a parameter."""

    def __init__(self, index, layers=2):
        super().__init__()
        torch.manual_seed(index)
        self.first, self.last = index == 0, index == 3
        self.table = torch.nn.Parameter(torch.randn(2, 4))
        self.layers = torch.nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x):
        offset = self.table.exp()[None]  # as large as x
        for layer in self.layers:
            x = layer(x, offset)
        losses = {"loss": x.square().sum()} if self.last else {}
        return tiny_gpt.Output(x, losses, torch.zeros(()), {})


STAGES = {"twice": Twice, "shares": Shares, "hands on": partial(Shares, layers=1)}


def _taken_apart_or_not(rank, world_size, kind, schedule, dims):
    mesh = ParallelDims(**dims).build("cpu")
    indices = stage_indices(schedule, pp_size=2, pp_rank=mesh.pp_rank, stages_per_rank=2)
    stages = [STAGES[kind](index) for index in indices]
    for stage in stages:
        parallelize_experts(stage, mesh)
        units = [module for module in stage.modules() if isinstance(module, Layer)]
        apply_data_parallel(stage, mesh, blocks=units, zero_stage=1)
    pipeline = Pipeline(stages, mesh, schedule=schedule, first_input="x", hidden_size=4)
    batches = [{"x": torch.linspace(-1, m, 8).view(1, 2, 4)} for m in range(4)]
    pipeline.step(batches[mesh.dp_rank :: mesh.dp_size])
    whole = [STAGES[kind](index) for index in range(4)]
    for batch in batches:
        x, aux_loss = batch["x"], 0.0
        for stage in whole:
            out = stage(x)
            x, aux_loss = out.x, aux_loss + out.aux_loss
        (out.losses["loss"] + aux_loss / len(batches)).backward()
    for index, stage in zip(indices, stages, strict=True):
        for p, alone in zip(stage.parameters(), whole[index].parameters(), strict=True):
            torch.testing.assert_close(tiny_gpt.whole(p.grad), alone.grad)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("schedule", ["interleaved-zero-bubble", "zbv-zero-bubble"])
@pytest.mark.parametrize(
    ("kind", "dims"),
    [("twice", {"pp": 2}), ("twice", {"pp": 2, "dp_shard": 2, "ep": 2}), ("shares", {"pp": 2}),
     ("hands on", {"pp": 2})],
    ids=["twice", "twice dp2 ep2", "shares", "hands on dp2"],
)  # fmt: skip
def test_weights_whose_gradients_a_schedule_of_halves_would_get_wrong(kind, schedule, dims):
    """Used twice, shared by two layers, handed on as an input of one (torch 2.11 added both)."""
    run_ranks(_taken_apart_or_not, 2 * dims.get("dp_shard", 1), kind, schedule, dims)


class Both(torch.autograd.Function):
    """What it gets, in one op, as FSDP2 hands the inputs of a unit on."""

    @staticmethod
    def forward(ctx, *given):
        return tuple(one.view_as(one) for one in given)

    @staticmethod
    def backward(ctx, *grads):
        return grads


def test_a_backward_pass_is_taken_apart_where_torch_can():
    model = tiny_gpt.build(replace(MOE, tied=False))
    x = model.embedding(torch.arange(8)[None]).detach().requires_grad_()
    for block in model.stack.blocks.values():
        assert not must_stay_whole([block(x, None)[0].grad_fn], [x])  # though x is used often
    assert not must_stay_whole([None], [x])  # of a frozen stage
    layer, x = torch.nn.Linear(4, 4), torch.ones(4, requires_grad=True)
    twice = [layer(layer(x)).grad_fn]
    assert must_stay_whole(twice, [x])
    assert not must_stay_whole(twice, [torch.ones(4)])  # of a first stage, which has no halves
    offset = layer.bias.exp()
    assert must_stay_whole([((x + offset) * offset).grad_fn], [x])
    assert not must_stay_whole([(x + offset * offset).grad_fn], [x])  # meets x once
    parts = Both.apply(x, offset)
    for release, whole in (("2.12.1", True), ("2.13.0", False)):
        with mock.patch.object(torch, "__version__", release):
            assert must_stay_whole([(parts[0] * parts[1]).grad_fn], [x]) == whole


def test_a_sequence_that_the_tp_ranks_cannot_share_is_refused():
    pipeline = Pipeline.__new__(Pipeline)
    pipeline.first_input, pipeline.streams, pipeline.shards = "frames", [["frames"]], 2
    with _refused("Expected tp = 2 to divide the 7 tokens of a sequence"):
        pipeline.step([{"frames": torch.zeros(2, 7, 3)}])


class Seq2Seq(torch.nn.Module):
    """Two layers of an encoder, two of a decoder, one embedding for both and for the head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        D, V = tiny_gpt.D, tiny_gpt.V
        self.embedding = torch.nn.Embedding(V, D)
        self.encoder = torch.nn.ModuleDict({str(i): torch.nn.Linear(D, D) for i in range(2)})
        self.decoder = torch.nn.ModuleDict({str(i): torch.nn.Linear(2 * D, D) for i in range(2)})
        self.head = torch.nn.Linear(D, V, bias=False)
        self.head.weight = self.embedding.weight

    def keep(self, stage, stages):
        layers = [(part, str(i)) for part in (self.encoder, self.decoder) for i in range(2)]
        per_stage = 4 // stages
        for number, (part, name) in enumerate(layers):
            if number // per_stage != stage:
                del part[name]
        if stage not in (0, stages // 2):
            self.embedding = None
        if stage != stages - 1:
            self.head = None

    def forward(self, x, *, targets, labels):
        own = None
        if self.encoder and self.embedding is not None:
            x = self.embedding(x)
        if isinstance(x, tuple):
            own, x = x
        for layer in self.encoder.values():
            x = x + torch.tanh(layer(x.cumsum(1)))
        if self.decoder and own is None:
            own = self.embedding(targets)
        for layer in self.decoder.values():
            seen = torch.softmax(own @ x.mT, dim=-1) @ x
            own = own + torch.tanh(layer(torch.cat([own, seen], dim=-1)))
        if self.head is None:
            return tiny_gpt.Output(x if own is None else (own, x), {}, None, {})
        loss = torch.nn.functional.cross_entropy(self.head(own).flatten(0, 1), labels.flatten())
        return tiny_gpt.Output(None, {"lm loss": loss / 3}, None, {})


SEQ2SEQ = [
    ({"pp": 2, "dp_shard": 2}, "1f1b", 2),
    ({"pp": 4}, "1f1b", 4),
    ({"pp": 2, "dp_shard": 2}, "interleaved-1f1b", 4),
]


def _seq2seq(rank, world_size):
    """Losses, and every gradient of two steps, by layout; {} stands for one process."""
    generator = torch.Generator().manual_seed(1)

    def ids(length):
        return torch.randint(tiny_gpt.V, (2, length), generator=generator)

    batches = [{"tokens": ids(7), "targets": ids(5), "labels": ids(5)} for _ in range(3)]
    results = []
    for dims, schedule, stages in SEQ2SEQ if world_size > 1 else [({}, "", 1)]:
        mesh = ParallelDims(**dims).build("cpu")
        pipeline, parts = None, [Seq2Seq()]
        if dims:
            place = {"pp_size": mesh.pp_size, "pp_rank": mesh.pp_rank}
            indices = stage_indices(schedule, stages_per_rank=stages // mesh.pp_size, **place)
            parts = [Seq2Seq() for _ in indices]
            for part, index in zip(parts, indices, strict=True):
                part.keep(index, stages)
            words = ["tokens"]
            streams = [words, words, ["targets", *words]] if stages == 4 else [words]
            copies = {stages // 2: "embedding.weight", -1: "head.weight"}
            tied = {"embedding.weight": copies if stages == 4 else "head.weight"}
            settings = {"first_input": "tokens", "hidden_size": tiny_gpt.D, "streams": streams}
            pipeline = Pipeline(parts, mesh, schedule=schedule, tied=tied, **settings)
            if schedule == "interleaved-1f1b":
                with pytest.raises(
                    ValueError, match="one stream between stages with interleaved-z"
                ):
                    Pipeline(parts, mesh, schedule="interleaved-zero-bubble", **settings)
                with pytest.raises(ValueError, match="each of the 3 borders between 4 stages"):
                    Pipeline(parts, mesh, schedule=schedule, **(settings | {"streams": [words]}))
                with _refused("in a multiple of pp with interleaved-1f1b, got 5 and pp = 2"):
                    pipeline.step([*batches, *batches[:2]])
        losses, grads = [], []
        for _ in range(2):
            if pipeline is not None:
                losses.append(pipeline.step(batches)["lm loss"])
                losses.append(pipeline.evaluate(batches)["lm loss"])
            else:
                found = [tiny_gpt.call(parts[0], batch).losses["lm loss"] for batch in batches]
                sum(found).backward()
                losses += [sum(found).detach()] * 2
            named = [(name, p) for part in parts for name, p in part.named_parameters()]
            grads.append([(name, p.grad.clone()) for name, p in named])
            with torch.no_grad():
                for _, parameter in named:
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
        results.append((losses, grads))
    return results


def test_an_encoder_and_a_decoder_with_one_embedding():
    ((losses, grads),) = _seq2seq(0, 1)
    assert losses[0] != losses[2]
    expected = [dict(step) for step in grads]
    for results in run_ranks(_seq2seq, 4):
        for got_losses, got in results:
            torch.testing.assert_close(got_losses, losses, rtol=1e-5, atol=0)
            for step, want in zip(got, expected, strict=True):
                for name, grad in step:
                    name = name.replace("head", "embedding")
                    torch.testing.assert_close(grad, want[name], rtol=1e-5, atol=1e-6)
