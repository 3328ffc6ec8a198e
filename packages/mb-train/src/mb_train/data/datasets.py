"""Datasets and batches of a run, from the token files that its flags name.

Batches are prepared ahead by a few threads, beside a GPU with a process each where samples are made
in Python, and come in the sampler's order.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import mb_data
import numpy as np
import torch
import torch.distributed as dist
from mb_data import Tokenizer, WorkerDiedError
from mb_data.indexed_dataset import similar_prefixes
from mb_parallel import ParallelMesh, rank, world_size

from mb_train.config import TrainConfig
from mb_train.config.data import weights_and_prefixes
from mb_train.data.same import identity
from mb_train.data.sample import sample_corpus
from mb_train.machine.signals import StopFlag
from mb_train.tasks import Batch, Dataset, Task

T = TypeVar("T")

# Samples whose tokens are looked at before a run begins; the others when they are read.
_LOOKED_AT = 8
# How the arrays of a batch that hold tokens are named; in some of them -1 is none, perhaps all.
_TOKEN_ARRAYS = ("tokens_", "labels_", "decoder_tokens_", "block_BS")
_MASKED_LABELS = ("labels_BM", "labels_BR")


class DataError(ValueError):
    """Tokens that no text of this model's has; a run may meet them in any step."""


@dataclass(frozen=True)
class Data:
    """Datasets of a run, and the `same.identity` of what they are made from."""

    train: Dataset
    valid: Dataset | None
    test: Dataset | None
    identity: dict[str, Any]


def prepare_data(
    config: TrainConfig,
    task: Task,
    batch_size: int,
    samples: int,
    folder: Path,
    say: Callable[[str], None],
    *,
    tokenizer: Tokenizer,
    vocab_size: int,
) -> Data:
    """Find or make the token files, and build the datasets over them.

    Evaluation always takes the first `eval_iters` batches of its set, so that two evaluations are
    comparable and a resumed run repeats those of an uninterrupted one.

    Args:
        task: builds the datasets over the files.
        batch_size: sequences of a step, over all ranks.
        samples: sequences of the whole training.
        folder: where the sample corpus is kept.
        say: prints a line of progress.
        tokenizer: of the sample corpus.
        vocab_size: of the model.

    Raises:
        ValueError: no training documents, a damaged file, or tokens of another vocabulary.
        OSError: a file that cannot be read.
    """
    parts = _words_by_part(config)
    if not parts:
        corpus = _on_rank_zero_first(
            lambda: sample_corpus(tokenizer, task, folder, say, mock=config.mock_data)
        )
        parts = {"": [corpus]}
    if config.reads_token_files:
        parts = {part: words and _weighed(words) for part, words in parts.items()}
    prefixes = [
        prefix for words in parts.values() for prefix in _weights_and_prefixes(config, words)[1]
    ]
    evaluated = config.eval_iters * batch_size
    train, valid, test = _on_rank_zero_first(
        lambda: task.build_datasets(parts.get("") or parts, (samples, evaluated, evaluated))
    )
    if train is None:
        raise ValueError(
            f"Expected documents to train on, got none from {' '.join(prefixes)}"
            + (f" with --split {config.split}." if "" in parts else ".")
        )
    weights, _ = _weights_and_prefixes(config, parts["" if "" in parts else "train"])
    files = [Path(prefix + _suffixes(config)[0]) for prefix in prefixes]
    first = task.collate([train[i] for i in range(min(len(train), _LOOKED_AT))])
    check_tokens(first, vocab_size)
    if not config.eval_iters:
        valid = test = None
    return Data(train, valid, test, identity(train, files, weights))


def check_files(config: TrainConfig) -> None:
    """Raise ValueError if a file of the data that the flags name is missing, or taken for a weight.

    Apart from `prepare_data`, since it can be asked before a model is built, which takes minutes.
    """
    if config.model == "ict" and config.titles_data_path is not None:
        check_prefixes([config.titles_data_path], (".bin", ".idx"), "--titles-data-path")
    for part, words in _words_by_part(config).items():
        if words is None:
            continue
        weights, prefixes = _weights_and_prefixes(config, words)
        check_prefixes(prefixes, _suffixes(config), _named_by(config, part))
        for word in words[::2] if weights else []:
            if Path(f"{word}.bin").is_file():
                raise ValueError(
                    f"Expected {_named_by(config, part)} to be prefixes alone, or weights and "
                    f"prefixes by turns, got {word} where a weight is due, and there is "
                    f"{word}.bin. Write ./{word} for a prefix."
                )


def check_tokens(arrays: Mapping[str, np.ndarray], vocab_size: int) -> None:
    """Raise DataError if an array of tokens holds one that the model has no row for.

    On a GPU such a token would end the process with an assertion on the device.
    """
    for name, array in arrays.items():
        if name in _MASKED_LABELS:
            array = array[array != -1]
        if not name.startswith(_TOKEN_ARRAYS) or not array.size:
            continue
        least = array.min()
        wrong = least if least < 0 else array.max()
        if not 0 <= wrong < vocab_size:
            raise DataError(
                f"Expected tokens below {vocab_size}, the model's vocabulary, got {wrong}: "
                "the data was made with another tokenizer, or is damaged. Give the --tokenizer "
                "that it was made with (or --vocab-file and --merge-file)."
            )


def _words_by_part(config: TrainConfig) -> dict[str, list[str] | None]:
    """What names the data of each part; "" is of what is split into parts. {} if nothing does."""
    words = config.data_words()
    return config.data_by_part() or ({} if words is None else {"": words})


def _weights_and_prefixes(
    config: TrainConfig, words: list[str] | None
) -> tuple[list[float], list[str]]:
    """See `config.data`; text has no weights, and a part that is not named neither."""
    if not words or not config.reads_token_files:
        return [], words or []
    return weights_and_prefixes(words)


def _weighed(words: list[str]) -> list[str]:
    """Several prefixes without weights get their numbers of tokens as weights."""
    if len(words) == 1 or weights_and_prefixes(words)[0]:
        return words
    tokens = [int(mb_data.IndexedDataset(prefix).sizes.sum(dtype=np.int64)) for prefix in words]
    # An empty one weighs something too: it is left out of the blend with a warning.
    weights = (str(max(count, 1)) for count in tokens)
    return [word for pair in zip(weights, words, strict=True) for word in pair]


def _suffixes(config: TrainConfig) -> tuple[str, ...]:
    """Of the files of a data set; text is named whole."""
    return (".bin", ".idx") if config.reads_token_files else ("",)


def _named_by(config: TrainConfig, part: str) -> str:
    """The flag, or the file, that names the data of a part; "" is of what is split into parts."""
    file = config.per_split_data_args_path or config.data_args_path
    return file or (f"--{part}-data-path" if part else "--data-path")


def check_prefixes(prefixes: list[str], suffixes: tuple[str, ...], source: str) -> None:
    """Refuse data sets whose files are not there; `source` is the flag or file that names them."""
    if not prefixes:
        raise ValueError(f"Expected {source} to name a data set, got none.")
    for prefix in prefixes:
        for suffix in suffixes:
            path = Path(prefix + suffix)
            if not (path.is_file() if suffix else path.exists()):
                way = "Give the path without .bin, and make the files with mb-data preprocess."
                if similar := similar_prefixes(prefix):
                    way = f"There is {', '.join(similar)}."
                where = "" if Path(prefix).is_absolute() else f" in {Path.cwd()}"
                raise ValueError(
                    f"Expected {prefix}{suffix} to be a file (from {source}), "
                    f"found none{where}.{f' {way}' if suffix else ''}"
                )


def _on_rank_zero_first(make: Callable[[], T]) -> T:
    """Rank 0 makes the files, the others find them made; a failure on rank 0 fails all."""
    if world_size() == 1:
        return make()
    result = failure = told = None  # `told` is what the other ranks hear
    if rank() == 0:
        try:
            result = make()
        except (ValueError, OSError) as error:
            failure = told = error
        except Exception as error:  # unforeseen: rank 0 shows it, the others must not wait for it
            said = f"Making the data failed on rank 0: {type(error).__name__}: {error}"
            failure, told = error, RuntimeError(said)
    verdict = [told]
    dist.broadcast_object_list(verdict, src=0)
    if failure is not None:
        raise failure
    if verdict[0] is not None:
        raise verdict[0]
    return make() if result is None else result


def batches(
    task: Task,
    dataset: Dataset,
    device: torch.device,
    mesh: ParallelMesh,
    *,
    consumed_samples: int,
    micro_batch_size: int,
    workers: int,
    vocab_size: int,
    cyclic: bool = False,
    apart: bool = False,
    stop: StopFlag,
) -> Generator[Batch]:
    """This data-parallel rank's micro-batches from `consumed_samples` on, on the device.

    Ranks that share a model (tensor and pipeline parallel) each read the same samples.

    Args:
        workers: threads that prepare batches ahead; 0: none.
        cyclic: go through the samples again and again, each time in another order.
        apart: each worker has a process that makes the samples, see `mb_data.SampleReaders`; of
            use beside a GPU alone, since on a CPU a step takes longer than its samples.
        stop: rises when such a process has ended, as the system ends what takes too much memory.
            Its samples are then made in this process, so that the step can be finished and saved.

    Raises:
        DataError: a token that is not below `vocab_size`.
    """
    sampler = _order(cyclic=cyclic)(
        len(dataset),
        consumed_samples=consumed_samples,
        micro_batch_size=micro_batch_size,
        rank=mesh.dp_rank,
        world_size=mesh.dp_size,
    )
    pin = device.type == "cuda"

    def read(indices: list[int]) -> list[Any]:
        if readers is not None:
            try:
                return readers(indices)
            except WorkerDiedError as error:
                stop.fail(str(error))
        return [dataset[i] for i in indices]

    def load(indices: list[int]) -> Batch:
        arrays = task.collate(read(indices))
        check_tokens(arrays, vocab_size)
        batch = {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in arrays.items()}
        return {name: t.pin_memory() for name, t in batch.items()} if pin else batch

    apart = apart and workers > 0
    with contextlib.ExitStack() as stack:
        readers = stack.enter_context(mb_data.SampleReaders(dataset, workers)) if apart else None
        loaded = stack.enter_context(contextlib.closing(_ahead(load, iter(sampler), workers)))
        for batch in loaded:
            yield {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def samples_of_step(
    dataset: Dataset, consumed_samples: int, size: int, *, cyclic: bool
) -> list[int]:
    """The samples of all ranks that a step of `size` takes after `consumed_samples`."""
    order = _order(cyclic=cyclic)(
        len(dataset),
        consumed_samples=consumed_samples,
        micro_batch_size=size,
        rank=0,
        world_size=1,
    )
    return next(iter(order))


def _order(*, cyclic: bool) -> type[mb_data.CyclicSampler | mb_data.SequentialSampler]:
    return mb_data.CyclicSampler if cyclic else mb_data.SequentialSampler


def _ahead(
    load: Callable[[list[int]], Batch], items: Iterator[list[int]], workers: int
) -> Generator[Batch]:
    if workers == 0:
        yield from map(load, items)
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="batches") as pool:
        pending: deque[Future[Batch]] = deque(
            pool.submit(load, item) for item in islice(items, 2 * workers)
        )
        try:
            while pending:
                batch = pending.popleft().result()
                for item in islice(items, 1):
                    pending.append(pool.submit(load, item))
                yield batch
        finally:
            for future in pending:
                future.cancel()
