# SPDX-License-Identifier: Apache-2.0
"""Where everything lies, decided once for all ranks from the global plan.

Within a file, entries are ordered by the largest power of two (up to 64 KiB) that divides their
size, descending, then by name and offset: every entry then starts, counted from the first one, on a
multiple of that power, and so of its item size, without any padding between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from shardkeep.columns import Ints, narrow, order_by, pack, unpack
from shardkeep.formats.native.header import header_room
from shardkeep.formats.native.names import CONTENT_KEY, data_file
from shardkeep.formats.native.record import FileRow
from shardkeep.tables import ChunkTable, TensorTable, ValueTable

__all__ = [
    "FilePlan",
    "Layout",
    "Limits",
    "decode_rank_layout",
    "encode_rank_layout",
    "plan_layout",
]

MAX_POWER = 1 << 16


@dataclass(frozen=True, slots=True)
class Limits:
    """When a rank begins another file."""

    payload: int = 16 << 30
    """Most bytes of chunks in one file, unless a single chunk is larger."""
    together: int = 8
    """Into how many files of equal size a rank's chunks go, to be written at the same time."""
    least: int = 1 << 30
    """Bytes below which a file is not cut for that."""
    header: int = 8 << 20
    """Most bytes of header."""

    def payload_of(self, nbytes: int) -> int:
        """Most bytes of chunks in one file of a rank that has so many."""
        return min(self.payload, max(self.least, -(-nbytes // self.together)))


class FilePlan(msgspec.Struct, frozen=True):
    """One data file before it is written."""

    rank: int
    """Who writes it."""
    number: int
    """Of the files of that rank."""
    room: int
    """Bytes of header; the first chunk starts here."""
    content: int
    """Where the content digests begin: the end of the chunks."""
    values: int
    """Where the values begin: the end of the content digests."""
    first: int
    """First of the rank's chunks, in the order they lie on disk, that is in this file."""
    count: int
    """How many of them are."""
    holds_values: bool
    """Whether the rank's values are in this file."""

    def name(self, save_id: str) -> str:
        """Path relative to the checkpoint; only it differs between saves with one plan."""
        return data_file(save_id, self.rank, self.number)


@dataclass(frozen=True, eq=False)
class Layout:
    """The layout of a whole checkpoint."""

    chunks: ChunkTable
    """All chunks, with their file and place."""
    values: ValueTable
    """All values, with their file."""
    files: tuple[FilePlan, ...]
    """All files, in the order that chunks and values number them."""
    messages: tuple[bytes, ...]
    """What each rank must know of it."""
    kept: tuple[FileRow, ...] = ()
    """Files of an earlier checkpoint, numbered after those that are written."""


def plan_layout(
    tensors: TensorTable,
    chunks: ChunkTable,
    values: ValueTable,
    world_size: int,
    digest_size: int,
    limits: Limits,
    begun: Sequence[int] = (),
) -> Layout:
    """Give every chunk a file and a place, every value a file.

    `begun` says how many files each rank has written already: the next number is that.
    """
    nbytes = chunks.nbytes(tensors)
    power = np.minimum(nbytes & -nbytes, MAX_POWER)
    power[power == 0] = MAX_POWER  # nothing at all fits anywhere
    level = np.log2(power).astype(np.int64)
    order = order_by(chunks.rank * 32 + (16 - level), world_size * 32)
    ends = np.cumsum(nbytes[order])
    begins = ends - nbytes[order]
    used, which = np.unique(chunks.tensor[order], return_inverse=True)
    text = np.cumsum(_entry_bounds(tensors, used)[which])
    edges = np.searchsorted(chunks.rank[order], np.arange(world_size + 1))
    has_values = np.bincount(values.rank, minlength=world_size) > 0
    place = np.zeros(len(chunks), np.int64)
    value_file = np.full(world_size, -1)
    files: list[FilePlan] = []
    messages = []
    for rank in range(world_size):
        mine: list[FilePlan] = []
        low, stop = int(edges[rank]), int(edges[rank + 1])
        for at, end in _cut(low, stop, begins, ends, text, limits):
            last = end == stop
            header = 1024 + (
                int(text[end - 1]) - (int(text[at - 1]) if at else 0) if end > at else 0
            )
            if end == at and not has_values[rank]:
                continue
            room = header_room(header)
            content = room + (int(ends[end - 1] - begins[at]) if end > at else 0)
            if end > at:
                place[at:end] = begins[at:end] + (room - begins[at])
            holds_values = bool(last and has_values[rank])
            if holds_values:
                value_file[rank] = len(files)
            plan = FilePlan(
                rank,
                len(mine) + (begun[rank] if begun else 0),
                room,
                content,
                content + (end - at) * (CONTENT_KEY + digest_size),
                at - low,
                end - at,
                holds_values,
            )
            mine.append(plan)
            files.append(plan)
        messages.append(_rank_message(mine, order[low:stop], place[low:stop]))
    file, start = np.empty_like(place), np.empty_like(place)
    file[order] = np.repeat(np.arange(len(files)), [plan.count for plan in files])
    start[order] = place
    placed_values = ValueTable(
        values.names, values.rank, values.slot, value_file[values.rank].astype(np.int64)
    )
    return Layout(chunks.placed(file, start), placed_values, tuple(files), tuple(messages))


def _cut(
    low: int, stop: int, begins: Ints, ends: Ints, text: Ints, limits: Limits
) -> list[tuple[int, int]]:
    """Cut a rank's chunks, in disk order, into files."""
    if low == stop:
        return [(low, stop)]
    out = []
    at = low
    payload = limits.payload_of(int(ends[stop - 1] - begins[low]))
    while at < stop:
        by_bytes = int(np.searchsorted(ends[at:stop], begins[at] + payload, "right"))
        before = text[at - 1] if at else 0
        by_text = int(np.searchsorted(text[at:stop], before + limits.header, "right"))
        end = at + max(1, min(by_bytes, by_text))
        out.append((at, end))
        at = end
    return out


def _entry_bounds(tensors: TensorTable, rows: Ints) -> Ints:
    """For each of some tensors, the most bytes a header entry of one of its chunks can take."""
    digits = np.ones(len(tensors.shapes), np.int64)
    for power in range(1, 19):
        digits += tensors.shapes >= 10**power
    per_shape = np.add.reduceat(np.append(digits + 1, 0), tensors.shape_start[:-1]) * (
        np.diff(tensors.shape_start) > 0
    )
    per_shape, encode = per_shape[rows], msgspec.json.encode
    names = np.array([len(encode(tensors.names[row])) for row in rows.tolist()], np.int64)
    # The name, offsets and shape; then braces, a dtype, two numbers of 20 digits, `~n`.
    bounds: Ints = names + 2 * per_shape + 160
    return bounds


def _rank_message(files: list[FilePlan], rows: Ints, place: Ints) -> bytes:
    """A rank's chunks come in the order of the global plan; on disk they lie in another."""
    by_plan = np.argsort(rows)
    disk_order = np.empty_like(by_plan)
    disk_order[by_plan] = np.arange(len(rows))
    return encode_rank_layout(files, disk_order, place[by_plan])


def encode_rank_layout(files: list[FilePlan], disk_order: Ints, start: Ints) -> bytes:
    """What a rank must know: its files, those of its chunks that are in them, in the order they
    lie there, and where each of its chunks starts."""
    return pack(
        {
            "files": msgspec.msgpack.encode(files),
            "disk_order": narrow(disk_order),
            "start": narrow(start),
        }
    )


def decode_rank_layout(message: bytes) -> tuple[list[FilePlan], Ints, Ints]:
    """A rank's files, its chunks in disk order, and where each chunk starts."""
    part = unpack(message)
    files = msgspec.msgpack.decode(part["files"], type=list[FilePlan])
    return files, part["disk_order"].astype(np.int64), part["start"].astype(np.int64)
