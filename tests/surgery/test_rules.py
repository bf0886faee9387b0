"""Surgery against numpy on whole arrays; and everything that can be wrong with it."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardkeep
from shardkeep.arrays import HostSink
from shardkeep.dtypes import lookup
from shardkeep.structure import Structure
from shardkeep.surgery.operation import Surgery
from shardkeep.surgery.patterns import Found, Pattern
from shardkeep.surgery.pieces import Composed
from shardkeep.surgery.placing import placed
from shardkeep.surgery.rules import Fuse, Split, Stack, Unstack, parse_rule
from shardkeep.surgery.view import View, Wanted


def stored(arrays):
    return {n: Composed.stored(n, a.dtype.name, a.shape) for n, a in arrays.items()}


def materialised(made, arrays):
    """A composed tensor, made of its pieces by numpy."""
    out = np.zeros(made.shape, made.dtype)
    seen = np.zeros(made.shape, np.int64)
    for piece in made.pieces:
        where = tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True))
        begin, extent = piece.stored_box(piece.offsets, piece.sizes)
        part = arrays[piece.source][
            tuple(slice(o, o + s) for o, s in zip(begin, extent, strict=True))
        ]
        out[where] = part.reshape(piece.sizes)
        seen[where] += 1
    assert (seen == 1).all()
    return out


@st.composite
def cut_tensors(draw):
    """A tensor, a dimension, and sizes that cut it in groups."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    groups = draw(st.integers(1, 3))
    sizes = [groups * n for n in draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))]
    shape[dim] = sum(sizes)
    array = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    return array, dim, groups, sizes


def grouped_parts(array, dim, groups, sizes):
    """What numpy makes of it."""
    per_group = np.split(array, groups, axis=dim)
    edges = np.cumsum([size // groups for size in sizes])[:-1]
    cut = [np.split(part, edges, axis=dim) for part in per_group]
    return [np.concatenate([part[at] for part in cut], axis=dim) for at in range(len(sizes))]


@given(cut_tensors())
def test_split_and_fuse_are_what_numpy_does(case):
    array, dim, groups, sizes = case
    names = [f"p{at}" for at in range(len(sizes))]
    split = Surgery(rules=[Split("x", names, sizes, dim, groups)])
    state = split.operate(stored({"x": array}), [])
    assert state.faults == []
    parts = grouped_parts(array, dim, groups, sizes)
    for name, part in zip(names, parts, strict=True):
        np.testing.assert_array_equal(materialised(state.tensors[name], {"x": array}), part)
    arrays = dict(zip(names, parts, strict=True))
    fused = Surgery(rules=[Fuse(names, "x", dim, groups)]).operate(stored(arrays), [])
    assert fused.faults == []
    np.testing.assert_array_equal(materialised(fused.tensors["x"], arrays), array)
    # There and back in one surgery: pieces of pieces.
    both = Surgery(rules=[Split("x", names, sizes, dim, groups), Fuse(names, "y", dim, groups)])
    again = both.operate(stored({"x": array}), [])
    np.testing.assert_array_equal(materialised(again.tensors["y"], {"x": array}), array)


@given(st.lists(st.integers(1, 3), max_size=3), st.integers(1, 5), st.integers(0, 3), st.booleans())
def test_stack_and_unstack_are_what_numpy_does(shape, count, dim, negative):
    dim = min(dim, len(shape))
    rng = np.random.default_rng(count)
    arrays = {f"e.{at}.w": rng.integers(0, 99, shape) for at in range(count)}
    given_dim = dim - len(shape) - 1 if negative else dim
    state = Surgery(rules=[Stack("e.#.w", "e.w", given_dim)]).operate(stored(arrays), [])
    assert state.faults == []
    wanted = np.stack(list(arrays.values()), axis=dim)
    np.testing.assert_array_equal(materialised(state.tensors["e.w"], arrays), wanted)
    back = Surgery(rules=[Unstack("e.w", "e.#.w", given_dim)])
    apart = back.operate(stored({"e.w": wanted}), [])
    for name, array in arrays.items():
        np.testing.assert_array_equal(materialised(apart.tensors[name], {"e.w": wanted}), array)


def test_what_has_many_pieces_is_taken_apart_quickly():
    """Each piece is looked at once, and not once for each index."""
    count = 20_000
    tensors = {f"e.{at}": Composed.stored(f"e.{at}", "int32", (2, 3)) for at in range(count)}
    rules = ["stack e.# = e @ 1", "unstack e = f.# @ 1"]
    begun = time.monotonic()
    state = Surgery(rules=rules).operate(tensors, [])
    assert time.monotonic() - begun < 20  # it was minutes
    assert state.faults == []
    assert state.tensors["f.7"] == tensors["e.7"]


@given(st.data())
def test_a_box_of_what_surgery_made_is_read_as_a_box(data):
    """Through `View`, with sinks of host memory and with others."""
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    arrays = {f"e.{at}": rng.integers(0, 999, (3, 6)).astype(np.int32) for at in range(4)}
    rules = [
        "stack e.# = e @ 1",
        "split e = a, b @ 2",
        "fuse b, a = c @ 2/3",
        "unstack c = d.# @ 0",
    ]
    surgery = Surgery(rules=rules[: data.draw(st.integers(0, 4))])
    state = surgery.operate(stored(arrays), [])
    assert state.faults == []
    name = data.draw(st.sampled_from(sorted(state.tensors)))
    made = state.tensors[name]
    low = [data.draw(st.integers(0, n - 1)) for n in made.shape]
    sizes = [data.draw(st.integers(1, n - o)) for n, o in zip(made.shape, low, strict=True)]
    out = np.zeros(sizes, np.uint32)
    sink = HostSink(out, lookup("int32"))

    class Other:
        def put(self, offsets, block, dtype):
            sink.put(offsets, block, dtype)

    def read(items, sinks):
        for row in range(len(items)):
            item = items[row]
            stored_array = arrays[item.storage_index.fqn]
            box = tuple(
                slice(o, o + s) for o, s in zip(item.storage_offsets, item.lengths, strict=True)
            )
            part = np.ascontiguousarray(stored_array[box]).view(np.uint32)
            sinks(item.dest_index.index).put(item.dest_offsets, part, lookup("int32"))

    kind = data.draw(st.sampled_from([sink, Other()]))
    columns = shardkeep_columns(arrays)
    View(state.tensors, columns, read).read([Wanted(name, tuple(low), tuple(sizes), kind)])
    whole = materialised(made, arrays)
    where = tuple(slice(o, o + s) for o, s in zip(low, sizes, strict=True))
    np.testing.assert_array_equal(out.view(np.int32), whole[where])


def shardkeep_columns(arrays):
    from shardkeep.columns import Boxes
    from shardkeep.metadata import ChunkStorageMetadata, TensorProperties
    from shardkeep.tables import ChunkTable, StateColumns, TensorTable, ValueTable

    names = list(arrays)
    table = TensorTable.of(
        names,
        [TensorProperties(a.dtype.name) for a in arrays.values()],
        [a.shape for a in arrays.values()],
    )
    none = np.zeros(len(names), np.int64)
    boxes = [ChunkStorageMetadata((0,) * a.ndim, a.shape) for a in arrays.values()]
    chunks = ChunkTable(np.arange(len(names)), Boxes.of(boxes), none, none, none, none)
    empty = ValueTable([], none[:0], none[:0])
    return StateColumns(table, empty, lambda row: chunks.part(row, row + 1), chunks)


X = np.zeros((4, 6), np.float32)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"select": ["no.*"]}, "select no.*: no name matches"),
        ({"exclude": ["no.*"]}, "exclude no.*: no name matches"),
        ({"exclude": ["*"]}, "select and exclude leave nothing"),
        ({"rename": ["no=yes"]}, "rename no=yes: no name matches"),
        ({"rename": ["^[ab]$=z"]}, "a and b would have one name, z"),
        ({"rename": ["^a$="]}, "a would have no name"),
        ({"mapping": {"no": "yes"}}, "mapping: there is no no"),
        ({"mapping": {"a": "b"}}, "a and b would have one name, b"),
        ({"rules": ["fuse no, nor = x @ 0"]}, "no tensor matches"),
        ({"rules": ["fuse a, no = x @ 0"]}, "a is there, and no is not"),
        ({"rules": ["fuse a, b = step @ 0"]}, "there is a step already"),
        ({"rules": ["fuse a, half = x @ 0"]}, "a is float32 and half is float16"),
        ({"rules": ["fuse a, c = x @ 1"]}, "a has shape (4, 6) and c (8, 6)"),
        ({"rules": ["fuse a, b = x @ 2"]}, "a has shape (4, 6), and no dimension 2"),
        ({"rules": ["fuse a, b = x @ 0/3"]}, "do not go into 3 groups"),
        ({"rules": ["split a = x:1, y:2 @ 0"]}, "a has 4 indices in dimension 0, not 1+2"),
        ({"rules": ["split c = x, y, z @ 0"]}, "not 3 equal parts"),
        ({"rules": ["stack e.# = x @ 0"]}, "e.1 is missing, and e.2 is there"),
        ({"rules": ["stack far.# = x @ 0"]}, "far.1 is missing, and far.300000000 is there"),
        ({"rules": ["unstack void = x.# @ 0"]}, "void has no indices in dimension 0"),
        ({"rules": ["unstack many = x.# @ 0"]}, "in dimension 0; there can be up to 1,000,000"),
        ({"mapping": {"a": "\ud800"}}, r"'\ud800', which is not valid Unicode"),
        ({"rename": ["^step$=\ud800"]}, r"'\ud800', which is not valid Unicode"),
        ({"rules": ["fuse a, b = \ud800 @ 0"]}, r"'\ud800', which is not valid Unicode"),
        ({"rules": ["unstack a = b.# @ 7"]}, "a has shape (4, 6), and no dimension 7"),
        ({"rules": ["split a = x, y @ 2"]}, "a has shape (4, 6), and no dimension 2"),
        ({"rules": ["stack s.# = x @ 3"]}, "s.0 has shape (4, 6); there is no such dimension"),
        ({"rules": ["stack u.# = x @ 0"]}, "u.0 has shape (4, 6) and u.1 (8, 6)"),
        ({"rules": ["fuse *, *a = *x @ 0"]}, "aa would be used 2 times"),
        ({"rules": ["unstack *1 = *2.# @ 0", "fuse a, b = c @ 0"]}, "there is a c already"),
        ({"cast": ["f64=f32"]}, "cast float64=float32: no tensor of that type matches"),
        ({"cast": ["f32=i32"]}, "there is no cast between these types"),
        ({"cast": ["no.*:f32=bf16"]}, "no tensor of that type matches"),
    ],
)
def test_what_is_wrong_is_said(asked, said):
    arrays = {"a": X, "b": X, "c": np.zeros((8, 6), np.float32), "half": X.astype(np.float16)}
    arrays |= {"e.0": X, "e.2": X, "s.0": X, "u.0": X, "u.1": np.zeros((8, 6), np.float32)}
    arrays |= {"aa": X, "aaa": X, "far.0": X, "far.300000000": X}
    arrays |= {"void": X[:0], "many": np.zeros((1000001, 0), np.float32)}
    state = Surgery(**asked).operate(stored(arrays), ["step"])
    assert any(said in fault for fault in state.faults), state.faults
    with pytest.raises(shardkeep.PlanError, match="cannot be done as asked"):
        state.check()


def test_everything_that_is_wrong_is_said_at_once():
    asked = Surgery(
        select=["no1", "*"], rename=["no2="], rules=["fuse no3, no4 = x"], cast=["f64=f32"]
    )
    state = asked.operate(stored({"a": X}), [])
    assert len(state.faults) == 4
    with pytest.raises(shardkeep.PlanError) as caught:
        state.check()
    assert all(f"no{at}" in str(caught.value) for at in (1, 2, 3, 4))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fuse",
        "melt a = b",
        "fuse a, b c",
        "fuse a, b = c, d",
        "fuse *.a, b = *.c",
        "fuse a, a = c",
        "fuse a, b = ",
        "fuse a, b = c @ x",
        "fuse a, b = c @ 0/0",
        "fuse a.#, b = c",
        "split a = b:1, c",
        "stack a.# = b.#",
        "stack a = b",
        "stack a.# = b @ 0/2",
        "unstack a = b",
    ],
)
def test_rules_that_cannot_be_read(text):
    with pytest.raises(ValueError, match=r".+"):
        parse_rule(text)


@pytest.mark.parametrize(
    ("sizes", "what"), [((1,), "2 names, and sizes for 1"), ((3, -1), "a size is negative")]
)
def test_sizes_that_make_no_sense(sizes, what):
    with pytest.raises(ValueError, match=what):
        Split("x", ("a", "b"), sizes)


def test_options_may_be_objects_or_pairs():
    """As they are written, or as they are read: both are the same."""
    arrays = {"a": X}
    text = Surgery(rename=["^a=b"], cast=["f32=bf16"])
    for rename, cast in ((("^a", "b"), ("f32", "bf16")), (text.rename[0], text.cast[0])):
        made = Surgery(rename=[rename], cast=[cast])
        assert (made.rename, made.cast) == (text.rename, text.cast)
        assert made.operate(stored(arrays), []).tensors["b"].dtype == "bfloat16"


@pytest.mark.parametrize(
    "text",
    [
        "fuse *.q, *.k, *.v = *.qkv @ -1",
        "fuse a, b = c @ 0/8",
        "split *.qkv = *.q:4, *.k:2, *.v:2 @ 0/2",
        "stack *.experts.#.w = *.experts.w @ 0",
        "unstack w = w.# @ 1",
    ],
)
def test_rules_are_written_as_they_are_read(text):
    assert str(parse_rule(text)) == text


@pytest.mark.parametrize(
    "asked",
    [
        {"rename": ["x"]},
        {"rename": ["(=x"]},
        {"rename": [r"x=\2"]},
        {"cast": ["f32"]},
        {"cast": ["f32=nothing"]},
        {"cast": [("f32", "nothing")]},
        {"rename": [("(", "x")]},
    ],
)
def test_options_that_cannot_be_read(asked):
    with pytest.raises(ValueError, match=r".+"):
        Surgery(**asked)


def test_an_expression_may_look_ahead():
    state = Surgery(rename=[r"a(?=\.w)=b"]).operate(stored({"a.w": X, "a.b": X}), [])
    assert list(state.tensors) == ["b.w", "a.b"]


@given(st.lists(st.text("ab.*#0", max_size=4), min_size=1, max_size=3), st.text("ab.", max_size=4))
def test_a_pattern_fills_what_it_matches(parts, text):
    pattern = Pattern("*".join(part.replace("#", "").replace("*", "") for part in parts))
    name = pattern.fill(Found((text,) * pattern.stars))
    found = pattern.match(name)
    assert found is not None
    assert pattern.fill(found) == name


def test_a_number_that_python_would_not_read_is_no_number():
    assert Pattern("e.#.w").match(f"e.{'9' * 5000}.w") is None
    assert Pattern("e.#.w").match("e.123456789012345678.w").number == 123456789012345678


def nest(state):
    """A structure of nested dicts and lists; leaves are 0 or 1, their kinds."""
    if isinstance(state, dict):
        return ["dict", list(state), [nest(child) for child in state.values()], None]
    if isinstance(state, list):
        return ["list", None, [nest(child) for child in state], None]
    return state


@pytest.mark.parametrize(
    ("state", "names", "wanted"),
    [
        ({"m": {"a": 0, "b": 0}}, ["m.b", "m.a"], {"m": {"a": 0, "b": 0}}),
        ({"m": {"a": 0, "b": 0}}, ["m.a", "m.c.d"], {"m": {"a": 0, "c.d": 0}}),
        ({"m": {"a": 0}, "n": 0}, ["a", "n"], {"n": 0, "a": 0}),
        ({"m": {"a": 0, "l": {"x": 0}}}, ["m.l.y"], {"m": {"l": {"y": 0}}}),
        ({"m": [0, 0, 0]}, ["m.0", "m.2"], {"m": {0: 0, 2: 0}}),
        ({"m": [0, 0], "e": {}}, ["m.0", "m.1"], {"m": [0, 0], "e": {}}),
        ({"m": {"a": 0}}, ["m"], {"m": 0}),
        ({"m": {"a": 0}}, [".x", "m."], {".x": 0, "m.": 0}),
        ([0, 0], ["1", "x"], {1: 0, "x": 0}),
        ([0, 0], ["0", "1", "x"], {0: 0, 1: 0, "x": 0}),
        ([0, [0, 0]], ["0", "1.1", "1.x"], {0: 0, 1: {1: 0}, "1.x": 0}),
    ],
)
def test_names_have_their_places(state, names, wanted):
    made, faults = placed(Structure(nest(state)), dict.fromkeys(names, 0))
    assert faults == []
    assert made.root == nest(wanted)
    assert sorted(made.names) == sorted(names)


def test_a_container_keeps_its_name():
    _, faults = placed(Structure(nest({"m": {"a": 0}, "b": 0})), {"m.a": 0, "m": 0})
    assert faults == ["m is the name of a container that is not empty"]


def test_a_state_that_is_a_single_leaf():
    one = Structure(0)
    (name,) = one.names
    assert placed(one, {name: 0}) == (one, [])
    made, faults = placed(one, {"a.b": 0})
    assert (made.root, faults) == (nest({"a.b": 0}), [])


def test_names_that_their_places_would_not_have():
    """Where two paths would be written alike, a name stays what it was."""
    made, faults = placed(Structure(nest({"a": {"b": 0}, "c": 0})), {"a.b": 0, "a[b]": 0})
    assert faults == []
    assert sorted(made.names) == ["a.b", "a[b]"]


@pytest.mark.parametrize(
    ("state", "left", "said"),
    [
        ({"m": {"w": 0}, "m.w": 0}, '["m.w"]', '["m.w"] would be called m.w now; rename it, too'),
        ({"o": {0: 0, "0": 0}}, "o[0]", "o[0] would be called o.0 now; rename it, too"),
    ],
)
def test_a_name_that_was_given_because_of_another_goes_with_it(state, left, said):
    whole = Structure(nest(state))
    assert left in whole.names
    assert placed(whole, {left: 0})[1] == [said]
    made, faults = placed(whole, {"z": 0})
    assert (made.root, faults) == (nest({"z": 0}), [])


NAMES = st.sampled_from(["a", "b", "a.b", "a.c", "x.y", "0", "1", "[0]", "a.b.c", "q", ".", "a."])
STATES = st.recursive(
    st.just(0),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.dictionaries(NAMES | st.integers(0, 2), inner, min_size=1, max_size=3)
    ),
    max_leaves=6,
)


@given(STATES, st.data())
def test_names_follow_from_what_is_left_or_that_is_a_fault(state, data):
    whole = Structure(nest(state))
    kept = data.draw(st.sets(st.sampled_from(whole.names), min_size=1))
    names = {data.draw(st.just(name) | NAMES): 0 for name in whole.names if name in kept}
    made, faults = placed(whole, names)
    if not faults:
        assert Structure(made.root).names == made.names
        assert sorted(made.names) == sorted(names)


@pytest.mark.parametrize(
    ("state", "asked", "left"),
    [
        ([1, 2, 3], {"rename": ["^0$=x"]}, {1: 2, 2: 3, "x": 1}),
        ((1, 2, 3), {"rename": ["^1$=x"]}, {0: 1, 2: 3, "x": 2}),
        ([1, 2], {"exclude": ["0"]}, {1: 2}),
    ],
)
@pytest.mark.parametrize("to", ["native", "torch-save"])
def test_what_is_left_of_a_list_is_under_its_numbers(tmp_path, state, asked, left, to):
    source = type(state)(np.full(2, value, np.float32) for value in state)
    shardkeep.save({"at": source}, tmp_path / "below")
    shardkeep.convert(tmp_path / "below", tmp_path / "all.pt", to="torch-save")
    torch.save(torch.load(tmp_path / "all.pt")["at"], tmp_path / "root.pt")
    shardkeep.convert(tmp_path / "root.pt", tmp_path / "made", to=to, **asked)
    with shardkeep.open(tmp_path / "made") as made:
        found = made.state_dict()
    assert {key: float(value[0]) for key, value in found.items()} == left


def test_a_state_whose_names_no_reader_would_find_is_not_written(tmp_path):
    one, two = np.zeros(2, np.float32), np.ones(3, np.float32)
    shardkeep.save({"model": {"w": one}, "model.w": two}, tmp_path / "both")
    with pytest.raises(shardkeep.PlanError, match="rename it, too"):
        shardkeep.convert(tmp_path / "both", tmp_path / "made", exclude=["model.w"])
    assert not (tmp_path / "made").exists()
    renamed = {"model.w": "v", '["model.w"]': "w"}
    shardkeep.convert(tmp_path / "both", tmp_path / "made", mapping=renamed)
    with shardkeep.open(tmp_path / "made") as made:
        assert (made["v"].shape, made["w"].shape) == ((2,), (3,))
