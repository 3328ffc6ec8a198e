"""Text to tokens to training samples, in Megatron's file formats, without torch.

- Text to files: `preprocess`, `Summary`, `Progress`, `WorkerDiedError`, `write_sample_corpus`,
  `write_documentation_corpus`; conversations: `preprocess_chats`, `ChatSummary`, `ChatTokenizer`.
- Tokenizers: `load_tokenizer`, `megatron_tokenizer`, `Tokenizer`, `padded_vocab_size`,
  `hugging_face_files`.
- Files: `IndexedDataset`, `IndexedDatasetBuilder`; `mb_data.maintenance` joins and checks them.
- Samples: `build_gpt_datasets`, `GPTDataset`, `build_bert_datasets`, `BertDataset`,
  `build_t5_datasets`, `T5Dataset`, `build_ict_datasets`, `ICTDataset`, `build_packed_datasets`,
  `PackedDataset`, `PackedSamples`, `BlendedDataset`, `parse_split`, `build_conversation_datasets`,
  `ConversationDataset`, `ConversationSample`.
- Samples from other processes: `SampleReaders`.
- Documents in a sample: `document_layout`, `DocumentLayout`, `FillInTheMiddle`, `MiddleTokens`.
- Order: `SequentialSampler`, `CyclicSampler`, `BatchRampup`.
"""

# The public API.
from mb_data.chat.preprocess import ChatSummary as ChatSummary
from mb_data.chat.preprocess import preprocess_chats as preprocess_chats
from mb_data.chat.tokens import ChatTokenizer as ChatTokenizer
from mb_data.corpora.sample import write_documentation_corpus as write_documentation_corpus
from mb_data.corpora.sample import write_sample_corpus as write_sample_corpus
from mb_data.dataset_builder import IndexedDatasetBuilder as IndexedDatasetBuilder
from mb_data.indexed_dataset import IndexedDataset as IndexedDataset
from mb_data.preprocess import Summary as Summary
from mb_data.preprocess import preprocess as preprocess
from mb_data.sampler import BatchRampup as BatchRampup
from mb_data.sampler import CyclicSampler as CyclicSampler
from mb_data.sampler import SequentialSampler as SequentialSampler
from mb_data.samples.bert import BertDataset as BertDataset
from mb_data.samples.bert import build_bert_datasets as build_bert_datasets
from mb_data.samples.blend import BlendedDataset as BlendedDataset
from mb_data.samples.conversations import ConversationDataset as ConversationDataset
from mb_data.samples.conversations import ConversationSample as ConversationSample
from mb_data.samples.conversations import (
    build_conversation_datasets as build_conversation_datasets,
)
from mb_data.samples.document_layout import DocumentLayout as DocumentLayout
from mb_data.samples.document_layout import document_layout as document_layout
from mb_data.samples.fill_in_the_middle import FillInTheMiddle as FillInTheMiddle
from mb_data.samples.fill_in_the_middle import MiddleTokens as MiddleTokens
from mb_data.samples.gpt import GPTDataset as GPTDataset
from mb_data.samples.gpt import build_gpt_datasets as build_gpt_datasets
from mb_data.samples.ict import ICTDataset as ICTDataset
from mb_data.samples.ict import build_ict_datasets as build_ict_datasets
from mb_data.samples.packed_documents import PackedDataset as PackedDataset
from mb_data.samples.packed_documents import build_packed_datasets as build_packed_datasets
from mb_data.samples.packed_samples import PackedSamples as PackedSamples
from mb_data.samples.readers import SampleReaders as SampleReaders
from mb_data.samples.split import parse_split as parse_split
from mb_data.samples.t5 import T5Dataset as T5Dataset
from mb_data.samples.t5 import build_t5_datasets as build_t5_datasets
from mb_data.system import WorkerDiedError as WorkerDiedError
from mb_data.text.progress import Progress as Progress
from mb_data.tokenizer import Tokenizer as Tokenizer
from mb_data.tokenizer import hugging_face_files as hugging_face_files
from mb_data.tokenizer import load_tokenizer as load_tokenizer
from mb_data.tokenizer import megatron_tokenizer as megatron_tokenizer
from mb_data.tokenizer import padded_vocab_size as padded_vocab_size

__version__ = "0.1.0"
