# SPDX-License-Identifier: Apache-2.0
"""How many ranks share a machine, and so its memory and its cores."""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

__all__ = ["host_name", "ranks_on_hosts"]


def host_name() -> str:
    """The same for processes that share a machine, also in containers with names of their own."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def ranks_on_hosts(names: Sequence[str]) -> list[int]:
    """For each rank, how many ranks there are on its host.

    >>> ranks_on_hosts(["a", "b", "a"])
    [2, 1, 2]
    """
    counts = Counter(names)
    return [counts[name] for name in names]
