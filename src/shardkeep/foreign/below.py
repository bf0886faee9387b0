# SPDX-License-Identifier: Apache-2.0
"""Stretches of files of a checkpoint that somebody else wrote: all of one, or an error."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardkeep.errors import CorruptionError
from shardkeep.foreign.regular_files import opened

__all__ = ["file_below", "read_each", "read_exactly", "regular_size"]


def file_below(root: Path, name: str) -> Path:
    """The regular file that a checkpoint calls `name`; one that lies elsewhere is refused."""
    with opened(root, name):
        return root / name


def regular_size(path: Path) -> int:
    """Bytes of a regular file; anything else is a `FormatError` (a pipe would never answer)."""
    with opened(path) as file:
        return file.size


def read_exactly(path: Path, start: int, nbytes: int) -> bytes:
    """Bytes of a file; a file that is cut is a `CorruptionError`, before anything is allocated."""
    return read_each(path, [start], nbytes)


def read_each(path: Path, starts: Sequence[int], nbytes: int) -> bytes:
    """So many bytes from each of these places, one after the other; the file is opened once."""
    parts = []
    with opened(path) as file:
        for start in starts:
            if start < 0 or nbytes < 0 or start + nbytes > file.size:
                raise CorruptionError(
                    f"{path} has {file.size} bytes, and something of {nbytes} bytes is said to "
                    f"begin at byte {start}: the file is cut, or its metadata is damaged"
                )
            parts.append(file.read(start, nbytes))
            if len(parts[-1]) != nbytes:
                raise CorruptionError(f"{path} became shorter while it was read")
    return b"".join(parts)
