# SPDX-License-Identifier: Apache-2.0
"""Python's collector of cycles, paused where many objects are made that form none.

Each batch of new objects makes it look at some of the old ones again: with a hundred thousand
tensors in a state that takes as long as the planning itself.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from collections.abc import Iterator

__all__ = ["CollectorPause", "paused_collector"]

MOST_S = 10.0
"""How long a pause lasts whose end never comes."""
SOON_S = 1.0
"""How long after its last call a driver may still hold what it made."""


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Without collections inside, unless somebody turns them on; afterwards as before."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


class CollectorPause:
    """From one call of somebody else's driver until shortly after another.

    If the driver fails between them the second never comes: it ends with this object, or after
    `MOST_S`. After the second, the driver holds what it made for a moment, in which a collection
    would look at all of that for nothing.
    Only for a driver on the main thread: beside one on another thread the program goes on, and what
    it drops in cycles may be memory of a device.
    """

    def __init__(self) -> None:
        """Nothing is paused yet."""
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        _pauses.add(self)

    def __reduce__(self) -> tuple[type[CollectorPause], tuple[()]]:
        """A pause is this process's."""
        return CollectorPause, ()

    def begin(self) -> None:
        """Pause, unless somebody has."""
        self.end()
        if not gc.isenabled() or threading.current_thread() is not threading.main_thread():
            return
        with self._lock, contextlib.suppress(RuntimeError):  # no more threads: no pause
            self._timer = self._ending_in(MOST_S)
            gc.disable()

    def end_soon(self) -> None:
        """The driver has made its last call."""
        try:
            with self._lock:
                if self._timer is not None:
                    last, self._timer = self._timer, self._ending_in(SOON_S)
                    last.cancel()
        except RuntimeError:
            self.end()

    def end(self) -> None:
        """Go on, if it was paused here."""
        with self._lock:
            timer, self._timer = self._timer, None
            if timer is not None:
                timer.cancel()
                gc.enable()

    def end_in_child(self) -> None:
        """In a process that was forked meanwhile, in which no timer runs."""
        if self._timer is not None:
            gc.enable()
        self._lock, self._timer = threading.Lock(), None

    def __del__(self) -> None:
        """Whoever planned is gone."""
        self.end()

    def _ending_in(self, seconds: float) -> threading.Timer:
        timer = threading.Timer(seconds, _end, [weakref.ref(self)])
        timer.daemon = True
        timer.start()
        return timer


_pauses: weakref.WeakSet[CollectorPause] = weakref.WeakSet()


def _end(paused: weakref.ref[CollectorPause]) -> None:
    pause = paused()
    if pause is not None:
        pause.end()


def _end_in_child() -> None:
    for pause in _pauses:
        pause.end_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_in_child)
