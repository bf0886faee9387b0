# SPDX-License-Identifier: Apache-2.0
"""A `torch_dist` checkpoint: what torch's metadata tells, with Megatron's own ways undone."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from shardkeep.boxes import flat_range_boxes
from shardkeep.dtypes import TABLE
from shardkeep.errors import CorruptionError, FormatError
from shardkeep.foreign.dcp.classes import Info
from shardkeep.foreign.dcp.items import ItemFiles
from shardkeep.foreign.dcp.reading import MCORE
from shardkeep.foreign.dcp.reading import find_checkpoint as find_torch
from shardkeep.foreign.found import Found, Ints, Part, Raw, StoredTensor
from shardkeep.foreign.inert import read_beside, read_inert
from shardkeep.foreign.regular_files import read_whole
from shardkeep.foreign.torch_zip import Archive
from shardkeep.formats.megatron import COMMON, CONFIG, SYSTEM
from shardkeep.wording import shown

__all__ = ["find_checkpoint"]

_BACKEND = "torch_dist"
_ORIGINAL = "nd_reformulated_orig_global_shape"
_OBJECT = re.compile(r".*/shard_[\d.]+_[\d.]+", re.ASCII | re.DOTALL)
"""Keys of objects, of which each rank may have its own."""
UNDER = "common"


class _Items(ItemFiles):
    """Torch's items; values may hold objects of Megatron's classes, which become plain data."""

    def value(self, fqn: str, info: Info) -> Any:
        """A value, objects in it as dicts of their attributes."""
        if info.transforms:
            return super().value(fqn, info)
        file = self._checked(fqn, info)
        archive = Archive(file.read, info.offset, info.length, self._where(fqn, info))
        value = read_inert(archive, info.path)
        # Megatron puts each object into a list of its own.
        alone = isinstance(value, list) and len(value) == 1 and _OBJECT.fullmatch(fqn)
        return value[0] if alone else value


def find_checkpoint(path: Path) -> Found:
    """The state: keys as Megatron has them, and `common`."""
    config = _config(path)
    found = find_torch(path, items=_Items)
    told = dict(found.user_metadata)
    shapes = told.pop(MCORE, {})
    state = {
        name: _reformed(leaf, shapes.get(name), f"{name} in {path}")
        for name, leaf in found.state.items()
    }
    if UNDER in state:
        raise FormatError(f"{path}: something sharded is called {UNDER!r}")
    if (path / COMMON).exists():
        state[UNDER] = read_beside(path, COMMON)
    elif config.get("common_backend") == "torch":
        raise CorruptionError(f"{path} lacks {COMMON}, which belongs to it; copy all of it")
    return Found(SYSTEM, path, state, {**told, **config})


def _config(path: Path) -> dict[str, Any]:
    if not (path / CONFIG).exists():
        return {}
    try:
        told = json.loads(read_whole(path, CONFIG, 1 << 20))
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"{path / CONFIG} is not valid JSON: {error}") from error
    if not isinstance(told, dict):
        raise FormatError(f"{path / CONFIG} is no object")
    backend = told.get("sharded_backend")
    if backend != _BACKEND:
        raise FormatError(
            f"{path} was written by Megatron's backend {shown(backend)}; only {_BACKEND!r} is "
            "read. Convert it with Megatron: load it and save it with --ckpt-format torch_dist."
        )
    return told


def _reformed(leaf: Any, told: Any, what: str) -> Any:
    """A tensor as it was before Megatron flattened the pieces that ranks hold.

    Of shape (X, Y), held in pieces of (x, y), it is stored as (X / x, Y / y, x * y), whose last
    dimension may be cut anywhere.
    """
    if not isinstance(leaf, StoredTensor) or not isinstance(told, dict) or _ORIGINAL not in told:
        return leaf
    shape = told[_ORIGINAL]
    grid, count = leaf.shape[:-1], leaf.shape[-1] if leaf.shape else 0
    fine = isinstance(shape, tuple) and len(shape) == len(grid)
    fine = fine and all(type(n) is int and n > 0 for n in shape)
    if not fine or any(not g or n % g for n, g in zip(shape, grid, strict=True)):
        raise FormatError(
            f"{what} is stored as {leaf.shape}, which cannot have been {shown(shape)}"
        )
    piece = tuple(n // g for n, g in zip(shape, grid, strict=True))
    if math.prod(piece) != count:
        raise FormatError(f"{what} is stored as {leaf.shape}, which cannot have been {shape}")
    parts: list[Part] = []
    for part in leaf.parts:
        parts += _boxes(part, piece, TABLE[leaf.dtype].itemsize, what)
    return StoredTensor(leaf.dtype, tuple(shape), tuple(parts), leaf.requires_grad)


def _boxes(part: Part, piece: Ints, itemsize: int, what: str) -> list[Part]:
    place = part.place
    plain = isinstance(place, Raw) and place.strides is None
    if not plain or any(n != 1 for n in part.sizes[:-1]):
        raise FormatError(f"{what} is stored in pieces that cannot be put together")
    origin = tuple(at * n for at, n in zip(part.offsets, piece, strict=False))
    first, start = part.offsets[-1], place.start  # type: ignore[union-attr]
    boxes = []
    for offsets, sizes in flat_range_boxes(piece, first, first + part.sizes[-1]):
        moved = tuple(o + at for o, at in zip(offsets, origin, strict=True))
        boxes.append(Part(moved, sizes, Raw(place.file, start)))  # type: ignore[union-attr]
        start += math.prod(sizes) * itemsize
    return boxes
