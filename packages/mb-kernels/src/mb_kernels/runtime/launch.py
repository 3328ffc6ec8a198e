"""Launches Triton kernels, or lists them so that they can be compiled without a GPU."""

import json
import os
import warnings
from typing import Any

from mb_kernels.runtime.recording import Launch, recorded

try:
    from mb_kernels.runtime import direct
except (ImportError, AttributeError) as missing:  # a name that Triton keeps for itself
    warnings.warn(
        f"mb_kernels launches by Triton's public call, some 10 us slower: {missing}.", stacklevel=2
    )
    direct = None

# Products and sums become one instruction, as they did where kernels were measured and compared:
# Triton 3.10 no longer does so by itself, and 3.9 warns of it. Triton's own variable goes first.
_OPTIONS = {} if "TRITON_DEFAULT_FP_FUSION" in os.environ else {"enable_fp_fusion": True}


# Of the description that lies beside a compiled kernel.
UNREADABLE = (json.JSONDecodeError, UnicodeDecodeError)


def damaged(error: Exception) -> str:
    """What is wrong if a compiled kernel cannot be read."""
    from triton import knobs

    return (
        f"Expected whole files in Triton's cache, got {type(error).__name__}: {error}. They are "
        f"damaged, as by a full disk: remove the folder {knobs.cache.dir}."
    )


def cdiv(a: int, b: int) -> int:
    """a / b rounded up; ``triton.cdiv`` takes 1.9 us, this 0.1."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The least power of two that is not below n >= 1, as ``triton.next_power_of_2``."""
    return 1 << (n - 1).bit_length()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launch a Triton kernel: the device's arguments by position, constexprs and options by name.

    By the shorter path of ``runtime.direct`` if it can, else by Triton's ``kernel[grid]``.

    Raises:
        RuntimeError: what lies in Triton's cache is damaged, which Triton says without its name.
    """
    constants |= _OPTIONS
    if (listed := recorded()) is not None:
        listed.append(Launch(kernel, grid, args, constants))
        return
    try:
        if direct is None or not direct.launch(kernel, grid, args, constants):
            kernel[grid](*args, **constants)
    except (ValueError, RuntimeError) as error:
        if isinstance(error, UNREADABLE) or "kernel image" in str(error):
            raise RuntimeError(damaged(error)) from error
        raise


def compile_beside(launches: list[Launch], threads: int) -> int:
    """Compile what ``launches`` launch, in threads; how many there are, or 0 if Triton has changed.

    A launch meanwhile waits for its own kernel.
    """
    if direct is None:
        return 0
    return len(launches) if direct.compile_beside(launches, threads) else 0
