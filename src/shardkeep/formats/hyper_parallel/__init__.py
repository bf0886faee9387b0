# SPDX-License-Identifier: Apache-2.0
"""HyperParallel's distributed checkpoints, of all layouts it has had."""

from __future__ import annotations

from pathlib import Path

from shardkeep.errors import CheckpointError
from shardkeep.foreign.below import file_below, read_exactly, regular_size
from shardkeep.foreign.found import Found
from shardkeep.foreign.layout import OutFile, Outline
from shardkeep.formats.hyper_parallel.finding import state_of
from shardkeep.formats.hyper_parallel.metadata_files import metadata_files, read_metadata
from shardkeep.formats.hyper_parallel.writing import Platform, lay_out_all

__all__ = ["SYSTEM", "find", "lay_out", "recognises"]

SYSTEM = "HyperParallel"


def recognises(path: Path) -> bool:
    """Whether its metadata is there: the first class that the pickle names is HyperParallel's."""
    try:
        for _, name in metadata_files(path):
            file = file_below(path, name)
            begin = read_exactly(file, 0, min(200, regular_size(file)))
            return b"hyper_parallel." in begin
    except (CheckpointError, OSError, ValueError):
        pass
    return False


def find(path: Path) -> Found:
    """The state of all ranks. What differs between ranks under one name becomes a dict of ranks."""
    return Found(SYSTEM, path, state_of(path, read_metadata(path)))


def lay_out(
    outline: Outline, *, platform: Platform = "torch", max_nbytes: int = 16 << 30
) -> list[OutFile]:
    """A directory in the present layout; a tensor file ends before it has more than `max_nbytes`.

    As HyperParallel itself does, keys become text and tuples that hold tensors become lists; what
    ties tensors together is lost.
    """
    if platform not in ("torch", "mindspore"):
        raise ValueError(f'platform must be "torch" or "mindspore", not {platform!r}')
    return lay_out_all(outline, platform=platform, max_nbytes=max_nbytes)
