# SPDX-License-Identifier: Apache-2.0
"""Saves of `torch.distributed.checkpoint` into the native format."""

from __future__ import annotations

import dataclasses
import os
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint import planner as dcp_planner
from torch.distributed.checkpoint import storage as dcp_storage
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    FileSystem,
    SerializationFormat,
)
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from shardkeep.collector import CollectorPause
from shardkeep.errors import PlanError
from shardkeep.formats.native.layout import plan_layout
from shardkeep.formats.native.names import RECORD, new_save_id
from shardkeep.formats.native.writer import NativeWriter
from shardkeep.global_plan import check_tilings
from shardkeep.metadata import Metadata, MetadataIndex
from shardkeep.planner import Place, SavePlan, WriteItems
from shardkeep.storage import WriteResult
from shardkeep.tables import LocationColumns, StateColumns, ValueTable
from shardkeep.torch.announcing import Word, take_word
from shardkeep.torch.mapping import nesting_from_torch, tensor_table
from shardkeep.torch.neighbours import ranks_on_host, world_size
from shardkeep.torch.stored import placed_locations
from shardkeep.torch.writing import (
    Elements,
    check_items,
    describe_items,
    join_layouts,
    write_items,
)

__all__ = ["StorageWriter"]

_LAYOUT = "layout"
"""The result in which a rank says where everything lies."""


class StorageWriter(dcp_storage.StorageWriter, BlockingAsyncStager):
    """Writes the native format under torch's own `save` and `async_save`.

    Takes the place of `torch.distributed.checkpoint.FileSystemWriter`. What is replaced stays whole
    and visible until the new checkpoint is; objects are stored as plain values, never as pickles.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[Any] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
        *,
        memory_budget: int | None = None,
    ) -> None:
        """`overwrite`, `cache_staged_state_dict`, and `memory_budget` as in `shardkeep.save`.

        `single_file_per_rank`, `sync_files`, `thread_count` and `per_thread_copy_ahead` are torch's
        and change nothing: files are few, always synced, and written by as many threads as pay.
        """
        super().__init__(cache_staged_state_dict=cache_staged_state_dict)
        if _extensions:
            raise ValueError(
                "_extensions change the bytes of files behind the format's back; the native format "
                "has none. Leave them out, or use torch's FileSystemWriter"
            )
        if serialization_format != SerializationFormat.TORCH_SAVE:
            raise ValueError(
                f"serialization_format={serialization_format} is one of torch's own files; this "
                "writer has its own, which are valid safetensors files. Leave it out"
            )
        self.fs = FileSystem()
        self.path = Path(path)
        self.single_file_per_rank = single_file_per_rank
        self.sync_files = sync_files
        self.thread_count = thread_count
        self.per_thread_copy_ahead = per_thread_copy_ahead
        self.overwrite = overwrite
        self.serialization_format = serialization_format
        self.memory_budget = memory_budget
        self.save_id = new_save_id()
        """Of this save once it is planned; until then nobody else's."""
        self.rank: int | None = None
        self.use_collectives = True
        self.is_coordinator = False
        self._native: NativeWriter | None = None
        self._busy = False
        self._unfinished: weakref.finalize[..., Any] | None = None
        self._planning = CollectorPause()
        """While torch plans: an object or two for each tensor, on each rank."""

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to a save under way: another process begins its own."""
        return {
            **self.__dict__,
            "_native": None,
            "_busy": False,
            "_unfinished": None,
            "state_dict_cache": None,
        }

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Where it goes."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path; not a URL."""
        return "://" not in os.fspath(checkpoint_id) and FileSystem.validate_checkpoint_id(
            checkpoint_id
        )

    def storage_meta(self) -> dcp.StorageMeta | None:
        """Which save this is."""
        return dcp.StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    # --- the calls of torch's driver, in order

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save."""
        self._give_up()
        if checkpoint_id:
            self.path = Path(checkpoint_id)
        self.save_id = new_save_id()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take this rank's place."""
        self._give_up()
        self.is_coordinator = is_coordinator
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)
        if not self.use_collectives and world_size() > 1:
            raise ValueError(
                "use_collectives=False makes a checkpoint of each rank alone, which only the same "
                "rank of as many can load; the native format has whole tensors only. Leave it out, "
                "or give each rank a directory of its own and no_dist=True"
            )
        self._planning.begin()

    def prepare_local_plan(self, plan: dcp_planner.SavePlan) -> dcp_planner.SavePlan:
        """Refuse what cannot be stored, and a checkpoint that may not be replaced."""
        check_items(plan.items)
        if (self.path / RECORD).exists():
            if not self.overwrite:
                raise RuntimeError(
                    f"Checkpoint already exists in {self.path}, and overwrite=False. Choose "
                    "another checkpoint_id, or pass overwrite=True"
                )
            warnings.warn(
                f"Detected an existing checkpoint in {self.path}; it is replaced once the new one "
                "is whole, since overwrite=True",
                stacklevel=2,
            )
        return plan

    def prepare_global_plan(self, plans: list[dcp_planner.SavePlan]) -> list[dcp_planner.SavePlan]:
        """Take the lease; every rank learns of it through its plan."""
        if len(plans) == 1 and plans[0].usable:
            # With several ranks torch's planner looks; of one it takes any part of a tensor.
            items = write_items(plans[0].items, 0)
            check_tilings(items.tensors, items.chunks.tensor, items.chunks.boxes, items.chunks.rank)
        native = self._new_native()
        announcement = native.set_up_storage_writer(Place(0, len(plans)))
        self._native, self.save_id = native, native.save_id
        # Torch's driver tells no storage that a save has failed. A lease must not outlive it for
        # long; whoever drops the writer has no save under way.
        self._unfinished = weakref.finalize(self, native.abort)
        self._unfinished.atexit = False
        return [
            dataclasses.replace(plan, storage_data=Word(rank, len(plans), announcement))
            for rank, plan in enumerate(plans)
        ]

    def write_data(
        self, plan: dcp_planner.SavePlan, planner: dcp_planner.SavePlanner
    ) -> torch.futures.Future[list[dcp_storage.WriteResult]]:
        """Write this rank's share; on return it is durable."""
        future: torch.futures.Future[list[dcp_storage.WriteResult]] = torch.futures.Future()
        try:
            future.set_result(self._write(plan, planner))
        finally:
            self._planning.end_soon()
        return future

    def _write(
        self, plan: dcp_planner.SavePlan, planner: dcp_planner.SavePlanner
    ) -> list[dcp_storage.WriteResult]:
        word = take_word(Word, plan.storage_data)
        if self._native is None:
            self._follow(word)
        native, rank = self._native, self.rank
        assert native is not None
        if rank is None:
            rank = 0 if word is None else word.rank
        native.ranks_on_host = ranks_on_host(1 if word is None else word.world_size)
        self._busy = True
        try:
            done = self._write_items(native, plan, planner, rank)
        except BaseException:
            # Without this rank's word nothing is committed, so its files can go. So can the lease:
            # the coordinator's writer is not told, and would hold it for as long as it lives.
            native.abort(alone=True)
            self._end()
            raise
        finally:
            self._busy = False
        if not self.is_coordinator:
            self._end()  # only the coordinator will know what becomes of them
        return done

    def _write_items(
        self,
        native: NativeWriter,
        plan: dcp_planner.SavePlan,
        planner: dcp_planner.SavePlanner,
        rank: int,
    ) -> list[dcp_storage.WriteResult]:
        items = write_items(plan.items, rank)
        layout = _rank_layout(native, items, rank)
        elements = Elements(plan.items, planner)
        written = native.write_data(SavePlan(items, storage_data=layout), elements)
        results = [
            dcp_storage.WriteResult(dcp.MetadataIndex(r.index.fqn), r.size_in_bytes, r.storage_data)
            for r in written
        ]
        told = describe_items(items, layout, native.save_id)
        return [*results, dcp_storage.WriteResult(dcp.MetadataIndex(_LAYOUT), 0, told)]

    def finish(self, metadata: dcp.Metadata, results: list[list[dcp_storage.WriteResult]]) -> None:
        """Index, then the record: the commit."""
        native = self._native
        assert native is not None
        self._busy = True
        self._planning.begin()  # other ranks may have taken longer than it lasts
        try:
            self._commit(native, metadata, results)
        except BaseException:
            native.abort(committing=True)
            raise
        finally:
            self._busy = False
            self._end()
            self._planning.end_soon()

    def _commit(
        self,
        native: NativeWriter,
        metadata: dcp.Metadata,
        results: list[list[dcp_storage.WriteResult]],
    ) -> None:
        tensors, value_names = tensor_table(metadata.state_dict_metadata)
        told = [r.storage_data for rank in results for r in rank if r.index.fqn == _LAYOUT]
        layout = join_layouts(told, tensors, value_names, native.save_id)
        chunks = layout.chunks
        check_tilings(tensors, chunks.tensor, chunks.boxes, chunks.rank)
        native.use_plan(layout)
        first = chunks.tensor.searchsorted(range(len(tensors) + 1)).tolist()
        state = StateColumns(
            tensors, layout.values, lambda row: chunks.part(first[row], first[row + 1]), chunks
        )
        written = [
            [
                WriteResult(MetadataIndex(r.index.fqn), r.size_in_bytes, r.storage_data)
                for r in rank
                if r.index.fqn != _LAYOUT
            ]
            for rank in results
        ]
        final = native.finish(Metadata(state, nesting_from_torch(metadata)), written)
        native.settle()
        assert isinstance(final.storage_data, LocationColumns)
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = placed_locations(
            tensors, chunks, layout.values, final.storage_data.files, final.storage_data.ranges
        )
        metadata.storage_meta = self.storage_meta()

    # --- the native writer of one save

    def _new_native(self) -> NativeWriter:
        return NativeWriter(self.path, overwrite=self.overwrite, memory_budget=self.memory_budget)

    def _follow(self, word: Word | None) -> None:
        """Join the coordinator's save; raises where this rank does not see its directory."""
        if word is None:
            raise PlanError(
                "the plan of this rank does not come from prepare_global_plan of the coordinator's "
                "shardkeep.torch.StorageWriter; all ranks must use one, and a planner must not "
                "change storage_data"
            )
        native = self._new_native()
        # A coordinator is rank 0 to the native writer, whichever rank torch has made it.
        native.set_up_storage_writer(
            Place(word.rank or word.world_size, word.world_size), word.announcement
        )
        self._native, self.save_id = native, native.save_id

    def _end(self) -> None:
        if self._unfinished is not None:
            self._unfinished.detach()
        self._native = self._unfinished = None

    def _give_up(self) -> None:
        """Where a save was begun and never finished: some rank could not write."""
        if self._busy:
            raise RuntimeError(
                f"this writer is writing {self.path} on another thread; wait for that save, or use "
                "a writer for each"
            )
        self._planning.end()
        native = self._native
        self._end()
        if native is not None:
            native.abort()


def _rank_layout(native: NativeWriter, items: WriteItems, rank: int) -> bytes:
    """Where this rank's chunks lie follows from them alone."""
    count = len(items.value_names)
    values = ValueTable(items.value_names, np.full(count, rank), np.arange(count))
    layout = plan_layout(
        items.tensors,
        items.chunks,
        values,
        rank + 1,
        native.digest_size,
        native.limits,
    )
    return layout.messages[rank]
