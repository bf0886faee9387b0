# SPDX-License-Identifier: Apache-2.0
"""What the coordinator's storage tells those of other ranks, through torch's driver.

Torch's driver lets storages of different ranks speak only through the plans it scatters. A planner
that caches plans drops the one that came, and gives its writer the one of an earlier save: what was
put into that belongs to another save. So a word is kept where it arrives, which is in the thread
that will write or read.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields
from typing import Any, TypeVar

__all__ = ["Intent", "SharedReads", "Word", "take_word"]


@dataclass(frozen=True)
class _Announced:
    def __reduce__(self) -> tuple[Any, ...]:
        """Unpickled by `_arrive`."""
        return _arrive, (type(self), *(getattr(self, each.name) for each in fields(self)))


@dataclass(frozen=True)
class Word(_Announced):
    """One save, as a rank must know it; travels in `SavePlan.storage_data`."""

    rank: int
    """The rank it is meant for."""
    world_size: int
    """How many ranks save."""
    announcement: bytes
    """Of the coordinator's native writer."""


@dataclass(frozen=True)
class SharedReads(_Announced):
    """What ranks read for each other in one load; travels in `LoadPlan.storage_data`."""

    share: bytes
    """This rank's `Share`; empty if each reads for itself."""


@dataclass(frozen=True)
class Intent:
    """What a rank tells the coordinator of a load, in `LoadPlan.storage_data`."""

    digest: str
    """Of the record that it has opened."""
    wants: bytes
    """What it will read, for `plan_shares`; empty where it does not share."""


_ARRIVED = threading.local()

W = TypeVar("W", bound=_Announced)


def _arrive(kind: type[W], *parts: Any) -> W:
    word = kind(*parts)
    setattr(_ARRIVED, kind.__name__, word)
    return word


def take_word(kind: type[W], planned: object) -> W | None:
    """The word that came to this thread last, or else the one in the plan; each only once."""
    word: W | None = getattr(_ARRIVED, kind.__name__, None)
    setattr(_ARRIVED, kind.__name__, None)
    if word is None and isinstance(planned, kind):
        return planned
    return word
