# SPDX-License-Identifier: Apache-2.0
"""A file read in whole blocks, and files kept open while they are used."""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Generic, TypeVar

from shardkeep.arrays import Bytes
from shardkeep.errors import CorruptionError
from shardkeep.stores.reading import ReadFile

__all__ = ["BlockFile", "OpenFiles"]

MAX_OPEN = 32
"""Files kept open, each with up to two descriptors; a checkpoint may have more of them than a
process may open."""


class BlockFile:
    """An open file, cut into blocks; nobody knows what its bytes should be."""

    check = False
    """Whether blocks are compared with digests."""

    def __init__(self, file: ReadFile, name: str, block: int, payload: int) -> None:
        """The first `payload` bytes are read, in blocks of which the last may be short."""
        self.file = file
        self.name = name
        self.block = block
        self.payload = payload

    def read_at(self, out: Bytes, offset: int) -> None:
        """Fill `out` with bytes that nobody has checked."""
        got = self.file.read_into(out.data, offset)
        if got != len(out):
            self._refuse_short(offset + len(out))

    def read_cold(self, out: Bytes, offset: int, nbytes: int) -> int:
        """The same around the page cache, for a buffer that begins on a page; returns how many
        bytes came that way."""
        got, direct = self.file.read_direct(out.data, offset, nbytes)
        if got != nbytes:
            self._refuse_short(offset + nbytes)
        return direct

    def _refuse_short(self, wanted: int) -> None:
        size = os.fstat(self.file.fd).st_size
        raise CorruptionError(
            f"{self.name}: the file has {size} bytes now, and no byte {wanted - 1}; it was cut "
            "while it was read"
        )

    def check_blocks(self, first: int, data: Bytes) -> None:
        """Compare whole blocks, the first of which has this number, with their digests."""

    def read_pieces(self, first: int, out: Bytes, piece: int) -> tuple[int, float, float]:
        """Read whole blocks, each piece of so many bytes checked while it is in a cache.

        Returns how many pieces there were, and the seconds that reading and checking took.
        """
        view, low = out.data, first * self.block
        begun = perf_counter()
        for at in range(0, len(view), piece):
            part = view[at : at + piece]
            if self.file.read_into(part, low + at) != len(part):
                self._refuse_short(low + at + len(part))
        return -(-len(view) // piece), perf_counter() - begun, 0.0

    def close(self) -> None:
        """Let go of the file."""
        self.file.close()


F = TypeVar("F", bound=BlockFile)


@dataclass(slots=True)
class _Held(Generic[F]):
    file: F
    users: int = 0


class OpenFiles(Generic[F]):
    """Files by number, opened when they are used and kept for the next use, but never too many."""

    def __init__(self, open_file: Callable[[int], F]) -> None:
        """`open_file(number)` opens one; it is called under a lock.

        A method of whoever holds this: held weakly, so that files go with their holder at once,
        and not when Python next looks for cycles.
        """
        self._open = weakref.WeakMethod(open_file)
        self._lock = threading.Lock()
        self._held: dict[int, _Held[F]] = {}
        self._closing = False

    @contextmanager
    def use(self, number: int) -> Iterator[F]:
        """One of them, for as long as the context lasts; from any thread."""
        with self._lock:
            held = self._held.pop(number, None)
            if held is None:
                held = _Held(self._open_one(number))
            self._held[number] = held
            held.users += 1
        try:
            yield held.file
        finally:
            with self._lock:
                held.users -= 1
                self._close_idle(0 if self._closing else MAX_OPEN)

    def _open_one(self, number: int) -> F:
        """Open a file; where there are too many, in place of those that nobody uses."""
        open_file = self._open()
        assert open_file is not None, "files are used by their holder"
        try:
            return open_file(number)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._held:
                raise
            self._close_idle(0)
            return open_file(number)

    def _close_idle(self, keep: int) -> None:
        excess = len(self._held) - keep
        for number in [n for n, held in self._held.items() if held.users == 0][: max(0, excess)]:
            self._held.pop(number).file.close()

    def release(self) -> None:
        """Close those that nobody uses."""
        with self._lock:
            self._close_idle(0)

    def close(self) -> None:
        """Close all; one that a thread still uses goes when it is done."""
        with self._lock:
            self._closing = True
            self._close_idle(0)

    def reopen(self) -> None:
        """Keep files again."""
        with self._lock:
            self._closing = False
