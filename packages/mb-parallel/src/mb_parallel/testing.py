"""Run a function on several ranks from a plain test: gloo on the CPU, one process per rank.

    def sum_of_ranks(rank: int, world_size: int) -> int:
        total = torch.tensor(rank)
        dist.all_reduce(total)
        return int(total)

    def test_all_reduce():
        assert run_ranks(sum_of_ranks, 3) == [3, 3, 3]

Ranks are forked from a small server process that has imported torch and this library, so starting
them takes milliseconds, and the test process may hold threads or a GPU. The server cannot import a
test file by name (pytest's importlib mode gives it none), so the file's path travels instead.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from types import FunctionType
from typing import Any

from mb_parallel.arguments import above_0, at_least_1, device_type_name

_PRELOAD = [
    "pytest",  # which test files import: a third of a second on every rank
    "torch._dynamo",  # which the first optimizer step imports
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "mb_parallel",
]


def preload(*modules: str) -> None:
    """Have the server import these too, so that no rank needs to.

    Call it in a `conftest.py`: the first `run_ranks` of a process starts the server. A module that
    looks at the GPUs when it is imported (Inductor does) leaves ranks with `device_type="cuda"`
    without: CUDA does not survive a fork.

    Args:
        modules: names; one that cannot be imported is left to the ranks.
    """
    _PRELOAD.extend(modules)


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120.0,
    device_type: str = "cpu",
) -> list[Any]:
    """Call `function(rank, world_size, *args)` on `world_size` processes joined by gloo.

    Args:
        function: defined at the top level of a module or test file.
        world_size: number of processes.
        args: picklable; tensors travel by value.
        timeout_s: after this long every rank is ended and the call fails, saying where each was.
        device_type: "cuda" gives rank r the r-th GPU, and joins the ranks by NCCL as well.

    Returns:
        What each rank returned (picklable), in rank order.

    Raises:
        RuntimeError: a rank raised (its traceback is in the message), died or timed out.
        ValueError: no rank to start, a function of another kind, another device type or no time.
    """
    at_least_1(world_size=world_size)
    above_0(timeout_s=timeout_s)
    device_type_name(device_type)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    defined = inspect.unwrap(function) if callable(function) else None  # under its decorators
    in_file = isinstance(defined, FunctionType) and Path(defined.__code__.co_filename).is_file()
    if not in_file or not isinstance(function, FunctionType) or "<" in function.__qualname__:
        raise ValueError(
            f"Expected a function that is defined at the top level of a file, got {function!r}."
        )
    source = (function.__module__, defined.__code__.co_filename, function.__qualname__)
    with tempfile.TemporaryDirectory(prefix="mb-ranks-") as folder:
        payload = pickle.dumps(args)
        common = (world_size, folder, source, payload, device_type)
        ranks = [
            context.Process(target=_rank_main, args=(rank, *common)) for rank in range(world_size)
        ]
        try:
            for process in ranks:
                process.start()
            _join(ranks, Path(folder), timeout_s)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                    process.join()
        return [pickle.loads((Path(folder) / f"{r}.ok").read_bytes()) for r in range(world_size)]


def _join(ranks: list[Any], folder: Path, timeout_s: float) -> None:
    """Wait for all ranks; the first to fail decides, since its peers then hang or fail in turn."""
    deadline = time.monotonic() + timeout_s
    while late := {rank: process for rank, process in enumerate(ranks) if process.is_alive()}:
        _raise_if_failed(ranks, folder)
        left = deadline - time.monotonic()
        if left < 0:
            stacks = _stacks(late, folder)
            raise RuntimeError(f"ranks {list(late)} still ran after {timeout_s} s\n{stacks}")
        # Until one ends: what looks every few milliseconds takes time from them. No day is waited
        # for in one piece, as the system counts it in an int of milliseconds.
        wait([process.sentinel for process in late.values()], timeout=min(left, 60.0))
    _raise_if_failed(ranks, folder)


def _stacks(late: dict[int, Any], folder: Path) -> str:
    """Where each of these processes is, all of its threads; what waits in C++ tells it too."""
    ready = [rank for rank in late if (folder / f"{rank}.stack").exists()]
    for rank in ready:
        with contextlib.suppress(ProcessLookupError):  # it ended after all
            os.kill(late[rank].pid, signal.SIGUSR2)
    time.sleep(0.5)  # handlers write within milliseconds, and nothing says when they have
    return "\n".join(
        f"rank {rank} was at\n{(folder / f'{rank}.stack').read_text()}" for rank in ready
    )


def _raise_if_failed(ranks: list[Any], folder: Path) -> None:
    if not _codes(ranks, folder) and not any(folder.glob("*.error")):
        return
    # An exit code comes by way of the fork server, later than peers see the connection closed.
    time.sleep(0.3)
    codes = _codes(ranks, folder)
    reports = {int(path.stem): path.read_text() for path in folder.glob("*.error")}
    told = []
    if died := [rank for rank in codes if rank not in reports]:
        told.append(f"rank {died[0]} of {len(ranks)} died with exit code {codes[died[0]]}")
    if reports:
        # Peers of the rank that failed see a closed connection: the earliest report is the cause.
        rank = min(reports, key=lambda r: (folder / f"{r}.error").stat().st_mtime_ns)
        told.append(f"rank {rank} of {len(ranks)} failed:\n{reports[rank]}")
    raise RuntimeError("\n".join(told))


def _codes(ranks: list[Any], folder: Path) -> dict[int, int]:
    """The exit codes of ranks that failed, or ended without a result."""
    ended = {r: process.exitcode for r, process in enumerate(ranks) if process.exitcode is not None}
    return {r: code for r, code in ended.items() if code or not (folder / f"{r}.ok").exists()}


def _rank_main(
    rank: int,
    world_size: int,
    folder: str,
    source: tuple[str, str, str],
    payload: bytes,
    device_type: str,
) -> None:
    import torch
    import torch.distributed as dist

    threading.Thread(target=_end_with_the_caller, daemon=True).start()
    gc.freeze()  # what the server has imported: collections would look through it on every rank
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # What torchrun tells its processes.
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{world_size}"}
    torch.set_num_threads(1)
    here = Path(folder)
    if hasattr(faulthandler, "register"):  # not on Windows
        draft = here / f"{rank}.handler"
        faulthandler.register(signal.SIGUSR2, file=draft.open("w"))
        draft.rename(here / f"{rank}.stack")  # from now on the signal does not end this process
    try:
        function = _load(*source)
        args = pickle.loads(payload)
        store = dist.FileStore(str(here / "store"), world_size)
        group: dict[str, Any] = {"store": store, "rank": rank, "world_size": world_size}
        if device_type == "cuda":
            torch.cuda.set_device(rank)
            device = torch.device("cuda", rank)
            dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, **group)
        else:
            dist.init_process_group("gloo", **group)
        result = function(rank, world_size, *args)
        dist.barrier()
        dist.destroy_process_group()
        (here / f"{rank}.ok").write_bytes(pickle.dumps(result))
    except BaseException:
        # Reported before this rank's connections close, so that its peers' complaints come later.
        draft = here / f"{rank}.draft"
        draft.write_text(traceback.format_exc())
        draft.rename(here / f"{rank}.error")
        os._exit(1)


def _end_with_the_caller() -> None:
    """A caller that is killed ends no rank, and a rank's work may last for hours."""
    caller = multiprocessing.parent_process()
    assert caller is not None
    caller.join()
    os._exit(1)


def _load(module_name: str, path: str, qualname: str) -> Callable[..., Any]:
    """The function from its file, registered under its own module name so that pickles find it."""
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    target: Any = sys.modules[module_name]
    for part in qualname.split("."):
        target = getattr(target, part)
    return target
