# SPDX-License-Identifier: Apache-2.0
"""Torch's metadata to ours and back.

The two say the same with different types: `torch.Size` or tuples, dtype objects or names, a dict
per checkpoint or columns. `to_torch` makes what torch would have written: the offset of a tensor
without dimensions is empty, that of a value None; keys of mappings are text in `planner_data`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo

from shardkeep.columns import Boxes, Ints, starts
from shardkeep.dtypes import TABLE, lookup
from shardkeep.errors import UnsupportedValueError
from shardkeep.global_plan import sort_keys
from shardkeep.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageLocation,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from shardkeep.structure import TENSOR, VALUE, Structure
from shardkeep.tables import ChunkTable, StateColumns, TensorTable, ValueTable
from shardkeep.torch.nesting import paths_of, structure_of

__all__ = ["boxes_of", "from_torch", "properties_from_torch", "tensor_table", "to_torch"]

_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "preserve_format": torch.preserve_format,
}


# --- from torch


@cache
def _properties(
    dtype: torch.dtype, layout: str, requires_grad: bool, memory_format: str, pin_memory: bool
) -> TensorProperties:
    return TensorProperties(str(dtype), layout, requires_grad, memory_format, pin_memory)


def properties_from_torch(properties: dcp.TensorProperties, name: str = "") -> TensorProperties:
    """Ours, or `UnsupportedValueError` naming what cannot be stored."""
    layout = str(properties.layout).rpartition(".")[2]
    if layout != "strided":
        raise UnsupportedValueError(f"{name}: {layout} tensors cannot be stored; save dense parts")
    memory_format = str(properties.memory_format).rpartition(".")[2]
    try:
        return _properties(
            properties.dtype,
            layout,
            bool(properties.requires_grad),
            memory_format if memory_format in _FORMATS else "contiguous_format",
            bool(properties.pin_memory),
        )
    except UnsupportedValueError as error:
        raise UnsupportedValueError(f"{name}: {error}") from None


_offsets, _sizes = attrgetter("offsets"), attrgetter("sizes")


def boxes_of(chunks: Sequence[Any]) -> Boxes:
    """Many of torch's boxes as columns."""
    offsets, sizes = list(map(_offsets, chunks)), list(map(_sizes, chunks))
    start = starts(np.fromiter(map(len, offsets), np.int64, len(chunks)))
    count = int(start[-1])
    return Boxes(
        start,
        np.fromiter((n for box in offsets for n in box), np.int64, count),
        np.fromiter((n for box in sizes for n in box), np.int64, count),
    )


def tensor_table(state: Mapping[str, dcp.STORAGE_TYPES]) -> tuple[TensorTable, list[str]]:
    """The tensors of torch's metadata, by name, and the names of its values."""
    names = sorted(k for k, v in state.items() if isinstance(v, dcp.TensorStorageMetadata))
    entries: list[Any] = [state[name] for name in names]
    table = TensorTable.of(
        names,
        [properties_from_torch(e.properties, n) for n, e in zip(names, entries, strict=True)],
        [tuple(e.size) for e in entries],
    )
    held = set(names)
    return table, sorted(name for name in state if name not in held)


def from_torch(metadata: dcp.Metadata) -> Metadata:
    """Our metadata of what torch's describes; nothing is read.

    Locations in files keep their meaning: those of a checkpoint that torch wrote are of its files.
    """
    state = metadata.state_dict_metadata
    tensors, value_names = tensor_table(state)
    chunks = _chunk_table(tensors, [state[name].chunks for name in tensors.names])  # type: ignore[union-attr]
    first = np.searchsorted(chunks.tensor, np.arange(len(tensors) + 1)).tolist()
    zeros = np.zeros(len(value_names), np.int64)
    columns = StateColumns(
        tensors,
        ValueTable(value_names, zeros, np.arange(len(value_names))),
        lambda row: chunks.part(first[row], first[row + 1]),
        chunks,
    )
    return Metadata(
        columns,
        nesting_from_torch(metadata),
        _locations_from_torch(metadata.storage_data),
        _meta_from_torch(metadata.storage_meta),
    )


def nesting_from_torch(metadata: dcp.Metadata) -> Structure:
    """The nesting that `planner_data` tells, or a flat one."""
    kinds = {
        name: TENSOR if isinstance(entry, dcp.TensorStorageMetadata) else VALUE
        for name, entry in metadata.state_dict_metadata.items()
    }
    return structure_of(kinds, metadata.planner_data)


def _chunk_table(tensors: TensorTable, chunks: Sequence[Sequence[Any]]) -> ChunkTable:
    """By tensor, then by offset."""
    tensor = np.repeat(np.arange(len(tensors)), np.fromiter(map(len, chunks), np.int64))
    boxes = boxes_of([box for each in chunks for box in each])
    order = chunk_order(tensors, tensor, boxes)
    zeros = np.zeros(len(tensor), np.int64)
    return ChunkTable(tensor[order], boxes.take(order), zeros, zeros)


def chunk_order(tensors: TensorTable, tensor: Ints, boxes: Boxes) -> Ints:
    """Sorts chunks by tensor, then by offset."""
    return np.argsort(sort_keys(tensors, tensor, boxes), kind="stable").astype(np.int64)


def _locations_from_torch(locations: object) -> Mapping[MetadataIndex, StorageLocation] | None:
    if not isinstance(locations, Mapping):
        return None
    return {
        MetadataIndex(key.fqn, key.offset, key.index): StorageLocation(
            info.relative_path, int(info.offset), int(info.length)
        )
        for key, info in locations.items()
    }


def _meta_from_torch(meta: dcp.StorageMeta | None) -> StorageMeta | None:
    if meta is None:
        return None
    where = None if meta.checkpoint_id is None else os.fspath(meta.checkpoint_id)
    return StorageMeta(where, meta.save_id, meta.load_id, tuple(meta.modules))


# --- to torch


@cache
def _dtype_of(name: str) -> torch.dtype:
    row = TABLE[name]
    found = getattr(torch, row.torch, None) if row.torch else None
    if not isinstance(found, torch.dtype):
        raise UnsupportedValueError(
            f"this torch has no dtype {name}, in which tensors are stored; shardkeep.open and "
            "shardkeep.load read them"
        )
    return found


def properties_to_torch(properties: TensorProperties, name: str = "") -> dcp.TensorProperties:
    """Torch's, or `UnsupportedValueError` where it has no such dtype."""
    try:
        dtype = _dtype_of(lookup(properties.dtype).name)
    except UnsupportedValueError as error:
        raise UnsupportedValueError(f"{name}: {error}") from None
    return dcp.TensorProperties(
        dtype,
        getattr(torch, properties.layout),
        properties.requires_grad,
        _FORMATS[properties.memory_format],
        properties.pin_memory,
    )


def _chunks_to_torch(chunks: Sequence[Any]) -> list[dcp.ChunkStorageMetadata]:
    size = torch.Size
    return [dcp.ChunkStorageMetadata(size(box.offsets), size(box.sizes)) for box in chunks]


def to_torch(metadata: Metadata) -> dcp.Metadata:
    """Torch's metadata of what ours describes, as plain objects: one per chunk."""
    state: dict[str, dcp.STORAGE_TYPES] = {}
    nesting = metadata.planner_data
    for name in metadata.state_dict_metadata if nesting is None else nesting.names:
        entry = metadata.state_dict_metadata[name]
        if isinstance(entry, TensorStorageMetadata):
            state[name] = dcp.TensorStorageMetadata(
                properties_to_torch(entry.properties, name),
                torch.Size(entry.size),
                _chunks_to_torch(entry.chunks),
            )
        else:
            assert isinstance(entry, BytesStorageMetadata)
            state[name] = dcp.BytesStorageMetadata()
    locations = metadata.storage_data
    placed = None if locations is None else dict(_locations_to_torch(locations, state))
    return dcp.Metadata(
        state,
        None if nesting is None else paths_of(nesting),
        placed,
        meta_to_torch(metadata.storage_meta),
        CURRENT_DCP_VERSION,
    )


def _locations_to_torch(
    locations: Mapping[MetadataIndex, StorageLocation], state: Mapping[str, dcp.STORAGE_TYPES]
) -> Iterator[tuple[dcp.MetadataIndex, _StorageInfo]]:
    for key, place in locations.items():
        tensor = isinstance(state.get(key.fqn), dcp.TensorStorageMetadata)
        index = dcp.MetadataIndex(key.fqn, (key.offset or ()) if tensor else None, key.index)
        yield index, _StorageInfo(place.file, place.offset, place.nbytes)


def meta_to_torch(meta: StorageMeta | None) -> dcp.StorageMeta | None:
    """Which save or load something belongs to."""
    if meta is None:
        return None
    return dcp.StorageMeta(meta.checkpoint_id, meta.save_id, meta.load_id, list(meta.modules))
