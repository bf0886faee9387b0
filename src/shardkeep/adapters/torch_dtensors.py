# SPDX-License-Identifier: Apache-2.0
"""What PyTorch spreads over processes: `DTensor`, `ShardedTensor`, results still on their way.

Which boxes a DTensor holds follows from its mesh, placements and shape alone (`dtensor_layout`).
PyTorch's own chunk lists give one box per rank, which is wrong for strided shards with holes and
for uneven ones; so they are not asked, and a local tensor of another shape is refused.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from shardkeep.adapters import torch_steps
from shardkeep.adapters.dtensor_layout import (
    Placement,
    StridedShard,
    in_shard_order,
    local_boxes,
    local_shape,
)
from shardkeep.adapters.dtensor_wrappers import Spread as _Spread
from shardkeep.adapters.dtensor_wrappers import wrapped_parts
from shardkeep.adapters.torch_tensors import ADAPTER as TENSORS
from shardkeep.adapters.torch_tensors import properties_of
from shardkeep.arrays import (
    ArrayForm,
    ArrayParts,
    LocalTarget,
    Sink,
    SinkPiece,
    Source,
    Staging,
    Stepped,
    source_parts,
)
from shardkeep.dtypes import DType, lookup
from shardkeep.errors import UnsupportedValueError
from shardkeep.metadata import ChunkStorageMetadata, int_tuple
from shardkeep.sharding import Replicate, Shard

__all__ = ["ADAPTER"]


class TorchDistributed:
    """The adapter for the tensor classes of `torch.distributed`; what differs is in their kind."""

    def claims(self, kind: type) -> bool:
        """Only those; other subclasses of tensors are judged by `torch_tensors`."""
        return _kind_of(kind) is not None

    def glances(self, values: Sequence[Any]) -> Sequence[Hashable | None]:
        """What each kind knows."""
        kinds = {_kind_of(kind) for kind in set(map(type, values))}
        if len(kinds) == 1:
            return _kind(values[0]).glances(values)
        return [_kind(value).glances((value,))[0] for value in values]

    def form(self, value: object, where: str) -> ArrayForm:
        """The boxes of this rank."""
        return _kind(value).form(value, where)

    def sources(self, value: object, where: str) -> Sequence[Source]:
        """The elements of those boxes."""
        return _kind(value).sources(value, where)

    def addresses(self, values: Sequence[Any]) -> Sequence[int]:
        """What each kind knows."""
        kinds = {_kind_of(kind) for kind in set(map(type, values))}
        if kinds == {_DTENSORS}:
            locals_ = list(map(_LOCAL, values))
            if set(map(type, locals_)) <= _PLAIN:
                found = TENSORS.addresses(locals_)
                if all(found):
                    return found
        return [_kind(value).address(value) for value in values]

    def tie(self, value: object) -> Hashable:
        """That of the local memory."""
        return _kind(value).tie(value)

    def signature(self, value: object, where: str) -> tuple[tuple[int, ...], DType]:
        """Shape of the whole tensor and element type."""
        return _kind(value).signature(value, where)

    def target(self, value: object, where: str, device: object) -> LocalTarget:
        """Local tensors are filled in place; meta DTensors are allocated."""
        return _kind(value).target(value, where, device)

    def target_glances(self, values: Sequence[Any]) -> Sequence[Hashable | None]:
        """Those of DTensors; among others they are asked for one by one."""
        if all(_kind_of(kind) is _DTENSORS for kind in set(map(type, values))):
            return _DTENSORS.target_glances(values)
        return [None] * len(values)

    def target_addresses(
        self, values: Sequence[Any], names: Sequence[str], reach: Sequence[int]
    ) -> Sequence[int]:
        """Those of the local tensors."""
        return TENSORS.target_addresses(list(map(_LOCAL, values)), names, reach)

    def sink(self, value: Any, dtype: DType) -> Sink:
        """The memory of the local tensor."""
        return TENSORS.sink(value._local_tensor, dtype)

    def host_addresses(self, values: Sequence[Any], nbytes: Sequence[int]) -> Sequence[int]:
        """Of those with one local part."""
        parts = [_kind(value).locals(value) for value in values]
        alone = [len(mine) == 1 for mine in parts]
        found = iter(
            TENSORS.host_addresses(
                [mine[0] for mine, is_alone in zip(parts, alone, strict=True) if is_alone],
                [size for size, is_alone in zip(nbytes, alone, strict=True) if is_alone],
            )
        )
        return [next(found) if is_alone else 0 for is_alone in alone]

    def stepped(self, values: Sequence[Any]) -> Stepped:
        """Where the only local part is. Changes are their own, which torch counts, and those of the
        local parts, whose optimizer does."""
        own = [_kind(value) is _DTENSORS for value in values]  # others cannot be asked
        parts = [
            [value] * is_own + _kind(value).locals(value)
            for value, is_own in zip(values, own, strict=True)
        ]
        found = torch_steps.stepped([part for mine in parts for part in mine])
        end = np.cumsum([len(mine) for mine in parts])
        alone = np.array(list(map(len, parts)), np.int64) == 1 + np.array(own, np.int64)
        which = np.zeros(len(values), np.bool_)
        spans = np.zeros((len(values), 2), np.uint64)
        which[alone] = np.array(found.which, np.bool_)[end[alone] - 1]
        spans[alone] = found.spans[end[alone] - 1]

        def changed() -> list[bool]:
            now = iter(found.changed())
            return [any([next(now) for _ in mine]) for mine in parts]

        return Stepped(which.tolist(), spans, changed, np.zeros(len(values), np.bool_))

    def settle(self, values: Iterable[Any], wait: bool = True) -> Staging | None:
        """What the local tensors need."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return None
        locals_ = [part for value in values for part in _kind(value).locals(value)]
        return TENSORS.settle(locals_, wait)

    def is_composite(self, kind: type) -> bool:
        """A DTensor may be around a wrapper subclass."""
        return _kind_of(kind) is _DTENSORS

    def parts(self, value: Any) -> ArrayParts | None:
        """Of a DTensor around a wrapper subclass: parts that are spread like it."""
        local = value._local_tensor
        return _DTENSORS.parts(value, local) if _is_wrapper(type(local)) else None  # type: ignore[arg-type]

    def any_composite(self, values: Sequence[Any]) -> bool:
        """Whether any local tensor is a wrapper subclass."""
        return any(map(_is_wrapper, set(map(type, map(_LOCAL, values)))))

    def from_numpy(self, array: npt.NDArray[np.generic], dtype: DType) -> object:
        """A plain tensor over the same memory."""
        return TENSORS.from_numpy(array, dtype)


class _Kind(Protocol):
    """One class of tensors; the methods are those of an adapter."""

    def glances(self, values: Sequence[Any]) -> Sequence[Hashable | None]: ...

    def form(self, value: Any, where: str) -> ArrayForm: ...

    def sources(self, value: Any, where: str) -> Sequence[Source]: ...

    def locals(self, value: Any) -> list[torch.Tensor]: ...

    def address(self, value: Any) -> int: ...

    def tie(self, value: Any) -> Hashable: ...

    def signature(self, value: Any, where: str) -> tuple[tuple[int, ...], DType]: ...

    def target(self, value: Any, where: str, device: object) -> LocalTarget: ...


@cache
def _kind_of(kind: type) -> _Kind | None:
    # By name, because importing the classes would cost those who do not use them.
    for cls in kind.__mro__:
        if cls.__name__ in _KINDS and cls.__module__.startswith("torch.distributed"):
            return _KINDS[cls.__name__]
    return None


def _kind(value: object) -> _Kind:
    kind = _kind_of(type(value))  # type: ignore[arg-type]
    assert kind is not None
    return kind


_PLAIN = {torch.Tensor, torch.nn.Parameter}
_LOOKS = attrgetter("_spec", "_local_tensor", "requires_grad")
_LOCAL = attrgetter("_local_tensor")
_SPEC = attrgetter("_spec")
_LOCAL_LOOKS = attrgetter("__class__", "shape", "dtype", "layout", "is_meta")
_SPEC_LOOKS = attrgetter(
    "mesh", "placements", "shape", "shard_order", "use_strided_shard_as_shard_order"
)

# --- DTensor ------------------------------------------------------------------------------------


class _Mesh:
    """What follows from a mesh; asked for every tensor, and few answers differ."""

    def __init__(self, mesh: Any) -> None:
        self._ranks: npt.NDArray[np.int64] = mesh.mesh.numpy().astype(np.int64)
        self._shape = self._ranks.shape
        text = repr((self._shape, self._ranks.ravel().tolist())).encode()
        self._name = f"mesh {xxhash.xxh3_64_hexdigest(text)}"
        self._known: dict[Hashable, _Spread] = {}

    def spread(self, value: Any, coordinate: Any, placements: tuple[Placement, ...]) -> _Spread:
        """Where the rank at this place has its part of a DTensor."""
        # Both say what the placements do not; PyTorch has no public name for them.
        order = getattr(value._spec, "shard_order", None)
        strided_is_order = getattr(value._spec, "use_strided_shard_as_shard_order", True)
        key = (value.shape, coordinate, placements, order, strided_is_order)
        found = self._known.get(key)
        if found is None:
            cuts, axes = self._in_order(placements, order, strided_is_order is not False)
            shape = int_tuple(value.shape)
            at = (shape, self._shape, coordinate, cuts, axes)
            replicas = self._replicas(coordinate, placements)
            found = _Spread(shape, local_shape(*at), local_boxes(*at), replicas)
            self._known[key] = found
        return found

    def _in_order(
        self, placements: tuple[Placement, ...], order: Any, strided_is_order: bool
    ) -> tuple[tuple[Placement, ...], tuple[int, ...] | None]:
        """How each mesh axis cuts, and in which order; None is from the first to the last."""
        strided = any(isinstance(placement, StridedShard) for placement in placements)
        if strided and strided_is_order:
            return in_shard_order(self._shape, placements) or (placements, None)
        if not order:
            return placements, None
        return placements, tuple(axis for entry in order for axis in entry.mesh_dims)

    def _replicas(
        self, coordinate: tuple[int, ...], placements: tuple[Placement, ...]
    ) -> tuple[Hashable, ...]:
        axes = tuple(
            slice(None) if isinstance(placement, Replicate) else at
            for at, placement in zip(coordinate, placements, strict=True)
        )
        return (self._name, *np.sort(self._ranks[axes], axis=None).tolist())


class _DTensors:
    """`DTensor`, with any mix of `Shard`, `_StridedShard` and `Replicate`."""

    def __init__(self) -> None:
        self._meshes: WeakKeyDictionary[Any, _Mesh] = WeakKeyDictionary()

    def glances(self, values: Sequence[Any]) -> Sequence[Hashable | None]:
        """Everything that `form` looks at, of the tensor, its layout and its local tensor."""
        try:
            specs, locals_, gradients = zip(*map(_LOOKS, values), strict=True)
            layouts = map(_SPEC_LOOKS, specs)
            return list(zip(layouts, map(_LOCAL_LOOKS, locals_), gradients, strict=True))
        except Exception:
            return [None] * len(values)

    def form(self, value: Any, where: str) -> ArrayForm:
        """The boxes of the local tensor; ranks along replicated axes are declared replicas."""
        spread = self._spread(value, where)
        dtype = TENSORS.form(_local(value, where), where).dtype
        properties = properties_of(dtype.name, value.requires_grad)
        boxes = tuple(box for box, _ in spread.boxes)
        return ArrayForm(spread.shape, dtype, properties, boxes, spread.replicas)

    def sources(self, value: Any, where: str) -> Sequence[Source]:
        """Regions of the local tensor."""
        spread, local = self._spread(value, where), _local(value, where)
        regions = [here for _, here in spread.boxes]
        return source_parts(TENSORS.sources(local, where)[0], tuple(local.shape), regions)

    def locals(self, value: Any) -> list[torch.Tensor]:
        """Its local tensor."""
        return [_local(value, "")]

    def address(self, value: Any) -> int:
        """That of the local tensor; where nothing is here, that of its storage."""
        local = _local(value, "")
        # A tie counts only where every rank has it, so also those that hold nothing say theirs.
        found: int = local.data_ptr() or local.untyped_storage()._cdata
        return found

    def tie(self, value: Any) -> Hashable:
        """That of the local tensor."""
        local = _local(value, "")
        if local.numel() == 0:
            return ("torch", "empty", local.untyped_storage()._cdata, local.dtype)
        return TENSORS.tie(local)

    def signature(self, value: Any, where: str) -> tuple[tuple[int, ...], DType]:
        """Shape of the whole tensor and element type; refuses what cannot be filled."""
        spread = self._spread(value, where)
        return spread.shape, TENSORS.signature(_local(value, where), where)[1]

    def target(self, value: Any, where: str, device: object) -> LocalTarget:
        """The local tensor is filled in place; a meta one is allocated, on the mesh's device."""
        spread = self._spread(value, where)
        local, result = _local(value, where), value
        if local.device.type == "meta":
            result, local = _allocated(value, local, device)
        inner = TENSORS.target(local, where, device)
        pieces = [inner.pieces[0].part(here, box) for box, here in spread.boxes]
        return LocalTarget(spread.shape, inner.dtype, pieces, result, inner.memory)

    def target_glances(self, values: Sequence[Any]) -> Sequence[Hashable | None]:
        """Everything that `target` looks at, of the layout and of the local tensor."""
        try:
            locals_ = list(map(_LOCAL, values))
            if not set(map(type, locals_)) <= _PLAIN:
                return [None] * len(values)
            inner = TENSORS.target_glances(locals_)
            if None in inner:
                return [None] * len(values)
            layouts = map(_SPEC_LOOKS, map(_SPEC, values))
            return list(zip(layouts, inner, strict=True))
        except Exception:
            return [None] * len(values)

    def parts(self, value: Any, local: Any) -> ArrayParts:
        """The inner tensors of its local tensor, each as a part of a whole one."""
        return wrapped_parts(value, local, self._spread(value, "a DTensor"))

    def _spread(self, value: Any, where: str) -> _Spread:
        mesh = value.device_mesh
        placements = tuple([_placement(p, where) for p in value.placements])
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            # This rank is not in the mesh: it knows of the tensor and holds nothing of it.
            return _Spread(int_tuple(value.shape), None, (), ())
        known = self._meshes.get(mesh)
        if known is None:
            known = self._meshes[mesh] = _Mesh(mesh)
        spread = known.spread(value, tuple(coordinate), placements)
        found = tuple(value._local_tensor.shape)
        if spread.local_shape != found:
            raise UnsupportedValueError(
                f"{where}: the local tensor has shape {found}; of a DTensor of shape "
                f"{spread.shape} with placements {value.placements} on a mesh of shape "
                f"{tuple(mesh.shape)} the rank at {tuple(coordinate)} holds {spread.local_shape}. "
                "Shards of other sizes can be saved as shardkeep.ShardedArray"
            )
        return spread


def _placement(placement: Any, where: str) -> Placement:
    """By name: PyTorch has made strided shards a kind of shard, and not, in turn."""
    name = type(placement).__name__
    if name == "_StridedShard":
        return StridedShard(placement.dim, int(placement.split_factor))
    if name == "Shard":
        return Shard(placement.dim)
    if name == "Replicate":
        return Replicate()
    advice = "cannot be stored"
    if "Partial" in name:
        advice = "is not yet reduced; redistribute it to Shard or Replicate first"
    raise UnsupportedValueError(f"{where}: a DTensor with placement {placement} {advice}")


@cache
def _is_wrapper(kind: type) -> bool:
    """Whether local tensors of this class are stored as the tensors they are made of."""
    plain = kind in _PLAIN or kind.__name__ == "AsyncCollectiveTensor"
    return not plain and hasattr(kind, "__tensor_flatten__")


def _local(value: Any, where: str) -> torch.Tensor:
    local: Any = value._local_tensor
    if type(local).__name__ == "AsyncCollectiveTensor":
        local = local.trigger_wait()
    if type(local) not in _PLAIN:
        raise UnsupportedValueError(
            f"{where}: the local tensor of the DTensor is a {type(local).__module__}."
            f"{type(local).__qualname__}, a class that does not say what it is made of "
            "(__tensor_flatten__)"
        )
    plain: torch.Tensor = local
    return plain


def _allocated(value: Any, meta: torch.Tensor, device: object) -> tuple[Any, torch.Tensor]:
    """A DTensor like an abstract one, and its local tensor, which holds nothing yet."""
    place: Any = value.device_mesh.device_type if device is None else device
    local = torch.empty_like(meta, device=place, requires_grad=False)
    # Not by from_local: it would move the memory to the mesh's device, and forget the shard order.
    parameter = isinstance(value, torch.nn.Parameter)
    gradient = value.requires_grad
    made = type(value)(local, value._spec, requires_grad=gradient and not parameter)
    if parameter:
        made = torch.nn.Parameter(made, requires_grad=gradient)
    return made, made._local_tensor


# --- ShardedTensor, AsyncCollectiveTensor -------------------------------------------------------


class _ShardedTensors:
    """`ShardedTensor`: it lists its boxes itself. Equal boxes on several ranks are compared."""

    def glances(self, values: Sequence[Any]) -> Sequence[Hashable | None]:
        """Nothing quick is known."""
        return [None] * len(values)

    def form(self, value: Any, where: str) -> ArrayForm:
        """Its local shards."""
        shape, dtype = self.signature(value, where)
        for shard in value.local_shards():
            TENSORS.form(shard.tensor, where)
        gradient = value.metadata().tensor_properties.requires_grad
        properties = properties_of(dtype.name, bool(gradient))
        return ArrayForm(shape, dtype, properties, tuple(map(_box_of, value.local_shards())))

    def sources(self, value: Any, where: str) -> Sequence[Source]:
        """The tensors of its local shards."""
        return [TENSORS.sources(shard.tensor, where)[0] for shard in value.local_shards()]

    def locals(self, value: Any) -> list[torch.Tensor]:
        """Of all local shards."""
        return [shard.tensor for shard in value.local_shards()]

    def address(self, value: Any) -> int:
        """That of the first local shard, if none of them is empty."""
        each = TENSORS.addresses([shard.tensor for shard in value.local_shards()])
        return each[0] if each and all(each) else 0

    def tie(self, value: Any) -> Hashable:
        """Those of all local shards."""
        return tuple(TENSORS.tie(shard.tensor) for shard in value.local_shards())

    def signature(self, value: Any, where: str) -> tuple[tuple[int, ...], DType]:
        """From its metadata, which every rank has."""
        metadata = value.metadata()
        return int_tuple(metadata.size), lookup(metadata.tensor_properties.dtype)

    def target(self, value: Any, where: str, device: object) -> LocalTarget:
        """Local shards are filled in place."""
        shape, dtype = self.signature(value, where)
        pieces = []
        for shard in value.local_shards():
            if shard.tensor.device.type == "meta":
                raise UnsupportedValueError(
                    f"{where}: a ShardedTensor on the meta device cannot be filled; use a DTensor"
                )
            piece = TENSORS.target(shard.tensor, where, device).pieces[0]
            pieces.append(SinkPiece(_box_of(shard), piece.sink, piece.memory))
        return LocalTarget(shape, dtype, pieces, value)


def _box_of(shard: Any) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(
        int_tuple(shard.metadata.shard_offsets), int_tuple(shard.metadata.shard_sizes)
    )


class _AsyncTensors:
    """`AsyncCollectiveTensor`: a plain tensor that a collective may still be writing."""

    def glances(self, values: Sequence[Any]) -> Sequence[Hashable | None]:
        """Nothing before they are there."""
        return [None] * len(values)

    def form(self, value: Any, where: str) -> ArrayForm:
        """Of the tensor, once it is there."""
        return TENSORS.form(value.trigger_wait(), where)

    def sources(self, value: Any, where: str) -> Sequence[Source]:
        """The tensor, once it is there."""
        return TENSORS.sources(value.trigger_wait(), where)

    def locals(self, value: Any) -> list[torch.Tensor]:
        """The tensor, once it is there."""
        return [value.trigger_wait()]

    def address(self, value: Any) -> int:
        """Of the tensor, once it is there."""
        return TENSORS.addresses((value.trigger_wait(),))[0]

    def tie(self, value: Any) -> Hashable:
        """Of the tensor, once it is there."""
        return TENSORS.tie(value.trigger_wait())

    def signature(self, value: Any, where: str) -> tuple[tuple[int, ...], DType]:
        """Those of the tensor."""
        return TENSORS.signature(value.trigger_wait(), where)

    def target(self, value: Any, where: str, device: object) -> LocalTarget:
        """Filled in place, once nobody else writes to it."""
        inner = TENSORS.target(value.trigger_wait(), where, device)
        return LocalTarget(inner.shape, inner.dtype, inner.pieces, value)


_DTENSORS = _DTensors()
_KINDS: dict[str, _Kind] = {
    "DTensor": _DTENSORS,
    "ShardedTensor": _ShardedTensors(),
    "AsyncCollectiveTensor": _AsyncTensors(),
}

ADAPTER = TorchDistributed()
