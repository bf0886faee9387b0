# SPDX-License-Identifier: Apache-2.0
"""Short turns at the interpreter while threads of ours share it.

A thread that comes back from the disk or a copy waits for the interpreter's lock. Whoever holds it
lets go for every read and digest, but takes it again before the one that waits has woken up, so
that this one waits until its turn is due: 5 ms by default, in which it could have moved 30 MB.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["short_turns"]

SHORT_S = 1e-4
"""A few times what it takes to wake up."""

_lock = threading.Lock()
_inside = 0
_before = 0.0


@contextmanager
def short_turns() -> Iterator[None]:
    """While anybody is inside, turns are short; then they are again what they were."""
    global _inside, _before
    with _lock:
        _inside += 1
        if _inside == 1:
            _before = sys.getswitchinterval()
            if _before > SHORT_S:
                sys.setswitchinterval(SHORT_S)
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            # Not if somebody else has set them meanwhile.
            if _inside == 0 and abs(sys.getswitchinterval() - SHORT_S) < SHORT_S / 100:
                sys.setswitchinterval(_before)
