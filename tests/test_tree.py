"""Taking states apart and putting them together: names, ties, Statefuls, PerRank."""

from __future__ import annotations

from collections import Counter, OrderedDict, namedtuple
from enum import Enum

import numpy as np
import pytest

import shardkeep
from shardkeep import PerRank, PlanError, UnsupportedValueError
from shardkeep.structure import Structure, bracketed, dotted, merge, unique_names
from shardkeep.tree import fill, flatten

Point = namedtuple("Point", "x y")


def names_of(state):
    return flatten(state).structure.names


def test_torch_names():
    state = {"model": {"w": np.zeros(1), 7: {"8": 1}}, "opt": [np.zeros(1), {"lr": 0.1}]}
    assert names_of(state) == ["model.w", "model.7.8", "opt.0", "opt.1.lr"]


def test_clashing_names_are_bracketed_and_distinct():
    state = {7: {"8": 1, 8: 2}, "a.b": 3, "a": {"b": 4}}
    assert names_of(state) == ["[7].8", "[7][8]", '["a.b"]', "a.b"]


def test_a_bracketed_name_may_clash_again():
    state = {"a": {8: 1, "8": 2}, "a[8]": 3}
    names = names_of(state)
    assert len(set(names)) == 3
    assert names == ["a[8]", "a.8", '["a[8]"]']


def test_unique_names_refuses_one_path_twice():
    with pytest.raises(PlanError, match="one path"):
        unique_names([("a",), ("a",)])


def test_dotted_and_bracketed():
    assert dotted(("a", 1, "b")) == "a.1.b"
    assert bracketed(("a", 1, (1, 2), "x y", "")) == 'a[1][tuple (1, 2)].x y[""]'


def test_sequences_split_only_around_what_is_not_plain():
    state = {"plain": [1, [2, (3,)]], "split": [1, {"x": 2}], "tuple": (np.zeros(2), 5)}
    assert names_of(state) == ["plain", "split.0", "split.1.x", "tuple.0", "tuple.1"]


def test_counters_are_values():
    assert names_of({"milestones": Counter({3: 1})}) == ["milestones"]


def test_empty_containers_are_kept():
    state = {"a": {}, "b": [], "c": (), "d": OrderedDict(), "e": {"f": {}}}
    flat = flatten(state)
    assert flat.structure.names == ["b", "c"]
    built = Structure.decode(flat.structure.encode()).build(lambda i: flat.values[i])
    assert built == state
    assert type(built["d"]) is OrderedDict


def test_build_gives_the_same_nesting():
    state = {"t": (1, np.zeros(1)), "l": [{"a": 1}], "o": OrderedDict(z=1, a=2), 3: {None: 4}}
    flat = flatten(state)
    built = Structure.decode(flat.structure.encode()).build(lambda i: flat.values[i])
    assert repr(built) == repr(state)
    assert list(built["o"]) == ["z", "a"]


def test_cycles_are_refused():
    state = {}
    state["self"] = state
    with pytest.raises(UnsupportedValueError, match="deeper"):
        flatten(state)


def test_lone_surrogates_are_refused():
    with pytest.raises(UnsupportedValueError, match="Unicode"):
        flatten({"a\ud800": 1})


def test_long_names_are_refused():
    with pytest.raises(UnsupportedValueError, match="4096"):
        flatten({"x" * 5000: 1}).structure.names  # noqa: B018


class Module:
    def __init__(self, order, name, **state):
        self.order, self.name, self.state = order, name, state

    def state_dict(self):
        self.order.append(self.name)
        return self.state

    def load_state_dict(self, state):
        self.order.append(self.name)
        self.loaded = dict(state)


def test_statefuls_are_asked_in_the_order_of_their_names():
    order = []
    inner = Module(order, "inner", w=1)
    state = {
        "z": Module(order, "z", a=1),
        "a": [Module(order, "a.0", sub=inner)],
        "m": {"k": inner},
    }
    flat = flatten(state)
    assert order == ["a.0", "inner", "z"]
    assert flat.structure.names == ["z.a", "a.0.sub.w", "m.k.w"]


def test_statefuls_get_their_state_back():
    order = []
    module = Module(order, "m", w=np.zeros(2), step=1)
    state = {"m": module}
    flat = flatten(state)
    results = list(flat.values)
    results[1] = 7
    assert fill(state, flat, results) is state
    assert module.loaded["step"] == 7


def test_fill_changes_mutables_and_rebuilds_the_rest():
    array = np.zeros(2)
    state = {"t": (1, {"a": array}), "l": [{"x": 1}], "n": Point({"k": 1}, 2)}
    inner_list = state["l"]
    flat = flatten(state)
    out = fill(state, flat, [10, array, 20, 30, 40])
    assert out is state
    assert state["t"] == (10, {"a": array})
    assert state["l"] is inner_list
    assert inner_list == [{"x": 20}]
    assert state["n"] == Point({"k": 30}, 40)
    assert type(state["n"]) is Point


def test_per_rank_is_a_container_by_rank():
    flat = flatten({"rng": PerRank({"seed": 5})}, rank=2, world_size=4)
    assert flat.structure.names == ["rng.2.seed"]


def test_merge_is_the_union_in_the_order_of_the_first():
    a = flatten({"x": 1, "z": {"q": 2}}).structure
    b = flatten({"y": 1, "x": 1, "z": {"p": 2}}).structure
    union, maps = merge([a, b])
    assert union.names == ["x", "z.q", "z.p", "y"]
    assert maps == [[0, 1], [3, 0, 2]]


def test_merge_refuses_equal_keys_of_different_types():
    with pytest.raises(PlanError, match="one dict cannot hold both"):
        merge([flatten({1: "int"}).structure, flatten({True: "bool"}).structure])


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        ({"x": 1}, {"x": {"y": 1}}, "a plain value on rank 0 and a dict on rank 1"),
        ({"x": 1}, {"x": np.zeros(1)}, "a plain value on rank 0 and an array on rank 1"),
        ({"x": [np.zeros(1)]}, {"x": [np.zeros(1)] * 2}, "1 entries on rank 0 and 2 on rank 1"),
        ({"x": {"a": 1}}, {"x": OrderedDict(a=1)}, "a dict on rank 0 and a ordered_dict"),
    ],
)
def test_merge_refuses_what_cannot_be_one_state(a, b, text):
    with pytest.raises(PlanError, match=text):
        merge([flatten(a).structure, flatten(b).structure])


def test_wide_unions_keep_names_unique_on_every_rank(tmp_path):
    """A clash that only the union sees renames leaves; loading by path still finds them."""

    def state(rank):
        return {"a": {8: rank}} if rank == 0 else {"a": {"8": rank}}

    shardkeep.ThreadRanks(2).run(lambda c: shardkeep.save(state(c.rank), tmp_path, process_group=c))
    assert sorted(shardkeep.open(tmp_path)) == ["a.8", "a[8]"]
    for rank in (0, 1):
        target = {"a": {8: None}} if rank == 0 else {"a": {"8": None}}
        shardkeep.load(target, tmp_path, strict=False)
        assert list(target["a"].values()) == [rank]


def test_a_clash_in_the_target_alone_loads_nothing_into_the_wrong_leaf(tmp_path):
    shardkeep.save({"a": {8: "int"}}, tmp_path)
    target = {"a": {8: None, "8": None}}
    result = shardkeep.load(target, tmp_path, strict=False)
    assert target["a"] == {8: "int", "8": None}
    assert result.missing == ("a['8']",)


def test_names_are_the_same_in_every_process(tmp_path):
    """Sets print in the order of their hashes, which differ from process to process."""
    import subprocess
    import sys

    code = f"""
import sys, numpy as np, shardkeep
state = {{frozenset("abcdef"): 1, np.float32(1.5): 2, ("x", 1): np.ones(2)}}
if sys.argv[1] == "save":
    shardkeep.save(state, {str(tmp_path / "c")!r})
else:
    target = dict.fromkeys(state, None) | {{("x", 1): np.zeros(2)}}
    shardkeep.load(target, {str(tmp_path / "c")!r})
    assert list(target.values())[:2] == [1, 2] and target["x", 1][1] == 1
    assert shardkeep.open({str(tmp_path / "c")!r}).state_dict().keys() == state.keys()
    assert shardkeep.verify({str(tmp_path / "c")!r}).ok
"""
    for seed, what in [("1", "save"), ("2", "load"), ("3", "load")]:
        env = {"PYTHONHASHSEED": seed, "PATH": ""}
        subprocess.run([sys.executable, "-c", code, what], check=True, env=env)


def test_statefuls_are_asked_also_where_the_state_cannot_be_stored():
    """Another rank may wait in the same `state_dict()`, whatever is wrong with this one's keys."""
    asked = []

    class Collective:
        def state_dict(self):
            asked.append(self)
            return {"w": np.zeros(1)}

        def load_state_dict(self, state):
            pass

    with pytest.raises(UnsupportedValueError, match="Unicode"):
        flatten({"\ud800": 1, "z": Collective()})
    assert len(asked) == 1


@pytest.mark.parametrize(
    "state",
    [
        {"a": {"b": np.zeros(2), "c": 1}, "d": [np.zeros(1), {}], "e": Point(np.zeros(1), 2)},
        {1: np.zeros(1), "x": {None: 2, 2.5: np.zeros(1)}},
        {"rank": PerRank({"seed": 1, "w": np.zeros(1)}), "empty": {}},
        OrderedDict(a=OrderedDict(), b=np.zeros(1)),
        np.zeros(1),
    ],
)
def test_what_a_walk_learns_on_its_way_is_what_the_structure_says(state):
    found = flatten(state, rank=1, world_size=2).structure
    again = Structure(found.root)
    assert found.kinds == again.kinds
    assert found.key_types == again.key_types
    assert found.names == again.names


class Kind(Enum):
    ONE = "one"


def test_keys_that_would_be_stored_alike():
    with pytest.raises(UnsupportedValueError, match="two keys are stored as 'one'"):
        flatten({"a": {Kind.ONE: 1, "one": 2}})


def test_a_stateful_that_gives_no_mapping():
    class Odd:
        def state_dict(self):
            return [1]

        def load_state_dict(self, state_dict):
            pass

    with pytest.raises(UnsupportedValueError, match="gave a list, expected a mapping"):
        flatten({"a": Odd()})


def test_counts_in_a_list_are_values():
    flat = flatten({"a": [Counter(x=1), 2]})
    assert list(flat.structure.names) == ["a"]
    assert flat.values == [[Counter(x=1), 2]]
