# SPDX-License-Identifier: Apache-2.0
"""What a rank holds of a state: which tensors, in which boxes, tied to which others.

A state has many tensors and few forms of them, so each form is worked out once, and the columns of
a local plan are rows of the forms' columns. What a tensor's form follows from (its glance) is
quick to compare: an equal look of the whole state means an equal local plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from operator import is_
from typing import Any

import numpy as np
import xxhash

from shardkeep.arrays import (
    YIELDING,
    ArrayAdapter,
    ArrayForm,
    Source,
    Stepped,
    adapters_of,
    ask_each,
)
from shardkeep.collector import paused_collector
from shardkeep.columns import Boxes, Ints, ragged_rows, starts
from shardkeep.errors import PlanError, UnsupportedValueError
from shardkeep.memory import Addresses
from shardkeep.metadata import ChunkStorageMetadata
from shardkeep.planner import YIELDS, LocalColumns, Place, StalePlan, WriteItems
from shardkeep.structure import DISTINCT_KEYS, Structure
from shardkeep.tables import NO_ALIAS, ChunkTable, TensorTable
from shardkeep.traces import Trace
from shardkeep.tree import FlatState

__all__ = ["Holding", "Look", "replica_number"]

MAX_DIMS = 32


def _no_rows() -> Ints:
    return np.zeros(0, np.int64)


@dataclass(eq=False)
class Look:
    """Everything that a local plan follows from, and what was worked out of it; no array."""

    structure: Structure
    """The nesting."""
    tensor_leaf: list[int]
    """The leaves that are arrays."""
    value_leaf: list[int]
    """The leaves that are plain values."""
    glances: list[Hashable | None]
    """What the form of each tensor follows from."""
    forms: list[ArrayForm] = field(default_factory=list)
    """The distinct forms."""
    form: Ints = field(default_factory=_no_rows)
    """Which of them each tensor has."""
    alias_of: list[int] = field(default_factory=list)
    """The first tensor that each is tied to."""
    tensor: Ints = field(default_factory=_no_rows)
    """The tensor of each piece of the plan."""
    number: Ints = field(default_factory=_no_rows)
    """Which of the boxes of the tensor's form it is."""
    boxes: Boxes = field(default_factory=lambda: Boxes.of(()))
    """The box of each piece."""
    adapters: list[ArrayAdapter | None] = field(default_factory=list)
    """The adapter of each leaf."""
    unasked: list[int] = field(default_factory=list)
    """Tensors whose elements nobody may ask for, because they are empty here or tied to others."""
    trace: Trace | None = None
    """The objects, without holding them."""

    @property
    def is_comparable(self) -> bool:
        """Whether an equal look means an equal plan."""
        return self.structure.key_types <= DISTINCT_KEYS and None not in self.glances

    def same(self, other: Look) -> bool:
        """Whether nesting, names and forms are equal; ties are not looked at."""
        return (
            self.is_comparable
            and self.structure.same(other.structure)
            and self.glances == other.glances
        )


@dataclass(eq=False)
class Holding:
    """A state taken apart, as one rank holds it."""

    flat: FlatState
    """The state."""
    look: Look
    """What is known of it."""
    trusted: bool = False
    """Whether forms were taken over from a look at the same objects, to be checked one by one."""
    _several: dict[int, Sequence[Source]] = field(default_factory=dict)

    @classmethod
    def of(cls, flat: FlatState) -> Holding:
        """A first look: what can be seen of a tensor without working out its boxes."""
        tensors = [leaf for leaf, adapter in enumerate(flat.adapters) if adapter is not None]
        others = [leaf for leaf, adapter in enumerate(flat.adapters) if adapter is None]
        out = cls(flat, Look(flat.structure, tensors, others, [], adapters=flat.adapters))
        out.look.glances = out._by_adapter(lambda adapter, arrays: adapter.glances(arrays))
        return out

    @classmethod
    def recognise(cls, state: object, look: Look) -> Holding | None:
        """A state whose arrays are the very objects that the look was taken of.

        They may have been changed in place, so forms are checked again when elements are asked for
        (`sources`). What nobody will ask for, the empty and the tied, is checked here.
        """
        leaves = look.trace.follow(state) if look.trace is not None else None
        if leaves is None:
            return None
        flat = FlatState(look.structure, leaves, look.adapters, set())
        out = cls(flat, replace(look), trusted=True)
        if not out._are_as_seen(look.unasked):
            return None
        for row in look.unasked:
            first = look.alias_of[row]
            if first != NO_ALIAS and not out._are_tied(row, first):
                return None
        return out

    def _are_tied(self, row: int, other: int) -> bool:
        one, two = self._leaf(row), self._leaf(other)
        return one[0] is two[0] and one[0].tie(one[1]) == two[0].tie(two[1])

    def _leaf(self, row: int) -> tuple[ArrayAdapter, Any]:
        leaf = self.look.tensor_leaf[row]
        adapter = self.flat.adapters[leaf]
        assert adapter is not None
        return adapter, self.flat.values[leaf]

    @paused_collector()  # it would look at everything the program has, now and then
    def _are_as_seen(self, rows: list[int]) -> bool:
        """Whether arrays recognised by identity have the forms they had."""
        leaves = [self.look.tensor_leaf[row] for row in rows]
        arrays = [self.flat.values[leaf] for leaf in leaves]
        known = (self.flat.adapters[leaf] for leaf in leaves)
        if not all(map(is_, adapters_of(arrays), known)):
            return False
        seen = self._by_adapter(lambda adapter, arrays: adapter.glances(arrays), leaves)
        return seen == [self.look.glances[row] for row in rows]

    def take_trace(self, state: object) -> None:
        """Remember the objects of the state this was taken of, to recognise them later."""
        self.look.trace = Trace.of(state, self.flat)

    def looks_like(self, other: Look) -> bool:
        """Whether the local plan of another state is that of this one too; if so, take it over."""
        if not self.look.same(other):
            return False
        mine, self.look = self.look, replace(other)
        if self.find_ties() != other.alias_of:
            self.look = mine
            return False
        self.flat.structure = other.structure  # whose names are known
        return True

    def _by_adapter(
        self,
        ask: Callable[[ArrayAdapter, Sequence[Any]], Sequence[Any]],
        leaves: list[int] | None = None,
    ) -> list[Any]:
        """Ask every adapter once, about all of its tensors; answers in the order of tensors."""
        flat = self.flat
        leaves = self.look.tensor_leaf if leaves is None else leaves
        adapters: list[Any] = [flat.adapters[leaf] for leaf in leaves]
        return ask_each(adapters, [[flat.values[leaf] for leaf in leaves]], ask)

    def look_closely(self, place: Place) -> None:
        """Work out forms and ties; refuses what cannot be stored, by name."""
        names, known = self.flat.structure.names, dict[Hashable, int]()
        self.look.forms, form = [], []
        distinct: list[Hashable | None] = []
        for row, glance in enumerate(self.look.glances):
            number = None if glance is None else known.get(glance)
            if number is None:
                adapter, array = self._leaf(row)
                name = names[self.look.tensor_leaf[row]]
                made = adapter.form(array, name)
                _check_shape(made.shape, made.dtype.itemsize, name)
                _check_declared(made, place, name)
                number = len(self.look.forms)
                self.look.forms.append(made)
                distinct.append(glance)
                if glance is not None:
                    known[glance] = number
            form.append(number)
        self.look.form = np.array(form, np.int64)
        # Kept until the next save: one of each, not one for each tensor.
        self.look.glances = [distinct[number] for number in form]
        self.look.alias_of = self.find_ties()

    def find_ties(self) -> list[int]:
        """For each tensor, the first one of the same memory, strides, dtype and boxes."""
        alias_of = [NO_ALIAS] * len(self.look.tensor_leaf)
        addresses = self._by_adapter(lambda adapter, arrays: adapter.addresses(arrays))
        if len(set(addresses)) == len(addresses):
            return alias_of
        rows: dict[int, list[int]] = {}
        for row, address in enumerate(addresses):
            if address:
                rows.setdefault(address, []).append(row)
        for several in rows.values():
            if len(several) == 1:
                continue
            first: dict[Hashable, int] = {}
            for row in several:
                adapter, array = self._leaf(row)
                form = self.look.forms[self.look.form[row]]
                key = (adapter.tie(array), form.shape, form.boxes)
                other = first.setdefault(key, row)
                if other != row:
                    alias_of[row] = other
        return alias_of

    def columns(self, names: Sequence[str], rank: int) -> WriteItems:
        """The items of this rank's local plan; those of every form, taken for every tensor."""
        forms, form = self.look.forms, self.look.form
        full = [[n for n, box in enumerate(f.boxes) if 0 not in box.sizes] for f in forms]
        box_start = starts(np.array([len(kept) for kept in full], np.int64))
        number = np.array([n for kept in full for n in kept], np.int64)
        boxes = Boxes.of([f.boxes[n] for f, kept in zip(forms, full, strict=True) for n in kept])
        rows, start = ragged_rows(box_start, form)
        self.look.tensor = np.repeat(np.arange(len(form)), np.diff(start))
        self.look.number = number[rows]
        self.look.boxes = boxes.take(rows)
        asked = np.array(self.look.alias_of, np.int64) == NO_ALIAS
        asked &= np.diff(start) > 0
        self.look.unasked = np.flatnonzero(~asked).tolist()
        replicas = np.array([replica_number(f.replicas) for f in forms], np.int64)
        chunks = ChunkTable(
            self.look.tensor, self.look.boxes, np.full(len(rows), rank), np.arange(len(rows))
        )
        kinds = TensorTable.of(
            [""] * len(forms), [f.properties for f in forms], [f.shape for f in forms]
        )
        flat, shape_start = ragged_rows(kinds.shape_start, form)
        tensors = TensorTable(
            [names[leaf] for leaf in self.look.tensor_leaf],
            kinds.kinds,
            kinds.kind[form],
            shape_start,
            kinds.shapes[flat],
            np.array(self.look.alias_of, np.int64),
        )
        local = LocalColumns(
            np.array(self.look.tensor_leaf, np.int64),
            np.array(self.look.value_leaf, np.int64),
            replicas[form][self.look.tensor],
        )
        value_names = [names[leaf] for leaf in self.look.value_leaf]
        return WriteItems(tensors, chunks, value_names, range(len(value_names)), local)

    def pieces(self, numbers: Ints) -> list[tuple[Source, int, int]]:
        """The elements of pieces, with the bytes of each piece and of an element of it."""
        boxes = self.look.boxes.take(numbers)
        sizes = np.array([form.dtype.itemsize for form in self.look.forms], np.int64)
        itemsize = sizes[self.look.form[self.look.tensor[numbers]]]
        nbytes = boxes.volumes() * itemsize
        sources = self.sources(numbers, boxes)
        return list(zip(sources, nbytes.tolist(), itemsize.tolist(), strict=True))

    def check(self, numbers: Ints) -> None:
        """Raise `StalePlan` where a tensor was only recognised, and is not what it was."""
        if self.trusted and not self._are_as_seen(self.look.tensor[numbers].tolist()):
            raise StalePlan

    @paused_collector()
    def sources(self, numbers: Ints, boxes: Boxes) -> list[Source]:
        """The elements of parts of pieces, given by box; from any thread."""
        self.check(numbers)
        rows = self.look.tensor[numbers].tolist()
        held, every = self.look.boxes.take(numbers), self.are_whole(numbers, boxes)
        out = []
        for at, (row, which) in enumerate(
            zip(rows, self.look.number[numbers].tolist(), strict=True)
        ):
            source = self._sources(row)[which]
            out.append(source if every else _part(source, held[at], boxes[at]))
        return out

    def are_whole(self, numbers: Ints, boxes: Boxes) -> bool:
        """Whether parts of pieces, given by box, are all of them."""
        held = self.look.boxes.take(numbers)
        return np.array_equal(held.offsets, boxes.offsets) and np.array_equal(
            held.sizes, boxes.sizes
        )

    @paused_collector()
    def addresses(self, numbers: Ints, boxes: Boxes) -> Addresses:
        """Where parts of pieces begin that are all a rank holds of a tensor, and lie row-major in
        host memory, as they are stored; 0 for others. Valid as long as nothing is changed."""
        if not self.are_whole(numbers, boxes):
            return np.zeros(len(numbers), np.uint64)
        rows, which = np.unique(self.look.tensor[numbers], return_inverse=True)
        kinds, kind = np.unique(self.look.form[rows], return_inverse=True)
        forms = [self.look.forms[number] for number in kinds.tolist()]
        sizes = [
            math.prod(form.boxes[0].sizes) * form.dtype.itemsize if len(form.boxes) == 1 else 0
            for form in forms
        ]
        leaves = [self.look.tensor_leaf[row] for row in rows.tolist()]
        adapters: list[Any] = [self.flat.adapters[leaf] for leaf in leaves]
        columns = [
            [self.flat.values[leaf] for leaf in leaves],
            np.array(sizes, np.int64)[kind].tolist(),
        ]
        found = ask_each(
            adapters, columns, lambda adapter, *columns: adapter.host_addresses(*columns)
        )
        known: Addresses = np.array(found, np.uint64)[which]
        return known

    def stepped(self) -> Stepped:
        """The tensors that only an optimizer's step changes."""
        which = np.zeros(len(self.look.tensor_leaf), np.bool_)
        spans, begins = np.zeros((len(which), 2), np.uint64), which.copy()
        by_adapter: dict[int, list[int]] = {}
        for row, leaf in enumerate(self.look.tensor_leaf):
            by_adapter.setdefault(id(self.flat.adapters[leaf]), []).append(row)
        asked = []
        for rows in by_adapter.values():
            leaves = [self._leaf(row) for row in rows]
            found = leaves[0][0].stepped([value for _, value in leaves])
            which[rows], spans[rows], begins[rows] = found.which, found.spans, found.begins
            asked.append((rows, found.changed))

        def changed() -> list[bool]:
            now = np.zeros(len(which), np.bool_)
            for rows, ask in asked:
                now[rows] = ask()
            answers: list[bool] = now.tolist()
            return answers

        return Stepped(which.tolist(), spans, changed, begins)

    def _sources(self, row: int) -> Sequence[Source]:
        sources = self._several.get(row)
        if sources is None:
            adapter, array = self._leaf(row)
            name = self.flat.structure.names[self.look.tensor_leaf[row]]
            sources = adapter.sources(array, name)
            if len(sources) > 1:
                self._several[row] = sources
        return sources


def _part(source: Source, held: ChunkStorageMetadata, box: ChunkStorageMetadata) -> Source:
    if held == box:
        return source
    offsets = tuple(a - b for a, b in zip(box.offsets, held.offsets, strict=True))
    return source.part(offsets, box.sizes)


def _check_shape(shape: tuple[int, ...], itemsize: int, name: str) -> None:
    if len(shape) > MAX_DIMS:
        raise UnsupportedValueError(f"{name}: {len(shape)} dimensions; at most {MAX_DIMS}")
    if math.prod(max(n, 1) for n in shape) * itemsize >= 2**63:
        raise UnsupportedValueError(f"{name}: shape {shape} is more than 2**63 bytes")


def _check_declared(form: ArrayForm, place: Place, name: str) -> None:
    """A rank that declares replicas by number must be one of them."""
    ranks = form.replicas
    if not (ranks and form.boxes and all(type(rank) is int for rank in ranks)):
        return
    if place.rank not in ranks or not all(0 <= r < place.world_size for r in ranks):  # type: ignore[operator]
        raise PlanError(
            f"{name}: rank {place.rank} of {place.world_size} declares its pieces to be held by "
            f"ranks {ranks}; it must be one of them"
        )


def replica_number(replicas: tuple[Any, ...]) -> int:
    """A number for a declared set of holders; 0 where none is declared."""
    if not replicas:
        return 0
    if replicas == YIELDING:
        return YIELDS
    return xxhash.xxh3_64_intdigest(repr(replicas).encode()) >> 2 | 1
