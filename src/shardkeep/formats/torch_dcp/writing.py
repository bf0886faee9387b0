# SPDX-License-Identifier: Apache-2.0
"""Laying out a checkpoint of torch's: `.distcp` files, and the metadata that finds everything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from shardkeep.dtypes import lookup
from shardkeep.errors import UnsupportedValueError
from shardkeep.foreign.layout import Literal, OutFile, Outline, OutTensor, Segment
from shardkeep.foreign.torch_archives import ALIGNMENT, Box, Moulds, lay_out_archive
from shardkeep.formats.torch_dcp import METADATA
from shardkeep.formats.torch_dcp.describing import Item, describe
from shardkeep.formats.torch_dcp.flattening import flattened

__all__ = ["lay_out_checkpoint"]

Ints = tuple[int, ...]


def lay_out_checkpoint(
    outline: Outline, *, file_bytes: int = 16 << 30, chunk_bytes: int | None = None
) -> list[OutFile]:
    """Files that `torch.distributed.checkpoint.load` reads into any sharding.

    A new file begins after `file_bytes`. Tensors of more than `chunk_bytes` are cut along their
    first dimension, which helps torch where it loads shards. Tied tensors are stored once.
    """
    leaves = flattened(outline.state)
    for name, (_, leaf) in leaves.items():
        if isinstance(leaf, OutTensor) and not lookup(leaf.dtype).torch:
            raise UnsupportedValueError(f"{name}: torch has no dtype {leaf.dtype}")
    files = _Files(file_bytes)
    items: dict[str, list[Item]] = {}
    written: dict[int, list[Item]] = {}
    # As torch does: values come first.
    for name, (_, leaf) in leaves.items():
        if not isinstance(leaf, OutTensor):
            items[name] = [files.add(name, leaf, None, None)]
    for name, (_, leaf) in leaves.items():
        if isinstance(leaf, OutTensor):
            if id(leaf) not in written:
                written[id(leaf)] = [
                    files.add(name, Box(leaf, offsets, sizes), offsets, sizes)
                    for offsets, sizes in _cut(leaf, chunk_bytes)
                ]
            items[name] = written[id(leaf)]
    data = describe({name: (path, leaf, items[name]) for name, (path, leaf) in leaves.items()})
    return [*files.files(), OutFile(METADATA, len(data), [Literal(0, data)])]


def _cut(tensor: OutTensor, chunk_bytes: int | None) -> Iterator[tuple[Ints, Ints]]:
    shape = tensor.shape
    zeros = (0,) * len(shape)
    if not shape or chunk_bytes is None or tensor.nbytes <= chunk_bytes:
        yield zeros, shape
        return
    rows = max(1, chunk_bytes // max(1, tensor.nbytes // shape[0]))
    for low in range(0, shape[0], rows):
        yield (low, *zeros[1:]), (min(rows, shape[0] - low), *shape[1:])


@dataclass
class _Files:
    """Data files being filled, one after the other."""

    limit: int
    sizes: list[int] = field(default_factory=lambda: [0])
    segments: list[list[Segment]] = field(default_factory=lambda: [[]])
    moulds: Moulds = field(default_factory=Moulds)

    def add(self, name: str, content: Any, offsets: Ints | None, sizes: Ints | None) -> Item:
        if self.sizes[-1] >= self.limit:
            self.sizes.append(0)
            self.segments.append([])
        # So that elements are aligned in the file, not only in their archive.
        start = -(-self.sizes[-1] // ALIGNMENT) * ALIGNMENT
        if isinstance(content, Box):
            segments, length = self.moulds.lay_out(content, start, name)
        else:
            segments, length = lay_out_archive(content, start, weights_only=False, where=name)
        self.segments[-1] += segments
        self.sizes[-1] = start + length
        return Item(self.name(len(self.sizes) - 1), start, length, offsets, sizes)

    @staticmethod
    def name(number: int) -> str:
        return f"__0_{number}.distcp"

    def files(self) -> list[OutFile]:
        return [
            OutFile(self.name(number), size, segments)
            for number, (size, segments) in enumerate(zip(self.sizes, self.segments, strict=True))
        ]
