"""Changes of bytes, whatever they mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

__all__ = ["MOST", "Mutator", "changed_bytes"]

Mutator = Callable[[Random, bytes, Sequence[bytes]], bytes]
"""From a random generator, an input and all inputs there are to another input."""

MOST = 1 << 17
"""Bytes that an input grows to by repeating parts of itself."""

_ODD = (b"\0", b"\xff", b"\x7f", b"\x80", b"\n", b'"', b"{", b"[", b"]", b"}", b",", b"\0" * 8)
_WIDE = (b"\xff" * 8, b"\xff" * 7 + b"\x7f", b"\0" * 7 + b"\x80", b"\0\0\0\0\0\1\0\0", b"\xff" * 4)


def changed_bytes(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """One to six changes: bits, runs, cuts, copies, pieces of another input."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        _change(rng, out, others)
    return bytes(out)


def _change(rng: Random, out: bytearray, others: Sequence[bytes]) -> None:
    pick, size = rng.randrange(10), len(out)
    at = rng.randrange(size + 1)
    if pick < 3 and size:
        out[at - 1] ^= 1 << rng.randrange(8)
    elif pick == 3 and size:
        out[at - 1] = rng.randrange(256)
    elif pick == 4:
        out[at:at] = rng.choice(_ODD)
    elif pick == 5:
        wide = rng.choice(_WIDE)
        out[at : at + len(wide)] = wide
    elif pick == 6:
        del out[at : at + _length(rng, size)]
    elif pick == 7:
        del out[at:]
    elif pick == 8 and size < MOST:
        piece = out[at : at + _length(rng, size)]
        out[at:at] = piece * rng.choice((1, 1, 2, 8))
    elif others:
        other = rng.choice(others)
        begin = rng.randrange(len(other) + 1)
        piece = bytearray(other[begin : begin + _length(rng, len(other))])
        out[at : at + (len(piece) if rng.random() < 0.5 else 0)] = piece


def _length(rng: Random, size: int) -> int:
    return rng.randrange(1, rng.choice((3, 9, 65, max(2, size))) + 1)
