# SPDX-License-Identifier: Apache-2.0
"""Local plans of all ranks -> one plan for all, and the tables of the whole checkpoint.

Names are joined, boxes are deduplicated, replicas dealt out, and every tensor is shown to be
covered exactly once: all as operations over whole columns.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkeep.boxes import Gap, Outside, linear_starts, tiled, tiling_fault
from shardkeep.columns import Boxes, Column, Ints, ragged_rows
from shardkeep.errors import PlanError
from shardkeep.hints import ranks_hint
from shardkeep.planner import YIELDS, SavePlan, WriteItems
from shardkeep.replicas import assign_writers, split_replicas
from shardkeep.sharing import Shared
from shardkeep.structure import TENSOR, VALUE, Structure, merge
from shardkeep.tables import NO_ALIAS, ChunkTable, TensorTable, ValueTable
from shardkeep.wording import SHOWN, faults_text

__all__ = ["GlobalPlan", "check_tilings", "group_equal", "join_plans", "sort_keys"]


@dataclass(frozen=True, eq=False)
class GlobalPlan:
    """What all ranks write together."""

    structure: Structure
    """The union of all nestings."""
    tensors: TensorTable
    """Every tensor, by name."""
    chunks: ChunkTable
    """Every stored chunk, by tensor, then by offset."""
    values: ValueTable
    """Every stored value, by name."""
    value_source: Ints
    """For each value, its number on the rank that stores it."""
    renamed: list[dict[int, str]]
    """For each rank, the leaves whose name the union changed."""
    shared: Shared
    """What several ranks hold without having declared it, to be compared."""


def join_plans(plans: Sequence[SavePlan], *, compare_tensors: bool = True) -> GlobalPlan:
    """Join the local plans of all ranks, in rank order."""
    items = [WriteItems.of(plan.items) for plan in plans]
    names = _Names.join(plans, items)
    tensors = _join_tensors(items, names)
    chunks, shared_chunks = _join_chunks(items, names, tensors)
    values, value_source, shared_values = _join_values(items, names)
    if not compare_tensors:
        shared_chunks = shared_chunks.none()
    return GlobalPlan(
        names.structure,
        tensors,
        chunks,
        values,
        value_source,
        [names.renamed[u] for u in names.of],
        _join_shared(shared_chunks, shared_values),
    )


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows of items that several ranks hold."""

    rank: Ints
    item: Ints
    source: Ints
    describe: Callable[[int], str]
    in_full: npt.NDArray[np.bool_]

    def none(self) -> _Rows:
        none = self.rank[:0], self.item[:0], self.source[:0]
        return _Rows(*none, self.describe, self.in_full[:0])


def _join_shared(chunks: _Rows, values: _Rows) -> Shared:
    first = int(chunks.item.max(initial=-1)) + 1

    def describe(item: int) -> str:
        return chunks.describe(item) if item < first else values.describe(item - first)

    return Shared.of(
        np.concatenate([chunks.rank, values.rank]),
        np.concatenate([chunks.item, values.item + first]),
        np.concatenate([chunks.source, values.source]),
        first,
        describe,
        np.concatenate([chunks.in_full, values.in_full]),
    )


# --- names ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Names:
    """The union of all names; ranks with equal nestings share one row of everything here."""

    structure: Structure
    of: list[int]
    """Which of the distinct nestings each rank has."""
    leaf: list[Ints]
    """For each distinct nesting, the number of its leaves in the union."""
    renamed: list[dict[int, str]]
    tensor_names: list[str]
    value_names: list[str]
    row: Ints
    """Row of each leaf of the union among the tensors or the values."""

    @classmethod
    def join(cls, plans: Sequence[SavePlan], items: Sequence[WriteItems]) -> _Names:
        distinct: dict[int, int] = {}
        structures: list[Structure] = []
        of = []
        for plan, part in zip(plans, items, strict=True):
            structure = plan.planner_data
            if structure is None or part.local is None:
                # A planner without nesting: its names are the keys of one dict.
                structure = _flat_structure(part)
            if id(structure) not in distinct:
                distinct[id(structure)] = len(structures)
                structures.append(structure)
            of.append(distinct[id(structure)])
        union, maps = merge(structures, [of.index(u) for u in range(len(structures))])
        names = union.names
        kinds = union.kinds
        by_name = sorted(range(len(names)), key=names.__getitem__)  # as their UTF-8 is sorted
        row = np.zeros(len(names), np.int64)
        sorted_names: dict[int, list[str]] = {}
        for kind in (TENSOR, VALUE):
            leaves = [leaf for leaf in by_name if kinds[leaf] == kind]
            row[leaves] = np.arange(len(leaves))
            sorted_names[kind] = [names[leaf] for leaf in leaves]
        renamed: list[dict[int, str]] = [
            {}
            if structure is union
            else {
                here: names[there]
                for here, (old, there) in enumerate(zip(structure.names, numbers, strict=True))
                if names[there] != old
            }
            for structure, numbers in zip(structures, maps, strict=True)
        ]
        leaf = [np.array(numbers, np.int64) for numbers in maps]
        return cls(union, of, leaf, renamed, sorted_names[TENSOR], sorted_names[VALUE], row)

    def tensor_rows(self, rank: int, items: WriteItems) -> Ints:
        """Row in the union of each of a rank's tensors."""
        leaf = np.arange(len(items.tensors)) if items.local is None else items.local.tensor_leaf
        return self.row[self.leaf[self.of[rank]][leaf]]

    def value_rows(self, rank: int, items: WriteItems) -> Ints:
        """Row in the union of each of a rank's values."""
        if items.local is None:
            leaf = len(items.tensors) + np.arange(len(items.value_names))
        else:
            leaf = items.local.value_leaf
        return self.row[self.leaf[self.of[rank]][leaf]]


def _flat_structure(items: WriteItems) -> Structure:
    keys = [*items.tensors.names, *items.value_names]
    leaves = [TENSOR] * len(items.tensors) + [VALUE] * len(items.value_names)
    return Structure(["dict", keys, leaves, None])


# --- tensors --------------------------------------------------------------------------------------


def _join_tensors(items: Sequence[WriteItems], names: _Names) -> TensorTable:
    if len({(id(part.tensors), names.of[rank]) for rank, part in enumerate(items)}) == 1:
        return _reorder_tensors(items[0], names)
    count = len(names.tensor_names)
    first_rank = np.full(count, -1)
    properties: list[Any] = [None] * count
    shapes: list[tuple[int, ...]] = [()] * count
    done: dict[tuple[int, int], int] = {}
    faults = []
    alias_low = np.full(count, np.iinfo(np.int64).max)
    alias_high = np.full(count, np.iinfo(np.int64).min)
    for rank, part in enumerate(items):
        key = (id(part.tensors), names.of[rank])
        if key in done:
            continue
        done[key] = rank
        rows = names.tensor_rows(rank, part)
        for here, row in enumerate(rows.tolist()):
            kind, shape = part.tensors.properties(here), part.tensors.shape(here)
            if first_rank[row] < 0:
                first_rank[row], properties[row], shapes[row] = rank, kind, shape
            elif shapes[row] != shape or properties[row].dtype != kind.dtype:
                faults.append(
                    f"{names.tensor_names[row]}: shape {shapes[row]} {properties[row].dtype} on "
                    f"rank {first_rank[row]}, shape {shape} {kind.dtype} on rank {rank}"
                )
        alias = part.tensors.alias_of
        target = np.where(
            alias == NO_ALIAS, NO_ALIAS, rows[np.maximum(alias, 0)] if len(rows) else 0
        )
        np.minimum.at(alias_low, rows, target)
        np.maximum.at(alias_high, rows, target)
    if faults:
        raise PlanError(
            faults_text(
                "one name is different tensors on different ranks",
                faults,
                ranks_hint(faults, "Give them different names, or wrap them in PerRank."),
            )
        )
    # A tie counts only where every holder has it.
    alias_of = np.where((alias_low == alias_high) & (alias_low >= 0), alias_low, NO_ALIAS)
    return TensorTable.of(names.tensor_names, properties, shapes, alias_of.tolist())


def _reorder_tensors(items: WriteItems, names: _Names) -> TensorTable:
    """Where all ranks list the same tensors, as they do when all of them are sharded."""
    rows, tensors = names.tensor_rows(0, items), items.tensors
    order = np.argsort(rows, kind="stable")
    flat, shape_start = ragged_rows(tensors.shape_start, order)
    # Kinds are numbered as they come, so that the same tensors make the same index.
    kind = tensors.kind[order]
    used, first = np.unique(kind, return_index=True)
    used = used[np.argsort(first)]
    number = np.zeros(len(tensors.kinds), np.uint16)
    number[used] = np.arange(len(used))
    alias = tensors.alias_of[order]
    target = rows[np.maximum(alias, 0)] if len(rows) else alias
    return TensorTable(
        names.tensor_names,
        tuple(tensors.kinds[at] for at in used.tolist()),
        number[kind],
        shape_start,
        tensors.shapes[flat],
        np.where(alias == NO_ALIAS, NO_ALIAS, target),
    )


# --- chunks ---------------------------------------------------------------------------------------


def _join_chunks(
    items: Sequence[WriteItems], names: _Names, tensors: TensorTable
) -> tuple[ChunkTable, _Rows]:
    tensor = np.concatenate(
        [names.tensor_rows(rank, part)[part.chunks.tensor] for rank, part in enumerate(items)]
    )
    counts = [len(part.chunks) for part in items]
    rank = np.repeat(np.arange(len(items)), counts)
    source = np.concatenate([part.chunks.source for part in items])
    boxes = Boxes.join([part.chunks.boxes for part in items])

    keys = sort_keys(tensors, tensor, boxes)
    order = np.argsort(keys, kind="stable")
    group_start = group_equal(keys, order, tensor, boxes)
    order, group_start = _without_yielding(items, order, group_start)
    first = order[group_start[:-1]]
    distinct, whose = boxes.take(first), tensor[first]
    del keys, tensor, boxes, first  # the largest columns there are
    rank, source = rank[order], source[order]
    declared, contested = _find_declared(items, order, group_start)
    shared = _shared_chunks(
        items, declared, contested, tensors, whose, group_start, rank, source, distinct
    )
    check_tilings(tensors, whose, distinct, rank[group_start[:-1]])

    stored = tensors.alias_of[whose] == NO_ALIAS
    if not stored.all():
        keep = np.flatnonzero(stored)
        flat, group_start = ragged_rows(group_start, keep)
        rank, source = rank[flat], source[flat]
        distinct, whose, declared = distinct.take(keep), whose[keep], declared[keep]

    nbytes = distinct.volumes() * tensors.itemsize[whose]
    pieces, group, number = split_replicas(distinct, nbytes, group_start, declared)
    cut = len(pieces) != len(distinct)
    if cut:
        whose = whose[group]
        nbytes = pieces.volumes() * tensors.itemsize[whose]
    writer = assign_writers(nbytes, group, number, group_start, rank, len(items))
    table = ChunkTable(whose, pieces, rank[writer], source[writer])
    if cut:
        keys = sort_keys(tensors, table.tensor, table.boxes)
        table = table.take(np.argsort(keys, kind="stable"))
    return table, shared


def sort_keys(tensors: TensorTable, tensor: Ints, boxes: Boxes) -> Column:
    """One number per chunk that orders by tensor, then by offset."""
    linear = linear_starts(tensors.shape_start, tensors.shapes, tensor, boxes)
    volumes = np.maximum(tensors.volumes, 1)
    if float(volumes.astype(np.float64).sum()) < 2**62:
        ends = np.cumsum(volumes)
        linear += (ends - volumes)[tensor]
        # A box outside its tensor must still be sorted with its tensor, for the checks to find it.
        np.minimum(linear, (ends - 1)[tensor], out=linear)
        return linear
    # So many elements that one number does not hold both: rank the pairs instead.
    order = np.lexsort((linear, tensor))
    step = (np.diff(tensor[order]) != 0) | (np.diff(linear[order]) != 0)
    keys = np.zeros(len(order), np.int64)
    keys[order[1:]] = np.cumsum(step)
    return keys


def group_equal(keys: Column, order: npt.NDArray[np.intp], tensor: Ints, boxes: Boxes) -> Ints:
    """Where in `order`, which sorts the keys, each run of equal boxes of one tensor begins."""
    ordered = keys[order]
    # Equal boxes have equal keys, so only those need a look, and they are few.
    alike = np.flatnonzero(ordered[1:] == ordered[:-1]) + 1
    alike = alike[tensor[order[alike]] == tensor[order[alike - 1]]]
    here, before = boxes.take(order[alike]), boxes.take(order[alike - 1])
    differs = (here.offsets != before.offsets) | (here.sizes != before.sizes)
    equal = np.ones(len(alike), np.bool_)
    for _, rows, at in here.dimensions():
        equal[rows] &= ~differs[at]
    begins = np.ones(len(order), np.bool_)
    begins[alike[equal]] = False
    return np.append(np.flatnonzero(begins), len(order))


def _without_yielding(
    items: Sequence[WriteItems], order: npt.NDArray[np.intp], group_start: Ints
) -> tuple[npt.NDArray[np.intp], Ints]:
    """Leave out holders of a box that yield to another."""
    locals_ = [part.local for part in items if part.local is not None]
    if len(locals_) < len(items) or not any((one.replicas == YIELDS).any() for one in locals_):
        return order, group_start
    stays = np.concatenate([local.replicas for local in locals_])[order] != YIELDS
    staying = np.add.reduceat(stays, group_start[:-1], dtype=np.int64)
    stays |= np.repeat(staying == 0, np.diff(group_start))
    return order[stays], np.concatenate([[0], np.cumsum(stays)])[group_start]


def _find_declared(
    items: Sequence[WriteItems], order: npt.NDArray[np.intp], group_start: Ints
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Which of the groups are declared replicas: all that hold one box declare the same.

    Where they do not, as parameters that FSDP has cut and tensor parallelism has not, which lie on
    a mesh for each of its ranks, nothing is declared that could be relied on. These are the second
    answer: they may as well be different tensors of one name.
    """
    several = np.flatnonzero(np.diff(group_start) > 1)
    declared = np.zeros(len(group_start) - 1, np.bool_)
    contested = np.zeros_like(declared)
    if len(several) == 0 or any(part.local is None for part in items):
        return declared, contested
    locals_ = [part.local for part in items if part.local is not None]
    replicas = np.concatenate([local.replicas for local in locals_])
    declared[several] = replicas[order[group_start[several]]] > 0
    rows, start = ragged_rows(group_start, several)
    group = np.repeat(several, np.diff(start))
    differs = replicas[order[rows]] != replicas[order[group_start[group]]]
    declared[group[differs]] = False
    contested[group[differs]] = True
    return declared, contested


def _shared_chunks(
    items: Sequence[WriteItems],
    declared: npt.NDArray[np.bool_],
    contested: npt.NDArray[np.bool_],
    tensors: TensorTable,
    whose: Ints,
    group_start: Ints,
    rank: Ints,
    source: Ints,
    distinct: Boxes,
) -> _Rows:
    """The boxes that several ranks hold, and nobody has declared."""
    several = np.flatnonzero((np.diff(group_start) > 1) & ~declared)
    if any(part.local is None for part in items):
        several = several[:0]
    rows, start = ragged_rows(group_start, several)
    group = np.repeat(several, np.diff(start))
    some, of = distinct.take(several), whose[several]

    def describe(item: int) -> str:
        return _box_text(tensors, of, some, int(np.searchsorted(several, item)))

    return _Rows(rank[rows], group, source[rows], describe, contested[group])


def _box_text(tensors: TensorTable, whose: Ints, boxes: Boxes, row: int) -> str:
    box = boxes[row]
    return f"{tensors.names[int(whose[row])]} offsets {box.offsets} sizes {box.sizes}"


def check_tilings(tensors: TensorTable, whose: Ints, distinct: Boxes, rank: Ints) -> None:
    """Raise unless the boxes of each tensor, sorted by tensor, cover it once."""
    seed = secrets.randbits(62)
    fine = tiled(tensors.shape_start, tensors.shapes, whose, distinct, seed)
    bad = np.flatnonzero(~fine)
    if len(bad) == 0:
        return
    faults = []
    for row in bad[:SHOWN].tolist():
        rows = np.flatnonzero(whose == row)
        shape = tensors.shape(row)
        part = distinct.take(rows)
        matrix = (len(rows), len(shape))
        fault = tiling_fault(shape, part.offsets.reshape(matrix), part.sizes.reshape(matrix))
        name = tensors.names[row]
        if isinstance(fault, Outside):
            box = part[fault.row]
            faults.append(
                f"{name}: offsets {box.offsets} sizes {box.sizes} (rank {rank[rows[fault.row]]}) "
                f"reaches out of shape {shape}"
            )
        elif isinstance(fault, Gap):
            faults.append(
                f"{name}: no rank holds offsets {fault.box.offsets} sizes {fault.box.sizes} "
                f"of shape {shape}"
            )
        elif fault is not None:
            a, b = part[fault.first], part[fault.second]
            faults.append(
                f"{name}: offsets {a.offsets} sizes {a.sizes} (rank {rank[rows[fault.first]]}) "
                f"overlaps offsets {b.offsets} sizes {b.sizes} (rank {rank[rows[fault.second]]})"
            )
    raise PlanError(
        faults_text(
            "the pieces that ranks hold do not make whole tensors",
            faults,
            "Every element of a tensor must be held exactly once, or by replicas of one box.",
            len(bad),
        )
    )


# --- values ---------------------------------------------------------------------------------------


def _join_values(items: Sequence[WriteItems], names: _Names) -> tuple[ValueTable, Ints, _Rows]:
    rows = np.concatenate([names.value_rows(rank, part) for rank, part in enumerate(items)])
    counts = [len(part.value_names) for part in items]
    rank = np.repeat(np.arange(len(items)), counts)
    source = np.concatenate([np.array(part.value_source, np.int64) for part in items])
    order = np.argsort(rows, kind="stable")
    rows, rank, source = rows[order], rank[order], source[order]
    start = np.concatenate([np.flatnonzero(np.diff(rows, prepend=-1)), [len(rows)]])
    several = np.repeat(np.diff(start) > 1, np.diff(start))
    if any(part.local is None for part in items):
        several[:] = False
    shared = _Rows(
        rank[several],
        rows[several],
        source[several],
        lambda item: names.value_names[item],
        np.ones(int(several.sum()), np.bool_),
    )
    holder, number = rank[start[:-1]], source[start[:-1]]
    slot = np.zeros(len(holder), np.int64)
    by_rank = np.argsort(holder, kind="stable")
    first = np.searchsorted(holder[by_rank], np.arange(len(items)))
    slot[by_rank] = np.arange(len(holder)) - first[holder[by_rank]]
    return ValueTable(names.value_names, holder, slot), number, shared
