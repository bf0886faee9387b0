# SPDX-License-Identifier: Apache-2.0
"""A stretch of a file that is to be, read ahead window by window.

Whoever writes the file asks for its bytes from several threads, more or less in order. While one
window is being written the next ones are being read.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from shardkeep.arrays import Bytes
from shardkeep.engine.pages import page_aligned

__all__ = ["ALIVE", "Windows"]

AHEAD = 2
"""Windows that are read, or waiting to be, behind the one that is asked for: who reads is never
waiting for who writes."""
ALIVE = AHEAD + 3
"""Windows that are in memory at a time: also one that is still being written, the one that is asked
for, and for a moment one more."""


class Windows:
    """The bytes [begin, end) of a file."""

    def __init__(
        self, begin: int, end: int, size: int, fill: Callable[[int, int, Bytes], None]
    ) -> None:
        """`fill(low, high, out)` brings bytes; it is called on a thread of this."""
        self._begin, self._end, self._size = begin, end, size
        self._fill = fill
        self._lock = threading.Lock()
        self._windows: dict[int, Future[Bytes]] = {}
        self._lent: dict[int, int] = {}
        self._dropped: dict[int, Bytes] = {}
        self._free: list[Bytes] = []
        self._returned: deque[int] = deque()
        """Windows of which parts were given back: counted later, as no lock may be taken then."""
        self._last = -1
        self._reader = ThreadPoolExecutor(AHEAD, thread_name_prefix="shardkeep-ahead")
        weakref.finalize(self, self._reader.shutdown, wait=False, cancel_futures=True)

    def close(self) -> None:
        """Read nothing more."""
        self._reader.shutdown(wait=True, cancel_futures=True)

    def find(self, low: int, high: int) -> Bytes | None:
        """Some of the bytes, once they are there; None outside, or where they are long past."""
        if low < self._begin or high > self._end:
            return None
        parts = [self._part(number, low, high) for number in self._numbers(low, high)]
        if any(part is None for part in parts):
            return None
        found = [part for part in parts if part is not None]
        # Aligned as windows are: one write from elsewhere ends direct I/O for all of a file.
        return found[0] if len(found) == 1 else np.concatenate(found, out=page_aligned(high - low))

    def _numbers(self, low: int, high: int) -> range:
        return range(low // self._size, (high - 1) // self._size + 1)

    def _bounds(self, number: int) -> tuple[int, int]:
        low = number * self._size
        return max(low, self._begin), min(low + self._size, self._end)

    def _part(self, number: int, low: int, high: int) -> Bytes | None:
        future = self._window(number)
        if future is None:
            return None
        data = future.result()
        first, last = self._bounds(number)
        part = data[max(low, first) - first : min(high, last) - first]
        with self._lock:
            if number not in self._windows:
                return None
            self._lent[number] = self._lent.get(number, 0) + 1
        # Whoever has the part may write it for a while; then its memory is for another window.
        weakref.finalize(part, self._returned.append, number).atexit = False
        return part

    def _window(self, number: int) -> Future[Bytes] | None:
        with self._lock:
            if number > self._last:
                self._last = number
                for old in [at for at in self._windows if at < number - 1]:
                    self._drop(old)
                for at in range(number, number + 1 + AHEAD):
                    if at not in self._windows and at * self._size < self._end:
                        self._windows[at] = self._reader.submit(self._read, at)
            return self._windows.get(number)

    def _read(self, number: int) -> Bytes:
        low, high = self._bounds(number)
        with self._lock:
            self._count_returned()
            memory = self._free.pop() if self._free else None
        if memory is None:
            memory = page_aligned(self._size)
        # As aligned in memory as in the file: direct I/O writes from here.
        out = memory[: high - low]
        self._fill(low, high, out)
        return out

    def _drop(self, number: int) -> None:
        future = self._windows.pop(number)
        if future.done() and not future.cancelled() and future.exception() is None:
            memory = future.result()
            self._count_returned()
            if self._lent.get(number):
                self._dropped[number] = memory
            else:
                self._reuse(memory)

    def _count_returned(self) -> None:
        while self._returned:
            number = self._returned.popleft()
            self._lent[number] -= 1
            if not self._lent[number]:
                del self._lent[number]
                memory = self._dropped.pop(number, None)
                if memory is not None:
                    self._reuse(memory)

    def _reuse(self, memory: Bytes) -> None:
        if len(memory) == self._size:
            self._free.append(memory)
