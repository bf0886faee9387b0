# SPDX-License-Identifier: Apache-2.0
"""The data files of a checkpoint of ours, remembered in the journal of a workplace."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from shardkeep.converting.workplace import Workplace, files_below, sync_directories
from shardkeep.formats.native.jobs import Written
from shardkeep.stores.local import storage_errors

__all__ = ["DataJournal", "clear_unknown"]


class DataJournal:
    """`shardkeep.formats.native.jobs.Journal` in the journal of a workplace."""

    def __init__(self, place: Workplace, skipped: Callable[[int], None]) -> None:
        """`skipped` is told the bytes of files that need not be written again."""
        self.save_id = place.save_id
        self._place = place
        self._skipped = skipped
        self._known = known_files(place)
        self._lock = threading.Lock()
        self._done: dict[str, Written] = {}
        self._durable: set[str] = set()

    def found(self, name: str) -> Written | None:
        """What an earlier attempt has written, if it is still there."""
        done = self._known.get(name)
        if done is not None:
            self._skipped(done.payload)
        return done

    def written(self, name: str, done: Written) -> None:
        """Note it, if it is durable already."""
        with self._lock:
            self._done[name] = done
        self._note(name)

    def durable(self, name: str) -> None:
        """Note it, if it is known already what it holds."""
        with self._lock:
            self._durable.add(name)
        self._note(name)

    def _note(self, name: str) -> None:
        with self._lock:
            if name in self._durable and name in self._done:
                self._durable.remove(name)
                done: Any = msgspec.to_builtins(self._done.pop(name))
                self._place.note({"file": name, "written": done})


def known_files(place: Workplace) -> dict[str, Written]:
    """The files that the journal says are whole, and that are there."""
    known: dict[str, Written] = {}
    for name, done in _noted(place).items():
        with contextlib.suppress(OSError):
            if (place.made / name).stat().st_size == done.size:
                known[name] = done
    return known


def _noted(place: Workplace) -> dict[str, Written]:
    noted: dict[str, Written] = {}
    for entry in place.entries:
        with contextlib.suppress(msgspec.ValidationError, KeyError):
            if entry["written"] is None:
                noted.pop(entry["file"], None)
            else:
                noted[entry["file"]] = msgspec.convert(entry["written"], Written)
    return noted


def clear_unknown(place: Workplace) -> None:
    """Remove what an attempt that was killed had begun and not finished.

    For good: if a file came back after a crash, in the place of one of its name and size that is
    noted by then, it would be taken for that.
    """
    known = known_files(place)
    # One that is gone is forgotten before another takes its name: that is as large from the first,
    # and would be taken for what was noted.
    for name in _noted(place).keys() - known.keys():
        place.note({"file": name, "written": None})
    with storage_errors(f"cleaning {place.made}"):
        if not place.made.is_dir():
            return
        for path in files_below(place.made):
            if path.relative_to(place.made).as_posix() not in known:
                path.unlink()
        sync_directories(place.made)
