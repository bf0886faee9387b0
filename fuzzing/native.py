"""Parsers of the native format: record, headers, index, digests, structure, values, all of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np

import shardkeep
from fuzzing.by_bytes import Mutator, changed_bytes
from fuzzing.encodings import changed_json, changed_msgpack
from fuzzing.headers import changed_header, changed_index
from fuzzing.hostile import number
from fuzzing.native_seeds import Saved, encoded_values, saved
from fuzzing.sealing import layout_of, sealed, sealed_record, verified
from fuzzing.targets import Target, by_label, every_one, labelled, unlabelled
from shardkeep import values
from shardkeep.engine.digests import algorithm
from shardkeep.errors import CheckpointError
from shardkeep.formats.native.header import read_header
from shardkeep.formats.native.index import Index
from shardkeep.formats.native.names import RECORD
from shardkeep.formats.native.record import decode_head, decode_record, encode_record
from shardkeep.structure import Structure

__all__ = ["native_targets"]

_XXH = algorithm("xxh3-128")


def native_targets(scratch: Path) -> list[Target]:
    """All of them; checkpoints are written below `scratch`."""
    made = saved(scratch)
    index = made.payloads[made.record.index.name]
    data = made.payloads[made.record.files[0].name]
    structure = [_structure_of(index)]
    return [
        Target("record", [made.text()], (_record_json, _record_bytes, changed_bytes), _record, 90),
        Target("header", [_head(data), _head(index)], (changed_header, changed_bytes), _header, 90),
        Target("index", [index], (changed_index,), _index_of(made), 12),
        Target("digests", [b"\7" + _whole(data[:9000])], (_digest_bytes,), _digests, 90),
        Target("structure", structure, (changed_msgpack, changed_bytes), _structure, 70),
        Target("values", encoded_values(), (changed_msgpack, changed_bytes), _values, 100),
        _checkpoint(made, scratch / "checkpoint"),
    ]


# --- record


def _record_json(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    return sealed_record(changed_json(rng, data, others))


def _record_bytes(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    return sealed_record(changed_bytes(rng, data, others))


def _record(data: bytes) -> None:
    every_one(lambda: decode_head(data, "x").nbytes, lambda: decode_record(data, "x"))


# --- headers


def _head(payload: bytes) -> bytes:
    text = payload[8 : 8 + int.from_bytes(payload[:8], "little")].rstrip(b" ")
    return len(text).to_bytes(8, "little") + text


def _header(data: bytes) -> None:
    read_header(data, "x", 1 << 20)


# --- index


def _index_of(made: Saved) -> Callable[[bytes], None]:
    files, room = len(made.record.files), sum(row.payload for row in made.record.files)

    def run(payload: bytes) -> None:
        digests, root = sealed(payload)
        index = Index(verified(payload + digests, len(payload), root), files, room)
        count = len(index.tensors)
        _walk(index.structure)
        every_one(
            lambda: index.chunks_among(np.arange(count)),
            *(lambda row=row: index.chunks_of(row) for row in range(min(count, 20))),
        )

    return run


def _structure_of(index: bytes) -> bytes:
    entries, _ = read_header(index[: 8 + int.from_bytes(index[:8], "little")], "", 1 << 62)
    entry = entries["structure"]
    return index[entry.start : entry.stop]


def _structure(data: bytes) -> None:
    _walk(Structure.decode(data))


def _walk(structure: Structure) -> None:
    every_one(
        lambda: structure.names,
        structure.encode,
        lambda: structure.build(lambda number: number),
    )


# --- digests


def _whole(payload: bytes) -> bytes:
    return payload + sealed(payload)[0]


def _digest_bytes(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Anything in the file or its digests, with some of the levels put right (the first byte)."""
    return bytes([rng.choice((0, 0, 4, 6, 7))]) + changed_bytes(rng, data[1:], ())


def _digests(data: bytes) -> None:
    """Of a file of 9000 bytes: whatever lies behind them is what it says of its digests."""
    right, whole = data[0] if data else 0, data[1:]
    layout = layout_of(9000)
    level1, rest = whole[9000 : layout.tail_start], whole[layout.tail_start :]
    if right & 1:
        payload = whole[:9000]
        level1 = sealed(payload)[0][: layout.level1]
    if right & 2:
        rest = _XXH.digest(level1) + rest[16:]
    root = _XXH.digest(rest) if right & 4 else b"\0" * 16
    file = verified(whole[:9000] + level1 + rest, 9000, root)
    every_one(
        file.check_digests,
        lambda: file.read_range(0, 9000),
        lambda: file.read_range(5000, 100),
        lambda: file.block_digest(2),
    )


# --- values


def _values(data: bytes) -> None:
    every_one(
        lambda: values.decode(data, foreign="plain"),
        lambda: values.decode(data, foreign="plain", named=lambda *given: given),
    )


def _changed_values(at: int) -> Mutator:
    """The values at the end of a data file, or the directory of them, changed."""

    def change(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
        blob = data[at:]
        count = int.from_bytes(blob[:8], "little")
        if not 0 < count <= len(blob) // 8 - 1:
            return changed_bytes(rng, data, ())
        ends = [int.from_bytes(blob[8 + 8 * n : 16 + 8 * n], "little") for n in range(count)]
        body = blob[8 + 8 * count :]
        parts = [body[low:high] for low, high in zip([0, *ends[:-1]], ends, strict=True)]
        pick = rng.randrange(count)
        parts[pick] = changed_msgpack(rng, parts[pick], ())
        ends = np.cumsum([len(part) for part in parts]).tolist()
        if rng.random() < 0.2:
            ends[pick] = number(rng, ends[pick])
        if rng.random() < 0.1:
            count = number(rng, count)
        told = b"".join((n & (1 << 64) - 1).to_bytes(8, "little") for n in (count, *ends))
        return data[:at] + told + b"".join(parts)

    return change


# --- all of it


def _checkpoint(made: Saved, folder: Path) -> Target:
    """Any file of a checkpoint changed, and those that vouch for it put right."""
    record, first = made.record, made.record.files[0]
    seeds = [labelled(name, payload) for name, payload in made.payloads.items()]
    mutators: dict[str, Sequence[Mutator]] = {
        record.index.name: (changed_index,),
        first.name: (_changed_values(first.values or 0), changed_header, changed_bytes),
        RECORD: (_record_json,),
    }
    state = _Written(made, folder)
    seeds.append(labelled(RECORD, made.text()))
    return Target("checkpoint", seeds, (by_label(mutators),), state.run, 4)


class _Written:
    """A checkpoint on disk, of which one file at a time is another."""

    def __init__(self, made: Saved, folder: Path) -> None:
        self.made, self.folder, self.last = made, folder, ""
        made.write(folder)

    def run(self, data: bytes) -> None:
        name, content = unlabelled(data)
        if self.last not in ("", name):
            self.made.write(self.folder)
        self.last = name
        if name == RECORD:
            (self.folder / RECORD).write_bytes(content)
        else:
            self._write(name, content)
        every_one(self._read, lambda: shardkeep.verify(self.folder))

    def _write(self, name: str, payload: bytes) -> None:
        record = self.made.record
        try:
            row, whole = self.made.written(name, payload)
            rows = [row if row.name == old.name else old for old in self.made.rows()]
            text = encode_record(replace(record, index=rows[0], files=tuple(rows[1:])))
        except CheckpointError:
            return
        (self.folder / name).write_bytes(whole)
        (self.folder / RECORD).write_bytes(text)

    def _read(self) -> None:
        with shardkeep.open(self.folder) as opened:
            opened.state_dict(as_="numpy")
