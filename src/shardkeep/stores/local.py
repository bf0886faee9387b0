# SPDX-License-Identifier: Apache-2.0
"""A directory of a local or shared file system, one small operation at a time.

Every operation that the commit depends on is a method here, so that a recording store can log it
and replay a crash after any of them. Names are relative; a link in a file's place is not followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from shardkeep.errors import CheckpointError, StorageError
from shardkeep.memory import address_of
from shardkeep.stores.direct import (
    direct_alignment,
    exchange_names,
    in_memory,
    set_direct,
    start_writeback,
)
from shardkeep.stores.reading import ReadFile

__all__ = ["FileId", "LocalStore", "ReadFile", "WriteFile", "above_stdio", "storage_errors"]

_NOT_OURS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EINVAL}
"""What syncing a directory that only others can change may answer."""

_PLAIN_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_REFUSED = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTBLK}
"""What a file system answers to direct I/O that it cannot do."""
_EARLY = 1 << 20
"""Writes from this size on are worth starting before the sync."""
_TRANSIENT = {
    *(errno.ESTALE, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT, errno.EBUSY),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
}
"""Says nothing of what is stored: the same may be done a moment later."""


@contextlib.contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Turn an operating system's error into ours, keeping `errno` and saying what was tried."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        failed = StorageError(
            f"{what}: {reason} (errno {error.errno})", transient=error.errno in _TRANSIENT
        )
        failed.errno = error.errno  # not strerror too: OSError would print these two and no more
        raise failed from error


class WriteFile:
    """A file being written, created exclusively; threads share it by position."""

    def __init__(self, fd: int, path: Path) -> None:
        """Own the descriptor until `close`, or until nobody holds the file."""
        self.fd = fd
        self.path = path
        self.direct = False
        """Whether writes go around the page cache."""
        self._alignment = 1
        self._turning = threading.Lock()
        self._closer = weakref.finalize(self, os.close, fd)
        # Not when the program ends: a save may go on until then, and write to what has its number.
        self._closer.atexit = False

    def detach(self) -> int:
        """Give the descriptor to somebody else, who closes it."""
        self._closer.detach()
        return self.fd

    def allocate(self, nbytes: int) -> None:
        """Reserve space, so that a full disk shows now. Best effort where it is not supported."""
        try:
            if in_memory(self.fd):
                os.ftruncate(self.fd, nbytes)
            elif nbytes:
                fallocate(self.fd, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EINTR):
                raise

    def begin_direct(self) -> bool:
        """Write around the page cache from now on, if that can be done here; says whether."""
        self._alignment = direct_alignment(self.fd)
        self.direct = self._alignment > 0 and set_direct(self.fd, True)
        return self.direct

    def _end_direct(self) -> None:
        """Go on through the page cache: the kernel keeps what is there in step with the rest."""
        with self._turning:
            if self.direct:
                if not set_direct(self.fd, False):
                    raise OSError(errno.EIO, "direct I/O does not work, nor can it be turned off")
                self.direct = False

    def write_at(self, data: memoryview, offset: int) -> None:
        """Write all of `data` at a position, however many calls that takes.

        The first piece that direct I/O cannot write, or refuses, ends it for this file; nothing is
        lost by that, and threads that write other pieces need not know.
        """
        while len(data):
            direct = self.direct
            if direct and not self._is_aligned(data, offset):
                self._end_direct()
                continue
            try:
                written = _write_some(self.fd, data, offset)
            except InterruptedError:
                continue
            except OSError as error:
                if not direct or error.errno not in _REFUSED:
                    raise
                self._end_direct()
                continue
            if written <= 0:
                raise OSError(errno.EIO, "the system wrote nothing, and gave no reason")
            if not direct and written >= _EARLY:
                start_writeback(self.fd, offset, written)
            data, offset = data[written:], offset + written

    def _is_aligned(self, data: memoryview, offset: int) -> bool:
        mask = self._alignment - 1
        address = address_of(np.frombuffer(data, np.uint8))
        return (offset | len(data) | address) & mask == 0

    def sync(self) -> None:
        """Make the contents durable. A failure is final: the pages are already marked clean."""
        sync_fd(self.fd)

    def touch(self) -> None:
        """Set the modification time to the file server's present."""
        os.utime(self.fd if os.utime in os.supports_fd else self.path)

    def close(self) -> None:
        """Close, raising what a late write error left behind."""
        self.fd = -1
        self._closer()


_SEEKING = threading.Lock()
"""Where the system has no positioned reads and writes, seeking and moving bytes are one step."""


def _write_some(fd: int, data: memoryview, offset: int) -> int:
    if hasattr(os, "pwrite"):
        return os.pwrite(fd, data, offset)
    with _SEEKING:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.write(fd, data)


def above_stdio(fd: int) -> int:
    """The same file, under a number that is not of standard input, output or error.

    Programs close those, and whatever is opened next gets their numbers: what is printed then would
    go there.
    """
    if fd > 2 or sys.platform == "win32":
        return fd
    import fcntl

    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)


def fallocate(fd: int, nbytes: int) -> None:
    """The system call itself: the library's `posix_fallocate` writes zeros where it is lacking."""
    if sys.platform != "linux":
        return
    import ctypes

    call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if call is None:
        return
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if call(fd, 0, 0, nbytes) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def sync_fd(fd: int) -> None:
    """fsync that reaches the disk, also on macOS, where plain fsync stops at the drive's cache."""
    if sys.platform == "darwin":
        import fcntl

        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
        return
    os.fsync(fd)


@dataclass(frozen=True, slots=True)
class Stat:
    """What is known of a file without opening it."""

    size: int
    """Bytes."""
    modified: float
    """Modification time, by the clock of whoever keeps the file."""
    changed: float
    """When its name or contents last changed here; a copy that keeps times is new by this."""
    links: int = 1
    """Names it has."""


FileId: TypeAlias = tuple[int, int]
"""Of a file, whichever of its names it was found by."""


class LocalStore:
    """One directory and what is in it."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        """Nothing is touched yet. The path is made absolute, so that `chdir` changes nothing."""
        path = os.fspath(root)
        if not isinstance(path, str):
            raise TypeError(f"the checkpoint's path is {path!r}; pass text or a pathlib.Path")
        self.root = Path(os.path.abspath(path))

    def _path(self, name: str) -> Path:
        return self.root / name if name else self.root

    def make_directory(self, name: str, *, sync: bool = True) -> None:
        """Make a directory and what it needs above it; every parent that gains one is synced.

        Without `sync`, whoever calls syncs the directory that it is in.
        """
        path = self._path(name)
        if not sync:
            with contextlib.suppress(FileExistsError):
                self._mkdir(path)
            return
        missing = []
        while not path.exists():
            missing.append(path)
            path = path.parent
        # Whoever made the lowest one there is may not have synced it yet, or was killed before.
        try:
            self._sync_directory(path.parent)
        except OSError as error:
            if error.errno not in _NOT_OURS:
                raise
        for made in reversed(missing):
            with contextlib.suppress(FileExistsError):
                self._mkdir(made)
            self._sync_directory(made.parent)

    def _mkdir(self, path: Path) -> None:
        path.mkdir()

    def _sync_directory(self, path: Path) -> None:
        if os.name == "nt":
            return
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def sync_directory(self, name: str = "") -> None:
        """Make the names in a directory durable."""
        self._sync_directory(self._path(name))

    def create(self, name: str) -> WriteFile:
        """Create a file that must not exist; permissions follow the umask."""
        path = self._path(name)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _PLAIN_FLAGS
        return WriteFile(above_stdio(os.open(path, flags, 0o666)), path)

    def open_shared(self, name: str) -> WriteFile:
        """Open a file that another process has just created, to write other bytes of it."""
        path = self._path(name)
        flags = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | _PLAIN_FLAGS
        return WriteFile(above_stdio(os.open(path, flags)), path)

    def open(self, name: str) -> ReadFile:
        """Open a regular file for reading; a link is not followed."""
        path = self._path(name)
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | _PLAIN_FLAGS
        # A pipe put in a data file's place must not block the reader for ever.
        file = ReadFile(os.open(path, flags | getattr(os, "O_NONBLOCK", 0)), path)
        if not stat.S_ISREG(os.fstat(file.fd).st_mode):
            file.close()
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file

    def read(self, name: str, limit: int) -> bytes:
        """The whole of a small file; more than `limit` bytes is a `StorageError`."""
        file = self.open(name)
        try:
            if file.size > limit:
                raise StorageError(f"{file.path} is {file.size} bytes, expected at most {limit}")
            buffer = bytearray(file.size)
            got = file.read_into(memoryview(buffer), 0)
            return bytes(buffer[:got])
        finally:
            file.close()

    def link(self, old: str, new: str) -> None:
        """Give a file a second name; `FileExistsError` if the name is taken."""
        follow = os.link not in os.supports_follow_symlinks
        os.link(self._path(old), self._path(new), follow_symlinks=follow)

    def sync_file(self, name: str) -> FileId:
        """Make the contents of a file durable that somebody else has written; says which it is."""
        descriptor = os.open(self._path(name), os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            os.fsync(descriptor)
            found = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        return found.st_dev, found.st_ino

    def identify(self, name: str) -> FileId:
        """Which file a name leads to."""
        found = os.stat(self._path(name), follow_symlinks=False)
        return found.st_dev, found.st_ino

    def link_from(self, other: LocalStore, old: str, new: str) -> None:
        """Give a file of another directory, which is never written to again, a name in this one."""
        follow = os.link not in os.supports_follow_symlinks
        os.link(other._path(old), self._path(new), follow_symlinks=follow)

    def rename(self, old: str, new: str) -> None:
        """Move a file over whatever has the new name, atomically; or a directory to a free one."""
        os.replace(self._path(old), self._path(new))

    def exchange(self, one: str, other: str) -> None:
        """Have two names change places, atomically; an `OSError` where the system cannot."""
        exchange_names(self._path(one), self._path(other))

    def unlink(self, name: str) -> None:
        """Remove a name."""
        os.unlink(self._path(name))

    def remove_directory(self, name: str) -> None:
        """Remove a directory that is empty."""
        os.rmdir(self._path(name))

    def is_directory(self, name: str) -> bool:
        """Whether a name is that of a directory, and not of a link to one."""
        path = self._path(name)
        return path.is_dir() and not path.is_symlink()

    def is_link(self, name: str) -> bool:
        """Whether a name is that of a symbolic link, wherever it leads."""
        return os.path.islink(self._path(name))

    def stat(self, name: str) -> Stat:
        """Size and time of a file; a link counts as itself."""
        found = os.stat(self._path(name), follow_symlinks=False)
        return Stat(found.st_size, found.st_mtime, found.st_ctime, found.st_nlink)

    def list(self, name: str = "") -> list[str]:
        """Names in a directory, sorted; none if there is no such directory."""
        try:
            return sorted(os.listdir(self._path(name)))
        except (FileNotFoundError, NotADirectoryError):
            return []
