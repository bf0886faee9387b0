# SPDX-License-Identifier: Apache-2.0
"""Bytes at a steady pace, for work that must leave room to others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["Pace"]


class Pace:
    """At most so many bytes a second. In any time no more than that, and one piece, are let by."""

    def __init__(
        self,
        rate: float | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Without a `rate` there is no limit."""
        self.rate = rate
        self._clock = clock
        self._sleep = sleep
        self._free_at = clock()
        self._lock = threading.Lock()

    def __call__(self, nbytes: int) -> None:
        """Wait until so many bytes may move; each piece takes the time it would at that pace."""
        if self.rate is None:
            return
        with self._lock:
            now = self._clock()
            begin = max(now, self._free_at)
            self._free_at = begin + nbytes / self.rate
        if begin > now:
            self._sleep(begin - now)
