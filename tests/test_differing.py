"""`diff`: what differs is found, and what is equal is not read twice."""

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardkeep
from shardkeep.comparing import Tolerance, compare
from shardkeep.dtypes import lookup


def saved(path, state):
    shardkeep.save(state, path, no_dist=True)
    return path


def base():
    rng = np.random.default_rng(3)
    return {
        "a": rng.standard_normal((40, 30)).astype(np.float32),
        "b": np.arange(100),
        "n": np.array([np.nan, 0.0, np.inf]),
        "z": np.zeros(0),
        "step": 3,
        "lr": 0.1,
    }


def test_a_copy_is_the_same_and_is_not_read(tmp_path):
    a, b = saved(tmp_path / "a", base()), saved(tmp_path / "b", base())
    report = shardkeep.diff(a, b)
    assert report.same
    assert report.names == 6
    assert report.known_bytes == report.nbytes > 0


@pytest.fixture
def few_digits():
    """Python's own limit, which some libraries lift for all of the process."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(4300)
    yield
    sys.set_int_max_str_digits(before)


@pytest.mark.usefixtures("few_digits")
def test_integers_of_any_size(tmp_path):
    one = {"same": 10**5000, "other": [10**5000]}
    two = {"same": 10**5000, "other": [10**5000 + 1]}
    report = shardkeep.diff(saved(tmp_path / "a", one), saved(tmp_path / "b", two))
    assert [(found.name, found.a) for found in report.differences] == [("other", "<list>")]


def test_every_kind_of_difference(tmp_path):
    state = base()
    state["a"] = state["a"].copy()
    state["a"][3, 4] += 0.5
    state["a"][39, 29] -= 0.25
    state["b"] = state["b"].astype(np.int32)
    state["n"] = np.array([np.nan, -0.0, np.inf])
    state["z"] = np.zeros((0, 2))
    state["step"] = np.zeros(3)
    state["lr"] = 0.2
    del state["z"]
    state["new"] = "text"
    report = shardkeep.diff(saved(tmp_path / "a", base()), saved(tmp_path / "b", state))
    found = {one.name: one for one in report.differences}
    kinds = {name: one.kind for name, one in found.items()}
    assert kinds == {
        "a": "values",
        "b": "dtype",
        "n": "values",
        "z": "only in a",
        "step": "kind",
        "lr": "values",
        "new": "only in b",
    }
    assert (found["a"].changed, found["a"].elements) == (2, 1200)
    assert found["a"].max_abs == pytest.approx(0.5)
    assert found["b"].changed == 0
    assert (found["n"].changed, found["n"].max_abs) == (1, 0.0)
    assert (found["lr"].a, found["lr"].b) == ("0.1", "0.2")
    assert found["new"].b == "'text'"
    assert not report.same
    only = shardkeep.diff(tmp_path / "a", tmp_path / "b", keys=["n", "lr"])
    assert [one.name for one in only.differences] == ["n", "lr"]
    with pytest.raises(ValueError, match="matches 'no'"):
        shardkeep.diff(tmp_path / "a", tmp_path / "b", keys=["no"])


def test_shapes_differ(tmp_path):
    a, b = saved(tmp_path / "a", {"x": np.zeros(3)}), saved(tmp_path / "b", {"x": np.zeros((3, 1))})
    (one,) = shardkeep.diff(a, b).differences
    assert (one.kind, one.a, one.b) == ("shape", "3 float64", "3x1 float64")


def test_what_is_near_enough(tmp_path):
    state = base()
    a = saved(tmp_path / "a", state)
    state["a"] = state["a"] + np.float32(1e-3)
    state["lr"] = 0.1001
    state["n"] = np.array([np.nan, -0.0, np.inf])
    b = saved(tmp_path / "b", state)
    assert len(shardkeep.diff(a, b).differences) == 3
    assert shardkeep.diff(a, b, atol=2e-3).same
    assert not shardkeep.diff(a, b, atol=1e-4).same


def test_differently_cut_tensors_are_compared_within_the_budget(tmp_path):
    state = {"x": np.arange(1 << 20, dtype=np.float64).reshape(1024, 1024)}
    a = saved(tmp_path / "a", state)
    b = tmp_path / "b"

    def part(ranks):
        rows = slice(ranks.rank * 512, ranks.rank * 512 + 512)
        piece = state["x"][rows].copy()
        if ranks.rank:
            piece[-1, -1] = -1
        held = shardkeep.ShardedArray.from_local(piece, (rows.start, 0), (1024, 1024))
        shardkeep.save({"x": held}, b, process_group=ranks)

    shardkeep.ThreadRanks(2).run(part)
    report = shardkeep.diff(a, b, memory_budget=16 << 20)
    (one,) = report.differences
    assert (one.changed, one.max_abs) == (1, float((1 << 20) - 1 + 1))
    assert report.known_bytes == 0
    # Chunk by chunk, only the one that differs is read.
    c = tmp_path / "c"

    def other(ranks):
        rows = slice(ranks.rank * 512, ranks.rank * 512 + 512)
        held = shardkeep.ShardedArray.from_local(
            state["x"][rows].copy(), (rows.start, 0), (1024, 1024)
        )
        shardkeep.save({"x": held}, c, process_group=ranks)

    shardkeep.ThreadRanks(2).run(other)
    report = shardkeep.diff(b, c)
    assert report.differences[0].changed == 1
    assert report.known_bytes == report.nbytes // 2


DTYPES = ["float32", "float64", "int64", "bfloat16", "uint8", "bool", "complex128", "float8_e4m3fn"]


@given(st.sampled_from(DTYPES), st.binary(min_size=64, max_size=64), st.binary(min_size=64))
def test_bits_decide(name, left, right):
    dtype = lookup(name)
    a = np.frombuffer(left, dtype.bits())
    b = np.frombuffer((right * 2)[:64], dtype.bits())
    found = compare(a, b, (dtype, dtype), Tolerance())
    item = dtype.itemsize
    wanted = sum(left[i : i + item] != (right * 2)[i : i + item] for i in range(0, 64, item))
    assert found.changed == wanted
    assert compare(a, a, (dtype, dtype), Tolerance()).changed == 0


def test_a_damaged_checkpoint_is_trouble(tmp_path):
    a, b = saved(tmp_path / "a", base()), saved(tmp_path / "b", {**base(), "a": np.zeros((40, 30))})
    (data,) = (b / "data").glob("*-r00000-0.safetensors")
    raw = bytearray(data.read_bytes())
    raw[4096 + 100] ^= 1
    data.write_bytes(raw)
    with pytest.raises(shardkeep.CorruptionError):
        shardkeep.diff(a, b)


INF, BIG = float("inf"), 2**53


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.array([1.0]), np.array([INF])),
        (np.array([INF]), np.array([-INF])),
        (np.array([1.0], np.float16), np.array([INF], np.float16)),
        (np.array([BIG]), np.array([BIG + 1])),
        (np.array([2**63 - 1], np.uint64), np.array([2**63], np.uint64)),
        (np.array([-(2**63)]), np.array([2**63 - 1])),
        (1.0, INF),
        (-INF, INF),
        (BIG, BIG + 1),
        (10**400, -(10**400)),
        (10**400, 1.0),
        (1, {"y": 1}),
        (np.ones(2), {"y": np.ones(2)}),
        ([], {}),
    ],
)
def test_what_no_tolerance_makes_equal(tmp_path, one, other):
    shardkeep.save({"x": one, "z": 1}, tmp_path / "a", no_dist=True)
    shardkeep.save({"x": other, "z": 1}, tmp_path / "b", no_dist=True)
    for sides in (("a", "b"), ("b", "a")):
        for tolerance in ({"atol": 0.5}, {"atol": 0.5, "rtol": 1e-20}):
            report = shardkeep.diff(*(tmp_path / side for side in sides), **tolerance)
            assert {row.name.split(".")[0] for row in report.differences} == {"x"}


def test_numbers_that_are_near_are_equal_whatever_their_size(tmp_path):
    one = {"a": 10**400, "b": np.array([2**63 - 1], np.uint64), "c": np.array([INF, 1.0]), "d": INF}
    other = one | {"a": 10**400 + 1, "b": np.array([2**63], np.uint64)}
    shardkeep.save(one, tmp_path / "a", no_dist=True)
    shardkeep.save(other, tmp_path / "b", no_dist=True)
    assert not shardkeep.diff(tmp_path / "a", tmp_path / "b").same
    assert shardkeep.diff(tmp_path / "a", tmp_path / "b", atol=1).same
    assert shardkeep.diff(tmp_path / "a", tmp_path / "b", rtol=0.1).same


@pytest.mark.parametrize(
    ("a", "b", "near"),
    [
        (float("nan"), float("nan"), True),
        (float("nan"), 1.0, False),
        (1.0, float("nan"), False),
        (float("inf"), float("inf"), True),
        (float("inf"), 1e308, False),
        (10**400, 1.0, False),
        (10**400, 10**400 + 1, False),
        (1, 1.05, True),
        (1, "1", False),
        (True, 1, False),
    ],
    ids=range(10),
)
def test_numbers_that_count_as_equal(a, b, near):
    assert Tolerance(atol=0.1).close_numbers(a, b) is near
    assert not Tolerance().close_numbers(a, b)


def test_elements_that_are_no_numbers_here_are_equal_or_not():
    kind = lookup("float4_e2m1fn_x2")  # two to a byte
    x, y = np.array([1, 2, 3], np.uint8), np.array([1, 2, 4], np.uint8)
    found = compare(x, y, (kind, kind), Tolerance(atol=99.0))
    assert (found.changed, found.max_abs) == (1, None)
