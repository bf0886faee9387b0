# SPDX-License-Identifier: Apache-2.0
"""Whether a part of a file is in memory already: asked of the kernel, so that nobody guesses."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import random
import sys
from functools import cache
from typing import Any

__all__ = ["is_cached"]

_CACHESTAT = 451
"""The number of the system call, the same on every machine but Alpha."""
_MOSTLY = 0.75
"""The part of a range that must be in memory for it to be read from there."""


def is_cached(fd: int, offset: int, nbytes: int) -> bool:
    """Whether reading through the page cache would mostly find the bytes there.

    Linux 6.5 counts the pages. Earlier kernels are asked to read one page without waiting; if in
    doubt, and elsewhere, the answer is yes: the page cache is always right, at worst slower.
    """
    counted = _count(fd, offset, nbytes)
    if counted >= 0:
        return counted * mmap.PAGESIZE >= _MOSTLY * nbytes
    return _has_page(fd, offset, nbytes)


@cache
def _cachestat() -> Any:
    if sys.platform != "linux" or os.uname().machine == "alpha":
        return None
    try:
        call = ctypes.CDLL(None, use_errno=True).syscall
    except (OSError, AttributeError):
        return None
    call.restype = ctypes.c_long
    return call


def _count(fd: int, offset: int, nbytes: int) -> int:
    """Pages of a range that are in memory; -1 where the kernel does not say."""
    call = _cachestat()
    if call is None:
        return -1
    asked = (ctypes.c_uint64 * 2)(offset, nbytes)
    answer = (ctypes.c_uint64 * 5)()
    done = call(ctypes.c_long(_CACHESTAT), ctypes.c_long(fd), asked, answer, ctypes.c_long(0))
    return int(answer[0]) if done == 0 else -1


def _has_page(fd: int, offset: int, nbytes: int) -> bool:
    flag = getattr(os, "RWF_NOWAIT", 0)
    if not flag or nbytes < mmap.PAGESIZE:
        return True
    # To ask may bring the page in: another one each time, and without those around it.
    at = offset + random.randrange(nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return os.preadv(fd, [bytearray(mmap.PAGESIZE)], at, flag) == mmap.PAGESIZE
    except OSError as error:
        return error.errno != errno.EAGAIN
    finally:
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_NORMAL)
