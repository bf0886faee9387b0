# SPDX-License-Identifier: Apache-2.0
"""The nesting around what surgery leaves of a state.

What keeps its name keeps its place. A new name goes into the innermost dict whose name it begins
with, under the rest of the name, as state dicts of modules do. A list that loses or gains entries
becomes a dict by their numbers, so that the names of the others stay; a container that loses all is
gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardkeep.structure import Node, Path, Structure, dotted, key_identity

__all__ = ["placed"]

_OPEN = ("dict", "ordered_dict")
_KEYED = (*_OPEN, "per_rank", "parts")


@dataclass
class _Branch:
    """A container while it changes."""

    kind: str
    extra: Any
    children: dict[object, tuple[Any, _Branch | str]] = field(default_factory=dict)
    """Identity of each key to the key, and to a branch or the name of a leaf."""
    whole: int = 0
    """How many children it had."""
    gained: bool = False
    """Whether any was added to them."""

    def is_gone(self) -> bool:
        """Whether it had something, and nothing is left."""
        left = [child for _, child in self.children.values()]
        return bool(self.whole) and all(isinstance(c, _Branch) and c.is_gone() for c in left)


def placed(structure: Structure, leaves: Mapping[str, int]) -> tuple[Structure, list[str]]:
    """The nesting of leaves, given by name and kind, and the clashes that make it impossible."""
    names = iter(structure.names)
    if type(structure.root) is int:  # a state that is a single leaf
        name = next(names)
        root = _Branch("dict", None)
        kept: set[str] = set()
        if list(leaves) == [name]:
            return structure, []
    else:
        kept = set(leaves) & set(structure.names)
        root = _grow(structure.root, names, kept)
    faults = []
    containers = _containers(root)
    for name in leaves:
        if name not in kept:
            fault = _put(containers, root, name)
            if fault:
                faults.append(fault)
    order: list[str] = []
    made = Structure(_node(root, leaves, order))
    if len(order) == len(leaves) and made.names != order:
        if made.has_simple_keys:
            faults += _misnamed(order, made.names)
        made.take_names(order)
    return made, faults


def _misnamed(order: list[str], names: list[str]) -> list[str]:
    """What had its name because of another of the same, which is gone."""
    pairs = [(old, new) for old, new in zip(order, names, strict=True) if old != new]
    return [f"{old} would be called {new} now; rename it, too" for old, new in pairs[:8]]


def _grow(node: Node, names: Any, kept: set[str]) -> _Branch:
    kind, keys, children, extra = node
    branch = _Branch(kind, extra, whole=len(children))
    for key, child in zip(range(len(children)) if keys is None else keys, children, strict=True):
        if type(child) is int:
            name = next(names)
            if name in kept:
                branch.children[key_identity(key)] = (key, name)
        else:
            branch.children[key_identity(key)] = (key, _grow(child, names, kept))
    return branch


def _containers(root: _Branch) -> dict[str, _Branch]:
    """Every dict that new names can go to, by its name; the first of those that share one."""
    found: dict[str, _Branch] = {}
    pending: list[tuple[Path, _Branch]] = [((), root)]
    while pending:
        path, branch = pending.pop(0)
        if path and branch.kind in _OPEN:
            found.setdefault(dotted(path), branch)
        for key, child in branch.children.values():
            if isinstance(child, _Branch):
                pending.append(((*path, key), child))
    return found


def _put(containers: Mapping[str, _Branch], root: _Branch, name: str) -> str:
    """Put a leaf where its name says; says what is wrong with that."""
    end = len(name)
    branch, key = root, name
    while (end := name.rfind(".", 0, end)) > 0:
        found = containers.get(name[:end])
        if found is not None and name[end + 1 :]:
            branch, key = found, name[end + 1 :]
            break
    there = branch.children.get(key)
    if there is not None and not (isinstance(there[1], _Branch) and there[1].is_gone()):
        return f"{name} is the name of a container that is not empty"
    branch.children[key] = (key, name)
    branch.gained = True
    return ""


def _node(branch: _Branch, leaves: Mapping[str, int], order: list[str]) -> Node:
    kind, extra = branch.kind, branch.extra
    keys: list[Any] = []
    children: list[Node] = []
    for key, child in branch.children.values():
        if isinstance(child, _Branch) and child.is_gone():
            continue
        keys.append(key)
        if isinstance(child, _Branch):
            children.append(_node(child, leaves, order))
        else:
            order.append(child)
            children.append(leaves[child])
    if (branch.gained or len(children) < branch.whole) and kind not in _OPEN:
        kind, extra = "dict", None
    return [kind, keys if kind in _KEYED else None, children, extra]
