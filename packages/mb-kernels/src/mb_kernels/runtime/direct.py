"""A shorter way to launch a compiled kernel than Triton's public call.

At each launch ``kernel[grid]`` works out again which compiled kernel to run, asks the driver about
each tensor and calls its hooks. Here the compiled kernel is looked up in a dictionary, by all that
Triton compiles for, and tensors are passed as addresses. Of 26 us a launch the one saves 5, the
other 6 (hosts of an H200).

This depends on private names of Triton. If one is missing or has changed, a warning is given and
all launches go through the public call.
"""

import os
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from mb_kernels.runtime import registration

# Compiled kernels (see ``_keep``), by everything that Triton specialises them for.
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = {}
# What `compile_beside` is compiling now, by the same key without the device. A launch waits for
# it, because Triton 3.6 would compile the kernel a second time.
_under_way: dict[tuple[Any, ...], Any] = {}
# The releases whose private call is known and tested.
_KNOWN_TRITON = ((3, 6), (3, 9))


def _known_triton() -> bool:
    major, minor = triton.__version__.split(".")[:2]
    return _KNOWN_TRITON[0] <= (int(major), int(minor)) <= _KNOWN_TRITON[1]


# Not on AMD, where Triton specialises for the size of a storage too; the interpreter compiles none.
_on = (
    os.environ.get("MB_DIRECT_LAUNCH") != "0"
    and torch.version.hip is None
    and not registration.interpret
    and _known_triton()
)


def launch(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]
) -> bool:
    """Launch the kernel, and return True; False if it is left to Triton's public call."""
    if not _on:
        return False
    try:
        known = None if _watched(kernel) else _specialize(kernel, args, constants)
        if known is None:
            return False
        device, key, addresses = known
        kept = _compiled.get(key)
        if kept is not None:
            return _run(kept, device, grid, addresses)
        ahead = _under_way.get(key[:-1])
    except (TypeError, AttributeError) as changed:  # raised before anything is launched
        _give_up(changed)
        return False
    if ahead is not None:
        ahead.result()
    compiled = kernel[grid](*args, **constants)
    try:
        _compiled[key] = _keep(kernel, args, constants, compiled)
    except (TypeError, AttributeError) as changed:
        _give_up(changed)
    return True


def _run(
    kept: tuple[Any, tuple[Any, ...], tuple[Any, ...]],
    device: int,
    grid: tuple[int, ...],
    addresses: list[Any],
) -> bool:
    compiled, values, captured = kept
    for names, name, value in captured:
        if names.get(name) is not value:  # Triton decides: it may raise
            return False
    active: Any = driver.active
    compiled.run(
        *(*grid, 1, 1)[:3],
        active.get_current_stream(device),
        compiled.function,
        compiled.packed_metadata,
        None,  # metadata for hooks, and no hooks
        None,
        None,
        *addresses,
        *values,
    )
    return True


def _keep(
    kernel: Any, args: tuple[Any, ...], constants: dict[str, Any], compiled: Any
) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
    """What ``_run`` needs: the kernel, its constants in order, the globals it was compiled with."""
    assert not any(isinstance(value, Tensor) for value in constants.values())
    if hasattr(compiled, "finalize_compile"):  # `compile_beside` compiles it in another thread
        compiled = compiled.result()
    globals_used = kernel.used_global_vals.items()
    captured = tuple((names, n, names.get(n)) for (n, _), (_, names) in globals_used)
    return compiled, tuple(constants[n] for n in kernel.arg_names[len(args) :]), captured


def _give_up(changed: Exception) -> None:
    """Leave all launches to Triton from now on: its private names have changed."""
    global _on
    _on = False
    warnings.warn(
        f"mb_kernels launches by Triton's public call from here on, some 10 us slower: Triton "
        f"{triton.__version__} has changed ({changed}). MB_DIRECT_LAUNCH=0 does so from the start "
        "and silences this.",
        stacklevel=4,
    )


def _watched(kernel: Any) -> bool:
    """Whether hooks want to see launches or the stages of a compilation.

    A profiler adds its hooks to Triton's chains, or replaces the chains.
    """
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(
        getattr(enter, "calls", enter)
        or getattr(leave, "calls", leave)
        or kernel.pre_run_hooks
        or runtime.add_stages_inspection_hook
    )


def _specialize(
    kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]
) -> tuple[int, tuple[Any, ...], list[Any]] | None:
    """Device, key, and the arguments with addresses for tensors.

    The key is what Triton specialises for: the dtype of a tensor, dtype and block of a descriptor,
    and whether an integer is 1, a multiple of 16, or beyond 32 bits. None where there is more to
    it: an unaligned tensor, or an argument of another kind.
    """
    device = -1
    key = [kernel.fn, knobs.runtime.debug, knobs.compilation.instrumentation_mode]
    key += [*constants, *constants.values()]
    addresses: list[Any] = []
    for a in args:
        kind = type(a)
        given = a
        if kind is int:
            key.append((a == 1) + 2 * (a % 16 == 0) + 4 * (-(2**31) <= a < 2**31))
        elif a is None or kind is float:
            key.append(kind)
        elif isinstance(a, Tensor):
            device, given = a.get_device(), a.data_ptr()
            if given % 16:
                return None
            key.append(a.dtype)
        elif hasattr(a, "block_shape"):  # a descriptor; dtype and block decide Gluon's layout
            device = a.base.get_device()
            key.append((a.base.dtype, *a.block_shape))
        else:
            return None
        addresses.append(given)
    key.append(device)
    return device, tuple(key), addresses


def compile_beside(launches: Iterable[Any], threads: int) -> bool:
    """Compile what ``launches`` launch, in threads; False if this Triton cannot."""
    keys = []
    try:
        with ThreadPoolExecutor(threads) as pool, triton.AsyncCompileMode(_Builder(pool)):
            for kernel, grid, args, constants in launches:
                later = kernel.warmup(*args, grid=grid, **constants)
                known = _specialize(kernel, args, constants)
                if known is not None and hasattr(later, "finalize_compile"):
                    keys.append(known[1][:-1])
                    _under_way[keys[-1]] = later
    except (TypeError, AttributeError) as changed:
        warnings.warn(
            "warm_up: kernels are compiled one after another, as they are launched: Triton "
            f"{triton.__version__} has changed ({changed}).",
            stacklevel=2,
        )
        return False
    finally:
        for key in keys:
            _under_way.pop(key, None)
    return True


class _Builder(Executor):
    """Compiles a kernel and then builds its launcher.

    Triton 3.6 writes a launcher in C for each kernel's arguments and has the host's compiler build
    it at the first launch: a fifth of a second each, one after another. Built here, it lies in
    Triton's cache on disk. Later releases have one launcher for all kernels.
    """

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.pool = pool

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        def build() -> Any:
            kernel = fn(*args, **kwargs)
            active: Any = driver.active
            launcher = getattr(active, "launcher_cls", None)
            if launcher is not None:
                launcher(kernel.src, kernel.metadata)
            return kernel

        return self.pool.submit(build)
