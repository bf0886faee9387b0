# SPDX-License-Identifier: Apache-2.0
"""The bytes of a laid-out file, brought into memory stretch by stretch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from shardkeep.arrays import Bytes
from shardkeep.boxes import flat_range_boxes
from shardkeep.dtypes import lookup
from shardkeep.engine.byte_runs import ByteRuns
from shardkeep.engine.regions import Flags
from shardkeep.foreign.layout import Elements, Ints, Late, Literal, OutTensor, Segment

__all__ = ["Filling", "Straight", "Wish"]

_END = 2**63 - 1


class Wish(NamedTuple):
    """A box of a tensor, and the memory it goes to."""

    tensor: OutTensor
    """Which."""
    offsets: Ints
    """Where the box begins in it."""
    sizes: Ints
    """Its extent."""
    place: npt.NDArray[Any]
    """As bits of the tensor's type; not always aligned."""


class Straight(Protocol):
    """Brings bytes that are stored as they are wanted, without a look at tensors."""

    def runs(self, segments: Sequence[Elements]) -> tuple[ByteRuns, Flags]:
        """Where the bytes of segments are stored, and of which that is known for all bytes.

        The owner of a run is the number of its segment.
        """

    def read_runs(self, runs: ByteRuns, name: Callable[[int], str], out: Bytes) -> None:
        """Bring them; `name` tells errors what an owner is."""


class Filling:
    """Any stretch of a file, wherever it is cut. Any thread may."""

    def __init__(
        self,
        segments: Sequence[Segment],
        read: Callable[[Sequence[Wish]], None],
        straight: Straight | None = None,
    ) -> None:
        """`read` brings all that is wished for, `straight` what need not be."""
        self._segments = segments
        self._read = read
        self._straight = straight
        self._starts = np.array([segment.start for segment in segments], np.int64)
        ends = self._starts + np.array([segment.nbytes for segment in segments], np.int64)
        apart = np.ones(len(segments), np.bool_)
        if straight is not None:
            rows = np.flatnonzero([isinstance(segment, Elements) for segment in segments])
            self._elements: list[Elements] = [segments[row] for row in rows.tolist()]  # type: ignore[misc]
            self._runs, plain = straight.runs(self._elements)
            apart[rows[plain]] = False
        self._apart = np.flatnonzero(apart)
        """Those that are looked at one by one."""
        begins, stops = np.append(0, ends), np.append(self._starts, _END)
        self._holes = np.stack([begins, stops], 1)[begins < stops]
        """What no segment covers."""

    def rows(self, low: int, high: int) -> range:
        """The segments that have a byte in [low, high)."""
        first = max(0, int(np.searchsorted(self._starts, low, "right")) - 1)
        last = int(np.searchsorted(self._starts, high, "left"))
        segments = self._segments
        if first < last and segments[first].start + segments[first].nbytes <= low:
            first += 1
        return range(first, last)

    def fill(self, low: int, high: int, out: Bytes) -> None:
        """Bring the bytes [low, high); what is only known later, and what is nothing, is zero."""
        wishes: list[Wish] = []
        edges: list[tuple[Bytes, Bytes]] = []
        self._clear(low, high, out)
        rows = self.rows(low, high)
        apart = slice(*np.searchsorted(self._apart, (rows.start, rows.stop)).tolist())
        for row in self._apart[apart].tolist():
            segment = self._segments[row]
            begin, end = max(low, segment.start), min(high, segment.start + segment.nbytes)
            place = out[begin - low : end - low]
            if isinstance(segment, Literal):
                skip = begin - segment.start
                place[:] = np.frombuffer(segment.data, np.uint8)[skip : skip + len(place)]
            elif isinstance(segment, Late):
                place[:] = 0
            else:
                self._wish(segment, begin - segment.start, place, wishes, edges)
        if self._straight is not None:
            runs = self._runs.part(low, high)
            if len(runs):
                self._straight.read_runs(runs, self._name, out)
        if wishes:
            self._read(wishes)
        for place, whole in edges:
            place[:] = whole

    def _clear(self, low: int, high: int, out: Bytes) -> None:
        first, last = (
            np.searchsorted(self._holes[:, 1], low, "right"),
            np.searchsorted(self._holes[:, 0], high, "left"),
        )
        for begin, end in self._holes[first:last].tolist():
            out[max(begin, low) - low : min(end, high) - low] = 0

    def _name(self, number: int) -> str:
        return self._elements[number].tensor.name

    def _wish(
        self,
        segment: Elements,
        skip: int,
        place: Bytes,
        wishes: list[Wish],
        edges: list[tuple[Bytes, Bytes]],
    ) -> None:
        """Ask for the bytes of a segment from `skip` on; cut elements come by themselves."""
        dtype = lookup(segment.tensor.dtype)
        item, stop = dtype.itemsize, skip + len(place)
        first, last = -(-skip // item), stop // item
        for cut in {skip // item, last}:
            low, high = max(skip, cut * item), min(stop, (cut + 1) * item)
            if low < high and not first <= cut < last:
                whole = np.empty(item, np.uint8)
                self._ask(segment, cut, cut + 1, whole, wishes)
                edges.append(
                    (place[low - skip : high - skip], whole[low - cut * item :][: high - low])
                )
        if first < last:
            inner = place[first * item - skip : last * item - skip]
            self._ask(segment, first, last, inner, wishes)

    def _ask(
        self, segment: Elements, first: int, last: int, place: Bytes, wishes: list[Wish]
    ) -> None:
        """Ask for elements [first, last) of a segment, row-major."""
        bits = place.view(lookup(segment.tensor.dtype).bits())
        at = 0
        for inner, sizes in flat_range_boxes(segment.sizes, first, last):
            offsets = tuple(a + b for a, b in zip(segment.offsets, inner, strict=True))
            count = int(np.prod(sizes, dtype=np.int64))
            wishes.append(
                Wish(segment.tensor, offsets, sizes, bits[at : at + count].reshape(sizes))
            )
            at += count
