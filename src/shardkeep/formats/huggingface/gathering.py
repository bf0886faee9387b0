# SPDX-License-Identifier: Apache-2.0
"""The bytes of a job, put together from what this rank holds and what others sent.

A job is a stretch of bytes in the middle of row-major tensors, a chunk a box of one. What they have
in common are a few smaller boxes, each of which lies in both as it is, if by strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkeep.arrays import Bytes, HostSource, Source, region
from shardkeep.boxes import flat_range_boxes, overlap
from shardkeep.dtypes import bits_of
from shardkeep.engine.arriving import ArrivingSource
from shardkeep.formats.huggingface.dealing import LOCAL, Deal
from shardkeep.metadata import ChunkStorageMetadata
from shardkeep.planner import SavePlanner, WriteItems

__all__ = ["Gathering", "Received"]

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Run:
    """Elements that follow each other in the chunk and in the job."""

    at: int
    """Byte of the job."""
    nbytes: int
    start: int
    """First element, among those of the chunk."""
    stop: int

    def read(self, source: Source, out: Bytes) -> None:
        source.read_into(self.start, self.stop, out)

    def put(self, source: Source, job: Bytes) -> None:
        self.read(source, job[self.at : self.at + self.nbytes])

    def receive(self, data: Bytes, job: Bytes) -> None:
        np.copyto(job[self.at : self.at + self.nbytes], data)


@dataclass(frozen=True, slots=True)
class _Block:
    """A box of a chunk, and a box of some whole rows of the job."""

    at: int
    """Byte of the job where those rows begin."""
    rows: Ints
    """Their extent."""
    inner: tuple[Any, ...]
    """The box, within them."""
    offsets: Ints
    """The box, within the chunk."""
    sizes: Ints
    item: int

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.sizes, dtype=np.int64)) * self.item

    def _place(self, job: Bytes) -> npt.NDArray[Any]:
        count = int(np.prod(self.rows, dtype=np.int64)) * self.item
        bits = bits_of(self.item)
        rows: npt.NDArray[Any] = job[self.at : self.at + count].view(bits).reshape(self.rows)
        return rows[self.inner]  # type: ignore[no-any-return]

    def read(self, source: Source, out: Bytes) -> None:
        part = source.part(self.offsets, self.sizes)
        part.read_into(0, len(out) // self.item, out)

    def put(self, source: Source, job: Bytes) -> None:
        if type(source) is HostSource and source.array.dtype.isnative:
            part = source.array[region(self.offsets, self.sizes)]
            np.copyto(self._place(job).view(part.dtype), part)
            return
        data = np.empty(self.nbytes, np.uint8)
        self.read(source, data)
        self.receive(data, job)

    def receive(self, data: Bytes, job: Bytes) -> None:
        np.copyto(self._place(job), data.view(bits_of(self.item)).reshape(self.sizes))


class Received:
    """What other ranks sent for the jobs of a round, taken in order."""

    def __init__(self, parts: Sequence[Bytes]) -> None:
        """One part from each rank."""
        self._parts = parts
        self._at = [0] * len(parts)

    def take(self, rank: int, nbytes: int) -> Bytes:
        """The next bytes of a rank."""
        at = self._at[rank]
        self._at[rank] = at + nbytes
        data = self._parts[rank][at : at + nbytes]
        if len(data) != nbytes:
            raise AssertionError(f"rank {rank} sent {len(self._parts[rank])} bytes, too few")
        return data


class Gathering:
    """The jobs of one rank, and what it has for those of others."""

    def __init__(self, deal: Deal, items: WriteItems, planner: SavePlanner) -> None:
        """Nothing is looked at yet."""
        self.deal = deal
        self._items = items
        self._planner = planner
        self._first = np.searchsorted(deal.pair_job, np.arange(len(deal.low) + 1)).tolist()
        self._low, self._high = deal.low.tolist(), deal.high.tolist()
        self._holder = deal.holder.tolist()

    def local_jobs(self) -> list[int]:
        """Those for which nothing travels."""
        deal = self.deal
        return np.flatnonzero((deal.round == LOCAL) & (deal.owner == deal.rank)).tolist()

    def jobs(self, number: int) -> list[int]:
        """Those of a round that this rank writes."""
        deal = self.deal
        return np.flatnonzero((deal.round == number) & (deal.owner == deal.rank)).tolist()

    def sizes(self, number: int) -> list[int]:
        """How many bytes each rank sends to this one in a round."""
        sizes = [0] * self.deal.world
        for job in self.jobs(number):
            for chunk in self._chunks(job):
                if self._holder[chunk] != self.deal.rank:
                    nbytes = sum(piece.nbytes for piece in self._pieces(job, chunk))
                    sizes[self._holder[chunk]] += nbytes
        return sizes

    def parts(self, number: int) -> list[Bytes]:
        """What this rank sends to each in a round."""
        deal = self.deal
        theirs = np.flatnonzero((deal.round == number) & (deal.owner != deal.rank)).tolist()
        to: list[list[tuple[int, _Run | _Block]]] = [[] for _ in range(deal.world)]
        for job in theirs:
            for chunk in self._chunks(job):
                if self._holder[chunk] == deal.rank:
                    pieces = self._pieces(job, chunk)
                    to[int(deal.owner[job])].extend((chunk, piece) for piece in pieces)
        sources = self._sources([chunk for told in to for chunk, _ in told])
        parts = []
        for told in to:
            out = np.empty(sum(piece.nbytes for _, piece in told), np.uint8)
            at = 0
            for chunk, piece in told:
                end = at + piece.nbytes
                piece.read(sources[chunk], out[at:end])
                at = end
            parts.append(out)
        return parts

    def prepare(self, jobs: Sequence[int], received: Received) -> dict[int, dict[int, list[Bytes]]]:
        """For each job, what came for each chunk: taken in the order in which it was sent."""
        come: dict[int, dict[int, list[Bytes]]] = {}
        for job in jobs:
            come[job] = {
                chunk: [
                    received.take(self._holder[chunk], piece.nbytes)
                    for piece in self._pieces(job, chunk)
                ]
                for chunk in self._chunks(job)
                if self._holder[chunk] != self.deal.rank
            }
        return come

    def fill(self, job: int, out: Bytes, come: dict[int, list[Bytes]] | None = None) -> None:
        """Put the bytes of a job together, but for those of headers; from any thread."""
        chunks = self._chunks(job)
        sources = self._sources([c for c in chunks if self._holder[c] == self.deal.rank])
        for chunk in chunks:
            pieces = self._pieces(job, chunk)
            if chunk in sources:
                for piece in pieces:
                    piece.put(sources[chunk], out)
            else:
                assert come is not None
                for piece, data in zip(pieces, come[chunk], strict=True):
                    piece.receive(data, out)

    def _chunks(self, job: int) -> list[int]:
        chunks: list[int] = self.deal.pair_chunk[self._first[job] : self._first[job + 1]].tolist()
        return chunks

    def _sources(self, chunks: Sequence[int]) -> dict[int, Source]:
        wanted = list(dict.fromkeys(chunks))
        if not wanted:
            return {}
        found = self._planner.sources(self._items, self.deal.row[wanted])
        return {c: self._shaped(c, source) for c, source in zip(wanted, found, strict=True)}

    def _shaped(self, chunk: int, source: Source) -> Source:
        """What was staged lies flat; boxes are taken of what has a shape."""
        if not self.deal.dense[chunk] and isinstance(source, HostSource | ArrivingSource):
            part = slice(*self.deal.boxes.start[chunk : chunk + 2].tolist())
            sizes = tuple(self.deal.boxes.sizes[part].tolist())
            if source.array.shape != sizes:
                return replace(source, array=source.array.reshape(sizes))
        return source

    def _pieces(self, job: int, chunk: int) -> list[_Run | _Block]:
        """What a job and a chunk have in common."""
        deal = self.deal
        low, high = self._low[job], self._high[job]
        place, item = int(deal.place[chunk]), int(deal.item[chunk])
        part = slice(int(deal.boxes.start[chunk]), int(deal.boxes.start[chunk + 1]))
        sizes = tuple(deal.boxes.sizes[part].tolist())
        if deal.dense[chunk]:
            first, count = int(deal.first[chunk]), int(np.prod(sizes, dtype=np.int64))
            begin = max(low, place + first * item)
            end = min(high, place + (first + count) * item)
            if begin >= end:
                return []
            start = (begin - place) // item - first
            return [_Run(begin - low, end - begin, start, start + (end - begin) // item)]
        shape = tuple(deal.shapes.sizes[part].tolist())
        offsets = tuple(deal.boxes.offsets[part].tolist())
        return _blocks(low, high, place, item, shape, ChunkStorageMetadata(offsets, sizes))


def _blocks(
    low: int, high: int, place: int, item: int, shape: Ints, box: ChunkStorageMetadata
) -> list[_Run | _Block]:
    nbytes = int(np.prod(shape, dtype=np.int64)) * item
    begin, end = max(low, place), min(high, place + nbytes)
    out: list[_Run | _Block] = []
    at = begin - low
    for offsets, sizes in flat_range_boxes(shape, (begin - place) // item, (end - place) // item):
        common = overlap(ChunkStorageMetadata(offsets, sizes), box)
        if common is not None:
            inner = region(
                tuple(a - b for a, b in zip(common.offsets, offsets, strict=True)), common.sizes
            )
            inside = tuple(a - b for a, b in zip(common.offsets, box.offsets, strict=True))
            out.append(_Block(at, sizes, inner, inside, common.sizes, item))
        at += int(np.prod(sizes, dtype=np.int64)) * item
    return out
