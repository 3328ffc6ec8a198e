"""`--profile`: what the GPU's time of a few steps goes into, by kind of work.

torch's profiler records every kernel of rank 0. A kernel of ours is of the kind of the room of
`mb_kernels` that it is written in, a collective of the kind of its process group, others go by
name. Of each kind two figures are told: how long at least one of its kernels ran, and how long
nothing else did; a collective beside matrix products costs little, one that is alone its time.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from mb_train.config import TrainConfig
from mb_train.folder.whole_files import replaced
from mb_train.words import counted

EXCHANGE, SHARDING = "expert exchange", "data-parallel communication"

# Room of mb_kernels -> kind. What is not named here is of a model's element-wise rest.
_ROOMS = {
    "exchange": EXCHANGE,
    "expert_mlp": "experts",
    "grouped_gemm": "experts",
    "block_sparse": "experts",
    "quantize": "experts",
    "float8": "rounding to FP8",
    "routing": "routing and permutation",
    "permute": "routing and permutation",
    "router_losses": "routing and permutation",
    "linear_cross_entropy": "loss",
    "relative_attention": "attention",
    "state_space": "scans of Mamba-2",
    **dict.fromkeys(("adamw", "muon", "symmetric_matmul", "sum_of_squares"), "optimizer"),
    "accumulate_grad": "sums of gradients",
}

# First axis of a process group's name that fits, see `mb_parallel.mesh`.
_GROUPS = {"ep": EXCHANGE, "tp": "tensor-parallel communication", "pp": "pipeline communication"}

# What other libraries' kernels are called; the first that is found holds.
_NAMES = tuple(
    (re.compile(pattern, re.IGNORECASE), kind)
    for pattern, kind in (
        (r"flash|fmha|sdpa|attention", "attention"),
        (r"gemm|nvjet|cutlass|xmma|splitk|cijk_", "matrix products"),
        (r"split_with_sizes_copy|chunk_cat", "packing for data parallelism"),
        (r"multi_tensor|lpnorm", "optimizer"),
        (r"memcpy|memset", "copies"),
    )
)
_REST = "norms, activations, the rest"


class Span(NamedTuple):
    """A kernel that ran, or a copy: microseconds."""

    name: str
    kind: str
    begin: float
    end: float


@dataclass(frozen=True)
class Share:
    """Milliseconds of one kind in a step.

    Attributes:
        busy: in which at least one of its kernels ran.
        alone: of those, in which no kernel of another kind did.
        calls: kernels.
    """

    busy: float
    alone: float
    calls: float


@dataclass(frozen=True)
class Profile:
    """What the steps of a profile were made of, a step's mean.

    Attributes:
        steps: that were recorded.
        step_ms: from the first kernel's begin to the last one's end.
        idle_ms: in which no kernel ran.
        kinds: by kind, the longest first.
        kernels: milliseconds and calls by kernel, the longest first.
    """

    steps: int
    step_ms: float
    idle_ms: float
    kinds: dict[str, Share]
    kernels: dict[str, tuple[float, float]]

    def lines(self, kernels: int = 12) -> str:
        """As a table, with so many of the longest kernels below it."""
        rows = [
            f" profile of {counted(self.steps, 'step')}, rank 0: {self.step_ms:.2f} ms a step, of "
            f"which the GPU is idle for {self.idle_ms:.2f}",
            f"  {'kind':32}{'ms':>9}{'share':>8}{'alone ms':>10}{'share':>8}{'calls':>8}",
        ]
        for kind, share in self.kinds.items():
            rows.append(
                f"  {kind:32}{share.busy:9.2f}{share.busy / self.step_ms:8.1%}"
                f"{share.alone:10.2f}{share.alone / self.step_ms:8.1%}{share.calls:8.0f}"
            )
        for name, (ms, calls) in list(self.kernels.items())[:kernels]:
            rows.append(f"  {ms:9.2f} ms {calls:6.0f} x {name[:90]}")
        return "\n".join(rows)


class Profiler:
    """Records the steps that a run's flags ask for.

    Args:
        config: of the run.
        here: whether this rank records.
    """

    def __init__(self, config: TrainConfig, *, here: bool) -> None:
        wanted = config.profile and here
        self._first = config.profile_step_start if wanted else None
        self._last = config.profile_step_end
        self._recorder: profile | None = None

    def begins(self, step: int) -> bool:
        """Whether to `start` when so many steps of this start of the program are done."""
        return step == self._first

    def ends(self, step: int, *, stopping: bool) -> bool:
        """Whether to `stop` then: the last step asked for is done, or what follows is no step."""
        return self._recorder is not None and (step == self._last or stopping)

    def start(self) -> None:
        """Begin; what the device is still doing is waited for."""
        torch.cuda.synchronize()
        # The host is recorded for the sake of the collectives: it alone knows of their groups.
        both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        self._recorder = profile(activities=both, acc_events=True)  # without it, it warns
        self._recorder.start()

    def stop(self, step: int, keep: Path | None) -> tuple[Profile, str]:
        """End; what the steps since `start` were made of, and a line about their trace.

        Args:
            step: steps of this start that are done.
            keep: a file for the trace, gzipped JSON that Perfetto and chrome://tracing show.
        """
        assert self._recorder is not None
        assert self._first is not None
        recorder, self._recorder = self._recorder, None
        torch.cuda.synchronize()
        recorder.stop()
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            recorder.export_chrome_trace(str(trace))
            kept = " trace: not kept without --save" if keep is None else _compress(trace, keep)
            events = json.loads(trace.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
        return summarize(device_spans(events, rooms_of_kernels()), step - self._first), kept


def check_profiled(config: TrainConfig, device: torch.device) -> None:
    """Raise ValueError for a run that no profile can be made of."""
    if config.profile and device.type != "cuda":
        raise ValueError(f"Expected a GPU for --profile, got --device {device.type}.")


def _compress(source: Path, target: Path) -> str:
    """Keep a trace; a line about it. A full disk ends no run."""
    try:
        with (
            replaced(target) as draft,
            source.open("rb") as plain,
            gzip.open(draft, "wb", compresslevel=1) as packed,
        ):
            shutil.copyfileobj(plain, packed)
    except OSError as error:
        return f" trace: not kept, {error.strerror or error}"
    return f" trace: {target}"


def device_spans(events: Iterable[Mapping[str, Any]], rooms: Mapping[str, str]) -> list[Span]:
    """What a trace's events say that the device did.

    Args:
        events: of a chrome trace.
        rooms: see `rooms_of_kernels`.
    """
    return [
        Span(event["name"], kind_of(event, rooms), event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]


def rooms_of_kernels() -> dict[str, str]:
    """The room of `mb_kernels` that each Triton kernel is written in, of those imported so far."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("mb_kernels."):
            room = name.split(".")[1]
            for value in vars(module).values():
                written_in = getattr(value, "__module__", None)
                if hasattr(value, "fn") and written_in == name:
                    found[value.__name__] = room
    return found


def kind_of(event: Mapping[str, Any], rooms: Mapping[str, str]) -> str:
    """The kind of work that a kernel of a trace does."""
    name = event["name"]
    if name in rooms:
        return _ROOMS.get(rooms[name], _REST)
    if "nccl" in name.lower():
        group = event.get("args", {}).get("Process Group Description", "")
        axes = re.findall(r"[a-z]+", group)
        return next((kind for axis, kind in _GROUPS.items() if axis in axes), SHARDING)
    return next((kind for pattern, kind in _NAMES if pattern.search(name)), _REST)


def summarize(spans: list[Span], steps: int) -> Profile:
    """Add the spans of `steps` steps up by kind and by kernel."""
    per_step_ms = 1 / (1000 * steps)
    busy: dict[str, float] = {}
    alone: dict[str, float] = {}
    calls: dict[str, int] = {}
    kernels: dict[str, tuple[float, float]] = {}
    borders = []
    for span in spans:
        borders += [(span.begin, 1, span.kind), (span.end, -1, span.kind)]
        calls[span.kind] = calls.get(span.kind, 0) + 1
        ms, count = kernels.get(span.name, (0.0, 0.0))
        kernels[span.name] = ms + (span.end - span.begin) * per_step_ms, count + 1 / steps
    borders.sort(key=lambda border: border[0])
    running: dict[str, int] = {}  # kernels under way, by kind
    idle, before = 0.0, borders[0][0] if borders else 0.0
    for at, change, kind in borders:
        passed, before = at - before, at
        for each in running:
            busy[each] = busy.get(each, 0.0) + passed
        if len(running) == 1:
            (only,) = running
            alone[only] = alone.get(only, 0.0) + passed
        elif not running:
            idle += passed
        running[kind] = running.get(kind, 0) + change
        if not running[kind]:
            del running[kind]
    kinds = {
        kind: Share(ms * per_step_ms, alone.get(kind, 0.0) * per_step_ms, calls[kind] / steps)
        for kind, ms in sorted(busy.items(), key=lambda item: -item[1])
    }
    length = borders[-1][0] - borders[0][0] if borders else 0.0
    longest = sorted(kernels.items(), key=lambda item: -item[1][0])
    return Profile(steps, length * per_step_ms, idle * per_step_ms, kinds, dict(longest))
