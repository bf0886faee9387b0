# SPDX-License-Identifier: Apache-2.0
"""Who writes which bytes of files that many ranks write at once.

Files are cut into ranges of 1 MiB, and each has one rank that writes it: the one that holds most of
it, or, where many hold a little of every range, one after the other. What other ranks hold of a
range travels to that rank, in rounds, so that no rank has more on its way than its memory allows.

All files lie one behind the other in one space of bytes, each beginning on a whole range. The
coordinator deals for all; a rank learns what concerns it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardkeep.boxes import linear_starts
from shardkeep.columns import Boxes, Column, Ints, narrow, pack, starts, unpack
from shardkeep.tables import ChunkTable, TensorTable

__all__ = ["RANGE", "UNIT", "Deal", "Space", "deal"]

RANGE = 1 << 20
"""Bytes that one rank alone writes, wherever they begin on a multiple of this."""
UNIT = 2 << 20
"""Most bytes of a job: what is gathered, and written at once."""
LOCAL = -1
"""In place of a round: nothing has to travel."""


@dataclass(frozen=True, eq=False)
class Space:
    """All files, one behind the other."""

    base: Ints
    """Where each begins, and one more for the end."""
    size: Ints
    """Bytes of each."""
    heads: Ints
    """Bytes at the beginning of each that are no tensor's: they are the coordinator's."""

    @classmethod
    def of(cls, sizes: Sequence[int], heads: Sequence[int]) -> Space:
        """Of files of these sizes, with headers of these sizes."""
        size = np.array(sizes, np.int64)
        return cls(starts(-(-size // RANGE)) * RANGE, size, np.array(heads, np.int64))


@dataclass(frozen=True, eq=False)
class _Spans:
    """Where the elements of chunks lie, rounded out where they are many short runs."""

    low: Ints
    high: Ints
    nbytes: Ints
    dense: npt.NDArray[np.bool_]
    """Whether a chunk is one run."""
    first: Ints
    """Its first element, among those of its tensor."""

    @classmethod
    def of(cls, tensors: TensorTable, chunks: ChunkTable, place: Ints) -> _Spans:
        item = tensors.itemsize[chunks.tensor]
        first = linear_starts(tensors.shape_start, tensors.shapes, chunks.tensor, chunks.boxes)
        volumes = chunks.boxes.volumes()
        low, high = first.copy(), first + volumes
        dense = np.ones(len(chunks), np.bool_)
        for ndim, rows, offsets, sizes in chunks.boxes.by_ndim():
            if ndim < 2:
                continue
            whose = chunks.tensor[rows]
            shape = tensors.shapes[tensors.shape_start[whose][:, None] + np.arange(ndim)]
            # After `last` a box has all there is; before `outer` it has one row of each dimension.
            part = sizes != shape
            last = np.where(part.any(axis=1), ndim - 1 - part[:, ::-1].argmax(axis=1), 0)
            several = sizes > 1
            outer = np.where(several.any(axis=1), several.argmax(axis=1), ndim - 1)
            short = outer < last
            stride = np.ones_like(shape)
            stride[:, :-1] = np.cumprod(shape[:, :0:-1], axis=1)[:, ::-1]
            kept = np.arange(ndim) <= outer[:, None]
            begin = (np.where(kept, offsets, 0) * stride).sum(axis=1)
            at = np.arange(len(sizes)), outer
            end = begin + sizes[at] * stride[at]
            low[rows] = np.where(short, begin, low[rows])
            high[rows] = np.where(short, end, high[rows])
            dense[rows] = ~short
        base = place[chunks.tensor]
        return cls(base + low * item, base + high * item, volumes * item, dense, first)


def _owners(space: Space, spans: _Spans, rank: Ints) -> Ints:
    """Who writes each range."""
    count = int(space.base[-1]) // RANGE
    owner = np.zeros(count, np.int64)
    if len(rank):
        order = np.argsort(spans.low, kind="stable")
        reach = np.maximum.accumulate(spans.high[order])
        begins = np.append(True, spans.low[order][1:] >= reach[:-1])
        first = np.flatnonzero(begins)
        low = spans.low[order][first]
        last = np.append(first[1:], len(order))
        high = reach[last - 1]
        # By the middle of a range: of two chunks that meet in it, the larger part decides.
        middle = np.arange(count) * RANGE + RANGE // 2
        file = np.searchsorted(space.base, middle, "right") - 1
        middle = np.minimum(middle, space.base[file] + np.maximum(space.size[file] - 1, 0))
        group = np.maximum(np.searchsorted(low, middle, "right") - 1, 0)
        members = (last - first)[group]
        turn = (middle - low[group]) * members // (high - low)[group]
        owner = rank[order[first[group] + np.clip(turn, 0, members - 1)]]
    for begin, head in zip(space.base[:-1].tolist(), space.heads.tolist(), strict=True):
        owner[begin // RANGE : -(-(begin + head) // RANGE)] = 0
    return owner


def _pairs(low: Ints, high: Ints, begins: Ints) -> tuple[Ints, Ints]:
    """Every interval with every stretch it has bytes in; stretches follow each other."""
    first = np.searchsorted(begins, low, "right") - 1
    last = np.searchsorted(begins, high - 1, "right") - 1
    counts = last - first + 1
    begin = starts(counts)
    rows = np.repeat(np.arange(len(low)), counts)
    return rows, np.repeat(first - begin[:-1], counts) + np.arange(begin[-1])


def _shared(space: Space, spans: _Spans, rank: Ints, owner: Ints) -> npt.NDArray[np.bool_]:
    """Of each range, whether anybody but its owner holds some of it."""
    begins = np.flatnonzero(np.diff(owner, prepend=-1))
    ends = np.append(begins[1:], len(owner))
    chunk, stretch = _pairs(spans.low, spans.high, begins * RANGE)
    foreign = rank[chunk] != owner[begins[stretch]]
    chunk, stretch = chunk[foreign], stretch[foreign]
    change = np.zeros(len(owner) + 1, np.int64)
    np.add.at(change, np.maximum(spans.low[chunk] // RANGE, begins[stretch]), 1)
    np.add.at(change, np.minimum(-(-spans.high[chunk] // RANGE), ends[stretch]), -1)
    return np.cumsum(change)[:-1] > 0


@dataclass(frozen=True, eq=False)
class _Jobs:
    """What is written at once: bytes [low, high) of one file."""

    low: Ints
    high: Ints
    file: Ints
    owner: Ints
    shared: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, space: Space, owner: Ints, shared: npt.NDArray[np.bool_]) -> _Jobs:
        count = len(owner)
        at = np.arange(count) * RANGE
        file = np.searchsorted(space.base, at, "right") - 1
        # Files without a byte have no range, and so no number here.
        same = (owner[1:] == owner[:-1]) & (shared[1:] == shared[:-1]) & (file[1:] == file[:-1])
        run = np.flatnonzero(np.append(True, ~same)) if count else np.zeros(0, np.int64)
        length = np.diff(np.append(run, count))
        each = UNIT // RANGE
        cuts = -(-length // each)
        begin = starts(cuts)
        first = np.repeat(run - begin[:-1] * each, cuts) + np.arange(begin[-1]) * each
        last = np.minimum(first + each, np.repeat(run + length, cuts))
        high = np.minimum(last * RANGE, space.base[file[first]] + space.size[file[first]])
        return cls(first * RANGE, high, file[first], owner[first], shared[first])


def _rounds(
    jobs: _Jobs, spans: _Spans, rank: Ints, chunk: Ints, job: Ints, world: int, limit: int
) -> Ints:
    """When what belongs to each job travels; no rank has more than `limit` bytes in one round,
    unless a single job needs more."""
    turn = np.full(len(jobs.low), LOCAL)
    shared = np.flatnonzero(jobs.shared)
    if len(shared) == 0:
        return turn
    # In every round each owner has something to do: the first jobs of all come first.
    by_owner = shared[np.argsort(jobs.owner[shared], kind="stable")]
    counts = np.bincount(jobs.owner[by_owner], minlength=world)
    number = np.arange(len(by_owner)) - starts(counts)[jobs.owner[by_owner]]
    order = by_owner[np.argsort(number, kind="stable")]
    position = np.zeros(len(jobs.low), np.int64)
    position[order] = np.arange(len(order))
    away = (rank[chunk] != jobs.owner[job]) & jobs.shared[job]
    chunk, job = chunk[away], job[away]
    inside = np.minimum(spans.high[chunk], jobs.high[job]) - np.maximum(
        spans.low[chunk], jobs.low[job]
    )
    density = spans.nbytes[chunk] / (spans.high[chunk] - spans.low[chunk])
    cost = np.ceil(np.maximum(inside, 0) * density).astype(np.int64)
    who = np.concatenate([rank[chunk], jobs.owner[job]])
    when, much = np.tile(position[job], 2), np.tile(cost, 2)
    sort = np.lexsort((when, who))
    who, when, much = who[sort], when[sort], much[sort]
    edges = np.searchsorted(who, np.arange(world + 1))
    total = starts(much)
    low = number_of = 0
    while low < len(order):
        high = len(order)
        for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            now = begin + int(np.searchsorted(when[begin:end], low))
            past = int(np.searchsorted(total[now : end + 1], total[now] + limit, "right")) + now - 1
            if past < end:
                high = min(high, int(when[past]))
        high = max(high, low + 1)
        turn[order[low:high]] = number_of
        low, number_of = high, number_of + 1
    return turn


def deal(
    space: Space,
    tensors: TensorTable,
    chunks: ChunkTable,
    place: Ints,
    world: int,
    limit: int,
) -> list[bytes]:
    """What each rank must know to write its part; `place` is where each tensor begins."""
    spans = _Spans.of(tensors, chunks, place)
    owner = _owners(space, spans, chunks.rank)
    jobs = _Jobs.of(space, owner, _shared(space, spans, chunks.rank, owner))
    if len(jobs.low):
        chunk, job = _pairs(spans.low, spans.high, jobs.low)
    else:
        chunk = job = np.zeros(0, np.int64)
    # Both ends of a transfer go through its pieces in this order.
    sort = np.lexsort((chunk, job))
    chunk, job = chunk[sort], job[sort]
    turn = _rounds(jobs, spans, chunks.rank, chunk, job, world, limit)
    rounds = int(turn.max(initial=LOCAL)) + 1
    by_rank = np.argsort(chunks.rank, kind="stable")
    row = np.zeros(len(chunks), np.int64)
    row[by_rank] = np.arange(len(chunks)) - np.searchsorted(
        chunks.rank[by_rank], chunks.rank[by_rank]
    )
    messages = []
    for rank in range(world):
        mine = np.flatnonzero((jobs.owner[job] == rank) | (chunks.rank[chunk] == rank))
        used_chunks, in_chunk = np.unique(chunk[mine], return_inverse=True)
        used_jobs = np.union1d(job[mine], np.flatnonzero(jobs.owner == rank))
        boxes, whose = chunks.boxes.take(used_chunks), chunks.tensor[used_chunks]
        shapes = Boxes(tensors.shape_start, tensors.shapes, tensors.shapes).take(whose)
        columns: dict[str, Column | bytes] = {
            "low": jobs.low[used_jobs],
            "high": jobs.high[used_jobs],
            "file": jobs.file[used_jobs],
            "owner": jobs.owner[used_jobs],
            "round": turn[used_jobs],
            "place": place[whose],
            "item": tensors.itemsize[whose],
            "ndim": boxes.ndim,
            "shapes": shapes.sizes,
            "offsets": boxes.offsets,
            "sizes": boxes.sizes,
            "rank": chunks.rank[used_chunks],
            "row": row[used_chunks],
            "dense": spans.dense[used_chunks].astype(np.int8),
            "first": spans.first[used_chunks],
            "pair_chunk": in_chunk.reshape(-1),
            "pair_job": np.searchsorted(used_jobs, job[mine]),
            "numbers": np.array([rank, world, rounds], np.int64),
            "base": space.base,
        }
        messages.append(pack({key: narrow(np.asarray(c)) for key, c in columns.items()}))
    return messages


@dataclass(frozen=True, eq=False)
class Deal:
    """What one rank knows of it: jobs it writes or sends to, and the chunks in them."""

    rank: int
    """This rank."""
    world: int
    """How many there are."""
    rounds: int
    """How often bytes travel; the same on all ranks."""
    base: Ints
    """Where each file begins in the space."""
    low: Ints
    """First byte of each job, in the space."""
    high: Ints
    """Where it ends."""
    file: Ints
    """Which file it is in."""
    owner: Ints
    """Who writes it."""
    round: Ints
    """When what belongs to it travels, or `LOCAL`."""
    place: Ints
    """First byte of the tensor of each chunk."""
    item: Ints
    """Bytes of an element."""
    shapes: Boxes
    """Shape of the tensor of each chunk, as sizes; the offsets are those of the chunk."""
    boxes: Boxes
    """The chunks."""
    holder: Ints
    """Who has the elements."""
    row: Ints
    """Which of the holder's chunks it is."""
    dense: Ints
    """Whether its elements follow each other in the tensor."""
    first: Ints
    """Its first element, among those of the tensor."""
    pair_chunk: Ints
    """Chunks that have elements in jobs, in the order in which they travel ..."""
    pair_job: Ints
    """... and the job of each."""

    @classmethod
    def decode(cls, message: bytes) -> Deal:
        """What `deal` made for a rank."""
        part: dict[str, Ints] = {
            key: column.astype(np.int64) for key, column in unpack(message).items()
        }
        rank, world, rounds = part["numbers"].tolist()
        begin = starts(part["ndim"])
        return cls(
            rank,
            world,
            rounds,
            part["base"],
            part["low"],
            part["high"],
            part["file"],
            part["owner"],
            part["round"],
            part["place"],
            part["item"],
            Boxes(begin, part["offsets"], part["shapes"]),
            Boxes(begin, part["offsets"], part["sizes"]),
            part["rank"],
            part["row"],
            part["dense"],
            part["first"],
            part["pair_chunk"],
            part["pair_job"],
        )
