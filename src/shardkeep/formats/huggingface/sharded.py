# SPDX-License-Identifier: Apache-2.0
"""Tensors in pieces: what torch's HuggingFaceStorageWriter leaves, a file or more for each rank.

Each file says where in its tensor each of its entries begins. How large a tensor is, nothing says:
it reaches as far as its pieces do, so that a lost last piece cannot be noticed. Any other can.
"""

from __future__ import annotations

import json
import secrets
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from shardkeep.boxes import FEW_SLABS, Gap, Overlap, tiled, tiling_fault
from shardkeep.columns import Boxes, starts
from shardkeep.errors import FormatError
from shardkeep.foreign.found import Part, StoredTensor
from shardkeep.foreign.headers import no_duplicates
from shardkeep.formats.huggingface.names import SHARDING
from shardkeep.metadata import ChunkStorageMetadata

__all__ = ["Piece", "join_pieces"]

FURTHEST = 2**62
"""Past any offset: sums of two of them are 64 bits wide."""


@dataclass(frozen=True)
class Piece:
    """An entry of a file, and where it belongs."""

    name: str
    """The tensor's."""
    tensor: StoredTensor
    """The piece, as if it were all."""
    offsets: tuple[int, ...]
    """Where it begins in the tensor."""
    where: str
    """The file, for errors."""

    @classmethod
    def of(cls, name: str, tensor: StoredTensor, told: str | None, where: str) -> Piece:
        """An entry of a file with this sharding information; without any it is the whole."""
        if told is None:
            return cls(name, tensor, (0,) * len(tensor.shape), where)
        try:
            offsets = tuple(_parsed(told)[name]["saved_offsets"])
            if len(offsets) != len(tensor.shape) or not all(
                type(at) is int and 0 <= at < FURTHEST for at in offsets
            ):
                raise ValueError(f"offsets {offsets} for shape {tensor.shape}")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise FormatError(
                f"{where}: {SHARDING} does not say where {name} begins: {error!r}"
            ) from error
        return cls(name, tensor, offsets, where)


@lru_cache(maxsize=1)
def _parsed(told: str) -> Any:
    return json.loads(told, object_pairs_hook=no_duplicates)


def join_pieces(pieces: Sequence[Piece], where: str) -> dict[str, StoredTensor]:
    """All tensors; pieces that overlap, leave a gap or are of different types are an error."""
    by_name: dict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        by_name[piece.name].append(piece)
    return {name: _joined(name, found, where) for name, found in by_name.items()}


def _joined(name: str, pieces: list[Piece], where: str) -> StoredTensor:
    first = pieces[0].tensor
    for piece in pieces:
        if (piece.tensor.dtype, len(piece.offsets)) != (first.dtype, len(first.shape)):
            raise FormatError(
                f"{piece.where}: {name} has another dtype or number of dimensions than in "
                f"{pieces[0].where}"
            )
    # No piece may be larger than its file, so these sums are far from 64 bits.
    shape = tuple(
        max(at + n for at, n in zip(along, extents, strict=True))
        for along, extents in zip(
            zip(*(piece.offsets for piece in pieces), strict=True),
            zip(*(piece.tensor.shape for piece in pieces), strict=True),
            strict=True,
        )
    )
    if max(shape, default=0) >= FURTHEST:
        raise FormatError(f"{where}: {name} would have the shape {shape}")
    filled = [piece for piece in pieces if 0 not in piece.tensor.shape]
    _check_tiled(name, shape, filled, where)
    parts = tuple(
        Part(piece.offsets, piece.tensor.shape, piece.tensor.parts[0].place) for piece in filled
    )
    return StoredTensor(first.dtype, shape, parts)


def _check_tiled(name: str, shape: tuple[int, ...], pieces: list[Piece], where: str) -> None:
    boxes = Boxes.of([ChunkStorageMetadata(p.offsets, p.tensor.shape) for p in pieces])
    shapes = np.array(shape, np.int64)
    rows = np.zeros(len(pieces), np.int64)
    # The seed is a secret: whoever wrote the file must not be able to make up for a gap.
    if tiled(starts(np.array([len(shape)])), shapes, rows, boxes, secrets.randbits(63))[0]:
        return
    matrix = (len(pieces), len(shape))
    offsets, sizes = boxes.offsets.reshape(matrix), boxes.sizes.reshape(matrix)
    fault = tiling_fault(shape, offsets, sizes, FEW_SLABS)
    what = "do not make one tensor"
    if isinstance(fault, Overlap):
        what = f"in {pieces[fault.first].where} and {pieces[fault.second].where} overlap"
    elif isinstance(fault, Gap):
        what = f"leave out {fault.box.sizes} at {fault.box.offsets}"
    raise FormatError(
        f"{where}: the pieces of {name} {what}; were files of several saves mixed, or some lost?"
    )
