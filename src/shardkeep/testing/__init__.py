# SPDX-License-Identifier: Apache-2.0
"""What tests of storages need, ours and others': recorded stores, and crashes replayed on them.

`StorageTests` is the suite that every storage passes; it needs pytest, which is imported with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardkeep.testing.storages import StorageTests

__all__ = ["StorageTests"]


def __getattr__(name: str) -> object:
    """Import the suite when it is asked for."""
    if name == "StorageTests":
        from shardkeep.testing.storages import StorageTests

        return StorageTests
    raise AttributeError(f"module 'shardkeep.testing' has no attribute {name!r}")
