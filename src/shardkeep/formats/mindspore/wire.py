# SPDX-License-Identifier: Apache-2.0
"""Protocol buffers on the wire: as much of them as MindSpore's checkpoints use.

Reading looks at tags and lengths only and passes over contents, however large they are.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["BYTES", "VARINT", "Damaged", "Field", "Stretch", "bytes_head", "varint"]

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


class Damaged(ValueError):
    """These bytes are not a message, or a part of one is missing."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a message."""

    number: int
    """Which field."""
    kind: int
    """How it is written: `VARINT`, `BYTES`, or one of no use here."""
    value: int
    """The number that a `VARINT` holds."""
    start: int
    """First byte of what a `BYTES` field holds, in the file."""
    stop: int
    """End, likewise."""


class Stretch:
    """Bytes of a file that hold a message."""

    def __init__(self, file: io.BufferedReader, start: int, stop: int) -> None:
        """`start` to `stop` are known to lie inside the file."""
        self._file = file
        self.start = start
        self.stop = stop

    def inside(self, field: Field) -> Stretch:
        """The message that a field holds."""
        return Stretch(self._file, field.start, field.stop)

    def read(self, field: Field) -> bytes:
        """What a `BYTES` field holds; the caller has looked at how much that is."""
        self._file.seek(field.start)
        data = self._file.read(field.stop - field.start)
        if len(data) != field.stop - field.start:
            raise Damaged("the file became shorter while it was read")
        return data

    def __iter__(self) -> Iterator[Field]:
        """The fields in order; `Damaged` at the first byte that cannot be one."""
        at = self.start
        while at < self.stop:
            self._file.seek(at)
            ahead = self._file.read(min(20, self.stop - at))
            key, used = _varint(ahead, 0, at)
            number, kind = key >> 3, key & 7
            if number == 0:
                raise Damaged(f"there is no field at byte {at}")
            value, start, stop = 0, at + used, at + used
            if kind == VARINT:
                value, used = _varint(ahead, used, at)
                stop = at + used
            elif kind == BYTES:
                nbytes, used = _varint(ahead, used, at)
                start, stop = at + used, at + used + nbytes
            elif kind in (FIXED64, FIXED32):
                stop = start + (8 if kind == FIXED64 else 4)
            else:
                raise Damaged(f"the field at byte {at} is of no known kind")
            if stop > self.stop:
                raise Damaged(
                    f"the field at byte {at} would end at byte {stop}, but its message ends at "
                    f"byte {self.stop}"
                )
            yield Field(number, kind, value, start, stop)
            at = stop

    def numbers(self, field: Field) -> Iterable[int]:
        """The signed numbers of a field, which may be packed."""
        if field.kind == VARINT:
            return (_signed(field.value),)
        if field.kind != BYTES or field.stop - field.start > 10 * 1024:
            raise Damaged(f"there are no numbers at byte {field.start}")
        data, used, out = self.read(field), 0, []
        while used < len(data):
            value, used = _varint(data, used, field.start)
            out.append(_signed(value))
        return out


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _varint(data: bytes, used: int, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if used >= len(data):
            raise Damaged(f"the field at byte {at} is cut")
        byte = data[used]
        used += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (2**64 - 1), used
    raise Damaged(f"the number at byte {at} does not end")


def varint(value: int) -> bytes:
    """A number as it is written."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def bytes_head(number: int, nbytes: int) -> bytes:
    """What precedes `nbytes` bytes in field `number`."""
    return varint(number << 3 | BYTES) + varint(nbytes)
