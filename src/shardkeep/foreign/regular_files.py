# SPDX-License-Identifier: Apache-2.0
"""Files of another system's checkpoint, opened with care: none outside of it, and no pipes."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from shardkeep.errors import (
    CheckpointNotFoundError,
    CorruptionError,
    FormatError,
    UnsafeCheckpointError,
)
from shardkeep.foreign.tables import check_inside
from shardkeep.stores.local import above_stdio, storage_errors
from shardkeep.stores.reading import ReadFile

__all__ = ["OpenedFile", "beginning", "opened", "read_whole"]

_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
_FLAGS |= getattr(os, "O_BINARY", 0)


_AHEAD = 16 << 10
"""Bytes read at once where fewer are asked for: mostly the next ones are asked for next."""


class OpenedFile:
    """A file, read by position; on one thread at a time."""

    def __init__(self, file: ReadFile) -> None:
        self._file = file
        self.size = file.size
        """Its length when it was opened."""
        self._near = b""
        self._near_at = 0

    def read(self, at: int, count: int) -> bytes:
        """Bytes from a position on; fewer only where the file ends."""
        count = max(0, min(count, self.size - at))
        low = at - self._near_at
        if not 0 <= low <= len(self._near) - count:
            data = self._read(at, min(max(count, _AHEAD), self.size - at)) if count else b""
            if count > _AHEAD:
                return data
            self._near, self._near_at, low = data, at, 0
        return self._near[low : low + count]

    def _read(self, at: int, count: int) -> bytes:
        buffer = bytearray(count)
        got = self._file.read_into(memoryview(buffer), at)
        return bytes(buffer[:got])

    def expect(self, places: Iterable[int]) -> None:
        """Have the system begin to read all that `read` will take around some bytes, in ascending
        order."""
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                for low, high in _joined(places, self.size):
                    os.posix_fadvise(self._file.fd, low, high - low, os.POSIX_FADV_WILLNEED)


def _joined(places: Iterable[int], size: int) -> Iterator[tuple[int, int]]:
    """What lies around places of a file, those that are near each other together."""
    low = high = -1
    for at in places:
        begin, end = max(0, at - _AHEAD // 4), min(at + _AHEAD, size)
        if begin > high:
            if low < high:
                yield low, high
            low = begin
        high = max(high, end)
    if low < high:
        yield low, high


@contextmanager
def opened(root: Path, name: str = "") -> Iterator[OpenedFile]:
    """A regular file of the checkpoint at `root`, or the checkpoint itself."""
    path = root / name if name else root
    if name:
        check_inside(name, str(root))
    with storage_errors(f"reading {path}"):
        if name and _has_link(root, name) and not _is_inside(path, root):
            raise UnsafeCheckpointError(f"{path} is a link that leads out of the checkpoint")
        try:
            file = ReadFile(above_stdio(os.open(path, _FLAGS)), path)
        except FileNotFoundError as error:
            if not name:
                raise CheckpointNotFoundError(f"there is no file {path}") from error
            raise CorruptionError(f"{path} is missing; the checkpoint is not whole") from error
        try:
            if not stat.S_ISREG(os.fstat(file.fd).st_mode):
                raise FormatError(f"{path} is not a regular file")
            yield OpenedFile(file)
        finally:
            file.close()


def _has_link(root: Path, name: str) -> bool:
    """Whether anything below the root is one; mostly nothing is, and that is soon known."""
    place = str(root)
    for part in PurePosixPath(name).parts:
        place = f"{place}/{part}"
        if os.path.islink(place):
            return True
    return False


def _is_inside(path: Path, root: Path) -> bool:
    try:
        return path.resolve().is_relative_to(root.resolve())
    except RuntimeError as error:  # as pathlib says it before Python 3.13
        raise FormatError(f"{path} is a link that leads nowhere: {error}") from error


def read_whole(root: Path, name: str, most: int) -> bytes:
    """All of a file that is small."""
    with opened(root, name) as file:
        if file.size > most:
            raise FormatError(f"{root / name} has {file.size} bytes, at most {most} are read")
        return file.read(0, file.size)


def beginning(path: Path, count: int) -> bytes:
    """The first bytes of a regular file; none where there is no such file."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return b""
        with open(path, "rb") as file:
            return file.read(count)
    except OSError:
        return b""
