"""The nesting of an index: not looked into where a target has the same, and checked where it is."""

import tracemalloc

import msgspec
import numpy as np
import pytest

from shardkeep import FormatError, UnsupportedValueError
from shardkeep.formats.native.nesting import StoredStructure
from shardkeep.structure import TENSOR, VALUE, Structure, dotted
from shardkeep.tree import flatten

STATE = {"m": {"w": np.zeros(2), "b": np.zeros(1)}, "step": 3}


def stored(rows=(1, 0, 0), tensors=("m.b", "m.w"), data=None):
    data = flatten(STATE).structure.encode() if data is None else data
    names = {TENSOR: list(tensors), VALUE: ["step"]}
    return StoredStructure(data, np.array(rows), names, "index")


def test_a_target_of_the_same_nesting_is_taken_for_it(monkeypatch):
    found = stored()
    monkeypatch.setattr(Structure, "decode", lambda data: pytest.fail("looked inside"))
    target = flatten(STATE).structure
    assert found.same(target)
    assert found.names == ["m.w", "m.b", "step"]
    assert found.root == target.root
    assert found.kinds == [TENSOR, TENSOR, VALUE]


@pytest.mark.parametrize(
    "other",
    [
        {"m": {"b": np.zeros(1), "w": np.zeros(2)}, "step": 3},
        {"m": {"w": np.zeros(2), "b": 1.0}, "step": 3},
        {"m": {"w": np.zeros(2)}, "step": 3},
        {"m": [np.zeros(2), np.zeros(1)], "step": 3},
    ],
)
def test_another_nesting_is_not(other):
    found = stored()
    assert not found.same(flatten(other).structure)
    assert found.names == ["m.w", "m.b", "step"]


def test_keys_that_python_calls_equal_are_told_apart():
    one, true = ({key: np.zeros(1)} for key in (1, True))
    found = StoredStructure(
        flatten(one).structure.encode(), np.array([0]), {TENSOR: ["1"], VALUE: []}, "index"
    )
    assert not found.same(flatten(true).structure)
    assert found.same(flatten(one).structure)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": (0, 1, 0)},
        {"rows": (1, 1, 0)},
        {"rows": (1, 0)},
        {"rows": (1, 0, 7)},
        {"tensors": ("m.b", "m.x")},
        {"data": b"\x93\x00"},
    ],
)
@pytest.mark.parametrize("by", ["target", "looking"])
def test_what_does_not_fit_is_an_error_either_way(wrong, by):
    found = stored(**wrong)
    with pytest.raises(FormatError):
        found.same(flatten(STATE).structure) if by == "target" else found.look()


@pytest.mark.parametrize(
    ("what", "found"),
    [("kinds", [TENSOR, TENSOR, VALUE]), ("names", ["m.w", "m.b", "step"]), ("root", None)],
)
def test_whatever_is_asked_for_first_is_looked_for(what, found):
    assert getattr(stored(), what) == (found or flatten(STATE).structure.root)


def test_names_of_other_keys_are_those_of_the_tables():
    """A version that names such keys otherwise wrote them."""
    state = {(1, 2): np.zeros(2), (3, 4): np.zeros(1)}
    data, names = flatten(state).structure.encode(), {TENSOR: ["x", "y"], VALUE: []}
    assert StoredStructure(data, np.array([1, 0]), names, "index").names == ["y", "x"]
    for rows in ([0, 0], [1, 1], [0, 2], [0, -1], [0], [0, 1, 1]):
        with pytest.raises(FormatError):
            StoredStructure(data, np.array(rows), names, "index").look()


def refused_in_little_memory(error, call):
    tracemalloc.start()
    try:
        with pytest.raises(error):
            call()
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("depth", [1, 40])
def test_a_key_too_long_above_many_leaves(depth):
    """Each would have a name, or each nest a beginning, of ten million letters."""
    node = ["list", None, [TENSOR] * 40, None]
    for _ in range(depth - 1):
        node = ["list", None, [node], None]
    data = msgspec.msgpack.encode(["dict", ["x" * 10_000_000], [node], None])
    refused_in_little_memory(UnsupportedValueError, lambda: Structure.decode(data).names)


def test_a_key_too_long_above_nothing_is_no_name():
    node = ["dict", ["x" * 5000, "y"], [["dict", [], [], None], TENSOR], None]
    assert Structure.decode(msgspec.msgpack.encode(node)).names == ["y"]


def test_a_long_key_above_more_leaves_than_names_have_letters():
    count = 100_000
    leaves = ["list", None, [TENSOR] * count, None]
    data = msgspec.msgpack.encode(["dict", ["x" * 4000], [leaves], None])
    names = {TENSOR: [str(row) for row in range(count)], VALUE: []}
    found = StoredStructure(data, np.arange(count), names, "index")
    refused_in_little_memory(FormatError, lambda: found.names)


@pytest.mark.parametrize(
    "state",
    [
        {"a": {"b": 1, "c": [2, (3, 4)]}, "d": np.zeros(1), "e": {}},
        {1: {"x": 1}, None: 2, 2.5: {"y": [5]}},
        {"a.b": 1, "a": {"b": 2}},
        [7, [8]],
        5,
    ],
)
def test_letters_are_those_of_torchs_names(state):
    found = flatten(state).structure
    assert found.letters == sum(len(dotted(path)) for path in found.paths)
    assert found.letters <= sum(map(len, found.names))
