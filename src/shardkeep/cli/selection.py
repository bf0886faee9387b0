# SPDX-License-Identifier: Apache-2.0
"""`cat`: parsing a slice, and reading only what it selects."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shardkeep import values
from shardkeep.checkpoint import Checkpoint, TensorView
from shardkeep.cli.contents import matching
from shardkeep.dtypes import lookup
from shardkeep.foreign.reader import ForeignReader
from shardkeep.formats.native.reader import NativeReader
from shardkeep.metadata import TensorStorageMetadata
from shardkeep.storage import find_reader

__all__ = ["Item", "TensorItem", "ValueItem", "parse_index", "read_item"]

Part: TypeAlias = int | slice | EllipsisType
Array: TypeAlias = npt.NDArray[Any]

EDGE = 3
"""Elements shown at each end of a dimension that is cut, as numpy does."""
THRESHOLD = 1000
"""More elements than this, and only the ends of long dimensions are shown, as numpy does."""
NEARBY = 128 << 10
"""Steps of fewer bytes are read through: what lies between is in the same blocks anyway."""

_INTEGER = re.compile(r"[+-]?\d{1,18}", re.ASCII)


@dataclass(frozen=True, slots=True)
class TensorItem:
    """A selected part of a tensor."""

    name: str
    """Fully qualified."""
    dtype: str
    """Name of the stored element type."""
    shape: tuple[int, ...]
    """Of the selection."""
    array: Array
    """Its elements; where `cut`, only as much of them as printing shows."""
    cut: bool
    """Whether long dimensions hold only their ends, with one element between that is not read."""


@dataclass(frozen=True, slots=True)
class ValueItem:
    """A plain value."""

    name: str
    """Fully qualified."""
    value: object
    """What it is; a framework's sizes, dtypes and devices as plain tuples and text."""


Item: TypeAlias = TensorItem | ValueItem


def parse_index(text: str) -> tuple[Part, ...]:
    """A slice as numpy writes it, without evaluating anything.

    >>> parse_index("0:10"), parse_index("3,:,-2"), parse_index("...,::2")
    ((slice(0, 10, None),), (3, slice(None, None, None), -2), (Ellipsis, slice(None, None, 2)))
    """
    bare = text.strip()
    if bare.startswith("[") and bare.endswith("]"):
        bare = bare[1:-1]
    return tuple(_part(part.strip(), text) for part in bare.split(",")) if bare.strip() else ()


def _part(part: str, text: str) -> Part:
    if part == "...":
        return ...
    bounds = [bound.strip() for bound in part.split(":")]
    if len(bounds) > 3 or not all(_INTEGER.fullmatch(b) or (not b and ":" in part) for b in bounds):
        raise ValueError(f"{text!r} is not a slice; write 0:10, or 3,:,2 or ...,-1 or ::2")
    if len(bounds) == 1:
        return int(bounds[0])
    if len(bounds) == 3 and bounds[2] and int(bounds[2]) == 0:
        raise ValueError(f"{text!r}: a step cannot be 0")
    return slice(*(int(bound) if bound else None for bound in bounds))


def read_item(path: str, name: str, index: str | None = None, *, corners: bool) -> Item:
    """Read a value, or the selected part of a tensor: with `corners` no more than is printed.

    A name that is not there is a LookupError, an index that does not fit an IndexError.
    """
    parts = None if index is None else parse_index(index)
    foreign = issubclass(find_reader(path), ForeignReader)
    reader = ForeignReader(path) if foreign else NativeReader(path)
    try:
        with Checkpoint(reader) as checkpoint:
            known = checkpoint.metadata.state_dict_metadata
            if isinstance(known.get(name), TensorStorageMetadata):
                view = checkpoint[name]
                assert isinstance(view, TensorView)
                return _read_tensor(view, parts or (), corners)
            if name not in known:
                raise LookupError(_absent(checkpoint, name))
            if parts is not None:
                raise IndexError(f"{name} is a plain value, not a tensor; leave the slice out")
            found: list[bytes] = []
            reader.read_values([name], lambda _, data: found.append(data))
            return ValueItem(name, values.decode(found[0], foreign="plain"))
    finally:
        reader.close()


def _absent(checkpoint: Checkpoint, name: str) -> str:
    inside = matching(list(checkpoint), name)
    if inside:
        return f"{name!r} selects {len(inside)} names; name one of them, such as {inside[0]!r}"
    return f"no {name!r} in {checkpoint.path}; shardkeep show lists what there is"


def _read_tensor(view: TensorView, parts: Sequence[Part], corners: bool) -> TensorItem:
    wanted = _ranges(parts, view.shape)
    shape = tuple(len(pick) for pick in wanted if isinstance(pick, range))
    cut = corners and math.prod(shape) > THRESHOLD
    itemsize = lookup(view.dtype).itemsize
    if not cut:
        array = _read_part(view, wanted, itemsize)
    else:
        # Of a dimension that will be cut, its two ends and room for one element between them:
        # numpy then prints the same dots as for the whole.
        ends = [
            (pick[:EDGE], pick[-EDGE:])
            if isinstance(pick, range) and len(pick) > 2 * EDGE
            else (pick,)
            for pick in wanted
        ]
        array = np.zeros([min(n, 2 * EDGE + 1) for n in shape], lookup(view.dtype).to_numpy())
        for corner in itertools.product(*ends):
            place = tuple(
                slice(-EDGE, None) if len(both) == 2 and pick is both[1] else slice(len(pick))
                for both, pick in zip(ends, corner, strict=True)
                if isinstance(pick, range)
            )
            array[place] = _read_part(view, corner, itemsize)
    return TensorItem(view.name, view.dtype, shape, _numbers(array, view.dtype), cut)


def _ranges(parts: Sequence[Part], shape: Sequence[int]) -> list[int | range]:
    """For each dimension the index or the range of indices that is wanted."""
    if sum(part is ... for part in parts) > 1:
        raise IndexError("a slice may hold one ... only")
    given = [part for part in parts if not isinstance(part, EllipsisType)]
    if len(given) > len(shape):
        raise IndexError(f"{len(given)} indices for a tensor of shape {tuple(shape)}")
    gap = parts.index(...) if ... in parts else len(given)
    full = [*given[:gap], *[slice(None)] * (len(shape) - len(given)), *given[gap:]]
    wanted: list[int | range] = []
    for part, extent in zip(full, shape, strict=True):
        if isinstance(part, slice):
            wanted.append(range(extent)[part])
        elif -extent <= part < extent:
            wanted.append(part % extent)
        else:
            raise IndexError(f"index {part} is out of range for a tensor of shape {tuple(shape)}")
    return wanted


def _read_part(view: TensorView, wanted: Sequence[int | range], itemsize: int) -> Array:
    """Read ranges; steps over less than a block are read through and dropped in memory."""
    ask: list[int | slice] = []
    keep: list[slice] = []
    for dim, pick in enumerate(wanted):
        if isinstance(pick, int):
            ask.append(pick)
            continue
        low, high = (min(pick[0], pick[-1]), max(pick[0], pick[-1]) + 1) if pick else (0, 0)
        stride = math.prod(view.shape[dim + 1 :]) * itemsize
        if pick.step == 1:
            ask.append(slice(low, high))
            keep.append(slice(None))
        elif abs(pick.step) * stride <= NEARBY:
            ask.append(slice(low, high))
            keep.append(slice(None, None, pick.step))
        else:
            ask.append(slice(low, high, abs(pick.step)))
            keep.append(slice(None, None, 1 if pick.step > 0 else -1))
    array: Array = view[tuple(ask)]
    return array[tuple(keep)]


def _numbers(array: Array, dtype: str) -> Array:
    """Elements that numpy can print; only packed pairs of float4 stay raw bytes."""
    if dtype == "complex32":
        halves = np.ascontiguousarray(array).reshape(-1).view(np.float16).astype(np.float32)
        return halves.view(np.complex64).reshape(array.shape)
    return array
