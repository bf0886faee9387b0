# SPDX-License-Identifier: Apache-2.0
"""Load plans of torch's planners as ours: which regions of which chunks go to which tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from shardkeep.adapters.torch_memory import tensor_of
from shardkeep.adapters.torch_tensors import ADAPTER, check_storage
from shardkeep.arrays import HostPlaces, Sink, region
from shardkeep.columns import Boxes, Ints
from shardkeep.dtypes import DType, lookup
from shardkeep.errors import MismatchError, PlanError, UnsupportedValueError
from shardkeep.memory import Memory
from shardkeep.planner import ReadItems
from shardkeep.tables import StateColumns
from shardkeep.targets import Targets as ArrayTargets

if TYPE_CHECKING:
    from torch.distributed.checkpoint import planner as dcp

__all__ = ["Targets", "read_items"]


def read_items(items: Sequence[dcp.ReadItem], stored: StateColumns) -> ReadItems:
    """Columns of the tensors' items; each item is a wanted box of its own."""
    tensors = stored.tensors
    count = len(items)
    rows = np.fromiter((tensors.row_of[i.storage_index.fqn] for i in items), np.int64, count)
    rows = np.where(tensors.alias_of[rows] < 0, rows, tensors.alias_of[rows])
    among, which = np.unique(rows, return_inverse=True)
    chunks, begin = stored.chunks_among(among)
    at = _locate(items, chunks.boxes, begin[which], begin[which + 1])
    found = chunks.take(at)
    offsets = _flat([i.storage_offsets for i in items], found.boxes)
    lengths = _flat([i.lengths for i in items], found.boxes)
    if (offsets < 0).any() or (lengths < 0).any() or (lengths > found.boxes.sizes - offsets).any():
        raise PlanError("the planner asks for a region that reaches out of a stored chunk")
    low = found.boxes.offsets + offsets
    return ReadItems(
        tensors,
        found,
        at - begin[which],
        np.arange(count),
        [i.dest_index.fqn for i in items],
        Boxes(found.boxes.start, low, lengths),
        low,
        lengths,
    )


def _flat(sizes: Sequence[Sequence[int]], boxes: Boxes) -> Ints:
    """Coordinates end to end, as many for each item as its chunk has."""
    if not np.array_equal(np.fromiter(map(len, sizes), np.int64, len(sizes)), boxes.ndim):
        raise PlanError("the planner asks for a region of other dimensions than the stored chunk")
    return np.fromiter(chain.from_iterable(sizes), np.int64, int(boxes.start[-1]))


def _locate(items: Sequence[dcp.ReadItem], boxes: Boxes, first: Ints, stop: Ints) -> Ints:
    """The chunk that each item reads: the one its hint names, if that begins at its offset."""
    hints = np.fromiter((i.storage_index.index or 0 for i in items), np.int64, len(items))
    if (stop <= first).any():
        raise PlanError("the planner asks for a tensor of which nothing is stored")
    at: Ints = np.clip(first + hints, first, stop - 1)
    wanted = [tuple(i.storage_index.offset or ()) for i in items]
    start = boxes.start.tolist()
    offsets = boxes.offsets.tolist()
    for number, (row, offset) in enumerate(zip(at.tolist(), wanted, strict=True)):
        if tuple(offsets[start[row] : start[row + 1]]) == offset:
            continue
        for other in range(int(first[number]), int(stop[number])):
            if tuple(offsets[start[other] : start[other + 1]]) == offset:
                at[number] = other
                break
        else:
            name = items[number].storage_index.fqn
            raise PlanError(f"{name}: no chunk is stored that begins at {offset}")
    return at


@dataclass(frozen=True, slots=True)
class CopySink:
    """A tensor that torch copies into: of another dtype than what is stored, or a lazy view."""

    tensor: torch.Tensor
    """The target."""

    def put(self, offsets: tuple[int, ...], block: npt.NDArray[np.generic], dtype: DType) -> None:
        """Copy a block, and cast it as torch does."""
        source = tensor_of(np.ascontiguousarray(block), dtype).reshape(block.shape)
        self.tensor[region(offsets, block.shape)].copy_(source)


class Targets:
    """The tensors a planner wants filled, in the order of its items."""

    def __init__(
        self, items: Sequence[dcp.ReadItem], tensors: Sequence[torch.Tensor], read: ReadItems
    ) -> None:
        """Looks at all of them together; raises for those that cannot be filled."""
        self._items, self._tensors = items, tensors
        _refuse_meta(items, tensors)
        stored = [lookup(kind.dtype) for kind in read.tensors.kinds]
        kinds = read.tensors.kind[read.chunks.tensor]
        alike = [getattr(torch, one.torch, None) if one.torch else None for one in stored]
        straight = [
            type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.dtype is kind
            for tensor, kind in zip(tensors, map(alike.__getitem__, kinds.tolist()), strict=True)
        ]
        if any(any(map(lazy, tensors)) for lazy in (torch.Tensor.is_conj, torch.Tensor.is_neg)):
            lazies = [tensor.is_conj() or tensor.is_neg() for tensor in tensors]
            straight = [one and not lazy for one, lazy in zip(straight, lazies, strict=True)]
        for row in np.flatnonzero(np.logical_not(straight)).tolist():
            _check_copied(tensors[row], items[row].dest_index.fqn)
        rows = np.flatnonzero(straight)
        names = [items[row].dest_index.fqn for row in rows.tolist()]
        values = [tensors[row] for row in rows.tolist()]
        self._filling = ArrayTargets.of(names, values, [ADAPTER] * len(rows)).filling(None)
        self._number = np.full(len(items), -1)  # of those that are filled as they are
        self._number[rows] = np.arange(len(rows))
        addresses = np.zeros(len(items), np.uint64)
        addresses[rows] = self._filling.places().address
        self.places = HostPlaces(addresses, kinds, stored)
        self.staging = ADAPTER.settle(tensors)

    def sink(self, row: int) -> Sink:
        """Where the elements of an item go."""
        number = int(self._number[row])
        return CopySink(self._tensors[row]) if number < 0 else self._filling.sink(number)

    def check_ties(self, same_content: Callable[[str, str], bool]) -> None:
        """Raise where two tensors share memory, and would get different contents."""
        items, tensors = self._items, self._tensors
        rows = list(range(len(items)))
        if self._number.min(initial=0) >= 0:  # a row is a number, and no other lies near those
            near = {_place(items[row]) for row in self._filling.suspects()}
            rows = [row for row in rows if _place(items[row]) in near] if near else []
        memories = [_memory(tensors[row]) for row in rows]
        forms = [
            (tensors[row].dtype, tensors[row].is_conj(), tensors[row].is_neg()) for row in rows
        ]
        _check_shared([items[row] for row in rows], memories, forms, same_content)


def _refuse_meta(items: Sequence[dcp.ReadItem], tensors: Sequence[torch.Tensor]) -> None:
    for item, tensor in zip(items, tensors, strict=True):
        if tensor.is_meta:
            raise UnsupportedValueError(
                f"{item.dest_index.fqn}: the planner gives a meta tensor, which has no memory to "
                "fill; allocate it first"
            )


def _check_copied(tensor: torch.Tensor, name: str) -> None:
    """Of a tensor that torch copies into, which does not look how much memory there is."""
    if tensor.layout is torch.strided:
        with contextlib.suppress(NotImplementedError):  # a class that wraps others has none
            check_storage(tensor, name)


def _place(item: dcp.ReadItem) -> tuple[str, Any]:
    """Which tensor of the target an item is a part of."""
    return item.dest_index.fqn, item.dest_index.offset


def _memory(tensor: torch.Tensor) -> Memory | None:
    """None for what has no memory of its own: sparse tensors, and classes that wrap others."""
    if tensor.layout is not torch.strided:
        return None
    try:
        address = tensor.data_ptr()
    except RuntimeError:
        return None
    if address == 0:
        return None
    item = tensor.element_size()
    strides = tuple(step * item for step in tensor.stride())
    return Memory(str(tensor.device), address, tuple(tensor.shape), strides, item)


def _check_shared(
    items: Sequence[dcp.ReadItem],
    memories: Sequence[Memory | None],
    forms: Sequence[object],
    same_content: Callable[[str, str], bool],
) -> None:
    """Raise where two tensors of the target share memory, and would get different contents.

    They are filled at the same time, so neither would be what is stored.
    """
    bounds: dict[tuple[str, Any], tuple[str, int, int]] = {}
    of: dict[tuple[str, Any], list[int]] = {}
    for at, (item, memory) in enumerate(zip(items, memories, strict=True)):
        if memory is not None:
            key = _place(item)
            low, high = memory.bounds()
            held = bounds.get(key, (memory.device, low, high))
            bounds[key] = memory.device, min(held[1], low), max(held[2], high)
            of.setdefault(key, []).append(at)
    faults: dict[str, str] = {}
    reach: tuple[str, int] = ("", 0)
    near: list[tuple[str, Any]] = []
    for key, (device, low, high) in sorted(bounds.items(), key=lambda entry: entry[1]):
        if device != reach[0] or low >= reach[1]:
            near = []
        for other in near:
            tied = other[0] != key[0] and _clash(memories, of[key], of[other])
            if tied and not (
                _alike(items, memories, forms, of[key], of[other])
                and same_content(key[0], other[0])
            ):
                faults[key[0]] = (
                    f"shares memory with {other[0]}, but the two would get different contents"
                )
        near.append(key)
        reach = device, max(high, reach[1]) if device == reach[0] else high
    if faults:
        listed = "; ".join(f"{name}: {text}" for name, text in sorted(faults.items()))
        raise MismatchError(f"{listed}. Untie the target", mismatched=faults)


def _clash(memories: Sequence[Memory | None], a: list[int], b: list[int]) -> bool:
    return any(
        one.overlaps(other)
        for one in (memories[at] for at in a)
        for other in (memories[at] for at in b)
        if one is not None and other is not None
    )


def _alike(
    items: Sequence[dcp.ReadItem],
    memories: Sequence[Memory | None],
    forms: Sequence[object],
    a: list[int],
    b: list[int],
) -> bool:
    """Whether the same regions go to the same places, in the same form."""

    def regions(rows: list[int]) -> list[Any]:
        return [
            (memories[at], forms[at], items[at].storage_index.offset, items[at].storage_offsets)
            for at in rows
        ]

    return len(a) == len(b) and all(one in regions(b) for one in regions(a))
