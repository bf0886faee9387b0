# SPDX-License-Identifier: Apache-2.0
"""Loading from other systems' checkpoints: what a parser found, read like one of ours.

Elements that lie in files as they are go through the engine, as bytes: foreign files align nothing.
Everything else is read piece by piece.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shardkeep import values
from shardkeep.arrays import FlatSink, HostPlaces, HostSink, PartSink, Sink, Staging
from shardkeep.boxes import strides as row_major
from shardkeep.columns import Boxes, Ints
from shardkeep.engine.blocks import BlockFile, OpenFiles
from shardkeep.engine.budget import io_threads
from shardkeep.engine.byte_runs import BYTE
from shardkeep.engine.region_reader import Planned, RegionReader, Sinks
from shardkeep.engine.regions import Regions, regions_of
from shardkeep.errors import (
    CheckpointNotFoundError,
    CorruptionError,
    FormatError,
    StorageError,
)
from shardkeep.foreign.detecting import detect
from shardkeep.foreign.fingerprint import Fingerprint, fingerprint
from shardkeep.foreign.found import Raw
from shardkeep.foreign.pieces import Piece, Strided, read_pieces
from shardkeep.foreign.tables import ODD, Tables, tables_of
from shardkeep.foreign.unchanged import Marks
from shardkeep.metadata import ChunkStorageMetadata, Metadata, StorageMeta
from shardkeep.planner import ReadItems
from shardkeep.reads import plan_reads
from shardkeep.storage import CheckpointId
from shardkeep.stores.local import above_stdio, storage_errors
from shardkeep.stores.reading import ReadFile
from shardkeep.tables import LocationColumns

__all__ = ["ForeignReader"]

BLOCK = 128 << 10
"""Bytes in which files are read."""
TRIES = 4
"""How often a checkpoint may be written to while it is parsed."""
RECENT_NS = 100_000_000
"""What changed so shortly before may have changed meanwhile: clocks of files are not that exact."""
PIECE = 4 << 20
"""Most bytes of what is read piece by piece, at a time and thread."""


class ForeignReader(RegionReader):
    """Reads what other systems wrote; thread-safe once the metadata is read."""

    digest: str | None = None
    """Other systems keep none."""
    save_id: str | None = None
    """Nor this."""

    def __init__(
        self,
        checkpoint_id: CheckpointId | None = None,
        *,
        memory_budget: int | None = None,
        progress: Callable[[int], None] | None = None,
        **options: Any,
    ) -> None:
        """`options` are the format's own, as in `find`."""
        super().__init__(memory_budget, progress)
        self.options = options
        self.checkpoint_id = ""
        self.system = ""
        """Who wrote the checkpoint."""
        self.user_metadata: Mapping[str, Any] = {}
        """What that system kept beside the state."""
        self._files = OpenFiles(self._open)
        self.reset(checkpoint_id)

    # --- what there is

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Begin another load."""
        self.close()
        self._files.reopen()
        self.forget()
        if checkpoint_id is not None:
            self.checkpoint_id = os.fspath(checkpoint_id)
            self.root = Path(os.path.abspath(checkpoint_id))
            self._below = self.root

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Whether another system's checkpoint is there."""
        name = os.fspath(checkpoint_id)
        return "://" not in name and detect(Path(name)) is not None

    def read_metadata(self, announcement: bytes = b"") -> Metadata:
        """Parse what is there; every rank does, and must find what the first one has found."""
        before: Marks | None = None
        for _ in range(TRIES):
            begun = time.time_ns()
            self._find()
            # Looked at only now, as it is known only now which they are: what was written to in
            # the meantime is parsed once more, between two looks.
            if self._marks == before or not self._marks.changed_since(begun - RECENT_NS):
                break
            before = self._marks
        else:
            raise StorageError(
                f"{self.root} is written to faster than it can be read; load or open it again",
                transient=True,
            )
        if announcement and not self._fingerprint().agrees(Fingerprint.decode(announcement)):
            raise StorageError(
                f"{self.root} was replaced, or written to, while ranks looked at it: they have "
                "found different checkpoints there; load it again",
                transient=True,
            )
        state = self.tables.state
        return Metadata(
            state,
            self.tables.structure,
            LocationColumns(state, self.tables.files, [(0, 0)] * max(1, len(self.tables.files))),
            StorageMeta(self.checkpoint_id),
        )

    def _find(self) -> None:
        known = detect(self.root)
        if known is None:
            raise CheckpointNotFoundError(f"there is no checkpoint at {self.root} any more")
        with storage_errors(f"reading {self.root}"):
            found = known.find(self.root, **self.options)
        self.system, self.user_metadata = found.system, found.user_metadata
        self._below = found.root
        self.tables: Tables = tables_of(found)
        self._marks = Marks(found.root, self.tables.files)

    def announcement(self) -> bytes:
        """What was found, in a few bytes: others must find the same."""
        return self._fingerprint().encode()

    def _fingerprint(self) -> Fingerprint:
        def read(number: int, at: int, count: int) -> bytes:
            data = bytearray(count)
            with self._files.use(number) as file:
                return bytes(data[: file.file.read_into(memoryview(data), at)])

        with storage_errors(f"reading {self.root}"):
            return fingerprint(self.tables, self._marks, read)

    def close(self) -> None:
        """Let go of files."""
        self._files.close()

    def _open(self, number: int) -> BlockFile:
        name = self.tables.files[number]
        path = self._below / name if name else self._below
        with storage_errors(f"opening {path}"):
            if path.resolve() != path and self._below.resolve() not in (
                path.resolve(),
                *path.resolve().parents,
            ):
                raise FormatError(f"{path} is a link that leads out of the checkpoint")
            # A pipe in place of a file must not make us wait.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
            file = ReadFile(above_stdio(os.open(path, flags)), path)
            try:
                self._marks.check(number, os.fstat(file.fd))
            except BaseException:
                file.close()
                raise
        return BlockFile(file, name or str(path), BLOCK, file.size)

    # --- values

    def read_values(self, names: Sequence[str], deliver: Callable[[int, bytes], None]) -> None:
        """Values by name; `deliver(i, data)` gets the i-th in our encoding."""
        for at, name in enumerate(names):
            deliver(at, values.encode(self.tables.plain[name], where=name))

    # --- elements

    def _files_of(self, items: ReadItems) -> list[int]:
        chunks = items.chunks
        assert chunks.file is not None
        assert chunks.start is not None
        odd = [self.tables.odd_files[at] for at in chunks.start[chunks.file == ODD].tolist()]
        return sorted({*np.unique(chunks.file).tolist(), *odd} - {ODD})

    def plan_tensors(
        self, items: ReadItems, sinks: Sinks, places: HostPlaces | None, staging: Staging | None
    ) -> Planned:
        """What goes through the engine, and then what is read piece by piece."""
        regions = regions_of(items)
        odd = regions.file == ODD
        made: dict[int, Sink | None] = {}
        for number, kind in set(zip(regions.sink.tolist(), regions.kind.tolist(), strict=True)):
            made[number] = _byte_sink(sinks(number), regions.dtype[kind])
        odd |= np.array([made[number] is None for number in regions.sink.tolist()], np.bool_)
        direct = _as_bytes(_taken(regions, np.flatnonzero(~odd)))
        self.check_places(direct)
        reading = self.reading_of(
            direct,
            lambda number: made[number],  # type: ignore[arg-type,return-value]
            _byte_places(places, regions),
            names=items.wanted_names.__getitem__,
        )
        pieces = [self._piece(regions, row, sinks) for row in np.flatnonzero(odd).tolist()]

        def then() -> None:
            threads = io_threads(self.ranks_on_host)
            # A piece, what it is made of, and what a cast or a device makes of it.
            read_pieces(pieces, min(PIECE, self.budget // (4 * threads)), threads, self.progress)
            self.check_files(self._files_of(items))

        wanted = Boxes(regions.stored.start, regions.dest, regions.size).volumes()
        return Planned(reading, sinks, then, int((wanted * regions.itemsize)[odd].sum()))

    def check_files(self, numbers: list[int]) -> None:
        """By what the system says of them."""
        self._marks.check_all(numbers)

    @property
    def block(self) -> int:
        """Always the same: other systems digest nothing."""
        return BLOCK

    def data_file(self, number: int) -> AbstractContextManager[BlockFile]:
        """Kept open for the next use, but never too many at once."""
        return self._files.use(number)

    def check_places(self, regions: Regions) -> None:
        """Every part within its file: a header that lies must not read past it."""
        end = regions.start + regions.stored.volumes()
        for number in np.unique(regions.file).tolist():
            with self._files.use(number) as file:
                most = int(end[regions.file == number].max())
                if most > file.payload:
                    raise CorruptionError(
                        f"{self.root / file.name} has {file.payload} bytes, and {most} are needed; "
                        "it was cut"
                    )

    def _piece(self, regions: Regions, row: int, sinks: Sinks) -> Piece:
        part = slice(int(regions.stored.start[row]), int(regions.stored.start[row + 1]))
        dtype = regions.dtype[int(regions.kind[row])]
        stored = tuple(regions.stored.sizes[part].tolist())
        number, start = int(regions.file[row]), int(regions.start[row])
        place: Any = Raw("", start)
        if number == ODD:
            place, number = self.tables.odd[start], self.tables.odd_files[start]
        if isinstance(place, Raw):
            steps = place.strides or row_major(stored)
            place = Strided(lambda: self._files.use(number), place.start, steps, dtype.bits())
        return Piece(
            place,
            tuple(regions.stored.offsets[part].tolist()),
            tuple(regions.size[part].tolist()),
            sinks(int(regions.sink[row])),
            tuple(regions.dest[part].tolist()),
            dtype,
        )

    def same_content(self, first: str, second: str) -> bool:
        """Whether two tensors have equal bytes: compared, as nobody has digests of them."""
        tensors = self.tables.state.tensors
        rows = [tensors.stored_row(tensors.row_of[name]) for name in (first, second)]
        if rows[0] == rows[1]:
            return True
        if tensors.shape(rows[0]) != tensors.shape(rows[1]):
            return False
        if tensors.properties(rows[0]).dtype != tensors.properties(rows[1]).dtype:
            return False
        shape, dtype = tensors.shape(rows[0]), tensors.dtype(rows[0])
        row = max(1, int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize)
        step = max(1, PIECE // row)
        for low in range(0, shape[0] if shape else 1, step):
            high = min(low + step, shape[0]) if shape else 1
            box = ChunkStorageMetadata((low, *(0,) * len(shape[1:])), (high - low, *shape[1:]))
            box = box if shape else ChunkStorageMetadata((), ())
            one, other = (self._box(tensors.names[at], box) for at in rows)
            if one.tobytes() != other.tobytes():
                return False
        return True

    def _box(self, name: str, box: ChunkStorageMetadata) -> Any:
        dtype = self.tables.state.tensors.dtype(self.tables.state.tensors.row_of[name])
        out = np.empty(box.sizes, dtype.bits())
        if out.size:
            items = plan_reads(self.tables.state, [name], Boxes.of([box]))
            self.read_tensors(items, lambda _: HostSink(out, dtype))
        return out


def _byte_sink(sink: Sink, dtype: Any) -> Sink | None:
    """The same memory as bytes, an element being one more dimension; None where it is no such."""
    if type(sink) is FlatSink and sink.dtype is dtype:
        return FlatSink(sink.bytes, (*sink.shape, dtype.itemsize), BYTE)
    if type(sink) is HostSink and sink.dtype is dtype and sink.array.dtype.isnative:
        return HostSink(sink.array[..., None].view(np.uint8), BYTE)
    if type(sink) is PartSink:
        inner = _byte_sink(sink.sink, dtype)
        return None if inner is None else PartSink(inner, (*sink.offsets, 0))
    return None


def _byte_places(places: HostPlaces | None, regions: Regions) -> HostPlaces | None:
    """Where sinks lie that get what is stored as it is."""
    if places is None:
        return None
    same = np.array([[one is other for other in regions.dtype] for one in places.dtype], np.bool_)
    address = places.address.copy()
    if len(regions):
        fits = same[places.kind[regions.sink], regions.kind]
        address[regions.sink[~fits]] = 0
    return HostPlaces(address, np.zeros(len(address), np.int64), [BYTE])


def _taken(regions: Regions, rows: Ints) -> Regions:
    stored = regions.stored.take(rows)

    def flat(column: Ints) -> Ints:
        return Boxes(regions.stored.start, column, column).take(rows).offsets

    return replace(
        regions,
        file=regions.file[rows],
        start=regions.start[rows],
        stored=stored,
        size=flat(regions.size),
        dest=flat(regions.dest),
        shape=flat(regions.shape),
        sink=regions.sink[rows],
        kind=regions.kind[rows],
    )


def _as_bytes(regions: Regions) -> Regions:
    """With the bytes of an element as one more dimension: elements may begin anywhere then."""
    start = regions.stored.start
    ends, item = start[1:], regions.itemsize
    zeros = np.zeros(len(regions), np.int64)

    def longer(flat: Ints, last: Ints) -> Ints:
        return np.insert(flat, ends, last)

    stored = regions.stored
    return replace(
        regions,
        stored=Boxes(
            start + np.arange(len(start)), longer(stored.offsets, zeros), longer(stored.sizes, item)
        ),
        size=longer(regions.size, item),
        dest=longer(regions.dest, zeros),
        shape=longer(regions.shape, item),
        dtype=[BYTE],
        kind=zeros,
    )
