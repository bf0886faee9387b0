# SPDX-License-Identifier: Apache-2.0
"""Memory in whole pages, as direct I/O and devices want it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

import numpy as np

from shardkeep.arrays import Bytes
from shardkeep.memory import address_of

__all__ = ["HUGE_PAGE", "mapped", "page_aligned"]

HUGE_PAGE = 2 << 20
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000


def page_aligned(nbytes: int) -> Bytes:
    """Memory of whole pages, huge ones where they help: direct I/O then moves it in few pieces."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    # More addresses than needed, to begin on a huge page; what is never touched costs no memory.
    spare = HUGE_PAGE if nbytes >= HUGE_PAGE else 0
    memory = mmap.mmap(-1, nbytes + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if spare and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    skip = -address_of(whole) % HUGE_PAGE if spare else 0
    return whole[skip : skip + nbytes]


def mapped(fd: int, nbytes: int) -> Bytes:
    """Memory of a file, shared with whoever else maps it.

    Python's own would keep a descriptor besides, under the lowest number: so only addresses come
    from it, which it gives back when nobody uses them, and the file is mapped in their place.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8)
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
    )
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    begin = address_of(memory)
    if call(begin, nbytes, protection, flags, fd, 0) != begin:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return memory
