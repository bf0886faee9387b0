# SPDX-License-Identifier: Apache-2.0
"""What a parser found in another system's checkpoint: a state whose tensors say where they lie.

A parser reads headers and metadata only. `ForeignReader` does the rest: names, structure, and the
elements, in parallel and only those somebody wants.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt

from shardkeep.dtypes import lookup

__all__ = ["Found", "Made", "Part", "Raw", "StoredTensor", "whole"]

Ints = tuple[int, ...]
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Raw:
    """Elements that lie in a file as they are, little-endian."""

    file: str
    """Path below the checkpoint, or `""` where the checkpoint is a file itself."""
    start: int
    """Byte of the first element."""
    strides: Ints | None = None
    """Steps in elements, where the part does not lie row-major."""


class Made(Protocol):
    """Elements that have to be worked out: unpacked, decoded, joined."""

    def read(self, offsets: Ints, sizes: Ints) -> Array:
        """The elements of a box of the part, row-major, as bits of the tensor's dtype.

        `offsets` count from the part's own first element. Any thread may call this.
        """


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor, and where its elements are."""

    offsets: Ints
    """Where it begins in the tensor."""
    sizes: Ints
    """Its extent."""
    place: Raw | Made
    """Where its elements are."""


@dataclass(eq=False)  # the same object twice in a state is a tie
class StoredTensor:
    """A tensor of another system's checkpoint."""

    dtype: str
    """Name in `shardkeep.dtypes.TABLE`."""
    shape: Ints
    """Its whole extent."""
    parts: tuple[Part, ...]
    """Boxes that cover it, each element once; none is empty."""
    requires_grad: bool = False
    """Whether it is said to gather gradients."""

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * lookup(self.dtype).itemsize

    def identity(self) -> tuple[object, ...]:
        """The same for all that have the same elements, and not empty. Numbers stand as text in it:
        whoever wrote the file can choose those of which all tuples have one hash."""
        places = [part.place for part in self.parts]
        rest = [(p.start, p.strides) if isinstance(p, Raw) else None for p in places]
        boxes = [(part.offsets, part.sizes) for part in self.parts]
        files = [p.file if isinstance(p, Raw) else p for p in places]
        return self.dtype, str((self.shape, boxes, rest)), *files


def whole(
    dtype: str, shape: Ints, place: Raw | Made, *, requires_grad: bool = False
) -> StoredTensor:
    """A tensor that lies in one part."""
    parts = () if 0 in shape else (Part((0,) * len(shape), shape, place),)
    return StoredTensor(dtype, shape, parts, requires_grad)


@dataclass
class Found:
    """A checkpoint of another system."""

    system: str
    """Who wrote it, as in "torch.distributed.checkpoint"."""
    root: Path
    """The directory, or the file."""
    state: Any
    """Nested dicts, lists and tuples; leaves are `StoredTensor`s and plain values."""
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    """What the system keeps beside the state for people to read."""
