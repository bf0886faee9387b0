# SPDX-License-Identifier: Apache-2.0
"""Sharded-tensor metadata: which boxes make up a tensor, and who holds them.

Specs say how a tensor is cut (`ChunkShardingSpec`, `EnumerableShardingSpec`, `MeshShardingSpec`)
and build its `ShardedTensorMetadata`. `ShardedArray` is how a program without DTensor says "I hold
this box of that tensor". Nothing here belongs to a framework or copies an array.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shardkeep.boxes import Gap, overlap, tiling_fault, volume
from shardkeep.columns import Ints
from shardkeep.dtypes import dtype_name
from shardkeep.errors import PlanError
from shardkeep.metadata import ChunkStorageMetadata, TensorProperties, int_tuple

__all__ = [
    "Array",
    "ChunkShardingSpec",
    "EnumerableShardingSpec",
    "LocalShard",
    "MeshShardingSpec",
    "Replicate",
    "Shard",
    "ShardMetadata",
    "ShardedArray",
    "ShardedTensorMetadata",
    "check_shards",
    "validate_non_overlapping",
]

_RANK = re.compile(r"rank:(\d+)(?:/|\Z)")


class Array(Protocol):
    """What is asked of an array here: any framework's has it."""

    @property
    def shape(self) -> Sequence[int]:
        """Extent in each dimension."""

    @property
    def dtype(self) -> object:
        """The framework's own dtype."""


@dataclass(frozen=True, slots=True)
class ShardMetadata:
    """One box of a tensor and where it lives."""

    shard_offsets: tuple[int, ...]
    """First index in each dimension."""
    shard_sizes: tuple[int, ...]
    """Extent in each dimension; a zero makes the shard empty."""
    placement: str | None = None
    """Rank and device such as `rank:0/cuda:0`; other objects are kept as their text."""

    def __post_init__(self) -> None:
        """Refuse shards that cannot be."""
        object.__setattr__(self, "shard_offsets", int_tuple(self.shard_offsets))
        object.__setattr__(self, "shard_sizes", int_tuple(self.shard_sizes))
        object.__setattr__(self, "placement", _placement(self.placement))
        ChunkStorageMetadata(self.shard_offsets, self.shard_sizes)  # the checks of a box

    @property
    def box(self) -> ChunkStorageMetadata:
        """The shard without its placement."""
        return ChunkStorageMetadata(self.shard_offsets, self.shard_sizes)

    @property
    def rank(self) -> int | None:
        """The rank named by the placement, if it names one.

        >>> ShardMetadata((0,), (4,), "rank:3/cuda:1").rank
        3
        """
        found = _RANK.match(self.placement or "")
        return int(found[1]) if found else None


def _placement(value: object) -> str | None:
    return value if value is None else str(value)


# --- do the shards make the tensor? -------------------------------------------------------------


def validate_non_overlapping(shards: Iterable[ShardMetadata]) -> None:
    """Raise `PlanError` naming two shards that share elements; empty shards share none."""
    listed = tuple(shards)
    if listed:
        _check_ndim(listed, len(listed[0].shard_sizes), "the first shard")
    _check_overlap(listed)


def check_shards(shards: Iterable[ShardMetadata], size: Sequence[int]) -> None:
    """Raise `PlanError` unless the shards cover a tensor of this size exactly once.

    The message names the shard that does not fit, the two that overlap, or the first uncovered box.
    """
    listed, shape = tuple(shards), int_tuple(size)
    _check_inside(listed, shape)
    _check_overlap(listed)
    # Inside and without overlap, equal volume means that nothing is left over.
    if sum(volume(shard.shard_sizes) for shard in listed) == volume(shape):
        return
    gap = tiling_fault(shape, *_matrices(listed, len(shape)))
    assert isinstance(gap, Gap)
    raise PlanError(
        f"no shard covers offsets {gap.box.offsets} sizes {gap.box.sizes} of a tensor of size "
        f"{shape} ({len(listed)} shards). Add the missing shards"
    )


def _check_inside(shards: Sequence[ShardMetadata], size: tuple[int, ...]) -> None:
    _check_ndim(shards, len(size), f"a tensor of size {size}")
    for row, shard in enumerate(shards):
        ends = map(operator.add, shard.shard_offsets, shard.shard_sizes)
        if any(map(operator.gt, ends, size)):
            raise PlanError(
                f"{_described(row, shard)} reaches outside a tensor of size {size}. "
                "Fix its offsets, or the size of the tensor"
            )


def _check_ndim(shards: Sequence[ShardMetadata], ndim: int, of: str) -> None:
    for row, shard in enumerate(shards):
        if len(shard.shard_sizes) != ndim:
            raise PlanError(
                f"{_described(row, shard)} has {len(shard.shard_sizes)} dimensions, {of} has {ndim}"
            )


def _check_overlap(shards: Sequence[ShardMetadata]) -> None:
    pair = _overlapping_pair(shards)
    if pair is None:
        return
    first, second = sorted(pair)
    shared = overlap(shards[first].box, shards[second].box)
    assert shared is not None
    raise PlanError(
        f"{_described(first, shards[first])} and {_described(second, shards[second])} overlap: "
        f"both hold offsets {shared.offsets} sizes {shared.sizes}. List every element in one "
        "shard; copies are declared as replicas"
    )


def _overlapping_pair(shards: Sequence[ShardMetadata]) -> tuple[int, int] | None:
    """Sweep along one dimension: a shard is compared only with those that begin before it ends."""
    rows = np.array([i for i, s in enumerate(shards) if volume(s.shard_sizes) > 0], np.intp)
    if len(rows) < 2:
        return None
    ndim = len(shards[rows[0]].shard_sizes)
    if ndim == 0:
        return int(rows[0]), int(rows[1])
    low, sizes = _matrices([shards[row] for row in rows], ndim)
    # The dimension with the most cuts leaves the fewest to compare.
    along = max(range(ndim), key=lambda dim: len(np.unique(low[:, dim])))
    order = np.argsort(low[:, along], kind="stable")
    rows, low, high = rows[order], low[order], (low + sizes)[order]
    reach = np.searchsorted(low[:, along], high[:, along])
    for at, stop in enumerate(reach.tolist()):
        later = slice(at + 1, stop)
        hit = np.flatnonzero(((low[later] < high[at]) & (high[later] > low[at])).all(axis=1))
        if len(hit):
            return int(rows[at]), int(rows[at + 1 + hit[0]])
    return None


def _matrices(shards: Sequence[ShardMetadata], ndim: int) -> tuple[Ints, Ints]:
    shape = (len(shards), ndim)
    return (
        np.array([shard.shard_offsets for shard in shards], np.int64).reshape(shape),
        np.array([shard.shard_sizes for shard in shards], np.int64).reshape(shape),
    )


def _described(row: int, shard: ShardMetadata) -> str:
    place = "" if shard.placement is None else f" on {shard.placement}"
    return f"shard {row} (offsets {shard.shard_offsets} sizes {shard.shard_sizes}{place})"


@dataclass(frozen=True, slots=True)
class ShardedTensorMetadata:
    """A tensor and the shards it is cut into."""

    shards_metadata: tuple[ShardMetadata, ...]
    """The shards, in any order."""
    size: tuple[int, ...]
    """Shape of the whole tensor."""
    tensor_properties: TensorProperties
    """Element type and the like."""

    def __post_init__(self) -> None:
        """Keep sequences immutable. Whether the shards tile the tensor is left to `check`."""
        object.__setattr__(self, "shards_metadata", tuple(self.shards_metadata))
        object.__setattr__(self, "size", _checked_size(self.size))

    def check(self) -> None:
        """Raise `PlanError` unless the shards cover the tensor exactly once (`check_shards`)."""
        check_shards(self.shards_metadata, self.size)


def _checked_size(size: Iterable[object]) -> tuple[int, ...]:
    checked = int_tuple(size)
    if min(checked, default=0) < 0:
        raise ValueError(f"a tensor cannot have the negative size {checked}")
    return checked


# --- specs: how a tensor is cut -----------------------------------------------------------------


def _part(length: int, parts: int, index: int) -> tuple[int, int]:
    """Offset and size of one part as `torch.chunk` cuts; parts that get nothing lie at the end."""
    step = -(-length // parts)
    start = min(step * index, length)
    return start, min(step, length - start)


def _checked_dim(dim: int, size: tuple[int, ...]) -> int:
    if not -len(size) <= dim < len(size):
        raise ValueError(f"cannot shard dimension {dim} of a tensor of size {size}")
    return dim % len(size)


@dataclass(frozen=True, slots=True)
class ChunkShardingSpec:
    """One dimension cut into equal parts, one per placement, as `torch.chunk` cuts."""

    dim: int
    """Dimension to cut; negative counts from the end."""
    placements: tuple[str, ...]
    """Where each part lives, in order."""

    def __post_init__(self) -> None:
        """Keep placements as text."""
        object.__setattr__(self, "dim", operator.index(self.dim))
        object.__setattr__(self, "placements", tuple(map(str, self.placements)))
        if not self.placements:
            raise ValueError("a ChunkShardingSpec needs at least one placement")

    def build_metadata(
        self, size: Sequence[int], tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        """One shard per placement; where the dimension is too short, the last ones are empty."""
        shape = _checked_size(size)
        dim = _checked_dim(self.dim, shape)
        shards = []
        for index, placement in enumerate(self.placements):
            offsets, sizes = [0] * len(shape), list(shape)
            offsets[dim], sizes[dim] = _part(shape[dim], len(self.placements), index)
            shards.append(ShardMetadata(tuple(offsets), tuple(sizes), placement))
        return ShardedTensorMetadata(tuple(shards), shape, tensor_properties)


@dataclass(frozen=True, slots=True)
class EnumerableShardingSpec:
    """Every shard named, however irregular; refused with `PlanError` if two overlap."""

    shards: tuple[ShardMetadata, ...]
    """All shards of the tensor, of equal dimension."""

    def __post_init__(self) -> None:
        """Refuse what tiles no tensor of any size."""
        object.__setattr__(self, "shards", tuple(self.shards))
        validate_non_overlapping(self.shards)

    def build_metadata(
        self, size: Sequence[int], tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        """The shards as given; `PlanError` unless they cover a tensor of this size exactly once."""
        metadata = ShardedTensorMetadata(self.shards, _checked_size(size), tensor_properties)
        metadata.check()
        return metadata


@dataclass(frozen=True, slots=True)
class Shard:
    """A mesh axis cuts this dimension."""

    dim: int
    """Dimension of the tensor; negative counts from the end."""


@dataclass(frozen=True, slots=True)
class Replicate:
    """Along a mesh axis all ranks hold the same."""


@dataclass(frozen=True, slots=True)
class MeshShardingSpec:
    """Ranks in a grid; each axis cuts one dimension of the tensor or repeats it.

    Axes that cut the same dimension cut one after the other, the first axis first, each as
    `torch.chunk` cuts what the axes before have left.
    """

    mesh_shape: tuple[int, ...]
    """Ranks along each axis."""
    placements: tuple[Shard | Replicate, ...]
    """What each axis does."""
    ranks: tuple[int, ...] | None = None
    """Ranks of the mesh in row-major order; None counts from 0."""

    def __post_init__(self) -> None:
        """Refuse meshes that cannot be."""
        object.__setattr__(self, "mesh_shape", int_tuple(self.mesh_shape))
        object.__setattr__(self, "placements", tuple(self.placements))
        if min(self.mesh_shape, default=1) < 1:
            raise ValueError(f"a mesh cannot have the shape {self.mesh_shape}")
        if len(self.placements) != len(self.mesh_shape):
            raise ValueError(
                f"a mesh of shape {self.mesh_shape} needs {len(self.mesh_shape)} placements, "
                f"found {len(self.placements)}"
            )
        for placement in self.placements:
            if not isinstance(placement, (Shard, Replicate)):
                raise TypeError(f"a mesh axis takes Shard(dim) or Replicate(), found {placement!r}")
        if self.ranks is None:
            return
        ranks = int_tuple(self.ranks)
        object.__setattr__(self, "ranks", ranks)
        count = math.prod(self.mesh_shape)
        if len(ranks) != count or len(set(ranks)) != count or min(ranks) < 0:
            raise ValueError(
                f"a mesh of shape {self.mesh_shape} needs {count} different ranks, found {ranks}"
            )

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """The rank at this place in the mesh."""
        position = 0
        for at, extent in zip(self._checked(coordinate), self.mesh_shape, strict=True):
            position = position * extent + at
        return position if self.ranks is None else self.ranks[position]

    def boxes_of(self, coordinate: Sequence[int], size: Sequence[int]) -> ChunkStorageMetadata:
        """The box that the rank at this place holds of a tensor of this size.

        >>> MeshShardingSpec((2, 3), (Shard(0), Shard(0))).boxes_of((1, 1), (10,))
        ChunkStorageMetadata(offsets=(7,), sizes=(2,))
        """
        shape = _checked_size(size)
        offsets, sizes = [0] * len(shape), list(shape)
        for at, extent, placement in zip(
            self._checked(coordinate), self.mesh_shape, self.placements, strict=True
        ):
            if isinstance(placement, Shard):
                dim = _checked_dim(placement.dim, shape)
                start, sizes[dim] = _part(sizes[dim], extent, at)
                offsets[dim] += start
        return ChunkStorageMetadata(tuple(offsets), tuple(sizes))

    def replicas_of(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        """All ranks that hold the same box as the one at this place, itself included, sorted."""
        axes = [
            range(extent) if isinstance(placement, Replicate) else (at,)
            for at, extent, placement in zip(
                self._checked(coordinate), self.mesh_shape, self.placements, strict=True
            )
        ]
        return tuple(sorted(map(self.rank_at, itertools.product(*axes))))

    def build_metadata(
        self, size: Sequence[int], tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        """Each distinct box once, placed on its first holder in mesh order."""
        shape = _checked_size(size)
        axes = [
            range(1 if isinstance(placement, Replicate) else extent)
            for extent, placement in zip(self.mesh_shape, self.placements, strict=True)
        ]
        holders: dict[ChunkStorageMetadata, int] = {}
        for coordinate in itertools.product(*axes):
            holders.setdefault(self.boxes_of(coordinate, shape), self.rank_at(coordinate))
        shards = tuple(
            ShardMetadata(box.offsets, box.sizes, f"rank:{rank}") for box, rank in holders.items()
        )
        return ShardedTensorMetadata(shards, shape, tensor_properties)

    def _checked(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        checked = int_tuple(coordinate)
        if len(checked) != len(self.mesh_shape) or not all(
            0 <= at < extent for at, extent in zip(checked, self.mesh_shape, strict=True)
        ):
            raise ValueError(f"a mesh of shape {self.mesh_shape} has no place {checked}")
        return checked


# --- arrays that are a part of a tensor ---------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class LocalShard:
    """An array in this process, and which box of its tensor it is."""

    array: Array
    """The data; never copied here."""
    metadata: ShardMetadata
    """Its box."""

    def __post_init__(self) -> None:
        """The array must fill its box."""
        shape = int_tuple(self.array.shape)
        if shape != self.metadata.shard_sizes:
            raise ValueError(
                f"an array of shape {shape} was given for the shard with offsets "
                f"{self.metadata.shard_offsets} sizes {self.metadata.shard_sizes}. "
                "Pass the local part of that size"
            )


@dataclass(frozen=True, slots=True, eq=False)
class ShardedArray:
    """The boxes of one tensor that this process holds: some, one, all or none.

    A box that is outside the tensor, overlaps another here, has another dtype or is not listed in
    the metadata is a `PlanError`.
    """

    local_shards: tuple[LocalShard, ...]
    """What this process holds."""
    metadata: ShardedTensorMetadata
    """The whole tensor; may list only the shards held here."""
    replicas: tuple[int, ...] = ()
    """Ranks declared to hold these same boxes, sorted; empty where nothing is declared."""
    yields: bool = False
    """Whether what a rank holds that does not yield is saved instead; if none does, this is."""

    def __post_init__(self) -> None:
        """Refuse local shards that contradict each other or the tensor."""
        object.__setattr__(self, "local_shards", tuple(self.local_shards))
        object.__setattr__(self, "replicas", tuple(sorted(set(int_tuple(self.replicas)))))
        if self.replicas and self.replicas[0] < 0:
            raise ValueError(f"ranks cannot be negative: replicas {self.replicas}")
        held = [shard.metadata for shard in self.local_shards]
        _check_inside(held, self.shape)
        _check_overlap(held)
        listed = {(s.shard_offsets, s.shard_sizes) for s in self.metadata.shards_metadata}
        for row, shard in enumerate(self.local_shards):
            found = dtype_name(shard.array.dtype)
            if found != self.dtype:
                raise PlanError(
                    f"{_described(row, shard.metadata)} has dtype {found}, its tensor has "
                    f"{self.dtype}. Cast one of them"
                )
            if (shard.metadata.shard_offsets, shard.metadata.shard_sizes) not in listed:
                raise PlanError(
                    f"{_described(row, shard.metadata)} is held here but not listed in the "
                    "tensor's shards_metadata"
                )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self.metadata.size

    @property
    def dtype(self) -> str:
        """Name of the element type in `shardkeep.dtypes.TABLE`."""
        return self.metadata.tensor_properties.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.metadata.size)

    @classmethod
    def from_local(
        cls,
        array: Array,
        offsets: Sequence[int],
        global_shape: Sequence[int],
        *,
        replicas: Sequence[int] = (),
    ) -> ShardedArray:
        """This array is the box at `offsets` of a tensor of shape `global_shape`.

        >>> ShardedArray.from_local(np.zeros((2, 3), "float32"), (4, 0), (8, 3)).shape
        (8, 3)
        """
        return cls.from_shards([(array, offsets)], global_shape, replicas=replicas)

    @classmethod
    def from_shards(
        cls,
        shards: Iterable[tuple[Array, Sequence[int]]],
        global_shape: Sequence[int],
        *,
        dtype: object = None,
        replicas: Sequence[int] = (),
    ) -> ShardedArray:
        """These arrays are the boxes at these offsets; without any, `dtype` must be given."""
        local = tuple(
            LocalShard(array, ShardMetadata(int_tuple(offsets), int_tuple(array.shape)))
            for array, offsets in shards
        )
        return cls._of(local, global_shape, dtype, replicas)

    @classmethod
    def from_mesh(
        cls,
        array: Array,
        spec: MeshShardingSpec,
        coordinate: Sequence[int],
        global_shape: Sequence[int],
    ) -> ShardedArray:
        """This array is what the rank at this place of the mesh holds; replicas follow from it."""
        box = spec.boxes_of(coordinate, global_shape)
        placement = f"rank:{spec.rank_at(coordinate)}"
        shard = LocalShard(array, ShardMetadata(box.offsets, box.sizes, placement))
        return cls._of((shard,), global_shape, None, spec.replicas_of(coordinate))

    @classmethod
    def _of(
        cls,
        shards: tuple[LocalShard, ...],
        global_shape: Sequence[int],
        dtype: object,
        replicas: Sequence[int],
    ) -> ShardedArray:
        if dtype is None:
            if not shards:
                raise ValueError("a ShardedArray that holds nothing needs dtype=")
            dtype = shards[0].array.dtype
        # Only what every holder knows: one that holds nothing must describe the same tensor.
        properties = TensorProperties(dtype_name(dtype))
        listed = tuple(shard.metadata for shard in shards)
        metadata = ShardedTensorMetadata(listed, _checked_size(global_shape), properties)
        return cls(shards, metadata, tuple(replicas))
