# SPDX-License-Identifier: Apache-2.0
"""A step is copied to another folder, and appears there as a whole.

It is copied under a name that no listing takes for a step, and gets its own in one move once every
byte is durable. Each attempt has a name of its own, so that nothing depends on what became of one
before: who was killed leaves a directory that goes when it is old.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from shardkeep.errors import CheckpointError, CheckpointNotFoundError
from shardkeep.formats.native.commit import (
    Lease,
    read_record,
    server_time,
    surely_absent,
    unlink_all,
)
from shardkeep.formats.native.copying import CopyResult, copy_checkpoint, known_files
from shardkeep.formats.native.names import DATA, lease_name
from shardkeep.formats.native.record import Record
from shardkeep.manager.catalog import MANAGED, Catalog, copying_name
from shardkeep.manager.removal import remove_tree
from shardkeep.manager.steps import Step
from shardkeep.stores.local import LocalStore, storage_errors

__all__ = ["copy_step", "remove_dead_copies"]

log = logging.getLogger("shardkeep")

NEIGHBOURS = 2
"""Steps before and after one, in which files are looked for that it shares with them."""


def copy_step(
    step: Step,
    source: Catalog,
    target: Catalog,
    *,
    moving: contextlib.AbstractContextManager[Any],
    may_appear: Callable[[], bool],
    pace: Callable[[int], None] = lambda nbytes: None,
    planned: Callable[[int], None] = lambda nbytes: None,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> CopyResult | None:
    """Copy a step, every byte checked; None if it was decided otherwise meanwhile.

    `may_appear` is asked right before it gets its name, inside of `moving`.
    """
    name = target.names.of(step.step)
    temporary = copying_name(name, secrets.token_hex(8))
    target.copying.add(temporary)
    store = target.store
    try:
        inside = target.open_store(store.root / temporary)
        done = copy_checkpoint(
            source.open_store(step.path),
            inside,
            save_id=step.save_id,
            known=known_files(_neighbours(step, target)),
            pace=pace,
            planned=planned,
            progress=progress,
        )
        with moving:
            if not may_appear():
                return None
            with storage_errors(f"moving the copy of {name} into {store.root}"):
                _appear(target, temporary, name, done)
        with storage_errors(f"syncing {store.root}"):
            store.sync_directory()
        return done
    finally:
        # What has its place is not there any more; all else goes at once, as it takes room.
        with contextlib.suppress(OSError):
            if store.is_directory(temporary):
                remove_tree(store, temporary)
        target.copying.discard(temporary)


def _neighbours(step: Step, target: Catalog) -> list[LocalStore]:
    """Steps that may share files with it, the nearest first."""
    others = [found for found in target.look().steps if found.step != step.step]
    before = [found for found in others if found.step < step.step][-NEIGHBOURS:]
    after = [found for found in others if found.step > step.step][:NEIGHBOURS]
    return [target.open_store(found.path) for found in (*reversed(before), *after)]


def _appear(target: Catalog, temporary: str, name: str, done: CopyResult) -> None:
    store = target.store
    if not store.is_directory(name):
        try:
            store.rename(temporary, name)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    # What is there, of another save, goes with the very operation by which this one comes.
    _replace(target.open_store(store.root / temporary), target.open_store(store.root / name), done)


def _replace(inside: LocalStore, there: LocalStore, done: CopyResult) -> None:
    """Commit the copy in a directory that holds another save, or what one left."""
    old, exists = _record_of(there)
    if old is not None and old.save_id == done.record.save_id:
        return  # somebody else has brought it
    there.make_directory(DATA)
    names = [row.name for row in (*done.record.files, done.record.index)]
    # Of an attempt that was killed just here: no record names them.
    unlink_all(there, [lease_name(done.record.save_id), *names])
    lease = Lease(there, done.record.save_id)
    try:
        for name in names:
            there.link_from(inside, name, name)
        there.sync_directory(DATA)
        lease.commit(done.data, overwrite=exists, same=lambda found: found == done.data)
    except BaseException:
        # The lease first: a rename that a server has yet to do fails from then on.
        if lease.release() and surely_absent(there, done.record.save_id):
            unlink_all(there, names)
        raise
    finally:
        lease.release()
    if old is not None:
        unlink_all(there, [row.name for row in (old.index, *old.files)])


def _record_of(store: LocalStore) -> tuple[Record | None, bool]:
    """The record there, and whether there is one, be it damaged."""
    try:
        return read_record(store), True
    except CheckpointNotFoundError:
        return None, False
    except CheckpointError as error:
        log.warning("%s is replaced by a whole copy: %s", store.root, error)
        return None, True


def remove_dead_copies(
    catalog: Catalog, names: Sequence[str], stale_s: float, *, dry_run: bool = False
) -> tuple[list[str], int]:
    """Remove copies whose makers gave no sign of life for so long; names, and bytes."""
    store = catalog.store
    suspects = [name for name in names if name not in catalog.copying]
    if not suspects:
        return [], 0
    store.make_directory(MANAGED)
    now = server_time(LocalStore(store.root / MANAGED))
    removed, nbytes = [], 0
    for name in suspects:
        if now - _last_sign(store, name) < stale_s:
            continue
        size, gone = (0, True) if dry_run else remove_tree(store, name)
        nbytes += size
        if gone:
            removed.append(name)
    return removed, nbytes


def _last_sign(store: LocalStore, name: str) -> float:
    """When its lease was last touched, or something last came or went."""
    times = [0.0]
    for path in (name, f"{name}/{DATA}", *(f"{name}/{inner}" for inner in store.list(name))):
        with contextlib.suppress(OSError):
            times.append(store.stat(path).modified)
    return max(times)
