# SPDX-License-Identifier: Apache-2.0
"""What one or several metadata files say together.

Ranks that save without collectives write metadata of their own, each with its chunks only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardkeep.errors import CorruptionError, FormatError
from shardkeep.foreign.dcp.classes import Bytes, Chunk, Info, Tensor
from shardkeep.wording import shown

__all__ = ["Joined", "spot"]

Ints = tuple[int, ...]
Spots = Mapping[tuple[str, str], Info]


def spot(fqn: str, offset: Ints | None) -> tuple[str, str]:
    """What an item is looked up by. A file's writer can choose numbers of which all tuples have one
    hash, so that finding one of many takes for ever; of texts, nobody knows the hashes."""
    return fqn, str(offset)


class Joined:
    """Tensors, values and nesting of all ranks."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.tensors: dict[str, Tensor] = {}
        """Tensors by name."""
        self.values: dict[str, list[Info]] = {}
        """Where each rank stored a value, by name."""
        self.places: list[Info] = []
        """Where anything is stored."""
        self.order: dict[str, None] = {}
        """Every name, as they come."""
        self.paths: dict[str, tuple[Any, ...]] | None = None
        """Name to path, where the state was nested."""
        self.notes: dict[str, Any] = {}
        """What else is told."""
        self._chunks: dict[str, list[tuple[list[Chunk], Spots]]] = {}

    def add(self, rank: int, fqn: str, leaf: Tensor | Bytes, spots: Spots) -> None:
        """What a rank says of a name."""
        self.order[fqn] = None
        if isinstance(leaf, Bytes):
            info = spots.get(spot(fqn, None)) or spots.get(spot(fqn, ()))
            if info is None:
                raise CorruptionError(
                    f"{self.where}: nothing says where the value {fqn} is stored", names=(fqn,)
                )
            self.values.setdefault(fqn, []).append(info)
        else:
            known = self.tensors.setdefault(fqn, leaf)
            if known.size != leaf.size or known.properties.dtype != leaf.properties.dtype:
                raise FormatError(
                    f"{self.where}: {fqn} has shape {leaf.size} of {leaf.properties.dtype} on rank "
                    f"{rank}, and {known.size} of {known.properties.dtype} before; pass rank= to "
                    "take what one rank saved"
                )
            self._chunks.setdefault(fqn, []).append((leaf.chunks, spots))
        if fqn in self.tensors and fqn in self.values:
            raise FormatError(f"{self.where}: {fqn} is a tensor and a value")

    def add_paths(self, planner_data: Any, where: str) -> None:
        """How names are nested; None where they are not."""
        if planner_data is None:
            return
        if type(planner_data) is not dict:
            raise FormatError(f"{where}: the nesting is told in a form that is not known")
        self.paths = self.paths or {}
        for fqn, path in planner_data.items():
            fine = type(fqn) is str and isinstance(path, (tuple, list)) and 0 < len(path) <= 64
            if not fine or not all(type(key) in (str, int) for key in path):
                raise FormatError(f"{where}: {shown(fqn)} has no valid path")
            if self.paths.setdefault(fqn, tuple(path)) != tuple(path):
                raise FormatError(f"{where}: {fqn:.100} has two paths")

    def chunks_of(self, fqn: str, tensor: Tensor) -> Iterator[tuple[Chunk, Info | None]]:
        """Every chunk of a tensor, and where it is."""
        for chunks, spots in self._chunks[fqn]:
            for chunk in chunks:
                if type(chunk) is not Chunk:
                    raise FormatError(f"{self.where}: {fqn} has chunks of another kind")
                info = spots.get(spot(fqn, chunk.offsets))
                if info is None and not any(chunk.offsets):
                    info = spots.get(spot(fqn, None))
                yield chunk, info
