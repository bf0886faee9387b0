# SPDX-License-Identifier: Apache-2.0
"""Shardkeep: distributed checkpoints, saved by any number of processes, loaded by any other.

Names are resolved on first use, so that importing the package costs nothing and brings in no
framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOMES = {
    "checkpoint": ("Checkpoint", "SubView", "TensorView"),
    "checkpointer": ("Checkpointer",),
    "converting.driver": ("ConvertResult", "convert"),
    "coordination": ("Coordinator", "SingleProcess"),
    "default_load_planner": ("DefaultLoadPlanner",),
    "default_planner": ("DefaultSavePlanner",),
    "differing": ("DiffReport", "Difference", "diff"),
    "errors": (
        "CheckpointError",
        "CheckpointExistsError",
        "CheckpointNotFoundError",
        "CorruptionError",
        "FormatError",
        "MismatchError",
        "MissingDependencyError",
        "PlanError",
        "RankError",
        "StorageError",
        "UnsafeCheckpointError",
        "UnsupportedValueError",
    ),
    "foreign.reader": ("ForeignReader",),
    "formats.huggingface.writer": ("HuggingFaceWriter",),
    "formats.native.commit": ("GcResult",),
    "formats.native.reader": ("NativeReader",),
    "formats.native.verifying": ("Problem", "VerifyReport"),
    "formats.native.writer": ("NativeWriter",),
    "functions": ("async_save", "load", "save"),
    "groups": ("flush",),
    "handles": ("SaveHandle",),
    "inspecting": ("gc", "open", "verify"),
    "loading": ("LoadResult",),
    "manager.driver": ("CheckpointManager",),
    "manager.keeping": ("KeepBest", "KeepEvery", "KeepLast", "KeepNewer", "KeepPolicy"),
    "manager.restoring": ("Restored",),
    "manager.timing": (
        "AtSteps",
        "EverySeconds",
        "EverySteps",
        "Moment",
        "OnPreemption",
        "SavePolicy",
        "WhenIdle",
    ),
    "manager.steps": ("DamagedStep", "Step"),
    "manager.tiers": ("FastTier",),
    "manager.waiting": ("PinnedStep",),
    "metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageLocation",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    ),
    "per_rank": ("PerRank",),
    "planner": (
        "LoadPlan",
        "LoadPlanner",
        "ReadItem",
        "SavePlan",
        "SavePlanner",
        "WriteItem",
    ),
    "preemption": ("catch_preemption",),
    "saving": ("SaveResult",),
    "sharding": (
        "ChunkShardingSpec",
        "EnumerableShardingSpec",
        "LocalShard",
        "MeshShardingSpec",
        "Replicate",
        "Shard",
        "ShardMetadata",
        "ShardedArray",
        "ShardedTensorMetadata",
    ),
    "storage": ("StorageReader", "StorageWriter", "WriteResult"),
    "surgery.operation": ("Surgery",),
    "surgery.rules": ("Fuse", "Split", "Stack", "Unstack"),
    "thread_ranks": ("ThreadRanks",),
    "tree": ("Stateful",),
}

_PACKAGES = ("resizing", "rng", "torch")
"""Parts of the package whose names are told by theirs: `shardkeep.torch.guard`."""

_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AtSteps",
    "BytesStorageMetadata",
    "Checkpoint",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointManager",
    "CheckpointNotFoundError",
    "Checkpointer",
    "ChunkShardingSpec",
    "ChunkStorageMetadata",
    "ConvertResult",
    "Coordinator",
    "CorruptionError",
    "DamagedStep",
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "DiffReport",
    "Difference",
    "EnumerableShardingSpec",
    "EverySeconds",
    "EverySteps",
    "FastTier",
    "ForeignReader",
    "FormatError",
    "Fuse",
    "GcResult",
    "HuggingFaceWriter",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepNewer",
    "KeepPolicy",
    "LoadPlan",
    "LoadPlanner",
    "LoadResult",
    "LocalShard",
    "MeshShardingSpec",
    "Metadata",
    "MetadataIndex",
    "MismatchError",
    "MissingDependencyError",
    "Moment",
    "NativeReader",
    "NativeWriter",
    "OnPreemption",
    "PerRank",
    "PinnedStep",
    "PlanError",
    "Problem",
    "RankError",
    "ReadItem",
    "Replicate",
    "Restored",
    "SaveHandle",
    "SavePlan",
    "SavePlanner",
    "SavePolicy",
    "SaveResult",
    "Shard",
    "ShardMetadata",
    "ShardedArray",
    "ShardedTensorMetadata",
    "SingleProcess",
    "Split",
    "Stack",
    "Stateful",
    "Step",
    "StorageError",
    "StorageLocation",
    "StorageMeta",
    "StorageReader",
    "StorageWriter",
    "SubView",
    "Surgery",
    "TensorProperties",
    "TensorStorageMetadata",
    "TensorView",
    "ThreadRanks",
    "UnsafeCheckpointError",
    "Unstack",
    "UnsupportedValueError",
    "VerifyReport",
    "WhenIdle",
    "WriteItem",
    "WriteResult",
    "__version__",
    "async_save",
    "catch_preemption",
    "convert",
    "diff",
    "flush",
    "gc",
    "load",
    "open",
    "save",
    "verify",
]


if not TYPE_CHECKING:  # type checkers read the list below, so that they find misspelt names

    def __getattr__(name: str) -> object:
        """Import the module a public name lives in, the first time it is asked for."""
        if name in _PACKAGES:
            return importlib.import_module(f"shardkeep.{name}")
        module = _HOME.get(name)
        if module is None:
            raise AttributeError(f"module 'shardkeep' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"shardkeep.{module}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """The public names, imported or not."""
    return [*__all__, *_PACKAGES]


if TYPE_CHECKING:
    from shardkeep import resizing as resizing
    from shardkeep import rng as rng
    from shardkeep import torch as torch
    from shardkeep.checkpoint import Checkpoint, SubView, TensorView
    from shardkeep.checkpointer import Checkpointer
    from shardkeep.converting.driver import ConvertResult, convert
    from shardkeep.coordination import Coordinator, SingleProcess
    from shardkeep.default_load_planner import DefaultLoadPlanner
    from shardkeep.default_planner import DefaultSavePlanner
    from shardkeep.differing import Difference, DiffReport, diff
    from shardkeep.errors import (
        CheckpointError,
        CheckpointExistsError,
        CheckpointNotFoundError,
        CorruptionError,
        FormatError,
        MismatchError,
        MissingDependencyError,
        PlanError,
        RankError,
        StorageError,
        UnsafeCheckpointError,
        UnsupportedValueError,
    )
    from shardkeep.foreign.reader import ForeignReader
    from shardkeep.formats.huggingface.writer import HuggingFaceWriter
    from shardkeep.formats.native.commit import GcResult
    from shardkeep.formats.native.reader import NativeReader
    from shardkeep.formats.native.verifying import Problem, VerifyReport
    from shardkeep.formats.native.writer import NativeWriter
    from shardkeep.functions import async_save, load, save
    from shardkeep.groups import flush
    from shardkeep.handles import SaveHandle
    from shardkeep.inspecting import gc, open, verify
    from shardkeep.loading import LoadResult
    from shardkeep.manager.driver import CheckpointManager
    from shardkeep.manager.keeping import KeepBest, KeepEvery, KeepLast, KeepNewer, KeepPolicy
    from shardkeep.manager.restoring import Restored
    from shardkeep.manager.steps import DamagedStep, Step
    from shardkeep.manager.tiers import FastTier
    from shardkeep.manager.timing import (
        AtSteps,
        EverySeconds,
        EverySteps,
        Moment,
        OnPreemption,
        SavePolicy,
        WhenIdle,
    )
    from shardkeep.manager.waiting import PinnedStep
    from shardkeep.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageLocation,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )
    from shardkeep.per_rank import PerRank
    from shardkeep.planner import (
        LoadPlan,
        LoadPlanner,
        ReadItem,
        SavePlan,
        SavePlanner,
        WriteItem,
    )
    from shardkeep.preemption import catch_preemption
    from shardkeep.saving import SaveResult
    from shardkeep.sharding import (
        ChunkShardingSpec,
        EnumerableShardingSpec,
        LocalShard,
        MeshShardingSpec,
        Replicate,
        Shard,
        ShardedArray,
        ShardedTensorMetadata,
        ShardMetadata,
    )
    from shardkeep.storage import StorageReader, StorageWriter, WriteResult
    from shardkeep.surgery.operation import Surgery
    from shardkeep.surgery.rules import Fuse, Split, Stack, Unstack
    from shardkeep.thread_ranks import ThreadRanks
    from shardkeep.tree import Stateful
