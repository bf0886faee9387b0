# SPDX-License-Identifier: Apache-2.0
"""What is stored as it is wanted: where its bytes lie in the files of the source, as columns.

Most tensors are neither cast nor cut across. They are planned once for a whole file, all together,
and then copied as bytes, wherever the file is cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from shardkeep.boxes import strides
from shardkeep.columns import Boxes
from shardkeep.engine.byte_runs import ByteRuns
from shardkeep.engine.regions import Flags, regions_of, spans_of
from shardkeep.foreign.layout import Elements
from shardkeep.metadata import ChunkStorageMetadata
from shardkeep.reads import plan_reads
from shardkeep.surgery.pieces import Composed, Ints
from shardkeep.tables import StateColumns

__all__ = ["stored_runs"]


def stored_runs(
    segments: Sequence[Elements], composed: Mapping[str, Composed], stored: StateColumns
) -> tuple[ByteRuns, Flags]:
    """The bytes of all segments that are stored as they are wanted, and which those are.

    The owner of a run is the number of its segment.
    """
    asked = _Asked(stored)
    plain = np.array([asked.add(n, s, composed[s.tensor.name]) for n, s in enumerate(segments)])
    plain = plain.astype(np.bool_)
    items = plan_reads(stored, asked.names, Boxes.of(asked.boxes))
    regions = regions_of(items)
    spans = spans_of(regions)
    owner = np.array(asked.owner, np.int64)[items.wanted]
    plain[owner[~spans.flat | (regions.file < 0)]] = False
    rows = np.flatnonzero(plain[owner])
    to = np.array(asked.begin, np.int64)[items.wanted] + spans.at
    rows = rows[np.argsort(to[rows], kind="stable")]
    low, high = spans.low[rows], spans.high[rows]
    return ByteRuns(regions.file[rows], low, high - low, to[rows], owner[rows]), plain


class _Asked:
    """Boxes of stored tensors that lie as runs in segments, and where in the file each begins."""

    def __init__(self, stored: StateColumns) -> None:
        tensors = stored.tensors
        self._row_of = tensors.row_of
        self._kind = tensors.kind.tolist()
        self._dtypes = [kind.dtype for kind in tensors.kinds]
        self.names: list[str] = []
        self.boxes: list[ChunkStorageMetadata] = []
        self.owner: list[int] = []
        self.begin: list[int] = []

    def add(self, number: int, segment: Elements, tensor: Composed) -> bool:
        """Ask for all of a segment; False where a part of it is no run, or of another type."""
        whole = segment.sizes == tensor.shape
        itemsize = segment.nbytes // math.prod(segment.sizes)
        for piece in tensor.pieces:
            if self._dtypes[self._kind[self._row_of[piece.source]]] != tensor.dtype:
                return False
            if whole and piece.sizes == tensor.shape:
                low, sizes, at = piece.offsets, piece.sizes, 0
            else:
                found = piece.overlap(segment.offsets, segment.sizes)
                if found is None:
                    continue
                low, sizes = found
                if not _is_run(segment.sizes, sizes):
                    return False
                inner = (a - b for a, b in zip(low, segment.offsets, strict=True))
                at = sum(map(int.__mul__, inner, strides(segment.sizes)))
            self.names.append(piece.source)
            self.boxes.append(ChunkStorageMetadata(*piece.stored_box(low, sizes)))
            self.owner.append(number)
            self.begin.append(segment.start + at * itemsize)
        return True


def _is_run(shape: Ints, extent: Ints) -> bool:
    """Whether a part of this extent is one run of row-major elements."""
    whole = True
    for size, part in zip(reversed(shape), reversed(extent), strict=True):
        if not whole and part != 1:
            return False
        whole = whole and size == part
    return True
