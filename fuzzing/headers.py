"""safetensors headers, and the columns of an index behind one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from fuzzing.by_bytes import changed_bytes
from fuzzing.encodings import changed_json, changed_msgpack
from fuzzing.hostile import number
from shardkeep.errors import CheckpointError
from shardkeep.foreign.headers import Entry, parse_header
from shardkeep.formats.native.header import header_room, write_header
from shardkeep.formats.native.names import DIGESTS

__all__ = ["changed_header", "changed_index"]

_BLOBS = {"structure": changed_msgpack, "kinds": changed_json}
_WIDTHS = {"I64": 8, "I32": 4, "U16": 2, "U8": 1}


def changed_header(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """A file with another header; its length is mostly right, and what follows stays."""
    length = int.from_bytes(data[:8], "little")
    if not 0 < length <= len(data) - 8:
        return changed_bytes(rng, data, others)
    text = data[8 : 8 + length]
    texts = [other[8 : 8 + int.from_bytes(other[:8], "little")] for other in others[:4]]
    made = changed_json(rng, text.rstrip(b" "), texts)
    if rng.random() < 0.1:
        made = changed_bytes(rng, made, ())
    made = made.ljust(length)
    told = len(made) if rng.random() < 0.95 else number(rng, len(made))
    return (told & (1 << 64) - 1).to_bytes(8, "little") + made + data[8 + length :]


@dataclass(frozen=True)
class _Index:
    columns: tuple[tuple[str, str, bytes], ...]
    """Name, type and bytes of each."""
    metadata: tuple[tuple[str, str], ...]


@lru_cache(maxsize=512)
def _index(payload: bytes) -> _Index | None:
    length = int.from_bytes(payload[:8], "little")
    try:
        entries, metadata = parse_header(payload[: 8 + length], "", 1 << 62)
    except CheckpointError:
        return None
    columns = tuple(
        (name, entry.dtype, payload[entry.start : entry.stop])
        for name, entry in entries.items()
        if name != DIGESTS and entry.dtype in _WIDTHS
    )
    return _Index(columns, tuple((metadata or {}).items())) if columns else None


def changed_index(rng: Random, payload: bytes, others: Sequence[bytes]) -> bytes:
    """An index with other numbers in its columns, or columns of other lengths."""
    found = _index(payload)
    if found is None or rng.random() < 0.15:
        change = changed_header if rng.random() < 0.7 else changed_bytes
        return change(rng, payload, others)
    columns = list(found.columns)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.randrange(len(columns))
        name, dtype, data = columns[at]
        columns[at] = (name, dtype, _column(rng, name, dtype, data, others))
    return _joined(columns, dict(found.metadata))


def _column(rng: Random, name: str, dtype: str, data: bytes, others: Sequence[bytes]) -> bytes:
    if name in _BLOBS:
        return _BLOBS[name](rng, data, ())
    width = _WIDTHS[dtype]
    rows, pick = len(data) // width, rng.random()
    if width == 1 or rows == 0:
        return changed_bytes(rng, data, ())
    at = rng.randrange(rows) * width
    if pick < 0.75:
        near = int.from_bytes(data[at : at + width], "little", signed=True)
        new = number(rng, near) & (1 << 8 * width) - 1
        return data[:at] + new.to_bytes(width, "little") + data[at + width :]
    if pick < 0.85:
        return data[:at] + data[at + width :]
    if pick < 0.95:
        return data[:at] + data[at : at + width] + data[at:]
    other = rng.randrange(rows) * width
    out = bytearray(data)
    out[at : at + width], out[other : other + width] = (
        data[other : other + width],
        data[at : at + width],
    )
    return bytes(out)


def _joined(columns: list[tuple[str, str, bytes]], metadata: dict[str, str]) -> bytes:
    at = room = header_room(512 + 160 * (len(columns) + 1))
    entries = {}
    for name, dtype, data in columns:
        shape = (len(data) // _WIDTHS[dtype],)
        entries[name] = Entry(dtype, shape, at, at + shape[0] * _WIDTHS[dtype])
        at = entries[name].stop
    try:
        head = write_header(entries, metadata, room)
    except AssertionError:  # names of a kept input may be long
        head = _long_header(entries, metadata)
    parts = [data[: entries[name].stop - entries[name].start] for name, _, data in columns]
    return head + b"".join(parts)


def _long_header(entries: dict[str, Entry], metadata: dict[str, str]) -> bytes:
    first = min(entry.start for entry in entries.values())
    table = {
        name: {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": (entry.start - first, entry.stop - first),
        }
        for name, entry in entries.items()
    }
    text = json.dumps({"__metadata__": metadata, **table}).encode()
    return len(text).to_bytes(8, "little") + text
