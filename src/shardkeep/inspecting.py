# SPDX-License-Identifier: Apache-2.0
"""The calls that need no ranks: `open`, `verify` and `gc`."""

from __future__ import annotations

from shardkeep.checkpoint import Checkpoint
from shardkeep.checkpointer import refuse_pin
from shardkeep.engine.budget import checked_budget
from shardkeep.errors import StorageError
from shardkeep.foreign.reader import ForeignReader
from shardkeep.formats.native.commit import STALE_S, GcResult, collect_garbage
from shardkeep.formats.native.reader import NativeReader
from shardkeep.formats.native.verifying import VerifyReport, verify_checkpoint
from shardkeep.progress import Progress, tracked
from shardkeep.storage import CheckpointId, find_reader
from shardkeep.stores.local import LocalStore, storage_errors

__all__ = ["gc", "open", "verify"]


def open(
    checkpoint_id: CheckpointId,
    *,
    verify: bool = True,
    expect_digest: str | None = None,
    allow_pickle: bool = False,
    memory_budget: int | None = None,
) -> Checkpoint:
    """Open a checkpoint lazily: no model, no ranks; costs O(tensors), reads no payload."""
    checked_budget(memory_budget)
    for last in (False, True):
        reader = _open_reader(checkpoint_id, verify, expect_digest, memory_budget)
        try:
            return Checkpoint(reader, allow_pickle=allow_pickle)
        except BaseException as error:
            reader.close()
            # Replaced between its record and its index: the new one is there to be opened.
            if last or not (isinstance(error, StorageError) and error.transient):
                raise
    raise AssertionError


def _open_reader(
    checkpoint_id: CheckpointId,
    verify: bool,
    expect_digest: str | None,
    memory_budget: int | None,
) -> NativeReader | ForeignReader:
    if not issubclass(find_reader(checkpoint_id), ForeignReader):
        return NativeReader(
            checkpoint_id, verify=verify, expect_digest=expect_digest, memory_budget=memory_budget
        )
    refuse_pin(expect_digest, checkpoint_id)
    return ForeignReader(checkpoint_id, memory_budget=memory_budget)


def verify(
    checkpoint_id: CheckpointId,
    *,
    expect_digest: str | None = None,
    memory_budget: int | None = None,
    progress: Progress = None,
) -> VerifyReport:
    """Read and check every byte of every file; what is wrong is in the report."""
    with tracked(progress, "verifying") as counter:
        return verify_checkpoint(
            checkpoint_id,
            expect_digest=expect_digest,
            memory_budget=memory_budget,
            progress=counter,
            planned=counter.expect,
        )


def gc(checkpoint_id: CheckpointId, *, stale_s: float = STALE_S, dry_run: bool = False) -> GcResult:
    """Remove what killed saves left in a checkpoint's directory; safe beside running saves."""
    store = LocalStore(checkpoint_id)
    with storage_errors(f"cleaning up in {store.root}"):
        return collect_garbage(store, stale_s=stale_s, dry_run=dry_run)
