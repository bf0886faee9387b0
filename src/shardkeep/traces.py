# SPDX-License-Identifier: Apache-2.0
"""Knowing a state again by its objects: the same arrays in the same places.

A training loop saves the same tensors again and again. To see that takes a look at the containers
alone, not at the tensors, and so a small part of the time of taking the state apart. A trace holds
identities and no array, not even weakly: numpy would not resize, and torch not convert, what is
pointed to. Arrays can be changed in place, and an identity can be another's by now: what a trace
recognises is what the state seems to be, until each array has been looked at.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, TypeAlias

from shardkeep.arrays import adapter_of
from shardkeep.per_rank import PerRank
from shardkeep.structure import DISTINCT_KEYS, TENSOR, VALUE, Node
from shardkeep.tree import SCALARS, FlatState, flatten

__all__ = ["Trace"]

_ARRAYS, _MAPPING, _SEQUENCE, _PER_RANK, _ARRAY, _VALUE = range(6)
_Step: TypeAlias = tuple[Any, ...]
_MAPPINGS = (dict, OrderedDict)


class Trace:
    """Where the arrays of a state were."""

    def __init__(self, root: _Step) -> None:
        """Made by `of`."""
        self._root = root

    @classmethod
    def of(cls, state: object, flat: FlatState) -> Trace | None:
        """The trace of a state just taken apart; None where objects in it make theirs anew."""
        root = None if flat.states else _step(state, flat.structure.root)
        return None if root is None else cls(root)

    def follow(self, state: object) -> list[object] | None:
        """The leaves of a state whose arrays seem to be those of the trace; None if any is not."""
        leaves: list[object] = []
        return leaves if _follow(state, self._root, leaves) else None


def _step(value: Any, node: Node) -> _Step | None:
    kind: Any = type(value)
    if node == TENSOR:
        return (_ARRAY, id(value))
    if node == VALUE:
        return (_VALUE,)
    if kind is PerRank:
        inner = _step(value.value, node[2][0])
        return None if inner is None else (_PER_RANK, inner)
    children: list[Any]
    if kind in _MAPPINGS:
        keys, types = list(value), set(map(type, value))
        if not types <= DISTINCT_KEYS:
            return None
        children = list(value.values())
        if all(part == TENSOR for part in node[2]):
            return (_ARRAYS, kind, keys, types, list(map(id, children)))
    elif node[0] in ("list", "tuple", "named_tuple"):
        children = list(value)
    else:
        return None
    steps = [_step(child, part) for child, part in zip(children, node[2], strict=True)]
    if None in steps:
        return None
    if kind in _MAPPINGS:
        return (_MAPPING, kind, keys, types, steps)
    return (_SEQUENCE, kind, steps)


def _follow(value: Any, step: _Step, leaves: list[object]) -> bool:
    what = step[0]
    if what == _ARRAYS:
        _, kind, keys, types, ids = step
        if type(value) is not kind or list(value) != keys or set(map(type, value)) != types:
            return False
        arrays = list(value.values())
        leaves += arrays
        return bool(list(map(id, arrays)) == ids)
    if what in (_ARRAY, _VALUE):
        leaves.append(value)
        return bool(step[1] == id(value)) if what == _ARRAY else _is_plain(value)
    if what == _PER_RANK:
        return type(value) is PerRank and _follow(value.value, step[1], leaves)
    if type(value) is not step[1]:
        return False
    if what == _MAPPING:
        same = list(value) == step[2] and set(map(type, value)) == step[3]
        return same and _follow_all(list(value.values()), step[4], leaves)
    return _follow_all(value, step[2], leaves)


def _follow_all(values: Sequence[object], steps: list[_Step], leaves: list[object]) -> bool:
    return len(values) == len(steps) and all(
        _follow(value, step, leaves) for value, step in zip(values, steps, strict=True)
    )


def _is_plain(value: object) -> bool:
    """Whether it is one plain value, and not something that is taken apart."""
    if type(value) in SCALARS:
        return True
    if adapter_of(value) is not None:
        return False
    flat = flatten(value)
    return bool(flat.structure.root == VALUE) and not flat.states
