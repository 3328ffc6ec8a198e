"""Several ranks in one process: their arenas are CPU tensors, the table holds CPU addresses."""

import itertools
from typing import NamedTuple

import pytest
import torch
from mb_kernels import bin_tokens
from mb_kernels.exchange import Layout, PeerMemory

_GUARD = 512  # bytes before and behind an arena that nothing may write


@pytest.fixture
def no_access_outside_the_arguments():
    """Kernels write other ranks' arenas by address: guard bytes take the place of that check."""


class Ranks(NamedTuple):
    memories: list[PeerMemory]
    guarded: list[torch.Tensor]

    def check_guards(self) -> None:
        for whole in self.guarded:
            assert (whole[:_GUARD] == 173).all()
            assert (whole[-_GUARD:] == 173).all()


def _ranks(layout: Layout, polls: int = 3) -> Ranks:
    guarded = []
    for _ in range(layout.ranks):
        whole = torch.full((layout.nbytes + 2 * _GUARD,), 173, dtype=torch.uint8)
        whole[_GUARD:-_GUARD] = 0
        guarded.append(whole)
    arenas = [whole[_GUARD:-_GUARD] for whole in guarded]
    table = torch.tensor([arena.data_ptr() for arena in arenas])
    error = [torch.zeros(3, dtype=torch.int32) for _ in arenas]
    memories = [
        PeerMemory(layout, rank, arena, table, error[rank], polls=polls)
        for rank, arena in enumerate(arenas)
    ]
    for memory in memories:  # what a kernel does not write shows
        for buffer in ("tokens", "grads", "home"):
            memory.rows(buffer).fill_(torch.nan)
    return Ranks(memories, guarded)


def _destinations(tokens: int, columns: int, ranks: int, generator: torch.Generator):
    """Distinct ranks per token, some of them missing."""
    peers = torch.rand(tokens, ranks, generator=generator).topk(columns).indices.int()
    peers[torch.rand(peers.shape, generator=generator) < 0.3] = -1
    return peers


CASES = [
    # ranks, tokens of each, hidden, columns, dtype
    (2, (5, 7), 16, 2, torch.float32),
    (3, (4, 0, 6), 24, 2, torch.float16),
    (4, (1, 9, 3, 2), 8, 1, torch.float32),
    (2, (0, 0), 8, 1, torch.float32),
    (2, (1, 0), 1032, 2, torch.bfloat16),  # more columns than one block
    (5, (2, 1, 2, 0, 2), 8, 4, torch.float32),
]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("ranks", "lengths", "hidden", "columns", "dtype"), CASES)
def test_there_and_back(ranks, lengths, hidden, columns, dtype):
    generator = torch.Generator().manual_seed(ranks)
    words, most = 2 * columns, max(max(lengths), 1)
    layout = Layout(ranks, most, hidden, words, dtype)
    world = _ranks(layout)
    for repeat in range(2):  # the second time over what the first left behind
        x = [torch.randn(n, hidden, generator=generator).to(dtype) for n in lengths]
        payload = [torch.randn(n, words, generator=generator) for n in lengths]
        peers = [_destinations(n, columns, ranks, generator) for n in lengths]
        bins = [bin_tokens(p, ranks) for p in peers]
        for memory, x_r, payload_r, bins_r in zip(world.memories, x, payload, bins, strict=True):
            memory.push(
                "tokens",
                x_r,
                bins_r.tokens_per_expert_E,
                order_N=bins_r.order_N,
                columns=columns,
                payload=payload_r,
            )
        counts = [memory.wait("tokens") for memory in world.memories]
        for here, memory in enumerate(world.memories):
            for source in range(ranks):
                mine = (peers[source] == here).any(1)
                rows = slice(source * most, source * most + int(mine.sum()))
                assert int(counts[here][source]) == int(mine.sum())
                assert torch.equal(memory.rows("tokens")[rows], x[source][mine])
                assert torch.equal(memory.payload("tokens")[rows], payload[source][mine])
                behind = memory.rows("tokens")[rows.stop : (source + 1) * most]
                assert repeat or behind.isnan().all()  # untouched

        for memory, counts_r in zip(world.memories, counts, strict=True):
            scale = memory.rank + 1
            memory.push(
                "home",
                memory.rows("tokens") * scale,
                counts_r,
                payload=memory.payload("tokens") * scale,
            )
        for memory in world.memories:
            memory.wait("home")
        for memory, x_r, payload_r, peers_r, bins_r in zip(
            world.memories, x, payload, peers, bins, strict=True
        ):
            indices = (peers_r, bins_r.inverse_N, bins_r.offsets_E1)
            factor = (peers_r + 1).sum(1, keepdim=True)  # -1 adds none
            y = memory.sum_home(memory.rows("home"), *indices)
            tolerance = 1e-6 if dtype is torch.float32 else 1e-2
            torch.testing.assert_close(y, x_r * factor, rtol=tolerance, atol=tolerance)
            words_home = memory.sum_home(memory.payload("home"), *indices)
            torch.testing.assert_close(words_home, payload_r * factor)
            assert torch.equal(y, memory.sum_home(memory.rows("home"), *indices))
        assert not any(memory.error.any() for memory in world.memories), f"repeat {repeat}"
    world.check_guards()


def test_gradients_use_the_rows_of_their_tokens():
    layout = Layout(2, 4, 8, 2, torch.float32)
    world = _ranks(layout)
    peers = torch.tensor([[1], [0], [1]], dtype=torch.int32)
    bins = bin_tokens(peers, 2)
    x = torch.arange(24.0).view(3, 8)
    for memory in world.memories:
        counts = bins.tokens_per_expert_E
        memory.push("tokens", x, counts, order_N=bins.order_N, payload=torch.zeros(3, 2))
        memory.push("grads", -x, counts, order_N=bins.order_N)
    for memory in world.memories:
        memory.wait("tokens")
        memory.wait("grads")
        for source, count in ((0, memory.rank + 1), (4, memory.rank + 1)):
            rows = slice(source, source + count)
            assert torch.equal(memory.rows("grads")[rows], -memory.rows("tokens")[rows])
    world.check_guards()
    for memory in world.memories:
        memory.wait("grads", place=5)  # signals are used up: both are waited for, the first named
        assert memory.error.tolist() == [1, 5, 0]


def test_a_peer_that_does_not_come_is_named_once():
    layout = Layout(3, 2, 8, 2, torch.float32)
    world = _ranks(layout)
    first, second, _ = world.memories
    nothing = torch.zeros(3, dtype=torch.int32)
    for memory in (first, second):
        memory.push("home", torch.zeros(6, 8), nothing)
    first.wait("home", place=17)
    assert first.error.tolist() == [1, 17, 2]
    first.wait("grads", place=18)
    assert first.error.tolist() == [1, 17, 2]
    assert second.error.tolist() == [0, 0, 0]


def test_any_memory_order():
    layout = Layout(2, 3, 8, 2, torch.float32)
    world = _ranks(layout)
    peers = torch.tensor([[1, 0], [0, -1], [1, -1]], dtype=torch.int32)
    bins = bin_tokens(peers, 2)

    def strided(t):
        return torch.stack([t, torch.full_like(t, 77)], dim=-1)[..., 0]

    x, payload = torch.arange(24.0).view(3, 8), torch.arange(6.0).view(3, 2)
    for memory in world.memories:
        order = {"order_N": strided(bins.order_N), "columns": 2, "payload": strided(payload)}
        memory.push("tokens", strided(x), strided(bins.tokens_per_expert_E), **order)
    for memory in world.memories:
        counts = memory.wait("tokens")
        memory.push("home", strided(memory.rows("tokens")), strided(counts))
    indices = [strided(t) for t in (peers, bins.inverse_N, bins.offsets_E1)]
    for memory in world.memories:
        memory.wait("home")
        want = x * (peers >= 0).sum(1, keepdim=True)
        assert torch.equal(memory.sum_home(memory.rows("home"), *indices), want)
    world.check_guards()


def test_what_does_not_fit_the_layout_is_refused():
    layout = Layout(2, 3, 8, 2, torch.float32)
    memory = _ranks(layout).memories[0]
    counts, order = torch.zeros(2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    x = torch.zeros(3, 8)
    for says, changed in (
        ("x: expected torch.float32", {"x": x.half()}),
        ("x: expected at most 3", {"x": torch.zeros(4, 8)}),
        ("counts_P: expected torch.int32", {"counts_P": counts.long()}),
        ("order_N: expected", {"order_N": order[:2]}),
        ("payload: expected", {"payload": torch.zeros(3, 3)}),
    ):
        arguments = {"x": x, "counts_P": counts, "order_N": order} | changed
        with pytest.raises(ValueError, match=says):
            memory.push("tokens", **arguments)
    with pytest.raises(ValueError, match=r"x: expected torch.float32 \(6, 8\)"):
        memory.push("home", x, counts)
    # It would have been stored over that of "tokens", which the backward reads.
    with pytest.raises(ValueError, match='payload: expected "tokens" or "home"; got "grads"'):
        memory.push("grads", x, counts, order_N=order, payload=torch.zeros(3, 2))
    with pytest.raises(ValueError, match='got "grads"'):
        memory.payload("grads")
    peers = torch.zeros(3, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"inverse_N: expected .*\(3,\)"):
        memory.sum_home(memory.rows("home"), peers, order[:2], order)
    with pytest.raises(ValueError, match="gather: expected a layout of 1 token; got 3"):
        memory.gather(x[0])


def test_layouts_that_cannot_be_are_named():
    with pytest.raises(ValueError, match=r"multiple of 16 bytes.* got 6 elements of torch.float32"):
        Layout(2, 4, 6, 2, torch.float32)
    with pytest.raises(ValueError, match="sizes of at least 1"):
        Layout(2, 0, 8, 2, torch.float32)


def test_nothing_overlaps_in_an_arena():
    layout = Layout(3, 5, 24, 6, torch.float16)
    rows, words = 15 * 24 * 2, 15 * 6 * 4
    pieces = sorted(
        [(layout.rows_at(b), rows) for b in ("tokens", "grads", "home")]
        + [(layout.payload_at(b), words) for b in ("tokens", "home")]
        + [(layout.counts_at(), 12)]
        + [(layout.signals_at(b), 12) for b in ("tokens", "grads", "home")]
    )
    for (at, size), (following, _) in itertools.pairwise(pieces):
        assert at + size <= following
    assert pieces[-1][0] + 12 <= layout.nbytes
