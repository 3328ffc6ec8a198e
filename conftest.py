"""Settings of every test process, made before torch is imported, and the rule for GPU tests."""

import gc
import os
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator

import pytest

# pytest-xdist already fills the cores with processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "agg")
# Images of containers often forbid bytecode. Every process that a test starts would compile torch
# from its sources again: two seconds of processor time each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A full collection looks at all that torch and transformers are made of, for a third of a second,
# and came every few seconds: a twentieth of the time. Now it comes with every minute or two.
gc.set_threshold(700, 10, 1000)


# A worker runs a file at a time: what takes long begins first, or it would run alone at the end. Of
# these, files of one process come beside the one that starts up to eight.
LONGEST_FIRST = (
    "integration-tests/test_parallel.py",
    "mb-kernels/tests/test_interpreter.py",
    "integration-tests/test_standalone.py",
    "mb-layers/tests/test_living.py",
    "mb-kernels/tests/test_hopper.py",
    "integration-tests/test_sentence_models.py",
    "mb-parallel/tests/test_dispatchers.py",
    "mb-parallel/tests/test_data_parallel.py",
    "mb-parallel/tests/test_expert_parallel.py",
    "mb-parallel/tests/test_tensor_parallel.py",
    "mb-parallel/tests/test_pipeline_parallel.py",
    "mb-parallel/tests/test_rebalance.py",
    "mb-parallel/tests/test_layouts.py",
    "integration-tests/test_data_parallel.py",
    "integration-tests/test_train_cli.py",
    "mb-parallel/tests/test_interpreter.py",
)


def pytest_configure(config: pytest.Config) -> None:
    # xdist's own guess, files of most tests first, begins with hundreds of flags of a millisecond.
    config.option.loadscopereorder = False


def mark_further_cases(items: Iterable[pytest.Item]) -> None:
    """Make the cases of a test that is marked `sweep(n)` slow, but for one in n of them.

    Which ones stay is drawn, so that no parameter has a single value in them, and is the same every
    time.
    """
    sweeps: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sweep") and not item.get_closest_marker("slow"):
            sweeps[item.nodeid.partition("[")[0]].append(item)
    for cases in sweeps.values():
        (one_in,) = cases[0].get_closest_marker("sweep").args
        cases.sort(key=lambda item: zlib.crc32(item.name.encode()))
        for item in cases[-(-len(cases) // one_in) :]:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)  # before slow cases are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_further_cases(items)

    def turn(item: pytest.Item) -> int:
        names = enumerate(LONGEST_FIRST)
        return next((i for i, name in names if item.path.as_posix().endswith(name)), 99)

    items.sort(key=turn)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA or ROCm device"))


@pytest.fixture(autouse=True, scope="module")
def compiled_by_this_file_alone() -> Iterator[None]:
    """Blocks that another file compiled would count towards the eight of a function."""
    yield
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()
