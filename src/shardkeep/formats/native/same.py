# SPDX-License-Identifier: Apache-2.0
"""What of a rank's chunks an earlier checkpoint has, bit for bit, by their content digests."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from shardkeep.columns import Boxes, Column, Ints, narrow, pack, unpack
from shardkeep.engine.budget import BufferPool
from shardkeep.engine.contents import digest_memory, digest_sources
from shardkeep.engine.digests import Algorithm
from shardkeep.engine.filling import Chunks
from shardkeep.errors import CheckpointError
from shardkeep.formats.native.earlier import Earlier
from shardkeep.formats.native.early import (
    EarlyFiles,
    WriteEarly,
    are_small,
    surely_changed,
    worth_writing,
)
from shardkeep.formats.native.reader import NativeReader
from shardkeep.global_plan import group_equal, sort_keys
from shardkeep.planner import SavePlanner, WriteItems
from shardkeep.tables import ChunkTable, TensorTable

__all__ = ["Same", "compare"]

log = logging.getLogger("shardkeep")


@dataclass(frozen=True, eq=False)
class Same:
    """What one rank need not write, as it tells the coordinator."""

    row: Ints
    """Which of its chunks."""
    file: Ints
    """Number of the base's file that has it."""
    start: Ints
    """First byte there."""
    base: str = ""
    """The base's save, so that all mean the same; empty where it could not be read."""
    early: EarlyFiles | None = None
    """What it has written already."""

    def encode(self) -> bytes:
        """For the coordinator."""
        columns = {"row": self.row, "file": self.file, "start": self.start}
        packed = pack({key: narrow(column) for key, column in columns.items()})
        return msgspec.msgpack.encode((self.base, packed, self.early))

    @classmethod
    def decode(cls, message: bytes) -> Same:
        """What a rank told; nothing where it could not compare."""
        if not message:
            return NOTHING
        told = msgspec.msgpack.decode(message, type=tuple[str, bytes, EarlyFiles | None])
        part = {key: column.astype(np.int64) for key, column in unpack(told[1]).items()}
        return cls(part["row"], part["file"], part["start"], told[0], told[2])


NOTHING = Same(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))


def compare(
    earlier: Earlier,
    items: WriteItems,
    planner: SavePlanner,
    *,
    algorithm: Algorithm,
    block: int,
    pool: BufferPool,
    threads: int,
    worked: Callable[[], None],
    write_early: WriteEarly | None = None,
) -> Same:
    """Which of a rank's chunks the base has, bit for bit, by their content digests.

    A base that cannot be read, or is digested in another way, has none. What is known to have
    changed once small chunks are compared, `write_early` may write beside the others. `worked` is
    told whenever some more is compared.
    """
    everything = np.arange(len(items.chunks))
    planner.check_sources(items, everything)
    address = planner.addresses(items, everything)
    try:
        base = earlier.tables()
        if (base.record.digests, base.record.block) != (algorithm.name, block):
            log.info("%s is digested in another way; nothing of it is kept", base.root)
            return NOTHING
        found = _candidates(base, earlier.chunks, items)
        wanted = base.contents_at(found.file, found.start)
        save_id = base.record.save_id
        nbytes = items.chunks.nbytes(items.tensors)[found.row]
        address = address[found.row]
        changed = np.zeros(len(found.row), np.bool_)
        if write_early is not None:
            changed = surely_changed(base, found.file, found.start, nbytes, address, algorithm)
    except CheckpointError as error:
        log.warning("all is written, as the base cannot be compared with: %s", error)
        return NOTHING

    def digest(rows: Ints) -> Column:
        return digest_memory(
            address[rows], nbytes[rows], algorithm=algorithm, threads=threads, worked=worked
        )

    near, far = np.flatnonzero(~changed & (address != 0)), np.flatnonzero(address == 0)
    small = are_small(nbytes[near])
    few, most = near[small], near[~small]
    changed[few] = (digest(few) != wanted[few]).any(axis=1)
    if write_early is not None and worth_writing(nbytes[changed]):
        write_early(found.row[changed], address[changed])
    changed[most] = (digest(most) != wanted[most]).any(axis=1)
    digests = _digest_far(items, planner, found.row[far], algorithm, pool, threads, worked)
    changed[far] = (digests != wanted[far]).any(axis=1)
    return Same(found.row[~changed], found.file[~changed], found.start[~changed], save_id)


def _digest_far(
    items: WriteItems,
    planner: SavePlanner,
    rows: Ints,
    algorithm: Algorithm,
    pool: BufferPool,
    threads: int,
    worked: Callable[[], None],
) -> Column:
    """Content digests of chunks that are not in host memory, or not in one piece."""
    nbytes = items.chunks.nbytes(items.tensors)[rows]
    itemsize = items.tensors.itemsize[items.chunks.tensor[rows]]
    order = np.argsort(-itemsize, kind="stable")  # so that no element is cut in two
    nbytes, itemsize, ordered = nbytes[order], itemsize[order], rows[order]
    end_to_end = Chunks(
        np.cumsum(nbytes) - nbytes,
        nbytes,
        itemsize,
        lambda first, last: planner.sources(items, ordered[first:last]),
    )
    out = np.zeros((len(rows), algorithm.size), np.uint8)
    out[order] = digest_sources(
        end_to_end, algorithm=algorithm, pool=pool, threads=threads, worked=worked
    )
    return out


def _candidates(base: NativeReader, chunks: ChunkTable | None, items: WriteItems) -> Same:
    """Chunks that the base has the same box of, in a tensor of the same name, type and shape.

    `chunks` are those of the base, if they are known already.
    """
    to_base = _same_tensors(items.tensors, base.index.tensors)
    if chunks is None:
        chunks, _ = base.index.chunks_among(np.unique(to_base[to_base >= 0]))
    assert chunks.file is not None
    assert chunks.start is not None
    if not len(chunks):
        return NOTHING
    if np.array_equal(to_base[items.chunks.tensor], chunks.tensor) and _equal(
        items.chunks.boxes, chunks.boxes
    ):
        return Same(np.arange(len(chunks)), chunks.file, chunks.start)
    wanted = np.flatnonzero(to_base[items.chunks.tensor] >= 0)
    ours = items.chunks.boxes.take(wanted)
    boxes = Boxes.join([ours, chunks.boxes])
    tensor = np.concatenate([to_base[items.chunks.tensor[wanted]], chunks.tensor])
    keys = sort_keys(base.index.tensors, tensor, boxes)
    order = np.argsort(keys, kind="stable")
    edges = group_equal(keys, order, tensor, boxes)
    box = np.empty_like(order)  # which of the distinct ones each is
    box[order] = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
    theirs = np.full(len(edges) - 1, -1)
    theirs[box[len(wanted) :]] = np.arange(len(chunks))
    at = theirs[box[: len(wanted)]]
    found = at >= 0
    return Same(wanted[found], chunks.file[at[found]], chunks.start[at[found]])


def _equal(one: Boxes, other: Boxes) -> bool:
    return np.array_equal(one.offsets, other.offsets) and np.array_equal(one.sizes, other.sizes)


def _same_tensors(ours: TensorTable, theirs: TensorTable) -> Ints:
    """For each tensor, the row that is stored under its name with its type and shape; or -1."""
    if ours.names == theirs.names:
        row = np.arange(len(ours.names))
    else:
        find = theirs.row_of.get
        row = np.array([find(name, -1) for name in ours.names], np.int64)
    mine = np.flatnonzero(row >= 0)
    there = row[mine]
    dtypes = {kind.dtype: at for at, kind in enumerate((*ours.kinds, *theirs.kinds))}
    one, other = ([dtypes[kind.dtype] for kind in table.kinds] for table in (ours, theirs))
    alike = theirs.alias_of[there] < 0
    alike &= (
        np.array(one, np.int64)[ours.kind[mine]] == np.array(other, np.int64)[theirs.kind[there]]
    )
    alike &= np.diff(ours.shape_start)[mine] == np.diff(theirs.shape_start)[there]
    row[mine[~alike]] = -1
    mine, there = mine[alike], there[alike]
    shape = Boxes(ours.shape_start, ours.shapes, ours.shapes).take(mine)
    stored = Boxes(theirs.shape_start, theirs.shapes, theirs.shapes).take(there)
    owner = np.repeat(mine, np.diff(shape.start))
    row[owner[shape.sizes != stored.sizes]] = -1
    return row
