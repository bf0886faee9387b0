# SPDX-License-Identifier: Apache-2.0
"""What the metadata of all ranks and the tensor files amount to: one state."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shardkeep.boxes import strides as row_major
from shardkeep.dtypes import TABLE
from shardkeep.errors import CorruptionError, FormatError, UnsafeCheckpointError
from shardkeep.foreign import pickles
from shardkeep.foreign.below import file_below, read_each, read_exactly, regular_size
from shardkeep.foreign.found import Part, Raw, StoredTensor
from shardkeep.foreign.nesting import nested
from shardkeep.foreign.torch_objects import Finishing, elements_at
from shardkeep.foreign.torch_stand_ins import TORCH
from shardkeep.formats.hyper_parallel.data_files import DataFiles
from shardkeep.formats.hyper_parallel.metadata_files import Box, Location, Metadata, Tensor

__all__ = ["state_of"]

_WHOLE = 1 << 20
"""Copies up to this size are compared in full, larger ones here and there."""
_SAMPLE = 1 << 12
_SAMPLES = 64
_MAX_VALUE = 1 << 30


@dataclass
class _Copies:
    """One tensor as the ranks that hold some of it tell of it."""

    tensor: Tensor
    parts: dict[str, list[tuple[int | None, Part]]] = field(default_factory=dict)
    """By box, as text."""


def state_of(root: Path, all_metadata: list[Metadata]) -> dict[str, Any]:
    """The state, nested where the checkpoint says how."""
    files = DataFiles(root)
    leaves: dict[str, Any] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    ties: dict[Any, Any] = {}
    for name, copies in _gathered(all_metadata, files).items():
        leaf = _tensor(root, name, copies)
        if isinstance(leaf, StoredTensor) and leaf.parts:
            leaf = ties.setdefault(leaf.identity(), leaf)
        leaves[name] = leaf
    for name, found in _values(root, all_metadata).items():
        if name in leaves:
            raise FormatError(f"{root}: {name} is a tensor on one rank and a value on another")
        leaves[name] = found
    for metadata in all_metadata:
        paths |= metadata.paths
    state = nested(leaves, paths, str(root))
    if not isinstance(state, dict):
        raise FormatError(f"{root}: the state is a list, not a dict of names")
    return state


def _gathered(all_metadata: list[Metadata], files: DataFiles) -> dict[str, _Copies]:
    out: dict[str, _Copies] = {}
    for metadata in all_metadata:
        for name, tensor in metadata.tensors.items():
            copies = out.setdefault(name, _Copies(tensor))
            if copies.tensor != tensor:
                raise FormatError(
                    f"{metadata.source}: {name} has shape {tensor.shape} and type {tensor.dtype}, "
                    f"and on another rank {copies.tensor.shape} and {copies.tensor.dtype}"
                )
            for text, box in {str(box): box for box in metadata.boxes[name]}.items():
                held = copies.parts.setdefault(text, [])
                held += [(metadata.rank, part) for part in _parts(metadata, files, name, box)]
    return out


def _parts(metadata: Metadata, files: DataFiles, name: str, box: Box) -> Iterator[Part]:
    tensor, (offsets, sizes) = metadata.tensors[name], box
    places = metadata.places.get((name, str(offsets)))
    if not places and not any(offsets):
        places = metadata.places.get((name, "()"))
    if not places:
        raise CorruptionError(
            f"{metadata.source} does not say where the box of {name} at {offsets} lies",
            names=[name],
        )
    for place in {str(place): place for place in places}.values():
        stored = files.tensor(place.file, place.key)
        if stored.shape != sizes or stored.dtype != tensor.dtype:
            raise FormatError(
                f"{place.file} holds {place.key} of shape {stored.shape} and type {stored.dtype}; "
                f"{metadata.source} tells of {sizes} and {tensor.dtype}"
            )
        if 0 not in sizes:
            yield Part(offsets, sizes, stored.parts[0].place)


def _tensor(root: Path, name: str, copies: _Copies) -> Any:
    """A tensor; or, where ranks hold different ones under one name, all of them by rank."""
    tensor = copies.tensor
    if _all_same(root, copies):
        parts = tuple(held[0][1] for held in copies.parts.values() if held)
        return StoredTensor(tensor.dtype, tensor.shape, parts, tensor.requires_grad)
    by_rank: dict[int | None, list[Part]] = {}
    for held in copies.parts.values():
        for rank, part in held:
            by_rank.setdefault(rank, []).append(part)
    if None in by_rank or len(copies.parts) > 1:
        raise CorruptionError(
            f"{root}: there are copies of {name} that differ, and nothing says which is right",
            names=[name],
        )
    return {
        f"rank{rank}": StoredTensor(tensor.dtype, tensor.shape, tuple(parts), tensor.requires_grad)
        for rank, parts in by_rank.items()
    }


def _all_same(root: Path, copies: _Copies) -> bool:
    dtype = copies.tensor.dtype
    for held in copies.parts.values():
        parts = [part for _, part in held]
        if len(parts) < 2:
            continue
        nbytes = StoredTensor(dtype, parts[0].sizes, ()).nbytes
        if all(_raw(part).strides is None for part in parts):
            looks = (_look(root, part, nbytes) for part in parts)
        else:
            # All of them in one way: elements of some say nothing beside all of another.
            most = max(nbytes, *(_span(part) * TABLE[dtype].itemsize for part in parts))
            in_full = most <= 16 * _WHOLE
            looks = (_look_at_elements(root, part, dtype, in_full) for part in parts)
        first = next(looks)
        if any(look != first for look in looks):
            return False
    return True


def _raw(part: Part) -> Raw:
    assert isinstance(part.place, Raw)  # both kinds of tensor files say where elements lie
    return part.place


def _look(root: Path, part: Part, nbytes: int) -> bytes:
    """Some bytes of a part that tell it from another, where both lie row by row."""
    place = _raw(part)
    path = file_below(root, place.file)
    if nbytes <= _WHOLE:
        return read_exactly(path, place.start, nbytes)
    last = nbytes - _SAMPLE
    starts = [place.start + last * at // (_SAMPLES - 1) for at in range(_SAMPLES)]
    return read_each(path, starts, _SAMPLE)


def _strides(part: Part) -> tuple[int, ...]:
    return _raw(part).strides or row_major(part.sizes)


def _span(part: Part) -> int:
    """Elements from the first to the last, as they lie."""
    return 1 + sum((n - 1) * step for n, step in zip(part.sizes, _strides(part), strict=True))


def _look_at_elements(root: Path, part: Part, dtype: str, in_full: bool) -> bytes:
    """The same where one of them does not: all elements, or some of many."""
    place, item, strides = _raw(part), TABLE[dtype].itemsize, _strides(part)
    path = file_below(root, place.file)
    if in_full:
        data = read_exactly(path, place.start, _span(part) * item)
        return elements_at(data, 0, dtype, part.sizes, strides).tobytes()
    spots = np.unique(np.linspace(0, math.prod(part.sizes) - 1, _SAMPLE, dtype=np.int64))
    steps = sum(
        at * step for at, step in zip(np.unravel_index(spots, part.sizes), strides, strict=True)
    )
    return read_each(path, (place.start + np.asarray(steps) * item).tolist(), item)


def _values(root: Path, all_metadata: list[Metadata]) -> dict[str, Any]:
    """Plain values; where ranks differ under one name, all of them by rank."""
    held: dict[str, dict[int | None, bytes]] = {}
    read: dict[tuple[str, str], bytes] = {}
    left: dict[Path, int] = {}
    for metadata in all_metadata:
        for name in metadata.values:
            places = metadata.places.get((name, "()"))
            if not places:
                raise CorruptionError(
                    f"{metadata.source} does not say where {name} lies", names=[name]
                )
            key = name, str(places[-1])
            if key not in read:
                read[key] = _bytes(root, name, places[-1], left)
            held.setdefault(name, {})[metadata.rank] = read[key]
    out: dict[str, Any] = {}
    for name, by_rank in held.items():
        values = {data: _value(root, name, data) for data in by_rank.values()}
        if len(values) == 1:
            out[name] = next(iter(values.values()))
        else:
            out[name] = {f"rank{rank}": values[data] for rank, data in by_rank.items()}
    return out


def _bytes(root: Path, name: str, place: Location, left: dict[Path, int]) -> bytes:
    """A value as it lies; `left` are the bytes of each file that no value has taken yet."""
    path = file_below(root, place.file)
    size = regular_size(path)
    length = size if place.length < 0 else place.length
    if length > _MAX_VALUE:
        raise FormatError(f"{path}: the value {name} has more than {_MAX_VALUE >> 30} GiB")
    data = read_exactly(path, place.offset, length)
    left[path] = left.get(path, size) - length
    if left[path] < 0:  # a few bytes of metadata could ask for gigabytes, any number of times
        raise CorruptionError(
            f"{path} has {size} bytes, and values that lie in it are said to have more",
            names=[name],
        )
    return data


def _value(root: Path, name: str, data: bytes) -> Any:
    """What bytes mean: a pickle, or themselves, since that is how `bytes` are written."""
    if data[:1] != b"\x80" or data[-1:] != b".":
        return data
    where = f"{name} in {root}"
    try:
        value, end = pickles.load_next(data, where=where, classes=TORCH)
    except UnsafeCheckpointError as error:
        error.add_note(
            f"Everything else of {root} can be read once the value {name} is out of the way: save "
            "it as plain values, or without it."
        )
        raise
    except FormatError:
        # A pickle that was damaged must not pass as bytes that somebody saved.
        if data[1:2] in (b"\2", b"\3", b"\4", b"\5"):
            raise
        return data
    return Finishing("", where).finished(value) if end == len(data) else data
