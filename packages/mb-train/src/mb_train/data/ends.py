"""Whether data sets have the ends of documents that flags of a run look for.

Where a document ends is told by a token alone. In data that was made without it, or with another,
documents run into each other, and what the flags ask for does not happen.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from mb_data import IndexedDataset, Tokenizer

from mb_train.config import TrainConfig

# Documents of a data set that are looked at, spread over it, and the last tokens of each: one that
# was packed elsewhere has ends within.
_DOCUMENTS, _TOKENS = 16, 4096


def without_ends(config: TrainConfig, prefixes: Iterable[str], tokenizer: Tokenizer) -> list[str]:
    """A line for data sets in which nothing was found that ends a document, if it matters.

    Args:
        prefixes: the data sets.
        tokenizer: the run's, whose `eod` ends documents.
    """
    asking = {
        "--reset-attention-mask": config.reset_attention_mask,
        "--reset-position-ids": config.reset_position_ids,
        "--eod-mask-loss": config.eod_mask_loss,
        "--document-packing best_fit": config.packs_whole,
        "--fim-data": config.fim_data,
    }
    flags = [words for words, given in asking.items() if given]
    if not flags or config.model != "gpt" or config.sft:
        return []
    eod = tokenizer.eod
    found = [prefix for prefix in dict.fromkeys(prefixes) if not _has_ends(prefix, eod)]
    if not found:
        return []
    return [
        f"data: documents of {', '.join(found)} do not end with {eod}, this run's end-of-document "
        f"token, by which {', '.join(flags)} would tell them apart. mb-data preprocess "
        "--append-eod ends documents with it; --eod-token names the one that data has"
    ]


def _has_ends(prefix: str, eod: int) -> bool:
    data = IndexedDataset(prefix)
    (filled,) = np.nonzero(data.sizes)
    if not len(filled):
        return True
    spread = np.linspace(0, len(filled) - 1, min(len(filled), _DOCUMENTS)).astype(np.int64)
    for index in filled[spread].tolist():
        size = int(data.sizes[index])
        if (data.get(index, max(size - _TOKENS, 0)) == eod).any():
            return True
    return False
