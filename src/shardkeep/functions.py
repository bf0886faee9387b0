# SPDX-License-Identifier: Apache-2.0
"""The calls that all ranks make together: `save`, `async_save` and `load`.

Each makes a `Checkpointer` for the caller's group, or shares one where saves go on behind it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from shardkeep.background import OnOverlap, SnapshotKind, WriterKind
from shardkeep.checkpointer import Checkpointer
from shardkeep.coordination import Coordinator
from shardkeep.default_load_planner import DefaultLoadPlanner
from shardkeep.default_planner import CheckReplicas
from shardkeep.dtypes import Cast
from shardkeep.groups import coordinator_for
from shardkeep.handles import SaveHandle
from shardkeep.loading import LoadResult
from shardkeep.planner import SavePlanner
from shardkeep.progress import Progress
from shardkeep.saving import SaveResult
from shardkeep.storage import CheckpointId, ReadOnce, StorageReader, StorageWriter
from shardkeep.surgery.operation import Surgery

__all__ = ["async_save", "load", "save"]

_LOOKING = threading.Lock()


def save(
    state_dict: object,
    checkpoint_id: CheckpointId | None = None,
    *,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: object = None,
    no_dist: bool = False,
    overwrite: bool = False,
    base: CheckpointId | None = None,
    allow_pickle: bool = False,
    check_replicas: CheckReplicas = "sample",
    user_metadata: Mapping[str, Any] | None = None,
    memory_budget: int | None = None,
    timeout_s: float | None = None,
    progress: Progress = None,
) -> SaveResult:
    """Save a nested state of arrays and plain values; collective over `process_group`.

    Returns once the checkpoint is committed and durable. An existing one is an error, or replaced
    atomically with `overwrite=True`. After any error the earlier checkpoint is whole.
    `user_metadata` is kept in the record, and found without reading any data: what JSON has, at
    most 1 MiB. That of the coordinator counts.
    """
    with Checkpointer(process_group=process_group, no_dist=no_dist, timeout_s=timeout_s) as keeper:
        return keeper.save(
            state_dict,
            checkpoint_id,
            storage_writer=storage_writer,
            planner=planner,
            overwrite=overwrite,
            base=base,
            allow_pickle=allow_pickle,
            check_replicas=check_replicas,
            user_metadata=user_metadata,
            memory_budget=memory_budget,
            progress=progress,
        )


def async_save(
    state_dict: object,
    checkpoint_id: CheckpointId | None = None,
    *,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: object = None,
    no_dist: bool = False,
    overwrite: bool = False,
    base: CheckpointId | None = None,
    allow_pickle: bool = False,
    check_replicas: CheckReplicas = "sample",
    user_metadata: Mapping[str, Any] | None = None,
    snapshot: SnapshotKind = "eager",
    on_overlap: OnOverlap = "wait",
    writer: WriterKind = "thread",
    memory_budget: int | None = None,
    timeout_s: float | None = None,
    progress: Progress = None,
) -> SaveHandle:
    """Save in the background; collective over `process_group`, until it returns.

    Returns once the state may change: with `snapshot="eager"` all of it has been copied; with
    `"lazy"` parameters and optimizer state have not, and `shardkeep.torch.guard` must keep the
    optimizer from changing them before that. The handle's `result()` is that of `save`.

    One save runs at a time: with `on_overlap="wait"` this waits for the one before; with `"skip"`
    it returns a handle with `skipped` set; with `"error"` it raises. A save that failed without
    anybody looking at its handle is raised by the next one.
    """
    keeper = _default_keeper(coordinator_for(process_group, no_dist, timeout_s), writer)
    return keeper.async_save(
        state_dict,
        checkpoint_id,
        storage_writer=storage_writer,
        planner=planner,
        overwrite=overwrite,
        base=base,
        allow_pickle=allow_pickle,
        check_replicas=check_replicas,
        user_metadata=user_metadata,
        snapshot=snapshot,
        on_overlap=on_overlap,
        memory_budget=memory_budget,
        progress=progress,
    )


def _default_keeper(coordinator: Coordinator, writer: WriterKind) -> Checkpointer:
    """The one that module functions share; it is closed with the group."""
    with _LOOKING:
        keeper: Checkpointer | None = coordinator.memory.get(f"keeper/{writer}")
        if keeper is None:
            keeper = Checkpointer(process_group=coordinator, writer=writer)
            coordinator.memory[f"keeper/{writer}"] = keeper
        return keeper


def load(
    state_dict: object,
    checkpoint_id: CheckpointId | None = None,
    *,
    storage_reader: StorageReader | None = None,
    planner: DefaultLoadPlanner | None = None,
    process_group: object = None,
    no_dist: bool = False,
    strict: bool = True,
    keys: Sequence[str] | None = None,
    optional: Sequence[str] = (),
    cast: Cast = False,
    surgery: Surgery | None = None,
    verify: bool = True,
    expect_digest: str | None = None,
    allow_pickle: bool = False,
    device: object = None,
    read_once: ReadOnce = "auto",
    memory_budget: int | None = None,
    timeout_s: float | None = None,
    progress: Progress = None,
) -> LoadResult:
    """Fill a nested state in place from a checkpoint; collective over `process_group`.

    Names that are missing or unexpected, shapes and dtypes that differ are one `MismatchError` that
    lists them all, raised before anything is read. `keys` (globs of whole names, such as
    `"model.*"`) narrows the request, `optional` lets names be missing, `cast="widen"` or `True`
    allows dtype changes within a kind. `surgery` renames, joins, cuts and casts what is stored
    before it is matched with the target. `read_once` says whether what several ranks want is read
    by one of them and passed on.
    """
    with Checkpointer(process_group=process_group, no_dist=no_dist, timeout_s=timeout_s) as keeper:
        return keeper.load(
            state_dict,
            checkpoint_id,
            storage_reader=storage_reader,
            planner=planner,
            strict=strict,
            keys=keys,
            optional=optional,
            cast=cast,
            surgery=surgery,
            verify=verify,
            expect_digest=expect_digest,
            allow_pickle=allow_pickle,
            device=device,
            read_once=read_once,
            memory_budget=memory_budget,
            progress=progress,
        )
