"""The tokenizer of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mb_train.config import TrainConfig, flag_name

if TYPE_CHECKING:
    from mb_data import Tokenizer


def load_tokenizer(config: TrainConfig) -> Tokenizer:
    """The one of `--tokenizer`, or that of Megatron's flags; without either its default.

    Raises:
        ValueError: an unknown name, a file that is no vocabulary, or a file that is missing.
        OSError: no such file.
    """
    try:
        return _load(config)
    except ValueError as error:
        names = ("tokenizer", "tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
        given = [n for n in (*names, "vocab_extra_ids") if getattr(config, n)]
        said = " ".join(f"{flag_name(n)} {getattr(config, n)}" for n in given)
        raise ValueError(f"{said}: {error}") from error


def _load(config: TrainConfig) -> Tokenizer:
    import mb_data

    extra = config.vocab_extra_ids
    kind = "GPT2BPETokenizer" if config.model == "gpt" else "BertWordPieceLowerCase"
    if config.tokenizer is not None:
        return mb_data.load_tokenizer(config.tokenizer, num_extra_ids=extra)
    if config.tokenizer_model is not None:
        kind = "SentencePieceTokenizer"
    return mb_data.megatron_tokenizer(
        config.tokenizer_type or kind,
        vocab_file=config.vocab_file,
        merge_file=config.merge_file,
        tokenizer_model=config.tokenizer_model,
        vocab_size=config.vocab_size,
        tiktoken_pattern=config.tiktoken_pattern,
        tiktoken_num_special_tokens=config.tiktoken_num_special_tokens,
        tiktoken_special_tokens=config.tiktoken_special_tokens,
        num_extra_ids=extra,
    )
