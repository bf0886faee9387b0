# SPDX-License-Identifier: Apache-2.0
"""A found state as the tables that every load and every open checkpoint works on."""

from __future__ import annotations

import math
import secrets
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from shardkeep.boxes import FEW_SLABS, Gap, Overlap, tiled, tiling_fault
from shardkeep.columns import Boxes
from shardkeep.dtypes import lookup
from shardkeep.errors import CheckpointError, CorruptionError, FormatError, UnsafeCheckpointError
from shardkeep.foreign.found import Array, Found, Ints, Made, Part, Raw, StoredTensor, whole
from shardkeep.metadata import ChunkStorageMetadata, TensorProperties
from shardkeep.structure import (
    MAX_DEPTH,
    TENSOR,
    VALUE,
    Node,
    Path,
    Structure,
    dotted,
    key_identity,
)
from shardkeep.tables import NO_ALIAS, ChunkTable, StateColumns, TensorTable, ValueTable

__all__ = ["ODD", "Tables", "tables_of"]

_FEW = 16
"""Parts of a tensor that are looked at one by one: with more of them, all together first."""
ODD = -1
"""In place of a file's number: a part that must be worked out; `start` says which."""


@dataclass(frozen=True, eq=False)
class InMemory:
    """Elements that the parser has at hand."""

    array: Array
    """All of them, little-endian."""

    def read(self, offsets: Ints, sizes: Ints) -> Array:
        """A part."""
        return self.array[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]


@dataclass(eq=False)
class Tables:
    """What was found, as columns."""

    state: StateColumns
    """Tensors, chunks and values."""
    structure: Structure
    """The nesting around them."""
    files: list[str]
    """Every file that elements lie in."""
    odd: list[Made | Raw]
    """Parts that do not lie row-major in a file."""
    odd_files: list[int]
    """The file of each, or -1."""
    plain: dict[str, object]
    """Every plain value by its name."""


@dataclass
class _Walk:
    """One pass over a found state."""

    where: str
    tensors: list[StoredTensor] = field(default_factory=list)
    plain: list[object] = field(default_factory=list)
    leaves: list[tuple[int, int]] = field(default_factory=list)
    """Kind of each leaf, and its number among those of its kind."""
    splits: dict[int, bool] = field(default_factory=dict)
    """By the id of a sequence, whether it holds a tensor or a mapping, at any depth of sequences;
    looked at once, however often and however deep it occurs."""

    def node(self, value: object, path: Path) -> Node:
        if len(path) > MAX_DEPTH:
            raise FormatError(f"{self.where}: the state is nested deeper than {MAX_DEPTH}")
        if isinstance(value, np.ndarray):
            value = _array(value, dotted(path))
        if isinstance(value, StoredTensor):
            return self._leaf(TENSOR, self.tensors, value)
        if isinstance(value, Mapping) and type(value) is not Counter:
            return self._mapping(value, path)
        if type(value) in (list, tuple) and self._splits(value, 0):
            kind = "list" if type(value) is list else "tuple"
            items: Sequence[object] = value  # type: ignore[assignment]
            nodes = [self.node(item, (*path, at)) for at, item in enumerate(items)]
            return [kind, None, nodes, None]
        return self._leaf(VALUE, self.plain, value)

    def _mapping(self, value: Mapping[Any, object], path: Path) -> Node:
        keys = list(value)
        try:
            if len(set(map(key_identity, keys))) != len(keys):
                raise FormatError(f"{self.where}: {dotted(path)} has a key twice")
        except CheckpointError as error:
            raise FormatError(f"{self.where}: {dotted(path) or 'the state'}: {error}") from error
        children = [self.node(child, (*path, key)) for key, child in value.items()]
        return ["ordered_dict" if isinstance(value, OrderedDict) else "dict", keys, children, None]

    def _leaf(self, kind: int, among: list[Any], value: object) -> Node:
        self.leaves.append((kind, len(among)))
        among.append(value)
        return kind

    def _splits(self, value: Any, depth: int) -> bool:
        if depth > MAX_DEPTH:
            return True
        known = self.splits.get(id(value))
        if known is None:
            known = self.splits[id(value)] = self._holds_one(value, depth)
        return known

    def _holds_one(self, value: Any, depth: int) -> bool:
        for item in value:
            if isinstance(item, (StoredTensor, np.ndarray, Mapping)) and type(item) is not Counter:
                return True
            if type(item) in (list, tuple) and self._splits(item, depth + 1):
                return True
        return False


def _array(array: Array, name: str) -> StoredTensor:
    try:
        dtype = lookup(array.dtype)
    except (CheckpointError, TypeError) as error:
        raise FormatError(f"{name}: {error}") from error
    plain = (
        np.ascontiguousarray(array)
        .reshape(array.shape)
        .astype(array.dtype.newbyteorder("<"), copy=False)
    )
    return whole(dtype.name, array.shape, InMemory(plain.view(dtype.bits())))


def tables_of(found: Found) -> Tables:
    """Names, structure and places of everything that was found; all of it is checked."""
    where = str(found.root)
    walk = _Walk(where)
    structure = Structure(walk.node(found.state, ()))
    if type(structure.root) is int:
        raise FormatError(f"{where} holds a single value, not a state")
    names = structure.names
    try:
        "".join(names).encode()
    except UnicodeEncodeError as error:
        raise FormatError(f"{where}: a name in it has half a character: {error}") from error
    tensor_names = [n for n, (kind, _) in zip(names, walk.leaves, strict=True) if kind == TENSOR]
    value_names = [n for n, (kind, _) in zip(names, walk.leaves, strict=True) if kind == VALUE]
    first: dict[int, int] = {}
    alias = [first.setdefault(id(t), row) for row, t in enumerate(walk.tensors)]
    alias = [NO_ALIAS if row == at else row for at, row in enumerate(alias)]
    table = _tensor_table(walk.tensors, tensor_names, alias, where)
    tables = _Parts(where)
    chunks = tables.chunks(walk.tensors, tensor_names, alias)
    count = len(value_names)
    value_table = ValueTable(
        value_names, np.zeros(count, np.int64), np.arange(count), np.zeros(count, np.int64)
    )
    begin = np.searchsorted(chunks.tensor, np.arange(len(table) + 1))

    def chunks_of(row: int) -> ChunkTable:
        return chunks.part(int(begin[row]), int(begin[row + 1]))

    state = StateColumns(table, value_table, chunks_of, chunks)
    plain = dict(zip(value_names, walk.plain, strict=True))
    return Tables(state, structure, tables.files, tables.odd, tables.odd_files, plain)


def _tensor_table(
    tensors: list[StoredTensor], names: list[str], alias: list[int], where: str
) -> TensorTable:
    properties = []
    known: dict[tuple[str, bool], TensorProperties] = {}
    for tensor, name in zip(tensors, names, strict=True):
        # Without those extents that are 0: strides are computed from the others all the same.
        nbytes = math.prod(n for n in tensor.shape if n) * lookup(tensor.dtype).itemsize
        if len(tensor.shape) > 32 or not 0 <= nbytes < 2**62:
            raise FormatError(f"{where}: {name} claims the shape {tensor.shape}")
        kind = tensor.dtype, tensor.requires_grad
        if kind not in known:
            known[kind] = TensorProperties(tensor.dtype, requires_grad=tensor.requires_grad)
        properties.append(known[kind])
    return TensorTable.of(names, properties, [t.shape for t in tensors], alias)


class _Parts:
    """Parts of tensors, as rows of a table."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.files: list[str] = []
        self.odd: list[Made | Raw] = []
        self.odd_files: list[int] = []
        self._numbers: dict[str, int] = {}

    def chunks(self, tensors: list[StoredTensor], names: list[str], alias: list[int]) -> ChunkTable:
        rows: list[tuple[int, Part]] = []
        for row, (tensor, name) in enumerate(zip(tensors, names, strict=True)):
            if alias[row] == NO_ALIAS:
                self._check_cover(tensor, name)
                parts = sorted(tensor.parts, key=lambda part: part.offsets)
                rows += [(row, part) for part in parts]
        placed = [self._place(part.place) for _, part in rows]
        count = len(rows)
        column = np.fromiter((row for row, _ in rows), np.int64, count)
        boxes = Boxes.of([ChunkStorageMetadata(part.offsets, part.sizes) for _, part in rows])
        file = np.fromiter((number for number, _ in placed), np.int64, count)
        start = np.fromiter((at for _, at in placed), np.int64, count)
        none = np.zeros(count, np.int64)
        return ChunkTable(column, boxes, none, none, file, start)

    def _place(self, place: Raw | Made) -> tuple[int, int]:
        file = self._file(place.file) if isinstance(place, Raw) else ODD
        if isinstance(place, Raw) and place.strides is None:
            if not 0 <= place.start < 2**62:
                raise FormatError(f"{self.where}: {place.file} has no byte {place.start}")
            return file, place.start
        self.odd.append(place)
        self.odd_files.append(file)
        return ODD, len(self.odd) - 1

    def _file(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            check_inside(name, self.where)
            number = self._numbers[name] = len(self.files)
            self.files.append(name)
        return number

    def _check_cover(self, tensor: StoredTensor, name: str) -> None:
        parts = tensor.parts
        ndim = len(tensor.shape)
        for part in parts:
            if len(part.offsets) != ndim or len(part.sizes) != ndim or 0 in part.sizes:
                raise FormatError(f"{self.where}: {name} has a part {part.offsets} {part.sizes}")
            ends = zip(part.offsets, part.sizes, tensor.shape, strict=True)
            if any(o < 0 or s < 0 or o + s > n for o, s, n in ends):
                raise FormatError(
                    f"{self.where}: {name} has a part at {part.offsets} of {part.sizes}, which "
                    f"reaches out of its shape {tensor.shape}"
                )
        if len(parts) == 1 and parts[0].sizes == tensor.shape:
            return
        matrix = (len(parts), ndim)
        offsets = np.array([part.offsets for part in parts], np.int64).reshape(matrix)
        sizes = np.array([part.sizes for part in parts], np.int64).reshape(matrix)
        many = len(parts) > _FEW
        if many:
            boxes = Boxes.of([ChunkStorageMetadata(part.offsets, part.sizes) for part in parts])
            shape, rows = np.array(tensor.shape, np.int64), np.zeros(len(parts), np.int64)
            if tiled(np.array([0, ndim]), shape, rows, boxes, secrets.randbits(62))[0]:
                return
        fault = tiling_fault(tensor.shape, offsets, sizes, FEW_SLABS)
        if isinstance(fault, Gap):
            text = f"nothing covers {fault.box.offsets} to the extent of {fault.box.sizes}"
        elif isinstance(fault, Overlap):
            one, other = parts[fault.first], parts[fault.second]
            text = f"those at {one.offsets} and {other.offsets} overlap"
        elif many:
            text = "some overlap or are missing"
        else:
            return
        raise CorruptionError(
            f"{self.where}: of the {len(parts)} parts of {name}, {text}", names=(name,)
        )


def check_inside(name: str, where: str) -> None:
    """Refuse the name of a file that does not lie in the checkpoint, or that no file can have."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise FormatError(f"{where}: names a file {name!r:.100}, which is no text") from error
    parts = PurePosixPath(name).parts
    if "\0" in name or "\\" in name or name.startswith("/") or ".." in parts:
        raise UnsafeCheckpointError(f"{where}: names a file outside of it, {name!r}")
