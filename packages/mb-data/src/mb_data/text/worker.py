"""A worker process: it encodes a block, says how many tokens came of it, keeps them until it is
told where they belong, and writes them there.

It is told ("encode", (unit, inside), block or archive) and ("write", (unit, inside), (number,
places)), and answers ("encoded", key, (block, result)), ("end", (unit, blocks), None) after an
archive, ("written", key, number), or ("failed", key, error).
"""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Sequence
from io import FileIO
from itertools import chain, islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mb_data.system import naming, resident_bytes, write_all
from mb_data.text.encode import Job, encode_block
from mb_data.text.partial_output import Place
from mb_data.text.reading import Archive, Block
from mb_data.text.spill import SpillBuffer

AHEAD = 2  # blocks that it may have encoded, but not written, besides one under way
CACHE_BYTES = 256 << 20  # what a worker may grow by before its tokenizer forgets


# A block by its unit of work and its place in that, 0 where the unit is a block.
Key = tuple[int, int]


def serve(
    connection: Connection,
    inherited: list[Connection],
    job: Job,
    files: Sequence[tuple[Path, Path, Path]],
    directory: Path,
) -> None:
    """The worker's side: obey "encode" and "write" until the parent is gone."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    for other in inherited:  # or the end of the parent would go unnoticed
        other.close()
    with contextlib.ExitStack() as stack:
        server = None
        while True:
            try:
                command, key, value = connection.recv()
            except (EOFError, OSError):
                return
            try:
                if server is None:  # here: that a file cannot be opened is told like all errors
                    paths = chain(*files)
                    targets = [stack.enter_context(p.open("r+b", buffering=0)) for p in paths]
                    server = _Server(connection, job, targets, directory)
                server.obey(command, key, value)
                continue
            except (ValueError, OSError, ModuleNotFoundError) as error:
                reply = "failed", key, error
            except Exception:
                reply = "failed", key, RuntimeError(f"in a worker:\n{traceback.format_exc()}")
            try:
                connection.send(reply)
            except BrokenPipeError:  # the parent is gone
                return


class _Server:
    """What a worker process does when told to."""

    def __init__(
        self,
        connection: Connection,
        job: Job,
        targets: list[FileIO],
        directory: Path,
    ) -> None:
        self.connection = connection
        self.job = job
        self.targets = targets
        self.unwritten = SpillBuffer(directory, AHEAD + 1)
        self.memory = resident_bytes() + CACHE_BYTES

    def obey(self, command: str, key: Key, value: Any) -> None:
        if command == "write":
            self.write(key, *value)
        elif isinstance(value, Block):
            self.encode(key, value)
        else:
            self.unpack(key, value)

    def unpack(self, key: Key, archive: Archive) -> None:
        """Encode the blocks of an archive, from one on; meanwhile "write" is all that is asked."""
        unit, inside = key
        for block in islice(archive.blocks(), inside, None):
            self.encode((unit, inside), block)
            inside += 1
            self.forget()
            while self.connection.poll():
                self.obey(*self.connection.recv())
        self.connection.send(("end", (unit, inside), None))

    def encode(self, key: Key, block: Block) -> None:
        arrays, result = encode_block(self.job, block)
        self.unwritten.put(key, arrays)
        self.connection.send(("encoded", key, (block._replace(data=None), result)))

    def write(self, key: Key, number: int, places: list[Place]) -> None:
        offsets = [index for place in places for index in place]
        for target, array, index in zip(
            self.targets, self.unwritten.take(key), offsets, strict=True
        ):
            _write_at(target, array, index)
        self.connection.send(("written", key, number))
        self.forget()

    def forget(self) -> None:
        if resident_bytes() > self.memory:
            self.job.tokenizer.forget()
            self.memory = max(self.memory, resident_bytes() + CACHE_BYTES)


def _write_at(file: FileIO, values: npt.NDArray, index: int) -> None:
    """Write an array to where its first element has this index."""
    with naming(str(file.name)):
        file.seek(index * values.itemsize)
        write_all(file, np.ascontiguousarray(values).data.cast("B"))
