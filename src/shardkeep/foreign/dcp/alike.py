# SPDX-License-Identifier: Apache-2.0
"""Archives that differ in their elements only, told by comparing the bytes around them.

Taking an archive apart costs more than reading its elements if those are few, and a checkpoint has
thousands that are alike: the same shape, so the same pickle and the same directory. Where all other
bytes are the same as in one that was taken apart and checked, so is where the elements lie.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from shardkeep.foreign.torch_zip import Archive

__all__ = ["Alike"]

Ints = tuple[int, ...]
Spans = tuple[tuple[int, int], ...]
Read = Callable[[int, int], bytes]


@dataclass(frozen=True, slots=True)
class Alike:
    """An archive that was taken apart."""

    start: int
    """Where its elements begin, counted from its own start."""
    steps: Ints | None
    """Their strides, where they do not lie row-major."""
    head: int
    """Bytes before its storage."""
    tail: int
    """Bytes up to the end of it."""
    end: int
    """Its length."""
    fixed_head: Spans
    """Bytes of the head that must be the same."""
    fixed_tail: Spans
    """The same of what follows the storage, counted from there."""
    content: bytes
    """All of those."""

    @staticmethod
    def of(archive: Archive, storage: str, start: int, steps: Ints | None, read: Read) -> Alike:
        """What the bytes around one storage say."""
        head = archive.locate(storage) - archive.start
        tail = head + archive.entries[storage].nbytes
        free = archive.of_content(storage)
        serial = storage.partition("/")[0] + "/.data/serialization_id"
        if serial in archive.entries:  # a number of its own for each archive
            free += archive.of_content(serial)
        before = _without(free, 0, head)
        after = tuple(
            (low - tail, high - tail) for low, high in _without(free, tail, archive.nbytes)
        )
        made = Alike(start, steps, head, tail, archive.nbytes, before, after, b"")
        return replace(made, content=made.around(read, archive.start))

    def fits(self, read: Read, at: int) -> bool:
        """Whether the archive at a byte of a file is the same around its storage."""
        return self.content == self.around(read, at)

    def around(self, read: Read, at: int) -> bytes:
        """What must be the same."""
        head, tail = read(at, self.head), read(at + self.tail, self.end - self.tail)
        parts = [head[low:high] for low, high in self.fixed_head]
        return b"".join(parts + [tail[low:high] for low, high in self.fixed_tail])


def _without(free: list[tuple[int, int]], low: int, high: int) -> Spans:
    """The spans of [low, high) that are not free."""
    left = []
    for begin, end in sorted(free):
        if low <= begin and end <= high:
            left.append((low, begin))
            low = end
    left.append((low, high))
    return tuple(span for span in left if span[0] < span[1])
