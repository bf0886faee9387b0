# SPDX-License-Identifier: Apache-2.0
"""The header every file begins with: that of a safetensors file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from shardkeep.errors import FormatError

__all__ = ["ALIGNMENT", "Entry", "header_room", "no_duplicates", "read_header", "write_header"]

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


def write_header(entries: Mapping[str, Entry], metadata: Mapping[str, str], room: int) -> bytes:
    """The first `room` bytes of a file, padded with spaces."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    for key, entry in entries.items():
        table[key] = {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": (entry.start - room, entry.stop - room),
        }
    text = msgspec.json.encode(table)
    if len(text) > room - 8:
        raise AssertionError(f"a header of {len(text)} bytes was planned to fit {room - 8}")
    return (room - 8).to_bytes(8, "little") + text.ljust(room - 8)


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
