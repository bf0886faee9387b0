# SPDX-License-Identifier: Apache-2.0
"""Whether files are still those that were looked at: other systems write over theirs in place.

Ours have digests and are never written to again. Theirs may be another save's by the time that
elements are wanted, and what was learnt of the first says nothing of the second.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from shardkeep.errors import StorageError
from shardkeep.stores.local import storage_errors

__all__ = ["Marks"]

Mark = tuple[int, int, int, int]


class Marks:
    """What tells files from those that take their places: device, number, size, time."""

    def __init__(self, root: Path, names: Sequence[str]) -> None:
        """Look at all files once; `""` is the checkpoint itself."""
        self._paths = [root / name if name else root for name in names]
        with storage_errors(f"looking at the files of {root}"):
            found = [os.stat(path) for path in self._paths]
        self._marks = [_mark(each) for each in found]
        # A file that takes the place of another may be an old one, but was given its name then.
        self._changed = max((max(each.st_mtime_ns, each.st_ctime_ns) for each in found), default=0)

    def __eq__(self, other: object) -> bool:
        """Whether these are the same files, unchanged."""
        if not isinstance(other, Marks):
            return NotImplemented
        return self._paths == other._paths and self._marks == other._marks

    __hash__ = None  # type: ignore[assignment]

    def changed_since(self, when_ns: int) -> bool:
        """Whether any was written to, or got its name, after a time; by the clock of its server."""
        return self._changed >= when_ns

    @property
    def numbers(self) -> list[tuple[int, int]]:
        """Of the device of each, and of each there."""
        return [(device, number) for device, number, _, _ in self._marks]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each."""
        return [size for _, _, size, _ in self._marks]

    @property
    def times(self) -> list[int]:
        """When each was last written to."""
        return [when for _, _, _, when in self._marks]

    def check(self, number: int, found: os.stat_result) -> None:
        """Raise unless this is the file that was looked at."""
        if _mark(found) != self._marks[number]:
            raise StorageError(
                f"{self._paths[number]} was written to, or replaced, after it was looked at; load "
                "or open the checkpoint again",
                transient=True,
            )

    def check_all(self, numbers: Iterable[int]) -> None:
        """The same for files by their names, after something was read from them."""
        for number in numbers:
            path = self._paths[number]
            with storage_errors(f"looking at {path}"):
                self.check(number, os.stat(path))


def _mark(found: os.stat_result) -> Mark:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
