# SPDX-License-Identifier: Apache-2.0
"""The interpreter of pickles: a stack, a memo, and one action for each opcode.

Nothing here imports, looks up an attribute by a name from the pickle, or calls anything but the
functions of the table it is given. `pickles` says what follows from that.
"""

from __future__ import annotations

import codecs
import re
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from time import thread_time
from typing import Any, Final, NoReturn

from shardkeep.collector import paused_collector
from shardkeep.errors import CheckpointError, CorruptionError, FormatError, UnsafeCheckpointError
from shardkeep.foreign.graphs import (
    AT_ONCE,
    SEARCH,
    Constant,
    Global,
    Limits,
    StandIn,
    check_key,
    excessive,
)

__all__ = ["Classes", "Cut", "interpret"]

Classes = Mapping[str, Callable[..., object] | Constant]
"""`module.name` to what stands in for it: called with what the pickle gives, or a constant."""

_number4 = struct.Struct("<I").unpack_from
_signed4 = struct.Struct("<i").unpack_from
_NOTHING: Final = Global("a memo that was never put", lambda *_: None)


class Cut(CorruptionError):
    """The bytes end before the pickle does."""


def interpret(
    data: bytes,
    start: int,
    where: str,
    classes: Classes,
    persistent: Callable[[Any], object] | None,
    limits: Limits,
) -> tuple[object, int]:
    """What the pickle that begins at `start` builds, and where it ends."""
    machine = _Machine(data, start, where, classes, persistent, limits)
    try:
        with paused_collector():  # all that is made is kept, or dropped at once
            return machine.run(), machine.pos
    except CheckpointError:
        raise
    except Exception as error:  # hostile bytes go wrong in many ways; all of them mean one thing
        raise FormatError(
            f"{where}: not a pickle that can be read: {type(error).__name__} at byte "
            f"{machine.pos - start}: {_short(str(error))}"
        ) from error


def _short(text: str) -> str:
    return text if len(text) <= 200 else text[:200] + " ..."


class _Machine:
    """One pickle being interpreted."""

    __slots__ = (
        "alike",
        "classes",
        "containers",
        "data",
        "known",
        "limits",
        "marks",
        "memo",
        "odd_keys",
        "persistent",
        "pos",
        "room",
        "searching",
        "stack",
        "start",
        "where",
    )

    def __init__(
        self,
        data: bytes,
        start: int,
        where: str,
        classes: Classes,
        persistent: Callable[[Any], object] | None,
        limits: Limits,
    ) -> None:
        self.data, self.start, self.pos, self.where = data, start, start, where
        self.classes, self.persistent, self.limits = classes, persistent, limits
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: list[Any] = []
        self.known: dict[tuple[str, str], object] = {}
        self.alike: dict[bytes, tuple[Global, tuple[Any, ...], object]] = {}
        # What a byte of a pickle may make. Real ones take some 13 bytes for a container.
        self.containers = limits.containers + (len(data) - start) // 8
        self.room = limits.copies + 48 * (len(data) - start)
        self.odd_keys = limits.odd_keys
        self.searching = limits.searching

    def run(self) -> object:
        data, table, memo, end = self.data, _OPCODES, self.memo, len(self.data)
        pos, stack = self.pos, self.stack
        # What metadata of millions of chunks mostly consists of, without a call for each opcode,
        # and by numbers, which are found faster than names; and what comes in a row there, in one
        # step that does the same.
        while pos < end:
            code = data[pos]
            pos += 1
            if code == 0x94:  # MEMOIZE
                memo.append(stack[-1])
            elif code == 0x6A and pos + 4 <= end:  # LONG_BINGET
                value = memo[_number4(data, pos)[0]]
                pos += 4
                stack.append(value)
                if type(value) is Global and value.numbers:
                    pos = self.call_with_numbers(value, pos)
            elif code == 0x68 and pos < end:  # BINGET
                value = memo[data[pos]]
                pos += 1
                stack.append(value)
                if type(value) is Global and value.numbers:
                    pos = self.call_with_numbers(value, pos)
            elif code == 0x4B and pos < end:  # BININT1
                stack.append(data[pos])
                pos += 1
            elif code == 0x85:  # TUPLE1
                args = (stack.pop(),)
                if data.startswith(_CALLED, pos):
                    self.pos = pos + 2
                    made = self.call(stack.pop(), args)
                    memo += (args, made)
                    stack.append(made)
                    pos += len(_CALLED)
                else:
                    stack.append(args)
            elif code == 0x29:  # EMPTY_TUPLE
                if data.startswith(_WITH_STATE, pos):
                    self.pos = pos + 1
                    state: dict[Any, Any] = {}
                    made = self.call(stack.pop(), ())
                    self.made()
                    memo += (made, state)
                    stack += (made, state)
                    self.mark()
                    stack = self.stack
                    pos += len(_WITH_STATE)
                else:
                    stack.append(())
            elif code == 0x75:  # SETITEMS
                self.pos = pos
                items, stack = stack, self.marks.pop()
                self.stack = stack
                self.set_all(items)
            elif code == 0x4A and pos + 4 <= end:  # BININT
                stack.append(_signed4(data, pos)[0])
                pos += 4
            elif code == 0x86:  # TUPLE2
                last = stack.pop()
                stack[-1] = (stack[-1], last)
            elif code == 0x89:  # NEWFALSE
                stack.append(False)
            elif code == 0x72 and pos + 4 <= end and _number4(data, pos)[0] == len(memo):
                memo.append(stack[-1])  # LONG_BINPUT
                pos += 4
            elif code == 0x2E:  # STOP
                self.pos = pos
                return self.stop()
            else:
                self.pos = pos
                action = table[code]
                if action is None:
                    self.unknown(code)
                action(self)
                pos, stack = self.pos, self.stack
        self.pos = pos
        raise self.cut()

    def call_with_numbers(self, function: Global, pos: int) -> int:
        """Where numbers follow, a tuple of them and a call with it: make the call, once for all
        that are alike, as what it gives never changes. Says where to go on."""
        found = _NUMBERS_CALLED(self.data, pos)
        if found is None:
            return pos
        code = found[0]
        made = self.alike.get(code)
        if made is None or made[0] is not function:
            self.pos = pos
            numbers = _numbers(code)
            if numbers is None:
                return pos
            made = self.alike[code] = (function, (numbers,), self.call(function, (numbers,)))
        else:
            self.containers -= 1
            if self.containers < 0:
                raise self.heavy()
        _, args, result = made
        self.memo += (args[0], args, result) if args[0] else (args, result)
        self.stack[-1] = result
        return found.end()

    def stop(self) -> object:
        if self.marks or len(self.stack) != 1:
            raise ValueError("it stops with other than one value")
        return self.stack.pop()

    # --- refusals ------------------------------------------------------------------------------

    def cut(self) -> Cut:
        return Cut(f"{self.where}: the pickle ends in the middle, at byte {self.pos - self.start}")

    def unsafe(self, what: str) -> UnsafeCheckpointError:
        return UnsafeCheckpointError(
            f"{self.where}: the pickle {what} (byte {self.pos - self.start}). Reading it could run "
            "code, so nothing of it is read. If it is yours, save plain values and tensors instead."
        )

    def unknown(self, code: int) -> NoReturn:
        if code in b"\x82\x83\x84":
            raise self.unsafe("uses a code of copyreg's extension registry")
        if code in b"\x97\x98":
            raise self.unsafe("refers to buffers outside of itself")
        raise ValueError(f"there is no opcode {code:#04x}")

    def excessive(self, what: str) -> UnsafeCheckpointError:
        return excessive(self.where, f"{what} (byte {self.pos - self.start})")

    def heavy(self) -> UnsafeCheckpointError:
        return self.excessive("makes far more objects than its length explains")

    def made(self) -> None:
        """A container was made."""
        self.containers -= 1
        if self.containers < 0:
            raise self.heavy()

    # --- bytes of the pickle ----------------------------------------------------------------------

    def take(self, count: int) -> bytes:
        low = self.pos
        if count > len(self.data) - low:
            raise self.cut()
        self.pos = low + count
        return self.data[low : low + count]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def line(self) -> bytes:
        end = self.data.find(b"\n", self.pos, self.pos + self.limits.line)
        if end < 0:
            raise self.cut()
        text = self.data[self.pos : end]
        self.pos = end + 1
        return text

    # --- names and calls ------------------------------------------------------------------------

    def find(self, module: object, name: object) -> object:
        if type(module) is not str or type(name) is not str:
            raise ValueError("a global is not named by two texts")
        if len(module) + len(name) > _LONG:
            self.long_key(module, name)
        known = self.known.get((module, name), _NOTHING)
        if known is not _NOTHING:
            return known
        full = f"{module}.{name}"
        found: object
        entry = self.classes.get(full)
        if entry is None:
            raise self.unsafe(f"needs {_short(full)}, which is not on the list of what may be read")
        if isinstance(entry, Constant):
            # A pickle could set the state of a stand-in that outlives it.
            assert not isinstance(entry.value, StandIn), full
            found = entry.value
        else:
            found = Global(full, entry, numbers=full in _OF_NUMBERS)
        self.known[module, name] = found
        return found

    def call(self, function: object, args: object) -> object:
        if type(function) is not Global:
            raise self.unsafe(f"calls a {type(function).__name__}")
        if type(args) is not tuple:
            raise ValueError("arguments are no tuple")
        self.containers -= 1
        if self.containers < 0:
            raise self.heavy()
        if args:
            self.room -= len(args) * _ARGUMENT
            self.charge(args)
            if function.name in _HASHING:
                for argument in args:
                    if type(argument) in (list, tuple):
                        self.room -= len(argument) * _SIZED[set]
                        self.charge(())
                        self.add(set(), argument)
        begun = thread_time() if args and function.name in _COPYING else None
        try:
            result: Any = function.make(*args)
        except CheckpointError as error:
            raise type(error)(f"{self.where}: {error}") from error
        except Exception as error:
            raise ValueError(f"no {function.name} is made from this: {error}") from error
        if begun is not None:
            self.searched(begun, len(result))
        if type(result) in _SIZED:
            self.charge((result,))
        return result

    def charge(self, values: tuple[Any, ...]) -> None:
        """What stand-ins get and give: they may look at all of it, as often as they are called."""
        for value in values:
            weight = _SIZED.get(type(value))
            if weight is not None:
                self.room -= len(value) * weight
        if self.room < 0:
            raise self.heavy()

    def check_keys(self, keys: Any) -> None:
        """What is about to be hashed: some hashes never end, or are all the same."""
        if type(keys) in _MAPPINGS or type(keys) not in (list, tuple, set, frozenset, deque):
            return
        for key in keys:
            if type(key) is not str:
                count, size = check_key(key, self.where)
                self.odd_keys -= count
                self.room -= size
                if self.odd_keys < 0 or self.room < 0:
                    raise self.excessive("has too many or too large keys that are no texts")

    def long_key(self, *keys: str) -> None:
        """One is compared with another that is equal, letter by letter, each time it is used."""
        self.room -= sum(map(len, keys))
        if self.room < 0:
            raise self.excessive("has too many or too large keys")

    def searched(self, begun: float, count: int = 1) -> None:
        """Places of keys were looked for since then."""
        self.searching += count * SEARCH - (thread_time() - begun)
        if self.searching < 0:
            raise self.excessive("has numbers or tuples as keys that take far too long to find")

    def add(self, target: set[Any], items: Sequence[Any]) -> None:
        """Members to a set."""
        self.check_keys(items)
        for low in range(0, len(items), AT_ONCE):
            begun, some = thread_time(), items[low : low + AT_ONCE]
            target.update(some)
            self.searched(begun, len(some))

    def put(self, index: int) -> None:
        value, memo = self.stack[-1], self.memo
        if index == len(memo):
            memo.append(value)
        elif 0 <= index < len(memo):
            memo[index] = value
        elif index > len(self.data) or index < 0:
            raise ValueError(f"there is no memo {index}")
        else:  # what is in between was never put, and is nothing that could be used
            memo.extend([_NOTHING] * (index - len(memo)))
            memo.append(value)

    def get(self, index: int) -> None:
        if not 0 <= index < len(self.memo):
            raise ValueError(f"memo {index} was never put")
        self.stack.append(self.memo[index])

    def items(self) -> list[Any]:
        """All since the last mark."""
        items = self.stack
        self.stack = self.marks.pop()
        return items

    # --- opcodes, as far as they are more than a line --------------------------------------------

    def mark(self) -> None:
        if len(self.marks) >= self.limits.marks:
            raise self.unsafe("is nested too deep")
        self.marks.append(self.stack)
        self.stack = []

    def reduce(self) -> None:
        args = self.stack.pop()
        self.stack.append(self.call(self.stack.pop(), args))

    def new_with_keywords(self) -> None:
        keywords = self.stack.pop()
        if type(keywords) is not dict or keywords:
            raise self.unsafe("makes an object with keyword arguments")
        self.reduce()

    def instance(self) -> None:
        module, name = self.line().decode(), self.line().decode()
        args = tuple(self.items())
        self.stack.append(self.call(self.find(module, name), args))

    def object_of_all(self) -> None:
        cls, *args = self.items()
        self.stack.append(self.call(cls, tuple(args)))

    def build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, StandIn):
            if type(state) is dict:
                self.room -= len(state) * _DICT
                if self.room < 0:
                    raise self.heavy()
            else:
                self.charge(state if type(state) is tuple else (state,))
            begun = thread_time() if type(state) is tuple else None
            target.build(state)
            if begun is not None:  # attributes of a class with slots are joined in one dict
                self.searched(begun, sum(len(part) for part in state if type(part) is dict))
        elif type(target) not in _MAPPINGS or type(state) is not dict:
            # Attributes of a dict, as `_metadata` of a module's state, are left out.
            raise self.unsafe(f"sets the state of a {type(target).__name__}")

    def append_all(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list and type(target) is not deque:
            raise self.unsafe(f"appends to a {type(target).__name__}")
        target.extend(items)

    def set_items(self) -> None:
        self.set_all(self.items())

    def set_all(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) not in _MAPPINGS:
            raise self.unsafe(f"sets items of a {type(target).__name__}")
        if len(items) % 2:
            raise ValueError("a key without a value")
        rest = iter(items)
        for key, value in zip(rest, rest, strict=True):
            if type(key) is str:
                if len(key) > _LONG:
                    self.long_key(key)
                target[key] = value
                continue
            self.check_keys((key,))
            if isinstance(key, StandIn):  # found by what it is: nobody chose that
                target[key] = value
                continue
            begun = thread_time()
            target[key] = value
            self.searched(begun)

    def add_all(self) -> None:
        items = self.items()
        if type(self.stack[-1]) is not set:
            raise self.unsafe(f"adds to a {type(self.stack[-1]).__name__}")
        self.add(self.stack[-1], items)

    def persistent_id(self, given: object) -> None:
        if self.persistent is None:
            raise self.unsafe("refers to something outside of itself")
        self.made()
        try:
            self.stack.append(self.persistent(given))
        except CheckpointError as error:
            raise type(error)(f"{self.where}: {error}") from error

    def fresh(self, container: object) -> None:
        self.containers -= 1
        if self.containers < 0:
            raise self.heavy()
        self.stack.append(container)

    def frozen(self) -> None:
        members: set[Any] = set()
        self.add(members, self.items())
        self.fresh(frozenset(members))

    def dictionary(self) -> None:
        items = self.items()
        self.fresh({})
        self.set_all(items)

    def frame(self) -> None:
        size = self.number(8)
        if size > len(self.data) - self.pos:
            raise self.cut()

    def long(self, size: int) -> None:
        if size > self.limits.long:
            raise ValueError(f"an integer of {size} bytes")
        self.stack.append(int.from_bytes(self.take(size), "little", signed=True))

    def old_string(self, data: bytes) -> None:
        """A `str` of Python 2: text where it is one."""
        try:
            self.stack.append(data.decode())
        except UnicodeDecodeError:
            self.stack.append(data)

    def quoted(self) -> None:
        text = self.line().strip()
        if len(text) < 2 or text[:1] != text[-1:] or text[:1] not in b"'\"":
            raise ValueError("a text without quotes")
        self.old_string(codecs.escape_decode(text[1:-1])[0])

    def short_text(self) -> None:
        low = self.pos + 1
        high = low + self.number(1)
        if high > len(self.data):
            raise self.cut()
        self.pos = high
        self.stack.append(self.data[low:high].decode())

    def tuple_of_three(self) -> None:
        last, second = self.stack.pop(), self.stack.pop()
        self.stack[-1] = (self.stack[-1], second, last)

    def tuple_of_all(self) -> None:
        items = tuple(self.items())
        self.stack.append(items)

    def stack_global(self) -> None:
        name = self.stack.pop()
        self.stack.append(self.find(self.stack.pop(), name))

    def protocol(self) -> None:
        number = self.number(1)
        if number > 5:
            raise FormatError(f"{self.where}: pickle protocol {number} is newer than what is read")

    def text_int(self) -> None:
        text = self.line()
        special = {b"00": False, b"01": True}.get(text)
        self.stack.append(int(text) if special is None else special)

    def pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.items()


_CALLED: Final = b"\x94R\x94"
"""MEMOIZE, REDUCE, MEMOIZE: behind a tuple of one, a call with it."""
_NUMBERS_CALLED: Final = re.compile(
    rb"(?:\)|(?:K.|M..|J....){1,3}[\x85-\x87]\x94)\x85\x94R\x94", re.DOTALL
).match
"""A tuple of up to three numbers, memoized where it is not empty, and `_CALLED` with it."""
_WITH_STATE: Final = b"\x81\x94}\x94("
"""NEWOBJ, MEMOIZE, EMPTY_DICT, MEMOIZE, MARK: behind an empty tuple, an object and its state."""
_MAPPINGS: Final = frozenset({dict, OrderedDict, Counter})
# What looking at a value costs, in bytes for each element.
_SIZED: Final[dict[type, int]] = {
    bytes: 1, bytearray: 1, str: 4, list: 8, tuple: 8, deque: 8,
    dict: 50, OrderedDict: 100, Counter: 50, set: 50, frozenset: 50,
}  # fmt: skip
_DICT: Final = _SIZED[dict]
_ARGUMENT: Final = 64
"""The same for each argument of a call: a path takes its parts apart, be they empty."""
_OF_NUMBERS: Final = frozenset({"torch.Size"})
"""Called with a tuple of numbers, these give what never changes, so that it may be shared."""
_HASHING: Final = frozenset(
    f"{module}.{name}" for module in ("builtins", "__builtin__") for name in ("set", "frozenset")
)
_COPYING: Final = frozenset(
    {"builtins.dict", "__builtin__.dict", "collections.OrderedDict", "collections.Counter"}
)
_LONG: Final = 256
"""Characters of a key from which on it counts: few have as many."""


def _numbers(code: bytes) -> tuple[int, ...] | None:
    """The tuple at the beginning of what `_NUMBERS_CALLED` finds; None if it takes others too."""
    out, at = [], 0
    while code[at] in _WIDTHS:
        width = _WIDTHS[code[at]]
        out.append(int.from_bytes(code[at + 1 : at + 1 + width], "little", signed=width == 4))
        at += 1 + width
    return tuple(out) if len(out) == (0 if code[at] == 0x29 else code[at] - 0x84) else None


_WIDTHS: Final = {0x4B: 1, 0x4D: 2, 0x4A: 4}
"""BININT1, BININT2, BININT: the bytes of each number."""


def _double(machine: _Machine) -> None:
    machine.stack.append(struct.unpack(">d", machine.take(8))[0])


_ACTIONS: dict[bytes, Callable[[_Machine], None]] = {
    b"(": _Machine.mark,
    b"0": _Machine.pop,
    b"1": lambda m: m.items().clear(),
    b"2": lambda m: m.stack.append(m.stack[-1]),
    b"F": lambda m: m.stack.append(float(m.line())),
    b"I": _Machine.text_int,
    b"J": lambda m: m.stack.append(_signed4(m.take(4))[0]),
    b"K": lambda m: m.stack.append(m.number(1)),
    b"L": lambda m: m.stack.append(int(m.line().rstrip(b"L"))),
    b"M": lambda m: m.stack.append(m.number(2)),
    b"N": lambda m: m.stack.append(None),
    b"P": lambda m: m.persistent_id(m.line().decode()),
    b"Q": lambda m: m.persistent_id(m.stack.pop()),
    b"R": _Machine.reduce,
    b"S": _Machine.quoted,
    b"T": lambda m: m.old_string(m.take(m.number(4))),
    b"U": lambda m: m.old_string(m.take(m.number(1))),
    b"V": lambda m: m.stack.append(m.line().decode("raw-unicode-escape")),
    b"X": lambda m: m.stack.append(m.take(m.number(4)).decode()),
    b"a": lambda m: m.append_all([m.stack.pop()]),
    b"b": _Machine.build,
    b"c": lambda m: m.stack.append(m.find(m.line().decode(), m.line().decode())),
    b"d": _Machine.dictionary,
    b"e": lambda m: m.append_all(m.items()),
    b"g": lambda m: m.get(int(m.line())),
    b"h": lambda m: m.get(m.number(1)),
    b"i": _Machine.instance,
    b"j": lambda m: m.get(m.number(4)),
    b"l": lambda m: m.fresh(m.items()),
    b"o": _Machine.object_of_all,
    b"p": lambda m: m.put(int(m.line())),
    b"q": lambda m: m.put(m.number(1)),
    b"r": lambda m: m.put(m.number(4)),
    b"s": lambda m: m.set_all([m.stack.pop(-2), m.stack.pop()]),
    b"t": _Machine.tuple_of_all,
    b"u": _Machine.set_items,
    b"}": lambda m: m.fresh({}),
    b"]": lambda m: m.fresh([]),
    b"G": _double,
    b"B": lambda m: m.stack.append(m.take(m.number(4))),
    b"C": lambda m: m.stack.append(m.take(m.number(1))),
    b"\x80": _Machine.protocol,
    b"\x81": _Machine.reduce,
    b"\x87": _Machine.tuple_of_three,
    b"\x88": lambda m: m.stack.append(True),
    b"\x89": lambda m: m.stack.append(False),
    b"\x8a": lambda m: m.long(m.number(1)),
    b"\x8b": lambda m: m.long(m.number(4)),
    b"\x8c": _Machine.short_text,
    b"\x8d": lambda m: m.stack.append(m.take(m.number(8)).decode()),
    b"\x8e": lambda m: m.stack.append(m.take(m.number(8))),
    b"\x8f": lambda m: m.fresh(set()),
    b"\x90": _Machine.add_all,
    b"\x91": _Machine.frozen,
    b"\x92": _Machine.new_with_keywords,
    b"\x93": _Machine.stack_global,
    b"\x94": lambda m: m.memo.append(m.stack[-1]),
    b"\x95": _Machine.frame,
    b"\x96": lambda m: m.fresh(bytearray(m.take(m.number(8)))),
}


_OPCODES: list[Any] = [_ACTIONS.get(bytes([code])) for code in range(256)]
