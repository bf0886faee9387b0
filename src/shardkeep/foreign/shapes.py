# SPDX-License-Identifier: Apache-2.0
"""Shapes that a file tells of: looked at before anything is computed with them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from shardkeep.boxes import flat_range_boxes
from shardkeep.errors import FormatError
from shardkeep.foreign.found import Part, Raw

__all__ = ["checked_shape", "flat_parts"]

MAX_DIMS = 32
MAX_COUNT = 1 << 60
"""Elements; products with any item size stay within 64 bits."""

Ints = tuple[int, ...]


def checked_shape(dims: Iterable[object], what: str) -> Ints:
    """A shape that can be: not negative, 32 dimensions, fewer elements than 64 bits count."""
    shape = tuple(dims)
    ints = tuple(n for n in shape if isinstance(n, int) and not isinstance(n, bool) and n >= 0)
    if len(ints) != len(shape) or len(ints) > MAX_DIMS:
        raise FormatError(f"{what} is said to have shape {shape[:40]}, which cannot be")
    if math.prod(n for n in ints if n) > MAX_COUNT:
        raise FormatError(f"{what} is said to have shape {ints}: more elements than can be")
    return tuple(map(int, ints))


def flat_parts(
    shape: Ints, first: int, stop: int, file: str, start: int, itemsize: int
) -> list[Part]:
    """Elements `first` to `stop` of a row-major tensor, which lie together from byte `start`."""
    parts = []
    for offsets, sizes in flat_range_boxes(shape, first, stop):
        parts.append(Part(offsets, sizes, Raw(file, start)))
        start += math.prod(sizes) * itemsize
    return parts
