# SPDX-License-Identifier: Apache-2.0
"""Writing the native format: the steps of a save on storage, in the order of its contract."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np

import shardkeep
from shardkeep.arrays import Staging
from shardkeep.collector import paused_collector
from shardkeep.columns import Ints
from shardkeep.engine.budget import (
    KEPT,
    MINIMUM_BUDGET,
    BufferPool,
    Spares,
    checked_budget,
    usable_cores,
)
from shardkeep.engine.digests import DigestLayout, algorithm
from shardkeep.engine.parallel import Behind
from shardkeep.engine.process import WriterProcess
from shardkeep.engine.snapshot import StagedPlanner
from shardkeep.engine.writing import WriteStats
from shardkeep.errors import CheckpointError
from shardkeep.formats.native.claiming import refuse_occupied, see_lease, take_lease
from shardkeep.formats.native.commit import (
    Lease,
    read_record,
    surely_absent,
    unlink_all,
    wait_visible,
)
from shardkeep.formats.native.detached import write_detached
from shardkeep.formats.native.earlier import Earlier
from shardkeep.formats.native.early import Early, lay_out
from shardkeep.formats.native.files import FileWriter, RankChunks, data_header, index_payload
from shardkeep.formats.native.index import index_entries
from shardkeep.formats.native.jobs import DataFiles, Journal, Written, file_values
from shardkeep.formats.native.keeping import Keeping, join, without_kept
from shardkeep.formats.native.layout import (
    FilePlan,
    Layout,
    Limits,
    decode_rank_layout,
    plan_layout,
)
from shardkeep.formats.native.names import (
    DATA,
    RECORD,
    index_file,
    new_save_id,
)
from shardkeep.formats.native.reader import NativeReader
from shardkeep.formats.native.record import (
    DEFAULT_BLOCK,
    FileRow,
    Record,
    decode_record,
    encode_record,
)
from shardkeep.formats.native.same import compare
from shardkeep.memory import Addresses
from shardkeep.metadata import Metadata, MetadataIndex, StorageMeta
from shardkeep.planner import Place, SavePlan, SavePlanner, WriteItems
from shardkeep.storage import CheckpointId, StorageWriter, WriteResult, unchanged
from shardkeep.stores.local import LocalStore, storage_errors
from shardkeep.structure import Structure
from shardkeep.tables import LocationColumns, StateColumns

__all__ = ["NativeWriter"]

log = logging.getLogger("shardkeep")

SOON_WRITTEN = 1 << 30
"""Bytes that are written so soon that Python's collector can wait for it."""

INDEX_BUDGET = MINIMUM_BUDGET
INDEX_BEHIND = 4 * INDEX_BUDGET
"""Bytes of buffers from which on an index is written beside data files."""
WRITE_EARLY = 8 * MINIMUM_BUDGET
"""The same for files that are written while others are compared."""

MOST_VALUES = 256 << 20
"""Bytes of plain values that are sent to a process; chunks are not sent."""


class _Result(msgspec.Struct):
    """A data file as its writer reports it."""

    size: int
    payload: int
    root: str
    values: int | None
    chunks: int
    features: list[str]
    content: str


class NativeWriter(StorageWriter):
    """Writes checkpoints of the native format into directories."""

    def __init__(
        self,
        checkpoint_id: CheckpointId | None = None,
        *,
        overwrite: bool = False,
        base: CheckpointId | None = None,
        digest: str = "xxh3-128",
        block: int = DEFAULT_BLOCK,
        limits: Limits = Limits(),
        memory_budget: int | None = None,
        progress: Callable[[int], None] | None = None,
        open_store: Callable[[CheckpointId], LocalStore] = LocalStore,
    ) -> None:
        """`digest` is `"xxh3-128"`, or `"blake3"` where the record's digest is pinned elsewhere."""
        if not 4096 <= block <= 1 << 20 or block & (block - 1):
            raise ValueError(f"block is {block}; use a power of two from 4096 to {1 << 20}")
        self.overwrite = overwrite
        self.base = base
        self.block = block
        self.limits = limits
        self.memory_budget = memory_budget
        self.progress = progress
        self.worked: Callable[[], None] | None = None
        """Told of work that moves no bytes; `progress` is otherwise, of none."""
        self.before_commit: Callable[[], None] = lambda: None
        """Called as the last thing before the commit; what it raises stops it."""
        self.ranks_on_host = 1
        """How many ranks share this host's cores and memory."""
        self.user_metadata: Mapping[str, Any] = {}
        """Goes into the record, for whoever lists checkpoints."""
        self.spares: Spares | None = None
        """Keeps buffers from one save to the next."""
        self.process: WriterProcess | None = None
        """Writes what is staged, in place of this process."""
        self.journal: Journal | None = None
        """Knows what an earlier attempt with the same plan has written, and gives its save id."""
        self._algorithm = algorithm(digest)
        self._open_store = open_store
        self.reset(checkpoint_id)

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Begin another save."""
        if checkpoint_id is not None:
            self.checkpoint_id = os.fspath(checkpoint_id)
            self._store = self._open_store(checkpoint_id)
        self.save_id = ""
        self.digest = ""
        """The record's digest, on the coordinator after `finish`."""
        self.content = ""
        """Equal for saves whose tensors are, or `unchanged`: on the coordinator after `finish`."""
        self.stats: dict[str, float] = {}
        """What `write_data` did: see `shardkeep.engine.writing.WriteStats`."""
        self._lease: Lease | None = None
        self._leased = ""
        """The name of the lease that another rank holds."""
        self._earlier: Earlier | None = None
        self._early: Early | None = None
        self._writing = Behind()
        self._indexing: Behind | None = None
        self._index: FileRow | None = None
        self._layout: Layout | None = None
        self._written: list[str] = []
        self._replaced: list[str] = []
        self._kept = 0
        self._buffers = 0
        self._place = Place()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Any path; not a URL."""
        return "://" not in os.fspath(checkpoint_id)

    @property
    def digest_size(self) -> int:
        """Bytes of a digest."""
        return self._algorithm.size

    def storage_meta(self) -> StorageMeta:
        """Which save this is."""
        return StorageMeta(self.checkpoint_id, self.save_id)

    # --- set up

    def set_up_storage_writer(self, place: Place, announcement: bytes = b"") -> bytes:
        """The coordinator takes a lease; every other rank must see it."""
        self._place = place
        if self.base is not None:
            self._look_at_base(self.base)
        if not place.is_coordinator:
            word = msgspec.msgpack.decode(announcement, type=dict[str, str])
            self.save_id, self._leased = word["save_id"], word["lease"]
            see_lease(self._store, word["lease"], word["host"], place.rank)
            return announcement
        with storage_errors(f"looking at {self._store.root}"):
            refuse_occupied(self._store, self.overwrite)
        self.save_id = new_save_id() if self.journal is None else self.journal.save_id
        self._lease = take_lease(self._store, self.save_id)
        word = {"save_id": self.save_id, "lease": self._lease.name, "host": socket.gethostname()}
        return msgspec.msgpack.encode(word)

    def _look_at_base(self, base: CheckpointId) -> None:
        """Begin to: the rest of the set-up mostly waits for the disk."""
        reader = NativeReader(base, open_store=self._open_store)
        store = self._open_store(base) if self._place.is_coordinator else None
        self._earlier = Earlier(reader, store, all_of_it=self._place.world_size == 1)

    # --- plan

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan], metadata: Metadata) -> list[SavePlan]:
        """Decide file and place of every chunk."""
        state = _columns_of(metadata)
        assert state.chunks is not None
        self._layout = plan_layout(
            state.tensors,
            state.chunks,
            state.values_table,
            len(plans),
            self._algorithm.size,
            self.limits,
        )
        return [
            replace(plan, storage_data=message)
            for plan, message in zip(plans, self._layout.messages, strict=True)
        ]

    def plan_key(self) -> Hashable | None:
        """What the layout follows from besides the plan; unknown for what is derived from this."""
        return (self._algorithm.name, self.limits) if type(self) is NativeWriter else None

    def plan_memory(self) -> object:
        """The layout; only names of files differ between saves with one plan."""
        return self._layout

    def use_plan(self, memory: object) -> None:
        """Take the layout of an earlier save."""
        assert isinstance(memory, Layout)
        self._layout = memory

    # --- compare with an earlier checkpoint

    def compare_data(self, plan: SavePlan, planner: SavePlanner) -> bytes:
        """The chunks that the base has, by their content digests."""
        assert self._earlier is not None
        behind, budget = isinstance(planner, StagedPlanner), self._budget()
        items, threads = WriteItems.of(plan.items), self._cores(behind)
        alone = behind or budget < WRITE_EARLY
        if alone and self.spares is not None:
            self.spares.at_most(budget // KEPT)
        pool = BufferPool(
            budget if alone else budget // 2, threads, self.block, staging=planner.staging
        )
        try:
            same = compare(
                self._earlier,
                items,
                planner,
                algorithm=self._algorithm,
                block=self.block,
                pool=pool,
                threads=threads,
                worked=self.worked or self._tell_of_no_bytes,
                write_early=None if alone else partial(self._write_early, items, planner),
            )
            self._writing.wait()
        finally:
            pool.close()
        return replace(same, early=None if self._early is None else self._early.told()).encode()

    def _tell_of_no_bytes(self) -> None:
        if self.progress is not None:
            self.progress(0)

    def _write_early(
        self, items: WriteItems, planner: SavePlanner, rows: Ints, address: Addresses
    ) -> None:
        """Begin to write what has changed for sure, while the rest is compared."""
        rank = self._place.rank
        early = self._early = lay_out(items, rows, rank, self._algorithm.size, self.limits)
        known = np.zeros(len(items.chunks), np.uint64)
        known[rows] = address
        job = self._job(items, early.files, early.disk_order, early.start, planner, known)[0]

        # Half of all there is: the other half compares.
        files = self._file_writer(self.spares, planner.staging, True, self._budget() // 2)
        early.stop, names = files.stop, self._written

        def write() -> None:
            with files:
                early.written = job.write(files, names)
            self._count(files.stats)

        self._writing.run(write)

    def share_data(self, told: list[bytes], metadata: Metadata) -> list[bytes]:
        """Keep files of the base, and lay out around them what changed."""
        assert self.base is not None
        assert self._earlier is not None
        keeping = Keeping(
            self._open_store(self.base),
            self._store,
            self.save_id,
            self._place.world_size,
            self._written,
            self._earlier.synced,
        )
        state = _columns_of(metadata)
        self._layout, answers = join(told, state, self.limits, self._algorithm.size, keeping.keep)
        if self._budget() >= INDEX_BEHIND:
            self._begin_index(state, metadata.planner_data)
        return answers

    def _begin_index(self, state: StateColumns, structure: Structure | None) -> None:
        """What changed is written meanwhile: a disk's work, and this is an interpreter's."""
        assert structure is not None

        def write() -> None:
            self._index = self._write_index(state, structure)

        self._indexing = Behind()
        self._indexing.run(write)

    def use_shared(self, plan: SavePlan, answer: bytes) -> SavePlan:
        """Only what changed is written."""
        items = WriteItems.of(plan.items)
        nbytes = items.chunks.nbytes(items.tensors)
        message, changed = without_kept(answer, len(nbytes))
        written = changed if self._early is None else np.append(changed, self._early.rows)
        self._kept = int(nbytes.sum() - nbytes[written].sum())
        if self.progress is not None:
            self.progress(self._kept)
        return replace(plan, storage_data=message)

    # --- write

    def write_order(self, plan: SavePlan) -> Sequence[Ints]:
        """As they lie in the files."""
        plans, disk_order, _ = decode_rank_layout(plan.storage_data)
        return [disk_order[file.first : file.first + file.count] for file in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Write this rank's files; on return they and their names are durable."""
        items = WriteItems.of(plan.items)
        plans, disk_order, start = decode_rank_layout(plan.storage_data)
        job, chunks = self._job(items, plans, disk_order, start, planner)
        behind = isinstance(planner, StagedPlanner)
        if isinstance(planner, StagedPlanner) and plans and self._is_detachable(planner):
            written = self._write_detached(job, chunks, planner)
        else:
            # Many small chunks are many objects without cycles, and are soon gone again.
            soon: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if not behind and chunks.nbytes.sum() < SOON_WRITTEN:
                soon = paused_collector()
            with soon, self._file_writer(self.spares, planner.staging, behind) as files:
                written = job.write(files, self._written)
            self._count(files.stats)
        done = list(zip(plans, written, strict=True))
        if self._early is not None:
            done += zip(self._early.files, self._early.written, strict=True)
        if done and not self._place.is_coordinator:  # who syncs it once the index is there too
            with storage_errors(f"syncing {self._store.root / DATA}"):
                self._store.sync_directory(DATA)
        if self.base is not None:
            self.stats["kept_bytes"] = self._kept
        features = sorted(planner.features)
        return [self._result(file, told, features) for file, told in done]

    def _job(
        self,
        items: WriteItems,
        plans: list[FilePlan],
        disk_order: Ints,
        start: Ints,
        planner: SavePlanner,
        address: Addresses | None = None,
    ) -> tuple[DataFiles, RankChunks]:
        """Files of this rank, and the chunks that go into them; where these lie, if it is known."""
        chunks = RankChunks(items, disk_order, start, planner, address)

        def front(file: FilePlan) -> tuple[bytes, bytes]:
            values = file_values(file, items, planner)
            layout = self._digest_layout(file.values + len(values))
            return data_header(file, chunks, values, layout, self._file_metadata()), values

        parts = (plans, front, chunks.part)
        job = DataFiles(self.save_id, self._algorithm, self.block, *parts, self.journal)
        return job, chunks

    def _count(self, stats: WriteStats) -> None:
        for name, value in stats.as_dict().items():
            self.stats[name] = self.stats.get(name, 0) + value

    def _is_detachable(self, planner: StagedPlanner) -> bool:
        """Whether a process can write in place of this one; where it could, and can't, say so."""
        if self.process is None:
            return False
        if type(self._store) is not LocalStore:
            log.info(
                "%s is written by a thread: its store is one of this process", self._store.root
            )
            return False
        if sum(map(len, planner.snapshot.held.values.values())) > MOST_VALUES:
            log.info("%s is written by a thread: its values are large", self._store.root)
            return False
        return True

    def _write_detached(
        self, job: DataFiles, chunks: RankChunks, planner: StagedPlanner
    ) -> list[Written]:
        assert self.process is not None
        # A process that dies does not say which files exist.
        self._written.extend(plan.name(self.save_id) for plan in job.plans)
        written, self.stats = write_detached(
            self.process,
            job,
            self._store.root,
            chunks,
            planner,
            budget=self._budget(),
            cores=self._cores(True),
            progress=self.progress or (lambda nbytes: None),
        )
        return written

    def _budget(self) -> int:
        """Bytes of buffers; but for those of an index that is written at the same time."""
        if not self._buffers:
            self._buffers = checked_budget(self.memory_budget, self.ranks_on_host)
        return self._buffers if self._indexing is None else self._buffers - INDEX_BUDGET

    def _file_writer(
        self,
        spares: Spares | None,
        staging: Staging | None = None,
        behind: bool = False,
        budget: int | None = None,
    ) -> FileWriter:
        return FileWriter(
            self._store,
            self._algorithm,
            self.block,
            budget=self._budget() if budget is None else budget,
            cores=self._cores(behind),
            staging=staging,
            progress=self.progress,
            spares=spares,
        )

    def _cores(self, behind: bool) -> int:
        cores = usable_cores(self.ranks_on_host)
        # The program has better uses for its cores than to be saved a little sooner.
        return max(1, cores // 2) if behind else cores

    def _result(self, plan: FilePlan, done: Written, features: list[str]) -> WriteResult:
        values = plan.values if plan.holds_values else None
        told = _Result(
            done.size, done.payload, done.root, values, plan.count, features, done.content
        )
        name = plan.name(self.save_id)
        return WriteResult(MetadataIndex(name), done.size, msgspec.msgpack.encode(told))

    def _digest_layout(self, payload: int) -> DigestLayout:
        return DigestLayout(payload, self.block, self._algorithm.size)

    def _file_metadata(self) -> dict[str, str]:
        return {"format": "pt", "shardkeep": "1", "save_id": self.save_id}

    def _content_beside(self, layout: Layout) -> str:
        """That of what is written, of the files that are kept, and of where each chunk lies: equal
        where the same was written beside the same."""
        assert layout.chunks.file is not None
        assert layout.chunks.start is not None
        kept = " ".join(row.root for row in layout.kept).encode()
        places = layout.chunks.file.tobytes() + layout.chunks.start.tobytes()
        return self._algorithm.digest(self.content.encode() + kept + places).hex()

    # --- finish

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> Metadata:
        """Index, then the record: the commit."""
        assert self._lease is not None
        assert self._layout is not None
        found = {result.index.fqn: result.storage_data for rank in results for result in rank}
        reports = [
            msgspec.msgpack.decode(found[plan.name(self.save_id)], type=_Result)
            for plan in self._layout.files
        ]
        self.content = " ".join(report.content for report in reports)
        if self._layout.kept:
            changed = any(plan.count for plan in self._layout.files)
            self.content = self._content_beside(self._layout) if changed else unchanged(self.base)
        files = tuple(
            FileRow(plan.name(self.save_id), r.size, r.payload, r.root, r.values, r.chunks)
            for plan, r in zip(self._layout.files, reports, strict=True)
        )
        files += self._layout.kept
        state = _columns_of(metadata)
        structure = metadata.planner_data
        assert structure is not None
        if self._indexing is not None:
            self._indexing.wait()
        index = self._index or self._write_index(state, structure)
        with storage_errors(f"syncing {self._store.root / DATA}"):
            self._store.sync_directory(DATA)
        wait_visible(self._store, {row.name: row.size for row in (index, *files)}, self._lease)
        requires = sorted({feature for report in reports for feature in report.features})
        record = Record(
            self.save_id,
            index,
            files,
            self._algorithm.name,
            self.block,
            tuple(requires),
            shardkeep.__version__,
            _summary(state, self._layout, len(results)),
            user=self.user_metadata,
        )
        data = encode_record(record)
        # Read back before it replaces anything: a record no reader accepts must not be committed.
        digest = decode_record(data, RECORD).digest
        self._note_replaced()
        self.before_commit()
        self._lease.commit(data, overwrite=self.overwrite, same=lambda found: found == data)
        self.digest = digest
        placed = StateColumns(
            state.tensors, self._layout.values, _placed_chunks(self._layout, state)
        )
        ranges = [(r.values or 0, r.payload - r.values if r.values else 0) for r in files]
        locations = LocationColumns(placed, [row.name for row in files], ranges)
        return replace(
            metadata,
            state_dict_metadata=placed,
            storage_data=locations,
            storage_meta=self.storage_meta(),
        )

    def _write_index(self, state: StateColumns, structure: Structure) -> FileRow:
        assert self._layout is not None
        parts = index_entries(structure, state.tensors, self._layout.chunks, self._layout.values)
        layout = self._digest_layout(parts.payload)
        name = index_file(self.save_id)
        with self._file_writer(None, budget=INDEX_BUDGET) as files:
            payload = index_payload(parts, layout, self._file_metadata())
            root = files.write(name, payload, layout, self._written)
        return FileRow(name, layout.file_size, layout.payload, root)

    def _note_replaced(self) -> None:
        """Remember the files of the record about to be replaced; only those are removed later."""
        self._replaced = []
        if self.overwrite:
            # A damaged record does not stop its replacement; its files are left to `gc`.
            with contextlib.suppress(CheckpointError):
                old = read_record(self._store)
                self._replaced = [old.index.name, *(row.name for row in old.files)]

    def settle(self) -> None:
        """Remove the lease's name and the files of the replaced checkpoint."""
        self._let_go()
        self._written = []
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()
            unlink_all(self._store, self._replaced, patience_s=5.0 if os.name == "nt" else 0.0)

    def abort(self, *, committing: bool = False, alone: bool = False) -> None:
        """Remove this rank's files, unless the checkpoint may exist.

        `alone`: the coordinator will not do the same, but commits nothing either. Then the lease
        goes too, whoever holds it.
        """
        self._let_go()
        lease, self._lease = self._lease, None
        leased, self._leased = self._leased, ""
        written, self._written = self._written, []
        with contextlib.suppress(Exception):
            if committing and not self._place.is_coordinator:
                # Only the coordinator knows whether the commit happened; what is left is garbage
                # that `gc` removes, or a whole checkpoint.
                return
            # The lease goes first: a commit that a server was asked for, and has yet to do, fails
            # from here on. Where it will not go, files are left to `gc`.
            may_commit = lease is not None and not lease.release()
            # Asked also when the lease is gone: an interrupt may come while `settle` cleans up.
            if committing and (may_commit or not surely_absent(self._store, self.save_id)):
                return
            if alone and leased:
                written = [leased, *written]
            if committing and self._layout is not None:
                written = [*written, *(plan.name(self.save_id) for plan in self._layout.files)]
            unlink_all(self._store, written)

    def _let_go(self) -> None:
        """Of what is done behind; the name of its file is known then."""
        earlier, self._earlier = self._earlier, None
        indexing, self._indexing = self._indexing, None
        if self._early is not None:
            self._early.stop()  # it reads the caller's memory
        with contextlib.suppress(Exception):
            self._writing.give_up()
            if indexing is not None:
                indexing.give_up()
            if earlier is not None:
                earlier.close()


def _columns_of(metadata: Metadata) -> StateColumns:
    state = metadata.state_dict_metadata
    if not isinstance(state, StateColumns):
        raise TypeError(
            "the native format needs the metadata of the default planner, or of one derived from it"
        )
    return state


def _placed_chunks(layout: Layout, state: StateColumns) -> Callable[[int], Any]:
    first = np.searchsorted(layout.chunks.tensor, np.arange(len(state.tensors) + 1))
    return lambda row: layout.chunks.take(np.arange(first[row], first[row + 1]))


def _summary(state: StateColumns, layout: Layout, ranks: int) -> dict[str, Any]:
    nbytes = int(layout.chunks.nbytes(state.tensors).sum())
    return {
        "tensors": len(state.tensors),
        "values": len(state.values_table),
        "chunks": len(layout.chunks),
        "bytes": nbytes,
        "ranks": ranks,
        **({"kept": sum(row.size for row in layout.kept)} if layout.kept else {}),
        "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
