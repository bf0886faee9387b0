# SPDX-License-Identifier: Apache-2.0
"""What the coordinator's writer tells those of other ranks, through torch's driver.

Torch's driver lets storages of different ranks speak only through the plans it scatters. A planner
that caches plans drops the one that came, and gives its writer the one of an earlier save: what was
put into that belongs to another save. So the word is kept where it arrives, which is in the thread
that will write.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["Word", "take_word"]


@dataclass(frozen=True)
class Word:
    """One save, as a rank must know it; travels in `SavePlan.storage_data`."""

    rank: int
    """The rank it is meant for."""
    world_size: int
    """How many ranks save."""
    announcement: bytes
    """Of the coordinator's native writer."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Unpickled by `_arrive`."""
        return _arrive, tuple(getattr(self, each.name) for each in fields(self))


_ARRIVED = threading.local()


def _arrive(rank: int, world_size: int, announcement: bytes) -> Word:
    word = Word(rank, world_size, announcement)
    _ARRIVED.word = word
    return word


def take_word(planned: object) -> Word | None:
    """The word that came to this thread last, or else the one in the plan; each only once."""
    word: Word | None = getattr(_ARRIVED, "word", None)
    _ARRIVED.word = None
    if word is None and isinstance(planned, Word):
        return planned
    return word
