# SPDX-License-Identifier: Apache-2.0
"""Ready-made `resize` for `PerRank`: what ranks get of what another number of ranks has saved.

Any function `(values, rank, world_size) -> value` will do. `values` has one value for each rank
that saved one, in the order of ranks; each is read from the checkpoint when it is looked at. What
is raised here stops the load on every rank, before anything is changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shardkeep.per_rank import Resize

__all__ = ["Resize", "deal_counts", "first", "refuse"]


def first(values: Sequence[Any], rank: int, world_size: int) -> Any:
    """For every rank, what the first rank has saved: for what is the same on all, or as good."""
    return values[0]


def refuse(values: Sequence[Any], rank: int, world_size: int) -> Any:
    """No value at all: on the same number of ranks as it was saved, else an error."""
    raise ValueError("load it on as many ranks as have saved it, or give it another resize=")


def deal_counts(*names: str, uneven: bool = False) -> Resize:
    """Counts of samples, or of whatever else is dealt out to ranks in turn: their sum, dealt anew.

    `names` are the counters in a dict, dotted where it is nested; with none, the value itself is
    the count. What else the dict holds must be equal on all ranks that saved it, and stays.

    Of `total` samples, rank `r` of `n` has seen those at `r`, `r + n`, `r + 2n`, ... below `total`:
    so deals a distributed sampler. With counts that such a deal cannot give, some samples would be
    seen twice and others never; that is refused, unless `uneven` says it does not matter.

    >>> [deal_counts()([5, 5, 4], rank, 4) for rank in range(4)]
    [4, 4, 3, 3]
    >>> deal_counts("seen")([{"epoch": 2, "seen": 8}, {"epoch": 2, "seen": 8}], 0, 1)
    {'epoch': 2, 'seen': 16}
    """

    def resize(values: Sequence[Any], rank: int, world_size: int) -> Any:
        saved = list(values)
        paths = [tuple(name.split(".")) for name in names] or [()]
        dealt = {path: _deal(saved, path, rank, world_size, uneven) for path in paths}
        for old, other in enumerate(saved[1:], 1):
            for path in _differences(saved[0], other, ()):
                if path not in dealt:
                    raise ValueError(
                        f"{'.'.join(map(str, path)) or 'the value'} differs between the ranks that "
                        f"saved it (0 and {old} of {len(saved)}) and is not one of the counters "
                        f"{', '.join(names)}"
                    )
        made = saved[0]
        for path, count in dealt.items():
            made = _with(made, path, count)
        return made

    resize.__qualname__ = f"deal_counts({', '.join(map(repr, names))})"
    return resize


def _deal(
    saved: Sequence[Any], path: tuple[str, ...], rank: int, world_size: int, uneven: bool
) -> int:
    counts = [_at(value, path) for value in saved]
    total = sum(counts)
    fair = [_share(total, old, len(counts)) for old in range(len(counts))]
    if counts != fair and not uneven:
        raise ValueError(
            f"{'.'.join(path) or 'the count'} is {_few(counts)} on the ranks that saved it; dealt "
            f"in turn it would be {_few(fair)}. Pass uneven=True to deal the sum all the same"
        )
    return _share(total, rank, world_size)


def _share(total: int, rank: int, world_size: int) -> int:
    return total // world_size + (rank < total % world_size)


def _few(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts[:8])) + (", ..." if len(counts) > 8 else "")


def _at(value: Any, path: tuple[str, ...]) -> int:
    name = ".".join(path) or "the value"
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            raise KeyError(f"there is no counter {name}")
        value = value[key]
    count = None if isinstance(value, bool) else _count(value)
    if count is None:
        raise TypeError(f"{name} is {value!r}, not a count")
    if count < 0:
        raise ValueError(f"{name} is {count}; a count is not negative")
    return count


def _count(value: Any) -> int | None:
    """An integer of Python or numpy, or an array that holds a single one; None for others."""
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.reshape(())
    if not isinstance(value, (int, np.integer)) and not hasattr(value, "shape"):
        return None
    try:
        return int(value.__index__())
    except (AttributeError, TypeError):
        return None


def _with(value: Any, path: tuple[str, ...], count: int) -> Any:
    """The value with another count; the class of the count stays (numpy's integers, arrays)."""
    if not path:
        made = _made_like(value, count)
        if _count(made) != count:
            raise OverflowError(f"{count} is too much for the {value.dtype} of the counter")
        return made
    changed = type(value)(value)
    changed[path[0]] = _with(value[path[0]], path[1:], count)
    return changed


def _made_like(value: Any, count: int) -> Any:
    if isinstance(value, np.ndarray):
        return np.full_like(value, count)
    if hasattr(value, "new_full"):  # of torch; its class would take the number for a length
        return value.new_full(value.shape, count)
    kind: Any = type(value)
    return kind(count)


def _differences(one: Any, two: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Paths at which two values differ."""
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        for key in dict.fromkeys([*one, *two]):
            if key in one and key in two:
                yield from _differences(one[key], two[key], (*path, key))
            else:
                yield (*path, key)
    elif isinstance(one, (list, tuple)) and type(one) is type(two) and len(one) == len(two):
        for at, pair in enumerate(zip(one, two, strict=True)):
            yield from _differences(*pair, (*path, at))
    elif not _equal(one, two):
        yield path


def _equal(one: Any, two: Any) -> bool:
    if hasattr(one, "shape") or hasattr(two, "shape"):
        same = getattr(one, "shape", None) == getattr(two, "shape", None)
        return same and one.dtype == two.dtype and bool((one == two).all())
    return type(one) is type(two) and bool(one == two)
