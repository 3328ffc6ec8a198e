"""The world of ranks: joining it under `torchrun`, or not, and checks that all its ranks agree."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, is_dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mb_parallel.arguments import above_0, device_type_name

_WHERE = ("MASTER_ADDR", "MASTER_PORT")
# Thirty years: no longer one overflows the clocks of torch, which count nanoseconds in 64 bits.
_LONGEST_S = 1e9
_PATIENCE_S = 30.0  # that ranks may need to import torch from a slow disk
_DECLINED = "declined: "  # before a rank's reason, where others say their type of device


@contextmanager
def distributed(device_type: str, *, timeout_s: float = 600.0) -> Generator[torch.device]:
    """Join the process group that `torchrun` describes; yield this rank's device; leave at the end.

    Without `torchrun` (no WORLD_SIZE, or 1) no group is made; one that is there already is used,
    and not left. On GPUs the group that is made carries NCCL (RCCL on ROCm) for device tensors and
    gloo for host tensors, so that flags and checkpoint plans are exchanged without touching the
    device.

    The model's meshes and torch's caches keep groups and gloo's threads alive after the end, if
    `ParallelMesh.close` does not end them. Rarely such a thread aborts a process that is done (exit
    code -6, "terminate called without an active exception", pytorch issue 190489). A script for
    which that matters ends with `os._exit(0)`, after flushing its output.

    Args:
        device_type: "cpu" or "cuda" (ROCm answers to "cuda" as well).
        timeout_s: a collective that takes longer, for instance because another rank died, fails.
            Infinite: it never does. Of ranks that do not come to join the group at all, the first
            rank of each host warns before.

    Raises:
        ValueError: another device type, on this rank or on others, more ranks on this host than
            devices, an environment that names no rank, or a rank that has said why it does not come
            (`decline`).
        ConnectionError: the other ranks were not reached.
    """
    device_type_name(device_type)
    above_0(timeout_s=timeout_s)
    joined = dist.is_initialized()
    ranks, here, local_rank = (
        (world_size(), rank(), _number("LOCAL_RANK")) if joined else _launched()
    )
    device = torch.device("cpu")
    if device_type == "cuda":
        devices = torch.cuda.device_count()
        if local_rank >= devices:
            raise ValueError(
                f"Expected at most one rank per GPU, got local rank {local_rank} on a host with "
                f"{devices}. Lower --nproc_per_node."
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if ranks > 1 and not joined:
        _join(ranks, here, device, timeout_s)
    try:
        yield device
    except RuntimeError as error:
        if ranks > 1:
            error.add_note(
                f"This is rank {here} of {ranks}. If another rank ended before it, that rank's own "
                "error is the cause; if none did, ranks ran unequally many passes in a step."
            )
        raise
    finally:
        if ranks > 1 and not joined:
            dist.destroy_process_group()


def decline(reason: str, *, timeout_s: float = 600.0) -> None:
    """Have the other ranks end, in `distributed`, because this one cannot begin.

    They would wait for it until their timeout. Say first what is wrong: this may have to wait for
    them. Then end this rank, which has not joined; it does nothing for a process alone, or in a
    group already.

    Args:
        reason: what the others' error says of this rank, a line.
        timeout_s: how long to look for them. Rank 0, if the others meet at it and not at a
            launcher's, waits until they have been told; no other rank does.

    Raises:
        ValueError: an environment that names no rank.
    """
    above_0(timeout_s=timeout_s)
    ranks, here, _ = (1, 0, 0) if dist.is_initialized() else _launched()
    if ranks == 1:
        return
    with suppress(RuntimeError, OSError):  # nobody came who could be told
        store = _store(ranks, here, timedelta(seconds=min(timeout_s, _LONGEST_S)))
        store.set(f"device/{here}", f"{_DECLINED}{reason}")
        _leave(store, ranks, here)


def _join(ranks: int, here: int, device: torch.device, timeout_s: float) -> None:
    options: dict[str, Any] = {"backend": "gloo"}
    if device.type == "cuda":
        options = {"backend": "cpu:gloo,cuda:nccl", "device_id": device}
    timeout = timedelta(seconds=min(timeout_s, _LONGEST_S))
    try:
        with _waiting_told(ranks, here, timeout_s):
            store = _store(ranks, here, timeout)
            _meet(store, ranks, here, device.type)
            dist.init_process_group(
                store=store, rank=here, world_size=ranks, timeout=timeout, **options
            )
    except (RuntimeError, OSError) as error:
        raise ConnectionError(
            f"rank {here} of {ranks} could not join the others at {_meeting_point()}: {error}\n"
            "Either a rank did not start within the timeout (its own error is the cause), or "
            "MASTER_ADDR is not the first node's, or MASTER_PORT is taken: give torchrun another "
            "--master_port."
        ) from error


@contextmanager
def _waiting_told(ranks: int, here: int, timeout_s: float) -> Generator[None]:
    """Within it this rank waits for the others, which may have ended: warn if that is long."""

    def tell() -> None:
        until = "without an end" if timeout_s > _LONGEST_S else f"for {timeout_s:g} s at most"
        warnings.warn(
            f"rank {here} of {ranks} has waited {_PATIENCE_S:g} s for the others to come to "
            f"{_meeting_point()}, and does so {until}: look for ranks that ended, or were not "
            "started",
            RuntimeWarning,
            stacklevel=2,
        )

    if _number("LOCAL_RANK") != 0:  # one of those on a host
        yield
        return
    timer = threading.Timer(_PATIENCE_S, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # or it would still be there for a moment


def _meeting_point() -> str:
    return ":".join(os.environ[name] for name in _WHERE)


def _store(ranks: int, here: int, timeout: timedelta) -> dist.Store:
    """Where the ranks meet, for one time that they do."""
    store, _, _ = next(dist.rendezvous("env://", here, ranks, timeout=timeout))
    store.set_timeout(timeout)
    # torchrun's store outlives a group: one that is made later by the same processes must not
    # find where the ranks of the one before listened, and wait for them there.
    joined = store.add(f"mb_parallel/joined_by_{here}", 1)
    return dist.PrefixStore(f"mb_parallel/{joined}", store)


def _meet(store: dist.Store, ranks: int, here: int, mine: str) -> None:
    """Raise ValueError on all ranks if one has declined, or if they are on devices of two types.

    They would never meet.
    """
    store.set(f"device/{here}", mine)
    by_rank = [said.decode() for said in store.multi_get([f"device/{r}" for r in range(ranks)])]
    first = {kind: by_rank.index(kind) for kind in by_rank}
    if len(first) == 1:
        return
    with suppress(RuntimeError):  # one that was lost meanwhile hides not what is said here
        _leave(store, ranks, here)
    for kind, r in first.items():
        if kind.startswith(_DECLINED):
            reason = kind.removeprefix(_DECLINED)
            raise ValueError(f"Rank {r} of {ranks} could not begin, and all end with it: {reason}")
    told = ", ".join(f"{kind} on rank {r}" for kind, r in first.items())
    raise ValueError(
        f"Expected one type of device for all {ranks} ranks, got {told}. Look for the GPUs of "
        "that rank's node with nvidia-smi or rocm-smi, or ask for the CPU on all."
    )


def _leave(store: dist.Store, ranks: int, here: int) -> None:
    """Let a rank go that has said, or heard, why they do not meet."""
    store.set(f"left/{here}", "")
    launchers = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if here == 0 and not launchers:  # the store ends with this process
        store.wait([f"left/{r}" for r in range(ranks)])


def _launched() -> tuple[int, int, int]:
    """Number of ranks, this one's and its number on this host; (1, 0, 0) for a process alone."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return 1, 0, 0
    ranks, here, local_rank = (_number(name) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"))
    if 0 <= here < ranks and local_rank >= 0 and all(os.environ.get(name) for name in _WHERE):
        return ranks, here, local_rank
    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK", *_WHERE)
    told = ", ".join(f"{name}={os.environ.get(name, '')}" for name in names)
    raise ValueError(
        "Expected WORLD_SIZE, a RANK below it, MASTER_ADDR and MASTER_PORT in the environment, or "
        f"no WORLD_SIZE, got {told}. Start the ranks with torchrun, which sets them, or unset "
        "WORLD_SIZE to run one process."
    )


def _number(name: str) -> int:
    """An integer of the environment, -1 for anything else; LOCAL_RANK is 0 if it is not set."""
    said = os.environ.get(name, "0" if name == "LOCAL_RANK" else "")
    return int(said) if said.isdecimal() else -1


def ranks_on_host() -> int:
    """Number of ranks on this host, as the launcher says; 0 if it says none, or no number."""
    return max(_number("LOCAL_WORLD_SIZE"), 0)


def world_size() -> int:
    """Number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This process's rank in the world, not in data parallelism; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def any_rank(flag: bool) -> bool:
    """Whether `flag` is true on any rank: a small host-side all-reduce, free for one process.

    In a group without host tensors ("nccl" alone) the device does it, and the host waits.
    """
    if not dist.is_initialized():
        return flag
    vote = torch.tensor(int(flag), dtype=torch.int32, device=_carried())
    dist.all_reduce(vote, op=dist.ReduceOp.MAX)
    return bool(vote.item())


def check_same(value: Any, what: str, *, group: dist.ProcessGroup | None = None) -> None:
    """Raise on every rank unless all ranks were given an equal `value`; call it at start.

    Args:
        value: a dataclass, a mapping, or anything that differs in its repr; of sets and
            mappings the members are compared, inside lists and tuples too.
        what: its name in the error, for instance "the config".
        group: whose ranks call this; None: all.

    Raises:
        ValueError: the values differ; names the entries and who has what.
    """
    check_same_along(value, what, [group])


def check_same_along(
    value: Any, what: str, groups: Sequence[dist.ProcessGroup | None], *, note: str = ""
) -> None:
    """`check_same` over the ranks of a grid, given this rank's row, its column and so on.

    Args:
        note: ends the error; "" tells of arguments and files.
    """
    if world_size() == 1:
        return
    by_rank = {rank(): _lines(value)}
    for group in groups:
        parts = of_all_ranks(by_rank, group)
        by_rank = {r: lines for part in parts for r, lines in part.items()}
    if all(lines == by_rank[rank()] for lines in by_rank.values()):
        return
    common = set.intersection(*map(set, by_rank.values()))
    told = [
        f"rank {r}: {', '.join(line for line in theirs if line not in common) or 'none of these'}"
        for r, theirs in sorted(by_rank.items())
    ]
    raise ValueError(
        f"Expected {what} to be equal on all {len(by_rank)} ranks, got\n  "
        + "\n  ".join(told)
        + f"\n{note or 'Start every rank with the same arguments and files.'}"
    )


def of_all_ranks(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What each rank of a group, None: the world's, passes as `mine` (pickled), in their order.

    Free for one process without a group.
    """
    if not dist.is_initialized():
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def _carried() -> torch.device:
    """The device whose tensors the world's group can send: the host's if any can."""
    backends = dist.get_backend_config()
    alone = "nccl" in backends and "cpu" not in backends
    return torch.device("cuda", torch.cuda.current_device()) if alone else torch.device("cpu")


def _lines(value: Any) -> list[str]:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return sorted(f"{key} = {_text(item)}" for key, item in value.items())
    return [_text(value)]


def _text(value: Any) -> str:
    """The repr, but for the order of sets and mappings, which differs where they are equal."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{key!r}: {_text(item)}' for key, item in value.items()))}}}"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    if type(value) in (list, tuple):
        inside = ", ".join(map(_text, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    return repr(value)
