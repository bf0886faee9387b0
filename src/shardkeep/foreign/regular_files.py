# SPDX-License-Identifier: Apache-2.0
"""Files of another system's checkpoint, opened with care: none outside of it, and no pipes."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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


class OpenedFile:
    """A file, read by position."""

    def __init__(self, file: ReadFile) -> None:
        self._file = file
        self.size = file.size
        """Its length when it was opened."""

    def read(self, at: int, count: int) -> bytes:
        """Bytes from a position on; fewer only where the file ends."""
        count = max(0, min(count, self.size - at))
        buffer = bytearray(count)
        got = self._file.read_into(memoryview(buffer), at) if count else 0
        return bytes(buffer[:got])


@contextmanager
def opened(root: Path, name: str = "") -> Iterator[OpenedFile]:
    """A regular file of the checkpoint at `root`, or the checkpoint itself."""
    path = root / name if name else root
    if name:
        check_inside(name, str(root))
    with storage_errors(f"reading {path}"):
        if name and not _is_inside(path, root):
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
