"""Good checkpoints of our own, small, and the same in every run."""

from __future__ import annotations

import datetime as dt
import decimal
import fractions
import pathlib
import uuid
from collections import Counter, OrderedDict, deque, namedtuple
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import shardkeep
from fuzzing.sealing import BLOCK, sealed
from shardkeep import NativeWriter, values
from shardkeep.formats.native.names import DATA, RECORD
from shardkeep.formats.native.record import FileRow, Record, decode_record, encode_record

__all__ = ["VALUES", "Saved", "saved"]

SAVE_ID = "0123456789abcdef" * 2
_Point = namedtuple("_Point", "x y")

VALUES: tuple[Any, ...] = (
    None, True, 5, -(2**63), 2**64 - 1, 10**40, 1.5, float("nan"), 1 + 2j, "text", b"bytes",
    bytearray(b"ab"), [1, [2, "a"]], (1, (2,)), _Point(1, "y"), {"a": 1, 2: {"b": None}},
    OrderedDict(a=1, b=2), Counter("abca"), deque([1, 2], 5), {1, "a"}, frozenset({2, (3, 4)}),
    range(1, 9, 2), slice(1, None, 2), np.float32(2.5), np.datetime64("2020-01-01", "s"),
    pathlib.PurePosixPath("a/b"), pathlib.PureWindowsPath("c:/x"), dt.date(2020, 1, 2),
    dt.datetime(2020, 1, 2, 3, 4, 5, 6, dt.UTC), dt.time(1, 2, 3), dt.timedelta(1, 2, 3),
    dt.timezone(dt.timedelta(hours=2), "x"), uuid.UUID(int=7), decimal.Decimal("1.5E+7"),
    fractions.Fraction(3, 7),
)  # fmt: skip


def state() -> dict[Any, Any]:
    """Tensors whole, tied, in parts, empty and without dimensions; values of many types."""
    tied = np.arange(6, dtype=np.float32)
    rows = np.arange(24.0).reshape(4, 6)
    parts = [(rows[:2], (0, 0)), (rows[2:], (2, 0))]
    return {
        "model": {
            "w": shardkeep.ShardedArray.from_shards(parts, (4, 6)),
            "tied": tied,
            "also": tied,
            "list": [np.arange(3), (np.zeros((0, 2)), {"x": np.ones(2, np.int16)})],
        },
        "s": np.full((), 2.5),
        "big": np.arange(1500),
        7: np.arange(5, dtype=np.uint8),
        "ordered": OrderedDict(a=np.ones(1), b=3),
        "point": _Point(np.ones(2), 4),
        "rng": shardkeep.PerRank({"state": np.arange(4), "n": 1}),
        "values": {str(at): value for at, value in enumerate(VALUES)},
        "step": 3,
    }


@dataclass
class Saved:
    """A checkpoint, taken apart."""

    record: Record
    """Its record."""
    payloads: dict[str, bytes]
    """What its files hold before their digests, by name."""

    def text(self) -> bytes:
        """The record as it is written."""
        return encode_record(self.record)

    def rows(self) -> list[FileRow]:
        """The rows of all files, that of the index first."""
        return [self.record.index, *self.record.files]

    def written(self, name: str, payload: bytes) -> tuple[FileRow, bytes]:
        """A file with another payload and digests that fit, and its row."""
        (row,) = (row for row in self.rows() if row.name == name)
        digests, root = sealed(payload)
        values_at = row.values if row.values is None else max(1, min(row.values, len(payload)))
        row = replace(
            row,
            size=len(payload) + len(digests),
            payload=len(payload),
            root=root.hex(),
            values=values_at,
        )
        return row, payload + digests

    def write(self, folder: Path) -> None:
        """All of it."""
        (folder / DATA).mkdir(parents=True, exist_ok=True)
        rows = []
        for name, payload in self.payloads.items():
            row, data = self.written(name, payload)
            rows.append(row)
            (folder / name).write_bytes(data)
        self.record = replace(self.record, index=rows[0], files=tuple(rows[1:]))
        (folder / RECORD).write_bytes(self.text())


def saved(scratch: Path) -> Saved:
    """Save the state, and give it a save id that is always the same."""
    path = scratch / "saved"
    user = {"step": 100, "metrics": {"loss": 1.5}, "list": [1, [2, {"a": None}]]}
    shardkeep.save(
        state(),
        path,
        storage_writer=NativeWriter(block=BLOCK),
        no_dist=True,
        user_metadata=user,
    )
    record = decode_record((path / "checkpoint.json").read_bytes(), "")
    old = record.save_id

    def renamed(row: FileRow) -> FileRow:
        return replace(row, name=row.name.replace(old, SAVE_ID))

    payloads = {}
    for row in (record.index, *record.files):
        payload = (path / row.name).read_bytes()[: row.payload]
        payloads[renamed(row).name] = payload.replace(old.encode(), SAVE_ID.encode())
    made = Saved(
        replace(
            record,
            save_id=SAVE_ID,
            index=renamed(record.index),
            files=tuple(map(renamed, record.files)),
            summary={**record.summary, "saved_at": "2026-01-01T00:00:00Z"},
        ),
        payloads,
    )
    made.write(scratch / "checkpoint")
    return made


def encoded_values() -> list[bytes]:
    """Every plain value on its own, and all of them together."""
    return [
        *(values.encode(value, where="") for value in VALUES),
        values.encode(list(VALUES), where=""),
    ]
