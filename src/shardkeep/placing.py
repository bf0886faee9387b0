# SPDX-License-Identifier: Apache-2.0
"""Putting a value of any form where a target holds another.

What can be changed is changed, so that whoever else holds it sees the new contents: dicts, lists,
and arrays of the same shape and type. What cannot is replaced in what holds it: read-only arrays
too, and those that share memory with another target which has other contents.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkeep import values
from shardkeep.arrays import ArrayAdapter, adapter_of, region
from shardkeep.errors import UnsupportedValueError
from shardkeep.memory import Memory
from shardkeep.structure import MAX_DEPTH, Path, dotted, key_identity
from shardkeep.tree import (
    SCALARS,
    Told,
    find_statefuls,
    is_split_mapping,
    is_stateful,
    plain_key,
)

__all__ = ["Placing", "package_of", "untold"]


class Placing:
    """Values put into a target; its `Stateful`s are left to be told."""

    def __init__(self, is_filled: Callable[[Memory], bool] = lambda memory: False) -> None:
        """`is_filled` says what memory has its contents already, and must keep them."""
        self._is_filled = is_filled
        self._mine: list[tuple[str, int, int, Memory]] = []
        self.told: list[Told] = []
        """The `Stateful`s that were met, and what each is to be told."""

    def put(self, old: Any, new: Any, path: Path) -> Any:
        """What stands in the place of `old` from now on."""
        if adapter_of(old) is not None:
            return self._array(old, new, dotted(path))
        if is_split_mapping(old) and isinstance(new, Mapping):
            return self._mapping(old, new, path)
        if type(old) is list and type(new) is list:
            old[:] = [
                self.put(old[at], item, (*path, at)) if at < len(old) else item
                for at, item in enumerate(new)
            ]
            return old
        if isinstance(old, tuple) and type(new) is tuple and len(old) == len(new):
            items = [
                self.put(a, b, (*path, at)) for at, (a, b) in enumerate(zip(old, new, strict=True))
            ]
            make: Any = getattr(type(old), "_make", tuple)
            return make(items)
        if is_stateful(old) and isinstance(new, Mapping):
            self.told.append((dotted(path), old, new))
            return old
        return values.like(old, new)

    def _array(self, old: Any, new: Any, where: str) -> Any:
        """Elements into the memory of an array, if it has the same shape and type."""
        adapter, given = adapter_of(old), adapter_of(new)
        if adapter is None or given is None or adapter.is_composite(type(old)):
            return new
        try:
            form = given.form(new, where)
            if (form.shape, form.dtype) != adapter.signature(old, where):
                return new
            block = np.empty(form.shape, form.dtype.bits())
            if block.size == 0:
                return old
            given.sources(new, where)[0].read_into(0, block.size, _flat(block))
            target = adapter.target(old, where, None)
        except UnsupportedValueError:
            return new  # cannot be filled
        if any([self._is_taken(piece.memory) for piece in target.pieces]):
            return old if _holds(adapter, old, block, where) else new
        for piece in target.pieces:
            part = block[region(piece.box.offsets, piece.box.sizes)]
            piece.sink.put((0,) * block.ndim, part, form.dtype)
            self._take(piece.memory)
        return target.result

    def _is_taken(self, memory: Memory | None) -> bool:
        """Whether any of it has been filled."""
        if memory is None:
            return False
        low, high = memory.bounds()
        near = [m for d, a, b, m in self._mine if a < high and b > low and d == memory.device]
        return any(map(memory.overlaps, near)) or self._is_filled(memory)

    def _take(self, memory: Memory | None) -> None:
        if memory is not None:
            self._mine.append((memory.device, *memory.bounds(), memory))

    def _mapping(self, old: Any, new: Mapping[Any, Any], path: Path) -> Any:
        mine = {_identity(key, path): key for key in old}
        filled = {}
        for key, item in new.items():
            # Its own key, which may be an Enum where its value is stored.
            own = mine.get(_identity(key, path), key)
            filled[own] = self.put(old[own], item, (*path, own)) if own in old else item
        if isinstance(old, MutableMapping):
            old.clear()
            old.update(filled)
            return old
        return OrderedDict(filled) if isinstance(new, OrderedDict) else filled


def untold(old: Any, new: Any) -> list[str]:
    """The `Stateful`s in `old` for which `new` has nothing that could be told, by name."""
    return [
        dotted(path) or type(stateful).__qualname__
        for path, stateful in find_statefuls(old)
        if not isinstance(_follow(new, path), Mapping)
    ]


def _follow(value: Any, path: Path) -> Any:
    """What is at a path, or None."""
    for key in path:
        if isinstance(value, Mapping):
            found = {_identity(own, path): item for own, item in value.items()}
            value = found.get(_identity(key, path))
        elif isinstance(value, (list, tuple)) and isinstance(key, int) and key < len(value):
            value = value[key]
        else:
            return None
    return value


def _identity(key: Any, path: Path) -> object:
    try:
        return key_identity(plain_key(key, path))
    except UnsupportedValueError:
        return key


def _flat(block: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return block.reshape(-1).view(np.uint8)


def _holds(adapter: ArrayAdapter, array: Any, block: npt.NDArray[Any], where: str) -> bool:
    """Whether an array has these elements, to the last bit."""
    for box, source in zip(
        adapter.form(array, where).boxes, adapter.sources(array, where), strict=True
    ):
        part = np.ascontiguousarray(block[region(box.offsets, box.sizes)])
        held = np.empty_like(part)
        if part.size:
            source.read_into(0, part.size, _flat(held))
        if not np.array_equal(_flat(held), _flat(part)):
            return False
    return True


def package_of(value: Any, depth: int = 0) -> str | None:
    """The library of the first array in a value, as far as one sees without asking: its package."""
    if type(value) in SCALARS or depth > MAX_DEPTH:
        return None
    if adapter_of(value) is not None:
        package = type(value).__module__.partition(".")[0]
        return package if package in ("numpy", "torch") else None
    if is_stateful(value):
        homes = {cls.__module__.partition(".")[0] for cls in type(value).__mro__}
        return "torch" if homes & {"torch", "torchdata"} else None
    if not isinstance(value, (Mapping, list, tuple)):
        return None
    items = value.values() if isinstance(value, Mapping) else value
    return next((found for one in items if (found := package_of(one, depth + 1))), None)
