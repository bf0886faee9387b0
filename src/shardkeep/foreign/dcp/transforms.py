# SPDX-License-Identifier: Apache-2.0
"""Items whose bytes torch's extensions have changed: compressed ones are unpacked when read."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardkeep.boxes import strides as row_major
from shardkeep.dtypes import TABLE
from shardkeep.errors import CorruptionError, FormatError, MissingDependencyError
from shardkeep.foreign.dcp.classes import Info
from shardkeep.foreign.found import Array
from shardkeep.foreign.regular_files import opened
from shardkeep.foreign.torch_objects import elements_at
from shardkeep.foreign.torch_zip import Archive

__all__ = ["LastUnpacked", "Unpacked", "unpack"]

Ints = tuple[int, ...]
Locate = Callable[[Archive, str, Ints], tuple[int, Ints | None, str]]

_AROUND = 1 << 20
"""Bytes of an archive beside the elements."""


def unpack(data: bytes, transforms: tuple[str, ...], most: int, where: str) -> bytes:
    """The bytes as they were before torch's extensions changed them."""
    for name in reversed(transforms):
        if not (name == "stream.zstd/1" or name.startswith("stream.zstd/1.")):
            raise FormatError(f"{where}: written with the extension {name!r}, which is not known")
        data = _unpack_zstd(data, most, where)
    return data


def _unpack_zstd(data: bytes, most: int, where: str) -> bytes:
    try:
        import zstandard
    except ImportError as error:
        raise MissingDependencyError(
            f"{where} is compressed: pip install 'shardkeep[zstd]'"
        ) from error
    reader = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(data)
    try:
        made = reader.read(most + 1)
    except (zstandard.ZstdError, MemoryError) as error:
        raise CorruptionError(f"{where}: cannot be unpacked: {error}") from error
    if len(made) > most:
        raise FormatError(f"{where}: unpacks to more than the {most} bytes it can have")
    return bytes(made)


class LastUnpacked:
    """The elements unpacked last: pieces of one item are read one after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: tuple[object, Array] | None = None

    def get(self, key: object, make: Callable[[], Array]) -> Array:
        """Those of an item, unpacked if they are not at hand."""
        with self._lock:
            if self._last is None or self._last[0] is not key:
                self._last = None  # before the next takes its memory
                self._last = (key, make())
            return self._last[1]


class Unpacked:
    """The elements of an item that must be unpacked."""

    def __init__(
        self,
        path: Path,
        info: Info,
        dtype: str,
        sizes: Ints,
        where: str,
        locate: Locate,
        last: LastUnpacked,
    ) -> None:
        self._path, self._info, self._where = path, info, where
        self._dtype, self._sizes, self._locate, self._last = dtype, sizes, locate, last

    def read(self, offsets: Ints, sizes: Ints) -> Any:
        """A box of them."""
        every = self._last.get(self, self._make)
        return every[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]

    def _make(self) -> Array:
        info = self._info
        with opened(self._path, info.path) as file:
            packed = file.read(info.offset, info.length)
        most = math.prod(self._sizes) * TABLE[self._dtype].itemsize + _AROUND
        data = unpack(packed, info.transforms, most, self._where)
        archive = Archive(lambda at, count: data[at : at + count], 0, len(data), self._where)
        start, steps, _ = self._locate(archive, self._dtype, self._sizes)
        return elements_at(data, start, self._dtype, self._sizes, steps or row_major(self._sizes))
