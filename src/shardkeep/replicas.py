# SPDX-License-Identifier: Apache-2.0
"""Boxes that several ranks hold: who writes them.

Everything works on columns: `group_start` gives where each distinct box's holders begin in
`holders`. Large boxes whose replicas are declared are cut among their holders; the rest is dealt
out so that the least loaded holder writes, neighbours staying together in one file.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardkeep.columns import Boxes, Ints, starts

__all__ = ["assign_writers", "split_replicas"]

SPLIT_BYTES = 8 << 20
"""A replicated box is cut into pieces of at least this size."""


def split_replicas(
    boxes: Boxes, nbytes: Ints, group_start: Ints, may_split: npt.NDArray[np.bool_]
) -> tuple[Boxes, Ints, Ints]:
    """Cut large boxes along their outermost dimension, one piece per holder at most.

    Returns the boxes, the group each came from, and its number among the pieces of that group.
    """
    count = len(boxes)
    split = np.flatnonzero(may_split)
    most = np.minimum(group_start[split + 1] - group_start[split], nbytes[split] // SPLIT_BYTES)
    wanted, most = split[most > 1], most[most > 1]
    if len(wanted) == 0:
        return boxes, np.arange(count), np.zeros(count, np.int64)
    pieces, extent = np.ones(count, np.int64), np.ones(count, np.int64)
    cut_at = np.zeros(count, np.int64)
    part = boxes.take(wanted)
    for _, rows, _, sizes in part.by_ndim():
        outer = np.argmax(sizes > 1, axis=1)
        cut_at[wanted[rows]] = outer
        extent[wanted[rows]] = np.take_along_axis(sizes, outer[:, None], 1)[:, 0]
    pieces[wanted] = np.minimum(most, extent[wanted])
    group = np.repeat(np.arange(count), pieces)
    number = np.arange(len(group)) - starts(pieces)[group]
    cut = boxes.take(group)
    offsets, sizes = cut.offsets.copy(), cut.sizes.copy()
    split = np.flatnonzero(pieces[group] > 1)
    at = cut.start[split] + cut_at[group[split]]
    k, of, n = number[split], pieces[group[split]], extent[group[split]]
    low, high = k * n // of, (k + 1) * n // of
    offsets[at] += low
    sizes[at] = high - low
    return Boxes(cut.start, offsets, sizes), group, number


def assign_writers(
    nbytes: Ints,
    group: Ints,
    number: Ints,
    group_start: Ints,
    holders: Ints,
    world_size: int,
) -> Ints:
    """For each piece, the position in `holders` of the rank that writes it.

    A piece of a cut box goes to the holder of its number. Whole boxes with several holders are
    dealt out set by set: each set of holders is filled up to one level, in the order of the boxes.
    """
    writer = group_start[group] + number
    width = np.diff(group_start)
    whole = np.bincount(group, minlength=len(width)) == 1
    free = np.flatnonzero((whole & (width > 1))[group])
    load = np.bincount(holders[writer], nbytes, world_size).astype(np.float64)
    if len(free) == 0:
        return writer
    load -= np.bincount(holders[writer[free]], nbytes[free], world_size)
    order, set_start = _same_holders(group[free], group_start, holders, world_size)
    free = free[order]
    totals = np.add.reduceat(nbytes[free], set_start[:-1])
    for at in np.argsort(-totals, kind="stable").tolist():
        rows = free[set_start[at] : set_start[at + 1]]
        first = int(group_start[group[rows[0]]])
        ranks = holders[first : first + int(width[group[rows[0]]])]
        share = _fill_levels(load[ranks], float(totals[at]))
        middle = np.cumsum(nbytes[rows]) - nbytes[rows] / 2
        chosen = np.minimum(np.searchsorted(np.cumsum(share), middle), len(ranks) - 1)
        writer[rows] = group_start[group[rows]] + chosen
        load += np.bincount(ranks[chosen], nbytes[rows], world_size)
    return writer


def _same_holders(
    group: Ints, group_start: Ints, holders: Ints, world_size: int
) -> tuple[npt.NDArray[np.intp], Ints]:
    """Order the groups by their set of holders; where each set begins in that order."""
    marks = np.random.default_rng(0).integers(1, 2**62, world_size, dtype=np.uint64)
    sums = np.add.reduceat(marks[holders], group_start[:-1])[group]
    order = np.argsort(sums, kind="stable")
    changes = np.flatnonzero(np.diff(sums[order])) + 1
    return order, np.concatenate([[0], changes, [len(order)]]).astype(np.int64)


def _fill_levels(load: npt.NDArray[np.float64], total: float) -> npt.NDArray[np.float64]:
    """How much each holder takes so that all that take anything end up equally loaded."""
    ascending = np.sort(load)
    filled = np.arange(1, len(load) + 1) * ascending - np.cumsum(ascending)
    taking = int(np.searchsorted(filled, total, "right"))
    level = (total + ascending[:taking].sum()) / taking
    share: npt.NDArray[np.float64] = np.maximum(level - load, 0.0)
    return share
