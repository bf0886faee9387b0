# SPDX-License-Identifier: Apache-2.0
"""CRC-32 of files, and of bytes whose parts have known ones."""

from __future__ import annotations

import zlib
from pathlib import Path

from shardkeep.errors import CorruptionError
from shardkeep.stores.local import storage_errors

__all__ = ["combined", "crc_of", "followed_by_zeros"]

_POLYNOMIAL = 0xEDB88320
_CHUNK = 4 << 20


def crc_of(path: Path, start: int, stop: int, crc: int = 0) -> int:
    """The CRC of a stretch of a file, going on from `crc`; in bounded memory."""
    buffer = memoryview(bytearray(min(_CHUNK, max(stop - start, 1))))
    with storage_errors(f"reading {path}"), path.open("rb", buffering=0) as file:
        file.seek(start)
        while start < stop:
            got = file.readinto(buffer[: min(len(buffer), stop - start)])
            if not got:
                raise CorruptionError(f"{path} became shorter while it was read")
            crc = zlib.crc32(buffer[:got], crc)
            start += got
    return crc


def _times(matrix: list[int], vector: int) -> int:
    out, row = 0, 0
    while vector:
        if vector & 1:
            out ^= matrix[row]
        vector >>= 1
        row += 1
    return out


def combined(first: int, second: int, nbytes: int) -> int:
    """The CRC of bytes with CRC `first` followed by `nbytes` bytes with CRC `second`.

    A CRC is linear: a zero bit behind the data is one step of the register, a matrix over two
    elements; its powers of two are squared up until `nbytes` zeros are through.
    """
    if nbytes == 0:
        return first
    step = [_POLYNOMIAL, *(1 << n for n in range(31))]
    for _ in range(3):
        step = [_times(step, row) for row in step]  # one byte
    while nbytes:
        if nbytes & 1:
            first = _times(step, first)
        nbytes >>= 1
        if nbytes:
            step = [_times(step, row) for row in step]
    return first ^ second


def followed_by_zeros(crc: int, nbytes: int) -> int:
    """The CRC of bytes with this CRC and so many zeros behind them."""
    zeros, length = zlib.crc32(b"\0"), 1
    while nbytes:
        if nbytes & 1:
            crc = combined(crc, zeros, length)
        nbytes >>= 1
        zeros, length = combined(zeros, zeros, length), 2 * length
    return crc
