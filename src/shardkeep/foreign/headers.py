# SPDX-License-Identifier: Apache-2.0
"""Headers of safetensors files: a length, then a table in JSON of what lies where.

Nothing in one is believed: numbers are compared with the file's real size as Python integers,
before anything is allocated or becomes 64 bits wide.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from shardkeep.errors import FormatError
from shardkeep.stores.reading import ReadFile

__all__ = [
    "CODE_BITS",
    "MAX_HEADER",
    "Entry",
    "check_packed",
    "no_duplicates",
    "parse_header",
    "parse_json",
    "read_whole_header",
]

MAX_HEADER = 100_000_000
"""Bytes of header that safetensors itself accepts."""
MOST_DIMS = 64

CODE_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32,
             "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F8_E4M3": 8,
             "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6,
             "F6_E3M2": 6}  # fmt: skip
"""Bits of an element of each type there is."""


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


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys stand once each; for `object_pairs_hook`."""
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key stands twice")
    return table


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object in UTF-8, no key of it twice; else a `FormatError`."""
    try:
        table = json.loads(data.decode(), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(table, dict):
        raise FormatError(f"{where} is not a JSON object")
    return table


def parse_header(
    data: bytes, where: str, file_end: int
) -> tuple[dict[str, Entry], dict[str, str] | None]:
    """Entries and metadata of a header, given all of its bytes; anything odd is a `FormatError`.

    Entries lie within the file, and are as long as their shapes say.
    """
    try:
        table = parse_json(data[8:], where)
        metadata = table.pop("__metadata__", None)
        entries = {}
        for key, row in table.items():
            key.encode()  # half of a surrogate pair is no name
            entries[key] = _entry(key, row, len(data), file_end)
        if metadata is not None and not all(type(value) is str for value in metadata.values()):
            raise ValueError("metadata is not text")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{where}: the header is not valid: {error!r}") from error
    return entries, metadata


def _entry(key: str, row: Any, base: int, file_end: int) -> Entry:
    start, stop = row["data_offsets"]
    shape, dtype = tuple(row["shape"]), row["dtype"]
    if len(shape) > MOST_DIMS or not all(type(n) is int and 0 <= n < 2**63 for n in shape):
        raise ValueError(f"entry {key!r} has a shape that no tensor has")
    if type(start) is not int or type(stop) is not int or not 0 <= start <= stop:
        raise ValueError(f"entry {key!r} lies at {start} to {stop}")
    if type(dtype) is not str or dtype not in CODE_BITS:
        raise ValueError(f"entry {key!r} has the dtype {dtype!r}, which safetensors does not know")
    # Python's integers: a product of extents may be past any number of bits.
    if (stop - start) * 8 != math.prod(shape) * CODE_BITS[dtype] or base + stop > file_end:
        raise ValueError(f"entry {key!r} is not as long as its shape, or past the end")
    return Entry(dtype, shape, base + start, base + stop)


def check_packed(entries: Mapping[str, Entry], begin: int, end: int, where: str) -> None:
    """Raise `FormatError` unless the entries cover all bytes from `begin` to `end`, each once."""
    rows = sorted((entry.start, entry.stop, key) for key, entry in entries.items())
    rows = [(begin, begin, ""), *rows, (end, end, "")]
    for (_, stop, before), (start, _, key) in pairwise(rows):
        if start < stop:
            raise FormatError(f"{where}: entries {before!r} and {key!r} overlap")
        if start > stop:
            after = f"entry {before!r}" if before else "the header"
            raise FormatError(f"{where}: {start - stop} bytes after {after} belong to no entry")


def read_whole_header(
    file: ReadFile, where: str
) -> tuple[dict[str, Entry], dict[str, str] | None, int]:
    """Entries and metadata of a file, and where its header ends."""
    size = file.size
    front = bytearray(8)
    length = int.from_bytes(front, "little") if file.read_into(memoryview(front), 0) == 8 else -1
    if not 2 <= length <= size - 8:
        raise FormatError(
            f"{where} is not a safetensors file, or is cut short: it claims a header of {length} "
            f"bytes and has {size} bytes"
        )
    if length > MAX_HEADER:
        raise FormatError(f"{where}: a header of {length} bytes; at most {MAX_HEADER} are read")
    data = bytearray(8 + length)
    if file.read_into(memoryview(data), 0) != len(data):
        raise FormatError(f"{where} became shorter while it was read")
    entries, metadata = parse_header(bytes(data), where, size)
    return entries, metadata, len(data)
