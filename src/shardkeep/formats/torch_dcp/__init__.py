# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of `torch.distributed.checkpoint`, from torch 1.13 on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkeep.foreign.regular_files import beginning

if TYPE_CHECKING:
    from shardkeep.foreign.found import Found
    from shardkeep.foreign.layout import OutFile, Outline

__all__ = ["METADATA", "SYSTEM", "find", "lay_out", "rank_metadata", "recognises"]

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


def recognises(path: Path) -> bool:
    """Whether a directory holds metadata that torch has pickled."""
    try:
        if not path.is_dir():
            return False
        names = [METADATA] if (path / METADATA).exists() else list(rank_metadata(path).values())
    except OSError:
        return False
    head = beginning(path / names[0], 1024) if names else b""
    return any(module in head for module in _MODULES)


def find(path: Path, *, rank: int | None = None) -> Found:
    """What a checkpoint holds.

    Where ranks wrote metadata for themselves, what they hold is joined; `rank` takes only what one
    of them wrote.
    """
    from shardkeep.formats.torch_dcp.reading import find_checkpoint

    return find_checkpoint(path, rank)


def lay_out(outline: Outline, **options: Any) -> list[OutFile]:
    """Files that `torch.distributed.checkpoint.load` reads."""
    from shardkeep.formats.torch_dcp.writing import lay_out_checkpoint

    return lay_out_checkpoint(outline, **options)
