"""Measuring a run's model beside its losses."""

from types import SimpleNamespace

import torch
from mb_train.train.validate import measure


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
