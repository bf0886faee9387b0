# SPDX-License-Identifier: Apache-2.0
"""What stands in for the classes of torch's metadata.

Millions of chunks may be described, so these are small, and check what they are given at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from shardkeep.foreign.graphs import Constant, StandIn
from shardkeep.foreign.stand_ins import Record, members, records
from shardkeep.foreign.torch_stand_ins import TORCH, TorchDType, TorchSize

__all__ = ["CLASSES", "Bytes", "Chunk", "Description", "Index", "Info", "Properties", "Tensor"]

Ints = tuple[int, ...]
_DIMENSIONS = 32
_EXTENT = 1 << 62
_LONGEST = 4096
"""Characters of a name: equal ones are compared letter by letter wherever they are looked up."""


def _require(fine: bool, wrong: str) -> None:
    if not fine:
        raise ValueError(wrong)


def _sizes(given: Any) -> Ints:
    if type(given) is TorchSize and len(given) <= _DIMENSIONS:
        for extent in given:
            if not 0 <= extent < _EXTENT:
                raise ValueError("odd sizes")
        return tuple(given)
    _require(isinstance(given, (tuple, list)) and len(given) <= _DIMENSIONS, "odd sizes")
    _require(all(type(n) is int and 0 <= n < _EXTENT for n in given), "odd sizes")
    return tuple(given)


def _attributes(state: Any) -> dict[str, Any]:
    _require(type(state) is dict, "an object without attributes")
    return state  # type: ignore[no-any-return]


class Chunk(StandIn):
    """A stored box of a tensor."""

    __slots__ = ("offsets", "sizes")

    flat = True

    def __init__(self) -> None:
        self.offsets: Ints = ()
        self.sizes: Ints = ()

    def build(self, state: Any) -> None:
        """Take offsets and sizes."""
        self.offsets, self.sizes = _sizes(state["offsets"]), _sizes(state["sizes"])
        if len(self.offsets) != len(self.sizes):
            raise ValueError("offsets and sizes that do not match")


class Index(StandIn):
    """What `storage_data` is looked up by."""

    __slots__ = ("fqn", "offset")

    flat = True

    def __init__(self) -> None:
        self.fqn = ""
        self.offset: Ints | None = None

    def build(self, state: Any) -> None:
        """Take name and offset; the hint is of no use here."""
        fields = _attributes(state)
        offset, self.fqn = fields.get("offset"), fields["fqn"]
        self.offset = None if offset is None else _sizes(offset)
        if type(self.fqn) is not str or len(self.fqn) > _LONGEST:
            raise ValueError("an index without a name")


class Info(StandIn):
    """Where an item lies."""

    __slots__ = ("length", "offset", "path", "transforms")

    flat = True

    def __init__(self) -> None:
        self.path = ""
        self.offset = self.length = 0
        self.transforms: tuple[str, ...] = ()

    def build(self, state: Any) -> None:
        """Take file, offset, length, and what was done to the bytes."""
        fields = _attributes(state)
        self.path, self.offset = fields["relative_path"], fields["offset"]
        self.length = fields["length"]
        transforms = fields.get("transform_descriptors") or ()
        if type(self.path) is not str or not 0 < len(self.path) <= _LONGEST:
            raise ValueError("an item in no file")
        if type(self.offset) is not int or type(self.length) is not int:
            raise ValueError("an item at no offset")
        _require(0 <= self.offset < _EXTENT and 0 <= self.length < _EXTENT, "an item at no offset")
        if transforms:
            _require(isinstance(transforms, (list, tuple)), "odd transforms")
            _require(all(type(name) is str for name in transforms), "odd transforms")
        self.transforms = tuple(transforms)


class Properties(StandIn):
    """What is known of a tensor's elements."""

    __slots__ = ("dtype", "requires_grad")

    flat = True

    def __init__(self) -> None:
        self.dtype = ""
        self.requires_grad = False

    def build(self, state: Any) -> None:
        """Take torch's tuple: dtype, layout, requires_grad, memory format, pinned."""
        dtype, layout, requires_grad = (
            state[:3]
            if type(state) is tuple
            else (state["dtype"], state.get("layout"), state.get("requires_grad"))
        )
        _require(type(dtype) is TorchDType, "a tensor without a dtype")
        _require(getattr(layout, "name", "torch.strided") == "torch.strided", "a sparse tensor")
        self.dtype, self.requires_grad = dtype.name, requires_grad is True


class Tensor(StandIn):
    """A tensor and its boxes."""

    __slots__ = ("chunks", "properties", "size")

    def __init__(self) -> None:
        self.properties = Properties()
        self.size: Ints = ()
        self.chunks: list[Chunk] = []

    def build(self, state: Any) -> None:
        """Take properties, size and chunks."""
        fields = _attributes(state)
        properties, chunks = fields["properties"], fields["chunks"]
        _require(type(properties) is Properties and type(chunks) is list, "an odd tensor")
        self.properties, self.size, self.chunks = properties, _sizes(fields["size"]), chunks

    def inside(self) -> Iterable[object]:
        """The chunks: the list may still change."""
        return (self.chunks,)


class Bytes(StandIn):
    """A value that is no tensor."""

    __slots__ = ()

    flat = True

    def build(self, state: Any) -> None:
        """There is nothing to take."""
        _require(not state, "a value with attributes")


class Description(Record):
    """All of the metadata."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__("Metadata", ())


_MODULES = ("torch.distributed.checkpoint", "torch.distributed._shard.checkpoint")
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_PLANS = ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
"""Megatron keeps the plans of all ranks beside; they say nothing that is not told elsewhere."""
_FORMATS = ("_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING")


def _entries() -> dict[str, Callable[..., object] | Constant]:
    table = dict(TORCH)
    for module in _MODULES:
        table |= {
            f"{module}.metadata.Metadata": Description,
            f"{module}.metadata.TensorStorageMetadata": Tensor,
            f"{module}.metadata.BytesStorageMetadata": Bytes,
            f"{module}.metadata.ChunkStorageMetadata": Chunk,
            f"{module}.metadata.MetadataIndex": Index,
            f"{module}.metadata.TensorProperties": Properties,
            f"{module}.filesystem._StorageInfo": Info,
            **records(f"{module}.metadata", "StorageMeta", *_FORMATS),
            **records(f"{module}.planner", *_PLANS),
        }
    table[f"{_SHARDED}.TensorProperties"] = Properties
    table |= records(_SHARDED, *_FORMATS)
    enums = {*_FORMATS, "WriteItemType"}
    return table | members(*(full for full in table if full.rpartition(".")[2] in enums))


CLASSES = _entries()
"""All that torch's metadata may name."""
