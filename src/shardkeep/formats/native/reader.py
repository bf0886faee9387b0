# SPDX-License-Identifier: Apache-2.0
"""Reading the native format: record -> index -> ranges, every byte checked on the way."""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from shardkeep.arrays import HostPlaces, Staging
from shardkeep.columns import Column, Ints
from shardkeep.coordination import Coordinator
from shardkeep.engine.blocks import OpenFiles
from shardkeep.engine.digests import algorithm
from shardkeep.engine.reading import Reading, wanted_runs
from shardkeep.engine.region_reader import Planned, RegionReader, Sinks
from shardkeep.engine.regions import Regions, regions_of
from shardkeep.engine.shares import encode_wants
from shardkeep.engine.verified import DamagedBlock, VerifiedFile
from shardkeep.engine.windows import Address
from shardkeep.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptionError,
    FormatError,
    StorageError,
)
from shardkeep.foreign.detecting import detect, seen
from shardkeep.formats.native.commit import read_record_bytes, refuse_linked_data
from shardkeep.formats.native.foreign import foreign_format
from shardkeep.formats.native.index import Index
from shardkeep.formats.native.names import CONTENT_KEY, RECORD
from shardkeep.formats.native.record import FileRow, Record, decode_record
from shardkeep.metadata import Metadata, StorageMeta
from shardkeep.planner import ReadItems
from shardkeep.storage import CheckpointId, ReadOnce
from shardkeep.stores.local import LocalStore, ReadFile, storage_errors
from shardkeep.tables import ChunkTable, LocationColumns

__all__ = ["NativeReader"]


class NativeReader(RegionReader):
    """Reads checkpoints of the native format; thread-safe once the metadata is read."""

    record: Record
    """The commit record."""
    index: Index
    """The open index."""
    system = "Shardkeep"
    """Who wrote the checkpoint."""
    unpinned: bool = False
    """Whether the record is another than `expect_digest` says."""

    def __init__(
        self,
        checkpoint_id: CheckpointId | None = None,
        *,
        verify: bool = True,
        expect_digest: str | None = None,
        memory_budget: int | None = None,
        progress: Callable[[int], None] | None = None,
        open_store: Callable[[CheckpointId], LocalStore] = LocalStore,
    ) -> None:
        """`verify=False` skips the digests of payload, never those of record and index."""
        super().__init__(memory_budget, progress)
        self.verify = verify
        self.expect_digest = expect_digest
        self._open_store = open_store
        self._files = OpenFiles(self._open_data)
        self._contents_of: dict[int, tuple[Ints, Column]] = {}
        self._index_file: VerifiedFile | None = None
        self.reset(checkpoint_id)

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Begin another load."""
        self.close()
        self._files.reopen()
        self.forget()
        if checkpoint_id is not None:
            self.checkpoint_id = os.fspath(checkpoint_id)
            self._store = self._open_store(checkpoint_id)
            self.root = self._store.root

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Any path; not a URL."""
        return "://" not in os.fspath(checkpoint_id)

    @property
    def digest(self) -> str:
        """Of the record."""
        return self.record.digest

    @property
    def save_id(self) -> str:
        """The save that wrote it."""
        return self.record.save_id

    @property
    def user_metadata(self) -> Mapping[str, Any]:
        """What was kept beside the state."""
        return self.record.user

    # --- metadata

    def read_metadata(self, announcement: bytes = b"") -> Metadata:
        """Record, then the tensor table of the index."""
        self.read_tables(announcement, nested=True)
        files = [row.name for row in self.record.files]
        ranges = [
            (row.values or 0, row.payload - row.values if row.values else 0)
            for row in self.record.files
        ]
        state = self.index.state
        return Metadata(
            state,
            self.index.structure,
            LocationColumns(state, files, ranges),
            StorageMeta(self.checkpoint_id, self.record.save_id),
        )

    def read_tables(self, announcement: bytes = b"", *, nested: bool = False) -> None:
        """Record, and the tensor table of the index: without the nesting, unless asked for."""
        where = str(self.root / RECORD)
        data = announcement
        if not data:
            try:
                data = read_record_bytes(self._store)
            except CheckpointNotFoundError:
                self._say_foreign()
                raise
        refuse_linked_data(self._store)
        self._record_bytes = data
        self.record = decode_record(data, where)
        self.unpinned = self.expect_digest not in (None, self.record.digest)
        if self.unpinned:
            raise CorruptionError(
                f"{where}: the record's digest is {self.record.digest}, expected "
                f"{self.expect_digest}; this is not the checkpoint that was pinned"
            )
        self._contents_of = {}
        self._index_file = self._open(self.record.index, check=True)
        self.index = Index(
            self._index_file,
            len(self.record.files),
            sum(row.payload for row in self.record.files),
            nested=nested,
        )

    def _say_foreign(self) -> None:
        known = detect(self.root)
        other = known.SYSTEM if known and self.root.is_file() else foreign_format(self._store)
        if other is not None:
            rest = "" if known else f", and not all of it: there is {seen(self.root)}"
            raise FormatError(
                f"{self.root} seems to hold a checkpoint of {other}, not of Shardkeep{rest}"
            )

    def announcement(self) -> bytes:
        """The record, so that other ranks need not look it up."""
        return self._record_bytes

    # --- files

    def _open(self, row: FileRow, check: bool) -> VerifiedFile:
        opened = self._open_named(row)
        try:
            return self._verified(opened, row, check)
        except BaseException:
            opened.close()
            raise

    def _verified(self, opened: ReadFile, row: FileRow, check: bool) -> VerifiedFile:
        return VerifiedFile(
            opened,
            row.name,
            self.record.layout(row),
            bytes.fromhex(row.root),
            algorithm(self.record.digests),
            check,
        )

    def _open_named(self, row: FileRow) -> ReadFile:
        try:
            return self._store.open(row.name)
        except OSError as error:
            self._explain_missing(row, error)
            with storage_errors(f"opening {self.root / row.name}"):
                raise

    def _explain_missing(self, row: FileRow, error: OSError) -> None:
        """A named file is gone: damage, unless the checkpoint was replaced meanwhile."""
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            return
        if not self.is_current():
            raise StorageError(
                f"{self.root} was replaced while being read; open it again",
                transient=True,
            ) from error
        if isinstance(error, FileNotFoundError):
            raise CorruptionError(
                f"{self.root / row.name} is missing; the record names it"
            ) from error

    def is_current(self) -> bool:
        """Whether the record on disk is still the one that was read; if in doubt, it is."""
        try:
            return decode_record(read_record_bytes(self._store), RECORD).save_id == (
                self.record.save_id
            )
        except CheckpointNotFoundError:
            return False
        except CheckpointError:
            return True

    @property
    def block(self) -> int:
        """As they were written."""
        return self.record.block

    def data_file(self, number: int) -> AbstractContextManager[VerifiedFile]:
        """A data file by its number; kept open for the next use, but never too many at once."""
        return self._files.use(number)

    def _open_data(self, number: int) -> VerifiedFile:
        try:
            return self._open(self.record.files[number], self.verify)
        except CorruptionError as error:
            error.names = self.names_in(number)
            raise

    def names_in(self, file: int, low: int = 0, high: int = 2**63 - 1) -> tuple[str, ...]:
        """Tensors and values that lie in bytes [low, high) of a data file, for reports."""
        names = set()
        tensors, values = self.index.tensors, self.index.values
        try:
            chunks, _ = self.index.chunks_among(np.arange(len(tensors)))
            assert chunks.start is not None
            end = chunks.start + chunks.nbytes(tensors)
            hit = (chunks.file == file) & (chunks.start < high) & (end > low)
            names = {tensors.names[row] for row in np.unique(chunks.tensor[hit]).tolist()}
        except CheckpointError:
            pass  # the index is damaged too: what is known of it is better than nothing
        begin = self.record.files[file].values
        if begin is not None and high > begin and values.file is not None:
            names |= {values.names[row] for row in np.flatnonzero(values.file == file).tolist()}
        return tuple(sorted(names))

    def release(self) -> None:
        """Let go of data files that nobody reads; the index stays open."""
        self._files.release()

    def close(self) -> None:
        """Let go of all files; one that a thread still reads goes when it is done."""
        self._files.close()
        if self._index_file is not None:
            self._index_file.close()
            self._index_file = None

    # --- data

    def plan_tensors(
        self, items: ReadItems, sinks: Sinks, places: HostPlaces | None, staging: Staging | None
    ) -> Planned:
        """All go through the engine."""
        names = items.wanted_names.__getitem__
        reading = self.reading_of(self._regions(items), sinks, places, staging, names)
        return Planned(reading, sinks)

    def read_tensors(
        self,
        items: ReadItems,
        sinks: Sinks,
        places: HostPlaces | None = None,
        staging: Staging | None = None,
        coordinator: Coordinator | None = None,
        read_once: ReadOnce = "auto",
        passing: Callable[[Reading], None] | None = None,
    ) -> int:
        """Read every region of the plan into its sink; returns the bytes delivered.

        With a coordinator, on all its ranks: what several want is read by one, as in `share_reads`.
        Without one, `passing` may bring what others have read.
        """

        def plan() -> Planned:
            return self.plan_tensors(items, sinks, places, staging)

        if coordinator is not None:
            planned = self.share(plan, coordinator, read_once)
        else:
            planned = plan()
            if passing is not None:
                with storage_errors(f"reading {self.root}"):
                    passing(planned.reading)
        self.run(planned)
        return items.nbytes

    def wants(self, items: ReadItems, budget: int, window: Address | None) -> bytes:
        """Which blocks will be read for these, as `plan_shares` is told."""
        runs = wanted_runs(self._regions(items), self.record.block)
        return encode_wants(runs, budget=budget, block=self.record.block, cold=True, window=window)

    def _regions(self, items: ReadItems) -> Regions:
        """The regions of a plan, all within their files."""
        regions = regions_of(items)
        self.check_places(regions)
        return regions

    def check_places(self, regions: Regions) -> None:
        """Every chunk within its file's payload: an index that lies must not read past it."""
        itemsize = np.array([d.itemsize for d in regions.dtype], np.int64)
        item = itemsize[regions.kind]
        limits = np.array([row.payload for row in self.record.files] or [0], np.int64)
        if len(regions) == 0:
            return
        # Sums could leave 64 bits, differences cannot: an index never claims more than its files.
        if (regions.start > limits[regions.file] - regions.stored.volumes() * item).any():
            raise FormatError(f"{self.record.index.name}: a chunk reaches out of its file")
        if (regions.start % item).any():
            raise FormatError(f"{self.record.index.name}: a chunk is not aligned to its elements")

    def read_values(self, names: Sequence[str], deliver: Callable[[int, bytes], None]) -> None:
        """Read values by name; `deliver(i, data)` gets the encoding of the i-th."""
        table = self.index.values
        assert table.file is not None
        by_file: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for at, name in enumerate(names):
            row = table.row_of[name]
            by_file[int(table.file[row])].append((at, int(table.slot[row])))
        for number, wanted in sorted(by_file.items()):
            with self.data_file(number) as file, storage_errors(f"reading {file.name}"):
                try:
                    start, ends = self.value_directory(number, file)
                    bounds = [
                        (int(ends[slot - 1]) if slot else 0, int(ends[slot])) for _, slot in wanted
                    ]
                    low, high = min(b[0] for b in bounds), max(b[1] for b in bounds)
                    data = file.read_range(start + low, high - low)
                except DamagedBlock as damage:
                    hit = self.names_in(number, *damage.block_range)
                    more = " ..." if len(hit) > 8 else ""
                    raise CorruptionError(
                        f"{damage}; it holds {', '.join(hit[:8])}{more}", names=hit
                    ) from None
            for (at, _), (begin, end) in zip(wanted, bounds, strict=True):
                deliver(at, data[begin - low : end - low])

    def value_directory(self, number: int, file: VerifiedFile) -> tuple[int, Ints]:
        """Where the values of a file begin, and where each ends, counted from there."""
        row = self.record.files[number]
        if row.values is None:
            raise FormatError(f"{row.name}: the index puts values there, the record does not")
        room = row.payload - row.values
        count = int.from_bytes(file.read_range(row.values, 8), "little") if room >= 8 else 0
        if not 0 < count <= (room - 8) // 8:
            raise FormatError(f"{row.name}: claims {count} values in {room} bytes")
        ends = np.frombuffer(file.read_range(row.values + 8, 8 * count), "<u8").astype(np.int64)
        start = row.values + 8 + 8 * count
        table = self.index.values
        assert table.file is not None
        slots = table.slot[table.file == number]
        fits = (
            int(ends[0]) >= 0
            and bool((ends[1:] >= ends[:-1]).all())  # a difference could leave 64 bits
            and start + int(ends[-1]) == row.payload
            and len(slots) == count
            and bool((np.sort(slots) == np.arange(count)).all())
        )
        if not fits:
            raise FormatError(f"{row.name}: the directory of its values is not valid")
        return start, ends

    def same_content(self, first: str, second: str) -> bool:
        """By the content digests of their chunks; differently cut tensors are not compared."""
        tensors = self.index.tensors
        rows = [tensors.stored_row(tensors.row_of[name]) for name in (first, second)]
        if rows[0] == rows[1]:
            return True
        a, b = (self.index.chunks_of(row) for row in rows)
        if not (
            np.array_equal(a.boxes.offsets, b.boxes.offsets)
            and np.array_equal(a.boxes.sizes, b.boxes.sizes)
        ):
            return False
        return np.array_equal(self._contents(a), self._contents(b))

    def _contents(self, chunks: ChunkTable) -> Column:
        assert chunks.file is not None
        assert chunks.start is not None
        return self.contents_at(chunks.file, chunks.start)

    def contents_at(self, file: Ints, start: Ints) -> Column:
        """Content digests of chunks, by their file and where they start in it: one row for each."""
        out = np.zeros((len(file), algorithm(self.record.digests).size), np.uint8)
        for number in np.unique(file).tolist():
            if number not in self._contents_of:
                self._contents_of[number] = self._content_columns(number)
            begins, digests = self._contents_of[number]
            rows = np.flatnonzero(file == number)
            at = np.searchsorted(begins, start[rows], "right") - 1
            lost = start[rows[(at < 0) | (begins[at] != start[rows])]] if len(begins) else start
            if len(lost):
                raise FormatError(
                    f"{self.record.index.name}: no content digest for a chunk at byte "
                    f"{int(lost[0])} of {self.record.files[number].name}"
                )
            out[rows] = digests[at]
        return out

    def content_digests(self, file: int) -> dict[int, bytes]:
        """Content digest of each chunk of a data file, by where the chunk starts."""
        begins, digests = self._content_columns(file)
        return dict(zip(begins.tolist(), map(bytes, digests), strict=True))

    def _content_columns(self, file: int) -> tuple[Ints, Column]:
        """Where the chunks of a data file start, in ascending order, and their content digests."""
        row = self.record.files[file]
        size = CONTENT_KEY + algorithm(self.record.digests).size
        end = row.payload if row.values is None else row.values
        with self.data_file(file) as opened, storage_errors(f"reading {row.name}"):
            data = opened.read_range(end - row.chunks * size, row.chunks * size)
        table = np.frombuffer(data, np.uint8).reshape(-1, size)
        begins = np.ascontiguousarray(table[:, :CONTENT_KEY]).view("<i8").reshape(-1)
        order = np.argsort(begins, kind="stable")
        return begins[order], table[order, CONTENT_KEY:]
