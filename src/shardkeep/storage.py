# SPDX-License-Identifier: Apache-2.0
"""The storage contract: how plans become bytes somewhere, and bytes become arrays again.

A storage that passes `shardkeep.testing.StorageTests` works under `save` and `load`. One is chosen
by asking each in turn whether a checkpoint id is its own; third parties add theirs through the
entry point group `shardkeep.storage`.
"""

from __future__ import annotations

import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np

from shardkeep.columns import Ints
from shardkeep.coordination import Coordinator
from shardkeep.errors import StorageError
from shardkeep.metadata import Metadata, MetadataIndex, StorageMeta
from shardkeep.planner import (
    LoadPlan,
    LoadPlanner,
    Place,
    ReadItems,
    SavePlan,
    SavePlanner,
    WriteItems,
)

__all__ = [
    "CheckpointId",
    "ColumnReader",
    "ReadOnce",
    "StorageReader",
    "StorageWriter",
    "WriteResult",
    "find_reader",
    "find_writer",
    "unchanged",
]

CheckpointId = str | os.PathLike[str]
ReadOnce: TypeAlias = Literal["auto"] | bool
"""Whether what several ranks want is read by one of them; `"auto"`: where that is worth it."""


@dataclass(frozen=True, slots=True)
class WriteResult:
    """What became of one thing written; a storage may report per file, not per item."""

    index: MetadataIndex
    """The item, or the file."""
    size_in_bytes: int
    """Bytes written."""
    storage_data: bytes = b""
    """What `finish` must know of it, in the storage's own encoding."""


def unchanged(base: CheckpointId | None) -> str:
    """What a writer says of the content of a save that has every tensor as its base has it."""
    return f"unchanged since {None if base is None else os.path.abspath(base)}"


class StorageWriter(ABC):
    """Called `reset`, `set_up_storage_writer`, `prepare_local_plan`, `prepare_global_plan`
    (coordinator), `share_writes`, `write_data`, `finish` (coordinator), `settle`; or `abort` after
    any error.
    """

    @abstractmethod
    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Begin another save, possibly to another place."""

    @abstractmethod
    def set_up_storage_writer(self, place: Place, announcement: bytes = b"") -> bytes:
        """Get ready to write.

        The coordinator is called first, with nothing, and returns what every other rank gets as
        `announcement`. Those must raise if they do not see the same storage.
        """

    @abstractmethod
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Look at this rank's plan before it is joined."""

    @abstractmethod
    def prepare_global_plan(self, plans: list[SavePlan], metadata: Metadata) -> list[SavePlan]:
        """Decide where everything lies. Runs on the coordinator."""

    ranks_on_host: int = 1
    """How many ranks of the save share this machine; set before `write_data`."""

    stats: Mapping[str, float] = MappingProxyType({})
    """What `write_data` did, as counts and seconds; `SaveResult.stats` has them."""

    base: CheckpointId | None = None
    """An earlier checkpoint, of which what has not changed is used again."""

    def compare_data(self, plan: SavePlan, planner: SavePlanner) -> bytes:
        """What of this rank's share the base has, in the storage's own encoding."""
        raise NotImplementedError(f"{type(self).__name__} uses nothing of other checkpoints")

    def share_data(self, told: list[bytes], metadata: Metadata) -> list[bytes]:
        """Decide what is used again, from what all ranks told. Runs on the coordinator."""
        raise NotImplementedError

    def use_shared(self, plan: SavePlan, answer: bytes) -> SavePlan:
        """This rank's share without what is used again."""
        raise NotImplementedError

    def plan_key(self) -> Hashable | None:
        """What `prepare_*_plan` follow from besides the plans; None: never use a plan twice."""
        return None

    def plan_memory(self) -> object:
        """What `prepare_global_plan` decided, to be given to `use_plan` of a later save."""
        return None

    def use_plan(self, memory: object) -> None:
        """In place of `prepare_*_plan`, for a save with the same plan. Runs on the coordinator."""

    def write_order(self, plan: SavePlan) -> Sequence[Ints]:
        """Rows of the plan's chunks in the order they will be asked for; those of a file together.

        A snapshot is taken in this order, so that writing need not wait for all of it.
        """
        return [np.arange(len(WriteItems.of(plan.items).chunks))]

    def share_writes(self, plan: SavePlan, planner: SavePlanner, coordinator: Coordinator) -> None:
        """Before `write_data`, on all ranks: pass on what another rank is to write.

        Collective, through the coordinator. A storage in which each rank writes what it holds, and
        nothing else, does nothing.
        """

    @abstractmethod
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Write this rank's share; on return it is durable."""

    @abstractmethod
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> Metadata:
        """Make the checkpoint exist, atomically. Runs on the coordinator, last."""

    def settle(self) -> None:
        """Clean up what the commit replaced, once every rank knows of it. Never fails a save."""

    def abort(self, *, committing: bool = False) -> None:
        """Clean up after an error; must not raise.

        With `committing`, the error came in or after `finish`: the checkpoint may exist, and what
        belongs to it must stay.
        """

    @classmethod
    @abstractmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Whether this storage could write there."""

    def storage_meta(self) -> StorageMeta | None:
        """Which save this is."""
        return None


class StorageReader(ABC):
    """Called `reset`, `read_metadata`, `set_up_storage_reader`, `prepare_local_plan`,
    `prepare_global_plan` (coordinator), `read_bytes`, `read_data`.

    After `prepare_global_plan`, `prepare_local_plan`, `read_bytes` and `read_data` may be called
    for further plans, on some ranks only: for what was saved per rank.
    """

    stats: Mapping[str, float] = MappingProxyType({})
    """What was read since the last `reset`, as counts and seconds; `LoadResult.stats` has them."""

    ranks_on_host: int = 1
    """How many ranks of the load share this machine; set before `read_data`."""

    @abstractmethod
    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Begin another load, possibly from another place."""

    @abstractmethod
    def read_metadata(self, announcement: bytes = b"") -> Metadata:
        """What is stored. The coordinator is called with nothing, other ranks with its word."""

    def announcement(self) -> bytes:
        """What the coordinator tells other ranks after it has read the metadata."""
        return b""

    @abstractmethod
    def set_up_storage_reader(self, metadata: Metadata, place: Place) -> None:
        """Get ready to read."""

    @abstractmethod
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Look at this rank's plan."""

    @abstractmethod
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Look at all plans. Runs on the coordinator."""

    @abstractmethod
    def read_bytes(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Hand the plain values of the plan to `planner.load_bytes`, which may refuse them.

        Every rank has done so before any rank reads a tensor.
        """

    @abstractmethod
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> int:
        """Read the tensors of the plan into their places; returns the payload bytes delivered."""

    def share_reads(
        self, plan: LoadPlan, planner: LoadPlanner, coordinator: Coordinator, read_once: ReadOnce
    ) -> None:
        """Before `read_data`, on all ranks: read once what several of them want, and pass it on.

        Collective, through the coordinator. A storage that does nothing has `read_data` read all.
        """

    def same_content(self, first: str, second: str) -> bool:
        """Whether two stored tensors are known to have equal bytes, without reading them."""
        return False

    def close(self) -> None:
        """Let go of files."""

    @classmethod
    @abstractmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Whether this storage can read there."""


class ColumnReader(StorageReader):
    """A reader of plans that are columns, to which it has nothing to add."""

    def set_up_storage_reader(self, metadata: Metadata, place: Place) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to add."""
        return plans

    @abstractmethod
    def read_values(self, names: Sequence[str], deliver: Callable[[int, bytes], None]) -> None:
        """Read values by name; `deliver(i, data)` gets the encoding of the i-th."""

    def read_bytes(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """The values of the plan: they are small, and may still refuse the load."""
        items = ReadItems.of(plan)
        self.read_values(
            items.value_names,
            lambda at, data: planner.load_bytes(items[len(items.chunks) + at], data),
        )


@runtime_checkable
class StorageKind(Protocol):
    """What an entry point of `shardkeep.storage` names: a pair of classes, or one of them."""

    writer: ClassVar[type[StorageWriter]]
    """Writes this kind of storage."""
    reader: ClassVar[type[StorageReader]]
    """Reads it."""


BUILT_IN = ("shardkeep.foreign.storage:ForeignStorage", "shardkeep.formats.native:NativeStorage")
"""`module:name` of the storages that come with the package, asked first."""


def _kinds() -> list[StorageKind]:
    kinds = []
    for spec in BUILT_IN:
        module, _, name = spec.partition(":")
        kinds.append(getattr(importlib.import_module(module), name))
    return kinds


def _third_party() -> list[StorageKind]:
    from importlib.metadata import entry_points

    return [point.load() for point in entry_points(group="shardkeep.storage")]


def _find(checkpoint_id: CheckpointId, role: str) -> Any:
    if not isinstance(os.fspath(checkpoint_id), str):
        raise TypeError(f"checkpoint_id is {checkpoint_id!r}; pass text or a pathlib.Path")
    for kinds in (_kinds, _third_party):
        for kind in kinds():
            cls = getattr(kind, role, None)
            if cls is not None and cls.validate_checkpoint_id(checkpoint_id):
                return cls
    raise StorageError(
        f"no storage knows the checkpoint id {os.fspath(checkpoint_id)!r}; pass storage_{role}=..."
    )


def find_writer(checkpoint_id: CheckpointId) -> type[StorageWriter]:
    """The first storage that says it can write there."""
    found: type[StorageWriter] = _find(checkpoint_id, "writer")
    return found


def find_reader(checkpoint_id: CheckpointId) -> type[StorageReader]:
    """The first storage that says it can read there."""
    found: type[StorageReader] = _find(checkpoint_id, "reader")
    return found
