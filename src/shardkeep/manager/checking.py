# SPDX-License-Identifier: Apache-2.0
"""What a manager is given: refused when it is given, and not when it is needed."""

from __future__ import annotations

import contextlib
import numbers
import operator
import os
import re
from typing import Any

from shardkeep.errors import StorageError
from shardkeep.storage import CheckpointId

__all__ = ["MOST", "checked_place", "checked_step", "is_number"]

MOST = 10**18 - 1
"""The largest number of a step."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""What is left of a URL that was made a `pathlib.Path`; the names of drives have one letter."""


def checked_step(step: Any) -> int:
    """The number of a step, of whatever is an integer: Python's, numpy's, or a tensor with one.

    >>> import numpy as np
    >>> checked_step(np.int64(10))
    10
    """
    # A truth value has an index too.
    if not isinstance(step, bool) and "bool" not in str(getattr(step, "dtype", "")):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            number = operator.index(step)
            if 0 <= number <= MOST:
                return number
    raise ValueError(f"step is {step!r}; use an integer from 0 to {MOST}")


def checked_place(place: CheckpointId, what: str) -> str:
    """A folder's path. A URL is none: it would become a folder of that name, in the working one."""
    try:
        path = os.fspath(place)
    except TypeError:
        path = None
    if not isinstance(path, str):
        raise TypeError(f"{what} is {place!r}; pass text or a pathlib.Path")
    if not path:
        raise ValueError(f"{what} is empty; pass the path of a folder, or '.'")
    if "://" in path or _URL.match(path):
        raise StorageError(
            f"no storage knows the checkpoint id {path!r}, which is {what}: a manager keeps its "
            "steps in folders; pass a path, such as that of a mount"
        )
    return path


def is_number(given: object) -> bool:
    """Whether it can be a time or a rate."""
    return isinstance(given, numbers.Real) and not isinstance(given, bool)
