# SPDX-License-Identifier: Apache-2.0
"""Copies within host memory by address: many small ones, each at the price of a call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

__all__ = ["move_all"]

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
