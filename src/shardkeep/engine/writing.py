# SPDX-License-Identifier: Apache-2.0
"""Writing one file: elements from anywhere, digested and written from private buffers.

A file is cut into units. Each is filled (the caller's memory is read once, into a buffer of ours),
digested while it is hot, and written at its place: what is digested is what is written. Filling and
digesting keep a core busy and writing keeps a disk busy, so each has threads of its own, and a unit
is handed from one to the other. Memory of a snapshot needs no filling and stands still: while the
cores are busy with taking it, its units are written first and digested later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardkeep.arrays import Bytes
from shardkeep.engine.budget import BufferPool
from shardkeep.engine.digests import (
    FILE_ALIGNMENT,
    Algorithm,
    ContentDigests,
    DigestLayout,
)
from shardkeep.engine.filling import SMALL, Chunks, Filler
from shardkeep.engine.parallel import Crew, run_in_order
from shardkeep.stores.local import WriteFile

__all__ = ["Payload", "WriteStats", "write_file"]

STRIP = 4
"""Units that one thread writes in a row, in a large file."""


@dataclass(frozen=True, eq=False)
class Payload:
    """What a file holds before its digests: head, chunks and the rest, without holes."""

    head: bytes
    """Its first bytes."""
    chunks: Chunks
    """What comes next."""
    late_start: int
    """Where the chunks end."""
    late: Callable[[], bytes] = bytes
    """Gives what follows them; called once, when every chunk has been digested."""


@dataclass(slots=True)
class WriteStats:
    """What was done; seconds are summed over threads."""

    written_bytes: int = 0
    """Of all files, digests and padding included."""
    written_files: int = 0
    """Files."""
    direct_files: int = 0
    """Those of them written around the page cache to their end."""
    requests: int = 0
    """Writes asked of the store."""
    copy_s: float = 0.0
    """Filling buffers."""
    digest_s: float = 0.0
    """Digesting them."""
    pwrite_s: float = 0.0
    """Writing them."""
    sync_s: float = 0.0
    """Making files durable."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **done: float) -> None:
        """Count some more, from any thread."""
        with self._lock:
            for name, value in done.items():
                setattr(self, name, getattr(self, name) + value)

    def as_dict(self) -> dict[str, float]:
        """Every counter by name."""
        names = [name for name in self.__dataclass_fields__ if not name.startswith("_")]
        return {name: getattr(self, name) for name in names}


def write_file(
    file: WriteFile,
    payload: Payload,
    layout: DigestLayout,
    *,
    pool: BufferPool,
    algorithm: Algorithm,
    threads: int = 1,
    writers: int = 0,
    content: ContentDigests | None = None,
    stats: WriteStats | None = None,
    progress: Callable[[int], None] | None = None,
) -> bytes:
    """Write all of a new file, for which space has been allocated; returns its root digest.

    `threads` fill and digest, `writers` write; without `writers`, each writes what it has digested.
    Nothing is synced. What `progress` raises, which is called after every unit, ends the writing.
    """
    stats = WriteStats() if stats is None else stats
    writer = _FileWriter(
        file, payload, layout, pool, algorithm, threads, writers, content, stats, progress
    )
    root = writer.run()
    stats.add(written_files=1, written_bytes=layout.file_size, direct_files=int(file.direct))
    return root


@dataclass(frozen=True, slots=True, eq=False)
class _Filled:
    """A unit whose elements are in a buffer, or on their way there."""

    low: int
    high: int
    buffer: Bytes
    rows: tuple[int, int]
    """The chunks in it."""
    done: Callable[[], None] | None
    image: Bytes | None = None
    """Where its bytes are, if not in the buffer; which is kept all the same: so many units may be
    on their way at a time."""

    @property
    def data(self) -> Bytes:
        """Its bytes."""
        return self.buffer[: self.high - self.low] if self.image is None else self.image

    def wait(self) -> None:
        """Until they have arrived."""
        if self.done is not None:
            self.done()


class _FileWriter:
    """One file being written."""

    def __init__(
        self,
        file: WriteFile,
        payload: Payload,
        layout: DigestLayout,
        pool: BufferPool,
        algorithm: Algorithm,
        threads: int,
        writers: int,
        content: ContentDigests | None,
        stats: WriteStats,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._file = file
        self._payload = payload
        self._layout = layout
        self._pool = pool
        self._algorithm = algorithm
        self._most = threads
        self._content = content
        self._stats = stats
        self._progress = progress
        self._level1 = bytearray(layout.level1)
        self._late: Bytes | None = None
        self._filler = Filler(payload.chunks, pool.staging)
        # Direct I/O moves whole pages; the bytes after the last of them go with the digests.
        self._last_page = layout.payload // FILE_ALIGNMENT * FILE_ALIGNMENT
        self._rest = b""
        self._put_off: list[list[_Filled]] = []
        """What was written before it was digested, strip by strip."""
        self._catching_up = threading.Lock()
        self._is_last = False
        """Whether only what depends on digests is left."""
        if layout.payload <= pool.unit:
            writers = 0
        self._writers = Crew(self._write_unit, self._drop, writers, "write")

    def run(self) -> bytes:
        """Chunks in parallel; then, in order, what depends on their digests; then the digests."""
        layout = self._layout
        turning = self._payload.late_start // layout.block * layout.block
        threads = self._threads()
        with self._writers:
            run_in_order(self._strips(turning, threads), self._next_strip, threads, alone_here=True)
            run_in_order(self._put_off, self._digest_all, threads, alone_here=True)
            self._is_last = True
            self._strip((turning, layout.payload))
        # They know this and this knows them: a circle, in which an image would stay for as long as
        # Python's collector is paused.
        del self._writers
        entry, root = layout.seal(bytes(self._level1), self._algorithm)
        self._write_end(np.frombuffer(self._rest + entry, np.uint8))
        return root

    def _threads(self) -> int:
        """How many threads this file keeps busy."""
        chunks, end = self._payload.chunks, self._payload.late_start
        if end <= self._pool.unit or end < len(chunks.start) * SMALL:
            return 1  # small chunks are work for the interpreter, which runs one thread at a time
        return min(self._pool.threads, self._most)

    def _strips(self, end: int, threads: int) -> Sequence[tuple[int, int]]:
        """Cut what comes before `end` into runs of units, several for every thread."""
        unit = self._pool.unit
        if self._payload.chunks.image.is_passing:
            return list(_units(0, end, unit))
        together = max(1, min(STRIP, end // (unit * threads * STRIP)))
        return list(_units(0, end, unit * together))

    def _next_strip(self, strip: tuple[int, int]) -> None:
        """After one that was put off, if there is any: the disk has units to write meanwhile."""
        if self._payload.chunks.image.is_settled():
            with self._catching_up:
                late = self._put_off.pop() if self._put_off else []
            self._digest_all(late)
        self._strip(strip)

    def _strip(self, strip: tuple[int, int]) -> None:
        """One unit after the other: a piece that two of them share is then digested in order.

        What comes from a device is begun one unit ahead.
        """
        ahead: list[_Filled] = []
        put_off: list[_Filled] = []
        try:
            for low, high in _units(*strip, self._pool.unit):
                buffer = self._pool.take(wait=not ahead)
                if buffer is None:
                    self._finish(ahead.pop())
                    buffer = self._pool.take()
                    assert buffer is not None
                ahead.append(self._begin(low, high, buffer))
                if len(ahead) == 1 and self._is_put_off(ahead[0]):
                    put_off.append(ahead.pop())
                    self._writers.hand(put_off[-1])
                    continue
                self._digest_all(put_off)
                if self._pool.staging is None or len(ahead) > 1:
                    self._finish(ahead.pop(0))
            while ahead:
                self._finish(ahead.pop(0))
            if put_off:
                self._put_off.append(put_off)
        finally:
            for filled in ahead:
                self._drop(filled)

    def _begin(self, low: int, high: int, buffer: Bytes) -> _Filled:
        begun = time.perf_counter()
        staging = self._pool.staging
        try:
            image = self._payload.chunks.image.find(low, high)
            if image is not None:
                return _Filled(low, high, buffer, self._filler.rows(low, high), None, image)
            rows = self._fill(low, high, buffer[: high - low])
            done = None if staging is None else staging.fence()
        except BaseException:
            try:
                if staging is not None:
                    staging.fence()()  # nothing may still be on its way when the memory goes
            finally:
                self._pool.give(buffer)
            raise
        self._stats.add(copy_s=time.perf_counter() - begun)
        return _Filled(low, high, buffer, rows, done)

    def _finish(self, filled: _Filled) -> None:
        """Digest a unit once it is there, and leave it to be written."""
        clock = time.perf_counter
        try:
            begun = clock()
            filled.wait()
            there = clock()
            self._digest(filled.low, filled.rows, filled.data)
            digested = clock()
        except BaseException:
            self._pool.give(filled.buffer)
            raise
        self._stats.add(copy_s=there - begun, digest_s=digested - there)
        self._writers.hand(filled)

    def _is_put_off(self, filled: _Filled) -> bool:
        """Whether it stands still where it is, and there is no core to digest it now."""
        settled = self._payload.chunks.image.is_settled
        return filled.image is not None and not self._is_last and not settled()

    def _digest_all(self, put_off: list[_Filled]) -> None:
        """Units of one strip, in order, of which none is left to digest then."""
        while put_off:
            filled = put_off.pop(0)
            begun = time.perf_counter()
            self._digest(filled.low, filled.rows, filled.data)
            self._stats.add(digest_s=time.perf_counter() - begun)

    def _write_unit(self, filled: _Filled) -> None:
        begun = time.perf_counter()
        try:
            self._write(filled.low, filled.data)
        finally:
            self._pool.give(filled.buffer)
        self._stats.add(requests=1, pwrite_s=time.perf_counter() - begun)
        if self._progress is not None:
            self._progress(filled.high - filled.low)

    def _drop(self, filled: _Filled) -> None:
        """Give up a unit; its buffer is free when nothing comes into it any more."""
        try:
            filled.wait()
        finally:
            self._pool.give(filled.buffer)

    def _fill(self, low: int, high: int, data: Bytes) -> tuple[int, int]:
        """Copy everything that lies in [low, high) to its place; says which chunks that are."""
        head, late = self._payload.head, self._payload.late_start
        if low < len(head):
            part = np.frombuffer(head, np.uint8)[low:high]
            np.copyto(data[: len(part)], part)
        first, last = self._filler.fill(low, high, data)
        if high > late:
            if self._pool.staging is not None:
                self._pool.staging.fence()()  # what is digested here must have arrived
            # Units from here on come in order, so all chunks but those just copied are digested.
            self._digest_content(low, (first, last), data)
            if self._late is None:
                self._late = np.frombuffer(self._payload.late(), np.uint8)
                assert len(self._late) == self._layout.payload - late
            begin = max(low, late)
            np.copyto(data[begin - low :], self._late[begin - late : high - late])
            first = last
        return first, last

    def _digest(self, low: int, rows: tuple[int, int], data: Bytes) -> None:
        block = self._layout.block
        found = self._algorithm.digests(data.data, block)
        place = low // block * self._algorithm.size
        self._level1[place : place + len(found)] = found
        self._digest_content(low, rows, data)

    def _digest_content(self, low: int, rows: tuple[int, int], data: Bytes) -> None:
        """Chunks that lie whole in the unit in one go; the two that may not, by themselves."""
        if self._content is not None:
            self._content.add_stretch(self._payload.chunks.start, rows, low, data.data)

    def _write(self, low: int, data: Bytes) -> None:
        whole = self._last_page - low
        if whole < len(data):
            self._rest = bytes(data[max(0, whole) :])
            data = data[: max(0, whole)]
        if len(data):
            self._file.write_at(data.data, low)

    def _write_end(self, end: Bytes) -> None:
        """What is left: a part of a page, the digests, zeros; it fills whole pages."""
        with self._pool.buffer() as buffer:
            for at, stop in _units(0, len(end), len(buffer)):
                data = buffer[: stop - at]
                np.copyto(data, end[at:stop])
                self._file.write_at(data.data, self._last_page + at)
                self._stats.add(requests=1)


def _units(low: int, high: int, unit: int) -> Iterator[tuple[int, int]]:
    for at in range(low, high, unit):
        yield at, min(at + unit, high)
