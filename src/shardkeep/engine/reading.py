# SPDX-License-Identifier: Apache-2.0
"""Reading regions: wanted bytes -> digest blocks -> parallel verified reads -> copies.

A unit that is in the page cache is read from there, piece by piece, each digested while it is hot,
and where a region is one run in host memory, straight into it. A unit that is not is fetched around
the page cache into a private buffer as a whole, by threads that wait for the disk, and handed on to
those that digest and copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter

import numpy as np

from shardkeep.arrays import Bytes, HostPlaces, Sink, Staging
from shardkeep.columns import Ints
from shardkeep.engine.blocks import BlockFile
from shardkeep.engine.budget import BufferPool
from shardkeep.engine.delivery import Delivery
from shardkeep.engine.pages import page_aligned
from shardkeep.engine.parallel import Crew, run_in_order
from shardkeep.engine.regions import Regions, cut_sparse, spans_of
from shardkeep.engine.units import Runs, Units, members_of, runs_of
from shardkeep.engine.verified import DamagedBlock
from shardkeep.errors import CorruptionError
from shardkeep.memory import address_of
from shardkeep.stores.page_cache import is_cached

__all__ = ["READ_STATS", "Reading", "wanted_runs"]

PIECE = 512 << 10
"""Bytes that stay in a core's cache between the steps that touch them."""
LARGE_PIECE = 2 << 20
"""Bytes read at once into a buffer, from which they are copied on: fewer calls, more threads."""

COLD_UNIT = 8 << 20
"""Most bytes of a read around the page cache: disks that are shared answer late, or so many reads a
second only."""
WARM_UNIT = 16 << 20
"""Most bytes of a unit that is read piece by piece."""
STAGED_UNIT = 32 << 20
"""Most bytes of one that a device takes: each costs some calls, and nothing is in a cache."""

PAGE = 4096
"""Where memory must begin that is read to around the page cache."""

FETCHERS = 4
"""Reads that wait for the disk at the same time, at least."""

SAMPLES = 4
"""Units that are asked for whether the file is in memory, before any is read."""

READ_STATS = (
    "bytes_read",
    "read_requests",
    "bytes_direct",
    "bytes_straight",
    "bytes_received",
    "read_thread_s",
    "digest_thread_s",
    "copy_thread_s",
)
"""What is counted: bytes read, how often, how many around the page cache and how many without a
buffer; bytes that other ranks read; seconds of all threads together."""

Files = Callable[[int], AbstractContextManager[BlockFile]]


def wanted_runs(regions: Regions, block: int) -> Runs:
    """The blocks that a reading of these regions will read."""
    regions = cut_sparse(regions, block)
    spans = spans_of(regions)
    return runs_of(regions.file, spans.low, spans.high, block)


class Reading:
    """One reading of many regions into their sinks, all at once or piece by piece.

    A damaged block raises `CorruptionError` naming the regions that lie in it, through `names`.
    Sinks may have been written by then: their contents are undefined after an error.
    """

    def __init__(
        self,
        files: Files,
        regions: Regions,
        sinks: Callable[[int], Sink],
        *,
        block: int,
        pool: Callable[[int, int], BufferPool],
        threads: int,
        places: HostPlaces | None = None,
        staging: Staging | None = None,
        progress: Callable[[int], None] | None = None,
        names: Callable[[int], str] = str,
    ) -> None:
        """`pool(buffers, nbytes)` gives that many buffers, of so many bytes at most.

        `threads` are what the machine's cores are good for; where the disk must be waited for there
        are as many again, which do only that.
        """
        regions = cut_sparse(regions, block)
        self.regions = regions
        self.spans = spans = spans_of(regions)
        self.runs = runs_of(regions.file, spans.low, spans.high, block)
        """The blocks to read that nobody has brought yet."""
        self.staging = staging
        self.delivery = Delivery(regions, spans, sinks, places=places, staging=staging)
        self.large = spans.flat & spans.alone & (spans.high - spans.low >= 2 * block)
        self.files = files
        self.block = block
        self.make_pool = pool
        self.threads = threads
        self.progress = progress
        self.names = names
        self.stats = dict.fromkeys(READ_STATS, 0.0)
        self.files_read: set[int] = set()
        """Of which files anything was read here."""
        self.lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of whole blocks that are left, of which the last of a file may be short."""
        return int(self.runs.blocks.sum()) * self.block

    def run(self, *, alone: bool = False) -> None:
        """Read everything that is left; `alone` on the caller's thread, one of several that read.

        Then nothing is handed on: what one of them waits for, another can digest meanwhile.
        """
        cold = self.is_cold()
        fetchers = max(FETCHERS, self.threads) if cold else self.threads
        workers = self.threads if cold or self.staging else 0
        if alone:
            fetchers, workers = 1, 0
        # One buffer for each thread, and where units are handed on, one waits for each fetcher.
        buffers = workers + 2 * fetchers if workers else fetchers
        warm = STAGED_UNIT if self.staging else WARM_UNIT
        self.pool = self.make_pool(buffers, COLD_UNIT if cold else warm)
        self.units = self.members(self.runs.cut(self.pool.unit // self.block))
        fetchers, workers = (min(count, self.pool.threads) for count in (fetchers, workers))
        try:
            with Crew(self._deliver, self._drop, workers, "read") as crew:

                def fetch(number: int) -> None:
                    crew.hand(self._fetch(number))

                run_in_order(range(len(self.units)), fetch, fetchers, alone_here=alone)
        finally:
            self.pool.close()

    def members(self, runs: Runs) -> Units:
        """Runs as units of this reading."""
        return members_of(runs, self.regions.file, self.spans.low, self.spans.high, self.block)

    def is_cold(self) -> bool:
        """Whether some of it must be waited for, by a few samples."""
        runs = self.runs
        for number in range(0, len(runs), max(1, len(runs) // SAMPLES)):
            with self.files(int(runs.file[number])) as file:
                low = int(runs.first[number]) * self.block
                high = min(int(runs.stop[number]) * self.block, file.payload)
                if not is_cached(file.file.fd, low, min(high - low, COLD_UNIT)):
                    return True
        return False

    def read_raw(self, runs: Runs) -> list[Bytes]:
        """Some runs as they lie in the file, unchecked, for whoever checks them.

        A last block that is short has something after it.
        """
        data = [page_aligned(blocks * self.block) for blocks in runs.blocks.tolist()]

        def read(number: int) -> None:
            self.bring(runs, number, data[number])

        run_in_order(range(len(runs)), read, self.threads * 2)
        return data

    def bring(self, runs: Runs, number: int, out: Bytes, by_way_of: Bytes | None = None) -> None:
        """One run as it lies in the file, unchecked, into memory that begins on a page.

        What comes from a disk goes by way of other memory, if there is any, and is copied from it.
        """
        with self.files(int(runs.file[number])) as file:
            self.files_read.add(int(runs.file[number]))
            low = int(runs.first[number]) * self.block
            data = out[: file.payload - low]
            begun = perf_counter()
            direct = 0
            if file.file.is_cold(low, len(data)):
                direct = file.read_cold(out if by_way_of is None else by_way_of, low, len(data))
            else:
                file.read_at(data, low)
                by_way_of = None
            there = perf_counter()
        if by_way_of is not None:
            np.copyto(data, by_way_of[: len(data)])
            self.count(copy_thread_s=perf_counter() - there)
        self.count(
            bytes_read=len(data),
            read_requests=1,
            bytes_direct=direct,
            read_thread_s=there - begun,
        )

    def take(self, runs: Runs, data: Sequence[Bytes]) -> None:
        """Check blocks that somebody brought, and deliver what they hold."""
        units = self.members(runs)

        def deliver(number: int) -> None:
            with self._naming(units.members(number)):
                self.deliver(units, number, data[number])

        run_in_order(range(len(runs)), deliver, self.threads)
        self.runs = self.runs.without(runs)

    def deliver(self, units: Units, number: int, data: Bytes) -> int:
        """Check the blocks of one unit, and deliver what they hold; returns how many bytes."""
        rows, first = units.members(number), int(units.runs.first[number])
        begun = perf_counter()
        with self.files(int(units.runs.file[number])) as file:
            data = data[: file.payload - first * self.block]
            if file.check:
                file.check_blocks(first, data)
        checked = perf_counter()
        self.delivery.put_many(rows, data, first * self.block)
        if self.staging is not None:
            self.staging.fence()()  # the memory is not the pool's
        self.count(digest_thread_s=checked - begun, copy_thread_s=perf_counter() - checked)
        if self.progress is not None:
            self.progress(len(data))
        return len(data)

    def count(self, **amounts: float) -> None:
        """Add to what is counted; from any thread."""
        with self.lock:
            for key, value in amounts.items():
                self.stats[key] += value

    @contextmanager
    def _naming(self, rows: Ints) -> Iterator[None]:
        """Damage found inside becomes an error that names what it hit."""
        try:
            yield
        except DamagedBlock as damage:
            low, high = self.spans.low[rows].tolist(), self.spans.high[rows].tolist()
            spans = zip(rows.tolist(), low, high, strict=True)
            hit = {int(self.regions.sink[row]) for row, a, b in spans if damage.touches(a, b)}
            raise _named(damage, {self.names(sink) for sink in hit}) from None

    def _fetch(self, number: int) -> _Unit:
        """Take a buffer for a unit and, where it must come by way of that, read it."""
        runs = self.units.runs
        buffer = self.pool.take()
        assert buffer is not None
        try:
            with self.files(int(runs.file[number])) as file:
                unit = _Unit(self, number, file.payload, buffer)
                cold = file.file.is_cold(unit.low, unit.high - unit.low)
                if cold or self.staging:
                    unit.fetch(file, cold, self.units.members(number))
        except BaseException:
            self.pool.give(buffer)
            raise
        return unit

    def _deliver(self, unit: _Unit) -> None:
        """Check a unit, reading it first where it is at hand, and copy what it has."""
        rows = self.units.members(unit.number)
        try:
            with self.files(int(self.units.runs.file[unit.number])) as file, self._naming(rows):
                unit.run(file, rows)
        finally:
            self._drop(unit)
        self.files_read.add(int(self.units.runs.file[unit.number]))
        self.count(**unit.stats)
        if self.progress is not None:
            self.progress(unit.high - unit.low)

    def _drop(self, unit: _Unit) -> None:
        self.pool.give(unit.buffer)


class _Unit:
    """One unit while it is being read."""

    def __init__(self, reading: Reading, number: int, payload: int, buffer: Bytes) -> None:
        runs, block = reading.units.runs, reading.block
        self.reading = reading
        self.number = number
        self.low = int(runs.first[number]) * block
        self.high = min(int(runs.stop[number]) * block, payload)
        self.buffer = buffer
        self.data = buffer[: self.high - self.low]
        self.parts: list[tuple[int, Bytes]] = []
        """What was read already, from which byte on, and where it is now."""
        self.placed: set[int] = set()
        """Which of these are where they go."""
        self.stats = dict.fromkeys(READ_STATS, 0.0)
        self.stats["bytes_read"] = self.high - self.low
        self.clock = perf_counter()

    def lap(self, key: str) -> None:
        """Count the time since the last lap under this name."""
        now = perf_counter()
        self.stats[key] += now - self.clock
        self.clock = now

    def fetch(self, file: BlockFile, cold: bool, rows: Ints) -> None:
        """Read all of it, around the page cache where it is not there."""
        if cold:
            self.parts = list(self.pages(rows))
            for begin, memory in self.parts:
                direct = file.read_cold(memory, begin, min(len(memory), self.high - begin))
                self.stats["bytes_direct"] += direct
                self.stats["read_requests"] += 1
        else:
            self.parts = [(self.low, self.data)]
            file.read_at(self.data, self.low)
            self.stats["read_requests"] += 1
        self.lap("read_thread_s")

    def pages(self, rows: Ints) -> Iterator[tuple[int, Bytes]]:
        """Where it is read to, from which byte on: where it goes, if that begins on a page, and
        else the buffer."""
        at = self.low
        for begin, end, memory in self.straight(rows):
            if address_of(memory) % PAGE == 0:
                if at < begin:
                    yield at, self.buffer[at - self.low : begin - self.low]
                yield begin, memory
                self.placed.add(begin)
                self.stats["bytes_straight"] += end - begin
                at = end
        if at < self.high:
            yield at, self.buffer[at - self.low :]

    def run(self, file: BlockFile, rows: Ints) -> None:
        """Check it, and copy it to where it goes."""
        self.clock = perf_counter()
        if not self.parts:
            self.read(file, rows)
            return
        if file.check:
            for begin, memory in self.parts:
                file.check_blocks(begin // self.reading.block, memory[: self.high - begin])
            self.lap("digest_thread_s")
        for begin, memory in self.parts:
            if begin not in self.placed:
                self.put(rows, memory[: self.high - begin], begin)
        self.lap("copy_thread_s")

    def put(self, rows: Ints, data: Bytes, begin: int) -> None:
        """Copy on what regions want of the bytes from `begin` on."""
        if len(data) < self.high - self.low:
            spans = self.reading.spans
            rows = rows[(spans.low[rows] < begin + len(data)) & (spans.high[rows] > begin)]
        self.reading.delivery.put_many(rows, data, begin)

    def read(self, file: BlockFile, rows: Ints) -> None:
        """Bring it from the page cache, check it, and copy on what could not go to its place."""
        at = self.low
        for begin, end, memory in self.straight(rows):
            self.read_between(file, rows, at, begin)
            self.pieces(file, begin, memory, PIECE)
            self.stats["bytes_straight"] += end - begin
            at = end
        self.read_between(file, rows, at, self.high)

    def straight(self, rows: Ints) -> Iterator[tuple[int, int, Bytes]]:
        """Whole blocks that one region alone wants, as one run of host memory, and that memory."""
        reading, block = self.reading, self.reading.block
        large = rows[reading.large[rows]]
        spans = zip(
            large.tolist(),
            reading.spans.low[large].tolist(),
            reading.spans.high[large].tolist(),
            strict=True,
        )
        for row, low, high in spans:
            begin = -(-max(low, self.low) // block) * block
            end = min(high, self.high) // block * block
            memory = reading.delivery.stretch(row, begin, end) if begin < end else None
            if memory is not None:
                yield begin, end, memory

    def read_between(self, file: BlockFile, rows: Ints, begin: int, end: int) -> None:
        """Bring the blocks [begin, end) of small regions, and copy them on while they are hot."""
        if begin == end:
            return
        data = self.buffer[: end - begin]
        self.pieces(file, begin, data, LARGE_PIECE)
        self.clock = perf_counter()
        self.put(rows, data, begin)
        self.lap("copy_thread_s")

    def pieces(self, file: BlockFile, begin: int, memory: Bytes, size: int) -> None:
        """Bring the blocks from `begin` on into memory, piece by piece, and check them."""
        block = self.reading.block
        size = max(block, size // block * block)
        requests, reading, digesting = file.read_pieces(begin // block, memory, size)
        self.stats["read_requests"] += requests
        self.stats["read_thread_s"] += reading
        self.stats["digest_thread_s"] += digesting


def _named(damage: DamagedBlock, names: set[str]) -> CorruptionError:
    hit = sorted(names)
    return CorruptionError(
        f"{damage}; it holds {', '.join(hit[:8])}{' ...' if len(hit) > 8 else ''}. The contents of "
        "the targets are undefined now; load another checkpoint.",
        names=hit,
    )
