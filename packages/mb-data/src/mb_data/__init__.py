"""Text to tokens to training samples, in Megatron's file formats, without torch."""

# The public API.
from mb_data.indexed_dataset import IndexedDataset as IndexedDataset
from mb_data.indexed_dataset import IndexedDatasetBuilder as IndexedDatasetBuilder

__version__ = "0.1.0"
