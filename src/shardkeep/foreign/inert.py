# SPDX-License-Identifier: Apache-2.0
"""Objects of any class that a trainer saved beside its tensors, as plain data that does nothing.

Arguments of a run, schedulers and the like are objects of the trainer's own classes. Nothing of
them is imported or called: an object becomes a dict of its attributes, under whose `__class__` the
name of the class is told. Classes and functions of Python itself are refused all the same.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardkeep.foreign import pickles
from shardkeep.foreign.graphs import Constant
from shardkeep.foreign.regular_files import opened
from shardkeep.foreign.stand_ins import Record, records
from shardkeep.foreign.torch_objects import Finishing, Members
from shardkeep.foreign.torch_stand_ins import TORCH
from shardkeep.foreign.torch_zip import Archive
from shardkeep.wording import shown

__all__ = ["CLASS", "read_beside", "read_inert"]

CLASS = "__class__"
ARGUMENTS = "__args__"
_BARE = frozenset({"argparse.Namespace", "types.SimpleNamespace"})
"""What is no more than its attributes."""
STREAM = "_io.BytesIO"
_OF_PYTHON = _BARE | {STREAM, "signal.Signals"}
"""What of Python itself may be told of; none of the rest has business in a checkpoint."""

Entry = Callable[..., object] | Constant


class _AnyClass(dict[str, Entry]):
    """Stand-ins for whatever is named: what looks like a class can be made, the rest is a name."""

    def get(self, name: str, default: Any = None) -> Any:
        """The entry of a name that the table lacks is made up."""
        known = super().get(name)
        if known is None:
            module, _, last = name.rpartition(".")
            if module.partition(".")[0] in sys.stdlib_module_names and name not in _OF_PYTHON:
                return None
            known = records(module, last)[name] if last[:1].isupper() else Constant(name)
            self[name] = known
        return known


def read_beside(root: Path, name: str) -> Any:
    """What `torch.save` put into a file of a checkpoint; objects as plain data."""
    with opened(root, name) as file:
        return read_inert(Archive(file.read, 0, file.size, str(root / name)), name)


def read_inert(archive: Archive, file: str) -> Any:
    """The object in an archive that lies in `file`; objects in it as plain data."""
    members = Members(archive)
    graph = pickles.load(
        members.pickle(),
        where=archive.where,
        classes=_AnyClass(TORCH),
        persistent=members.storage,
    )
    return Finishing(file, archive.where).finished(_plain(graph, {}))


def _plain(value: Any, done: dict[int, tuple[object, Any]]) -> Any:
    """A value in which every `Record` is a dict; depth and sharing were bounded before."""
    kind = type(value)
    if kind not in (dict, OrderedDict, list, tuple, deque, set, frozenset, Counter, Record):
        return value
    known = done.get(id(value))
    if known is None:
        known = done[id(value)] = (value, _made(value, kind, done))
    return known[1]


def _made(value: Any, kind: Any, done: dict[int, tuple[object, Any]]) -> Any:
    if kind is Record:
        return _attributes(value, done)
    if kind is dict or kind is OrderedDict:
        return _table(kind, value, done)
    if kind is list or kind is tuple:
        return kind([_plain(item, done) for item in value])
    if kind is deque:
        return deque([_plain(item, done) for item in value], value.maxlen)
    if kind is Counter or not any(isinstance(item, Record) for item in value):
        return value
    return [_plain(item, done) for item in value]


def _table(kind: Any, value: dict[Any, Any], done: dict[int, tuple[object, Any]]) -> Any:
    """A mapping whose keys are plain. A key that is an object (a member of an Enum, say) is told by
    its class and value; those told alike are numbered, so that none takes another's place."""
    out = kind()
    told: Counter[str] = Counter()
    for key, item in value.items():
        if isinstance(key, Record):
            text = key = f"{key.name}({', '.join(map(shown, key.args))})"
            while key in out or key in value:
                told[text] += 1
                key = f"{text} #{told[text] + 1}"
        out[key] = _plain(item, done)
    return out


def _attributes(record: Record, done: dict[int, tuple[object, Any]]) -> Any:
    state = record.state
    if record.name == STREAM and type(state) is tuple and state and type(state[0]) is bytes:
        return state[0]  # what it holds; where it was read up to does not matter
    out: dict[Any, Any] = {}
    if record.name not in _BARE:
        out[CLASS] = record.name
        if record.args:
            out[ARGUMENTS] = _plain(record.args, done)
    if type(state) is dict:
        out |= _table(dict, state, done)
    elif state is not None:
        out["__state__"] = _plain(state, done)
    return out
