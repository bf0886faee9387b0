# SPDX-License-Identifier: Apache-2.0
"""Nested state <-> leaves with typed paths and names.

A leaf is an array or a plain value. What remains when the leaves are taken out is the `Structure`:
enough to build the very same nesting again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import is_
from typing import Any, Protocol, runtime_checkable

from shardkeep import values
from shardkeep.arrays import (
    ArrayAdapter,
    adapter_of,
    adapter_of_type,
    any_sets_shard_fields,
)
from shardkeep.errors import MismatchError, UnsupportedValueError
from shardkeep.metadata import BytesStorageMetadata, TensorStorageMetadata
from shardkeep.per_rank import PerRank
from shardkeep.structure import (
    MAX_DEPTH,
    TENSOR,
    VALUE,
    Key,
    Node,
    Path,
    Structure,
    dotted,
    key_identity,
)

__all__ = [
    "AwareStateful",
    "CheckingStateful",
    "FlatState",
    "Stateful",
    "Stored",
    "Told",
    "fill",
    "flatten",
]

_TEXT = {str}
SCALARS = {int, float, str, bool, type(None)}
"""Classes of plain values that need no second look."""


@runtime_checkable
class Stateful(Protocol):
    """An object that gives and takes its own state, like a module or an optimizer."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state to save."""

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> object:
        """Take back what `state_dict` gave."""


Stored = Mapping[str, TensorStorageMetadata | BytesStorageMetadata]
"""What is stored, by name; of an object in a state, by the rest of the name after its own."""


@runtime_checkable
class AwareStateful(Stateful, Protocol):
    """A `Stateful` that wants to know what its state is for.

    What it gives to load into may depend on what there is to load; `load_state_dict` then gets that
    very mapping, filled.
    """

    def state_to_save(self, world_size: int) -> Mapping[str, Any]:
        """The state to save, together with so many ranks."""

    def state_to_load(self, stored: Stored) -> Mapping[str, Any]:
        """What to load into, of a checkpoint that has this to offer to it."""


@runtime_checkable
class CheckingStateful(Stateful, Protocol):
    """A `Stateful` that can refuse a load by plain values alone, before any tensor is read."""

    def check_values(self, values: Mapping[str, object]) -> None:
        """Raise if these, by the rest of their names after its own, are not for this object."""


def is_stateful(value: object) -> bool:
    """Whether the object, not its class, gives and takes a state."""
    return (
        not isinstance(value, (type, Mapping))
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


def is_split_mapping(value: object) -> bool:
    """Counters are plain values; every other mapping is taken apart."""
    return isinstance(value, Mapping) and type(value) is not Counter


def _is_named_tuple(value: object) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _is_sequence(value: object) -> bool:
    # torch.Size and the like are tuples by inheritance only: plain values.
    return type(value) in (list, tuple) or _is_named_tuple(value)


def _splits(value: object, depth: int = 0) -> bool:
    """Whether a sequence holds anything that is not plain, at any depth of sequences."""
    if depth > MAX_DEPTH:
        return True  # too deep or a cycle: the walk finds it and says where
    for item in value:  # type: ignore[attr-defined]
        kind = type(item)
        if kind in SCALARS:
            continue
        if isinstance(item, (Mapping, PerRank)):
            if kind is not Counter:
                return True
        elif _is_sequence(item):
            if _splits(item, depth + 1):
                return True
        elif adapter_of(item) is not None or is_stateful(item):
            return True
    return False


# --- taking a state apart -----------------------------------------------------------------------


States = dict[int, tuple[object, Mapping[str, Any]]]


@dataclass
class FlatState:
    """A state taken apart: its leaves in order, and the nesting around them."""

    structure: Structure
    """The nesting."""
    values: list[object]
    """The arrays and plain values themselves, in the order of the structure."""
    adapters: list[ArrayAdapter | None]
    """The adapter of each array; None for a plain value."""
    fixed: set[int]
    """Leaves that cannot be set on load."""
    states: States = field(default_factory=dict)
    """What each `Stateful` gave, by identity; held, so that no identity is used twice."""
    whole: dict[int, Path] | None = None
    """Leaves that are a `PerRank` with `resize`, as they were left, and the path to each."""


def flatten(
    state: object,
    *,
    rank: int = 0,
    world_size: int = 1,
    keep_whole: bool = False,
    stored_under: Callable[[str], Stored] | None = None,
) -> FlatState:
    """Take a state apart. `Stateful`s are asked in the order of their names, on this thread.

    With `keep_whole`, a `PerRank` with `resize` is one leaf, and nothing in it is asked.
    `stored_under` says what is stored under a name, where the state is one to load into.
    """
    found = _flatten_unasked(state, rank, world_size, keep_whole)
    if found is not None:
        return found
    ask = partial(_ask_to_save, world_size=world_size)
    if stored_under is not None:
        ask = partial(_ask_to_load, stored_under=stored_under)
    states = _ask_statefuls(state, rank, ask, keep_whole)
    return _Walk(states, rank, world_size, keep_whole).flat(state)


def _flatten_unasked(
    state: object, rank: int, world_size: int, keep_whole: bool
) -> FlatState | None:
    """Take a state apart in one go, if there is nobody in it to ask, as in most.

    What is wrong with a state is not said here: whoever is to be asked is asked first, as other
    ranks may wait for this one there.
    """
    try:
        return _Walk(None, rank, world_size, keep_whole).flat(state)
    except Exception:
        return None


def _ask_to_save(value: Any, path: Path, world_size: int) -> Any:
    if isinstance(value, AwareStateful):
        return value.state_to_save(world_size)
    return value.state_dict()


def _ask_to_load(value: Any, path: Path, stored_under: Callable[[str], Stored]) -> Any:
    if isinstance(value, AwareStateful):
        return value.state_to_load(stored_under(dotted(path)))
    return value.state_dict()


def _ask_statefuls(
    state: object, rank: int, ask: Callable[[Any, Path], Any], keep_whole: bool
) -> States:
    """Ask every `Stateful` once. Sorted, because a `state_dict()` may itself be collective.

    For that reason also after one has failed: other ranks may wait for this one in the next.
    """
    states: States = {}
    first: Exception | None = None
    pending: list[tuple[Path, object]] = [((), state)]
    rounds = 0
    while pending:
        rounds += 1
        if rounds > MAX_DEPTH:
            raise UnsupportedValueError(
                f"state_dict() of a {type(next(reversed(states.values()))[0]).__qualname__} gives "
                f"further objects to ask, more than {MAX_DEPTH} deep"
            )
        found: dict[int, tuple[Path, object]] = {}
        for begin, part in pending:
            for path, value in find_statefuls(part, begin, 0, keep_whole, rank):
                if id(value) not in states:
                    found.setdefault(id(value), (path, value))
        pending = []
        for path, value in sorted(found.values(), key=lambda item: dotted(item[0])):
            try:
                given = ask(value, path)
            except Exception as error:
                first = first or error
                given = {}
            if not isinstance(given, Mapping):
                raise UnsupportedValueError(
                    f"state_dict() of a {type(value).__qualname__} gave a "
                    f"{type(given).__qualname__}, expected a mapping"
                )
            states[id(value)] = (value, given)
            pending.append((path, given))
    if first is not None:
        raise first
    return states


def given_state(states: States, value: object, path: Path) -> Mapping[str, Any]:
    """What a `Stateful` gave when it was asked."""
    known, given = states.get(id(value), (None, {}))
    if known is not value:
        raise UnsupportedValueError(
            f"{dotted(path)}: the container makes a new {type(value).__qualname__} each time it is "
            "read; put the objects themselves into the state"
        )
    return given


def find_statefuls(
    value: object,
    path: Path = (),
    depth: int = 0,
    keep_whole: bool = False,
    rank: int | None = None,
) -> Iterator[tuple[Path, object]]:
    """Every `Stateful` in a value, and the path to it; asks none of them.

    What is `PerRank` has the number of its rank in the path, if that is given.
    """
    below = depth + 1
    if depth > MAX_DEPTH:
        return
    if type(value) is dict:
        for key, child in value.items():
            kind = type(child)
            # Asked here, because most dicts of a state hold arrays only.
            if kind not in SCALARS and adapter_of_type(kind) is None:  # type: ignore[arg-type]
                yield from find_statefuls(child, (*path, key), below, keep_whole, rank)
    elif adapter_of(value) is not None:
        return
    elif isinstance(value, PerRank):
        if value.resize is None or not keep_whole:
            own = path if rank is None else (*path, rank)
            yield from find_statefuls(value.value, own, below, keep_whole, rank)
    elif is_split_mapping(value):
        for key, child in value.items():  # type: ignore[attr-defined]
            yield from find_statefuls(child, (*path, key), below, keep_whole, rank)
    elif _is_sequence(value):
        for i, child in enumerate(value):  # type: ignore[arg-type]
            yield from find_statefuls(child, (*path, i), below, keep_whole, rank)
    elif is_stateful(value):
        yield path, value


class _NotAsked(Exception):
    """There is a `Stateful`, and nobody has asked any."""


class _Walk:
    """One pass over a state, collecting leaves."""

    def __init__(self, states: States | None, rank: int, world_size: int, keep_whole: bool) -> None:
        """`states` is None as long as nobody was asked: then there must be nobody to ask."""
        self.states = states
        self.rank = rank
        self.world_size = world_size
        self.whole: dict[int, Path] | None = {} if keep_whole else None
        self.values: list[object] = []
        self.adapters: list[ArrayAdapter | None] = []
        self.fixed: set[int] = set()
        self._known: dict[type, ArrayAdapter | None] = {}
        self._simple: dict[type, ArrayAdapter] = {}
        self._key_types: set[type] = set()

    def flat(self, state: object) -> FlatState:
        root = self.node(state, (), 0)
        kinds = [VALUE if adapter is None else TENSOR for adapter in self.adapters]
        return FlatState(
            Structure(root, kinds, self._key_types),
            self.values,
            self.adapters,
            self.fixed,
            self.states or {},
            self.whole,
        )

    def node(self, value: object, path: Path, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise UnsupportedValueError(
                f"{dotted(path[:8])}...: nested deeper than {MAX_DEPTH}, or a container that "
                "holds itself"
            )
        if type(value) is dict:
            return self._mapping(value, path, depth)
        adapter = adapter_of(value)
        if adapter is not None:
            return self._array(adapter, value, path, depth)
        if isinstance(value, PerRank):
            if value.resize is not None and self.whole is not None:
                self.whole[len(self.values)] = path
                child = self._leaf(value, None)
            else:
                child = self.node(value.value, (*path, self.rank), depth + 1)
            self._key_types.add(int)
            return ["per_rank", [self.rank], [child], self.world_size]
        if is_split_mapping(value):
            return self._mapping(value, path, depth)  # type: ignore[arg-type]
        if _is_sequence(value) and _splits(value):
            return self._sequence(value, path, depth)  # type: ignore[arg-type]
        if is_stateful(value):
            if self.states is None:
                raise _NotAsked
            return self.node(given_state(self.states, value, path), path, depth)
        return self._leaf(value, None)

    def _leaf(self, value: object, adapter: ArrayAdapter | None) -> Node:
        self.values.append(value)
        self.adapters.append(adapter)
        return VALUE if adapter is None else TENSOR

    def _array(self, adapter: ArrayAdapter, value: object, path: Path, depth: int) -> Node:
        composite = adapter.parts(value) if adapter.is_composite(type(value)) else None
        if composite is None:
            return self._leaf(value, adapter)
        keys, children = [], []
        for key, part in composite.parts.items():
            keys.append(key)
            children.append(self.node(part, (*path, key), depth + 1))
        for key, attribute in composite.attributes.items():
            keys.append(key)
            self.fixed.add(len(self.values))
            children.append(self._leaf(attribute, None))
        self._key_types.update(map(type, keys))
        return ["parts", keys, children, composite.kind]

    def _mapping(self, value: Mapping[Key, object], path: Path, depth: int) -> Node:
        kind = "ordered_dict" if isinstance(value, OrderedDict) else "dict"
        keys = _plain_names(value)
        if keys is not None:
            children = self._arrays_only(list(value.values()))
            if children is None:
                below = depth + 1
                children = [self.node(c, (*path, key), below) for key, c in value.items()]
            if keys:
                self._key_types.add(str)
            return [kind, keys, children, None]
        keys, children, seen = [], [], set()
        for key, child in value.items():
            plain = plain_key(key, path)
            identity = key_identity(plain)
            if identity in seen:
                raise UnsupportedValueError(
                    f"{dotted(path)}: two keys are stored as {plain!r}; give them distinct values"
                )
            seen.add(identity)
            keys.append(plain)
            children.append(self.node(child, (*path, plain), depth + 1))
        self._key_types.update(map(type, keys))
        return [kind, keys, children, None]

    def _arrays_only(self, arrays: list[object]) -> list[Node] | None:
        """Take the values of a dict all at once, if they are arrays, as most of a state are."""
        adapters = list(map(self._simple.get, map(type, arrays)))
        if None in adapters or any_sets_shard_fields(arrays):
            return self._arrays_slowly(arrays)
        self.values += arrays
        self.adapters += adapters
        return [TENSOR] * len(arrays)

    def _arrays_slowly(self, arrays: list[object]) -> list[Node] | None:
        """The same, asking the adapters."""
        kinds = list(map(type, arrays))
        for kind in set(kinds):
            adapter = self._adapter(kind)
            if adapter is None:
                return None
            if adapter.is_composite(kind):
                alike = [array for array, its in zip(arrays, kinds, strict=True) if its is kind]
                if adapter.any_composite(alike):
                    return None
            else:
                self._simple[kind] = adapter
        if any_sets_shard_fields(arrays):
            return None
        self.values += arrays
        self.adapters += map(self._known.__getitem__, kinds)
        return [TENSOR] * len(arrays)

    def _adapter(self, kind: type) -> ArrayAdapter | None:
        """The adapter of arrays of this type."""
        if kind not in self._known:
            self._known[kind] = adapter_of_type(kind)
        return self._known[kind]

    def _sequence(self, value: Sequence[object], path: Path, depth: int) -> Node:
        children = [self.node(child, (*path, i), depth + 1) for i, child in enumerate(value)]
        if _is_named_tuple(value):
            fields = list(type(value)._fields)  # type: ignore[attr-defined]
            return ["named_tuple", None, children, [type(value).__name__, fields]]
        return ["list" if type(value) is list else "tuple", None, children, None]


def _plain_names(value: Mapping[Key, object]) -> list[Key] | None:
    """The keys of a dict, if they are stored as they are; other text may not even be Unicode."""
    if type(value) is not dict and type(value) is not OrderedDict:
        return None
    keys = list(value)
    return keys if set(map(type, keys)) <= _TEXT and "".join(keys).isascii() else None


def plain_key(key: object, path: Path) -> Key:
    """A mapping key as it is stored; Enums by value, as everywhere."""
    kind = type(key)
    if kind is str:
        try:
            key.encode()  # type: ignore[attr-defined]
        except UnicodeEncodeError as error:
            raise UnsupportedValueError(
                f"{dotted(path)}: key {key!r} is not valid Unicode and cannot be stored"
            ) from error
        return key
    if kind is int or kind is bool or key is None:
        return key
    return values.decode(values.encode_key(key, where=dotted(path)), foreign="plain")


# --- putting a state together again -------------------------------------------------------------


Told = tuple[str, Stateful, Mapping[str, Any]]
"""A `Stateful`, where it is, and what it is told."""


def fill(
    state: object, flat: FlatState, results: Sequence[object], also: Sequence[Told] = ()
) -> Any:
    """Put `results`, one per leaf of `flat`, into the state they were flattened from.

    Mutable containers are changed in place, others rebuilt; `Stateful`s get `load_state_dict` in
    the order of their names, `also` those named there, once everything else is in place.
    """
    filler = _Fill(flat, results)
    out = filler.node(state)
    first: Exception | None = None
    for _, stateful, filled in sorted([*filler.statefuls, *also], key=lambda item: item[0]):
        try:
            stateful.load_state_dict(filled)
        except Exception as error:  # the next may be collective, and other ranks wait in it
            first = first or error
    if first is not None:
        raise first
    return out


class _Fill:
    def __init__(self, flat: FlatState, results: Sequence[object]) -> None:
        self.flat = flat
        self.results = results
        self.at = 0
        self.statefuls: list[Told] = []
        self._seen: dict[int, tuple[Path, int, int]] = {}

    def node(self, value: Any, path: Path = ()) -> Any:
        if type(value) is dict and self._arrays_only(value):
            return value
        adapter = adapter_of(value)
        if adapter is not None:
            composite = adapter.parts(value) if adapter.is_composite(type(value)) else None
            if composite is None:
                return self._leaf()
            for part in composite.parts.values():
                self.node(part, path)
            self.at += len(composite.attributes)
            return value
        if isinstance(value, PerRank):
            whole = value.resize is not None and self.flat.whole is not None
            return replace(value, value=self._leaf() if whole else self.node(value.value, path))
        if is_split_mapping(value):
            begun = self.at
            filled_mapping = self._mapping(value, path)
            self._check_shared(value, path, begun)
            return filled_mapping
        if _is_sequence(value) and _splits(value):
            begun = self.at
            filled = [self.node(child, (*path, i)) for i, child in enumerate(value)]
            self._check_shared(value, path, begun)
            if type(value) is list:
                value[:] = filled
                return value
            return type(value)(*filled) if _is_named_tuple(value) else tuple(filled)
        if is_stateful(value):
            filled_state = self.node(given_state(self.flat.states, value, path), path)
            self.statefuls.append((dotted(path), value, filled_state))
            return value
        return self._leaf()

    def _check_shared(self, value: object, path: Path, begun: int) -> None:
        """One container at two places can hold only one of two contents."""
        first = self._seen.setdefault(id(value), (path, begun, self.at))
        if first[0] == path:
            return
        for one, two in zip(range(first[1], first[2]), range(begun, self.at), strict=True):
            if self.flat.adapters[two] is None and not values.same(
                self.results[one], self.results[two]
            ):
                raise MismatchError(
                    f"{dotted(first[0])} and {dotted(path)} are one {type(value).__name__} in the "
                    "target, but are stored with different contents; give each its own",
                    mismatched={dotted(path): f"is the same object as {dotted(first[0])}"},
                )

    def _arrays_only(self, value: dict[Key, object]) -> bool:
        """Fill a dict all at once, if every value of it is an array, as in most of a state."""
        part = slice(self.at, self.at + len(value))
        held, adapters = self.flat.values[part], self.flat.adapters[part]
        # An empty container has no leaf at all: the leaves here may be fewer than the values.
        if None in adapters or len(held) < len(value) or not all(map(is_, value.values(), held)):
            return False
        results = self.results[part]
        if not all(map(is_, held, results)):
            value.update(zip(list(value), results, strict=True))
        self.at = part.stop
        return True

    def _leaf(self) -> object:
        self.at += 1
        return self.results[self.at - 1]

    def _mapping(self, value: Any, path: Path) -> Any:
        filled = {key: self.node(child, (*path, key)) for key, child in list(value.items())}
        if isinstance(value, MutableMapping):
            for key, new in filled.items():
                if value[key] is not new:
                    value[key] = new
            return value
        try:
            return type(value)(filled)
        except TypeError:
            return filled
