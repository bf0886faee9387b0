# SPDX-License-Identifier: Apache-2.0
"""Values of any class that say which boxes of a tensor they hold.

The fields are those proposed for PyTorch (`CheckpointableTensor`), so a tensor that carries them
for PyTorch works here unchanged.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from shardkeep.arrays import (
    SHARD_FIELDS,
    ArrayAdapter,
    ArrayForm,
    LocalTarget,
    NotComposite,
    Source,
    Staging,
    TargetsApart,
    Unstepped,
    library_adapter,
    settle_all,
    source_parts,
)
from shardkeep.dtypes import DType
from shardkeep.errors import UnsupportedValueError
from shardkeep.metadata import ChunkStorageMetadata, TensorProperties, int_tuple

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["ADAPTER", "ShardProtocol"]


class ShardProtocol(Protocol):
    """Boxes of a larger tensor, all within one local array.

    The local array is what `local_tensor()` gives, where there is such a method, or the value
    itself: the fields may be set on a plain torch tensor. It is filled in place on load. A class of
    its own must have the fields as class attributes, properties or annotations.
    """

    global_shape: Sequence[int]
    """Shape of the whole tensor."""
    global_offsets: Sequence[Sequence[int]]
    """Where each box begins in the whole tensor; none where nothing is held here."""
    local_offsets: Sequence[Sequence[int]]
    """Where each box begins in the local array."""
    local_sizes: Sequence[Sequence[int]]
    """Extent of each box."""


class ShardValues(NotComposite, TargetsApart, Unstepped):
    """The adapter for values that follow `ShardProtocol`."""

    def claims(self, kind: type) -> bool:
        """Decided by the fields, before anybody asks."""
        return True

    def glances(self, values: Sequence[Any]) -> Sequence[Hashable | None]:
        """Nothing quick is known."""
        return [None] * len(values)

    def form(self, value: Any, where: str) -> ArrayForm:
        """The boxes it lists. Equal ones on several ranks are compared, not declared replicas."""
        adapter, local = _local(value, where)
        inner = adapter.form(local, where)
        shape, boxes = _boxes(value, inner.shape, where)
        properties = TensorProperties(
            inner.dtype.name, requires_grad=inner.properties.requires_grad
        )
        return ArrayForm(shape, inner.dtype, properties, tuple(box for box, _ in boxes))

    def sources(self, value: Any, where: str) -> Sequence[Source]:
        """Regions of the local array."""
        adapter, local = _local(value, where)
        local_shape = adapter.form(local, where).shape
        regions = [here for _, here in _boxes(value, local_shape, where)[1]]
        return source_parts(adapter.sources(local, where)[0], local_shape, regions)

    def addresses(self, values: Sequence[Any]) -> Sequence[int]:
        """Those of the local arrays."""
        found = [_local(value, "") for value in values]
        return [adapter.addresses((local,))[0] for adapter, local in found]

    def tie(self, value: Any) -> Hashable:
        """That of the local array."""
        adapter, local = _local(value, "")
        return adapter.tie(local)

    def signature(self, value: Any, where: str) -> tuple[tuple[int, ...], DType]:
        """Shape of the whole tensor and element type."""
        adapter, local = _local(value, where)
        local_shape, dtype = adapter.signature(local, where)
        return _boxes(value, local_shape, where)[0], dtype

    def target(self, value: Any, where: str, device: object) -> LocalTarget:
        """The local array is filled in place, where there are boxes."""
        adapter, local = _local(value, where)
        inner = adapter.target(local, where, device)
        if inner.result is not local:
            raise UnsupportedValueError(
                f"{where}: the local array of a {type(value).__qualname__} with shard fields holds "
                "no memory to fill; allocate it first"
            )
        shape, boxes = _boxes(value, inner.shape, where)
        pieces = [inner.pieces[0].part(here, box) for box, here in boxes]
        return LocalTarget(shape, inner.dtype, pieces, value)

    def settle(self, values: Iterable[Any], wait: bool = True) -> Staging | None:
        """Those of the local arrays."""
        found = [_local(value, "") for value in values]
        return settle_all([adapter for adapter, _ in found], [local for _, local in found], wait)

    def from_numpy(self, array: npt.NDArray[np.generic], dtype: DType) -> object:
        """The array itself, whole."""
        return array


def _local(value: Any, where: str) -> tuple[ArrayAdapter, object]:
    given = getattr(value, "local_tensor", None)
    local = given() if callable(given) else value
    adapter = library_adapter(type(local))
    if adapter is None:
        raise UnsupportedValueError(
            f"{where}: a {type(value).__qualname__} has the fields {', '.join(SHARD_FIELDS)} but "
            f"its local array is a {type(local).__qualname__}; give it a method local_tensor() "
            "that returns an array"
        )
    return adapter, local


def _boxes(
    value: ShardProtocol, local_shape: tuple[int, ...], where: str
) -> tuple[tuple[int, ...], list[tuple[ChunkStorageMetadata, ChunkStorageMetadata]]]:
    """Shape of the whole tensor, and each box in it and in the local array."""
    try:
        shape = int_tuple(value.global_shape)
        listed = zip(value.global_offsets, value.local_offsets, value.local_sizes, strict=True)
        boxes = [
            (
                ChunkStorageMetadata(int_tuple(there), int_tuple(sizes)),
                ChunkStorageMetadata(int_tuple(here), int_tuple(sizes)),
            )
            for there, here, sizes in listed
        ]
        for box, here in boxes:
            _check_inside(box, shape, "the tensor")
            _check_inside(here, local_shape, "the local array")
    except (AttributeError, TypeError, ValueError) as error:
        raise UnsupportedValueError(f"{where}: the shard fields are wrong: {error}") from error
    return shape, [(box, here) for box, here in boxes if 0 not in box.sizes]


def _check_inside(box: ChunkStorageMetadata, shape: tuple[int, ...], of: str) -> None:
    ends = [o + s for o, s in zip(box.offsets, box.sizes, strict=True)]
    if len(ends) != len(shape) or any(e > n for e, n in zip(ends, shape, strict=True)):
        raise ValueError(
            f"offsets {box.offsets} sizes {box.sizes} reach out of shape {shape} of {of}"
        )


ADAPTER = ShardValues()
