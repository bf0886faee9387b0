# SPDX-License-Identifier: Apache-2.0
"""torch's metadata, written without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardkeep.foreign.layout import OutTensor
from shardkeep.foreign.pickling import Pickling, Written

__all__ = ["Item", "describe"]

Ints = tuple[int, ...]

_MODULE = "torch.distributed.checkpoint.metadata"
VERSION = "1.0.0"


@dataclass(frozen=True, slots=True)
class Item:
    """Something that is stored."""

    file: str
    """In which file."""
    start: int
    """From which byte on."""
    length: int
    """How many bytes."""
    offsets: Ints | None
    """Where a chunk begins in its tensor; None for a value."""
    sizes: Ints | None
    """Its extent."""


@dataclass(frozen=True, eq=False)
class _Object(Written):
    name: str
    state: Any
    module: str = _MODULE

    def write(self, pickling: Pickling) -> None:
        pickling.instance(self.module, self.name, self.state)


@dataclass(frozen=True, eq=False)
class _Chunk(Written):
    """Frozen, so that equal ones are one; most tensors have one, and many are of one shape."""

    offsets: Ints
    sizes: Ints

    def write(self, pickling: Pickling) -> None:
        state = {"offsets": _size(self.offsets), "sizes": _size(self.sizes)}
        name = "ChunkStorageMetadata"
        pickling.once(
            (name, self.offsets, self.sizes), lambda: pickling.instance(_MODULE, name, state)
        )


@dataclass(frozen=True, eq=False)
class _Call(Written):
    module: str
    name: str
    argument: Any

    def write(self, pickling: Pickling) -> None:
        # Sizes, layouts and formats never change: equal ones are one.
        called = self.module, self.name, self.argument
        pickling.once(called, lambda: pickling.call(*called))


@dataclass(frozen=True, eq=False)
class _Name(Written):
    name: str

    def write(self, pickling: Pickling) -> None:
        pickling.name("torch", self.name)


def describe(
    leaves: Mapping[str, tuple[tuple[Any, ...], Any, Sequence[Item]]],
) -> bytes:
    """The contents of `.metadata`: of every name its path, what it is, and where it lies."""
    stored = {name: _leaf(leaf, items) for name, (_, leaf, items) in leaves.items()}
    places = {
        _index(name, item, number): _Object(
            "_StorageInfo",
            {"relative_path": item.file, "offset": item.start, "length": item.length},
            "torch.distributed.checkpoint.filesystem",
        )
        for name, (_, _, items) in leaves.items()
        for number, item in enumerate(items)
    }
    nothing: dict[str, Any] = {
        "checkpoint_id": None,
        "save_id": None,
        "load_id": None,
        "modules": [],
    }
    state = {
        "state_dict_metadata": stored,
        "planner_data": {name: path for name, (path, _, _) in leaves.items()},
        "storage_data": places,
        "storage_meta": _Object("StorageMeta", {**nothing, "modules": []}),
        "version": VERSION,
    }
    pickling = Pickling(weights_only=False, storage=lambda tensor: "")
    pickling.value(_Object("Metadata", state), "")
    return pickling.finished()


def _size(extent: Ints) -> _Call:
    return _Call("torch", "Size", extent)


def _index(name: str, item: Item, number: int) -> _Object:
    chunk = item.offsets is not None
    offset = _size(item.offsets) if item.offsets is not None else None
    return _Object(
        "MetadataIndex", {"fqn": name, "offset": offset, "index": number if chunk else None}
    )


def _leaf(leaf: Any, items: Sequence[Item]) -> _Object:
    if not isinstance(leaf, OutTensor):
        return _Object("BytesStorageMetadata", {})
    properties = (
        _Name(leaf.dtype),
        _Call("torch.serialization", "_get_layout", "torch.strided"),
        leaf.requires_grad,
        _Call(_MODULE, "_MEM_FORMAT_ENCODING", 0),
        False,
    )
    chunks = [_Chunk(item.offsets or (), item.sizes or ()) for item in items]
    return _Object(
        "TensorStorageMetadata",
        {
            "properties": _Object("TensorProperties", properties),
            "size": _size(leaf.shape),
            "chunks": chunks,
        },
    )
