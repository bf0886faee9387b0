# SPDX-License-Identifier: Apache-2.0
"""What the interpreter of pickles builds with, and what it gives out: checked so one may walk it.

A few bytes of a pickle can describe a value that holds itself, that never ends when taken apart, or
whose hash takes for ever. None of these leaves the interpreter.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from time import thread_time
from typing import Any

from shardkeep.errors import FormatError, UnsafeCheckpointError

__all__ = [
    "AT_ONCE",
    "SEARCH",
    "Constant",
    "Global",
    "Limits",
    "StandIn",
    "check_graph",
    "check_key",
    "excessive",
]

SEARCH = 5e-6
"""Seconds in which any key is found whose hash nobody chose."""
AT_ONCE = 64
"""Keys that are looked for between two looks at the clock."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one pickle may be."""

    nbytes: int = 1 << 30
    """Its length."""
    depth: int = 100
    """Containers inside each other, in what is built."""
    marks: int = 1000
    """The same while it is being built."""
    containers: int = 150_000
    """Containers beyond one for each 8 bytes of the pickle."""
    copies: int = 48 << 20
    """Bytes that calls look at and copy, beyond 48 for each byte of the pickle."""
    expanded: int = 1_000_000
    """Containers and what lies in them, beyond 16 times the containers and 4 times the rest that
    there is (16 times also of sequences without containers), if shared ones are counted wherever
    they occur; and as many as it takes microseconds to look for keys whose hashes were chosen."""
    odd_keys: int = 10_000
    """Keys and members whose hashes a writer can choose with ease, as long and complex numbers, or
    that take long to look at: long tuples, and tuples in tuples."""
    searching: float = 0.5
    """Seconds of looking for the places of keys other than texts, beyond some microseconds for
    each: the hashes of numbers, of UUIDs and of tuples of them can be chosen, too, but there may be
    many that nobody chose."""
    long: int = 1 << 10
    """Bytes of one integer: Python prints none that is much longer."""
    line: int = 1 << 20
    """Bytes of one line, in the oldest protocols."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A name that stands for a value, not for something to call."""

    value: object
    """The value."""


class Global:
    """A class or function that a pickle names; stand-ins may get one as an argument."""

    __slots__ = ("make", "name", "numbers")

    def __init__(self, name: str, make: Callable[..., object], *, numbers: bool = False) -> None:
        self.name = name
        """`module.name` as the pickle has it."""
        self.make = make
        """What is called in its place."""
        self.numbers = numbers
        """Whether it makes of a tuple of numbers what may be shared by all who ask for the same."""


class StandIn:
    """Base of what stands for an object: inert, hashed by identity."""

    __slots__ = ()

    flat = False
    """True where `build` lets in nothing that `inside` would have to give."""

    chosen = False
    """True where a writer can choose the hash of what it becomes in the end."""

    def finished(self) -> object:
        """What that is; a `ValueError` if it was not described."""
        return self

    def build(self, state: Any) -> None:
        """Take the state that a pickle sets; whatever does not fit is a `ValueError`."""
        raise ValueError(f"a {type(self).__name__} has no state")

    def inside(self) -> Iterable[object]:
        """All it holds."""
        return ()


_ATOMS: frozenset[type] = frozenset({str, int, float, bool, type(None), bytes, bytearray, complex})
_SEQUENCES = frozenset({list, tuple, set, frozenset, deque})
_MAPPINGS = frozenset({dict, OrderedDict, Counter})
_HASHED = _MAPPINGS | {set, frozenset}
_CHOSEN = 4
"""What a key counts whose hash is easily chosen: others are slow to find."""
_ITEM = 48
"""Bytes that each item of a tuple counts: no more than a byte of the pickle allows for."""
_SHARED = 16
"""Times that a part may occur on the average."""
_PLAIN_KEYS = frozenset({str, float, bool, type(None), bytes})


def _inside(value: Any) -> Iterable[Any] | None:
    """What a value holds; None where it is nothing to look into."""
    kind: type = type(value)
    if kind in _SEQUENCES or isinstance(value, tuple):
        return list(value)
    if kind in _MAPPINGS:
        return [*value, *value.values()]
    if isinstance(value, StandIn):
        return value.inside()
    return None


def check_graph(root: object, where: str, limits: Limits) -> None:
    """Refuse cycles, too much depth or sharing, and names of code among the values."""
    skip: set[type] = set(_ATOMS)
    known = _Known(limits.expanded)
    search = _Search(where, limits.searching)
    path: list[_Visit] = []
    _enter(root, path, known, skip, where, limits)
    while path:
        visit = path[-1]
        for item in visit.todo:
            if type(item) in skip:
                continue
            found = known.get(id(item))
            if found is not None:
                visit.count(*found, where)
            elif _enter(item, path, known, skip, where, limits):
                search.chosen |= getattr(item, "chosen", False)
                break
        else:
            path.pop()
            visit.size += search.searched(visit.value)
            _leave(visit, path, known, where, limits)


class _Known(dict[int, tuple[int, int]]):
    """Of each container: how much is inside of it, counted wherever it occurs, and how deep."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        """How much may be inside of one."""


class _Visit:
    """A container on the way to the value that is looked at."""

    __slots__ = ("height", "size", "todo", "value")

    def __init__(self, value: object, todo: Iterator[object]) -> None:
        self.value, self.todo, self.size, self.height = value, todo, 1, 1

    def count(self, size: int, height: int, where: str) -> None:
        if size < 0:
            raise FormatError(f"{where}: a {type(self.value).__name__} holds itself")
        self.size += size
        self.height = max(self.height, height + 1)


def _enter(
    value: object,
    path: list[_Visit],
    known: _Known,
    skip: set[type],
    where: str,
    limits: Limits,
) -> bool:
    if type(value) is Global:
        raise UnsafeCheckpointError(
            f"{where}: {value.name} is stored as a value. Classes and functions are not read; "
            "save its name instead."
        )
    inner = None if getattr(value, "flat", False) else _inside(value)
    if inner is None:
        skip.add(type(value))
        return False
    if len(path) >= limits.depth:
        raise FormatError(f"{where}: values nested deeper than {limits.depth}")
    known[id(value)] = (-1, 0)
    items = list(inner)
    todo = [item for item in items if type(item) not in skip]
    visit, plain = _Visit(value, iter(todo)), len(items) - len(todo)
    visit.size += plain
    # Names and places are kept for each item of a mapping, and of a sequence that holds one.
    once = type(value) in _MAPPINGS or todo
    known.room += _SHARED + plain * (_SHARED // 4 if once else _SHARED)
    path.append(visit)
    return True


class _Search:
    """Looking for keys once they are what they stand for: those that were built are found by what
    they are, which nobody chose.

    What is inside of keys is looked for before them, so that making them takes no longer than that.
    """

    def __init__(self, where: str, seconds: float) -> None:
        self.where, self.left = where, seconds
        self.chosen = False
        """Whether anything was met that becomes a key whose hash can be chosen."""
        self._made: dict[int, object] = {}

    def searched(self, value: Any) -> int:
        """Microseconds beyond the usual in which the keys of a container are looked for. Whoever
        copies the values spends them wherever it occurs."""
        if type(value) not in _HASHED:
            return 0
        kinds = set(map(type, value))
        if all(kind is str or (issubclass(kind, StandIn) and not kind.chosen) for kind in kinds):
            return 0
        keys = [self._finished(key) for key in value] if self.chosen else list(value)
        known: set[Any] = set()
        spent = 0.0
        step = AT_ONCE if kinds.isdisjoint((tuple, frozenset)) else 1  # one may take long itself
        for low in range(0, len(keys), step):
            begun, some = thread_time(), keys[low : low + step]
            known.update(some)
            spent += thread_time() - begun - SEARCH * len(some)
            if spent > self.left:
                raise excessive(self.where, "has keys that take far too long to find")
        self.left -= spent
        return max(0, int(spent * 1e6))

    def _finished(self, key: Any) -> Any:
        kind: Any = type(key)
        if not (kind is tuple or kind is frozenset or getattr(kind, "chosen", False)):
            return key
        made = self._made.get(id(key))
        if made is None:
            if isinstance(key, StandIn):
                try:
                    made = key.finished()
                except ValueError as error:
                    raise FormatError(f"{self.where}: {error}") from error
            else:
                made = kind(map(self._finished, key))
            self._made[id(key)] = made
        return made


def excessive(where: str, what: str) -> UnsafeCheckpointError:
    """For a pickle without bounds."""
    return UnsafeCheckpointError(
        f"{where}: the pickle {what}. Reading it would take far more time or memory than its "
        "length explains, so nothing of it is read. If it is yours, save plain values and tensors "
        "instead, and less of them in one file."
    )


def _leave(visit: _Visit, path: list[_Visit], known: _Known, where: str, limits: Limits) -> None:
    known[id(visit.value)] = (visit.size, visit.height)
    if len(path) + visit.height > limits.depth:
        raise FormatError(f"{where}: values nested deeper than {limits.depth}")
    if visit.size > known.room:
        raise UnsafeCheckpointError(
            f"{where}: values that share parts would be {visit.size} when taken apart; for as many "
            f"as there are, at most {known.room} may be"
        )
    if path:
        path[-1].count(visit.size, visit.height, where)


def check_key(key: Any, where: str, depth: int = 0) -> tuple[int, int]:
    """How much a key counts towards `Limits.odd_keys`, and the bytes that are looked at to hash it
    and to compare it with an equal one; refuses those that must not be hashed."""
    kind = type(key)
    if kind in _PLAIN_KEYS:
        return 0, 0
    if isinstance(key, StandIn):
        return 0, 0
    if kind is int:
        return (0 if -(2**64) < key < 2**64 else _CHOSEN), 0
    if kind is Global:
        raise UnsafeCheckpointError(f"{where}: {key.name} is used as a key")
    if isinstance(key, tuple):
        if depth > 8:
            raise FormatError(f"{where}: tuples nested too deep for a key")
        # A tuple costs what is in it; those inside of it may be the same one many times.
        count, size = bool(depth) + len(key) // 100, _ITEM * len(key)
        for item in key:
            if type(item) is str or type(item) is bytes:
                size += len(item)
                continue
            inner, more = check_key(item, where, depth + 1)
            count += inner
            size += more
            if count > 10_000:
                raise FormatError(f"{where}: a tuple too large for a key")
        return count, size
    return _CHOSEN, 0
