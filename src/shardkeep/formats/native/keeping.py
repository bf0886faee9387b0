# SPDX-License-Identifier: Apache-2.0
"""Files of an earlier checkpoint, used again where nothing in them changed.

Each rank tells which of its chunks the earlier checkpoint, its base, has. The coordinator keeps
those files of the base of which enough is still wanted: they get a second name in the new
checkpoint, and what they hold is not written. A kept file may hold more than the new checkpoint
wants of it; the index says what that is.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardkeep.columns import Ints, pack, unpack
from shardkeep.errors import CheckpointError
from shardkeep.formats.native.commit import read_record, unlink_all
from shardkeep.formats.native.layout import (
    FilePlan,
    Layout,
    Limits,
    decode_rank_layout,
    encode_rank_layout,
    plan_layout,
)
from shardkeep.formats.native.names import kept_file
from shardkeep.formats.native.record import FileRow, Record
from shardkeep.formats.native.same import Same
from shardkeep.stores.local import FileId, LocalStore
from shardkeep.tables import StateColumns

__all__ = ["Keeping", "join", "without_kept", "worth_keeping"]

log = logging.getLogger("shardkeep")

DEAD = 1.0
"""Most bytes of kept files that are not wanted, to those of the whole checkpoint: they take room
until their files go."""
MOST_FILES = 32
"""Most files that are kept, to each rank."""


@dataclass(frozen=True, eq=False)
class Keeping:
    """What becomes of the files of a base, on the coordinator of a save."""

    base: LocalStore
    """The earlier checkpoint."""
    store: LocalStore
    """The new one."""
    save_id: str
    """Of the new one."""
    ranks: int
    """How many save."""
    written: list[str]
    """Names of files that an abort removes: those of kept files join them."""
    synced: Callable[[], Mapping[str, FileId]]
    """Files of the base that are durable, by name."""

    def keep(self, compared: str, wanted: Ints, total: int) -> dict[int, FileRow]:
        """Keep what is worth it, by the number of each file: of each so many bytes are wanted, of
        a checkpoint of `total`. Nothing, if the base is not the save any more that ranks have
        compared with."""
        try:
            record = read_record(self.base)
        except CheckpointError:
            return {}
        if record.save_id != compared:
            return {}
        size = np.array([row.size for row in record.files[: len(wanted)]], np.int64)
        numbers = worth_keeping(size, wanted, total, MOST_FILES * self.ranks)
        return self._link(record, numbers)

    def _link(self, record: Record, numbers: Sequence[int]) -> dict[int, FileRow]:
        """Give a second name to files of the base, the oldest first: in the order of their names,
        what was written last comes last.

        A file that cannot be linked is not kept: it is on another file system, or is gone
        meanwhile. All are durable before: once it has a new name, a sync waits for that too.
        """
        base, store, kept = self.base, self.store, dict[int, FileRow]()
        synced = self.synced()
        for number in sorted(numbers, key=lambda number: (not record.files[number].kept, number)):
            row = record.files[number]
            name = kept_file(self.save_id, len(kept))
            self.written.append(name)  # an interrupt may come as soon as it is there
            try:
                store.link_from(base, row.name, name)
            except OSError as error:
                log.info("%s is not kept: %s", base.root / row.name, error)
                unlink_all(store, [name])  # ours alone; it may be there though a server says no
                continue
            try:
                if store.identify(name) != synced.get(row.name):
                    store.sync_file(name)
                if (size := store.stat(name).size) != row.size:
                    raise OSError(errno.EIO, f"{size} bytes, expected {row.size}")
            except OSError as error:
                log.warning("%s is not kept: %s", base.root / row.name, error)
                unlink_all(store, [name])
                continue
            kept[number] = replace(row, name=name, kept=True)
        return kept


def worth_keeping(size: Ints, wanted: Ints, total: int, most: int) -> list[int]:
    """Of files of so many bytes, of which so many are `wanted`: those to keep.

    All of which anything is wanted, but for those that waste the most once they waste too much of a
    checkpoint of `total` bytes, and for those that have the least once they are too many.
    """
    useful = np.flatnonzero(wanted > 0)
    by_use = useful[np.argsort(-wanted[useful] / size[useful], kind="stable")]
    dead = np.cumsum((size - wanted)[by_use])
    kept = by_use[dead <= DEAD * total]
    return sorted(kept[np.argsort(-wanted[kept], kind="stable")][:most].tolist())


def join(
    told: Sequence[bytes],
    state: StateColumns,
    limits: Limits,
    digest_size: int,
    keep: Callable[[str, Ints, int], dict[int, FileRow]],
) -> tuple[Layout, list[bytes]]:
    """The layout around what is kept, and what each rank must know of it.

    `keep(base, wanted, total)` gets the bytes wanted of each of the base's files, and those of the
    whole checkpoint, and says which it keeps.
    """
    assert state.chunks is not None
    same = [Same.decode(message) for message in told]
    base = next((one.base for one in same if one.base), "")
    edges = [np.flatnonzero(state.chunks.rank == rank) for rank in range(len(told))]
    file, start = np.full(len(state.chunks), -1), np.zeros(len(state.chunks), np.int64)
    written = np.full(len(state.chunks), -1)
    early: list[FilePlan] = []
    for rows, one in zip(edges, same, strict=True):
        if one.base == base:  # it may have been replaced meanwhile
            file[rows[one.row]] = one.file
            start[rows[one.row]] = one.start
        if one.early is not None:
            mine, number_in, begins = one.early.columns()
            written[rows[mine]] = number_in + len(early)
            start[rows[mine]] = begins
            early += one.early.plans
    nbytes = state.chunks.nbytes(state.tensors)
    used = file >= 0
    wanted = np.bincount(file[used], nbytes[used]).astype(np.int64)
    kept = keep(base, wanted, int(nbytes.sum())) if base else {}
    number = np.full(len(wanted) + 1, -1)  # the last is that of what is in no file
    number[list(kept)] = np.arange(len(kept))
    file = number[file]
    changed = np.flatnonzero((file < 0) & (written < 0))
    layout = plan_layout(
        state.tensors,
        state.chunks.take(changed),
        state.values_table,
        len(told),
        digest_size,
        limits,
        [len(one.early.plans) if one.early is not None else 0 for one in same],
    )
    assert layout.chunks.file is not None
    assert layout.chunks.start is not None
    file += len(layout.files) + len(early)
    file = np.where(written < 0, file, written + len(layout.files))
    file[changed], start[changed] = layout.chunks.file, layout.chunks.start
    whole = Layout(
        state.chunks.placed(file, start),
        layout.values,
        (*layout.files, *early),
        layout.messages,
        tuple(kept.values()),
    )
    is_changed = np.zeros(len(file), np.bool_)
    is_changed[changed] = True
    answers = [
        pack({"layout": message, "changed": np.packbits(is_changed[rows])})
        for rows, message in zip(edges, layout.messages, strict=True)
    ]
    return whole, answers


def without_kept(answer: bytes, chunks: int) -> tuple[bytes, Ints]:
    """What a rank must know of its layout, and which of its chunks changed and are written."""
    part = unpack(answer)
    rows = np.flatnonzero(np.unpackbits(part["changed"], count=chunks))
    files, disk_order, start = decode_rank_layout(part["layout"])
    places = np.zeros(chunks, np.int64)
    places[rows] = start
    return encode_rank_layout(files, rows[disk_order], places), rows
