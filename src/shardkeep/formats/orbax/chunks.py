# SPDX-License-Identifier: Apache-2.0
"""Arrays that tensorstore reads, chunk by chunk."""

from __future__ import annotations

import itertools
import math
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from shardkeep.dtypes import lookup
from shardkeep.errors import (
    CorruptionError,
    FormatError,
    MissingDependencyError,
    UnsafeCheckpointError,
    UnsupportedValueError,
)
from shardkeep.foreign.found import Array, Ints, Part, StoredTensor
from shardkeep.foreign.regular_files import beginning
from shardkeep.foreign.shapes import checked_shape
from shardkeep.foreign.tables import check_inside
from shardkeep.formats.orbax.items import Tree

__all__ = ["Arrays"]

_MAX_PARTS = 1 << 12
"""Chunks of one array that are told apart; one with more is read as a whole."""
_MAX_CHUNK = 1 << 36
_SMALL_CHUNK = 16 << 20
"""Bytes that a chunk may have, however little of it an array fills."""
_MAX_METADATA = 1 << 20
"""Bytes of the metadata of one array."""
_MAX_DEPTH = 64
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.?)*+"?|[][{}]', re.DOTALL)
"""A text, be it cut off, or a bracket; never goes back, so that no text takes long."""
_CACHED = 4
"""Chunks that are kept decoded: what is read piece by piece is not decoded for each piece."""
_SMALL_CACHE = 64 << 20


def _tensorstore() -> Any:
    try:
        import tensorstore
    except ImportError as error:
        raise MissingDependencyError(
            "reading Orbax's checkpoints needs tensorstore: "
            'pip install "shardkeep[orbax]" (or tensorstore alone)'
        ) from error
    return tensorstore


@contextmanager
def _told(what: str) -> Iterator[None]:
    """tensorstore's errors as ours."""
    try:
        yield
    except (CorruptionError, FormatError, UnsafeCheckpointError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        text = text if len(text) < 300 else text[:300] + " ..."
        raise CorruptionError(f"{what} cannot be read: {text}") from error


class Arrays:
    """The arrays of one item."""

    def __init__(self, root: Path, tree: Tree) -> None:
        """Nothing is opened yet."""
        self._ts = _tensorstore()
        self._root = root
        self._tree = tree
        self._largest = 0
        self._lock = threading.Lock()
        self._context: Any = None
        self._open: dict[str, Any] = {}
        _check_files(root)

    @property
    def _packed(self) -> dict[str, Any]:
        """All arrays in one store."""
        # A directory as a URL would need its name escaped; as a path it does not.
        return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{self._root}{os.sep}"}}

    def _spec(self, name: str) -> dict[str, Any]:
        if self._tree.use_ocdbt:
            kvstore = {**self._packed, "path": f"{name}/"}
        else:
            check_inside(name, str(self._root))
            kvstore = {"driver": "file", "path": f"{self._root}{os.sep}{name}{os.sep}"}
        return {
            "driver": "zarr3" if self._tree.use_zarr3 else "zarr",
            "kvstore": kvstore,
            "fill_missing_data_reads": not self._tree.is_filled,
            # What another process does to a checkpoint that is being read is not followed.
            "recheck_cached_metadata": "open",
            "recheck_cached_data": "open",
        }

    def find(self, names: list[str]) -> dict[str, StoredTensor]:
        """What there is under each of these names; looks at metadata only."""
        self._check_metadata(names)
        opened = {}
        for name in names:
            with _told(f"{name} in {self._root}"):
                opened[name] = self._ts.open(self._spec(name), open=True, read=True)
        found = {}
        for name, future in opened.items():
            with _told(f"{name} in {self._root}"):
                found[name] = self._tensor(name, future.result())
        return found

    def _check_metadata(self, names: list[str]) -> None:
        file = "zarr.json" if self._tree.use_zarr3 else ".zarray"
        if not self._tree.use_ocdbt:
            for name in names:
                path = Path(self._spec(name)["kvstore"]["path"], file)
                _check_metadata(beginning(path, _MAX_METADATA + 1), str(path))
            return
        read = {}
        with _told(str(self._root)):
            packed = self._ts.KvStore.open(self._packed).result()
            for name in names:
                read[name] = packed.read(f"{name}/{file}")
        for name, future in read.items():
            with _told(f"{name} in {self._root}"):
                _check_metadata(future.result().value, f"{name} in {self._root}")

    def _tensor(self, name: str, store: Any) -> StoredTensor:
        what = f"{name} in {self._root}"
        try:
            dtype = lookup(store.dtype.name)
        except UnsupportedValueError as error:
            raise FormatError(f"{what}: {error}") from error
        if any(store.domain.origin):
            raise FormatError(f"{what} does not begin at 0")
        shape = checked_shape((int(n) for n in store.shape), what)
        grid = store.chunk_layout.read_chunk.shape or shape
        chunk = checked_shape((max(1, int(n)) for n in grid), what)
        nbytes = math.prod(chunk) * dtype.itemsize
        whole = math.prod(shape) * dtype.itemsize
        if nbytes > _MAX_CHUNK or nbytes > max(_SMALL_CHUNK, 2 * whole):
            # tensorstore takes memory for all of a chunk, and ends the process if there is none.
            raise FormatError(
                f"{what} is said to have chunks of {nbytes} bytes, and {whole} bytes in all"
            )
        self._largest = max(self._largest, nbytes)
        if 0 in shape:
            return StoredTensor(dtype.name, shape, ())
        counts = [-(-n // c) for n, c in zip(shape, chunk, strict=True)]
        if math.prod(counts) > _MAX_PARTS:
            counts, chunk = [1] * len(shape), shape
        parts = []
        for place in itertools.product(*map(range, counts)):
            low = tuple(p * c for p, c in zip(place, chunk, strict=True))
            sizes = tuple(min(c, n - o) for c, n, o in zip(chunk, shape, low, strict=True))
            parts.append(Part(low, sizes, _Chunk(self.store, name, what, low, dtype.bits())))
        return StoredTensor(dtype.name, shape, tuple(parts))

    def store(self, name: str) -> Any:
        """An array, opened with a cache that all of them share."""
        with self._lock:
            if self._context is None:
                limit = max(_SMALL_CACHE, _CACHED * self._largest)
                self._context = self._ts.Context({"cache_pool": {"total_bytes_limit": limit}})
            if name not in self._open:
                self._open[name] = self._ts.open(
                    self._spec(name), open=True, read=True, context=self._context
                ).result()
            return self._open[name]


class _Chunk:
    """A chunk of an array."""

    __slots__ = ("_bits", "_low", "_name", "_store", "_what")

    def __init__(
        self,
        store: Callable[[str], Any],
        name: str,
        what: str,
        low: Ints,
        bits: np.dtype[np.generic],
    ) -> None:
        self._store, self._name, self._what = store, name, what
        self._low, self._bits = low, bits

    def read(self, offsets: Ints, sizes: Ints) -> Array:
        """Some of its elements."""
        at = tuple(
            slice(low + o, low + o + s) for low, o, s in zip(self._low, offsets, sizes, strict=True)
        )
        with _told(self._what):
            block = self._store(self._name)[at].read().result()
        return np.ascontiguousarray(block).reshape(sizes).view(self._bits)


def _check_files(root: Path) -> None:
    """tensorstore follows links wherever they lead, and waits for pipes: neither may be there."""
    inside = Path(os.path.realpath(root))
    folders = [os.fspath(root)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    if not Path(os.path.realpath(entry.path)).is_relative_to(inside):
                        raise UnsafeCheckpointError(
                            f"{entry.path} is a link that leaves the checkpoint's directory; it is "
                            "not followed"
                        )
                elif entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif not entry.is_file(follow_symlinks=False):
                    raise FormatError(f"{entry.path} is not a regular file")


def _check_metadata(data: bytes, what: str) -> None:
    """tensorstore ends the process if metadata nests too deep for the stack of a thread."""
    if len(data) > _MAX_METADATA:
        raise FormatError(f"{what} has more metadata than {_MAX_METADATA} bytes")
    if data.count(b"{") + data.count(b"[") <= _MAX_DEPTH:
        return
    depth = 0
    for token in _TOKEN.finditer(data):
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(token[0], 0)
        if depth > _MAX_DEPTH:
            raise FormatError(f"{what} has metadata that nests more than {_MAX_DEPTH} deep")
