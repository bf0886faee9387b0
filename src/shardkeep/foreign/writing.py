# SPDX-License-Identifier: Apache-2.0
"""Writing laid-out files: windows of bytes, read and summed by a few threads, written by others.

A file is cut into windows. Each is brought into a buffer (`Filling`), its checksums are taken where
the format wants them, and it is written at its place. Windows come in any order, so sums are put
together later. What is written and durable is noted, so that whoever was killed can go on.
"""

from __future__ import annotations

import contextlib
import os
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Protocol

from shardkeep.arrays import Bytes
from shardkeep.engine.budget import BufferPool, io_threads
from shardkeep.engine.parallel import Crew, run_in_order
from shardkeep.errors import UnsafeCheckpointError
from shardkeep.foreign.crc import combined
from shardkeep.foreign.filling import Filling, Straight, Wish
from shardkeep.foreign.layout import Elements, Late, OutFile
from shardkeep.stores.local import LocalStore, WriteFile, storage_errors

__all__ = ["FileNote", "Notes", "write_layout"]

WINDOW = 16 << 20
"""Most bytes read and written together."""
WINDOWS = 6
"""Some are read while others are written."""
READERS = 3
"""Windows that are read at the same time, each on one thread: the disk always has one to read."""
PAGE = 4096
DIRECT_FROM = 1 << 20
"""Smaller files go through the page cache."""
WRITE = 4 << 20
"""Bytes of one write."""
NOTE_EVERY = 512 << 20
"""Bytes after which what is written is made durable and noted."""


@dataclass(frozen=True)
class FileNote:
    """How far a file is, durably."""

    upto: int
    """All bytes before this one are there; but for `Late` ones."""
    sums: Mapping[int, int]
    """CRC-32 so far of each checked segment that begins there, by number."""
    done: bool = False
    """Whether all of it is there."""


class Notes(Protocol):
    """Remembers how far files are, for whoever goes on after a kill."""

    def found(self, name: str) -> FileNote | None:
        """What was noted of a file before."""

    def note(self, name: str, note: FileNote) -> None:
        """Note it; on return it is durable. Nothing noted before counts, where nothing is there."""


def write_layout(
    root: Path,
    files: Sequence[OutFile],
    read: Callable[[Sequence[Wish]], None],
    straight: Straight | None = None,
    *,
    budget: int,
    notes: Notes,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Write all files below `root`, or as `root` where a file has no name; all are durable then.

    `read` brings elements, and `straight` what is stored as it is wanted.
    """
    pool = BufferPool(budget, WINDOWS, PAGE, WINDOW)
    try:
        for file in files:
            name = _checked_name(file.name)
            path = root / name if name else root
            with storage_errors(f"writing {path}"):
                _write(path, file, Filling(file.segments, read, straight), pool, notes, progress)
    finally:
        pool.close()


def _checked_name(name: str) -> str:
    parts = PurePosixPath(name).parts
    if name.startswith("/") or ".." in parts or "\0" in name or "\\" in name:
        raise UnsafeCheckpointError(f"a file of the result would be {name!r}, outside of it")
    return name


def _write(
    path: Path,
    file: OutFile,
    filling: Filling,
    pool: BufferPool,
    notes: Notes,
    progress: Callable[[int], None],
) -> None:
    noted = notes.found(file.name)
    found = _still_true(noted, path, file.size)
    if noted is not None and found is None:
        # Before another takes its name: that one is as large from the first, and would be taken
        # for what was noted.
        notes.note(file.name, FileNote(0, {}))
    if found is not None and found.done:
        progress(file.size)
        return
    LocalStore(path.parent).make_directory("")
    out, found = _opened(path, found)
    try:
        out.allocate(file.size)
        os.ftruncate(out.fd, file.size)
        if file.size >= DIRECT_FROM:
            out.begin_direct()
        writing = _Writing(out, file, filling, pool, notes, progress, found)
        writing.run()
    except BaseException:
        out.close()
        raise
    out.close()


def _still_true(found: FileNote | None, path: Path, size: int) -> FileNote | None:
    """What was noted of a file, if that is there: its name may not have been durable in a crash."""
    try:
        return found if found is None or path.stat().st_size == size else None
    except FileNotFoundError:
        return None


def _opened(path: Path, found: FileNote | None) -> tuple[WriteFile, FileNote]:
    """A file that was begun, where it is known how far it is; else a new one."""
    store, name = LocalStore(path.parent), path.name
    if found is not None:
        return store.open_shared(name), found
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
        # For good: after a crash it would be taken for the new one, as it has its name and size.
        store.sync_directory()
    return store.create(name), FileNote(0, {})


@dataclass(frozen=True, slots=True, eq=False)
class _Window:
    number: int
    low: int
    high: int
    buffer: Bytes

    @property
    def data(self) -> Bytes:
        return self.buffer[: self.high - self.low]


class _Sum(NamedTuple):
    segment: int
    crc: int
    nbytes: int


class _Writing:
    """One file being written."""

    def __init__(
        self,
        out: WriteFile,
        file: OutFile,
        filling: Filling,
        pool: BufferPool,
        notes: Notes,
        progress: Callable[[int], None],
        found: FileNote,
    ) -> None:
        self._out, self._file, self._filling = out, file, filling
        self._pool, self._notes, self._progress = pool, notes, progress
        self._begin = found.upto
        self._sums = dict(found.sums)
        """Of checked segments by their numbers, as far as windows are written without a gap."""
        self._sums_of: dict[int, list[_Sum]] = {}
        """Those of each window that is not in there yet."""
        checked = [n for n, s in enumerate(file.segments) if isinstance(s, Elements) and s.checked]
        self._numbers = {id(file.segments[number]): number for number in checked}
        self._lock = threading.Lock()
        self._noting = threading.Lock()
        self._written: set[int] = set()
        self._next = self._noted = 0

    def run(self) -> None:
        """All windows; then what follows from them; then all of it is durable."""
        self._progress(self._begin)
        unit, end = self._pool.unit, self._file.size
        with Crew(self._write, self._drop, min(2, io_threads() + 1), "write") as writers:

            def bring(task: tuple[int, int]) -> None:
                number, low = task
                buffer = self._pool.take()
                assert buffer is not None
                window = _Window(number, low, min(low + unit, end), buffer)
                try:
                    self._filling.fill(window.low, window.high, window.data)
                    self._sum(window)
                except BaseException:
                    self._pool.give(buffer)
                    raise
                writers.hand(window)

            run_in_order(enumerate(range(self._begin, end, unit)), bring, READERS)
        self._put_together(self._noted, self._next)
        for segment in self._file.segments:
            if isinstance(segment, Late):
                data = segment.make(self._sum_of)
                assert len(data) == segment.nbytes, "a late segment is as long as it said"
                self._out.write_at(memoryview(data), segment.start)
        self._out.sync()
        self._notes.note(self._file.name, FileNote(self._file.size, {}, done=True))

    def _sum_of(self, segment: Elements) -> int:
        return self._sums.get(self._numbers[id(segment)], 0)

    def _sum(self, window: _Window) -> None:
        """Sum what lies in a window of each checked segment, while it is in a cache."""
        sums = []
        for row in self._filling.rows(window.low, window.high) if self._numbers else ():
            segment = self._file.segments[row]
            if isinstance(segment, Elements) and segment.checked:
                low = max(segment.start, window.low) - window.low
                high = min(segment.start + segment.nbytes, window.high) - window.low
                sums.append(_Sum(row, zlib.crc32(window.data[low:high].data), high - low))
        with self._lock:
            self._sums_of[window.number] = sums

    def _put_together(self, first: int, last: int) -> dict[int, int]:
        """Add the sums of windows [first, last), which come next; gives what they came to."""
        changed: dict[int, int] = {}
        for window in range(first, last):
            for row, crc, nbytes in self._sums_of.pop(window):
                before = self._sums.get(row)
                changed[row] = crc if before is None else combined(before, crc, nbytes)
                self._sums[row] = changed[row]
        return changed

    def _write(self, window: _Window) -> None:
        try:
            data = window.data.data
            for at in range(0, len(data), WRITE):
                piece = data[at : at + WRITE]
                whole = len(piece) // PAGE * PAGE
                # The last bytes of a file are no whole page: they go by themselves, after the rest.
                for low, high in ((0, whole), (whole, len(piece))):
                    if low < high:
                        self._out.write_at(piece[low:high], window.low + at + low)
        finally:
            self._pool.give(window.buffer)
        self._progress(window.high - window.low)
        self._note(window.number)

    def _drop(self, window: _Window) -> None:
        self._pool.give(window.buffer)

    def _note(self, number: int) -> None:
        """Count a window; every so often make what is there durable, and note it."""
        with self._lock:
            self._written.add(number)
            while self._next in self._written:
                self._written.remove(self._next)
                self._next += 1
            due = (self._next - self._noted) * self._pool.unit >= NOTE_EVERY
        if not due or not self._noting.acquire(blocking=False):
            return
        try:
            with self._lock:
                first, last = self._noted, self._next
                self._noted = last
                sums = self._put_together(first, last)
            self._out.sync()
            upto = min(self._begin + last * self._pool.unit, self._file.size)
            self._notes.note(self._file.name, FileNote(upto, sums))
        finally:
            self._noting.release()
