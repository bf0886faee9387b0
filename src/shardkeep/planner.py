# SPDX-License-Identifier: Apache-2.0
"""The planning contract: what is written and read, by whom, in which boxes.

A save: every rank makes a local plan, the coordinator joins them into one global plan and the
metadata, every rank finishes its share, and storage asks for the data item by item. A load: every
rank lists what it wants of what is stored. Plans are columns; `WriteItem` and `ReadItem` are what
one row looks like.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NoReturn

import numpy as np

from shardkeep.arrays import Bytes, HostPlaces, Sink, Source, Staging
from shardkeep.columns import Boxes, Ints, Rows
from shardkeep.errors import PlanError
from shardkeep.memory import Addresses
from shardkeep.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from shardkeep.structure import Structure
from shardkeep.tables import ChunkTable, TensorTable

__all__ = [
    "BytesWriteData",
    "LoadPlan",
    "LoadPlanner",
    "ReadItem",
    "SavePlan",
    "SavePlanner",
    "TensorWriteData",
    "WriteItem",
    "WriteItems",
]


class StalePlan(Exception):
    """An array is no longer what the plan that was made of it says it is."""


@dataclass(frozen=True, slots=True)
class TensorWriteData:
    """One box of a tensor."""

    chunk: ChunkStorageMetadata
    """The box."""
    properties: TensorProperties
    """What the tensor is."""
    size: tuple[int, ...]
    """Shape of the whole tensor."""


@dataclass(frozen=True, slots=True)
class BytesWriteData:
    """One plain value."""


@dataclass(frozen=True, slots=True)
class WriteItem:
    """One thing to write."""

    index: MetadataIndex
    """Its name and place; the hint is the number of the piece, or of the value, on this rank: what
    all later steps know it by, and must be given."""
    data: TensorWriteData | BytesWriteData
    """What it is."""


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """Memory of ours that holds bytes of a file as they lie there: nothing need be copied."""

    find: Callable[[int, int], Bytes | None]
    """The bytes [low, high), if they are in it. May wait for them."""
    is_settled: Callable[[], bool] = lambda: True
    """Whether threads have ended to copy into it. Until then it stays as it is where it is found,
    and whoever writes from it leaves the cores to them."""
    is_passing: bool = False
    """Whether it holds little at a time, and has bytes only while they are asked for in order."""


NO_IMAGE = Image(lambda low, high: None)
"""Has nothing of any file."""

YIELDS = -1
"""In place of a set of holders: only to be saved if no rank holds the same box otherwise."""


@dataclass(frozen=True, slots=True, eq=False)
class LocalColumns:
    """What the global plan must know of a rank's items besides the items themselves."""

    tensor_leaf: Ints
    """Leaf number of each tensor in this rank's structure."""
    value_leaf: Ints
    """Leaf number of each value."""
    replicas: Ints
    """For each chunk: a number for the declared set of holders, 0 for none, or `YIELDS`."""


@dataclass(frozen=True, eq=False)
class WriteItems(Rows[WriteItem]):
    """The items of a plan: rows of a chunk table, then values, then what has no element to write:
    the empty tensors of a local plan, so that a list of it loses none."""

    tensors: TensorTable
    """The tensors the chunks belong to."""
    chunks: ChunkTable
    """The chunks to write."""
    value_names: Sequence[str] = ()
    """The values to write, in the order of their slots."""
    value_source: Sequence[int] = ()
    """Which of this rank's values each is."""
    local: LocalColumns | None = None
    """Present on a local plan of the default planner."""

    @cached_property
    def empty(self) -> Ints:
        """Rows of the tensors without an element; in a plan of all ranks none, the metadata has
        them."""
        none = np.zeros(0, np.int64)
        return none if self.local is None else np.flatnonzero(self.tensors.volumes == 0)

    def __len__(self) -> int:
        """Chunks, values and empty tensors together."""
        return len(self.chunks) + len(self.value_names) + len(self.empty)

    def row(self, row: int) -> WriteItem:
        """One item as an object."""
        if row < len(self.chunks):
            tensor, box = int(self.chunks.tensor[row]), self.chunks.boxes[row]
            return self._box(tensor, box, int(self.chunks.source[row]))
        row -= len(self.chunks)
        if row < len(self.value_names):
            index = MetadataIndex(self.value_names[row], None, self.value_source[row])
            return WriteItem(index, BytesWriteData())
        row -= len(self.value_names)
        shape = self.tensors.shape(int(self.empty[row]))
        whole = ChunkStorageMetadata((0,) * len(shape), shape)
        return self._box(int(self.empty[row]), whole, self._first_free + row)

    @cached_property
    def _first_free(self) -> int:
        """A number that no piece has, nor any after it: nobody asks by those of empty tensors, but
        a planner may sort by numbers."""
        return int(self.chunks.source.max(initial=-1)) + 1

    @property
    def value_items(self) -> Sequence[WriteItem]:
        """Those that are values."""
        return self[len(self.chunks) : len(self.chunks) + len(self.value_names)]

    def _box(self, tensor: int, box: ChunkStorageMetadata, number: int) -> WriteItem:
        return WriteItem(
            MetadataIndex(self.tensors.names[tensor], box.offsets, number),
            TensorWriteData(box, self.tensors.properties(tensor), self.tensors.shape(tensor)),
        )

    @classmethod
    def of(cls, items: Sequence[WriteItem]) -> WriteItems:
        """Columns from a plain list, as a planner of somebody else's may give."""
        if isinstance(items, WriteItems):
            return items
        boxes = [(i.index, i.data) for i in items if isinstance(i.data, TensorWriteData)]
        others = [i.index for i in items if isinstance(i.data, BytesWriteData)]
        rows: dict[str, int] = {}
        first: list[TensorWriteData] = []
        for index, data in boxes:
            if rows.setdefault(index.fqn, len(rows)) == len(first):
                first.append(data)
            _check_alike(index.fqn, first[rows[index.fqn]], data)
        tensors = TensorTable.of(
            list(rows), [data.properties for data in first], [data.size for data in first]
        )
        chunks = [(index, data) for index, data in boxes if 0 not in data.chunk.sizes]
        count = len(chunks)
        table = ChunkTable(
            np.array([rows[index.fqn] for index, _ in chunks], np.int64),
            Boxes.of([data.chunk for _, data in chunks]),
            np.zeros(count, np.int64),
            np.array([_number(index) for index, _ in chunks], np.int64),
        )
        return cls(tensors, table, [i.fqn for i in others], [_number(i) for i in others])

    def check_numbers(self) -> None:
        """Refuse a local plan in which one item could be taken for another."""
        if self.local is not None:
            return
        items: dict[int, tuple[str, ChunkStorageMetadata]] = {}
        numbers: dict[tuple[str, ChunkStorageMetadata], int] = {}
        chunks = self.chunks
        for row, number in enumerate(chunks.source.tolist()):
            item = (self.tensors.names[int(chunks.tensor[row])], chunks.boxes[row])
            other = items.setdefault(number, item)
            if other != item:
                _refuse_number(_text(*other), _text(*item), number)
            known = numbers.setdefault(item, number)
            if known != number:
                raise PlanError(
                    f"{_text(*item)} is listed by one rank with index {known} and with index "
                    f"{number}; list each box of a tensor once"
                )
        values: dict[int, str] = {}
        for name, number in zip(self.value_names, self.value_source, strict=True):
            if values.setdefault(number, name) != name:
                _refuse_number(values[number], name, number)


def _text(name: str, box: ChunkStorageMetadata) -> str:
    return f"{name} offsets {box.offsets} sizes {box.sizes}"


def _refuse_number(one: str, other: str, number: int) -> NoReturn:
    raise PlanError(
        f"{one} and {other} are listed by one rank with index {number}; number the pieces of a "
        "rank, and its values, each by itself"
    )


def _number(index: MetadataIndex) -> int:
    if index.index is None or index.index < 0:
        place = f" offset {index.offset}" if index.offset else ""
        raise PlanError(
            f"{index.fqn}{place}: the item has index {index.index}; it must be the number of the "
            "piece or value on its rank, by which its data is asked for"
        )
    return index.index


def _check_alike(name: str, one: TensorWriteData, other: TensorWriteData) -> None:
    if one.size != other.size or one.properties.dtype != other.properties.dtype:
        raise PlanError(
            f"{name}: shape {one.size} {one.properties.dtype} in one item of a rank, shape "
            f"{other.size} {other.properties.dtype} in another"
        )


@dataclass(frozen=True, eq=False)
class SavePlan:
    """What one rank writes."""

    items: Sequence[WriteItem]
    """The items; `WriteItems` where the default planner made it."""
    planner_data: Structure | None = None
    """The nesting of this rank's state."""
    storage_data: bytes = b""
    """What the storage tells its own writer on this rank, in its own encoding."""
    usable: bool = True
    """False where nothing changed and the previous plan holds."""


@dataclass(frozen=True, slots=True)
class ReadItem:
    """One region to read: a part of a stored chunk that goes to a part of a wanted box."""

    dest_index: MetadataIndex
    """The wanted box; the hint is its number on this rank."""
    dest_offsets: tuple[int, ...]
    """Where in the wanted box the region goes."""
    storage_index: MetadataIndex
    """The stored chunk; the hint is its row among the tensor's chunks."""
    storage_offsets: tuple[int, ...]
    """Where in the stored chunk the region starts."""
    lengths: tuple[int, ...]
    """Its extent; `()` with a value."""


@dataclass(frozen=True, eq=False)
class ReadItems(Rows[ReadItem]):
    """The items of a load plan: one row per pair of wanted box and stored chunk, then values."""

    tensors: TensorTable
    """The stored tensors."""
    chunks: ChunkTable
    """The stored chunk of each row, with its location."""
    chunk_row: Ints
    """Row of that chunk among its tensor's chunks."""
    wanted: Ints
    """Number of the wanted box on this rank."""
    wanted_names: Sequence[str]
    """Name of each wanted box."""
    wanted_boxes: Boxes
    """Each wanted box."""
    low: Ints
    """First index of the region in the whole tensor, all rows end to end."""
    size: Ints
    """Extent of the region, likewise."""
    value_names: Sequence[str] = ()
    """Stored values wanted."""
    value_dest: Sequence[int] = ()
    """Number of each on this rank."""

    @classmethod
    def of(cls, plan: LoadPlan) -> ReadItems:
        """The items of a plan, which must be columns."""
        if not isinstance(plan.items, ReadItems):
            raise TypeError("this storage needs the plan of the default planner")
        return plan.items

    @property
    def nbytes(self) -> int:
        """Bytes of all regions."""
        volumes = Boxes(self.chunks.boxes.start, self.low, self.size).volumes()
        return int((volumes * self.tensors.itemsize[self.chunks.tensor]).sum())

    def __len__(self) -> int:
        """Regions and values together."""
        return len(self.chunks) + len(self.value_names)

    def row(self, row: int) -> ReadItem:
        """One item as an object."""
        if row >= len(self.chunks):
            at = row - len(self.chunks)
            name = self.value_names[at]
            dest = MetadataIndex(name, None, self.value_dest[at])
            return ReadItem(dest, (), MetadataIndex(name), (), ())
        number = int(self.wanted[row])
        box, stored = self.wanted_boxes[number], self.chunks.boxes[row]
        part = slice(int(self.chunks.boxes.start[row]), int(self.chunks.boxes.start[row + 1]))
        low, size = self.low[part].tolist(), self.size[part].tolist()
        return ReadItem(
            MetadataIndex(self.wanted_names[number], box.offsets, number),
            tuple(a - b for a, b in zip(low, box.offsets, strict=True)),
            MetadataIndex(
                self.tensors.names[int(self.chunks.tensor[row])],
                stored.offsets,
                int(self.chunk_row[row]),
            ),
            tuple(a - b for a, b in zip(low, stored.offsets, strict=True)),
            tuple(size),
        )


@dataclass(frozen=True, eq=False)
class LoadPlan:
    """What one rank reads."""

    items: Sequence[ReadItem]
    """The regions; `ReadItems` where the default planner made it."""
    storage_data: bytes = b""
    """What the storage tells its own reader on this rank."""
    wanted: frozenset[str] = frozenset()
    """Names this rank asks for."""
    containers: frozenset[str] = frozenset()
    """Top-level containers of this rank's target."""
    mismatched: Mapping[str, str] = field(default_factory=dict)
    """Names whose stored shape, dtype or kind does not fit, and how."""
    whole: frozenset[tuple[int, int]] = frozenset()
    """Leaves of the stored structure, from the first to past the last, that are taken as they are:
    what was saved per rank and has a `resize`."""
    kept: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Names that keep what the target has, and the stored leaves there: what was saved per rank,
    by another number of ranks, and is optional."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a planner runs."""

    rank: int = 0
    """This rank."""
    world_size: int = 1
    """How many there are."""

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank makes the global plan."""
        return self.rank == 0


class SavePlanner(ABC):
    """Decides what each rank writes."""

    @property
    def features(self) -> frozenset[str]:
        """What a reader must be able to do with this rank's values: `"pickle"`, or nothing."""
        return frozenset()

    staging: Staging | None = None
    """How elements are best copied, where some are on a device."""

    @abstractmethod
    def set_up_planner(
        self, state_dict: object, storage_meta: StorageMeta | None = None, place: Place = Place()
    ) -> None:
        """Take the state of this rank."""

    @abstractmethod
    def create_local_plan(self) -> SavePlan:
        """What this rank could write."""

    @abstractmethod
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """What each rank does write, and the metadata of it all. Runs on the coordinator."""

    @abstractmethod
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Take this rank's share of the global plan."""

    @abstractmethod
    def resolve_data(self, write_item: WriteItem) -> Source | bytes:
        """The elements of a box, or the encoded value. May be called from any thread."""

    def check_sources(self, items: WriteItems, rows: Ints) -> None:
        """Raise what asking for the elements of these chunks would, as far as that is quick."""

    def addresses(self, items: WriteItems, rows: Ints) -> Addresses:
        """Where some chunks of the plan lie in host memory, row-major and as they are stored, if
        that is known; else 0. Valid while the state stands still."""
        return np.zeros(len(rows), np.uint64)

    def sources(self, items: WriteItems, rows: Ints) -> Sequence[Source]:
        """The elements of some chunks of the plan; asks `resolve_data` for each."""
        return [self.resolve_data(items[row]) for row in rows.tolist()]  # type: ignore[misc]

    def image(self, rows: Ints, start: Ints, nbytes: Ints) -> Image | None:
        """Finds bytes of a file in memory of ours, where these chunks lie there as in the file."""
        return None


class PlannedPlanner(SavePlanner):
    """Gives the elements of a plan that was made by another, or without a state."""

    def set_up_planner(
        self, state_dict: object, storage_meta: StorageMeta | None = None, place: Place = Place()
    ) -> None:
        """Planning is over."""
        raise AssertionError("a snapshot is planned already")

    def create_local_plan(self) -> SavePlan:
        """Planning is over."""
        raise AssertionError("a snapshot is planned already")

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Planning is over."""
        raise AssertionError("a snapshot is planned already")

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Planning is over."""
        raise AssertionError("a snapshot is planned already")


class LoadPlanner(ABC):
    """Decides what each rank reads and where it goes."""

    staging: Staging | None = None
    """How elements are best copied, where some are on a device."""

    @abstractmethod
    def set_up_planner(
        self, state_dict: object, metadata: Metadata, place: Place = Place()
    ) -> None:
        """Take the target of this rank and what is stored."""

    @abstractmethod
    def create_local_plan(self) -> LoadPlan:
        """What this rank reads; raises `MismatchError` where the target does not fit."""

    @abstractmethod
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """A last look at all plans together. Runs on the coordinator."""

    @abstractmethod
    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Take this rank's final plan."""

    @abstractmethod
    def load_bytes(self, read_item: ReadItem, value: bytes) -> None:
        """Take an encoded value."""

    @abstractmethod
    def resolve_tensor(self, read_item: ReadItem) -> Sink:
        """Where the elements of a wanted box go. May be called from any thread."""

    def sinks(self, items: ReadItems) -> Callable[[int], Sink]:
        """The sink of each wanted box by its number; asks `resolve_tensor` once for each."""
        first = {number: row for row, number in reversed(list(enumerate(items.wanted.tolist())))}
        found: dict[int, Sink] = {}

        def sink(number: int) -> Sink:
            if number not in found:
                found[number] = self.resolve_tensor(items[first[number]])
            return found[number]

        return sink

    def places(self, items: ReadItems) -> HostPlaces | None:
        """Where sinks lie in host memory, if that is known without asking for each of them."""
        return None

    def commit_tensor(self, read_item: ReadItem, tensor: Sink) -> None:
        """Every element of this region has been put.

        A load that is begun again, as another rank could not read for a moment, sets up the planner
        again first, and tells of every region once more.
        """

    def commit(self, items: ReadItems, sinks: Callable[[int], Sink]) -> None:
        """All regions have been put, into these sinks; tells `commit_tensor` of each."""
        if type(self).commit_tensor is LoadPlanner.commit_tensor:
            return
        for row, number in enumerate(items.wanted.tolist()):
            self.commit_tensor(items[row], sinks(number))
