# SPDX-License-Identifier: Apache-2.0
"""How many ranks share a machine, and so its memory and its cores."""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

__all__ = ["host_name", "name_host", "ranks_on_hosts"]


def name_host(message: bytes) -> bytes:
    """A rank's message to the coordinator, with where it comes from."""
    return msgspec.msgpack.encode((host_name(), message))


def ranks_on_hosts(told: Sequence[bytes]) -> tuple[list[bytes], list[int]]:
    """The messages that `name_host` was given, and how many of them come from each one's host."""
    parts = [msgspec.msgpack.decode(part, type=tuple[str, bytes]) for part in told]
    counts = Counter(host for host, _ in parts)
    return [message for _, message in parts], [counts[host] for host, _ in parts]


def host_name() -> str:
    """The same for processes that share a machine, also in containers with names of their own."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()
