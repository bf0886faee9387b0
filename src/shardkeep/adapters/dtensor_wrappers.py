# SPDX-License-Identifier: Apache-2.0
"""DTensors around wrapper subclasses, such as the 8-bit optimizer states of torchao with FSDP2.

Each inner tensor of the local one is a part of a whole inner tensor:
- one of the local tensor's own shape is spread as the DTensor is, if the class is known to keep
  elements where the tensor has them, or names the inner tensor in `shardkeep_alike`: the shape
  alone does not tell, as one that is kept transposed may have it too;
- one that has an element for every block of the local tensor, in row-major order, is a run of the
  whole one, where the local tensor is a run of whole blocks;
- a table is the same everywhere;
- any other is the rank's own, and fits only the very same layout; of a DTensor that is not cut, it
  is whole.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from shardkeep.adapters.torch_tensors import wrapper_parts
from shardkeep.arrays import ArrayParts
from shardkeep.errors import UnsupportedValueError
from shardkeep.metadata import ChunkStorageMetadata
from shardkeep.sharding import ShardedArray

__all__ = ["Spread", "wrapped_parts"]

_BLOCKWISE = "torchao.optim."
"""Classes whose flat inner tensors go by blocks of elements, in row-major order, and whose others
have an element for each of the tensor's, at its place."""
_TABLES = frozenset({"qmap"})
"""Inner tensors of those that are the same for all elements."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Where in the whole tensor the local tensor of a rank lies."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    local_shape: tuple[int, ...] | None
    """What the local tensor must have; None on a rank outside the mesh."""
    boxes: tuple[tuple[ChunkStorageMetadata, ChunkStorageMetadata], ...]
    """Each box in the whole tensor and in the local one."""
    replicas: tuple[Hashable, ...]
    """The mesh, and its ranks that hold the same boxes: equal on them and nowhere else."""


def wrapped_parts(value: Any, local: Any, spread: Spread) -> ArrayParts:
    """What a DTensor is stored as whose local tensor is a wrapper subclass."""
    kind, names, context = wrapper_parts(local)
    attributes = {"__context__": _of_whole(context, tuple(local.shape), spread.shape)}
    is_known = kind.startswith(_BLOCKWISE)
    declared = getattr(type(local), "shardkeep_alike", ())
    parts: dict[str, object] = {}
    for name in names:
        inner = getattr(local, name)
        made: object = None
        if is_known and name in _TABLES:
            made = inner
        elif inner.shape == local.shape and (is_known or name in declared):
            made = _spread_alike(value, inner)
        elif is_known:
            made = _run_of_blocks(local, inner, spread)
        elif all(placement.is_replicate() for placement in value.placements):
            made = ShardedArray.from_local(
                inner, [0] * inner.dim(), inner.shape, replicas=_ranks(spread)
            )
        if made is None:
            made = _own(value, inner, spread, f"{name} of a {kind}")
            attributes["__layout__"] = [list(value.device_mesh.shape), str(value.placements)]
        parts[name] = made
    return ArrayParts(kind, parts, attributes)


def _ranks(spread: Spread) -> list[int]:
    """Those that hold the same boxes."""
    return [int(rank) for rank in spread.replicas[1:]]  # type: ignore[call-overload]


def _of_whole(context: object, local: tuple[int, ...], whole: tuple[int, ...]) -> object:
    """What else the wrapper needs, as it would be for the whole tensor."""
    if isinstance(context, dict):
        return {key: _of_whole(item, local, whole) for key, item in context.items()}
    if isinstance(context, (list, torch.Size)):
        if len(context) == len(local) and tuple(context) == local:
            return torch.Size(whole)
        return (
            context
            if isinstance(context, torch.Size)
            else [_of_whole(item, local, whole) for item in context]
        )
    return context


def _spread_alike(value: Any, inner: torch.Tensor) -> object:
    spec = value._spec
    meta = type(spec.tensor_meta)(value.shape, value.stride(), inner.dtype)
    alike = type(spec)(spec.mesh, spec.placements, tensor_meta=meta)
    for name in ("shard_order", "use_strided_shard_as_shard_order"):
        if hasattr(spec, name):
            object.__setattr__(alike, name, getattr(spec, name))
    # Not by from_local: it would move the memory to the mesh's device.
    return type(value)(inner, alike, requires_grad=False)


def _run_of_blocks(local: Any, inner: torch.Tensor, spread: Spread) -> ShardedArray | None:
    """The inner tensor as a run of the whole one, if the local tensor is a run of whole blocks."""
    if inner.dim() != 1 or not inner.numel() or local.numel() % inner.numel():
        return None
    if len(spread.boxes) != 1 or not spread.shape:
        return None
    block = local.numel() // inner.numel()
    box = spread.boxes[0][0]
    if box.sizes[1:] != spread.shape[1:]:
        return None  # its rows are cut: what is a run here is none in the whole tensor
    begin, total = box.offsets[0] * math.prod(spread.shape[1:]), math.prod(spread.shape)
    if begin % block or total % block:
        return None
    where, shape = (begin // block,), (total // block,)
    return ShardedArray.from_local(inner, where, shape, replicas=_ranks(spread))


def _own(value: Any, inner: torch.Tensor, spread: Spread, what: str) -> ShardedArray:
    """The inner tensor beside those of all other shards."""
    mesh = value.device_mesh
    at, count = 0, 1
    for coordinate, extent, placement in zip(
        mesh.get_coordinate(), mesh.shape, value.placements, strict=True
    ):
        if not placement.is_replicate():
            at, count = at * extent + coordinate, count * extent
    if math.prod(spread.local_shape or ()) * count != math.prod(spread.shape):
        raise UnsupportedValueError(
            f"{what} cannot be stored: shape {spread.shape} is cut into unequal parts, and the "
            "class does not say which elements of the whole tensor this inner tensor has. If it "
            "has one for each of the tensor's, at the same place, name it in the class attribute "
            "shardkeep_alike"
        )
    offsets, shape = (at, *[0] * inner.dim()), (count, *inner.shape)
    return ShardedArray.from_local(inner.unsqueeze(0), offsets, shape, replicas=_ranks(spread))
