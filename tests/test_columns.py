"""Columns say the same as the objects they stand for, and damaged messages are refused."""

from contextlib import suppress
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkeep.columns import Boxes, ChunkList, Strings, pack, ragged_rows, starts, unpack
from shardkeep.errors import FormatError
from shardkeep.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from shardkeep.tables import ChunkTable, LocationColumns, StateColumns, TensorTable, ValueTable

numbers = st.integers(0, 2**40)
up_to_4 = st.integers(0, 4)


@st.composite
def one_box(draw, ndims=up_to_4):
    ndim = draw(ndims)
    row = st.lists(numbers, min_size=ndim, max_size=ndim)
    return ChunkStorageMetadata(draw(row), draw(row))


box_lists = st.lists(one_box(), max_size=12)


def listed(boxes):
    return [boxes[row] for row in range(len(boxes))]


# --- Boxes ---


@given(st.lists(st.lists(numbers)))
def test_ragged_rows(rows):
    flat = [x for row in rows for x in row]
    start = starts(np.array([len(row) for row in rows], np.int64))
    assert start[-1] == len(flat)
    chosen = np.arange(len(rows))[::-1]
    at, new_start = ragged_rows(start, chosen)
    found = [[flat[i] for i in at[a:b]] for a, b in pairwise(new_start)]
    assert found == rows[::-1]


@given(box_lists)
def test_boxes_of_objects_and_back(boxes):
    columns = Boxes.of(boxes)
    assert len(columns) == len(boxes)
    assert listed(columns) == boxes
    assert list(columns) == boxes
    assert columns.ndim.tolist() == [len(b.sizes) for b in boxes]
    for box in columns:
        assert all(type(x) is int for x in box.offsets + box.sizes)


@given(box_lists, st.data())
def test_take_reorders_repeats_and_drops(boxes, data):
    index = st.integers(0, len(boxes) - 1) if boxes else st.nothing()
    rows = data.draw(st.lists(index, max_size=20)) if boxes else []
    taken = Boxes.of(boxes).take(np.array(rows, np.int64))
    assert listed(taken) == [boxes[row] for row in rows]


@given(st.lists(box_lists, max_size=4))
def test_join_is_concatenation(parts):
    joined = Boxes.join([Boxes.of(part) for part in parts])
    assert listed(joined) == [box for part in parts for box in part]


@given(box_lists)
def test_by_ndim_visits_every_box_once(boxes):
    columns = Boxes.of(boxes)
    seen = {}
    for ndim, rows, offsets, sizes in columns.by_ndim():
        assert offsets.shape == sizes.shape == (len(offsets), ndim)
        for row, o, s in zip(np.arange(len(boxes))[rows], offsets, sizes, strict=True):
            assert row not in seen
            seen[int(row)] = ChunkStorageMetadata(o, s)
    assert [seen[row] for row in range(len(boxes))] == boxes


@given(st.lists(one_box(ndims=st.integers(0, 1)), max_size=12))
def test_volumes(boxes):
    wanted = [b.sizes[0] if b.sizes else 1 for b in boxes]
    assert Boxes.of(boxes).volumes().tolist() == wanted


def test_volumes_multiply():
    boxes = [ChunkStorageMetadata((0, 0), (3, 4)), ChunkStorageMetadata((0, 0, 0), (2, 0, 5))]
    assert Boxes.of(boxes).volumes().tolist() == [12, 0]


def test_boxes_index_like_a_list():
    boxes = [ChunkStorageMetadata((1,), (2,)), ChunkStorageMetadata((3, 4), (5, 6))]
    columns = Boxes.of(boxes)
    assert columns[-1] == boxes[1]
    assert columns[-2] == boxes[0]
    for bad in (2, -3):
        with pytest.raises(IndexError):
            columns[bad]


# --- ChunkList ---


@st.composite
def chunk_lists(draw):
    ndim = draw(st.integers(0, 3))
    boxes = draw(st.lists(one_box(st.just(ndim)), max_size=5))
    form = (len(boxes), ndim)
    offsets = np.array([b.offsets for b in boxes], np.int64).reshape(form)
    sizes = np.array([b.sizes for b in boxes], np.int64).reshape(form)
    return boxes, ChunkList(offsets, sizes)


@given(chunk_lists(), chunk_lists())
def test_chunk_list_equals_any_sequence_of_its_boxes(one, other):
    boxes, chunks = one
    assert len(chunks) == len(boxes)
    assert list(chunks) == boxes
    assert chunks == boxes
    assert tuple(boxes) == chunks
    assert chunks == ChunkList(chunks.offsets.copy(), chunks.sizes.copy())
    assert chunks[1:] == boxes[1:]
    assert (chunks == other[1]) == (boxes == other[0])
    assert (chunks == other[0]) == (boxes == other[0])
    assert chunks != 3
    if boxes:
        assert chunks[-1] == boxes[-1]
        assert boxes[0] in chunks
        assert chunks != boxes[1:]
    with pytest.raises(IndexError):
        chunks[len(boxes)]


def test_chunk_list_stands_in_for_chunks():
    chunks = ChunkList(np.array([[0], [2]]), np.array([[2], [2]]))
    properties = TensorProperties("int8")
    objects = [ChunkStorageMetadata((0,), (2,)), ChunkStorageMetadata((2,), (2,))]
    assert TensorStorageMetadata(properties, (4,), chunks) == TensorStorageMetadata(
        properties, (4,), objects
    )
    with pytest.raises(TypeError):
        hash(chunks)


def test_chunk_list_shows_the_first_few():
    chunks = ChunkList(np.arange(5)[:, None], np.ones((5, 1), np.int64))
    assert repr(chunks).endswith(", ...] (5 chunks)")
    assert repr(chunks).count("ChunkStorageMetadata") == 3
    assert repr(chunks[:1]).endswith("sizes=(1,))] (1 chunks)")


# --- Strings ---


@given(st.lists(st.text(max_size=8), max_size=10))
def test_strings_round_trip(strings):
    columns = Strings.of(iter(strings))
    assert len(columns) == len(strings)
    assert columns.tolist() == strings
    assert list(columns) == strings
    assert columns[:] == strings
    assert columns[::-2] == strings[::-2]
    assert [columns[row] for row in range(-len(strings), 0)] == strings
    for bad in (len(strings), -len(strings) - 1):
        with pytest.raises(IndexError):
            columns[bad]


def test_strings_are_a_sequence():
    columns = Strings.of(["a", "ü", "", "層.0", "a"])
    assert "層.0" in columns
    assert columns.index("ü") == 1
    assert columns.count("a") == 2
    assert list(reversed(columns)) == ["a", "層.0", "", "ü", "a"]


# --- messages ---

KINDS = ["int64", "int32", "uint64", "uint8", "bool", "float64"]


@st.composite
def column(draw):
    if draw(st.booleans()):
        return draw(st.binary(max_size=20))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    array = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    return array.astype(draw(st.sampled_from(KINDS)))


messages = st.dictionaries(st.text(max_size=5), column(), max_size=5)


def same(a, b):
    if isinstance(a, bytes):
        return type(b) is bytes and a == b
    return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b)


@given(messages)
def test_messages_round_trip(columns):
    found = unpack(pack(columns))
    assert list(found) == list(columns)
    assert all(same(columns[name], found[name]) for name in columns)


def test_strided_arrays_and_other_buffers_are_packed():
    columns = {"t": np.arange(6).reshape(2, 3).T, "b": bytearray(b"abc"), "m": memoryview(b"de")}
    found = unpack(memoryview(pack(columns)))
    assert np.array_equal(found["t"], columns["t"])
    assert (found["b"], found["m"]) == (b"abc", b"de")


def test_arrays_are_views_on_an_8_byte_boundary():
    message = pack({"a": b"x", "b": np.arange(3)})
    found = unpack(message)["b"]
    assert not found.flags.owndata
    assert (
        found.__array_interface__["data"][0] % 8
        == np.frombuffer(message, np.uint8).__array_interface__["data"][0] % 8
    )


@given(messages, st.data())
def test_a_cut_message_is_refused_or_whole(columns, data):
    message = pack(columns)
    cut = data.draw(st.integers(0, len(message)))
    try:
        found = unpack(message[:cut])
    except FormatError:
        return
    # Only padding may be missing unnoticed.
    assert list(found) == list(columns)
    assert all(same(columns[name], found[name]) for name in columns)


@given(messages, st.data())
def test_a_damaged_message_is_refused_or_read(columns, data):
    message = bytearray(pack(columns))
    for _ in range(data.draw(st.integers(1, 3))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    with suppress(FormatError):
        unpack(bytes(message))


@given(
    st.dictionaries(
        st.text(max_size=2),
        st.tuples(
            st.sampled_from(
                ["bytes", "<i8", "|O", "|V0", "<U0", "{}", "(", "i8,i8", ",", "zzz", ""]
            )
            | st.text(max_size=3),
            st.lists(st.integers(-(2**63), 2**64 - 1) | st.integers(-2, 9), max_size=3),
            st.integers(-(2**63), 2**64 - 1) | st.integers(-40, 40),
        ),
        max_size=2,
    ),
    st.binary(max_size=40),
)
def test_a_hostile_directory_is_refused_or_read(head, rest):
    front = msgspec.msgpack.encode(head)
    front += b"\xc1" * (-len(front) % 8)
    message = len(front).to_bytes(8, "little") + front + rest
    try:
        found = unpack(message)
    except FormatError:
        return
    for name, (kind, shape, _) in head.items():
        if kind == "bytes":
            assert [len(found[name])] == shape
        else:
            assert list(found[name].shape) == shape


@given(st.binary(max_size=40))
def test_noise_is_refused(noise):
    with suppress(FormatError):
        assert unpack(noise) == {}


def test_the_error_says_what_is_damaged():
    with pytest.raises(FormatError, match="message between ranks is damaged"):
        unpack(pack({"a": np.arange(9), "b": b"abc"})[:-8])
    with pytest.raises(FormatError, match="message between ranks is damaged"):
        unpack(b"")


# --- where things lie


def located(chunked=True):
    """One tensor in two chunks, one in one, one without dimensions, and a value."""
    shapes = {"w": (4, 2), "v": (3,), "s": ()}
    boxes = [((0, 0), (2, 2)), ((2, 0), (2, 2)), ((0,), (3,)), ((), ())]
    made = [ChunkStorageMetadata(*box) for box in boxes]
    tensor = np.array([0, 0, 1, 2])
    start = np.array([0, 32, 64, 88])
    none = np.zeros(4, np.int64)
    chunks = ChunkTable(tensor, Boxes.of(made), none, none, none, start)
    begin = [0, 2, 3, 4]
    state = StateColumns(
        TensorTable.of(list(shapes), [TensorProperties("float64")] * 3, list(shapes.values())),
        ValueTable(["x"], none[:1], none[:1], none[:1]),
        lambda row: chunks.part(begin[row], begin[row + 1]),
        chunks if chunked else None,
    )
    return state, LocationColumns(state, ["data/0"], [(96, 10)])


@pytest.mark.parametrize(
    ("key", "place"),
    [
        (MetadataIndex("w", (0, 0)), (0, 32)),
        (MetadataIndex("w", (2, 0), 1), (32, 32)),
        (MetadataIndex("w", (2, 0), 0), (32, 32)),
        (MetadataIndex("w", (2, 0), 7), (32, 32)),
        (MetadataIndex("v"), (64, 24)),
        (MetadataIndex("v", ()), (64, 24)),
        (MetadataIndex("s"), (88, 8)),
        (MetadataIndex("s", ()), (88, 8)),
        (MetadataIndex("x"), (96, 10)),
    ],
)
def test_places_are_found_whatever_is_told_of_them(key, place):
    _, places = located()
    found = places[key]
    assert (found.offset, found.nbytes) == place
    assert len(places) == len(list(places)) == 5


@pytest.mark.parametrize(
    "key",
    [
        MetadataIndex("w"),
        MetadataIndex("w", ()),
        MetadataIndex("w", (1, 0)),
        MetadataIndex("w", (0,)),
        MetadataIndex("v", (1,)),
        MetadataIndex("x", (1,)),
        MetadataIndex("no"),
    ],
)
def test_places_that_are_none(key):
    with pytest.raises(KeyError):
        located()[1][key]


@pytest.mark.parametrize("chunked", [True, False])
def test_chunks_of_some_tensors(chunked):
    state, _ = located(chunked)
    state.prefetch([0])
    chunks, begin = state.chunks_among(np.array([0, 2]))
    assert begin.tolist() == [0, 2, 3]
    assert chunks.start.tolist() == [0, 32, 88]
