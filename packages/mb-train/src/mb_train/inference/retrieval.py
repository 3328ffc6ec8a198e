"""A corpus as vectors: every block embedded by a trained retriever, in a FAISS index on disk.

    INDEX/vectors.faiss   the blocks' embeddings, searched by inner product
    INDEX/blocks.npy      int64 [A, 4]: first sentence, sentence after the last, document, number
    INDEX/index.json      what it was made of: the checkpoint, the corpus, the kind of index; and
                          the SHA-256 of the two files

The folder gets its name once it is whole. Texts are not copied: an answer is read from the corpus,
and an index is refused whose checkpoint or corpus is not what it was made of, or whose files are
not what was written: a vector or a row with a flipped bit is another, and answers are too.

Letters: A blocks, B of them at a time, D embedding width, S tokens of a block.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mb_data
import numpy as np
import numpy.typing as npt
import torch

from mb_train.config import TrainConfig, whole
from mb_train.data.batches import check_tokens
from mb_train.data.named import Named
from mb_train.folder.checksums import damage, sum_of
from mb_train.folder.whole_files import replaceable, replaced_folder
from mb_train.loading import Trained, load_trained
from mb_train.tasks.collate import kept_places
from mb_train.tasks.ict import embedded_at_once, titles_beside
from mb_train.untrusted import json_of
from mb_train.words import counted, missing_package

if TYPE_CHECKING:
    from mb_data import Tokenizer

    from mb_train.models.ict import Tower

VECTORS, BLOCKS, ABOUT = "vectors.faiss", "blocks.npy", "index.json"
_FILES = {VECTORS, BLOCKS, ABOUT}


def faiss_library() -> Any:
    """The module `faiss`.

    Raises:
        ValueError: it is not installed; says how to.
    """
    try:
        import faiss
    except ModuleNotFoundError:
        install = "'mb-train[retrieval]'"
        raise missing_package("faiss", "for an index", install, ", or faiss-gpu") from None
    return faiss


def build_index(
    run: Path,
    corpus: str,
    output: Path,
    *,
    titles: str | None = None,
    kind: str = "Flat",
    queries: int = 1000,
    device: str = "auto",
    say: Callable[[str], None] = print,
) -> dict[str, float]:
    """Embed a corpus and write its index.

    Args:
        run: of a retriever (`--model ict`).
        corpus: prefix of token files split into sentences, by the run's tokenizer.
        output: the index's folder; an earlier index there is replaced.
        titles: prefix of the documents' titles; None takes those beside the corpus, if any.
        kind: of index, in the words of `faiss.index_factory`; "Flat" compares with every block.
        queries: for how many sentences to measure whether their block is found.

    Returns:
        `recall@k` and BM25's, as a run measures them, among the blocks of the queries, `blocks`.

    Raises:
        ValueError: no faiss, no retriever, no corpus, no queries, a kind that faiss does not know,
            a corpus of another tokenizer, or a folder that holds something else. Nothing has been
            written.
    """
    faiss = faiss_library()
    output = replaceable(output)
    if output.exists() and not (output.is_dir() and _files(output) in (set(), _FILES)):
        raise ValueError(
            f"Expected a new folder or an index to replace, got {output}. Name another --output."
        )
    if queries < 1:
        raise ValueError(f"Expected --queries of at least 1, got {queries}.")
    trained = load_trained(run, device, kinds=("ict",))
    dataset = _every_block(trained.config, trained.tokenizer, corpus, titles)
    rows_AX = np.unique(np.asarray(dataset.mapping, np.int64), axis=0)
    say(f"{counted(len(rows_AX), 'block')} of {corpus}")
    vectors = _searchable(np.concatenate(list(_embedded(trained, dataset, rows_AX))), kind)
    about = {
        "checkpoint": str(trained.checkpoint.resolve()),
        "iteration": trained.saved.iteration,
        "written": trained.saved.written,
        "corpus": str(Path(corpus).resolve()),
        "corpus_bytes": Path(f"{corpus}.bin").stat().st_size,
        "titles": None if titles is None else str(Path(titles).resolve()),
        "kind": kind,
        "blocks": len(rows_AX),
    }
    with replaced_folder(output) as draft:
        faiss.write_index(vectors, str(draft / VECTORS))
        np.save(draft / BLOCKS, rows_AX)
        about["sums"] = {name: sum_of(draft / name) for name in (VECTORS, BLOCKS)}
        (draft / ABOUT).write_text(json.dumps(about, indent=2) + "\n")
    return trained.task.evaluate_more(trained.model, dataset, min(queries, len(dataset)))


def _files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _searchable(found_AD: npt.NDArray[np.float32], kind: str) -> Any:
    """A FAISS index of vectors."""
    faiss = faiss_library()
    count, width = found_AD.shape
    try:
        vectors = faiss.index_factory(width, kind, faiss.METRIC_INNER_PRODUCT)
        vectors.train(found_AD)
        vectors.add(found_AD)
    except RuntimeError as error:
        raise ValueError(
            f"Expected a kind of index that takes {count} vectors of {width}, got {kind!r}: "
            f"{str(error).splitlines()[-1]}"
        ) from None
    return vectors


@dataclass(frozen=True)
class Answer:
    """A block that a query found: how near it lies, its document's title, its text."""

    score: float
    title: str
    text: str


class Retriever:
    """Answers queries from an index.

    Args:
        run: whose query tower embeds them; the one that the index was made with.
        index: the index's folder.
        lists: how many lists of an IVF index are searched; faiss itself takes the nearest alone,
            and misses most blocks. Other kinds have none.

    Raises:
        ValueError: no faiss, no index, or one that is damaged or of another checkpoint or corpus;
            no list to search.
        OSError: its files cannot be read.
    """

    def __init__(self, run: Path, index: Path, *, lists: int, device: str = "auto") -> None:
        faiss = faiss_library()
        if lists < 1:
            raise ValueError(f"Expected at least one list of an index to search, got {lists}.")
        about = _about(index)
        self._trained = load_trained(run, device, kinds=("ict",))
        saved = self._trained.saved
        if (saved.iteration, saved.written) != (about["iteration"], about["written"]):
            raise ValueError(
                f"{index} was made with {about['checkpoint']} as it was then, iteration "
                f"{about['iteration']}; {run} is another, or was trained anew, iteration "
                f"{saved.iteration}. Make it again with mb-train index."
            )
        if wrong := damage(index, about["sums"], about["sums"]):
            raise ValueError(f"{wrong[0]}. Make the index again with mb-train index.")
        corpus = about["corpus"]
        file = Path(f"{corpus}.bin")
        if not file.is_file() or file.stat().st_size != about["corpus_bytes"]:
            raise ValueError(f"{file}, which {index} was made of, is gone or has changed.")
        self._tokenizer = self._trained.tokenizer
        self._dataset = _every_block(self._trained.config, self._tokenizer, corpus, about["titles"])
        try:
            self._vectors = faiss.read_index(str(index / VECTORS))
            self._rows_AX = np.load(index / BLOCKS)
        except (RuntimeError, EOFError, ValueError, OSError) as error:
            why = str(error).rpartition("failed: ")[2]  # faiss tells of its sources before
            raise ValueError(
                f"{index} is damaged: {why}. Make it again with mb-train index."
            ) from None
        listed = faiss.try_extract_index_ivf(self._vectors)  # of what may stand around it
        if listed is not None:
            listed.nprobe = min(lists, listed.nlist)

    def ask(self, query: str, count: int) -> list[Answer]:
        """The nearest blocks, the nearest first.

        Raises:
            ValueError: a query without a word, or no number of answers.
        """
        if count < 1:
            raise ValueError(f"Expected at least one answer to be asked for, got {count}.")
        length, tokenizer = self._dataset.seq_length, self._tokenizer
        words = list(tokenizer.encode(query))[: length - 2]
        if not words:
            raise ValueError("Expected a query of at least one word.")
        tokens_1S = np.array([[tokenizer.cls, *words, tokenizer.sep]])
        vector_1D = _embed(self._trained, "query", tokens_1S, np.ones_like(tokens_1S))
        scores, places = self._vectors.search(vector_1D, min(count, len(self._rows_AX)))
        return [
            self._answer(float(score), int(place))
            for score, place in zip(scores[0], places[0], strict=True)
            if place >= 0
        ]

    def _answer(self, score: float, place: int) -> Answer:
        start, end, document, _ = self._rows_AX[place].tolist()
        dataset, decode = self._dataset, self._tokenizer.decode
        sentences = [decode(dataset.indexed[i].tolist()) for i in range(start, end)]
        return Answer(score, decode(dataset.title(document)), " ".join(sentences))


def _about(index: Path) -> dict[str, Any]:
    """What an index was made of."""
    try:
        about = json_of((index / ABOUT).read_text())
        if not isinstance(about["titles"], (str, type(None))):
            raise TypeError
        return {
            **{name: about[name] for name in ("checkpoint", "iteration", "written")},
            **{name: about[name] for name in ("corpus", "corpus_bytes", "titles")},
            "sums": {name: about["sums"][name] for name in (VECTORS, BLOCKS)},
        }
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"Expected an index in {index}, found none. Make one with mb-train index."
        ) from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{index / ABOUT} is damaged. Make the index again with mb-train index."
        ) from None


def _every_block(
    config: TrainConfig, tokenizer: Tokenizer, corpus: str, titles: str | None
) -> mb_data.ICTDataset:
    """Every block of a corpus at least once; a query of it is taken out of its block."""
    Named([corpus], "--corpus").check()
    dataset, _, _ = mb_data.build_ict_datasets(
        corpus,
        titles_prefix=titles or titles_beside(corpus),
        tokenizer=tokenizer,
        split="100,0,0",
        seq_length=whole(config.seq_length),
        num_samples=(1, 0, 0),
        seed=config.seed,
        query_in_block_prob=0.0,
        use_one_sent_docs=config.use_one_sent_docs,
        cache_dir=config.data_cache_path,
    )
    if not isinstance(dataset, mb_data.ICTDataset) or not len(dataset):
        raise ValueError(f"Expected documents of two sentences or more in {corpus}, got none.")
    return dataset


def _embedded(
    trained: Trained, dataset: mb_data.ICTDataset, rows_AX: npt.NDArray[np.int64]
) -> Iterator[npt.NDArray[np.float32]]:
    """Embeddings of the blocks, [B, D] at a time."""
    at_once = embedded_at_once(trained.config)
    for start in range(0, len(rows_AX), at_once):
        rows = rows_AX[start : start + at_once, :3].tolist()
        blocks = zip(*(dataset.get_block(*row) for row in rows), strict=True)
        tokens_BS, valid_BS = map(np.stack, blocks)
        check_tokens({"block_BS": tokens_BS}, trained.vocab_size)
        yield _embed(trained, "block", tokens_BS, valid_BS)


@torch.no_grad()
def _embed(
    trained: Trained, side: str, tokens_BS: npt.NDArray, valid_BS: npt.NDArray
) -> npt.NDArray[np.float32]:
    tower: Tower = getattr(trained.model, side)
    device = next(tower.parameters()).device
    arrays = {"tokens_BS": tokens_BS, "valid_BS": valid_BS, **kept_places(kept_T=valid_BS)}
    batch = {name: torch.from_numpy(a.astype(np.int64)).to(device) for name, a in arrays.items()}
    return tower(**batch)[0].float().cpu().numpy()
