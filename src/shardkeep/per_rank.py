# SPDX-License-Identifier: Apache-2.0
"""What each rank keeps for itself, and who says what becomes of it on another number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

__all__ = ["PerRank", "Resize"]

T = TypeVar("T")

Resize: TypeAlias = Callable[[Sequence[Any], int, int], Any]
"""`resize(values, rank, world_size)`: what rank `rank` of `world_size` gets, of the values that
other ranks have saved, in the order of those ranks."""


@dataclass(frozen=True, slots=True)
class PerRank(Generic[T]):
    """A value each rank keeps for itself: never compared, never deduplicated, restored by rank.

    With `resize` it is restored as it was saved, whatever the target holds by then: other keys,
    lengths and shapes are fine. Without, it must fit as everything else.
    """

    value: T
    """Anything a state may hold: a plain value, an array, a container of them, a `Stateful`."""

    resize: Resize | None = None
    """What a load on another number of ranks makes of the values that were saved; None refuses.

    Only loads look at it, and only where the number differs; see `shardkeep.resizing` for ready
    ones. It is called on every rank, may be called twice, and must not talk to other ranks.
    """

    def __post_init__(self) -> None:
        """Find out now, not when the run is to go on."""
        if self.resize is not None and not callable(self.resize):
            raise TypeError(
                f"resize is {self.resize!r}; pass a function (values, rank, world_size) -> value"
            )
