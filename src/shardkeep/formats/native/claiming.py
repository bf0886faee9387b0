# SPDX-License-Identifier: Apache-2.0
"""Claiming a directory for a save: what must not be there, and a lease that every rank sees."""

from __future__ import annotations

import errno
import socket
import stat
import time
from pathlib import Path

from shardkeep.errors import CheckpointExistsError, StorageError
from shardkeep.formats.native.commit import Lease, refuse_linked_data
from shardkeep.formats.native.foreign import foreign_format
from shardkeep.formats.native.names import DATA, RECORD
from shardkeep.stores.local import LocalStore, storage_errors

__all__ = ["refuse_occupied", "see_lease", "take_lease"]

LEASE_SEEN_S = 10.0
"""How long a rank looks for a lease that the coordinator has taken: directories are cached."""
LEASE_TRIES = 3


def refuse_occupied(store: LocalStore, overwrite: bool) -> None:
    """Raise where a save must not go."""
    root = store.root
    if _is_no_directory(root):
        raise StorageError(f"{root} is a file; a checkpoint needs a directory of its own")
    refuse_linked_data(store)
    other = foreign_format(store, below=True)
    if other is not None:
        raise CheckpointExistsError(
            f"{root} holds a checkpoint of {other}; two formats are never mixed in one "
            "directory, also with overwrite=True. Choose another checkpoint_id."
        )
    if not overwrite and (root / RECORD).exists():
        raise CheckpointExistsError(
            f"{root} already holds a checkpoint; choose another checkpoint_id or pass "
            "overwrite=True"
        )


def take_lease(store: LocalStore, save_id: str) -> Lease:
    """In a directory that is made if need be: and again, where somebody who cleans takes what a
    killed save left for empty, before the lease says otherwise."""
    for left in range(LEASE_TRIES, -1, -1):
        try:
            with storage_errors(f"making the directory {store.root}"):
                store.make_directory("")
                store.make_directory(DATA, sync=False)  # its name is, with the lease's
            return Lease(store, save_id)
        except StorageError as error:
            if error.errno != errno.ENOENT or not left:
                raise
    raise AssertionError


def see_lease(store: LocalStore, name: str, host: str, rank: int) -> None:
    """Wait until this rank sees the lease that the coordinator took on `host`."""
    deadline = time.monotonic() + LEASE_SEEN_S
    while True:
        try:
            store.stat(name)
        except OSError as error:
            if time.monotonic() < deadline:
                time.sleep(0.05)
                continue
            raise StorageError(
                f"rank {rank} on host {socket.gethostname()} does not see the directory "
                f"{store.root} that rank 0 on host {host} made; checkpoint_id must be on storage "
                "that all ranks share"
            ) from error
        return


def _is_no_directory(path: Path) -> bool:
    """Whether something else is there; asked once: what a dead save left may go meanwhile."""
    try:
        return not stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        return False
