# SPDX-License-Identifier: Apache-2.0
"""A snapshot: what one rank writes, copied into the arena, and written from there as it arrives.

Chunks lie in the arena in the order they are written, so that writing can begin with the first
unit while the next are still copied. Host memory is copied by a few threads; copies from a device
are begun in order by one thread, and the device itself says of each unit when it is there: whoever
waits for it asks the device nothing.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from shardkeep.arrays import Bytes, HostSource, Source, Staging, lies_within
from shardkeep.columns import Ints
from shardkeep.dtypes import lookup
from shardkeep.engine.arena import SEGMENT, Arena
from shardkeep.engine.arriving import ArrivingSource, arriving_sources, image_of
from shardkeep.engine.filling import Chunks, Filler
from shardkeep.engine.parallel import run_in_order
from shardkeep.memory import Addresses, Spans, address_of
from shardkeep.planner import (
    BytesWriteData,
    Image,
    PlannedPlanner,
    SavePlan,
    SavePlanner,
    StalePlan,
    WriteItem,
    WriteItems,
)

__all__ = ["Copying", "Held", "Mask", "Snapshot", "StagedPlanner", "hold"]

HOST_UNIT = 64 << 20
"""Bytes that one thread copies in one go: the C library copies large pieces around the caches, at
twice the rate."""
DEVICE_UNIT = 128 << 20
"""Bytes of a device that arrive together: a queue of copies has an end, at which asking waits."""
GROUP = 1 << 16
"""What goes into one file begins at a multiple of this, so that all of it stays aligned."""
ITEM = 16
"""Bytes of the largest element."""
LOOK_S = 0.0005
"""Between two looks at what a device says."""
TURN_S = 0.002
"""The same at what somebody else may have seen who waits for another unit."""
WAIT_S = 0.1
"""Between two looks at whether there is an error, of which one is told at once."""

Mask = npt.NDArray[np.bool_]


@dataclass(eq=False)
class Held:
    """The chunks of a rank, where in an arena they go, and how their elements are found."""

    items: WriteItems
    """What is written."""
    rows: Ints
    """Its chunks, in the order they lie in the arena."""
    start: Ints
    """Where each lies there."""
    nbytes: Ints
    """Bytes of each."""
    itemsize: Ints
    """Bytes of an element of each."""
    length: int
    """Bytes of the arena that are used."""
    values: dict[str, bytes]
    """The encoded values, by name."""
    planner: SavePlanner
    """Knows their elements."""

    def part(
        self,
        which: Mask,
        sources: Sequence[Source] | None = None,
        *,
        still: bool = False,
        within: Spans | None = None,
    ) -> Chunks:
        """Some of them, as they lie in the arena, and what they hold if that is elsewhere: in
        `sources`, unless these are still empty when it is looked up.

        With `still` nothing is changed until they are copied: where it is in host memory, which is
        quick to find, is all that need be known then. Else `within` says where each of all chunks
        must still lie when it is looked up: it may have other memory for a while.
        """
        rows, planner, items = self.rows[which], self.planner, self.items
        places = None if within is None else within[which].tolist()

        def find(first: int, last: int) -> Sequence[Source]:
            # Not all before the first is copied: a device is at work meanwhile.
            if sources:
                return sources[first:last]
            found = planner.sources(items, rows[first:last])
            if places is not None and not all(
                lies_within(source, *place)
                for source, place in zip(found, places[first:last], strict=True)
            ):
                raise StalePlan
            return found

        columns = self.start[which], self.nbytes[which], self.itemsize[which]
        if not still:
            return Chunks(*columns, find)
        # All before the first is copied: threads that copy would wait for each other.
        address = planner.addresses(items, rows)
        return Chunks(*columns, find, addresses=lambda first, last: address[first:last])


def hold(plan: SavePlan, planner: SavePlanner, order: Sequence[Ints]) -> Held:
    """Look up all that a rank writes; `order` has, for each file, its rows as they lie in it."""
    items = WriteItems.of(plan.items)
    rows = np.concatenate([np.zeros(0, np.int64), *order])
    nbytes = items.chunks.nbytes(items.tensors)[rows]
    itemsize = items.tensors.itemsize[items.chunks.tensor[rows]]
    start = np.zeros(len(rows), np.int64)
    at = first = 0
    for group in order:
        mine = slice(first, first + len(group))
        room = nbytes[mine]
        begin = np.cumsum(room) - room
        if (begin % itemsize[mine]).any():  # not in an order that keeps elements aligned
            room = -(-room // ITEM) * ITEM
            begin = np.cumsum(room) - room
        start[mine] = at + begin
        at += -(-int(room.sum()) // GROUP) * GROUP
        first += len(group)
    values = {item.index.fqn: planner.resolve_data(item) for item in items.value_items}
    planner.check_sources(items, rows)
    return Held(items, rows, start, nbytes, itemsize, at, values, planner)  # type: ignore[arg-type]


@dataclass(eq=False)
class Copying:
    """Some chunks that are to come into the arena."""

    fill: Callable[[int, int, Bytes], object]
    """Copies what they have of a stretch of the arena."""
    units: Ints
    """The units they lie in."""
    staging: Staging | None
    """How they come from a device."""


class Snapshot:
    """Chunks on their way into the arena, and there."""

    def __init__(self, held: Held, arena: Arena, unit: int, threads: int) -> None:
        """The arena is large enough; nothing is expected yet. `threads` copy host memory."""
        self.held = held
        self.arena = arena
        self.unit = unit
        """Bytes that arrive together."""
        self._threads = threads
        self._missing = np.zeros(-(-held.length // unit), np.int64)
        """Copies of each unit that are not done, or begun by a device, as far as was looked."""
        self._arrived: dict[int, list[Callable[[], bool]]] = {}
        """For units that come from a device, what says that they are there."""
        self._told: queue.SimpleQueue[tuple[int, Callable[[], bool] | None] | None] = (
            queue.SimpleQueue()
        )
        """Units that came, and that there is an error. The caller's thread may be interrupted
        anywhere, and must hold no lock that others need."""
        self._turn = threading.Lock()
        """Of those who wait, one looks at what was told."""
        self.error: BaseException | None = None
        """Why what is not there will never be."""

    @property
    def memory(self) -> Bytes:
        """What they come into."""
        return self.arena.memory

    def is_ready(self, staging: Staging | None) -> bool:
        """Whether all of the arena that is used can be copied to as fast as memory goes."""
        return self.arena.is_ready(self.held.length, staging)

    # --- copying

    def expect(
        self,
        which: Mask,
        staging: Staging | None = None,
        sources: Sequence[Source] | None = None,
        *,
        still: bool = False,
        within: Spans | None = None,
    ) -> Copying:
        """Some chunks, without which their units are not whole; the rest as in `Held.part`."""
        held = self.held
        filler = Filler(held.part(which, sources, still=still, within=within), staging)
        units = _units_of(held.start[which], held.nbytes[which], self.unit, len(self._missing))
        self._missing[units] += 1
        return Copying(filler.fill, units, staging)

    def copy(self, copying: Copying) -> None:
        """Copy chunks that are expected. What comes from a device is only begun."""
        memory, unit, length = self.arena.memory, self.unit, self.held.length

        def fill(number: int) -> None:
            low = number * unit
            high = min(low + unit, length)
            copying.fill(low, high, memory[low:high])

        if copying.staging is None:

            def work(number: int) -> None:
                fill(number)
                self._came(number)

            run_in_order(copying.units.tolist(), work, self._threads, alone_here=True)
            return
        for number in copying.units.tolist():
            self._make_ready(min((number + 1) * unit, length), copying.staging)
            fill(number)
            self._came(number, copying.staging.arrival())

    def complete(self) -> None:
        """All chunks are there."""
        self.arena.note_filled(self.held.length)

    def _make_ready(self, nbytes: int, staging: Staging) -> None:
        if not self.arena.is_ready(nbytes, staging):
            nbytes = min(-(-nbytes // SEGMENT) * SEGMENT, len(self.arena.memory))
            self.arena.prepare(nbytes, staging, self._threads)

    def _came(self, number: int, arrived: Callable[[], bool] | None = None) -> None:
        self._told.put((number, arrived))

    def fail(self, error: BaseException) -> None:
        """What is not there yet will never be: whoever waits for it gets the first such error."""
        if self.error is None:
            self.error = error
        self._told.put(None)

    # --- waiting

    def wait(self, low: int = 0, high: int | None = None) -> None:
        """Until the bytes [low, high) of the arena are there."""
        high = self.held.length if high is None else high
        first, last = low // self.unit, -(-high // self.unit)
        while self._missing[first:last].any():
            self.check()
            if self._turn.acquire(timeout=TURN_S):
                try:
                    if self._missing[first:last].any():
                        self._look(WAIT_S)
                finally:
                    self._turn.release()
        for number in range(first, last):
            for arrived in tuple(self._arrived.get(number, ())):
                while not arrived():
                    self.check()
                    time.sleep(LOOK_S)
        self.check()

    def _look(self, wait_s: float) -> bool:
        """Take note of one thing that was told, in one's turn; whether there was any."""
        try:
            told = self._told.get(timeout=wait_s) if wait_s else self._told.get_nowait()
        except queue.Empty:
            return False
        if told is not None:
            number, arrived = told
            if arrived is not None:
                self._arrived.setdefault(number, []).append(arrived)
            self._missing[number] -= 1
        return True

    def is_settled(self) -> bool:
        """Whether threads have ended to copy; a device may still be at it."""
        if self._turn.acquire(blocking=False):
            try:
                while self._look(0):
                    """All that there is."""
            finally:
                self._turn.release()
        return not self._missing.any()

    def arrivals(self) -> Iterator[int]:
        """Up to where all of the arena is there, again and again until that is its end."""
        for low in range(0, self.held.length, self.unit):
            high = min(low + self.unit, self.held.length)
            self.wait(low, high)
            yield high

    def check(self) -> None:
        """Raise what went wrong."""
        if self.error is not None:
            raise self.error


def _units_of(start: Ints, nbytes: Ints, unit: int, count: int) -> Ints:
    """The units that chunks lie in."""
    edges = np.zeros(count + 1, np.int64)
    np.add.at(edges, start // unit, 1)
    np.add.at(edges, (start + nbytes - 1) // unit + 1, -1)
    return np.flatnonzero(np.cumsum(edges[:-1]))


class StagedPlanner(PlannedPlanner):
    """Stands in for a planner once its elements are in an arena, or on their way there."""

    def __init__(self, snapshot: Snapshot, features: frozenset[str]) -> None:
        """`features` are those of the planner that made the plan."""
        self.snapshot = snapshot
        self._features = features
        held = snapshot.held
        self._place = np.zeros(len(held.items.chunks), np.int64)
        self._place[held.rows] = np.arange(len(held.rows))
        self._by_key: dict[tuple[str, tuple[int, ...] | None], int] | None = None

    @property
    def features(self) -> frozenset[str]:
        """As before."""
        return self._features

    def places(self, rows: Ints) -> Ints:
        """Where in the arena chunks of the plan lie."""
        return self.snapshot.held.start[self._place[rows]]

    def addresses(self, items: WriteItems, rows: Ints) -> Addresses:
        """In the arena; waits for all of it."""
        self.snapshot.wait()
        places: Addresses = self.places(rows).astype(np.uint64)
        return places + np.uint64(address_of(self.snapshot.memory))

    def sources(self, items: WriteItems, rows: Ints) -> Sequence[Source]:
        """Chunks of the plan, in the arena; waits for small ones."""
        held, place = self.snapshot.held, self._place[rows]
        bits = [lookup(kind.dtype).bits().newbyteorder("<") for kind in items.tensors.kinds]
        kinds = items.tensors.kind[items.chunks.tensor[rows]].tolist()
        dtypes = [bits[kind] for kind in kinds]
        return arriving_sources(self.snapshot, held.start[place], held.nbytes[place], dtypes)

    def image(self, rows: Ints, start: Ints, nbytes: Ints) -> Image:
        """In the arena, as they arrive."""
        return image_of(self.snapshot, start, nbytes, self.places(rows))

    def resolve_data(self, write_item: WriteItem) -> Source | bytes:
        """By name and offsets."""
        held = self.snapshot.held
        if isinstance(write_item.data, BytesWriteData):
            return held.values[write_item.index.fqn]
        if self._by_key is None:
            names, boxes = held.items.tensors.names, held.items.chunks.boxes
            tensor = held.items.chunks.tensor.tolist()
            self._by_key = {
                (names[tensor[row]], boxes[row].offsets): row for row in range(len(tensor))
            }
        row = self._by_key[write_item.index.fqn, write_item.data.chunk.offsets]
        (source,) = self.sources(held.items, np.array([row]))
        assert isinstance(source, HostSource | ArrivingSource)
        return replace(source, array=source.array.reshape(write_item.data.chunk.sizes))
