# SPDX-License-Identifier: Apache-2.0
"""A flat state nested again, along the paths that torch and others keep; and keys as those have
them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from shardkeep.errors import FormatError, UnsupportedValueError

__all__ = ["items_by_text", "nested"]

_GAPS = 10_000
"""Items that a list may lack."""
_DEPTH = 64
"""Keys that a path may have."""


def items_by_text(
    state: Mapping[Any, Any], path: tuple[object, ...], system: str
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The items of a mapping at a path, with theirs, where a system makes text of keys; two keys of
    one text are refused."""
    texts: set[str] = set()
    for key, item in state.items():
        text = str(key)
        inner = (*path, text)
        if text in texts:
            raise UnsupportedValueError(
                f"{'.'.join(map(str, inner))}: two keys have this name in {system}, which makes "
                "text of keys. Rename one."
            )
        texts.add(text)
        yield inner, item


def nested(
    leaves: Mapping[str, Any], paths: Mapping[str, tuple[Any, ...]] | None, where: str
) -> Any:
    """The state as it was before it was flattened; names without a path stay as they are.

    Texts in a path are keys of dicts, numbers are places in lists.
    """
    if paths is None:
        return dict(leaves)
    tops = [paths.get(fqn, (fqn,))[0] for fqn in leaves]
    root: _Keys | _Items = _Items() if tops and all(type(key) is int for key in tops) else _Keys()
    # Places further on are refused before they are looked for: they can be chosen to collide.
    most = 2 * len(leaves) + _GAPS
    for fqn, value in leaves.items():
        path = paths.get(fqn, (fqn,))
        if len(path) > _DEPTH:
            raise FormatError(f"{where}: {fqn:.100} is nested deeper than {_DEPTH}")
        at: Any = root
        for key, following in pairwise(path):
            _check_key(at, key, most, fqn, where)
            at = _inner(at, key, following, fqn, where)
        _check_key(at, path[-1], most, fqn, where)
        if path[-1] in at:
            raise FormatError(f"{where}: {fqn} lies where something else does")
        at[path[-1]] = value
    return _finished(root, where)


class _Keys(dict[Any, Any]):
    """A dict that is being filled."""


class _Items(dict[Any, Any]):
    """A list that is being filled, in any order."""


def _inner(at: Any, key: Any, following: Any, fqn: str, where: str) -> Any:
    kind: type = _Items if type(following) is int else _Keys
    inner = at.setdefault(key, kind())
    if type(inner) is not kind:
        raise FormatError(f"{where}: the path of {fqn} leads through something else")
    return inner


def _check_key(at: Any, key: Any, most: int, fqn: str, where: str) -> None:
    if (type(key) is int) != (type(at) is _Items) or (type(key) is int and key < 0):
        raise FormatError(f"{where}: the path of {fqn} leads through something else")
    if type(key) is int and key >= most:
        raise FormatError(
            f"{where}: {fqn:.100} is an item of a list of more than the {most} that there can be"
        )


def _finished(value: Any, where: str) -> Any:
    """With dicts and lists in place of those that were filled."""
    if type(value) is _Keys:
        return {key: _finished(item, where) for key, item in value.items()}
    if type(value) is not _Items:
        return value
    count = max(value) + 1
    if count > 2 * len(value) + _GAPS:
        raise FormatError(f"{where}: a list of {count} items has {len(value)} of them")
    # torch leaves out empty containers, and puts None in their place.
    return [_finished(value.get(at), where) for at in range(count)]
