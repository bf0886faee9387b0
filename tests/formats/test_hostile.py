"""Checkpoints made to harm: digests are right, contents lie. Always an error of ours, at once."""

import contextlib
import json
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import shardkeep
from shardkeep import (
    CheckpointError,
    CorruptionError,
    FormatError,
    NativeReader,
    NativeWriter,
    UnsafeCheckpointError,
    UnsupportedValueError,
    values,
)
from shardkeep.engine.digests import DigestLayout, algorithm
from shardkeep.formats.native.header import Entry, header_room, read_header, write_header
from shardkeep.formats.native.layout import Limits
from shardkeep.formats.native.names import DIGESTS
from shardkeep.formats.native.record import decode_head, decode_record, encode_record
from shardkeep.tree import Structure

REFUSED = (FormatError, CorruptionError, UnsafeCheckpointError, UnsupportedValueError)
BLOCK = 4096
XXH = algorithm("xxh3-128")
CODES = {"<i8": "I64", "<i4": "I32", "<u2": "U16", "|u1": "U8", "<f8": "F64"}


def state() -> dict:
    tied = np.arange(6, dtype=np.float32)
    return {
        "a": {"w": np.arange(24.0).reshape(4, 6), "tied": tied, "also": tied},
        "b": np.arange(5, dtype=np.int16),
        "s": np.full((), 2.5),
        "step": 3,
        "text": "hello",
    }


def parts() -> dict:
    """The same with `a.w` in two chunks."""
    whole = state()
    rows = [(whole["a"]["w"][:2], (0, 0)), (whole["a"]["w"][2:], (2, 0))]
    whole["a"]["w"] = shardkeep.ShardedArray.from_shards(rows, (4, 6))
    return whole


class Forge:
    """A good checkpoint, to be rewritten with digests that fit."""

    def __init__(self, path: Path, state: dict | None = None, **options) -> None:
        self.path = path
        state = parts() if state is None else state
        writer = NativeWriter(block=BLOCK, **options)
        shardkeep.save(state, path, storage_writer=writer, no_dist=True)
        self.record = decode_record((path / "checkpoint.json").read_bytes(), "")
        data = (path / self.record.index.name).read_bytes()
        length = int.from_bytes(data[:8], "little")
        self.entries, self.metadata = read_header(data[: 8 + length], "", len(data))
        self.entries.pop(DIGESTS)
        kinds = {code: np.dtype(kind) for kind, code in CODES.items()}
        self.columns = {
            key: np.frombuffer(data[e.start : e.stop], kinds[e.dtype]).copy()
            for key, e in self.entries.items()
        }
        self.names = bytes(self.columns["tensor.names"]).decode()

    # --- sealing

    def write_index(self, columns: dict, header: dict | None = None) -> None:
        """An index of these columns, and a record that vouches for it."""
        at = room = header_room(512 + 160 * (len(columns) + 1))
        entries = {}
        for key, column in columns.items():
            entries[key] = Entry(CODES[column.dtype.str], column.shape, at, at + column.nbytes)
            at += column.nbytes
        if header:
            entries |= header
        layout = DigestLayout(at, BLOCK, 16)
        entries[DIGESTS] = Entry("U8", (layout.file_size - at,), at, layout.file_size)
        body = write_header(entries, self.metadata, room)
        body += b"".join(column.tobytes() for column in columns.values())
        self.write_index_bytes(body)

    def write_index_bytes(self, payload: bytes) -> None:
        row = self.seal(self.record.index, payload)
        self.write_record(replace(self.record, index=row))

    def seal(self, row, payload: bytes):
        layout = DigestLayout(len(payload), BLOCK, 16)
        level1 = b"".join(
            XXH.digest(payload[at : at + BLOCK]) for at in range(0, len(payload), BLOCK)
        )
        entry, root = layout.seal(level1, XXH)
        (self.path / row.name).write_bytes(payload + entry)
        return replace(row, size=layout.file_size, payload=len(payload), root=root.hex())

    def write_record(self, record) -> None:
        (self.path / "checkpoint.json").write_bytes(encode_record(record))

    def change(self, **columns) -> None:
        """Rewrite the index with some columns replaced; `__` in a name stands for a dot."""
        renamed = {key.replace("__", "."): np.asarray(value) for key, value in columns.items()}
        assert renamed.keys() <= self.columns.keys()
        self.write_index({**self.columns, **renamed})

    def row(self, name: str) -> int:
        with shardkeep.open(self.path) as ckpt:
            return ckpt.metadata.state_dict_metadata.tensors.row_of[name]


def seal_record(body: bytes) -> bytes:
    """Any bytes with a right digest after them."""
    head = body + b',\n "digest": "xxh3-128:'
    return head + xxhash.xxh3_128_hexdigest(head).encode() + b'"\n}\n'


@pytest.fixture
def forge(tmp_path) -> Forge:
    return Forge(tmp_path / "ckpt")


@contextlib.contextmanager
def modest(seconds: float = 5.0, nbytes: int = 64 << 20):
    """At once, and without a large allocation."""
    tracemalloc.start()
    begun = time.monotonic()
    try:
        yield
        taken, peak = time.monotonic() - begun, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert taken < seconds
    assert peak < nbytes


def load_all(path: Path):
    with shardkeep.open(path) as ckpt:
        return ckpt.state_dict()


def read_each(path: Path) -> None:
    with shardkeep.open(path) as ckpt:
        for name in ckpt:
            found = ckpt[name]
            if isinstance(found, shardkeep.TensorView):
                _ = found[...], found.metadata.chunks[:]
        _ = list(ckpt.metadata.storage_data.items())


def refused(path: Path) -> None:
    """Every way to read it refuses it."""
    target = state()
    target["a"]["also"] = target["a"]["also"].copy()
    tied = state()
    for call in (
        load_all,
        read_each,
        lambda p: shardkeep.load(target, p, no_dist=True),
        lambda p: shardkeep.load(tied, p, no_dist=True),
    ):
        with modest(), pytest.raises(REFUSED):
            call(path)
    with modest():
        assert not verified(path)


def verified(path: Path) -> bool:
    try:
        return shardkeep.verify(path).ok
    except REFUSED:
        return False


def test_the_forge_makes_good_checkpoints(forge):
    forge.change()
    assert shardkeep.verify(forge.path).ok
    target = state()
    target["a"]["w"][:] = 0
    shardkeep.load(target, forge.path, no_dist=True)
    assert np.array_equal(target["a"]["w"], state()["a"]["w"])
    assert load_all(forge.path)["step"] == 3


# --- the record ---------------------------------------------------------------------------------

ROW = ("index", "files.0")


def table_of(forge: Forge) -> dict:
    table = json.loads((forge.path / "checkpoint.json").read_bytes())
    del table["digest"]
    return table


def put(table: dict, where: str, value: object) -> None:
    *path, last = [int(k) if k.isdigit() else k for k in where.split(".")]
    for key in path:
        table = table[key]
    table[last] = value


GONE = object()
WRONG = [None, True, -1, 1.5, float("nan"), "x", [], {}, [[]], 2**63, 2**64, 10**40, "", [None]]
SAVE_ID = "0123456789abcdef" * 2
RECORD_CASES: list[tuple[str, object]] = [
    *(
        (f"{row}.name", name)
        for row in ROW
        for name in (
            "../x",
            "data/../../etc/passwd",
            "/etc/passwd",
            f"data/{SAVE_ID}-r00000-0.safetensors\0",
            f"data/{SAVE_ID}-r00000-0.safetensors/../../x",
            f"data/{SAVE_ID}-../x.safetensors",
            f"data\\{SAVE_ID}-x.safetensors",
            f"./data/{SAVE_ID}-x.safetensors",
            f"data//{SAVE_ID}-x.safetensors",
            f"data/{SAVE_ID}-x.safetensors\n",
            f"data/{SAVE_ID.upper()}-x.safetensors",
            f"data/{SAVE_ID}-é.safetensors",
            "checkpoint.json",
            "data",
            "",
            "x" * 10_000_000,
            f"data/{SAVE_ID}-{'x' * 10_000_000}.safetensors",
            *WRONG,
        )
    ),
    *((f"{row}.{key}", wrong) for row in ROW for key in ("size", "payload") for wrong in WRONG),
    *((f"{row}.size", n) for row in ROW for n in (0, 4096, 2**62, 2**63 - 1)),
    *((f"{row}.payload", n) for row in ROW for n in (0, 1, 2**62, 2**63 - 1)),
    *(
        (f"{row}.root", root)
        for row in ROW
        for root in ("zz" * 16, "ab", "AB" * 16, "0" * 32, "0" * 64, "é" * 32, *WRONG)
    ),
    *(("files.0.values", wrong) for wrong in [*WRONG[1:], 0, 1, 2**62]),
    *(("files.0.chunks", wrong) for wrong in [*WRONG, 2**62]),
    *(("format.major", wrong) for wrong in [2, 0, 99, *(w for w in WRONG if w is not True)]),
    *(("requires", wrong) for wrong in (["time-travel"], [["x"]], [1], [None], {"a": 1}, 5, "abc")),
    *(("save_id", wrong) for wrong in [*WRONG, "A" * 32, "0" * 31, "../" * 10 + "ab"]),
    *(("digests.block", wrong) for wrong in [*WRONG, 0, 1, 2048, 4097, 1 << 21, 2**62, 8192.0]),
    *(("digests.algorithm", wrong) for wrong in [*WRONG, "md5", "xxh3"]),
    *(("user", wrong) for wrong in WRONG if wrong != {}),
    *(("files.0.kept", wrong) for wrong in WRONG if wrong is not True),
    *(
        (key, wrong)
        for key in ("format", "digests", "index", "files.0")
        for wrong in [*WRONG, GONE]
        if not (key == "files.0" and wrong is GONE)
    ),
    *(("files", wrong) for wrong in WRONG if wrong != []),
    *((key, GONE) for key in ("save_id", "requires", "files")),
    *((f"{row}.{key}", GONE) for row in ROW for key in ("name", "size", "payload", "root")),
]


def test_hostile_records(forge):
    """Wrong types, sizes, names and versions, each in an otherwise good record."""
    record = forge.path / "checkpoint.json"
    for where, wrong in RECORD_CASES:
        table = table_of(forge) if record.exists() else {}
        original = record.read_bytes()
        if wrong is GONE:
            *path, last = where.split(".")
            inner = table
            for key in path:
                inner = inner[int(key) if key.isdigit() else key]
            del inner[last]
        else:
            put(table, where, wrong)
        record.write_bytes(seal_record(json.dumps(table).encode()[:-1]))
        try:
            with modest():
                with pytest.raises(REFUSED) as caught:
                    load_all(forge.path)
                assert len(str(caught.value)) < 10_000, where
                assert not verified(forge.path)
        except BaseException as error:
            error.add_note(f"{where} = {wrong!r:.80}")
            raise
        finally:
            record.write_bytes(original)
    assert shardkeep.verify(forge.path).ok


@pytest.mark.parametrize(("kind", "other"), [("blake3", "xxh3-128"), ("xxh3-128", "blake3")])
def test_a_record_is_digested_as_its_files_are(tmp_path, kind, other):
    """Whoever pins its digest pins all of it, with digests as strong as that one."""
    pytest.importorskip("blake3")
    shardkeep.save(state(), tmp_path, storage_writer=NativeWriter(digest=kind), no_dist=True)
    table = json.loads((tmp_path / "checkpoint.json").read_bytes())
    del table["digest"]

    def seal(name):
        head = json.dumps(table).encode()[:-1] + f',\n "digest": "{name}:'.encode()
        digest = algorithm(name).digest(head).hex().encode()
        (tmp_path / "checkpoint.json").write_bytes(head + digest + b'"\n}\n')

    seal(kind)
    assert shardkeep.verify(tmp_path).ok
    seal(other)
    refused(tmp_path)
    with pytest.raises(FormatError, match="digested with another algorithm"):
        load_all(tmp_path)


BODIES = {
    "brackets": b"[" * 100_000,
    "braces": b'{"a":' * 100_000,
    "nested in a member": b'{"summary": ' + b"[" * 100_000 + b"]" * 100_000,
    "duplicate": b'{"format": {"major": 1}, "format": {"major": 2}',
    "array": b'["a"',
    "number": b"1",
    "nothing": b"",
    "not UTF-8": b'{"a": "\xff\xfe"',
    "UTF-16": '{"a": 1'.encode("utf-16"),
    "NUL": b"\0" * 1000,
    "a long number": b'{"format": {"major": ' + b"9" * 100_000 + b"}",
    "NaN": b'{"format": {"major": NaN}',
    "infinity": b'{"format": {"major": 1e999}',
    "empty": b"{",
}


@pytest.mark.parametrize("body", BODIES)
def test_records_that_are_not_tables(forge, body):
    (forge.path / "checkpoint.json").write_bytes(seal_record(BODIES[body]))
    with modest():
        refused(forge.path)


def test_duplicate_members_at_any_depth(forge):
    text = (forge.path / "checkpoint.json").read_bytes()
    head = text[: text.rindex(b',\n "digest"')]
    for member in (b'"major": 1', b'"block": 4096', b'"requires": []'):
        assert member in head, member
        doubled = head.replace(member, member + b", " + member, 1)
        (forge.path / "checkpoint.json").write_bytes(seal_record(doubled))
        refused(forge.path)


def test_a_file_named_twice(forge):
    table = table_of(forge)
    table["files"].append(dict(table["files"][0]))
    (forge.path / "checkpoint.json").write_bytes(seal_record(json.dumps(table).encode()[:-1]))
    refused(forge.path)


def test_a_record_too_large(forge):
    with open(forge.path / "checkpoint.json", "r+b") as file:
        file.truncate(65 << 20)
    with modest(), pytest.raises(CheckpointError):
        load_all(forge.path)


def test_unknown_members_are_ignored(forge):
    table = table_of(forge)
    table["future"] = {"x": [1, 2, {"y": None}]}
    table["files"][0]["future"] = "yes"
    table["format"]["minor"] = 7
    (forge.path / "checkpoint.json").write_bytes(seal_record(json.dumps(table).encode()[:-1]))
    assert shardkeep.verify(forge.path).ok


def test_members_that_a_record_may_lack(forge):
    table = table_of(forge)
    for key in ("summary", "writer"):
        del table[key]
    for key in ("chunks", "values"):
        del table["index"][key]
    found = decode_record(seal_record(json.dumps(table).encode()[:-1]), "")
    assert (found.index, found.files) == (forge.record.index, forge.record.files)
    assert (found.summary, found.version, found.user) == ({}, "", {})
    assert found.index.chunks == 0
    assert not any(row.kept for row in found.files)


def test_files_that_are_no_list(tmp_path):
    """Of a checkpoint that has none, so that nothing is missed."""
    forge = Forge(tmp_path / "empty", {})
    assert forge.record.files == ()
    for wrong in ({}, "", None, True):
        table = table_of(forge)
        table["files"] = wrong
        (forge.path / "checkpoint.json").write_bytes(seal_record(json.dumps(table).encode()[:-1]))
        with pytest.raises(FormatError):
            load_all(forge.path)
        table["files"] = []
        (forge.path / "checkpoint.json").write_bytes(seal_record(json.dumps(table).encode()[:-1]))
        assert load_all(forge.path) == {}


def test_newer_versions_are_named(forge):
    table = table_of(forge)
    table["format"]["major"] = 2
    (forge.path / "checkpoint.json").write_bytes(seal_record(json.dumps(table).encode()[:-1]))
    with pytest.raises(FormatError, match="version 2"):
        shardkeep.open(forge.path)
    table["format"]["major"] = 1
    table["requires"] = ["pickle", "time-travel"]
    (forge.path / "checkpoint.json").write_bytes(seal_record(json.dumps(table).encode()[:-1]))
    with pytest.raises(FormatError, match="time-travel"):
        shardkeep.open(forge.path)


# --- the index ----------------------------------------------------------------------------------

LOW, HIGH = -(2**63), 2**63 - 1


def at(column: np.ndarray, row: int, value: object) -> np.ndarray:
    out = column.copy()
    out[row] = value
    return out


def structure_of(forge: Forge) -> list:
    return msgspec.msgpack.decode(bytes(forge.columns["structure"]))


def raw(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def test_every_number_of_the_index_at_its_extremes(forge):
    """Each number of each column replaced by what breaks arithmetic."""
    for key, column in forge.columns.items():
        if column.dtype == np.uint8:
            continue
        info = np.iinfo(column.dtype)
        for row in range(len(column)):
            old = int(column[row])
            for value in {info.min, info.max, info.max // 2 + 1, -1, 2**31 - 1, old + 1, old - 1}:
                if value == old or not info.min <= value <= info.max:
                    continue
                forge.write_index({**forge.columns, key: at(column, row, value)})
                try:
                    refused_or_equal(forge.path, key)
                except BaseException as error:
                    error.add_note(f"{key}[{row}] = {value}, was {old}")
                    raise


def refused_or_equal(path: Path, key: str) -> None:
    """Refused on load, or (another place of the same type) refused by `verify`."""
    with modest():
        try:
            found = load_all(path)
        except REFUSED:
            found = None
        assert not shardkeep.verify(path).ok
    if found is not None:
        # Whole and consistent, but not what was written: only the header tells.
        assert key in ("chunk.start", "tensor.shape_start", "value.slot", "tensor.kind"), key


def test_every_column_missing_short_long_or_of_another_type(forge):
    for key, column in forge.columns.items():
        rest = {k: v for k, v in forge.columns.items() if k != key}
        cases = {
            "missing": rest,
            "short": {**forge.columns, key: column[:-1]},
            "empty": {**forge.columns, key: column[:0]},
            "long": {**forge.columns, key: np.append(column, column[-1:])},
            "matrix": {**forge.columns, key: column.reshape(1, -1)},
            "floats": {**forge.columns, key: column.astype(np.float64)},
        }
        if column.dtype == np.int64:
            cases["narrow"] = {**forge.columns, key: column.astype(np.int32)}
            cases["unsigned"] = {**forge.columns, key: column.astype(np.uint8)}
        for case, columns in cases.items():
            forge.write_index(columns)
            try:
                refused(forge.path)
                if case in ("matrix", "narrow", "unsigned") and not key.startswith("chunk."):
                    with pytest.raises(FormatError, match=f"column {key} is not one row of numb"):
                        shardkeep.open(forge.path)
            except BaseException as error:
                error.add_note(f"{key}: {case}")
                raise


def test_values_of_which_one_column_has_more(forge):
    for key in ("value.slot", "value.file"):
        column = forge.columns[key]
        for wrong in (column[:-1], np.append(column, column[-1:])):
            forge.write_index({**forge.columns, key: wrong})
            with pytest.raises(FormatError, match="value columns do not fit each other"):
                shardkeep.open(forge.path)


def test_starts_that_wrap_around(forge):
    """Steps that only look ascending once a difference has left 64 bits; and such that do not."""
    for key in ("tensor.name_start", "tensor.shape_start", "tensor.first_chunk"):
        good = forge.columns[key]
        for first, second in ((HIGH, LOW), (int(good[2]) + 1, int(good[2])), (-1, int(good[2]))):
            column = good.copy()
            column[1], column[2] = first, second
            forge.write_index({**forge.columns, key: column})
            refused(forge.path)
            with pytest.raises(FormatError, match="are not in order"):
                shardkeep.open(forge.path)


@pytest.mark.parametrize(
    "huge", [(2**62, 4), (2**40, 2**40), (2**62,) * 2, (2**33,), (2**20, 2**20)]
)
def test_shapes_larger_than_the_files(forge, huge):
    row = forge.row("a.w")
    shapes, begin = forge.columns["tensor.shapes"], forge.columns["tensor.shape_start"]
    for claimed in (huge, (0, *huge[1:]), (*huge[:-1], 0)):
        if len(claimed) != 2:
            claimed = (*claimed, 1)
        if 0 in claimed and max(claimed) < 2**60:
            continue  # an empty tensor is fine
        new = shapes.copy()
        new[begin[row] : begin[row] + 2] = claimed
        forge.change(tensor__shapes=new)
        refused(forge.path)


@pytest.mark.parametrize("tied", [False, True])
def test_bytes_beyond_the_files_are_refused_at_once(tmp_path, tied):
    """Already by who only looks: nothing of such a size is there to be read."""
    array = np.arange(512.0)
    forge = Forge(tmp_path / "c", {"w": array, **({"v": array} if tied else {})})
    held = sum(row.payload for row in forge.record.files)
    most = held // 8
    for length, fits in ((most, True), (most + 1, False)):
        forge.change(tensor__shapes=np.full_like(forge.columns["tensor.shapes"], length))
        with (
            contextlib.nullcontext() if fits else pytest.raises(REFUSED, match="bytes in files of")
        ):
            shardkeep.open(forge.path).close()


def test_empty_shapes_whose_product_leaves_64_bits(tmp_path):
    forge = Forge(tmp_path / "c", {"x": np.zeros((0, 5))})
    for length in (2**60 - 1, 2**60, 2**61, 2**62):
        fits = length * 8 < 2**63
        forge.change(tensor__shapes=np.array([0, length]))
        with contextlib.nullcontext() if fits else pytest.raises(FormatError, match="claims shape"):
            assert load_all(forge.path)["x"].shape == (0, length)


def test_shapes_that_could_not_be_read_back_are_not_saved(tmp_path):
    """An empty tensor may have any shape that an index can hold."""
    import torch

    shardkeep.save({"x": torch.empty(2**59, 0)}, tmp_path / "c")
    assert load_all(tmp_path / "c")["x"].shape == (2**59, 0)
    huge = shardkeep.ShardedArray.from_shards([], (2**61, 0), dtype="float32")
    with pytest.raises(UnsupportedValueError):
        shardkeep.save({"x": huge}, tmp_path / "d")


def chunk_rows(forge: Forge, name: str) -> tuple[slice, slice]:
    row = forge.row(name)
    first = forge.columns["tensor.first_chunk"]
    ndim = np.diff(forge.columns["tensor.shape_start"])
    coords = np.concatenate([[0], np.cumsum(np.diff(first) * ndim)])
    return slice(first[row], first[row + 1]), slice(coords[row], coords[row + 1])


@pytest.mark.parametrize(
    ("offsets", "sizes"),
    [
        ([0, 0, 0, 0], [2, 6, 2, 6]),  # overlap and gap: as many elements as the tensor
        ([0, 0, 1, 0], [2, 6, 2, 6]),
        ([0, 0, 2, 0], [2, 6, 1, 6]),  # gap
        ([0, 0, 2, 0], [2, 6, 3, 6]),  # out of the tensor
        ([0, 0, 3, 0], [2, 6, 2, 6]),
        ([-2, 0, 2, 0], [2, 6, 2, 6]),
        ([0, 0, 2, 0], [-2, 6, 2, 6]),
        ([0, 0, HIGH - 1, 0], [2, 6, 2, 6]),  # offset + size wraps
        ([0, 0, 2, 0], [2, 6, 2, HIGH]),
        ([0, 0, 2, 0], [0, 6, 2, 6]),
        ([0, 0, 0, 0], [4, 6, 4, 6]),
        ([2, 0, 0, 0], [2, 6, 2, 3]),
    ],
)
def test_boxes_that_do_not_tile(forge, offsets, sizes):
    _, coords = chunk_rows(forge, "a.w")
    new_offsets, new_sizes = (
        forge.columns["chunk.offsets"].copy(),
        forge.columns["chunk.sizes"].copy(),
    )
    new_offsets[coords], new_sizes[coords] = offsets, sizes
    forge.change(chunk__offsets=new_offsets, chunk__sizes=new_sizes)
    refused_by_load(forge.path)


def refused_by_load(path: Path) -> None:
    target = {"a": {"w": np.full((4, 6), 7.0)}}
    for call in (load_all, read_each, lambda p: shardkeep.load(target, p, strict=False)):
        with modest(), pytest.raises(REFUSED):
            call(path)
    assert (target["a"]["w"] == 7).all()
    with modest():
        assert not shardkeep.verify(path).ok


@pytest.mark.parametrize("start", [-1, -(2**63), 2**63 - 1, 2**62, 1 << 20, 4097])
def test_chunks_out_of_their_file_or_misaligned(forge, start):
    rows, _ = chunk_rows(forge, "a.w")
    forge.change(chunk__start=at(forge.columns["chunk.start"], rows.start, start))
    refused_by_load(forge.path)


def test_chunks_in_the_digests(forge):
    rows, _ = chunk_rows(forge, "a.w")
    inside = forge.record.files[0].payload // 8 * 8
    forge.change(chunk__start=at(forge.columns["chunk.start"], rows.start, inside))
    refused_by_load(forge.path)


@pytest.mark.parametrize("file", [-1, 1, 2**31 - 1, -(2**31)])
def test_files_that_are_not_there(forge, file):
    rows, _ = chunk_rows(forge, "a.w")
    forge.change(chunk__file=at(forge.columns["chunk.file"], rows.start, file))
    refused_by_load(forge.path)
    forge.change(value__file=at(forge.columns["value.file"], 0, file))
    refused(forge.path)


@pytest.mark.parametrize("name", ["a.w", "b", "s"])
def test_the_last_place_of_a_chunk_in_its_file(forge, name):
    """Also where it is all that is read."""
    rows, _ = chunk_rows(forge, name)
    payload = forge.record.files[0].payload
    with shardkeep.open(forge.path) as ckpt:
        dtype, size = (
            ckpt[name].numpy().dtype,
            ckpt[name].numpy().nbytes // (rows.stop - rows.start),
        )
    last = (payload - size) // dtype.itemsize * dtype.itemsize
    for start, fits in ((last, True), (last + dtype.itemsize, False), (last - 1, False)):
        forge.change(chunk__start=at(forge.columns["chunk.start"], rows.start, start))
        what = r"reaches out of its file|is not aligned to its elements"
        with (
            shardkeep.open(forge.path) as ckpt,
            contextlib.nullcontext() if fits else pytest.raises(FormatError, match=what),
        ):
            ckpt[name].numpy()
        assert not verified(forge.path)


def test_content_digests_are_those_of_the_chunk_that_begins_there(tmp_path):
    forge = Forge(tmp_path / "c", {name: np.full(8, float(n)) for n, name in enumerate("xyz")})
    starts = forge.columns["chunk.start"]
    reader = NativeReader(forge.path)
    reader.read_metadata()
    told = reader.content_digests(0)
    assert sorted(told) == sorted(starts.tolist())
    for some in (starts, starts[::-1], starts[:1], starts[1:2], starts[2:]):
        found = reader.contents_at(np.zeros(len(some), np.int64), some)
        assert [row.tobytes() for row in found] == [told[start] for start in some.tolist()]
    for start in (0, int(starts.min()) - 8, int(starts.min()) + 8, int(starts.max()) + 64):
        for some in ([start], [*starts.tolist(), start], [start, *starts.tolist()]):
            with pytest.raises(
                FormatError, match=f"no content digest for a chunk at byte {start} "
            ):
                reader.contents_at(np.zeros(len(some), np.int64), np.array(some))
    # Of another checkpoint, all is read anew.
    other = Forge(tmp_path / "d", {name: np.full(8, n + 5.0) for n, name in enumerate("xyz")})
    reader.reset(other.path)
    reader.read_metadata()
    assert not reader.content_digests(0).items() & told.items()
    found = reader.contents_at(np.zeros(3, np.int64), starts)
    assert [row.tobytes() for row in found] == [
        reader.content_digests(0)[n] for n in starts.tolist()
    ]
    forge.write_record(replace(forge.record, files=(replace(forge.record.files[0], chunks=0),)))
    reader.reset(forge.path)
    reader.read_metadata()
    with pytest.raises(FormatError, match="no content digest for a chunk"):
        reader.contents_at(np.zeros(1, np.int64), starts[:1])
    reader.close()


@pytest.mark.parametrize("pair", [(0, 1), (1, 2), (2, 0), (3, 2)])
def test_chunks_of_a_kept_file_that_share_bytes(tmp_path, pair):
    """Its header may have more entries than are wanted, so it does not tell."""
    names = "wxyz"
    forge = Forge(tmp_path / "c", {name: np.zeros(8) for name in names})
    forge.record = replace(forge.record, files=(replace(forge.record.files[0], kept=True),))
    forge.change()
    assert shardkeep.verify(forge.path).ok
    one, other = pair
    column = forge.columns["chunk.start"]
    forge.change(chunk__start=at(column, one, column[other]))
    (problem,) = shardkeep.verify(forge.path).problems
    assert problem.names == tuple(sorted(names[row] for row in pair))
    assert problem.text == f"chunks of {' and '.join(problem.names)} share bytes"
    assert problem.file == forge.record.index.name


def test_chunks_of_any_kept_file_that_share_bytes(tmp_path):
    """Equal places in different files are none that are shared."""
    names, limits = "uvwxyz", Limits(payload=128, least=1, together=1)
    forge = Forge(tmp_path / "c", {name: np.zeros(8) for name in names}, limits=limits)
    files = tuple(replace(row, kept=True) for row in forge.record.files)
    assert len(files) == 3
    forge.record = replace(forge.record, files=files)
    forge.change()
    assert shardkeep.verify(forge.path).ok
    file, column = forge.columns["chunk.file"], forge.columns["chunk.start"]
    for number in range(3):
        one, other = np.flatnonzero(file == number)
        forge.change(chunk__start=at(column, one, column[other]))
        (problem,) = shardkeep.verify(forge.path).problems
        assert problem.names == tuple(sorted(names[row] for row in (one, other)))
        assert "share bytes" in problem.text


def test_what_is_wrong_with_an_index_is_told_once(forge):
    """Whether its bytes are damaged or make no sense, and whatever else is wrong."""
    index, data = forge.path / forge.record.index.name, forge.path / forge.record.files[0].name

    def damaged(file):
        changed = bytearray(file.read_bytes())
        changed[-1] ^= 1
        file.write_bytes(changed)

    def found():
        return [problem.file for problem in shardkeep.verify(forge.path).problems]

    whole = index.read_bytes()
    damaged(index)
    assert found() == [forge.record.index.name]
    index.write_bytes(whole)
    forge.change(value__file=at(forge.columns["value.file"], 0, 1))
    assert found() == [forge.record.index.name]
    damaged(data)
    assert sorted(found()) == sorted([forge.record.index.name, forge.record.files[0].name])


def test_chunks_that_share_bytes_are_found_by_verify(forge):
    rows, _ = chunk_rows(forge, "a.w")
    column = forge.columns["chunk.start"]
    forge.change(chunk__start=at(column, rows.start, column[rows.start + 1]))
    assert not shardkeep.verify(forge.path).ok


def test_aliases(forge):
    alias = forge.columns["tensor.alias_of"]
    also = forge.row("a.also")
    other = forge.row("a.tied")
    source, tied = (also, other) if alias[also] < 0 else (other, also)
    assert alias[tied] == source
    w, b = forge.row("a.w"), forge.row("b")
    for case in (
        at(alias, tied, tied),  # of itself
        at(alias, source, tied),  # a cycle
        at(alias, tied, len(alias)),
        at(alias, tied, -2),
        at(alias, tied, HIGH),
        at(alias, tied, b),  # of another shape and type
        at(alias, tied, w),
        at(alias, tied, -1),  # its own, with no chunks
        at(alias, w, b),  # with chunks of its own
    ):
        forge.change(tensor__alias_of=case)
        refused(forge.path)


def test_an_alias_of_an_alias(tmp_path):
    """Also of the first tensor: the last would have no chunks at all."""
    tied = np.arange(6.0)
    forge = Forge(tmp_path / "c", {"x": tied, "y": tied + 1, "z": tied})
    assert forge.columns["tensor.alias_of"].tolist() == [-1, -1, 0]
    forge.change(
        tensor__alias_of=np.array([1, -1, 0]),
        tensor__first_chunk=np.array([0, 0, 1, 1]),
        **{f"chunk__{key}": forge.columns[f"chunk.{key}"][1:]
           for key in ("offsets", "sizes", "start", "file")},
    )  # fmt: skip
    for call in (load_all, read_each):
        with pytest.raises(FormatError, match="columns do not fit each other"):
            call(forge.path)
    assert not verified(forge.path)


def test_an_alias_of_another_shape_or_type(tmp_path):
    tied = np.arange(6.0)
    state = {"x": tied, "z": tied, "shape": tied.reshape(2, 3).copy(), "type": tied.astype("i8")}
    forge = Forge(tmp_path / "c", state)
    for other in ("shape", "type"):
        forge.change()
        alias = at(forge.columns["tensor.alias_of"], forge.row("z"), forge.row(other))
        forge.change(tensor__alias_of=alias)
        with pytest.raises(FormatError, match="z differs from what it is an alias of"):
            shardkeep.open(forge.path)


def test_the_most_dimensions_and_the_longest_name(tmp_path):
    deep, name = np.full((1,) * 32, 7), "x" * 4096
    forge = Forge(tmp_path / "c", {name: deep})
    assert load_all(forge.path)[name].shape == deep.shape
    assert verified(forge.path)
    forge.change(
        tensor__shape_start=np.array([0, 33]),
        tensor__shapes=np.ones(33, np.int64),
        chunk__offsets=np.zeros(33, np.int64),
        chunk__sizes=np.ones(33, np.int64),
    )
    for call in (load_all, read_each):
        with pytest.raises(FormatError, match="columns do not fit each other"):
            call(forge.path)


def test_names(forge):
    names = bytes(forge.columns["tensor.names"])
    for wrong in (
        b"\xff" * len(names),
        b"\0" * len(names),
        names[::-1],
        b"\xed\xa0\x80".ljust(len(names), b"x"),  # a lone surrogate
    ):
        forge.change(tensor__names=raw(wrong))
        refused(forge.path)
    # "a.also" and "a.tied" are equally long: the same name twice.
    forge.change(tensor__names=raw(names.replace(b"a.also", b"a.tied")))
    refused(forge.path)
    with pytest.raises(FormatError, match="has a name twice"):
        shardkeep.open(forge.path)
    # Longer than a name may be; that of a value is checked by the same.
    start = forge.columns["tensor.name_start"]
    more = 4097 - int(start[-1] - start[-2])
    longer = at(start, len(start) - 1, int(start[-1]) + more)
    forge.change(tensor__names=raw(names + b"x" * more), tensor__name_start=longer)
    refused(forge.path)
    with pytest.raises(FormatError, match="has a name of more than 4096 bytes"):
        shardkeep.open(forge.path)
    # A character cut in two by the offsets.
    forge.change(tensor__names=raw("é".encode() * (len(names) // 2) + b"x" * (len(names) % 2)))
    refused(forge.path)


def test_structures(forge):
    root = structure_of(forge)
    pack = msgspec.msgpack.encode
    deep: object = 0
    for _ in range(200):
        deep = ["dict", ["k"], [deep], None]
    for wrong in (
        b"",
        b"\xc1",
        b"\x91" * 100_000 + b"\x00",  # brackets
        b"\xdd\xff\xff\xff\xff",  # four billion items that are not there
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        pack(root) + b"\0",
        pack(0),
        pack(1),
        pack(7),
        pack(-1),
        pack(True),
        pack(None),
        pack("dict"),
        pack({}),
        pack([]),
        pack(deep),
        pack(["dict", [], [], None]),  # nothing the tables know
        pack(["dict", root[1], root[2][:-1], None]),
        pack(["dict", root[1][:-1], root[2], None]),
        pack(["dict", [root[1][0]] * len(root[1]), root[2], None]),  # one key, many times
        pack(["dict", [[1]] * len(root[1]), root[2], None]),
        pack(["dict", [{}] * len(root[1]), root[2], None]),
        pack(["dict", [*root[1][:-1], "x" * 5000], root[2], None]),
        pack(["dict", [*root[1][:-1], "x" * 10_000_000], root[2], None]),
        pack(["dict", root[1], root[2], "extra"]),
        pack(["list", None, root[2], None]),
        pack(["list", root[1], root[2], None]),
        pack(["set", root[1], root[2], None]),
        pack(["per_rank", list(range(len(root[1]))), root[2], 2]),
        pack(["per_rank", [2**62] * len(root[1]), root[2], 2**63 - 1]),
        pack(["named_tuple", None, root[2], ["T", ["f"]]]),
        pack(["parts", root[1], root[2], 5]),
        pack([["dict"], root[1], root[2], None]),
        pack(["dict", [msgspec.msgpack.Ext(9, b"")] * len(root[1]), root[2], None]),
        pack(["dict", [msgspec.msgpack.Ext(1, b"\xc1")] * len(root[1]), root[2], None]),
        pack(["dict", [msgspec.msgpack.Ext(1, b"\xc7\x01\x7f.")] * len(root[1]), root[2], None]),
        pack(["dict", [2**64 - 1 - i for i in range(len(root[1]))], root[2], None]),
        pack(["dict", root[1], [1 - k if type(k) is int else k for k in root[2]], None]),
    ):
        forge.change(structure=raw(wrong))
        try:
            refused(forge.path)
        except BaseException as error:
            error.add_note(f"structure {wrong[:60]!r}")
            raise


def test_kinds(forge):
    for wrong in (
        b"",
        b"[]",
        b"{}",
        b"null",
        b"[1]",
        b"[" * 100_000,
        b'[{"dtype": "object"}]',
        b'[{"dtype": 5}]',
        b'[{"dtype": null}]',
        b"[{}]",
        b'[{"dtype": "float32", "memory_format": "sideways"}]',
    ):
        forge.change(kinds=raw(wrong))
        try:
            refused(forge.path)
        except BaseException as error:
            error.add_note(f"kinds {wrong[:60]!r}")
            raise


def test_headers_of_the_index(forge):
    for length in (0, 1, 7, 2**32, 2**62, 2**63, 2**64 - 1, 100_000_001):
        forge.write_index_bytes(length.to_bytes(8, "little") + b"{}".ljust(8184))
        refused(forge.path)
    for text in (
        b"[" * 5000,
        b"{}",
        b"[]",
        b'{"__metadata__": {}}',
        b'{"a": 1}',
        b"\xff" * 100,
        b"",
    ):
        forge.write_index_bytes((8184).to_bytes(8, "little") + text.ljust(8184))
        refused(forge.path)
    forge.write_index_bytes(b"")
    refused(forge.path)
    forge.write_index_bytes(b"\x08")
    refused(forge.path)


def test_every_byte_of_a_header_length_counts(forge):
    """All else is right."""
    row = forge.record.index
    data = bytearray((forge.path / row.name).read_bytes()[: row.payload])
    forge.write_index_bytes(bytes(data))
    assert verified(forge.path)
    for at in range(3, 8):
        data[at] ^= 1
        forge.write_index_bytes(bytes(data))
        with pytest.raises(FormatError, match="claims a header of"):
            shardkeep.open(forge.path)
        data[at] ^= 1


def test_columns_in_the_digests_or_past_the_end(forge):
    size = 2 * 4096
    for start, stop in ((size, size + 8), (2**62, 2**62 + 8)):
        with pytest.raises(FormatError):
            read_header(write_header({"x": Entry("I64", (1,), start, stop)}, {}, 4096), "", size)


# --- plain values -------------------------------------------------------------------------------


def write_values(forge: Forge, blob: bytes) -> None:
    row = forge.record.files[0]
    data = (forge.path / row.name).read_bytes()[: row.values] + blob
    sealed = forge.seal(row, data)
    forge.write_record(replace(forge.record, files=(sealed,)))


def blob_of(ends: list[int], body: bytes, count: int | None = None) -> bytes:
    number = len(ends) if count is None else count
    return number.to_bytes(8, "little") + np.array(ends, np.uint64).tobytes() + body


def test_directories_of_values(forge):
    step, text = values.encode(3), values.encode("hello")
    good, n = step + text, len(step)
    write_values(forge, blob_of([n, len(good)], good))
    assert load_all(forge.path)["text"] == "hello"
    assert verified(forge.path)
    for blob in (
        b"",
        b"\0",
        b"\0" * 8,
        b"\xff" * 8,
        b"\xff" * 64,
        blob_of([n, len(good)], good, count=0),
        blob_of([n, len(good)], good, count=1),
        blob_of([n, len(good)], good, count=3),
        blob_of([n, len(good)], good, count=2**61),
        blob_of([n, len(good)], good, count=2**64 - 1),
        blob_of([n, len(good) + 1], good),
        blob_of([n, len(good) - 1], good),
        blob_of([len(good), n], good),
        blob_of([2**63, len(good)], good),
        blob_of([2**64 - 1, len(good)], good),
        blob_of([2**63 - 1, len(good)], good),
        blob_of([n], good),
        blob_of([n, len(good), len(good)], good),
        empty := blob_of([0, len(good)], good),  # the first is empty
    ):
        write_values(forge, blob)
        try:
            with modest(), pytest.raises(REFUSED):
                load_all(forge.path)
            if blob != empty:  # which only its decoding finds
                assert not verified(forge.path)
        except BaseException as error:
            error.add_note(f"values {blob[:60]!r}")
            raise


def test_a_directory_of_values_that_wraps_around(tmp_path):
    forge = Forge.__new__(Forge)
    forge.path = tmp_path / "ckpt"
    shardkeep.save({f"v{i}": i for i in range(8)}, forge.path, no_dist=True,
                   storage_writer=NativeWriter(block=BLOCK))  # fmt: skip
    forge.record = decode_record((forge.path / "checkpoint.json").read_bytes(), "")
    step = 2**62
    write_values(forge, blob_of([1, 2, 3, 4, 5, 6, 7, 8], bytes(8)))
    assert load_all(forge.path) == {f"v{i}": 0 for i in range(8)}
    for ends in (
        [step, 2**63 - 1, 2**63, 2**63 + step, 2**64 - 1, 0, 4, 8],
        [1, 2, 3, 9, 5, 6, 7, 8],
        [1, 2, 3, 7, 6, 7, 7, 8],
        [1, 2, 3, 4, 5, 6, 9, 8],
    ):
        write_values(forge, blob_of(ends, bytes(8)))
        with modest(), pytest.raises(FormatError, match="directory of its values is not valid"):
            load_all(forge.path)


def test_values_that_are_not_values(forge):
    for wrong in (
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 50_000,
        b"\xc7\x01\x55x",
        b"\x81\x01\x01",
    ):
        write_values(forge, blob_of([len(wrong), len(wrong) + 1], wrong + b"\x01"))
        with modest(), pytest.raises(REFUSED):
            load_all(forge.path)


def test_a_pickle_that_was_not_announced(forge):
    pickled = b"\xc7\x01\x7f."
    write_values(forge, blob_of([len(pickled), len(pickled) + 1], pickled + b"\x01"))
    with pytest.raises(UnsafeCheckpointError):
        load_all(forge.path)
    target = state()
    with pytest.raises(UnsafeCheckpointError):
        shardkeep.load(target, forge.path, no_dist=True)


def test_values_in_a_file_that_has_none(forge):
    row = forge.record.files[0]
    forge.write_record(replace(forge.record, files=(replace(row, values=None, chunks=0),)))
    with pytest.raises(FormatError, match="the index puts values there, the record does not"):
        load_all(forge.path)
    assert not verified(forge.path)


def test_heads_of_records_are_refused_as_records_are(forge):
    """A listing reads no more of them."""
    good = (forge.path / "checkpoint.json").read_bytes()
    head = decode_head(good, "here")
    sizes = [row.size for row in (forge.record.index, *forge.record.files)]
    assert (head.save_id, head.nbytes) == (forge.record.save_id, sum(sizes))
    for body in BODIES.values():
        with pytest.raises(REFUSED, match="here"):
            decode_head(seal_record(body), "here")
    for where, wrong in (("format.major", 2), ("requires", ["time-travel"]), ("files", 5)):
        table = table_of(forge)
        put(table, where, wrong)
        with pytest.raises(FormatError, match="here"):
            decode_head(seal_record(json.dumps(table).encode()[:-1]), "here")
    with pytest.raises(CorruptionError, match="here"):
        decode_head(good.replace(b"save_id", b"save_ID"), "here")


def test_headers_of_data_files(forge):
    """Digests fit, and still other tools would read something else than we do."""
    row = forge.record.files[0]
    data = (forge.path / row.name).read_bytes()[: row.payload]
    length = int.from_bytes(data[:8], "little")
    entries, metadata = read_header(data[: 8 + length], "", row.size)
    name = next(iter(entries))
    for found, what in (
        ((0).to_bytes(8, "little") + data[8:], "claims a header of 0 bytes"),
        ((1 << 62).to_bytes(8, "little") + data[8:], "claims a header of 4611686018427387904"),
        (((1 << 56) + length).to_bytes(8, "little") + data[8:], "claims a header of"),
        (
            write_header({("other" if k == name else k): e for k, e in entries.items()}, metadata,
                         8 + length) + data[8 + length :],
            "its header and the index disagree",
        ),
    ):  # fmt: skip
        forge.write_record(replace(forge.record, files=(forge.seal(row, found),)))
        problems = shardkeep.verify(forge.path).problems
        assert [what in problem.text for problem in problems] == [True], problems


def test_entries_of_a_kept_file_that_share_bytes(forge):
    """A kept file may have more than is wanted of it, but nothing twice."""
    row = replace(forge.record.files[0], kept=True)
    data = (forge.path / row.name).read_bytes()[: row.payload]
    length = int.from_bytes(data[:8], "little")
    entries, metadata = read_header(data[: 8 + length], "", row.size)
    forge.write_record(replace(forge.record, files=(row,)))
    assert shardkeep.verify(forge.path).ok
    for again in (True, False):
        changed = dict(entries)
        if again:
            changed["again"] = next(iter(entries.values()))
        header = write_header(changed, metadata, 8 + length)
        sealed = forge.seal(row, header + data[8 + length :])
        forge.write_record(replace(forge.record, files=(sealed,)))
        problems = shardkeep.verify(forge.path).problems
        found = ["its entries overlap, or leave holes" in problem.text for problem in problems]
        assert found == [True] * again, problems


def test_an_entry_of_a_kept_file_that_has_another_type(forge):
    row = replace(forge.record.files[0], kept=True)
    data = (forge.path / row.name).read_bytes()[: row.payload]
    length = int.from_bytes(data[:8], "little")
    entries, metadata = read_header(data[: 8 + length], "", row.size)
    name = next(key for key, entry in entries.items() if entry.dtype == "F64")
    header = write_header(
        {**entries, name: replace(entries[name], dtype="I64")}, metadata, 8 + length
    )
    sealed = forge.seal(row, header + data[8 + length :])
    forge.write_record(replace(forge.record, files=(sealed,)))
    (problem,) = shardkeep.verify(forge.path).problems
    assert "its header and the index disagree" in problem.text


def test_a_record_that_lies_about_chunks_and_ties(forge):
    """Content digests are looked up when tied targets are filled from untied tensors."""
    row = forge.record.files[0]
    shared = np.zeros((4, 6))
    for chunks in (row.chunks, 0, 1, 2**40):
        with contextlib.suppress(CheckpointError):
            forge.write_record(replace(forge.record, files=(replace(row, chunks=chunks),)))
        target = {"a": {"tied": shared[0, :], "also": shared[0, :]}, "b": np.zeros(5, np.int16)}
        with modest(), contextlib.suppress(CheckpointError):
            shardkeep.load(target, forge.path, strict=False, no_dist=True)


# --- fuzzing ------------------------------------------------------------------------------------

BASE_RECORD = None


def base_record(tmp) -> bytes:
    global BASE_RECORD
    if BASE_RECORD is None:
        shardkeep.save(state(), tmp / "fuzz", no_dist=True)
        BASE_RECORD = (tmp / "fuzz" / "checkpoint.json").read_bytes()
    return BASE_RECORD


edits = st.lists(
    st.tuples(st.integers(0, 4000), st.integers(0, 40), st.binary(max_size=12)),
    min_size=1,
    max_size=4,
)


def mutate(data: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    for begin, length, new in changes:
        begin %= len(data) + 1
        data = data[:begin] + new + data[begin + length :]
    return data


@given(changes=edits)
def test_fuzzed_records(tmp_path_factory, changes):
    text = base_record(tmp_path_factory.getbasetemp())
    body = mutate(text[: text.rindex(b',\n "digest"')], changes)
    try:
        record = decode_record(seal_record(body), "here")
    except REFUSED:
        return
    for row in (record.index, *record.files):
        assert 0 <= row.payload <= row.size < 2**63
        assert not Path(row.name).is_absolute()
        assert ".." not in Path(row.name).parts
    assert decode_record(encode_record(record), "here").files == record.files


@given(data=st.binary(max_size=300))
def test_fuzzed_record_envelopes(data):
    for candidate in (data, seal_record(data), data + b'"digest": "xxh3-128:00"\n}\n'):
        with contextlib.suppress(*REFUSED):
            decode_record(candidate, "here")


HEADER = write_header(
    {"a": Entry("F32", (2, 3), 4096, 4120), "b": Entry("I64", (1,), 4120, 4128)},
    {"format": "pt"},
    4096,
)


@given(changes=edits)
def test_fuzzed_headers(changes):
    data = mutate(HEADER, changes)
    try:
        entries, metadata = read_header(data, "here", 8192)
    except REFUSED:
        return
    assert all(type(v) is str for v in metadata.values())
    for entry in entries.values():
        assert len(data) <= entry.start <= entry.stop <= 8192


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(table=json_values)
def test_fuzzed_header_tables(table):
    text = json.dumps(table).encode()
    with contextlib.suppress(*REFUSED):
        read_header(len(text).to_bytes(8, "little") + text, "here", 8192)


def touch(structure: Structure) -> None:
    """What the index does with a structure it has decoded."""
    with contextlib.suppress(*REFUSED, shardkeep.PlanError, ValueError):
        names = structure.names
        assert len(names) == len(structure.kinds) == len(set(names))
    structure.build(lambda number: number)
    assert Structure.decode(structure.encode()).encode() == structure.encode()


@given(changes=edits)
def test_fuzzed_structures(changes):
    inner = ["list", None, [1, 0], None], ["per_rank", [0, 1], [1, 1], 2]
    named = ["named_tuple", None, [0], ["T", ["f"]]]
    tree = ["dict", ["a", 1, None, True], [0, *inner, named], None]
    try:
        structure = Structure.decode(mutate(msgspec.msgpack.encode(tree), changes))
    except REFUSED:
        return
    touch(structure)


nodes = st.recursive(
    st.sampled_from([0, 1, 2, None, "x", True]),
    lambda inner: st.tuples(
        st.sampled_from(
            ["dict", "ordered_dict", "list", "tuple", "per_rank", "parts", "named_tuple"]
        ),
        st.none() | st.lists(json_values, max_size=3),
        st.lists(inner, max_size=3),
        json_values,
    ).map(list),
    max_leaves=10,
)


@given(node=nodes)
def test_fuzzed_structure_nodes(node):
    try:
        data = msgspec.msgpack.encode(node)
    except (OverflowError, ValueError, UnicodeEncodeError):
        return
    try:
        structure = Structure.decode(data)
    except REFUSED:
        return
    touch(structure)
