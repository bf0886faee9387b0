# SPDX-License-Identifier: Apache-2.0
"""Files of another system, laid out before anything is written: every byte has its place.

A format's `lay_out` gives these for a state; whoever has the elements writes all files at once, in
any order and from many threads or ranks, within a memory budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardkeep.dtypes import lookup

__all__ = ["Elements", "Late", "Literal", "OutFile", "OutTensor", "Outline", "Segment"]

Ints = tuple[int, ...]


@dataclass(eq=False)  # the same object twice in a state is a tie
class OutTensor:
    """A tensor to be written."""

    name: str
    """Its fully qualified name."""
    dtype: str
    """Name in `shardkeep.dtypes.TABLE`."""
    shape: Ints
    """Its extent."""
    requires_grad: bool = False
    """Whether it gathers gradients."""

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        count = lookup(self.dtype).itemsize
        for extent in self.shape:
            count *= extent
        return count


@dataclass(frozen=True)
class Outline:
    """A state to be written, without its elements."""

    state: Any
    """Nested dicts, lists and tuples; leaves are `OutTensor`s and plain values."""
    tensors: Mapping[str, OutTensor]
    """Every name to its tensor, in the order of the state; ties have several names."""
    values: Mapping[str, Any]
    """Every name to its plain value."""
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    """What was kept beside the state."""


@dataclass(frozen=True, slots=True, eq=False)
class Literal:
    """Bytes that are known."""

    start: int
    """Where in the file."""
    data: bytes
    """What."""

    @property
    def nbytes(self) -> int:
        """How many bytes."""
        return len(self.data)


@dataclass(frozen=True, slots=True, eq=False)
class Elements:
    """A box of a tensor, row-major, little-endian."""

    start: int
    """Where in the file."""
    tensor: OutTensor
    """Which."""
    offsets: Ints
    """Where the box begins in it."""
    sizes: Ints
    """Extent of the box; never empty."""
    checked: bool = False
    """Whether a `Late` segment needs the CRC-32 of these bytes."""

    @property
    def nbytes(self) -> int:
        """How many bytes."""
        count = lookup(self.tensor.dtype).itemsize
        for extent in self.sizes:
            count *= extent
        return count


@dataclass(frozen=True, slots=True, eq=False)
class Late:
    """Bytes that follow from others: made when all `Elements` of the file are written."""

    start: int
    """Where in the file."""
    nbytes: int
    """How many."""
    make: Callable[[Callable[[Elements], int]], bytes]
    """Makes them; gets a function that gives the CRC-32 of a segment that is `checked`."""


Segment = Literal | Elements | Late


@dataclass(frozen=True, eq=False)
class OutFile:
    """A file to be written."""

    name: str
    """Path below the destination, or `""` where the destination is the file itself."""
    size: int
    """All of it; what no segment covers is zero."""
    segments: Sequence[Segment]
    """In order of their starts, without overlap."""
