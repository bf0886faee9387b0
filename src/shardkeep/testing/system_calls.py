# SPDX-License-Identifier: Apache-2.0
"""What the program asks of the system about files, seen or answered by a test.

The seam is Python's `os`, below every store and writer: whatever thread asks, and whoever removes a
tree with the standard library, it comes through here. Calls of Linux that `os` lacks are the few
functions of ours that make them.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shardkeep.testing.operations import (
    Enter,
    Exchange,
    Move,
    Remove,
    Resize,
    SyncDirectory,
    SyncFile,
    Truncate,
    Write,
)
from shardkeep.testing.recording import OperationLog

__all__ = ["Call", "Handler", "Recorder", "intercepted", "recorded"]

CHANGING = (
    *("open", "write", "pwrite", "ftruncate", "fsync", "link", "rename", "replace", "unlink"),
    *("remove", "mkdir", "rmdir"),
)
LOOKING = ("read", "pread", "preadv", "stat", "lstat", "listdir", "scandir", "utime", "close")
OURS = {
    "fallocate": ("shardkeep.stores.local",),
    "exchange_names": ("shardkeep.stores.local", "shardkeep.converting.workplace"),
}
"""Functions that make calls which `os` lacks, and who has them by name."""
_SETS = ("supports_dir_fd", "supports_fd", "supports_follow_symlinks")
_BY_NUMBER = ("close", "fallocate", "fsync", "ftruncate", "pread", "preadv", "pwrite", "read",
              "write")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Call:
    """One call, not made yet."""

    name: str
    """Of the function."""
    real: Callable[..., Any]
    """The function."""
    args: tuple[Any, ...]
    """As they were given."""
    options: Mapping[str, Any]
    """Those that were given by name."""

    def make(self) -> Any:
        """Let it happen."""
        return self.real(*self.args, **self.options)

    def path(self, at: int = 0) -> Path | None:
        """The file it is about; None where that cannot be told."""
        given = self.args[at]
        if isinstance(given, int):
            return _path_of(given)
        path = Path(os.fsdecode(given))
        around = next(
            (self.options[key] for key in (_DIR_FDS[at], "dir_fd") if self.options.get(key)), None
        )
        if around is not None:
            parent = _path_of(around)
            return None if parent is None else parent / path
        return Path(os.path.abspath(path))


_DIR_FDS = ("src_dir_fd", "dst_dir_fd")

Handler = Callable[[Call], Any]


def _path_of(descriptor: int) -> Path | None:
    try:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    except OSError:
        return None


@contextlib.contextmanager
def intercepted(handler: Handler) -> Iterator[None]:
    """Have every call on files, of any thread, made by a handler; its own calls are not seen."""
    busy, active = threading.local(), [True]

    def wrapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if not active or getattr(busy, "is_in", False):
                return real(*args, **options)
            busy.is_in = True
            try:
                return handler(Call(name, real, args, options))
            finally:
                busy.is_in = False

        return call

    with contextlib.ExitStack() as undo:
        for name in filter(partial(hasattr, os), (*CHANGING, *LOOKING)):
            _replace(undo, os, name, wrapped(name, getattr(os, name)))
        for name, modules in OURS.items():
            for module in map(importlib.import_module, modules):
                _replace(undo, module, name, wrapped(name, getattr(module, name)))
        undo.callback(active.clear)  # some hold a function for longer, such as one that closes
        yield


def _replace(undo: contextlib.ExitStack, module: Any, name: str, new: Callable[..., Any]) -> None:
    real = getattr(module, name)
    setattr(module, name, new)
    undo.callback(setattr, module, name, real)
    for known in (getattr(os, key) for key in _SETS):
        if real in known:
            known.add(new)
            undo.callback(known.discard, new)


@contextlib.contextmanager
def recorded(log: OperationLog) -> Iterator[None]:
    """Log every change below the directory of a log, whoever makes it in this process."""
    with intercepted(Recorder(log)):
        yield


class Recorder:
    """A handler that makes calls, and logs what they changed."""

    def __init__(self, log: OperationLog) -> None:
        """Those below the directory of a log."""
        self._log = log
        self._numbers: dict[tuple[int, int], int] = {}
        """What is open or was, by device and inode; an inode that is used again is made again."""

    def __call__(self, call: Call) -> Any:
        """Make it."""
        record = getattr(self, f"_{call.name}", None)
        if record is None or not self._is_ours(call):
            return call.make()
        with self._log.lock:
            return record(call)

    def _is_ours(self, call: Call) -> bool:
        if call.name in _BY_NUMBER:
            return True  # told by the inode
        path = call.path()
        return path is not None and path.is_relative_to(self._log.base)

    def _number(self, descriptor: int) -> int | None:
        found = os.fstat(descriptor)
        return self._numbers.get((found.st_dev, found.st_ino))

    def _named(self, call: Call, at: int = 0) -> tuple[Path, int]:
        path = call.path(at)
        assert path is not None
        number = self._log.number(path)
        assert number is not None
        return path, number

    # --- contents

    def _open(self, call: Call) -> int:
        path = call.path()
        assert path is not None
        flags: int = call.args[1]
        is_new = bool(flags & os.O_CREAT) and not os.path.lexists(path)
        descriptor: int = call.make()
        if is_new:
            self._log.add(Enter(*self._log.place(path), self._log.fresh(), "file"))
        number = self._log.number(path)
        assert number is not None
        found = os.fstat(descriptor)
        self._numbers[found.st_dev, found.st_ino] = number
        if flags & os.O_TRUNC and not is_new:
            self._log.add(Truncate(number, 0))
        return descriptor

    def _pwrite(self, call: Call) -> int:
        descriptor, data, offset = call.args
        written: int = call.make()
        self._wrote(descriptor, offset, data, written)
        return written

    def _write(self, call: Call) -> int:
        descriptor, data = call.args
        number, written = self._number(descriptor), call.make()
        if number is not None:
            self._wrote(descriptor, os.lseek(descriptor, 0, os.SEEK_CUR) - written, data, written)
        return int(written)

    def _wrote(self, descriptor: int, offset: int, data: Any, written: int) -> None:
        number = self._number(descriptor)
        if number is not None:
            self._log.add(Write(number, offset, bytes(memoryview(data).cast("B")[:written])))

    def _ftruncate(self, call: Call) -> None:
        call.make()
        number = self._number(call.args[0])
        if number is not None:
            self._log.add(Truncate(number, call.args[1]))

    def _fallocate(self, call: Call) -> None:
        call.make()
        number = self._number(call.args[0])
        if number is not None:
            self._log.add(Resize(number, os.fstat(call.args[0]).st_size))

    def _fsync(self, call: Call) -> None:
        call.make()
        number = self._number(call.args[0])
        if number is not None:
            is_file = number in self._log.files
            self._log.add(SyncFile(number) if is_file else SyncDirectory(number))

    # --- names

    def _mkdir(self, call: Call) -> None:
        call.make()
        path = call.path()
        assert path is not None
        self._log.add(Enter(*self._log.place(path), self._log.fresh(), "directory"))

    def _link(self, call: Call) -> None:
        _, number = self._named(call)
        call.make()
        new = call.path(1)
        assert new is not None
        self._log.add(Enter(*self._log.place(new), number))

    def _rename(self, call: Call) -> None:
        source, target = call.path(), call.path(1)
        assert source is not None
        assert target is not None
        number = self._log.number(source) if os.path.lexists(source) else None
        call.make()
        assert number is not None
        directory, old = self._log.place(source)
        into, new = self._log.place(target)
        self._log.add(Move(directory, old, new, number, None if into == directory else into))

    _replace = _rename

    def _exchange_names(self, call: Call) -> None:
        one, first = self._named(call)
        other, second = self._named(call, 1)
        call.make()
        directory, name = self._log.place(one)
        self._log.add(Exchange(directory, name, first, *self._log.place(other), second))

    def _unlink(self, call: Call) -> None:
        call.make()
        path = call.path()
        assert path is not None
        self._log.add(Remove(*self._log.place(path)))

    _remove = _rmdir = _unlink
