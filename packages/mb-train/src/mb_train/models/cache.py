"""Keys and values that a model keeps of the tokens it has seen, to go on from them.

Layers with a state (`models.states`) keep that, and their last few tokens, instead.

Rows need not be equally long: a new token is written behind its row's own, and sees those alone.
What a row was filled up with lies behind its tokens, is seen by none, and is overwritten.

Letters: B rows, Q new tokens of a row, S places, G key-value heads, C width of a head, which may be
another of a value.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Places to begin with; they double.
_PLACES = 64


class KVCache:
    """Grows with what is put into it.

    Args:
        rows: B.
        device: of keys and values.

    Attributes:
        places: of each row, S.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._lengths_B = torch.zeros(rows, dtype=torch.int64, device=device)
        self._longest = 0  # the same on the host
        self._held: dict[nn.Module, tuple[Tensor, ...]] = {}
        self._positions_BQ = self._lengths_B[:, None]
        self.places = _PLACES

    def reserve(self, most: int) -> None:
        """Make room for so many more tokens of each row. All else is left to the device.

        So a pass within the room may be captured as a graph: what it reads and writes stays where
        it is until there are more places, or fewer rows.
        """
        self._longest += most
        while self.places < self._longest:
            self.places *= 2

    def begin(self, new_B: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
        """Put new tokens behind each row's, for whom there is room.

        Args:
            new_B: how many each row gets.
            most: the largest of them, Q.

        Returns:
            positions_BQ; the pairs that may attend, bool [B, 1, Q, S]; valid_BQ, where tokens are
            none that a row was filled up with.
        """
        steps_Q = torch.arange(most, device=new_B.device)
        self._positions_BQ = self._lengths_B[:, None] + steps_Q
        places_S = torch.arange(self.places, device=new_B.device)
        mask = (places_S <= self._positions_BQ[..., None])[:, None]
        self._lengths_B += new_B
        return self._positions_BQ, mask, steps_Q < new_B[:, None]

    def extend(self, owner: nn.Module, k_BQGC: Tensor, v_BQGC: Tensor) -> tuple[Tensor, Tensor]:
        """Put a layer's new keys and values behind its own; return all places, [B, S, G, C]."""
        found = []
        rows_B1 = torch.arange(len(k_BQGC), device=k_BQGC.device)[:, None]
        for old, new in zip(self._held.get(owner, (None, None)), (k_BQGC, v_BQGC), strict=True):
            held = new.new_zeros(len(new), self.places, *new.shape[2:]) if old is None else old
            if held.shape[1] < self.places:
                more = held.new_zeros(len(held), self.places - held.shape[1], *held.shape[2:])
                held = torch.cat([held, more], dim=1)
            held[rows_B1, self._positions_BQ] = new
            found.append(held)
        k, v = found
        self._held[owner] = k, v
        return k, v

    def held(self, owner: nn.Module) -> tuple[Tensor, ...] | None:
        """What a layer of another kind last had it hold, if anything."""
        return self._held.get(owner)

    def hold(self, owner: nn.Module, *tensors: Tensor) -> None:
        """Hold tensors of each row, [B, ...], for its keys and values, where the last ones lie."""
        held = self._held.get(owner)
        if held is None:
            self._held[owner] = tensors
            return
        for place, tensor in zip(held, tensors, strict=True):
            place.copy_(tensor)

    def keep(self, rows: Tensor) -> None:
        """Let go of all rows but these, given by number."""
        self._lengths_B = self._lengths_B[rows]
        self._held = {
            owner: tuple(x[rows] for x in tensors) for owner, tensors in self._held.items()
        }
