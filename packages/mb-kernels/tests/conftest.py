"""Makes Triton's interpreter faster, and right in bf16, where it runs: see test_interpreter.py."""

import dataclasses
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from mb_kernels.testing import bf16_interpreted

# Under --import-mode=importlib a test module cannot see its neighbours.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def right_in_bf16():
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    with bf16_interpreted():
        yield


@pytest.fixture(autouse=True)
def what_an_interpreter_need_not_do_twice(monkeypatch):
    """Leaves out work of Triton 3.7's interpreter that changes no result.

    The interpreter patches the language at each call of a device function: once for each module and
    launch is enough, because the launch undoes it at its end. To look up a dtype it builds a table
    of all dtypes. And it computes sums and products of integers in 64 bits too, to find overflows
    of 32 bits, which tensors as small as these do not have.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    replaced: set[int] = set()
    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    dtypes: dict[str, np.dtype] = {}
    look_up = interpreter._get_np_dtype

    def replace_once(fn):
        if id(fn.__globals__) in replaced:
            return None
        replaced.add(id(fn.__globals__))
        return replace(fn)

    def launch_anew(self, *args, **keywords):
        replaced.clear()
        return launch(self, *args, **keywords)

    def known(kind):
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = look_up(kind)
        return dtypes[name]

    builder = interpreter.interpreter_builder
    unchecked = dataclasses.replace(builder.options, sanitize_overflow=False)
    monkeypatch.setattr(builder, "options", unchecked)
    monkeypatch.setattr(interpreter, "_patch_lang", replace_once)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_anew)
    monkeypatch.setattr(interpreter, "_get_np_dtype", known)


@pytest.fixture
def poisoned_memory():
    """torch.empty returns NaN, so that an element no kernel writes shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
