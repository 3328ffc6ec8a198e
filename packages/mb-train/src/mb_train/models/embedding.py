"""Where tokens become hidden states.

Letters: B sequences, S tokens of a sequence, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mb_train.models.config import TransformerConfig
from mb_train.models.linear import Norm


class Embedding(nn.Module):
    """Token embedding, plus learned positions and token types if there are any; norm; dropout.

    The norm is there for blocks with norms behind sums alone.

    Args:
        config: sizes; positions "learned" adds a table of `max_positions` rows.
        token_types: kinds of segments a token can be of (BERT's A and B); 0 for none.
    """

    def __init__(self, config: TransformerConfig, *, token_types: int = 0) -> None:
        super().__init__()
        D = config.hidden_size
        self.tokens = nn.Embedding(config.vocab_size, D)
        self.positions = None
        if config.positions == "learned":
            self.positions = nn.Embedding(config.max_positions, D)
        self.token_types = nn.Embedding(token_types, D) if token_types else None
        self.norm = Norm(config) if config.norms == "sum" else None
        self.dropout = nn.Dropout(config.hidden_dropout)
        for table in (self.tokens, self.positions, self.token_types):
            if table is not None:
                nn.init.normal_(table.weight, std=config.ends_std)

    def of_stage(self, *, embeds: bool, head: bool) -> Embedding | None:
        """What a stage of a pipeline keeps of it: all, a tied head's token table, or nothing.

        Args:
            embeds: tokens come in there. head: there is a head that is tied to it.
        """
        if embeds:
            return self
        self.positions = self.token_types = self.norm = None
        return self if head else None

    def forward(
        self, tokens_BS: Tensor, positions_BS: Tensor, token_types_BS: Tensor | None = None
    ) -> Tensor:
        """x_BSD in the tables' dtype; positions are [B or 1, S]."""
        x_BSD = self.tokens(tokens_BS)
        if self.positions is not None:
            x_BSD = x_BSD + self.positions(positions_BS)
        if self.token_types is not None and token_types_BS is not None:
            x_BSD = x_BSD + self.token_types(token_types_BS)
        if self.norm is not None:
            x_BSD = self.norm(x_BSD)
        return self.dropout(x_BSD)


def running_positions(tokens_BS: Tensor) -> Tensor:
    """0, 1, 2, ... for every sequence alike, [1, S]."""
    return torch.arange(tokens_BS.shape[1], device=tokens_BS.device)[None]
