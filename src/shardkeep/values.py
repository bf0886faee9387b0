# SPDX-License-Identifier: Apache-2.0
"""Plain values to bytes and back: tagged msgpack that returns exact types and runs no code.

None, bool, integers of 64 bits, float, str, bytes and list are msgpack's own types (a float is
always the 64-bit form, so every bit of it survives). All else is a msgpack ext. A payload written
`[a, b, ...]` is one msgpack array whose elements are values again; other payloads are raw bytes.
msgpack maps and timestamps never occur. The codes are part of the on-disk format: frozen.

    code  type           payload
       1  int            beyond 64 bits: two's complement, big-endian, as short as it goes
       2  complex        real, imag: two big-endian IEEE doubles
       3  bytearray      its bytes
       4  tuple          [item, ...]
       5  namedtuple     [type name, field, item, field, item, ...]; decodes to a tuple
       6  dict           [key, value, key, value, ...] in the order of the dict
       7  OrderedDict    as dict
       8  Counter        as dict
       9  deque          [maxlen or nil, item, ...]
      10  set            [member, ...] in the byte order of the members' encodings
      11  frozenset      as set
      12  range          [start, stop, step]
      13  slice          [start, stop, step]
      14  numpy          [dtype name, its bytes, little-endian]; a numpy or ml_dtypes scalar
      15  path           [kind, text]; kind: "path" (native), "posix", "windows" (pure ones)
      16  datetime       [year, month, day, hour, minute, second, microsecond, fold, zone]
      17  date           [year, month, day]
      18  time           [hour, minute, second, microsecond, fold, zone]
      19  timedelta      [days, seconds, microseconds]
      20  timezone       [offset in microseconds, name or nil]
      21  zoneinfo       key, ASCII
      22  uuid           16 bytes, big-endian
      23  decimal        upper-case scientific text, ASCII
      24  fraction       [numerator, denominator] in lowest terms
      25  torch.Size     [int, ...]
      26  torch.dtype    name without "torch.", ASCII
      27  torch.device   text as torch writes it, ASCII
     127  pickle         a pickle, protocol 5; only written and only read with allow_pickle

The zone of 16 and 18 is nil, a timezone or a zoneinfo. An Enum member is stored as its value.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import fractions
import importlib
import pathlib
import pickle
import re
import reprlib
import struct
import sys
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, cast

import msgspec
from msgspec.msgpack import Ext

from shardkeep.errors import (
    CheckpointError,
    FormatError,
    MissingDependencyError,
    UnsafeCheckpointError,
    UnsupportedValueError,
)
from shardkeep.wording import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = [
    "EXT_CODES",
    "MAX_DEPTH",
    "Encoded",
    "decode",
    "encode",
    "encode_key",
    "encode_value",
    "like",
    "same",
]

_NAMES = (
    "int complex bytearray tuple namedtuple dict OrderedDict Counter deque set frozenset range"
    " slice numpy path datetime date time timedelta timezone zoneinfo uuid decimal fraction"
    " torch.Size torch.dtype torch.device"
)
EXT_CODES: Final[dict[str, int]] = {
    **{name: code for code, name in enumerate(_NAMES.split(), start=1)},
    "pickle": 127,
}
"""Type name to msgpack ext code, as in the table above."""

MAX_DEPTH: Final = 64
"""How many containers may lie inside each other."""

Foreign = Literal["exact", "plain"]


@dataclasses.dataclass(frozen=True, slots=True)
class Encoded:
    """One encoded value."""

    data: bytes
    """What `decode` takes."""

    pickled: bool
    """True when a pickle lies somewhere inside, so that reading needs `allow_pickle`."""


def encode_value(value: object, *, where: str = "", allow_pickle: bool = False) -> Encoded:
    """Encode a plain value; `where` is its place in the state, for messages.

    Equal bytes mean the same value of the same type to the last bit, in the same dict order.
    Only pickles may differ between processes for equal objects.
    """
    if type(value) in _DIRECT:
        try:
            return Encoded(_pack(value), False)
        except (OverflowError, ValueError):
            pass  # a long int or a bad str: the walk below knows what to do and say
    walk = _Walk(where, allow_pickle)
    return Encoded(walk.pack(value, walk.lower(value)), walk.pickled)


def encode(value: object, *, where: str = "", allow_pickle: bool = False) -> bytes:
    """The bytes of `encode_value`, for callers who need not know about pickles.

    >>> decode(encode({1: (2.5, None)}))
    {1: (2.5, None)}
    """
    return encode_value(value, where=where, allow_pickle=allow_pickle).data


def encode_key(key: object, where: str = "") -> bytes:
    """Encode a mapping key: as `encode`, but what cannot be a key again is refused."""
    if type(key) is not str:
        _Walk(where, False).check_keys(key, [key])
    return encode(key, where=where)


def decode(
    data: bytes | bytearray | memoryview,
    *,
    allow_pickle: bool = False,
    foreign: Foreign = "exact",
    named: Callable[[str, tuple[str, ...], tuple[object, ...]], object] | None = None,
) -> object:
    """The value again; `FormatError` for any bytes that are not an encoding.

    With `foreign="plain"` torch is not imported: a Size becomes a tuple, a dtype or device its
    name. A pickle is an `UnsafeCheckpointError` unless allowed. `named(type name, fields, items)`
    builds what a named tuple becomes, in place of a tuple.
    """
    try:
        return _Reader(allow_pickle, foreign, named).value(_unpack(data))
    except CheckpointError:
        raise
    except Exception as error:  # hostile bytes reach many constructors; all failures mean one thing
        said = shown(error.args)  # which may hold numbers that are too long to print
        raise FormatError(f"not an encoded plain value: {type(error).__name__}{said}") from error


def same(a: object, b: object) -> bool:
    """Whether two plain values agree in type, order and every bit (an Enum counts as its value).

    >>> same(float("nan"), float("nan")), same(0.0, -0.0), same(1, True)
    (True, False, False)
    """
    return encode(a) == encode(b)


def like(target: object, value: object) -> object:
    """A decoded value with the classes that only a target knows: named tuples and Enums.

    A position where the target does not fit keeps the value as it is.
    """
    if isinstance(target, Enum):
        return _member(target, value)
    if type(value) is tuple and isinstance(target, tuple):
        items = _like_each(target, value)
        if _is_named_tuple(target) and len(target) == len(value):
            return cast("Any", type(target))._make(items)
        return tuple(items)
    if type(value) is list and isinstance(target, list):
        return _like_each(target, value)
    if type(value) is deque and isinstance(target, deque):
        return deque(_like_each(list(target), list(value)), value.maxlen)
    if type(value) in (dict, OrderedDict, Counter) and isinstance(target, dict):
        return _like_mapping(target, cast("dict[object, object]", value))
    return value


def _like_each(targets: Sequence[object], values: Sequence[object]) -> list[object]:
    paired = [like(target, value) for target, value in zip(targets, values, strict=False)]
    return paired + list(values[len(paired) :])


def _like_mapping(target: dict[object, object], value: dict[object, object]) -> object:
    try:
        known = {_bare(key): key for key in target}
    except TypeError:  # an Enum key whose value cannot be a key: nothing stored matches it
        return value
    made = type(value)()
    for key, item in value.items():
        if key in known:
            made[like(known[key], key)] = like(target[known[key]], item)
        else:
            made[key] = item
    return made


def _member(target: Enum, value: object) -> object:
    """The member of the target's Enum that has this value, exactly; else the value."""
    try:
        member = type(target)(value)
        # Enum finds 1 for True, and `_missing_` may invent a member: only an exact one counts.
        return member if same(member.value, like(member.value, value)) else value
    except Exception:  # `_missing_` is the user's code: whatever it raises, there is no member
        return value


# ---- encoding: a walk that lowers a value to what msgpack has, then one call to pack it

_pack = msgspec.msgpack.Encoder().encode
_AS_IS = frozenset({type(None), bool, float, bytes})
_DIRECT = _AS_IS | {int, str}
_INTS = range(-(2**63), 2**64)
_LITTLE = sys.byteorder == "little"
_TORCH = frozenset({"Size", "dtype", "device"})
_NUMPY = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64"
    " float16 float32 float64 complex64 complex128"
)
_ML_DTYPES = (
    "bfloat16 float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz"
    " float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float6_e2m3fn float6_e3m2fn float4_e2m1fn"
    " int1 int2 int4 uint1 uint2 uint4 complex32 bcomplex32"
)
_NUMPY_NAMES = frozenset(_NUMPY.split())
_ML_NAMES = frozenset(_ML_DTYPES.split())
_TIME64 = re.compile(r"(datetime64|timedelta64)(\[\d*[A-Za-z]+\])?\Z")
_ZONE_KEY = re.compile(r"[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*\Z")


class _Walk:
    """One `encode`: where the walk is, and whether it met something to pickle."""

    __slots__ = ("allow_pickle", "path", "pickled", "where")

    def __init__(self, where: str, allow_pickle: bool) -> None:
        self.where = where
        self.allow_pickle = allow_pickle
        self.pickled = False
        # Not popped when an error flies, so the message can name the place at no cost before.
        self.path: list[tuple[str, object]] = []

    def lower(self, value: object) -> object:
        known = _LOWER.get(type(value))
        if known is None:
            return _lower_other(self, value)
        name, lowering = known
        lowered = lowering(self, value)
        return self.ext(name, value, lowered) if name else lowered

    def ext(self, name: str, value: object, payload: object) -> Ext:
        """A tagged value: raw bytes stay as they are, a list becomes one msgpack array."""
        data = payload if type(payload) is bytes else self.pack(value, payload)
        return Ext(EXT_CODES[name], data)

    def item(self, value: object, kind: str, label: object) -> object:
        cls = type(value)
        if cls in _AS_IS or (cls is int and value in _INTS):
            return value
        self.path.append((kind, label))
        lowered = self.lower(value)
        self.path.pop()
        return lowered

    def items(self, values: Iterable[object]) -> list[object]:
        self.check_depth(values)
        return [self.item(value, "[{}]", index) for index, value in enumerate(values)]

    def pairs(self, mapping: dict[object, object]) -> list[object]:
        self.check_depth(mapping)
        self.check_keys(mapping, mapping)
        flat: list[object] = []
        for key, value in mapping.items():
            flat += self.item(key, "<key {}>", key), self.item(value, "[{}]", key)
        return flat

    def members(self, values: Iterable[object]) -> list[object]:
        self.check_depth(values)
        self.check_keys(values, values)
        packed = [self.pack(value, self.item(value, "<member {}>", value)) for value in values]
        return [msgspec.Raw(data) for data in sorted(packed)]

    def check_depth(self, value: object) -> None:
        if len(self.path) >= MAX_DEPTH:
            self.refuse(value, f"nested deeper than {MAX_DEPTH}, or contains itself. Flatten it")

    def check_keys(self, value: object, keys: Iterable[object]) -> None:
        """Keys must still be hashable and distinct once Enums are values, or none could decode."""
        listed = list(keys)
        try:
            distinct = len({_bare(key) for key in listed})
        except TypeError as error:
            self.refuse(value, f"a key or member cannot be hashed when read back: {error}")
        if distinct != len(listed):
            self.refuse(value, "an Enum here has the value of another key or member. Convert it")

    def pack(self, value: object, lowered: object) -> bytes:
        try:
            return _pack(lowered)
        except (OverflowError, ValueError) as error:
            self.refuse(value, f"too large for a plain value ({error}). Store it as an array")

    def refuse(self, value: object, why: str) -> NoReturn:
        place = (self.where or "value") + "".join(
            kind.format(f'"{label}"' if type(label) is str else reprlib.repr(label))
            for kind, label in self.path
        )
        place = place.encode(errors="backslashreplace").decode()  # a bad str may be the label
        raise UnsupportedValueError(
            f"{place}: cannot store a value of type {_type_name(value)}: {why}."
        )


def _bare(key: object) -> object:
    """A key as it will be after decoding, as far as equality and hashing go."""
    if type(key) in _DIRECT:
        return key
    if isinstance(key, Enum):
        return _bare(key.value)
    if isinstance(key, tuple):
        return tuple(map(_bare, key))
    if isinstance(key, frozenset):
        return frozenset(map(_bare, key))
    if isinstance(key, slice):  # hashable from Python 3.12 on, but older readers exist
        raise TypeError("unhashable type: 'slice'")
    return key


def _type_name(value: object) -> str:
    cls = type(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__name__}"


def _is_named_tuple(value: object) -> bool:
    fields = getattr(type(value), "_fields", None)
    return isinstance(value, tuple) and isinstance(fields, tuple) and len(fields) == len(value)


def _lower_other(walk: _Walk, value: object) -> object:
    """Types known by kind, not by identity; what is left is refused or pickled."""
    if isinstance(value, Enum):
        walk.check_depth(value)
        return walk.item(value.value, ".value", None)
    if type(value).__module__ == "torch" and type(value).__name__ in _TORCH:
        return _lower_torch(walk, value)
    if _is_named_tuple(value):
        return _lower_named_tuple(walk, cast("tuple[object, ...]", value))
    numpy = sys.modules.get("numpy")  # no numpy scalar exists where numpy is not imported
    if numpy is not None and isinstance(value, numpy.generic):
        name = value.dtype.name
        known = name in _NUMPY_NAMES or name in _ML_NAMES or _TIME64.match(name)
        if known and type(value) is value.dtype.type:  # not a subclass of the user's
            scalar = value if _LITTLE else value.byteswap()
            return walk.ext("numpy", value, [name, scalar.tobytes()])
    elif hasattr(type(value), "shape") and hasattr(type(value), "dtype"):
        walk.refuse(value, "arrays inside this container cannot be part of a plain value")
    return _lower_pickle(walk, value)


def _lower_pickle(walk: _Walk, value: object) -> Ext:
    if not walk.allow_pickle:
        walk.refuse(value, _hint(value))
    try:
        data = pickle.dumps(value, protocol=5)
    except Exception as error:
        walk.refuse(value, f"pickle refuses it too ({error}). Convert it")
    walk.pickled = True
    return walk.ext("pickle", value, data)


def _hint(value: object) -> str:
    if dataclasses.is_dataclass(value):
        return "pass dataclasses.asdict(x)"
    if _type_name(value) == "argparse.Namespace":
        return "pass vars(x)"
    if isinstance(value, defaultdict):
        return "its default factory is code; pass dict(x)"
    return "convert it, or pass allow_pickle=True"


def _lower_torch(walk: _Walk, value: object) -> Ext:
    name = type(value).__name__
    if name == "Size":
        return walk.ext("torch.Size", value, walk.items(cast("tuple[object, ...]", value)))
    return walk.ext(f"torch.{name}", value, str(value).removeprefix("torch.").encode())


def _lower_named_tuple(walk: _Walk, value: tuple[object, ...]) -> Ext:
    walk.check_depth(value)
    flat: list[object] = [type(value).__name__]
    for field, item in zip(cast("Any", value)._fields, value, strict=True):
        flat += field, walk.item(item, f".{field}", None)
    return walk.ext("namedtuple", value, flat)


def _lower_int(walk: _Walk, value: int) -> object:
    if value in _INTS:
        return value
    # ~ maps a negative number to the positive one with as many significant bits.
    size = (value if value >= 0 else ~value).bit_length() // 8 + 1
    return walk.ext("int", value, value.to_bytes(size, "big", signed=True))


def _lower_str(walk: _Walk, value: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            walk.refuse(value, f"not valid Unicode ({error.reason}). Pass bytes")
    return value


def _lower_path(walk: _Walk, value: pathlib.PurePath) -> list[object]:
    kind = next(kind for kind, cls in _PATHS.items() if type(value) is cls)
    text = str(value)
    again = type(value)(text)
    # pathlib reads its own text of a few odd Windows paths ("//:/") as another path.
    if again.parts != value.parts or str(again) != text:
        walk.refuse(value, "its text does not read back as the same path. Pass str(x)")
    return [kind, walk.item(text, "", None)]


def _lower_timezone(walk: _Walk, value: dt.timezone) -> list[object]:
    offset, *name = cast("Any", value).__getinitargs__()  # tells a given name from a made-up one
    return [offset // _MICROSECOND, *walk.items(name or [None])]


def _lower_zone(walk: _Walk, value: zoneinfo.ZoneInfo) -> bytes:
    if not value.key or not _ZONE_KEY.match(value.key):
        walk.refuse(value, "it has no usable key. Convert the time to UTC")
    return value.key.encode()


def _lower_datetime(walk: _Walk, x: dt.datetime) -> list[object]:
    return [x.year, x.month, x.day, *_lower_time(walk, x)]


def _lower_time(walk: _Walk, x: dt.datetime | dt.time) -> list[object]:
    walk.check_depth(x)
    if type(x.tzinfo) not in _ZONES:
        walk.refuse(x, f"its zone is a {_type_name(x.tzinfo)}. Use datetime.timezone or zoneinfo")
    return [x.hour, x.minute, x.second, x.microsecond, x.fold, walk.item(x.tzinfo, ".tzinfo", None)]


_MICROSECOND = dt.timedelta(microseconds=1)
_ZONES = (type(None), dt.timezone, zoneinfo.ZoneInfo)
_PATHS: dict[str, type[pathlib.PurePath]] = {
    "path": type(pathlib.Path()),
    "posix": pathlib.PurePosixPath,
    "windows": pathlib.PureWindowsPath,
}

# Type to its name in EXT_CODES ("" where the lowered value needs no tag) and its payload.
_LOWER: dict[type, tuple[str, Callable[[_Walk, Any], object]]] = {
    **{cls: ("", lambda walk, x: x) for cls in _AS_IS},
    int: ("", _lower_int),
    str: ("", _lower_str),
    list: ("", _Walk.items),
    complex: ("complex", lambda walk, x: struct.pack(">dd", x.real, x.imag)),
    bytearray: ("bytearray", lambda walk, x: bytes(x)),
    tuple: ("tuple", _Walk.items),
    dict: ("dict", _Walk.pairs),
    OrderedDict: ("OrderedDict", _Walk.pairs),
    Counter: ("Counter", _Walk.pairs),
    deque: ("deque", lambda walk, x: [x.maxlen, *walk.items(x)]),
    set: ("set", _Walk.members),
    frozenset: ("frozenset", _Walk.members),
    range: ("range", lambda walk, x: walk.items((x.start, x.stop, x.step))),
    slice: ("slice", lambda walk, x: walk.items((x.start, x.stop, x.step))),
    **dict.fromkeys(_PATHS.values(), ("path", _lower_path)),
    dt.datetime: ("datetime", _lower_datetime),
    dt.date: ("date", lambda walk, x: [x.year, x.month, x.day]),
    dt.time: ("time", _lower_time),
    dt.timedelta: ("timedelta", lambda walk, x: [x.days, x.seconds, x.microseconds]),
    dt.timezone: ("timezone", _lower_timezone),
    zoneinfo.ZoneInfo: ("zoneinfo", _lower_zone),
    uuid.UUID: ("uuid", lambda walk, x: x.bytes),
    # Upper case because the caller's decimal context chooses between "1E+5" and "1e+5".
    decimal.Decimal: ("decimal", lambda walk, x: str(x).upper().encode()),
    fractions.Fraction: ("fraction", lambda walk, x: walk.items((x.numerator, x.denominator))),
}


# ---- decoding: unpack to lists and Ext, then build. `decode` turns whatever a constructor raises
# into a FormatError, so builders check only what would pass silently.

_unpack = msgspec.msgpack.Decoder().decode


class _Reader:
    """One `decode`: its permissions and how deep it is."""

    __slots__ = ("allow_pickle", "depth", "foreign", "named")

    def __init__(
        self,
        allow_pickle: bool,
        foreign: Foreign,
        named: Callable[[str, tuple[str, ...], tuple[object, ...]], object] | None,
    ) -> None:
        self.allow_pickle = allow_pickle
        self.foreign = foreign
        self.named = named
        self.depth = 0

    def value(self, node: object) -> object:
        if type(node) in _DIRECT:
            return node
        if type(node) is list:
            return self.items(node)
        _require(type(node) is Ext, f"msgpack {type(node).__name__}")
        code, data = cast("Ext", node).code, bytes(cast("Ext", node).data)
        _require(code in _NAME_OF, f"unknown ext code {code}; a newer version wrote this?")
        name = _NAME_OF[code]
        if name in _FROM_BYTES:
            return _FROM_BYTES[name](data)
        if name in _FROM_ITEMS:
            items = self.payload(data)
            built = _FROM_ITEMS[name](*items)
            if name == "namedtuple" and self.named is not None:
                return self.named(items[0], tuple(items[1::2]), tuple(items[2::2]))
            return built
        return self.pickled(data) if name == "pickle" else self.torch(name, data)

    def items(self, nodes: list[object]) -> list[object]:
        _require(self.depth < MAX_DEPTH, f"nested deeper than {MAX_DEPTH}")
        self.depth += 1
        values = [self.value(node) for node in nodes]
        self.depth -= 1
        return values

    def payload(self, data: bytes) -> list[Any]:
        nodes = _unpack(data)
        _require(type(nodes) is list, "the payload is no array")
        return self.items(nodes)

    def pickled(self, data: bytes) -> object:
        if not self.allow_pickle:
            raise UnsafeCheckpointError(
                "this value holds a pickle, which can run code when read. "
                "Pass allow_pickle=True only if you trust who wrote it."
            )
        return pickle.loads(data)

    def torch(self, name: str, data: bytes) -> object:
        plain = tuple(self.payload(data)) if name == "torch.Size" else data.decode("ascii")
        _require(type(plain) is str or all(type(n) is int for n in plain), name)
        if self.foreign == "plain":
            return plain
        torch = _module("torch", "shardkeep[torch]")
        if name != "torch.dtype":
            return torch.Size(plain) if name == "torch.Size" else torch.device(plain)
        dtype = vars(torch).get(plain)  # not getattr: the module's __getattr__ imports things
        _require(isinstance(dtype, torch.dtype), f"this torch has no dtype {plain!r}")
        return dtype


def _require(fine: bool, wrong: str) -> None:
    if not fine:
        raise FormatError(f"not an encoded plain value: {wrong}")


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        message = f"a stored value needs {name}: pip install '{package}'"
        raise MissingDependencyError(message) from error


def _build_int(data: bytes) -> int:
    value = int.from_bytes(data, "big", signed=True)
    _require(value not in _INTS, "a short integer in long form")
    return value


def _build_mapping(cls: type[Any]) -> Callable[..., object]:
    def build(*flat: object) -> object:
        made = cls()
        for key, value in zip(flat[::2], flat[1::2], strict=True):
            made[key] = value
        _require(2 * len(made) == len(flat), "a key occurs twice")
        return made

    return build


def _build_set(cls: type[Any]) -> Callable[..., object]:
    def build(*members: object) -> object:
        made = cls(members)
        _require(len(made) == len(members), "a member occurs twice")
        return made

    return build


def _build_named_tuple(name: str, *flat: object) -> tuple[object, ...]:
    _require(len(flat) % 2 == 0, "a field without a value")
    _require(all(type(text) is str for text in (name, *flat[::2])), "a name is no text")
    return flat[1::2]


def _build_deque(maxlen: int | None, *items: object) -> deque[object]:
    _require(maxlen is None or maxlen >= len(items), "more items than a deque's maxlen")
    return deque(items, maxlen)


def _build_numpy(name: str, raw: bytes) -> object:
    numpy = _module("numpy", "numpy")
    if name in _ML_NAMES:
        ml_dtypes = _module("ml_dtypes", "ml_dtypes")
        if not hasattr(ml_dtypes, name):
            raise MissingDependencyError(f"this ml_dtypes has no {name}: install a newer one.")
        dtype = numpy.dtype(getattr(ml_dtypes, name))
    else:
        _require(name in _NUMPY_NAMES or bool(_TIME64.match(name)), f"unknown dtype {name!r}")
        dtype = numpy.dtype(name)
    array = numpy.frombuffer(raw, dtype)
    scalar = (array if _LITTLE else array.byteswap())[0]
    _require(len(array) == 1 and dtype.name == name, "a numpy scalar of another size or name")
    _require(name != "bool" or raw in (b"\0", b"\1"), "a bool that is neither 0 nor 1")
    return scalar


def _build_path(kind: str, text: str) -> pathlib.PurePath:
    path = _PATHS[kind](text)
    # A native path from another system may be respelled here; a pure one never is.
    _require(kind == "path" or str(path) == text, "path")
    return path


def _build_zone(data: bytes) -> zoneinfo.ZoneInfo:
    key = data.decode("ascii")
    # The key names a file, and may name a submodule of tzdata: nothing odd gets that far.
    _require(bool(_ZONE_KEY.match(key)), f"time zone {key!r}")
    try:
        return zoneinfo.ZoneInfo(key)
    except zoneinfo.ZoneInfoNotFoundError as error:
        raise FormatError(f"no time zone {key!r} on this machine: install tzdata.") from error


def _build_decimal(data: bytes) -> decimal.Decimal:
    value = decimal.Decimal(data.decode("ascii"))
    # A context without traps makes NaN of nonsense.
    _require(str(value).upper().encode() == data, "decimal")
    return value


def _build_fraction(numerator: int, denominator: int) -> fractions.Fraction:
    value = fractions.Fraction(numerator, denominator)
    _require(type(denominator) is int and value.denominator == denominator, "fraction")
    return value


_NAME_OF = {code: name for name, code in EXT_CODES.items()}
_FROM_BYTES: dict[str, Callable[[bytes], object]] = {
    "int": _build_int,
    "complex": lambda data: complex(*struct.unpack(">dd", data)),
    "bytearray": bytearray,
    "zoneinfo": _build_zone,
    "uuid": lambda data: uuid.UUID(bytes=data),
    "decimal": _build_decimal,
}
# Explicit arguments, not the class itself: dates take pickled bytes, range takes one argument.
_FROM_ITEMS: dict[str, Callable[..., object]] = {
    "tuple": lambda *items: items,
    "namedtuple": _build_named_tuple,
    "dict": _build_mapping(dict),
    "OrderedDict": _build_mapping(OrderedDict),
    "Counter": _build_mapping(Counter),
    "deque": _build_deque,
    "set": _build_set(set),
    "frozenset": _build_set(frozenset),
    "range": lambda start, stop, step: range(start, stop, step),
    "slice": lambda start, stop, step: slice(start, stop, step),
    "numpy": _build_numpy,
    "path": _build_path,
    "datetime": lambda y, mo, d, h, mi, s, us, fold, zone: dt.datetime(
        y, mo, d, h, mi, s, us, zone, fold=fold
    ),
    "date": lambda year, month, day: dt.date(year, month, day),
    "time": lambda h, mi, s, us, fold, zone: dt.time(h, mi, s, us, zone, fold=fold),
    "timedelta": lambda days, seconds, us: dt.timedelta(days, seconds, us),
    "timezone": lambda us, name: dt.timezone(
        dt.timedelta(microseconds=us), *([] if name is None else [name])
    ),
    "fraction": _build_fraction,
}
