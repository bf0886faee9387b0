# SPDX-License-Identifier: Apache-2.0
"""A tensor made of boxes of stored ones.

Nothing is read: cutting, joining and stacking is arithmetic on boxes. The order of elements never
changes, so a box of a stored tensor is a box of the new one, give or take dimensions of one index.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardkeep.dtypes import lookup

__all__ = ["Composed", "Piece"]

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a stored tensor, and where it sits in a new one."""

    source: str
    """Name of the stored tensor."""
    begin: Ints
    """Where the box begins there."""
    dims: Ints
    """For each dimension of the stored tensor the new one it runs along, ascending; -1: it has one
    index, and no dimension in the new tensor."""
    offsets: Ints
    """Where it sits in the new tensor."""
    sizes: Ints
    """Its extent there."""

    def stored_box(self, low: Ints, sizes: Ints) -> tuple[Ints, Ints]:
        """Where a part of the piece, given in the new tensor, lies in the stored one."""
        begin, extent = [], []
        for first, dim in zip(self.begin, self.dims, strict=True):
            begin.append(first if dim < 0 else first + low[dim] - self.offsets[dim])
            extent.append(1 if dim < 0 else sizes[dim])
        return tuple(begin), tuple(extent)

    def overlap(self, offsets: Ints, sizes: Ints) -> tuple[Ints, Ints] | None:
        """What a box of the new tensor has in common with the piece."""
        low = tuple(map(max, self.offsets, offsets))
        ends = zip(self.offsets, self.sizes, offsets, sizes, low, strict=True)
        extent = tuple(min(o + s, p + t) - at for o, s, p, t, at in ends)
        return (low, extent) if min(extent, default=1) > 0 else None

    def moved(self, dim: int, by: int) -> Piece:
        """The same piece, further along a dimension."""
        return replace(self, offsets=_put(self.offsets, dim, self.offsets[dim] + by))


def _put(values: Ints, at: int, value: int) -> Ints:
    return (*values[:at], value, *values[at + 1 :])


def _without(values: Ints, at: int) -> Ints:
    return (*values[:at], *values[at + 1 :])


@dataclass(frozen=True)
class Composed:
    """A new tensor: what it is, and the pieces it is made of."""

    dtype: str
    """Of its elements; what is stored as another is cast on the way."""
    shape: Ints
    """Its extent."""
    pieces: tuple[Piece, ...]
    """They cover it, each element once; none is empty."""
    requires_grad: bool = False
    """Whether it is said to gather gradients."""

    @classmethod
    def stored(cls, name: str, dtype: str, shape: Ints, requires_grad: bool = False) -> Composed:
        """A stored tensor as it is."""
        zeros = (0,) * len(shape)
        piece = Piece(name, zeros, tuple(range(len(shape))), zeros, shape)
        return cls(dtype, shape, () if 0 in shape else (piece,), requires_grad)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * lookup(self.dtype).itemsize

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """The stored tensors it is made of, each once."""
        return tuple(dict.fromkeys(piece.source for piece in self.pieces))

    def narrow(self, dim: int, start: int, length: int) -> Composed:
        """The indices [start, start + length) of a dimension."""
        shape = _put(self.shape, dim, length)
        pieces = []
        for piece in self.pieces:
            low, extent = _put((0,) * len(shape), dim, start), _put(self.shape, dim, length)
            found = piece.overlap(low, extent)
            if found is not None:
                at, sizes = found
                begin, _ = piece.stored_box(at, sizes)
                offsets = _put(at, dim, at[dim] - start)
                pieces.append(Piece(piece.source, begin, piece.dims, offsets, sizes))
        return replace(self, shape=shape, pieces=tuple(pieces))

    def inserted(self, dim: int) -> Composed:
        """With one more dimension, of one index."""
        pieces = tuple(
            replace(
                piece,
                dims=tuple(d + 1 if d >= dim else d for d in piece.dims),
                offsets=(*piece.offsets[:dim], 0, *piece.offsets[dim:]),
                sizes=(*piece.sizes[:dim], 1, *piece.sizes[dim:]),
            )
            for piece in self.pieces
        )
        return replace(self, shape=(*self.shape[:dim], 1, *self.shape[dim:]), pieces=pieces)

    def apart(self, dim: int) -> list[Composed]:
        """Each index of a dimension, without it."""
        found: list[list[Piece]] = [[] for _ in range(self.shape[dim])]
        for piece in self.pieces:
            dims = tuple(-1 if d == dim else d - 1 if d > dim else d for d in piece.dims)
            offsets, sizes = _without(piece.offsets, dim), _without(piece.sizes, dim)
            along = piece.dims.index(dim) if dim in piece.dims else None
            begin = piece.begin
            for at in range(piece.sizes[dim]):
                if along is not None:
                    begin = _put(piece.begin, along, piece.begin[along] + at)
                found[piece.offsets[dim] + at].append(
                    Piece(piece.source, begin, dims, offsets, sizes)
                )
        shape = _without(self.shape, dim)
        return [Composed(self.dtype, shape, tuple(part), self.requires_grad) for part in found]

    @staticmethod
    def joined(parts: Sequence[Composed], dim: int) -> Composed:
        """Parts that differ in the extent of one dimension only, end to end along it."""
        at = 0
        pieces: list[Piece] = []
        for part in parts:
            pieces += [piece.moved(dim, at) if at else piece for piece in part.pieces]
            at += part.shape[dim]
        grad = all(part.requires_grad for part in parts)
        return Composed(parts[0].dtype, _put(parts[0].shape, dim, at), tuple(pieces), grad)
