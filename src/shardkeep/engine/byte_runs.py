# SPDX-License-Identifier: Apache-2.0
"""Runs of bytes in files, and where each goes in one stretch of memory, as columns.

What is copied as it is stored needs no tensors and no boxes: these are all there is to know of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardkeep.arrays import Bytes, HostPlaces
from shardkeep.columns import Boxes, Ints
from shardkeep.dtypes import lookup
from shardkeep.engine.regions import Regions
from shardkeep.memory import address_of

__all__ = ["BYTE", "ByteRuns"]

BYTE = lookup("uint8")


@dataclass(frozen=True, eq=False)
class ByteRuns:
    """One row for each run, in the order of where they go; none overlaps another there."""

    file: Ints
    """Which file."""
    start: Ints
    """First byte in it."""
    nbytes: Ints
    """How many."""
    to: Ints
    """Where the first byte goes."""
    owner: Ints
    """What it is a part of, to whoever made this."""

    def __len__(self) -> int:
        """Number of runs."""
        return len(self.file)

    def part(self, low: int, high: int) -> ByteRuns:
        """What goes to the bytes [low, high), counted from `low`."""
        first = max(0, int(self.to.searchsorted(low, "right")) - 1)
        if first < len(self) and self.to[first] + self.nbytes[first] <= low:
            first += 1
        rows = slice(first, max(first, int(self.to.searchsorted(high, "left"))))
        to = self.to[rows]
        begin: Ints = np.maximum(to, low)
        end: Ints = np.minimum(to + self.nbytes[rows], high)
        return ByteRuns(
            self.file[rows],
            self.start[rows] + (begin - to),
            end - begin,
            begin - low,
            self.owner[rows],
        )

    def places(self, out: Bytes) -> HostPlaces:
        """Where the memory lies that all of them go to."""
        address = np.full(len(self), address_of(out), np.uint64)
        return HostPlaces(address, np.zeros(len(self), np.int64), [BYTE])

    def regions(self, room: int) -> Regions:
        """The same as regions, each with a sink of its own number: memory of `room` bytes."""
        count = len(self)
        zeros = np.zeros(count, np.int64)
        return Regions(
            self.file,
            self.start,
            Boxes(np.arange(count + 1), zeros, self.nbytes),
            self.nbytes,
            self.to,
            np.full(count, room, np.int64),
            np.arange(count),
            [BYTE],
            zeros,
        )
