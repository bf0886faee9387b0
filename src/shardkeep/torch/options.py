# SPDX-License-Identifier: Apache-2.0
"""Options of the groups of an optimizer, told for each parameter.

Plain values are pairs in one list. What holds tensors is named beside it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from shardkeep import values
from shardkeep.errors import MismatchError, UnsupportedValueError
from shardkeep.torch.copying import clone, copied
from shardkeep.torch.first_steps import Kept
from shardkeep.wording import names_text

__all__ = ["OptionsOfGroups", "OptionsToLoad", "apply_options", "by_name", "differing", "same"]

Options = list[list[Any]]
"""Pairs of a name and a value."""

_NOT_OPTIONS = ("params", "param_names")

_TOLD = ("options", "state", "class")
"""What is told of a parameter besides options that hold tensors."""


class OptionsOfGroups:
    """The options of groups, listed once for all parameters of each."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Options, dict[str, Any]]] = {}

    def of(self, group: dict[str, Any], kept: Kept) -> dict[str, Any]:
        """What is told of a parameter of a group."""
        found = self._known.get(id(group))
        if found is None:
            options = {k: v for k, v in sorted(group.items()) if k not in _NOT_OPTIONS}
            apart = {name: value for name, value in options.items() if _holds_arrays(value)}
            _check_names(apart)
            pairs = [
                [name, value.item() if isinstance(value, Tensor) else value]
                for name, value in options.items()
                if name not in apart
            ]
            found = self._known[id(group)] = (pairs, apart)
        pairs, apart = found
        return {**self._given(apart), "options": pairs, "state": sorted(map(str, kept))}

    def _given(self, apart: dict[str, Any]) -> dict[str, Any]:
        return apart


class OptionsToLoad(OptionsOfGroups):
    """Copies for each parameter: what is stored of each may differ, and options may be kept."""

    def _given(self, apart: dict[str, Any]) -> dict[str, Any]:
        return {name: copied(value, clone) for name, value in apart.items()}


def _check_names(apart: Collection[str]) -> None:
    taken = [name for name in apart if name in _TOLD]
    if taken:
        raise UnsupportedValueError(
            f"a group of the optimizer has an option {names_text(taken)} that holds tensors or a "
            "dict; AppState has these names for its own entries. Call it otherwise"
        )


def _holds_arrays(value: object) -> bool:
    """Whether it is more than one plain value; a learning rate in a tensor is not."""
    if isinstance(value, Tensor):
        return value.dim() > 0 or type(value) is not Tensor
    if isinstance(value, (list, tuple)):
        return any(isinstance(item, Tensor) or _holds_arrays(item) for item in value)
    return isinstance(value, Mapping)


def by_name(told: Mapping[str, Any], keep: Collection[str]) -> dict[str, Any]:
    """All options that are told of a parameter, but for those that a load leaves alone."""
    found = {**dict(map(tuple, told["options"])), **{k: told[k] for k in told if k not in _TOLD}}
    return {name: value for name, value in found.items() if name not in keep}


def same(one: Any, other: Any) -> bool:
    """Whether two options are equal, also where they hold tensors."""
    if one is other:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return type(one) is type(other) and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if _holds_arrays(one) and _holds_arrays(other):
        return len(one) == len(other) and all(map(same, one, other))
    return values.same(one, other)


def differing(
    one: str, mine: Mapping[str, Any], other: str, theirs: Mapping[str, Any]
) -> MismatchError:
    """What to say of two parameters of one group that were saved with different options."""
    names = [
        f"{name} {mine.get(name)!r} and {theirs.get(name)!r}"
        for name in sorted({*mine, *theirs})
        if not same(mine.get(name), theirs.get(name))
    ]
    return MismatchError(
        f"{one} and {other} are in one group of the optimizer, but were saved with different "
        f"options: {', '.join(names)}. Put them into groups of their own, or name the options in "
        "keep_options",
        mismatched={other: f"options differ from those of {one}"},
    )


def apply_options(
    group: dict[str, Any],
    told: Mapping[str, Any],
    keep: Collection[str],
    filled: dict[Tensor, Any],
) -> None:
    """Set the options of a group; `filled` holds what tensors were given in this load."""
    apart = [(name, value) for name, value in told.items() if name not in _TOLD]
    for name, value in (*told["options"], *apart):
        if name not in keep and name not in _NOT_OPTIONS:
            group[name] = _in_place(group.get(name), value, filled)


def _in_place(old: Any, value: Any, filled: dict[Tensor, Any]) -> Any:
    """The value of an option; in the tensors that are there, if it fits them.

    A captured graph or a compiled step reads from there. But groups that shared one tensor may have
    come to have different values.
    """
    if isinstance(old, Tensor) and old.is_meta:
        return value
    if isinstance(old, Tensor) and isinstance(value, (int, float, complex)):
        value = torch.full_like(old, value)
    if isinstance(old, Tensor) and isinstance(value, Tensor):
        if old.shape != value.shape or old.dtype != value.dtype or type(old) is not type(value):
            return value
        given = filled.setdefault(old, value)
        if given is not value and not torch.equal(given, value):
            return value
        with torch.no_grad():
            return old.copy_(value)
    if type(old) is type(value) and isinstance(value, dict):
        made = copy.copy(value)
        for key, item in value.items():
            made[key] = _in_place(old.get(key), item, filled)
        return made
    if type(old) is type(value) and type(value) in (list, tuple) and len(old) == len(value):
        pairs = zip(old, value, strict=True)
        return type(value)(_in_place(mine, item, filled) for mine, item in pairs)
    return value
