# SPDX-License-Identifier: Apache-2.0
"""The nesting of a state without its leaves, and the names that follow from it.

A leaf's identity is its typed path; its name (fqn) is torch's dotted one, bracketed where two paths
would share it. Structures of ranks that each hold a part of a state merge into one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from shardkeep import values
from shardkeep.errors import FormatError, PlanError, UnsupportedValueError
from shardkeep.wording import shown

__all__ = ["TENSOR", "VALUE", "Structure", "bracketed", "dotted", "key_identity", "merge"]

MAX_DEPTH = 64
MAX_NAME_BYTES = 4096

TENSOR, VALUE = 0, 1
"""Leaf kinds, as they stand in the structure."""

Key = Any
Path = tuple[Key, ...]
Node = Any
"""A leaf kind (int), or `[kind, keys, children, extra]`."""


_TEXT = {str}


def dotted(path: Path) -> str:
    """Torch's name of a path."""
    if set(map(type, path)) == _TEXT:
        return ".".join(path)
    return ".".join(map(key_text, path))


def key_text(key: Key) -> str:
    """A key as it stands in a name: `str`, where that is the same in every process."""
    if type(key) in (str, bool, float, bytes) or key is None or _is_short(key):
        return str(key)
    if type(key) is tuple:
        items = [repr(item) if type(item) is str else key_text(item) for item in key]
        return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
    # Sets print in any order, numpy's scalars by version, paths by system: only bytes are alike.
    return f"{type(key).__name__}:{values.encode_key(key, where='').hex()}"


def _is_short(key: Key) -> bool:
    # Python refuses to print integers of thousands of digits.
    return type(key) is int and key.bit_length() <= 4096


def bracketed(path: Path) -> str:
    """A name that no other path has: what is not a plain dotless string stands in brackets."""
    out = ""
    for key in path:
        if type(key) is str and key and not any(c in '.[]"' for c in key):
            out += f".{key}" if out else key
        elif type(key) is str:
            out += "[" + msgspec.json.encode(key).decode() + "]"
        elif _is_short(key):
            out += f"[{key}]"
        else:
            out += f"[{type(key).__name__} {key_text(key)}]"
    return out


def unique_names(paths: Sequence[Path]) -> list[str]:
    """A name for each path: dotted, or bracketed where two paths share one dotted name."""
    names = [dotted(path) for path in paths]
    if len(set(names)) == len(names):
        return names
    fixed: set[int] = set()
    while True:
        seen: dict[str, int] = {}
        clash: set[int] = set()
        for row, name in enumerate(names):
            first = seen.setdefault(name, row)
            if first != row:
                clash |= {first, row}
        if clash <= fixed:
            if clash:
                a, b = sorted(clash)[:2]
                raise PlanError(f"two leaves have one path: {paths[a]!r} and {paths[b]!r}")
            return names
        for row in clash:
            names[row] = bracketed(paths[row])
        fixed |= clash


def _dotted_names(node: Node, prefix: str, names: list[str]) -> None:
    """Torch's names of all leaves below a node, in order."""
    if len(prefix) > MAX_NAME_BYTES:
        _refuse_below(node, prefix)
        return
    kind, keys, children, _ = node
    if children.count(TENSOR) == len(children) and keys and set(map(type, keys)) == _TEXT:
        names += map(prefix.__add__, keys)
        return
    for key, child in zip(keys if kind in _KEYED else range(len(children)), children, strict=True):
        text = key if type(key) is str else key_text(key)
        if type(child) is int:
            names.append(prefix + text)
        else:
            _dotted_names(child, f"{prefix}{text}.", names)


def _letters(node: Node, before: int) -> int:
    """How many characters these names have, if each begins with so many."""
    kind, keys, children, _ = node
    if kind not in _KEYED:
        keys = range(len(children))
    if set(map(type, children)) == {int} and set(map(type, keys)) == _TEXT:
        return before * len(keys) + sum(map(len, keys))
    found = 0
    for key, child in zip(keys, children, strict=True):
        size = before + len(key if type(key) is str else key_text(key))
        found += size if type(child) is int else _letters(child, size + 1)
    return found


def _refuse_below(node: Node, prefix: str) -> None:
    """Where anything below has a name, that is too long, and many would fill the memory."""
    found: list[int] = []
    _add_kinds(node, found)
    if found:
        raise UnsupportedValueError(
            f"names that begin with {prefix[:80]}... have over {len(prefix)} bytes; at most "
            f"{MAX_NAME_BYTES} can be stored"
        )


def _add_kinds(node: Node, kinds: list[int]) -> None:
    if type(node) is int:
        kinds.append(node)
        return
    children = node[2]
    if all(type(child) is int for child in children):
        kinds += children
        return
    for child in children:
        _add_kinds(child, kinds)


def _add_key_types(node: Node, found: set[type]) -> None:
    if type(node) is not int:
        if node[1] is not None:
            found.update(map(type, node[1]))
        for child in node[2]:
            if type(child) is not int:
                _add_key_types(child, found)


def _check_lengths(names: Sequence[str], paths: Sequence[Path]) -> None:
    for name, path in zip(names, paths, strict=True):
        try:
            size = len(name.encode())
        except UnicodeEncodeError:
            raise UnsupportedValueError(
                f"{shown(name)} has half a character in it and cannot be a name"
            ) from None
        if size > MAX_NAME_BYTES:
            begin = key_text(path[0])[:80]
            raise UnsupportedValueError(
                f"the name of {begin}... has {size} bytes; at most {MAX_NAME_BYTES} can be stored"
            )


def key_identity(key: Key) -> object:
    """Tells 1, True and 1.0 apart, which Python calls equal."""
    return key if type(key) is str else values.encode_key(key, where="")


_KEY_EXT = 1
_MAPPINGS = ("dict", "ordered_dict")
_KEYED = (*_MAPPINGS, "per_rank", "parts")
_KINDS = (*_KEYED, "list", "tuple", "named_tuple")
_PLAIN_KEYS = {str, bool, type(None)}
"""Keys that msgpack keeps as they are, whatever their value."""
DISTINCT_KEYS = {str, int}
"""Keys that are equal only if they are of one class: Python takes 1, 1.0 and True for equal."""


class Structure:
    """The nesting of a state without its leaves."""

    def __init__(
        self, root: Node, kinds: list[int] | None = None, key_types: set[type] | None = None
    ) -> None:
        """Wrap a tree of nodes; whoever made it may know its `kinds` and `key_types`."""
        self.root = root
        self._names: list[str] | None = None
        self._paths: list[Path] | None = None
        self._kinds: list[int] = kinds or []
        self._key_types = key_types

    def look(self) -> None:
        """Take it apart now, where it was only read: a `FormatError` if it is not valid."""

    @property
    def paths(self) -> list[Path]:
        """Typed path of each leaf, in order."""
        if self._paths is None:
            self._paths = []
            self._walk(self.root, ())
        return self._paths

    @property
    def kinds(self) -> list[int]:
        """Kind of each leaf, in order."""
        if not self._kinds:
            _add_kinds(self.root, self._kinds)
        return self._kinds

    @property
    def names(self) -> list[str]:
        """Name of each leaf, in order; see `unique_names`."""
        if self._names is None:
            names: list[str] = []
            if type(self.root) is int:
                names = unique_names(self.paths)
            else:
                _dotted_names(self.root, "", names)
            if len(set(names)) < len(names):
                names = unique_names(self.paths)
            if max(map(len, names), default=0) > MAX_NAME_BYTES // 4:
                _check_lengths(names, self.paths)
            self._names = names
        return self._names

    @property
    def letters(self) -> int:
        """The least number of characters that all names have together; none is made for it."""
        return 0 if type(self.root) is int else _letters(self.root, 0)

    @property
    def has_simple_keys(self) -> bool:
        """Whether every key is text, a number or None, whose names no version will change."""
        return self.key_types <= {str, int, bool, type(None)}

    @property
    def key_types(self) -> set[type]:
        """Classes of all keys."""
        if self._key_types is None:
            self._key_types = set()
            _add_key_types(self.root, self._key_types)
        return self._key_types

    def same(self, other: Structure) -> bool:
        """Whether nesting and keys are equal, and so the names; False where that is hard to say."""
        return (
            self.key_types <= DISTINCT_KEYS
            and self.key_types == other.key_types
            and self.root == other.root
        )

    def take_names(self, names: list[str]) -> None:
        """Use stored names in place of those that would follow from the paths."""
        self._names = names

    def _walk(self, node: Node, path: Path) -> None:
        assert self._paths is not None
        if type(node) is int:
            self._paths.append(path)
            return
        kind, keys, children, _ = node
        for key, child in zip(
            keys if kind in _KEYED else range(len(children)), children, strict=True
        ):
            if type(child) is int:
                self._paths.append((*path, key))
            else:
                self._walk(child, (*path, key))

    def encode(self) -> bytes:
        """As msgpack; keys that msgpack cannot tell apart are wrapped."""
        plain = self.key_types <= _PLAIN_KEYS
        return msgspec.msgpack.encode(self.root if plain else _wire(self.root))

    @classmethod
    def decode(cls, data: bytes) -> Structure:
        """What `encode` made, checked node by node; hostile bytes give a `FormatError`."""
        try:
            root = _from_wire(msgspec.msgpack.decode(data, ext_hook=_key_hook), 0)
        except (msgspec.MsgspecError, RecursionError, ValueError, TypeError) as error:
            raise FormatError(f"the structure of the state is damaged: {error}") from error
        return cls(root)

    def build(self, leaf: Callable[[int], object]) -> Any:
        """Build the nesting anew, with `leaf(i)` in place of leaf i."""
        counter = iter(range(len(self.paths)))

        def make(node: Node) -> Any:
            if type(node) is int:
                return leaf(next(counter))
            kind, keys, children, _ = node
            made = [make(child) for child in children]
            if kind == "ordered_dict":
                return OrderedDict(zip(keys, made, strict=True))
            if kind in _KEYED:
                return dict(zip(keys, made, strict=True))
            return made if kind == "list" else tuple(made)

        return make(self.root)


def _wire(node: Node) -> Node:
    if type(node) is int:
        return node
    kind, keys, children, extra = node
    if keys is not None and kind in _MAPPINGS:
        keys = [
            k
            if type(k) in (str, bool) or k is None or (type(k) is int and -(2**63) <= k < 2**63)
            else msgspec.msgpack.Ext(_KEY_EXT, values.encode_key(k, where=""))
            for k in keys
        ]
    return [kind, keys, [_wire(child) for child in children], extra]


def _key_hook(code: int, data: memoryview) -> object:
    if code != _KEY_EXT:
        raise ValueError(f"unknown key code {code}")
    return values.decode(bytes(data), foreign="plain")


def _from_wire(node: Node, depth: int) -> Node:
    if type(node) is int:
        if node not in (TENSOR, VALUE):
            raise ValueError(f"unknown leaf kind {node}")
        return node
    if depth > MAX_DEPTH + 1 or type(node) is not list or len(node) != 4:
        raise ValueError("a container is not [kind, keys, children, extra], or too deep")
    kind, keys, children, extra = node
    if kind not in _KINDS or type(children) is not list:
        raise ValueError(f"unknown container kind {kind!r}")
    if kind in _KEYED:
        if type(keys) is not list or len(keys) != len(children):
            raise ValueError(f"{kind} has keys that do not fit its children")
        if len(set(keys)) != len(keys) or _has_twins(keys):
            raise ValueError(f"{kind} has a key twice")
    elif keys is not None:
        raise ValueError(f"{kind} has keys")
    _check_extra(kind, keys, children, extra)
    if set(map(type, children)) != {int} or not set(children) <= {TENSOR, VALUE}:
        children = [_from_wire(child, depth + 1) for child in children]
    return [kind, keys, children, extra]


def _has_twins(keys: list[Key]) -> bool:
    """Whether two keys that Python tells apart are stored alike; text never is."""
    if set(map(type, keys)) <= _TEXT:
        return False
    return len({key_identity(key) for key in keys}) != len(keys)


def _check_extra(kind: str, keys: Any, children: list[Node], extra: Any) -> None:
    if kind == "per_rank":
        fits = type(extra) is int and all(type(k) is int and 0 <= k < extra for k in keys)
    elif kind == "parts":
        fits = type(extra) is str and all(type(k) is str for k in keys)
    elif kind == "named_tuple":
        fits = (
            type(extra) is list
            and len(extra) == 2
            and type(extra[0]) is str
            and type(extra[1]) is list
            and len(extra[1]) == len(children)
            and all(type(f) is str for f in extra[1])
        )
    else:
        fits = extra is None
    if not fits:
        raise ValueError(f"{kind} is not well formed")


class _Merged:
    """A container or leaf of the union, while it is being built."""

    __slots__ = ("children", "extra", "key", "kind", "number", "rank")

    def __init__(self, key: Key, kind: str | int, extra: object, rank: int) -> None:
        self.key = key
        self.kind = kind
        self.extra = extra
        self.rank = rank
        self.children: dict[object, _Merged] = {}
        self.number = -1


def merge(
    structures: Sequence[Structure], ranks: Sequence[int] | None = None
) -> tuple[Structure, list[list[int]]]:
    """The union over ranks, and for each rank the number of each of its leaves in the union.

    Keys keep the order of the first rank that has them. Containers of different kinds or lists of
    different lengths under one path are a `PlanError` naming both ranks; `ranks` says which they
    are, where `structures` are not those of all ranks in order.
    """
    if len(structures) == 1:
        return structures[0], [list(range(len(structures[0].kinds)))]
    root: _Merged | None = None
    leaves: list[list[_Merged]] = []
    for rank, structure in zip(ranks or range(len(structures)), structures, strict=True):
        found: list[_Merged] = []
        root = _merge_node(root, structure.root, None, (), rank, found)
        leaves.append(found)
    assert root is not None
    count = 0

    def number(node: _Merged) -> Node:
        nonlocal count
        if type(node.kind) is int:
            node.number = count
            count += 1
            return node.kind
        children = [number(child) for child in node.children.values()]
        keys = [c.key for c in node.children.values()] if node.kind in _KEYED else None
        if keys is not None and len(set(keys)) != len(keys):
            same = next(key for at, key in enumerate(keys) if key in keys[:at])
            raise PlanError(
                f"ranks have keys that differ in type and are equal, such as {same!r}; one dict "
                "cannot hold both"
            )
        return [node.kind, keys, children, node.extra]

    union = Structure(number(root))
    return union, [[leaf.number for leaf in found] for found in leaves]


def _merge_node(
    into: _Merged | None, node: Node, key: Key, path: Path, rank: int, found: list[_Merged]
) -> _Merged:
    leaf = type(node) is int
    kind, keys, children, extra = (node, None, (), None) if leaf else node
    if into is None:
        into = _Merged(key, kind, extra, rank)
        fresh = True
    else:
        fresh = False
        if into.kind != kind or into.extra != extra:
            raise PlanError(
                f"{dotted(path) or 'the state'} is {_kind_text(into.kind, into.extra)} on rank "
                f"{into.rank} and {_kind_text(kind, extra)} on rank {rank}; one name must mean one "
                "thing on all ranks"
            )
    if leaf:
        found.append(into)
        return into
    keyed = kind in _KEYED
    if not keyed and not fresh and len(into.children) != len(children):
        raise PlanError(
            f"{dotted(path)} has {len(into.children)} entries on rank {into.rank} and "
            f"{len(children)} on rank {rank}; use a dict if ranks hold different entries"
        )
    parts: Any = keys if keyed else range(len(children))
    for part, child in zip(parts, children, strict=True):
        identity = key_identity(part) if keyed else part
        old = into.children.get(identity)
        new = _merge_node(old, child, part, (*path, part), rank, found)
        if old is None:
            into.children[identity] = new
    return into


def _kind_text(kind: str | int, extra: object) -> str:
    if kind == TENSOR:
        return "an array"
    if kind == VALUE:
        return "a plain value"
    return f"a {kind} {extra!r}" if extra is not None else f"a {kind}"
