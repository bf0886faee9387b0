# SPDX-License-Identifier: Apache-2.0
"""Files of a checkpoint that somebody else wrote: looked up without leaving its directory."""

from __future__ import annotations

import stat
from pathlib import Path, PurePosixPath

from shardkeep.errors import CorruptionError, FormatError, UnsafeCheckpointError
from shardkeep.stores.local import storage_errors

__all__ = ["file_below", "read_exactly", "regular_size"]


def file_below(root: Path, name: str) -> Path:
    """The regular file that a checkpoint calls `name`; one that lies elsewhere is refused."""
    parts = PurePosixPath(name).parts
    if not parts or "\0" in name or "\\" in name or ".." in parts or name.startswith("/"):
        raise UnsafeCheckpointError(
            f"{root}: its metadata names the file {name!r}, which is not below the checkpoint. "
            "A checkpoint whose files lie elsewhere is not read."
        )
    path = root.joinpath(*parts)
    try:
        inside = path.resolve(strict=True).is_relative_to(root.resolve(strict=True))
    except FileNotFoundError:
        raise CorruptionError(
            f"{root}: the file {name!r} that its metadata names is not there; "
            "copy the checkpoint again, or choose another step"
        ) from None
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a name too long
        raise FormatError(f"{root}: the file {name!r} cannot be looked up: {error}") from error
    if not inside:
        raise UnsafeCheckpointError(
            f"{path} is a link that leaves the checkpoint's directory; it is not followed. "
            "Put a copy of the file in its place if you trust it."
        )
    regular_size(path)
    return path


def regular_size(path: Path) -> int:
    """Bytes of a regular file; anything else is a `FormatError` (a pipe would never answer)."""
    with storage_errors(f"looking at {path}"):
        found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise FormatError(f"{path} is not a regular file")
    return found.st_size


def read_exactly(path: Path, start: int, nbytes: int) -> bytes:
    """Bytes of a file; a file that is cut is a `CorruptionError`, before anything is allocated."""
    size = regular_size(path)
    if start < 0 or nbytes < 0 or start + nbytes > size:
        raise CorruptionError(
            f"{path} has {size} bytes, and something of {nbytes} bytes is said to begin at byte "
            f"{start}: the file is cut, or its metadata is damaged"
        )
    with storage_errors(f"reading {path}"), path.open("rb") as file:
        file.seek(start)
        data = file.read(nbytes)
    if len(data) != nbytes:
        raise CorruptionError(f"{path} became shorter while it was read")
    return data
