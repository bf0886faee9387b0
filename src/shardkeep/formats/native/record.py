# SPDX-License-Identifier: Apache-2.0
"""The commit record, `checkpoint.json`: its presence is what makes a checkpoint exist.

The envelope (the last member is the digest of every byte before it) is checked before anything is
interpreted, and never changes in any version.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shardkeep.engine.digests import DigestLayout, algorithm
from shardkeep.errors import (
    CorruptionError,
    FormatError,
    UnsafeCheckpointError,
    UnsupportedValueError,
)
from shardkeep.formats.native.header import no_duplicates
from shardkeep.formats.native.names import CONTENT_KEY, save_id_of

__all__ = [
    "MAX_RECORD",
    "FileRow",
    "Record",
    "RecordHead",
    "checked_user_metadata",
    "decode_head",
    "decode_record",
    "encode_record",
]

MAJOR = 1
MAX_RECORD = 64 << 20
MAX_FILES = 1_000_000
MAX_USER = 1 << 20
"""Bytes of what a user puts beside a checkpoint; every listing of a run reads it."""
MAX_DEPTH = 32
DEFAULT_BLOCK = 128 << 10
FEATURES = frozenset({"pickle"})
"""What this version understands of `requires`."""

_ENVELOPE = re.compile(rb'"digest": "([a-z0-9-]+):([0-9a-f]+)"\n\}\n\Z', re.ASCII)


@dataclass(frozen=True, slots=True)
class FileRow:
    """One file of the checkpoint."""

    name: str
    """Path relative to the checkpoint."""
    size: int
    """Bytes of the whole file."""
    payload: int
    """T: bytes covered by block digests."""
    root: str
    """Root digest, in hex."""
    values: int | None = None
    """Where its values entry begins, if it has one; the entry ends at T."""
    chunks: int = 0
    """Chunks in it."""
    kept: bool = False
    """Whether an earlier checkpoint has it too; it may hold more than this one wants of it."""


@dataclass(frozen=True, slots=True)
class Record:
    """What `checkpoint.json` says."""

    save_id: str
    """Of the save that wrote it."""
    index: FileRow
    """The index file."""
    files: tuple[FileRow, ...]
    """The data files; chunks and values name them by number."""
    digests: str = "xxh3-128"
    """Algorithm of every digest in it."""
    block: int = DEFAULT_BLOCK
    """Bytes of a digest block."""
    requires: tuple[str, ...] = ()
    """Features a reader must know."""
    version: str = ""
    """Of the library that wrote it; informative."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """For people; no reader uses it."""
    digest: str = ""
    """The record's own digest, with its algorithm."""
    user: Mapping[str, Any] = field(default_factory=dict)
    """What whoever saved it put beside it, as JSON."""

    def layout(self, row: FileRow) -> DigestLayout:
        """Where the digests of a file lie."""
        return DigestLayout(row.payload, self.block, algorithm(self.digests).size)


def _row(row: FileRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "size": row.size,
        "payload": row.payload,
        "root": row.root,
        "values": row.values,
        "chunks": row.chunks,
        **({"kept": True} if row.kept else {}),
    }


def _minor(record: Record) -> int:
    """The lowest that has all that is in it."""
    return int(bool(record.user) or any(row.kept for row in record.files))


def encode_record(record: Record) -> bytes:
    """The bytes of `checkpoint.json`."""
    body = {
        "format": {"major": MAJOR, "minor": _minor(record)},
        "requires": list(record.requires),
        "writer": {"name": "shardkeep", "version": record.version},
        "save_id": record.save_id,
        "digests": {"algorithm": record.digests, "block": record.block},
        "summary": dict(record.summary),
        **({"user": dict(record.user)} if record.user else {}),
        "index": _row(record.index),
        "files": [_row(row) for row in record.files],
    }
    text = msgspec.json.format(msgspec.json.encode(body), indent=1)
    head = text.removesuffix(b"\n}") + b',\n "digest": "' + record.digests.encode() + b":"
    data = head + algorithm(record.digests).digest(head).hex().encode() + b'"\n}\n'
    if len(data) > MAX_RECORD:
        raise FormatError(f"the record of {len(record.files)} files is larger than {MAX_RECORD}")
    return data


def decode_record(data: bytes, where: str) -> Record:
    """Check the envelope, then the version, then everything else."""
    full_digest = _check_envelope(data, where)
    try:
        table = json.loads(data, object_pairs_hook=no_duplicates)
        _check_version(table, where)
        return _parse(table, full_digest, where)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise FormatError(f"{where}: the record is not well formed: {error!r}") from error


class _HeadFile(msgspec.Struct):
    size: int


class _HeadFormat(msgspec.Struct):
    major: int


class RecordHead(msgspec.Struct):
    """What a listing of many checkpoints needs of each record, checked as far as that goes."""

    format: _HeadFormat
    save_id: str
    requires: list[str]
    index: _HeadFile
    files: list[_HeadFile]
    user: dict[str, Any] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the files that the record names."""
        return self.index.size + sum(row.size for row in self.files)


def decode_head(data: bytes, where: str) -> RecordHead:
    """A part of a record, in a fraction of the time; the envelope and the version are checked."""
    _check_envelope(data, where)
    try:
        head = msgspec.json.decode(data, type=RecordHead)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{where}: the record is not well formed: {error}") from error
    _check_version({"format": {"major": head.format.major}, "requires": head.requires}, where)
    return head


def _check_envelope(data: bytes, where: str) -> str:
    """The digest that the record has, as it says itself."""
    found = _ENVELOPE.search(data[-256:])
    if found is None:
        raise CorruptionError(f"{where}: not a commit record, or its end is damaged")
    name = found[1].decode()
    start = len(data) - len(found[0]) + found.start(2) - found.start()
    try:
        digest = algorithm(name).digest(data[:start]).hex().encode()
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from error
    if digest != found[2]:
        raise CorruptionError(
            f"{where}: the record differs from its own digest (expected {found[2].decode()}, "
            f"found {digest.decode()})"
        )
    return f"{name}:{digest.decode()}"


def _check_version(table: dict[str, Any], where: str) -> None:
    major = table["format"]["major"]
    if type(major) is not int or major != MAJOR:
        raise FormatError(
            f"{where}: format version {major}; this library reads version {MAJOR}. Use the "
            f"version that wrote it: {table.get('writer')}"
        )
    unknown = sorted(set(table["requires"]) - FEATURES)
    if unknown:
        raise FormatError(f"{where}: needs features this version lacks: {', '.join(unknown)}")


def _parse(table: dict[str, Any], digest: str, where: str) -> Record:
    save_id, block = table["save_id"], table["digests"]["block"]
    if type(save_id) is not str or not re.fullmatch("[0-9a-f]{32}", save_id):
        raise ValueError(f"save id {save_id!r}")
    if type(block) is not int or not 4096 <= block <= 1 << 20 or block & (block - 1):
        raise ValueError(f"digest block of {block} bytes")
    if type(table["files"]) is not list or len(table["files"]) > MAX_FILES:
        raise ValueError(f"{len(table['files'])} files")
    kind = algorithm(table["digests"]["algorithm"])
    if not digest.startswith(f"{kind.name}:"):
        raise ValueError(f"the record is digested with another algorithm than its files: {digest}")
    rows = [_parse_row(row, block, kind.size, where) for row in [table["index"], *table["files"]]]
    if len({row.name for row in rows}) != len(rows):
        raise ValueError("a file is named twice")
    user = table.get("user", {})
    if type(user) is not dict:
        raise ValueError(f"user is a {type(user).__name__}")
    return Record(
        save_id,
        rows[0],
        tuple(rows[1:]),
        kind.name,
        block,
        tuple(table["requires"]),
        str(table.get("writer", {}).get("version", "")),
        table.get("summary", {}),
        digest,
        user,
    )


def checked_user_metadata(user: Mapping[str, Any] | None) -> dict[str, Any]:
    """What may stand in a record, or an `UnsupportedValueError` that says why not."""
    if user is None:
        return {}
    made = _json_value(user, "user_metadata", 0)
    if not isinstance(made, dict):
        raise UnsupportedValueError(f"user_metadata is a {type(user).__qualname__}; use a dict")
    nbytes = len(msgspec.json.encode(made))
    if nbytes > MAX_USER:
        raise UnsupportedValueError(
            f"user_metadata has {nbytes} bytes, at most {MAX_USER} fit: it is read whenever "
            "checkpoints are listed. Put large things into the state."
        )
    return made


def _json_value(value: object, path: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise UnsupportedValueError(f"{path} is nested more than {MAX_DEPTH} deep")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise UnsupportedValueError(f"{path} has the key {key!r}; JSON has texts as keys")
            _check_text(key, f"{path} has the key {key!r}, which")
        return {
            key: _json_value(item, f"{path}[{key!r}]", depth + 1) for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_json_value(item, f"{path}[{at}]", depth + 1) for at, item in enumerate(value)]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        _check_text(value, path)
        return str(value)
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    raise UnsupportedValueError(
        f"{path} is {reprlib.repr(value)}, which JSON does not have; use texts, finite numbers of "
        "at most 64 bits, booleans, None, lists and dicts"
    )


def _check_text(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnsupportedValueError(f"{what} is text that UTF-8 cannot carry") from error


def _parse_row(row: Mapping[str, Any], block: int, digest_size: int, where: str) -> FileRow:
    name, size, payload, root = row["name"], row["size"], row["payload"], row["root"]
    values, chunks = row.get("values"), row.get("chunks", 0)
    if type(name) is not str or save_id_of(name) is None:
        raise UnsafeCheckpointError(
            f"{where}: names a file {reprlib.repr(name)}, which is not inside the "
            "checkpoint's data folder"
        )
    numbers: Sequence[Any] = (size, payload, chunks, 0 if values is None else values)
    if any(type(n) is not int or not 0 <= n < 2**63 for n in numbers):
        raise ValueError(f"{name}: sizes {numbers}")
    if DigestLayout(payload, block, digest_size).file_size != size:
        raise ValueError(f"{name}: size {size} does not follow from payload {payload}")
    if values is not None and not 0 < values <= payload:
        raise ValueError(f"{name}: values at {values}")
    if chunks > (payload if values is None else values) // (CONTENT_KEY + digest_size):
        raise ValueError(f"{name}: {chunks} chunks do not fit")
    if type(root) is not str or not re.fullmatch(f"[0-9a-f]{{{2 * digest_size}}}", root):
        raise ValueError(f"{name}: root {root!r}")
    kept = row.get("kept", False)
    if type(kept) is not bool:
        raise ValueError(f"{name}: kept is {kept!r}")
    return FileRow(name, size, payload, root, values, chunks, kept)
