# SPDX-License-Identifier: Apache-2.0
"""A store that remembers every operation, and what a crash after any of them may leave behind.

`RecordingStore` does everything for real and logs it; several stores, one for each simulated rank,
may share one `OperationLog`. `crash_points` replays the log on a model of a file system that keeps
no more than POSIX says: an fsync of a file makes its contents durable and not its name, an fsync of
a directory makes the names in it durable and not what they point to, and all else may be kept,
lost or torn in any combination. `materialize` turns such a state into a real directory.
"""

from __future__ import annotations

import hashlib
import os
import random
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shardkeep.storage import CheckpointId
from shardkeep.stores.local import FileId, LocalStore, WriteFile

__all__ = [
    "CrashPoint",
    "Enter",
    "Mark",
    "Move",
    "Operation",
    "OperationLog",
    "RecordingStore",
    "Remove",
    "Resize",
    "State",
    "SyncDirectory",
    "SyncFile",
    "Write",
    "crash_points",
    "materialize",
]

ROOT = 0
"""Number of the directory that a log watches."""


@dataclass(frozen=True, slots=True)
class Enter:
    """A name appears: mkdir, an exclusive create, or a link."""

    directory: int
    """Where."""
    name: str
    """The new name."""
    inode: int
    """What it names; files and directories are numbered, so a link or rename keeps identity."""
    made: Literal["file", "directory"] | None = None
    """What was made with it; None for a second name of a file."""


@dataclass(frozen=True, slots=True)
class Remove:
    """A name goes."""

    directory: int
    """Where."""
    name: str
    """The name."""


@dataclass(frozen=True, slots=True)
class Move:
    """A name is replaced by another in the same directory, atomically."""

    directory: int
    """Where."""
    old: str
    """The name that goes."""
    new: str
    """The name that now has the file, whatever had it before."""
    inode: int
    """The file."""


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes at a place in a file."""

    inode: int
    """The file."""
    offset: int
    """First byte."""
    data: bytes = field(repr=False)
    """All of them."""


@dataclass(frozen=True, slots=True)
class Resize:
    """A file grows to at least a size, with zeros."""

    inode: int
    """The file."""
    size: int
    """Bytes it has at least."""


@dataclass(frozen=True, slots=True)
class SyncFile:
    """fsync of a file."""

    inode: int
    """The file."""


@dataclass(frozen=True, slots=True)
class SyncDirectory:
    """fsync of a directory."""

    inode: int
    """The directory."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A note of the caller, such as that a save has returned; does nothing."""

    label: str
    """What it says."""


EntryChange = Enter | Remove | Move
ContentChange = Write | Resize
Operation = EntryChange | ContentChange | SyncFile | SyncDirectory | Mark


@dataclass(frozen=True, slots=True)
class State:
    """A directory tree as it stands after a crash."""

    entries: Mapping[str, bytes | None]
    """Relative path -> contents; None is a directory, which stands before what is in it."""

    def digest(self) -> bytes:
        """Equal for equal trees."""
        total = hashlib.blake2b(digest_size=16)
        for path, data in sorted(self.entries.items()):
            kind = b"d" if data is None else b"f"
            head = f"{len(path.encode())}:{path}:{0 if data is None else len(data)}:"
            total.update(kind + head.encode())
            total.update(data or b"")
        return total.digest()

    @classmethod
    def of(cls, directory: str | os.PathLike[str]) -> State:
        """A real directory as it is now."""
        base, entries = Path(directory), dict[str, bytes | None]()
        for path in sorted(base.rglob("*")):
            entries[path.relative_to(base).as_posix()] = (
                None if path.is_dir() else path.read_bytes()
            )
        return cls(entries)


def materialize(state: State, directory: str | os.PathLike[str]) -> None:
    """Write a state into a real directory, which is made if it is not there."""
    base = Path(directory)
    base.mkdir(parents=True, exist_ok=True)
    for path, data in state.entries.items():
        if data is None:
            (base / path).mkdir()
        else:
            (base / path).write_bytes(data)


@dataclass(slots=True)
class _File:
    durable: bytes = b""
    pending: list[ContentChange] = field(default_factory=list)


@dataclass(slots=True)
class _Directory:
    durable: dict[str, int] = field(default_factory=dict)
    pending: list[EntryChange] = field(default_factory=list)


def _changed(entries: Mapping[str, int], changes: Iterable[EntryChange]) -> dict[str, int]:
    result = dict(entries)
    for change in changes:
        match change:
            case Enter():
                result[change.name] = change.inode
            case Remove():
                result.pop(change.name, None)
            case Move():
                result.pop(change.old, None)
                result[change.new] = change.inode
    return result


def _written(data: bytes, changes: Iterable[ContentChange]) -> bytes:
    result = bytearray(data)
    for change in changes:
        end = change.size if isinstance(change, Resize) else change.offset + len(change.data)
        result.extend(bytes(max(0, end - len(result))))
        if isinstance(change, Write):
            result[change.offset : end] = change.data
    return bytes(result)


def _torn(change: ContentChange) -> tuple[ContentChange, ContentChange]:
    """The first and the second half of a change."""
    if isinstance(change, Resize):
        return Resize(change.inode, change.size // 2), change
    half = len(change.data) // 2
    return (
        Write(change.inode, change.offset, change.data[:half]),
        Write(change.inode, change.offset + half, change.data[half:]),
    )


class _Disk:
    """What is durable and what is pending, after some operations."""

    def __init__(self, initial: State) -> None:
        """All of `initial` is durable."""
        self.files: dict[int, _File] = {}
        self.directories: dict[int, _Directory] = {ROOT: _Directory()}
        self.count = ROOT + 1
        at = {"": ROOT}
        for path, data in initial.entries.items():
            parent, _, name = path.rpartition("/")
            inode = at[path] = self.count
            self.count += 1
            self.directories[at[parent]].durable[name] = inode
            if data is None:
                self.directories[inode] = _Directory()
            else:
                self.files[inode] = _File(data)

    def apply(self, operation: Operation) -> None:
        match operation:
            case Enter():
                if operation.made == "file":
                    self.files[operation.inode] = _File()
                elif operation.made == "directory":
                    self.directories[operation.inode] = _Directory()
                self.count = max(self.count, operation.inode + 1)
                self.directories[operation.directory].pending.append(operation)
            case Remove() | Move():
                self.directories[operation.directory].pending.append(operation)
            case Write() | Resize():
                self.files[operation.inode].pending.append(operation)
            case SyncFile():
                file = self.files[operation.inode]
                file.durable, file.pending = _written(file.durable, file.pending), []
            case SyncDirectory():
                found = self.directories[operation.inode]
                found.durable, found.pending = _changed(found.durable, found.pending), []
            case Mark():
                pass

    def now(self, directory: int) -> dict[str, int]:
        """The names that a running process sees."""
        found = self.directories[directory]
        return _changed(found.durable, found.pending)

    def whole(self, inode: int) -> bytes:
        """The contents that a running process sees."""
        file = self.files[inode]
        return _written(file.durable, file.pending)

    def durable(self, inode: int) -> bytes:
        """The contents as of the last fsync; nothing, if there was none."""
        return self.files[inode].durable

    def zeros(self, inode: int) -> bytes:
        """The size arrived, what was written did not."""
        file = self.files[inode]
        size = len(self.whole(inode))
        return file.durable + bytes(max(0, size - len(file.durable)))

    def state(self, keep: Callable[[EntryChange], bool], contents: Callable[[int], bytes]) -> State:
        entries: dict[str, bytes | None] = {}

        def walk(directory: int, prefix: str) -> None:
            found = self.directories[directory]
            names = _changed(found.durable, [change for change in found.pending if keep(change)])
            for name, inode in sorted(names.items()):
                if inode in self.files:
                    entries[prefix + name] = contents(inode)
                else:
                    entries[prefix + name] = None
                    walk(inode, f"{prefix}{name}/")

        walk(ROOT, "")
        return State(entries)

    def crashes(self, chance: random.Random, samples: int) -> Iterator[tuple[str, State]]:
        """Everything a crash now may leave, as far as single faults and some samples go."""
        changes = [c for directory in self.directories.values() for c in directory.pending]
        unsynced = [inode for inode, file in self.files.items() if file.pending]

        def every(_: EntryChange) -> bool:
            return True

        def no(_: EntryChange) -> bool:
            return False

        yield "all kept", self.state(every, self.whole)
        if not changes and not unsynced:
            return
        yield "all lost", self.state(no, self.durable)
        yield "contents lost", self.state(every, self.durable)
        yield "contents zero", self.state(every, self.zeros)
        yield "names lost", self.state(no, self.whole)
        for change in changes:
            for text, contents in (("kept", self.whole), ("lost", self.durable)):
                without = self.state(lambda c, change=change: c is not change, contents)  # type: ignore[misc]
                yield f"without {change}, contents {text}", without
                alone = self.state(lambda c, change=change: c is change, contents)  # type: ignore[misc]
                yield f"only {change}, contents {text}", alone
        for inode in unsynced:
            yield f"file {inode} lost", self.state(every, self._but(inode, self.durable(inode)))
            yield f"file {inode} zero", self.state(every, self._but(inode, self.zeros(inode)))
            pending = self.files[inode].pending
            for part, half in zip(("head", "tail"), _torn(pending[-1]), strict=True):
                torn = _written(self.durable(inode), [*pending[:-1], half])
                yield f"file {inode} torn, {part} kept", self.state(every, self._but(inode, torn))
        for number in range(samples):
            yield f"sample {number}", self._sample(changes, unsynced, chance)

    def _but(self, changed: int, data: bytes) -> Callable[[int], bytes]:
        return lambda inode: data if inode == changed else self.whole(inode)

    def _sample(
        self, changes: Sequence[EntryChange], unsynced: Collection[int], chance: random.Random
    ) -> State:
        kept = {id(change) for change in changes if chance.random() < 0.5}
        contents = {}
        for inode in unsynced:
            some: list[ContentChange] = []
            for change in self.files[inode].pending:
                some.extend(chance.choice([(), (change,), _torn(change)[:1], _torn(change)[1:]]))
            contents[inode] = _written(self.durable(inode), some)
        return self.state(
            lambda change: id(change) in kept,
            lambda inode: contents[inode] if inode in contents else self.durable(inode),
        )


@dataclass(frozen=True, slots=True)
class CrashPoint:
    """One thing that may be found after one crash."""

    position: int
    """Operations that were done before it."""
    variant: str
    """What became of what was not yet durable."""
    state: State
    """What is left."""


def crash_points(
    initial: State,
    operations: Sequence[Operation],
    *,
    start: int = 0,
    samples: int = 3,
    seed: int = 0,
) -> Iterator[CrashPoint]:
    """What may be left by a crash after each prefix of at least `start` operations.

    `samples` random combinations of what is pending are added for each prefix, by `seed`.
    """
    disk, chance = _Disk(initial), random.Random(seed)
    for position in range(len(operations) + 1):
        if position:
            disk.apply(operations[position - 1])
        if position >= start:
            for variant, state in disk.crashes(chance, samples):
                yield CrashPoint(position, variant, state)


class OperationLog:
    """The operations on one directory, in the order they took effect; shared by many threads."""

    def __init__(self, base: str | os.PathLike[str]) -> None:
        """Watch `base`; what is in it already counts as durable."""
        self.base = Path(os.path.abspath(os.fspath(base)))
        self.initial = State.of(self.base)
        self.operations: list[Operation] = []
        self.lock = threading.RLock()
        """Held while an operation is done and logged, so that both happen in one order."""
        self._disk = _Disk(self.initial)

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
            return self._disk.state(lambda _: True, self._disk.whole)

    def resumed(self, position: int, base: str | os.PathLike[str]) -> OperationLog:
        """A log that goes on after the process was killed at a position, but not the machine.

        `base`, a directory yet to be made, gets what the processes had done by then; what was
        pending is still pending.
        """
        with self.lock:
            operations = self.operations[:position]
        disk = _Disk(self.initial)
        for operation in operations:
            disk.apply(operation)
        materialize(disk.state(lambda _: True, disk.whole), base)
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
