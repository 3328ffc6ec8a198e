"""Finding the block that a sentence was taken from: ICT, for retrieval."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mb_data
import numpy as np
import torch
from mb_parallel import ParallelMesh
from mb_parallel.expert_parallel import Place, gather_rows
from mb_parallel.tensor_parallel import Plan
from torch import Tensor

from mb_train.config import TrainConfig, whole
from mb_train.models.ict import ICT, LOSS
from mb_train.models.tensor_plans import ict_plan
from mb_train.models.workload import Head, Pass, Workload
from mb_train.tasks.base import Borders, DataPaths, Dataset, Datasets, Wanted
from mb_train.tasks.bm25 import BM25, rank_of, recall
from mb_train.tasks.collate import EVALUATED_AT_ONCE, batches_of, kept_places, stacked
from mb_train.tasks.sentences import SentenceTask


class ICTTask(SentenceTask):
    """See `base.Task`; a tokenizer with [CLS], [SEP] and [PAD].

    Args:
        mesh: over whose data-parallel ranks blocks are gathered.
    """

    def __init__(self, config: TrainConfig, *args: Any, mesh: ParallelMesh, **how: Any) -> None:
        super().__init__(config, *args, **how)
        self.loss_weights = {LOSS: "weights_B"}
        self._mesh = mesh
        tower = Pass(self.model_config, whole(config.seq_length))
        projection = config.biencoder_projection_dim
        heads = (Head(1, projection),) * 2 if projection else ()
        self.workload = Workload((tower, tower), heads)

    def borders(self, runs: Sequence[range]) -> Borders:
        """Refused: two towers side by side have no stages."""
        raise ValueError(
            "Expected data, tensor and expert parallelism for --model ict, got "
            f"{len(runs)} pipeline stages, of which two towers side by side have none."
        )

    def tensor_plan(self) -> Plan:
        """See `models.tensor_plans`."""
        return ict_plan(self.model_config)

    def build_model(self, *, compute_dtype: torch.dtype) -> ICT:
        """Two towers, or one, with fresh weights."""
        config = self._config
        return ICT(
            self.model_config,
            shared=config.biencoder_shared_query_context_model,
            projection=config.biencoder_projection_dim,
            scale_scores=config.retriever_score_scaling,
            gather=self._gather,
            rank=self._mesh.dp_rank,
            compute_dtype=compute_dtype,
        )

    def build_datasets(self, paths: DataPaths, num_samples: Wanted) -> Datasets:
        """Megatron's samples over files that were split into sentences, and their titles.

        Without `--titles-data-path` the titles are those that `mb-data preprocess` writes beside
        PREFIX_text_sentence as PREFIX_title_document, or as PREFIX_title_sentence, if they are
        there.
        """
        config = self._config
        if not isinstance(paths, (list, tuple)) or len(paths) != 1:
            raise ValueError("Expected one --data-path for --model ict, got several data sets.")
        return mb_data.build_ict_datasets(
            paths[0],
            titles_prefix=config.titles_data_path or titles_beside(paths[0]),
            tokenizer=self._tokenizer,
            seq_length=whole(config.seq_length),
            num_samples=num_samples,
            query_in_block_prob=config.query_in_block_prob,
            use_one_sent_docs=config.use_one_sent_docs,
            **config.dataset_arguments(),
        )

    def collate(self, samples: list[Any]) -> dict[str, np.ndarray]:
        """See `ICT.forward`."""
        queries_BS, blocks_BS = (
            stacked(samples, f"{side}_pad_mask") for side in ("query", "block")
        )
        batch = {
            "tokens_BS": stacked(samples, "query_tokens"),
            "query_valid_BS": queries_BS,
            "block_BS": stacked(samples, "block_tokens"),
            "block_valid_BS": blocks_BS,
            "weights_B": np.ones(len(samples), np.float32),
        }
        if self._leave_out:
            batch |= kept_places(query_kept_T=queries_BS, block_kept_T=blocks_BS)
        return batch

    @torch.no_grad()
    def evaluate_more(self, model: ICT, dataset: Dataset, count: int) -> dict[str, float]:
        """`recall@k` among the samples' blocks, one for each; BM25's beside.

        Queries are taken out of their blocks as in training: not `--query-in-block-prob` of them.

        k is what `--retriever-report-topk-accuracies` says, by default 1, 5 and 20.
        """
        every = (dataset[i] for i in range(count))
        different = {tuple(s["block_data"].tolist()[:3]): s for s in every}
        samples = list(different.values())
        queries, blocks = [], []
        at_once = embedded_at_once(self._config)
        for _, batch in batches_of(self, samples, model, at_once=at_once):
            kept = [batch.get(f"{side}_kept_T") for side in ("query", "block")]
            query_BD, _ = model.query(batch["tokens_BS"], batch["query_valid_BS"], kept[0])
            block_BD, _ = model.block(batch["block_BS"], batch["block_valid_BS"], kept[1])
            queries.append(query_BD.float())
            blocks.append(block_BD.float())
        scores_BA = (torch.cat(queries) @ torch.cat(blocks).t()).cpu().numpy()
        words = BM25([self._words(s["block_tokens"]) for s in samples])
        ours, theirs = [], []
        for number, sample in enumerate(samples):
            ours.append(rank_of(scores_BA[number], number))
            theirs.append(rank_of(words.scores(self._words(sample["query_tokens"])), number))
        found: dict[str, float] = {"blocks": float(len(samples))}
        for k in self._config.retriever_report_topk_accuracies or [1, 5, 20]:
            found[f"recall@{k}"] = recall(ours, k)
            found[f"BM25 recall@{k}"] = recall(theirs, k)
        return found

    def _words(self, tokens: np.ndarray) -> list[int]:
        """Without special tokens."""
        special = {self._tokenizer.cls, self._tokenizer.sep, self._tokenizer.pad}
        return [token for token in tokens.tolist() if token not in special]

    def _gather(self, x_BD: Tensor) -> Tensor:
        axis = self._mesh.axis("dp")
        if axis is None:
            return x_BD
        # What the others' losses say of these blocks comes back summed.
        return gather_rows(x_BD, Place(axis.get_group(), "the retriever's loss"))


def embedded_at_once(config: TrainConfig) -> int:
    """Texts that a trained tower gets at a time.

    One where experts have a capacity or choose: others would take its places, and it would lie
    elsewhere among others.
    """
    return 1 if config.experts_see_others else EVALUATED_AT_ONCE


def titles_beside(prefix: str) -> str | None:
    """The titles that `mb-data preprocess` wrote with PREFIX_text_sentence, if it did.

    In a call of their own, or in the text's, which split them into sentences too.
    """
    stem = prefix.removesuffix("_text_sentence")
    both = (f"{stem}_title_{level}" for level in ("document", "sentence"))
    return next((titles for titles in both if Path(f"{titles}.idx").is_file()), None)
