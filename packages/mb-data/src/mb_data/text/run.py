"""One run over all input: blocks go to the workers, what they made is booked and checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import chain

from mb_data.text.bookkeeping import Bookkeeping
from mb_data.text.encode import Job
from mb_data.text.partial_output import PartialOutput, State
from mb_data.text.pipeline import run_workers
from mb_data.text.progress import Progress
from mb_data.text.reading import Block, blocks
from mb_data.text.sources import Source
from mb_data.words import counted


def encode_sources(
    job: Job,
    sources: Sequence[Source],
    partial: PartialOutput,
    *,
    shard: tuple[int, int] | None,
    block_bytes: int,
    workers: int,
    skip: bool,
    on_progress: Callable[[Progress], None] | None,
) -> State:
    """Encode what ``partial`` does not hold yet of the sources, or of their shard.

    Returns what it holds then; all that is wrong with the input or the machine is an error.
    """
    total = max(1, sum(source.size for source in sources))

    def mine(position: int) -> bool:
        return shard is None or position * shard[1] // total == shard[0]

    work = blocks(sources, block_bytes, job.max_line_bytes, mine=mine)
    first = next(work, None)
    run = Bookkeeping(
        partial,
        sources,
        skip=skip,
        line_limit=job.max_line_bytes,
        first=first if isinstance(first, Block) else None,
        shard=shard,
        on_progress=on_progress,
    )
    todo = enumerate(chain([] if first is None else [first], work))
    before = partial.state
    try:
        with run:
            run_workers(
                job,
                (item for item in todo if item[0] >= before.units),
                start=before,
                workers=min(workers, _count_blocks(sources, block_bytes) or workers),
                files=[partial.key_files(key) for key in range(len(job.keys))],
                directory=partial.directory,
                place=run.place,
                written=run.written,
                tick=run.tick,
            )
        try:
            _check_complete(run.saved, sources, job.keys, may_be_empty=shard is not None)
        except ValueError:
            partial.kept = 0  # to go on from here would end here again
            raise
    except ValueError as error:
        if not (partial.kept and partial.resume):
            raise
        raise ValueError(
            f"{error}\n{partial.directory} keeps {counted(run.saved.documents, 'document')}: the "
            "same command goes on from there, and so does one with --on-error skip"
        ) from error
    return run.saved


def _count_blocks(sources: Sequence[Source], block_bytes: int) -> int:
    """How many blocks there are, 0 if reading alone can tell."""
    if not all(source.seekable and source.unit != "parquet" for source in sources):
        return 0
    return max(1, sum(-(-source.size // block_bytes) for source in sources))


def _check_complete(
    state: State, sources: Sequence[Source], keys: tuple[str, ...], *, may_be_empty: bool
) -> None:
    names = ", ".join(source.path for source in sources[:3])
    if len(sources) > 3:
        names += f" and {len(sources) - 3} more"
    for key, place in zip(keys, state.places, strict=True):
        if not place.sequences and not may_be_empty:
            found = f"{state.empty} empty, {state.bad_lines} bad lines"
            raise ValueError(f"no document with text under {key!r} in {names} ({found})")
    for source in sources:
        if not source.stream and not source.remote:
            status = os.stat(source.path)
            if (status.st_size, status.st_mtime_ns) != (source.size, source.version):
                raise ValueError(f"{source.path}: changed while it was being read; run again")
