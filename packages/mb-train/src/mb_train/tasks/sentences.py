"""What BERT, T5, ICT and the classifier share: samples of sentences, with padding."""

from __future__ import annotations

from typing import Any

from mb_train.config import TrainConfig
from mb_train.tasks.architecture import transformer_config


class SentenceTask:
    """The part of a `base.Task` that is alike.

    Args:
        config: the run.
        tokenizer: with the special tokens of its samples.
        vocab_size: padded.
        leave_out: batches say which places are padding, for blocks to leave out.

    Raises:
        ValueError: an activation or experts that mb_layers refuses.
    """

    sentences = True
    tells_more = True

    def __init__(
        self, config: TrainConfig, tokenizer: Any, *, vocab_size: int, leave_out: bool = False
    ) -> None:
        self.model_config = transformer_config(config, vocab_size)
        self._config, self._tokenizer, self._leave_out = config, tokenizer, leave_out
