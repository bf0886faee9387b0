# SPDX-License-Identifier: Apache-2.0
"""The header every file begins with: that of a safetensors file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from shardkeep.dtypes import lookup
from shardkeep.errors import FormatError
from shardkeep.metadata import TensorProperties

__all__ = [
    "ALIGNMENT",
    "Entry",
    "chunk_entries",
    "header_room",
    "no_duplicates",
    "read_header",
    "write_header",
]

ALIGNMENT = 4096
MAX_HEADER = 100_000_000

_SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4,
          "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8, "F8_E4M3": 1, "F8_E5M2": 1,
          "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a file."""

    dtype: str
    """safetensors' code."""
    shape: tuple[int, ...]
    """As other tools see it."""
    start: int
    """First byte, counted from the start of the file."""
    stop: int
    """End, likewise."""


def header_room(nbytes: int) -> int:
    """Where payload starts if the header's text takes at most this many bytes."""
    return -(-(8 + nbytes) // ALIGNMENT) * ALIGNMENT


def write_header(
    entries: Mapping[str, Entry],
    metadata: Mapping[str, str],
    room: int,
    before: Iterable[bytes] = (),
) -> bytes:
    """The first `room` bytes of a file, padded with spaces.

    `before` are entries as text already (`chunk_entries`), which come first.
    """
    table = {
        key: {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": (entry.start - room, entry.stop - room),
        }
        for key, entry in entries.items()
    }
    parts = [b'"__metadata__":' + msgspec.json.encode(dict(metadata)), *before]
    if table:
        parts.append(msgspec.json.encode(table)[1:-1])
    text = b"{" + b",".join(parts) + b"}"
    if len(text) > room - 8:
        raise AssertionError(f"a header of {len(text)} bytes was planned to fit {room - 8}")
    return (room - 8).to_bytes(8, "little") + text.ljust(room - 8)


def chunk_entries(
    keys: Sequence[str],
    kinds: Sequence[TensorProperties],
    kind: Sequence[int],
    sizes: Sequence[tuple[int, ...]],
    begin: Sequence[int],
    end: Sequence[int],
) -> list[bytes]:
    """Entries of chunks as JSON text; `begin` and `end` count from the end of the header.

    Columns in, and the few shapes there are made text once: a header may have 100,000 entries.
    """
    known: dict[tuple[int, tuple[int, ...]], bytes] = {}
    quoted = msgspec.json.Encoder().encode
    out = []
    for key, number, size, low, high in zip(keys, kind, sizes, begin, end, strict=True):
        front = known.get((number, size))
        if front is None:
            dtype = lookup(kinds[number].dtype)
            shape = (*size, dtype.extra_dim) if dtype.extra_dim else size
            table = {"dtype": dtype.safetensors, "shape": shape}
            front = known[number, size] = msgspec.json.encode(table)[:-1]
        out.append(b'%b:%b,"data_offsets":[%d,%d]}' % (quoted(key), front, low, high))
    return out


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys stand once each; for `object_pairs_hook`."""
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key stands twice")
    return table


def read_header(data: bytes, where: str, file_end: int) -> tuple[dict[str, Entry], dict[str, str]]:
    """Entries and metadata of a header, given all of its bytes; anything odd is a `FormatError`."""
    try:
        table = json.loads(data[8:], object_pairs_hook=no_duplicates)
        metadata = table.pop("__metadata__")
        base = len(data)
        entries = {}
        for key, row in table.items():
            start, stop = row["data_offsets"]
            shape, dtype = tuple(row["shape"]), row["dtype"]
            count = 1
            for n in shape:
                if type(n) is not int or n < 0:
                    raise ValueError(f"entry {key!r} has shape {shape}")
                count *= n
            if type(start) is not int or type(stop) is not int or not 0 <= start <= stop:
                raise ValueError(f"entry {key!r} lies at {start} to {stop}")
            if stop - start != count * _SIZES[dtype] or base + stop > file_end:
                raise ValueError(f"entry {key!r} is not as long as its shape, or past the end")
            entries[key] = Entry(dtype, shape, base + start, base + stop)
        if not all(type(v) is str for v in metadata.values()):
            raise ValueError("metadata is not text")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"{where}: the header is not valid: {error!r}") from error
    return entries, metadata
