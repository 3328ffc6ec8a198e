"""Fields that say what a run reads: token files, sequences, tokenizer."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mb_train.config.field import (
    AT_LEAST_0,
    LEFT_OUT,
    OFF,
    POSITIVE,
    SHARE,
    Bounds,
    flag,
    flag_name,
)
from mb_train.untrusted import json_of

# The ways to name data: one flag for all of it, or one for each part.
_AS_ONE = ("data_path", "mock_data", "data_args_path", "per_split_data_args_path")
# Of data that is named part by part nothing is split.
_SPLIT = ("train_data_path", LEFT_OUT)
WAYS = (*_AS_ONE, "train_data_path", "valid_data_path", "test_data_path")
# What each --tokenizer-type is made from: mb_data.tokenizer.megatron.MADE_FROM, which brings NumPy,
# for which --help need not wait; a test holds the two together.
TOKENIZER_TYPES = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "BertWordPieceLowerCase": ("vocab_file",),
    "BertWordPieceCase": ("vocab_file",),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "GPTSentencePieceTokenizer": ("tokenizer_model",),
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "Llama2Tokenizer": ("tokenizer_model",),
    "TikTokenizer": (
        "tokenizer_model", "vocab_size", "tiktoken_pattern", "tiktoken_num_special_tokens",
        "tiktoken_special_tokens",
    ),
    "NullTokenizer": ("vocab_size",),
}  # fmt: skip


def _made_into(name: str, *untyped: Bounds) -> tuple[Any, ...]:
    """What a field that tokenizers are made from needs; `untyped`, if it does without a type."""
    types = (kind for kind, made_from in TOKENIZER_TYPES.items() if name in made_from)
    return ("tokenizer_type", *untyped, *types)


@dataclass(frozen=True, kw_only=True)
class DataFields:
    """Token files, sequences, tokenizer."""

    data_path: list[str] | None = flag(  # noqa: RUF009, a field like the others
        "prefix of .bin and .idx, weights and prefixes by turns, or prefixes alone, which weigh as "
        "many as their tokens; default: Python's own library",
        instead_of=WAYS,
    )
    mock_data: bool = flag(
        "documents that count from 1 to a random number, instead of data: for benchmarks", False,
        instead_of=WAYS,
    )  # fmt: skip
    data_args_path: str | None = flag("file with the words of --data-path", instead_of=WAYS)
    per_split_data_args_path: str | None = flag(
        "JSON file with the data of train, valid and test, each as the words of --data-path",
        instead_of=WAYS,
    )
    split: str = flag(
        "shares of documents for training, validation and test", "969,30,1", on_load="fixed",
        needs=_SPLIT,
    )  # fmt: skip
    split_rounding: str = flag(
        "whose ranges the shares make: Megatron-LM's up to 2023, or cumulative, Megatron Core's "
        "(ours)",
        "shares", choices=("shares", "cumulative"), on_load="fixed", needs=_SPLIT,
    )  # fmt: skip
    train_data_path: list[str] | None = flag(  # noqa: RUF009
        "training data of its own; of a classifier TSV files, or RACE's folders",
        instead_of=_AS_ONE, also=("--train-data",), needs=("per_split_data_args_path", LEFT_OUT),
    )  # fmt: skip
    valid_data_path: list[str] | None = flag(  # noqa: RUF009
        "validation data of its own; of a classifier as for training", also=("--valid-data",)
    )
    test_data_path: list[str] | None = flag("test data of its own")  # noqa: RUF009
    seq_length: int | None = flag(
        "tokens per sample; of the encoder, where there is a decoder too", bounds=POSITIVE,
        on_load="fixed", also=("--encoder-seq-length",), required=True
    )  # fmt: skip
    decoder_seq_length: int | None = flag(
        "tokens per sample of T5's decoder",
        bounds=POSITIVE,
        on_load="fixed",
        needs=("model", "t5"),
    )
    dataloader_type: str = flag(
        "order of samples: single passes once, cyclic shuffles every pass anew", "single",
        choices=("single", "cyclic"), on_load="fixed",
    )  # fmt: skip
    reset_position_ids: bool = flag(
        "count positions anew after every end of a document",
        False,
        on_load="said",
        needs=("model", "gpt"),
    )
    reset_attention_mask: bool = flag(
        "attend within a document only", False, on_load="said", needs=("model", "gpt")
    )
    eod_mask_loss: bool = flag(
        "leave the end of a document out of the loss", False, on_load="said",
        needs=[("model", "gpt"), ("sft", OFF)],
    )  # fmt: skip
    document_packing: str = flag(
        "end_to_end cuts documents at the end of a sample, best_fit keeps whole what fits (ours)",
        "end_to_end", choices=("end_to_end", "best_fit"), on_load="fixed",
    )  # fmt: skip
    sft: bool = flag(
        "learn the answers of conversations that mb-data chats wrote, each whole in a sample",
        False, on_load="fixed", needs=("model", "gpt"),
    )  # fmt: skip
    fim_data: bool = flag(
        "rearrange documents so that their middle comes last", False, on_load="said"
    )
    fim_rate: float = flag(
        "share of documents so rearranged", 0.5, bounds=SHARE, on_load="said", needs=("fim_data",)
    )
    fim_spm_rate: float = flag(
        "share of those that begin with their suffix",
        0.5,
        bounds=SHARE,
        on_load="said",
        needs=("fim_data",),
    )
    fim_prefix_token: str = flag(
        "what marks a document's prefix", "<fim_prefix>", on_load="said", needs=("fim_data",)
    )
    fim_middle_token: str = flag(
        "what marks its middle", "<fim_middle>", on_load="said", needs=("fim_data",)
    )
    fim_suffix_token: str = flag(
        "what marks its suffix", "<fim_suffix>", on_load="said", needs=("fim_data",)
    )
    fim_split_sample: str | None = flag(
        "token between the fragments of a document, each rearranged by itself",
        on_load="said",
        needs=("fim_data",),
    )
    fim_fragment_rate: float = flag(
        "share of the fragments so rearranged",
        0.5,
        bounds=SHARE,
        on_load="said",
        needs=("fim_data",),
    )
    fim_no_prefix: str | None = flag(
        "leave documents and fragments that begin so as they are",
        on_load="said",
        needs=("fim_data",),
    )
    num_workers: int = flag(
        "threads (for BERT, T5 and ICT on a GPU processes) that prepare batches ahead",
        2,
        bounds=AT_LEAST_0,
    )
    data_cache_path: str | None = flag(
        "folder for sample indices; default beside the data", needs=("task", LEFT_OUT)
    )
    # Another tokenizer is refused by its content, wherever its files lie: see `Run.identity`.
    tokenizer: str | None = flag(
        "tokenizer by name or file; default gpt2, or bert-base-uncased for the other models (ours)",
        instead_of=("tokenizer_type", "vocab_file", "merge_file", "tokenizer_model"),
    )
    tokenizer_type: str | None = flag(
        "Megatron's kind of tokenizer, with its files below",
        choices=tuple(TOKENIZER_TYPES),
        # Two of AMD's port; and Core's of conversations, which have been through a template here.
        said_as={
            "DeepSeekV2Tokenizer": "HuggingFaceTokenizer",
            "DeepSeekV3Tokenizer": "HuggingFaceTokenizer",
            "SFTTokenizer": "HuggingFaceTokenizer",
        },
        instead_of=("tokenizer",),
    )
    vocab_file: str | None = flag(
        "vocab.json of a byte-level BPE, or vocab.txt",
        instead_of=("tokenizer", "tokenizer_model"),
        needs=_made_into("vocab_file", LEFT_OUT),
    )
    merge_file: str | None = flag(
        "merges.txt of a byte-level BPE", needs=_made_into("merge_file", LEFT_OUT)
    )
    tokenizer_model: str | None = flag(
        "model file of SentencePiece or the TikTokenizer; a tokenizer.json for the "
        "HuggingFaceTokenizer",
        instead_of=("tokenizer", "vocab_file", "merge_file"),
        needs=_made_into("tokenizer_model", LEFT_OUT),
    )
    vocab_size: int | None = flag(
        "ids of the NullTokenizer or the TikTokenizer, before padding", bounds=POSITIVE,
        needs=_made_into("vocab_size"),
    )  # fmt: skip
    tiktoken_pattern: str | None = flag(
        "how the TikTokenizer cuts words",
        choices=("v1", "v2"),
        needs=_made_into("tiktoken_pattern"),
    )
    tiktoken_num_special_tokens: int = flag(
        "special tokens of the TikTokenizer",
        1000,
        bounds=AT_LEAST_0,
        needs=_made_into("tiktoken_num_special_tokens"),
    )
    tiktoken_special_tokens: list[str] | None = flag(  # noqa: RUF009
        "their names",
        also=("--tokenizer-special-tokens",),
        needs=_made_into("tiktoken_special_tokens"),
    )
    eod_token: str | None = flag(
        "special token that ends documents, as mb-data preprocess was told; default the "
        "tokenizer's own (ours)", on_load="fixed", needs=("model", "gpt"),
    )  # fmt: skip
    vocab_extra_ids: int = flag(
        "sentinel tokens to append, as T5 needs them", 0, bounds=AT_LEAST_0, on_load="fixed"
    )

    @property
    def packs_whole(self) -> bool:
        """Samples are of whole documents."""
        return self.document_packing == "best_fit"

    def data_words(self) -> dict[str, list[str] | None]:
        """What names the data of "train", "valid" and "test", or of "", which is split into them.

        Empty if nothing does.

        Raises:
            ValueError: a file that does not hold what its flag says.
            OSError: no such file.
        """
        if self.per_split_data_args_path is not None:
            return _read_parts(self.per_split_data_args_path)
        if self.train_data_path is not None:
            parts = self.train_data_path, self.valid_data_path, self.test_data_path
            return dict(zip(("train", "valid", "test"), parts, strict=True))
        if self.data_args_path is not None:
            return {"": _read_words(self.data_args_path)}
        return {} if self.data_path is None else {"": self.data_path}

    def check_data(self) -> None:
        """Raise ValueError for files that exclude each other, or are not what is read."""
        if self.sft:
            self._check_conversations()
        given = [name for name in WAYS if getattr(self, name)]
        parts = [name for name in given if name not in _AS_ONE]
        if len(given) > max(len(parts), 1):
            named = " and ".join(map(flag_name, given))
            raise ValueError(f"Expected one of the ways to name data, got {named}.")
        if parts and "train_data_path" not in parts:
            raise ValueError(f"Expected --train-data-path with {flag_name(parts[0])}, got none.")
        if self.merge_file is not None and self.vocab_file is None:
            raise ValueError("Expected --vocab-file with --merge-file, got none.")
        both = self.vocab_file is not None and self.tokenizer_model is not None
        if both and self.tokenizer_type is None:
            raise ValueError(
                "Expected --tokenizer-type with --vocab-file and --tokenizer-model, which are of "
                "different ones, got none. Say it, or leave one file out."
            )
        files = self.tokenizer_type or self.vocab_file or self.tokenizer_model
        if files is not None and self.tokenizer is not None:
            raise ValueError(
                f"Expected --tokenizer or Megatron's tokenizer flags, got {self.tokenizer!r} and "
                f"{files!r}."
            )

    def _check_conversations(self) -> None:
        for words, given in {"--fim-data": self.fim_data, "--mock-data": self.mock_data}.items():
            if given:
                raise ValueError(f"Expected conversations with --sft, got {words}. Leave one out.")
        for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
            for path in getattr(self, name) or ():
                if path.endswith((".jsonl", ".json", ".parquet")):
                    raise ValueError(
                        f"Expected {flag_name(name)} to be what mb-data chats wrote, with --sft, "
                        f"got {path}. Run mb-data chats --input {shlex.quote(path)} --tokenizer "
                        "FOLDER --output-prefix NAME first, and give NAME_messages_document."
                    )

    def check_blends(self) -> None:
        """Raise ValueError where token files are not prefixes, or weights and prefixes by turns.

        So it does for shares that are no numbers.
        """
        from mb_data.samples.split import parse_split

        try:
            parse_split(self.split, 0)
        except ValueError as error:
            raise ValueError(f"--{error}.") from error
        for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
            _check_blend(name, getattr(self, name))


def _read_words(path: str) -> list[str]:
    """The words of `--data-path` from a file."""
    try:
        words = Path(path).read_text("utf-8").split()
    except UnicodeDecodeError as error:
        raise ValueError(f"Expected {path} to be text, got {error}.") from error
    if not words:
        raise ValueError(f"Expected data paths in {path}, got an empty file.")
    _check_blend("data_args_path", words)
    return words


def _read_parts(path: str) -> dict[str, list[str] | None]:
    """The lists of a JSON file by their part; an empty one is none."""
    names = ("train", "valid", "test")
    try:
        parts = json_of(Path(path).read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"Expected JSON in {path}, got {error}.") from error
    if not isinstance(parts, dict) or not all(isinstance(parts.get(n), list) for n in names):
        raise ValueError(f"Expected lists of train, valid and test in {path}.")
    words = {name: [str(word) for word in parts[name]] or None for name in names}
    if words["train"] is None:
        raise ValueError(f"Expected data of train in {path}, got none.")
    for name in names:
        _check_blend("per_split_data_args_path", words[name])
    return words


def _check_blend(name: str, paths: list[str] | None) -> None:
    """Raise ValueError for what is neither prefixes alone nor weights and prefixes by turns."""
    # Here: it brings NumPy, for which --help need not wait.
    from mb_data.samples.parts import parse_blend

    try:
        if paths:
            parse_blend(paths)
    except ValueError as error:
        raise ValueError(f"{flag_name(name)}: {error}.") from error
