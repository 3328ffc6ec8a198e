"""Where documents lie in packed samples, for attention that must not cross them.

A packed sample holds pieces of several documents, each closed by an end-of-document token. Masks
of S × S entries keep them apart on paper, but fused attention kernels ignore such masks. Kernels
for variable lengths take the cumulative lengths of the documents instead: n + 1 numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class DocumentLayout(NamedTuple):
    """The documents of a batch laid end to end, B·S tokens in all.

    Attributes:
        cumulative_lengths: int32 [documents + 1], from 0 to B·S: document i is tokens
            ``cumulative_lengths[i]:cumulative_lengths[i + 1]`` of the flattened batch.
        max_length: tokens of the longest one.
        position_ids: int64, of the shape of the tokens: counted from the start of each document
            (Megatron's ``--reset-position-ids``).
        loss_mask: float32, of the shape of the tokens: 0 where the input is the end-of-document
            token, whose next token belongs to another document (``--eod-mask-loss``), else 1.
    """

    cumulative_lengths: npt.NDArray[np.int32]
    max_length: int
    position_ids: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.float32]


def document_layout(tokens_BS: npt.NDArray[np.integer], eod: int) -> DocumentLayout:
    """Find the documents in input tokens [B, S] or [S] by their end-of-document token.

    The token ends its document, the next one starts another; a row of the batch starts and ends
    one in any case. Pass inputs (the first S of a sample's S + 1 tokens).

    Raises ValueError for tokens of another number of dimensions.
    """
    tokens = np.asarray(tokens_BS)
    if tokens.ndim not in (1, 2) or tokens.size == 0:
        raise ValueError(f"expected tokens of shape [S] or [B, S], got {tokens.shape}")
    ends = tokens == eod
    loss_mask = (~ends).astype(np.float32)
    ends[..., -1] = True
    cumulative = np.concatenate(([0], np.flatnonzero(ends) + 1))
    lengths = np.diff(cumulative)
    positions = np.arange(tokens.size) - np.repeat(cumulative[:-1], lengths)
    return DocumentLayout(
        cumulative_lengths=cumulative.astype(np.int32),
        max_length=int(lengths.max()),
        position_ids=positions.reshape(tokens.shape),
        loss_mask=loss_mask,
    )
