# SPDX-License-Identifier: Apache-2.0
"""A nested state taken apart by torch's rules, so that torch finds what it looks for.

Mappings are always taken apart, lists where they hold a tensor or a mapping, tuples never. Keys
become text, and names are joined by dots. torch leaves empty mappings out; here they are values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardkeep.errors import UnsupportedValueError
from shardkeep.foreign.layout import OutTensor
from shardkeep.foreign.nesting import items_by_text

__all__ = ["flattened"]

Path = tuple[str | int, ...]


def flattened(state: Any) -> dict[str, tuple[Path, Any]]:
    """Name to path and leaf; two leaves of one name, or keys of one text, are refused."""
    if not isinstance(state, Mapping):
        raise UnsupportedValueError(
            f"torch.distributed.checkpoint stores a dict of names, not a {type(state).__name__}"
        )
    found: dict[str, tuple[Path, Any]] = {}
    for path, leaf in _leaves(state, ()):
        name = ".".join(map(str, path))
        if name in found:
            raise UnsupportedValueError(
                f"{name}: two parts of the state get this name in torch.distributed.checkpoint, "
                "which makes text of keys and joins them by dots. Rename one."
            )
        found[name] = (path, leaf)
    return found


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping) and (value or not path):
        for inner, item in items_by_text(value, path, "torch.distributed.checkpoint"):
            yield from _leaves(item, inner)
    elif type(value) is list and _splits(value):
        for at, item in enumerate(value):
            yield from _leaves(item, (*path, at))
    else:
        yield path, value


def _splits(items: list[Any]) -> bool:
    """As torch does, for what is left once empty mappings are values."""
    return any(
        isinstance(item, OutTensor)
        or (isinstance(item, Mapping) and len(item) > 0)
        or (type(item) is list and _splits(item))
        for item in items
    )
