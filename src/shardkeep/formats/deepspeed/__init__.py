# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's universal checkpoints: a folder for each parameter."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardkeep.foreign.found import Found

__all__ = ["SYSTEM", "ZERO", "find", "recognises"]

SYSTEM = "DeepSpeed universal checkpoint"
ZERO = "zero"
"""The folder of all parameters' folders."""


def recognises(path: Path) -> bool:
    """Whether a folder `zero` is there that has folders with `fp32.pt`."""
    try:
        with os.scandir(path / ZERO) as entries:
            for entry in entries:
                if entry.is_dir() and (path / ZERO / entry.name / "fp32.pt").is_file():
                    return True
    except (OSError, ValueError):
        pass
    return False


def find(path: Path) -> Found:
    """Parameters and their optimizer states by name, and what lies beside them."""
    from shardkeep.formats.deepspeed.reading import find_checkpoint

    return find_checkpoint(path)
