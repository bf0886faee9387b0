# SPDX-License-Identifier: Apache-2.0
"""Which items an Orbax checkpoint has, and the tree of each: what its JSON files say."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardkeep.errors import CheckpointError, CorruptionError, FormatError, UnsafeCheckpointError
from shardkeep.foreign.below import file_below, read_exactly, regular_size
from shardkeep.foreign.detecting import recognised_later

__all__ = ["TREE", "Leaf", "Tree", "is_checkpoint", "items_of", "read_json", "read_tree"]

CHECKPOINT = "_CHECKPOINT_METADATA"
TREE = "_METADATA"
UNFINISHED = ".orbax-checkpoint-tmp"
_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".npz"),
    ".index.json",
)
"""How files end that hold another system's weights, or say where they are."""
_MAX_JSON = 1 << 30
_MAX_DEPTH = 64
SEQUENCE, DICT = 1, 2

Key = str | int


@dataclass(frozen=True, slots=True)
class Leaf:
    """One entry of a tree."""

    path: tuple[Key, ...]
    """Keys from the root; an integer is a place in a list."""
    name: str
    """What its array is called in the store."""
    kind: str
    """Orbax's name of its type."""
    is_empty: bool
    """Whether nothing is stored of it: None, or an empty container."""


@dataclass(frozen=True, slots=True)
class Tree:
    """The tree of one item."""

    leaves: tuple[Leaf, ...]
    """In Orbax's order."""
    use_ocdbt: bool
    """Whether arrays are packed into a few files."""
    use_zarr3: bool
    """Whether they are zarr 3, else zarr 2."""
    is_filled: bool
    """Whether every chunk is stored; else one that is not holds the fill value."""


def is_checkpoint(path: Path) -> bool:
    """Whether this is a checkpoint, an item of one, or a folder of steps; never an error."""
    try:
        if not path.is_dir():
            return False
        if _says(path / TREE, b'"tree_metadata"') or _says(path / CHECKPOINT, b'"item_handlers"'):
            return True
        return bool(_steps(path) or _trees(path))
    except (CheckpointError, OSError, ValueError):
        return False


def _says(path: Path, key: bytes) -> bool:
    return path.is_file() and key in read_exactly(path, 0, min(4096, regular_size(path)))


def _folders(path: Path) -> list[str]:
    with os.scandir(path) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir())


def _is_among_weights(path: Path) -> bool:
    """Whether another system's weights lie there: a model of Hugging Face may have a folder with
    the same in Orbax's form, and is still one of Hugging Face."""
    with os.scandir(path) as entries:
        if any(entry.name.endswith(_WEIGHTS) and not entry.is_dir() for entry in entries):
            return True
    return recognised_later("orbax", path)


def _trees(path: Path) -> list[str]:
    """Names of items that are trees: before version 0.10 nothing else said what a step holds."""
    if _is_among_weights(path):
        return []
    return [name for name in _folders(path) if _says(path / name / TREE, b'"tree_metadata"')]


def _steps(path: Path) -> list[str]:
    """Names of steps, where this is a manager's folder.

    The name of an item may end in a digit as that of a step does, so where no step says what it
    holds, this is a manager's folder only if all that have trees have such names. Where one does,
    only what can be read instead makes it none: weights may have been exported beside it.
    """
    telling = {name for name in _folders(path) if (path / name / CHECKPOINT).is_file()}
    if recognised_later("orbax", path) if telling else _is_among_weights(path):
        return []
    folders = [name for name in _folders(path) if UNFINISHED not in name]
    silent = [
        name
        for name in folders
        if name not in telling and ((path / name / TREE).is_file() or _trees(path / name))
    ]
    old = [name for name in silent if name[-1].isdecimal()]
    if not telling and len(old) < len(silent):
        return []
    return sorted([*telling, *old], key=lambda name: (len(name), name))


def items_of(root: Path) -> list[str]:
    """Names of the items, or `[""]` where the directory is one itself."""
    _refuse_unfinished(root)
    if (root / TREE).exists():
        return [""]
    if not (root / CHECKPOINT).exists():
        steps = _steps(root)
        if steps:
            raise FormatError(
                f"{root} is a folder of steps, not a checkpoint. Name a step, as in "
                f"{root / steps[-1]}; there are {len(steps)}."
            )
        if not _trees(root):
            raise FormatError(f"{root} holds no metadata of Orbax")
        names = [name for name in _folders(root) if not name.startswith(".")]
        for name in names:
            _refuse_unfinished(root / name)
        return [name for name in names if os.listdir(root / name)]
    told = read_json(root, CHECKPOINT).get("item_handlers")
    names = sorted(told) if isinstance(told, dict) else []
    for name in names:
        if "/" in name or "\\" in name or "\0" in name or name in ("", ".", ".."):
            raise UnsafeCheckpointError(f"{root}: {name!r} cannot be an item of it")
    if not names:
        with os.scandir(root) as entries:
            names = sorted(e.name for e in entries if (Path(e.path) / TREE).is_file())
    if not names:
        raise CorruptionError(f"{root}: nothing but metadata is there; copy all of it")
    return names


def _refuse_unfinished(path: Path) -> None:
    if UNFINISHED in path.name:
        raise FormatError(f"{path} is a save of Orbax that was not finished; choose another step")


def read_json(root: Path, name: str) -> dict[str, Any]:
    """An object of a JSON file below the checkpoint."""
    path = file_below(root, name)
    size = regular_size(path)
    if size > _MAX_JSON:
        raise FormatError(f"{path} has {size} bytes, more than Orbax's metadata takes")
    try:
        table = json.loads(read_exactly(path, 0, size).decode())
        if not isinstance(table, dict):
            raise ValueError("it is no object")
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"{path} is not valid JSON: {error}") from error
    return table


def read_tree(root: Path, item: str) -> Tree:
    """The tree of an item."""
    name = f"{item}/{TREE}" if item else TREE
    table = read_json(root, name)
    try:
        rows = table["tree_metadata"]
        leaves = tuple(_leaf(row) for row in rows.values())
        use_ocdbt = table.get("use_ocdbt", (root / item / "manifest.ocdbt").exists())
        return Tree(
            leaves,
            bool(use_ocdbt),
            bool(table.get("use_zarr3", False)),
            table.get("store_array_data_equal_to_fill_value") is True,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{root / name} is not a tree as Orbax writes it: {error!r}") from error


def _leaf(row: dict[str, Any]) -> Leaf:
    keys: list[Key] = []
    names: list[str] = []
    for each in row["key_metadata"]:
        key, kind = each["key"], each["key_type"]
        if type(key) is not str or kind not in (SEQUENCE, DICT):
            raise ValueError(f"a key {key!r} of type {kind!r}")
        names.append(key)
        keys.append(int(key) if kind == SEQUENCE else key)
    if not 0 < len(keys) <= _MAX_DEPTH or any(len(name) > 4096 for name in names):
        raise ValueError("a path of no fair length")
    value = row["value_metadata"]
    if type(value["value_type"]) is not str:
        raise ValueError("a value without a type")
    name = ".".join(names)
    return Leaf(tuple(keys), name, value["value_type"], value.get("skip_deserialize") is True)
