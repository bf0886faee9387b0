# SPDX-License-Identifier: Apache-2.0
"""Chunks in memory that somebody else is still filling, read as they arrive."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shardkeep.arrays import Bytes, HostSource, Source
from shardkeep.columns import Ints
from shardkeep.planner import NO_IMAGE, Image

__all__ = ["Arriving", "ArrivingSource", "Incoming", "arriving_sources", "image_of"]


class Arriving(Protocol):
    """Memory that is being filled."""

    unit: int
    """Bytes that arrive together."""

    @property
    def memory(self) -> Bytes:
        """All of it."""

    def wait(self, low: int, high: int) -> None:
        """Until the bytes [low, high) are there."""

    def is_settled(self) -> bool:
        """Whether no thread copies into it any more; a device may."""


class Incoming:
    """Memory that is filled from its beginning, by somebody who says how far."""

    def __init__(self, memory: Bytes, unit: int) -> None:
        """Nothing is there yet."""
        self.memory = memory
        self.unit = unit
        self._there, self._settled = 0, False
        self._changed = threading.Condition()

    def reach(self, below: int, settled: bool) -> None:
        """All bytes below this one are there; and whether nobody's threads copy any more."""
        with self._changed:
            self._there, self._settled = below, settled
            self._changed.notify_all()

    def wait(self, low: int, high: int) -> None:
        """Until these are."""
        with self._changed:
            self._changed.wait_for(lambda: self._there >= high)

    def is_settled(self) -> bool:
        """As was said last."""
        return self._settled


@dataclass(frozen=True, eq=False)
class ArrivingSource:
    """A large chunk, of which a part may be there before the rest."""

    arriving: Arriving
    start: int
    array: npt.NDArray[np.generic]

    def read_into(self, start: int, stop: int, out: Bytes) -> None:
        """Wait for these elements only."""
        item = self.array.itemsize
        self.arriving.wait(self.start + start * item, self.start + stop * item)
        HostSource(self.array).read_into(start, stop, out)

    def part(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Source:
        """Wait for all of it."""
        self.arriving.wait(self.start, self.start + self.array.nbytes)
        return HostSource(self.array).part(offsets, sizes)


def image_of(arriving: Arriving, start: Ints, nbytes: Ints, place: Ints) -> Image:
    """For chunks that begin at `start` in a file and at `place` in such memory: finds bytes of the
    file there, once they have arrived, if the chunks lie the same in both."""
    if not len(start) or not np.array_equal(place - place[0], start - start[0]):
        return NO_IMAGE
    begin, end, shift = int(start[0]), int(start[-1] + nbytes[-1]), int(place[0] - start[0])

    def find(low: int, high: int) -> Bytes | None:
        if low < begin or high > end:
            return None
        arriving.wait(low + shift, high + shift)
        return arriving.memory[low + shift : high + shift]

    return Image(find, arriving.is_settled)


def arriving_sources(
    arriving: Arriving, start: Ints, nbytes: Ints, dtypes: Iterable[np.dtype[np.generic]]
) -> list[HostSource | ArrivingSource]:
    """Chunks that lie there, as flat arrays; waits for small ones."""
    small = nbytes <= arriving.unit
    if small.any():
        arriving.wait(int(start[small].min()), int((start + nbytes)[small].max()))
    memory = arriving.memory
    columns = zip(start.tolist(), nbytes.tolist(), small.tolist(), dtypes, strict=True)
    out: list[HostSource | ArrivingSource] = []
    for at, length, is_small, dtype in columns:
        array = memory[at : at + length].view(dtype)
        out.append(HostSource(array) if is_small else ArrivingSource(arriving, at, array))
    return out
