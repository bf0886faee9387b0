# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of `torch.distributed.checkpoint`, from torch 1.13 on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkeep.foreign.dcp import METADATA, SYSTEM, is_checkpoint, rank_metadata

if TYPE_CHECKING:
    from shardkeep.foreign.found import Found
    from shardkeep.foreign.layout import OutFile, Outline

__all__ = ["METADATA", "SYSTEM", "find", "lay_out", "rank_metadata", "recognises"]


def recognises(path: Path) -> bool:
    """Whether a directory holds metadata that torch has pickled."""
    return is_checkpoint(path)


def find(path: Path, *, rank: int | None = None) -> Found:
    """What a checkpoint holds.

    Where ranks wrote metadata for themselves, what they hold is joined; `rank` takes only what one
    of them wrote.
    """
    from shardkeep.foreign.dcp.reading import find_checkpoint

    return find_checkpoint(path, rank)


def lay_out(outline: Outline, **options: Any) -> list[OutFile]:
    """Files that `torch.distributed.checkpoint.load` reads."""
    from shardkeep.formats.torch_dcp.writing import lay_out_checkpoint

    return lay_out_checkpoint(outline, **options)
