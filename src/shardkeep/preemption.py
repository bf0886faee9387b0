# SPDX-License-Identifier: Apache-2.0
"""A scheduler wants its machine back: the signal is noted, and the program stops when it can.

A signal comes at any time and to any rank, so the handler only notes it. `Checkpointer.should_stop`
asks all ranks at a step boundary, where they can save and end together.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["Catching", "catch_preemption", "is_preempted"]


def catch_preemption(signals: Iterable[int] = (signal.SIGTERM,)) -> Catching:
    """Note signals instead of ending: `Checkpointer.should_stop` tells all ranks of them.

    `signals` are those that the scheduler sends. Called as it is, it holds to the end of the
    process. In `with`, the earlier handlers are there again on leaving, and what was noted is
    forgotten. A handler that the program had before is still called, after the note; what it raises
    is its own. Only the main thread may call this.
    """
    return Catching(signals)


class Catching:
    """Handlers that note signals, until it is left."""

    def __init__(self, signals: Iterable[int]) -> None:
        """They are there from now on."""
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "catch_preemption was called in another thread; Python has signals handled in the "
                "main thread alone, so call it there"
            )
        self._process = os.getpid()
        self._caught = False
        self._earlier: dict[int, Any] = {}
        _catching.append(self)
        try:
            for number in signals:
                if number not in self._earlier:
                    self._earlier[number] = signal.signal(number, self._note)
        except BaseException:
            self._restore()
            raise

    @property
    def caught(self) -> bool:
        """Whether this process got one of the signals."""
        return self._caught

    def _note(self, number: int, frame: FrameType | None) -> None:
        # No lock and no log: what was interrupted may hold either.
        earlier = self._earlier.get(number)
        if os.getpid() != self._process:
            # A forked child, as of a data loader, was never asked: it ends as it would have.
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)
            signal.raise_signal(number)
            return
        self._caught = True
        # Python's own handler of Ctrl-C stands for what the system would do.
        if callable(earlier) and earlier is not signal.default_int_handler:
            earlier(number, frame)

    def _restore(self) -> None:
        _catching.remove(self)
        for number, earlier in self._earlier.items():
            # One that came after ours stays: it may call ours, which does no harm.
            if signal.getsignal(number) == self._note:
                # None: the handler was not Python's, and is lost.
                signal.signal(number, signal.SIG_DFL if earlier is None else earlier)

    def __enter__(self) -> Self:
        """Usable in `with`."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put the earlier handlers back."""
        if self in _catching:
            self._restore()


_catching: list[Catching] = []
"""Those in use: handlers belong to the process, and so does what they note."""


def is_preempted() -> bool:
    """Whether this process was told to stop."""
    return any(catching.caught for catching in _catching)
