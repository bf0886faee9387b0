# SPDX-License-Identifier: Apache-2.0
"""The data files of one rank, written by a process that sees nothing but an arena.

Names, plain values and everything that ranks agree on stay in the program: the process gets headers
and values as bytes, and for each chunk four numbers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from shardkeep.arrays import Source
from shardkeep.dtypes import bits_of
from shardkeep.engine.arriving import Incoming, arriving_sources, image_of
from shardkeep.engine.digests import algorithm
from shardkeep.engine.filling import Chunks
from shardkeep.engine.process import WriterProcess
from shardkeep.engine.snapshot import StagedPlanner
from shardkeep.formats.native.files import FileWriter, RankChunks
from shardkeep.formats.native.jobs import DataFiles, Written
from shardkeep.formats.native.layout import FilePlan
from shardkeep.stores.local import LocalStore

__all__ = ["write_detached", "write_there"]


class _Order(msgspec.Struct, frozen=True):
    """What the process is told."""

    root: bytes
    """Of the checkpoint, as the file system knows it."""
    save_id: str
    algorithm: str
    block: int
    budget: int
    cores: int
    umask: int
    """Of the program: its files, and those of the process, are for the same eyes."""
    plans: list[FilePlan]
    fronts: list[tuple[bytes, bytes]]
    """Header and values of each file."""
    columns: tuple[bytes, bytes, bytes, bytes]
    """Of the chunks in the order they lie on disk: start in the file, bytes, bytes of an element,
    and place in the arena."""


class _Answer(msgspec.Struct, frozen=True):
    """What it answers."""

    written: list[Written]
    stats: dict[str, float]


def write_detached(
    process: WriterProcess,
    job: DataFiles,
    root: os.PathLike[str],
    chunks: RankChunks,
    planner: StagedPlanner,
    *,
    budget: int,
    cores: int,
    progress: Callable[[int], None],
) -> tuple[list[Written], dict[str, float]]:
    """Have the process write all files; gives what `DataFiles.write` does, and the statistics."""
    columns = (chunks.start, chunks.nbytes, chunks.itemsize, planner.places(chunks.rows))
    order = _Order(
        os.fsencode(root),
        job.save_id,
        job.algorithm.name,
        job.block,
        budget,
        cores,
        _umask(),
        list(job.plans),
        [job.front(plan) for plan in job.plans],
        tuple(column.astype(np.int64).tobytes() for column in columns),  # type: ignore[arg-type]
    )
    data = msgspec.msgpack.encode(order)
    work = f"{__name__}:{write_there.__name__}"
    answer = msgspec.msgpack.decode(
        process.run(work, data, planner.snapshot, progress), type=_Answer
    )
    return answer.written, answer.stats


def write_there(data: bytes, incoming: Incoming, progress: Callable[[int], None]) -> bytes:
    """In the process: write all files, of which the elements arrive in memory."""
    order = msgspec.msgpack.decode(data, type=_Order)
    os.umask(order.umask)
    chunks = _ArenaChunks(order.columns, incoming)
    job = DataFiles(
        order.save_id,
        algorithm(order.algorithm),
        order.block,
        order.plans,
        lambda plan: order.fronts[plan.number],
        chunks.part,
    )
    store = LocalStore(os.fsdecode(order.root))
    with FileWriter(
        store,
        job.algorithm,
        job.block,
        budget=order.budget,
        cores=order.cores,
        progress=progress,
    ) as files:
        written = job.write(files, [])
    return msgspec.msgpack.encode(_Answer(written, files.stats.as_dict()))


def _umask() -> int:
    """Of this process, as it is now."""
    try:
        with open("/proc/self/status", "rb") as status:
            return next(int(line.split()[1], 8) for line in status if line.startswith(b"Umask:"))
    except (OSError, StopIteration):
        # To ask is to change it: whatever another thread creates just now is too private at worst.
        mask = os.umask(0o077)
        os.umask(mask)
        return mask


class _ArenaChunks:
    """The chunks of a rank, as columns in the order they lie on disk, and where in the arena."""

    def __init__(self, columns: Sequence[bytes], incoming: Incoming) -> None:
        self._start, self._nbytes, self._itemsize, self._place = (
            np.frombuffer(column, np.int64) for column in columns
        )
        self._incoming = incoming

    def part(self, low: int, high: int) -> Chunks:
        """The chunks [low, high), which lie in one file, for the engine."""
        rows = slice(low, high)
        return Chunks(
            self._start[rows],
            self._nbytes[rows],
            self._itemsize[rows],
            lambda first, last: self._sources(low + first, low + last),
            image_of(self._incoming, self._start[rows], self._nbytes[rows], self._place[rows]),
        )

    def _sources(self, low: int, high: int) -> Sequence[Source]:
        rows = slice(low, high)
        dtypes = [bits_of(item).newbyteorder("<") for item in self._itemsize[rows].tolist()]
        return arriving_sources(self._incoming, self._place[rows], self._nbytes[rows], dtypes)
