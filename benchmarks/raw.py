"""Raw rates: what the disk and the memory of this machine give, defined in this one place.

- *write*: `nbytes` of random bytes to a preallocated file, direct I/O, `threads` threads that take
  units of `unit` bytes in order, from memory that no cache holds; then `fsync`. Opening and
  preallocating are not timed.
- *read*: the same file back, direct, into such memory; none of it is in the page cache.
- *tmpfs write*, *tmpfs read*: the same to a file in memory, without direct I/O; it is not
  preallocated, since for such a file that is half of the work.
- *both*: one file read and another written at the same time, each as above, until both are done:
  what a program that copies can at best reach. Some devices do one after the other.
- *memcpy*: from one stretch of memory to another, neither in any cache, by as many threads.

Threads and unit are those of the fastest of a short sweep, for each direction by itself. Nothing is
copied, digested or checked: a program that does any of this can at best come close.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.caches import evict
from shardkeep.engine.pages import page_aligned

MIB = 1 << 20
STRETCH = 256 * MIB
"""A multiple of every unit."""
SWEEP = [(threads, unit * MIB) for threads in (1, 2, 4) for unit in (1, 4, 16)]


@dataclass(frozen=True)
class Way:
    """How the raw rate is reached."""

    threads: int
    unit: int
    direct: bool
    preallocate: bool = True

    def __str__(self) -> str:
        how = "direct" if self.direct else "buffered"
        return f"{how}, {self.threads} thread(s), {self.unit / MIB:.0f} MiB"


def stretch(nbytes: int) -> Any:
    """Random bytes, in huge pages where there are any: some disks take a request in few pieces.

    More than any cache holds, as a state is. A disk that is a program of the host, which copies, is
    faster by a third from and to memory that it has in its cache and that nobody else touches.
    """
    memory = page_aligned(min(nbytes, STRETCH))
    some = np.frombuffer(os.urandom(min(len(memory), 16 * MIB)), np.uint8)
    for at in range(0, len(memory), len(some)):
        part = memory[at : at + len(some)]
        part[:] = some[: len(part)]
    return memory


def _seconds(
    nbytes: int, way: Way, move: Callable[[Any, int, int], None], end: Callable[[], None]
) -> float:
    """Time `move(memory, offset, length)` for every unit, on threads."""
    memory = stretch(max(nbytes, way.unit))
    offsets: Iterator[int] = iter(range(0, nbytes, way.unit))

    def work(_: int) -> None:
        for at in offsets:  # one step of a range is whole under the interpreter's lock
            move(memory[at % len(memory) :], at, min(way.unit, nbytes - at))

    with ThreadPoolExecutor(way.threads) as pool:
        begun = time.perf_counter()
        list(pool.map(work, range(way.threads)))
        end()
        return time.perf_counter() - begun


def _open(path: Path, flags: int, direct: bool) -> int:
    return os.open(path, flags | (os.O_DIRECT if direct else 0), 0o600)


def _whole(nbytes: int) -> int:
    return max(nbytes // mmap.PAGESIZE, 1) * mmap.PAGESIZE


def write_rate(path: Path, nbytes: int, way: Way) -> float:
    """Bytes per second; leaves the file there."""
    nbytes = _whole(nbytes)
    fd = _open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, way.direct)
    try:
        if way.preallocate:
            os.posix_fallocate(fd, 0, nbytes)
            os.fsync(fd)

        def move(data: Any, at: int, length: int) -> None:
            _write(fd, data[:length], at)

        return nbytes / _seconds(nbytes, way, move, lambda: os.fsync(fd))
    finally:
        os.close(fd)


def _write(fd: int, data: Any, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], at + done)


def read_rate(path: Path, way: Way) -> float:
    """Bytes per second of a whole file; it must not be in the page cache if it is on a disk."""
    fd = _open(path, os.O_RDONLY, way.direct)
    try:
        nbytes = os.fstat(fd).st_size

        def move(data: Any, at: int, length: int) -> None:
            _read(fd, data[:length], at)

        return nbytes / _seconds(nbytes, way, move, lambda: None)
    finally:
        os.close(fd)


def _read(fd: int, data: Any, at: int) -> None:
    done = 0
    while done < len(data):
        got = os.preadv(fd, [data[done:]], at + done)
        assert got, "the file ended early"
        done += got


def both_rate(source: Path, target: Path, read: Way, write: Way) -> float:
    """Bytes per second of each, of a file that is there and another of its size."""
    rates: dict[str, float] = {}
    work = {
        "read": lambda: read_rate(source, read),
        "write": lambda: write_rate(target, source.stat().st_size, write),
    }

    def measure(name: str) -> None:
        rates[name] = work[name]()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(measure, work))
    return min(rates.values())


def memcpy_rate(nbytes: int, threads: int) -> float:
    """Bytes copied per second, each byte counted once."""
    length = min(nbytes, 1 << 29)
    source, target = (np.full(length, value, np.uint8) for value in (1, 2))  # touched
    step = -(-length // threads)

    def copy(at: int) -> None:
        ctypes.memmove(target[at:].ctypes.data, source[at:].ctypes.data, min(step, length - at))

    begun = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(copy, range(0, length, step)))
    return length / (time.perf_counter() - begun)


@dataclass(frozen=True)
class Raw:
    """The ways chosen for one directory and one memory file system."""

    write: Way
    read: Way
    threads: int
    """For memory."""

    def disk(self, directory: Path, nbytes: int) -> dict[str, float]:
        """One measurement of each direction."""
        path = directory / "raw"
        try:
            write = write_rate(path, nbytes, self.write)
            evict(path)
            return {"write": write, "read": read_rate(path, self.read)}
        finally:
            path.unlink(missing_ok=True)

    def copying(self, directory: Path, nbytes: int) -> float:
        """Both directions at the same time."""
        source, target = directory / "raw", directory / "raw copy"
        try:
            write_rate(source, nbytes, self.write)
            evict(source)
            return both_rate(source, target, self.read, self.write)
        finally:
            source.unlink(missing_ok=True)
            target.unlink(missing_ok=True)

    def memory(self, directory: Path, nbytes: int) -> dict[str, float]:
        path = directory / "raw"
        way = Way(self.threads, 4 * MIB, direct=False, preallocate=False)
        try:
            write = write_rate(path, nbytes, way)
            read = read_rate(path, way)
        finally:
            path.unlink(missing_ok=True)
        return {
            "tmpfs write": write,
            "tmpfs read": read,
            "memcpy": memcpy_rate(nbytes, self.threads),
        }


def choose(directory: Path, nbytes: int) -> Raw:
    """Try ways on a part of the size; the fastest of each direction."""
    path = directory / "raw"
    nbytes = min(nbytes, 1 << 28)
    direct = _has_direct(directory)
    writes: dict[Way, float] = {}
    reads: dict[Way, float] = {}
    try:
        for threads, unit in SWEEP:
            way = Way(threads, unit, direct)
            writes[way] = write_rate(path, nbytes, way)
            evict(path)
            reads[way] = read_rate(path, way)
    finally:
        path.unlink(missing_ok=True)
    threads = max(1, min(4, len(os.sched_getaffinity(0))))
    return Raw(max(writes, key=writes.__getitem__), max(reads, key=reads.__getitem__), threads)


def _has_direct(directory: Path) -> bool:
    path = directory / "direct"
    try:
        os.close(_open(path, os.O_RDWR | os.O_CREAT, direct=True))
    except OSError:
        print(f"{directory} refuses direct I/O: raw rates are buffered", file=sys.stderr)
        return False
    finally:
        path.unlink(missing_ok=True)
    return True
