# SPDX-License-Identifier: Apache-2.0
"""A flat state made nested again, by the path that each name had."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardkeep.errors import FormatError
from shardkeep.structure import MAX_DEPTH

__all__ = ["nested"]

Key = str | int


class _Branch(dict[Key, Any]):
    """A container that is being filled; a list where its keys are numbers."""


def nested(leaves: Mapping[str, Any], paths: Mapping[str, tuple[Key, ...]], where: str) -> Any:
    """`leaves` by their paths: dicts, and lists where the keys are numbers.

    A name without a path stays where it is, at the top.
    """
    root = _Branch()
    for name, leaf in leaves.items():
        path = paths.get(name, (name,))
        if not 0 < len(path) <= MAX_DEPTH:
            raise FormatError(f"{where}: {name} is nested deeper than {MAX_DEPTH}")
        branch = root
        for key in path[:-1]:
            branch = branch.setdefault(key, _Branch())
            if type(branch) is not _Branch:
                raise FormatError(f"{where}: {name} lies inside of something that is no container")
        if path[-1] in branch:
            raise FormatError(f"{where}: two things are at the place of {name}")
        branch[path[-1]] = leaf
    return _closed(root, where)


def _closed(value: Any, where: str) -> Any:
    if type(value) is not _Branch:
        return value
    done = {key: _closed(inner, where) for key, inner in value.items()}
    numbers = [key for key in done if type(key) is int]
    if not numbers:
        return done
    if len(numbers) != len(done) or sorted(numbers) != list(range(len(done))):
        raise FormatError(f"{where}: a list is told of whose elements are not all there")
    return [done[row] for row in range(len(done))]
