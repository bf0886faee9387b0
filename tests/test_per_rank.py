"""What each rank keeps, on the number of ranks that saved it and on any other."""

from __future__ import annotations

import shutil
import tempfile
from collections import OrderedDict, namedtuple
from enum import Enum
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardkeep
from shardkeep import CorruptionError, MismatchError, PerRank, ThreadRanks, resizing, values
from shardkeep.placing import Placing, untold

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


def save(world, make, path, **options):
    """`make(rank)` on each rank."""
    return ThreadRanks(world).run(
        lambda c: shardkeep.save(make(c.rank), path, process_group=c, **options)
    )


def load(targets, path, **options):
    """One target for each rank."""
    return ThreadRanks(len(targets)).run(
        lambda c: shardkeep.load(targets[c.rank], path, process_group=c, **options)
    )


def fail(targets, path, **options):
    """The error, which must be one and the same on all ranks."""
    outcomes = ThreadRanks(len(targets)).outcomes(
        lambda c: shardkeep.load(targets[c.rank], path, process_group=c, **options)
    )
    assert len({(type(outcome), str(outcome)) for outcome in outcomes}) == 1, outcomes
    return outcomes[0]


def everything(given, rank, world_size):
    return {"all": list(given), "rank": rank, "of": world_size}


def never(given, rank, world_size):
    raise AssertionError("called on the number of ranks that saved it")


# --- any value, any number of ranks


def arrays():
    dtypes = st.sampled_from(["float32", "int8", "uint16", "complex64", "bool", "float64"])
    shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
    return st.builds(
        lambda dtype, shape, seed: (
            np.random.default_rng(seed).integers(0, 2, shape).astype(dtype) * 1
        ).astype(dtype),
        dtypes,
        shapes,
        st.integers(0, 99),
    )


plain = st.one_of(
    st.none(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.lists(st.integers(), max_size=3),
    st.tuples(st.booleans(), st.floats()),
)
nested = st.recursive(
    plain | arrays(),
    lambda inner: st.one_of(
        st.dictionaries(st.text("abc.", max_size=3) | st.integers(-1, 2), inner, max_size=3),
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(OrderedDict, st.dictionaries(st.text("xy", max_size=2), inner, max_size=2)),
    ),
    max_leaves=6,
)


def same(one, two):
    """Equal to the last bit, and of the same types."""
    if isinstance(one, np.ndarray) or isinstance(two, np.ndarray):
        return (
            isinstance(one, np.ndarray)
            and isinstance(two, np.ndarray)
            and (one.dtype, one.shape, one.tobytes()) == (two.dtype, two.shape, two.tobytes())
        )
    if type(one) is not type(two):
        return False
    if isinstance(one, dict):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(same, one, two))
    return values.same(one, two)


@settings(max_examples=30)
@given(
    st.integers(1, 8),
    st.integers(1, 8),
    st.lists(nested, min_size=8, max_size=8),
    st.booleans(),
)
def test_any_value_reaches_the_resize_of_any_number_of_ranks(m, n, saved, deep):
    def wrap(inner):
        return {"a": [{"b.c": inner}], "x": np.ones(2)} if deep else {"own": inner, "x": np.ones(2)}

    def unwrap(state):
        return (state["a"][0]["b.c"] if deep else state["own"]).value

    given_to = {}

    def resize(given, rank, world_size):
        given_to[rank] = list(given)
        return {"for": rank, "of": world_size, "got": given[len(given) - 1]}

    path = tempfile.mkdtemp(dir=MEMORY)
    try:
        save(m, lambda rank: wrap(PerRank(saved[rank], resize=never)), path)
        targets = [wrap(PerRank(None, resize=resize)) for _ in range(n)]
        load(targets, path)
        for rank, state in enumerate(targets):
            if m == n:
                assert not given_to
                assert same(unwrap(state), saved[rank])
            else:
                assert same(given_to[rank], saved[:m])
                expected = {"for": rank, "of": n, "got": saved[m - 1]}
                assert same(unwrap(state), expected)
    finally:
        shutil.rmtree(path)


@settings(max_examples=25)
@given(st.integers(1, 4), st.lists(nested, min_size=4, max_size=4), nested)
def test_the_same_number_of_ranks_gets_what_it_saved_whatever_it_holds(world, saved, held):
    path = tempfile.mkdtemp(dir=MEMORY)
    try:
        save(world, lambda rank: {"own": PerRank(saved[rank])}, path)
        targets = [{"own": PerRank(held, resize=never)}]
        targets += [{"own": PerRank(None, resize=never)} for _ in range(world - 1)]
        load(targets, path)
        for rank, state in enumerate(targets):
            found = state["own"].value
            if rank == 0 and isinstance(held, np.ndarray) and isinstance(found, np.ndarray):
                assert found.tobytes() == saved[0].tobytes()
            elif rank:
                assert same(found, saved[rank])
            else:
                assert sorted(map(repr, shape(found))) == sorted(map(repr, shape(saved[0])))
    finally:
        shutil.rmtree(path)


def shape(value):
    """Leaves, whatever holds them: a target may hold its own dicts and tuples."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from shape(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from shape(item)
    else:
        yield value.tobytes() if isinstance(value, np.ndarray) else value


# --- what stays, and what is seen by who else holds it


class Kind(Enum):
    FAST = "fast"


def test_keys_that_only_the_target_knows(tmp_path):
    save(2, lambda rank: {"own": PerRank({Kind.FAST: np.full(2, rank), 1: rank})}, tmp_path)
    held = {1: 0, Kind.FAST: np.zeros(2, int)}
    array = held[Kind.FAST]
    load([{"own": PerRank(held, resize=lambda v, r, n: v[1])}], tmp_path)
    assert held[Kind.FAST] is array
    assert held[1] == 1
    assert array.tolist() == [1, 1]
    fixed = {"own": PerRank(MappingProxyType({1: 0}), resize=lambda v, r, n: v[1])}
    load([fixed], tmp_path)
    assert fixed["own"].value[1] == 1


def test_dicts_lists_and_arrays_of_the_target_are_filled_in_place(tmp_path):
    def make(rank):
        return {"own": PerRank({"n": rank, "w": np.full(3, rank), "l": [rank, {"k": rank}]})}

    save(2, make, tmp_path)
    array, inner, held = np.zeros(3, int), [0, {"k": 0}], {}
    held |= {"n": -1, "w": array, "l": inner, "old": "goes"}
    load([{"own": PerRank(held, resize=resizing.first)}], tmp_path)
    assert held["w"] is array
    assert held["l"] is inner
    assert inner == [0, {"k": 0}]
    assert (array == 0).all()
    load([{"own": PerRank(held, resize=lambda v, r, n: v[1])}], tmp_path)
    assert (array == 1).all()
    assert inner == [1, {"k": 1}]
    assert list(held) == ["n", "w", "l"]


def test_tensors_come_back_as_tensors_in_place_if_they_fit(tmp_path):
    save(2, lambda rank: {"own": PerRank({"w": torch.full((2,), rank + 0.5)})}, tmp_path)
    tensor = torch.zeros(2)
    target = {"own": PerRank({"w": tensor}, resize=lambda v, r, n: v[1])}
    load([target], tmp_path)
    assert target["own"].value["w"] is tensor
    assert tensor.tolist() == [1.5, 1.5]
    other = {"own": PerRank({"w": torch.zeros(3)}, resize=lambda v, r, n: v[1])}
    load([other], tmp_path)
    assert other["own"].value["w"].tolist() == [1.5, 1.5]
    beside = {"own": PerRank({}, resize=resizing.first), "t": torch.zeros(1)}
    load([beside], tmp_path, optional=["t"])
    assert isinstance(beside["own"].value["w"], torch.Tensor)
    alone = {"own": PerRank({}, resize=resizing.first)}
    load([alone], tmp_path)
    assert isinstance(alone["own"].value["w"], np.ndarray)


@pytest.mark.parametrize("make", [np.zeros, lambda n: torch.zeros(n, dtype=torch.float64)])
def test_what_shares_memory_is_not_overwritten(tmp_path, make):
    stored = {"a": np.array([1.0, 2.0]), "b": np.array([3.0, 4.0]), "c": np.array([1.0, 2.0])}
    save(1, lambda _: {"w": np.array([9.0, 8.0]), "own": PerRank(stored)}, tmp_path)

    def loaded(w, **held):
        target = {"w": w, "own": PerRank(dict(held), resize=resizing.first)}
        other = {"w": make(2), "own": PerRank({}, resize=resizing.first)}
        for targets in ([target], [target, other]):  # as it was saved, and resized
            load(targets, tmp_path)
            got = target["own"].value
            assert {name: got[name].tolist() for name in stored} == {
                name: value.tolist() for name, value in stored.items()
            }
            assert target["w"] is w
            assert w.tolist() == [9.0, 8.0]
        return got

    x = make(2)
    assert loaded(x, a=x)["a"] is not x
    x = make(2)
    inside = loaded(make(2), a=x, b=x, c=x)
    assert inside["a"] is x
    assert inside["c"] is x  # the same contents: they stay tied
    x = make(3)
    loaded(make(2), a=x[:2], b=x[1:])
    loaded(x[1:], a=x[:2], b=make(2))
    x = make(4)  # between each other, but with no byte in common
    apart = {"a": x[::2], "b": x[1::2]}
    got = loaded(make(2), **apart)
    assert all(got[name] is value for name, value in apart.items())


def test_what_two_targets_share_is_not_overwritten(tmp_path):
    save(2, lambda _: {"p": PerRank({"a": np.ones(2)}), "q": PerRank(np.full(2, 2.0))}, tmp_path)
    x = np.zeros(2)
    target = {"p": PerRank({"a": x}, resize=resizing.first), "q": PerRank(x, resize=resizing.first)}
    load([target], tmp_path)
    assert target["p"].value["a"].tolist() == [1.0, 1.0]
    assert target["q"].value.tolist() == [2.0, 2.0]


def test_an_array_that_cannot_be_filled_is_replaced(tmp_path):
    save(2, lambda _: {"w": np.ones(3), "own": PerRank({"a": np.arange(3.0)})}, tmp_path)
    fixed = np.zeros(3)
    fixed.flags.writeable = False
    repeated = torch.zeros(1, dtype=torch.float64).expand(3)
    resized = torch.zeros(3, dtype=torch.float64)
    resized.untyped_storage().resize_(0)
    for one in (fixed, repeated, resized, np.ma.masked_array(np.zeros(3))):
        # On one rank of two only, on the number that saved it; and on another number.
        for arrays in ([np.zeros(3), one], [one]):
            targets = [
                {"w": np.zeros(3), "own": PerRank({"a": array}, resize=resizing.first)}
                for array in arrays
            ]
            load(targets, tmp_path)
            assert all(target["w"].all() for target in targets)
            assert targets[-1]["own"].value["a"] is not one
            assert targets[-1]["own"].value["a"].tolist() == [0.0, 1.0, 2.0]
    assert not fixed.any()
    assert not repeated.any()


Point = namedtuple("Point", "x y")


def test_classes_that_only_the_target_knows(tmp_path):
    save(2, lambda rank: {"own": PerRank({"p": Point(rank, np.ones(1))})}, tmp_path)
    target = {"own": PerRank({"p": Point(0, np.zeros(1))}, resize=lambda v, r, n: v[1])}
    load([target], tmp_path)
    assert target["own"].value["p"] == Point(1, np.ones(1))
    assert isinstance(target["own"].value["p"], Point)


def test_the_policy_stays_for_the_next_load_and_is_not_stored(tmp_path):
    save(2, lambda rank: {"own": PerRank(rank, resize=resizing.first)}, tmp_path)
    target = {"own": PerRank(9, resize=resizing.first)}
    load([target], tmp_path)
    assert target["own"] == PerRank(0, resize=resizing.first)
    strict = {"own": PerRank(9)}
    assert "give the PerRank a resize=" in str(fail([strict], tmp_path))


# --- what a policy reads


def test_only_what_is_looked_at_is_read(tmp_path):
    save(4, lambda rank: {"own": PerRank(np.full(1000, rank))}, tmp_path)
    target = {"own": PerRank(None, resize=lambda v, r, n: v[-1] + len(v))}
    (result,) = load([target], tmp_path)
    assert (target["own"].value == 3 + 4).all()
    assert result.nbytes == 8000
    (result,) = load([{"own": PerRank(None, resize=lambda v, r, n: v[1:3])}], tmp_path)
    assert result.nbytes == 16000
    (result,) = load([{"own": PerRank(None, resize=lambda v, r, n: sum(v))}], tmp_path)
    assert result.nbytes == 32000
    (result,) = load([{"own": PerRank(None, resize=lambda v, r, n: len(v))}], tmp_path)
    assert result.nbytes == 0


def test_values_cannot_be_looked_at_later(tmp_path):
    save(2, lambda rank: {"own": PerRank(rank)}, tmp_path)
    kept = []

    def resize(given, rank, world_size):
        kept.append(given)
        return given[0]

    load([{"own": PerRank(None, resize=resize)}], tmp_path)
    assert kept[0][0] == 0
    with pytest.raises(RuntimeError, match="has ended"):
        kept[0][1]


def test_damage_is_found_and_is_not_the_fault_of_the_policy(tmp_path):
    save(2, lambda rank: {"own": PerRank(np.full(5000, rank))}, tmp_path)
    with shardkeep.open(tmp_path) as ckpt:
        location = ckpt.metadata.storage_data[shardkeep.MetadataIndex("own.1", (0,))]
    file = tmp_path / location.file
    data = bytearray(file.read_bytes())
    data[location.offset] ^= 1
    file.write_bytes(data)
    outcome = fail([{"own": PerRank(None, resize=lambda v, r, n: v[1])}], tmp_path)
    assert isinstance(outcome, CorruptionError)
    load([{"own": PerRank(None, resize=resizing.first)}], tmp_path)


def test_ranks_that_saved_nothing_are_left_out(tmp_path):
    def make(rank):
        return {"stage": np.ones(1)} | ({"loader": PerRank({"at": rank})} if rank in (1, 3) else {})

    save(4, make, tmp_path)
    targets = [{"loader": PerRank({}, resize=everything), "stage": np.zeros(1)} for _ in range(2)]
    load(targets, tmp_path)
    assert targets[1]["loader"].value == {"all": [{"at": 1}, {"at": 3}], "rank": 1, "of": 2}
    same_size = [
        make(rank) | ({"loader": PerRank({}, resize=never)} if rank in (1, 3) else {})
        for rank in range(4)
    ]
    load(same_size, tmp_path)
    assert same_size[3]["loader"].value == {"at": 3}
    everywhere = [{"loader": PerRank({}, resize=never), "stage": np.zeros(1)} for _ in range(4)]
    outcome = fail(everywhere, tmp_path)
    assert outcome.missing == ("loader.0", "loader.2")
    load(everywhere, tmp_path, optional=["loader.*"])
    assert [state["loader"].value for state in everywhere] == [{}, {"at": 1}, {}, {"at": 3}]


def test_an_empty_value_and_a_pickled_one(tmp_path):
    save(2, lambda rank: {"own": PerRank({}), "other": PerRank(slice)}, tmp_path, allow_pickle=True)
    target = {"own": PerRank({"x": 1}, resize=resizing.first), "other": PerRank(0, resizing.first)}
    assert isinstance(fail([target], tmp_path), shardkeep.UnsafeCheckpointError)
    load([target], tmp_path, allow_pickle=True)
    assert target["own"].value == {}
    assert target["other"].value is slice


# --- errors come before anything is changed


def broken(given, rank, world_size):
    if rank == 1:
        raise LookupError("no such shard")
    return given[0]


def test_a_policy_that_fails_on_one_rank_changes_nothing_on_any(tmp_path):
    save(3, lambda rank: {"own": PerRank({"n": rank}), "step": 5, "w": np.ones(4)}, tmp_path)
    targets = [
        {"own": PerRank({"n": -1}, resize=broken), "step": 0, "w": np.zeros(4)} for _ in range(2)
    ]
    outcome = fail(targets, tmp_path)
    assert isinstance(outcome, MismatchError)
    for text in ("own: saved per rank by 3 ranks, loading on 2", "broken", "no such shard"):
        assert text in str(outcome)
    assert outcome.mismatched.keys() == {"own"}
    assert not any("undefined" in note for note in outcome.__notes__)
    for target in targets:
        assert target["own"].value == {"n": -1}
        assert target["step"] == 0
        assert not target["w"].any()


@pytest.mark.parametrize("made", [None, 7, [1]])
def test_a_policy_that_forgets_what_it_makes(tmp_path, made):
    save(2, lambda rank: {"own": PerRank({"n": rank})}, tmp_path)
    target = {"own": PerRank({"n": -1}, resize=lambda v, r, n: made)}
    assert "where the target has a dict" in str(fail([target], tmp_path))
    assert "returned None" in str(
        fail([{"own": PerRank(3, resize=lambda v, r, n: None)}], tmp_path)
    )


def test_what_is_no_function_is_refused_at_once():
    with pytest.raises(TypeError, match="pass a function"):
        PerRank(1, resize="first")


def test_what_was_not_saved_per_rank(tmp_path):
    save(2, lambda rank: {"own": 3, "deep": {0: 1}, "x": np.ones(1)}, tmp_path)
    for name in ("own", "deep"):
        target = {name: PerRank(0, resize=resizing.first)}
        assert "was not saved per rank" in str(fail([target], tmp_path))
    missing = {"new": PerRank(0, resize=resizing.first)}
    assert fail([missing], tmp_path, keys=["new*"]).missing == ("new.0",)
    result = load([missing], tmp_path, keys=["new*"], optional=["new*"])[0]
    assert missing["new"].value == 0
    assert result.missing == ("new.0",)


def test_per_rank_within_per_rank_has_no_resize(tmp_path):
    save(2, lambda rank: {"own": PerRank({"in": PerRank(rank)})}, tmp_path)
    outer = {"own": PerRank({}, resize=resizing.first)}
    assert "within a PerRank" in str(fail([outer], tmp_path))
    inner = {"own": PerRank({"in": PerRank(0, resize=resizing.first)})}
    assert "within another PerRank" in str(fail([inner, inner], tmp_path))


# --- keys and optional


def test_optional_keeps_what_the_target_has(tmp_path):
    save(3, lambda rank: {"own": PerRank({"n": rank, "w": np.ones(2)}), "x": np.ones(3)}, tmp_path)
    for globs in (["own"], ["own.*"], ["own*"], "own.*"):
        targets = [
            {"own": PerRank({"n": -1, "w": np.zeros(2)}), "x": np.zeros(3)} for _ in range(2)
        ]
        results = load(targets, tmp_path, optional=globs)
        for target, result in zip(targets, results, strict=True):
            assert target["own"].value["n"] == -1
            assert not target["own"].value["w"].any()
            assert target["x"].all()
            assert result.missing == ("own",)
            assert "own.0.n" in result.skipped
            assert result.unexpected == ()
    half = [{"own": PerRank({"n": -1, "w": np.zeros(2)}), "x": np.zeros(3)}]
    assert isinstance(fail(half, tmp_path, optional=["own.*.n"]), MismatchError)
    # On the number that saved it, it is there.
    targets = [{"own": PerRank({"n": -1, "w": np.zeros(2)}), "x": np.zeros(3)} for _ in range(3)]
    load(targets, tmp_path, optional=["own.*"])
    assert [target["own"].value["n"] for target in targets] == [0, 1, 2]


def test_keys_leave_it_out_or_ask_for_it(tmp_path):
    save(3, lambda rank: {"own": PerRank({"n": rank}), "x": np.ones(3)}, tmp_path)
    target = {"own": PerRank({"n": -1}, resize=never), "x": np.zeros(3)}
    result = load([target], tmp_path, keys=["x"])[0]
    assert target["own"].value == {"n": -1}
    assert result.skipped == ("own.0.n", "own.1.n", "own.2.n")
    for keys in (["own.*"], ["*.n"], "own*"):
        target = {"own": PerRank({"n": -1}, resize=lambda v, r, n: v[2]), "x": np.zeros(3)}
        load([target], tmp_path, keys=keys)
        assert target["own"].value == {"n": 2}
        assert not target["x"].any()


# --- ready-made


def test_first_and_refuse(tmp_path):
    save(2, lambda rank: {"own": PerRank({"n": rank})}, tmp_path)
    targets = [{"own": PerRank({}, resize=resizing.first)} for _ in range(5)]
    load(targets, tmp_path)
    assert [target["own"].value for target in targets] == [{"n": 0}] * 5
    assert "as many ranks" in str(fail([{"own": PerRank({}, resize=resizing.refuse)}], tmp_path))
    exact = [{"own": PerRank({"other": 1}, resize=resizing.refuse)} for _ in range(2)]
    load(exact, tmp_path)
    assert exact[1]["own"].value == {"n": 1}


@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 8))
def test_dealt_counts_are_those_of_a_sampler_that_deals_in_turn(total, m, n):
    def seen(world):
        return [len(range(rank, total, world)) for rank in range(world)]

    deal = resizing.deal_counts("data.seen")
    saved = [{"epoch": 3, "data": {"seen": count}} for count in seen(m)]
    made = [deal(saved, rank, n) for rank in range(n)]
    assert [one["data"]["seen"] for one in made] == seen(n)
    assert all(one["epoch"] == 3 for one in made)
    assert [resizing.deal_counts()(seen(m), rank, n) for rank in range(n)] == seen(n)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8), st.integers(1, 8))
def test_uneven_counts_keep_their_sum(counts, n):
    deal = resizing.deal_counts(uneven=True)
    made = [deal(counts, rank, n) for rank in range(n)]
    assert sum(made) == sum(counts)
    assert max(made) - min(made) <= 1


def test_what_cannot_be_dealt():
    deal = resizing.deal_counts("n")
    with pytest.raises(ValueError, match=r"n is 5, 9 on .* it would be 7, 7.*uneven=True"):
        deal([{"n": 5}, {"n": 9}], 0, 1)
    with pytest.raises(ValueError, match=r"epoch differs .*0 and 1 of 2"):
        deal([{"n": 5, "epoch": 1}, {"n": 5, "epoch": 2}], 0, 1)
    with pytest.raises(ValueError, match=r"buffer differs"):
        deal([{"n": 5, "buffer": np.ones(2)}, {"n": 5, "buffer": np.zeros(2)}], 0, 1)
    with pytest.raises(KeyError, match="no counter n"):
        deal([{"m": 5}], 0, 2)
    with pytest.raises(TypeError, match="not a count"):
        deal([{"n": 5.0}], 0, 2)
    with pytest.raises(ValueError, match="negative"):
        deal([{"n": -5}], 0, 2)
    kept = [{"n": np.int64(4), "buffer": torch.ones(2)}] * 2
    assert deal(kept, 0, 1)["n"] == 8
    assert kept[0]["n"] == 4


@pytest.mark.parametrize(
    "counter",
    [
        np.int32(3),
        np.array(3),
        np.array([3], ">i4"),
        np.array([[3]], np.uint8),
        torch.tensor(3),
        torch.tensor([3], dtype=torch.int16),
    ],
)
def test_counters_in_arrays_stay_arrays(tmp_path, counter):
    deal = resizing.deal_counts("n")
    made = deal([{"n": counter}] * 3, 0, 1)["n"]
    assert type(made) is type(counter)
    assert (made.dtype, made.shape) == (counter.dtype, counter.shape)
    assert int(made) == 9 if made.ndim == 0 else made.reshape(-1).tolist() == [9]
    assert (counter == 3).all()
    save(2, lambda rank: {"own": PerRank({"n": counter})}, tmp_path)
    target = {"own": PerRank({"n": counter * 0}, resize=deal)}
    load([target], tmp_path)
    assert (target["own"].value["n"] == 6).all()


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_arrays_that_are_no_counters(make):
    deal = resizing.deal_counts("n")
    for held in ([3, 3], [], 3.0, [3.0]):
        with pytest.raises(TypeError, match="not a count"):
            deal([{"n": make(held)}], 0, 2)
    small = make([100], dtype=np.int8 if make is np.array else torch.int8)
    with pytest.raises((OverflowError, RuntimeError)):
        deal([{"n": small}] * 2, 0, 1)


# --- a loader of data


class Loader:
    """Deals samples in turn; what it keeps grows while it is in use, as in real loaders."""

    def __init__(self, rank, world, total=96):
        self.rank, self.world, self.total = rank, world, total
        self.seen, self.epoch = 0, 0
        self.inner = None

    def __iter__(self):
        while self.rank + self.seen * self.world < self.total:
            sample = self.rank + self.seen * self.world
            self.seen += 1
            self.inner = {"last": sample, "order": np.arange(3)}
            yield sample

    def state_dict(self):
        return {"seen": self.seen, "epoch": self.epoch, "inner": self.inner}

    def load_state_dict(self, state):
        self.seen, self.epoch, self.inner = state["seen"], state["epoch"], state["inner"]


def reset_inner(given, rank, world_size):
    saved = [{**one, "inner": None} for one in given]
    return resizing.deal_counts("seen")(saved, rank, world_size)


@pytest.mark.parametrize("after", [1, 2, 3, 4, 8])
def test_no_sample_is_lost_or_seen_twice(tmp_path, after):
    world, steps = 4, 6
    loaders = [Loader(rank, world) for rank in range(world)]
    streams = [iter(loader) for loader in loaders]
    seen = [next(stream) for _ in range(steps) for stream in streams]
    save(world, lambda rank: {"loader": PerRank(loaders[rank], resize=reset_inner)}, tmp_path)
    fresh = [Loader(rank, after) for rank in range(after)]
    targets = [{"loader": PerRank(loader, resize=reset_inner)} for loader in fresh]
    load(targets, tmp_path)
    assert all(
        target["loader"].value is loader for target, loader in zip(targets, fresh, strict=True)
    )
    if after == world:
        assert fresh[2].inner["last"] == loaders[2].inner["last"]
        assert (fresh[2].inner["order"] == np.arange(3)).all()
    rest = [sample for loader in fresh for sample in loader]
    assert sorted(seen + rest) == list(range(96))


def test_an_object_that_would_not_be_told_stops_the_load(tmp_path):
    def make(rank):
        return {"own": PerRank({"loader": Loader(rank, 2), "n": rank}), "x": np.ones(2)}

    def target(resize):
        held = {"loader": Loader(0, 1), "n": -1}
        return {"own": PerRank(held, resize=resize), "x": np.zeros(2)}

    save(2, make, tmp_path / "a")
    save(2, lambda rank: {"own": PerRank({"loader": 3}), "x": np.ones(2)}, tmp_path / "b")
    forgetful = target(lambda v, r, n: {"n": v[0]["n"]})
    assert "returned no state for loader" in str(fail([forgetful], tmp_path / "a"))
    assert forgetful["own"].value["n"] == -1
    assert not forgetful["x"].any()
    same_size = [target(never), target(never)]
    assert "has no state for loader" in str(fail(same_size, tmp_path / "b"))
    direct = {"own": PerRank(Loader(0, 1), resize=lambda v, r, n: 5), "x": np.zeros(2)}
    assert "returned no state for Loader" in str(fail([direct], tmp_path / "a"))
    fine = target(resizing.first)
    fine["own"].value["loader"].seen = 9
    load([fine], tmp_path / "a")
    assert fine["own"].value["loader"].seen == 0


# --- saved in the background


@pytest.mark.parametrize("writer", ["thread", "process"])
@pytest.mark.parametrize("snapshot", ["eager", "lazy"])
def test_saved_in_the_background_as_it_was(tmp_path, snapshot, writer):
    def work(ranks):
        with shardkeep.Checkpointer(process_group=ranks, writer=writer) as keeper:
            held = {"n": ranks.rank, "w": torch.full((3,), float(ranks.rank))}
            state = {"own": PerRank(held, resize=resizing.first), "x": torch.ones(3)}
            handle = keeper.async_save(state, tmp_path, snapshot=snapshot)
            held["n"] = -1
            held["w"].fill_(-1)
            handle.result(timeout=60)

    ThreadRanks(3).run(work)
    targets = [{"own": PerRank({}, resize=everything), "x": torch.zeros(3)} for _ in range(2)]
    load(targets, tmp_path)
    got = targets[1]["own"].value["all"]
    assert [one["n"] for one in got] == [0, 1, 2]
    assert [one["w"].tolist() for one in got] == [[0.0] * 3, [1.0] * 3, [2.0] * 3]


# --- what is put where


def test_a_count_that_its_counter_cannot_hold():
    deal = resizing.deal_counts("n")
    saved = [{"n": np.uint8(200)}] * 2
    with pytest.raises(OverflowError, match="400"):
        deal(saved, 0, 1)


def test_counts_of_values_that_differ_elsewhere_are_not_dealt():
    deal = resizing.deal_counts("n")
    for other, where in (({"a": [1, 2]}, "a"), ({"a": [1, 3], "b": 1}, "b")):
        saved = [{"n": 1, "a": [1, 3]}, {"n": 1, **other}]
        with pytest.raises(ValueError, match=where):
            deal(saved, 0, 1)
    assert deal([{"n": 1, "a": [1, (2,)]}] * 2, 0, 1) == {"n": 2, "a": [1, (2,)]}


def test_arrays_that_cannot_be_filled_make_way():
    empty = np.zeros((0, 3))
    assert Placing().put(empty, np.zeros((0, 3)), ("x",)) is empty
    new = np.zeros(3)
    assert Placing().put(np.zeros(3, np.float32), new, ("x",)) is new
    assert Placing().put(np.zeros(3), 5, ("x",)) == 5


def test_memory_that_is_filled_already_keeps_what_it_has():
    shared = np.zeros(4)
    placing = Placing()
    assert placing.put(shared[:3], np.array([1.0, 2, 3]), ("a",)).tolist() == [1, 2, 3]
    same, other = np.array([2.0, 3]), np.array([7.0, 8])
    assert np.shares_memory(placing.put(shared[1:3], same, ("b",)), shared)
    assert placing.put(shared[1:3], other, ("c",)) is other
    assert shared.tolist() == [1, 2, 3, 0]


class Telling:
    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass


def test_statefuls_for_which_there_is_nothing_are_named():
    old = {"a": [Telling(), Telling()], "b": {"c": Telling()}, "d": Telling()}
    new = {"a": [{"x": 1}], "b": {"c": {}}, "d": 5}
    assert untold(old, new) == ["a.1", "d"]
    assert untold(old, {"a": ({}, {}), "b": 7, "d": {}}) == ["b.c"]
