"""These tests run Triton kernels on CPU tensors; tests/test_interpreter.py starts them."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# Under --import-mode=importlib a test module cannot see its neighbours.
sys.path.insert(0, str(Path(__file__).parent))
collect_ignore_glob = [] if _INTERPRETED else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def interpreted():
    """A file named on the command line is collected all the same: its ops would run no kernel."""
    if not _INTERPRETED:
        pytest.skip("expected TRITON_INTERPRET=1 in the environment")


@pytest.fixture
def reachable():
    """Tensors that a kernel finds through a table of addresses: a test lists them here."""
    return []


@pytest.fixture(autouse=True)
def no_access_outside_the_arguments(monkeypatch, reachable):
    """What compute-sanitizer does on a GPU: each address read or written is in a tensor given."""
    from triton.runtime import interpreter

    spans = np.zeros((0, 2), np.uint64)  # first byte and end of every argument's storage
    prepare = interpreter.GridExecutor._init_args_hst

    def prepared(self, arguments, keywords):
        nonlocal spans
        on_host = prepare(self, arguments, keywords)
        arguments = (*on_host[0], *on_host[1].values(), *reachable)
        tensors = [getattr(a, "base", a) for a in arguments]
        storages = [t.untyped_storage() for t in tensors if hasattr(t, "untyped_storage")]
        bounds = [(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages]
        spans = np.array(bounds, np.uint64).reshape(-1, 2)
        return on_host

    def check(pointers, mask):
        at = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)]
        end = at + np.uint64(pointers.get_element_ty().primitive_bitwidth // 8)
        within = (at[:, None] >= spans[:, 0]) & (end[:, None] <= spans[:, 1])
        assert within.any(1).all(), "a kernel reads or writes outside its arguments"

    def load(self, pointers, mask, *rest, **options):
        check(pointers, mask)
        return read(self, pointers, mask, *rest, **options)

    def store(self, pointers, value, mask, *rest, **options):
        check(pointers, mask)
        return write(self, pointers, value, mask, *rest, **options)

    builder = interpreter.InterpreterBuilder
    read, write = builder.create_masked_load, builder.create_masked_store
    monkeypatch.setattr(interpreter.GridExecutor, "_init_args_hst", prepared)
    monkeypatch.setattr(builder, "create_masked_load", load)
    monkeypatch.setattr(builder, "create_masked_store", store)
