# SPDX-License-Identifier: Apache-2.0
"""What a run's folder holds, learnt from the directory and from nothing else.

A step exists if and only if its record is committed. There is no file that says which is the
latest: it could be wrong.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from shardkeep.errors import CheckpointError, CorruptionError, FormatError, StorageError
from shardkeep.formats.native.names import RECORD
from shardkeep.formats.native.record import MAX_RECORD, decode_head
from shardkeep.manager.checking import checked_place
from shardkeep.manager.naming import StepNames
from shardkeep.manager.steps import DamagedStep, Listing, Step, metrics_of
from shardkeep.storage import CheckpointId
from shardkeep.stores.local import LocalStore, Stat, storage_errors

__all__ = ["MANAGED", "Catalog", "copying_name", "is_leaving", "leaving_name", "left_step"]

log = logging.getLogger("shardkeep")

MANAGED = ".shardkeep"
"""The folder beside the steps for what the manager itself keeps."""
_LEAVING = ".deleted-"
"""Before the name of a step that is being removed: 16 hex digits and a dash follow."""
_COPYING = ".copying-"
"""The same before the name of a step that is being copied here from another tier."""
_DIGITS = 16
_LOOKS = 20
"""Listings in a row that may change while they are looked at."""
_PAUSE_S = 0.002


def leaving_name(name: str, token: str) -> str:
    """What a step is called while it is being removed."""
    return f"{_LEAVING}{token}-{name}"


def copying_name(name: str, token: str) -> str:
    """What a step is called until all of its copy is there."""
    return f"{_COPYING}{token}-{name}"


def is_leaving(name: str, prefix: str = _LEAVING) -> bool:
    """Whether a name is that of something being removed."""
    token, _, rest = name.removeprefix(prefix).partition("-")
    return (
        name.startswith(prefix)
        and len(token) == _DIGITS
        and not set(token) - set("0123456789abcdef")
        and rest != ""
    )


def left_step(name: str) -> str:
    """The name that it had before."""
    return name.removeprefix(_LEAVING)[_DIGITS + 1 :]


class Catalog:
    """The steps in one folder. Records are read once, as long as they stay what they are."""

    def __init__(
        self,
        root: CheckpointId,
        names: StepNames,
        open_store: Callable[[CheckpointId], LocalStore] = LocalStore,
    ) -> None:
        """Nothing is touched; the folder need not exist."""
        self.store = open_store(checked_place(root, "the folder of a run"))
        self.names = names
        self.open_store = open_store
        self._known: dict[str, tuple[Stat, Step | DamagedStep]] = {}
        self._links: set[str] = set()
        """Those that were told of."""
        self.copying: set[str] = set()
        """Names of copies that this process is making here."""
        self._lock = threading.Lock()

    @property
    def root(self) -> str:
        """The folder, as an absolute path."""
        return str(self.store.root)

    def path(self, step: int) -> str:
        """Where a step lies, or would."""
        return os.path.join(self.root, self.names.of(step))

    def copies(self, step: int) -> tuple[str, ...]:
        """Where whole copies of a step are, the one to read first in front."""
        found = self._look(self.names.of(step), step)
        return (found.path,) if isinstance(found, Step) else ()

    def find(self, step: int) -> Step | DamagedStep | None:
        """One step, without looking at the others."""
        return self._look(self.names.of(step), step)

    def refuse_checkpoint(self) -> None:
        """Raise if the folder is itself a checkpoint: a step saved there would lie in it, and not
        beside it. Costs one call to the system."""
        if os.path.lexists(self.store.root / RECORD):
            self.look()

    def look(self) -> Listing:
        """All there is now. Costs two calls to the system for each step, and a read for each new.

        Steps go while others come: one that was listed and is gone when it is looked at may have
        made way for one that was not listed yet. So the folder is listed again until none is.
        """
        before: list[str] | None = None
        for _ in range(_LOOKS):
            with storage_errors(f"listing {self.root}"):
                names = self.store.list()
            listing, vanished = self._look_at(names)
            # One listing may miss both a step that is moved away and the one that takes its place.
            missed = not listing.steps and bool(listing.leaving) and names != before
            if not vanished and not missed:
                if RECORD in names and listing == Listing():
                    raise FormatError(
                        f"{self.root} is a checkpoint, and not the folder of a run; pass the "
                        "folder that holds the steps"
                    )
                return listing
            before = names
            time.sleep(_PAUSE_S)
        if vanished and not listing.steps:
            raise StorageError(
                f"steps of {self.root} come and go faster than they can be looked at; try again",
                transient=True,
            )
        return listing

    def _look_at(self, names: list[str]) -> tuple[Listing, bool]:
        """What these names are, and whether a step among them is gone."""
        steps, damaged, unfinished, leaving, copying = [], [], [], [], []
        vanished = False
        numbered = []
        for name in names:
            if is_leaving(name):
                leaving.append(name)
            elif is_leaving(name, _COPYING):
                copying.append(name)
            elif (step := self.names.step(name)) is not None:
                numbered.append((step, name))
        for step, name in sorted(numbered):
            try:
                found, is_unfinished, is_gone = self._look_closely(name, step)
            except OSError as error:
                found, is_unfinished, is_gone = self._unreadable(name, step, error), False, False
            vanished = vanished or is_gone
            if is_unfinished:
                unfinished.append(name)
            if isinstance(found, Step):
                steps.append(found)
            elif found is not None:
                damaged.append(found)
        self._forget({name for _, name in numbered})
        listing = Listing(
            tuple(steps), tuple(damaged), tuple(unfinished), tuple(leaving), tuple(copying)
        )
        return listing, vanished

    def _look_closely(self, name: str, step: int) -> tuple[Step | DamagedStep | None, bool, bool]:
        """What has this name; if it is none, whether it is one unfinished, or gone."""
        found = self._look(name, step)
        if found is not None:
            return found, False, False
        if self.store.is_directory(name):
            # Moved away and back by a remover that found it pinned, it has its record again.
            found = self._look(name, step)
            return found, found is None, False
        # A file or a link stays what it is; a directory is back just now.
        there = os.path.lexists(self.store.root / name)
        return None, False, not there or self.store.is_directory(name)

    def _unreadable(self, name: str, step: int, error: OSError) -> DamagedStep:
        return DamagedStep(
            step, self.path(step), f"{name} cannot be read: {error}", StorageError.__name__
        )

    def _forget(self, there: set[str]) -> None:
        with self._lock:
            for name in self._known.keys() - there:
                del self._known[name]

    def _look(self, name: str, step: int) -> Step | DamagedStep | None:
        record = f"{name}/{RECORD}"
        if self._is_link(name):
            return None
        try:
            now = self.store.stat(record)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            return self._unreadable(record, step, error)
        with self._lock:
            stamp, known = self._known.get(name, (None, None))
        if known is not None and stamp == now:
            return known
        found = self._read(name, step, now)
        # What could not be read this time may be read the next: only contents are remembered.
        if isinstance(found, Step) or (found and found.kind == CorruptionError.__name__):
            with self._lock:
                self._known[name] = (now, found)
        return found

    def _is_link(self, name: str) -> bool:
        """A link is no step: it would count as one more, and what it leads to be removed for it."""
        if not os.path.islink(self.store.root / name):
            return False
        with self._lock:
            told = name in self._links
            self._links.add(name)
        if not told:
            log.warning(
                "%s is a symbolic link, which does not count as a step; load what it leads to by "
                "its own path",
                self.store.root / name,
            )
        return True

    def _read(self, name: str, step: int, now: Stat) -> Step | DamagedStep | None:
        path = self.path(step)
        try:
            with storage_errors(f"reading {path}/{RECORD}"):
                data = self.store.read(f"{name}/{RECORD}", MAX_RECORD)
            head = decode_head(data, f"{path}/{RECORD}")
        except FileNotFoundError:
            return None
        except CheckpointError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            return DamagedStep(step, path, str(error), type(error).__name__)
        user = head.user
        return Step(
            step,
            path,
            head.save_id,
            head.nbytes + len(data),
            1 + len(head.files),
            _time(user.get("saved_at"), now.modified),
            metrics_of(user),
            _dict(user.get("metadata")),
            (path,),
        )


def _time(said: object, otherwise: float) -> float:
    known = isinstance(said, (int, float)) and not isinstance(said, bool)
    return float(said) if known else otherwise  # type: ignore[arg-type]


def _dict(said: object) -> dict[str, Any]:
    return said if isinstance(said, dict) else {}
