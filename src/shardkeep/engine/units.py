# SPDX-License-Identifier: Apache-2.0
"""Runs of blocks that cover all spans, and the units they are read in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardkeep.columns import Ints, starts

__all__ = ["Runs", "Units", "members_of", "runs_of", "segments_of"]


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs of whole blocks, none touching another: by file, then by place."""

    file: Ints
    """Which file."""
    first: Ints
    """First block."""
    stop: Ints
    """End, in blocks."""

    def __len__(self) -> int:
        """Number of runs."""
        return len(self.file)

    @property
    def blocks(self) -> Ints:
        """Length of each."""
        return self.stop - self.first

    def take(self, rows: Ints) -> Runs:
        """Some of them."""
        return Runs(self.file[rows], self.first[rows], self.stop[rows])

    def cut(self, blocks: int) -> Runs:
        """The same blocks in runs of at most so many."""
        counts = -(-self.blocks // blocks)
        number = np.arange(int(counts.sum())) - np.repeat(starts(counts)[:-1], counts)
        first = np.repeat(self.first, counts) + number * blocks
        stop = np.minimum(first + blocks, np.repeat(self.stop, counts))
        return Runs(np.repeat(self.file, counts), first, stop)

    def without(self, others: Runs) -> Runs:
        """What is left when others, which lie within these, are taken out."""
        if len(others) == 0:
            return self
        segments, held = segments_of([self, others])
        return segments.take(np.flatnonzero(held[0] & ~held[1]))


def segments_of(parts: Sequence[Runs]) -> tuple[Runs, npt.NDArray[np.bool_]]:
    """All blocks cut wherever a run of any part begins or ends, and which parts hold each piece."""
    # A number line with one stretch per file serves all files at once.
    stretch = max([1, *(int(part.stop.max(initial=0)) + 1 for part in parts)])
    lines = [(p.file * stretch + p.first, p.file * stretch + p.stop) for p in parts]
    edges = np.unique(np.concatenate([edge for line in lines for edge in line]))
    held = np.zeros((len(parts), max(len(edges) - 1, 0)), np.bool_)
    for mine, (low, high) in zip(held, lines, strict=True):
        change = np.zeros(len(edges), np.int64)
        np.add.at(change, np.searchsorted(edges, low), 1)
        np.add.at(change, np.searchsorted(edges, high), -1)
        mine[:] = np.cumsum(change)[:-1] > 0
    file = edges[:-1] // stretch
    return Runs(file, edges[:-1] - file * stretch, edges[1:] - file * stretch), held


@dataclass(frozen=True, eq=False)
class Units:
    """Reads of bounded size and the spans they touch."""

    runs: Runs
    """What is read: one row each."""
    edges: Ints
    """Where the spans of each unit begin in `spans`; one more for the end."""
    spans: Ints
    """Spans that touch each unit, in the order of their places."""

    def __len__(self) -> int:
        """Number of reads."""
        return len(self.runs)

    def members(self, number: int) -> Ints:
        """The spans of one unit."""
        found: Ints = self.spans[self.edges[number] : self.edges[number + 1]]
        return found


def runs_of(file: Ints, low: Ints, high: Ints, block: int) -> Runs:
    """The blocks that spans lie in, joined where they touch; no block that none touches."""
    first, stop = low // block, -(-high // block)
    order = np.lexsort((first, file))
    stretch = int(stop.max(initial=0)) + 1
    at, end = (file * stretch + first)[order], (file * stretch + stop)[order]
    reach = np.maximum.accumulate(end)
    begins = np.flatnonzero(np.concatenate([[True], at[1:] > reach[:-1]])) if len(at) else order
    run_file = file[order][begins]
    run_stop = reach[np.concatenate([begins[1:], [len(at)]]) - 1] if len(at) else at
    return Runs(run_file, at[begins] - run_file * stretch, run_stop - run_file * stretch)


def members_of(runs: Runs, file: Ints, low: Ints, high: Ints, block: int) -> Units:
    """Which spans touch each of these runs; they may lie outside all of them in part."""
    stretch = max(int(runs.stop.max(initial=0)), int((-(-high // block)).max(initial=0))) + 1
    order = np.lexsort((low, file))
    begin = runs.file * stretch + runs.first
    end = runs.file * stretch + runs.stop
    line = file[order] * stretch
    from_run = np.searchsorted(end, line + low[order] // block, "right")
    to_run = np.searchsorted(begin, line - (-high[order] // block), "left")
    counts = np.maximum(to_run - from_run, 0)
    spans = np.repeat(order, counts)
    inside = np.arange(len(spans)) - np.repeat(starts(counts)[:-1], counts)
    touched = np.repeat(from_run, counts) + inside
    by_run = np.argsort(touched, kind="stable")
    edges = np.searchsorted(touched[by_run], np.arange(len(runs) + 1))
    return Units(runs, edges, spans[by_run])
