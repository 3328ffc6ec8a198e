"""All kinds of parallelism together, with the sharded optimizer, against one process.

Steps with accumulation, clipping and AdamW, two here and five in `benchmarks/equality.py`:
losses, gradient norms, every gradient (the router's by name), every parameter and every moment at
the end.
"""

from dataclasses import replace

import pytest
from mb_parallel.optimizer import AdamW, clip_and_step, decay_groups
from mb_parallel.testing import run_ranks
from tiny_gpt import Options, accumulate, data, relative_error, router_slopes, spread, whole

DENSE = Options(sequence_parallel=True)
EXPERTS = replace(DENSE, experts=4, shared_expert=8)
LAYOUTS = {
    "tp2": replace(DENSE, tp=2, zero_stage=2),
    "tp2-experts": replace(EXPERTS, tp=2, zero_stage=1),
    "pp2": replace(DENSE, pp=2, zero_stage=3),
    "ep2": replace(EXPERTS, dp=2, ep=2, zero_stage=2),
    "dp2-tp2": replace(EXPERTS, dp=2, tp=2, zero_stage=3),
    "dp2-tp2-ep2": replace(EXPERTS, dp=2, tp=2, ep=2, zero_stage=2),
    "dp2-tp2-ep4": replace(EXPERTS, dp=2, tp=2, ep=4, zero_stage=1),
    "tp2-pp2": replace(EXPERTS, tp=2, pp=2, zero_stage=3),
    "dp2-pp2": replace(EXPERTS, dp=2, pp=2, zero_stage=2),
    "hybrid-pp2-ep2": replace(EXPERTS, dp_replicate=2, pp=2, ep=2, zero_stage=2),
    "pp4": replace(DENSE, pp=4, zero_stage=2),
    "dp2-tp2-pp2-ep2": replace(EXPERTS, dp=2, tp=2, pp=2, ep=2, zero_stage=2),
}
# The others are in `benchmarks/equality.py`, and trained by integration-tests/test_parallel.py.
TESTED = ("ep2", "dp2-tp2-ep4", "tp2-pp2", "hybrid-pp2-ep2")


def train(options):
    """History by step, and the state at the end, of what this rank has part in."""
    mesh, (stage,), pipeline = spread(options)
    # A bias of keys has gradient zero, but for rounding, which a small eps would blow up to steps.
    optimizer = AdamW(decay_groups(stage, 0.1), lr=0.01, eps=1e-3)
    history = []
    for batches in data(options):
        loss, _ = accumulate(mesh, [stage], pipeline, batches)
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
    return [train(options) for options in cases]


def alone(options):
    """The same model in one process."""
    return replace(options, dp_replicate=1, dp=1, tp=1, pp=1, ep=1, zero_stage=3)


def run_all(layouts, steps):
    """What each rank has of every layout, and one process of its model; each size starts once."""
    models = {alone(LAYOUTS[name]) for name in layouts}
    got = {model: train(replace(model, steps=steps)) for model in models}
    by_size: dict[int, list[str]] = {}
    for name in layouts:
        by_size.setdefault(LAYOUTS[name].dims.world_size, []).append(name)
    for ranks, names in by_size.items():
        cases = [replace(LAYOUTS[name], steps=steps) for name in names]
        together = run_ranks(train_all, ranks, cases, timeout_s=280.0)
        got |= {name: [one[i] for one in together] for i, name in enumerate(names)}
    return got


def deviations(results, layout):
    """The largest relative deviation of each kind, over all ranks and steps."""
    history, state = results[alone(LAYOUTS[layout])]
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


@pytest.mark.sweep(2)
@pytest.mark.parametrize("layout", TESTED)
def test_layout_equals_one_process(results, layout):
    history, _ = results[alone(LAYOUTS[layout])]
    assert history[0][0] > history[-1][0]
    assert max(deviations(results, layout).values()) < 1e-5


def test_the_routers_have_the_gradient_of_the_whole_step():
    """Auxiliary losses too, with experts spread and by a stage's backward, in their right scale."""
    both = Options(experts=4, padded=True, tied=False)
    cases = [replace(both, dp=2, ep=2), replace(both, pp=2)]
    slopes = [slope for results in run_ranks(router_slopes, 2, *cases) for slope in results]
    for measured, expected in slopes:
        assert measured == pytest.approx(expected, rel=1e-5)
        assert expected == pytest.approx(slopes[0][1], rel=1e-9)
