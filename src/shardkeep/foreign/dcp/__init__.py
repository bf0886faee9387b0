# SPDX-License-Identifier: Apache-2.0
"""Metadata and files of `torch.distributed.checkpoint`: torch's own format, and what others put
beside it."""

from __future__ import annotations

import os
from pathlib import Path

from shardkeep.foreign.regular_files import beginning

__all__ = ["METADATA", "SYSTEM", "is_checkpoint", "rank_metadata"]

SYSTEM = "torch.distributed.checkpoint"

METADATA = ".metadata"
_MODULES = (
    b"torch.distributed.checkpoint.metadata",
    b"torch.distributed._shard.checkpoint.metadata",
)


def rank_metadata(path: Path) -> dict[int, str]:
    """Metadata that ranks wrote for themselves (`use_collectives=False`), by rank."""
    found = {}
    for name in os.listdir(path):
        number = name.removeprefix("__").removesuffix(METADATA)
        if name == f"__{number}{METADATA}" and number.isdecimal() and number.isascii():
            found[int(number)] = name
    return dict(sorted(found.items()))


def is_checkpoint(path: Path) -> bool:
    """Whether a directory holds metadata that torch has pickled."""
    try:
        if not path.is_dir():
            return False
        names = [METADATA] if (path / METADATA).exists() else list(rank_metadata(path).values())
    except OSError:
        return False
    head = beginning(path / names[0], 1024) if names else b""
    return any(module in head for module in _MODULES)
