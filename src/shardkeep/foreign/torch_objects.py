# SPDX-License-Identifier: Apache-2.0
"""What `torch.save` put into an archive, as a state whose tensors say where they lie."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkeep.boxes import strides as row_major
from shardkeep.dtypes import TABLE
from shardkeep.errors import CorruptionError, FormatError, UnsafeCheckpointError
from shardkeep.foreign import pickles
from shardkeep.foreign.found import Part, Raw, StoredTensor, whole
from shardkeep.foreign.graphs import StandIn
from shardkeep.foreign.numpy_stand_ins import NumpyArray, NumpyDType, NumpyType
from shardkeep.foreign.stand_ins import Record, Uuid
from shardkeep.foreign.tables import InMemory
from shardkeep.foreign.torch_stand_ins import TORCH, Storage, StorageType, TensorView, TorchName
from shardkeep.foreign.torch_zip import PROGRAM, Archive

__all__ = [
    "Finishing",
    "Members",
    "elements_at",
    "read_object",
    "read_object_in_memory",
    "steps_of",
    "storage_id",
]

PICKLE = "data.pkl"
_MOST = 1 << 30
"""Bytes of a pickle: what it describes is far larger, but lies beside it."""
_OVERLAPPING = 8 << 30
"""Bytes that all tensors of a file may have beyond 16 times those of their storages: views that
overlap, or repeat elements, are counted as what they are when read."""
_ATOMS = frozenset({str, int, float, bool, type(None), bytes, bytearray, complex})


def storage_id(given: Any) -> tuple[StorageType, str, int]:
    """Type, key and length of the storage that a persistent id names."""
    if type(given) is not tuple or len(given) not in (5, 6) or given[0] != "storage":
        raise UnsafeCheckpointError("a persistent id names something else than a storage")
    _, kind, key, _location, count = given[:5]
    if type(kind) is not StorageType or type(key) is not str or len(key) > 100:
        raise FormatError("a storage is not described as torch does")
    if type(count) is not int or not 0 <= count < 2**62:
        raise FormatError("a storage is not described as torch does")
    if kind.dtype is None and kind.name != "torch.UntypedStorage":
        raise FormatError(f"a {kind.name} holds quantised elements, which are not read")
    return kind, key, count


class Members:
    """The entries of one archive of `torch.save`."""

    def __init__(self, archive: Archive) -> None:
        """Find the folder that all of them are in; its name is arbitrary."""
        self.archive = archive
        found = [name for name in archive.entries if name.partition("/")[2] == PICKLE]
        if len(found) != 1:
            raise FormatError(f"{archive.where}: a zip archive, but not one of torch.save")
        self.folder = found[0].removesuffix(PICKLE)
        if f"{self.folder}constants.pkl" in archive.entries:
            raise FormatError(f"{archive.where} {PROGRAM}")
        order = f"{self.folder}byteorder"
        if order in archive.entries and archive.read(order, 16).strip() != b"little":
            raise FormatError(
                f"{archive.where} was written on a big-endian machine, which is not supported; "
                "load it with torch and save it again"
            )

    def pickle(self) -> bytes:
        """The pickle of the object."""
        return self.archive.read(f"{self.folder}{PICKLE}", _MOST)

    def storage(self, given: object) -> Storage:
        """A storage by its persistent id."""
        kind, key, count = storage_id(given)
        name = f"{self.folder}data/{key}"
        entry = self.archive.entries.get(name)
        if entry is None:
            raise CorruptionError(f"the storage {key:.40} is not in the archive")
        nbytes = count * (TABLE[kind.dtype].itemsize if kind.dtype else 1)
        if nbytes != entry.nbytes:
            raise CorruptionError(
                f"the storage {key:.40} has {entry.nbytes} bytes, expected {nbytes}"
            )
        return Storage(kind.dtype, nbytes, self.archive.locate(name))


def read_object(archive: Archive, file: str) -> Any:
    """The object in an archive that lies in `file`."""
    members = Members(archive)
    graph = pickles.load(
        members.pickle(), where=archive.where, classes=TORCH, persistent=members.storage
    )
    return Finishing(file, archive.where).finished(graph)


def read_object_in_memory(data: bytes, where: str) -> Any:
    """The object in an archive that is at hand."""
    archive = Archive(lambda at, count: data[at : at + count], 0, len(data), where)
    members = Members(archive)
    graph = pickles.load(members.pickle(), where=where, classes=TORCH, persistent=members.storage)
    return _InMemoryFinishing(data, where).finished(graph)


class Finishing:
    """Stand-ins to what they stand for."""

    def __init__(self, file: str, where: str) -> None:
        self.file, self.where = file, where
        self._tensors: dict[str, StoredTensor] = {}
        self._done: dict[int, tuple[object, Any]] = {}
        self._places: set[str] = set()
        self._room = _OVERLAPPING

    def finished(self, value: Any) -> Any:
        """A value without stand-ins; what lies at the same place is the same tensor."""
        kind: type = type(value)
        if kind in _ATOMS:
            return value
        known = self._done.get(id(value))
        if known is None:
            known = self._done[id(value)] = (value, self._made(value, kind))
        return known[1]

    def _made(self, value: Any, kind: type) -> Any:
        if kind is dict or kind is OrderedDict:
            pairs = ((self.finished(key), self.finished(item)) for key, item in value.items())
            made = kind(pairs)
            if len(made) != len(value):
                raise FormatError(f"{self.where}: two keys of a dict become one")
            return made
        if kind is list or kind is tuple:
            return kind([self.finished(item) for item in value])
        if kind is deque:
            return deque([self.finished(item) for item in value], value.maxlen)
        if kind in (set, frozenset):
            return kind(self.finished(item) for item in value)
        if kind is Counter:
            return Counter({self.finished(key): item for key, item in value.items()})
        if isinstance(value, TensorView):
            return self.tensor(value)
        return self._leaf(value)

    def _leaf(self, value: Any) -> Any:
        if isinstance(value, NumpyDType):
            return value.name
        if isinstance(value, (NumpyArray, Uuid)):
            try:
                return value.array() if isinstance(value, NumpyArray) else value.finished()
            except (ValueError, TypeError) as error:
                raise FormatError(f"{self.where}: {error}") from error
        if isinstance(value, (Record, NumpyType, TorchName, StorageType)):
            raise UnsafeCheckpointError(
                f"{self.where}: holds a {value.name}, which is neither a tensor nor a plain value"
            )
        if isinstance(value, StandIn):
            raise FormatError(f"{self.where}: holds a bare {type(value).__name__.lower()}")
        return value

    def tensor(self, view: TensorView) -> StoredTensor:
        """A tensor where it lies."""
        place = view.storage.place
        # As text: numbers can be chosen so that all tuples of them have one hash.
        key = str((place, view.dtype, view.offset, view.shape, view.strides))
        made = self._tensors.get(key)
        if made is None:
            start = place + view.offset * TABLE[view.dtype].itemsize
            raw = Raw(self.file, start, steps_of(view))
            made = self._tensors[key] = whole(view.dtype, view.shape, raw)
            self._count(made, view)
        made.requires_grad |= view.requires_grad
        return made

    def _count(self, made: StoredTensor, view: TensorView) -> None:
        place = str(view.storage.place)
        if place not in self._places:
            self._places.add(place)
            self._room += 16 * view.storage.nbytes
        self._room -= made.nbytes
        if self._room < 0:
            raise FormatError(
                f"{self.where}: its tensors repeat or share elements so often that they are far "
                "larger than the file; save copies of them instead"
            )


class _InMemoryFinishing(Finishing):
    """The same, with the elements at hand."""

    def __init__(self, data: bytes, where: str) -> None:
        super().__init__("", where)
        self.data = data

    def tensor(self, view: TensorView) -> StoredTensor:
        """A tensor with its elements."""
        made = super().tensor(view)
        start = view.storage.place + view.offset * TABLE[view.dtype].itemsize
        place = InMemory(elements_at(self.data, start, view.dtype, view.shape, view.strides))
        made.parts = tuple(Part(part.offsets, part.sizes, place) for part in made.parts)
        return made


def elements_at(
    data: bytes, start: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]
) -> npt.NDArray[Any]:
    """Elements that lie in memory, as bits."""
    bits = TABLE[dtype].bits()
    steps = [step * bits.itemsize for step in strides]
    return np.ndarray(shape, bits, data, start, steps) if 0 not in shape else np.zeros(shape, bits)


def steps_of(view: TensorView) -> tuple[int, ...] | None:
    """The strides of a tensor that does not lie row-major."""
    if math.prod(view.shape) <= 1:
        return None
    plain = row_major(view.shape)
    same = all(
        n == 1 or one == other
        for n, one, other in zip(view.shape, view.strides, plain, strict=True)
    )
    return None if same else view.strides
