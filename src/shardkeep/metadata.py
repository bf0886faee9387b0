# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds: names, shapes, boxes, and where their bytes lie.

The names are PyTorch DCP's and HyperParallel's; the types belong to no framework: tuples of int,
dtypes as strings. Sequences of chunks and the map of locations may be columns underneath
(`shardkeep.columns`); they look the same from here.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkeep.dtypes import dtype_name

if TYPE_CHECKING:
    from shardkeep.structure import Structure

__all__ = [
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageLocation",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
]

MEMORY_FORMATS = ("contiguous_format", "channels_last", "preserve_format")

METADATA_VERSION = "1.0.0"


def int_tuple(values: Iterable[object]) -> tuple[int, ...]:
    """Any sequence of integers (numpy's, `torch.Size`, ...) as a tuple of Python's own."""
    if type(values) is tuple and all(type(v) is int for v in values):
        return values
    return tuple(int(operator.index(v)) for v in values)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class MetadataIndex:
    """Look-up key of one stored item."""

    fqn: str
    """Fully qualified name of the tensor or value."""
    offset: tuple[int, ...] | None = None
    """Where the chunk starts; `()` and None mean the same: the only chunk, or a value."""
    index: int | None = None
    """A hint where to look first; not compared and not hashed."""

    def __post_init__(self) -> None:
        """Accept any sequence of integers as the offset."""
        if self.offset is not None:
            object.__setattr__(self, "offset", int_tuple(self.offset))

    def __eq__(self, other: object) -> bool:
        """Equal when name and offset are, whatever the hint."""
        if not isinstance(other, MetadataIndex):
            return NotImplemented
        return self.fqn == other.fqn and (self.offset or ()) == (other.offset or ())

    def __hash__(self) -> int:
        """Agrees with `==`."""
        return hash((self.fqn, self.offset or ()))


@dataclass(frozen=True)
class ChunkStorageMetadata:
    """One stored region of a tensor, half-open in every dimension: the box type everywhere."""

    offsets: tuple[int, ...]
    """First index in each dimension."""
    sizes: tuple[int, ...]
    """Extent in each dimension; a zero makes the box empty."""

    def __post_init__(self) -> None:
        """Refuse boxes that cannot be."""
        object.__setattr__(self, "offsets", int_tuple(self.offsets))
        object.__setattr__(self, "sizes", int_tuple(self.sizes))
        if len(self.offsets) != len(self.sizes):
            raise ValueError(
                f"a box needs as many offsets as sizes, found {self.offsets} and {self.sizes}"
            )
        if min(self.offsets + self.sizes, default=0) < 0:
            raise ValueError(f"a box cannot be negative: offsets {self.offsets} sizes {self.sizes}")


def _plain_name(value: object) -> str:
    return value if isinstance(value, str) else str(value)


@dataclass(frozen=True)
class TensorProperties:
    """What a tensor is besides its shape. Framework objects are accepted and kept as strings."""

    dtype: str
    """Name in `shardkeep.dtypes.TABLE`."""
    layout: str = "strided"
    """Memory layout; only `strided` can be stored."""
    requires_grad: bool = False
    """Whether it was a leaf that gathers gradients."""
    memory_format: str = "contiguous_format"
    """One of `contiguous_format`, `channels_last`, `preserve_format`."""
    pin_memory: bool = False
    """Whether it lay in pinned memory."""

    def __post_init__(self) -> None:
        """Bring names to one spelling and refuse unknown memory formats."""
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        object.__setattr__(self, "layout", _plain_name(self.layout).rpartition(".")[2])
        memory_format = _plain_name(self.memory_format).rpartition(".")[2]
        if memory_format not in MEMORY_FORMATS:
            raise ValueError(
                f"memory format {memory_format!r} is unknown; use one of {MEMORY_FORMATS}"
            )
        object.__setattr__(self, "memory_format", memory_format)

    @classmethod
    def create_from_tensor(cls, tensor: object) -> TensorProperties:
        """Read the properties off any array that has at least a dtype."""
        pinned = getattr(tensor, "is_pinned", None)
        return cls(
            dtype=tensor.dtype,  # type: ignore[attr-defined]
            layout=_plain_name(getattr(tensor, "layout", "strided")),
            requires_grad=bool(getattr(tensor, "requires_grad", False)),
            pin_memory=bool(pinned()) if callable(pinned) else False,
        )


@dataclass(frozen=True)
class TensorStorageMetadata:
    """One tensor: what it is, how large it is, and the boxes it is stored in."""

    properties: TensorProperties
    """Element type and the like."""
    size: tuple[int, ...]
    """Shape of the whole tensor."""
    chunks: Sequence[ChunkStorageMetadata] = ()
    """Stored boxes, by offset; columns underneath where there are many."""

    def __post_init__(self) -> None:
        """Keep sequences immutable."""
        object.__setattr__(self, "size", int_tuple(self.size))
        if isinstance(self.chunks, list):
            object.__setattr__(self, "chunks", tuple(self.chunks))


@dataclass(frozen=True)
class BytesStorageMetadata:
    """One plain value."""


@dataclass(frozen=True)
class StorageLocation:
    """Where the bytes of a chunk lie."""

    file: str
    """Path relative to the checkpoint."""
    offset: int
    """First byte, counted from the start of the file."""
    nbytes: int
    """Number of bytes stored."""


@dataclass(frozen=True)
class StorageMeta:
    """Which save or load something belongs to."""

    checkpoint_id: str | None = None
    """The name the caller gave; never written to disk."""
    save_id: str | None = None
    """32 hex digits, one per attempt."""
    load_id: str | None = None
    """The same for a load."""
    modules: tuple[str, ...] = ()
    """Modules a third-party storage needs to read it."""

    def __post_init__(self) -> None:
        """Keep sequences immutable."""
        object.__setattr__(self, "modules", tuple(self.modules))


@dataclass(frozen=True)
class Metadata:
    """Everything known of a checkpoint without reading its data.

    Fields absent from an older pickle read as the defaults here.
    """

    state_dict_metadata: Mapping[str, TensorStorageMetadata | BytesStorageMetadata]
    """Name to what is stored under it."""
    planner_data: Structure | None = None
    """The nesting the names came from."""
    storage_data: Mapping[MetadataIndex, StorageLocation] | None = None
    """Chunk to where its bytes lie."""
    storage_meta: StorageMeta | None = None
    """The save it came from."""
    version: str = METADATA_VERSION
    """Of this model, not of the format."""
