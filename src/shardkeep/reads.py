# SPDX-License-Identifier: Apache-2.0
"""Which regions of which stored chunks make up the boxes somebody wants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from shardkeep.columns import Boxes, Ints, ragged_rows, starts
from shardkeep.planner import ReadItems
from shardkeep.tables import StateColumns

__all__ = ["plan_reads"]

_PAIRS = 1 << 18
"""Pairs of a wanted box and a chunk of its tensor that are compared together."""


def plan_reads(
    stored: StateColumns,
    names: Sequence[str],
    boxes: Boxes,
    value_names: Sequence[str] = (),
    value_dest: Sequence[int] = (),
) -> ReadItems:
    """Which regions of which chunks make up boxes of named tensors; no box may be empty."""
    tensors = stored.tensors
    rows = np.fromiter(map(tensors.row_of.__getitem__, names), np.int64, len(names))
    rows = np.where(tensors.alias_of[rows] < 0, rows, tensors.alias_of[rows])
    among, which = np.unique(rows, return_inverse=True)
    chunks, begin = stored.chunks_among(among)
    found = list(_overlaps(boxes, chunks.boxes, begin[which], begin[which + 1]))
    of_wanted, of_chunk, low, size = (
        np.concatenate([part[k] for part in found]) if found else np.zeros(0, np.int64)
        for k in range(4)
    )
    whole = len(of_chunk) == len(chunks) and bool((of_chunk == np.arange(len(chunks))).all())
    return ReadItems(
        tensors,
        chunks if whole else chunks.take(of_chunk),
        of_chunk - begin[which[of_wanted]],
        of_wanted,
        names,
        boxes,
        low,
        size,
        value_names,
        value_dest,
    )


def _overlaps(
    wanted: Boxes, chunks: Boxes, first: Ints, stop: Ints
) -> Iterator[tuple[Ints, Ints, Ints, Ints]]:
    """Pairs (wanted, chunk) that share elements, and the regions they share, flat.

    Box `i` is compared with the chunks [first[i], stop[i]).
    """
    counts = stop - first
    at = 0
    ends = np.cumsum(counts)
    while at < len(counts):
        done = int(ends[at] - counts[at])
        until = max(at + 1, int(np.searchsorted(ends, done + _PAIRS, "right")))
        part = counts[at:until]
        pair_wanted = np.repeat(np.arange(at, until), part)
        pair_chunk = np.repeat(first[at:until] - starts(part)[:-1], part)
        pair_chunk += np.arange(len(pair_chunk))
        for dim in range(int(wanted.ndim[at:until].max(initial=0))):
            # One dimension mostly leaves few chunks for the next.
            w, c = wanted.start[pair_wanted] + dim, chunks.start[pair_chunk] + dim
            has = np.flatnonzero(w < wanted.start[pair_wanted + 1])
            w, c = w[has], c[has]
            low = np.maximum(wanted.offsets[w], chunks.offsets[c])
            high = np.minimum(
                wanted.offsets[w] + wanted.sizes[w], chunks.offsets[c] + chunks.sizes[c]
            )
            keep = np.ones(len(pair_wanted), np.bool_)
            keep[has] = low < high
            if not keep.all():
                pair_wanted, pair_chunk = pair_wanted[keep], pair_chunk[keep]
        w, _ = ragged_rows(wanted.start, pair_wanted)
        c, _ = ragged_rows(chunks.start, pair_chunk)
        low = np.maximum(wanted.offsets[w], chunks.offsets[c])
        high = np.minimum(wanted.offsets[w] + wanted.sizes[w], chunks.offsets[c] + chunks.sizes[c])
        yield pair_wanted, pair_chunk, low, high - low
        at = until
