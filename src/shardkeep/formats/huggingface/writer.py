# SPDX-License-Identifier: Apache-2.0
"""Writing a Hugging Face checkpoint from many ranks at once: final files, at their final bytes.

Nothing is written twice and nothing is joined afterwards. The coordinator decides where every
tensor lies, and who writes which range of which file.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import msgspec
import numpy as np

from shardkeep.columns import Ints
from shardkeep.coordination import Coordinator
from shardkeep.engine.budget import checked_budget, io_threads
from shardkeep.errors import StorageError
from shardkeep.formats.huggingface.building import Building
from shardkeep.formats.huggingface.dealing import UNIT, Deal, Space, deal
from shardkeep.formats.huggingface.gathering import Gathering, Received
from shardkeep.formats.huggingface.names import MODEL
from shardkeep.formats.huggingface.range_files import RangeFiles
from shardkeep.formats.huggingface.shards import (
    DEFAULT_SIZE,
    Shard,
    Tensor,
    index_text,
    parse_size,
    plan_shards,
    refuse_values,
)
from shardkeep.metadata import Metadata, MetadataIndex, StorageMeta
from shardkeep.planner import Place, SavePlan, SavePlanner, WriteItems
from shardkeep.storage import CheckpointId, StorageWriter, WriteResult
from shardkeep.stores.local import LocalStore, storage_errors
from shardkeep.tables import NO_ALIAS, StateColumns, TensorTable

__all__ = ["HuggingFaceWriter"]


class HuggingFaceWriter(StorageWriter):
    """Writes `model.safetensors`, or several files and an index, into a directory of its own.

    Plain values have no place there: they are refused by name, or left out with `values="drop"`.
    Of tied tensors the first name is stored.
    """

    def __init__(
        self,
        checkpoint_id: CheckpointId | None = None,
        *,
        max_shard_size: int | str = DEFAULT_SIZE,
        stem: str = MODEL,
        values: Literal["refuse", "drop"] = "refuse",
        overwrite: bool = False,
        memory_budget: int | None = None,
        progress: Callable[[int], None] | None = None,
        open_store: Callable[[CheckpointId], LocalStore] = LocalStore,
    ) -> None:
        """`max_shard_size` is in bytes, or text as transformers takes it: `"5GB"`."""
        parse_size(max_shard_size)
        refuse_values((), values)
        self.max_shard_size = max_shard_size
        self.stem = stem
        self.values = values
        self.overwrite = overwrite
        self.memory_budget = memory_budget
        self.progress = progress
        self.before_commit: Callable[[], None] = lambda: None
        """Called as the last thing before the commit; what it raises stops it."""
        self._open_store = open_store
        self.checkpoint_id = ""
        self.reset(checkpoint_id)

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Begin another save."""
        if checkpoint_id is not None:
            self.checkpoint_id = os.fspath(checkpoint_id)
        self.stats: dict[str, float] = {}
        self._place = Place()
        self._building: Building | None = None
        self._shards: list[Shard] = []
        self._state: StateColumns | None = None
        self._files: RangeFiles | None = None
        self._jobs: Gathering | None = None
        self._shared_bytes = 0

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Any path; not a URL."""
        return "://" not in os.fspath(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        """Where it goes; these files do not say which save they are of."""
        return StorageMeta(self.checkpoint_id)

    # --- set up

    def set_up_storage_writer(self, place: Place, announcement: bytes = b"") -> bytes:
        """The coordinator makes a directory; every other rank must see it."""
        self._place = place
        if not self.checkpoint_id:
            raise ValueError("pass checkpoint_id=..., the directory to write")
        if not place.is_coordinator:
            word = msgspec.msgpack.decode(announcement, type=dict[str, str])
            self._building = self._begin(word["save_id"])
            self._building.see(word["host"])
            return announcement
        save_id = secrets.token_hex(8)
        self._building = self._begin(save_id)
        with storage_errors(f"looking at {self._building.target}"):
            self._building.refuse_occupied(self.overwrite)
        self._building.begin()
        return msgspec.msgpack.encode({"save_id": save_id, "host": socket.gethostname()})

    def _begin(self, save_id: str) -> Building:
        return Building(self.checkpoint_id, save_id, self.stem, self._open_store)

    # --- plan

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan], metadata: Metadata) -> list[SavePlan]:
        """Decide file and place of every tensor, and make the files."""
        assert self._building is not None
        state = metadata.state_dict_metadata
        if not isinstance(state, StateColumns) or state.chunks is None:
            raise TypeError(
                "a HuggingFaceWriter needs the metadata of the default planner, or of one derived "
                "from it"
            )
        refuse_values(list(state.values_table.names), self.values)
        stored, ties = _stored(state.tensors)
        self._state = state
        self._shards = plan_shards(
            stored, max_shard_size=self.max_shard_size, stem=self.stem, ties=ties
        )
        for shard in self._shards:
            self._building.create(shard.name, shard.size)
        told = msgspec.msgpack.encode([(shard.name, shard.size) for shard in self._shards])
        return [replace(plan, storage_data=told) for plan in plans]

    # --- write

    def share_writes(self, plan: SavePlan, planner: SavePlanner, coordinator: Coordinator) -> None:
        """Write what several ranks hold parts of, after these have travelled to who writes it."""
        budget = checked_budget(self.memory_budget, self.ranks_on_host)
        answer = coordinator.gather_scatter(
            "share writes",
            lambda: msgspec.msgpack.encode(budget),
            lambda told: self._deal([msgspec.msgpack.decode(part, type=int) for part in told]),
        )
        jobs = self._jobs = Gathering(Deal.decode(answer), WriteItems.of(plan.items), planner)
        files = self._files = self._open_files(plan, jobs)
        for number in range(jobs.deal.rounds):
            self._round(number, jobs, files, coordinator)

    def _deal(self, budgets: list[int]) -> list[bytes]:
        state, shards = self._state, self._shards
        assert state is not None
        assert state.chunks is not None
        space = Space.of([s.size for s in shards], [len(s.header) for s in shards])
        at = {
            tensor.name: int(space.base[number]) + start
            for number, shard in enumerate(shards)
            for tensor, start in shard.tensors
        }
        tensors = state.tensors
        place: Ints = np.fromiter((at.get(name, -1) for name in tensors.names), np.int64)
        # What is sent, what is received, what is put together, and as much to spare.
        return deal(space, tensors, state.chunks, place, len(budgets), min(budgets) // 4)

    def _open_files(self, plan: SavePlan, jobs: Gathering) -> RangeFiles:
        assert self._building is not None
        names = msgspec.msgpack.decode(plan.storage_data, type=list[tuple[str, int]])
        headers = [shard.header for shard in self._shards]
        budget = checked_budget(self.memory_budget, self.ranks_on_host)
        threads = max(1, min(io_threads(self.ranks_on_host) + 1, budget // (4 * UNIT)))
        return RangeFiles(self._building, names, headers, jobs, threads)

    def _round(
        self, number: int, jobs: Gathering, files: RangeFiles, coordinator: Coordinator
    ) -> None:
        sizes = jobs.sizes(number)
        received = coordinator.exchange("pass pieces on", lambda: jobs.parts(number), sizes)

        def write() -> None:
            mine = jobs.jobs(number)
            come = jobs.prepare(mine, Received(received))
            files.write(mine, come)
            self._shared_bytes += sum(int(jobs.deal.high[j] - jobs.deal.low[j]) for j in mine)

        coordinator.agree("write shared ranges", write)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Write what this rank holds alone; on return all that it wrote is durable."""
        jobs, files = self._jobs, self._files
        if jobs is None or files is None:
            raise StorageError("a HuggingFaceWriter works under shardkeep.save only")
        progress = self.progress or (lambda nbytes: None)
        progress(self._shared_bytes)
        files.write(jobs.local_jobs(), {}, progress)
        files.finish()
        self.stats = dict(files.stats)
        return [WriteResult(MetadataIndex(name), nbytes) for name, nbytes in files.written.items()]

    # --- finish

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> Metadata:
        """The index, then the directory gets its name: the commit."""
        building = self._building
        assert building is not None
        sizes = {shard.name: shard.size for shard in self._shards}
        written = dict.fromkeys(sizes, 0)
        for result in (result for rank in results for result in rank):
            written[result.index.fqn] += result.size_in_bytes
        if written != sizes:
            raise StorageError(f"ranks wrote {written} bytes, expected {sizes}")
        index = index_text(self._shards, self.stem)
        if index is not None:
            building.write(*index)
        building.check(sizes)
        building.commit(self.overwrite, self.before_commit)
        return replace(metadata, storage_meta=self.storage_meta())

    def settle(self) -> None:
        """Remove what was replaced."""
        self._close()
        if self._building is not None and self._place.is_coordinator:
            self._building.discard()

    def abort(self, *, committing: bool = False) -> None:
        """Remove what was built, unless it is in place: then what it replaced."""
        self._close()
        building = self._building
        if building is not None and self._place.is_coordinator:
            # Either way, what has the name of the directory that was built is not wanted.
            with contextlib.suppress(Exception):
                building.discard()

    def _close(self) -> None:
        files, self._files, self._jobs = self._files, None, None
        self._state = None
        if files is not None:
            files.close()


def _stored(tensors: TensorTable) -> tuple[list[Tensor], dict[str, str]]:
    """Tensors that are stored, in order, and names that stand for one of them."""
    stored, ties = [], {}
    nbytes = (tensors.volumes * tensors.itemsize).tolist()
    for row, name in enumerate(tensors.names):
        if tensors.alias_of[row] != NO_ALIAS:
            ties[name] = tensors.names[int(tensors.alias_of[row])]
            continue
        dtype = tensors.properties(row).dtype
        stored.append(Tensor(name, dtype, tensors.shape(row), nbytes[row]))
    return stored, ties
