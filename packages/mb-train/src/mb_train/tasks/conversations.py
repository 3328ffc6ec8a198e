"""Learning to answer: a GPT on conversations, of whose tokens the answers alone count."""

from __future__ import annotations

from typing import Any

import mb_data
import numpy as np

from mb_train.tasks.base import DataPaths, Datasets, Wanted
from mb_train.tasks.gpt import GPTTask, positions_of


class ConversationTask(GPTTask):
    """A `GPTTask` on what `mb-data chats` wrote; see `mb_data.build_conversation_datasets`.

    Whole conversations share a sample. None sees another: attention and positions begin anew with
    each, and with what fills the sample up.
    """

    def build_datasets(self, paths: DataPaths, num_samples: Wanted) -> Datasets:
        """Samples of at most S + 1 tokens of whole conversations."""
        return mb_data.build_conversation_datasets(
            paths,
            eod=self._eod,
            seq_length=self._length,
            num_samples=num_samples,
            **self._config.dataset_arguments(),
        )

    def _whole(self, samples: list[Any]) -> dict[str, np.ndarray]:
        """A batch of whole sequences; `weights_BS` is 1 where the next token is of an answer."""
        text = np.stack([sample.tokens for sample in samples])
        learned = np.stack([sample.learned for sample in samples])
        ends_BS = np.zeros((len(samples), text.shape[1] - 1), bool)
        for ends_S, sample in zip(ends_BS, samples, strict=True):
            last = np.cumsum(sample.lengths) - 1
            ends_S[last[last < len(ends_S)]] = True
        return {
            "tokens_BS": text[:, :-1],
            "labels_BS": text[:, 1:],
            "weights_BS": learned[:, 1:].astype(np.float32),
            **self._apart(ends_BS),
            "positions_BS": positions_of(ends_BS),
        }
