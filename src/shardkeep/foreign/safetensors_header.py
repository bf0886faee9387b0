# SPDX-License-Identifier: Apache-2.0
"""Headers of safetensors files that other tools write, and that they read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardkeep.dtypes import TABLE
from shardkeep.errors import (
    CheckpointError,
    CorruptionError,
    FormatError,
    UnsupportedValueError,
)
from shardkeep.foreign import headers
from shardkeep.foreign.below import read_exactly, regular_size
from shardkeep.foreign.headers import MAX_HEADER, parse_header
from shardkeep.foreign.shapes import checked_shape

__all__ = ["Entry", "is_safetensors", "lay_out_entries", "read_entries"]

ANYWHERE = 1 << 100
"""Past the end of any file."""

_DTYPES = {
    row.safetensors: row.name
    for row in TABLE.values()
    if not row.extra_dim and (row.safetensors != "U8" or row.name == "uint8")
}

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file."""

    dtype: str
    """Name in `shardkeep.dtypes.TABLE`."""
    shape: Ints
    """Its extent."""
    start: int
    """First byte, counted from the start of the file."""
    stop: int
    """End, likewise."""


def is_safetensors(path: Path) -> bool:
    """Whether a file begins as safetensors files do; never an error."""
    try:
        size = regular_size(path)
        if size < 10:
            return False
        begin = read_exactly(path, 0, 9)
    except (CheckpointError, OSError):
        return False
    return int.from_bytes(begin[:8], "little") <= min(size - 8, MAX_HEADER) and begin[8:] == b"{"


def read_entries(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Tensors and metadata of a file; its entries fill it without holes or overlaps."""
    size = regular_size(path)
    if size < 8:
        raise CorruptionError(f"{path} has {size} bytes; no safetensors file is that short")
    nbytes = int.from_bytes(read_exactly(path, 0, 8), "little")
    if nbytes > MAX_HEADER:
        raise FormatError(f"{path} is not a safetensors file: its header would have {nbytes} bytes")
    # What is past the end was cut off, which is another error than a header that lies.
    found, metadata = parse_header(read_exactly(path, 0, 8 + nbytes), str(path), ANYWHERE)
    entries = {name: _entry(path, name, one) for name, one in found.items()}
    _check_filled(path, entries, 8 + nbytes, size)
    return entries, metadata or {}


def _entry(path: Path, name: str, found: headers.Entry) -> Entry:
    shape = checked_shape(found.shape, f"{path}: entry {name!r}")
    if found.dtype not in _DTYPES:
        raise FormatError(f"{path}: entry {name!r} has elements of the unknown type {found.dtype}")
    return Entry(_DTYPES[found.dtype], shape, found.start, found.stop)


def _check_filled(path: Path, entries: Mapping[str, Entry], begin: int, size: int) -> None:
    at = begin
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != at:
            raise FormatError(
                f"{path}: entry {name!r} begins at byte {entry.start}, where {at} was expected"
            )
        at = entry.stop
    if at > size:
        raise CorruptionError(
            f"{path} has {size} bytes, and its header tells of {at}: it is cut. "
            "Copy it again, or choose another step.",
            names=[name for name, entry in entries.items() if entry.stop > size],
        )
    if at < size:
        raise FormatError(f"{path} has {size} bytes, of which its header explains {at}")


def lay_out_entries(
    entries: Iterable[tuple[str, str, Ints]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int], int]:
    """The first bytes of a file with these (name, dtype, shape), in an order that aligns them.

    Returns the header, where each entry starts in the file, and how large the file is.
    """
    rows = sorted(entries, key=lambda row: (-TABLE[row[1]].itemsize, row[0]))
    for name, dtype, _ in rows:
        if _DTYPES.get(TABLE[dtype].safetensors) != dtype:
            raise UnsupportedValueError(
                f"{name} has elements of type {dtype}, which safetensors files cannot hold; "
                "convert it first, or leave it out"
            )
        if name == "__metadata__":
            raise UnsupportedValueError(f"safetensors files hold no tensor called {name!r}")
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    starts, at = {}, 0
    for name, dtype, shape in rows:
        kind = TABLE[dtype]
        nbytes = kind.itemsize
        for n in shape:
            nbytes *= n
        table[name] = {
            "dtype": kind.safetensors,
            "shape": list(shape),
            "data_offsets": [at, at + nbytes],
        }
        starts[name] = at
        at += nbytes
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    if len(text) > MAX_HEADER:
        raise UnsupportedValueError(
            f"{len(rows)} tensors need a header of {len(text)} bytes, and safetensors allows "
            f"{MAX_HEADER}; write several files, or another format"
        )
    text = text.ljust(-(-len(text) // 8) * 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + at for name, at in starts.items()}, len(header) + at
