# SPDX-License-Identifier: Apache-2.0
"""Chunks that are known to have changed, written while others are still being compared.

Small chunks are compared first. One block of a large one may tell: the earlier checkpoint has
digests of all blocks of its files. If the digest of the same bytes in memory is another one, the
chunk has changed; if it is the same, nothing is known. To compare takes a processor, to write takes
a disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import ne

import msgspec
import numpy as np
import numpy.typing as npt

from shardkeep.columns import Ints
from shardkeep.engine.contents import view_memory
from shardkeep.engine.digests import Algorithm
from shardkeep.formats.native.jobs import Written
from shardkeep.formats.native.layout import FilePlan, Limits, decode_rank_layout, plan_layout
from shardkeep.formats.native.reader import NativeReader
from shardkeep.memory import Addresses
from shardkeep.planner import WriteItems
from shardkeep.tables import ChunkTable, ValueTable

__all__ = ["Early", "EarlyFiles", "are_small", "lay_out", "surely_changed", "worth_writing"]

LARGE = 1 << 20
"""Bytes of a chunk that one look is worth."""
ENOUGH = 16 << 20
"""Bytes of changed chunks that are worth files of their own."""

Mask = npt.NDArray[np.bool_]


def are_small(nbytes: Ints) -> Mask:
    """Which of chunks of so many bytes are compared before anything is written."""
    small: Mask = nbytes < LARGE
    return small


def worth_writing(nbytes: Ints) -> bool:
    """Whether chunks of so many bytes are worth files of their own."""
    return bool(nbytes.sum() >= ENOUGH)


def surely_changed(
    base: NativeReader,
    file: Ints,
    start: Ints,
    nbytes: Ints,
    address: Addresses,
    algorithm: Algorithm,
) -> Mask:
    """Of chunks in memory that the base has at some place: large ones with a block that differs."""
    block = base.record.block
    first = -(-start // block)
    count = (start + nbytes) // block - first
    number = first + count // 2
    out = np.zeros(len(file), np.bool_)
    asked = np.flatnonzero(~are_small(nbytes) & (count > 0) & (address != 0))
    here = address + (number * block - start).astype(np.uint64)
    for one in np.unique(file[asked]).tolist():
        rows = asked[file[asked] == one]
        with base.data_file(one) as opened:
            kept = list(map(opened.block_digest, number[rows].tolist()))
        views = [view_memory(at, block) for at in here[rows].tolist()]
        out[rows] = list(map(ne, map(algorithm.digest, views), kept))
    return out


class EarlyFiles(msgspec.Struct, frozen=True):
    """Files that a rank wrote before the others knew of them, as it tells the coordinator."""

    plans: list[FilePlan]
    """The files; numbered before all others of this rank."""
    rows: bytes
    """Which of its chunks are in them."""
    file: bytes
    """The number of each chunk's file among these."""
    start: bytes
    """Its first byte there."""

    def columns(self) -> tuple[Ints, Ints, Ints]:
        """Row, file and start of each chunk."""
        rows, file, start = (
            np.frombuffer(column, np.int64) for column in (self.rows, self.file, self.start)
        )
        return rows, file, start


@dataclass(eq=False)
class Early:
    """What a rank writes early, and has written."""

    rows: Ints
    """Of its chunks."""
    files: list[FilePlan]
    """What they are written to."""
    disk_order: Ints
    """Rows as they lie there."""
    start: Ints
    """Where each of all the rank's chunks begins, if it is one of them."""
    written: Sequence[Written] = ()
    """The same files, once they are there."""
    stop: Callable[[], None] = lambda: None
    """Has whoever writes them end soon."""

    def told(self) -> EarlyFiles:
        """For the coordinator."""
        file = np.repeat(np.arange(len(self.files)), [plan.count for plan in self.files])
        columns = (self.disk_order, file, self.start[self.disk_order])
        return EarlyFiles(self.files, *(column.astype(np.int64).tobytes() for column in columns))


def lay_out(items: WriteItems, rows: Ints, rank: int, digest_size: int, limits: Limits) -> Early:
    """Files for some chunks of a rank: where they lie follows from them alone."""
    chunks = items.chunks.take(rows)
    alone = ChunkTable(chunks.tensor, chunks.boxes, np.zeros(len(rows), np.int64), chunks.source)
    nothing = ValueTable([], np.zeros(0, np.int64), np.zeros(0, np.int64))
    layout = plan_layout(items.tensors, alone, nothing, 1, digest_size, limits)
    files, disk_order, start = decode_rank_layout(layout.messages[0])
    places = np.zeros(len(items.chunks), np.int64)
    places[rows] = start
    mine = [msgspec.structs.replace(plan, rank=rank) for plan in files]
    return Early(rows, mine, rows[disk_order], places)


WriteEarly = Callable[[Ints, Addresses], None]
"""Begins to write some of a rank's chunks, which lie at these addresses."""
