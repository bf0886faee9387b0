# SPDX-License-Identifier: Apache-2.0
"""Which elements of a tensor a rank of a mesh holds, by PyTorch's rules. Needs no torch.

Along each dimension a rank holds runs of consecutive indices. A cut takes a part of what the cuts
before have left; what the runs of all dimensions span together are the boxes. A strided shard holds
several runs, so a local tensor may be several boxes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shardkeep.metadata import ChunkStorageMetadata
from shardkeep.sharding import Replicate, Shard

__all__ = ["Placement", "StridedShard", "in_shard_order", "local_boxes", "local_shape"]

Runs: TypeAlias = tuple[tuple[int, int], ...]
"""Begin and end of each run of indices, as they follow each other in the local tensor."""


@dataclass(frozen=True, slots=True)
class StridedShard:
    """A mesh axis cuts each of `split_factor` parts of this dimension, and holds a bit of all."""

    dim: int
    """Dimension of the tensor."""
    split_factor: int
    """How many parts."""


Placement: TypeAlias = Shard | StridedShard | Replicate


def local_boxes(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
    order: Sequence[int] | None = None,
) -> tuple[tuple[ChunkStorageMetadata, ChunkStorageMetadata], ...]:
    """Each box that the rank at `coordinate` holds, in the tensor and in its local tensor.

    Mesh axes cut in `order`; by default the first axis first. Empty boxes are left out.

    >>> local_boxes((8,), (2,), (1,), [StridedShard(0, 2)])[1]  # doctest: +NORMALIZE_WHITESPACE
    (ChunkStorageMetadata(offsets=(6,), sizes=(2,)),
     ChunkStorageMetadata(offsets=(2,), sizes=(2,)))
    """
    spans = []
    for runs in _runs(shape, mesh_shape, coordinate, placements, order):
        sizes = [high - low for low, high in runs]
        starts = itertools.accumulate(sizes, initial=0)
        spans.append([(low, at, n) for (low, _), at, n in zip(runs, starts, sizes, strict=False)])
    boxes = []
    for box in itertools.product(*spans):
        extent = tuple(n for _, _, n in box)
        there = ChunkStorageMetadata(tuple(low for low, _, _ in box), extent)
        boxes.append((there, ChunkStorageMetadata(tuple(at for _, at, _ in box), extent)))
    return tuple(boxes)


def local_shape(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
    order: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Shape of the local tensor of the rank at `coordinate`; see `local_boxes`."""
    return tuple(map(_length, _runs(shape, mesh_shape, coordinate, placements, order)))


def in_shard_order(
    mesh_shape: Sequence[int], placements: Sequence[Placement]
) -> tuple[tuple[Placement, ...], tuple[int, ...]] | None:
    """Strided shards that stand for plain ones made in another order: those, and the order.

    FSDP2 cuts what tensor parallelism has cut before, though its mesh axis comes first, and says so
    by a strided shard with as many parts as the later axes make. Where parts are uneven that is not
    the same as a strided shard by its own definition; the order is what the ranks hold. None where
    no order fits. (The rule is PyTorch's, which gathers such tensors by it.)

    >>> in_shard_order((2, 4), [StridedShard(0, 4), Shard(0)])
    ((Shard(dim=0), Shard(dim=0)), (1, 0))
    """
    orders: dict[int, list[int]] = {}
    plain = list(placements)
    for axis in reversed(range(len(plain))):
        placement = plain[axis]
        if isinstance(placement, Replicate):
            continue
        order = orders.setdefault(placement.dim, [])
        wanted = placement.split_factor if isinstance(placement, StridedShard) else 1
        parts = 1
        for position in range(len(order) + 1):
            if parts == wanted:
                order.insert(position, axis)
                break
            if position == len(order):
                return None
            parts *= mesh_shape[order[position]]
        plain[axis] = Shard(placement.dim)
    return tuple(plain), tuple(itertools.chain.from_iterable(orders.values()))


def _runs(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
    order: Sequence[int] | None,
) -> list[Runs]:
    """What the rank holds along each dimension."""
    held: list[Runs] = [((0, extent),) if extent else () for extent in shape]
    for axis in range(len(mesh_shape)) if order is None else order:
        placement = placements[axis]
        if isinstance(placement, Replicate):
            continue
        dim = placement.dim
        length = _length(held[dim])
        parts = placement.split_factor if isinstance(placement, StridedShard) else 1
        taken: list[tuple[int, int]] = []
        for part in range(parts):
            low, high = _chunk(0, length, parts, part)
            low, high = _chunk(low, high, mesh_shape[axis], coordinate[axis])
            _extend(taken, held[dim], low, high)
        held[dim] = tuple(taken)
    return held


def _length(runs: Runs) -> int:
    return sum(high - low for low, high in runs)


def _chunk(low: int, high: int, parts: int, index: int) -> tuple[int, int]:
    """One part of a range as `torch.chunk` cuts it; parts that get nothing lie at the end."""
    step = -(-(high - low) // parts)
    return min(low + step * index, high), min(low + step * (index + 1), high)


def _extend(taken: list[tuple[int, int]], runs: Runs, low: int, high: int) -> None:
    """Add the indices at positions [low, high) of the runs; what touches becomes one run."""
    at = 0
    for begin, end in runs:
        first, last = max(low - at, 0) + begin, min(high - at, end - begin) + begin
        at += end - begin
        if first >= last:
            continue
        if taken and taken[-1][1] == first:
            first = taken.pop()[0]
        taken.append((first, last))
