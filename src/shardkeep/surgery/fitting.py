# SPDX-License-Identifier: Apache-2.0
"""Whether elements fit the type that surgery casts them to.

Rounding is what a cast is for. An integer out of range, a number that would be infinite or NaN, an
infinity that would be NaN, and an infinity or NaN that would be a number are something else than
what was stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from shardkeep.arrays import Sink
from shardkeep.dtypes import DType, lookup
from shardkeep.errors import UnsupportedValueError

__all__ = ["Fitting", "holds_all", "unfit"]

Array = npt.NDArray[np.generic]

PART = 1 << 16
"""Elements that are looked at together."""


@dataclass(frozen=True, slots=True)
class Fitting:
    """A sink that takes only what its tensor's type holds."""

    sink: Sink
    """Where that goes."""
    name: str
    """Of the tensor."""
    dtype: DType
    """What it is cast to."""

    def put(self, offsets: tuple[int, ...], block: Array, dtype: DType) -> None:
        """Hand on, or say what does not fit."""
        odd = unfit(block, dtype, self.dtype)
        if odd:
            raise UnsupportedValueError(
                f"{self.name} holds {odd}, which a cast from {dtype.name} to {self.dtype.name} "
                "would lose. Cast to a type that holds it, or say which tensors: GLOB:OLD=NEW."
            )
        self.sink.put(offsets, block, dtype)


def unfit(block: Array, source: DType, target: DType) -> str:
    """An element, given as bits, that a cast within a kind would lose; empty if there is none."""
    if holds_all(target, source):
        return ""
    typed = [block.view(source.to_numpy())]
    if source.kind == "complex":
        typed = [typed[0].real, typed[0].imag]
        source, target = _real(source), _real(target)
    with np.errstate(all="ignore"):
        return next((odd for part in typed for odd in _unfit(part, source, target)), "")


def _unfit(typed: Array, source: DType, target: DType) -> Iterator[str]:
    """Casts keep the order of numbers: the least and the greatest tell of all."""
    for part in _parts(typed, source):
        ends = [part.min(), part.max()]
        if source.kind == "float" and not np.isfinite(ends).all():
            some = [part[test(part)] for test in (np.isnan, np.isinf, np.isfinite)]
            ends = [end for each in some if each.size for end in (each.min(), each.max())]
        for end in ends:
            if not _holds(target, end.item()):
                yield f"{end:g}" if source.kind == "float" else f"{end}"


def _parts(typed: Array, source: DType) -> Iterator[npt.NDArray[Any]]:
    """Elements some at a time; those of small types as wider ones, which compute faster."""
    wide = typed.dtype
    if source.itemsize < 4:
        wide = np.dtype(np.int64 if source.kind == "int" else np.float32)
    parts: Any = np.nditer(
        [typed],
        ["external_loop", "buffered", "zerosize_ok"],
        [["readonly"]],
        [wide],
        casting="unsafe",
        buffersize=PART,
    )
    for part in parts:
        if part.size:
            yield part


def _holds(target: DType, value: float) -> bool:
    low, high = _range(target)
    if low <= value <= high:
        return True
    if target.kind == "int" or not _has_nan(target):
        return False
    return _sort(_rounded(target, value)) == _sort(value)


def _sort(value: float) -> tuple[bool, bool, float]:
    """Whether it is NaN or infinite, and its sign; that of a NaN means nothing."""
    nan = math.isnan(value)
    return nan, math.isinf(value), 0.0 if nan else math.copysign(1, value)


@cache
def holds_all(target: DType, source: DType) -> bool:
    """Whether a cast from another type of its kind loses nothing, whatever the elements."""
    if source.kind == "complex":
        return holds_all(_real(target), _real(source))
    odd = [-math.inf, math.inf, math.nan] if source.kind == "float" else []
    values = (*_range(source), *(value for value in odd if _holds(source, value)))
    return all(_holds(target, value) for value in values)


def _real(dtype: DType) -> DType:
    return lookup({"complex64": "float32", "complex128": "float64"}[dtype.name])


@cache
def _range(dtype: DType) -> tuple[float, float]:
    """The least and the greatest of its numbers."""
    if dtype.kind == "int":
        ints = ml_dtypes.iinfo(dtype.to_numpy())  # type: ignore[no-untyped-call]
        return int(ints.min), int(ints.max)
    floats = ml_dtypes.finfo(dtype.to_numpy())  # type: ignore[no-untyped-call]
    return float(floats.min), float(floats.max)


@cache
def _has_nan(dtype: DType) -> bool:
    """The smallest types have neither that nor infinities, and give their greatest instead."""
    return math.isnan(_rounded(dtype, math.nan))


def _rounded(dtype: DType, value: float) -> float:
    with np.errstate(all="ignore"):
        return float(np.float64(value).astype(dtype.to_numpy()))
