"""The memory through which ranks of one host exchange rows, and a check whether it is available.

Every rank has an arena that the kernels of the other ranks store into (`mb_kernels.exchange`). It
is torch's symmetric memory, unless a test passes another.

Letters: T tokens, D hidden, M the most tokens a rank may bring.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mb_kernels.exchange import Layout, PeerMemory
from mb_kernels.uncompiled import uncompiled
from torch import Tensor

from mb_parallel.expert_parallel.collectives import Place, longest_of_ranks
from mb_parallel.world import of_all_ranks

# Makes an arena of so many bytes for the ranks of a place: (arena, table, error, what to keep).
Allocate = Callable[[int, Place], tuple[Tensor, Tensor, Tensor, Any]]
# What ranks wait for each other in, as messages name it.
Step = Literal[
    "dispatch",
    "combine",
    "the backward of combine",
    "the backward of dispatch",
    "the counts for a capacity",
]
_STEPS: tuple[Step, ...] = get_args(Step)


class PeerBuffers:
    """The memory that all layers of a model exchange through, made at the first dispatch.

    Args:
        place: the expert-parallel group; its `layer` is not used.
        max_tokens: M. None: the most that any rank brings to its first dispatch.
        equal_tokens: all ranks bring equally many tokens. Then all of them see when there are more
            than M, and make larger memory, unless `max_tokens` says that there never are.
        timeout_s: about how long a kernel waits for a peer before it gives up.
        allocate: makes the memory; by default torch's symmetric memory.
    """

    def __init__(
        self,
        place: Place,
        *,
        max_tokens: int | None = None,
        equal_tokens: bool = False,
        timeout_s: float = 600.0,
        allocate: Allocate | None = None,
    ) -> None:
        self.place = place
        self.max_tokens = max_tokens
        self.grows = equal_tokens and max_tokens is None
        self.timeout_s = timeout_s
        self._allocate = allocate or symmetric_arena
        self._memories: dict[tuple[int, torch.dtype, int], PeerMemory] = {}
        # Every memory, and what it needs kept: routes and CUDA graphs refer to replaced ones too.
        self._made: list[tuple[PeerMemory, Any]] = []
        self._layers: list[str] = []
        # Sends so far, by buffer: a later one overwrites the rows.
        self.uses: Counter[str] = Counter()
        # What backward passes have sent and the peers may still be reading: until a backward pass
        # brings something home, which none does if neither tokens nor weights need a gradient.
        self.unread: set[tuple[PeerMemory, str]] = set()

    def __deepcopy__(self, memo: Any) -> PeerBuffers:
        return self  # the layers of a model's copy run beside the model's, one after the other

    def register(self, layer: str) -> int:
        """Give a layer a number, for messages."""
        self._layers.append(layer)
        return len(self._layers) - 1

    def name_of(self, layer: int) -> str:
        """The name that the layer of this number was registered with."""
        return self._layers[layer]

    @property
    def arenas(self) -> list[Tensor]:
        """What was allocated so far, as bytes."""
        return [memory.arena for memory, _ in self._made]

    def place_of(self, layer: int, step: Step) -> int:
        """The number by which a kernel that gives up reports a layer and a step of it."""
        return layer * len(_STEPS) + _STEPS.index(step)

    def memory(self, x_TD: Tensor, words: int) -> PeerMemory:
        """The memory for rows of x's width and dtype, made if there is none yet.

        All ranks ask for the same ones in the same order.

        Raises:
            ValueError: more tokens than there is room for.
            RuntimeError: a peer did not come to an earlier exchange.
        """
        tokens, hidden = x_TD.shape
        key = (hidden, x_TD.dtype, words)
        memory = self._memories.get(key)
        if memory is None or (self.grows and tokens > memory.layout.tokens):
            memory = self._memories[key] = self._make(x_TD, words)
        self.check(memory)
        if tokens > memory.layout.tokens:
            raise ValueError(
                f"Expected at most {memory.layout.tokens} tokens per rank, which the exchange was "
                f"made for, got {tokens}. Pass max_tokens={tokens} to parallelize_experts."
            )
        return memory

    @uncompiled
    def gathered(self, counts_E: Tensor, layer: int) -> Tensor:
        """int32 counts [E] of every rank, [P, E], until the next call.

        Rows of the same layer are exchanged after it, by which all ranks have read them.
        """
        experts = counts_E.shape[0]
        counts_W = counts_E
        if experts % 4:  # rows travel in pieces of 16 bytes
            counts_W = F.pad(counts_E, (0, -experts % 4))
        key = (counts_W.shape[0], torch.int32, 1)
        memory = self._memories.get(key)
        if memory is None:
            memory = self._allocated(Layout(self.place.size, 1, counts_W.shape[0], 1, torch.int32))
            self._memories[key] = memory
        self.check(memory)
        place = self.place_of(layer, "the counts for a capacity")
        return memory.gather(counts_W, place)[:, :experts]

    def _make(self, x_TD: Tensor, words: int) -> PeerMemory:
        tokens, hidden = x_TD.shape
        most = longest_of_ranks(self.max_tokens or tokens, self.place, x_TD.device)
        return self._allocated(Layout(self.place.size, max(most, 1), hidden, words, x_TD.dtype))

    def _allocated(self, layout: Layout) -> PeerMemory:
        polls = int(min(self.timeout_s * 1e6, 2**31 - 1))
        # The first pass may be an evaluation. Memory of inference mode could not be trained with.
        with torch.inference_mode(False):
            arena, table, error, kept = self._allocate(layout.nbytes, self.place)
            memory = PeerMemory(layout, self.place.rank, arena, table, error, polls=polls)
        self._made.append((memory, kept))
        return memory

    def check_all(self) -> None:
        """Raise as `check` does, for exchanges that a CUDA graph holds, where nobody else looks."""
        for memory, _ in self._made:
            self.check(memory)

    def check(self, memory: PeerMemory) -> None:
        """Raise if a kernel has given up waiting for a peer. Reads only host memory."""
        failed, place, peer = memory.error.tolist()
        if not failed:
            return
        layer, step = divmod(place, len(_STEPS))
        ranks = dist.get_process_group_ranks(self.place.group)
        raise RuntimeError(
            f"rank {dist.get_rank()} waited {self.timeout_s:g} s in vain for rank {ranks[peer]} in "
            f"{_STEPS[step]} of {self.name_of(layer)}. If that rank died, its own error is the "
            "cause; what this rank has computed since is worthless."
        )


def symmetric_arena(nbytes: int, place: Place) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Zeroed symmetric memory on the current device; collective over the ranks of `place`."""
    import torch.distributed._symmetric_memory as symmetric_memory

    device = torch.device("cuda", torch.cuda.current_device())
    arena = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
    arena.zero_()
    handle = symmetric_memory.rendezvous(arena, place.group)
    table = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
    error = torch.zeros(3, dtype=torch.int32, device="cpu", pin_memory=True)
    torch.cuda.synchronize(device)  # zeros everywhere before the first signal
    dist.barrier(place.group)
    return arena, table, error, handle


def peer_problem(place: Place, device_type: str, hidden_sizes: Iterable[int]) -> str | None:
    """Why peers cannot write each other's memory here; None if they can. Equal on all ranks.

    Tries to allocate a few bytes. Collective over the ranks of `place`.
    """
    if device_type != "cuda":
        return "the model is not on a GPU"
    if torch.version.hip is not None:
        return "on AMD it is compiled but not measured yet"
    for hidden_size in hidden_sizes:
        if hidden_size % 8:
            return f"hidden_size = {hidden_size} is no multiple of 8"
    mine = torch.cuda.current_device()
    where = of_all_ranks((socket.gethostname(), mine), place.group)
    if len({host for host, _ in where}) > 1:
        return "the ranks of an ep group are on several hosts"
    others = [index for _, index in where if index != mine]
    problem = None
    if not all(torch.cuda.can_device_access_peer(mine, other) for other in others):
        problem = "the GPUs cannot address each other's memory"
    problem = _any_problem(problem, place)
    if problem is not None:
        return problem
    try:
        symmetric_arena(256, place)
    except (RuntimeError, ImportError) as error:
        problem = f"symmetric memory is not available ({str(error).splitlines()[0]})"
    return _any_problem(problem, place)


def _any_problem(mine: str | None, place: Place) -> str | None:
    return next(filter(None, of_all_ranks(mine, place.group)), None)
