"""All kinds of parallelism together, with the sharded optimizer, against one process.

Steps with accumulation, clipping and AdamW, two here and five in `benchmarks/equality.py`:
losses, gradient norms, every gradient (the router's by name), every parameter and every moment at
the end.
"""

import dataclasses
import math

import pytest
import torch
from mb_parallel import ParallelDims, apply_data_parallel, parallelize_experts, set_gradient_sync
from mb_parallel.optimizer import AdamW, clip_and_step, decay_groups
from mb_parallel.pipeline_parallel import Pipeline, split_layers, stage_indices
from mb_parallel.tensor_parallel import parallelize_tensors
from mb_parallel.testing import run_ranks
from tiny_gpt import D, L, Options, build, data, plan, relative_error, router_slopes, whole

DENSE, EXPERTS = Options(), Options(experts=4, shared_expert=8)
LAYOUTS = {
    "tp2": (DENSE, {"tp": 2}, 2),
    "tp2-experts": (EXPERTS, {"tp": 2}, 1),
    "pp2": (DENSE, {"pp": 2}, 3),
    "ep2": (EXPERTS, {"dp_shard": 2, "ep": 2}, 2),
    "dp2-tp2": (EXPERTS, {"dp_shard": 2, "tp": 2}, 3),
    "dp2-tp2-ep2": (EXPERTS, {"dp_shard": 2, "tp": 2, "ep": 2}, 2),
    "dp2-tp2-ep4": (EXPERTS, {"dp_shard": 2, "tp": 2, "ep": 4}, 1),
    "tp2-pp2": (EXPERTS, {"tp": 2, "pp": 2}, 3),
    "dp2-pp2": (EXPERTS, {"dp_shard": 2, "pp": 2}, 2),
    "hybrid-pp2-ep2": (EXPERTS, {"dp_replicate": 2, "pp": 2, "ep": 2}, 2),
    "pp4": (DENSE, {"pp": 4}, 2),
    "dp2-tp2-pp2-ep2": (EXPERTS, {"dp_shard": 2, "tp": 2, "pp": 2, "ep": 2}, 2),
}
# The others are in `benchmarks/equality.py`, and trained by integration-tests/test_parallel.py.
TESTED = ("tp2-experts", "pp2", "ep2", "dp2-tp2-ep4", "tp2-pp2", "hybrid-pp2-ep2")


def train(options, dims, zero_stage):
    """History by step, and the state at the end, of what this rank has part in."""
    mesh = ParallelDims(**dims).build("cpu")
    stage = build(options)
    if mesh.pp_size > 1:
        layers = split_layers(L, mesh.pp_size)
        (index,) = stage_indices("1f1b", pp_size=mesh.pp_size, pp_rank=mesh.pp_rank)
        stage.keep(layers[index], first=index == 0, last=index == mesh.pp_size - 1)
    parallelize_tensors(stage, mesh, plan(options), sequence_parallel=True)
    parallelize_experts(stage, mesh)
    apply_data_parallel(stage, mesh, blocks=stage.stack.blocks.values(), zero_stage=zero_stage)
    pipeline = None
    if mesh.pp_size > 1:
        pipeline = Pipeline(
            [stage], mesh, schedule="1f1b", first_input="tokens", hidden_size=D,
            sequence_parallel=True, tied={"embedding.tokens.weight": "head.weight"},
        )  # fmt: skip
    # A bias of keys has gradient zero, but for rounding, which a small eps would blow up to steps.
    optimizer = AdamW(decay_groups(stage, 0.1), lr=0.01, eps=1e-3)
    history = []
    for batches in data(options):
        mine = batches[mesh.dp_rank :: mesh.dp_size]
        if pipeline is not None:
            loss = pipeline.step(mine, loss_scale=1.0)["lm loss"].clone()
        else:
            loss = torch.zeros(())
            for batch in mine:
                set_gradient_sync(stage, batch is mine[-1])
                rest = {k: v for k, v in batch.items() if k != "tokens"}
                output = stage(batch["tokens"], **rest)
                total = output.losses["lm loss"]
                if output.aux_loss is not None:
                    total = total + output.aux_loss / len(batches)
                total.backward()
                loss = loss + output.losses["lm loss"].detach()
        copies = [] if pipeline is None else pipeline.copies
        result = clip_and_step(optimizer, max_norm=0.5, mesh=mesh, uncounted=copies)
        grads = {n: whole(p.grad) for n, p in stage.named_parameters()}
        mesh.all_reduce(loss, "dp")
        history.append((loss, result.grad_norm, grads))
        optimizer.zero_grad()
    state = {
        (n, kind): whole(value)
        for n, p in stage.named_parameters()
        for kind, value in {"weight": p.detach(), **optimizer.state[p]}.items()
    }
    return history, state


def train_all(rank, world_size, cases):
    return [train(*case) for case in cases]


def run_all(layouts, steps):
    """What each rank has of every layout, and one process of both models; each size starts once."""

    def case(options, dims, zero_stage):
        return dataclasses.replace(options, steps=steps), dims, zero_stage

    got = {options: train(*case(options, {}, 3)) for options in (DENSE, EXPERTS)}
    by_size: dict[int, list[str]] = {}
    for name in layouts:
        sizes = [size for axis, size in LAYOUTS[name][1].items() if axis != "ep"]
        by_size.setdefault(math.prod(sizes), []).append(name)
    for ranks, names in by_size.items():
        together = run_ranks(train_all, ranks, [case(*LAYOUTS[n]) for n in names], timeout_s=280.0)
        got |= {name: [one[i] for one in together] for i, name in enumerate(names)}
    return got


def deviations(results, layout):
    """The largest relative deviation of each kind, over all ranks and steps."""
    history, state = results[LAYOUTS[layout][0]]
    worst, seen = dict.fromkeys(("loss", "norm", "gradient", "weight", "moment"), 0.0), set()

    def compare(kind, got, want):
        assert got.shape == want.shape
        worst[kind] = max(worst[kind], relative_error(got, want))

    for got_history, got_state in results[layout]:
        for got, want in zip(got_history, history, strict=True):
            compare("loss", got[0], want[0])
            compare("norm", got[1], want[1])
            for name, grad in got[2].items():
                compare("gradient", grad, want[2][_tied(name, want[2])])
        for (name, kind), value in got_state.items():
            name = _tied(name, history[0][2])
            seen.add(name)
            compare("weight" if kind == "weight" else "moment", value, state[name, kind])
    assert seen == set(history[0][2])  # together the ranks have it all
    return worst


def _tied(name, known):
    """The embedding's name for the copy of it that the last stage's head is."""
    return name if name in known else "embedding.tokens.weight"


@pytest.fixture(scope="module")
def results():
    return run_all(TESTED, steps=2)


@pytest.mark.parametrize("layout", TESTED)
def test_layout_equals_one_process(results, layout):
    history, _ = results[LAYOUTS[layout][0]]
    assert history[0][0] > history[-1][0]
    assert max(deviations(results, layout).values()) < 1e-5


def test_the_routers_have_the_gradient_of_the_whole_step():
    """Auxiliary losses too, with experts spread and by a stage's backward, in their right scale."""
    both = Options(experts=4, padded=True, tied=False)
    cases = [dataclasses.replace(both, dp=2, ep=2), dataclasses.replace(both, pp=2)]
    slopes = [slope for results in run_ranks(router_slopes, 2, *cases) for slope in results]
    for measured, expected in slopes:
        assert measured == pytest.approx(expected, rel=1e-5)
        assert expected == pytest.approx(slopes[0][1], rel=1e-9)
