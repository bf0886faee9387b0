# SPDX-License-Identifier: Apache-2.0
"""Operations on files and names, as a log has them; and directory trees as plain data."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

__all__ = [
    "ROOT",
    "ContentChange",
    "Enter",
    "EntryChange",
    "Exchange",
    "Mark",
    "Move",
    "Operation",
    "Remove",
    "Resize",
    "State",
    "SyncDirectory",
    "SyncFile",
    "Truncate",
    "Write",
    "materialize",
]

ROOT = 0
"""Number of the directory that is watched."""


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
    """A name is replaced by another, atomically."""

    directory: int
    """Where it was."""
    old: str
    """The name that goes."""
    new: str
    """The name that now has the file, whatever had it before."""
    inode: int
    """The file."""
    into: int | None = None
    """Where it is now, if that is another directory."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Two names change places, atomically."""

    directory: int
    """Where the one is."""
    name: str
    """What it is called."""
    inode: int
    """What it named before."""
    other: int
    """Where the other is."""
    other_name: str
    """What it is called."""
    other_inode: int
    """What it named before."""


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
class Truncate:
    """A file gets a size; what lies beyond it goes, what is missing are zeros."""

    inode: int
    """The file."""
    size: int
    """Bytes it has."""


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


EntryChange = Enter | Remove | Move | Exchange
ContentChange = Write | Resize | Truncate
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
