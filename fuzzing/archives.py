"""torch's zip archives: entries changed, sums put right, and the fields around them made to lie."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from fuzzing.by_bytes import changed_bytes
from fuzzing.hostile import number, text
from fuzzing.opcodes import changed_pickle

__all__ = ["changed_archive", "changed_archive_in_place"]

_LOCAL, _CENTRAL, _END = "<IHHHHHIIIHH", "<IHHHHHHIIIHHHHHII", "<IHHHHIIH"
_LIE = 0.25
"""How often a field is made to lie."""


@dataclass(frozen=True)
class _Archive:
    entries: tuple[tuple[str, bytes], ...]


@lru_cache(maxsize=1024)
def _archive(data: bytes) -> _Archive | None:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as opened:
            return _Archive(tuple((info.filename, opened.read(info)) for info in opened.infolist()))
    except Exception:  # a kept input may be no archive any more
        return None


def changed_archive(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """An archive whose pickle, entries or fields are others."""
    found = _archive(data)
    if found is None or not found.entries:
        return changed_bytes(rng, data, others)
    entries = list(found.entries)
    pick = rng.random()
    if pick < 0.7:
        entries = [_changed_entry(rng, entry, others) for entry in entries]
    else:
        _reorder(rng, entries)
    return _written(rng, entries, lie=pick > 0.9 or rng.random() < _LIE)


def changed_archive_in_place(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """The same, as long as before: what other files say of it still holds."""
    out = changed_archive(rng, data, others)
    missing = len(data) - len(out)
    if not 0 < missing < 1 << 16 or out[-22:-18] != b"PK\5\6":
        return out
    return out[:-2] + missing.to_bytes(2, "little") + b"\0" * missing


def _changed_entry(
    rng: Random, entry: tuple[str, bytes], others: Sequence[bytes]
) -> tuple[str, bytes]:
    name, data = entry
    if name.endswith("data.pkl"):
        pickles = (
            [found for other in (rng.choice(others),) for found in _pickles(other)]
            if others
            else []
        )
        return name, changed_pickle(rng, data, pickles)
    if rng.random() < 0.1:
        return name, changed_bytes(rng, data, ())
    return entry


def _pickles(data: bytes) -> list[bytes]:
    found = _archive(data)
    return [] if found is None else [d for name, d in found.entries if name.endswith("data.pkl")]


def _reorder(rng: Random, entries: list[tuple[str, bytes]]) -> None:
    at, pick = rng.randrange(len(entries)), rng.randrange(5)
    if pick == 0:
        del entries[at]
    elif pick == 1:
        entries.append(entries[at])
    elif pick == 2:
        entries[at] = (text(rng, entries[at][0]), entries[at][1])
    elif pick == 3:
        entries[at] = (entries[at][0], entries[at][1] * rng.choice((0, 2)))
    else:
        rng.shuffle(entries)


def _written(rng: Random, entries: list[tuple[str, bytes]], *, lie: bool) -> bytes:
    out, directory = bytearray(), bytearray()
    for name, data in entries:
        raw = name.encode("utf-8", "surrogatepass")[:60_000]
        crc, size = zlib.crc32(data), len(data)
        local = [0x04034B50, 20, 0, 0, 0, 0, crc, size, size, len(raw), 0]
        row = [0x02014B50, 20, 20, 0, 0, 0, 0, crc, size, size, len(raw), 0, 0, 0, 0, 0, len(out)]
        if lie and rng.random() < 0.3:
            _lie(rng, rng.choice((local, row)))
        out += _packed(_LOCAL, local) + raw + data
        directory += _packed(_CENTRAL, row) + raw
    count = len(entries)
    end = [0x06054B50, 0, 0, count, count, len(directory), len(out), 0]
    if lie and rng.random() < 0.3:
        _lie(rng, end)
    return bytes(out + directory + _packed(_END, end))


def _lie(rng: Random, fields: list[int]) -> None:
    at = rng.randrange(len(fields))
    fields[at] = number(rng, fields[at])


def _packed(layout: str, fields: list[int]) -> bytes:
    widths = [4 if letter == "I" else 2 for letter in layout[1:]]
    pairs = zip(fields, widths, strict=True)
    return struct.pack(layout, *(value & ((1 << 8 * width) - 1) for value, width in pairs))
