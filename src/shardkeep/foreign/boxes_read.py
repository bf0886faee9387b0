# SPDX-License-Identifier: Apache-2.0
"""Reading a box of an array that lies row-major in a file: whole rows where that is cheaper."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkeep.arrays import region
from shardkeep.errors import CorruptionError
from shardkeep.stores.local import storage_errors
from shardkeep.stores.reading import ReadFile

__all__ = ["read_box"]

Array = npt.NDArray[Any]

SKIPPED = 64 << 10
"""Bytes that are rather read than skipped: a disk gives them while it would be asked again."""
AT_ONCE = 4 << 20
"""Bytes that are read together."""


def read_box(
    file: ReadFile,
    start: int,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
) -> Array:
    """The box at `offsets` of an array of `shape` whose first element is at byte `start`."""
    with storage_errors(f"reading {file.path}"):
        return _read(file, start, dtype, shape, offsets, sizes)


def _read(
    file: ReadFile,
    start: int,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
) -> Array:
    out = np.empty(sizes, dtype)
    if not shape:
        _fill(file, out, start)
        return out
    # From `split` on everything is wanted, or nearly: whole rows are read, a few at a time.
    split = len(shape) - 1
    while split and _is_near(dtype.itemsize, shape, sizes, split - 1):
        split -= 1
    row = shape[split + 1 :]
    nbytes = math.prod(row) * dtype.itemsize
    step = max(1, AT_ONCE // max(1, nbytes))
    buffer = np.empty((min(step, sizes[split]), *row), dtype)
    inner = region(offsets[split + 1 :], sizes[split + 1 :])
    for index in np.ndindex(sizes[:split]):
        place = tuple(at + n for at, n in zip(offsets[:split], index, strict=True))
        first = _flat(shape[:split], place) * shape[split] + offsets[split]
        for low in range(0, sizes[split], step):
            part = buffer[: sizes[split] - low]
            _fill(file, part, start + (first + low) * nbytes)
            out[index][low : low + step] = part[(slice(None), *inner)]
    return out


def _is_near(itemsize: int, shape: tuple[int, ...], sizes: tuple[int, ...], dim: int) -> bool:
    """Whether what a box leaves out in the dimensions after `dim` is little enough to be read."""
    every, wanted = math.prod(shape[dim + 1 :]), math.prod(sizes[dim + 1 :])
    return (every - wanted) * itemsize <= SKIPPED or every <= 2 * wanted


def _flat(shape: tuple[int, ...], offsets: tuple[int, ...]) -> int:
    at = 0
    for extent, offset in zip(shape, offsets, strict=True):
        at = at * extent + offset
    return at


def _fill(file: ReadFile, data: Array, at: int) -> None:
    flat = data.reshape(-1).view(np.uint8)
    view = memoryview(flat)  # type: ignore[arg-type]
    if file.read_into(view, at) != len(view):
        raise CorruptionError(f"{file.path} became shorter after it was opened")
