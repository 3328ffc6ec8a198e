"""Writing the spans that were taken out of a text: T5."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any

import mb_data
import numpy as np
import torch
from mb_parallel.tensor_parallel import Plan
from torch import Tensor

from mb_train.config import TrainConfig, whole
from mb_train.models.segments import Segments
from mb_train.models.t5 import T5
from mb_train.models.tensor_plans import t5_plan
from mb_train.models.workload import Head, Pass, Workload
from mb_train.tasks.base import Borders, DataPaths, Dataset, Datasets, Wanted
from mb_train.tasks.collate import batches_of, kept_places, segment_ends
from mb_train.tasks.packed import laid, lengths_of, pack, row_of
from mb_train.tasks.sentences import SentenceTask

_READ, _WRITTEN = "enc_mask", "dec_mask"  # of a sample: what is not padding


class T5Task(SentenceTask):
    """See `base.Task`; a tokenizer with [PAD], [EOS] and sentinels (`--vocab-extra-ids`)."""

    def __init__(self, config: TrainConfig, *args: Any, **how: Any) -> None:
        super().__init__(config, *args, **how)
        self.loss_weights = {"lm loss": "weights_BR"}
        encoder = self.model_config
        self._decoder_moe_layers = tuple(map(config.has_experts, range(config.decoder_layers)))
        decoder = replace(
            encoder, num_layers=config.decoder_layers, moe_layers=self._decoder_moe_layers
        )
        self._rooms = [whole(config.seq_length), whole(config.decoder_seq_length)]
        read, written = self._rooms
        self.workload = Workload(
            (Pass(encoder, read), Pass(decoder, written, source=read)),
            (Head(written, encoder.vocab_size),),
        )
        self._most = config.samples_per_sequence

    def build_model(self, *, compute_dtype: torch.dtype) -> T5:
        """A T5 with fresh weights."""
        config = self._config
        return T5(
            self.model_config,
            decoder_layers=config.decoder_layers,
            decoder_moe_layers=self._decoder_moe_layers,
            scale_head=config.scale_head,
            compute_dtype=compute_dtype,
        )

    def borders(self, runs: Sequence[range]) -> Borders:
        """The encoder's states cross every border, the decoder's those behind its first layer."""
        config, last = self.model_config, len(runs) - 1
        first = config.num_layers  # of the decoder
        begins = next(stage for stage, layers in enumerate(runs) if first in layers)
        shared = {"embedding.tokens.weight": {begins, last} if config.tie_embeddings else {begins}}
        if config.positions == "learned":
            shared["embedding.positions.weight"] = {begins}
        if config.norms == "sum":
            shared["embedding.norm.weight"] = {begins}
            if config.norm == "layernorm":
                shared["embedding.norm.bias"] = {begins}
        if config.positions == "relative":
            encoders = {stage for stage, run in enumerate(runs) if run.start < first}
            decoders = {stage for stage, run in enumerate(runs) if run.stop > first}
            shared |= {"encoder_bias.table.weight": encoders, "decoder_bias.table.weight": decoders}
        tied: dict[str, dict[int, str]] = {}
        for name, stages in shared.items():
            if copies := {stage: name for stage in sorted(stages) if stage > 0}:
                tied[name] = copies
        streams = [
            ["tokens_BS"] if layers.stop <= first else ["decoder_tokens_BR", "tokens_BS"]
            for layers in runs[:-1]
        ]
        return Borders(tied, streams)

    def tensor_plan(self) -> Plan:
        """See `models.tensor_plans`."""
        return t5_plan(self.model_config)

    def build_datasets(self, paths: DataPaths, num_samples: Wanted) -> Datasets:
        """Megatron's samples over files that were split into sentences, packed if asked for."""
        build = partial(self._build_datasets, paths)
        return pack(build, num_samples, rooms=self._rooms, most=self._most)

    def _build_datasets(self, paths: DataPaths, num_samples: Wanted) -> Datasets:
        config, (encoder, decoder) = self._config, self._rooms
        return mb_data.build_t5_datasets(
            paths,
            tokenizer=self._tokenizer,
            encoder_seq_length=encoder,
            decoder_seq_length=decoder,
            num_samples=num_samples,
            mask_prob=config.mask_prob,
            mean_span=config.mean_noise_span_length,
            short_seq_prob=config.short_seq_prob,
            share_decoder=self._most > 1,
            **config.dataset_arguments(),
        )

    def collate(self, samples: list[Any]) -> dict[str, np.ndarray]:
        """See `T5.forward`.

        Args:
            samples: for each pair of sequences a sample, or a list of those that it is packed with.
        """
        rows = list(map(row_of, samples))
        read, written = (lengths_of(rows, mask, self._most) for mask in (_READ, _WRITTEN))
        # Padding of the decoder attends to the encoder's, or to nothing where it has none.
        ends_BN, decoder_ends_BN = segment_ends(*zip((read, written), self._rooms, strict=True))
        batch = {
            "tokens_BS": laid(rows, "text_enc", _READ),
            "ends_BN": ends_BN,
            "valid_BS": laid(rows, _READ, _READ),
            "decoder_tokens_BR": laid(rows, "text_dec", _WRITTEN),
            "decoder_ends_BN": decoder_ends_BN,
            "decoder_valid_BR": laid(rows, _WRITTEN, _WRITTEN),
            "labels_BR": laid(rows, "labels", _WRITTEN),
            "weights_BR": laid(rows, "loss_mask", _WRITTEN).astype(np.float32),
        }
        if self._leave_out:
            batch |= kept_places(kept_T=batch["valid_BS"], decoder_kept_T=batch["decoder_valid_BR"])
        return batch

    @torch.no_grad()
    def evaluate_more(self, model: T5, dataset: Dataset, count: int) -> dict[str, float]:
        """How well spans are written.

        `token accuracy`: share of their tokens that are the model's first choice, given those
        before; `most frequent token`: what always guessing the commonest would reach; `exact match
        of spans`: share of the spans that greedy writing gets right whole; `most frequent span`:
        what always writing the commonest would reach.
        """
        apart = chain.from_iterable(row_of(dataset[i]) for i in range(count))
        samples = list(islice(apart, count))
        right = right_tokens = 0
        spans: Counter[tuple[int, ...]] = Counter()
        tokens: list[Tensor] = []
        special = [*self._tokenizer.extra_ids, self._tokenizer.eos]
        for chunk, batch in batches_of(self, samples, model):
            tokens_BS, ends_BN, valid_BS = (
                batch[name] for name in ("tokens_BS", "ends_BN", "valid_BS")
            )
            written_BR, valid_BR = batch["decoder_tokens_BR"], batch["decoder_valid_BR"]
            read = Segments(ends_BN, tokens_BS.shape[1])
            written = Segments(batch["decoder_ends_BN"], written_BR.shape[1])
            memory_BSD, _ = model.encode(tokens_BS, read, valid_BS)
            x_BRD, _ = model.decode(written_BR, written, valid_BR, memory_BSD, read)
            labels_BR = batch["labels_BR"]
            special_BR = torch.isin(labels_BR, labels_BR.new_tensor(special))
            counts_BR = (batch["weights_BR"] > 0) & ~special_BR
            found_BR = model.logits(x_BRD).argmax(2)
            right_tokens += int(((found_BR == labels_BR) & counts_BR).sum())
            tokens.append(labels_BR[counts_BR])
            longest = int(valid_BR.sum(1).max())
            first = int(written_BR[0, 0])  # of every sample
            greedy_BR = model.write(tokens_BS, ends_BN, valid_BS, first=first, length=longest)
            for sample, tokens_R in zip(chunk, greedy_BR.tolist(), strict=True):
                wanted = self._spans([t for t in sample["labels"].tolist() if t >= 0])
                found = self._spans(tokens_R)
                right += sum(found.get(sentinel) == span for sentinel, span in wanted.items())
                spans.update(map(tuple, wanted.values()))
        every = torch.cat(tokens)
        if not len(every):
            return {}
        return {
            "token accuracy": right_tokens / len(every),
            "most frequent token": float(every.unique(return_counts=True)[1].max()) / len(every),
            "exact match of spans": right / spans.total(),
            "most frequent span": spans.most_common(1)[0][1] / spans.total(),
        }

    def _spans(self, tokens: list[int]) -> dict[int, list[int]]:
        """What follows each sentinel, up to the end of the text."""
        sentinels, spans = set(self._tokenizer.extra_ids), {}
        span: list[int] = []
        for token in tokens:
            if token == self._tokenizer.eos:
                break
            if token in sentinels:
                span = spans.setdefault(token, [])
            else:
                span.append(token)
        return spans
