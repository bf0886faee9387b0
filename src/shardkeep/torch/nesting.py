# SPDX-License-Identifier: Apache-2.0
"""The nesting of a state as torch's planners tell it, and as ours do.

Torch keeps the path of every leaf: `{"a.0.b": ("a", 0, "b")}`, keys of mappings as text and places
in lists as numbers. We keep the containers. What has no leaf, and what else a key was than text,
is not in torch's paths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from shardkeep.structure import MAX_DEPTH, Structure, key_text

__all__ = ["paths_of", "structure_of"]

Path: TypeAlias = tuple[str | int, ...]
MOST_HOLES = 4096
"""Places in a list without a leaf; with more of them it is no list."""
_KEYED = ("dict", "ordered_dict", "per_rank", "parts")


def structure_of(kinds: Mapping[str, int], paths: object) -> Structure:
    """The nesting of these leaves, which are tensors or values, in their order.

    Flat, with names as keys, where there are no paths, or such that names do not follow from.
    """
    flat = Structure(["dict", list(kinds), list(kinds.values()), None])
    root: dict[str | int, Any] = {}
    if not isinstance(paths, Mapping):
        return flat
    for name, kind in kinds.items():
        path = paths.get(name, (name,))
        if not _is_path(path) or not _insert(root, path, kind):
            return flat
    structure = Structure(_node(root))
    names = structure.names
    if len(names) == len(kinds) and set(names) == kinds.keys():
        return structure
    return flat


def _is_path(path: object) -> bool:
    return (
        isinstance(path, tuple)
        and 0 < len(path) < MAX_DEPTH
        and type(path[0]) is str
        and all(type(key) is str or (type(key) is int and key >= 0) for key in path)
    )


def _insert(root: dict[str | int, Any], path: Path, kind: int) -> bool:
    """False where a leaf and a container, or two leaves, have one path."""
    node = root
    for key in path[:-1]:
        node = node.setdefault(key, {})
        if type(node) is int:
            return False
    if path[-1] in node:
        return False
    node[path[-1]] = kind
    return True


def _node(tree: Any) -> Any:
    if type(tree) is int:
        return tree
    keys = list(tree)
    if keys and all(type(key) is int for key in keys):
        count = max(keys) + 1
        if count - len(keys) <= MOST_HOLES:
            # What has no leaf has no path: an empty mapping, most likely.
            return ["list", None, [_node(tree.get(key, {})) for key in range(count)], None]
    return ["dict", keys, [_node(child) for child in tree.values()], None]


def paths_of(structure: Structure) -> dict[str, Path]:
    """The path of each leaf, by its name, as torch's planners keep it."""
    return dict(zip(structure.names, _paths(structure.root, ()), strict=True))


def _paths(node: Any, path: Path) -> Iterator[Path]:
    if type(node) is int:
        yield path
        return
    kind, keys, children, _ = node
    if kind in _KEYED:
        steps: list[str | int] = [key if type(key) is str else key_text(key) for key in keys]
    else:
        steps = list(range(len(children)))
    for step, child in zip(steps, children, strict=True):
        yield from _paths(child, (*path, step))
