# SPDX-License-Identifier: Apache-2.0
"""Files of an earlier checkpoint, used again where nothing in them changed.

Each rank digests what it would write and compares that with the content digests of the earlier
checkpoint, its base. The coordinator keeps those files of the base of which enough is still wanted:
they get a second name in the new checkpoint, and what they hold is not written. A kept file may
hold more than the new checkpoint wants of it; the index says what that is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt

from shardkeep.collector import paused_collector
from shardkeep.columns import Boxes, Column, Ints, narrow, pack, unpack
from shardkeep.engine.budget import BufferPool
from shardkeep.engine.contents import digest_memory, digest_sources
from shardkeep.engine.digests import Algorithm
from shardkeep.engine.filling import Chunks
from shardkeep.errors import CheckpointError
from shardkeep.formats.native.commit import read_record, unlink_all
from shardkeep.formats.native.earlier import Earlier
from shardkeep.formats.native.early import (
    EarlyFiles,
    WriteEarly,
    are_small,
    surely_changed,
    worth_writing,
)
from shardkeep.formats.native.layout import (
    FilePlan,
    Layout,
    Limits,
    decode_rank_layout,
    encode_rank_layout,
    plan_layout,
)
from shardkeep.formats.native.names import kept_file
from shardkeep.formats.native.reader import NativeReader
from shardkeep.formats.native.record import FileRow, Record
from shardkeep.global_plan import group_equal, sort_keys
from shardkeep.memory import Addresses
from shardkeep.planner import SavePlanner, WriteItems
from shardkeep.stores.local import FileId, LocalStore
from shardkeep.tables import ChunkTable, StateColumns, TensorTable

__all__ = ["Keeping", "Same", "compare", "join", "without_kept", "worth_keeping"]

log = logging.getLogger("shardkeep")

DEAD = 1.0
"""Most bytes of kept files that are not wanted, to those of the whole checkpoint: they take room
until their files go."""
MOST_FILES = 32
"""Most files that are kept, to each rank."""

Mask = npt.NDArray[np.bool_]


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

    A base that cannot be read, or is digested in another way, has none. What is sure to have
    changed `write_early` may write meanwhile. `worked` is told whenever some more is compared.
    """
    everything = np.arange(len(items.chunks))
    with paused_collector():  # it would look at everything the program has, now and then
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
        known = np.zeros(len(found.row), np.bool_)
        if write_early is not None:
            small = np.flatnonzero(are_small(nbytes) & (address != 0))
            digests = digest_memory(
                address[small], nbytes[small], algorithm=algorithm, threads=threads, worked=worked
            )
            changed[small] = (digests != wanted[small]).any(axis=1)
            places = (found.file, found.start, nbytes, address)
            changed |= surely_changed(base, *places, algorithm)
            known[small] = True
            known |= changed
    except CheckpointError as error:
        log.warning("all is written, as the base cannot be compared with: %s", error)
        return NOTHING
    if write_early is not None and worth_writing(nbytes[changed]):
        write_early(found.row[changed], address[changed])
    left = np.flatnonzero(~known)
    digests = _contents(
        items,
        planner,
        found.row[left],
        address[left],
        algorithm=algorithm,
        pool=pool,
        threads=threads,
        worked=worked,
    )
    changed[left] = (digests != wanted[left]).any(axis=1)
    return Same(found.row[~changed], found.file[~changed], found.start[~changed], save_id)


def _contents(
    items: WriteItems,
    planner: SavePlanner,
    rows: Ints,
    address: Addresses,
    *,
    algorithm: Algorithm,
    pool: BufferPool,
    threads: int,
    worked: Callable[[], None],
) -> Column:
    """Content digests of some chunks, as they are now."""
    nbytes = items.chunks.nbytes(items.tensors)[rows]
    itemsize = items.tensors.itemsize[items.chunks.tensor[rows]]
    near, far = np.flatnonzero(address), np.flatnonzero(address == 0)
    far = far[np.argsort(-itemsize[far], kind="stable")]  # so that no element is cut in two
    out = np.zeros((len(rows), algorithm.size), np.uint8)
    out[near] = digest_memory(
        address[near], nbytes[near], algorithm=algorithm, threads=threads, worked=worked
    )
    end_to_end = Chunks(
        np.cumsum(nbytes[far]) - nbytes[far],
        nbytes[far],
        itemsize[far],
        lambda first, last: planner.sources(items, rows[far[first:last]]),
    )
    out[far] = digest_sources(
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


# --- on the coordinator


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
            try:
                store.link_from(base, row.name, name)
            except OSError as error:
                log.info("%s is not kept: %s", base.root / row.name, error)
                unlink_all(store, [name])  # ours alone; it may be there though a server says no
                continue
            try:
                if store.identify(name) != synced.get(row.name):
                    store.sync_file(name)
            except OSError as error:
                log.warning("%s is not kept: %s", base.root / row.name, error)
                unlink_all(store, [name])
                continue
            self.written.append(name)
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
