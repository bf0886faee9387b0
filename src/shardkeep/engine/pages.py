# SPDX-License-Identifier: Apache-2.0
"""Memory in whole pages, as direct I/O and devices want it."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

from shardkeep.arrays import Bytes
from shardkeep.memory import address_of

__all__ = ["HUGE_PAGE", "page_aligned"]

HUGE_PAGE = 2 << 20


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
