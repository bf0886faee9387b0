# SPDX-License-Identifier: Apache-2.0
"""What a rank wants filled: which arrays, in which boxes, lying where.

A target has many arrays, and few that differ in more than where they lie. So one of each form is
asked what there is to fill and whether that can be done, and the others are rows of its columns;
but for where they lie, which is looked at for each. A sink is made when somebody writes to it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from shardkeep.arrays import (
    ArrayAdapter,
    FlatSink,
    HostPlaces,
    LocalTarget,
    Sink,
    ask_each,
)
from shardkeep.columns import Boxes, Ints, ragged_rows, starts
from shardkeep.dtypes import DType, lookup
from shardkeep.memory import Addresses, Memory
from shardkeep.metadata import ChunkStorageMetadata
from shardkeep.tables import TensorTable

__all__ = ["Filling", "Targets"]


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """Arrays that somebody wants filled."""

    names: Sequence[str]
    """The name of each."""
    values: Sequence[Any]
    """The arrays themselves."""
    adapters: Sequence[ArrayAdapter]
    """The adapter of each."""
    form: Sequence[int]
    """Which of the forms each has."""
    signatures: Sequence[tuple[tuple[int, ...], DType]]
    """Of each form: shape of the whole tensor and element type."""
    shared: frozenset[int]
    """Forms of arrays that differ only in where they lie; any other form is that of one array."""

    @classmethod
    def of(
        cls, names: Sequence[str], values: Sequence[Any], adapters: Sequence[ArrayAdapter]
    ) -> Targets:
        """Look at the arrays; refuses, by name, what cannot be a target. Allocates nothing."""
        glances = ask_each(adapters, [values], lambda one, arrays: one.target_glances(arrays))
        # One whose glance says nothing is like no other; and the first of each form stands for it.
        seen = glances
        if None in glances:
            seen = [object() if glance is None else glance for glance in glances]
        known: dict[Hashable, int] = {}
        form = [known.setdefault(glance, len(known)) for glance in seen]
        first = dict(zip(reversed(form), range(len(form) - 1, -1, -1), strict=True))
        signatures = [
            adapters[first[number]].signature(values[first[number]], names[first[number]])
            for number in range(len(known))
        ]
        shared = frozenset(form[row] for row in first.values() if glances[row] is not None)
        return cls(names, values, adapters, form, signatures, shared)

    def signature(self, row: int) -> tuple[tuple[int, ...], DType]:
        """Shape of the whole tensor and element type."""
        return self.signatures[self.form[row]]

    def misfits(
        self, stored: TensorTable, rows: Sequence[int], can_cast: Callable[[DType, DType], bool]
    ) -> list[int]:
        """Which arrays differ in shape or element type from these stored tensors, one for each."""
        form, row = np.array(self.form, np.int64), np.array(rows, np.int64)
        shapes = [shape for shape, _ in self.signatures]
        start = starts(np.fromiter(map(len, shapes), np.int64, len(shapes)))
        flat = np.array([n for shape in shapes for n in shape], np.int64)
        numbers: dict[DType, int] = {}
        dtype = [numbers.setdefault(one, len(numbers)) for _, one in self.signatures]
        kinds = [lookup(kind.dtype) for kind in stored.kinds]
        cast = np.array([[can_cast(kind, one) for kind in kinds] for one in numbers], np.bool_)
        cast = cast.reshape(len(numbers), len(kinds))
        fits = cast[np.array(dtype, np.int64)[form], stored.kind[row]]
        fits &= np.diff(start)[form] == np.diff(stored.shape_start)[row]
        rest = np.flatnonzero(fits)  # whose shapes are equally long
        mine, begin = ragged_rows(start, form[rest])
        theirs, _ = ragged_rows(stored.shape_start, row[rest])
        fits[np.repeat(rest, np.diff(begin))[flat[mine] != stored.shapes[theirs]]] = False
        found: list[int] = np.flatnonzero(~fits).tolist()
        return found

    def take(self, rows: Sequence[int]) -> Targets:
        """The given ones, in order."""
        if len(rows) == len(self.form):
            return self
        return replace(
            self,
            names=[self.names[row] for row in rows],
            values=[self.values[row] for row in rows],
            adapters=[self.adapters[row] for row in rows],
            form=[self.form[row] for row in rows],
        )

    def filling(self, device: object) -> Filling:
        """What there is to fill; refuses, by name, what cannot be filled.

        Abstract arrays are allocated on `device`.
        """
        first: dict[int, int] = {}
        targets: list[LocalTarget] = []
        number: list[int] = []
        others: list[int] = []
        for row, known in enumerate(map(first.get, self.form)):
            if known is not None:
                others.append(row)
                number.append(known)
                continue
            value = self.values[row]
            target = self.adapters[row].target(value, self.names[row], device)
            if self.form[row] in self.shared and target.result is value:
                first[self.form[row]] = len(targets)  # an allocated one is nobody else's
            number.append(len(targets))
            targets.append(target)
        return Filling(self, targets, np.array(number, np.int64), np.array(others, np.int64))


class Filling:
    """The pieces of arrays that are to be filled, one row each; none of them is empty."""

    def __init__(
        self, arrays: Targets, targets: Sequence[LocalTarget], target: Ints, others: Ints
    ) -> None:
        """`target` is that of each array; of `others`, one that differs in where it lies."""
        self._arrays = arrays
        self._targets = targets
        self._target = target
        self._is_own = np.ones(len(target), np.bool_)
        self._is_own[others] = False
        shift = self._shifts(others)
        kept = [[p for p in one.pieces if 0 not in p.box.sizes] for one in targets]
        self._pieces = [piece for pieces in kept for piece in pieces]
        self._piece, start = ragged_rows(starts(np.array([*map(len, kept)], np.int64)), target)
        self._array = np.repeat(np.arange(len(target)), np.diff(start))
        one_each = len(start) == len(self._array) + 1 and bool((np.diff(start) == 1).all())
        self.names = (
            arrays.names if one_each else [arrays.names[row] for row in self._array.tolist()]
        )
        """Of each piece, that of its tensor."""
        self.boxes = Boxes.of([piece.box for piece in self._pieces]).take(self._piece)
        """Of each piece, where it sits in the whole tensor."""
        self._shift = shift[self._array]
        self._sinks: list[Sink | None] = [None] * len(self._piece)

    def _shifts(self, others: Ints) -> Addresses:
        """How far from the target it goes by each array lies."""
        shift = np.zeros(len(self._target), np.uint64)
        if len(others) == 0:
            return shift
        memories = [target.memory for target in self._targets]
        begin = np.array([m.address if m else 0 for m in memories], np.uint64)
        reach = np.array([m.bounds()[1] - m.address if m else 0 for m in memories], np.int64)
        rows, arrays = others.tolist(), self._arrays
        found = ask_each(
            [arrays.adapters[row] for row in rows],
            [
                [arrays.values[row] for row in rows],
                [arrays.names[row] for row in rows],
                reach[self._target[others]].tolist(),
            ],
            lambda adapter, *columns: adapter.target_addresses(*columns),
        )
        shift[others] = np.array(found, np.uint64) - begin[self._target[others]]
        return shift

    def allocated(self) -> Iterator[tuple[int, object]]:
        """Arrays that are filled in place of others, and which those are."""
        for row in np.flatnonzero(self._is_own).tolist():
            made = self._targets[self._target[row]].result
            if made is not self._arrays.values[row]:
                yield row, made

    def sink(self, number: int) -> Sink:
        """Where the elements of a piece go; from any thread."""
        found = self._sinks[number]
        if found is None:
            found = self._sinks[number] = self._make_sink(number)
        return found

    def _make_sink(self, number: int) -> Sink:
        row, piece = int(self._array[number]), self._pieces[int(self._piece[number])]
        if self._is_own[row]:
            return piece.sink
        adapter, target = self._arrays.adapters[row], self._targets[self._target[row]]
        return piece.sink_in(adapter.sink(self._arrays.values[row], target.dtype))

    def places(self) -> HostPlaces:
        """Where pieces lie, of those that are whole arrays in host memory."""
        flat = [
            p.memory.address if type(p.sink) is FlatSink and p.memory else 0 for p in self._pieces
        ]
        address = np.array(flat, np.uint64)[self._piece]
        address[address != 0] += self._shift[address != 0]
        return HostPlaces(
            address, self._target[self._array], [target.dtype for target in self._targets]
        )

    def near_others(self) -> Iterator[tuple[str, Memory, ChunkStorageMetadata]]:
        """Pieces whose addresses lie between those of another one; mostly there are none."""
        for number in self.suspects():
            memory = self._memory(number)
            assert memory is not None
            yield self.names[number], memory, self.boxes[number]

    def suspects(self) -> list[int]:
        """The numbers of those pieces."""
        memories = [piece.memory for piece in self._pieces]
        devices = {memory.device: None for memory in memories if memory is not None}
        low, high = self._bounds
        suspect = np.zeros(len(self._piece), np.bool_)
        for device in devices:
            here = np.array([m is not None and m.device == device for m in memories], np.bool_)
            rows = np.flatnonzero(here[self._piece])
            rows = rows[np.argsort(low[rows], kind="stable")]
            reach = np.maximum.accumulate(high[rows])
            suspect[rows[1:][reach[:-1] > low[rows[1:]]]] = True
            # What others reach into, and what reaches into others, wherever in the order those lie.
            follows = np.searchsorted(low[rows], high[rows])
            suspect[rows[follows > np.arange(1, len(rows) + 1)]] = True
        found: list[int] = np.flatnonzero(suspect).tolist()
        return found

    def overlaps(self, memory: Memory) -> bool:
        """Whether any piece has a byte of this memory."""
        low, high = self._bounds
        begin, end = memory.bounds()
        near = np.flatnonzero((low < np.uint64(end)) & (high > np.uint64(begin))).tolist()
        return any(one.overlaps(memory) for one in map(self._memory, near) if one is not None)

    @cached_property
    def _bounds(self) -> tuple[Addresses, Addresses]:
        """Lowest address and end of each piece; 0 where nothing is known."""
        memories = [piece.memory for piece in self._pieces]
        bounds = np.array([m.bounds() if m else (0, 0) for m in memories], np.uint64).reshape(-1, 2)
        low, high = bounds[self._piece].T + self._shift
        return low, high

    def _memory(self, number: int) -> Memory | None:
        memory: Memory | None = self._pieces[self._piece[number]].memory
        if memory is None:
            return None
        return replace(memory, address=(memory.address + int(self._shift[number])) % 2**64)
