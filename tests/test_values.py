# SPDX-License-Identifier: Apache-2.0
"""Plain values: exact types and bits back, places named in refusals, hostile bytes harmless."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import os
import pathlib
import pickle
import re
import struct
import subprocess
import sys
import time
import uuid
import zoneinfo

import ml_dtypes
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.msgpack import Ext

from shardkeep import values
from shardkeep.errors import (
    FormatError,
    MissingDependencyError,
    UnsafeCheckpointError,
    UnsupportedValueError,
)
from shardkeep.values import EXT_CODES, decode, encode, encode_key, encode_value, like, same

Point = collections.namedtuple("Point", "x y")


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1


class Perm(enum.Flag):
    R = 1
    W = 2


@dataclasses.dataclass
class Config:
    lr: float = 0.1


class Odd:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd)

    __hash__ = None  # type: ignore[assignment]


def floats() -> st.SearchStrategy[float]:
    """All 2**64 bit patterns."""
    return st.binary(min_size=8, max_size=8).map(lambda raw: struct.unpack(">d", raw)[0])


ML_NAMES = sorted(values._ML_NAMES)
NUMPY_NAMES = [*sorted(values._NUMPY_NAMES - {"bool"}), "datetime64[ns]", "timedelta64[25s]"]
TORCH_DTYPES = [x for x in vars(torch).values() if isinstance(x, torch.dtype)]


def numpy_scalars() -> st.SearchStrategy[object]:
    dtypes = [np.dtype(name) for name in NUMPY_NAMES]
    dtypes += [np.dtype(getattr(ml_dtypes, name)) for name in ML_NAMES if "int" not in name]
    return st.sampled_from(dtypes).flatmap(
        lambda dtype: st.binary(min_size=dtype.itemsize, max_size=dtype.itemsize).map(
            lambda raw: np.frombuffer(raw, dtype)[0]
        )
    )


def reads_back(path: pathlib.PurePath) -> bool:
    """False for a few odd Windows paths that pathlib itself cannot read again."""
    again = type(path)(str(path))
    return (again.parts, str(again)) == (path.parts, str(path))


zones = st.one_of(
    st.none(),
    st.just(dt.UTC),
    st.builds(
        lambda us, name: dt.timezone(dt.timedelta(microseconds=us), *name),
        st.integers(-86_399_999_999, 86_399_999_999),
        st.lists(st.text(max_size=5), max_size=1),
    ),
    st.sampled_from(["Europe/Berlin", "America/New_York", "UTC"]).map(zoneinfo.ZoneInfo),
)
hashable_leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**300), 2**300),
    floats(),
    st.builds(complex, floats(), floats()),
    st.text(),
    st.binary(),
    st.sampled_from([np.bool_(True), np.bool_(False), *(ml_dtypes.int4(i) for i in (-8, 7))]),
    numpy_scalars(),
    st.builds(range, st.integers(), st.integers(), st.integers(1, 2**70)),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])).map(pathlib.Path),
    st.text("ab/\\:.").map(pathlib.PurePosixPath),
    st.text("ab/\\:.").map(pathlib.PureWindowsPath).filter(reads_back),
    st.datetimes(timezones=zones).map(lambda x: x.replace(fold=x.microsecond % 2)),
    st.dates(),
    st.times(timezones=zones),
    st.timedeltas(),
    zones,
    st.uuids(),
    st.decimals().filter(lambda x: not x.is_snan()),
    st.fractions(),
    st.lists(st.integers(0, 2**40), max_size=3).map(torch.Size),
    st.sampled_from(TORCH_DTYPES),
    st.sampled_from([torch.device(x) for x in ("cpu", "cuda", "cuda:0", "meta", "mps")]),
)
keys = st.recursive(
    hashable_leaves,
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)


def _containers(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    lists = st.lists(inner, max_size=4)
    dicts = st.dictionaries(keys, inner, max_size=4)
    return st.one_of(
        lists,
        lists.map(tuple),
        st.builds(collections.deque, lists, st.none() | st.integers(0, 5)),
        st.sets(keys, max_size=4),
        dicts,
        dicts.map(collections.OrderedDict),
        dicts.map(collections.Counter),
        st.builds(slice, inner, inner, inner),
        st.binary().map(bytearray),
    )


plain = st.recursive(keys, _containers, max_leaves=15)


def exactly(a: object, b: object) -> bool:
    """An oracle for `same` that does not use the encoding."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return exactly(list(a.items()), list(b.items())) and type(a) is type(b)
    if isinstance(a, collections.deque):
        return a.maxlen == b.maxlen and exactly(list(a), list(b))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(exactly, a, b))
    if isinstance(a, (set, frozenset)):
        rest = list(b)
        for x in a:
            match = next((i for i, y in enumerate(rest) if exactly(x, y)), None)
            if match is None:
                return False
            del rest[match]
        return not rest
    if isinstance(a, slice):
        return exactly([a.start, a.stop, a.step], [b.start, b.stop, b.step])
    if isinstance(a, float) and not isinstance(a, np.generic):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex) and not isinstance(a, np.generic):
        return exactly((a.real, a.imag), (b.real, b.imag))
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, (dt.datetime, dt.time)):
        return repr(a) == repr(b) and a.fold == b.fold and exactly(a.tzinfo, b.tzinfo)
    if isinstance(a, (dt.timezone, decimal.Decimal, range, zoneinfo.ZoneInfo)):
        return repr(a) == repr(b)
    return a == b


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(plain)
def test_round_trip(value: object) -> None:
    data = encode(value)
    back = decode(data)
    assert exactly(value, back)
    assert encode(back) == data
    assert same(value, back)
    assert exactly(like(value, back), value)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(plain, plain)
def test_same_agrees_with_an_independent_oracle(a: object, b: object) -> None:
    assert same(a, b) == exactly(a, b)


def ids(cases: list[object]) -> list[str]:
    """Distinct and short: many of these values print alike, or at length."""
    named = [case[0] if isinstance(case, tuple) and case else case for case in cases]
    return [f"{index}-{type(case).__name__}" for index, case in enumerate(named)]


CORNERS = [
    struct.unpack(">d", bytes.fromhex(bits))[0]
    for bits in ("7ff8000000000001", "7ff0000000000001", "fff8000000000abc", "8000000000000000")
] + [
    complex(-0.0, -0.0),
    complex(0.0, struct.unpack(">d", bytes.fromhex("7ff0000000000001"))[0]),
    *(
        sign * 2**bits + d
        for bits in (7, 63, 64, 200, 2000)
        for sign in (1, -1)
        for d in (-1, 0, 1)
    ),
    "",
    "\0é\U0001f600",
    b"",
    bytearray(b"ab"),
    [],
    (),
    {},
    set(),
    collections.Counter("abracadabra"),
    collections.Counter(),
    collections.OrderedDict([("b", 1), ("a", 2)]),
    collections.deque([1, 2], maxlen=2),
    collections.deque(maxlen=0),
    collections.deque([1]),
    range(2**70, -3, -7),
    slice(None, (1,), "x"),
    np.bool_(True),
    np.float64(-0.0),
    np.float32(1.5),
    np.frombuffer(bytes.fromhex("0100807f"), np.float32)[0],
    np.datetime64("NaT"),
    np.datetime64("2020-01", "M"),
    np.timedelta64(3, "25s"),
    np.timedelta64("NaT"),
    ml_dtypes.bfloat16(1.5),
    ml_dtypes.float8_e4m3fn(0.5),
    ml_dtypes.int4(-3),
    pathlib.Path("/a/b"),
    pathlib.Path(),
    pathlib.PurePosixPath("a"),
    pathlib.PureWindowsPath(r"C:\x"),
    dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
    dt.datetime(2024, 1, 1, tzinfo=dt.UTC),
    dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=-3), "BRT")),
    dt.datetime.max,
    dt.date.min,
    dt.time(1, tzinfo=dt.timezone(dt.timedelta(0), "Zulu")),
    dt.timedelta.min,
    uuid.UUID(int=5),
    *map(decimal.Decimal, ("-0", "1.00", "1E+5", "0E-7", "NaN12", "-sNaN3", "-Infinity")),
    fractions.Fraction(-(2**80), 3),
    torch.Size([2, 3]),
    torch.Size([]),
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.device("cuda", 1),
    torch.device("cuda"),
]


@pytest.mark.parametrize("value", CORNERS, ids=ids(CORNERS))
def test_corner_values_come_back_exactly(value: object) -> None:
    for wrapped in (value, [value], {"k": (value,)}):
        back = decode(encode(wrapped))
        assert same(wrapped, back)
        if not (isinstance(value, decimal.Decimal) and value.is_snan()):
            assert exactly(wrapped, back)


def test_every_numpy_name_comes_back() -> None:
    for name in NUMPY_NAMES:
        assert exactly(decode(encode(np.ones(1, name)[0])), np.ones(1, name)[0])
    for name in ML_NAMES:
        scalar = getattr(ml_dtypes, name)(1)
        back = decode(encode(scalar))
        assert type(back) is type(scalar)
        assert back.tobytes() == scalar.tobytes()


def test_key_types_stay_apart() -> None:
    for key in (1, True, 1.0, "1", b"1", None, (1, 2), frozenset({1}), 2**99, np.int8(1)):
        back = decode(encode({key: key}))
        assert exactly(back, {key: key})
    variants = [1, True, 1.0, np.int64(1), fractions.Fraction(1), decimal.Decimal(1), Point(1, 1)]
    assert len({encode_key(key) for key in variants}) == len(variants)
    nans = {float("nan"): 1, float("nan"): 2}
    assert [*decode(encode(nans)).values()] == [1, 2]


def test_order_and_zero_signs_and_types_differ() -> None:
    assert not same({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert not same(0.0, -0.0)
    assert not same([1], (1,))
    assert not same((1, 2), Point(1, 2))
    assert not same(dt.UTC, zoneinfo.ZoneInfo("UTC"))
    assert same(float("nan"), float("nan"))


def test_equal_sets_encode_equally_in_any_process() -> None:
    script = (
        "from shardkeep.values import encode;"
        "print(encode({str(i) for i in range(50)} | {frozenset({'a','b','c'})}).hex())"
    )
    outputs = set()
    for seed in "012":
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        run = subprocess.run(
            [sys.executable, "-c", script], env=env, capture_output=True, check=True
        )
        outputs.add(run.stdout)
    assert len(outputs) == 1


def test_decimal_does_not_depend_on_the_context() -> None:
    with decimal.localcontext() as context:
        context.capitals = 0
        context.prec = 2
        context.traps[decimal.InvalidOperation] = False
        data = encode(decimal.Decimal("1.2345E+10"))
        assert str(decode(data)) == "1.2345e+10"
        with pytest.raises(FormatError):
            decode(msgspec.msgpack.encode(Ext(EXT_CODES["decimal"], b"nonsense")))
    assert data == encode(decimal.Decimal("1.2345E+10"))


def test_named_tuple_and_enum_lose_their_class() -> None:
    assert exactly(decode(encode([Point(1, (Color.RED, Level.LOW))])), [(1, (1, 1))])
    assert same(Color.BLUE, 2)


def test_like_gives_the_classes_back() -> None:
    state = {"p": Point(Color.RED, [Perm.R | Perm.W]), Color.BLUE: (Level.LOW,)}
    back = decode(encode(state))
    assert exactly(back, {"p": (1, [3]), 2: (1,)})
    restored = like(state, back)
    assert restored == state
    assert type(restored["p"]) is Point
    assert list(restored) == ["p", Color.BLUE]
    assert restored[Color.BLUE][0] is Level.LOW
    queue = collections.deque([Point(1, 2)], 3)
    assert type(like(queue, decode(encode(queue)))[0]) is Point


def test_like_leaves_alone_what_does_not_fit() -> None:
    assert exactly(like(Color.RED, 7), 7)
    assert exactly(like(Color.RED, True), True)
    assert exactly(like(Color.RED, [1]), [1])
    assert exactly(like(Point(1, 2), (1, 2, 3)), (1, 2, 3))
    assert exactly(like(Point(1, 2), [1, 2]), [1, 2])
    assert exactly(like([Point(1, 2)], [(1, 2), (3, 4)])[1], (3, 4))
    assert like({"a": Point(1, 2)}, {"b": (1, 2)}) == {"b": (1, 2)}
    assert like(5, "x") == "x"


class MyInt(int): ...


class MyFloat64(np.float64): ...


class MyDict(dict): ...


REFUSED = [
    (Config(), r"dataclasses\.asdict\(x\)"),
    (argparse.Namespace(a=1), r"vars\(x\)"),
    (collections.defaultdict(list), r"pass dict\(x\)"),
    (MyInt(1), "allow_pickle=True"),
    (MyDict(), "allow_pickle=True"),
    (MyFloat64(1), "allow_pickle=True"),
    (object(), "allow_pickle=True"),
    (time.gmtime(0), "allow_pickle=True"),
    (np.longdouble(1), "numpy.longdouble|numpy.float128"),
    (np.str_("a"), "numpy.str_"),
    (np.zeros(2), "arrays inside"),
    (torch.zeros(2), "arrays inside"),
    (torch.nn.Parameter(torch.zeros(())), "arrays inside"),
    ("a\ud800", "Unicode"),
    (pathlib.Path("a\udcff"), "Unicode"),
    (dt.datetime(2020, 1, 1, tzinfo=type("TZ", (dt.tzinfo,), {})()), "zone"),
    (len, "allow_pickle=True"),
    (pathlib.PureWindowsPath("//:/"), "read back"),
]


@pytest.mark.parametrize(("value", "says"), REFUSED, ids=ids(REFUSED))
def test_refusals_name_place_type_and_way_out(value: object, says: str) -> None:
    for wrapped, place in (
        (value, "opt.x:"),
        ([0, {"x": value}], 'opt.x[1]["x"]'),
        ((Point(0, value),), "opt.x[0].y"),
        ({3: collections.deque([value])}, "opt.x[3][0]"),
    ):
        with pytest.raises(UnsupportedValueError, match=says) as caught:
            encode(wrapped, where="opt.x")
        assert str(caught.value).startswith(place)
        if not isinstance(value, (str, pathlib.Path)):
            assert type(value).__name__ in str(caught.value)
        str(caught.value).encode()


def test_bad_keys_are_refused_with_their_place() -> None:
    for bad in ({(1, object()): 1}, {"\ud800": 1}, {object()}):
        with pytest.raises(UnsupportedValueError, match=r"^s<(key|member) ") as caught:
            encode(bad, where="s")
        str(caught.value).encode()
    for bad in ([1], {1: 2}, (1, [2]), slice(1), {1}, bytearray(), object()):
        with pytest.raises(UnsupportedValueError):
            encode_key(bad, "s")
    assert encode_key("a") == encode("a")


def test_enum_keys_that_would_collide_are_refused() -> None:
    for bad in ({Color.RED: 1, 1: 2}, {Color.RED, 1.0}, {(Color.RED,): 1, (True,): 2}):
        with pytest.raises(UnsupportedValueError, match="Enum"):
            encode(bad)
    lists = enum.Enum("lists", {"A": [1]})
    with pytest.raises(UnsupportedValueError, match="hashed"):
        encode({lists.A: 1})
    assert like({lists.A: 1}, {"a": 1}) == {"a": 1}


def nested(depth: int, wrap: object) -> object:
    value: object = 0
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: [x],
        lambda x: (x,),
        lambda x: {"k": x},
        lambda x: Point(x, 0),
        lambda x: frozenset([x]),
    ],
    ids=["list", "tuple", "dict", "namedtuple", "frozenset"],
)
def test_depth_limit_is_the_same_both_ways(wrap: object) -> None:
    deepest = encode(nested(64, wrap))
    decode(deepest)
    with pytest.raises(UnsupportedValueError, match="deeper than 64"):
        encode(nested(65, wrap))
    with pytest.raises(FormatError, match="deeper"):
        decode(b"\x91" + deepest)


def test_cycles_are_refused() -> None:
    loop: list[object] = []
    loop += [loop, loop]
    table: dict[str, object] = {}
    table["t"] = (table,)
    for cycle in (loop, table):
        with pytest.raises(UnsupportedValueError, match="contains itself"):
            encode(cycle, allow_pickle=True)


def test_pickle_needs_consent_at_both_ends() -> None:
    with pytest.raises(UnsupportedValueError):
        encode([Odd()])
    encoded = encode_value([Odd()], allow_pickle=True)
    assert encoded.pickled
    assert not encode_value([1, "a"], allow_pickle=True).pickled
    assert not encode_value(1, allow_pickle=True).pickled
    with pytest.raises(UnsafeCheckpointError):
        decode(encoded.data)
    assert decode(encoded.data, allow_pickle=True) == [Odd()]
    with pytest.raises(UnsupportedValueError, match="pickle refuses"):
        encode(lambda: 0, allow_pickle=True)
    with pytest.raises(UnsupportedValueError, match="arrays"):
        encode([np.zeros(2)], allow_pickle=True)
    with pytest.raises(UnsupportedValueError):
        encode_key(frozenset([object()]))


class Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return (os.mkdir, (self.path,))


def test_a_malicious_pickle_never_runs(tmp_path: pathlib.Path) -> None:
    target = tmp_path / "ran"
    bomb = pickle.dumps(Bomb(str(target)))
    tagged = Ext(EXT_CODES["pickle"], bomb)
    for hidden in (tagged, [tagged], Ext(EXT_CODES["tuple"], msgspec.msgpack.encode([1, tagged]))):
        with pytest.raises(UnsafeCheckpointError, match="allow_pickle"):
            decode(msgspec.msgpack.encode(hidden))
    for code in range(-128, 127):
        with pytest.raises(FormatError):
            decode(msgspec.msgpack.encode([Ext(code, bomb), Ext(99, b"")]))
    assert not target.exists()
    decode(msgspec.msgpack.encode(tagged), allow_pickle=True)
    assert target.exists()
    with pytest.raises(FormatError):
        decode(msgspec.msgpack.encode(Ext(EXT_CODES["pickle"], b"junk")), allow_pickle=True)


def ext(name: str, *fields: object) -> Ext:
    return Ext(EXT_CODES[name], msgspec.msgpack.encode(list(fields)))


MALFORMED = [
    b"",
    b"\x01\x01",
    b"\xc1",
    b"\xa1\xff",
    b"\x81\x01\x01",
    b"\xd6\xff\0\0\0\0",
    b"\xdd\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x04",
    b"\x91" * 100_000 + b"\xc0",
    Ext(28, b""),
    Ext(-2, b""),
    Ext(EXT_CODES["int"], b"\x01"),
    Ext(EXT_CODES["int"], b""),
    Ext(EXT_CODES["complex"], b"12"),
    Ext(EXT_CODES["tuple"], b"\x01"),
    Ext(EXT_CODES["tuple"], b""),
    Ext(EXT_CODES["uuid"], b"12"),
    Ext(EXT_CODES["decimal"], b"1e5"),
    Ext(EXT_CODES["zoneinfo"], b"../../etc/passwd"),
    Ext(EXT_CODES["zoneinfo"], b"/etc/passwd"),
    Ext(EXT_CODES["zoneinfo"], b"Europe"),
    Ext(EXT_CODES["zoneinfo"], b"No/Where"),
    Ext(EXT_CODES["torch.dtype"], b"load"),
    Ext(EXT_CODES["torch.dtype"], b"__dict__"),
    Ext(EXT_CODES["torch.device"], b"toaster"),
    ext("torch.Size", "a"),
    ext("namedtuple"),
    ext("namedtuple", "P", "x"),
    ext("namedtuple", "P", 1, 2),
    ext("dict", 1),
    ext("dict", [], 1),
    ext("dict", 1, 2, True, 3),
    ext("set", 1, 1.0),
    ext("frozenset", []),
    ext("deque"),
    ext("deque", 1, 1, 2),
    ext("deque", -1),
    ext("deque", 2**63),
    ext("range", 1),
    ext("range", 1, 2, 0),
    ext("slice", 1),
    ext("numpy", "float32", b"12"),
    ext("numpy", "float32", b""),
    ext("numpy", "float32", b"12345678"),
    ext("numpy", "bool", b"\2"),
    ext("numpy", "object", b"12345678"),
    ext("numpy", "O", b"12345678"),
    ext("numpy", "finfo", b"1"),
    ext("numpy", ["float32"], b"1234"),
    ext("numpy", "datetime64[1s]", b"12345678"),
    ext("path", "exe", "a"),
    ext("path", "posix", "a//b"),
    ext("path", "posix", 5),
    ext("date", b"\x07\xe4\x01\x01"),
    ext("datetime", 2020, 13, 1, 0, 0, 0, 0, 0, None),
    ext("datetime", 2020, 1, 1, 0, 0, 0, 0, 0, "UTC"),
    ext("timedelta", 10**18, 0, 0),
    ext("timezone", 10**18, None),
    ext("timezone", 0, 5),
    ext("fraction", 1, 0),
    ext("fraction", 2, 4),
    ext("fraction", 1, -1),
]


@pytest.mark.parametrize("data", MALFORMED, ids=ids(MALFORMED))
def test_malformed_bytes_are_a_format_error(data: bytes | Ext) -> None:
    with pytest.raises(FormatError):
        decode(data if isinstance(data, bytes) else msgspec.msgpack.encode(data))


def decode_or_refuse(data: bytes) -> None:
    try:
        value = decode(data)
    except (FormatError, UnsafeCheckpointError):
        return
    encode(value)  # what decodes is a plain value again


fuzz = settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))


@fuzz
@given(st.binary(max_size=60))
def test_arbitrary_bytes(data: bytes) -> None:
    decode_or_refuse(data)


@fuzz
@given(st.sampled_from([*EXT_CODES.values()]), st.lists(plain, max_size=5) | st.binary(max_size=20))
def test_arbitrary_payloads_behind_every_code(code: int, payload: list[object] | bytes) -> None:
    data = payload if isinstance(payload, bytes) else encode(payload)
    decode_or_refuse(msgspec.msgpack.encode(Ext(code, data)))


@fuzz
@given(plain, st.data())
def test_damaged_encodings(value: object, draw: st.DataObject) -> None:
    data = bytearray(encode(value))
    cut = draw.draw(st.integers(0, len(data) - 1))
    with pytest.raises((FormatError, UnsafeCheckpointError)):
        decode(bytes(data[:cut]))
    for _ in range(draw.draw(st.integers(1, 3))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    decode_or_refuse(bytes(data))


def in_fresh_python(script: str) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_plain_foreign_needs_no_torch_and_import_is_light() -> None:
    state = [torch.Size([2, 3]), torch.float32, torch.device("cuda:0")]
    assert exactly(decode(encode(state), foreign="plain"), [(2, 3), "float32", "cuda:0"])
    script = f"""
import sys
from shardkeep import values
from shardkeep.errors import MissingDependencyError
assert not {{"numpy", "torch", "ml_dtypes"}} & set(sys.modules)
values.encode([1, (2,), {{3: object}}], allow_pickle=True)
assert values.decode({encode(state)!r}, foreign="plain") == [(2, 3), "float32", "cuda:0"]
assert not {{"numpy", "torch", "ml_dtypes"}} & set(sys.modules)
sys.modules["torch"] = None
try:
    values.decode({encode(state)!r})
except MissingDependencyError as error:
    print(error)
"""
    assert "shardkeep[torch]" in in_fresh_python(script)


def test_an_old_ml_dtypes_is_a_missing_dependency(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(ml_dtypes.int1(0))
    monkeypatch.delattr(ml_dtypes, "int1")
    with pytest.raises(MissingDependencyError, match="int1"):
        decode(data)


def test_the_code_table_is_frozen_and_documented() -> None:
    table = re.findall(r"^ +(\d+)  (\S+)  ", values.__doc__ or "", re.M)
    assert {name: int(code) for code, name in table} == EXT_CODES


@pytest.mark.parametrize(
    ("value", "hexed"),
    [
        (None, "c0"),
        (-1, "ff"),
        (1.0, "cb3ff0000000000000"),
        ([True], "91c3"),
        (2**64, "c70901010000000000000000"),
        ((1,), "d5049101"),
        ({"a": 1}, "d60692a16101"),
        ({3, 1}, "c7030a920103"),
        (Point(1, 2), "c70d0595a5506f696e74a17801a17902"),
        (np.float32(1), "c70f0e92a7666c6f61743332c4040000803f"),
        (dt.timedelta(1), "d61393010000"),
    ],
    ids=str,
)
def test_bytes_on_disk_never_change(value: object, hexed: str) -> None:
    assert encode(value).hex() == hexed


def test_many_small_values_are_fast() -> None:
    states = [x for i in range(13_334) for x in (i, i / 3, f"name{i}")]
    start = time.perf_counter()
    for value in states:
        encode(value, where="w")
    assert time.perf_counter() - start < 1.0  # about 0.03 s; slack for a loaded machine


def test_a_number_too_long_to_print_in_place_of_a_name_is_one_of_our_errors():
    number = Ext(EXT_CODES["int"], (1 << 20_000).to_bytes(2501, "big", signed=True))
    items = msgspec.msgpack.encode([number, "x"])
    with pytest.raises(FormatError, match="not an encoded plain value"):
        decode(msgspec.msgpack.encode(Ext(EXT_CODES["path"], items)))
