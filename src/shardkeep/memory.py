# SPDX-License-Identifier: Apache-2.0
"""Where arrays lie: addresses, and which bytes of which device an array occupies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkeep.metadata import ChunkStorageMetadata

__all__ = ["Addresses", "LazyAddresses", "Memory", "Spans", "address_of", "bytes_at"]

FIRST, MOST = 256, 4096
"""Arrays that are asked for their address at once: few at first, so that work can begin."""

Addresses = npt.NDArray[np.uint64]
"""Or distances between them: sums of unsigned numbers wrap around, so any may be added."""


Spans = npt.NDArray[np.uint64]
"""For each array, the first byte of memory that it lies in, and the one after it; two zeros where
there is none, or that is not known. Hosts and devices share one space of addresses."""


def address_of(array: npt.NDArray[Any]) -> int:
    """Of the first element of an array in host memory."""
    return int(array.__array_interface__["data"][0])


def bytes_at(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Host memory that the caller holds, and has checked the bounds of, as an array."""
    return np.asarray(_Interface({"data": (address, False), "shape": (nbytes,), "typestr": "|u1"}))


class LazyAddresses:
    """Addresses of many arrays, found some at a time and in order, as they are needed; by any
    thread.

    To ask thousands of arrays takes as long as a disk takes for a hundred megabytes: it has those
    of the first to write meanwhile.
    """

    def __init__(self, count: int, find: Callable[[int, int], Addresses]) -> None:
        """`find(low, high)` gives those of arrays [low, high), which stay as they are."""
        self._find = find
        self._found = np.zeros(count, np.uint64)
        self._known = 0
        self._step = FIRST
        self._lock = threading.Lock()

    def __call__(self, low: int, high: int) -> Addresses:
        """Those of arrays [low, high)."""
        if self._known < high:
            with self._lock:
                while self._known < high:
                    begin = self._known
                    end = min(begin + self._step, len(self._found))
                    self._found[begin:end] = self._find(begin, end)
                    self._known = end
                    self._step = min(2 * self._step, MOST)
        return self._found[low:high]


@dataclass(frozen=True, slots=True)
class Memory:
    """Which bytes of which device an array occupies; never dereferenced."""

    device: str
    """Addresses of different devices are unrelated."""
    address: int
    """Of the first element."""
    shape: tuple[int, ...]
    """Elements in each dimension."""
    strides: tuple[int, ...]
    """Bytes from one element to the next in each dimension."""
    itemsize: int
    """Bytes of an element."""

    def bounds(self) -> tuple[int, int]:
        """Lowest address and the end of the highest element."""
        low = high = self.address
        for step, n in zip(self.strides, self.shape, strict=True):
            low, high = low + min(0, step * (n - 1)), high + max(0, step * (n - 1))
        return low, high + self.itemsize

    def part(self, box: ChunkStorageMetadata) -> Memory:
        """What a region of the array occupies."""
        shift = sum(o * step for o, step in zip(box.offsets, self.strides, strict=True))
        return Memory(self.device, self.address + shift, box.sizes, self.strides, self.itemsize)

    def may_repeat(self) -> bool:
        """Whether two elements may share a byte; regular layouts never do."""
        reach = self.itemsize
        for step, n in sorted(
            (abs(step), n) for step, n in zip(self.strides, self.shape, strict=True) if n > 1
        ):
            if step < reach:
                return True
            reach += step * (n - 1)
        return False

    def overlaps(self, other: Memory) -> bool:
        """Whether any byte belongs to both; interleaved views need not share any."""
        if self.device != other.device:
            return False
        try:
            return np.shares_memory(self._as_array(), other._as_array(), 100_000)  # type: ignore[arg-type]
        except np.exceptions.TooHardError:
            return True

    def _as_array(self) -> npt.NDArray[np.generic]:
        # numpy solves the overlap of strided arrays from addresses alone.
        return np.asarray(
            _Interface(
                {
                    "data": (self.address, True),
                    "shape": self.shape,
                    "strides": self.strides,
                    "typestr": f"|V{self.itemsize}",
                }
            )
        )


class _Interface:
    def __init__(self, described: dict[str, object]) -> None:
        self.__array_interface__ = {"version": 3, **described}
