"""What a run knows of itself: what goes where, how far it is, which lines were bad."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property

from mb_data.text.encode import Result
from mb_data.text.parquet import count_rows
from mb_data.text.partial_output import PartialOutput, Place, State
from mb_data.text.progress import Progress
from mb_data.text.reading import Block, count_lines
from mb_data.text.sources import Source

SAVE_INTERVAL = 0.25  # seconds of work a kill may cost, besides the blocks under way


class Bookkeeping(AbstractContextManager):
    """Assigns places in the output and counts lines, in order; knows what is safely written.

    While it is entered, a thread saves the state every ``SAVE_INTERVAL``. Syncing early also
    spreads the writing, so that little is left for the end.
    """

    def __init__(
        self,
        partial: PartialOutput,
        sources: Sequence[Source],
        *,
        skip: bool,
        line_limit: int,
        first: Block | None = None,
        shard: tuple[int, int] | None = None,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self.partial = partial
        self.skip = skip
        self.line_limit = line_limit
        self.on_progress = on_progress
        self.total = 0 if any(s.stream for s in sources) else sum(s.size for s in sources)
        self.start = 0  # position of a shard's first byte
        if shard and self.total:
            self.start = self.total * shard[0] // shard[1]
            self.total = self.total * (shard[0] + 1) // shard[1] - self.start
        self.first = first  # of a shard, it may lie in the middle of a file
        self.placed = self.saved = partial.state
        self.states: dict[int, State] = {}
        self.done: set[int] = set()
        self.started = self.shown = time.perf_counter()
        self.saver: threading.Thread | None = None
        self.failure: BaseException | None = None
        self.stopping = threading.Event()

    def place(self, block: Block, result: Result, units: int, inside: int) -> list[Place]:
        """Where the data of the next block goes; raises ValueError for what must stop the run.

        After this block ``units`` of work are done, and ``inside`` blocks of the next one.
        """
        before = self.placed
        lines = before.lines if block.start else 0
        if result.fatal:
            line, message = result.fatal
            raise ValueError(f"{self._where(block, lines, line, line)}, {message}")
        reported = before.reported
        for first, last, message in result.errors:
            message = f"{self._where(block, lines, first, last)}: {message}"
            if not self.skip:
                raise ValueError(f"{message}; --on-error skip leaves bad lines out")
            reported = self.partial.report(message)
        self.placed = State(
            places=tuple(map(Place.plus, before.places, result.lengths)),
            sums=tuple(map(Place.plus, before.sums, result.sums)),
            blocks=before.blocks + 1,
            units=units,
            inside=inside,
            lines=lines + result.lines,
            position=block.position,
            documents=before.documents + result.documents,
            empty=before.empty + result.empty,
            text_bytes=before.text_bytes + result.text_bytes,
            bad_lines=before.bad_lines + result.bad_lines,
            careful=before.careful + result.careful,
            reported=reported,
            line_limit=self.line_limit,
        )
        self.states[before.blocks] = self.placed
        return list(before.places)

    def _where(self, block: Block, lines: int, line: int, last: int) -> str:
        """File and numbers of some lines of a block; ``lines`` of its file come before it."""
        if self.first and self.first.path == block.path:
            lines += self._lines_before
        noun = "row" if block.unit == "parquet" else "line"
        if last > line:
            return f"{block.path}, {noun}s {lines + line + 1} to {lines + last + 1}"
        return f"{block.path}, {noun} {lines + line + 1}"

    @cached_property
    def _lines_before(self) -> int:
        """Lines or rows of a shard's first file before the shard, found by reading them."""
        first = self.first
        if not (first and first.start):
            return 0
        count = count_rows if first.unit == "parquet" else count_lines
        return count(first.path, first.start)

    def written(self, number: int) -> None:
        """A block's data is in the files."""
        self.done.add(number)
        while self.saved.blocks in self.done:
            number = self.saved.blocks
            self.done.remove(number)
            self.saved = self.states.pop(number)

    def tick(self) -> None:
        if self.saver is None:  # only now: a process with threads must not fork
            self.saver = threading.Thread(target=self._save_often, daemon=True)
            self.saver.start()
        if self.failure:
            raise self.failure
        now = time.perf_counter()
        if self.on_progress and now - self.shown > 0.2:
            self.shown = now
            self.on_progress(self._progress())

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stopping.set()
        if self.saver:
            self.saver.join()
        # A run that got to its end is synced by `finish`.
        if kind and self.saved.blocks > self.partial.kept and not self.failure:
            with contextlib.suppress(OSError):  # a full disk: what was saved before must do
                self.partial.save(self.saved)
        if self.on_progress:
            self.on_progress(self._progress())

    def _progress(self) -> Progress:
        start, now = self.partial.state, self.placed
        return Progress(
            position=min(max(now.position - self.start, 0), self.total or now.position),
            total=self.total,
            documents=now.documents,
            text_bytes=now.text_bytes,
            seconds=time.perf_counter() - self.started,
            resumed_position=max(start.position - self.start, 0),
            resumed_documents=start.documents,
            resumed_text_bytes=start.text_bytes,
        )

    def _save_often(self) -> None:
        last = self.saved
        while not self.stopping.wait(SAVE_INTERVAL):
            state = self.saved
            if state is not last:
                try:
                    self.partial.save(state)
                except BaseException as error:
                    self.failure = error
                    return
                last = state
