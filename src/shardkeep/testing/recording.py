# SPDX-License-Identifier: Apache-2.0
"""A store that remembers every operation, so that a crash after any of them can be replayed.

`RecordingStore` does everything for real and logs it; several stores, one for each simulated rank,
may share one `OperationLog`. `shardkeep.testing.disk` says what a crash may leave of it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from pathlib import Path

from shardkeep.storage import CheckpointId
from shardkeep.stores.local import FileId, LocalStore, WriteFile
from shardkeep.testing.disk import Disk
from shardkeep.testing.operations import (
    ROOT,
    Enter,
    Mark,
    Move,
    Operation,
    Remove,
    Resize,
    State,
    SyncDirectory,
    SyncFile,
    Write,
    materialize,
)

__all__ = ["OperationLog", "RecordingStore"]


class OperationLog:
    """The operations on one directory, in the order they took effect; shared by many threads."""

    def __init__(self, base: str | os.PathLike[str]) -> None:
        """Watch `base`; what is in it already counts as durable."""
        self.base = Path(os.path.abspath(os.fspath(base)))
        self.initial = State.of(self.base)
        self.operations: list[Operation] = []
        self.lock = threading.RLock()
        """Held while an operation is done and logged, so that both happen in one order."""
        self._disk = Disk(self.initial)

    def mark(self, label: str) -> None:
        """Note something between two operations."""
        self.add(Mark(label))

    def add(self, operation: Operation) -> None:
        """Log an operation that was just done."""
        with self.lock:
            self.operations.append(operation)
            self._disk.apply(operation)

    def state(self) -> State:
        """The directory as a running process sees it: what a killed one leaves."""
        with self.lock:
            return self._disk.whole()

    def resumed(self, position: int, base: str | os.PathLike[str]) -> OperationLog:
        """A log that goes on after the process was killed at a position, but not the machine.

        `base`, a directory yet to be made, gets what the processes had done by then; what was
        pending is still pending.
        """
        with self.lock:
            operations = self.operations[:position]
        disk = Disk(self.initial)
        for operation in operations:
            disk.apply(operation)
        materialize(disk.whole(), base)
        log = OperationLog(base)
        log.initial, log.operations, log._disk = self.initial, operations, disk
        return log

    def store(self, checkpoint_id: CheckpointId) -> RecordingStore:
        """A store on a directory under `base`; fits `open_store=` of writers and readers."""
        return RecordingStore(checkpoint_id, self)

    def place(self, path: Path) -> tuple[int, str]:
        """The directory that holds a path, and its name there."""
        directory = self.number(path.parent)
        if directory is None:
            raise ValueError(f"{path} is not under {self.base}")
        return directory, path.name

    def number(self, path: Path) -> int | None:
        """What a path names; None outside of `base`."""
        if not path.is_relative_to(self.base):
            return None
        inode = ROOT
        for part in path.relative_to(self.base).parts:
            inode = self._disk.now(inode)[part]
        return inode

    @property
    def files(self) -> Collection[int]:
        """Numbers of files, and not of directories."""
        return self._disk.files.keys()

    def fresh(self) -> int:
        """A number for something new."""
        return self._disk.count


class RecordingStore(LocalStore):
    """A local directory whose every change is done for real and logged."""

    def __init__(self, root: str | os.PathLike[str], log: OperationLog) -> None:
        """`root` lies under the directory that the log watches."""
        super().__init__(root)
        self.log = log

    def _mkdir(self, path: Path) -> None:
        with self.log.lock:
            super()._mkdir(path)
            self.log.add(Enter(*self.log.place(path), self.log.fresh(), "directory"))

    def _sync_directory(self, path: Path) -> None:
        with self.log.lock:
            super()._sync_directory(path)
            number = self.log.number(path)
            if number is not None:
                self.log.add(SyncDirectory(number))

    def create(self, name: str) -> WriteFile:
        """Create a file whose changes are logged."""
        with self.log.lock:
            file = super().create(name)
            number = self.log.fresh()
            self.log.add(Enter(*self.log.place(file.path), number, "file"))
            return _RecordingFile(file, self.log, number)

    def link(self, old: str, new: str) -> None:
        """Link, and log it."""
        with self.log.lock:
            super().link(old, new)
            self.log.add(Enter(*self.log.place(self._path(new)), self._number(old)))

    def sync_file(self, name: str) -> FileId:
        """Sync, and log it."""
        with self.log.lock:
            found = super().sync_file(name)
            self.log.add(SyncFile(self._number(name)))
            return found

    def link_from(self, other: LocalStore, old: str, new: str) -> None:
        """Link a file of another directory under the same log, and log it."""
        with self.log.lock:
            number = self.log.number(other._path(old))
            if number is None:
                raise ValueError(f"{other.root} is not under {self.log.base}")
            super().link_from(other, old, new)
            self.log.add(Enter(*self.log.place(self._path(new)), number))

    def rename(self, old: str, new: str) -> None:
        """Rename within a directory, and log it."""
        with self.log.lock:
            number = self._number(old) if os.path.lexists(self._path(old)) else ROOT
            directory, name = self.log.place(self._path(old))
            other, new_name = self.log.place(self._path(new))
            if other != directory:
                raise ValueError(f"rename from one directory to another: {old}, {new}")
            super().rename(old, new)
            self.log.add(Move(directory, name, new_name, number))

    def unlink(self, name: str) -> None:
        """Unlink, and log it."""
        with self.log.lock:
            super().unlink(name)
            self.log.add(Remove(*self.log.place(self._path(name))))

    def remove_directory(self, name: str) -> None:
        """Remove an empty directory, and log it."""
        with self.log.lock:
            super().remove_directory(name)
            self.log.add(Remove(*self.log.place(self._path(name))))

    def _number(self, name: str) -> int:
        number = self.log.number(self._path(name))
        assert number is not None
        return number


class _RecordingFile(WriteFile):
    def __init__(self, file: WriteFile, log: OperationLog, number: int) -> None:
        super().__init__(file.detach(), file.path)
        self._log = log
        self._number = number

    def allocate(self, nbytes: int) -> None:
        with self._log.lock:
            super().allocate(nbytes)
            self._log.add(Resize(self._number, os.fstat(self.fd).st_size))

    def write_at(self, data: memoryview, offset: int) -> None:
        with self._log.lock:
            super().write_at(data, offset)
            self._log.add(Write(self._number, offset, bytes(data)))

    def sync(self) -> None:
        with self._log.lock:
            super().sync()
            self._log.add(SyncFile(self._number))
