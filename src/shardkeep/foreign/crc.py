# SPDX-License-Identifier: Apache-2.0
"""CRC-32 of bytes whose parts have known ones: parts can then be summed in any order."""

from __future__ import annotations

import zlib
from functools import cache

__all__ = ["combined", "followed_by_zeros"]

_POLYNOMIAL = 0xEDB88320


def _times(matrix: tuple[int, ...], vector: int) -> int:
    out, row = 0, 0
    while vector:
        if vector & 1:
            out ^= matrix[row]
        vector >>= 1
        row += 1
    return out


@cache
def _zeros(power: int) -> tuple[int, ...]:
    """What 2 ** power zero bits behind the data do to a CRC.

    A CRC is linear: a zero bit is one step of the register, a matrix over two elements.
    """
    if power == 0:
        return (_POLYNOMIAL, *(1 << n for n in range(31)))
    half = _zeros(power - 1)
    return tuple(_times(half, row) for row in half)


def combined(first: int, second: int, nbytes: int) -> int:
    """The CRC of bytes with CRC `first` followed by `nbytes` bytes with CRC `second`."""
    power = 3  # bits
    left = nbytes
    while left:
        if left & 1:
            first = _times(_zeros(power), first)
        left >>= 1
        power += 1
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
