# SPDX-License-Identifier: Apache-2.0
"""Python's collector of cycles, paused where many objects are made that form none.

Each batch of new objects makes it look at some of the old ones again: with a hundred thousand
tensors in a state that takes as long as the planning itself.

Paused by a threshold that is never reached, which nobody else uses: whether the collector is on
stays the program's own, and a threshold that it sets meanwhile stays too.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from collections.abc import Iterator

__all__ = ["CollectorPause", "is_collector_paused", "paused_collector"]

MOST_S = 10.0
"""How long a pause lasts whose end never comes."""
SOON_S = 1.0
"""How long after its last call a driver may still hold what it made."""

_NEVER = 2_000_000_011


class _Threshold:
    """The collector's, while somebody has it paused.

    An interrupt may come anywhere, so there is no lock and no count that it could leave wrong: who
    pauses is known by an object of its own, and gone with that.
    """

    def __init__(self) -> None:
        self._holders: weakref.WeakSet[object] = weakref.WeakSet()
        self._before = gc.get_threshold()

    def hold(self, who: object) -> None:
        """One more has it paused."""
        self._holders.add(who)
        now = gc.get_threshold()
        if now[0] != _NEVER:
            self._before = now
            gc.set_threshold(_NEVER, *now[1:])

    def release(self, who: object) -> None:
        """One less."""
        self._holders.discard(who)
        if not self._holders and is_collector_paused():
            gc.set_threshold(*self._before)

    def release_all(self) -> None:
        """In a process that was forked: whoever would have is not in it."""
        self._holders = weakref.WeakSet()
        self.release(self)


class _Holder:
    """Who pauses the collector while a function runs."""

    is_done = False

    def __del__(self) -> None:
        """Also where an interrupt kept it from saying so; else nothing, as one here is lost."""
        if not self.is_done:
            _threshold.release(self)


_threshold = _Threshold()


def is_collector_paused() -> bool:
    """Whether it waits, on or off."""
    return gc.get_threshold()[0] == _NEVER


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Without collections inside; afterwards as before."""
    holder = _Holder()
    try:
        _threshold.hold(holder)
        yield
    finally:
        _threshold.release(holder)
        holder.is_done = True


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
        self._lock = threading.RLock()
        self._timer: threading.Timer | None = None
        _pauses.add(self)

    def __reduce__(self) -> tuple[type[CollectorPause], tuple[()]]:
        """A pause is this process's."""
        return CollectorPause, ()

    def begin(self) -> None:
        """Pause, on the main thread."""
        self.end()
        if threading.current_thread() is not threading.main_thread():
            return
        with self._lock, contextlib.suppress(RuntimeError):  # no more threads: no pause
            timer = self._ending_in(MOST_S)
            if self._timer is not None:  # a signal's handler was quicker
                timer.cancel()
                return
            self._timer = timer
            _threshold.hold(self)

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
                _threshold.release(self)

    def forget(self) -> None:
        """In a process that was forked meanwhile, in which no timer runs."""
        self._lock, self._timer = threading.RLock(), None

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
        pause.forget()
    _threshold.release_all()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_in_child)
