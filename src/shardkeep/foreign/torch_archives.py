# SPDX-License-Identifier: Apache-2.0
"""Archives that `torch.load` reads, laid out: every byte has its place before one is written.

As torch writes them: stored entries, each beginning on a multiple of 64 bytes within the archive.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shardkeep.foreign.layout import Elements, Late, Literal, OutTensor, Segment
from shardkeep.foreign.pickling import Pickling

__all__ = ["Box", "Moulds", "lay_out_archive"]

ALIGNMENT = 64
FOLDER = "archive"
_LARGE = 0xFFFFFFFF
_UTF8 = 0x0800

Ints = tuple[int, ...]
Crc = Callable[[Elements], int]


@dataclass(frozen=True, eq=False)
class Box:
    """A part of a tensor, to be written as a tensor of its own."""

    tensor: OutTensor
    """Which."""
    offsets: Ints
    """Where it begins in it."""
    sizes: Ints
    """Its extent."""


@dataclass
class _Entry:
    name: bytes
    start: int
    nbytes: int
    crc: int | Elements


@dataclass
class _Builder:
    """An archive from its beginning to its end."""

    base: int
    """Where it begins in the file."""
    segments: list[Segment] = field(default_factory=list)
    entries: list[_Entry] = field(default_factory=list)
    at: int = 0
    pending: bytearray = field(default_factory=bytearray)

    def literal(self, data: bytes) -> None:
        self.pending += data
        self.at += len(data)

    def flush(self) -> None:
        if self.pending:
            start = self.base + self.at - len(self.pending)
            self.segments.append(Literal(start, bytes(self.pending)))
            self.pending = bytearray()

    def data(self, name: str, data: bytes) -> None:
        entry = self._begin(name, len(data), zlib.crc32(data))
        self.literal(self._header(entry, zlib.crc32(data)) + data)

    def elements(self, name: str, box: Box) -> None:
        nbytes = Elements(0, box.tensor, box.offsets, box.sizes).nbytes
        if nbytes == 0:
            self.data(name, b"")
            return
        entry = self._begin(name, nbytes, 0)
        header = self._header(entry, 0)
        start = self.base + self.at + len(header)
        part = Elements(start, box.tensor, box.offsets, box.sizes, checked=True)
        entry.crc = part
        self.literal(header[:14])
        self.late(4, lambda crc: struct.pack("<I", crc(part)))
        self.literal(header[18:])
        self.flush()
        self.segments.append(part)
        self.at += nbytes

    def late(self, nbytes: int, make: Callable[[Crc], bytes]) -> None:
        self.flush()
        self.segments.append(Late(self.base + self.at, nbytes, make))
        self.at += nbytes

    def _begin(self, name: str, nbytes: int, crc: int) -> _Entry:
        entry = _Entry(f"{FOLDER}/{name}".encode(), self.at, nbytes, crc)
        self.entries.append(entry)
        return entry

    def _header(self, entry: _Entry, crc: int) -> bytes:
        extra, small = b"", entry.nbytes
        if entry.nbytes >= _LARGE:
            extra, small = struct.pack("<HHQQ", 1, 16, entry.nbytes, entry.nbytes), _LARGE
        unpadded = self.at + 30 + len(entry.name) + len(extra) + 4
        room = -unpadded % ALIGNMENT
        extra += struct.pack("<2sH", b"FB", room) + b"Z" * room
        version = 45 if small == _LARGE else 0
        lengths = len(entry.name), len(extra)
        fixed = struct.pack(
            "<IHHHHHIIIHH", 0x04034B50, version, _UTF8, 0, 0, 0, crc, small, small, *lengths
        )
        return fixed + entry.name + extra

    def end(self) -> None:
        """The directory: it needs every CRC, so it comes late."""
        entries, at = list(self.entries), self.at

        def make(crc: Crc) -> bytes:
            return _directory(
                [(e, crc(e.crc) if isinstance(e.crc, Elements) else e.crc) for e in entries], at
            )

        if any(isinstance(e.crc, Elements) for e in entries):
            self.late(len(_directory([(e, 0) for e in entries], at)), make)
        else:
            self.literal(make(lambda _: 0))
        self.flush()


def _directory(entries: list[tuple[_Entry, int]], at: int) -> bytes:
    out = bytearray()
    for entry, crc in entries:
        wide = [n for n in (entry.nbytes, entry.nbytes, entry.start) if n >= _LARGE]
        extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
        size, start = min(entry.nbytes, _LARGE), min(entry.start, _LARGE)
        version = 45 if wide else 0
        out += struct.pack(
            "<IHHHHHHIIIHHHHHII", 0x02014B50, version, version, _UTF8, 0, 0, 0, crc, size, size,
            len(entry.name), len(extra), 0, 0, 0, 0, start
        )  # fmt: skip
        out += entry.name + extra
    count, size = len(entries), len(out)
    out += struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, size, at)
    out += struct.pack("<IIQI", 0x07064B50, 0, at + size, 1)
    short = min(count, 0xFFFF)
    out += struct.pack(
        "<IHHHHIIH", 0x06054B50, 0, 0, short, short, min(size, _LARGE), min(at, _LARGE), 0
    )
    return bytes(out)


def lay_out_archive(
    state: Any, base: int, *, weights_only: bool, where: str = ""
) -> tuple[list[Segment], int]:
    """An archive that holds `state`, from byte `base` of a file on: its segments, and its length.

    In `state`, an `OutTensor` is a whole tensor; a `Box` alone is a part, saved as a tensor.
    """
    boxes: list[Box] = []
    keys: dict[int, str] = {}
    if isinstance(state, Box):
        boxes.append(state)
        state = OutTensor("", state.tensor.dtype, state.sizes)
        keys[id(state)] = "0"

    def storage(tensor: OutTensor) -> str:
        if id(tensor) not in keys:
            keys[id(tensor)] = str(len(boxes))
            boxes.append(Box(tensor, (0,) * len(tensor.shape), tensor.shape))
        return keys[id(tensor)]

    pickling = Pickling(weights_only=weights_only, storage=storage)
    pickling.value(state, where)
    builder = _Builder(base)
    builder.data("data.pkl", pickling.finished())
    builder.data(".format_version", b"1")
    builder.data(".storage_alignment", b"%d" % ALIGNMENT)
    builder.data("byteorder", b"little")
    for number, box in enumerate(boxes):
        builder.elements(f"data/{number}", box)
    builder.data("version", b"3\n")
    builder.end()
    return builder.segments, builder.at


class Moulds:
    """Archives of one part of a tensor each; made once for all of one type and extent, which differ
    in nothing but their elements."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, Ints], tuple[list[Segment], int]] = {}

    def lay_out(self, box: Box, base: int, where: str = "") -> tuple[list[Segment], int]:
        """As `lay_out_archive` does, for what torch may load with `weights_only=True`."""
        key = box.tensor.dtype, box.sizes
        if key not in self._known:
            segments, length = lay_out_archive(box, 0, weights_only=True, where=where)
            self._known[key] = [_without_sums(segment) for segment in segments], length
        segments, length = self._known[key]
        start = next((s.start for s in segments if isinstance(s, Elements)), 0)
        part = Elements(base + start, box.tensor, box.offsets, box.sizes, checked=True)
        return [_moved(segment, base, part) for segment in segments], length


@dataclass(frozen=True, slots=True, eq=False)
class _Summed:
    """Bytes with the CRC-32 of the elements in them."""

    start: int
    data: bytes
    at: int
    """Where the CRC-32 is."""

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def make(self, part: Elements, crc: Crc) -> bytes:
        return self.data[: self.at] + struct.pack("<I", crc(part)) + self.data[self.at + 4 :]


def _without_sums(segment: Any) -> Any:
    """A late segment as bytes in which the sum is missing; where it goes is told by two of them."""
    if not isinstance(segment, Late):
        return segment
    none, full = (segment.make(lambda _, crc=crc: crc) for crc in (0, _LARGE))  # type: ignore[misc]
    at = next(at for at, (a, b) in enumerate(zip(none, full, strict=True)) if a != b)
    assert none[:at] + full[at : at + 4] + none[at + 4 :] == full, "it has the sum once"
    return _Summed(segment.start, none, at)


def _moved(segment: Any, base: int, part: Elements) -> Segment:
    if isinstance(segment, Literal):
        return Literal(base + segment.start, segment.data)
    if isinstance(segment, _Summed):
        return Late(base + segment.start, segment.nbytes, partial(segment.make, part))
    return part
