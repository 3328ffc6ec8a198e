"""Measuring a run's model beside its losses."""

from types import SimpleNamespace

import torch
from mb_train.train.validate import evaluate, measure


def test_a_measurement_compiles_nothing():
    """Its batches have other sizes than those of the training, for which blocks are compiled."""
    compiled = []

    def evaluate_more(model, dataset, count):
        return {"sum": float(model(torch.ones(count, 2)).sum())}

    def backend(graph, inputs):
        compiled.append(inputs)
        return graph.forward

    class Model(torch.nn.Module):
        def forward(self, x):
            return x.relu()

    model = Model()
    model.compile(backend=backend)
    run = SimpleNamespace(
        config=SimpleNamespace(eval_iters=1, compile=True), say=lambda line: None,
        mesh=SimpleNamespace(tp_size=1, pp_size=1), batch_sizes=SimpleNamespace(full=3),
        model=SimpleNamespace(parts=[model]), progress=SimpleNamespace(iteration=1),
        log=SimpleNamespace(write=lambda event, **found: None),
        task=SimpleNamespace(tells_more=True, evaluate_more=evaluate_more),
    )  # fmt: skip
    assert measure(run, range(9), "the end") == {"sum": 6.0}
    assert not compiled
    model(torch.ones(3, 2))
    assert compiled


def test_a_long_evaluation_counts_every_token():
    """fp32 adds no 1 to 2^24: from there on batches of one token weighed nothing."""
    batches = [{"weights_B": torch.tensor([count])} for count in (2.0**24, 1.0, 1.0)]
    losses = iter([2.0**24, 5.0, 5.0])
    run = SimpleNamespace(
        config=SimpleNamespace(eval_iters=3), device="cpu", say=lambda line: None,
        sign_of_life=lambda line: None, progress=SimpleNamespace(iteration=1, consumed_samples=1),
        mesh=SimpleNamespace(all_reduce=lambda both, axis: both),
        batch_sizes=SimpleNamespace(full=1, micro_batches=lambda size: 1),
        stream=lambda dataset, **how: (batch for batch in batches),
        model=SimpleNamespace(
            train=lambda mode: None,
            executor=SimpleNamespace(
                evaluate=lambda batch: {"lm loss": torch.tensor(next(losses))}
            ),
        ),
        log=SimpleNamespace(write=lambda event, **found: None),
        task=SimpleNamespace(loss_weights={"lm loss": "weights_B"}),
    )  # fmt: skip
    found = evaluate(run, range(3), "the end", None)
    assert found == {"lm loss": (2**24 + 10) / (2**24 + 2)}
