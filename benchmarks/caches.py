"""Cold and durable: getting files out of the page cache, and knowing that they are."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

DROP = Path("/proc/sys/vm/drop_caches")
TOLERABLE = 0.01
"""Part of a file's bytes that may be cached when it is called cold, or missing when warm."""


def files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    for root, _, names in os.walk(path):
        for name in names:
            yield Path(root, name)


def size(path: Path) -> int:
    """Bytes of all files."""
    return sum(file.stat().st_size for file in files(path))


def make_durable(path: Path) -> None:
    """fsync every file and directory: for sides that leave this to their callers."""
    for root, _, names in os.walk(path):
        for name in names:
            sync_one(os.path.join(root, name))
        sync_one(root)
    if path.is_file():
        sync_one(path)
    sync_one(path.parent)


def sync_one(path: str | Path) -> None:
    """A file, or a directory: on ext4 that also settles what was removed from it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def evict(path: Path) -> float:
    """Make all files under a path cold; returns the part of their bytes that stayed cached."""
    make_durable(path)  # what is not yet written cannot be dropped
    for file in files(path):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    left = cached(path)
    if left > TOLERABLE:
        # Everybody's caches, so only where the polite way was not enough; takes root.
        with contextlib.suppress(OSError):
            DROP.write_text("1")
        left = cached(path)
    return left


def cached(path: Path) -> float:
    """The part of the bytes of all files under a path that is in the page cache."""
    pages = resident = 0
    libc = ctypes.CDLL(None, use_errno=True)
    for file in files(path):
        length = file.stat().st_size
        if not length:
            continue
        # Writable as far as Python knows, so that its address can be taken; private.
        access = mmap.PROT_READ | mmap.PROT_WRITE
        with open(file, "rb") as handle:
            view = mmap.mmap(handle.fileno(), length, mmap.MAP_PRIVATE, access)
        count = -(-length // mmap.PAGESIZE)
        table = (ctypes.c_ubyte * count)()
        start = ctypes.c_char.from_buffer(view)
        code = libc.mincore(
            ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(length), table
        )
        if code != 0:
            raise OSError(ctypes.get_errno(), f"mincore of {file}")
        resident += int((np.frombuffer(bytes(table), np.uint8) & 1).sum())
        pages += count
        del start
        view.close()
    return resident / pages if pages else 0.0


def warm(path: Path) -> float:
    """Read all files through the page cache; returns the part of their bytes that is in it."""
    for file in files(path):
        with open(file, "rb", buffering=0) as handle:
            while handle.read(1 << 24):
                pass
    return cached(path)
