# SPDX-License-Identifier: Apache-2.0
"""The zip archives that torch writes: where the bytes of each entry lie in the file.

torch stores and never compresses, so an entry is a range of bytes. Where one begins is told by the
directory at the end and by the header in front of the entry; both must agree, and no two entries
may share bytes.
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from shardkeep.errors import CorruptionError, FormatError

__all__ = ["PROGRAM", "Archive", "Entry"]

PROGRAM = "is a TorchScript program; save the module's state_dict instead"
"""What is wrong with an archive that has code in it."""

Read = Callable[[int, int], bytes]
"""Bytes of a file from a position on; fewer only where it ends."""

_END = struct.Struct("<IHHHHIIH")
_LOCATOR = struct.Struct("<IIQI")
_END64 = struct.Struct("<IQHHIIQQQQ")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_NEAR = 4096
"""Bytes read at once at either end: all of the directory and headers of a small archive."""
_FULL = 0xFFFFFFFF
_FULL16 = 0xFFFF


@dataclass(frozen=True, slots=True)
class Entry:
    """What the directory says of an entry."""

    header: int
    """Where its header is, counted from the start of the archive."""
    nbytes: int
    """Its length."""
    crc: int
    """CRC-32 of its bytes."""
    row: int
    """Where the directory tells of it, counted from the start of the archive."""


class Archive:
    """A zip archive that lies somewhere in a file."""

    def __init__(
        self, read: Read, start: int, nbytes: int, where: str, *, directory: int = 1 << 28
    ) -> None:
        """Read the directory, of so many bytes at most; entries are looked for when asked for."""
        self.where, self._most = where, directory
        self._read, self.start, self.nbytes = read, start, nbytes
        near = min(nbytes, _NEAR)
        self._head = self._exact(0, near)
        self._tail = self._head if near == nbytes else self._exact(nbytes - near, near)
        rows, self._payload_end = self._directory()
        self.entries = self._parse(rows)
        """Entries by name."""
        self._headers = sorted(entry.header for entry in self.entries.values())
        self._check_overlap()

    # --- bytes of the archive

    def _exact(self, at: int, count: int) -> bytes:
        data = self._read(self.start + at, count)
        if len(data) != count:
            raise CorruptionError(f"{self.where}: the file ends at byte {self.start + at}; cut?")
        return data

    def _bytes(self, at: int, count: int) -> bytes:
        if at < 0 or count < 0 or at + count > self.nbytes:
            raise self._broken(f"bytes {at} to {at + count} do not exist")
        if at + count <= len(self._head):
            return self._head[at : at + count]
        tail = at - (self.nbytes - len(self._tail))
        if tail >= 0:
            return self._tail[tail : tail + count]
        return self._exact(at, count)

    def _broken(self, why: str) -> CorruptionError:
        return CorruptionError(f"{self.where}: not a whole archive of torch.save: {why}")

    # --- the directory

    def _directory(self) -> tuple[bytes, int]:
        """The directory's bytes, and where it begins."""
        last = self.nbytes - _END.size
        if last < 0:
            raise self._broken(f"it has {self.nbytes} bytes")
        if self._bytes(last, 4) != b"PK\5\6":
            last = self._commented()
        _, disk, first, here, count, size, offset, comment = _END.unpack(
            self._bytes(last, _END.size)
        )
        if last + _END.size + comment != self.nbytes:
            raise self._broken("something follows its end")
        end = last
        if last >= _LOCATOR.size and self._bytes(last - _LOCATOR.size, 4) == b"PK\6\7":
            at = _LOCATOR.unpack(self._bytes(last - _LOCATOR.size, _LOCATOR.size))[2]
            fields = _END64.unpack(self._bytes(at, _END64.size))
            if fields[0] != 0x06064B50 or at + _END64.size > last - _LOCATOR.size:
                raise self._broken("its large end record is not where it should be")
            _, _, _, _, disk, first, here, count, size, offset = fields
            end = at
        if disk or first or here != count:
            raise self._broken("it claims to be one of several")
        if size > self._most or count * _CENTRAL.size > size or offset + size > end:
            raise self._broken(f"a directory of {count} entries in {size} bytes at {offset}")
        self._count = count
        return self._bytes(offset, size), offset

    def _commented(self) -> int:
        """Where the end record is in an archive with a comment."""
        near = min(self.nbytes, _END.size + _FULL16)
        at = self._bytes(self.nbytes - near, near).rfind(b"PK\5\6")
        if at < 0 or near - at < _END.size:
            raise self._broken("it has no directory")
        return self.nbytes - near + at

    def _parse(self, data: bytes) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        at = 0
        while at < len(data):
            if at + _CENTRAL.size > len(data):
                raise self._broken("its directory is cut")
            (sign, _, _, flags, method, _, _, crc, packed, size, name_len, extra_len, note_len,
             disk, _, _, header) = _CENTRAL.unpack_from(data, at)  # fmt: skip
            end = at + _CENTRAL.size + name_len
            stop = end + extra_len + note_len
            if sign != 0x02014B50 or stop > len(data) or disk:
                raise self._broken("its directory is damaged")
            try:
                name = data[at + _CENTRAL.size : end].decode()
            except UnicodeDecodeError as error:
                raise self._broken("an entry has no valid name") from error
            if _FULL in (packed, size, header):
                extra = data[end : end + extra_len]
                size, packed, header = self._large(extra, size, packed, header)
            if name.partition("/")[2].startswith("code/"):
                raise FormatError(f"{self.where} {PROGRAM}")
            if method or flags & 1 or packed != size:
                raise FormatError(
                    f"{self.where}: {name:.100} is compressed or encrypted, which torch.save never "
                    "does. Unpack the archive and store it without compression."
                )
            if name in entries:
                raise self._broken(f"it has {name:.100} twice")
            entries[name] = Entry(header, size, crc, self._payload_end + at)
            at = stop
        if len(entries) != self._count:
            raise self._broken(f"{len(entries)} entries, expected {self._count}")
        return entries

    def _large(self, extra: bytes, size: int, packed: int, header: int) -> tuple[int, int, int]:
        """Numbers past 32 bits lie in an extra field, those only that are."""
        at = 0
        while at + 4 <= len(extra):
            kind, length = struct.unpack_from("<HH", extra, at)
            field = extra[at + 4 : at + 4 + length]
            if kind == 1:
                numbers = [field[i : i + 8] for i in range(0, len(field) // 8 * 8, 8)]
                wide = iter(int.from_bytes(number, "little") for number in numbers)
                try:
                    size = next(wide) if size == _FULL else size
                    packed = next(wide) if packed == _FULL else packed
                    header = next(wide) if header == _FULL else header
                except StopIteration:
                    break
                return size, packed, header
            at += 4 + length
        raise self._broken("a large entry without its size")

    def _check_overlap(self) -> None:
        ends = sorted(
            (entry.header, entry.header + _LOCAL.size + len(name.encode()) + entry.nbytes, name)
            for name, entry in self.entries.items()
        )
        limit = self._payload_end
        for begin, end, name in reversed(ends):
            if end > limit:
                raise self._broken(f"{name:.100} overlaps what follows it")
            limit = begin

    # --- entries

    def locate(self, name: str) -> int:
        """Where the bytes of an entry begin in the file."""
        entry = self.entries[name]
        header = self._bytes(entry.header, _LOCAL.size)
        sign, _, _, method, _, _, _, _, _, name_len, extra_len = _LOCAL.unpack(header)
        begin = entry.header + _LOCAL.size + name_len + extra_len
        if sign != 0x04034B50 or method:
            raise self._broken(f"{name:.100} does not begin where the directory says")
        if self._bytes(entry.header + _LOCAL.size, name_len) != name.encode():
            raise self._broken(f"{name:.100} has another name in its own header")
        after = bisect_right(self._headers, entry.header)
        limit = self._headers[after] if after < len(self._headers) else self._payload_end
        if begin + entry.nbytes > limit:
            raise self._broken(f"{name:.100} overlaps what follows it")
        return int(self.start + begin)

    def of_content(self, name: str) -> list[tuple[int, int]]:
        """Which bytes of the archive depend on what an entry holds: its own, and its CRC-32s."""
        entry = self.entries[name]
        begin = self.locate(name) - self.start
        end = begin + entry.nbytes
        # In its header, in the directory, and perhaps in a record of its own that follows.
        spans = [(entry.header + 14, entry.header + 18), (entry.row + 16, entry.row + 20)]
        if self._bytes(end, min(4, self.nbytes - end)) == b"PK\7\10":
            return [*spans, (begin, end), (end + 4, end + 8)]
        return [*spans, (begin, end)]

    def read(self, name: str, most: int) -> bytes:
        """The bytes of an entry, checked."""
        entry = self.entries.get(name)
        if entry is None:
            raise self._broken(f"it has no {name}")
        if entry.nbytes > most:
            raise FormatError(f"{self.where}: {name} has {entry.nbytes} bytes, at most {most} do")
        data = self._bytes(self.locate(name) - self.start, entry.nbytes)
        if zlib.crc32(data) != entry.crc and entry.crc:  # torch can be told to leave it out
            raise CorruptionError(f"{self.where}: the bytes of {name} differ from their CRC-32")
        return data
