# SPDX-License-Identifier: Apache-2.0
"""Items in torch's `.distcp` files: archives of `torch.save` one behind the other.

Metadata says where an archive lies, not where in there the elements begin. Thousands of items are
alike but for their elements, so what was learnt from one is used for those whose bytes around the
elements are the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardkeep.closing import Closing
from shardkeep.dtypes import TABLE
from shardkeep.errors import CorruptionError
from shardkeep.foreign import pickles
from shardkeep.foreign.dcp.alike import Alike
from shardkeep.foreign.dcp.classes import Info
from shardkeep.foreign.dcp.safetensors_items import SafetensorsItems
from shardkeep.foreign.dcp.transforms import LastUnpacked, Unpacked, unpack
from shardkeep.foreign.found import Made, Raw
from shardkeep.foreign.regular_files import OpenedFile, opened
from shardkeep.foreign.torch_objects import (
    Members,
    read_object,
    read_object_in_memory,
    steps_of,
    storage_id,
)
from shardkeep.foreign.torch_stand_ins import TORCH, Storage, TensorView
from shardkeep.foreign.torch_zip import Archive

__all__ = ["ItemFiles"]

Ints = tuple[int, ...]

_DIRECTORY = 1 << 16
"""Most bytes of the directory of an archive that holds one tensor."""
_OPEN = 64
"""Files kept open at a time."""
_ALIKE = 4
"""Archives of one length that an item is compared with."""
_VALUE = 1 << 30
"""Most bytes of a value that is unpacked."""


class ItemFiles(Closing):
    """The files of a checkpoint, while its items are looked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: OrderedDict[str, tuple[ExitStack, OpenedFile]] = OrderedDict()
        self._tables: dict[tuple[str, int], SafetensorsItems] = {}
        self._views: dict[bytes, _View] = {}
        self._alike: dict[tuple[object, ...], list[Alike]] = {}
        self._last = LastUnpacked()
        self._left: dict[Path, int] = {}

    def close(self) -> None:
        """Let go of the files."""
        while self._files:
            self._files.popitem()[1][0].close()

    def _file(self, name: str) -> OpenedFile:
        if name in self._files:
            self._files.move_to_end(name)
            return self._files[name][1]
        if len(self._files) >= _OPEN:  # torch can be told to write a file for each item
            self._files.popitem(last=False)[1][0].close()
        stack = ExitStack()
        file = stack.enter_context(opened(self.path, name))
        self._files[name] = (stack, file)
        return file

    def expect(self, infos: Iterable[Info]) -> None:
        """Have the edges of all items read at once, and not one after the other as they are met."""
        edges: dict[str, set[int]] = {}
        for info in infos:
            edges.setdefault(info.path, set()).update((info.offset, info.offset + info.length))
        if len(edges) <= _OPEN:
            for name, places in edges.items():
                self._file(name).expect(sorted(places))

    def _where(self, fqn: str, info: Info) -> str:
        return f"{self.path / info.path} at byte {info.offset} ({fqn})"

    def _checked(self, fqn: str, info: Info) -> OpenedFile:
        file = self._file(info.path)
        if info.offset + info.length > file.size:
            raise CorruptionError(
                f"{self.path / info.path} has {file.size} bytes, and {fqn} ends at "
                f"{info.offset + info.length}; it was cut",
                names=(fqn,),
            )
        return file

    # --- tensors

    def tensor(self, fqn: str, dtype: str, sizes: Ints, info: Info) -> Raw | Made:
        """Where the elements of an item are."""
        file = self._checked(fqn, info)
        alike = self._alike.setdefault(() if info.transforms else (info.length, dtype, sizes), [])
        for one in alike:
            if one.fits(file.read, info.offset):
                return Raw(info.path, info.offset + one.start, one.steps)
        where = self._where(fqn, info)
        if info.transforms:
            return Unpacked(self.path, info, dtype, sizes, where, self._in_archive, self._last)
        if file.read(info.offset, 4) != b"PK\3\4":
            return self._in_table(file, fqn, dtype, sizes, info)
        archive = Archive(file.read, info.offset, info.length, where, directory=_DIRECTORY)
        start, steps, storage = self._in_archive(archive, dtype, sizes)
        if len(alike) < _ALIKE:
            alike.append(Alike.of(archive, storage, start - info.offset, steps, file.read))
        return Raw(info.path, start, steps)

    def _in_archive(
        self, archive: Archive, dtype: str, sizes: Ints
    ) -> tuple[int, Ints | None, str]:
        """Where elements begin, their strides, and their entry, if an archive holds one tensor."""
        members = Members(archive)
        data = members.pickle()
        view = self._views.get(data)
        if view is None:
            view = self._views[data] = _view_of(data, archive.where)
        try:
            storage = members.storage(view.storage)
        except CorruptionError as error:
            raise CorruptionError(f"{archive.where}: {error}") from error
        if view.dtype != dtype or view.shape != sizes:
            raise CorruptionError(
                f"{archive.where}: a tensor of {view.dtype} {view.shape}, expected {dtype} {sizes}"
            )
        return storage.place + view.start, view.steps, f"{members.folder}data/{view.storage[2]}"

    def _in_table(self, file: OpenedFile, fqn: str, dtype: str, sizes: Ints, info: Info) -> Raw:
        table = self._tables.get((info.path, info.offset))
        if table is None:
            where = str(self.path / info.path)
            table = SafetensorsItems(file, info.offset, where)
            self._tables[info.path, info.offset] = table
        return Raw(info.path, table.start(fqn, dtype, sizes))

    # --- values

    def same_bytes(self, one: Info, other: Info) -> bool:
        """Whether two items are the same but for the ids that torch gives each archive."""
        first, second = (self._content(info) for info in (one, other))
        return first == second

    def _content(self, info: Info) -> object:
        file = self._checked("", info)
        if info.transforms:
            return file.read(info.offset, info.length)
        archive = Archive(file.read, info.offset, info.length, self._where("", info))
        members = Members(archive)
        return {
            name.removeprefix(members.folder): (entry.nbytes, entry.crc)
            for name, entry in archive.entries.items()
            if "/.data/" not in name
        }

    def claim(self, fqn: str, info: Info) -> None:
        """Refuse values that share bytes: a few bytes of metadata would have any of them read, and
        any number of times."""
        path, size = self.path / info.path, self._checked(fqn, info).size
        self._left[path] = self._left.get(path, size) - info.length
        if self._left[path] < 0:
            raise CorruptionError(
                f"{path} has {size} bytes, and values that lie in it are said to have more",
                names=(fqn,),
            )

    def value(self, fqn: str, info: Info) -> Any:
        """A value, whatever was saved; tensors in it are left where they are."""
        file = self._checked(fqn, info)
        where = self._where(fqn, info)
        if info.transforms:
            data = unpack(file.read(info.offset, info.length), info.transforms, _VALUE, where)
            return read_object_in_memory(data, where)
        return read_object(Archive(file.read, info.offset, info.length, where), info.path)


@dataclass(frozen=True, slots=True)
class _View:
    """What the pickle of a tensor says."""

    dtype: str
    shape: Ints
    start: int
    """Byte of its storage at which it begins."""
    steps: Ints | None
    storage: tuple[Any, ...]
    """The persistent id of its storage."""


def _view_of(data: bytes, where: str) -> _View:
    named: list[tuple[Any, ...]] = []

    def persistent(given: Any) -> Storage:
        kind, _, count = storage_id(given)
        named.append(given)
        return Storage(kind.dtype, count * (TABLE[kind.dtype].itemsize if kind.dtype else 1), 0)

    view = pickles.load(data, where=where, classes=TORCH, persistent=persistent)
    if not isinstance(view, TensorView) or len(named) != 1:
        raise CorruptionError(f"{where}: something else than one tensor")
    start = view.offset * TABLE[view.dtype].itemsize
    return _View(view.dtype, view.shape, start, steps_of(view), named[0])
