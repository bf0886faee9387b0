# SPDX-License-Identifier: Apache-2.0
"""A state that was operated on, read through what is stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from shardkeep.arrays import HostSink, PartSink, Sink, region
from shardkeep.columns import Boxes
from shardkeep.dtypes import DType, lookup
from shardkeep.metadata import ChunkStorageMetadata
from shardkeep.planner import ReadItems
from shardkeep.reads import plan_reads
from shardkeep.surgery.fitting import Fitting, holds_all
from shardkeep.surgery.pieces import Composed, Ints, Piece
from shardkeep.tables import StateColumns

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["View", "Wanted"]


class Wanted(NamedTuple):
    """A box somebody wants."""

    name: str
    """Of which new tensor."""
    offsets: Ints
    """Where it begins."""
    sizes: Ints
    """Its extent; none is 0."""
    sink: Sink
    """Where it goes."""


Read = Callable[[ReadItems, Callable[[int], Sink]], object]
"""`read_tensors` of a reader."""


class View:
    """Reads boxes of tensors that are made of stored ones. Any thread may."""

    def __init__(self, tensors: Mapping[str, Composed], stored: StateColumns, read: Read) -> None:
        """`read` brings what is stored."""
        self.tensors = tensors
        self._stored = stored
        self._row_of = stored.tensors.row_of
        self._read = read

    def read(self, wanted: Sequence[Wanted]) -> None:
        """Bring all of these; the digests of what is read are checked by who reads."""
        names: list[str] = []
        boxes: list[ChunkStorageMetadata] = []
        sinks: list[Sink] = []
        for want in wanted:
            for name, box, sink in self._parts(want):
                names.append(name)
                boxes.append(box)
                sinks.append(sink)
        if names:
            self._read(plan_reads(self._stored, names, Boxes.of(boxes)), sinks.__getitem__)

    def _parts(self, want: Wanted) -> Iterator[tuple[str, ChunkStorageMetadata, Sink]]:
        tensor = self.tensors[want.name]
        dtype = lookup(tensor.dtype)
        for piece in tensor.pieces:
            found = piece.overlap(want.offsets, want.sizes)
            if found is not None:
                low, sizes = found
                box = ChunkStorageMetadata(*piece.stored_box(low, sizes))
                at = tuple(a - b for a, b in zip(low, want.offsets, strict=True))
                sink = _sink(want.sink, piece, at, sizes, sizes == want.sizes)
                stored = self._stored.tensors.dtype(self._row_of[piece.source])
                if stored is not dtype and not holds_all(dtype, stored):
                    sink = Fitting(sink, want.name, dtype)
                yield piece.source, box, sink


def _sink(sink: Sink, piece: Piece, at: Ints, sizes: Ints, whole: bool) -> Sink:
    """Where a part of a piece goes, in the dimensions it is stored in."""
    plain = piece.dims == tuple(range(len(sizes)))
    if plain and whole:
        return sink
    if isinstance(sink, HostSink):
        return HostSink(_stored_dims(sink.array[region(at, sizes)], piece), sink.dtype)
    return PartSink(sink, at) if plain else _Turned(sink, piece, at)


def _stored_dims(array: npt.NDArray[Any], piece: Piece) -> npt.NDArray[Any]:
    """A view of a part of a new tensor, with the dimensions of the stored one."""
    run = set(piece.dims)
    index = tuple(slice(None) if dim in run else 0 for dim in range(array.ndim))
    array = array[(*index, ...)]
    return array[(*(None if dim < 0 else slice(None) for dim in piece.dims), ...)]


@dataclass(frozen=True, slots=True)
class _Turned:
    """A sink that gets blocks in the dimensions they are stored in."""

    sink: Sink
    piece: Piece
    at: Ints
    """Where the part begins in the sink."""

    def put(self, offsets: Ints, block: npt.NDArray[np.generic], dtype: DType) -> None:
        """Hand on, in the dimensions of the new tensor."""
        place = list(self.at)
        shape = [1] * len(place)
        for dim, first, extent in zip(self.piece.dims, offsets, block.shape, strict=True):
            if dim >= 0:
                place[dim] += first
                shape[dim] = extent
        self.sink.put(tuple(place), block.reshape(shape), dtype)
