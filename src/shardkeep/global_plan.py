# SPDX-License-Identifier: Apache-2.0
"""Local plans of all ranks -> one plan for all, and the tables of the whole checkpoint.

Names are joined, boxes are deduplicated, replicas compared and dealt out, and every tensor is
shown to be covered exactly once: all as operations over whole columns.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkeep.boxes import Gap, Outside, linear_starts, tiled, tiling_fault
from shardkeep.columns import Boxes, Column, Ints, ragged_rows
from shardkeep.errors import PlanError
from shardkeep.planner import SavePlan, WriteItems
from shardkeep.replicas import assign_writers, split_replicas
from shardkeep.structure import TENSOR, VALUE, Structure, merge
from shardkeep.tables import NO_ALIAS, ChunkTable, TensorTable, ValueTable

__all__ = ["GlobalPlan", "join_plans"]

SHOWN = 8
"""How many names or ranks an error lists."""


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


def join_plans(plans: Sequence[SavePlan]) -> GlobalPlan:
    """Join the local plans of all ranks, in rank order."""
    items = [WriteItems.of(plan.items) for plan in plans]
    names = _Names.join(plans, items)
    tensors = _join_tensors(items, names)
    chunks = _join_chunks(items, names, tensors)
    values, value_source = _join_values(items, names)
    return GlobalPlan(
        names.structure, tensors, chunks, values, value_source, [names.renamed[u] for u in names.of]
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
        kinds = np.array(union.kinds, np.int64)
        by_name = sorted(range(len(names)), key=lambda leaf: names[leaf].encode())
        row = np.zeros(len(names), np.int64)
        sorted_names: dict[int, list[str]] = {}
        for kind in (TENSOR, VALUE):
            leaves = [leaf for leaf in by_name if kinds[leaf] == kind]
            row[leaves] = np.arange(len(leaves))
            sorted_names[kind] = [names[leaf] for leaf in leaves]
        renamed = [
            {
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


def _ranks_text(ranks: Sequence[int] | Column) -> str:
    shown = sorted({int(rank) for rank in ranks})
    more = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    return ("ranks " if len(shown) > 1 else "rank ") + ", ".join(map(str, shown[:SHOWN])) + more


def _faults_text(what: str, faults: Sequence[str], advice: str, count: int = 0) -> str:
    left = max(count, len(faults)) - SHOWN
    more = f"\n  ... and {left} more" if left > 0 else ""
    return f"{what}:\n  " + "\n  ".join(faults[:SHOWN]) + more + f"\n{advice}"


# --- tensors --------------------------------------------------------------------------------------


def _join_tensors(items: Sequence[WriteItems], names: _Names) -> TensorTable:
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
            _faults_text(
                "one name is different tensors on different ranks",
                faults,
                "Give them different names, or wrap them in PerRank.",
            )
        )
    # A tie counts only where every holder has it.
    alias_of = np.where((alias_low == alias_high) & (alias_low >= 0), alias_low, NO_ALIAS)
    return TensorTable.of(names.tensor_names, properties, shapes, alias_of.tolist())


# --- chunks ---------------------------------------------------------------------------------------


def _join_chunks(items: Sequence[WriteItems], names: _Names, tensors: TensorTable) -> ChunkTable:
    tensor = np.concatenate(
        [names.tensor_rows(rank, part)[part.chunks.tensor] for rank, part in enumerate(items)]
    )
    counts = [len(part.chunks) for part in items]
    rank = np.repeat(np.arange(len(items)), counts)
    source = np.concatenate([part.chunks.source for part in items])
    boxes = Boxes.join([part.chunks.boxes for part in items])

    keys = _sort_keys(tensors, tensor, boxes)
    order = np.argsort(keys, kind="stable")
    group_start = _group_equal(keys, order, tensor, boxes)
    first = order[group_start[:-1]]
    distinct, whose = boxes.take(first), tensor[first]
    del keys, tensor, boxes, first  # the largest columns there are
    rank, source = rank[order], source[order]
    declared = _check_replicas(items, order, tensors, whose, group_start, rank, distinct)
    _check_tilings(tensors, whose, distinct, rank[group_start[:-1]])

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
        keys = _sort_keys(tensors, table.tensor, table.boxes)
        table = table.take(np.argsort(keys, kind="stable"))
    return table


def _sort_keys(tensors: TensorTable, tensor: Ints, boxes: Boxes) -> Column:
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


def _group_equal(keys: Column, order: npt.NDArray[np.intp], tensor: Ints, boxes: Boxes) -> Ints:
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


def _check_replicas(
    items: Sequence[WriteItems],
    order: npt.NDArray[np.intp],
    tensors: TensorTable,
    whose: Ints,
    group_start: Ints,
    rank: Ints,
    distinct: Boxes,
) -> npt.NDArray[np.bool_]:
    """Compare boxes that several ranks hold; returns which of the groups are declared replicas."""
    several = np.flatnonzero(np.diff(group_start) > 1)
    declared = np.zeros(len(whose), np.bool_)
    if len(several) == 0 or any(part.local is None for part in items):
        return declared
    locals_ = [part.local for part in items if part.local is not None]
    replicas = np.concatenate([local.replicas for local in locals_])
    declared[several] = replicas[order[group_start[several]]] != 0
    rows, start = ragged_rows(group_start, several)
    group = np.repeat(several, np.diff(start))
    here, first = order[rows], order[group_start[group]]
    differs = replicas[here] != replicas[first]
    if differs.any():
        raise PlanError(
            _replica_text(
                "one box is held by ranks that are not replicas of each other",
                "Tensors of different meshes (pipeline stages, experts) need different names.",
                *(tensors, whose, distinct, group_start, rank, np.unique(group[differs])),
            )
        )
    digest = np.concatenate([local.digest for local in locals_]).view("<u8").reshape(-1, 2)
    differs = (digest[here] != digest[first]).any(axis=1) & ~declared[group]
    if differs.any():
        raise PlanError(
            _replica_text(
                "tensors under one name differ between ranks",
                "If each rank has its own, wrap it in shardkeep.PerRank; if they should be equal, "
                "bring them together before saving (or pass check_replicas='off').",
                *(tensors, whose, distinct, group_start, rank, np.unique(group[differs])),
            )
        )
    return declared


def _replica_text(
    what: str,
    advice: str,
    tensors: TensorTable,
    whose: Ints,
    distinct: Boxes,
    group_start: Ints,
    rank: Ints,
    groups: Ints,
) -> str:
    faults = []
    for group in groups.tolist():
        box = distinct[group]
        holders = rank[int(group_start[group]) : int(group_start[group + 1])]
        name = tensors.names[int(whose[group])]
        faults.append(f"{name} offsets {box.offsets} sizes {box.sizes} on {_ranks_text(holders)}")
    return _faults_text(what, faults, advice)


def _check_tilings(tensors: TensorTable, whose: Ints, distinct: Boxes, rank: Ints) -> None:
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
        _faults_text(
            "the pieces that ranks hold do not make whole tensors",
            faults,
            "Every element of a tensor must be held exactly once, or by replicas of one box.",
            len(bad),
        )
    )


# --- values ---------------------------------------------------------------------------------------


def _join_values(items: Sequence[WriteItems], names: _Names) -> tuple[ValueTable, Ints]:
    rows = np.concatenate([names.value_rows(rank, part) for rank, part in enumerate(items)])
    counts = [len(part.value_names) for part in items]
    rank = np.repeat(np.arange(len(items)), counts)
    source = np.concatenate([np.array(part.value_source, np.int64) for part in items])
    order = np.argsort(rows, kind="stable")
    rows, rank, source = rows[order], rank[order], source[order]
    start = np.concatenate([np.flatnonzero(np.diff(rows, prepend=-1)), [len(rows)]])
    if all(part.local is not None for part in items):
        every = [part.local.value_digest for part in items if part.local is not None]
        digest = np.concatenate(every).view("<u8").reshape(-1, 2)[order]
        group = np.repeat(np.arange(len(start) - 1), np.diff(start))
        differs = np.unique(group[(digest != digest[start[group]]).any(axis=1)])
        if len(differs):
            faults = [
                f"{names.value_names[int(rows[start[g]])]} on "
                f"{_ranks_text(rank[start[g] : start[g + 1]])}"
                for g in differs.tolist()
            ]
            raise PlanError(
                _faults_text(
                    "values under one name differ between ranks",
                    faults,
                    "If each rank has its own, wrap it in shardkeep.PerRank.",
                )
            )
    holder, number = rank[start[:-1]], source[start[:-1]]
    slot = np.zeros(len(holder), np.int64)
    by_rank = np.argsort(holder, kind="stable")
    first = np.searchsorted(holder[by_rank], np.arange(len(items)))
    slot[by_rank] = np.arange(len(holder)) - first[holder[by_rank]]
    return ValueTable(names.value_names, holder, slot), number
