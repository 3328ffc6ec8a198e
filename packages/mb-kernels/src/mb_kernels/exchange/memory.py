"""``PeerMemory``: rows exchanged between ranks through memory that all of them can address.

Every rank has an arena of one ``Layout``, and a table with the addresses of all arenas. ``push``
stores rows in the peers' arenas, each rank at a place of its own. ``wait`` lets the stream wait
until all peers' rows have arrived. Neither makes the host wait for the device, and shapes do not
depend on the routing, so a CUDA graph can hold both.

A buffer has a region of M rows for each source rank. So no rank has to know how many rows the
others send, and no region can overflow. Row p M + i is the i-th that came from rank p. Of the M
rows of its region only as many are valid as rank p sent; the others hold old data.

    "tokens"   tokens with their payload, from the ranks they belong to, and how many there are
    "grads"    gradients of these tokens' results, in the same rows
    "home"     rows that go back to the rank they came from, with a payload if need be

One copy of each buffer is enough, because a stream runs in order: a rank pushes into "tokens" again
only after it has waited for "home", which its peers pushed after they had read their "tokens". The
same holds for each pair of buffers. Uses must alternate, as in a layer's forward and backward.

Letters: T tokens, C destinations of a token, P ranks, M the most tokens a rank may bring, D hidden,
W words of payload.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mb_kernels.runtime import registration
from mb_kernels.runtime.checks import require_countable, require_exactly

Buffer = Literal["tokens", "grads", "home"]
_BUFFERS: tuple[Buffer, ...] = ("tokens", "grads", "home")
_ALIGNMENT = 256


@dataclass(frozen=True)
class Layout:
    """What lies where in an arena, in bytes.

    ranks: P; tokens: M; hidden: D; words: W, fp32; dtype: of the rows.

    Raises:
        ValueError: a size below 1, 2**30 rows, or rows whose length is no multiple of 16 bytes.
    """

    ranks: int
    tokens: int
    hidden: int
    words: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if min(self.ranks, self.tokens, self.hidden, self.words) < 1:
            raise ValueError(f"Layout: expected sizes of at least 1; got {self}.")
        require_countable("rows of a buffer, ranks times tokens", self.rows)
        if self.hidden * self.dtype.itemsize % 16:
            raise ValueError(
                "hidden: expected rows of a multiple of 16 bytes, which travel in such pieces; got "
                f"{self.hidden} elements of {self.dtype}. Pad the hidden size."
            )

    @property
    def rows(self) -> int:
        """Rows of one buffer, P M."""
        return self.ranks * self.tokens

    # Three times rows, two payloads, the counts of all ranks, and three times their signals.

    def rows_at(self, buffer: Buffer) -> int:
        return _BUFFERS.index(buffer) * self._rows_size

    def payload_at(self, buffer: Buffer) -> int:
        return 3 * self._rows_size + (buffer == "home") * self._payload_size

    def counts_at(self) -> int:
        return 3 * self._rows_size + 2 * self._payload_size

    def signals_at(self, buffer: Buffer) -> int:
        return self.counts_at() + (1 + _BUFFERS.index(buffer)) * self._counts_size

    @property
    def nbytes(self) -> int:
        return self.counts_at() + 4 * self._counts_size

    @property
    def _rows_size(self) -> int:
        return _aligned(self.rows * self.hidden * self.dtype.itemsize)

    @property
    def _payload_size(self) -> int:
        return _aligned(self.rows * self.words * 4)

    @property
    def _counts_size(self) -> int:
        return _aligned(self.ranks * 4)


class PeerMemory:
    """One rank's arena and its way into those of its peers.

    Args:
        layout: the same on all ranks.
        rank: this rank, 0 to P - 1.
        arena: uint8 [layout.nbytes] on the device, zeros, addressable by all peers.
        table: int64 [P] on the device: the addresses of all arenas, as this rank sees them.
        error: int32 [3] in pinned host memory (any memory under the interpreter), zeros: becomes
            (1, place, peer) when a peer does not come.
        polls: how often a signal is looked at before giving up, about a microsecond each.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        arena: Tensor,
        table: Tensor,
        error: Tensor,
        *,
        polls: int = 600_000_000,
    ) -> None:
        assert arena.dtype is torch.uint8
        assert arena.numel() >= layout.nbytes
        self.layout, self.rank, self.arena = layout, rank, arena
        self.table, self.error, self.polls = table, error, polls
        self._done = torch.zeros(1, dtype=torch.int32, device=arena.device)
        # For `gather` alone: made in each call they would be two more launches, made in the first
        # one they might belong to a CUDA graph.
        self._one_P = torch.ones(layout.ranks, dtype=torch.int32, device=arena.device)
        self._peers_P = torch.arange(layout.ranks, dtype=torch.int32, device=arena.device)
        if arena.is_cuda:
            units = torch.cuda.get_device_properties(arena.device).multi_processor_count
            self._programs = 4 * units  # 528 on an H200: what its links take in
        else:
            self._programs = 3
        shape, counts_at = (layout.rows, layout.hidden), layout.counts_at()
        # An exchange asks for all of these, and eager layers wait for the host.
        self._rows = {b: self._view(layout.rows_at(b), shape, layout.dtype) for b in _BUFFERS}
        self._at = {
            b: (layout.rows_at(b), layout.payload_at(b), counts_at, layout.signals_at(b))
            for b in _BUFFERS
        }
        region = self.rank * layout.tokens * layout.hidden * layout.dtype.itemsize
        self.home_P = table + layout.rows_at("home") + region
        """int64 [P]: where in each peer's "home" this rank's rows begin, for kernels that store
        them there by themselves, as ``expert_mlp`` does."""

    def rows(self, buffer: Buffer) -> Tensor:
        """The rows of a buffer, [P M, D], a view of this rank's arena."""
        return self._rows[buffer].detach()

    def payload(self, buffer: Buffer, words: int | None = None) -> Tensor:
        """The payload of "tokens" or "home", fp32 [P M, words], a view of this rank's arena.

        words: as pushed; None: W. ValueError for "grads", which have no payload.
        """
        _require_payload(buffer)
        shape = (self.layout.rows, self.layout.words if words is None else words)
        return self._view(self._at[buffer][1], shape, torch.float32)

    def push(
        self,
        buffer: Buffer,
        x: Tensor | None,
        counts_P: Tensor,
        *,
        order_N: Tensor | None = None,
        columns: int = 1,
        payload: Tensor | None = None,
    ) -> None:
        """Store rows into the peers' buffers and signal them.

        Args:
            buffer: theirs to write.
            x: [T, D] with `order_N`; else [P M, D], where row p M + i goes to rank p. None: an
                earlier kernel of this stream has stored rows to `home_P`, and the peers are told.
            counts_P: int32, rows for each peer, at most M. For "tokens" they are sent along.
            order_N: slots (token times columns plus choice) sorted by destination.
            columns: C.
            payload: fp32 [T or P M, W], or with fewer words; None for "grads".

        Raises:
            ValueError: a tensor of another shape, dtype or device than the layout's; a payload for
                "grads".
        """
        layout, words = self.layout, self.layout.words
        rows = layout.rows if order_N is None or x is None else x.shape[0]
        if x is not None:
            require_exactly("x", x, (layout.dtype,), (rows, layout.hidden), self.arena)
        if order_N is not None and rows > layout.tokens:
            raise ValueError(f"x: expected at most {layout.tokens} tokens; got {rows}.")
        require_exactly("counts_P", counts_P, (torch.int32,), (layout.ranks,), self.arena)
        if payload is not None:
            _require_payload(buffer)
            words = max(min(payload.shape[-1], words), 1)
            require_exactly("payload", payload, (torch.float32,), (rows, words), self.arena)
        if order_N is not None:
            require_exactly("order_N", order_N, (torch.int32,), (rows * columns,), self.arena)
        counts_P = counts_P.contiguous()
        silent = x is None and payload is None
        # Not more than there can be rows to store: each draws a ticket.
        programs = 1 if silent else max(min(self._programs, rows * layout.ranks), 1)
        with registration.device_of(self.arena):
            _kernels().push(
                programs,
                (
                    None if x is None else x.contiguous(),
                    None if payload is None else payload.contiguous(),
                    None if order_N is None else order_N.contiguous(),
                    counts_P,
                    self.table,
                    self._done,
                ),
                (*self._at[buffer], self.rank, layout.tokens, layout.hidden, words),
                C=columns,
                P=layout.ranks,
                SEND_COUNTS=buffer == "tokens",
            )

    def wait(self, buffer: Buffer, place: int = 0) -> Tensor:
        """Let the stream wait until all peers have pushed; return their counts [P], int32.

        Counts are meaningful for "tokens" alone. A peer that does not come sets `error` to
        (1, place, its rank), and nobody is waited for any more.
        """
        counts_P = torch.empty(self.layout.ranks, dtype=torch.int32, device=self.arena.device)
        _, _, counts_at, signals_at = self._at[buffer]
        numbers = (self.error.data_ptr(), counts_at, signals_at, self.rank, place, self.polls)
        with registration.device_of(self.arena):
            _kernels().wait(self.table, counts_P, numbers, send_counts=buffer == "tokens")
        return counts_P

    def gather(self, x_D: Tensor, place: int = 0) -> Tensor:
        """One row of every rank, [P, D] in the order of ranks, a view of this rank's arena.

        For memory of its own, with M = 1. The peers' next rows overwrite it: between two uses every
        rank has to wait for all others, as it does in the exchange of a layer's tokens.

        x_D: [D] in the layout's dtype; place: as for `wait`. ValueError for another tensor or M.
        """
        if self.layout.tokens != 1:
            raise ValueError(f"gather: expected a layout of 1 token; got {self.layout.tokens}.")
        ranks = self.layout.ranks
        self.push("tokens", x_D[None], self._one_P, order_N=self._peers_P, columns=ranks)
        self.wait("tokens", place)
        return self.rows("tokens")

    def sum_home(
        self, rows: Tensor, peers_TC: Tensor, inverse_N: Tensor, offsets_P1: Tensor
    ) -> Tensor:
        """Each token's rows summed in the order of its destinations; no atomics.

        In fp32, and fp64 in fp64.

        Args:
            rows: of "home": `rows("home")` or `payload("home")`, [P M, any].
            peers_TC: int32, destinations of each token, -1 for none.
            inverse_N, offsets_P1: of the bins that `push` of "tokens" had its order from.

        Returns:
            [T, any] in the dtype of rows.

        Raises:
            ValueError: a tensor of another shape, dtype or device than the layout's.
        """
        require_exactly("rows", rows, (rows.dtype,), (self.layout.rows, rows.shape[-1]), self.arena)
        slots, ends = peers_TC.numel(), self.layout.ranks + 1
        for name, index, shape in (
            ("peers_TC", peers_TC, peers_TC.shape if peers_TC.ndim == 2 else ("T", "C")),
            ("inverse_N", inverse_N, (slots,)),
            ("offsets_P1", offsets_P1, (ends,)),
        ):
            require_exactly(name, index, (torch.int32,), shape, self.arena)
        indices = (peers_TC.contiguous(), inverse_N.contiguous(), offsets_P1.contiguous())
        with registration.device_of(self.arena):
            return _kernels().sum_home(rows.contiguous(), *indices, self.layout.tokens)

    def _view(self, at: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        nbytes = shape[0] * shape[1] * dtype.itemsize
        return self.arena[at : at + nbytes].view(dtype).view(shape)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _kernels() -> Any:
    from mb_kernels.exchange import kernels  # imports Triton

    return kernels


def _require_payload(buffer: Buffer) -> None:
    if buffer == "grads":
        raise ValueError(
            'payload: expected "tokens" or "home"; got "grads", which come in the same rows as the '
            'tokens and have none. Read that of "tokens".'
        )
