"""Rare forms of files of torch and safetensors, and what is refused in each: built by hand."""

import contextlib
import io
import itertools
import pickle
import struct
import time
import zipfile

import numpy as np
import pytest
from hostile_pickles import colliding_tuples

from shardkeep import CheckpointError, CorruptionError, FormatError, UnsupportedValueError
from shardkeep.foreign import headers, safetensors_header
from shardkeep.foreign.found import Found, Part, Raw, StoredTensor
from shardkeep.foreign.found import whole as whole_tensor
from shardkeep.foreign.headers import read_whole_header
from shardkeep.foreign.numpy_stand_ins import NumpyDType
from shardkeep.foreign.regular_files import read_whole
from shardkeep.foreign.safetensors_header import is_safetensors, lay_out_entries, read_entries
from shardkeep.foreign.tables import tables_of
from shardkeep.foreign.torch_objects import Finishing
from shardkeep.foreign.torch_stand_ins import Storage, TensorView, TorchDevice
from shardkeep.foreign.torch_zip import Archive
from shardkeep.formats.torch_save.legacy import read_stream
from shardkeep.stores.local import LocalStore

FULL = 0xFFFFFFFF
CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")


def archive_of(data: bytes) -> Archive:
    return Archive(lambda at, count: data[at : at + count], 0, len(data), "here")


def zipped(**entries: bytes) -> bytearray:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for name, data in entries.items():
            file.writestr(name, data)
    return bytearray(out.getvalue())


# --- entries that tell of sizes past 32 bits


def wide(extra: bytes, size: int = FULL, header: int = FULL) -> bytes:
    """An archive whose only entry has its numbers in an extra field."""
    data = zipped(a=b"abc")
    at = data.index(b"PK\1\2")
    fields = list(CENTRAL.unpack_from(data, at))
    fields[8] = fields[9] = size
    fields[11], fields[16] = len(extra), header
    row = CENTRAL.pack(*fields) + b"a" + extra
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 1, 1, len(row), at, 0)
    return bytes(data[:at]) + row + end


def field(kind: int, *numbers: int) -> bytes:
    return struct.pack(f"<HH{len(numbers)}Q", kind, 8 * len(numbers), *numbers)


def test_wide_numbers_are_found_among_extra_fields():
    archive = archive_of(wide(field(7, 1) + field(1, 3, 3, 0)))
    assert archive.read("a", 10) == b"abc"


def test_only_the_numbers_that_are_wide_are_there():
    assert archive_of(wide(field(1, 0), size=3)).read("a", 10) == b"abc"


@pytest.mark.parametrize(
    "extra",
    [b"", field(7, 1, 2, 3), field(1), field(1, 3), field(1, 3, 3), b"\1\0", field(1, 2**63, 3, 0)],
    ids=["none", "another", "empty", "one", "two", "cut", "packed"],
)
def test_wide_numbers_that_are_not_there(extra):
    with pytest.raises(CheckpointError):
        archive_of(wide(extra)).read("a", 10)


@pytest.mark.parametrize("size", [2**40, 2**63, 2**64 - 1])
def test_entries_that_claim_terabytes(size):
    with pytest.raises(CorruptionError, match="overlaps"):
        archive_of(wide(field(1, size, size, 0)))


def test_an_archive_that_is_cut_while_it_is_read():
    data = bytes(zipped(a=b"abc"))
    with pytest.raises(CorruptionError, match="the file ends"):
        Archive(lambda at, count: data[at : at + count - 1], 0, len(data), "here")


def test_another_name_in_the_header_of_an_entry():
    data = zipped(a=b"abc")
    data[30] ^= 1
    with pytest.raises(CorruptionError, match="another name"):
        archive_of(bytes(data)).read("a", 10)


def test_entries_that_are_not_there_or_too_large():
    archive = archive_of(bytes(zipped(a=b"abc")))
    with pytest.raises(CorruptionError, match="it has no b"):
        archive.read("b", 10)
    assert archive.read("a", 3) == b"abc"
    with pytest.raises(FormatError, match="a has 3 bytes, at most 2 do"):
        archive.read("a", 2)


@pytest.mark.parametrize(("length", "what"), [(20, "is cut"), (60, "1 entries, expected 2")])
def test_a_directory_whose_rows_do_not_fill_it(length, what):
    data = zipped(**{"a" * 60: b"abc"})  # a row as long as the shortest two
    data[data.index(b"PK\1\2") + 28] = length
    data[-14:-10] = struct.pack("<HH", 2, 2)
    with pytest.raises(CorruptionError, match=what):
        archive_of(bytes(data))


@pytest.mark.parametrize("wrong", ["mark", "place"])
def test_a_large_end_record_that_is_elsewhere(wrong):
    data = zipped(a=b"abc")
    at = data.index(b"PK\5\6")
    end = list(struct.unpack("<IHHHHIIH", data[at:]))
    record = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, 1, 1, end[5], end[6])
    end[3:7] = 0xFFFF, 0xFFFF, FULL, FULL

    def whole(record: bytes, place: int) -> bytes:
        locator = struct.pack("<IIQI", 0x07064B50, 0, place, 1)
        return bytes(data[:at]) + record + locator + struct.pack("<IHHHHIIH", *end)

    assert archive_of(whole(record, at)).read("a", 10) == b"abc"
    broken = whole(b"no" + record[2:], at) if wrong == "mark" else whole(record, at + 1)
    with pytest.raises(CorruptionError, match="large end record"):
        archive_of(broken)


def test_files_larger_than_what_they_hold_takes(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert read_whole(tmp_path, "a", 3) == b"abc"
    with pytest.raises(FormatError, match="has 3 bytes, at most 2"):
        read_whole(tmp_path, "a", 2)


# --- streams of old


class Bytes:
    """What `read_stream` reads."""

    def __init__(self, data: bytes) -> None:
        self.data, self.size = data, len(data)

    def read(self, at: int, count: int) -> bytes:
        return self.data[at : at + max(0, count)]


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def storage(count: int, view: bytes = b"") -> bytes:
    """A persistent id as torch wrote it, with a part of the storage where `view` says which."""
    kind = b"ctorch\nFloatStorage\n"
    return b"(" + text("storage") + kind + text("0") + text("cpu") + b"K%c" % count + view + b"tQ"


def stream(graph: bytes, count: int = 4, told: int | None = None) -> Bytes:
    front = [0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}]
    out = b"".join(pickle.dumps(value, 2) for value in front) + b"\x80\2" + graph + b"."
    out += pickle.dumps(["0"], 2) + (count if told is None else told).to_bytes(8, "little")
    return Bytes(out + np.arange(count, dtype=np.float32).tobytes())


def tensor(of: bytes, count: int) -> bytes:
    size = b"K%c\x85K\1\x85" % count
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + of + b"K\0" + size + b"\x89}tR"


def part(offset: int, count: int) -> bytes:
    return (
        b"(" + text("v") + b"J" + struct.pack("<i", offset) + b"J" + struct.pack("<i", count) + b"t"
    )


def test_a_part_of_a_storage():
    file = stream(tensor(storage(4, part(1, 2)), 2))
    found = read_stream(file, "here")
    (only,) = found.parts
    assert np.frombuffer(file.data[only.place.start :][:8], np.float32).tolist() == [1, 2]


@pytest.mark.parametrize(
    "view",
    [part(-1, 2), part(0, -1), part(3, 2), b"K\5", b"(K\1K\1t", b"(" + text("v") + b"NNt"],
    ids=["before", "negative", "past", "number", "short", "nothing"],
)
def test_parts_that_are_none(view):
    with pytest.raises(FormatError):
        read_stream(stream(tensor(storage(4, view), 2)), "here")


def test_one_storage_of_two_lengths():
    both = b"(" + tensor(storage(4), 2) + tensor(storage(5), 2) + b"l"
    with pytest.raises(FormatError, match="two lengths"):
        read_stream(stream(both), "here")


def test_a_storage_of_another_length_than_its_tensors_say():
    with pytest.raises(CorruptionError, match="another length"):
        read_stream(stream(tensor(storage(4), 2), told=5), "here")


def test_storages_that_are_cut():
    whole = stream(tensor(storage(4), 4))
    with pytest.raises(CorruptionError, match="it was cut"):
        read_stream(Bytes(whole.data[:-1]), "here")


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        (("0",), FormatError),
        ([0], FormatError),
        (["0", "0"], CorruptionError),
        (["1"], CorruptionError),
    ],
    ids=repr,
)
def test_storages_that_are_listed_otherwise(keys, error):
    good, listed = stream(tensor(storage(4), 4)).data, pickle.dumps(["0"], 2)
    assert good.count(listed) == 1
    with pytest.raises(error, match="listed"):
        read_stream(Bytes(good.replace(listed, pickle.dumps(keys, 2))), "here")


# --- safetensors


def test_headers_that_lie(tmp_path):
    path = tmp_path / "x.safetensors"
    good, _, size = lay_out_entries([("a", "float32", (2,)), ("b", "int8", (3,))])
    whole = good.ljust(size, b"\0")
    path.write_bytes(whole)
    assert set(read_entries(path)[0]) == {"a", "b"}
    assert is_safetensors(path)
    for data, what in (
        (whole[:5], "that short"),
        (b"\xff" * 8 + whole[8:], "not a safetensors file"),
        (whole[:-1], "it is cut"),
        (whole + b"\0", "explains"),
        (whole.replace(b"[0,8]", b"[1,9]"), "was expected"),
        (whole.replace(b'"F32"', b'"F99"'), "not valid"),
    ):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=what):
            read_entries(path)
    path.write_bytes(b"{}")
    assert not is_safetensors(path)
    assert not is_safetensors(tmp_path / "nothing")


def test_elements_of_less_than_a_byte(tmp_path):
    path = tmp_path / "x.safetensors"
    good, _, size = lay_out_entries([("a", "float32", (2,))])
    path.write_bytes(good.replace(b'"F32"', b'"F4" ').ljust(size, b"\0"))
    with pytest.raises(FormatError, match="a"):
        read_entries(path)


def test_names_that_a_header_has_no_room_for(monkeypatch):
    with pytest.raises(UnsupportedValueError, match="__metadata__"):
        lay_out_entries([("__metadata__", "int8", (1,))])
    monkeypatch.setattr(safetensors_header, "MAX_HEADER", 200)
    assert lay_out_entries([("a", "int8", (1,))])
    with pytest.raises(UnsupportedValueError, match="header"):
        lay_out_entries([("a" * 200, "int8", (1,))])


def test_a_header_longer_than_any(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes((90).to_bytes(8, "little") + b"{}".ljust(90))
    with contextlib.closing(LocalStore(tmp_path).open("a")) as file:
        assert read_whole_header(file, "here")[0] == {}
        monkeypatch.setattr(headers, "MAX_HEADER", 89)
        with pytest.raises(FormatError, match="a header of 90 bytes"):
            read_whole_header(file, "here")


# --- what graphs are finished into


def test_keys_that_become_one():
    one, two = NumpyDType("float32"), NumpyDType("float32")
    assert Finishing("", "here").finished({one: 1}) == {"float32": 1}
    with pytest.raises(FormatError, match="two keys of a dict become one"):
        Finishing("", "here").finished({one: 1, two: 2})


def test_states_that_are_none(tmp_path):
    not_equal = {float("nan"): 1, float("nan"): 2}
    for state, what in (
        (5, "a single value, not a state"),
        ({"a": not_equal}, "a has a key twice"),
    ):
        with pytest.raises(FormatError, match=what):
            tables_of(Found("x", tmp_path, state))


def test_tensors_at_any_depth_of_sequences_have_names(tmp_path):
    stored = whole_tensor("int8", (1,), Raw("f", 0))
    (tmp_path / "f").write_bytes(b"1")
    tables = tables_of(Found("x", tmp_path, {"a": [[1, [stored]], 2]}))
    assert list(tables.structure.names) == ["a.0.0", "a.0.1.0", "a.1"]


def test_parts_of_other_dimensions(tmp_path):
    (tmp_path / "f").write_bytes(b"1234")
    for part in (Part((0,), (2, 2), Raw("f", 0)), Part((0, 0), (2, 0), Raw("f", 0))):
        stored = StoredTensor("int8", (2, 2), (part,))
        with pytest.raises(FormatError, match="a has a part"):
            tables_of(Found("x", tmp_path, {"a": stored}))


@pytest.mark.parametrize("count", [1000, 100_000])
def test_tensors_of_many_parts_are_covered_each_element_once(tmp_path, count):
    (tmp_path / "f").write_bytes(bytes(count))
    parts = tuple(Part((at,), (1,), Raw("f", at)) for at in range(count))
    begun = time.thread_time()
    tables_of(Found("x", tmp_path, {"a": StoredTensor("int8", (count,), parts)}))
    for wrong in (parts[:-1], (*parts[:-1], parts[0])):
        with pytest.raises(CorruptionError, match="parts of a, "):
            tables_of(Found("x", tmp_path, {"a": StoredTensor("int8", (count,), wrong)}))
    assert time.thread_time() - begun < 8  # and not 18


@pytest.mark.parametrize("name", ["half \ud800", "\udfff"])
def test_names_with_half_a_character(tmp_path, name):
    for leaf in (1, whole_tensor("int8", (1,), Raw("f", 0)), {"a": None}):
        with pytest.raises(FormatError, match="half a character"):
            tables_of(Found("x", tmp_path, {name: leaf}))


def test_empty_tensors_of_extents_that_cannot_be(tmp_path):
    assert tables_of(Found("x", tmp_path, {"a": StoredTensor("int8", (0, 1 << 60), ())}))
    for shape in ((0, 1 << 61, 1 << 61), (1 << 62, 0)):
        with pytest.raises(FormatError, match="a claims the shape"):
            tables_of(Found("x", tmp_path, {"a": StoredTensor("int8", shape, ())}))


@pytest.mark.parametrize("index", [-1, 128, 1 << 1000])
def test_devices_that_torch_could_not_make(index):
    assert str(TorchDevice("cuda", 127)) == "cuda:127"
    with pytest.raises(ValueError, match="a device of another number"):
        TorchDevice("cuda", index)


def test_tensors_whose_numbers_collide_are_told_apart_at_once():
    numbers = colliding_tuples(8000, ((0, at) for at in itertools.count()), low=0)
    assert len(set(map(hash, numbers))) == 1
    storage = Storage("float32", 16, 0)
    views = [TensorView(storage, "float32", 0, at, (0, 0, 0), False) for at in numbers]
    begun = time.thread_time()
    made = Finishing("file", "here").finished([*views, views[0]])
    assert time.thread_time() - begun < 3
    assert [tensor.shape for tensor in made] == [*numbers, numbers[0]]
    assert made[-1] is made[0]

    def lying(strides):
        part = Part((0, 0, 0), (1, 1, 1), Raw("file", 0, strides))
        return StoredTensor("float32", (1, 1, 1), (part,)).identity()

    assert len({hash(lying(at)) for at in numbers}) == len(numbers)
    assert lying(numbers[0]) == lying((*numbers[0],)) != lying(None)


def test_a_sequence_that_occurs_often_is_looked_through_once(tmp_path):
    often = [list(range(100_000))] * 300
    begun = time.thread_time()
    tables = tables_of(Found("ours", tmp_path, {"a": often, "b": [often, {"c": 1}]}))
    assert time.thread_time() - begun < 2
    assert tables.plain["a"] is often is tables.plain["b.0"]
