"""The rows of a model's vocabulary: as many as its tokenizer has tokens, and some to pad them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mb_train.config import TrainConfig
from mb_train.data.tokenizer_files import bert_checkpoint, copies_for
from mb_train.data.tokenizers import load_tokenizer
from mb_train.folder.run_folder import read_saved_run

if TYPE_CHECKING:
    from mb_data import Tokenizer

    from mb_train.folder.start import Start


def vocabulary_of(config: TrainConfig, start: Start | None, *, ranks: int) -> tuple[Tokenizer, int]:
    """The tokenizer that a run begins with, and V, the rows that its model has for it.

    Args:
        start: what it goes on from.
        ranks: tensor-parallel ones, which share the rows.

    Raises:
        ValueError: see `load_tokenizer` and `vocabulary_rows`.
        OSError: no such file.
    """
    tokenizer = load_tokenizer(config, copies_for(config, start))
    saved = _saved_rows(config, start)
    return tokenizer, vocabulary_rows(config, tokenizer.vocab_size, ranks=ranks, saved=saved)


def vocabulary_rows(config: TrainConfig, tokens: int, *, ranks: int, saved: int = 0) -> int:
    """V: as the flags say, or as a checkpoint has it, if tensor-parallel ranks can share that.

    Args:
        tokens: of the tokenizer.
        saved: rows of the checkpoint that weights come from; 0 for none.

    Raises:
        ValueError: they cannot; --padded-vocab-size is less than the tokens.
    """
    if saved < tokens:
        return _asked_rows(config, tokens, ranks=ranks)
    if saved % ranks:
        raise ValueError(
            f"Expected a vocabulary that {ranks} tensor-parallel ranks can share, got one of "
            f"{saved:,} rows in the checkpoint. mb-train convert makes more of them, of a Hugging "
            "Face folder: --make-vocab-size-divisible-by 128."
        )
    return saved


def _asked_rows(config: TrainConfig, tokens: int, *, ranks: int) -> int:
    rows = config.padded_vocab_size
    if rows is None:
        import mb_data

        multiple = config.make_vocab_size_divisible_by
        return mb_data.padded_vocab_size(tokens, divisible_by=multiple, tensor_parallel=ranks)
    if rows < tokens or rows % ranks:
        shared = f", a multiple of --tensor-model-parallel-size {ranks}" if ranks > 1 else ""
        raise ValueError(
            f"Expected --padded-vocab-size of at least {tokens}, the tokens of the "
            f"tokenizer{shared}, got {rows}."
        )
    return rows


def _saved_rows(config: TrainConfig, start: Start | None) -> int:
    """Rows of the vocabulary whose weights a run begins with: its own of before, or those of the
    BERT of `--bert-load`. 0: of none, or of a folder of Hugging Face's, which gets what is asked.
    """
    saved = None if start is None else start.saved
    if saved is None and (checkpoint := bert_checkpoint(config)) is not None:
        saved = read_saved_run(checkpoint)
    return 0 if saved is None else saved.vocab_rows
