"""ICT: two BERT towers that embed queries and blocks so that a query lies next to its block.

The loss is a softmax over all blocks of a micro-batch, of all data-parallel ranks (inverse cloze
task, arXiv 1906.00300): they are gathered, with gradients that flow back to where they came from.
`gather` does that, so the model knows of no process group. Micro-batches of a step, one after the
other, do not see each other's blocks.

Letters: B samples of this rank, A samples of all ranks, S tokens of a sequence, D embedding width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mb_train.models.bert import Bert
from mb_train.models.config import TransformerConfig
from mb_train.models.linear import Linear
from mb_train.models.output import ExpertReports, ModelOutput

LOSS = "retrieval loss"


class Tower(nn.Module):
    """A BERT encoder; the embedding of a text is its first token's, projected if asked for."""

    def __init__(
        self, config: TransformerConfig, *, projection: int, compute_dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.bert = Bert(config, binary_head=False, compute_dtype=compute_dtype)
        self.bert.lm_head = None
        self.projection = None
        if projection:
            self.projection = Linear(config.hidden_size, projection, std=config.init_std)

    def forward(
        self, tokens_BS: Tensor, valid_BS: Tensor, kept_T: Tensor | None = None
    ) -> tuple[Tensor, ExpertReports]:
        """Embeddings [B, D] of texts, and what the experts report."""
        types_BS = torch.zeros_like(tokens_BS)
        # Texts are of all lengths, so that there is always padding.
        length_B1 = valid_BS.sum(1, keepdim=True)
        ends_B2 = F.pad(length_B1, (0, 1), value=valid_BS.shape[1])
        x_BSD, reports = self.bert.encode(tokens_BS, types_BS, ends_B2, valid_BS, kept_T)
        x_BD = x_BSD[:, 0]
        return x_BD if self.projection is None else self.projection(x_BD), reports


class ICT(nn.Module):
    """A retriever with two towers, or one for both kinds of text.

    Args:
        config: of a tower.
        shared: one tower for queries and blocks.
        projection: width of the embeddings; 0 takes the hidden size.
        scale_scores: divide scores by the root of the hidden size.
        gather: [B, D] to [A, D] over the data-parallel ranks, in rank order, differentiable.
        rank: this rank's place among them.
        compute_dtype: dtype of the activations; parameters are made in fp32.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        shared: bool = False,
        projection: int = 0,
        scale_scores: bool = False,
        gather: Callable[[Tensor], Tensor] = lambda x: x,
        rank: int = 0,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.query = Tower(config, projection=projection, compute_dtype=compute_dtype)
        self.block: Tower = self.query
        if not shared:
            self.block = Tower(config, projection=projection, compute_dtype=compute_dtype)
        self.scale = config.hidden_size**-0.5 if scale_scores else 1.0
        self._gather, self._rank = gather, rank

    @torch.no_grad()
    def begin_from(self, bert: Bert) -> None:
        """Take the encoder's weights of a BERT for both towers, which begin alike.

        Their projections too, as in Megatron-LM: two of them would lay the same text in two places.

        Raises:
            RuntimeError: a BERT of other sizes.
        """
        heads = ("lm_head.", "pooler.", "order_head.")
        weights = {n: t for n, t in bert.state_dict().items() if not n.startswith(heads)}
        for tower in (self.query, self.block):
            tower.bert.load_state_dict(weights)
        if self.query.projection is not None and self.block.projection is not None:
            self.block.projection.load_state_dict(self.query.projection.state_dict())

    def forward(
        self, x: Tensor, *, query_valid_BS: Tensor, block_BS: Tensor, block_valid_BS: Tensor,
        weights_B: Tensor, query_kept_T: Tensor | None = None, block_kept_T: Tensor | None = None,
    ) -> ModelOutput:  # fmt: skip
        """The loss of finding each query's block among all blocks.

        Args:
            x: tokens of the queries [B, S], int64; block_BS: of their blocks.
            query_valid_BS, block_valid_BS: 1 for tokens that are not padding, else 0.
            weights_B: fp32 weight of each sample's loss in the sum.
            query_kept_T, block_kept_T: the places that blocks see, see `segments.Segments`.
        """
        query_BD, query_reports = self.query(x, query_valid_BS, query_kept_T)
        block_BD, block_reports = self.block(block_BS, block_valid_BS, block_kept_T)
        block_AD = self._gather(block_BD.float())
        scores_BA = query_BD.float() @ block_AD.t() * self.scale
        B = query_BD.shape[0]
        own_B = torch.arange(B, device=x.device) + self._rank * B
        losses_B = F.cross_entropy(scores_BA, own_B, reduction="none")
        reports = ExpertReports.joined(query_reports, block_reports)
        return reports.output(None, {LOSS: (losses_B * weights_B).sum()})
