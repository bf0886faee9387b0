# SPDX-License-Identifier: Apache-2.0
"""What a run's folder holds, learnt from the directory and from nothing else.

A step exists if and only if its record is committed. There is no file that says which is the
latest: it could be wrong.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from shardkeep.errors import CheckpointError, StorageError
from shardkeep.formats.native.names import RECORD
from shardkeep.formats.native.record import MAX_RECORD, decode_head
from shardkeep.manager.naming import StepNames
from shardkeep.manager.steps import DamagedStep, Listing, Step, metrics_of
from shardkeep.storage import CheckpointId
from shardkeep.stores.local import LocalStore, Stat, storage_errors

__all__ = ["MANAGED", "Catalog", "is_leaving", "leaving_name", "left_step"]

MANAGED = ".shardkeep"
"""The folder beside the steps for what the manager itself keeps."""
_LEAVING = ".deleted-"
"""Before the name of a step that is being removed: 16 hex digits and a dash follow."""
_DIGITS = 16


def leaving_name(name: str, token: str) -> str:
    """What a step is called while it is being removed."""
    return f"{_LEAVING}{token}-{name}"


def is_leaving(name: str) -> bool:
    """Whether a name is that of something being removed."""
    token, _, rest = name.removeprefix(_LEAVING).partition("-")
    return (
        name.startswith(_LEAVING)
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
        self.store = open_store(root)
        self.names = names
        self.open_store = open_store
        self._known: dict[str, tuple[Stat, Step | DamagedStep]] = {}
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

    def look(self) -> Listing:
        """All there is now. Costs a call to the system for each step, and a read for each new."""
        steps, damaged, unfinished, leaving = [], [], [], []
        with storage_errors(f"listing {self.root}"):
            names = self.store.list()
        numbered = []
        for name in names:
            if is_leaving(name):
                leaving.append(name)
            elif (step := self.names.step(name)) is not None:
                numbered.append((step, name))
        for step, name in sorted(numbered):
            found = self._look(name, step)
            if isinstance(found, Step):
                steps.append(found)
            elif found is not None:
                damaged.append(found)
            elif self.store.is_directory(name):
                unfinished.append(name)
        self._forget({name for _, name in numbered})
        return Listing(tuple(steps), tuple(damaged), tuple(unfinished), tuple(leaving))

    def _forget(self, there: set[str]) -> None:
        with self._lock:
            for name in self._known.keys() - there:
                del self._known[name]

    def _look(self, name: str, step: int) -> Step | DamagedStep | None:
        record = f"{name}/{RECORD}"
        try:
            now = self.store.stat(record)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            text = f"{record} cannot be read: {error}"
            return DamagedStep(step, self.path(step), text, StorageError.__name__)
        with self._lock:
            stamp, known = self._known.get(name, (None, None))
        if known is not None and stamp == now:
            return known
        found = self._read(name, step, now)
        if found is not None:
            with self._lock:
                self._known[name] = (now, found)
        return found

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
        )


def _time(said: object, otherwise: float) -> float:
    known = isinstance(said, (int, float)) and not isinstance(said, bool)
    return float(said) if known else otherwise  # type: ignore[arg-type]


def _dict(said: object) -> dict[str, Any]:
    return said if isinstance(said, dict) else {}
