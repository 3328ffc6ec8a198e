"""Calls once, on small tensors, what benchmarks call, so that they do not break on a GPU."""

import importlib
import pathlib
import sys

import pytest

HERE = pathlib.Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    yield importlib.import_module
    for name in [n for n in sys.modules if (HERE / f"{n}.py").exists()]:
        del sys.modules[name]


@pytest.mark.parametrize("name", [p.stem for p in sorted(HERE.glob("*.py")) if p.stem != "run"])
def test_every_benchmark_is_importable(benchmark, name):
    if name == "block_sparse":
        pytest.importorskip("stk")
    assert benchmark(name).__doc__


@pytest.mark.parametrize("top_k", [1, 2])
def test_every_kernel_is_called_as_it_wants_to_be(benchmark, top_k):
    shape = benchmark("layer").Shape(20, 32, 32, 4, top_k, "swiglu" if top_k > 1 else "gelu")
    for kernel in benchmark("kernels").kernels(shape, "cpu").values():
        kernel.launch(kernel.tile)


def test_a_timeline_names_every_kernel(benchmark):
    timeline = benchmark("timeline")
    shape = benchmark("layer").SHAPES["olmoe"]
    named = {name for names in timeline._KERNELS.values() for name in names}
    assert set(timeline._costs(shape)) == named
    flops = sum(flops for flops, _ in timeline._costs(shape).values())
    assert flops == shape.flops
