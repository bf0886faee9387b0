# SPDX-License-Identifier: Apache-2.0
"""Orbax's checkpoints: zarr 2 or 3, packed by OCDBT or not, read through tensorstore."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardkeep.formats.orbax.items import is_checkpoint

if TYPE_CHECKING:
    from shardkeep.foreign.found import Found

__all__ = ["SYSTEM", "find", "recognises"]

SYSTEM = "Orbax"


def recognises(path: Path) -> bool:
    """Whether Orbax's own metadata is there, or steps of its manager are."""
    return is_checkpoint(path)


def find(path: Path) -> Found:
    """The state; several items of one checkpoint are the entries of a dict."""
    from shardkeep.formats.orbax.finding import find_checkpoint

    return find_checkpoint(path)
