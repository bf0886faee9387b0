# SPDX-License-Identifier: Apache-2.0
"""`ShardedArray`: boxes of a larger tensor, each an array of any library."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardkeep.arrays import (
    ArrayAdapter,
    ArrayParts,
    LocalArray,
    LocalTarget,
    SinkPiece,
    SourcePiece,
    adapter_of,
)
from shardkeep.dtypes import DType, lookup
from shardkeep.errors import UnsupportedValueError
from shardkeep.sharding import LocalShard, ShardedArray

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["ADAPTER"]


class ShardedArrays:
    """The adapter for `shardkeep.ShardedArray`."""

    def claims(self, kind: type) -> bool:
        """Exactly `ShardedArray` and what is derived from it."""
        return issubclass(kind, ShardedArray)

    def held(self, value: object, where: str) -> LocalArray:
        """The boxes it lists."""
        assert isinstance(value, ShardedArray)
        pieces, ties = [], []
        for shard in value.local_shards:
            inner = _inner(shard, where).held(shard.array, where)
            pieces.append(SourcePiece(shard.metadata.box, inner.pieces[0].source))
            ties.append(inner.tie)
        tie = tuple(ties) if ties and None not in ties else None
        properties = value.metadata.tensor_properties
        dtype = lookup(properties.dtype)
        return LocalArray(value.shape, dtype, properties, pieces, value.replicas, tie)

    def signature(self, value: object, where: str) -> tuple[tuple[int, ...], DType]:
        """Shape of the whole tensor and element type."""
        assert isinstance(value, ShardedArray)
        return value.shape, lookup(value.dtype)

    def target(self, value: object, where: str, device: object) -> LocalTarget:
        """Each local array is filled in place; abstract ones are allocated."""
        assert isinstance(value, ShardedArray)
        pieces, shards = [], []
        for shard in value.local_shards:
            inner = _inner(shard, where).target(shard.array, where, device)
            piece = inner.pieces[0]
            pieces.append(SinkPiece(shard.metadata.box, piece.sink, piece.memory))
            shards.append(LocalShard(inner.result, shard.metadata))  # type: ignore[arg-type]
        same = all(a.array is b.array for a, b in zip(shards, value.local_shards, strict=True))
        result = value if same else replace(value, local_shards=tuple(shards))
        return LocalTarget(value.shape, lookup(value.dtype), pieces, result)

    def parts(self, value: object, where: str) -> ArrayParts | None:
        """Not composite: its boxes are boxes of one tensor."""
        return None

    def from_numpy(self, array: npt.NDArray[np.generic], dtype: DType) -> object:
        """The array itself, whole."""
        return array


def _inner(shard: LocalShard, where: str) -> ArrayAdapter:
    adapter = adapter_of(shard.array)
    if adapter is None or isinstance(adapter, ShardedArrays):
        raise UnsupportedValueError(
            f"{where}: a local shard is a {type(shard.array).__qualname__}, expected an array"
        )
    return adapter


ADAPTER = ShardedArrays()
