"""Writing torch's distributed checkpoints: in files of about one size, and with their sums."""

# Apart from `saver`, whose users need not wait for torch's checkpoints to be imported, DTensor with
# them, before a run's first step.

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed.checkpoint as dcp
from mb_data.system import sync_directory
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from mb_train.checkpoint.host_copy import HostCopier, use_stream
from mb_train.checkpoint.summed_file import summed_file
from mb_train.folder.checksums import SUMS_FILE, format_sums, sum_of
from mb_train.folder.run_folder import LATEST, RUN_FILE, SavedRun, iteration_folder
from mb_train.folder.whole_files import replaced, write_text

# Bytes of a rank's state that go into one file, or a tensor that has more.
_FILE_BYTES = 2**30

# Files that a rank writes at the same time. On two cores with nothing beside, 3 GB into memory took
# 2.8 s one by one and 1.8 by twos; to a disk, 9 and 6. On a GPU's host it was not tried.
_WRITING_THREADS = 2


class Planner(dcp.DefaultSavePlanner):
    """torch's planner, which hands the writer a snapshot, and tensors of a GPU on the host.

    Else the writer copies each into new pinned memory of its size (see `host_copy`).

    Args:
        snapshot: by name this rank's shards as they are to be written, in place of those that the
            state dict holds by then. Each is asked for once.
    """

    def __init__(self, snapshot: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._snapshot = snapshot
        self._copier = HostCopier(_WRITING_THREADS)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        name = write_item.index.fqn
        # By `get` an error in the making of one would pass for its absence.
        if name in self._snapshot:
            object = self._snapshot[name]
        data = super().transform_object(write_item, object)
        if isinstance(data, Tensor) and data.is_cuda:
            return self._copier.copy(data)
        return data


class Writer(dcp.FileSystemWriter):
    """torch's writer, which also leaves a SHA256SUMS and makes the draft the latest checkpoint.

    A rank writes files of about `_FILE_BYTES`, in torch's format but not by its `write_data`, which
    keeps a file's tensors on the host until it is whole and sums nothing. The sums travel among the
    write results. What `finish` raises on rank 0 is raised on all.

    Args:
        draft: the folder.
        run: what is said of the run.
        threads: files that a rank writes at the same time.
    """

    def __init__(self, draft: Path, run: SavedRun, *, threads: int = _WRITING_THREADS) -> None:
        super().__init__(draft)
        self._run, self._threads = run, threads

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        with ThreadPoolExecutor(
            self._threads, "files", initializer=use_stream, initargs=(stream,)
        ) as threads:
            files = threads.map(lambda file: self._write_file(planner, *file), _files(plan))
            results = [result for file in files for result in file]
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(results)
        return future

    def _write_file(
        self, planner: SavePlanner, name: str, items: Sequence[WriteItem]
    ) -> list[WriteResult]:
        results = []
        with summed_file(Path(self.path) / name) as file:
            for item in items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor)
                tensor = tensor.detach()
                if tensor.untyped_storage().nbytes() != tensor.nbytes:
                    tensor = tensor.clone()  # torch.save writes the whole of a storage
                begin = file.size
                torch.save(tensor, cast("IO[bytes]", file))
                place = _StorageInfo(name, begin, file.size - begin)
                results.append(WriteResult(item.index, place.length, place))
        return [*results, WriteResult(MetadataIndex(name), 0, file.sum())]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        everything = [result for one in results for result in one]
        shards = [result for result in everything if not isinstance(result.storage_data, str)]
        super().finish(metadata, [shards])
        folder = Path(self.path)
        write_text(folder / RUN_FILE, json.dumps(asdict(self._run), indent=1) + "\n")
        sums = {
            result.index.fqn: result.storage_data
            for result in everything
            if isinstance(result.storage_data, str)
        }
        sums |= {name: sum_of(folder / name) for name in (".metadata", RUN_FILE)}
        write_text(folder / SUMS_FILE, format_sums(sums))
        sync_directory(folder)
        with replaced(folder.with_name(LATEST)) as latest:
            # On the disk first: one that has no room for it would keep a whole checkpoint that no
            # run goes on from.
            with latest.open("wb") as file:
                file.write(b"%d\n" % self._run.iteration)
                file.flush()
                os.fsync(file.fileno())
            # Never onto an earlier checkpoint: a kill between two renames would leave neither.
            os.rename(folder, folder.with_name(iteration_folder(self._run.iteration)))
            sync_directory(folder.parent)


def _files(plan: SavePlan) -> Iterator[tuple[str, list[WriteItem]]]:
    """The names of a rank's files, and what goes into each."""
    pieces: list[list[WriteItem]] = []
    room = 0
    for item in plan.items:
        if room <= 0:
            pieces.append([])
            room = _FILE_BYTES
        pieces[-1].append(item)
        room -= _bytes_of(item)
    for number, items in enumerate(pieces):
        yield f"{plan.storage_data.prefix}{number}.distcp", items


def _bytes_of(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize
