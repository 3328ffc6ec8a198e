"""T5 samples: text with runs of words replaced by sentinels, and the runs to be generated.

    encoder   Thank you <x> me to your party <y> week .
    decoder   [BOS] <x> for inviting <y> last
    labels    <x> for inviting <y> last [EOS]

Samples and their order for a seed are Megatron-LM's, except those on which Megatron fails: where it
would run out of sentinels or of decoder positions, fewer runs are hidden here. Without a [BOS], as
with T5's own tokenizer, the decoder begins with padding. A sample is a function of (seed, index)
alone.
"""

from __future__ import annotations

import math
import os
from functools import partial
from itertools import chain
from typing import Unpack

import numpy as np
import numpy.typing as npt

from mb_data.indexed_dataset import IndexedDataset
from mb_data.mersenne import check_seed
from mb_data.samples.masking import (
    T5_MEAN_SPAN,
    MaskingTokenizer,
    Vocabulary,
    check_share,
    mask_t5,
    ones,
    pad_to,
    visible,
)
from mb_data.samples.parts import DataPaths, Parts, PartsOptions, build_parts
from mb_data.samples.sentence_index import SentenceSamples, count_documents, sample_mapping

ADDED = 2  # what Megatron leaves free in the encoder
SHORTEST = 3  # positions of a decoder with one hidden token


class T5Dataset(SentenceSamples):
    """Span-corrupted samples from a range of documents that were split into sentences.

    Args:
        indexed: sentences as sequences, documents as documents.
        documents: which to use.
        vocabulary: see ``Vocabulary.for_t5``.
        encoder_seq_length: S, tokens of the encoder with padding.
        decoder_seq_length: R, tokens of the decoder with padding.
        num_samples: how many must be there at least.
        seed: of the order and of the samples.
        mask_prob: share of the tokens to hide.
        short_seq_prob: share of samples with a shorter target.
        mean_span: words of a hidden run in the mean, before runs of more than 10 are cut to 10.
        share_decoder: samples are to share sequences: none takes more of the decoder than its text
            may take of the encoder, so that what fits together in one fits in the other.
        cache_dir: where the index is kept; ``<prefix>_index/`` if None.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: range,
        *,
        vocabulary: Vocabulary,
        encoder_seq_length: int,
        decoder_seq_length: int,
        num_samples: int,
        seed: int,
        mask_prob: float = 0.15,
        short_seq_prob: float = 0.1,
        mean_span: float = T5_MEAN_SPAN,
        share_decoder: bool = False,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if not 1 <= mean_span < math.inf:
            raise ValueError(f"mean_span must be at least 1 word, and finite, got {mean_span}")
        if decoder_seq_length < 1:
            raise ValueError(f"decoder_seq_length must be at least 1, got {decoder_seq_length}")
        indexed.expect_random_access()
        self.indexed = indexed
        self.vocabulary = vocabulary
        self.encoder_seq_length = encoder_seq_length
        self.decoder_seq_length = decoder_seq_length
        self.seed = check_seed(seed)
        self.mask_prob = check_share(mask_prob, encoder_seq_length - ADDED)
        self.mean_span, self.share_decoder = mean_span, share_decoder
        room = int(self._decoder_room(encoder_seq_length - ADDED))
        if mask_prob and encoder_seq_length - ADDED > 1 and room < SHORTEST:
            shared = f", {room} of them to a text" if share_decoder else ""
            raise ValueError(
                f"decoder_seq_length {decoder_seq_length}{shared}: a token to begin with, a "
                f"sentinel and a hidden token need {SHORTEST}, so none would be hidden; raise it"
            )
        self._index = sample_mapping(
            indexed,
            documents,
            max_length=encoder_seq_length - ADDED,
            short_seq_prob=short_seq_prob,
            min_sentences=1,
            num_samples=num_samples,
            seed=self.seed,
            cache_dir=cache_dir,
        )

    def lengths(self) -> npt.NDArray[np.int64]:
        """[samples, 2]: tokens in the encoder and in the decoder, at most; no sample is read."""
        text = self._text_lengths()
        return np.stack([text, self._decoder_room(text)], axis=1)

    def _decoder_room(self, text: npt.NDArray[np.int64] | int) -> npt.NDArray[np.int64]:
        """Positions of the decoder for texts of so many tokens, its first token's included."""
        if not self.share_decoder:
            return np.full_like(text, self.decoder_seq_length)
        return np.maximum(text * self.decoder_seq_length // self.encoder_seq_length, 1)

    def __getitem__(self, index: int) -> dict[str, npt.NDArray[np.int64] | int]:
        """Sample ``index``.

        Returns:
            ``text_enc`` [S], ``text_dec`` [R], ``labels`` [R] (-1 on padding), ``loss_mask`` [R],
            ``enc_mask`` [S] and ``dec_mask`` [R] (1 on tokens; attention masks are their outer
            products, causal in the decoder), all int64; ``truncated``, 0 or 1.
        """
        (start, end, target), rng = self._row(index)
        text = list(chain.from_iterable(self.indexed[i].tolist() for i in range(start, end)))
        tokens = text[:target]
        vocabulary = self.vocabulary
        spans = mask_t5(
            tokens,
            vocabulary,
            rng,
            probability=self.mask_prob,
            max_predictions=self.mask_prob * target,
            max_target=int(self._decoder_room(len(tokens))) - 1,
            mean_span=self.mean_span,
        )
        pieces = visible(tokens, spans)
        encoder = list(next(pieces))
        generated: list[int] = []
        for sentinel, span, piece in zip(vocabulary.sentinels, spans, pieces, strict=False):
            encoder += [sentinel, *piece]
            generated += [sentinel, *(tokens[position] for position in span)]
        decoder, labels = [vocabulary.bos, *generated], [*generated, vocabulary.eos]
        filled = ones(range(len(decoder)), self.decoder_seq_length)
        return {
            "text_enc": pad_to(encoder, self.encoder_seq_length, vocabulary.pad),
            "text_dec": pad_to(decoder, self.decoder_seq_length, vocabulary.pad),
            "labels": pad_to(labels, self.decoder_seq_length, -1),
            "loss_mask": filled,
            "enc_mask": ones(range(len(encoder)), self.encoder_seq_length),
            "dec_mask": filled.copy(),
            "truncated": int(len(text) > target),
        }


def build_t5_datasets(
    prefix: DataPaths,
    *,
    tokenizer: MaskingTokenizer,
    encoder_seq_length: int,
    decoder_seq_length: int,
    seed: int,
    mask_prob: float = 0.15,
    short_seq_prob: float = 0.1,
    mean_span: float = T5_MEAN_SPAN,
    share_decoder: bool = False,
    **parts: Unpack[PartsOptions],
) -> Parts[T5Dataset]:
    """Train, validation and test datasets; see ``build_gpt_datasets`` and ``T5Dataset``.

    Raises:
        ValueError: the tokenizer has no [PAD], [EOS] or sentinels, or no document is fit.
    """
    vocabulary = Vocabulary.for_t5(tokenizer)
    make = partial(
        T5Dataset,
        vocabulary=vocabulary,
        encoder_seq_length=encoder_seq_length,
        decoder_seq_length=decoder_seq_length,
        seed=seed,
        mask_prob=mask_prob,
        short_seq_prob=short_seq_prob,
        mean_span=mean_span,
        share_decoder=share_decoder,
    )
    return build_parts(prefix, make, count=count_documents, **parts)
