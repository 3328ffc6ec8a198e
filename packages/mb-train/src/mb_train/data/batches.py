"""Batches of a run, from its datasets.

They are prepared ahead by a few threads, beside a GPU with a process each where samples are made in
Python, and come in the sampler's order.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

import mb_data
import numpy as np
import torch
from mb_data import Tokenizer, WorkerDiedError
from mb_parallel import ParallelMesh

from mb_train.data.documents import documents_of
from mb_train.machine.signals import StopFlag
from mb_train.tasks import Batch, Dataset, Task

# How the arrays of a batch that hold tokens are named; in some of them -1 is none, perhaps all.
_TOKEN_ARRAYS = ("tokens_", "labels_", "decoder_tokens_", "block_BS")
_MASKED_LABELS = ("labels_BM", "labels_BR")


class DataError(ValueError):
    """Tokens that no text of this model's has; a run may meet them in any step."""


def check_tokens(arrays: Mapping[str, np.ndarray], vocab_size: int) -> None:
    """Raise DataError if an array of tokens holds one that the model has no row for.

    On a GPU such a token would end the process with an assertion on the device.
    """
    for tokens in _tokens_in(arrays):
        least = tokens.min()
        wrong = least if least < 0 else tokens.max()
        if not 0 <= wrong < vocab_size:
            raise DataError(
                f"Expected tokens below {vocab_size}, the model's vocabulary, got {wrong}: "
                "the data was made with another tokenizer, or is damaged. Give the --tokenizer "
                "that it was made with (or --vocab-file and --merge-file)."
            )


def beyond_tokenizer(arrays: Mapping[str, np.ndarray], tokenizer: Tokenizer) -> list[str]:
    """A line on tokens that the model has a row for, which fills it up, and the tokenizer has not.

    No text has them: neither one that the model is asked with, nor one that it writes.
    """
    most = max((int(tokens.max()) for tokens in _tokens_in(arrays)), default=0)
    if most < tokenizer.vocab_size:
        return []
    return [
        f"data: it holds token {most}, and {tokenizer.name} has those from 0 to "
        f"{tokenizer.vocab_size - 1}: was it made with another tokenizer?"
    ]


def _tokens_in(arrays: Mapping[str, np.ndarray]) -> Iterator[np.ndarray]:
    for name, array in arrays.items():
        if name in _MASKED_LABELS:
            array = array[array != -1]
        if name.startswith(_TOKEN_ARRAYS) and array.size:
            yield array


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
    """This rank's micro-batches from `consumed_samples` on, on the device.

    Ranks that share a model or sequences (tensor, pipeline and context parallel) each read the same
    samples; of sequences that are shared the task gives this rank's part.

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
        rank=mesh.data_rank,
        world_size=mesh.data_size,
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
        try:
            check_tokens(arrays, vocab_size)
        except DataError as error:
            named = documents_of(dataset, indices)
            raise DataError(f"{error} Documents of that batch: {named}.") from None
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
