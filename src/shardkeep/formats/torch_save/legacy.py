# SPDX-License-Identifier: Apache-2.0
"""The files that torch wrote before 1.6: pickles in a row, then every storage behind its length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardkeep.dtypes import TABLE
from shardkeep.errors import CorruptionError, FormatError
from shardkeep.foreign import pickles
from shardkeep.foreign.regular_files import OpenedFile
from shardkeep.foreign.torch_objects import Finishing, storage_id
from shardkeep.foreign.torch_stand_ins import TORCH, Storage
from shardkeep.wording import shown

__all__ = ["read_stream"]

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_FIRST = 1 << 20


class _Storages:
    """Storages by their keys, as pickles name them."""

    def __init__(self) -> None:
        self.roots: dict[str, tuple[int, int]] = {}
        """Elements and their size, by key."""
        self.named: list[tuple[str, int, Storage]] = []
        """Key, byte at which it begins in there, and what stands for it."""

    def __call__(self, given: Any) -> Storage:
        kind, key, count = storage_id(given)
        itemsize = TABLE[kind.dtype].itemsize if kind.dtype else 1
        if self.roots.setdefault(key, (count, itemsize)) != (count, itemsize):
            raise FormatError(f"the storage {key:.40} has two lengths")
        offset, length = 0, count
        view = given[5] if len(given) == 6 else None
        if view is not None:
            # Older versions name a part of a storage so: key, first element, length.
            if type(view) is not tuple or len(view) != 3:
                raise FormatError("a part of a storage is not described as torch does")
            _, offset, length = view
            if type(offset) is not int or type(length) is not int:
                raise FormatError("a part of a storage is not described as torch does")
            if offset < 0 or length < 0 or offset + length > count:
                raise FormatError(f"a part reaches past the end of the storage {key:.40}")
        made = Storage(kind.dtype, length * itemsize)
        self.named.append((key, offset * itemsize, made))
        return made


def read_stream(file: OpenedFile, where: str) -> Any:
    """The object in an old file; its tensors are left where they are."""

    def attempt(data: bytes) -> tuple[Any, _Storages, int]:
        storages = _Storages()
        magic, at = pickles.load_next(data, where=where)
        version, at = pickles.load_next(data, at, where=where)
        if magic != _MAGIC or version != _PROTOCOL:
            raise FormatError(f"{where}: version {shown(version)} of the old format is not known")
        system, at = pickles.load_next(data, at, where=where)
        if type(system) is not dict or system.get("little_endian") is not True:
            raise FormatError(
                f"{where} was written on a big-endian machine, which is not supported; load it "
                "with torch and save it again"
            )
        graph, at = pickles.load_next(data, at, where=where, classes=TORCH, persistent=storages)
        keys, at = pickles.load_next(data, at, where=where)
        if type(keys) is not list or not all(type(key) is str for key in keys):
            raise FormatError(f"{where}: its storages are not listed")
        if len(set(keys)) != len(keys) or set(keys) != set(storages.roots):
            raise CorruptionError(f"{where}: other storages are listed than tensors lie in")
        _place(file, where, keys, storages, at)
        return graph, storages, at

    graph, _, _ = _with_enough(file, attempt)
    return Finishing("", where).finished(graph)


def _with_enough(file: OpenedFile, attempt: Callable[[bytes], Any]) -> Any:
    """Pickles do not tell how long they are, and gigabytes may follow: more is read if need be."""
    size = _FIRST
    while True:
        try:
            return attempt(file.read(0, size))
        except pickles.Cut:
            if size >= file.size:
                raise
            size *= 16


def _place(file: OpenedFile, where: str, keys: list[str], storages: _Storages, at: int) -> None:
    starts = {}
    for key in keys:
        count, itemsize = storages.roots[key]
        if int.from_bytes(file.read(at, 8), "little") != count:
            raise CorruptionError(f"{where}: the storage {key:.40} has another length than it says")
        starts[key] = at + 8
        at += 8 + count * itemsize
    if at > file.size:
        raise CorruptionError(f"{where} has {file.size} bytes, and {at} are needed; it was cut")
    for key, offset, storage in storages.named:
        storage.place = starts[key] + offset
