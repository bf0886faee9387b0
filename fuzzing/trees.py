"""Changes of nested values: of what JSON and msgpack hold, after decoding and before encoding."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from fuzzing import hostile

__all__ = ["Tagged", "Tree", "changed_tree"]

Path = tuple[Any, ...]
_GONE = object()


class Tagged:
    """A msgpack extension whose content was decoded too."""

    __slots__ = ("code", "inner")

    def __init__(self, code: int, inner: Any) -> None:
        self.code, self.inner = code, inner


class Tree:
    """A nested value and the paths of all its nodes."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.paths = list(_paths(root, ()))


def _paths(node: Any, path: Path) -> Iterator[Path]:
    yield path
    for key in _keys(node):
        yield from _paths(_child(node, key), (*path, key))


def _keys(node: Any) -> Any:
    if type(node) is dict:
        return list(node)
    if type(node) is list:
        return range(len(node))
    return ("inner",) if type(node) is Tagged else ()


def _child(node: Any, key: Any) -> Any:
    return node.inner if type(node) is Tagged else node[key]


def changed_tree(rng: Random, tree: Tree, others: list[Tree]) -> Any:
    """The value with one to four of its nodes changed; what the tree holds stays as it is."""
    root = tree.root
    for _ in range(rng.choice((1, 1, 1, 2, 2, 4))):
        path = rng.choice(tree.paths)
        root = _at(rng, root, path, rng.choice(others) if others else tree)
        if root is _GONE:
            return None
    return root


def _at(rng: Random, node: Any, path: Path, other: Tree) -> Any:
    if not path:
        return _new(rng, node, other)
    key = path[0]
    if type(node) is Tagged:
        inner = _at(rng, node.inner, path[1:], other)
        return Tagged(node.code, None if inner is _GONE else inner)
    if type(node) is dict and key in node:
        made = _at(rng, node[key], path[1:], other)
        return _with_key(rng, node, key, made)
    if type(node) is list and type(key) is int and key < len(node):
        made = _at(rng, node[key], path[1:], other)
        return [*node[:key], *([] if made is _GONE else [made]), *node[key + 1 :]]
    return node


def _with_key(rng: Random, node: dict[Any, Any], key: Any, made: Any) -> dict[Any, Any]:
    out = dict(node)
    if made is _GONE:
        del out[key]
        return out
    out[key] = made
    pick = rng.random()
    if pick < 0.03 and type(key) is str:
        out[hostile.TWICE + key] = node[key]
    elif pick < 0.06:
        out[hostile.text(rng, key if type(key) is str else "")] = out.pop(key)
    return out


def _new(rng: Random, node: Any, other: Tree) -> Any:
    pick = rng.random()
    if pick < 0.1:
        return _GONE
    if pick < 0.2:
        return hostile.thing(rng)
    if pick < 0.28:
        return _sub(other, rng.choice(other.paths))
    if type(node) is int:
        return hostile.number(rng, node)
    if type(node) is str:
        return hostile.text(rng, node)
    if type(node) is list and node:
        return _new_list(rng, node)
    if type(node) is bytes and node:
        at = rng.randrange(len(node))
        return node[:at] + bytes([rng.randrange(256)]) + node[at + rng.randrange(3) :]
    if type(node) is Tagged:
        return Tagged(rng.choice((node.code, rng.randrange(128), -1, 127)), node.inner)
    if type(node) is dict and pick < 0.6:
        return {**node, hostile.text(rng): hostile.thing(rng)}
    return hostile.thing(rng)


def _new_list(rng: Random, node: list[Any]) -> list[Any]:
    at, pick = rng.randrange(len(node)), rng.randrange(6)
    if pick == 0:
        return [*node, node[at]]
    if pick == 1:
        return [*node[:at], node[at], *node[at:]]
    if pick == 2:
        return node[:at]
    if pick == 3:
        return [*node, hostile.thing(rng)]
    if pick == 4 and len(node) < 1000:
        return node * rng.choice((2, 3, 40))
    return list(reversed(node))


def _sub(tree: Tree, path: Path) -> Any:
    node = tree.root
    for key in path:
        node = _child(node, key)
    return node
