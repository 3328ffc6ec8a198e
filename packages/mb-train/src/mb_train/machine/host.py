"""This process on its host: its name, how it waits, keeps memory and collects garbage.

No torch: some of it has to be set before that is imported.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import socket
import sys
from collections.abc import Generator

# malloc.h of glibc. Memory up to the first size comes from the heap, and the heap gives none of it
# back; beyond it every allocation asks the kernel.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _KEPT_BYTES = -1, -3, 1 << 30
# How long a rank that cannot begin looks for the others, which may import torch from slow disks.
_STARTING_S = 120.0


def alone() -> bool:
    """Whether this process is none of several that torchrun made."""
    return os.environ.get("WORLD_SIZE", "1") == "1"


def of_torchrun() -> bool:
    """Whether it is one of several that torchrun made: clusters set WORLD_SIZE for nodes, too."""
    return not alone() and "TORCHELASTIC_RUN_ID" in os.environ


def _rank() -> str | None:
    """This process's among those that torchrun made; None alone, whatever RANK is left over."""
    return None if alone() else os.environ.get("RANK", "0")


def leads() -> bool:
    """Whether this process is the one that speaks: alone, or rank 0."""
    return _rank() in (None, "0")


def called() -> str:
    """What errors begin with: of one rank alone they may be."""
    rank = _rank()
    return "mb-train" if rank is None else f"mb-train, rank {rank} on {socket.gethostname()}"


@contextlib.contextmanager
def before_the_others() -> Generator[None]:
    """Of a rank that fails in this block, before it joins the others, tell these, who join.

    They would wait for it until their timeout. It is done when this process ends, for it may have
    to wait for them, and what is wrong is to be said first.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        if not alone():
            atexit.register(_decline, str(error))
        raise


def _decline(reason: str) -> None:
    from mb_parallel import decline

    with contextlib.suppress(ValueError):  # the environment names no others
        decline(reason, timeout_s=_STARTING_S)


def prepare_host() -> None:
    """Let threads sleep while they wait, keep freed memory for the next tensor, open many files."""
    # Read by OpenMP when torch is imported. Threads that spin while they wait made steps 2 to 4
    # times slower on two cores that ran anything else as well.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    keep_freed_memory()
    open_many_files()


def keep_freed_memory() -> None:
    """Do not hand freed blocks of up to 1 GiB back to the kernel.

    By default glibc asks the kernel anew, page by page, for every large tensor: 30 steps of
    `quickstart` took 9.3 s of system time, and take 1.1 s with this, for a fifth more memory.
    Other C libraries are left as they are.
    """
    if sys.platform == "win32":  # a program there has no one C library to ask for
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)


def open_many_files() -> None:
    """Let this process open as many files as it may ask for.

    A dataset of a blend keeps up to five open, its own two and an index for each part. Two hundred
    would end a run at the 1024 that systems begin with for the sake of programs that use select().
    """
    try:
        import resource
    except ImportError:  # Windows has neither the module nor the limit
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS names one that it does not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextlib.contextmanager
def first_import() -> Generator[None]:
    """Within it torch is imported, without collections of garbage: what modules make stays.

    Later collections pass over it, too: torch alone is half a million objects, and a full
    collection looks at all of them. Nothing of this where torch is imported already.
    """
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


def leave_out_of_collections() -> None:
    """Let collections of garbage pass over all that there is, until `gc.unfreeze`.

    A full one, every few hundred steps, looks at what torch and the model are made of, for a tenth
    to a quarter of a second, and with several ranks all wait for the one that is at it: of 800
    steps of a small dMoE on a CPU collections took 33 ms instead of 448, by hand.
    """
    gc.collect()
    gc.freeze()


def collect_meshes() -> None:
    """Let go of meshes, and of models on them, that nobody uses.

    They refer to themselves, and hold the threads of their groups. Behind a tiny run this took
    0.21 s.
    """
    gc.collect()
