# SPDX-License-Identifier: Apache-2.0
"""Direct I/O, early writeback, names that change places: what Linux offers beyond Python's calls.

All but the last is advice. Where a call is missing or refused, the answer is that there is no
direct I/O, and callers go through the page cache; no error leaves this module.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["direct_alignment", "exchange_names", "in_memory", "set_direct", "start_writeback"]

O_DIRECT: int = getattr(os, "O_DIRECT", 0)

_DIOALIGN = 0x2000
_AT_EMPTY_PATH = 0x1000
_WRITE = 2
"""SYNC_FILE_RANGE_WRITE: start, wait for nothing, and leave errors for the fsync to find."""

_DISKS = {0xEF53, 0x58465342, 0xF2F52010, 0x9123683E}
"""ext2 to ext4, xfs, f2fs, btrfs: what does direct I/O also under kernels that cannot be asked."""

_MEMORY = {0x01021994, 0x858458F6}
"""tmpfs, ramfs."""

_REMOTE = {0x6969, 0xFF534D42, 0xFE534D42, 0x01021997, 0x65735546}
"""NFS, SMB, 9p, FUSE: direct I/O, where they have it, would lose what their client batches."""


class _Statx(ctypes.Structure):
    _fields_ = (
        ("mask", ctypes.c_uint32),
        ("before", ctypes.c_uint8 * 148),
        ("memory", ctypes.c_uint32),
        ("offset", ctypes.c_uint32),
        ("after", ctypes.c_uint8 * 96),
    )


@cache
def _call(name: str) -> Callable[..., int] | None:
    """A function of the C library, or None where there is no such thing."""
    if sys.platform != "linux":
        return None
    with contextlib.suppress(OSError, AttributeError):
        return getattr(ctypes.CDLL(None, use_errno=True), name)  # type: ignore[no-any-return]
    return None


def direct_alignment(fd: int) -> int:
    """What offsets, lengths and addresses of direct I/O must be multiples of; 0: there is none."""
    if not O_DIRECT:
        return 0
    kind = _file_system(fd)
    if kind in _MEMORY or kind in _REMOTE:
        return 0
    statx, found = _call("statx"), _Statx()
    if statx is not None:
        statx(fd, b"", _AT_EMPTY_PATH, _DIOALIGN, ctypes.byref(found))
    if found.mask & _DIOALIGN:
        # At least 4096: a disk that takes less may read and write back to do so.
        return max(4096, found.memory, found.offset) if found.memory and found.offset else 0
    return max(4096, mmap.PAGESIZE) if kind in _DISKS else 0


def in_memory(fd: int) -> bool:
    """Whether the file lies in memory, where to reserve pages is to pay for them twice."""
    return _file_system(fd) in _MEMORY


def _file_system(fd: int) -> int:
    """The number that tells file systems apart; 0 where it cannot be had."""
    fstatfs = _call("fstatfs")
    answer = (ctypes.c_long * 32)()  # f_type comes first; the structure is far shorter
    if fstatfs is None or fstatfs(fd, answer) != 0:
        return 0
    return answer[0] & 0xFFFFFFFF


def set_direct(fd: int, on: bool) -> bool:
    """Turn direct I/O on or off for everybody who uses this descriptor; says if it is as asked."""
    if not O_DIRECT:
        return not on
    import fcntl

    try:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        wanted = flags | O_DIRECT if on else flags & ~O_DIRECT
        if wanted != flags:
            fcntl.fcntl(fd, fcntl.F_SETFL, wanted)
    except OSError:
        return False
    return True


def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Let the kernel begin to write a range now, so that the sync at the end has less to do."""
    call: Any = _call("sync_file_range")
    if call is not None:
        call(fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), ctypes.c_uint(_WRITE))


_HERE = -100
"""AT_FDCWD."""
_EXCHANGE = 2
"""RENAME_EXCHANGE."""


def exchange_names(one: Path, other: Path) -> None:
    """Have two names change places, atomically; an `OSError` where the system cannot."""
    call = _call("renameat2")
    if call is None:
        raise OSError(errno.EINVAL, "names cannot change places on this system")
    if call(_HERE, os.fsencode(one), _HERE, os.fsencode(other), ctypes.c_uint(_EXCHANGE)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(other))
