# SPDX-License-Identifier: Apache-2.0
"""HyperParallel's names: programs written for `hyper_parallel.core.distributed_checkpoint`.

`save`, `load` and `async_save` take its arguments and write our format; `load` also reads what
HyperParallel wrote. Planners and storages are ours, called by its verbs; a planner that overrides
one of those is heard. Where HyperParallel would be silent, ours is not: nothing is cast unless a
planner says so, and what is missing is an error before anything is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardkeep import functions
from shardkeep.arrays import Sink, Source
from shardkeep.default_load_planner import DefaultLoadPlanner
from shardkeep.default_planner import DefaultSavePlanner
from shardkeep.dtypes import Cast
from shardkeep.errors import MismatchError
from shardkeep.formats.native.reader import NativeReader
from shardkeep.formats.native.writer import NativeWriter
from shardkeep.handles import SaveHandle
from shardkeep.loading import LoadResult
from shardkeep.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from shardkeep.planner import LoadPlan, Place, ReadItem, SavePlan, WriteItem
from shardkeep.saving import SaveResult
from shardkeep.storage import CheckpointId, StorageReader, StorageWriter, WriteResult
from shardkeep.wording import names_text

__all__ = [
    "AsyncSaveResponse",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "FileSystemReader",
    "FileSystemWriter",
    "LoadPlan",
    "Metadata",
    "MetadataIndex",
    "ReadItem",
    "SavePlan",
    "StandardLoadPlanner",
    "StandardSavePlanner",
    "TensorProperties",
    "TensorStorageMetadata",
    "WriteItem",
    "WriteResult",
    "async_save",
    "load",
    "save",
]


def _hear(cls: type, base: type, **verbs: str) -> None:
    """Have our verbs call theirs that a class overrides. Those that none does are not passed on:
    they are called for every tensor, unless nobody has anything to say about one."""
    for theirs, ours in verbs.items():
        known = getattr(cls, ours) is getattr(base, ours)
        if known and getattr(cls, theirs) is not getattr(base, theirs):
            setattr(cls, ours, lambda self, *args, theirs=theirs: getattr(self, theirs)(*args))


class StandardSavePlanner(DefaultSavePlanner):
    """Ours by HyperParallel's verbs. Replicas are always written once, and plans are ours."""

    def __init__(
        self,
        enable_plan_caching: bool = True,
        remove_redundancy: bool = True,
        save_to_minimum_rank: bool = False,
    ) -> None:
        """The arguments change how HyperParallel writes, and nothing of what is loaded."""
        super().__init__()

    def configure_planner(
        self, state_dict: object, storage_meta: StorageMeta | None = None, place: Place = Place()
    ) -> None:
        """`set_up_planner`."""
        super().set_up_planner(state_dict, storage_meta, place)

    def set_up_planner(
        self, state_dict: object, storage_meta: StorageMeta | None = None, place: Place = Place()
    ) -> None:
        """`configure_planner`."""
        self.configure_planner(state_dict, storage_meta, place)

    def build_local_plan(self) -> SavePlan:
        """`create_local_plan`."""
        return super().create_local_plan()

    def create_local_plan(self) -> SavePlan:
        """`build_local_plan`."""
        return self.build_local_plan()

    def build_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """`create_global_plan`; on the coordinator only."""
        return super().create_global_plan(all_plans)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """`build_global_plan`."""
        return self.build_global_plan(all_plans)

    def finalize_plan(self, plan: SavePlan) -> SavePlan:
        """`finish_plan`."""
        return super().finish_plan(plan)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """`finalize_plan`."""
        return self.finalize_plan(new_plan)

    def get_data(self, item: WriteItem) -> Source | bytes:
        """`resolve_data`."""
        return super().resolve_data(item)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _hear(cls, StandardSavePlanner, get_data="resolve_data")


class StandardLoadPlanner(DefaultLoadPlanner):
    """Ours by HyperParallel's verbs: what the target lacks is no error, what it wants must be."""

    def __init__(self, allow_partial_load: bool = False, *, cast: Cast = False) -> None:
        """With `allow_partial_load`, what is not stored stays as it is."""
        super().__init__(strict=False, cast=cast)
        self.allow_partial_load = allow_partial_load

    def configure_planner(
        self, state_dict: object, metadata: Metadata, place: Place = Place()
    ) -> None:
        """`set_up_planner`."""
        super().set_up_planner(state_dict, metadata, place)

    def set_up_planner(
        self, state_dict: object, metadata: Metadata, place: Place = Place()
    ) -> None:
        """`configure_planner`."""
        self.configure_planner(state_dict, metadata, place)

    def build_local_plan(self) -> LoadPlan:
        """`create_local_plan`."""
        return super().create_local_plan()

    def create_local_plan(self) -> LoadPlan:
        """`build_local_plan`."""
        return self.build_local_plan()

    def build_global_plan(self, all_plans: list[LoadPlan]) -> list[LoadPlan]:
        """`create_global_plan`; on the coordinator only."""
        plans = super().create_global_plan(all_plans)
        if self.missing and not self.allow_partial_load:
            raise MismatchError(
                f"the checkpoint lacks {names_text(self.missing)}. Pass "
                "StandardLoadPlanner(allow_partial_load=True) to leave them as they are.",
                missing=self.missing,
            )
        return plans

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """`build_global_plan`."""
        return self.build_global_plan(global_plan)

    def finalize_plan(self, plan: LoadPlan) -> LoadPlan:
        """`finish_plan`."""
        return super().finish_plan(plan)

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """`finalize_plan`."""
        return self.finalize_plan(central_plan)

    def acquire_tensor(self, read_item: ReadItem) -> Sink:
        """`resolve_tensor`."""
        return super().resolve_tensor(read_item)

    def apply_tensor(self, read_item: ReadItem, tensor: Sink) -> None:
        """`commit_tensor`."""
        super().commit_tensor(read_item, tensor)

    def apply_bytes(self, read_item: ReadItem, value: bytes) -> None:
        """`load_bytes`; nothing is unpickled."""
        super().load_bytes(read_item, value)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _hear(
            cls,
            StandardLoadPlanner,
            acquire_tensor="resolve_tensor",
            apply_tensor="commit_tensor",
            apply_bytes="load_bytes",
        )


class FileSystemWriter(NativeWriter):
    """A directory of ours by HyperParallel's verbs; one that is there is replaced, atomically."""

    def __init__(self, checkpoint_dir: CheckpointId) -> None:
        """Nothing is made before the first write."""
        super().__init__(checkpoint_dir, overwrite=True)

    def initialize_writer(self, checkpoint_id: CheckpointId | None = None) -> None:
        """`reset`."""
        self.reset(checkpoint_id)

    def configure_writer(self, place: Place = Place()) -> bytes:
        """`set_up_storage_writer`."""
        return self.set_up_storage_writer(place)

    def optimize_local_plan(self, plan: SavePlan) -> SavePlan:
        """`prepare_local_plan`."""
        return self.prepare_local_plan(plan)

    def optimize_global_plan(self, plans: list[SavePlan], metadata: Metadata) -> list[SavePlan]:
        """`prepare_global_plan`; on the coordinator only."""
        return self.prepare_global_plan(plans, metadata)

    def execute_write(self, plan: SavePlan, planner: DefaultSavePlanner) -> list[WriteResult]:
        """`write_data`."""
        return self.write_data(plan, planner)

    def finalize_checkpoint(self, metadata: Metadata, results: list[list[WriteResult]]) -> Metadata:
        """`finish`: the commit."""
        return self.finish(metadata, results)


class FileSystemReader(NativeReader):
    """A checkpoint of ours by HyperParallel's verbs; `load` by path also reads HyperParallel's."""

    def __init__(self, checkpoint_dir: CheckpointId) -> None:
        """Nothing is opened yet."""
        super().__init__(checkpoint_dir)

    def initialize_reader(self, checkpoint_id: CheckpointId | None = None) -> None:
        """`reset`."""
        self.reset(checkpoint_id)

    def load_metadata(self, rank: int | None = None) -> Metadata:
        """`read_metadata`; there is one for all ranks."""
        return self.read_metadata()

    def configure_reader(self, metadata: Metadata, place: Place = Place()) -> None:
        """`set_up_storage_reader`."""
        self.set_up_storage_reader(metadata, place)

    def optimize_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """`prepare_local_plan`."""
        return self.prepare_local_plan(plan)

    def optimize_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """`prepare_global_plan`; on the coordinator only."""
        return self.prepare_global_plan(plans)

    def execute_read(self, plan: LoadPlan, planner: DefaultLoadPlanner) -> int:
        """`read_data`."""
        return self.read_data(plan, planner)


@dataclass(frozen=True, slots=True)
class AsyncSaveResponse:
    """A save that goes on behind the program."""

    persist_completion: SaveHandle
    """Done once the checkpoint is committed; a future."""

    def get_result(self, timeout: float | None = None) -> SaveResult:
        """Wait for the end; raises what went wrong."""
        return self.persist_completion.result(timeout)


def _refuse_alone(use_collectives: bool, no_dist: bool) -> None:
    if not use_collectives and not no_dist:
        raise ValueError(
            "use_collectives=False lets every rank write metadata of its own, which says nothing "
            "about the whole. Leave it out: ranks exchange a few bytes and never hang. Or give "
            "no_dist=True and each rank a path of its own."
        )


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_writer: StorageWriter | None = None,
    planner: DefaultSavePlanner | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    remove_redundancy: bool = True,
    save_to_minimum_rank: bool = False,
) -> Metadata:
    """Save on every rank; returns once the checkpoint is whole and durable."""
    _refuse_alone(use_collectives, no_dist)
    result = functions.save(
        state_dict,
        checkpoint_id,
        storage_writer=storage_writer,
        planner=planner,
        no_dist=no_dist,
        overwrite=storage_writer is None,
    )
    return result.metadata


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_writer: StorageWriter | None = None,
    planner: DefaultSavePlanner | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    use_gloo: bool = False,
    callback: Callable[[], None] | None = None,
) -> AsyncSaveResponse:
    """Save behind the program; `callback` runs once the checkpoint is committed."""
    _refuse_alone(use_collectives, no_dist)
    handle = functions.async_save(
        state_dict,
        checkpoint_id,
        storage_writer=storage_writer,
        planner=planner,
        no_dist=no_dist,
        overwrite=storage_writer is None,
    )
    if callback is not None:
        done = callback
        handle.add_done_callback(
            lambda ended: None if ended.cancelled() or ended.exception() else done()
        )
    return AsyncSaveResponse(handle)


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_reader: StorageReader | None = None,
    planner: DefaultLoadPlanner | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    broadcast_replicated_tensors: bool = True,
) -> LoadResult:
    """Fill a state in place from a checkpoint of ours or of HyperParallel, on every rank."""
    _refuse_alone(use_collectives, no_dist)
    return functions.load(
        state_dict,
        checkpoint_id,
        storage_reader=storage_reader,
        planner=planner or StandardLoadPlanner(),
        no_dist=no_dist,
        read_once="auto" if broadcast_replicated_tensors else False,
    )
