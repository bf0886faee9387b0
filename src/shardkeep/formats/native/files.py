# SPDX-License-Identifier: Apache-2.0
"""The files of one rank: what each holds, and how they are written one after the other."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import TracebackType

import numpy as np

from shardkeep.arrays import HostSource, Source, Staging
from shardkeep.columns import Boxes, Ints
from shardkeep.engine.budget import BufferPool, Spares
from shardkeep.engine.digests import Algorithm, ContentDigests, DigestLayout
from shardkeep.engine.filling import Chunks
from shardkeep.engine.parallel import Behind, run_in_order
from shardkeep.engine.writing import Payload, WriteStats, write_file
from shardkeep.formats.native.header import Entry, chunk_entries, write_header
from shardkeep.formats.native.index import IndexEntries
from shardkeep.formats.native.layout import FilePlan
from shardkeep.formats.native.names import CONTENT, CONTENT_KEY, DIGESTS, VALUES, entry_keys
from shardkeep.memory import Addresses, LazyAddresses
from shardkeep.planner import SavePlanner, WriteItems
from shardkeep.stores.local import LocalStore, WriteFile, storage_errors

__all__ = ["FileWriter", "RankChunks", "data_header", "data_payload", "index_payload"]

DIRECT_FROM = 1 << 20
"""Smaller files go through the page cache: one sync costs them more than all the rest."""
DIRECT_UNIT = 4 << 20
"""Most bytes of a direct write: huge pages, enough for a disk, and few turns at the interpreter."""
BUFFERED_UNIT = 4 << 20
"""Most bytes of a write into the page cache, where the file's lock is taken each time."""
STAGED_UNIT = 16 << 20
"""The same for what comes from a device: each costs some calls, and nothing is in a cache."""
MOST_BUSY = 4
"""Threads that fill and digest, and files written at the same time: more of them wait for the
interpreter, whose lock each takes for every block, more than they digest."""
DISK_WRITERS = 3
"""Direct writes that wait for the disk at the same time, at least: one is done, others are next."""


class Abandoned(Exception):
    """Something else went wrong, so this file need not be written."""


class FileWriter:
    """Writes files under one budget: several at a time, or each synced behind the next.

    As a context: on leaving it all files are durable and closed, or the error is raised.
    """

    def __init__(
        self,
        store: LocalStore,
        algorithm: Algorithm,
        block: int,
        *,
        budget: int,
        cores: int,
        staging: Staging | None = None,
        progress: Callable[[int], None] | None = None,
        spares: Spares | None = None,
    ) -> None:
        """`algorithm` and `block` are those of all files of the checkpoint.

        `cores` is this process's share of the machine. Threads that wait for a disk come on top.
        """
        self.stats = WriteStats()
        self._store = store
        self._algorithm = algorithm
        self._progress = progress
        self._block = block
        self._budget = budget
        self._busy = min(MOST_BUSY, cores)
        self._spare = cores - self._busy
        self._staging = staging
        self._spares = spares
        self._pool: BufferPool | None = None
        self._lock = threading.Lock()
        self._lanes = 1
        self._is_followed = False
        self._stopped = False
        self._behind = Behind()

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._behind.wait()
            else:
                self._behind.give_up()
        finally:
            if self._pool is not None:
                self._pool.close()

    def run(self, count: int, write: Callable[[int], None]) -> None:
        """Call `write(number)` for so many files. A file has a lock, so each gets a thread."""
        self._lanes = max(1, min(count, self._busy))
        self._is_followed = count > self._lanes

        # Stopped when the first error is known: none of the others can be taken for it.
        run_in_order(range(count), write, self._lanes, self.stop)

    def stop(self) -> None:
        """Write no further file, and of those begun no further unit; from any thread."""
        self._stopped = True

    def _check_wanted(self, nbytes: int) -> None:
        if self._stopped:
            raise Abandoned
        if self._progress is not None:
            self._progress(nbytes)

    def write(
        self,
        name: str,
        payload: Payload,
        layout: DigestLayout,
        written: list[str],
        content: ContentDigests | None = None,
        durable: Callable[[], None] = lambda: None,
    ) -> str:
        """Write a new file; returns its root digest. Its name joins `written` before it exists.

        `durable` is called once it is, which may be after this returns.
        """
        if self._stopped:
            raise Abandoned
        with storage_errors(f"writing {self._store.root / name}"):
            written.append(name)  # an interrupt may come as soon as it is there
            file = self._store.create(name)
            try:
                file.allocate(layout.file_size)
                direct = layout.file_size >= DIRECT_FROM and file.begin_direct()
                root = write_file(
                    file,
                    payload,
                    layout,
                    pool=self._buffers(direct),
                    algorithm=self._algorithm,
                    threads=self._threads(),
                    writers=self._writers(direct),
                    content=content,
                    stats=self.stats,
                    progress=self._check_wanted,
                )
            except BaseException:
                _close_quietly(file)
                raise
        if self._lanes == 1 and self._is_followed:
            self._behind.run(partial(self._finish, file, durable))
        else:
            self._finish(file, durable)
        return root.hex()

    def _threads(self) -> int:
        """For one file, to fill and digest."""
        return max(1, self._busy // self._lanes)

    def _writers(self, direct: bool) -> int:
        """For one file, to write."""
        if direct:
            return -(-max(DISK_WRITERS, self._busy) // self._lanes)
        # A copy into the page cache, under the file's lock: one at a time, if it has a core.
        return 1 if self._spare >= self._lanes else 0

    def _buffers(self, direct: bool) -> BufferPool:
        """Those of all files, cut as the first one likes them; one budget has one pool."""
        with self._lock:
            if self._pool is None:
                # Each thread holds one, and one waits for each writer.
                buffers = self._threads() + 2 * self._writers(direct)
                if self._staging is not None:
                    buffers += self._threads()  # one is filled while another is digested
                buffered = BUFFERED_UNIT if self._staging is None else STAGED_UNIT
                unit = DIRECT_UNIT if direct else buffered
                count = self._lanes * buffers
                self._pool = BufferPool(
                    self._budget, count, self._block, unit, self._staging, self._spares
                )
        return self._pool

    def _finish(self, file: WriteFile, durable: Callable[[], None]) -> None:
        with storage_errors(f"writing {file.path}"):
            begun = time.perf_counter()
            try:
                file.sync()
            except BaseException:
                _close_quietly(file)
                raise
            self.stats.add(sync_s=time.perf_counter() - begun)
            file.close()
            durable()


def _close_quietly(file: WriteFile) -> None:
    with contextlib.suppress(OSError):
        file.close()


class RankChunks:
    """The chunks of a rank, as columns in the order they lie on disk, and their elements."""

    def __init__(
        self,
        items: WriteItems,
        disk_order: Ints,
        start: Ints,
        planner: SavePlanner,
        address: Addresses | None = None,
    ) -> None:
        """`disk_order` are rows of the items; `start` says where each row lies in its file.

        `address` says where each row lies in memory, where the planner was just asked that.
        """
        self._items = items
        self._planner = planner
        self._address = address
        self.rows = disk_order
        """Of the items."""
        self.tensor = items.chunks.tensor[disk_order]
        self.boxes = items.chunks.boxes.take(disk_order)
        self.start = start[disk_order]
        self.itemsize = items.tensors.itemsize[self.tensor]
        self.volume = self.boxes.volumes()
        self.nbytes = self.volume * self.itemsize

    def part(self, low: int, high: int) -> Chunks:
        """The chunks [low, high), which lie in one file, for the engine."""
        rows = slice(low, high)
        start, nbytes = self.start[rows], self.nbytes[rows]
        chunks = Chunks(
            start,
            nbytes,
            self.itemsize[rows],
            lambda first, last: self._sources(low + first, low + last),
        )
        image = self._planner.image(self.rows[rows], start, nbytes)
        if image is not None:
            return replace(chunks, image=image)
        mine = self.rows[rows]
        if self._address is not None:
            known = self._address[mine]
            return replace(chunks, addresses=lambda first, last: known[first:last])

        def find(first: int, last: int) -> Addresses:
            self._planner.check_sources(self._items, mine[first:last])
            return self._planner.addresses(self._items, mine[first:last])

        return replace(chunks, addresses=LazyAddresses(len(mine), find))

    def _sources(self, low: int, high: int) -> Sequence[Source]:
        return self._planner.sources(self._items, self.rows[low:high])

    def entries(self, low: int, high: int, room: int) -> list[bytes]:
        """The header's text for the chunks [low, high)."""
        tensors = self._items.tensors
        rows = slice(low, high)
        numbers = self.tensor[rows]
        whole = self.volume[rows] == tensors.volumes[numbers]
        offsets, sizes = coordinates(self.boxes.part(low, high))
        names = tensors.names
        keys = entry_keys(
            (names[number], None if is_whole else at)
            for number, is_whole, at in zip(numbers.tolist(), whole.tolist(), offsets, strict=True)
        )
        begin = self.start[rows] - room
        end = begin + self.nbytes[rows]
        return chunk_entries(
            keys,
            tensors.kinds,
            tensors.kind[numbers].tolist(),
            sizes,
            begin.tolist(),
            end.tolist(),
        )


def coordinates(boxes: Boxes) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Offsets and sizes of each box."""
    start, offsets, sizes = boxes.start.tolist(), boxes.offsets.tolist(), boxes.sizes.tolist()
    return (
        [tuple(offsets[low:high]) for low, high in pairwise(start)],
        [tuple(sizes[low:high]) for low, high in pairwise(start)],
    )


def data_header(
    plan: FilePlan,
    chunks: RankChunks,
    values: bytes,
    layout: DigestLayout,
    metadata: Mapping[str, str],
) -> bytes:
    """The header of a data file."""
    entries = {}
    if plan.count:
        entries[CONTENT] = Entry("U8", (plan.values - plan.content,), plan.content, plan.values)
    if plan.holds_values:
        entries[VALUES] = Entry("U8", (len(values),), plan.values, layout.payload)
    entries[DIGESTS] = _digest_entry(layout)
    text = chunks.entries(plan.first, plan.first + plan.count, plan.room)
    return write_header(entries, metadata, plan.room, text)


def data_payload(
    plan: FilePlan, header: bytes, chunks: Chunks, values: bytes, content: ContentDigests
) -> Payload:
    """A data file: header, chunks, their content digests, values."""

    def late() -> bytes:
        digests = content.results()
        table = np.empty((plan.count, CONTENT_KEY + digests.shape[1]), np.uint8)
        table[:, :CONTENT_KEY] = chunks.start.astype("<u8").view(np.uint8).reshape(-1, CONTENT_KEY)
        table[:, CONTENT_KEY:] = digests
        return table.tobytes() + values

    return Payload(header, chunks, plan.content, late)


def index_payload(
    parts: IndexEntries, layout: DigestLayout, metadata: Mapping[str, str]
) -> Payload:
    """The index: header, columns."""
    header = write_header({**parts.entries, DIGESTS: _digest_entry(layout)}, metadata, parts.room)
    # An empty column lies nowhere.
    kept = {key: column for key, column in parts.columns.items() if column.nbytes}
    flat = [HostSource(column.reshape(-1).view(np.uint8)) for column in kept.values()]
    chunks = Chunks(
        np.array([parts.entries[key].start for key in kept], np.int64),
        np.array([column.nbytes for column in kept.values()], np.int64),
        np.ones(len(kept), np.int64),
        lambda first, last: flat[first:last],
    )
    return Payload(header, chunks, layout.payload)


def _digest_entry(layout: DigestLayout) -> Entry:
    digests = layout.file_size - layout.payload
    return Entry("U8", (digests,), layout.payload, layout.file_size)
