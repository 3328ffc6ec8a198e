"""A BERT with a head that tells of which class a text, or a pair of texts, is.

Or which of a sample's texts is the right one, of which each then has one score.

Letters: A samples, B their texts (A, or C A), S tokens of a text, N its segments (text and
padding), D hidden, C classes, or texts to choose from.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mb_train.models.bert import Bert
from mb_train.models.config import TransformerConfig
from mb_train.models.linear import Linear
from mb_train.models.output import ModelOutput

LOSS = "classification loss"


class Classifier(nn.Module):
    """A linear map of what BERT's pooler makes of the first token, behind a dropout; or a stage.

    Args:
        config: of the BERT.
        classes: C; 1 to choose among texts.
        compute_dtype: dtype of the activations; parameters are made in fp32.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        classes: int,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.bert = Bert(config, compute_dtype=compute_dtype)
        self.bert.lm_head = self.bert.order_head = None
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.head: Linear | None = Linear(config.hidden_size, classes, std=config.init_std)

    def keep(self, layers: range, *, first: bool, last: bool) -> None:
        """Cut the model down to a pipeline stage: these blocks, and what the ends need."""
        self.bert.keep(layers, first=first, last=last)
        if not last:
            self.head = None

    @torch.no_grad()
    def begin_from(self, bert: Bert) -> None:
        """Take a BERT's weights but its heads'; the pooler's where it was trained with one.

        Raises:
            RuntimeError: a BERT of other sizes.
        """
        own = self.bert.state_dict()
        kept = {name: tensor for name, tensor in bert.state_dict().items() if name in own}
        fresh = {name: tensor for name, tensor in own.items() if name.startswith("pooler.")}
        self.bert.load_state_dict(fresh | kept)

    def forward(
        self,
        x: Tensor,
        *,
        token_types_BS: Tensor,
        ends_BN: Tensor,
        valid_BS: Tensor,
        labels_A: Tensor,
        weights_A: Tensor,
        kept_T: Tensor | None = None,
    ) -> ModelOutput:
        """The loss of telling each sample's class.

        Args:
            x, token_types_BS, ends_BN, valid_BS, kept_T: as `Bert.forward`'s, the texts of a sample
                one behind the other.
            labels_A: int64 in [0, C); weights_A: fp32 weight of each sample's loss in the sum.
        """
        x_BSD, reports = self.bert.encode(x, token_types_BS, ends_BN, valid_BS, kept_T)
        if self.head is None:
            return reports.output(x_BSD, {})
        losses_A = F.cross_entropy(self.scores(x_BSD, len(labels_A)), labels_A, reduction="none")
        return reports.output(None, {LOSS: (losses_A * weights_A).sum()})

    def scores(self, x_BSD: Tensor, samples: int) -> Tensor:
        """Scores of the classes from encoded texts, [A, C] fp32."""
        assert self.bert.pooler is not None
        assert self.head is not None
        scores = self.head(self.dropout(self.bert.pooler(x_BSD[:, 0])))
        return scores.float().view(samples, -1)
