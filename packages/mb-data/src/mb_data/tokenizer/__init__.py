"""Tokenizers: by name or file, one interface, ids that never depend on the engine."""

from mb_data.tokenizer.base import Tokenizer as Tokenizer
from mb_data.tokenizer.base import padded_vocab_size as padded_vocab_size
from mb_data.tokenizer.export import hugging_face_files as hugging_face_files
from mb_data.tokenizer.load import load_tokenizer as load_tokenizer
from mb_data.tokenizer.megatron import megatron_tokenizer as megatron_tokenizer
