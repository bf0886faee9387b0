# SPDX-License-Identifier: Apache-2.0
"""Laying out a file of `torch.save`."""

from __future__ import annotations

from shardkeep.foreign.layout import OutFile, Outline
from shardkeep.foreign.torch_archives import lay_out_archive

__all__ = ["lay_out_file"]


def lay_out_file(outline: Outline) -> list[OutFile]:
    """One file that `torch.load(weights_only=True)` reads, nesting and plain values included.

    What that refuses is refused here, by its path. Tied tensors are one tensor in the file.
    """
    segments, size = lay_out_archive(outline.state, 0, weights_only=True)
    return [OutFile("", size, segments)]
