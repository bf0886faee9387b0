# SPDX-License-Identifier: Apache-2.0
"""Copies within host memory by address: many small ones, each at the price of a call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from shardkeep.arrays import Bytes
from shardkeep.columns import Ints
from shardkeep.memory import Addresses, address_of

__all__ = ["Mover", "move_all"]

_SIGNATURE = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_MEMMOVE = ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
_move = ctypes.PYFUNCTYPE(*_SIGNATURE)(_MEMMOVE)
"""Keeps the interpreter's lock: to let go of it would cost more than a small copy."""
_move_large = ctypes.CFUNCTYPE(*_SIGNATURE)(_MEMMOVE)
LARGE = 64 << 10


def move_all(to: Sequence[int], source: Sequence[int], nbytes: Sequence[int]) -> None:
    """Copy stretches of memory, which the caller holds and has checked the bounds of."""
    for there, here, count in zip(to, source, nbytes, strict=True):
        (_move if count <= LARGE else _move_large)(there, here, count)


class Mover:
    """Copies runs of host memory to where they lie in a stretch of bytes, part by part."""

    def __init__(self, start: Ints, nbytes: Ints, address: Addresses) -> None:
        """`start` is ascending; the caller keeps what is at `address` as it is meanwhile."""
        self._start = start
        self._end = start + nbytes
        self._address = address

    def fill(self, low: int, high: int, data: Bytes) -> None:
        """Copy every run's part of [low, high) into `data`, which is so long."""
        first = int(self._end.searchsorted(low, "right"))
        last = int(self._start.searchsorted(high, "left"))
        start = self._start[first:last]
        begin, end = np.maximum(start, low), np.minimum(self._end[first:last], high)
        here = self._address[first:last] + (begin - start).astype(np.uint64)
        there = (begin - low).astype(np.uint64) + np.uint64(address_of(data))
        assert len(data) == high - low
        move_all(there.tolist(), here.tolist(), (end - begin).tolist())
