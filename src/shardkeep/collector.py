# SPDX-License-Identifier: Apache-2.0
"""Python's collector of cycles, paused where many objects are made that form none.

Each batch of new objects makes it look at some of the old ones again: with a hundred thousand
tensors in a state that takes as long as the planning itself.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["paused_collector"]


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
