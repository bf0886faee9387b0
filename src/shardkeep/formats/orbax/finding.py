# SPDX-License-Identifier: Apache-2.0
"""A whole Orbax checkpoint: the trees of its items, nested, with values in place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardkeep.dtypes import lookup
from shardkeep.errors import CheckpointNotFoundError, FormatError
from shardkeep.foreign.found import Found, StoredTensor
from shardkeep.foreign.nesting import nested
from shardkeep.formats.orbax.chunks import Arrays
from shardkeep.formats.orbax.items import CHECKPOINT, TREE, Leaf, items_of, read_json, read_tree

__all__ = ["find_checkpoint"]

STRINGS = "_strings.json"
JSON_ITEMS = ("metadata", "metrics")
"""The only file of an item that holds JSON; the manager calls that of its metrics so."""
_ALONE = frozenset({"default", "state", "pytree"})
"""Names that Orbax itself gives to the only item; its own loading leaves them out."""
_EMPTY: dict[str, Any] = {"None": None, "Dict": dict, "List": list, "Tuple": tuple,
                          "NamedTuple": tuple}  # fmt: skip


def find_checkpoint(path: Path) -> Found:
    """The state of a checkpoint or of one item."""
    if not path.is_dir():
        raise CheckpointNotFoundError(f"there is no directory {path}")
    names = items_of(path)
    items = {name: _item(path, name) for name in names}
    state = items[names[0]] if names == [""] or set(names) < _ALONE else items
    user = read_json(path, CHECKPOINT) if (path / CHECKPOINT).is_file() else {}
    custom = user.get("custom_metadata")
    return Found("Orbax", path, state, custom if isinstance(custom, dict) else {})


def _item(root: Path, item: str) -> Any:
    folder = root / item
    if (folder / TREE).exists():
        return _tree_state(root, item)
    for name in JSON_ITEMS:
        if (folder / name).is_file():
            return read_json(root, f"{item}/{name}")
    raise FormatError(
        f"{folder} is an item that no tree describes: written by a handler of its own, or by a "
        "version of Orbax before there was one. Load it with Orbax and save it again as a tree; "
        "other items can be opened by their own folders."
    )


def _tree_state(root: Path, item: str) -> Any:
    tree = read_tree(root, item)
    folder = root / item
    stored = [leaf for leaf in tree.leaves if not leaf.is_empty and leaf.kind != "string"]
    arrays = Arrays(folder, tree).find([leaf.name for leaf in stored]) if stored else {}
    strings: Mapping[str, Any] = {}
    if any(leaf.kind == "string" for leaf in tree.leaves):
        strings = read_json(root, f"{item}/{STRINGS}" if item else STRINGS)
    values: dict[str, Any] = {}
    for leaf in tree.leaves:
        if leaf.name in values:
            raise FormatError(f"{folder}: there are two things called {leaf.name}")
        values[leaf.name] = _value(folder, leaf, arrays, strings)
    return nested(values, {leaf.name: leaf.path for leaf in tree.leaves}, str(folder))


def _value(
    folder: Path, leaf: Leaf, arrays: Mapping[str, StoredTensor], strings: Mapping[str, Any]
) -> Any:
    if leaf.is_empty:
        if leaf.kind not in _EMPTY:
            raise FormatError(f"{folder}: {leaf.name} is an empty {leaf.kind!r:.60}")
        kind = _EMPTY[leaf.kind]
        return kind() if kind else None
    if leaf.kind == "string":
        text = strings.get(leaf.name)
        if type(text) is not str:
            raise FormatError(f"{folder}: the text {leaf.name} is not in {STRINGS}")
        return text
    tensor = arrays[leaf.name]
    if leaf.kind == "scalar" and tensor.shape == ():
        place = tensor.parts[0].place
        bits = place.read((), ())  # type: ignore[union-attr]
        return bits.view(lookup(tensor.dtype).to_numpy()).item()
    return tensor
