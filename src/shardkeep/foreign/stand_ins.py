# SPDX-License-Identifier: Apache-2.0
"""What stands in for classes of Python and numpy in other systems' pickles.

Functions here get whatever a pickle says, so each takes exactly what the real class writes, checks
it, and does no more work than its arguments are long.
"""

from __future__ import annotations

import datetime as dt
import decimal
import fractions
import pathlib
import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any, cast

from shardkeep.errors import UnsafeCheckpointError
from shardkeep.foreign.graphs import Constant, Global, StandIn
from shardkeep.foreign.numpy_stand_ins import NUMPY

__all__ = ["PLAIN", "Record", "Uuid", "members", "records"]


_SLOTS = ((type(None), dict), (dict, dict))


class Record(StandIn):
    """An object of any class, as a pickle describes it: what it is made from, and its state."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name = name
        """`module.name` of the class."""
        self.args = args
        """What the pickle calls it with."""
        self.state: Any = None
        """What the pickle sets: attributes by name, or what the class's `__getstate__` gave."""

    def build(self, state: Any) -> None:
        """Keep the state; that of a class with slots joins the rest."""
        if type(state) is tuple and tuple(map(type, state)) in _SLOTS:
            state = {**(state[0] or {}), **state[1]}
        self.state = state

    def inside(self) -> Iterable[object]:
        """Arguments and state."""
        return self.args, self.state

    def get(self, field: str, default: Any = None) -> Any:
        """An attribute."""
        return self.state.get(field, default) if type(self.state) is dict else default

    def __repr__(self) -> str:
        return f"<{self.name}>"


def records(module: str, *names: str) -> dict[str, Callable[..., object]]:
    """Entries for classes of a module whose objects become `Record`s; Enums have their value."""

    def of(full: str) -> Callable[..., object]:
        return lambda *args: Record(full, args)

    return {f"{module}.{name}": of(f"{module}.{name}") for name in names}


def members(*enums: str) -> dict[str, Callable[..., object]]:
    """An entry for what Python 3.11.0 to 3.11.3 pickle a member of these Enums as: `getattr` of the
    class and its name. Nothing is looked up; the name is taken in place of the value."""

    def member(*args: Any) -> object:
        if len(args) == 2 and type(args[0]) is Global and args[0].name in enums:
            return args[0].make(_of(args[1], str))
        raise UnsafeCheckpointError(
            "the pickle needs builtins.getattr of something else than an Enum it may have"
        )

    return {"builtins.getattr": member}


def _require(fine: bool, wrong: str = "other arguments than expected") -> None:
    if not fine:
        raise ValueError(wrong)


def _of(value: object, *kinds: type) -> Any:
    _require(type(value) in kinds, f"a {type(value).__name__}")
    return value


def _bytes(*args: Any) -> bytes:
    if not args:
        return b""
    text, encoding = args
    _require(encoding in ("latin1", "latin-1"), "bytes in another encoding than latin1")
    return bytes(_of(text, str).encode("latin1"))


def _bytearray(*args: Any) -> bytearray:
    if len(args) == 1:
        return bytearray(_of(args[0], bytes))  # a number would be its length
    return bytearray(_bytes(*args))


def _complex(real: Any, imag: Any) -> complex:
    return complex(_of(real, float, int), _of(imag, float, int))


def _set(items: Any = ()) -> set[object]:
    return set(_of(items, list, tuple))


def _frozenset(items: Any = ()) -> frozenset[object]:
    return frozenset(_of(items, list, tuple))


def _range(start: Any, stop: Any, step: Any) -> range:
    return range(_of(start, int), _of(stop, int), _of(step, int))


def _slice(*parts: Any) -> slice:
    _require(len(parts) == 3 and all(type(part) in (int, type(None)) for part in parts))
    return slice(*parts)


_NUMBERED = 1000
"""Pairs of which some keys may be numbers: theirs are hashed all at once."""


_LONGEST = 4096
"""Characters of such a key: equal ones are compared letter by letter."""


def _plain_key(key: object) -> bool:
    if type(key) is str:
        return len(key) <= _LONGEST
    return type(key) is int and -(2**64) < key < 2**64


def _mapping(cls: type[Any]) -> Callable[..., object]:
    def make(*args: Any) -> object:
        made = cls()
        if args:
            (given,) = args
            # Python 2 writes pairs, a Counter a dict; the keys of a dict were looked at before.
            pairs = given.items() if type(given) is dict else _of(given, list)
            for key, value in pairs:
                _require(type(given) is dict or type(key) is str or len(given) <= _NUMBERED)
                _require(type(given) is dict or _plain_key(key), "an odd key")
                made[key] = value
        return made

    return make


def _default_dict(factory: Any = None) -> dict[object, object]:
    """As a dict: what makes the values that are not there is code."""
    _require(factory is None or type(factory) is Global)
    return {}


def _deque(items: Any = (), maxlen: Any = None) -> deque[object]:
    _of(maxlen, int, type(None))
    return deque(_of(items, list, tuple), maxlen)


def _datetime(data: Any, zone: Any = None) -> dt.datetime:
    _require(type(data) is bytes and len(data) == 10 and type(zone) in (dt.timezone, type(None)))
    make: Any = dt.datetime  # with the bytes that it writes itself
    return cast("dt.datetime", make(data) if zone is None else make(data, zone))


def _date(data: Any) -> dt.date:
    _require(type(data) is bytes and len(data) == 4)
    make: Any = dt.date
    return cast("dt.date", make(data))


def _time(data: Any, zone: Any = None) -> dt.time:
    _require(type(data) is bytes and len(data) == 6 and type(zone) in (dt.timezone, type(None)))
    return dt.time(data) if zone is None else dt.time(data, zone)


def _timedelta(days: Any, seconds: Any, micros: Any) -> dt.timedelta:
    return dt.timedelta(_of(days, int), _of(seconds, int), _of(micros, int))


def _timezone(offset: Any, *name: Any) -> dt.timezone:
    _require(not name or (len(name) == 1 and type(name[0]) is str))
    return dt.timezone(_of(offset, dt.timedelta), *name)


def _path(cls: Callable[..., pathlib.PurePath]) -> Callable[..., object]:
    def make(*parts: Any) -> pathlib.PurePath:
        _require(len(parts) < 1000 and all(type(part) is str for part in parts))
        return cls(*parts)

    return make


def _decimal(text: Any) -> decimal.Decimal:
    _require(type(text) is str and len(text) < 1000)
    return decimal.Decimal(text)


def _fraction(*args: Any) -> fractions.Fraction:
    if len(args) == 1:  # before Python 3.12 as text
        _require(type(args[0]) is str and len(args[0]) < 1000 and "e" not in args[0].lower())
        return fractions.Fraction(args[0])
    numerator, denominator = args
    _of(numerator, int)
    _of(denominator, int)
    _require(max(numerator.bit_length(), denominator.bit_length()) < 4096)
    return fractions.Fraction(numerator, denominator)


class Uuid(StandIn):
    """A UUID whose state comes later; `finished` has it."""

    __slots__ = ("number",)

    chosen = True

    def __init__(self) -> None:
        self.number: int | None = None

    def build(self, state: Any) -> None:
        """Take the number."""
        self.number = _of(_of(state, dict)["int"], int)
        uuid.UUID(int=self.number)

    def finished(self) -> uuid.UUID:
        """The UUID itself."""
        _require(self.number is not None, "a UUID without a number")
        return uuid.UUID(int=self.number)


def _only_name(*args: object) -> object:
    raise ValueError("it is a name here, not something to call")


_BUILTINS: dict[str, Callable[..., object] | Constant] = {
    "bytes": _bytes,
    "bytearray": _bytearray,
    "complex": _complex,
    "set": _set,
    "frozenset": _frozenset,
    "range": _range,
    "slice": _slice,
    "dict": _mapping(dict),
    # As factories of a defaultdict.
    **dict.fromkeys(("list", "int", "float", "str", "tuple", "bool"), _only_name),
}

PLAIN: dict[str, Callable[..., object] | Constant] = {
    **{f"builtins.{name}": make for name, make in _BUILTINS.items()},
    **{f"__builtin__.{name}": make for name, make in _BUILTINS.items()},
    "__builtin__.xrange": _range,
    "_codecs.encode": _bytes,
    "collections.OrderedDict": _mapping(OrderedDict),
    "collections.Counter": _mapping(Counter),
    "collections.defaultdict": _default_dict,
    "collections.deque": _deque,
    "datetime.datetime": _datetime,
    "datetime.date": _date,
    "datetime.time": _time,
    "datetime.timedelta": _timedelta,
    "datetime.timezone": _timezone,
    **{
        f"{module}.{name}": _path(cls)
        for module in ("pathlib", "pathlib._local")
        for name, cls in {
            "PosixPath": pathlib.Path,
            "WindowsPath": pathlib.PureWindowsPath,
            "Path": pathlib.Path,
            "PurePosixPath": pathlib.PurePosixPath,
            "PureWindowsPath": pathlib.PureWindowsPath,
        }.items()
    },
    "uuid.UUID": Uuid,
    "decimal.Decimal": _decimal,
    "fractions.Fraction": _fraction,
    **NUMPY,
}
"""Plain values: what a checkpoint may hold beside its tensors."""
