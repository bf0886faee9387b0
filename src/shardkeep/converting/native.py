# SPDX-License-Identifier: Apache-2.0
"""Into our own format, by the writer of ordinary saves: one process, elements read as they go."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardkeep.arrays import Bytes, HostSource, Source
from shardkeep.boxes import whole
from shardkeep.columns import Boxes, Ints
from shardkeep.converting.contents import Contents
from shardkeep.converting.windows import ALIVE, Windows
from shardkeep.dtypes import lookup
from shardkeep.engine.budget import usable_cores
from shardkeep.errors import CheckpointError
from shardkeep.foreign.filling import Filling, Wish
from shardkeep.foreign.layout import Elements, OutTensor
from shardkeep.formats.native.files import DIRECT_UNIT, MOST_BUSY
from shardkeep.formats.native.jobs import Journal
from shardkeep.formats.native.layout import FilePlan, Limits, decode_rank_layout
from shardkeep.formats.native.record import checked_user_metadata
from shardkeep.formats.native.writer import NativeWriter
from shardkeep.metadata import Metadata, TensorProperties
from shardkeep.planner import (
    BytesWriteData,
    Image,
    Place,
    PlannedPlanner,
    SavePlan,
    WriteItem,
    WriteItems,
)
from shardkeep.tables import NO_ALIAS, ChunkTable, StateColumns, TensorTable, ValueTable

__all__ = ["write_native"]

UNIT = DIRECT_UNIT
"""Windows are whole multiples of what is written at once."""
LARGEST = 16 << 20
SMALL = 256 << 10
"""Tensors up to this size are read whole, wherever a file is cut."""


def write_native(
    contents: Contents,
    root: Path,
    journal: Journal,
    *,
    budget: int,
    limits: Limits,
    progress: Callable[[int], None],
) -> str:
    """Write and commit a checkpoint at `root`; returns the digest of its record."""
    writer = NativeWriter(root, limits=limits, memory_budget=None, progress=progress)
    # Its buffers are touched at the ends of files only: all else is in windows already.
    writer.memory_budget = max(budget // 2, 8 << 20)
    writer.user_metadata = _user_metadata(contents)
    writer.journal = journal
    metadata, items = _planned(contents)
    try:
        writer.set_up_storage_writer(Place())
        (plan,) = writer.prepare_global_plan([SavePlan(items, metadata.planner_data)], metadata)
        files, _, _ = decode_rank_layout(plan.storage_data)
        with contextlib.closing(
            _Converted(contents, items, budget - budget // 4, files)
        ) as planner:
            writer.finish(metadata, [writer.write_data(plan, planner)])
        writer.settle()
    except Exception:
        writer.abort()  # after an interrupt, what is there is for the next attempt
        raise
    return writer.digest


def _user_metadata(contents: Contents) -> dict[str, object]:
    try:
        return checked_user_metadata(contents.checkpoint.user_metadata)
    except CheckpointError:
        return {}  # another system's notes, of a sort that a record does not hold


def _planned(contents: Contents) -> tuple[Metadata, WriteItems]:
    """What an ordinary save would have planned: every tensor in one chunk."""
    names, composed = contents.tensors, contents.composed
    rows = {name: row for row, name in enumerate(names)}
    tensors = TensorTable.of(
        names,
        [
            TensorProperties(composed[name].dtype, requires_grad=composed[name].requires_grad)
            for name in names
        ],
        [composed[name].shape for name in names],
        [rows[contents.ties[name]] if name in contents.ties else NO_ALIAS for name in names],
    )
    stored = [row for name, row in rows.items() if name not in contents.ties]
    stored = [row for row in stored if composed[names[row]].pieces]
    none = np.zeros(len(stored), np.int64)
    chunks = ChunkTable(
        np.array(stored, np.int64),
        Boxes.of([whole(composed[names[row]].shape) for row in stored]),
        none,
        np.arange(len(stored)),
    )
    count = len(contents.values)
    values = ValueTable(contents.values, np.zeros(count, np.int64), np.arange(count))
    edges = np.searchsorted(chunks.tensor, np.arange(len(tensors) + 1))
    state = StateColumns(
        tensors, values, lambda row: chunks.part(int(edges[row]), int(edges[row + 1])), chunks
    )
    items = WriteItems(tensors, chunks, contents.values, list(range(count)))
    return Metadata(state, contents.structure), items


@dataclass(frozen=True)
class _Lazy:
    """Elements of one tensor, read when they are wanted."""

    contents: Contents
    segment: Elements

    def read_into(self, start: int, stop: int, out: Bytes) -> None:
        item = self.segment.nbytes // int(np.prod(self.segment.sizes, dtype=np.int64))
        Filling([self.segment], self.contents.read).fill(start * item, stop * item, out)

    def part(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Source:
        raise AssertionError("chunks are whole tensors")


class _Converted(PlannedPlanner):
    """Gives the elements of a plan that is made already; reads them ahead of who writes them."""

    def __init__(
        self, contents: Contents, items: WriteItems, budget: int, files: Sequence[FilePlan]
    ) -> None:
        self._contents = contents
        self._values = contents.encoded_values()
        lanes = max(1, min(MOST_BUSY, usable_cores(), len(files)))
        self._window = min(LARGEST, max(UNIT // 2, budget // (ALIVE * lanes) // UNIT * UNIT))
        self._open: weakref.WeakSet[Windows] = weakref.WeakSet()
        tensors = items.tensors
        self._out = [
            OutTensor(tensors.names[row], tensors.dtype(row).name, tensors.shape(row))
            for row in items.chunks.tensor.tolist()
        ]

    @property
    def features(self) -> frozenset[str]:
        """What the values needed where they come from."""
        record = getattr(self._contents.checkpoint._reader, "record", None)
        return frozenset() if record is None or not self._values else frozenset(record.requires)

    def close(self) -> None:
        """Read nothing more."""
        for windows in list(self._open):
            windows.close()

    def image(self, rows: Ints, start: Ints, nbytes: Ints) -> Image | None:
        """The chunks of one file, read ahead."""
        if not len(rows):
            return None
        segments = [
            self._segment(row, at) for row, at in zip(rows.tolist(), start.tolist(), strict=True)
        ]
        filling = Filling(segments, self._contents.read, self._contents)
        windows = Windows(int(start[0]), int(start[-1] + nbytes[-1]), self._window, filling.fill)
        self._open.add(windows)
        return Image(windows.find, is_passing=True)

    def _segment(self, row: int, start: int = 0) -> Elements:
        tensor = self._out[row]
        return Elements(start, tensor, (0,) * len(tensor.shape), tensor.shape)

    def sources(self, items: WriteItems, rows: Ints) -> Sequence[Source]:
        """What lies at the ends of files: small tensors are read together, now."""
        segments = [self._segment(row) for row in rows.tolist()]
        found: list[Source] = []
        wishes = []
        for segment in segments:
            if segment.nbytes <= SMALL:
                place = np.empty(segment.sizes, lookup(segment.tensor.dtype).bits())
                wishes.append(Wish(segment.tensor, segment.offsets, segment.sizes, place))
                found.append(HostSource(place))
            else:
                found.append(_Lazy(self._contents, segment))
        if wishes:
            self._contents.read(wishes)
        return found

    def resolve_data(self, write_item: WriteItem) -> Source | bytes:
        """A value, or all of a tensor."""
        if isinstance(write_item.data, BytesWriteData):
            return self._values[write_item.index.fqn]
        assert write_item.index.index is not None
        return _Lazy(self._contents, self._segment(write_item.index.index))
