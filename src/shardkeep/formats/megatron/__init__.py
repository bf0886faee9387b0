# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's `torch_dist` checkpoints: torch's own files, and what all ranks share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from shardkeep.foreign.dcp import is_checkpoint
from shardkeep.foreign.regular_files import beginning

if TYPE_CHECKING:
    from shardkeep.foreign.found import Found

__all__ = ["COMMON", "CONFIG", "SYSTEM", "find", "recognises"]

SYSTEM = "Megatron-Core"
COMMON = "common.pt"
"""What is the same on all ranks."""
CONFIG = "metadata.json"
"""Which backends wrote the rest."""


def recognises(path: Path) -> bool:
    """Whether Megatron says that it wrote this, or its common state lies beside torch's files."""
    try:
        if (path / COMMON).is_file() and is_checkpoint(path):
            return True  # though what it says of itself may be damaged
        told = json.loads(beginning(path / CONFIG, 65536) or b"{}")
        return isinstance(told, dict) and isinstance(told.get("sharded_backend"), str)
    except (OSError, ValueError, RecursionError):
        return False


def find(path: Path) -> Found:
    """Every sharded tensor and object by its key, and under `common` what all ranks share."""
    from shardkeep.formats.megatron.reading import find_checkpoint

    return find_checkpoint(path)
