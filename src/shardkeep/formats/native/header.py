# SPDX-License-Identifier: Apache-2.0
"""The header every file begins with: that of a safetensors file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from shardkeep.dtypes import lookup
from shardkeep.errors import FormatError
from shardkeep.foreign.headers import MAX_HEADER, Entry, no_duplicates, parse_header
from shardkeep.metadata import TensorProperties

__all__ = [
    "ALIGNMENT",
    "MAX_HEADER",
    "Entry",
    "chunk_entries",
    "header_room",
    "no_duplicates",
    "read_header",
    "write_header",
]

ALIGNMENT = 4096


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


def read_header(data: bytes, where: str, file_end: int) -> tuple[dict[str, Entry], dict[str, str]]:
    """Entries and metadata of a header, given all of its bytes; anything odd is a `FormatError`."""
    entries, metadata = parse_header(data, where, file_end)
    if metadata is None:
        raise FormatError(f"{where}: the header is not valid: it has no metadata")
    return entries, metadata
