# SPDX-License-Identifier: Apache-2.0
"""`ShardedArray`: boxes of a larger tensor, each an array of any library."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shardkeep.arrays import (
    YIELDING,
    ArrayAdapter,
    ArrayForm,
    LocalTarget,
    NotComposite,
    SinkPiece,
    Source,
    Staging,
    TargetsApart,
    Unstepped,
    adapter_of,
    settle_all,
)
from shardkeep.dtypes import DType, lookup
from shardkeep.errors import UnsupportedValueError
from shardkeep.sharding import LocalShard, ShardedArray

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["ADAPTER"]


class ShardedArrays(NotComposite, TargetsApart, Unstepped):
    """The adapter for `shardkeep.ShardedArray`."""

    def claims(self, kind: type) -> bool:
        """Exactly `ShardedArray` and what is derived from it."""
        return issubclass(kind, ShardedArray)

    def glances(self, values: Sequence[ShardedArray]) -> Sequence[Hashable | None]:
        """All it says of itself, and the glances of its local arrays."""
        found: list[Hashable | None] = []
        for value in values:
            inner = []
            for shard in value.local_shards:
                adapter = adapter_of(shard.array)
                glance = None if adapter is None else adapter.glances((shard.array,))[0]
                inner.append((shard.metadata.box, glance))
            declared = value.replicas, value.yields
            whole = (value.shape, value.metadata.tensor_properties, declared, tuple(inner))
            found.append(None if any(glance is None for _, glance in inner) else whole)
        return found

    def form(self, value: ShardedArray, where: str) -> ArrayForm:
        """The boxes it lists."""
        for shard in value.local_shards:
            _inner(shard, where).form(shard.array, where)
        boxes = tuple(shard.metadata.box for shard in value.local_shards)
        properties = value.metadata.tensor_properties
        dtype = lookup(properties.dtype)
        replicas = YIELDING if value.yields else value.replicas
        return ArrayForm(value.shape, dtype, properties, boxes, replicas)

    def sources(self, value: ShardedArray, where: str) -> Sequence[Source]:
        """The local arrays."""
        shards = value.local_shards
        return [_inner(shard, where).sources(shard.array, where)[0] for shard in shards]

    def addresses(self, values: Sequence[ShardedArray]) -> Sequence[int]:
        """That of the first local array, if none of them is empty."""
        found = []
        for value in values:
            shards = value.local_shards
            each = [_inner(shard, "").addresses((shard.array,))[0] for shard in shards]
            found.append(each[0] if all(each) and each else 0)
        return found

    def tie(self, value: ShardedArray) -> Hashable:
        """Those of all local arrays."""
        return tuple(_inner(shard, "").tie(shard.array) for shard in value.local_shards)

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

    def settle(self, values: Iterable[ShardedArray], wait: bool = True) -> Staging | None:
        """Those of the local arrays."""
        arrays = [shard.array for value in values for shard in value.local_shards]
        return settle_all([adapter_of(array) for array in arrays], arrays, wait)

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
