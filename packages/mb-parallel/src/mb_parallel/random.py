"""Random numbers of dropout and jitter: a function of seed, step and sample, not of the ranks.

The default stream is seeded for every micro-batch from its place in the global batch. So
data-parallel ranks and pipeline stages draw different numbers, and tensor-parallel ranks, which
have the same samples, draw equal ones. A resumed run draws the same numbers as if it had not
stopped, even on another number of data-parallel ranks. Only the step has to be saved. (With another
number of stages, of ranks that share a sequence or, under sequence parallelism, of tensor-parallel
ranks, masks differ. torch's compiler draws dropout's masks in its own way: other ones than
uncompiled code, and on GPUs others for another number of ranks.)

If tensor-parallel ranks hold different parts of one activation (heads of attention, parts of the
sequence), equal masks would be wrong. For these, `distinct` switches to numbers of the rank's own.
It keeps no state: what it draws depends only on the default stream. `torch.utils.checkpoint`
restores that stream, so recomputation draws the same masks.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mb_parallel.arguments import several
from mb_parallel.forwards import wrap_forward

_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """A 63-bit seed that differs for different numbers (splitmix64, Steele et al. 2014)."""
    state = 0
    for number in numbers:
        state = (state + operator.index(number) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def seed_micro_batch(seed: int, *, step: int, place: int) -> None:
    """Seed the default streams of the host and of all devices.

    Args:
        seed: of the run.
        step: optimizer steps taken before this one.
        place: of the micro-batch in the global batch, for instance
            index * mesh.dp_size + mesh.dp_rank.
    """
    torch.manual_seed(mix(seed, step, place))


@contextmanager
def distinct(rank: int, device: torch.device | str | None = None) -> Generator[None]:
    """Draw numbers of this rank's own within the context.

    Default streams that were equal on several ranks, as in a tensor-parallel group, are equal again
    afterwards. Entering twice draws different numbers. The host does not wait for the device. Not
    for use while a CUDA graph is captured.

    Args:
        rank: in its group, for instance mesh.tp_rank.
        device: whose stream to switch besides the host's. None: only the host's.
    """
    # Drawn on the host, so that it waits for no device; this also moves the host's stream on.
    draw = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
    chosen = torch.device("cpu" if device is None else device)
    devices = [] if chosen.type == "cpu" else [chosen]
    kind = devices[0].type if devices else "cuda"
    with torch.random.fork_rng(devices=devices, device_type=kind):
        seed = mix(draw, rank)
        torch.default_generator.manual_seed(seed)
        for index in devices:
            with getattr(torch, kind).device(index):
                getattr(torch, kind).manual_seed(seed)
        yield


def make_distinct(modules: Iterable[nn.Module], rank: int) -> None:
    """Let `modules` (dropouts, attention cores) draw as in `distinct(rank)`, in place.

    For modules that see a part of an activation of which other tensor-parallel ranks have the rest.
    In eval mode nothing is drawn, and they are called as before.
    """
    for module in several(modules, "modules"):
        wrap_forward(module, _drawing(rank))


@functools.cache
def _drawing(rank: int) -> Callable[..., Any]:
    def call(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not module.training:
            return forward(*args, **kwargs)
        # Lengths, say, may come first, on the host.
        devices = (a.device for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
        with distinct(rank, next((d for d in devices if d.type not in ("cpu", "meta")), None)):
            return forward(*args, **kwargs)

    return call


def rng_state(device: torch.device | str) -> dict[str, Tensor]:
    """The state of the default streams of the host and of `device`, as CPU tensors."""
    device = torch.device(device)
    state = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state[device.type] = getattr(torch, device.type).get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Tensor], device: torch.device | str) -> None:
    """Restore what `rng_state` returned; the state of another kind of device is ignored."""
    device = torch.device(device)
    torch.set_rng_state(state["cpu"].cpu())
    if device.type in state and device.type != "cpu":
        getattr(torch, device.type).set_rng_state(state[device.type].cpu(), device)
