# SPDX-License-Identifier: Apache-2.0
"""Torch's metadata of a stored checkpoint; chunks become objects when a planner looks at them.

A checkpoint of many chunks is opened for its tensors: a planner asks for the chunks of those it
loads. Everything here compares equal to what `to_torch` would make, and is that once pickled.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo

from shardkeep.columns import Boxes, Ints
from shardkeep.metadata import Metadata, MetadataIndex, StorageLocation
from shardkeep.tables import ChunkTable, LocationColumns, StateColumns, TensorTable, ValueTable
from shardkeep.torch.mapping import meta_to_torch, properties_to_torch
from shardkeep.torch.nesting import paths_of

__all__ = ["StoredLocations", "StoredTensor", "placed_locations", "stored_metadata"]

FEW = 4
"""Tensors whose chunks are read one by one; who looks at more mostly looks at all."""


class StoredTensor(dcp.TensorStorageMetadata):
    """A stored tensor, whose chunks are read from the index on first use."""

    def __init__(
        self,
        properties: dcp.TensorProperties,
        size: torch.Size,
        read: Callable[[], list[dcp.ChunkStorageMetadata]],
    ) -> None:
        """`read` gives the chunks."""
        self.properties = properties
        self.size = size
        self._read = read

    def __getattr__(self, name: str) -> Any:
        """Asked only for what is not there yet."""
        if name != "chunks":
            raise AttributeError(name)
        self.chunks = self._read()
        return self.chunks

    def __eq__(self, other: object) -> bool:
        """As metadata that is no subclass would."""
        if not isinstance(other, dcp.TensorStorageMetadata):
            return NotImplemented
        mine = (self.properties, self.size, self.chunks)
        return mine == (other.properties, other.size, other.chunks)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        """Without the open index."""
        return dcp.TensorStorageMetadata, (self.properties, self.size, self.chunks)


def stored_metadata(metadata: Metadata, close: Callable[[], None]) -> dcp.Metadata:
    """Torch's metadata of an open native checkpoint; `close` is called when nobody has it more."""
    state = metadata.state_dict_metadata
    assert isinstance(state, StateColumns)
    assert metadata.planner_data is not None
    assert isinstance(metadata.storage_data, LocationColumns)
    chunks = _Chunks(state)
    weakref.finalize(chunks, close)
    tensors = state.tensors
    entries: dict[str, dcp.STORAGE_TYPES] = {}
    for name in metadata.planner_data.names:  # as they stand in the state
        row = tensors.row_of.get(name)
        if row is None:
            entries[name] = dcp.BytesStorageMetadata()
            continue
        entries[name] = StoredTensor(
            properties_to_torch(tensors.properties(row), name),
            torch.Size(tensors.shape(row)),
            partial(chunks.read, tensors.stored_row(row)),
        )
    return dcp.Metadata(
        entries,
        paths_of(metadata.planner_data),
        StoredLocations(metadata.storage_data, tensors, held=chunks),
        meta_to_torch(metadata.storage_meta),
        CURRENT_DCP_VERSION,
    )


class _Chunks:
    """Reads the chunks of a few tensors one by one, then all that are left at once."""

    def __init__(self, state: StateColumns) -> None:
        self._state = state
        self._asked = 0
        self._all: tuple[Boxes, Ints] | None = None

    def read(self, row: int) -> list[dcp.ChunkStorageMetadata]:
        self._asked += 1
        if self._asked < FEW:
            boxes = self._state.chunks_of(row).boxes
            return _objects(boxes, 0, len(boxes))
        if self._all is None:
            chunks, begin = self._state.chunks_among(np.arange(len(self._state.tensors)))
            self._all = chunks.boxes, begin
        boxes, begin = self._all
        return _objects(boxes, int(begin[row]), int(begin[row + 1]))


def _objects(boxes: Boxes, first: int, stop: int) -> list[dcp.ChunkStorageMetadata]:
    start = boxes.start[first : stop + 1].tolist()
    base = start[0]
    offsets = boxes.offsets[base : start[-1]].tolist()
    sizes = boxes.sizes[base : start[-1]].tolist()
    size, chunk = torch.Size, dcp.ChunkStorageMetadata
    return [
        chunk(size(offsets[low - base : high - base]), size(sizes[low - base : high - base]))
        for low, high in itertools.pairwise(start)
    ]


class StoredLocations(Mapping[dcp.MetadataIndex, _StorageInfo]):
    """`Metadata.storage_data`, as torch would have it, over our columns."""

    def __init__(
        self,
        locations: LocationColumns,
        tensors: TensorTable,
        pickled: tuple[Any, ...] | None = None,
        held: object = None,
    ) -> None:
        """`pickled` is how it is pickled, where it can be as columns; `held` is kept alive."""
        self._locations = locations
        self._tensors = tensors
        self._pickled = pickled
        self._held = held

    def __getitem__(self, key: dcp.MetadataIndex) -> _StorageInfo:
        """Where a chunk or value lies."""
        if (key.offset is None) == (key.fqn in self._tensors.row_of):
            raise KeyError(key)
        place: StorageLocation = self._locations[MetadataIndex(key.fqn, key.offset, key.index)]
        return _StorageInfo(place.file, place.offset, place.nbytes)

    def __iter__(self) -> Iterator[dcp.MetadataIndex]:
        """Every chunk, then every value."""
        tensors = self._tensors.row_of
        for key in self._locations:
            offset = (key.offset or ()) if key.fqn in tensors else None
            yield dcp.MetadataIndex(key.fqn, offset, key.index)

    def __len__(self) -> int:
        """Chunks and values."""
        return len(self._locations)

    def __reduce__(self) -> tuple[Any, ...]:
        """As columns, or as a dict."""
        return self._pickled or (dict, (list(self.items()),))


def placed_locations(
    tensors: TensorTable,
    chunks: ChunkTable,
    values: ValueTable,
    files: Sequence[str],
    value_ranges: Sequence[tuple[int, int]],
) -> StoredLocations:
    """Locations whose columns are in memory, and travel as such."""
    first = chunks.tensor.searchsorted(range(len(tensors) + 1)).tolist()
    state = StateColumns(
        tensors, values, lambda row: chunks.part(first[row], first[row + 1]), chunks
    )
    columns = LocationColumns(state, files, value_ranges)
    told = (tensors, chunks, values, list(files), list(value_ranges))
    return StoredLocations(columns, tensors, (placed_locations, told))
