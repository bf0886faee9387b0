"""What torch's metadata and its safetensors may not say, each part of it alone."""

import json
import re
import time

import pytest

from shardkeep.errors import CorruptionError, FormatError, UnsafeCheckpointError
from shardkeep.foreign.dcp.classes import Bytes, Chunk, Index, Info, Tensor
from shardkeep.foreign.dcp.joining import Joined, spot
from shardkeep.foreign.dcp.safetensors_items import SafetensorsItems
from shardkeep.foreign.headers import Entry, check_packed, parse_header, read_whole_header
from shardkeep.foreign.nesting import nested
from shardkeep.foreign.regular_files import opened
from shardkeep.foreign.tables import check_inside
from shardkeep.foreign.torch_stand_ins import TorchSize
from shardkeep.stores.local import LocalStore

BEYOND = 1 << 62


def made(cls, **state):
    thing = cls()
    thing.build(state)
    return thing


@pytest.mark.parametrize("kind", [tuple, list, TorchSize])
def test_places_of_chunks(kind):
    chunk = made(Chunk, offsets=kind((0, 2)), sizes=kind((BEYOND - 1, 0)))
    assert (chunk.offsets, chunk.sizes) == ((0, 2), (BEYOND - 1, 0))
    for wrong in (kind((-1, 0)), kind((0, BEYOND)), kind((0,) * 33)):
        with pytest.raises(ValueError, match="odd sizes"):
            made(Chunk, offsets=wrong, sizes=kind((1, 1)))
    with pytest.raises(ValueError, match="do not match"):
        made(Chunk, offsets=kind((0,)), sizes=kind((1, 1)))


@pytest.mark.parametrize("wrong", [None, 5, "ab", {0: 1}, (1.0,), (True,), ("1",)])
def test_places_that_are_no_numbers(wrong):
    with pytest.raises(ValueError, match="odd sizes"):
        made(Chunk, offsets=wrong, sizes=wrong)


def test_an_index_has_a_name():
    assert made(Index, fqn="a", offset=None).offset is None
    assert made(Index, fqn="a" * 4096).fqn
    for wrong in (None, 5, b"a", "a" * 4097):
        with pytest.raises(ValueError, match="without a name"):
            made(Index, fqn=wrong, offset=None)


@pytest.mark.parametrize(
    ("field", "wrong", "what"),
    [
        ("relative_path", "", "in no file"),
        ("relative_path", None, "in no file"),
        ("relative_path", "a" * 4097, "in no file"),
        ("offset", 1.0, "at no offset"),
        ("length", None, "at no offset"),
        ("length", True, "at no offset"),
        ("offset", -1, "at no offset"),
        ("length", BEYOND, "at no offset"),
        ("transform_descriptors", "zstd", "odd transforms"),
        ("transform_descriptors", [1], "odd transforms"),
    ],
)
def test_where_an_item_lies(field, wrong, what):
    good = {"relative_path": "a", "offset": 0, "length": BEYOND - 1}
    assert made(Info, **good).length == BEYOND - 1
    with pytest.raises(ValueError, match=what):
        made(Info, **{**good, field: wrong})


# --- ranks that do not agree


def tensor(size, dtype="float32"):
    out = Tensor()
    out.size, out.properties.dtype = size, dtype
    out.chunks = [made(Chunk, offsets=(0,) * len(size), sizes=size)]
    return out


@pytest.mark.parametrize("other", [tensor((3,)), tensor((2,), "float64"), tensor((2, 1))])
def test_a_tensor_that_is_another_on_another_rank(other):
    joined = Joined("here")
    joined.add(0, "a", tensor((2,)), {})
    joined.add(1, "a", tensor((2,)), {})
    with pytest.raises(FormatError, match=r"a has shape .* on rank 2, and"):
        joined.add(2, "a", other, {})


def test_a_tensor_that_is_a_value_on_another_rank():
    joined = Joined("here")
    joined.add(0, "a", Bytes(), {spot("a", None): Info()})
    with pytest.raises(FormatError, match="a is a tensor and a value"):
        joined.add(1, "a", tensor((2,)), {})


def test_a_value_that_lies_nowhere():
    with pytest.raises(CorruptionError, match="nothing says where the value a is stored"):
        Joined("here").add(0, "a", Bytes(), {})


@pytest.mark.parametrize("rest", [(), ("x",)], ids=["items", "keys of items"])
def test_places_in_a_list_that_collide_are_not_looked_for(rest):
    paths = {str(at): ("a", at * (2**61 - 1), *rest) for at in range(20_000)}
    begun = time.thread_time()
    with pytest.raises(FormatError, match="1 is an item of a list of more than the 50000 that"):
        nested(dict.fromkeys(paths), paths, "here")
    assert time.thread_time() - begun < 1
    far = {"a": ("a", 10_002)}
    with pytest.raises(FormatError, match="a list of more than the 10002 that"):
        nested({"a": 1}, far, "here")
    with pytest.raises(FormatError, match="a list of 10004 items has 1 of them"):
        nested({"a": 1, "b": 2}, {"a": ("a", 10_003), "b": ("b",)}, "here")
    assert nested({"a": 1}, {"a": ("a", 10_001)}, "here")["a"][-1] == 1


def test_names_whose_nesting_is_not_told_or_told_twice():
    joined = Joined("here")
    joined.add_paths(None, "here")
    assert joined.paths is None
    joined.add_paths({"a.b": ("a", "b")}, "here")
    joined.add_paths({"a.b": ["a", "b"], "c": ("c",)}, "here")
    assert joined.paths == {"a.b": ("a", "b"), "c": ("c",)}
    for wrong, what in (
        ([], "in a form that is not known"),
        ({"a.b": ("a.b",)}, "has two paths"),
        ({"d": ()}, "no valid path"),
        ({"d": ("d",) * 65}, "no valid path"),
        ({"d": (None,)}, "no valid path"),
        ({5: ("d",)}, "no valid path"),
        ({"d": "d"}, "no valid path"),
    ):
        with pytest.raises(FormatError, match=what):
            joined.add_paths(wrong, "here")


def test_chunks_of_another_kind():
    joined, one = Joined("here"), tensor((2,))
    joined.add(0, "a", one, {spot("a", None): Info()})
    assert [info is not None for _, info in joined.chunks_of("a", one)] == [True]
    one.chunks.append("no chunk")
    with pytest.raises(FormatError, match="chunks of another kind"):
        list(joined.chunks_of("a", one))


# --- safetensors


def header(table, more=b""):
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text + more


@pytest.mark.parametrize("text", [b"[]", b"{", b"nonsense", b"\xff\xff", b"[" * 5000])
def test_bytes_that_are_no_header_of_safetensors(tmp_path, text):
    (tmp_path / "a").write_bytes(header(text))
    with opened(tmp_path, "a") as file, pytest.raises(FormatError, match="neither an archive"):
        SafetensorsItems(file, 0, "here")
    with pytest.raises(FormatError):
        read_whole_header(LocalStore(tmp_path).open("a"), "here")


def test_headers_longer_than_the_file(tmp_path):
    for length in (0, 1, 11, 1 << 62, 2**64 - 1):
        (tmp_path / "a").write_bytes(length.to_bytes(8, "little") + b"{}")
        with opened(tmp_path, "a") as file, pytest.raises(FormatError, match="neither"):
            SafetensorsItems(file, 0, "here")
        with pytest.raises(FormatError, match="is cut short"):
            read_whole_header(LocalStore(tmp_path).open("a"), "here")
    (tmp_path / "a").write_bytes(b"\x02")
    with pytest.raises(FormatError, match="is cut short"):
        read_whole_header(LocalStore(tmp_path).open("a"), "here")


def test_where_a_tensor_lies_in_safetensors(tmp_path):
    good = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    for entry, fine in (
        (good, True),
        ({**good, "dtype": "F64"}, False),
        ({**good, "shape": [3, 2]}, False),
        ({**good, "data_offsets": [0, 23]}, False),
        ({**good, "data_offsets": [-24, 0]}, False),
        ({**good, "data_offsets": [1, 25]}, False),
        ({**good, "data_offsets": [0.0, 24]}, False),
        ({**good, "data_offsets": [0]}, False),
        ({"dtype": "F32"}, False),
        ([], False),
        (None, False),
    ):
        (tmp_path / "a").write_bytes(header({"w": entry}, b"x" * 24))
        with opened(tmp_path, "a") as file:
            items = SafetensorsItems(file, 0, "here")
            if fine:
                assert items.start("w", "float32", (2, 3)) == file.size - 24
                continue
            with pytest.raises(CorruptionError, match="w") as caught:
                items.start("w", "float32", (2, 3))
            assert caught.value.names == ("w",)


@pytest.mark.parametrize(
    "row",
    [
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1] * 1000, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]},
        {"dtype": "F32", "shape": [1], "data_offsets": ["0", 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},  # past the end
        {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1]},
        [],
        None,
    ],
)
def test_entries_that_no_header_has(row):
    good = {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "__metadata__": {"k": "v"}}
    data = header(good)
    entries, metadata = parse_header(data, "here", len(data) + 4)
    assert (entries["a"].stop, metadata) == (len(data) + 4, {"k": "v"})
    data = header({"a": row})
    with pytest.raises(FormatError, match="here: the header is not valid"):
        parse_header(data, "here", len(data) + 4)
    data = header({**good, "__metadata__": {"k": 1}})
    with pytest.raises(FormatError, match="metadata is not text"):
        parse_header(data, "here", len(data) + 4)


@pytest.mark.parametrize("dtype", ["F33", "", None, ["F32"]])
def test_an_entry_of_an_unknown_dtype_is_named(dtype):
    data = header({"a": {"dtype": dtype, "shape": [1], "data_offsets": [0, 4]}})
    with pytest.raises(FormatError, match=f"entry 'a' has the dtype {re.escape(repr(dtype))}"):
        parse_header(data, "here", len(data) + 4)


def test_entries_cover_every_byte_once():
    def entries(*places):
        return {str(n): Entry("U8", (b - a,), a, b) for n, (a, b) in enumerate(places)}

    check_packed(entries((14, 20), (10, 14), (14, 14)), 10, 20, "here")
    for places, what in (
        (((10, 15), (14, 20)), "overlap"),
        (((10, 14), (15, 20)), "1 bytes after entry '0' belong to no entry"),
        (((11, 20),), "1 bytes after the header"),
        (((10, 19),), "1 bytes after entry '0'"),
        (((10, 21),), "overlap"),
        (((9, 20),), "overlap"),
    ):
        with pytest.raises(FormatError, match=what):
            check_packed(entries(*places), 10, 20, "here")


@pytest.mark.parametrize("name", ["/etc/passwd", "../a", "a/../../b", "a\0b", "..\\a"])
def test_files_outside_of_a_checkpoint(name):
    check_inside("a/b..c/.d", "here")
    with pytest.raises(UnsafeCheckpointError, match="outside of it"):
        check_inside(name, "here")


def test_a_file_whose_name_is_no_text():
    with pytest.raises(FormatError, match="which is no text"):
        check_inside("a\ud800", "here")
