# SPDX-License-Identifier: Apache-2.0
"""Which regions of which stored chunks make up the boxes somebody wants."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardkeep.boxes import overlap
from shardkeep.columns import Ints
from shardkeep.metadata import ChunkStorageMetadata
from shardkeep.planner import ReadItems
from shardkeep.tables import ChunkTable, StateColumns

__all__ = ["plan_reads"]


def plan_reads(
    stored: StateColumns,
    wanted: Sequence[tuple[str, ChunkStorageMetadata]],
    value_names: Sequence[str] = (),
    value_dest: Sequence[int] = (),
) -> ReadItems:
    """Which regions of which chunks make up the wanted boxes; none of them may be empty."""
    tensors = stored.tensors
    rows = [tensors.stored_row(tensors.row_of[name]) for name, _ in wanted]
    stored.prefetch(rows)
    tables, chunk_rows, counts, lows, sizes = [], [], [], [], []
    for row, (_, box) in zip(rows, wanted, strict=True):
        chunks = stored.chunks_of(row)
        found, low, size = _overlaps(chunks, box)
        tables.append(chunks.take(found) if len(found) != len(chunks) else chunks)
        chunk_rows.append(found)
        counts.append(len(found))
        lows.append(low.ravel())
        sizes.append(size.ravel())
    none = [np.zeros(0, np.int64)]
    return ReadItems(
        tensors,
        ChunkTable.join(tables),
        np.concatenate(chunk_rows or none),
        np.repeat(np.arange(len(wanted)), counts),
        [name for name, _ in wanted],
        [box for _, box in wanted],
        np.concatenate(lows or none),
        np.concatenate(sizes or none),
        value_names,
        value_dest,
    )


def _overlaps(chunks: ChunkTable, box: ChunkStorageMetadata) -> tuple[Ints, Ints, Ints]:
    """Rows of the chunks that share elements with the box, and the regions they share."""
    ndim = len(box.offsets)
    if len(chunks) == 1:
        shared = overlap(chunks.boxes[0], box)
        if shared is None:
            return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)
        return (
            np.zeros(1, np.int64),
            np.array(shared.offsets, np.int64),
            np.array(shared.sizes, np.int64),
        )
    offsets = chunks.boxes.offsets.reshape(-1, ndim)
    sizes = chunks.boxes.sizes.reshape(-1, ndim)
    rows = np.arange(len(chunks))
    for dim in range(ndim):
        # One dimension mostly leaves few chunks for the next.
        begin = offsets[rows, dim] if dim else offsets[:, 0]
        end = begin + (sizes[rows, dim] if dim else sizes[:, 0])
        low, high = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
        rows = rows[np.maximum(begin, low) < np.minimum(end, high)]
    box_low = np.array(box.offsets, np.int64)
    lows = np.maximum(offsets[rows], box_low)
    highs = np.minimum(offsets[rows] + sizes[rows], box_low + np.array(box.sizes, np.int64))
    return rows, lows, highs - lows
