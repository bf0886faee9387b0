# SPDX-License-Identifier: Apache-2.0
"""The commit: a lease, the record written through it, one atomic step, and the cleaning after.

The order of operations here is the whole of promise P2; `docs/FORMAT.md` gives it in words, and
the recording store of `shardkeep.testing` replays every prefix of it.
"""

from __future__ import annotations

import contextlib
import errno
import re
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shardkeep.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    StorageError,
    UnsafeCheckpointError,
)
from shardkeep.foreign.detecting import seen
from shardkeep.formats.native.names import (
    DATA,
    RECORD,
    lease_name,
    lease_save_id,
    save_id_of,
)
from shardkeep.formats.native.record import MAX_RECORD, Record, decode_record
from shardkeep.stores.local import LocalStore, WriteFile, storage_errors

__all__ = [
    "PROBE",
    "GcResult",
    "Lease",
    "collect_garbage",
    "keep_fresh",
    "read_record",
    "read_record_bytes",
    "refuse_linked_data",
    "server_time",
    "surely_absent",
    "unlink_all",
    "wait_visible",
]

TOUCH_S = 30.0
STALE_S = 3600.0
VISIBILITY_S = 60.0

PROBE = re.compile(r"gc-[0-9a-f]{16}\.tmp", re.ASCII)
"""What a collection makes to learn the file server's time."""

_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES}


def refuse_linked_data(store: LocalStore) -> None:
    """Raise where `data/` is a link: files are removed by name, and may be another's there."""
    if store.is_link(DATA):
        raise UnsafeCheckpointError(
            f"{store.root / DATA} is a symbolic link; the files that it leads to may belong to "
            "another checkpoint. Put a directory in its place, or link the checkpoint as a whole"
        )


def read_record(store: LocalStore) -> Record:
    """The committed record, or `CheckpointNotFoundError`."""
    return decode_record(read_record_bytes(store), str(store.root / RECORD))


def read_record_bytes(store: LocalStore) -> bytes:
    """The bytes of the committed record, read whole and closed."""
    with storage_errors(f"reading {store.root / RECORD}"):
        try:
            return store.read(RECORD, MAX_RECORD)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointNotFoundError(_absent_text(store)) from error


def surely_absent(store: LocalStore, save_id: str) -> bool:
    """Whether a save is known not to be the committed one: then what it wrote may go.

    An unreadable record says nothing; what is left then is collected later.
    """
    try:
        if read_record(store).save_id == save_id:
            return False
        # If it replaced ours, ours must not come back after a crash, without its files.
        store.sync_directory()
        return True
    except CheckpointNotFoundError:
        return True
    except Exception:
        return False


def _absent_text(store: LocalStore) -> str:
    if store.root.is_file():
        name = store.root.name
        if name in (RECORD, ".metadata") or name.endswith(".index.json"):
            return (
                f"no checkpoint at {store.root}: that is one file of a checkpoint; pass its "
                f"directory, {store.root.parent}"
            )
        return f"no checkpoint at {store.root}: it is {seen(store.root)}, of no format we read"
    if not store.root.exists():
        return f"no checkpoint at {store.root}: there is no such directory"
    begun = [name for name in store.list() if lease_save_id(name)]
    if begun:
        return (
            f"no checkpoint at {store.root}: {len(begun)} save(s) began there and none was "
            "committed; it is still being written, or its writer died (shardkeep gc removes it)"
        )
    return (
        f"no checkpoint at {store.root}: it holds no {RECORD}, nor that of another system we read; "
        f"there is {seen(store.root)}"
    )


def _collected_text(store: LocalStore) -> str:
    return (
        f"the save to {store.root} was given up for dead and collected (its lease is gone); "
        "nothing was committed. Was this process stopped for an hour?"
    )


class Lease:
    """A save's claim on its own files, from its start to its commit.

    It is the record's temporary name. While it is fresh, nobody collects the save's files; once
    collected, the commit cannot succeed, because what it would rename is gone.
    """

    def __init__(self, store: LocalStore, save_id: str, touch_s: float = TOUCH_S) -> None:
        """Create it exclusively and keep it fresh."""
        self._store = store
        self.name = lease_name(save_id)
        with storage_errors(f"creating {store.root / self.name}"):
            file = store.create(self.name)
            try:
                store.sync_directory()
            except BaseException:
                file.close()
                unlink_all(store, [self.name])
                raise
        self._file: WriteFile | None = file
        self._stop = threading.Event()
        self._keeper = threading.Thread(
            target=keep_fresh,
            args=(file, self._stop, touch_s),
            name="shardkeep-lease",
            daemon=True,
        )
        # A lease that nobody holds any more must not stay fresh, whatever interrupted its holder.
        # One that is held while the program ends must.
        weakref.finalize(self, self._stop.set).atexit = False
        try:
            self._keeper.start()
        except BaseException:
            self.release()
            raise

    def commit(self, data: bytes, *, overwrite: bool, same: Callable[[bytes], bool]) -> None:
        """Make the record visible, whole, in one step. `same(data)` tells our record on disk."""
        self._end_keeping()
        store, file = self._store, self._file
        assert file is not None
        with storage_errors(f"writing the record of {store.root}"):
            file.write_at(memoryview(data), 0)
            file.sync()
            self._file = None
            file.close()
        try:
            self._publish(overwrite)
        except OSError as error:
            # A replayed request on a network file system may report failure after success.
            if not self._is_committed(same):
                if isinstance(error, FileExistsError):
                    raise CheckpointExistsError(
                        f"{store.root} was committed by another save meanwhile; choose another "
                        "checkpoint_id or pass overwrite=True"
                    ) from error
                if error.errno == errno.ENOENT:
                    raise StorageError(_collected_text(store)) from error
                with storage_errors(f"committing {store.root}"):
                    raise
        with storage_errors(f"syncing {store.root}"):
            store.sync_directory()

    def is_held(self) -> bool:
        """Whether it is still there; a storage that does not answer does not count."""
        try:
            self._store.stat(self.name)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return True

    def _publish(self, overwrite: bool) -> None:
        store = self._store
        if overwrite:
            store.rename(self.name, RECORD)
            return
        try:
            store.link(self.name, RECORD)
        except FileExistsError:
            raise
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # No hard links here: look, then rename. Weaker, and said so in docs/FORMAT.md.
            with contextlib.suppress(FileNotFoundError):
                store.stat(RECORD)
                raise FileExistsError(errno.EEXIST, "record exists", RECORD) from error
            store.rename(self.name, RECORD)

    def _is_committed(self, same: Callable[[bytes], bool]) -> bool:
        with contextlib.suppress(CheckpointError, OSError):
            return same(read_record_bytes(self._store))
        return False

    def _end_keeping(self) -> None:
        self._stop.set()
        if self._keeper.ident is not None:
            self._keeper.join(5)

    def release(self) -> bool:
        """Give the claim up; after a commit only the temporary name is left to remove.

        Says whether that is gone.
        """
        self._end_keeping()
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()
        return not unlink_all(self._store, [self.name])


def keep_fresh(file: WriteFile, stop: threading.Event, touch_s: float) -> None:
    """Touch a file that says by its age whether its maker is alive, until `stop`."""
    while not stop.wait(touch_s):
        with contextlib.suppress(OSError):
            file.touch()


def unlink_all(store: LocalStore, names: Iterable[str], patience_s: float = 0.0) -> list[str]:
    """Remove files; returns those that are still there. Never raises."""
    left = list(names)
    deadline = time.monotonic() + patience_s
    while left:
        still = []
        for name in left:
            try:
                store.unlink(name)
            except FileNotFoundError:
                continue
            except OSError:
                still.append(name)
        left = still
        if not left or time.monotonic() >= deadline:
            break
        time.sleep(0.1)
    return left


def wait_visible(
    store: LocalStore, sizes: dict[str, int], lease: Lease, timeout_s: float = VISIBILITY_S
) -> None:
    """Wait until every file is there with its size: network file systems may show them late."""
    deadline = time.monotonic() + timeout_s
    pause = 0.01
    while True:
        wrong = {}
        for name, size in sizes.items():
            try:
                found = store.stat(name).size
            except OSError:
                wrong[name] = "not visible"
            else:
                if found != size:
                    wrong[name] = f"{found} bytes, expected {size}"
        if not wrong:
            return
        if not lease.is_held():
            raise StorageError(_collected_text(store))
        if time.monotonic() >= deadline:
            name, what = next(iter(wrong.items()))
            raise StorageError(
                f"{len(wrong)} file(s) written by other ranks cannot be seen from the coordinator "
                f"under {store.root}, such as {name}: {what}. Is it a file system that all ranks "
                "share?"
            )
        time.sleep(pause)
        pause = min(2 * pause, 1.0)
        sizes = {name: sizes[name] for name in wrong}


@dataclass(frozen=True, slots=True)
class GcResult:
    """What a collection removed."""

    removed: tuple[str, ...]
    """Names of files, relative to the checkpoint."""
    nbytes: int
    """Bytes they took."""
    live: tuple[str, ...]
    """Saves that seem to be in progress, and were left alone."""


def collect_garbage(
    store: LocalStore, *, stale_s: float = STALE_S, dry_run: bool = False
) -> GcResult:
    """Remove what killed or failed saves left behind; never a committed or a running save's files.

    A damaged record stops the collection: what it named could not be told from garbage.
    """
    if not store.root.is_dir():
        raise CheckpointNotFoundError(f"no directory at {store.root}")
    refuse_linked_data(store)
    # Files before leases: a save makes its lease first, so each file's lease, if alive, is seen.
    files = [f"{DATA}/{name}" for name in store.list(DATA)]
    names = store.list()
    leases = {sid: name for name in names if (sid := lease_save_id(name))}
    probes = [name for name in names if PROBE.fullmatch(name)]
    ids = {sid for name in files if (sid := save_id_of(name))} | leases.keys()
    if not ids and not probes:
        return GcResult((), 0, ())
    now = server_time(store)
    recorded = RECORD in names
    removed, live, nbytes = [], [], 0

    def remove(name: str) -> bool:
        nonlocal nbytes
        size = _size(store, name)
        if not dry_run and unlink_all(store, [name]):
            return False
        removed.append(name)
        nbytes += size
        return True

    for name in probes:  # of collections that were killed
        if _age(store, name, now, stale_s) >= stale_s:
            remove(name)
    for save_id in sorted(ids):
        lease = leases.get(save_id)
        if lease is None and not recorded and _is_young(store, files, save_id, now, stale_s):
            live.append(save_id)  # a copy of a checkpoint, perhaps, whose record comes last
            continue
        # The lease goes first: from here on that save can no longer commit, and if it just has, the
        # record read next names its files. A lease that will not go may still commit.
        if lease is not None and (_age(store, lease, now, stale_s) < stale_s or not remove(lease)):
            live.append(save_id)
            continue
        named = _named_files(store)
        victims = [name for name in files if save_id_of(name) == save_id and name not in named]
        if victims and not dry_run:
            # A killed saver's record may not be durable yet; what it replaced is needed until then.
            store.sync_directory()
        for name in victims:
            remove(name)
    return GcResult(tuple(removed), nbytes, tuple(live))


def _age(store: LocalStore, name: str, now: float, gone: float) -> float:
    try:
        return now - store.stat(name).modified
    except FileNotFoundError:
        return gone


def _is_young(
    store: LocalStore, files: list[str], save_id: str, now: float, stale_s: float
) -> bool:
    for name in files:
        if save_id_of(name) == save_id:
            with contextlib.suppress(OSError):
                found = store.stat(name)
                if now - max(found.modified, found.changed) < stale_s:
                    return True
    return False


def _size(store: LocalStore, name: str) -> int:
    with contextlib.suppress(OSError):
        return store.stat(name).size
    return 0


def _named_files(store: LocalStore) -> set[str]:
    try:
        record = read_record(store)
    except CheckpointNotFoundError:
        return set()
    return {record.index.name, *(row.name for row in record.files)}


def server_time(store: LocalStore) -> float:
    """Now, by the clock that stamps files here; ours may be hours off."""
    name = f"gc-{secrets.token_hex(8)}.tmp"
    with storage_errors(f"creating a file in {store.root}"):
        file = store.create(name)
        try:
            return store.stat(name).modified
        finally:
            file.close()
            with contextlib.suppress(OSError):
                store.unlink(name)
