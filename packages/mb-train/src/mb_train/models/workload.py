"""What a model computes of one sample: enough to count its arithmetic and its activations."""

from __future__ import annotations

from typing import NamedTuple

from mb_train.models.config import TransformerConfig


class Pass(NamedTuple):
    """A sample's way through a stack of blocks.

    blocks: their configuration; length: tokens of a sequence.
    sequences: of a sample.
    source: tokens of the encoder's that each sequence attends to; 0 for blocks without cross
        attention.
    """

    blocks: TransformerConfig
    length: int
    sequences: int = 1
    source: int = 0

    @property
    def tokens(self) -> int:
        """Of a sample, padding included."""
        return self.sequences * self.length


class Head(NamedTuple):
    """A map from hidden states at so many places of a sample to so many numbers for each."""

    places: int
    outputs: int


class Workload(NamedTuple):
    """What is computed of one sample.

    passes: through stacks of blocks, in the order of the model's layers.
    heads: on what comes out of them.
    behind: through modules for further tokens (`models.mtp`), which come where the model ends and
        are none of the layers that the stages of a pipeline share.
    """

    passes: tuple[Pass, ...]
    heads: tuple[Head, ...] = ()
    behind: tuple[Pass, ...] = ()

    @property
    def tokens(self) -> int:
        """Of a sample, padding included, in all stacks together."""
        return sum(each.tokens for each in self.passes)

    @property
    def layers(self) -> int:
        """Blocks of all stacks."""
        return sum(each.blocks.num_layers for each in self.passes)
