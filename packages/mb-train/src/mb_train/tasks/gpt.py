"""Predicting the next token: GPT on packed documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import mb_data
import numpy as np
import torch
from mb_parallel import ParallelMesh
from mb_parallel.tensor_parallel import Plan

from mb_train.config import TrainConfig, whole
from mb_train.models.gpt import GPT
from mb_train.models.mtp import further_loss, further_weights, layers_of_module
from mb_train.models.tensor_plans import gpt_plan
from mb_train.models.workload import Head, Pass, Workload
from mb_train.tasks.architecture import transformer_config
from mb_train.tasks.base import Borders, DataPaths, Dataset, Datasets, Wanted
from mb_train.tasks.further import further_arrays

# What says of whole sequences which documents attention keeps apart, in one form or the other.
_APART = ("segments_BS", "ends_BN")


class GPTTask:
    """See `base.Task`.

    Args:
        config: the run.
        vocab_size: padded.
        eod: the end-of-document token.
        rearranged: what makes a dataset of rearranged documents of one, if they are to be.
        mesh: of ranks that may hold parts of sequences; None: this one has them whole.

    Raises:
        ValueError: an activation or experts that mb_layers refuses.
    """

    sentences = False
    tells_more = False

    def __init__(
        self,
        config: TrainConfig,
        *,
        vocab_size: int,
        eod: int,
        rearranged: Callable[[Dataset], Dataset] | None = None,
        mesh: ParallelMesh | None = None,
    ) -> None:
        modules = range(1, config.mtp_num_layers + 1)
        further = {further_loss(k): further_weights(k) for k in modules}
        self.loss_weights = {"lm loss": "weights_BS"} | further
        self._length = whole(config.seq_length)
        self.model_config = transformer_config(config, vocab_size)
        self.workload = Workload(
            (Pass(self.model_config, self._length),),
            (Head(self._length, vocab_size),) * (1 + len(modules)),
            tuple(Pass(layers_of_module(self.model_config), self._length) for _ in modules),
        )
        self._config, self._eod, self._rearranged = config, eod, rearranged
        self._part, self._parts = (0, 1) if mesh is None else (mesh.cp_rank, mesh.cp_size)

    def build_model(self, *, compute_dtype: torch.dtype) -> GPT:
        """A GPT with fresh weights."""
        return GPT(self.model_config, compute_dtype=compute_dtype)

    def borders(self, runs: Sequence[range]) -> Borders:
        """A tied head has a copy of the embedding; modules for further tokens have one of all."""
        config = self.model_config
        shared = []
        if config.tie_embeddings or config.mtp_modules:
            shared.append("embedding.tokens.weight")
        if config.positions == "learned" and config.mtp_modules:
            shared.append("embedding.positions.weight")
        return Borders({name: name for name in shared})

    def tensor_plan(self) -> Plan:
        """See `models.tensor_plans`."""
        return gpt_plan(self.model_config)

    def build_datasets(self, paths: DataPaths, num_samples: Wanted) -> Datasets:
        """Samples of S + 1 tokens: Megatron's, whose neighbours share one, or whole documents."""
        config = self._config
        how: dict[str, Any] = {
            **config.dataset_arguments(),
            "seq_length": self._length,
            "num_samples": num_samples,
        }
        parts: Datasets
        if config.packs_whole:
            parts = mb_data.build_packed_datasets(paths, eod=self._eod, **how)
        else:
            parts = mb_data.build_gpt_datasets(paths, **how)
        change = self._rearranged
        if change is not None:
            parts = cast(Datasets, tuple(part if part is None else change(part) for part in parts))
        return parts

    def collate(self, samples: list[Any]) -> dict[str, np.ndarray]:
        """tokens_BS and labels_BS, one place apart, weights_BS, and what documents change.

        Under context parallelism what is of tokens is of this rank's part of every sequence, with
        their positions in the whole; documents, of which attention asks, are the whole sequences'.
        """
        batch = self._whole(samples)
        learned = self.model_config.positions == "learned"
        batch |= further_arrays(batch, self.model_config.mtp_modules, positions=learned)
        return batch if self._parts == 1 else batch | self._cut(batch)

    def _whole(self, samples: list[Any]) -> dict[str, np.ndarray]:
        """A batch of whole sequences.

        The end of a document belongs to the document it ends, as in Megatron-LM: positions and
        attention begin anew behind it, and `--eod-mask-loss` leaves out what follows it. So does
        best-fit packing, where nothing follows: ends of documents fill a sample up.
        """
        config = self._config
        text = np.stack([np.asarray(sample) for sample in samples]).astype(np.int64)
        tokens_BS, labels_BS = text[:, :-1], text[:, 1:]
        ends_BS = tokens_BS == self._eod
        weights_BS = np.ones(tokens_BS.shape, np.float32)
        if config.eod_mask_loss or config.packs_whole:
            weights_BS[ends_BS] = 0
        batch = {"tokens_BS": tokens_BS, "labels_BS": labels_BS, "weights_BS": weights_BS}
        if config.reset_attention_mask:
            batch |= self._apart(ends_BS)
        if config.reset_position_ids:
            batch["positions_BS"] = positions_of(ends_BS)
        return batch

    def _cut(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Those of its arrays that are of tokens, cut to this rank's part of the sequences."""
        length = self._length // self._parts
        start = self._part * length
        by_token = {name: array for name, array in batch.items() if name not in _APART}
        by_token.setdefault("positions_BS", np.arange(self._length)[None])
        return {name: array[:, start : start + length] for name, array in by_token.items()}

    def _apart(self, ends_BS: np.ndarray) -> dict[str, np.ndarray]:
        """What keeps documents apart that end at these places."""
        if self._config.pipeline_model_parallel_size > 1:  # which sends arrays of one size
            return {"segments_BS": np.cumsum(ends_BS, axis=1) - ends_BS}
        return {"ends_BN": ends_of(ends_BS)}

    def evaluate_more(self, model: GPT, dataset: Dataset, count: int) -> dict[str, float]:
        """Nothing: the loss says it all."""
        return {}


def ends_of(ends_BS: np.ndarray) -> np.ndarray:
    """Places behind the documents, int64 [B, N]; N is a power of two, rows are filled up with S.

    So few different N that a compiled model meets them all soon.
    """
    B, S = ends_BS.shape
    most = 1 + int(ends_BS[:, :-1].sum(axis=1).max(initial=0))
    places_BN = np.full((B, 1 << (most - 1).bit_length()), S, np.int64)
    for row, ends_S in zip(places_BN, ends_BS, strict=True):
        behind = np.flatnonzero(ends_S[:-1]) + 1
        row[: len(behind)] = behind
    return places_BN


def positions_of(ends_BS: np.ndarray) -> np.ndarray:
    """Each token's place in its document, int64 [B, S]; a document ends where `ends_BS` is true."""
    return mb_data.document_layout(ends_BS.astype(np.int64), eod=1).position_ids


def fill_in_the_middle(config: TrainConfig, tokenizer: Any) -> Callable[[Dataset], Dataset]:
    """What makes `mb_data.FillInTheMiddle` of a dataset, by a run's `--fim-` flags.

    Raises:
        ValueError: the vocabulary has no such token.
    """

    def token(flag: str, text: str) -> int:
        found = tokenizer.token_id(text)
        if found is None:
            raise ValueError(
                f"Expected --{flag} to be a special token of {tokenizer.name}, got {text!r}. Name "
                "one that it has, or append some: --vocab-extra-ids 3 makes <extra_id_0> to "
                "<extra_id_2>."
            )
        return found

    marks = mb_data.MiddleTokens(
        token("fim-prefix-token", config.fim_prefix_token),
        token("fim-middle-token", config.fim_middle_token),
        token("fim-suffix-token", config.fim_suffix_token),
    )
    between, start = config.fim_split_sample, config.fim_no_prefix

    def begins_so(tokens: Any) -> bool:
        assert start is not None
        return tokenizer.decode(tokens[: len(start.encode()) + 1]).startswith(start)

    return partial(
        mb_data.FillInTheMiddle,
        marks=marks,
        eod=tokenizer.eod,
        rate=config.fim_rate,
        suffix_first_rate=config.fim_spm_rate,
        fragment_end=token("fim-split-sample", between) if between else None,
        fragment_rate=config.fim_fragment_rate,
        leave=begins_so if start else None,
        seed=config.seed,
    )
