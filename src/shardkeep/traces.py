# SPDX-License-Identifier: Apache-2.0
"""Knowing a state again by its objects: the same arrays in the same places.

A training loop saves the same tensors again and again. To see that takes a look at the containers
alone, not at the tensors, and so a small part of the time of taking the state apart. A trace keeps
no array alive. Arrays can be changed in place, so what a trace recognises is not what they are.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, TypeAlias
from weakref import ref

import numpy as np

from shardkeep.arrays import adapter_of
from shardkeep.structure import TENSOR, VALUE, Node
from shardkeep.tree import FlatState, PerRank, flatten

__all__ = ["Trace"]

_ARRAYS, _MAPPING, _SEQUENCE, _PER_RANK, _ARRAY, _ANY_ARRAY, _VALUE = range(7)
_Step: TypeAlias = tuple[Any, ...]
_MAPPINGS = (dict, OrderedDict)
_KEYS = {str, int}
"""Keys that are equal only if they are of one type."""


class Trace:
    """Where the arrays of a state were."""

    def __init__(self) -> None:
        """Made by `of`."""
        self.loose: list[int] = []
        """Leaves that may be any array: some must not be pointed to, or could not be resized."""
        self._root: _Step | None = None
        self._count = 0

    @classmethod
    def of(cls, state: object, flat: FlatState) -> Trace | None:
        """The trace of a state just taken apart; None where objects in it make theirs anew."""
        out = cls()
        if not flat.states:
            out._root = out._step(state, flat.structure.root)
        return None if out._root is None else out

    def follow(self, state: object) -> list[object] | None:
        """The leaves of a state whose arrays are those of the trace; None where any is not."""
        leaves: list[object] = []
        assert self._root is not None
        return leaves if _follow(state, self._root, leaves) else None

    def _step(self, value: Any, node: Node) -> _Step | None:
        kind: Any = type(value)
        if node in (TENSOR, VALUE):
            return self._leaf(value, node)
        if kind is PerRank:
            inner = self._step(value.value, node[2][0])
            return None if inner is None else (_PER_RANK, inner)
        children: list[Any]
        if kind in _MAPPINGS:
            if not {type(key) for key in value} <= _KEYS:
                return None
            children = list(value.values())
            refs = self._refs(children, node[2])
            if refs is not None:
                return (_ARRAYS, kind, list(value), refs)
        elif node[0] in ("list", "tuple", "named_tuple"):
            children = list(value)
        else:
            return None
        steps = [self._step(child, part) for child, part in zip(children, node[2], strict=True)]
        if None in steps:
            return None
        if kind in _MAPPINGS:
            return (_MAPPING, kind, list(value), steps)
        return (_SEQUENCE, kind, steps)

    def _leaf(self, value: Any, node: Node) -> _Step:
        self._count += 1
        if node == VALUE:
            return (_VALUE,)
        if _may_be_pointed_to(type(value)):
            return (_ARRAY, ref(value))
        self.loose.append(self._count - 1)
        return (_ANY_ARRAY,)

    def _refs(self, children: list[Any], nodes: list[Node]) -> list[Any] | None:
        """Of a dict of nothing but arrays; None of others."""
        if not all(node == TENSOR for node in nodes):
            return None
        if not all(map(_may_be_pointed_to, set(map(type, children)))):
            return None
        self._count += len(children)
        return list(map(ref, children))


def _may_be_pointed_to(kind: type) -> bool:
    # numpy refuses to resize an array that is pointed to.
    return not issubclass(kind, np.ndarray) and bool(getattr(kind, "__weakrefoffset__", 0))


def _follow(value: Any, step: _Step, leaves: list[object]) -> bool:
    what = step[0]
    if what == _ARRAYS:
        _, kind, keys, refs = step
        if type(value) is not kind or not _same_keys(value, keys):
            return False
        arrays = list(value.values())
        leaves += arrays
        return all(map(operator.is_, map(operator.call, refs), arrays))
    if what in (_ARRAY, _ANY_ARRAY, _VALUE):
        leaves.append(value)
        if what == _ARRAY:
            return step[1]() is value
        return adapter_of(value) is not None if what == _ANY_ARRAY else _is_plain(value)
    if what == _PER_RANK:
        return type(value) is PerRank and _follow(value.value, step[1], leaves)
    if type(value) is not step[1]:
        return False
    if what == _MAPPING:
        return _same_keys(value, step[2]) and _follow_all(list(value.values()), step[3], leaves)
    return _follow_all(value, step[2], leaves)


def _follow_all(values: Sequence[object], steps: list[_Step], leaves: list[object]) -> bool:
    return len(values) == len(steps) and all(
        _follow(value, step, leaves) for value, step in zip(values, steps, strict=True)
    )


def _same_keys(value: Any, keys: list[Any]) -> bool:
    found = list(value)
    return found == keys and set(map(type, found)) == set(map(type, keys))


def _is_plain(value: object) -> bool:
    """Whether it is one plain value, and not something that is taken apart."""
    if type(value) in (int, float, str, bool, type(None)):
        return True
    if adapter_of(value) is not None:
        return False
    flat = flatten(value)
    return bool(flat.structure.root == VALUE) and not flat.states
