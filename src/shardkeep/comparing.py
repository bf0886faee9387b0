# SPDX-License-Identifier: Apache-2.0
"""Two arrays compared: how many elements differ, and by how much."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkeep.dtypes import DType

__all__ = ["Found", "Tolerance", "compare"]

Array = npt.NDArray[Any]

PIECE = 1 << 16
"""Elements looked at together: what is made of them stays in a cache."""


@dataclass(frozen=True)
class Tolerance:
    """How far apart elements may be that count as equal."""

    rtol: float = 0.0
    """Times the magnitude of the second."""
    atol: float = 0.0
    """In any case."""

    def __bool__(self) -> bool:
        return self.rtol > 0 or self.atol > 0

    def close_numbers(self, a: object, b: object) -> bool:
        """Whether two plain values are numbers that count as equal."""
        if not self or not all(type(x) in (int, float) for x in (a, b)):
            return False
        if type(a) is int and type(b) is int and math.isfinite(self.atol + self.rtol):
            return abs(a - b) <= Fraction(self.atol) + Fraction(self.rtol) * abs(b)
        try:
            x, y = float(a), float(b)  # type: ignore[arg-type]
        except OverflowError:
            return False
        if math.isnan(x) or math.isnan(y):
            return math.isnan(x) and math.isnan(y)
        # Nothing is near to an infinity.
        near = math.isfinite(x - y) and abs(x - y) <= self.atol + self.rtol * abs(y)
        return x == y or near


@dataclass
class Found:
    """What was found so far; threads may add to it."""

    changed: int = 0
    """Elements that differ."""
    max_abs: float | None = None
    """The largest difference that is a number."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, other: Found) -> None:
        """Count what another part has."""
        with self._lock:
            self.changed += other.changed
            if other.max_abs is not None:
                self.max_abs = max(self.max_abs or 0.0, other.max_abs)


def compare(a: Array, b: Array, dtypes: tuple[DType, DType], tolerance: Tolerance) -> Found:
    """Compare elements, given as bits of their types, which may be two."""
    found = Found()
    same_type = dtypes[0] is dtypes[1]
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    for at in range(0, len(flat_a), PIECE):
        x, y = flat_a[at : at + PIECE], flat_b[at : at + PIECE]
        if same_type:
            differs = _bits(x) != _bits(y)
            differs = differs.any(axis=1) if differs.ndim > 1 else differs
            if not differs.any():
                continue
            x, y = x[differs], y[differs]
        found.add(_numbers(x, y, dtypes, tolerance))
    return found


def _bits(array: Array) -> Array:
    """Elements as integers: as complex numbers, two zeros of different signs would be equal."""
    return array.view(np.uint64).reshape(-1, 2) if array.itemsize == 16 else array


def _numbers(x: Array, y: Array, dtypes: tuple[DType, DType], tolerance: Tolerance) -> Found:
    """Elements that may differ, compared as numbers where they are numbers."""
    if not (dtypes[0].numpy and dtypes[1].numpy):
        return Found(len(x))
    with np.errstate(all="ignore"):
        wide = [_wide(array.view(d.to_numpy()), d) for array, d in zip((x, y), dtypes, strict=True)]
        apart = np.abs(wide[0] - wide[1])
        if dtypes[0] is dtypes[1] and dtypes[0].kind == "int":
            apart = _apart(x.view(dtypes[0].to_numpy()), y.view(dtypes[0].to_numpy()))
        else:
            apart[wide[0] == wide[1]] = 0  # infinities too
        nans = np.isnan(wide[0]) & np.isnan(wide[1])
        if tolerance:
            limit = tolerance.atol + tolerance.rtol * np.abs(wide[1])
            # Nothing is near to an infinity: a limit that is relative to one is no limit.
            differs = ~(((apart <= limit) & np.isfinite(apart)) | nans)
        elif dtypes[0] is dtypes[1]:
            differs = np.ones(len(x), np.bool_)  # their bits do
        else:
            differs = ~((apart == 0) | nans)
    known = apart[~np.isnan(apart)]
    return Found(int(differs.sum()), float(known.max()) if len(known) else None)


def _apart(x: Array, y: Array) -> Array:
    """How far integers are apart: as floats, large ones next to each other would be equal."""
    kind = np.uint64 if x.dtype.kind == "u" else np.int64
    a, b = x.astype(kind), y.astype(kind)
    apart = np.maximum(a, b).view(np.uint64) - np.minimum(a, b).view(np.uint64)
    return apart.astype(np.float64)


def _wide(array: Array, dtype: DType) -> Array:
    if dtype.kind == "complex":
        return array.astype(np.complex128)
    return array.astype(np.float64)
